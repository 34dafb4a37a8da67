#!/usr/bin/env bash
# Bulk transfers between two data transfer nodes pass a firewall: first a bridge with a fast path of its own, then a bridge beside a switch.
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
source "$here/../topology.sh"
need nft iperf3 jq ethtool ovs-vswitchd ovsdb-server ovsdb-tool ovs-vsctl
sidetrack=$(sidetrack_binary)
need_root 'it loads a BPF program, and starts Open vSwitch'
isolate "$@"

# cable A NAME B NAME: joins two hosts by interfaces of these names. A switch in user space needs finished checksums.
cable() {
    ip link add "$2" netns "$1" type veth peer name "$4" netns "$3"
    on "$1" ethtool -K "$2" tx off >/dev/null
    on "$3" ethtool -K "$4" tx off >/dev/null
    ip -n "$1" link set "$2" up
    ip -n "$3" link set "$4" up
}
# bridge FIREWALL: joins its two interfaces, and shows what they forward to the packet filter.
bridge() {
    # Debian has this part of its kernel as a module, which nothing else asks for.
    [ -e /proc/sys/net/bridge ] || modprobe br_netfilter || fail 'this kernel does not show what a bridge forwards to nftables (br_netfilter)'
    ip -n "$1" link add br0 type bridge
    ip -n "$1" link set to-campus master br0
    ip -n "$1" link set to-remote master br0
    ip -n "$1" link set br0 up
    on "$1" sh -c 'echo 1 >/proc/sys/net/bridge/bridge-nf-call-iptables; echo 1 >/proc/sys/net/netfilter/nf_conntrack_tcp_timeout_time_wait'
    on "$1" nft -f "$here/filter.nft"
}
# node FIREWALL NAME: starts Sidetrack there with NAME.toml as `config` has it, and the rules that it needs.
node() {
    show "sidetrack shunt rules -c ${here##*/}/$2.toml | nft -f -; sidetrack up -c ${here##*/}/$2.toml"
    sed 's/^/    | /' "$config"
    "$sidetrack" shunt rules -c "$config" >"$work/$2.nft"
    on "$1" nft -f "$work/$2.nft"
    start "$2" "$1" "$sidetrack" up -c "$config"
    wait_for_lines "$work/$2.log" 1 ready
}
seen() { on "$1" nft list counter inet firewall seen | grep -o 'bytes [0-9]*' | cut -d ' ' -f 2; }
# transfer FIREWALL CAMPUS REMOTE NAME: 100 MB by iperf3; most of them must not pass the firewall's rules.
transfer() {
    local firewall=$1 campus=$2 remote=$3 name=$4 before list client try passed
    start "iperf-$remote" "$remote" iperf3 --server --one-off --bind 10.90.0.3
    wait_for "iperf-$remote" "$remote" 10.90.0.3 5201
    before=$(seen "$firewall")
    show 'iperf3 --client 10.90.0.3 --bytes 100M --bitrate 160M'
    on "$campus" iperf3 --client 10.90.0.3 --bytes 100M --bitrate 160M --json >"$work/$name.iperf" 2>&1 &
    client=$!
    for ((try = 0; try < 300; try++)); do
        list=$(on "$firewall" "$sidetrack" shunt ls --admin "$work/$name.sock" || true)
        if grep -q '^installed' <<<"$list"; then break; fi
        read -rt 0.1 <> <(:) || true
    done
    show 'sidetrack shunt ls'
    sed 's/^/    /' <<<"$list"
    grep -q '^installed' <<<"$list" || { cat "$work/$name.log" >&2; fail 'the transfer should have moved to the fast path'; }
    wait "$client" || { cat "$work/$name.iperf" >&2; fail 'the transfer should have succeeded'; }
    passed=$(jq '.end.sum_received.bytes' "$work/$name.iperf")
    echo "    $passed bytes arrived at $(jq '.end.sum_received.bits_per_second / 1e6 | floor' "$work/$name.iperf") Mbit/s; the firewall's rules saw $(($(seen "$firewall") - before))"
    [ "$passed" -ge 100000000 ] || fail 'the transfer is not complete'
    [ "$(($(seen "$firewall") - before))" -lt 50000000 ] || fail 'most of the transfer should have taken the fast path'
}
addresses() {
    ip -n "$1" address add 10.90.0.2/24 dev eth0
    ip -n "$2" address add 10.90.0.3/24 dev eth0
}

say '1. Campus - firewall - remote site. The firewall is a bridge with rules.'
for name in campus firewall remote; do host "$name"; done
cable campus eth0 firewall to-campus
cable remote eth0 firewall to-remote
addresses campus remote
bridge firewall
sed 's/^/    | /' "$here/filter.nft"

say '2. Sidetrack on the firewall moves transfers to a program in the kernel (tc).'
for_this_kernel "$here/bridge.toml" campus firewall remote
node firewall bridge
transfer firewall campus remote bridge

say '3. The same with a switch: all cables end in it, and the firewall hangs beside it.'
for name in campus2 firewall2 remote2 switch; do host "$name"; done
cable campus2 eth0 switch fast1
cable remote2 eth0 switch fast2
cable firewall2 to-campus switch slow1
cable firewall2 to-remote switch slow2
cable firewall2 to-switch switch control
addresses campus2 remote2
ip -n firewall2 address add 10.90.77.1/24 dev to-switch
ip -n switch address add 10.90.77.2/24 dev control
bridge firewall2
export OVS_RUNDIR=$work/ovs OVS_LOGDIR=$work/ovs OVS_DBDIR=$work/ovs
mkdir -p "$work/ovs"
ovsdb-tool create "$work/ovs/conf.db" /usr/share/openvswitch/vswitch.ovsschema
start ovsdb switch ovsdb-server "$work/ovs/conf.db" --remote="punix:$work/ovs/db.sock" --unixctl="$work/ovs/db.ctl"
start ovs switch ovs-vswitchd "unix:$work/ovs/db.sock" --unixctl="$work/ovs/ovs.ctl"
vsctl() { on switch ovs-vsctl --timeout=50 --db="unix:$work/ovs/db.sock" "$@"; }
for ((try = 0; try < 600; try++)); do
    if [ -S "$work/ovs/db.sock" ] && [ -S "$work/ovs/ovs.ctl" ]; then break; fi
    read -rt 0.1 <> <(:) || true
done
vsctl add-br sw -- set bridge sw datapath_type=netdev fail_mode=secure protocols='[OpenFlow10,OpenFlow13]'
for port in fast1:49 fast2:50 slow1:10 slow2:11; do
    vsctl add-port sw "${port%:*}" -- set interface "${port%:*}" ofport_request="${port#*:}"
done

say '4. Sidetrack on the firewall programs the switch.'
config=$here/switch.toml
node firewall2 switch
show 'ovs-vsctl set-controller sw tcp:10.90.77.1:6653'
vsctl set-controller sw tcp:10.90.77.1:6653 -- set controller sw connection_mode=out-of-band max_backoff=1000
wait_for_lines "$work/switch.log" 1 'switch'
transfer firewall2 campus2 remote2 switch
say 'Done.'
