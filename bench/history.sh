#!/usr/bin/env bash
# How long questions about a stored history take: makes FLOWS flows of 30 days (10 million), has a node make columns of them, and
# asks each question seven times. Prints the table of bench/HISTORY.md. Needs 8 GB of disk and some minutes; SIDETRACK names the
# program, which must be a release build.
set -euo pipefail
cd "$(dirname "$0")/.."
flows=${FLOWS:-10000000}
rounds=7
sidetrack=${SIDETRACK:-target/dist/sidetrack}
folder=$(mktemp -d "${TMPDIR:-/var/tmp}/sidetrack-history.XXXXXX")
node=
trap '[ -z "$node" ] || kill "$node" 2>/dev/null || true; wait; rm -rf "$folder"' EXIT
mkdir -m 700 "$folder/history"
echo 1 >"$folder/history/format"
cat >"$folder/sidetrack.toml" <<TOML
version = 1
default = "deny"
user = "root"
[admin]
socket = "$folder/admin.sock"
[record]
to = "none"
[history]
path = "$folder/history"
max_bytes = 21474836480
keep_days = 365
TOML
echo "making $flows flows" >&2
python3 bench/history/flows.py "$folder/history" "$flows" "$(($(date +%s) - 30 * 86400))"
lines=$(du -sb "$folder/history" | cut -f1)
began=$(date +%s%N)
"$sidetrack" up -c "$folder/sidetrack.toml" 2>"$folder/log" &
node=$!
while [ -n "$(find "$folder/history" -name '0*.ndjson' -print -quit)" ]; do
    kill -0 "$node" || { cat "$folder/log" >&2; exit 1; }
    sleep 0.2
done
made=$((($(date +%s%N) - began) / 1000000))
columns=$(du -sb "$folder/history" | cut -f1)
files=$(find "$folder/history" -name '*.parquet' | wc -l)
ask() { curl -sS -G --unix-socket "$folder/admin.sock" -o "$folder/answer" -w '%{time_total}' "http://admin/v1/history" "$@"; }
row() { # NAME ARGUMENTS...
    local name=$1 times
    shift
    ask "$@" >/dev/null
    times=$(for _ in $(seq "$rounds"); do ask "$@"; echo; done | sort -n)
    printf '| %s | %s | %s | %s |\n' "$name" "$(jq '[(.flows | length), (.groups | length)] | add' "$folder/answer")" \
        "$(sed -n $(((rounds + 1) / 2))p <<<"$times" | awk '{ printf "%.0f", $1 * 1000 }')" \
        "$(tail -n 1 <<<"$times" | awk '{ printf "%.0f", $1 * 1000 }')"
}
echo "$(date -u +%F), Linux $(uname -r), $(nproc) cores. $flows flows in $files files: $((lines / 1000000)) MB as lines, $((columns / 1000000)) MB as \
columns, made in $((made / 1000)) s by a thread of the lowest priority."
echo
echo "| question | flows or sums | ms, median of $rounds | worst |"
echo "|---|---:|---:|---:|"
row "\`host == rare.example\`" --data-urlencode "filter=host == rare.example"
row "\`id == 5000000\`" --data-urlencode "filter=id == 5000000"
row "\`proc == program-7\`, the latest 1000" --data-urlencode "filter=proc == program-7"
row "the latest two hours" --data-urlencode "since=2h"
row "\`host ~ \"*-77.example\" and bytes > 1MiB\`" --data-urlencode 'filter=host ~ "*-77.example" and bytes > 1MiB' --data-urlencode limit=100000
row "\`reason != ok and age > 99s and not port == 22\`" --data-urlencode 'filter=reason != ok and age > 99s and not port == 22' --data-urlencode limit=100000
row "sums by host and process, by bytes" --data-urlencode top=host,process --data-urlencode limit=20
row "sums by rule of \`src in 10.1.0.0/25\`" --data-urlencode top=rule --data-urlencode 'filter=src in 10.1.0.0/25'
