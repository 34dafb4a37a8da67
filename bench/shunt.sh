#!/usr/bin/env bash
# Repeats the measurements of the NFShunt paper and writes them to bench/SHUNT.md, with the figures as JSON and SVG in bench/shunt.
# Needs root. Arguments are parts of `sidetrack-lab shunt` (validate latency tcp small rtt flows events cycles; default all), each measured by
# itself; parts that are not named stay as they were measured last. --quick: all of it once, within 90 seconds, nothing is
# written. Ends with an error when a bar is missed; the tables are written all the same.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/table.sh"
[ "${1:-}" != --quick ] || exec "$lab" shunt --quick

all=(validate latency tcp small rtt flows events cycles)
parts=("$@")
[ $# -gt 0 ] || parts=("${all[@]}")
folder=$repository/bench/shunt
mkdir -p "$folder"
for part in "${parts[@]}"; do
    : >"$results"
    measured shunt --only "$part" --out "$folder"
    cp "$results" "$folder/$part.md"
done
{
    echo "# The shunt, measured"
    echo
    echo "Written by \`bench/shunt.sh\`: \`sidetrack-lab shunt\`, part by part ([what the parts do](../docs/lab.md))."
    for part in "${all[@]}"; do
        [ ! -f "$folder/$part.md" ] || { echo; cat "$folder/$part.md"; }
    done
} >"$results"
kept SHUNT.md
