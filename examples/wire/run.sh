#!/usr/bin/env bash
# A gateway decides about a transfer, and leaves its bytes to the kernel: the transfer costs the gateway's process nothing.
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
source "$here/../topology.sh"
need iperf3
need_root 'it loads BPF programs'
has_tcx || fail "this example needs Linux 6.6, and this is $(uname -r). The page $examples/README.md says how to get a newer one"
sidetrack=$(sidetrack_binary)
isolate "$@"

say '1. A client and a server, and a gateway between them that does not route.'
for name in client gateway server; do host "$name"; done
wire client 10.84.1.2/24 fd84:1::2/64 gateway 10.84.1.1/24 fd84:1::1/64
wire gateway 10.84.2.1/24 fd84:2::1/64 server 10.84.2.2/24 fd84:2::2/64
start iperf3 server iperf3 --server
wait_for iperf3 server '*' 5201

say '2. The gateway: a port for the server, and a rule that leaves large flows to the kernel.'
show 'sidetrack up -c wire/gateway.toml'
start gateway gateway "$sidetrack" up -c "$here/gateway.toml"
gateway=${started[-1]}
wait_for gateway gateway 10.84.1.1 5201

ticks() { cut -d ' ' -f 14,15 "/proc/$gateway/stat" | tr ' ' '+'; }

say '3. The client sends for three seconds, and the gateway shows the flow meanwhile.'
show 'iperf3 -c 10.84.1.1 -t 3'
before=$(($(ticks)))
on client iperf3 --client 10.84.1.1 --time 3 --json >"$work/iperf3.json" &
transfer=$!
list() { on gateway "$sidetrack" flows --admin "$work/admin.sock" --json 2>/dev/null || true; }
for ((try = 0; try < 300; try++)); do
    if list | grep -q '"shunted": *true'; then break; fi
    read -rt 0.01 <> <(:) || true
done
list | grep -q '"shunted": *true' || fail 'the kernel did not take the transfer over'
show 'sidetrack flows'
on gateway "$sidetrack" flows --admin "$work/admin.sock" | sed 's/^/    /'
wait "$transfer" || fail 'the transfer broke'
spent=$(($(ticks) - before))
bytes=$(sed -n 's/.*"bytes":[[:space:]]*\([0-9]*\).*/\1/p' "$work/iperf3.json" | sort -n | tail -1)
echo "    $((bytes / 1000000)) MB passed; the gateway's process worked for $spent hundredths of a second"
[ "$bytes" -gt 20000000 ] || fail 'hardly anything passed'

say '4. The record has every byte.'
wait_for_lines "$work/records.jsonl" 1 '"shunted": *true'
grep '"shunted": *true' "$work/records.jsonl" | sed 's/^/    /' | cut -c 1-160
say 'Done.'
