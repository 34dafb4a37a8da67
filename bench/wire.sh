#!/usr/bin/env bash
# Measures flows on the wire (docs/wire.md) beside other ways through a gateway: HAProxy with splice, nginx stream, Sidetrack with splice, DNAT and
# plain routing by the kernel, and a cable without a gateway. Writes the table to bench/WIRE.md. SIDETRACK names the program, ROUNDS how often
# each row is taken (5), SECONDS_EACH how long a transfer takes (4). Needs root, iperf3, haproxy, nginx, nft and ApacheBench. About nine minutes.
#
# With `--part=handover` it measures hand-overs instead, by sidetrack-lab (LAB names the program): how long flows stand still, and 10,000 of them
# under load with loss. With `--part=curve`: which flows are worth one. They write bench/WIRE-handover.md and bench/WIRE-curve.md. Further options go
# to sidetrack-lab.
set -euo pipefail
repository=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
case ${1:-} in
--part=*)
    part=${1#--part=}
    sidetrack=$(realpath "${SIDETRACK:-$repository/target/dist/sidetrack}")
    lab=${LAB:-$(dirname "$sidetrack")/sidetrack-lab}
    SIDETRACK_BIN=$sidetrack exec "$lab" wire --part "$part" --page "${OUT:-$repository/bench/WIRE-$part.md}" "${@:2}"
    ;;
esac
out=${OUT:-$repository/bench/WIRE.md}
if [ "${SIDETRACK_WIRE_BENCH:-}" != yes ]; then
    SIDETRACK_WIRE_BENCH=yes exec unshare --mount --net --propagation private -- "$BASH" "$0" "$@"
fi
sidetrack=$(realpath "${SIDETRACK:-$repository/target/dist/sidetrack}")
rounds=${ROUNDS:-5} seconds=${SECONDS_EACH:-4}
scratch=$(mktemp -d)
chmod 755 "$scratch"
mount -t tmpfs none /run
mkdir -p /run/netns
running=()
# Ends a process, with force after three seconds.
stop() {
    local try
    kill "$1" 2>/dev/null || true
    for ((try = 0; try < 60; try++)); do
        kill -0 "$1" 2>/dev/null || break
        sleep 0.05
    done
    kill -KILL "$1" 2>/dev/null || true
    wait "$1" 2>/dev/null || true
}
finish() {
    for pid in "${running[@]}"; do stop "$pid"; done
    rm -rf "$scratch"
}
trap finish EXIT

# Hosts: a client, a gateway and a server; and a cable between client and server that passes no gateway.
join() { # A ADDRESS B ADDRESS
    ip link add "to-$3" netns "$1" type veth peer name "to-$1" netns "$3"
    ip -n "$1" address add "$2" dev "to-$3"
    ip -n "$3" address add "$4" dev "to-$1"
    ip -n "$1" link set "to-$3" up
    ip -n "$3" link set "to-$1" up
}
on() { local host=$1; shift; nsenter --net="/run/netns/$host" -- "$@"; }
# As `on`, for a program in the background: $! is then the program's own process.
become() { local host=$1; shift; exec nsenter --net="/run/netns/$host" -- "$@"; }
for host in client gateway server; do
    ip netns add "$host"
    ip -n "$host" link set lo up
done
join client 10.85.1.2/24 gateway 10.85.1.1/24
join gateway 10.85.2.1/24 server 10.85.2.2/24
join client 10.85.3.1/24 server 10.85.3.2/24
ip -n client route add 10.85.2.0/24 via 10.85.1.1
ip -n server route add 10.85.1.0/24 via 10.85.2.1
on gateway sh -c 'echo 1 >/proc/sys/net/ipv4/ip_forward'

cat >"$scratch/web.conf" <<CONF
daemon off; pid $scratch/web.pid; error_log $scratch/web.error; worker_processes 1;
events { worker_connections 1024; }
http { access_log off; keepalive_requests 100000000; keepalive_timeout 600;
       server { listen 10.85.2.2:80; listen 10.85.3.2:80; location / { return 200 "well"; } } }
CONF
become server nginx -c "$scratch/web.conf" & running+=($!)
listens() { # HOST PORT
    local try
    for ((try = 0; try < 200; try++)); do
        [ -z "$(on "$1" ss -Hltn "sport = :$2")" ] || return 0
        sleep 0.05
    done
    echo "nothing listens on port $2 of $1" >&2
    cat "$scratch"/*.log >&2
    exit 1
}
listens server 80

# The gateways. Each has a port for iperf3 and one for the web server.
cat >"$scratch/haproxy.cfg" <<CONF
defaults
    mode tcp
    option splice-auto
    timeout connect 5s
    timeout client 60s
    timeout server 60s
listen transfers
    bind 10.85.1.1:5201
    server one 10.85.2.2:5201
listen web
    bind 10.85.1.1:80
    server one 10.85.2.2:80
CONF
cat >"$scratch/stream.conf" <<CONF
$(ls /usr/lib/nginx/modules/ngx_stream_module.so >/dev/null 2>&1 && echo 'load_module /usr/lib/nginx/modules/ngx_stream_module.so;')
daemon off; pid $scratch/stream.pid; error_log $scratch/stream.error; worker_processes 2;
events { worker_connections 1024; }
stream {
    server { listen 10.85.1.1:5201; proxy_pass 10.85.2.2:5201; }
    server { listen 10.85.1.1:80; proxy_pass 10.85.2.2:80; }
}
CONF
node() { # NAME SHUNT
    cat >"$scratch/$1.toml" <<CONF
version = 1
default = "deny"
admin = { socket = "$scratch/$1.sock" }
[[listen]]
name = "transfers"
kind = "reverse"
address = "10.85.1.1:5201"
to = "10.85.2.2:5201"
[[listen]]
name = "web"
kind = "reverse"
address = "10.85.1.1:80"
to = "10.85.2.2:80"
[[rule]]
name = "all"
carrier = "direct"
kernel = "never"
$2
CONF
}
node splice ''
node wire 'shunt = { fast_path = "wire", after_bytes = 4000 }'

gateway=
begin() {
    gateway=
    case $1 in
    haproxy) become gateway setsid haproxy -db -f "$scratch/haproxy.cfg" >"$scratch/row.log" 2>&1 & ;;
    'nginx stream') become gateway setsid nginx -c "$scratch/stream.conf" >"$scratch/row.log" 2>&1 & ;;
    splice | wire) become gateway setsid "$sidetrack" up -c "$scratch/$1.toml" >"$scratch/row.log" 2>&1 & ;;
    dnat)
        on gateway nft -f - <<RULES
table ip bench {
    chain pre { type nat hook prerouting priority -100; ip daddr 10.85.1.1 tcp dport { 80, 5201 } dnat to 10.85.2.2; }
    chain post { type nat hook postrouting priority 100; oifname "to-server" masquerade; }
}
RULES
        return ;;
    *) return ;;
    esac
    gateway=$!
    listens gateway 80 && listens gateway 5201
}
end() {
    if [ "$1" = dnat ]; then on gateway nft delete table ip bench; fi
    [ -z "$gateway" ] || stop "$gateway"
    gateway=
}
where() { case $1 in direct) echo 10.85.3.2 ;; routed) echo 10.85.2.2 ;; *) echo 10.85.1.1 ;; esac; }

# Hundredths of a second that the gateway's processes have worked: those of its session.
worked() {
    [ -n "$gateway" ] || { echo 0; return; }
    cat /proc/[0-9]*/stat 2>/dev/null | sed 's/^[0-9]* (.*) //' | awk -v session="$gateway" '$4 == session { t += $12 + $13 } END { print t + 0 }'
}
# Hundredths of a second that all processors have worked, iperf3 and the kernel included.
busy() { awk '/^cpu / { print $2 + $3 + $4 + $7 + $8 }' /proc/stat; }

transfer() { # ROW STREAMS
    local own all iperf
    become server iperf3 --server --one-off >"$scratch/iperf.log" 2>&1 & iperf=$!
    listens server 5201
    own=$(worked) all=$(busy)
    on client timeout $((seconds + 30)) iperf3 --client "$(where "$1")" --time "$seconds" --parallel "$2" --json >"$scratch/transfer.json" || { cat "$scratch/transfer.json" "$scratch/row.log" >&2; exit 1; }
    stop "$iperf"
    own=$(($(worked) - own)) all=$(($(busy) - all))
    python3 - "$scratch/transfer.json" "$own" "$all" <<'PY'
import json, sys
end = json.load(open(sys.argv[1]))["end"]
received = end["sum_received"]
gigabytes = received["bytes"] / 1e9
print("%.3f|%.4f|%.4f" % (received["bits_per_second"] / 1e9, int(sys.argv[2]) / 100 / gigabytes, int(sys.argv[3]) / 100 / gigabytes))
PY
}
requests() {
    on client timeout 60 ab -q -k -n 60000 -c 16 "http://$(where "$1")/" >"$scratch/ab" 2>&1 || { cat "$scratch/ab" >&2; exit 1; }
    grep -q '^Failed requests: *0$' "$scratch/ab" || { cat "$scratch/ab" >&2; exit 1; }
    awk '/^Requests per second/ { print $4 }' "$scratch/ab"
}

rows=(direct routed dnat haproxy 'nginx stream' splice wire)
for round in $(seq "$rounds"); do
    order=("${rows[@]}")
    if ((round % 2 == 0)); then order=(wire splice 'nginx stream' haproxy dnat routed direct); fi
    for row in "${order[@]}"; do
        begin "$row"
        echo "one|$row|$(transfer "$row" 1)"
        echo "eight|$row|$(transfer "$row" 8)"
        echo "requests|$row|$(requests "$row")"
        end "$row"
    done
done >"$scratch/taken"

python3 - "$scratch/taken" "$rounds" "$seconds" "$("$sidetrack" --version)" "$(sysctl -n net.ipv4.tcp_congestion_control)" >"$out" <<'PY'
import os, statistics, sys, datetime
taken = {}
for line in open(sys.argv[1]):
    cell, row, *figures = line.strip().split("|")
    taken.setdefault((cell, row), []).append([float(figure) for figure in figures])
def median(cell, row, at): return statistics.median(figures[at] for figures in taken[cell, row])
def spread(cell, row, at):
    values = [figures[at] for figures in taken[cell, row]]
    return "%.3g to %.3g" % (min(values), max(values))
model = next((line.split(": ")[1].strip() for line in open("/proc/cpuinfo") if line.startswith("model name")), "?")
print(f"""# Flows on the wire, measured

Written by `bench/wire.sh` (`make bench-wire`). {datetime.date.today()}, {sys.argv[4]}, kernel {os.uname().release}, {os.cpu_count()} cores ({model}), congestion control {sys.argv[5]}.
Client, gateway and server are network namespaces of one host, joined by veth pairs; *direct* is a pair between client and server. Rows in turn, order reversed every
round, {sys.argv[2]} rounds of {sys.argv[3]} s, medians, the spread of the rounds in brackets. *CPU of the gateway*: processor time of the gateway's processes, seconds per 10^9 bytes. *CPU of all*: of the whole
machine, iperf3 and the kernel's work for packets included. Requests: ApacheBench, 16 connections that stay open, 60,000 requests for four bytes.
*wire* takes a flow over after 4,000 bytes, *splice* is the same program without that.

| | one stream, Gbit/s | of direct | CPU of the gateway, s/GB | CPU of all, s/GB | eight streams, Gbit/s | of direct | CPU of the gateway, s/GB | CPU of all, s/GB | requests/s | of DNAT |
|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|""")
for row in ["direct", "routed", "dnat", "haproxy", "nginx stream", "splice", "wire"]:
    cells = [row]
    for cell in ["one", "eight"]:
        rate = median(cell, row, 0)
        cells += ["%.1f (%s)" % (rate, spread(cell, row, 0)), "%.2f" % (rate / median(cell, "direct", 0)), "%.3f" % median(cell, row, 1), "%.3f" % median(cell, row, 2)]
    rate = median("requests", row, 0)
    cells += ["%.0f (%s)" % (rate, spread("requests", row, 0)), "%.2f" % (rate / median("requests", "dnat", 0))]
    print("| " + " | ".join(cells) + " |")
PY
cat "$out"
