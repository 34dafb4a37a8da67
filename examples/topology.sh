# Hosts made of network namespaces, for the examples. This file is to be sourced, not executed.
#
# Everything exists in a separate mount namespace with a private /run. When the script ends in any way, the
# kernel removes the hosts, the wires between them and every program started by `start`. Nothing on this
# machine is changed, and nothing has to be cleaned up.
#
#   isolate "$@"          re-runs the script in separate namespaces (as root, or as an ordinary user if the
#                         kernel allows user namespaces)
#   need_root REASON      ends the script for an ordinary user, with the reason
#   host NAME             a host
#   wire A ADDR4 ADDR6 B ADDR4 ADDR6    joins two hosts; addresses with prefix lengths
#   on HOST CMD...        runs a command there
#   for_this_kernel FILE HOST...    sets `config` to the file, or to a copy for kernels before 6.6
#   start NAME HOST CMD...    runs a program there until the script ends; its output goes to $work/NAME.log
#   wait_for NAME HOST ADDR PORT    returns once a program listens there, or prints the log of NAME and fails
#   wait_for_lines FILE COUNT PATTERN    returns once COUNT lines of the file match, or prints the file and fails
#   say, show, fail       messages of the script to the user
set -euo pipefail
# An ordinary user of Debian does not have them in PATH.
PATH=$PATH:/usr/sbin:/sbin

examples=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
repository=$(dirname "$examples")

say() { printf '\n\033[1m%s\033[0m\n' "$*"; }
show() { printf '  $ %s\n' "$*"; }
fail() { printf 'error: %s\n' "$*" >&2; exit 1; }

# The program under test: $SIDETRACK, otherwise a release build, otherwise a debug build of this repository.
sidetrack_binary() {
    local target=${CARGO_TARGET_DIR:-$repository/target} candidate
    for candidate in "${SIDETRACK:-}" "$target/release/sidetrack" "$target/debug/sidetrack" "$(command -v sidetrack || true)"; do
        if [ -n "$candidate" ] && [ -x "$candidate" ]; then
            printf '%s\n' "$candidate"
            return
        fi
    done
    fail "there is no sidetrack program yet: install the package, run 'cargo build --release', or set SIDETRACK=/path/to/sidetrack"
}

need() {
    local command
    for command in "$@"; do
        command -v "$command" >/dev/null || fail "'$command' is not installed: \
the page $(dirname "$0")/README.md names the packages"
    done
}

# Call it before `isolate`: afterwards every user is root, at least inside a user namespace.
need_root() {
    [ "$(id -u)" = 0 ] || fail "this example needs root: $1. Run it with sudo"
}

# Linux 6.6 has tcx, where BPF programs of the packet engine, the shunt and the wire are attached. SIDETRACK_EXAMPLE_LINUX=6.1
# pretends an older kernel.
has_tcx() {
    [ "$(printf '%s\n' 6.6 "${SIDETRACK_EXAMPLE_LINUX:-$(uname -r)}" | sort -V | head -n 1)" = 6.6 ]
}

