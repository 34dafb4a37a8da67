#!/usr/bin/env bash
# Does every tutorial as a newcomer does it: a clean Debian, the package, and the two commands of the example's page.
#
#   packaging/deb/tutorials.sh PACKAGE [DEBIAN [EXAMPLE...]]
#
# DEBIAN: the folder of a clean Debian 12, such as `debootstrap --variant=minbase bookworm DEBIAN` makes; without it, or with an empty
# word, one is made. Without EXAMPLE: all of them.
#
# Each example begins with the same clean Debian and an ordinary user who may use sudo. It installs the packages that its page names and
# no others, and runs the command of the page, without a network. It fails if the command fails, or takes longer than the page says: the
# page speaks of a quiet machine, so SIDETRACK_FACTOR times as long is right (default: 3). A table of all examples is printed at the end.
#
# Needs root, overlay mounts and a mirror of Debian. All changes happen in memory, in mount, process and network namespaces.
set -euo pipefail
package=$(realpath "$1")
clean=${2:-}
shift $(($# < 2 ? $# : 2))
chosen=("$@")
factor=${SIDETRACK_FACTOR:-3}
work=$(mktemp -d)
mounted=()
finish() {
    for point in "${mounted[@]}"; do umount -l "$point" 2>/dev/null || true; done
    rm -rf --one-file-system "$work"
}
trap finish EXIT
fail() { echo "error: $*" >&2; exit 1; }

if [ -z "$clean" ]; then
    clean=$work/debian
    debootstrap --variant=minbase bookworm "$clean" >"$work/debootstrap.log" || { tail "$work/debootstrap.log" >&2; exit 1; }
fi
mkdir "$work/memory"
mount -t tmpfs tmpfs "$work/memory" && mounted=("$work/memory" "${mounted[@]}")
# Downloaded packages serve all examples.
mkdir -p "$work/memory/archives/partial"

# copy NAME LOWER: a Debian whose changes are kept apart from the folders of LOWER.
copy() {
    mkdir -p "$work/memory/$1"/{upper,work,root}
    mount -t overlay overlay -o "lowerdir=$2,upperdir=$work/memory/$1/upper,workdir=$work/memory/$1/work" "$work/memory/$1/root"
    mounted=("$work/memory/$1/root" "${mounted[@]}")
}
# inside NAME NET USER LINE: runs a line of shell there as this user, in processes and mounts of its own; NET is `online` or `offline`.
inside() {
    local net=()
    [ "$2" = online ] || net=(--net)
    # A chroot would forbid user namespaces, so the root is replaced.
    unshare --mount --pid --fork --kill-child "${net[@]}" bash -euc '
        mount --make-rprivate /
        cd "$1"
        mount -t proc proc proc
        for folder in sys dev; do mount --rbind "/$folder" "$folder"; done
        mount -t tmpfs -o mode=1777 tmpfs dev/shm
        mount -t tmpfs -o mode=0755 tmpfs run
        mount --bind "$2" var/cache/apt/archives
        [ "$3" = offline ] || cat /etc/resolv.conf >etc/resolv.conf
        pivot_root . .
        umount -l .
        exec setpriv --reuid "$4" --regid "$4" --init-groups -- env -i HOME="$5" USER="$4" LANG=C.UTF-8 \
            PATH=/usr/local/bin:/usr/bin:/bin bash -c "cd; $6"
    ' bash "$work/memory/$1/root" "$work/memory/archives" "$2" "$3" "$([ "$3" = root ] && echo /root || echo "/home/$3")" "$4"
}

copy base "$clean"
base=$work/memory/base/root
# What a clean Debian has, and this one does not: sudo and a user. Nothing asks a question, and no service starts.
printf 'APT::Get::Assume-Yes "true";\nAPT::Install-Recommends "false";\nBinary::apt::APT::Keep-Downloaded-Packages "true";\n' \
    >"$base/etc/apt/apt.conf.d/90tutorials"
printf '#!/bin/sh\nexit 101\n' >"$base/usr/sbin/policy-rc.d"
chmod 755 "$base/usr/sbin/policy-rc.d"
printf '127.0.0.1 localhost %s\n::1 localhost\n' "$(uname -n)" >"$base/etc/hosts"
cp "$package" "$base/tmp/sidetrack.deb"
inside base online root 'export PATH=$PATH:/usr/sbin:/sbin DEBIAN_FRONTEND=noninteractive
    apt-get -q update && apt-get -q install sudo && apt-get -q install /tmp/sidetrack.deb
    echo debconf debconf/frontend select Noninteractive | debconf-set-selections
    useradd --create-home --shell /bin/bash newcomer
    echo "newcomer ALL=(ALL) NOPASSWD: ALL" >/etc/sudoers.d/newcomer' >"$work/base.log" 2>&1 ||
    { tail -n 20 "$work/base.log" >&2; fail 'the package cannot be installed'; }
umount "$base"

rows=() failed=0
now() { echo $((${EPOCHREALTIME/./} / 1000)); }
for folder in "$work"/memory/base/upper/usr/share/doc/sidetrack/examples/*/; do
    name=$(basename "$folder")
    if [ ${#chosen[@]} != 0 ] && [[ " ${chosen[*]} " != *" $name "* ]]; then continue; fi
    install=$(grep -m 1 '^sudo apt install ' "$folder/README.md") || fail "$name: its page has no line with its packages"
    command=$(grep -m 1 -E "^(sudo )?/usr/share/doc/sidetrack/examples/$name/run.sh" "$folder/README.md") || fail "$name: its page has no command"
    stated=$(sed -n 's/.*takes about \([0-9]*\) s.*/\1/p' "$folder/README.md" | head -n 1)
    [ -n "$stated" ] || fail "$name: its page does not say how long it takes"
    copy "$name" "$work/memory/base/upper:$clean"
    result=ok took=
    if ! inside "$name" online newcomer "$install" >"$work/$name.log" 2>&1; then
        result='packages missing'
    else
        began=$(now) status=0
        inside "$name" offline newcomer "timeout --kill-after=10 300 $command" >"$work/$name.log" 2>&1 || status=$?
        took=$(($(now) - began))
        if [ "$status" != 0 ]; then
            result="exit code $status"
        elif [ "$took" -gt $((stated * factor * 1000)) ]; then
            result='too slow'
        fi
        took=$(printf '%d.%d' $((took / 1000)) $((took % 1000 / 100)))
    fi
    if [ "$result" != ok ]; then
        failed=$((failed + 1))
        sed "s/^/$name: /" "$work/$name.log" | tail -n 60 >&2
    fi
    by=newcomer
    [[ $command != sudo* ]] || by=root
    rows+=("| $name | ${install#sudo apt install } | $by | $stated | ${took:--} | $result |")
    echo "$name: $result ${took:+($took s)}" >&2
    umount "$work/memory/$name/root"
    rm -rf "$work/memory/$name"
done
[ ${#rows[@]} != 0 ] || fail 'there is no such example'

echo '| example | packages | run by | its page says, s | took, s | result |'
echo '|---|---|---|---:|---:|---|'
printf '%s\n' "${rows[@]}"
echo
echo "tutorials: $((${#rows[@]} - failed)) passed, $failed failed"
[ "$failed" = 0 ]
