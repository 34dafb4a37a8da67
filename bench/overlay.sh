#!/usr/bin/env bash
# Repeats the in-lab evaluation of the seamless-overlays paper and writes it to bench/OVERLAY.md, with the figures as CSV and JSON
# in bench/overlay. Needs root; arguments go to `sidetrack-lab overlay` (--quick: 90 seconds). Ends with an error when a bar
# is missed; the tables are written all the same.
set -euo pipefail
repository=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
lab=${CARGO_TARGET_DIR:-$repository/target}/release/sidetrack-lab
[ -x "$lab" ] || { echo "error: $lab is not there: cargo build --release" >&2; exit 2; }

results=$(mktemp)
trap 'rm -f "$results"' EXIT
cat >"$results" <<'TEXT'
# The overlay, measured

Written by `bench/overlay.sh`: `sidetrack-lab overlay` with the arguments named below.

TEXT
echo "Arguments: ${*:-none}" >>"$results"
echo >>"$results"
status=0
"$lab" overlay --out "$repository/bench/overlay" "$@" | tee -a "$results" || status=$?
[ "$status" -le 1 ] || exit "$status"
cp "$results" "$repository/bench/OVERLAY.md"
exit "$status"
