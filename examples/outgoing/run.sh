#!/usr/bin/env bash
# A service asks for a path to a server, gets a port, and reaches the server through it. The rules decide about each flow.
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
source "$here/../topology.sh"
need curl nginx
sidetrack=$(sidetrack_binary)
isolate "$@"

say '1. Three hosts: worker - proxy - server.'
for name in worker proxy server; do host "$name"; done
wire worker 10.91.1.2/24 fd91:1::2/64 proxy 10.91.1.1/24 fd91:1::1/64
wire proxy 10.91.2.1/24 fd91:2::1/64 server 10.91.2.2/24 fd91:2::2/64
web_server server '10.91.2.2:80; listen 10.91.2.2:81' 'Hello from nginx'
wait_for web server 10.91.2.2 80
start proxy proxy "$sidetrack" up -c "$here/proxy.toml"
wait_for proxy proxy 10.91.1.1 50050

# path ADDRESS: asks for a path; sets `port`.
path() {
    show "curl --json '{\"address\": \"$1\", \"tls\": null}' http://10.91.1.1:50050/outgoing/new"
    port=$(on worker curl -sS --max-time 60 --fail --header 'Content-Type: application/json' \
        --data "{\"address\": \"$1\", \"tls\": null}" http://10.91.1.1:50050/outgoing/new)
    echo "    port $port"
    case $port in 420[0-9]) ;; *) fail 'a port of the range should have come' ;; esac
}

say '2. The worker asks for a path and uses it.'
path http://10.91.2.2:80
first=$port
show "curl http://10.91.1.1:$first/"
page=$(on worker curl -sS --max-time 60 "http://10.91.1.1:$first/")
echo "    $page"
[ "$page" = 'Hello from nginx' ] || fail 'the page should have come'
path http://10.91.2.2:80
[ "$port" = "$first" ] || fail 'the same path should have the same port'

say '3. A path that no rule allows.'
path http://10.91.2.2:81
[ "$port" != "$first" ] || fail 'another path should have another port'
show "curl http://10.91.1.1:$port/"
if on worker curl -sS --max-time 60 "http://10.91.1.1:$port/" 2>"$work/said"; then fail 'nothing should have come'; fi
sed 's/^/    /' "$work/said"

say '4. A path is given back.'
show "curl -X DELETE http://10.91.1.1:50050/outgoing/$first"
on worker curl -sS --max-time 60 --fail -X DELETE "http://10.91.1.1:50050/outgoing/$first"
if on worker curl -sS --max-time 60 "http://10.91.1.1:$first/" 2>"$work/said"; then fail 'the port should be free'; fi
sed 's/^/    /' "$work/said"

wait_for_lines "$work/proxy.jsonl" 2 '"reason"'
echo "  the proxy's records:"
records "$work/proxy.jsonl"
say 'Done.'
