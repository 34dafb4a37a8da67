#!/usr/bin/env bash
# Fuzzes every target for SECONDS (30) from its seeds: fuzz/run.sh [SECONDS] [TARGET...]. What it finds stays in
# corpus/TARGET; an input that crashes is written to artifacts/TARGET, printed, and the script fails.
source "$(dirname "$0")/build.sh"
seconds=${1:-30}
[ $# -lt 2 ] || targets=("${@:2}")
failed=()
for target in "${targets[@]}"; do
    mkdir -p "corpus/$target" "artifacts/$target" "seeds/$target"
    echo "$target: $seconds s"
    timeout $((seconds + 60)) "$binaries/$target" -max_total_time="$seconds" -max_len=70000 -timeout=10 \
        -rss_limit_mb=1024 -artifact_prefix="artifacts/$target/" "corpus/$target" "seeds/$target" \
        >"$built/$target.log" 2>&1 || { failed+=("$target"); tail -n 40 "$built/$target.log"; }
    tail -n 1 "$built/$target.log"
done
[ ${#failed[@]} = 0 ] || { echo "error: crashed: ${failed[*]}; inputs are in fuzz/artifacts" >&2; exit 1; }
