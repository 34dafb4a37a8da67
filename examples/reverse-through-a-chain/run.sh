#!/usr/bin/env bash
# One port of a gateway leads through a SOCKS5 proxy and an HTTP proxy of other parties to a server.
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
source "$here/../topology.sh"
need curl nginx
sidetrack=$(sidetrack_binary)
isolate "$@"

say '1. Five hosts in a row: client - gateway - first - second - server. Each reaches only its neighbours.'
for name in client gateway first second server; do host "$name"; done
wire client 10.90.1.2/24 fd90:1::2/64 gateway 10.90.1.1/24 fd90:1::1/64
wire gateway 10.90.2.1/24 fd90:2::1/64 first 10.90.2.2/24 fd90:2::2/64
wire first 10.90.3.1/24 fd90:3::1/64 second 10.90.3.2/24 fd90:3::2/64
wire second 10.90.4.1/24 fd90:4::1/64 server 10.90.4.2/24 fd90:4::2/64
web_server server '10.90.4.2:80; listen 10.90.4.2:81' 'Hello from nginx'
wait_for web server 10.90.4.2 80
for name in second first gateway; do start "$name" "$name" "$sidetrack" up -c "$here/$name.toml"; done
wait_for second second 10.90.3.2 3128
wait_for first first 10.90.2.2 1080
wait_for gateway gateway 10.90.1.1 8080

say '2. What will happen to a connection.'
show "sidetrack explain -c ${here##*/}/gateway.toml --listener records 10.90.1.2"
on gateway "$sidetrack" explain -c "$here/gateway.toml" --listener records 10.90.1.2 | sed 's/^/    /'

say '3. The client fetches a page from the gateway.'
show 'curl http://10.90.1.1:8080/'
page=$(on client curl -sS --max-time 60 http://10.90.1.1:8080/)
echo "    $page"
[ "$page" = 'Hello from nginx' ] || fail 'the page should have come'
# nginx writes its log after its answer.
wait_for_lines "$work/web/logs/access.log" 1 GET
grep -q '^10.90.4.1 ' "$work/web/logs/access.log" || fail 'nginx should have seen the second proxy'

say '4. Each party has its own record.'
for name in gateway first second; do
    wait_for_lines "$work/$name.jsonl" 1 '"ok"'
    echo "  $name:"
    records "$work/$name.jsonl"
done

say '5. A destination that the second party does not allow.'
sed 's/10.90.4.2:80/10.90.4.2:81/' "$here/gateway.toml" >"$work/other.toml"
sed -i "s#gateway.sock#other.sock#; s#gateway.jsonl#other.jsonl#; s#10.90.1.1:8080#10.90.1.1:8081#" "$work/other.toml"
start other gateway "$sidetrack" up -c "$work/other.toml"
wait_for other gateway 10.90.1.1 8081
show 'curl http://10.90.1.1:8081/'
if on client curl -sS --max-time 60 http://10.90.1.1:8081/ 2>"$work/said"; then fail 'nothing should have come'; fi
sed 's/^/    /' "$work/said"
wait_for_lines "$work/other.jsonl" 1 '"reason"'
records "$work/other.jsonl"
say 'Done.'
