#!/usr/bin/env bash
# Takes the figures of the packet engine and writes them to bench/ENGINE.md. Needs root; on a quiet machine, arguments go to
# `sidetrack-lab engine` (--quick: 90 seconds). Ends with an error when a bar is missed; the table is written all the same.
set -euo pipefail
repository=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
lab=${CARGO_TARGET_DIR:-$repository/target}/release/sidetrack-lab
[ -x "$lab" ] || { echo "error: $lab is not there: cargo build --release" >&2; exit 2; }

results=$(mktemp)
trap 'rm -f "$results"' EXIT
cat >"$results" <<'TEXT'
# The packet engine

Written by `bench/engine.sh` (`sidetrack-lab engine`). Absolute figures are those of the machine named. A bar that failed says
so.

TEXT
status=0
"$lab" engine "$@" | tee -a "$results" || status=1
cp "$results" "$repository/bench/ENGINE.md"
exit "$status"
