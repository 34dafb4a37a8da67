#!/usr/bin/env bash
# Measures datagrams through a reverse port and through SOCKS5, beside nginx, dante, the kernel and the least program, and writes the
# tables to bench/UDP.md. Needs root; arguments go to `sidetrack-lab udp` (--quick: 90 seconds). Ends with an error when a bar is missed;
# the tables are written all the same.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/table.sh"

cat >"$results" <<TEXT
# Datagrams, measured

Written by \`bench/udp.sh\`: \`sidetrack-lab udp\` with the arguments named below.

Arguments: ${*:-none}

TEXT
measured udp --out "$repository/bench/udp" "$@"
kept UDP.md
