#!/usr/bin/env bash
# Installs the programs that `sidetrack-lab relay`, `flights`, `idle`, `epi` and `http` compare us and measure with: Debian's packages; in
# $SIDETRACK_PEERS (default ~/.cache/sidetrack/peers) the two versions of socksx from its registry, built by cargo, and Squid with OpenSSL,
# unpacked, because Debian lets only one of its two packages be installed.
# What is there already is left alone. Run as root, or with sudo for the packages.
set -euo pipefail

packages=(httping wrk nginx libnginx-mod-stream haproxy dante-server microsocks redsocks tcpdump nftables iproute2 util-linux
    varnish trafficserver mitmproxy apache2-utils curl openssl squid-common libecap3 libltdl7 libtdb1 libnetfilter-conntrack3)
peers=${SIDETRACK_PEERS:-${XDG_CACHE_HOME:-$HOME/.cache}/sidetrack/peers}
repository=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

missing=()
for package in "${packages[@]}"; do
    dpkg-query --show --showformat='${db:Status-Status}' "$package" 2>/dev/null | grep -q '^installed' || missing+=("$package")
done
if [ "${#missing[@]}" -gt 0 ]; then
    as_root=()
    [ "$(id -u)" = 0 ] || as_root=(sudo)
    "${as_root[@]}" apt-get update
    # No service may start: the lab starts its own, in namespaces.
    DEBIAN_FRONTEND=noninteractive RUNLEVEL=1 "${as_root[@]}" apt-get install --yes --no-install-recommends "${missing[@]}"
fi

# The paper's programs are the examples of 0.1.0; 0.1.1 builds with its own lock file only.
mkdir -p "$peers"
cd "$peers" # away from the repository's toolchain file and lock
export RUSTUP_TOOLCHAIN=${RUSTUP_TOOLCHAIN:-$(cd "$repository" && rustup show active-toolchain 2>/dev/null | cut -d ' ' -f 1)}
[ -n "$RUSTUP_TOOLCHAIN" ] || unset RUSTUP_TOOLCHAIN
[ -x "$peers/socksx-0.1.0/bin/redirector" ] || cargo install socksx --version 0.1.0 \
    --example proxy --example redirector --root "$peers/socksx-0.1.0" --target-dir "$peers/build"
[ -x "$peers/socksx-0.1.1/bin/redirector" ] || cargo install socksx --version 0.1.1 --locked \
    --bin socksx --example redirector --root "$peers/socksx-0.1.1" --target-dir "$peers/build"
rm -rf "$peers/build"
if [ ! -x "$peers/squid-openssl/usr/sbin/squid" ]; then
    rm -rf "$peers/squid-openssl.new"
    mkdir "$peers/squid-openssl.new"
    (cd "$peers/squid-openssl.new" && apt-get download squid-openssl && dpkg-deb --extract squid-openssl_*.deb . && rm squid-openssl_*.deb)
    mv "$peers/squid-openssl.new" "$peers/squid-openssl"
fi
echo "peers are in $peers"
