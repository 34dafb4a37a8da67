#!/usr/bin/env bash
# Programs without any proxy setting, each under `sidetrack run`: no root, no configuration, nothing to clean up.
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
source "$here/../topology.sh"
need curl nginx
sidetrack=$(sidetrack_binary)
isolate "$@"

say '1. A client, a gateway that speaks SOCKS5 and SOCKS6, and a web server behind it.'
for name in client gateway server; do host "$name"; done
wire client 10.78.1.2/24 fd78:1::2/64 gateway 10.78.1.1/24 fd78:1::1/64
wire gateway 10.78.2.1/24 fd78:2::1/64 server 10.78.2.2/24 fd78:2::2/64
web_server server 10.78.2.2:80 'Hello from the web server'
wait_for web server 10.78.2.2 80
start gateway gateway "$sidetrack" up -c "$here/gateway.toml"
wait_for gateway gateway 10.78.1.1 1080

# The client has no route to the server: only inside the namespace of `run` is every address local.
run_as_client() { on client env -i PATH="$PATH" HOME=/tmp "$sidetrack" run "$@"; }

say '2. curl, through SOCKS6 and through SOCKS5.'
for via in socks6 socks5; do
    show "sidetrack run --via $via://10.78.1.1:1080 -- curl http://10.78.2.2/"
    page=$(run_as_client --via "$via://10.78.1.1:1080" -- curl -sS --max-time 60 http://10.78.2.2/)
    echo "    $page"
    [ "$page" = 'Hello from the web server' ] || fail "that is not the page"
done

say '3. A shell script with children: all of it is caught.'
show "sidetrack run --via socks6://10.78.1.1:1080 -- sh -c 'curl ... | tr a-z A-Z'"
page=$(run_as_client --via socks6://10.78.1.1:1080 -- \
    sh -c 'curl -sS --max-time 60 http://10.78.2.2/ | tr a-z A-Z')
echo "    $page"
[ "$page" = 'HELLO FROM THE WEB SERVER' ] || fail "that is not the page"

say "4. The command's exit code is ours."
show "sidetrack run --via socks6://10.78.1.1:1080 -- sh -c 'exit 42'"
status=0
run_as_client --via socks6://10.78.1.1:1080 -- sh -c 'exit 42' || status=$?
echo "    exit code $status"
[ "$status" = 42 ] || fail 'it should have been 42'

say '5. What policy denies at the gateway is refused, and the program sees an error, not another way out.'
show 'sidetrack run --via socks6://10.78.1.1:1080 -- curl http://10.78.1.99/'
if run_as_client --via socks6://10.78.1.1:1080 -- curl -sS --max-time 60 http://10.78.1.99/; then
    fail 'that should not have worked'
fi
say 'Done: nothing was installed on the client, and nothing is left on it.'
