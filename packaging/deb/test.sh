#!/usr/bin/env bash
# Installs the package in a clean Debian, uses it, upgrades it, removes and purges it: afterwards everything is as it was before.
#
#   packaging/deb/test.sh PACKAGE [DEBIAN]
#
# DEBIAN: the folder of a clean Debian 12, such as `debootstrap --variant=minbase bookworm DEBIAN` makes; without it, one is made.
# Needs root. All changes happen in an overlay mount in memory, and in a network namespace of their own.
set -euo pipefail
package=$(realpath "$1")
clean=${2:-}
work=$(mktemp -d)
mounted=()
node=
finish() {
    [ -z "$node" ] || kill -KILL "$node" 2>/dev/null || true
    for point in "${mounted[@]}"; do umount -l "$point" 2>/dev/null || true; done
    rm -rf --one-file-system "$work"
}
trap finish EXIT
fail() { echo "error: $*" >&2; exit 1; }
passed=0
ok() { passed=$((passed + 1)); echo "ok: $*"; }

if [ -z "$clean" ]; then
    clean=$work/debian
    debootstrap --variant=minbase bookworm "$clean" >"$work/debootstrap.log" || { tail "$work/debootstrap.log" >&2; exit 1; }
fi
mkdir "$work/changes"
mount -t tmpfs tmpfs "$work/changes" && mounted=("$work/changes" "${mounted[@]}")
mkdir "$work/changes/upper" "$work/changes/work" "$work/root"
mount -t overlay overlay -o "lowerdir=$clean,upperdir=$work/changes/upper,workdir=$work/changes/work" "$work/root"
mounted=("$work/root" "${mounted[@]}")
for folder in proc sys dev; do
    mount --rbind "/$folder" "$work/root/$folder" && mount --make-rslave "$work/root/$folder"
    mounted=("$work/root/$folder" "${mounted[@]}")
done
debian=(unshare --net chroot "$work/root" /usr/bin/env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/root DEBIAN_FRONTEND=noninteractive)
in_debian() { "${debian[@]}" "$@"; }
# What the package may not leave changed: every file with its kind, rights, owner and content, but for dpkg's own notes, and the users.
state() {
    (cd "$work/root" && find etc usr lib var opt srv run root -xdev \
        \( -path var/lib/dpkg -o -path var/log -o -path var/cache/apt -o -path var/lib/apt -o -path var/cache/ldconfig \) -prune -o \
        ! -path 'etc/*-' ! -name '.pwd.lock' -printf '%p %y %m %U:%G %l\n' | LC_ALL=C sort)
    (cd "$work/root" && find etc -xdev -type f ! -path 'etc/*-' ! -name .pwd.lock -print0 | LC_ALL=C sort -z | xargs -0 sha256sum)
}

state >"$work/before"
in_debian true
cp "$package" "$work/root/tmp/sidetrack.deb"
in_debian dpkg --install /tmp/sidetrack.deb >"$work/install.log" 2>&1 || { cat "$work/install.log" >&2; fail 'it cannot be installed'; }
ok "installed: $(in_debian sidetrack --version)"

in_debian getent passwd sidetrack >/dev/null || fail 'there is no user sidetrack'
[ "$(in_debian stat -c %a:%U:%G /etc/sidetrack)" = 750:root:sidetrack ] || fail 'the folder of keys is open'
in_debian sidetrack check /etc/sidetrack/sidetrack.toml >"$work/check.log" 2>&1 || { cat "$work/check.log" >&2; fail 'its own configuration is wrong'; }
ok 'the configuration that it brings is valid and does nothing'
for file in /usr/share/man/man1/sidetrack.1.gz /usr/share/man/man1/sidetrack-run.1.gz /usr/share/bash-completion/completions/sidetrack \
    /usr/share/zsh/vendor-completions/_sidetrack /usr/share/fish/vendor_completions.d/sidetrack.fish /lib/systemd/system/sidetrack.service /lib/systemd/system/sidetrack.socket \
    /usr/share/doc/sidetrack/copyright /usr/share/doc/sidetrack/sbom.cdx.json.gz /usr/share/doc/sidetrack/libraries.txt.gz \
    /usr/share/containers/oci/hooks.d/sidetrack-attach.json; do
    [ -s "$work/root$file" ] || fail "$file is missing"
