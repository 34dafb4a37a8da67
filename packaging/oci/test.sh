#!/usr/bin/env bash
# Runs the OCI image with podman on hosts made of network namespaces: without any right as a SOCKS proxy, and with NET_ADMIN as a gateway.
#
#   packaging/oci/test.sh IMAGE
#
# Needs root and podman. Images and containers are in a folder of its own, which is removed at the end.
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
source "$here/../../examples/topology.sh"
need curl nginx podman runc
need_root 'podman joins the network namespaces of the test'
export IMAGE=${IMAGE:-$(realpath "$1")}
isolate "$@"
passed=0
ok() { passed=$((passed + 1)); echo "ok: $*"; }

# Engines set limits that a restricted root may not raise; runc and cgroupfs work without systemd.
cat >"$work/containers.conf" <<CONF
[containers]
default_ulimits = ["nofile=1024:1024", "nproc=1024:1024"]
[engine]
runtime = "runc"
cgroup_manager = "cgroupfs"
events_logger = "none"
CONF
export CONTAINERS_CONF=$work/containers.conf
pod=(podman --root "$work/images" --runroot "$work/run" --storage-driver vfs)
containers=()
remove() {
    local status=$? name
    for name in "${containers[@]}"; do "${pod[@]}" rm --force --time 1 "$name" >/dev/null 2>&1 || true; done
    umount -l "$work/images/vfs" 2>/dev/null || true
    (exit "$status")
    finish
}
trap remove EXIT

loaded=$("${pod[@]}" load --quiet --input "$IMAGE")
image=${loaded##*: }
[ "$("${pod[@]}" run --rm --network none "$image" --version | cut -d ' ' -f 1)" = sidetrack ] || fail 'the program of the image does not start'
ok "loaded and started: $image"
size=$(stat -c %s "$IMAGE")
[ "$size" -lt 60000000 ] || fail "the image has $size bytes"
ok "the image has $size bytes"

# contained NAME HOST CONFIG PODMAN_OPTION...: runs a node in the background, in the network of a host. Its output goes to $work/NAME.log.
contained() {
    local name=$1 where=$2 config=$3
    shift 3
    containers+=("$name")
    "${pod[@]}" run --detach --name "$name" --network "ns:/run/netns/$where" --read-only --cap-drop ALL --security-opt no-new-privileges \
        --tmpfs /run/sidetrack:mode=1777 --volume "$config:/etc/sidetrack/sidetrack.toml:ro" "$@" "$image" >/dev/null
}
log() { "${pod[@]}" logs "$1" >"$work/$1.log" 2>&1 || true; }
listens() {
    local name=$1
    wait_for "$@" || { log "$name"; cat "$work/$name.log" >&2; fail "$name did not come up"; }
}

for name in client gateway server; do host "$name"; done
wire client 10.87.1.2/24 fd87:1::2/64 gateway 10.87.1.1/24 fd87:1::1/64
wire gateway 10.87.2.1/24 fd87:2::1/64 server 10.87.2.2/24 fd87:2::2/64
ip -n client route add default via 10.87.1.1
ip -n server route add default via 10.87.2.1
web_server server 10.87.2.2:80 'Hello from nginx'
wait_for web server 10.87.2.2 80

# 1. Without rights: the image's own user, no capability, a read-only root.
cat >"$work/socks.toml" <<TOML
version = 1
default = "deny"
[[listen]]
name = "socks"
kind = "socks"
address = "10.87.1.1:1080"
[[rule]]
name = "web"
match = { from = "10.87.1.0/24", to = "10.87.2.0/24", port = 80 }
carrier = "direct"
TOML
contained socks gateway "$work/socks.toml"
echo >"$work/socks.log"
listens socks gateway 10.87.1.1 1080
process=$("${pod[@]}" inspect --format '{{.State.Pid}}' socks)
grep -q '^CapEff:[[:space:]]*0*$' "/proc/$process/status" || fail 'it has capabilities'
[ "$(awk '/^Uid:/ { print $2 }' "/proc/$process/status")" = 65532 ] || fail 'it runs as another user'
[ "$(on client curl -sS --max-time 60 --proxy socks5h://10.87.1.1:1080 http://10.87.2.2/)" = 'Hello from nginx' ] || fail 'the page did not come'
if on client curl -sS --max-time 60 --proxy socks5h://10.87.1.1:1080 http://10.87.1.1:1080/ >/dev/null 2>&1; then fail 'the rules do not hold'; fi
ok 'as its own user, without any capability: a SOCKS proxy'
"${pod[@]}" stop --time 30 socks >/dev/null
[ "$("${pod[@]}" inspect --format '{{.State.ExitCode}}' socks)" = 0 ] || { log socks; cat "$work/socks.log" >&2; fail 'it did not stop well'; }
ok 'SIGTERM stops it, with exit code 0'

# 2. With NET_ADMIN and NET_RAW: a gateway that steers forwarded connections, and keeps the client's address.
cat >"$work/gateway.toml" <<TOML
version = 1
default = "deny"
user = "root"
[[listen]]
name = "gateway"
kind = "tproxy"
address = "0.0.0.0:15002"
ports = [80]
[[rule]]
name = "web"
match = { to = "10.87.2.0/24", port = 80 }
carrier = "direct"
keep_client_address = true
kernel = "never"
TOML
on gateway sh -c 'echo 1 >/proc/sys/net/ipv4/ip_forward'
contained gateway gateway "$work/gateway.toml" --user 0 --cap-add NET_ADMIN --cap-add NET_RAW
echo >"$work/gateway.log"
listens gateway gateway 0.0.0.0 15002
on gateway nft list tables | grep -q sidetrack || fail 'it installed no rules'
: >"$work/web/logs/access.log"
[ "$(on client curl -sS --max-time 60 http://10.87.2.2/)" = 'Hello from nginx' ] || { log gateway; cat "$work/gateway.log" >&2; fail 'the page did not come'; }
wait_for_lines "$work/web/logs/access.log" 1 '^10\.87\.1\.2 '
ok 'with NET_ADMIN and NET_RAW: a gateway that keeps the client address'
"${pod[@]}" kill --signal KILL gateway >/dev/null
for ((try = 0; try < 600; try++)); do
    if ! on gateway nft list tables | grep -q sidetrack; then break; fi
    read -rt 0.1 <> <(:) || true
done
if on gateway nft list tables | grep -q sidetrack; then fail 'SIGKILL left rules'; fi
ok 'after SIGKILL its rules are gone'
echo "oci: $passed passed, 0 failed"
