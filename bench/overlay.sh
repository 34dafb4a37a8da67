#!/usr/bin/env bash
# Repeats the in-lab evaluation of the seamless-overlays paper and writes it to bench/OVERLAY.md, with the figures as CSV and JSON
# in bench/overlay. Needs root; arguments go to `sidetrack-lab overlay` (--quick: 90 seconds). Ends with an error when a bar
# is missed; the tables are written all the same.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/table.sh"

cat >"$results" <<TEXT
# The overlay, measured

Written by \`bench/overlay.sh\`: \`sidetrack-lab overlay\` with the arguments named below.

Arguments: ${*:-none}

TEXT
measured overlay --out "$repository/bench/overlay" "$@"
kept OVERLAY.md
