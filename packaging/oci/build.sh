#!/usr/bin/env bash
# Makes an OCI image of the static program, without a network and without a container engine: `FROM scratch` with five small files.
#
#   packaging/oci/build.sh ARCHIVE OUT_DIR
#
# ARCHIVE: what packaging/static/build.sh made. It prints the path of the image, which is a tar of the OCI image layout:
# `podman load --input IMAGE`, `skopeo copy oci-archive:IMAGE ...`. Two runs give the same file.
set -euo pipefail
archive=$(realpath "$1")
mkdir -p "$2"
out=$(realpath "$2")
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
export LC_ALL=C TZ=UTC
export SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-$(git log -1 --format=%ct 2>/dev/null || stat -c %Y CHANGELOG.md)}
created=$(date -u -d "@$SOURCE_DATE_EPOCH" +%Y-%m-%dT%H:%M:%SZ)

name=$(basename "$archive" .tar.gz)
read -r version machine < <(sed -n 's/^sidetrack-\(.*\)-\([a-z0-9_]*\)-linux$/\1 \2/p' <<<"$name")
case $machine in
    x86_64) platform=amd64 ;;
    aarch64) platform=arm64 ;;
    *) echo "error: not an archive of packaging/static/build.sh: $archive" >&2; exit 1 ;;
esac
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
user=65532

# The files of the image.
root=$work/root
mkdir -p "$root"/{usr/bin,etc/sidetrack,usr/share/doc/sidetrack,run/sidetrack,var/lib/sidetrack,var/cache/sidetrack,tmp}
tar --extract --gzip --file "$archive" --directory "$work"
install -m 755 "$work/$name/sidetrack" "$root/usr/bin/sidetrack"
install -m 644 "$work/$name/sidetrack.toml" "$root/etc/sidetrack/sidetrack.toml"
install -m 644 "$work/$name"/{LICENSE-APACHE,LICENSE-MIT,sbom.cdx.json,libraries.txt} "$root/usr/share/doc/sidetrack/"
printf 'root:x:0:0:root:/:/sbin/nologin\nsidetrack:x:%s:%s:Sidetrack:/:/sbin/nologin\n' "$user" "$user" >"$root/etc/passwd"
printf 'root:x:0:\nsidetrack:x:%s:\n' "$user" >"$root/etc/group"
find "$root" -type d -exec chmod 755 {} +
chmod 1777 "$root/tmp"
chmod 644 "$root/etc/passwd" "$root/etc/group"

# One layer: files of root, then the folders that the user writes to. The program is readable for all and belongs to root.
archived() { tar --sort=name --numeric-owner --mtime="@$SOURCE_DATE_EPOCH" --format=ustar --directory "$root" "$@"; }
archived --create --owner=0 --group=0 --exclude=./run/sidetrack --exclude=./var/lib/sidetrack --exclude=./var/cache/sidetrack \
    --file "$work/layer.tar" .
archived --append --owner="$user" --group="$user" --file "$work/layer.tar" ./run/sidetrack ./var/lib/sidetrack ./var/cache/sidetrack
layer_id=$(sha256sum <"$work/layer.tar" | cut -c 1-64)
gzip -9n "$work/layer.tar"

# The layout: each part has its SHA-256 as its name.
layout=$work/layout
mkdir -p "$layout/blobs/sha256"
# blob FILE TYPE: stores the file, and prints its descriptor.
blob() {
    local sum size
    sum=$(sha256sum <"$1" | cut -c 1-64)
    size=$(stat -c %s "$1")
    cp "$1" "$layout/blobs/sha256/$sum"
    jq -cnS --arg type "$2" --arg digest "sha256:$sum" --argjson size "$size" '{mediaType: $type, digest: $digest, size: $size}'
}
layer=$(blob "$work/layer.tar.gz" application/vnd.oci.image.layer.v1.tar+gzip)
jq -cnS --arg created "$created" --arg platform "$platform" --arg layer "sha256:$layer_id" --arg version "$version" --arg user "$user:$user" '{
    created: $created, architecture: $platform, os: "linux",
    config: {
        User: $user, Entrypoint: ["/usr/bin/sidetrack"], Cmd: ["up", "--config", "/etc/sidetrack/sidetrack.toml"],
        Env: ["PATH=/usr/bin"], WorkingDir: "/", StopSignal: "SIGTERM",
        Labels: {"org.opencontainers.image.title": "sidetrack", "org.opencontainers.image.version": $version,
            "org.opencontainers.image.licenses": "MIT OR Apache-2.0"}
    },
    rootfs: {type: "layers", diff_ids: [$layer]},
    history: [{created: $created, created_by: "packaging/oci/build.sh"}]
}' >"$work/config.json"
config=$(blob "$work/config.json" application/vnd.oci.image.config.v1+json)
jq -cnS --argjson config "$config" --argjson layer "$layer" \
    '{schemaVersion: 2, mediaType: "application/vnd.oci.image.manifest.v1+json", config: $config, layers: [$layer]}' >"$work/manifest.json"
manifest=$(blob "$work/manifest.json" application/vnd.oci.image.manifest.v1+json)
jq -cnS --argjson manifest "$manifest" --arg platform "$platform" --arg name "localhost/sidetrack:$version" '{
    schemaVersion: 2, mediaType: "application/vnd.oci.image.index.v1+json",
    manifests: [$manifest + {platform: {architecture: $platform, os: "linux"}, annotations: {"org.opencontainers.image.ref.name": $name}}]
}' >"$layout/index.json"
echo '{"imageLayoutVersion":"1.0.0"}' >"$layout/oci-layout"

image=$out/sidetrack-$version-$platform.oci.tar
tar --create --sort=name --owner=0 --group=0 --numeric-owner --mode=u=rwX,go=rX --mtime="@$SOURCE_DATE_EPOCH" --directory "$layout" \
    --file "$image" blobs index.json oci-layout
echo "$image"
