#!/usr/bin/env bash
# Every connection to a web server passes three functions: one counts, one stops a word, one limits the bandwidth.
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
source "$here/../topology.sh"
need curl nginx
sidetrack=$(sidetrack_binary)
isolate "$@"

say '1. Three hosts: client - gateway - server.'
for name in client proxy server; do host "$name"; done
wire client 10.85.1.2/24 fd85:1::2/64 proxy 10.85.1.1/24 fd85:1::1/64
wire proxy 10.85.2.1/24 fd85:2::1/64 server 10.85.2.2/24 fd85:2::2/64
web_server server 10.85.2.2:80 'Hello from nginx'
head -c 12000000 /dev/zero | tr '\0' 'a' >"$work/web/html/large"
wait_for web server 10.85.2.2 80

say '2. The chain, tried on test bytes, without a listener.'
show "sidetrack chain try web -c ${here##*/}/proxy.toml --bytes 1000000"
"$sidetrack" chain try web -c "$here/proxy.toml" --bytes 1000000 | sed 's/^/    /'
start proxy proxy "$sidetrack" up -c "$here/proxy.toml"
wait_for proxy proxy 10.85.1.1 8080

say '3. A page passes unchanged.'
show 'curl http://10.85.1.1:8080/'
page=$(on client curl -sS --max-time 60 http://10.85.1.1:8080/)
echo "    $page"
[ "$page" = 'Hello from nginx' ] || fail 'the page should have come unchanged'

say '4. Downloads share 4 MB per second.'
show 'curl -o /dev/null http://10.85.1.1:8080/large'
result=$(on client curl -sS --max-time 120 -o /dev/null -w '%{size_download} %{time_total}' http://10.85.1.1:8080/large)
echo "    ${result% *} bytes in ${result#* } s"
[ "${result% *}" = 12000000 ] || fail 'the download should be whole'
# 12 MB less the burst of 1 MB, at 4 MB/s: never faster than 2.75 s.
awk -v seconds="${result#* }" 'BEGIN { exit !(seconds >= 2) }' || fail 'the download was faster than its limit'

say '5. A word that must not leave.'
show "curl --data 'the plan is TOP-SECRET' http://10.85.1.1:8080/"
if on client curl -sS --max-time 60 --data 'the plan is TOP-SECRET' http://10.85.1.1:8080/ 2>"$work/said"; then
    fail 'the request should have ended'
fi
sed 's/^/    /' "$work/said"
wait_for_lines "$work/proxy.jsonl" 1 '"function_refused"'

say '6. What the functions counted.'
show 'curl --unix-socket /run/example/proxy.sock http://admin/v1/functions'
on proxy curl -sS --unix-socket /run/example/proxy.sock http://admin/v1/functions | { jq -r '.[][] | "\(.name) (\(.kind)): \(.flows) flows, \(.bytes_up) bytes up, \(.bytes_down) bytes down"' 2>/dev/null || cat; } | sed 's/^/    /'
echo "  the gateway's records:"
records "$work/proxy.jsonl"
say 'Done.'
