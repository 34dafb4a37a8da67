#!/usr/bin/env bash
# Builds the Debian package from a program that is already built.
#
#   packaging/deb/build.sh PROGRAM OUT_DIR
#
# Two runs with the same program and SOURCE_DATE_EPOCH give the same file. It needs dpkg-dev, jq and cargo (for the list of libraries).
set -euo pipefail
program=$(realpath "$1")
mkdir -p "$2"
out=$(realpath "$2")
root=$(realpath "$(dirname "${BASH_SOURCE[0]}")/../..")
cd "$root"
export LC_ALL=C TZ=UTC
export SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-$(git log -1 --format=%ct 2>/dev/null || stat -c %Y CHANGELOG.md)}

version=$("$program" --version | cut -d ' ' -f 2)
architecture=$(dpkg --print-architecture)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
tree=$work/tree
install_file() { install -D -m "$1" "$2" "$tree/$3"; }
# compress FILE: as the packaging rules want it, and the same each time.
compress() { gzip -9n "$1"; }

install_file 755 "$program" usr/bin/sidetrack
strip --strip-unneeded --remove-section=.comment --remove-section=.note "$tree/usr/bin/sidetrack"
ln -s sidetrack "$tree/usr/bin/sidetrack-shell"
install -d "$tree/etc/sidetrack-shell.d"
install_file 640 packaging/sidetrack.toml etc/sidetrack/sidetrack.toml
for unit in packaging/*.service packaging/*.socket; do install_file 644 "$unit" "lib/systemd/system/${unit##*/}"; done
install_file 644 packaging/sysusers.conf usr/lib/sysusers.d/sidetrack.conf
install_file 644 packaging/tmpfiles.conf usr/lib/tmpfiles.d/sidetrack.conf
# Only containers with the annotation start it.
install_file 755 packaging/hooks/sidetrack-attach-hook usr/libexec/sidetrack-attach-hook
install_file 644 packaging/hooks/sidetrack-attach.json usr/share/containers/oci/hooks.d/sidetrack-attach.json

mkdir -p "$tree/usr/share/man/man1"
"$program" man "$tree/usr/share/man/man1" >/dev/null
find "$tree/usr/share/man" -name '*.1' -exec gzip -9n {} +
ln -s sidetrack-run.1.gz "$tree/usr/share/man/man1/sidetrack-shell.1.gz"
install -d "$tree/usr/share/bash-completion/completions" "$tree/usr/share/zsh/vendor-completions" "$tree/usr/share/fish/vendor_completions.d"
"$program" completions bash >"$tree/usr/share/bash-completion/completions/sidetrack"
"$program" completions zsh >"$tree/usr/share/zsh/vendor-completions/_sidetrack"
"$program" completions fish >"$tree/usr/share/fish/vendor_completions.d/sidetrack.fish"

doc=$tree/usr/share/doc/sidetrack
install -d "$doc/docs"
install -m 644 packaging/deb/copyright "$doc/copyright"
install -m 644 README.md SECURITY.md SPECIFICATION.md "$doc/"
cp -r docs/. "$doc/docs/"
cp -r examples "$doc/examples"
# Pages lead to these.
install -d "$doc/bench" "$doc/packaging"
install -m 644 bench/*.md "$doc/bench/"
install -m 644 packaging/README.md "$doc/packaging/"
install_file 644 packaging/prometheus/sidetrack.rules.yml usr/share/sidetrack/prometheus/sidetrack.rules.yml
install_file 644 packaging/grafana/sidetrack.json usr/share/sidetrack/grafana/sidetrack.json
install -m 644 CHANGELOG.md "$doc/"
compress "$doc/CHANGELOG.md"
# What the packaging rules call the changelog has a format of its own.
printf 'sidetrack (%s) stable; urgency=medium\n\n  * See CHANGELOG.md.gz.\n\n -- %s  %s\n' "$version" \
    "$(sed -n 's/^Maintainer: //p' packaging/deb/control)" "$(date -R -u -d "@$SOURCE_DATE_EPOCH")" >"$doc/changelog"
compress "$doc/changelog"
install -D -m 644 packaging/deb/lintian-overrides "$tree/usr/share/lintian/overrides/sidetrack"

cargo metadata --locked --format-version 1 --filter-platform "$(rustc -vV | sed -n 's/^host: //p')" >"$work/metadata.json"
jq -S --arg root sidetrack -f packaging/sbom.jq "$work/metadata.json" >"$doc/sbom.cdx.json"
packaging/licences.sh "$doc/sbom.cdx.json" "$work/metadata.json" >"$doc/libraries.txt"
compress "$doc/sbom.cdx.json"
compress "$doc/libraries.txt"
find "$tree" -type d -exec chmod 755 {} +
find "$doc" -type f ! -name '*.sh' -exec chmod 644 {} +
find "$doc/examples" -name run.sh -exec chmod 755 {} +
chmod 644 "$tree/usr/share/man/man1/"* "$tree/usr/share/bash-completion/completions/"* "$tree/usr/share/zsh/vendor-completions/"* \
    "$tree/usr/share/fish/vendor_completions.d/"*

# The libraries that the program needs, from its own symbols.
mkdir -p "$work/debian" "$tree/DEBIAN"
printf 'Source: sidetrack\n\nPackage: sidetrack\nArchitecture: any\n' >"$work/debian/control"
depends=$(cd "$work" && dpkg-shlibdeps -O -e"$tree/usr/bin/sidetrack" 2>/dev/null | sed -n 's/^shlibs:Depends=//p')
size=$(du -k --apparent-size -s "$tree" | cut -f 1)
sed -e "s/@VERSION@/$version/" -e "s/@ARCHITECTURE@/$architecture/" -e "s/@DEPENDS@/$depends/" -e "s/@SIZE@/$size/" \
    packaging/deb/control >"$tree/DEBIAN/control"
echo /etc/sidetrack/sidetrack.toml >"$tree/DEBIAN/conffiles"
for script in postinst prerm postrm; do install -m 755 "packaging/deb/$script" "$tree/DEBIAN/$script"; done
(cd "$tree" && find . -type f ! -path './DEBIAN/*' -printf '%P\0' | sort -z | xargs -0 md5sum) >"$tree/DEBIAN/md5sums"
chmod 644 "$tree/DEBIAN/control" "$tree/DEBIAN/conffiles" "$tree/DEBIAN/md5sums"
find "$tree" -exec touch --no-dereference --date="@$SOURCE_DATE_EPOCH" {} +

package=$out/sidetrack_${version}_${architecture}.deb
dpkg-deb --root-owner-group -Zxz --build "$tree" "$package" >/dev/null
echo "$package"
