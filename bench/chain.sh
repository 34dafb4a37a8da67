#!/usr/bin/env bash
# Takes the figures of functions and chains and writes them to bench/CHAIN.md. Needs root; about ten minutes on a quiet
# machine, up to three times as long where samples are disturbed and taken again. Arguments go to `sidetrack-lab chain` (--quick: 90
# seconds). Ends with an error when a bar is missed; the table is written all the same.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/table.sh"

cat >"$results" <<'TEXT'
# Functions and chains

Written by `bench/chain.sh` (`sidetrack-lab chain`). Absolute figures hold for the named machine only; ratios compare
slices of the same round. A missed bar is marked.

TEXT
measured chain "$@"
kept CHAIN.md
