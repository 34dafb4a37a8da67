#!/usr/bin/env bash
# A thousand reloads in a minute, too little memory, full and read-only file systems, and jumps of the clock, under flows that
# must go on; writes bench/FAULTS.md. Needs root; arguments go to `sidetrack-lab faults` (--part NAME, --quick). Ends with an
# error when a bar was missed; the tables are written all the same.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/table.sh"

cat >"$results" <<TEXT
# What a machine does to a program that runs for months

Written by \`bench/faults.sh\` (\`make faults\`): \`sidetrack-lab faults\` with the arguments named below ([what it does](../docs/lab.md#faults)).

Arguments: ${*:-none}

TEXT
measured faults "$@"
kept FAULTS.md
