#!/usr/bin/env bash
# An HTTP proxy intercepts the TLS connections of clients that trust its authority: rules, cache and records see the requests.
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
source "$here/../topology.sh"
need curl nginx openssl jq
sidetrack=$(sidetrack_binary)
isolate "$@"

say '1. Three hosts: client - proxy - server. The server has TLS, with a certificate that it signed itself.'
for name in client proxy server; do host "$name"; done
wire client 10.86.1.2/24 fd86:1::2/64 proxy 10.86.1.1/24 fd86:1::1/64
wire proxy 10.86.2.1/24 fd86:2::1/64 server 10.86.2.2/24 fd86:2::2/64
openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 30 -subj /CN=web.example \
    -addext subjectAltName=DNS:web.example -keyout "$work/server.key" -out "$work/server.pem" 2>"$work/openssl.log"
web_server server "10.86.2.2:443 ssl; ssl_certificate $work/server.pem; ssl_certificate_key $work/server.key;
        add_header Cache-Control max-age=3600" 'Hello from nginx, over TLS'
wait_for web server 10.86.2.2 443

say '2. An authority for names below .example. The key of its root is destroyed at once.'
show 'sidetrack ca init --dir ca --name example'
"$sidetrack" ca init --dir "$work/ca" --name example | sed 's/^/    /'
printf '127.0.0.1 localhost\n10.86.2.2 web.example\n' >"$work/hosts"
start proxy proxy unshare --mount -- sh -c 'mount --bind "$1" /etc/hosts && shift && exec "$@"' - \
    "$work/hosts" "$sidetrack" up -c "$here/proxy.toml"
wait_for proxy proxy 10.86.1.1 3128

# ask ROOT URL: asks through the proxy, trusting only ROOT. Sets `status` (000: no answer) and `cache`.
ask() {
    show "curl -x http://10.86.1.1:3128 --cacert ${1##*/} $2"
    status=$(on client curl -sS --max-time 60 -x http://10.86.1.1:3128 --cacert "$1" --header 'Cookie: session=private' \
        -D "$work/head" -o "$work/page" -w '%{response_code}' "$2" 2>"$work/said") || true
    cache=$(tr -d '\r' <"$work/head" | sed -n 's/^cache-status: //Ip')
    echo "    status $status${cache:+, cache: $cache}"
    [ "$status" != 000 ] || sed 's/^/    /' "$work/said"
}

say '3. A client that trusts only the server itself notices the interception, and sends nothing.'
ask "$work/server.pem" https://web.example/
[ "$status" = 000 ] || fail 'a client that does not trust the authority must not get an answer'

say '4. A client that has installed the root. Its packets are captured.'
show "sidetrack tap --pcapng requests.pcapng 'host == web.example'"
start tap proxy "$sidetrack" tap --admin "$work/proxy.sock" --pcapng "$work/requests.pcapng" 'host == web.example'
tap=${started[-1]}
wait_for_lines "$work/requests.pcapng" 1 sidetrack
ask "$work/ca/root.pem" https://web.example/
[ "$status" = 200 ] || fail 'the page should have come'
grep -q 'over TLS' "$work/page" || fail "that is not nginx's page"
ask "$work/ca/root.pem" https://web.example/
case $cache in *hit*) ;; *) fail 'the second request should have been a hit' ;; esac
ask "$work/ca/root.pem" https://web.example/admin/users
[ "$status" = 403 ] || fail 'the rule should have denied this URL'
[ "$(wc -l <"$work/web/logs/access.log")" = 1 ] || fail 'nginx should have seen one request'

say '5. The requests in the records and in the HTTP Archive.'
wait_for_lines "$work/proxy.jsonl" 7 '"reason"'
jq -r '"    flow \(.flow): rule \(.rule), \(.reason): \(.detail)"' "$work/proxy.jsonl"
grep -q 'GET https://web.example/ 200 hit' "$work/proxy.jsonl" || fail 'a record should say that the cache answered'
wait_for_lines "$work/requests.har" 1 web.example
jq -r '.log.entries[] | "    HAR: \(.request.method) \(.request.url) \(.response.status), \(.time) ms"' "$work/requests.har"
if grep -q 'session=private' "$work/requests.har"; then fail 'the archive must not have the cookie'; fi

say '6. The packets, decrypted.'
kill -INT "$tap"
wait_for_lines "$work/tap.log" 1 ' packets, '
sed 's/^/    /' "$work/tap.log"
if command -v tshark >/dev/null; then
    show 'tshark -r requests.pcapng -Y http.request'
    tshark -n -r "$work/requests.pcapng" -Y 'http2.headers.path || http.request' -T fields -e ip.dst -e http2.headers.path \
        -e http.request.uri >"$work/decrypted" 2>"$work/tshark.log"
    sed 's/^/    /' "$work/decrypted"
    grep -q /admin/users "$work/decrypted" || fail 'the capture should show the requests inside TLS'
fi
say 'Done.'
