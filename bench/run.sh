#!/usr/bin/env bash
# Measures what `sidetrack run` costs: connections held until the server has accepted beside connections accepted at once, and how long
# `run` takes to start. Writes the table to bench/RUN.md. SIDETRACK names the program, ROUNDS how often each row is taken (5).
# Needs nginx and ApacheBench (apache2-utils); about a minute on a quiet machine. It asserts nothing.
set -euo pipefail
repository=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
sidetrack=${SIDETRACK:-$repository/target/dist/sidetrack}
rounds=${ROUNDS:-5}
scratch=$(mktemp -d)
trap 'kill "$server" 2>/dev/null || true; rm -rf "$scratch"' EXIT

port=$(python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
cat >"$scratch/nginx.conf" <<CONF
daemon off; pid $scratch/pid; error_log $scratch/error; worker_processes 1;
events { worker_connections 1024; }
http { access_log off; server { listen 127.0.0.1:$port backlog=4096; location / { return 200 "well"; } } }
CONF
nginx -c "$scratch/nginx.conf" &
server=$!
until curl -s -o "$scratch/page" "http://127.0.0.1:$port/"; do
    kill -0 "$server" || { cat "$scratch/error" >&2; exit 1; }
    sleep 0.05
done

# How the command of each row is started.
rows=("direct" "run --early" "run")
started() {
    case $1 in
    direct) shift && "$@" ;;
    *) local options=${1#run} && shift && "$sidetrack" run $options --quiet -- "$@" ;;
    esac
}

# One figure of ApacheBench: $1 connections at a time, $2 requests, each on its own connection.
requests() {
    started "$3" ab -q -n "$2" -c "$1" "http://127.0.0.1:$port/" >"$scratch/ab" 2>&1 || { cat "$scratch/ab" >&2; exit 1; }
    grep -q '^Failed requests: *0$' "$scratch/ab" || { echo "some failed:" >&2; cat "$scratch/ab" >&2; exit 1; }
    awk '/^Requests per second/ { print $4 }' "$scratch/ab"
}

# Milliseconds that 20 starts take each.
starts() {
    local began
    began=$(date +%s%N)
    for _ in $(seq 20); do "$@"; done
    awk -v ns=$(($(date +%s%N) - began)) 'BEGIN { printf "%.2f\n", ns / 20 / 1e6 }'
}

for round in $(seq "$rounds"); do
    order=("${rows[@]}")
    if ((round % 2 == 0)); then order=("run" "run --early" "direct"); fi
    for row in "${order[@]}"; do
        echo "many|$row|$(requests 32 20000 "$row")"
        echo "one|$row|$(requests 1 3000 "$row")"
    done
    echo "start|direct|$(starts true)"
    echo "start|run|$(starts "$sidetrack" run --quiet -- true)"
    echo "start|run --jail|$(starts "$sidetrack" run --jail --quiet -- true)"
done >"$scratch/taken"

median() { awk -F'|' -v cell="$1" -v row="$2" '$1 == cell && $2 == row { print $3 }' "$scratch/taken" | sort -n | awk '{ v[NR] = $1 } END { print v[int((NR + 1) / 2)] }'; }
ratio() { awk -v a="$1" -v b="$2" 'BEGIN { printf "%.2f", a / b }'; }

{
    cat <<TEXT
# What \`sidetrack run\` costs, measured

Written by \`bench/run.sh\`. $(date +%F), kernel $(uname -r), $(nproc) cores ($(awk -F': ' '/^model name/ { print $2; exit }' /proc/cpuinfo)),
congestion control $(sysctl -n net.ipv4.tcp_congestion_control), load $(cut -d' ' -f1 /proc/loadavg). Rows in turn, order reversed every round, $rounds rounds, medians.
ApacheBench asks nginx on this host's loopback, each time on a new connection: 20,000 requests, 32 at a time; 3,000 requests, one after the
other. A start is that of \`true\`, 20 in a row. \`run\` holds each connection until the server has accepted; \`run --early\` accepts at once.

| | connections/s, 32 at a time | ms for a request, one at a time |
|---|---:|---:|
TEXT
    for row in "${rows[@]}"; do
        one=$(median one "$row")
        printf '| %s | %.0f | %.3f |\n' "$row" "$(median many "$row")" "$(ratio_ms=$(awk -v r="$one" 'BEGIN { print 1000 / r }') && echo "$ratio_ms")"
    done
    printf '\n| start of | ms |\n|---|---:|\n'
    for row in direct run "run --jail"; do printf '| %s | %s |\n' "$row" "$(median start "$row")"; done
    held=$(median one run) early=$(median one "run --early")
    printf '\n| bar | measured | wanted |\n|---|---:|---:|\n'
    printf '| `run`, connections/s of those of `run --early` | %s | at least 0.85 |\n' "$(ratio "$(median many run)" "$(median many "run --early")")"
    printf '| `run`, ms more for a request than `run --early` | %s | at most 0.2 |\n' "$(awk -v h="$held" -v e="$early" 'BEGIN { printf "%.2f", 1000 / h - 1000 / e }')"
    printf '| start of `run --jail -- true`, ms | %s | at most 25 |\n' "$(median start "run --jail")"
} >"$scratch/table"
cp "$scratch/table" "$repository/bench/RUN.md"
cat "$scratch/table"
