#!/usr/bin/env bash
# One camera, three sites with receivers: an IP multicast stream crosses the overlay. One site leaves the group and joins again.
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
source "$here/../topology.sh"
need socat jq
sidetrack=$(sidetrack_binary)
isolate "$@"

members='north east south'

say '1. A camera, its site, a relay, and three sites with a television each. No host forwards packets.'
for name in camera center relay; do host "$name"; done
wire camera 10.83.1.2/24 fd83:1::2/64 center 10.83.1.1/24 fd83:1::1/64
wire center 10.83.10.1/24 fd83:10::1/64 relay 10.83.10.2/24 fd83:10::2/64
ip -n camera route add default via 10.83.1.1
number=0
for name in $members; do
    number=$((number + 1))
    host "$name"
    host "tv-$name"
    wire relay "10.83.2$number.1/24" "fd83:2$number::1/64" "$name" "10.83.2$number.2/24" "fd83:2$number::2/64"
    wire "$name" "10.83.3$number.1/24" "fd83:3$number::1/64" "tv-$name" "10.83.3$number.2/24" "fd83:3$number::2/64"
    ip -n "tv-$name" route add default via "10.83.3$number.1"
done

say '2. Each television receives the multicast address 239.1.2.3, as if the camera were in its network.'
show 'socat -u UDP4-RECV:5004,ip-add-membership=239.1.2.3:10.83.31.2 -     (on tv-north)'
number=0
for name in $members; do
    number=$((number + 1))
    start "tv-$name" "tv-$name" socat -u "UDP4-RECV:5004,ip-add-membership=239.1.2.3:10.83.3$number.2" -
done

say '3. A key for each node, and all five nodes.'
show 'sidetrack overlay key center.key     (and one for each other node)'
replace=()
for name in center relay $members; do
    key=$("$sidetrack" overlay key "$work/$name.key")
    replace+=(-e "/^\[overlay.node.$name\]/,/^key/s#^key = .*#key = \"$key\"#")
done
for name in center relay $members; do sed "${replace[@]}" "$here/$name.toml" >"$work/$name.toml"; done
grep -A 9 'overlay.group' "$work/center.toml" | sed 's/^/    | /'
start relay relay "$sidetrack" up -c "$work/relay.toml"
wait_for relay relay 0.0.0.0 8100
for name in center $members; do start "$name" "$name" "$sidetrack" up -c "$work/$name.toml"; done

# Returns once the center knows these members, and shows them.
members_are() {
    local try text
    for ((try = 0; try < 600; try++)); do
        text=$(on center "$sidetrack" overlay group ls --admin /run/example/center.sock 2>/dev/null || true)
        if [ "$(grep -o -w -e north -e east -e south <<<"${text##*video}" | sort -u | xargs)" = "$*" ]; then
            show 'sidetrack overlay group ls     (on center)'
            sed 's/^/    /' <<<"$text"
            return
        fi
        read -rt 0.1 <> <(:) || true
    done
    fail "the members should be $*: $text"
}
members_are east north south

# The first packets tell when the links carry packets.
ready() {
    local try
    for ((try = 0; try < 600; try++)); do
        on camera "$BASH" -c 'echo ready >/dev/udp/239.1.2.3/5004'
        read -rt 0.1 <> <(:) || true
        if [ "$(grep -l ready "$work"/tv-*.log | wc -l)" = 3 ]; then return; fi
    done
    fail "$(on center "$sidetrack" overlay status --admin /run/example/center.sock)"
}
ready

say '4. The camera sends a packet of 1,000 bytes every 10 ms to 239.1.2.3.'
show 'for n in {1..}; do printf "packet %d %0990d\n" $n 0 >/dev/udp/239.1.2.3/5004; sleep 0.01; done'
sent_by() { ip -n "$1" -s -j link show "$2" | jq '.[0].stats64.tx.bytes'; }
before=$(sent_by center to-relay)
touch "$work/live"
on camera "$BASH" -c '
    exec 5>/dev/udp/239.1.2.3/5004
    for ((n = 1; n <= 6000 ; n++)); do
        [ -e "$1" ] || break
        printf "packet %d %0990d\n" "$n" 0 >&5
        read -rt 0.01 <> <(:) || true
    done
    echo "$((n - 1))"' bash "$work/live" >"$work/sent" &
stream=$!
count() { grep -c '^packet' "$work/tv-$1.log" || true; }
# Returns once a television has this many packets more than now.
more() {
    wait_for_lines "$work/tv-$1.log" "$(($(count "$1") + $2))" '^packet'
}
for name in $members; do more "$name" 50; done
echo '    all three televisions receive the stream'

say '5. East leaves the group while the stream runs.'
show 'sidetrack overlay group leave video     (on east)'
on east "$sidetrack" overlay group leave --admin /run/example/east.sock video | sed 's/^/    /'
members_are north south
more north 20
left=$(count east)
more north 50
more south 50
[ "$(count east)" = "$left" ] || fail 'east should get nothing more'
echo '    north and south go on; east gets nothing more'

say '6. East joins again.'
show 'sidetrack overlay group join video     (on east)'
on east "$sidetrack" overlay group join --admin /run/example/east.sock video | sed 's/^/    /'
members_are east north south
more east 50
echo '    east receives the stream again'

say '7. What came.'
rm "$work/live"
wait "$stream" || fail 'the stream should have gone on'
sent=$(cat "$work/sent")
for name in north south; do
    wait_for_lines "$work/tv-$name.log" "$sent" '^packet'
    [ "$(grep '^packet' "$work/tv-$name.log" | sort -u | wc -l)" = "$sent" ] || fail "$name: packets are missing"
    [ "$(count "$name")" = "$sent" ] || fail "$name: packets came twice"
done
echo "    the televisions of north and south got all $sent packets, each once"
bytes=$((sent * 1000)) crossed=$(($(sent_by center to-relay) - before))
echo "    the camera sent $bytes bytes, and the center $crossed bytes to the relay: one copy for all members"
[ "$crossed" -lt $((2 * bytes)) ] || fail 'one copy should cross the first link'
say 'Done.'
