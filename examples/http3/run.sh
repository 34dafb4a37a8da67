#!/usr/bin/env bash
# A web server that knows only HTTP/1.1 gets HTTP/2 and HTTP/3 from an edge in front of it. A command reaches the network behind the
# edge through HTTP/3, for TCP and UDP.
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
source "$here/../topology.sh"
need curl nginx python3 gtlsclient
sidetrack=$(sidetrack_binary)
isolate "$@"

say '1. Three hosts: client - edge - server. The server has nginx without TLS, and a game over UDP.'
for name in client edge server; do host "$name"; done
wire client 10.79.1.2/24 fd79:1::2/64 edge 10.79.1.1/24 fd79:1::1/64
wire edge 10.79.2.1/24 fd79:2::1/64 server 10.79.2.2/24 fd79:2::2/64
web_server server 10.79.2.2:80 'Hello from nginx'
touch -d '10 days ago' "$work/web/html/index.html"
wait_for web server 10.79.2.2 80
start game server python3 "$here/../udp/servers.py" 10.79.2.2

say '2. A certificate for the edge, of an authority made for this trial, and the edge itself.'
show 'sidetrack tunnel ca; sidetrack tunnel key --name edge.example --ca ca-private.pem'
(cd "$work" && "$sidetrack" tunnel ca >/dev/null && "$sidetrack" tunnel key --name edge.example --ca ca-private.pem >/dev/null)
mv "$work/edge.example.pem" "$work/edge.pem"
show "sidetrack up -c ${here##*/}/edge.toml"
sed 's/^/    | /' "$here/edge.toml"
start edge edge "$sidetrack" up -c "$here/edge.toml"
wait_for edge edge 10.79.1.1 443
wait_for edge edge 10.79.1.1 3129
printf '127.0.0.1 localhost\n10.79.1.1 edge.example\n' >"$work/hosts"
# The client knows the name of the edge.
as_client() {
    on client unshare --mount -- sh -c 'mount --bind "$1" /etc/hosts && shift && exec "$@"' - "$work/hosts" "$@"
}

say '3. curl gets the page over HTTP/2. The answer says that HTTP/3 is there, too.'
show 'curl --cacert ca.pem https://edge.example/'
as_client curl -sS --max-time 60 --cacert "$work/ca.pem" -D "$work/head" -o "$work/page" https://edge.example/
sed -n '1p; /^alt-svc/Ip' "$work/head" | tr -d '\r' | sed 's/^/    /'
grep -q '^HTTP/2 200' "$work/head" || fail 'that is not HTTP/2'
grep -qi '^alt-svc: h3=":443"' "$work/head" || fail 'nothing says that HTTP/3 is there'
grep -q 'Hello from nginx' "$work/page" || fail "that is not nginx's page"

say '4. ngtcp2 gets the same page over HTTP/3, from the cache: nginx is not asked again.'
show 'gtlsclient edge.example 443 https://edge.example/index.html'
mkdir "$work/got"
as_client gtlsclient -q --exit-on-all-streams-close --download="$work/got" edge.example 443 https://edge.example/ \
    https://edge.example/index.html >"$work/client.log" 2>&1 || { cat "$work/client.log"; fail 'HTTP/3 failed'; }
grep -q 'Hello from nginx' "$work/got/index.html" || { cat "$work/client.log"; fail 'that is not the page'; }
echo "    $(head -n 1 "$work/got/index.html")"

say '5. A command reaches the network behind the edge through HTTP/3: TCP by CONNECT, UDP by datagrams of QUIC.'
via="h3://edge.example:3129?ca=$work/ca.pem"
show "sidetrack run --via '$via' -- curl http://10.79.2.2/"
as_client "$sidetrack" run --via "$via" -- curl -sS --max-time 60 http://10.79.2.2/ >"$work/page" || { cat "$work/edge.log" "$work/edge.jsonl" >&2; exit 1; }
grep -q 'Hello from nginx' "$work/page" || fail "that is not nginx's page"
echo "    $(head -n 1 "$work/page")"
show "sidetrack run --via '$via' -- python3 player.py 10.79.2.2"
answer=$(as_client "$sidetrack" run --quiet --via "$via" -- python3 "$here/../udp/player.py" 10.79.2.2)
echo "    $answer"
[ "$answer" = '60 moves, 60 answers' ] || fail 'moves are missing'

say '6. The records of the edge: each request and each tunnel is a flow.'
wait_for_lines "$work/edge.jsonl" 5 '"reason":"ok"'
records "$work/edge.jsonl"
say 'Done.'
