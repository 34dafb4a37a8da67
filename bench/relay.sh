#!/usr/bin/env bash
# Takes the figures of relaying and writes them to bench/RESULTS.md: relay, flights, idle. Needs root; about twenty
# minutes on a quiet machine, arguments go to `sidetrack-lab relay` (--quick: about four). Ends with an error when a
# bar is missed; the table is written all the same.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/table.sh"

cat >"$results" <<'TEXT'
# Results

Written by `bench/relay.sh`; the commands are `sidetrack-lab relay`, `flights` and `idle`. Absolute figures hold for the
named machine only; ratios compare slices of the same round. A missed bar is marked.

TEXT
measured relay "$@"
echo >>"$results"
measured flights
echo >>"$results"
measured idle
kept RESULTS.md
