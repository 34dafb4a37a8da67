#!/usr/bin/env bash
# Bulk through the packet engine after the decision, when the kernel carries on, against the same path without it: writes
# bench/ENGINE-BULK.md. Needs root, iperf3 and a built `sidetrack`; five rounds take about four minutes (ROUNDS, SECONDS_EACH).
# Ends with an error when the bar is missed; the table is written all the same.
#
# client (10.0.1.1) - router (.254, .254) - server (10.0.2.1), three network namespaces with veth between them, offloads as
# they are. "Routed": the router forwards. "Engine": the client talks to the engine on the router.
set -euo pipefail
repository=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
binary=${SIDETRACK:-${CARGO_TARGET_DIR:-$repository/target}/dist/sidetrack}
[ -x "$binary" ] || { echo "error: $binary is not there: make dist" >&2; exit 2; }
rounds=${ROUNDS:-5} each=${SECONDS_EACH:-3}
folder=$(mktemp -d)
client=bulk-client-$$ router=bulk-router-$$ server=bulk-server-$$
engine=

clean() {
    [ -z "$engine" ] || kill "$engine" 2>/dev/null || true
    for host in $client $router $server; do ip netns del "$host" 2>/dev/null || true; done
    rm -rf "$folder"
}
trap clean EXIT

for host in $client $router $server; do ip netns add "$host"; done
side() { # NAMESPACE NET: a host and the router's interface to it
    ip -n "$router" link add "to-$2" type veth peer name eth0 netns "$1"
    ip -n "$router" addr add "10.0.$2.254/24" dev "to-$2"
    ip -n "$1" addr add "10.0.$2.1/24" dev eth0
    ip -n "$router" link set "to-$2" up
    ip -n "$1" link set eth0 up
    ip -n "$1" route add default via "10.0.$2.254"
}
side "$client" 1
side "$server" 2
ip netns exec "$router" sysctl -qw net.ipv4.ip_forward=1

cat >"$folder/engine.toml" <<TEXT
version = 1
workers = 1
default = "direct"
[[listen]]
kind = "engine"
address = "10.0.1.254:5201"
interfaces = ["to-1", "to-2"]
engine = { sources = ["10.0.2.254"], offload_max = 65536 }
to = "10.0.2.1:5201"
[admin]
socket = "$folder/admin.sock"
[record]
to = "$folder/records"
TEXT
ip netns exec "$router" "$binary" up -c "$folder/engine.toml" >"$folder/log" 2>&1 &
engine=$!
for _ in $(seq 100); do grep -q ready "$folder/log" && break; sleep 0.1; done
grep -q ready "$folder/log" || { cat "$folder/log" >&2; exit 2; }

rate() { # ADDRESS STREAMS [-R]: Gbit/s as the receiver counts them
    ip netns exec "$server" iperf3 -s -1 >"$folder/server" 2>&1 &
    local listening=$!
    for _ in $(seq 100); do ip netns exec "$server" ss -Htln sport = :5201 | grep -q . && break; sleep 0.05; done
    ip netns exec "$client" iperf3 -f m -c "$1" -t "$each" -P "$2" ${3:-} >"$folder/client" 2>&1 || cat "$folder/client" >&2
    wait "$listening" || true
    awk -v sum="$2" '/receiver/ && (sum == 1 || /SUM/) { for (i = 1; i < NF; i++) if ($(i + 1) == "Mbits/sec") rate = $i / 1000 }
        END { printf "%.2f\n", rate }' "$folder/client"
}
median() { sort -n | awk '{ all[NR] = $1 } END { print all[int((NR + 1) / 2)] }'; }

for _ in $(seq "$rounds"); do
    for streams in 1 8; do
        for way in up down; do
            reverse=$([ $way = up ] || echo -R)
            routed=$(rate 10.0.2.1 $streams $reverse)
            through=$(rate 10.0.1.254 $streams $reverse)
            awk -v s=$streams -v w=$way -v a="$routed" -v b="$through" 'BEGIN { print s, w, a, b, (a > 0 ? b / a : 0) }' |
                tee -a "$folder/rows"
        done
    done
done

status=0
{
    echo "# Bulk through the packet engine"
    echo
    echo "Written by \`bench/engine-bulk.sh\`. Kernel $(uname -r), $(nproc) processors, congestion control" \
        "$(sysctl -n net.ipv4.tcp_congestion_control), load $(cut -d' ' -f1 /proc/loadavg) at the end; $rounds rounds of $each s each, in turn;" \
        "medians, the ratio's is that of the rounds' ratios. Bar: 0.95 of routed."
    echo
    echo "| streams | direction | routed, Gbit/s | engine, Gbit/s | ratio (lowest, highest) | bar |"
    echo "|---:|---|---:|---:|---|---|"
    for streams in 1 8; do
        for way in up down; do
            of() { awk -v s=$streams -v w=$way -v n="$1" '$1 == s && $2 == w { print $n }' "$folder/rows"; }
            ratio=$(of 5 | median)
            held=$(awk -v r="$ratio" 'BEGIN { print (r >= 0.95 ? "held" : "missed") }')
            range=$(of 5 | sort -n | awk 'NR == 1 { a = $1 } { b = $1 } END { printf "%.2f, %.2f", a, b }')
            printf '| %s | %s | %s | %s | %.2f (%s) | %s |\n' "$streams" "$way" "$(of 3 | median)" "$(of 4 | median)" "$ratio" "$range" "$held"
        done
    done
} >"$folder/table"
cp "$folder/table" "$repository/bench/ENGINE-BULK.md"
cat "$folder/table"
! grep -q '| missed |' "$folder/table" || status=1
exit $status
