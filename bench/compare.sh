#!/usr/bin/env bash
# Compares two builds of sidetrack: new connections per second of a relay without a handshake and of a SOCKS5 server.
# The builds take turns, and the order is reversed every round; ratios are taken within a round.
#
#   bench/compare.sh OLD NEW [ROUNDS]     paths of two sidetrack programs; 7 rounds by default, 10 s each
#
# Prints a table. Needs root, python3 and a quiet machine; LAB names the laboratory (default: target/dist/sidetrack-lab).
set -euo pipefail
old=$1 new=$2 rounds=${3:-7}
repository=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
lab=${LAB:-$repository/target/dist/sidetrack-lab}
samples=$(mktemp -d)
trap 'rm -rf "$samples"' EXIT

sample() { # ROUND NAME PROGRAM
    # Its bars are about other programs, which are not asked here: the status says nothing.
    SIDETRACK_BIN=$3 "$lab" relay --rounds 1 --work new --only "ours reverse" --only "ours S5" \
        --json "$samples/$1.$2" >/dev/null 2>&1 || true
    [ -s "$samples/$1.$2" ] || { echo "error: no sample of $3" >&2; exit 2; }
}

for ((round = 0; round < rounds; round++)); do
    if ((round % 2 == 0)); then
        sample "$round" old "$old"
        sample "$round" new "$new"
    else
        sample "$round" new "$new"
        sample "$round" old "$old"
    fi
done

python3 - "$samples" "$rounds" <<'PYTHON'
import json, statistics, sys
folder, rounds = sys.argv[1], int(sys.argv[2])
def read(round_, which):
    run = json.load(open(f"{folder}/{round_}.{which}"))
    found = {}
    for series in run["series"]:
        if not series["peer"] in ("ours reverse", "ours S5"):
            continue
        for sample in series["samples"].values():
            report = sample["report"]
            rate = report["requests"] / (report["window_ns"] / 1e9)
            cpu = sample["cpu_ns"] / 1e3 / report["requests"]
            found[series["peer"], series["cell"]["new"]] = rate, cpu, report["p99_ns"] / 1e6
    return found
all_ = [(read(r, "old"), read(r, "new")) for r in range(rounds)]
print("| new connections | old /s | new /s | new / old (quartiles) | CPU, new / old | p99 ms, old | new |")
print("|---|---:|---:|---:|---:|---:|---:|")
ratios = []
def quartiles(values):
    return statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else values * 3
for key in sorted(all_[0][0]):
    both = [(old[key], new[key]) for old, new in all_ if key in old and key in new]
    rate = [new[0] / old[0] for old, new in both]
    ratios += rate
    low, middle, high = quartiles(rate)
    median = lambda side, at: statistics.median(pair[side][at] for pair in both)
    cpu = statistics.median(new[1] / old[1] for old, new in both)
    print(f"| {key[0]} at {key[1]} | {median(0, 0):.0f} | {median(1, 0):.0f} | {middle:.3f} ({low:.3f} to {high:.3f}) "
          f"| {cpu:.3f} | {median(0, 2):.1f} | {median(1, 2):.1f} |")
low, middle, high = quartiles(ratios)
print(f"| all | | | {middle:.3f} ({low:.3f} to {high:.3f}) | | | |")
PYTHON
