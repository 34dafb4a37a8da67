#!/usr/bin/env bash
# Takes the figures of the packet engine and writes them to bench/ENGINE.md. Needs root; on a quiet machine, arguments go to
# `sidetrack-lab engine` (--quick: 90 seconds). Ends with an error when a bar is missed; the table is written all the same.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/table.sh"

cat >"$results" <<TEXT
# The packet engine, measured

Written by \`bench/engine.sh\`: \`sidetrack-lab engine\` with the arguments named below. Absolute figures hold for the
named machine only.

Arguments: ${*:-none}

TEXT
measured engine --out "$repository/bench/engine" "$@"
kept ENGINE.md
