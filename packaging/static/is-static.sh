#!/usr/bin/env bash
# Fails unless the program is one static file: no loader, no shared library.
#
#   packaging/static/is-static.sh PROGRAM
set -euo pipefail
export LC_ALL=C
program=$1
fail() { echo "error: $program: $*" >&2; exit 1; }
[ -x "$program" ] || fail 'it is not a program'
! readelf --program-headers --wide "$program" | grep -w INTERP || fail 'it asks for a loader: it is not static'
! readelf --dynamic --wide "$program" 2>/dev/null | grep -w NEEDED || fail 'it needs shared libraries: it is not static'
kind=$(file --brief "$program")
grep -q 'static' <<<"$kind" || fail "file says: $kind"
echo "static: $kind"
