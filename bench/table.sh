# Sourced by the scripts beside it: what a file of results is made of.
# shellcheck shell=bash

repository=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
lab=${CARGO_TARGET_DIR:-$repository/target}/dist/sidetrack-lab
[ -x "$lab" ] || { echo "error: $lab is not there: make dist" >&2; exit 2; }

results=$(mktemp)
trap 'rm -f "$results"' EXIT
status=0

# measured COMMAND ARGUMENT...: runs a command of the laboratory into the results. Its 1 says that a bar was missed: the
# tables are kept all the same. Anything else is no measurement.
measured() {
    local code=0
    "$lab" "$@" | tee -a "$results" || code=$?
    [ "$code" -le 1 ] || exit "$code"
    [ "$code" = 0 ] || status=1
}

# kept FILE: keeps the results there and ends the script with what the bars say.
kept() {
    cp "$results" "$repository/bench/$1"
    exit "$status"
}
