#!/usr/bin/env bash
# A gateway with the page: an operator logs in from another host, sees live flows, and one who may only look ends none.
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
source "$here/../topology.sh"
need curl nginx jq nc
sidetrack=$(sidetrack_binary)
isolate "$@"

say '1. Four hosts: client - gateway - server, and an operator.'
for name in client gateway server operator; do host "$name"; done
wire client 10.89.1.2/24 fd89:1::2/64 gateway 10.89.1.1/24 fd89:1::1/64
wire gateway 10.89.2.1/24 fd89:2::1/64 server 10.89.2.2/24 fd89:2::2/64
wire gateway 10.89.3.1/24 fd89:3::1/64 operator 10.89.3.2/24 fd89:3::2/64
web_server server 10.89.2.2:80 'Hello from nginx'
wait_for web server 10.89.2.2 80

say '2. The gateway has a page, and makes the tokens to log in with.'
show "sidetrack up -c ${here##*/}/proxy.toml"
sed 's/^/    | /' "$here/proxy.toml"
start gateway gateway "$sidetrack" up -c "$here/proxy.toml"
wait_for gateway gateway 10.89.1.1 8080
wait_for gateway gateway 10.89.3.1 9466
[ "$(stat -c %a "$work/page-tokens")" = 600 ] || fail 'the tokens must be readable by their owner alone'

# page PATH [OPTION...]: asks the page from the operator's host; prints the answer and, in a line of its own, the status.
page() {
    local path=$1
    shift
    on operator curl -sS --max-time 60 -w '\n%{http_code}' "$@" "http://10.89.3.1:9466$path"
}
# expect STATUS PATH [OPTION...]
expect() {
    local status=$1 answer
    shift
    answer=$(page "$@")
    echo "    $1: ${answer##*$'\n'}"
    [ "${answer##*$'\n'}" = "$status" ] || fail "$1 answers ${answer##*$'\n'} and not $status"
}
# log_in ROLE: keeps the cookie in a file of this name.
log_in() {
    local token
    token=$(sed -n "s/^$1 //p" "$work/page-tokens")
    expect 200 /page/session -c "$work/$1.jar" -H 'content-type: application/json' -d "{\"token\": \"$token\"}"
}

say '3. Without a login there is the page and no data.'
expect 200 /
expect 401 /v1/flows
expect 401 /page/session -H 'content-type: application/json' -d '{"token": "a guess"}'

say '4. A connection stays open; both who may do everything and who may only look see it.'
start slow client sh -c '(printf "GET / HTTP/1.1\r\nHost: a\r\n"; sleep 100) | nc 10.89.1.1 8080'
# The delay after the failed login.
for ((try = 0; try < 100; try++)); do
    answer=$(page /page/session -H 'content-type: application/json' -d "{\"token\": \"$(sed -n 's/^read //p' "$work/page-tokens")\"}")
    [ "${answer##*$'\n'}" = 200 ] && break
    read -rt 0.1 <> <(:) || true
done
log_in read
log_in admin
for ((try = 0; try < 100; try++)); do
    flow=$(page /v1/flows -b "$work/read.jar" | head -n 1 | jq -r '.flows[0].flow // ""')
    [ -n "$flow" ] && break
    read -rt 0.1 <> <(:) || true
done
[ -n "$flow" ] || fail 'the flow is not shown'
page "/v1/flows/$flow" -b "$work/read.jar" | head -n 1 | jq -c '{flow, client, orig_dst, rule, carrier}' | sed 's/^/    /'

say '5. Who may only look cannot end it; the other one can.'
expect 403 "/v1/flows/$flow" -X DELETE -b "$work/read.jar"
expect 200 "/v1/flows/$flow" -X DELETE -b "$work/admin.jar"
for ((try = 0; try < 100; try++)); do
    reason=$(page "/v1/flows/$flow" -b "$work/admin.jar" | head -n 1 | jq -r .reason)
    [ "$reason" = killed ] && break
    read -rt 0.1 <> <(:) || true
done
[ "$reason" = killed ] || fail "the flow ended with $reason and not with killed"

say '6. A request that a page of another site makes the browser send is refused.'
expect 403 /v1/flows -b "$work/admin.jar" -H 'Origin: http://evil.example'
expect 421 /v1/flows -b "$work/admin.jar" -H 'Host: evil.example'
