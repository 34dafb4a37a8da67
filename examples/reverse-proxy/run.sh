#!/usr/bin/env bash
# A reverse proxy for any TCP protocol: a port in front of one server, and a port in front of several, chosen
# by the HTTP Host field (or SNI).
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
source "$here/../topology.sh"
need curl nginx
sidetrack=$(sidetrack_binary)
isolate "$@"

say '1. A client, the proxy, and two web servers behind it.'
for name in client proxy red blue; do host "$name"; done
wire client 10.79.1.2/24 fd79:1::2/64 proxy 10.79.1.1/24 fd79:1::1/64
wire proxy 10.79.2.1/24 fd79:2::1/64 red 10.79.2.2/24 fd79:2::2/64
wire proxy 10.79.3.1/24 fd79:3::1/64 blue 10.79.3.2/24 fd79:3::2/64
# If a host forwards packets, the kernel carries flows that need nothing else: those of the two ports with one server each.
on proxy sh -c 'echo 1 >/proc/sys/net/ipv4/ip_forward'
web_server red 10.79.2.2:80 'I am red' red
web_server blue 10.79.3.2:80 'I am blue' blue
wait_for red red 10.79.2.2 80
wait_for blue blue 10.79.3.2 80
start proxy proxy "$sidetrack" up -c "$here/proxy.toml"
wait_for proxy proxy 10.79.1.1 8081
wait_for proxy proxy 10.79.1.1 8080

expect() { # ANSWER URL [CURL-OPTION...]
    local answer=$1 page
    shift
    show "curl $*"
    page=$(on client curl -sS --max-time 60 "$@")
    echo "    $page"
    [ "$page" = "$answer" ] || fail "it should have been: $answer"
}

say '2. The redirection table: each port stands for a server.'
expect 'I am red' http://10.79.1.1:8081/
expect 'I am blue' http://10.79.1.1:8082/

say '3. One port for several servers, by the HTTP Host field.'
expect 'I am red' http://10.79.1.1:8080/ -H 'Host: red.example'
expect 'I am blue' http://10.79.1.1:8080/ -H 'Host: shop.blue.example'

say '4. A name nobody stands for is refused.'
show 'curl http://10.79.1.1:8080/ -H "Host: green.example"'
if on client curl -sS --max-time 60 http://10.79.1.1:8080/ -H 'Host: green.example'; then
    fail 'that should not have worked'
fi
say 'Done.'
