#!/usr/bin/env bash
# A router steers the traffic of the hosts behind it with TPROXY: they need no configuration and no root, and the server
# sees the client's own address.
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
source "$here/../topology.sh"
need curl nginx nft
sidetrack=$(sidetrack_binary)
isolate "$@"

say '1. Two clients behind a router, a web server on the other side. The router forwards packets.'
for name in alice bob router server; do host "$name"; done
wire alice 10.80.1.2/24 fd80:1::2/64 router 10.80.1.1/24 fd80:1::1/64
wire bob 10.80.2.2/24 fd80:2::2/64 router 10.80.2.1/24 fd80:2::1/64
wire router 10.80.3.1/24 fd80:3::1/64 server 10.80.3.2/24 fd80:3::2/64
ip -n alice route add default via 10.80.1.1
ip -n bob route add default via 10.80.2.1
ip -n server route add default via 10.80.3.1
on router sh -c 'echo 1 >/proc/sys/net/ipv4/ip_forward'
web_server server 10.80.3.2:80 'Hello from the far side'
wait_for web server 10.80.3.2 80

say '2. The router: sidetrack up with a tproxy listener; bob is denied by a rule.'
show 'sidetrack up -c router-tproxy/router.toml'
start router router "$sidetrack" up -c "$here/router.toml"
wait_for router router 0.0.0.0 15002

say '3. alice asks, told nothing; the server sees her own address although the router carried the flow.'
show 'curl http://10.80.3.2/    (alice)'
page=$(on alice curl -sS --max-time 60 http://10.80.3.2/)
echo "    $page"
[ "$page" = 'Hello from the far side' ] || fail 'that is not the page'
wait_for_lines "$work/web/logs/access.log" 1 GET
seen=$(cut -d ' ' -f 1 "$work/web/logs/access.log")
echo "    nginx's access log says: $seen"
[ "$seen" = 10.80.1.2 ] || fail 'the server should have seen 10.80.1.2'

say '4. bob asks and is refused.'
show 'curl http://10.80.3.2/    (bob)'
if on bob curl -sS --max-time 60 http://10.80.3.2/; then
    fail 'bob should have been refused'
fi

say '5. When the router process ends, its table is gone and packets flow as before.'
kill -TERM "${started[-1]}"
wait "${started[-1]}" || true
if on router nft list tables | grep -q sidetrack; then
    fail 'the table is still there'
fi
page=$(on bob curl -sS --max-time 60 http://10.80.3.2/)
echo "    bob, without Sidetrack: $page"
say 'Done.'
