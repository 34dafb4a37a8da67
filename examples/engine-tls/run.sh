#!/usr/bin/env bash
# The packet engine shares one TLS port among two servers by the name in the client's hello, without ending TLS.
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
source "$here/../topology.sh"
need_root 'the packet engine loads BPF programs'
need curl nginx openssl jq ethtool
sidetrack=$(sidetrack_binary)
isolate "$@"

say '1. Four hosts: a client, the proxy, and two web servers with a certificate each.'
for name in client proxy red blue; do host "$name"; done
wire client 10.89.1.2/24 fd89:1::2/64 proxy 10.89.1.1/24 fd89:1::1/64
wire proxy 10.89.2.1/24 fd89:2::1/64 red 10.89.2.2/24 fd89:2::2/64
wire proxy 10.89.3.1/24 fd89:3::1/64 blue 10.89.3.2/24 fd89:3::2/64
# The engine talks to both servers from 10.89.2.1.
ip -n blue route add 10.89.2.0/24 via 10.89.3.1
# server HOST ADDRESS NAME: a web server with a certificate for NAME that it signed itself.
server() {
    openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 30 -subj "/CN=$3" \
        -addext "subjectAltName=DNS:$3" -keyout "$work/$1.key" -out "$work/$1.pem" 2>"$work/openssl.log"
    web_server "$1" "$2:443 ssl; ssl_certificate $work/$1.pem; ssl_certificate_key $work/$1.key" "Hello from $3" "$1"
    wait_for "$1" "$1" "$2" 443
}
server red 10.89.2.2 red.example
server blue 10.89.3.2 www.blue.example
head -c 20000000 /dev/zero >"$work/red/html/large"

say '2. The proxy. It has no certificate.'
for_this_kernel "$here/proxy.toml" client proxy red blue
show "sidetrack up -c ${here##*/}/proxy.toml"
sed 's/^/    | /' "$config"
start proxy proxy "$sidetrack" up -c "$config"
# The engine has no listening socket: it says when it is ready.
wait_for_lines "$work/proxy.log" 1 ': ready'

# ask SERVER NAME PATH: requests the page under this name at the proxy's address, and trusts SERVER's certificate only.
ask() {
    show "curl https://$2$3 (the name leads to the proxy)"
    on client curl -sS --max-time 60 --cacert "$work/$1.pem" --resolve "$2:443:10.89.1.1" -o "$work/page" "https://$2$3" 2>"$work/said"
}

say '3. Each name reaches its server.'
ask red red.example / || fail "$(cat "$work/said")"
sed 's/^/    /' "$work/page"
grep -q 'Hello from red.example' "$work/page" || fail 'the red server should have answered'
ask blue www.blue.example / || fail "$(cat "$work/said")"
sed 's/^/    /' "$work/page"
grep -q 'Hello from www.blue.example' "$work/page" || fail 'the blue server should have answered'

say '4. A name that no entry has.'
if ask red green.example /; then fail 'nothing should have come'; fi
sed 's/^/    /' "$work/said"

say '5. A download. Once the server is chosen, the kernel may translate the packets.'
ask red red.example /large || fail "$(cat "$work/said")"
[ "$(stat -c %s "$work/page")" = 20000000 ] || fail 'the download should be whole'
wait_for_lines "$work/proxy.jsonl" 4 '"reason"'
jq -r '"    \(.orig_dst): \(.bytes_down) bytes down, shunted: \(.shunted), ended: \(.reason)"' "$work/proxy.jsonl"
say 'Done.'
