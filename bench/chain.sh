#!/usr/bin/env bash
# Takes the figures of functions and chains and writes them to bench/CHAIN.md. Needs root; about ten minutes on a quiet
# machine, up to three times as long where samples are disturbed and taken again. Arguments go to `sidetrack-lab chain` (--quick: 90
# seconds). Ends with an error when a bar is missed; the table is written all the same.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/table.sh"

cat >"$results" <<'TEXT'
# Functions and chains

Written by `bench/chain.sh` (`sidetrack-lab chain`). Absolute figures are those of the machine named; ratios are taken
between slices of the same round. A bar that failed says so.

TEXT
measured chain "$@"
kept CHAIN.md
