#!/usr/bin/env bash
# A gateway whose rules are names. The client knows nothing of it but its name server, and uses any program, over TCP and UDP.
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
source "$here/../topology.sh"
need curl dig nginx socat
sidetrack=$(sidetrack_binary)
isolate "$@"

say '1. A client behind a gateway; a web server and a game server on the other side.'
for name in client gateway server; do host "$name"; done
wire client 10.81.1.2/24 fd81:1::2/64 gateway 10.81.1.1/24 fd81:1::1/64
wire gateway 10.81.2.1/24 fd81:2::1/64 server 10.81.2.2/24 fd81:2::2/64
ip -n client route add default via 10.81.1.1
on gateway sh -c 'echo 1 >/proc/sys/net/ipv4/ip_forward'
web_server server 10.81.2.2:80 'Hello from the shop'
wait_for web server 10.81.2.2 80
start game server socat UDP4-RECVFROM:7000,bind=10.81.2.2,fork EXEC:cat
# Every program of this script asks the gateway for names.
echo 'nameserver 10.81.1.1' >"$work/resolv.conf"
mount --bind "$work/resolv.conf" /etc/resolv.conf

say '2. The gateway: sidetrack up with [dns] and two listeners.'
show 'sidetrack up -c gateway-names/gateway.toml'
start gateway gateway "$sidetrack" up -c "$here/gateway.toml"
wait_for gateway gateway 10.81.1.1 53
wait_for_lines "$work/gateway.log" 1 ': ready'

say '3. The client asks for names, over UDP and TCP. A name that no rule names does not exist.'
ask() { on client dig +tries=1 +time=30 +noall +answer "$@" @10.81.1.1; }
show 'dig www.shop.example'
address=$(ask +short www.shop.example)
echo "    $address"
case $address in 198.18.*) ;; *) fail 'that is no address of 198.18.0.0/15' ;; esac
show 'dig +tcp www.shop.example'
[ "$(ask +tcp +short www.shop.example)" = "$address" ] || fail 'the answer over TCP is another one'
show "dig -x $address"
ask +short -x "$address" | sed 's/^/    /'
show 'dig ads.example'
on client dig +tries=1 +time=30 ads.example @10.81.1.1 >"$work/dig"
grep -o 'status: [A-Z]*' "$work/dig" | sed 's/^/    /'
grep -q 'status: NXDOMAIN' "$work/dig" || fail 'ads.example should not exist'

say '4. Programs use the names.'
show 'curl http://www.shop.example/'
page=$(on client curl -sS --max-time 60 http://www.shop.example/)
echo "    $page"
[ "$page" = 'Hello from the shop' ] || fail 'that is not the page'
show 'curl http://ads.example/'
if on client curl -sS --max-time 60 http://ads.example/; then
    fail 'there should be no such name'
fi
show 'echo move >/dev/udp/game.example/9999'
# bash asks for the name itself. The answer is one datagram of five bytes.
answer=$(on client timeout 60 bash -c 'exec 3<>/dev/udp/game.example/9999; echo move >&3; head -c 5 <&3')
echo "    $answer"
[ "$answer" = move ] || fail 'the game has not answered'

say '5. What the gateway has recorded: names, not addresses.'
kill -TERM "${started[-1]}"
wait "${started[-1]}" || true
grep '^{' "$work/gateway.log" >"$work/records"
records "$work/records"
grep -q '"orig_dst":"www.shop.example:80"' "$work/records" || fail 'there is no record with the name'
grep -q '"orig_dst":"game.example:9999"' "$work/records" || fail 'there is no record of the game'
say 'Done.'
