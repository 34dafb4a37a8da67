#!/usr/bin/env bash
# A real Prometheus reads the counters of a gateway, and answers how many flows passed, failed and were denied. A real collector
# of flows, nfcapd, gets each of them as IPFIX.
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
source "$here/../topology.sh"
need curl nginx jq prometheus nfcapd nfdump
sidetrack=$(sidetrack_binary)
isolate "$@"

say '1. Four hosts: client - gateway - server, and a host for monitoring.'
for name in client gateway server monitor; do host "$name"; done
wire client 10.88.1.2/24 fd88:1::2/64 gateway 10.88.1.1/24 fd88:1::1/64
wire gateway 10.88.2.1/24 fd88:2::1/64 server 10.88.2.2/24 fd88:2::2/64
wire gateway 10.88.3.1/24 fd88:3::1/64 monitor 10.88.3.2/24 fd88:3::2/64
ip -n client address add 10.88.1.3/24 dev to-gateway
web_server server 10.88.2.2:80 'Hello from nginx'
wait_for web server 10.88.2.2 80

say '2. The gateway has an address for metrics, which the clients cannot reach.'
show "sidetrack up -c ${here##*/}/proxy.toml"
sed 's/^/    | /' "$here/proxy.toml"
start gateway gateway "$sidetrack" up -c "$here/proxy.toml"
wait_for gateway gateway 10.88.1.1 8080
wait_for gateway gateway 10.88.3.1 9465

say '3. A collector of flows listens, and Prometheus reads the gateway once per second.'
show "prometheus --config.file=${here##*/}/prometheus.yml"
sed 's/^/    | /' "$here/prometheus.yml"
start prometheus monitor prometheus --config.file="$here/prometheus.yml" --storage.tsdb.path="$work/prometheus" \
    --web.listen-address=10.88.3.2:9090
wait_for prometheus monitor 10.88.3.2 9090

show 'nfcapd -p 4739 -w flows'
mkdir "$work/flows"
start collector monitor nfcapd -b 10.88.3.2 -p 4739 -t 3600 -w "$work/flows"
collector=${started[-1]}
for ((try = 0; try < 600; try++)); do
    if [ -n "$(on monitor ss -Hlun 'src 10.88.3.2 and sport = :4739')" ]; then break; fi
    read -rt 0.1 <> <(:) || true
done

# ask QUERY: the first value that Prometheus answers; nothing if it has none.
ask() {
    on monitor curl -sS --max-time 60 --get --data-urlencode "query=$1" http://10.88.3.2:9090/api/v1/query | jq -r '.data.result[0].value[1] // ""'
}
# wait_until QUERY VALUE: until Prometheus answers this.
wait_until() {
    local try value
    for ((try = 0; try < 600; try++)); do
        value=$(ask "$1")
        if [ "$value" = "$2" ]; then
            echo "    $1 = $value"
            return
        fi
        read -rt 0.1 <> <(:) || true
    done
    cat "$work/prometheus.log" >&2
    fail "Prometheus answers '$value' to $1, not $2"
}
wait_until 'up{job="sidetrack"}' 1

say '4. Three pages, and two requests from an address that a rule denies.'
show 'curl http://10.88.1.1:8080/'
for _ in 1 2 3; do
    [ "$(on client curl -sS --max-time 60 --interface 10.88.1.2 http://10.88.1.1:8080/)" = 'Hello from nginx' ] || fail 'that is not the page'
done
for _ in 1 2; do
    if on client curl -sS --max-time 60 --interface 10.88.1.3 http://10.88.1.1:8080/ 2>/dev/null; then fail 'the rule should have denied it'; fi
done

say '5. What Prometheus knows.'
wait_until 'sum(sidetrack_flows_total{rule="web",reason="ok"})' 3
wait_until 'sum(sidetrack_flows_total{rule="not-guests",reason="policy_denied"})' 2
bytes=$(ask 'sum(sidetrack_flow_bytes_total{direction="down"})')
echo "    sum(sidetrack_flow_bytes_total{direction=\"down\"}) = $bytes"
[ "$bytes" -gt 51 ] || fail 'three pages are more than that'

say '6. What the collector knows: each flow with the bytes of both directions.'
wait_until 'sidetrack_export_reports_total{to="ipfix"}' 5
kill -TERM "$collector"
wait "$collector" || true
show 'nfdump -R flows -o biline'
nfdump -q -R "$work/flows" -o biline | sed 's/^/    /'
found=$(nfdump -q -R "$work/flows" -o json | jq -s -R '"[\(.)]" | fromjson | map(select(.out_bytes > 17)) | length')
[ "$found" = 3 ] || fail "the collector has $found pages, not 3"

say '7. The rule for alerts in prometheus.yml fires, because a fifth of the flows or more were denied.'
wait_until 'ALERTS{alertname="ManyFlowsDenied",alertstate="firing"}' 1
say 'Done.'