done
hook=$(sed -n 's/.*"path": "\(.*\)".*/\1/p' "$work/root/usr/share/containers/oci/hooks.d/sidetrack-attach.json")
[ -x "$work/root$hook" ] || fail 'the hook of podman names a program that is not there'
grep -qx /usr/bin/sidetrack-shell "$work/root/etc/shells" || fail 'the login shell is not in /etc/shells'
in_denial=$(in_debian sidetrack-shell -c true 2>&1) && fail 'a login shell without a file of the user runs'
case $in_denial in *'no shell for root'*) ;; *) fail "the login shell says: $in_denial" ;; esac
ok 'manual pages, completions, units, licences and the list of libraries are there'

# until_line FILE WORD PID: waits until a line of the file has the word, while the process runs.
until_line() {
    local until=$((SECONDS + 60))
    until grep -q "$2" "$1"; do
        [ "$SECONDS" -lt "$until" ] || { cat "$1" >&2; fail "it did not write '$2'"; }
        kill -0 "$3" 2>/dev/null || { cat "$1" >&2; fail "it ended before it wrote '$2'"; }
        read -rt 0.1 <> <(:) || true
    done
}
# A job from `init`, run as the unit would run it, reloaded and stopped.
in_debian sidetrack init cache --yes --force --dir /etc/sidetrack >/dev/null
"${debian[@]}" sidetrack up --config /etc/sidetrack/sidetrack.toml >"$work/up.log" 2>&1 &
node=$!
until_line "$work/up.log" 'ready' "$node"
kill -HUP "$node"
until_line "$work/up.log" 'reloaded' "$node"
kill -TERM "$node"
wait "$node" || { cat "$work/up.log" >&2; fail 'the node failed'; }
node=
ok 'a node of `sidetrack init cache` starts, reloads and stops'

# An upgrade keeps what was edited.
echo '# edited' >>"$work/root/etc/sidetrack/sidetrack.toml"
dpkg-deb --raw-extract "$package" "$work/next"
sed -i 's/^Version: \(.*\)/Version: \1+next/' "$work/next/DEBIAN/control"
dpkg-deb --root-owner-group --build -Znone "$work/next" "$work/root/tmp/next.deb" >/dev/null
in_debian dpkg --install --force-confold /tmp/next.deb >"$work/upgrade.log" 2>&1 || { cat "$work/upgrade.log" >&2; fail 'it cannot be upgraded'; }
tail -n 1 "$work/root/etc/sidetrack/sidetrack.toml" | grep -qx '# edited' || fail 'an upgrade replaced an edited configuration'
in_debian dpkg-query -W -f '${Version}' sidetrack | grep -q '+next$' || fail 'the new version is not installed'
ok 'an upgrade keeps an edited configuration'

in_debian dpkg --remove sidetrack >"$work/remove.log" 2>&1 || { cat "$work/remove.log" >&2; fail 'it cannot be removed'; }
[ -s "$work/root/etc/sidetrack/sidetrack.toml" ] || fail 'removing it took the configuration'
[ ! -e "$work/root/usr/bin/sidetrack" ] || fail 'the program is still there'
ok 'removing it leaves the configuration'
in_debian dpkg --purge sidetrack >"$work/purge.log" 2>&1 || { cat "$work/purge.log" >&2; fail 'it cannot be purged'; }
state >"$work/after"
diff "$work/before" "$work/after" >"$work/diff" || { cat "$work/diff" >&2; fail 'a purge leaves the above'; }
ok 'after a purge everything is as before'
echo "deb: $passed passed, 0 failed"
