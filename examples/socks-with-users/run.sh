#!/usr/bin/env bash
# A SOCKS5 proxy for two users: each has a password, and the rules say which servers each of them may reach.
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
source "$here/../topology.sh"
need curl nginx
sidetrack=$(sidetrack_binary)
isolate "$@"

say '1. Four hosts: a client, the proxy, and two web servers behind it.'
for name in client proxy first second; do host "$name"; done
wire client 10.84.1.2/24 fd84:1::2/64 proxy 10.84.1.1/24 fd84:1::1/64
wire proxy 10.84.2.1/24 fd84:2::1/64 first 10.84.2.2/24 fd84:2::2/64
wire proxy 10.84.3.1/24 fd84:3::1/64 second 10.84.3.2/24 fd84:3::2/64
web_server first 10.84.2.2:80 'Hello from the first server' first
web_server second 10.84.3.2:80 'Hello from the second server' second
wait_for first first 10.84.2.2 80
wait_for second second 10.84.3.2 80

say '2. The configuration, checked before it is used. The check tries the test that stands beside the rules.'
# Files that only their owner can read, one password each.
(umask 077; echo 'correct horse' >"$work/alice.password"; echo 'battery staple' >"$work/bob.password")
show "sidetrack check ${here##*/}/proxy.toml"
"$sidetrack" check "$here/proxy.toml" | sed 's/^/    /'
start proxy proxy "$sidetrack" up -c "$here/proxy.toml"
wait_for proxy proxy 10.84.1.1 1080

# ask USER:PASSWORD URL: sets `page` to what came, empty if nothing did.
ask() {
    show "curl --socks5 ${1:+$1@}10.84.1.1:1080 $2"
    page=$(on client curl -sS --max-time 60 ${1:+--proxy-user "$1"} --socks5 10.84.1.1:1080 "$2" 2>"$work/said") || true
    echo "    ${page:-nothing: $(cat "$work/said")}"
}

say '3. Alice reaches both servers, bob only the first.'
ask 'alice:correct horse' http://10.84.2.2/
[ "$page" = 'Hello from the first server' ] || fail 'alice may reach the first server'
ask 'alice:correct horse' http://10.84.3.2/
[ "$page" = 'Hello from the second server' ] || fail 'alice may reach the second server'
ask 'bob:battery staple' http://10.84.2.2/
[ "$page" = 'Hello from the first server' ] || fail 'bob may reach the first server'
ask 'bob:battery staple' http://10.84.3.2/
[ -z "$page" ] || fail 'bob may not reach the second server'

say '4. A wrong password, and no password.'
ask 'alice:guessed' http://10.84.2.2/
[ -z "$page" ] || fail 'a wrong password must be refused'
ask '' http://10.84.2.2/
[ -z "$page" ] || fail 'a client without a password must be refused'
[ "$(wc -l <"$work/first/logs/access.log")" = 2 ] || fail 'the first server should have seen two requests'

wait_for_lines "$work/proxy.jsonl" 6 '"reason"'
echo "  the proxy's records:"
records "$work/proxy.jsonl"
say 'Done.'
