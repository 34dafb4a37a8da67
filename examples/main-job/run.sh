#!/usr/bin/env bash
# The main job: an unmodified curl without a proxy setting fetches from a real nginx in another network
# namespace, through a SOCKS6 proxy in a third. Twice: as one command (`sidetrack run`), and by policy (`sidetrack up`).
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
source "$here/../topology.sh"
need curl nginx
sidetrack=$(sidetrack_binary)
isolate "$@"

say '1. Three hosts: client - proxy - server. The proxy forwards no packets: there is no other way through.'
for name in client proxy server; do host "$name"; done
wire client 10.77.1.2/24 fd77:1::2/64 proxy 10.77.1.1/24 fd77:1::1/64
wire proxy 10.77.2.1/24 fd77:2::1/64 server 10.77.2.2/24 fd77:2::2/64
ip -n client route add default via 10.77.1.1
ip -n client -6 route add default via fd77:1::1
web_server server 10.77.2.2:80 '<h1>Hello from nginx behind the proxy</h1>'
wait_for web server 10.77.2.2 80
echo '    client 10.77.1.2   proxy 10.77.1.1 / 10.77.2.1   server 10.77.2.2, nginx on port 80'

say '2. Without Sidetrack the client cannot reach the server.'
show 'curl http://10.77.2.2/'
if on client curl -sS --max-time 1 http://10.77.2.2/ 2>&1; then
    fail 'the client reached the server without the proxy: the topology is wrong'
fi

say '3. The proxy: sidetrack up, one SOCKS6 listener, and a rule that says where it may go.'
show "sidetrack up -c ${here##*/}/proxy.toml"
sed 's/^/    | /' "$here/proxy.toml"
# Only the proxy can resolve web.example, so the name must reach the proxy as a name.
printf '127.0.0.1 localhost\n10.77.2.2 web.example\n' >"$work/hosts"
start proxy proxy unshare --mount -- sh -c 'mount --bind "$1" /etc/hosts && shift && exec "$@"' - \
    "$work/hosts" "$sidetrack" up -c "$here/proxy.toml"
wait_for proxy proxy 10.77.1.1 1080

say '4. One command, no configuration, no root: curl runs unmodified and is told nothing.'
for url in http://10.77.2.2/ http://web.example/; do
    show "sidetrack run --via socks6://10.77.1.1:1080 -- curl $url    (with --records, to show them below)"
    on client env -i PATH="$PATH" HOME=/tmp \
        "$sidetrack" run --records "$work/run.jsonl" --via socks6://10.77.1.1:1080 -- curl -sS --max-time 60 "$url" >"$work/page"
    echo "    page, first line: $(head -n 1 "$work/page")"
    grep -q 'Hello from nginx' "$work/page" || fail "that is not nginx's page"
done

say '5. By policy: sidetrack up on the client redirects port 80 and a rule names the carrier. Plain curl again.'
show "sidetrack up -c ${here##*/}/client.toml"
sed 's/^/    | /' "$here/client.toml"
start client client "$sidetrack" up -c "$here/client.toml"
wait_for client client 127.0.0.1 15001
show 'curl http://10.77.2.2/'
on client env -i PATH="$PATH" HOME=/tmp curl -sS --max-time 60 http://10.77.2.2/ >"$work/page"
echo "    page, first line: $(head -n 1 "$work/page")"
grep -q 'Hello from nginx' "$work/page" || fail "that is not nginx's page"

say '6. Proof: nginx saw the proxy, never the client, and both ends wrote a record of each flow.'
wait_for_lines "$work/web/logs/access.log" 3 GET
asked=$(cut -d ' ' -f 1 "$work/web/logs/access.log" | sort | uniq -c | sed 's/^ */    /')
echo "    requests by address in nginx's access log: ${asked#    }"
if grep -qv '^10\.77\.2\.1 ' "$work/web/logs/access.log"; then
    fail 'somebody else than the proxy reached nginx'
fi
[ "$(wc -l <"$work/web/logs/access.log")" = 3 ] || fail 'nginx should have seen three requests'
wait_for_lines "$work/proxy.jsonl" 3 '"reason":"ok"'
wait_for_lines "$work/client.jsonl" 1 '"reason":"ok"'
wait_for_lines "$work/run.jsonl" 2 '"reason":"ok"'
echo "  the records of 'sidetrack run':"
records "$work/run.jsonl"
echo "  the record of the client's 'sidetrack up' (redirected by policy):"
records "$work/client.jsonl"
echo "  the proxy's records (two of 'sidetrack run', one by policy):"
records "$work/proxy.jsonl"

say 'Done. The hosts, their rules and every program started here go away with this script.'
