#!/usr/bin/env bash
# Takes the figures of the HTTP side and writes them to bench/HTTP.md. Needs root; about twenty minutes on a quiet machine,
# arguments go to `sidetrack-lab http` (--quick: 90 seconds). Each part is a run of its own. Ends with an error when a bar is
# missed; the tables are written all the same.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/table.sh"

cat >"$results" <<'TEXT'
# The HTTP side

Written by `bench/http.sh` (`sidetrack-lab http`). Absolute figures hold for the named machine only; ratios compare
slices of the same round. A missed bar is marked.

TEXT
if [[ " $* " == *" --quick "* || " $* " == *" --part "* ]]; then
    measured http "$@"
else
    for part in hit miss tunnel tls records idle rates pages; do
        measured http --part "$part" "$@"
        echo >>"$results"
    done
fi
kept HTTP.md
