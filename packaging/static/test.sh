#!/usr/bin/env bash
# Tries the static program: nothing is linked at run time, it works without any other file, and the main job runs with it.
#
#   packaging/static/test.sh ARCHIVE
set -euo pipefail
archive=$(realpath "$1")
root=$(realpath "$(dirname "${BASH_SOURCE[0]}")/../..")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
chmod 755 "$work"
fail() { echo "error: $*" >&2; exit 1; }
passed=0
ok() { passed=$((passed + 1)); echo "ok: $*"; }

tar --extract --gzip --file "$archive" --directory "$work" --strip-components 1
program=$work/sidetrack
"$root/packaging/static/is-static.sh" "$program"
ok 'one static file'
[ "$(jq '.components | length' "$work/sbom.cdx.json")" -gt 50 ] || fail 'the list of libraries is not complete'
ok 'the list of libraries is there'

case $archive in
    *"-$(uname -m)-linux.tar.gz") runner=() ;;
    *-aarch64-linux.tar.gz)
        # Another architecture: its emulator, if it is here, starts the program and reads a configuration.
        command -v qemu-aarch64-static >/dev/null || { echo 'skipped: needs qemu-aarch64-static to start it'; echo "static: $passed passed, 0 failed"; exit; }
        runner=(qemu-aarch64-static)
        ;;
    *) fail "this is not an archive of the build: $archive" ;;
esac
"${runner[@]}" "$program" --version
"${runner[@]}" "$program" check "$work/sidetrack.toml" || fail 'it rejects the default configuration'
ok 'it starts, and accepts the default configuration'
if [ ${#runner[@]} = 0 ]; then
    if ldd "$program" 2>&1 | grep '=>'; then fail 'ldd names libraries'; fi
    ok 'ldd names no library'
    SIDETRACK=$program "$root/examples/main-job/run.sh" >"$work/main-job.log" 2>&1 || { cat "$work/main-job.log" >&2; fail 'the main job fails'; }
    ok 'the main job runs with it'
fi
echo "static: $passed passed, 0 failed"
