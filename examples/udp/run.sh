#!/usr/bin/env bash
# UDP of unmodified programs under `sidetrack run`: DNS, a game and QUIC, through a SOCKS5 and a CONNECT-UDP gateway.
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
source "$here/../topology.sh"
need python3 dig
sidetrack=$(sidetrack_binary)
isolate "$@"

say '1. A client, a gateway, and a server behind it with a game, DNS and QUIC.'
for name in client gateway server; do host "$name"; done
wire client 10.78.1.2/24 fd78:1::2/64 gateway 10.78.1.1/24 fd78:1::1/64
wire gateway 10.78.2.1/24 fd78:2::1/64 server 10.78.2.2/24 fd78:2::2/64
start gateway gateway "$sidetrack" up -c "$here/gateway.toml"
wait_for gateway gateway 10.78.1.1 1080
wait_for gateway gateway 10.78.1.1 3128
wait_for_datagrams() {
    local name=$1 port=$2 try
    for ((try = 0; try < 600; try++)); do
        if [ -n "$(on server ss -Hlun "sport = :$port")" ]; then return; fi
        read -rt 0.1 <> <(:) || true
    done
    cat "$work/$name.log" >&2
    fail "$name did not come up at port $port"
}
start servers server python3 "$here/servers.py" 10.78.2.2
wait_for_datagrams servers 5000
wait_for_datagrams servers 5353
# QUIC by ngtcp2, if it is installed: the packages ngtcp2-client and ngtcp2-server.
quic=0
if command -v gtlsserver >/dev/null && command -v gtlsclient >/dev/null && command -v openssl >/dev/null; then
    quic=1
    openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=server \
        -keyout "$work/key.pem" -out "$work/certificate.pem" 2>/dev/null
    mkdir "$work/pages"
    echo 'Hello over QUIC' >"$work/pages/index.html"
    start quic server gtlsserver -q -d "$work/pages" 10.78.2.2 4433 "$work/key.pem" "$work/certificate.pem"
    wait_for_datagrams quic 4433
fi

# The client has no route to the server: only inside the namespace of `run` is every address local.
run_as_client() { on client env -i PATH="$PATH" HOME=/tmp "$sidetrack" run "$@"; }

step=2
for via in socks5://10.78.1.1:1080 http://10.78.1.1:3128; do
    say "$step. Through $via."
    show "sidetrack run --via $via -- dig +short @10.78.2.2 -p 5353 host.example"
    answer=$(run_as_client --via "$via" -- dig +short +tries=10 +time=5 @10.78.2.2 -p 5353 host.example)
    echo "    $answer"
    [ "$answer" = 192.0.2.53 ] || fail 'that is not the answer'
    show "sidetrack run --via $via -- python3 player.py 10.78.2.2"
    answer=$(run_as_client --via "$via" -- python3 "$here/player.py" 10.78.2.2)
    echo "    $answer"
    [ "$answer" = '60 moves, 60 answers' ] || fail 'moves are missing'
    if [ "$quic" = 1 ]; then
        show "sidetrack run --via $via -- gtlsclient 10.78.2.2 4433 https://server/index.html"
        rm -rf "$work/got"
        mkdir "$work/got"
        run_as_client --via "$via" -- gtlsclient -q --exit-on-all-streams-close --download="$work/got" \
            10.78.2.2 4433 https://server/index.html >"$work/client.log" 2>&1 || { cat "$work/client.log"; fail 'QUIC failed'; }
        echo "    $(cat "$work/got/index.html")"
        [ "$(cat "$work/got/index.html")" = 'Hello over QUIC' ] || fail 'that is not the page'
    fi
    step=$((step + 1))
done

say "$step. What the gateway denies is refused: the program sees a closed port."
show 'sidetrack run --via http://10.78.1.1:3128 -- python3 -c "..."   # to 10.78.1.99'
run_as_client --quiet --via http://10.78.1.1:3128 -- python3 -c '
import socket
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
s.settimeout(60)
s.connect(("10.78.1.99", 5000))
s.send(b"hello")
try:
    s.recv(100)
    raise SystemExit(1)
except ConnectionRefusedError as error:
    print("   ", error)
' || fail 'that should have been refused'

say "$((step + 1)). The records of the gateway."
wait_for_lines "$work/gateway.jsonl" $((quic ? 6 : 4)) '"reason":"ok"'
grep '"protocol":"udp"' "$work/gateway.jsonl" >"$work/udp.jsonl"
records "$work/udp.jsonl"
say 'Done: nothing was installed on the client, and nothing is left on it.'
