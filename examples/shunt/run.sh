#!/usr/bin/env bash
# A firewall with rules that inspect every packet, and a large download that leaves this path once it is trusted.
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
source "$here/../topology.sh"
need curl nginx nft ethtool
sidetrack=$(sidetrack_binary)
need_root 'it loads a BPF program'
isolate "$@"

say '1. Three hosts: client - firewall - server. The firewall routes, and its rules look at every packet.'
for name in client firewall server; do host "$name"; done
wire client 10.83.1.2/24 fd83:1::2/64 firewall 10.83.1.1/24 fd83:1::1/64
wire firewall 10.83.2.1/24 fd83:2::1/64 server 10.83.2.2/24 fd83:2::2/64
ip -n client route add default via 10.83.1.1
ip -n server route add default via 10.83.2.1
on firewall sh -c 'echo 1 >/proc/sys/net/ipv4/ip_forward; echo 1 >/proc/sys/net/netfilter/nf_conntrack_tcp_timeout_time_wait'
sed 's/^/    | /' "$here/filter.nft"
on firewall nft -f "$here/filter.nft"
web_server server 10.83.2.2:80 'Hello from nginx behind the firewall'
head -c 100000000 /dev/zero >"$work/web/html/large"
wait_for web server 10.83.2.2 80

say '2. Sidetrack on the firewall, and the rules that it needs in the packet filter.'
for_this_kernel "$here/firewall.toml" client firewall server
show "sidetrack shunt rules -c ${here##*/}/firewall.toml | nft -f -"
sed 's/^/    | /' "$config"
"$sidetrack" shunt rules -c "$config" >"$work/shunt.nft"
on firewall nft -f "$work/shunt.nft"
start firewall firewall "$sidetrack" up -c "$config"
wait_for_lines "$work/firewall.log" 1 ready

# seen: how many bytes the firewall's own rules have counted.
seen() { on firewall nft list counter inet firewall seen | grep -o 'bytes [0-9]*' | cut -d ' ' -f 2; }
shunt_ls() { on firewall "$sidetrack" shunt ls --admin /run/example/firewall.sock; }

say '3. A download of 100 MB. It may take no more than 20 MB per second, so that you can see it.'
show 'curl http://10.83.2.2/large'
before=$(seen)
on client curl -sS --max-time 120 --limit-rate 20M -o "$work/large" http://10.83.2.2/large &
download=$!
for ((try = 0; try < 300; try++)); do
    list=$(shunt_ls || true)
    if grep -q '^installed' <<<"$list"; then break; fi
    read -rt 0.1 <> <(:) || true
done
show 'sidetrack shunt ls'
sed 's/^/    /' <<<"$list"
grep -q '^installed' <<<"$list" || fail 'the flow should have moved to the fast path'
wait "$download" || fail 'the download should have succeeded'
cmp "$work/large" "$work/web/html/large" || fail '100 MB did not arrive as they were'
large=$(($(seen) - before))
echo "    100000000 bytes arrived; the firewall's rules saw $large"
[ "$large" -lt 50000000 ] || fail 'most of the download should have taken the fast path'

say '4. A small download stays with the firewall.'
show 'curl http://10.83.2.2/'
before=$(seen)
on client curl -sS --max-time 60 http://10.83.2.2/ >"$work/page"
echo "    page: $(cat "$work/page"); the firewall's rules saw $(($(seen) - before)) bytes"
[ "$(seen)" -gt "$before" ] || fail 'the firewall should have seen this one'

say '5. The record of the download. Sidetrack writes it when conntrack forgets the connection: here after 1 s instead of 120.'
wait_for_lines "$work/firewall.jsonl" 1 '"shunted":true'
records "$work/firewall.jsonl"
grep -o '"detail":"[^"]*"' "$work/firewall.jsonl" | head -n 1 | sed 's/^/      /'
say 'Done.'
