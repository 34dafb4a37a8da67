#!/usr/bin/env bash
# Kills `sidetrack up` at 200 random points of start, reload and stop, and writes what was left behind, which must be nothing, to
# bench/CRASH.md. Needs root; arguments go to `sidetrack-lab crash` (--points N, --seed S, --quick). Ends with an error when
# something was left or a restart failed; the tables are written all the same.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/table.sh"

cat >"$results" <<TEXT
# SIGKILL at random points

Written by \`bench/crash.sh\` (\`make crash\`): \`sidetrack-lab crash\` with the arguments named below ([what it does](../docs/lab.md#crashes)).

Arguments: ${*:-none}

TEXT
measured crash "$@"
kept CRASH.md
