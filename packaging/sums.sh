#!/usr/bin/env bash
# Writes SHA256SUMS of all artefacts in a folder, with the commit that they are from. `sha256sum --check SHA256SUMS` checks them.
#
#   packaging/sums.sh FOLDER
set -euo pipefail
export LC_ALL=C
commit=$(git rev-parse HEAD)
[ -z "$(git status --porcelain --untracked-files=no)" ] || commit+=' with changes'
cd "$1"
find . -maxdepth 1 -type f ! -name SHA256SUMS ! -name COMMIT -printf '%P\0' | sort -z | xargs -0 sha256sum >SHA256SUMS
echo "$commit" >COMMIT
sha256sum --check --quiet SHA256SUMS
cat SHA256SUMS
