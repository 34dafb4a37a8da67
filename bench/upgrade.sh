#!/usr/bin/env bash
# Replaces a node ten times in a row under 500 flows, half of them on the wire, and writes how long messages were on the way to bench/UPGRADE.md. Every
# byte and every record is checked. SIDETRACK names the program, FLOWS the number of flows. Needs root, cargo and a quiet machine; two minutes.
set -euo pipefail
repository=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$repository"
out=${OUT:-$repository/bench/UPGRADE.md}
flows=${FLOWS:-500}
sidetrack=$(realpath "${SIDETRACK:-$repository/target/dist/sidetrack}")
said=$(SIDETRACK_MEASURED=$sidetrack SIDETRACK_UPGRADE_FLOWS=$flows cargo test --quiet --locked --workspace --test wires -- \
    --exact ten::replaced_again_and_again_under_many_flows --nocapture)
table=$(grep '^|' <<<"$said")
cat >"$out" <<TEXT
# Upgrades under load

Written by \`bench/upgrade.sh\` (\`make bench-upgrade\`). A node is replaced ten times in a row ([how](../docs/howto/upgrade.md)) while $flows flows each get a
message of 64 bytes every 20 ms. Client, node and server are on three hosts made of network namespaces. A value is the longest way of one flow's messages, from
the server's write to the client's read, during one upgrade (the whole command), or during half a second before it. Generator and node share the processors.

$(uname -r), $(nproc) processors, load average $(cut -d ' ' -f 1-3 /proc/loadavg).

$table

Every byte was right, and each flow had one record with its bytes.
TEXT
cat "$out"
