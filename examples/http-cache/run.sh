#!/usr/bin/env bash
# An HTTP proxy with a cache and a filter: it fetches a page once, however often it is requested. For a denied host it answers
# with a page that names the rule.
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
source "$here/../topology.sh"
need curl nginx
sidetrack=$(sidetrack_binary)
isolate "$@"

say '1. Three hosts: client - proxy - server. Only the proxy knows the name web.example.'
for name in client proxy server; do host "$name"; done
wire client 10.81.1.2/24 fd81:1::2/64 proxy 10.81.1.1/24 fd81:1::1/64
wire proxy 10.81.2.1/24 fd81:2::1/64 server 10.81.2.2/24 fd81:2::2/64
web_server server 10.81.2.2:80 'Hello from nginx'
# A page that has not changed for ten days may be reused for one (RFC 9111, Sec. 4.2.2).
touch -d '10 days ago' "$work/web/html/index.html"
wait_for web server 10.81.2.2 80

say '2. The proxy.'
show "sidetrack up -c ${here##*/}/proxy.toml"
sed 's/^/    | /' "$here/proxy.toml"
printf '127.0.0.1 localhost\n10.81.2.2 web.example\n' >"$work/hosts"
start proxy proxy unshare --mount -- sh -c 'mount --bind "$1" /etc/hosts && shift && exec "$@"' - \
    "$work/hosts" "$sidetrack" up -c "$here/proxy.toml"
wait_for proxy proxy 10.81.1.1 3128

# ask URL: prints the status, the field Cache-Status, and the first line of the page.
ask() {
    show "curl -x http://10.81.1.1:3128 $1"
    on client curl -sS --max-time 60 -x http://10.81.1.1:3128 -D "$work/head" -o "$work/page" "$1"
    status=$(head -n 1 "$work/head" | cut -d ' ' -f 2)
    cache=$(tr -d '\r' <"$work/head" | sed -n 's/^cache-status: //Ip')
    echo "    status $status${cache:+, cache: $cache}"
}

say '3. One page, three times. The last request differs only in a parameter that the cache ignores.'
ask http://web.example/
[ "$status" = 200 ] || fail 'the page should have come'
grep -q 'Hello from nginx' "$work/page" || fail "that is not nginx's page"
for url in http://web.example/ 'http://web.example/?utm_source=mail'; do
    ask "$url"
    case $cache in *hit*) ;; *) fail 'that should have been a hit' ;; esac
    grep -q 'Hello from nginx' "$work/page" || fail "that is not nginx's page"
done
wait_for_lines "$work/web/logs/access.log" 1 GET
echo "    requests in nginx's access log: $(wc -l <"$work/web/logs/access.log")"
[ "$(wc -l <"$work/web/logs/access.log")" = 1 ] || fail 'nginx should have seen one request'

say '4. What the rules deny is answered by a page that names the rule.'
for pair in 'http://a.tracker.example/pixel no-tracking' 'http://web.example/setup.exe no-programs'; do
    ask "${pair% *}"
    [ "$status" = 403 ] || fail 'that should have been denied'
    grep -q "${pair#* }" "$work/page" || fail "the page should name the rule ${pair#* }"
    echo "    the page names the rule ${pair#* }"
done

say '5. A purged page is fetched again.'
show 'sidetrack cache purge http://web.example/'
on proxy "$sidetrack" cache purge --admin /run/example/proxy.sock http://web.example/ | sed 's/^/    /'
ask http://web.example/
case $cache in *hit*) fail 'that should have been a miss' ;; esac

wait_for_lines "$work/proxy.jsonl" 6 '"reason"'
echo "  the proxy's records:"
records "$work/proxy.jsonl"
say 'Done.'
