#!/usr/bin/env bash
# Builds the program as one static file that runs on any Linux of its architecture, and an archive with it.
#
#   packaging/static/build.sh ARCHITECTURE OUT_DIR [PROFILE]
#
# ARCHITECTURE: x86_64 or aarch64. PROFILE: a profile of cargo [default: dist]. It prints the path of the archive. Two runs from one commit
# with the same compilers give the same archive.
#
# The C parts (ring, mimalloc) are compiled by musl-gcc on x86_64. On another architecture they are compiled by Debian's cross compiler.
# They use only what the headers of both C libraries have in common, and Rust's own copy of musl is linked. Clang compiles
# the BPF programs, which are the same for both.
set -euo pipefail
architecture=$1
mkdir -p "$2"
out=$(realpath "$2")
profile=${3:-dist}
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
export LC_ALL=C TZ=UTC
export SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-$(git log -1 --format=%ct 2>/dev/null || stat -c %Y CHANGELOG.md)}
fail() { echo "error: $*" >&2; exit 1; }

target=$architecture-unknown-linux-musl
if [ "$architecture" = "$(uname -m)" ] && command -v musl-gcc >/dev/null; then
    compiler=musl-gcc prefix=
else
    compiler=$architecture-linux-gnu-gcc prefix=$architecture-linux-gnu-
fi
command -v "$compiler" >/dev/null || fail "$compiler is missing: apt-get install musl-tools, or gcc-${architecture/_/-}-linux-gnu"
if [ ! -d "$(rustc --print sysroot)/lib/rustlib/$target" ]; then
    command -v rustup >/dev/null || fail "Rust's library for $target is missing, and there is no rustup to fetch it"
    rustup target add "$target" >&2
fi

# Fortified calls name functions that only glibc has.
export "CC_${target//-/_}=$compiler"
export "CFLAGS_${target//-/_}=-U_FORTIFY_SOURCE"
upper=$(tr 'a-z-' 'A-Z_' <<<"$target")
export "CARGO_TARGET_${upper}_LINKER=$compiler"
# musl-gcc names a loader in every position-independent program, also in a static one. The other compilers do not, and Rust brings the start
# files and libraries of musl.
linker=$compiler
[ "$compiler" != musl-gcc ] || linker=gcc
packaging/cargo.sh rustc --profile "$profile" --locked --package sidetrack --bin sidetrack --target "$target" -- -C "linker=$linker" >&2

folder=$profile
[ "$profile" != dev ] || folder=debug
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
version=$(sed -n '/^\[workspace.package\]/,/^\[/s/^version = "\(.*\)"/\1/p' Cargo.toml)
name=sidetrack-$version-$architecture-linux
tree=$work/$name
mkdir "$tree"
install -m 755 "${CARGO_TARGET_DIR:-target}/$target/$folder/sidetrack" "$tree/sidetrack"
"${prefix}strip" --strip-unneeded --remove-section=.comment "$tree/sidetrack"
packaging/static/is-static.sh "$tree/sidetrack" >&2

install -m 644 LICENSE-APACHE LICENSE-MIT README.md CHANGELOG.md SECURITY.md packaging/sidetrack.toml packaging/sidetrack.service packaging/sidetrack.socket "$tree/"
cargo metadata --locked --format-version 1 --filter-platform "$target" >"$work/metadata.json"
jq -S --arg root sidetrack -f packaging/sbom.jq "$work/metadata.json" >"$tree/sbom.cdx.json"
packaging/licences.sh "$tree/sbom.cdx.json" "$work/metadata.json" >"$tree/libraries.txt"
archive=$out/$name.tar.gz
tar --create --sort=name --owner=0 --group=0 --numeric-owner --mtime="@$SOURCE_DATE_EPOCH" --directory "$work" "$name" | gzip -9n >"$archive"
echo "$archive"
