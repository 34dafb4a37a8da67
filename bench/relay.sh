#!/usr/bin/env bash
# Takes the figures of relaying and writes them to bench/RESULTS.md: relay, flights, idle. Needs root; about twenty
# minutes on a quiet machine, arguments go to `sidetrack-lab relay` (--quick: about four). Ends with an error when a
# bar is missed; the table is written all the same.
set -euo pipefail
repository=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
lab=${CARGO_TARGET_DIR:-$repository/target}/release/sidetrack-lab
[ -x "$lab" ] || { echo "error: $lab is not there: cargo build --release" >&2; exit 2; }

results=$(mktemp)
trap 'rm -f "$results"' EXIT
cat >"$results" <<'TEXT'
# Results

Written by `bench/relay.sh`; the commands are `sidetrack-lab relay`, `flights` and `idle`. Absolute figures are those of
the machine named; ratios are taken between slices of the same round. A bar that failed says so.

TEXT
status=0
for command in relay flights idle; do
    arguments=()
    if [ "$command" = relay ]; then arguments=("$@"); fi
    "$lab" "$command" "${arguments[@]}" | tee -a "$results" || status=1
    echo >>"$results"
done
cp "$results" "$repository/bench/RESULTS.md"
exit "$status"
