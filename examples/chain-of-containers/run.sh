#!/usr/bin/env bash
# Connections to a web server pass two containers, which have no network of their own. One of them is killed, and replaced.
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
source "$here/../topology.sh"
need curl nginx jq podman runc haproxy ldd strip
sidetrack=$(sidetrack_binary)
need_root 'it starts containers and enters their networks'
isolate "$@"

say '1. Three hosts: client - gateway - server.'
for name in client gateway server; do host "$name"; done
wire client 10.89.1.2/24 fd89:1::2/64 gateway 10.89.1.1/24 fd89:1::1/64
wire gateway 10.89.2.1/24 fd89:2::1/64 server 10.89.2.2/24 fd89:2::2/64
web_server server 10.89.2.2:80 'Hello from nginx'
wait_for web server 10.89.2.2 80

say '2. Two images with programs of this machine, and a podman with a storage of its own.'
# The rest of /run is private already. These settings are for machines without systemd; yours may need none.
cat >"$work/containers.conf" <<'CONF'
[containers]
default_ulimits = ["nofile=1024:1024", "nproc=1024:1024"]
[engine]
runtime = "runc"
cgroup_manager = "cgroupfs"
events_logger = "file"
CONF
export CONTAINERS_CONF=$work/containers.conf
engine=(podman --root "$work/images" --runroot "$work/engine")
# image NAME PROGRAM FILE...: the program with its libraries, and files beside it. With a network, you would say `podman pull`.
image() {
    local name=$1 program=$2 root=$work/root-$1 library
    shift 2
    mkdir -p "$root"/{tmp,proc,dev,sys,etc}
    strip -o "$root/program" "$program"
    for library in $(ldd "$program" | grep -o '/[^ ]*'); do install -D "$library" "$root$library"; done
    for file in "$@"; do cp "$file" "$root/"; done
    tar --create --directory "$root" . | "${engine[@]}" import --quiet - "localhost/$name:1" >/dev/null
    echo "    localhost/$name:1"
}
image words "$sidetrack" "$here/words.toml"
image haproxy "$(command -v haproxy)" "$here/haproxy.cfg"
show "podman system service unix://$work/engine.sock"
start engine gateway "${engine[@]}" system service --time=0 "unix://$work/engine.sock"
for ((try = 0; try < 600; try++)); do
    if [ -S "$work/engine.sock" ]; then break; fi
    read -rt 0.1 <> <(:) || true
done
unmount() {
    local status=$?
    "${engine[@]}" rm --all --force --time 0 >/dev/null 2>&1 || true
    umount -l "$work/images/overlay" 2>/dev/null || true
    (exit "$status")
    finish
}

say '3. The gateway starts the containers before the first connection comes.'
show "sidetrack up -c ${here##*/}/gateway.toml"
sed 's/^/    | /' "$here/gateway.toml"
start gateway gateway "$sidetrack" up -c "$here/gateway.toml"
node=${started[-1]}
# The gateway ends first, because it removes its containers by the engine.
stop_gateway() {
    local status=$?
    kill -TERM "$node" 2>/dev/null || true
    wait "$node" 2>/dev/null || true
    (exit "$status")
    unmount
}
trap stop_gateway EXIT
wait_for_lines "$work/gateway.log" 1 ready
show 'podman ps'
"${engine[@]}" ps --format '{{.Image}} {{.Status}}' | sed 's/^/    /'
[ "$("${engine[@]}" ps --quiet | wc -l)" = 2 ] || { cat "$work/gateway.log" >&2; fail 'there should be two containers'; }

say '4. A page passes all three functions. The containers have no interface but their own loopback.'
show 'curl http://10.89.1.1:8080/'
page=$(on client curl -sS --max-time 60 http://10.89.1.1:8080/)
echo "    $page"
[ "$page" = 'Hello from nginx' ] || fail 'the page should have come unchanged'
container=$("${engine[@]}" ps --quiet --filter ancestor=localhost/words:1)
process=$("${engine[@]}" inspect --format '{{.State.Pid}}' "$container")
interfaces=$(nsenter --net="/proc/$process/ns/net" -- ip -brief link | cut -d ' ' -f 1 | paste -s -d ' ')
echo "    interfaces of the container: $interfaces"
[ "$interfaces" = lo ] || fail 'it should have loopback only'
wait_for_lines "$work/gateway.jsonl" 1 '"reason":"ok"'
jq -r '"    the record names the chain: \(.chain | join(", "))"' "$work/gateway.jsonl"
[ "$(jq -r '.chain | join(" ")' "$work/gateway.jsonl")" = 'audit words relay' ] || fail 'the flow should have passed the chain'

say '5. A word that the container does not let pass.'
show "curl --data 'the plan is TOP-SECRET' http://10.89.1.1:8080/"
if on client curl -sS --max-time 60 --data 'the plan is TOP-SECRET' http://10.89.1.1:8080/ 2>"$work/said"; then fail 'the request should have ended'; fi
sed 's/^/    /' "$work/said"
wait_for_lines "$work/gateway.jsonl" 1 '"function_failed"'
jq -r 'select(.reason == "function_failed") | "    the record says: \(.detail)"' "$work/gateway.jsonl"

say '6. A container dies. The gateway replaces it; until then the rule denies.'
show "podman kill ${container:0:12}"
"${engine[@]}" kill --signal KILL "$container" >/dev/null
for ((try = 0; try < 600; try++)); do
    next=$("${engine[@]}" ps --quiet --filter ancestor=localhost/words:1)
    page=$(on client curl -sS --max-time 60 http://10.89.1.1:8080/ 2>/dev/null || true)
    if [ -n "$next" ] && [ "$next" != "$container" ] && [ "$page" = 'Hello from nginx' ]; then break; fi
    read -rt 0.1 <> <(:) || true
done
[ "$page" = 'Hello from nginx' ] || { cat "$work/gateway.log" >&2; fail 'pages should pass again'; }
echo "    another one runs: ${next:0:12}; $page"

say '7. When the gateway stops, it removes its containers.'
kill -TERM "$node"
wait "$node" || { cat "$work/gateway.log" >&2; fail 'the gateway should have stopped well'; }
[ -z "$("${engine[@]}" ps --all --quiet)" ] || fail 'a container is left'
echo '    podman ps --all: none'
say 'Done.'
