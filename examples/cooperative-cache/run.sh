#!/usr/bin/env bash
# Sidetrack and a real Squid are siblings: each asks the other for a page before it asks the web server.
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
source "$here/../topology.sh"
need_root 'Squid changes its user'
need curl nginx squid
sidetrack=$(sidetrack_binary)
isolate "$@"

say '1. Four hosts on one network: a client, Sidetrack, Squid and a web server.'
for name in client proxy squid server; do host "$name"; done
# The proxy's host is the switch between the others.
ip -n proxy link add lan type bridge
ip -n proxy link set lan up
ip -n proxy address add 10.87.1.1/24 dev lan
for pair in client:10.87.1.2 squid:10.87.1.3 server:10.87.1.4; do
    name=${pair%:*}
    ip link add eth0 netns "$name" type veth peer name "to-$name" netns proxy
    ip -n "$name" address add "${pair#*:}/24" dev eth0
    ip -n "$name" link set eth0 up
    ip -n proxy link set "to-$name" master lan up
done
web_server server '10.87.1.4:80; add_header Cache-Control max-age=3600' 'Hello from nginx'
for page in first second-{1..20}; do echo "The $page page" >"$work/web/html/$page"; done
wait_for web server 10.87.1.4 80

say '2. The two caches.'
start proxy proxy "$sidetrack" up -c "$here/proxy.toml"
wait_for proxy proxy 10.87.1.1 3128
mkdir -m 0777 "$work/squid"
start squid squid squid -N -f "$here/squid.conf"
wait_for squid squid 10.87.1.3 3128

# ask CACHE PAGE: requests the page through one of the caches.
ask() {
    show "curl -x http://$1:3128 http://10.87.1.4/$2"
    on client curl -sS --max-time 60 -x "http://$1:3128" -D "$work/head" -o "$work/page" "http://10.87.1.4/$2"
    tr -d '\r' <"$work/head" | grep -i '^cache-status:\|^x-cache:' | sed 's/^/    /' || true
    [ "$(cat "$work/page")" = "The $2 page" ] || fail 'that is not the page'
}

say '3. A page that Squid has, through Sidetrack.'
ask 10.87.1.3 first
ask 10.87.1.1 first

say '4. A page that Sidetrack has, through Squid. Squid asks a sibling only once it knows that the sibling answers.'
# seen PAGE: how many requests for it the web server has logged.
seen() { grep -c "GET /$1 " "$work/web/logs/access.log" || true; }
for number in {1..20}; do
    page=second-$number
    ask 10.87.1.1 "$page"
    ask 10.87.1.3 "$page"
    if grep -q "GET http://10.87.1.4/$page 200 hit" "$work/proxy.jsonl"; then break; fi
done

say '5. The web server has seen each page once.'
wait_for_lines "$work/web/logs/access.log" 2 GET
sed 's/^/    /' "$work/web/logs/access.log"
for page in first "$page"; do
    [ "$(seen "$page")" = 1 ] || fail "the web server should have seen one request for $page"
done
wait_for_lines "$work/proxy.jsonl" 3 '"reason"'
echo "  Sidetrack's records:"
records "$work/proxy.jsonl"
say 'Done.'
