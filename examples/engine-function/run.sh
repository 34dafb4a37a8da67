#!/usr/bin/env bash
# The packet engine with a payload function of one's own: a module in WebAssembly hides the digits that clients send.
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
source "$here/../topology.sh"
need_root 'the packet engine loads BPF programs'
need socat jq ethtool
sidetrack=$(sidetrack_binary)
isolate "$@"

say '1. Three hosts: client - proxy - server. The server sends back what it gets.'
for name in client proxy server; do host "$name"; done
wire client 10.90.1.2/24 fd90:1::2/64 proxy 10.90.1.1/24 fd90:1::1/64
wire proxy 10.90.2.1/24 fd90:2::1/64 server 10.90.2.2/24 fd90:2::2/64
start echo server socat TCP4-LISTEN:7,bind=10.90.2.2,fork,reuseaddr EXEC:cat
wait_for echo server 10.90.2.2 7

say "2. The function: $(wc -l <"$here/mask.wat") lines."
sed 's/^/    | /' "$here/mask.wat"
show "sidetrack graph -c ${here##*/}/proxy.toml"
"$sidetrack" graph -c "$here/proxy.toml" | sed 's/^/    /'

say '3. The proxy.'
for_this_kernel "$here/proxy.toml" client proxy server
start proxy proxy "$sidetrack" up -c "$config"
# The engine has no listening socket: it says when it is ready.
wait_for_lines "$work/proxy.log" 1 ': ready'

say '4. What the client sends comes back without its digits.'
show "echo 'card 4000 1234' | socat -t 60 - TCP4:10.90.1.1:7"
back=$(echo 'card 4000 1234' | on client timeout 60 socat -t 60 - TCP4:10.90.1.1:7)
echo "    $back"
[ "$back" = 'card **** ****' ] || fail 'the module should have hidden the digits'

wait_for_lines "$work/proxy.jsonl" 1 '"reason"'
echo "  the proxy's records:"
records "$work/proxy.jsonl"
say 'Done.'
