#!/usr/bin/env bash
# What runs in the guest of crates/lab/kernel/run.sh, as its first process.
source /run/plan
export PATH HOME CARGO_TERM_COLOR=never SIDETRACK_REQUIRE_ALL=0
# What Debian's kernel has; a test that finds it missing fails.
export SIDETRACK_HAS_FLOWTABLES=1
# Where the reviewed snapshots are; insta would ask cargo, which wants to write.
export INSTA_WORKSPACE_ROOT=$repository INSTA_UPDATE=no

prepare() {
    mount -t sysfs sysfs /sys
    mount -t cgroup2 cgroup2 /sys/fs/cgroup
    mkdir -p /dev/shm /dev/pts
    ln -sf /proc/self/fd /dev/fd
    mount -t tmpfs tmpfs /dev/shm
    mount -t devpts devpts /dev/pts
    mount -t tmpfs tmpfs /tmp
    # The modules of this kernel where it looks for them, so that it loads what is asked for by itself.
    mkdir -p /lib/modules
    mount -t tmpfs tmpfs /lib/modules
    mkdir "/lib/modules/$release"
    mount --bind "$modules/$release" "/lib/modules/$release"
    mkdir -p /dev/net
    modprobe -a tun veth bridge nf_tables nf_conntrack nf_conntrack_netlink nft_ct nft_redir nft_nat nft_chain_nat \
        nft_masq nft_tproxy nft_socket nft_flow_offload nf_flow_table_inet nft_reject_inet nft_fib_inet inet_diag tcp_diag ||
        echo "lab-kernel: some modules are missing; what needs them fails"
    ip link set lo up
    cd "$repository" || return
}

# Both kinds of link against what they are asked for and against each other. What needs a fast machine is left out: the guest
# has one slow CPU.
links() {
    "$target/debug/sidetrack-lab" links --links both --quick --only 'round trip' --only loss --only burst \
        --only duplicates --only overtaking --only down --only '10 Mbit' --only queue
}

# Every example, as the user that its page names. In examples/README.md: which of them uses XDP on a kernel without tcx (before Linux 6.6),
# and which one ends there with the advice to install a newer kernel. What it takes here says nothing: the guest is slow.
examples() {
    local page name by expected result failed=0
    for page in examples/*/README.md; do
        name=$(basename "$(dirname "$page")")
        [[ -z $chosen || " $chosen " == *" $name "* ]] || continue
        by=(setpriv --reuid 65534 --regid 65534 --clear-groups)
        ! grep -q "^sudo /usr/share/doc/sidetrack/examples/$name/run.sh" "$page" || by=()
        case $name in
            engine-* | shunt | science-dmz) expected='has no tcx' ;;
            wire) expected='this example needs Linux 6.6' ;;
            *) expected= ;;
        esac
        result=passed
        if ! HOME=/tmp SIDETRACK=$target/debug/sidetrack timeout 900 "${by[@]}" "examples/$name/run.sh" >"/tmp/$name.log" 2>&1; then
            [ "$name" = wire ] || result=FAILED
        fi
        grep -q "$expected" "/tmp/$name.log" || result=FAILED
        [ "$result" = passed ] || { failed=1; cat "/tmp/$name.log"; }
        echo "example $name: $result"
    done
    return "$failed"
}

# Of these the tests with this in their names: what a kernel of 6.1 has and the developers' has not.
declare -A only=([sidetrack/shunt]=flowtable::)

# The namespace tests of the parts that touch the kernel. Their list is written by make lab-kernel.
namespaces() {
    local failed=0 name binary
    while read -r name binary; do
        echo "--- $name"
        # shellcheck disable=SC2086 # nothing is no argument
        (cd "crates/${name%%/*}" && timeout 600 "$binary" --test-threads=1 ${only[$name]:-}) || { failed=1; echo "FAILED: $name"; }
    done <"$target/lab-kernel.tests"
    return "$failed"
}

prepare
jobs=${jobs:-links examples namespaces}
echo "lab-kernel: Linux $(uname -r), jobs: $jobs"
passed=1
for job in $jobs; do
    begun=$SECONDS
    if "$job"; then result=passed; else result=FAILED passed=0; fi
    echo "lab-kernel: $job $result after $((SECONDS - begun)) s of guest time"
done
[ "$passed" = 0 ] || echo "lab-kernel: all jobs passed"
busybox poweroff -f
