#!/usr/bin/env bash
# Builds the program twice from nothing, with the control plane and without it, and prints the CPU seconds (user and system) of
# each and their ratio. CPU time hardly depends on what else the machine does. Takes about fifteen minutes on two cores.
set -euo pipefail
cd "$(dirname "$0")/.."
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
# Crates are fetched before, so that no download is counted.
cargo fetch --locked --quiet

seconds() {
    local TIMEFORMAT='%U %S'
    { time CARGO_TARGET_DIR=$folder/target cargo build --locked --jobs 2 --quiet "$@" >&2; } 2>"$folder/time"
    awk 'END { printf "%.0f\n", $1 + $2 }' "$folder/time"
    rm -rf "$folder/target"
}

without=$(seconds --no-default-features)
with=$(seconds)
echo "without the control plane: $without s, with it: $with s; ratio $(awk "BEGIN { printf \"%.2f\", $without / $with }")"
