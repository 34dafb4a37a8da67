#!/usr/bin/env bash
# Runs cargo for programs to install: neither paths of this machine nor the time are in them, so two builds are equal wherever they are made.
#
#   packaging/cargo.sh ARGUMENT...
#
# CARGO names another cargo. rustc replaces the beginnings of source paths, which panics name: those of the checkout, of the folder that cargo
# builds in (sources that a build makes), and of cargo's own folder (libraries). C compilers take SOURCE_DATE_EPOCH as the time of the build.
set -euo pipefail
root=$(realpath --strip "$(dirname "${BASH_SOURCE[0]}")/..")
target=$(realpath --strip --canonicalize-missing "${CARGO_TARGET_DIR:-$root/target}")
home=$(realpath --strip --canonicalize-missing "${CARGO_HOME:-${HOME:-/root}/.cargo}")
# The last one that fits is used. A flag may have spaces, so they are separated by a character that none has.
flags=("--remap-path-prefix=$root=/sidetrack" "--remap-path-prefix=$target=/sidetrack/target" "--remap-path-prefix=$home=/cargo")
separator=$'\x1f'
encoded=${CARGO_ENCODED_RUSTFLAGS-$(tr -s ' \n' "$separator" <<<"${RUSTFLAGS:-}")}
encoded=${encoded%"$separator"}
for flag in "${flags[@]}"; do encoded=${encoded:+$encoded$separator}$flag; done
export CARGO_ENCODED_RUSTFLAGS=$encoded
export SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-0}
exec "${CARGO:-cargo}" "$@"