# for_this_kernel FILE HOST...: sets `config` to the file. On a kernel without tcx, to a copy with XDP instead, for which it prepares all
# interfaces of these hosts.
for_this_kernel() {
    local name interface
    config=$1
    if has_tcx; then return; fi
    echo "    This kernel has no tcx (Linux 6.6), so XDP does it: io = \"xdp\" of the engine, fast_path = \"xdp\" of the shunt."
    config=$work/${1##*/}
    sed -e 's/io = "packet"/io = "xdp"/' -e 's/^forwarding = .*/&\nfast_path = "xdp"/' -e "s#module = \"#&${1%/*}/#" "$1" >"$config"
    shift
    # XDP programs see checksums as they are, and a veth takes redirected frames only with GRO.
    for name in "$@"; do
        for interface in $(ip -n "$name" -brief link show type veth | cut -d @ -f 1); do
            on "$name" ethtool -K "$interface" tx off gro on >/dev/null
        done
    done
}

isolate() {
    need ip ss unshare nsenter setpriv
    if [ "${SIDETRACK_EXAMPLE_ISOLATED:-}" != yes ]; then
        export SIDETRACK_EXAMPLE_ISOLATED=yes
        if [ "$(id -u)" = 0 ]; then
            exec unshare --mount --net -- "$BASH" "$0" "$@"
        fi
        unshare --user --map-root-user --net true 2>/dev/null || fail "this kernel does not let an ordinary user \
make namespaces: run this script with sudo. ('sidetrack doctor' names the setting that forbids it.)"
        exec unshare --user --map-root-user --mount --net -- "$BASH" "$0" "$@"
    fi
    mount --make-rprivate /
    mount -t tmpfs -o mode=0755 sidetrack-example /run
    mkdir -p /run/netns
    work=/run/example
    mkdir "$work"
    started=()
    trap finish EXIT
    trap 'exit 129' HUP
    trap 'exit 130' INT
    trap 'exit 143' TERM
}

# Ends the started programs, and only those. If this script gets SIGKILL, they end by their parent-death signal.
finish() {
    local status=$? pid
    trap - EXIT
    for pid in "${started[@]}"; do kill -TERM "$pid" 2>/dev/null || true; done
    for pid in "${started[@]}"; do wait "$pid" 2>/dev/null || true; done
    exit "$status"
}

host() {
    ip netns add "$1"
    ip -n "$1" link set lo up
}

wire() {
    local a=$1 a4=$2 a6=$3 b=$4 b4=$5 b6=$6
    ip link add "to-$b" netns "$a" type veth peer name "to-$a" netns "$b"
    ip -n "$a" address add "$a4" dev "to-$b"
    ip -n "$b" address add "$b4" dev "to-$a"
    ip -n "$a" address add "$a6" dev "to-$b" nodad
    ip -n "$b" address add "$b6" dev "to-$a" nodad
    ip -n "$a" link set "to-$b" up
    ip -n "$b" link set "to-$a" up
}

on() {
    local where=$1
    shift
    nsenter --net="/run/netns/$where" -- "$@"
}

start() {
    local name=$1 where=$2
    shift 2
    nsenter --net="/run/netns/$where" -- setpriv --pdeathsig KILL -- "$@" >"$work/$name.log" 2>&1 &
    started+=($!)
}

# Polls, bounded: 600 tries, each at most 0.1 s.
wait_for() {
    local name=$1 where=$2 address=$3 port=$4 try
    for ((try = 0; try < 600; try++)); do
        if [ -n "$(on "$where" ss -Hltn "src $address and sport = :$port")" ]; then return; fi
        read -rt 0.1 <> <(:) || true
    done
    printf '%s did not come up at %s:%s. It wrote:\n' "$name" "$address" "$port" >&2
    cat "$work/$name.log" >&2
    exit 1
}

# The same for lines that are written after an event: records when flows end, the log line of a request after its answer.
wait_for_lines() {
    # Several files in one word, a space between them.
    local file=$1 count=$2 pattern=$3 try lines
    for ((try = 0; try < 600; try++)); do
        lines=$(cat $file 2>/dev/null | grep -c -- "$pattern" || true)
        if [ "${lines:-0}" -ge "$count" ]; then return; fi
        read -rt 0.1 <> <(:) || true
    done
    cat $file >&2 || true
    fail "fewer than $count lines with '$pattern' in $file"
}

# A real nginx that serves one page; its access log has the address of each client.
web_server() {
    local where=$1 address=$2 page=$3 tag=${4:-web}
    local folder="$work/$tag"
    mkdir -p "$folder/html" "$folder/logs"
    printf '%s\n' "$page" >"$folder/html/index.html"
    cat >"$folder/nginx.conf" <<NGINX
user root;
daemon off;
master_process off;
pid $folder/nginx.pid;
error_log stderr warn;
events { worker_connections 64; }
http {
    access_log $folder/logs/access.log;
    client_body_temp_path $folder/logs/body;
    proxy_temp_path $folder/logs/proxy;
    fastcgi_temp_path $folder/logs/fastcgi;
    uwsgi_temp_path $folder/logs/uwsgi;
    scgi_temp_path $folder/logs/scgi;
    default_type text/html;
    server { listen $address; root $folder/html; }
}
NGINX
    start "$tag" "$where" nginx -e stderr -p "$folder" -c "$folder/nginx.conf"
}

# Prints the records of flows, one line each: client, destination, carrier, bytes and reason.
records() {
    if command -v jq >/dev/null; then
        jq -r '(.host // "") as $host | (.orig_dst | startswith($host)) as $same |
            "    \(.client) -> \(if $same then "" else $host + " at " end)\(.orig_dst), by \(.carrier // "no carrier")\n" +
            "      rule \(.rule // "(default)"), caught by \(.intercept), \(.bytes_up) bytes up, " +
            "\(.bytes_down) bytes down, \(.duration_seconds) s, ended: \(.reason)"' "$1"
    else
        sed 's/^/    /' "$1"
    fi
}
