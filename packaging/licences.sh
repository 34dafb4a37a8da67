#!/usr/bin/env bash
# Prints the licences of all crates that are linked into the program, each text once, with the crates that it covers.
# Input: the file that sbom.jq made, and `cargo metadata` of the same tree.
#
#   packaging/licences.sh SBOM METADATA
set -euo pipefail
sbom=$1 metadata=$2

echo 'Sidetrack is linked with these libraries. Their licences follow.'
echo
declare -A crates=()
texts=$(mktemp -d)
trap 'rm -rf "$texts"' EXIT
while IFS=$'\t' read -r name version licence manifest; do
    echo "$name $version ($licence)"
    folder=$(dirname "$manifest")
    while IFS= read -r file; do
        sum=$(sha256sum <"$file" | cut -c 1-64)
        cp "$file" "$texts/$sum"
        crates[$sum]+="${crates[$sum]:+, }$name $version"
    done < <(find "$folder" -maxdepth 1 -type f \( -iname 'licen[cs]e*' -o -iname 'copying*' -o -iname 'notice*' \) | LC_ALL=C sort)
done < <(jq -r --slurpfile sbom "$sbom" '
    ($sbom[0].components | map({ key: "\(.name) \(.version)", value: true }) | from_entries) as $linked
    | [.packages[] | select($linked["\(.name) \(.version)"] and .source != null)]
    | sort_by(.name, .version)[] | [.name, .version, (.license // "see its text"), .manifest_path] | @tsv' "$metadata")

for sum in $(printf '%s\n' "${!crates[@]}" | LC_ALL=C sort); do
    echo
    echo "==== ${crates[$sum]}"
    echo
    cat "$texts/$sum"
done
