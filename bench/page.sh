#!/usr/bin/env bash
# Measures what a viewer of the page costs: new connections per second with a viewer of the flows and without. Writes the table to
# bench/PAGE.md. SIDETRACK names the program, ROUNDS how often each row is taken (7). UNTRACED may name the same program built with
# empty functions in live/trace.rs: a third row then shows what the decision trace costs. Needs nginx, ApacheBench (apache2-utils) and curl; about
# two minutes on a quiet machine. It asserts nothing.
set -euo pipefail
repository=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
out=${OUT:-$repository/bench/PAGE.md}
sidetrack=$(realpath "${SIDETRACK:-$repository/target/dist/sidetrack}")
rounds=${ROUNDS:-7}
scratch=$(mktemp -d)
running=()
finish() {
    kill "${running[@]}" 2>/dev/null || true
    rm -rf "$scratch"
}
trap finish EXIT

free_port() { python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])'; }
web=$(free_port)
cat >"$scratch/nginx.conf" <<CONF
daemon off; pid $scratch/pid; error_log $scratch/error; worker_processes 1;
events { worker_connections 1024; }
http { access_log off; server { listen 127.0.0.1:$web backlog=4096; location / { return 200 "well"; } } }
CONF
nginx -c "$scratch/nginx.conf" & running+=($!)

# A node for each program.
declare -A port
node() { # NAME PROGRAM
    port[$1]=$(free_port)
    cat >"$scratch/$1.toml" <<CONF
version = 1
default = "deny"
admin = { socket = "$scratch/$1.sock" }
record = { to = "none" }
[[listen]]
name = "web"
kind = "reverse"
address = "127.0.0.1:${port[$1]}"
to = "127.0.0.1:$web"
[[rule]]
name = "all"
carrier = "direct"
kernel = "never"
CONF
    "$2" up -c "$scratch/$1.toml" >"$scratch/$1.log" 2>&1 & running+=($!)
    until curl -s -o "$scratch/page" "http://127.0.0.1:${port[$1]}/"; do
        kill -0 "${running[-1]}" || { cat "$scratch/$1.log" >&2; exit 1; }
        sleep 0.05
    done
}
node traced "$sidetrack"
rows=("no viewer" "viewer")
if [ -n "${UNTRACED:-}" ]; then
    node untraced "$(realpath "$UNTRACED")"
    rows+=("no trace")
fi

taken() { # ROW
    local viewer= to=${port[traced]}
    [ "$1" != "no trace" ] || to=${port[untraced]}
    if [ "$1" = viewer ]; then
        curl -sN --unix-socket "$scratch/traced.sock" http://localhost/v1/live >"$scratch/live" & viewer=$!
        until [ -s "$scratch/live" ]; do sleep 0.05; done
    fi
    timeout 120 ab -q -n 40000 -c 32 "http://127.0.0.1:$to/" >"$scratch/ab" 2>&1 || { cat "$scratch/ab" >&2; exit 1; }
    grep -q '^Failed requests: *0$' "$scratch/ab" || { cat "$scratch/ab" >&2; exit 1; }
    if [ -n "$viewer" ]; then
        kill "$viewer"
        wait "$viewer" 2>/dev/null || true
    fi
    awk '/^Requests per second/ { print $4 }' "$scratch/ab"
}

for round in $(seq "$rounds"); do
    order=("${rows[@]}")
    if ((round % 2 == 0)); then
        order=()
        for row in "${rows[@]}"; do order=("$row" "${order[@]}"); done
    fi
    for row in "${order[@]}"; do echo "$row|$(taken "$row")"; done
done >"$scratch/taken"

python3 - "$scratch/taken" "$rounds" "$("$sidetrack" --version)" "$(sysctl -n net.ipv4.tcp_congestion_control)" >"$out" <<'PY'
import datetime, os, statistics, sys
taken = {}
for line in open(sys.argv[1]):
    row, figure = line.strip().split("|")
    taken.setdefault(row, []).append(float(figure))
model = next((line.split(": ")[1].strip() for line in open("/proc/cpuinfo") if line.startswith("model name")), "?")
print(f"""# What a viewer of the page costs, measured

Written by `bench/page.sh` (`make bench-page`). {datetime.date.today()}, {sys.argv[3]}, kernel {os.uname().release}, {os.cpu_count()} cores ({model}), congestion control {sys.argv[4]}.
Rows in turn, order reversed every round, {sys.argv[2]} rounds, medians, the spread of the rounds in brackets. ApacheBench asks nginx through a `reverse` listener on loopback: 40,000
requests, each on a new connection, 32 at a time. The viewer reads `GET /v1/live`, as the page does, and draws nothing: a browser on the same two cores would
measure itself.

| | new connections per second | of those without a viewer, round by round |
|---|---:|---:|""")
base = taken["no viewer"]
for row, figures in taken.items():
    ratios = [one / other for one, other in zip(figures, base)]
    print("| %s | %.0f (%.0f to %.0f) | %.3f (%.3f to %.3f) |" % (row, statistics.median(figures), min(figures), max(figures), statistics.median(ratios), min(ratios), max(ratios)))
if "no trace" in taken:
    print("""
*no trace* is the same source with empty functions in `crates/sidetrack/src/live/trace.rs`, and without the questions for `TCP_INFO`.""")
PY
cat "$out"
