#!/usr/bin/env bash
# An overlay: a download continues, byte for byte, although the relay that carries it loses its link.
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
source "$here/../topology.sh"
need curl nginx
sidetrack=$(sidetrack_binary)
isolate "$@"

say '1. Five hosts: left - two relays - right - server. No host forwards packets: there is no other way through.'
for name in left relay1 relay2 right server; do host "$name"; done
wire left 10.82.11.1/24 fd82:11::1/64 relay1 10.82.11.2/24 fd82:11::2/64
wire left 10.82.12.1/24 fd82:12::1/64 relay2 10.82.12.2/24 fd82:12::2/64
wire relay1 10.82.21.1/24 fd82:21::1/64 right 10.82.21.2/24 fd82:21::2/64
wire relay2 10.82.22.1/24 fd82:22::1/64 right 10.82.22.2/24 fd82:22::2/64
wire right 10.82.2.1/24 fd82:2::1/64 server 10.82.2.2/24 fd82:2::2/64
# The kernel needs a route before Sidetrack can catch a connection. With two routes, one is left whichever link is cut.
ip -n left route add default via 10.82.11.2 metric 1
ip -n left route add default via 10.82.12.2 metric 2
web_server server 10.82.2.2:80 'Hello from the right site'
head -c 20000000 /dev/urandom >"$work/web/html/large"
wait_for web server 10.82.2.2 80

say '2. A key for each node. The public half of each stands in the table of all nodes.'
show 'sidetrack overlay key left.key     (and one for each other node)'
replace=()
for name in left relay1 relay2 right; do
    key=$("$sidetrack" overlay key "$work/$name.key")
    echo "    $name $key"
    replace+=(-e "/^\[overlay.node.$name\]/,/^key/s#^key = .*#key = \"$key\"#")
done
for name in left relay1 relay2 right; do sed "${replace[@]}" "$here/$name.toml" >"$work/$name.toml"; done
sed 's/^/    | /' "$work/left.toml"

say '3. All four nodes.'
for name in right relay1 relay2 left; do
    start "$name" "$name" "$sidetrack" up -c "$work/$name.toml"
    [ "$name" = left ] || wait_for "$name" "$name" 0.0.0.0 8100
done
wait_for left left 127.0.0.1 15001

# path: waits until left knows a path to right, and puts the relay on it into $relay.
path() { # [NOT-THIS-RELAY]
    local try text
    for ((try = 0; try < 300; try++)); do
        text=$(on left "$sidetrack" overlay path --admin /run/example/left.sock right 2>/dev/null || true)
        relay=$(grep -o 'relay[12]' <<<"$text" | head -n 1 || true)
        if [ -n "$relay" ] && [ "$relay" != "${1:-}" ]; then
            show 'sidetrack overlay path right'
            sed 's/^/    /' <<<"$text"
            return
        fi
        read -rt 0.1 <> <(:) || true
    done
    fail "left knows no path to right: $text"
}
path

say '4. Plain curl downloads 20 MB from the right site. In the middle of it the relay loses its link.'
show 'curl http://10.82.2.2/large'
on left curl -sS --max-time 120 --limit-rate 10M -o "$work/large" http://10.82.2.2/large &
download=$!
for ((try = 0; try < 300; try++)); do
    size=$(stat -c %s "$work/large" 2>/dev/null || echo 0)
    [ "$size" -lt 2000000 ] || break
    read -rt 0.1 <> <(:) || true
done
[ "$size" -lt 20000000 ] || fail 'the download was over before the link was cut'
before=$relay
show "ip link set to-$before down     (on left, after $size bytes)"
ip -n left link set "to-$before" down
wait "$download" || fail 'the download should have gone on'
cmp "$work/large" "$work/web/html/large" || fail '20 MB did not arrive as they were'
echo '    the file arrived byte for byte'
path "$before"

wait_for_lines "$work/left.jsonl" 1 '"reason":"ok"'
echo '  the record of the left node:'
records "$work/left.jsonl"
[ "$(wc -l <"$work/left.jsonl")" = 1 ] || fail 'it should have been one flow'
wait_for_lines "$work/web/logs/access.log" 1 GET
if grep -qv '^10\.82\.2\.1 ' "$work/web/logs/access.log"; then fail 'only the right node should have reached nginx'; fi
say 'Done.'
