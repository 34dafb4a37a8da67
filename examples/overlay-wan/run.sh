#!/usr/bin/env bash
# Two sites and two relays: an ssh session and a UDP stream go on although a link is cut while they run.
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
source "$here/../topology.sh"
need ssh ssh-keygen /usr/sbin/sshd nc
need_root 'sshd changes its user'
sidetrack=$(sidetrack_binary)
isolate "$@"

say '1. Five hosts: left - two relays - right - server. No host forwards packets: there is no other way through.'
for name in left relay1 relay2 right server; do host "$name"; done
wire left 10.82.11.1/24 fd82:11::1/64 relay1 10.82.11.2/24 fd82:11::2/64
wire left 10.82.12.1/24 fd82:12::1/64 relay2 10.82.12.2/24 fd82:12::2/64
wire relay1 10.82.21.1/24 fd82:21::1/64 right 10.82.21.2/24 fd82:21::2/64
wire relay2 10.82.22.1/24 fd82:22::1/64 right 10.82.22.2/24 fd82:22::2/64
wire right 10.82.2.1/24 fd82:2::1/64 server 10.82.2.2/24 fd82:2::2/64
# The address of the left site. The kernel needs a route before Sidetrack can catch anything. With two routes, one is left
# whichever link is cut.
ip -n left address add 10.82.1.1/32 dev lo
ip -n left route add 10.82.2.0/24 via 10.82.11.2 src 10.82.1.1 metric 1
ip -n left route add 10.82.2.0/24 via 10.82.12.2 src 10.82.1.1 metric 2
# The server knows the left site by its address, behind the right node.
ip -n server route add 10.82.1.0/24 via 10.82.2.1

say '2. sshd and a receiver of UDP on the server.'
mkdir -m 0755 /run/sshd
ssh-keygen -q -t ed25519 -N '' -f "$work/host_key"
ssh-keygen -q -t ed25519 -N '' -f "$work/user_key"
cp "$work/user_key.pub" "$work/authorized"
cat >"$work/sshd.conf" <<SSHD
ListenAddress 10.82.2.2:22
HostKey $work/host_key
AuthorizedKeysFile $work/authorized
PidFile $work/sshd.pid
PermitRootLogin prohibit-password
StrictModes no
UsePAM no
SSHD
start sshd server /usr/sbin/sshd -D -e -f "$work/sshd.conf"
wait_for sshd server 10.82.2.2 22
start receiver server nc -u -l 10.82.2.2 5004

say '3. A key for each node, and all four nodes.'
show 'sidetrack overlay key left.key     (and one for each other node)'
replace=()
for name in left relay1 relay2 right; do
    key=$("$sidetrack" overlay key "$work/$name.key")
    replace+=(-e "/^\[overlay.node.$name\]/,/^key/s#^key = .*#key = \"$key\"#")
done
for name in left relay1 relay2 right; do sed "${replace[@]}" "$here/$name.toml" >"$work/$name.toml"; done
grep -A 6 'overlay.packets' "$work/left.toml" | sed 's/^/    | /'
for name in right relay1 relay2 left; do
    start "$name" "$name" "$sidetrack" up -c "$work/$name.toml"
    [ "$name" = left ] || wait_for "$name" "$name" 0.0.0.0 8100
done
wait_for left left 127.0.0.1 15001

# Returns once packets from left to right arrive over both relays.
both_paths() {
    local try
    for ((try = 0; try < 600; try++)); do
        text=$(on left "$sidetrack" overlay path --admin /run/example/left.sock right 2>/dev/null || true)
        if grep -q 'real-time, duplicate' <<<"$text" && grep -q 'left -> relay1' <<<"$text" &&
            grep -q 'left -> relay2' <<<"$text" && ! grep -q 'nothing arrives' <<<"$text"; then
            show 'sidetrack overlay path right'
            sed 's/^/    /' <<<"$text"
            return
        fi
        read -rt 0.1 <> <(:) || true
    done
    fail "packets do not arrive over both relays: $text"
}
both_paths
relay=$(head -n 1 <<<"$text" | grep -o 'relay[12]')

say '4. An ssh session and a UDP stream. In the middle of both, the link in use is cut.'
show 'ssh 10.82.2.2 "for n in {1..60}; do echo line \$n; sleep 0.05; done"'
on left ssh -F none -i "$work/user_key" -o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null -o LogLevel=ERROR \
    root@10.82.2.2 'for n in $(seq 60); do echo line $n; sleep 0.05; done' >"$work/lines" &
session=$!
show 'for n in {1..300}; do echo packet $n >/dev/udp/10.82.2.2/5004; sleep 0.01; done'
on left "$BASH" -c '
    exec 5>/dev/udp/10.82.2.2/5004
    for ((n = 1; n <= 300; n++)); do
        echo "packet $n" >&5
        read -rt 0.01 <> <(:) || true
    done' &
stream=$!
wait_for_lines "$work/lines" 10 line
wait_for_lines "$work/receiver.log" 30 packet
show "ip link set to-$relay down     (on left)"
ip -n left link set "to-$relay" down
wait "$stream" || fail 'the stream should have gone on'
wait "$session" || fail 'the session should have gone on'
[ "$(grep -c '^line' "$work/lines")" = 60 ] || fail 'lines of the session are missing'
echo '    the ssh session printed all of its 60 lines'
wait_for_lines "$work/receiver.log" 300 packet
[ "$(sort -u "$work/receiver.log" | grep -c packet)" = 300 ] || fail 'packets of the stream are missing'
[ "$(grep -c packet "$work/receiver.log")" = 300 ] || fail 'packets came twice'
echo '    the server got all 300 packets, each once'

say '5. What the left node counted.'
show 'sidetrack overlay status'
on left "$sidetrack" overlay status --admin /run/example/left.sock | grep -E '^(spread|real-time)' | sed 's/^/    /'
wait_for_lines "$work/left.jsonl" 1 '"reason":"ok"'
records "$work/left.jsonl"
say 'Done.'
