#!/usr/bin/env bash
# Three hops in a row, of three protocols. Each hop is reached through the one before; then comes the web server.
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
source "$here/../topology.sh"
need curl nginx
sidetrack=$(sidetrack_binary)
isolate "$@"

say '1. client - one - two - three - server in a line. Nobody forwards packets: each reaches its neighbours only.'
for name in client one two three server; do host "$name"; done
wire client 10.81.1.2/24 fd81:1::2/64 one 10.81.1.1/24 fd81:1::1/64
wire one 10.81.2.1/24 fd81:2::1/64 two 10.81.2.2/24 fd81:2::2/64
wire two 10.81.3.1/24 fd81:3::1/64 three 10.81.3.2/24 fd81:3::2/64
wire three 10.81.4.1/24 fd81:4::1/64 server 10.81.4.2/24 fd81:4::2/64
web_server server 10.81.4.2:80 'Hello from the end of the chain'
wait_for web server 10.81.4.2 80
start one one "$sidetrack" up -c "$here/one.toml"
start two two "$sidetrack" up -c "$here/two.toml"
start three three "$sidetrack" up -c "$here/three.toml"
wait_for one one 10.81.1.1 1080
wait_for two two 10.81.2.2 1080
wait_for three three 10.81.3.2 1080

say '2. One command through the three.'
hops=(--via socks6://10.81.1.1:1080 --via socks5://10.81.2.2:1080 --via socks6://10.81.3.2:1080)
show "sidetrack run ${hops[*]} -- curl http://10.81.4.2/"
page=$(on client env -i PATH="$PATH" HOME=/tmp \
    "$sidetrack" run "${hops[@]}" -- curl -sS --max-time 60 http://10.81.4.2/)
echo "    $page"
[ "$page" = 'Hello from the end of the chain' ] || fail 'that is not the page'

say '3. The same chain by policy: a rule of the client names the three hops.'
show 'sidetrack up -c chain-of-three/client.toml; curl http://10.81.4.2/'
ip -n client route add default via 10.81.1.1
start client client "$sidetrack" up -c "$here/client.toml"
wait_for client client 127.0.0.1 15001
page=$(on client curl -sS --max-time 60 http://10.81.4.2/)
echo "    $page"
[ "$page" = 'Hello from the end of the chain' ] || fail 'that is not the page'

say '4. The server saw the last hop only.'
wait_for_lines "$work/web/logs/access.log" 2 GET
seen=$(cut -d ' ' -f 1 "$work/web/logs/access.log" | sort -u)
echo "    nginx's access log says: $seen"
[ "$seen" = 10.81.4.1 ] || fail 'only the third hop reaches the server'
say 'Done.'
