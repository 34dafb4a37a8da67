#!/usr/bin/env bash
# Runs every fuzz target over its committed seeds (seeds/TARGET/) once. A target without seeds fails: it would
# show nothing.
plain=1
source "$(dirname "$0")/build.sh"
passed=0 failed=0
for target in "${targets[@]}"; do
    mapfile -t seeds < <(find "seeds/$target" -type f 2>/dev/null | sort)
    if [ ${#seeds[@]} -gt 0 ] && timeout 600 "$binaries/$target" "${seeds[@]}" >"$built/$target.log" 2>&1; then
        echo "$target: ${#seeds[@]} seeds ok"
        passed=$((passed + 1))
    else
        echo "$target: FAILED on ${#seeds[@]} seeds"
        tail -n 30 "$built/$target.log" 2>/dev/null || true
        failed=$((failed + 1))
    fi
done
echo "fuzz replay: $passed passed, $failed failed"
[ "$failed" = 0 ]
