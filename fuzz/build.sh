# Builds every fuzz target, for the two scripts beside this one. Source it; it is no program. With `plain=1` without coverage.
#
# The cores have no unsafe code, so the targets need coverage but no sanitizer, and the stable compiler does that:
# neither a nightly nor cargo-fuzz is needed. (`cargo +nightly fuzz run TARGET` works too.)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

host=$(rustc -vV | sed -n 's/^host: //p')
if [ -n "${plain:-}" ]; then
    # Once over the seeds: no search that coverage would guide, so the build may be a quick one.
    built=${CARGO_TARGET_DIR:-target}/fuzz-plain
    CARGO_TARGET_DIR=$built cargo build --locked --quiet
    binaries=$built/debug
else
    built=${CARGO_TARGET_DIR:-target}/fuzz
    coverage="--cfg fuzzing -Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4
      -Cllvm-args=-sanitizer-coverage-inline-8bit-counters -Cllvm-args=-sanitizer-coverage-pc-table
      -Cllvm-args=-sanitizer-coverage-trace-compares -Ccodegen-units=1 -Cdebug-assertions -Coverflow-checks"
    RUSTFLAGS=$(tr -s ' \n' ' ' <<<"$coverage") CARGO_TARGET_DIR=$built \
        cargo build --locked --release --target "$host" --quiet
    binaries=$built/$host/release
fi

# The names of the [[bin]] tables of Cargo.toml.
mapfile -t targets < <(awk '/^\[/ { bin = ($0 == "[[bin]]") } bin && /^name *=/ { gsub(/.*= *"|".*/, ""); print }' Cargo.toml)
[ ${#targets[@]} -gt 0 ] || { echo "error: Cargo.toml names no fuzz target" >&2; exit 1; }
