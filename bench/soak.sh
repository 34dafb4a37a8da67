#!/usr/bin/env bash
# Leads mixed traffic through a gateway for half an hour, with a reload each second and faults of its peers, and writes what came of it
# to bench/SOAK.md and the plots to docs/img/soak-*.svg. Needs root; arguments go to `sidetrack-lab soak` (--seconds N, --seed S, --quick). Ends
# with an error when a bar is missed; the tables are written all the same.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/table.sh"

cat >"$results" <<TEXT
# Mixed traffic for a long time

Written by \`bench/soak.sh\` (\`make soak\`): \`sidetrack-lab soak\` with the arguments named below ([what it does](../docs/lab.md#mixed-traffic-for-a-long-time)).
The plots are [memory](../docs/img/soak-memory.svg) and [descriptors](../docs/img/soak-descriptors.svg).

Arguments: ${*:-none}

TEXT
plots=$(mktemp -d)
trap 'rm -rf "$results" "$plots"' EXIT
measured soak --out "$plots" "$@"
cp "$plots"/soak-*.svg "$repository/docs/img/"
kept SOAK.md
