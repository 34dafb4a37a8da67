#!/usr/bin/env bash
# Repeats the measurements of the EPI paper and writes them to bench/EPI.md, with the figures as CSV and the plots as SVG in
# bench/epi. Needs root; arguments go to `sidetrack-lab epi` (--quick: 90 seconds; else it says how long it will take). Ends
# with an error when a bar is missed; the tables are written all the same.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/table.sh"

cat >"$results" <<TEXT
# The EPI measurements, repeated

Written by \`bench/epi.sh\`: \`sidetrack-lab epi\` with the arguments named below. Times are those of the emulated links plus
the time of the programs on the named machine. The plots and every single figure are in \`bench/epi/\`.

Arguments: ${*:-none}

TEXT
measured epi --out "$repository/bench/epi" "$@"
kept EPI.md
