#!/usr/bin/env bash
# A tunnel: flows of an unmodified curl travel inside one connection that two Sidetracks keep open.
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
source "$here/../topology.sh"
need curl nginx
sidetrack=$(sidetrack_binary)
isolate "$@"

say '1. Three hosts: near - far - server. The far side forwards no packets: there is no other way through.'
for name in near far server; do host "$name"; done
wire near 10.80.1.2/24 fd80:1::2/64 far 10.80.1.1/24 fd80:1::1/64
wire far 10.80.2.1/24 fd80:2::1/64 server 10.80.2.2/24 fd80:2::2/64
ip -n near route add default via 10.80.1.1
web_server server 10.80.2.2:80 'Hello from nginx behind the tunnel'
head -c 5000000 /dev/urandom >"$work/web/html/large"
wait_for web server 10.80.2.2 80

say '2. An authority, and a key for each end.'
show 'sidetrack tunnel ca'
show 'sidetrack tunnel key --name far.example --ca ca-private.pem     (and near.example)'
"$sidetrack" tunnel ca --out "$work/ca" | sed 's/^/    /'
for name in near far; do
    "$sidetrack" tunnel key --name "$name.example" --ca "$work/ca-private.pem" --out "$work/$name.pem" | sed 's/^/    /'
done

say '3. Both ends.'
sed 's/^/    | /' "$here/far.toml" "$here/near.toml"
start far far "$sidetrack" up -c "$here/far.toml"
wait_for far far 10.80.1.1 4433
start near near "$sidetrack" up -c "$here/near.toml"
wait_for near near 127.0.0.1 15001

say '4. Plain curl, told nothing.'
show 'curl http://10.80.2.2/'
on near curl -sS --max-time 60 http://10.80.2.2/ >"$work/page"
echo "    page: $(cat "$work/page")"
grep -q 'behind the tunnel' "$work/page" || fail "that is not nginx's page"
show 'curl http://10.80.2.2/large | cmp - large'
on near curl -sS --max-time 60 http://10.80.2.2/large >"$work/large"
cmp "$work/large" "$work/web/html/large" || fail 'five megabytes did not arrive as they were'
# Over QUIC, or over TLS where the first answer takes longer than a moment.
transport=$(grep -m 1 -o 'transport="[a-z]*"' "$work/near.log") || fail 'the tunnel should have come up'
echo "    the near side says: $transport"

say '5. Who is refused at the far side is told why.'
show 'curl http://10.80.2.3/'
if on near curl -sS --max-time 60 http://10.80.2.3/; then fail 'nobody is there'; fi

for end in near far; do
    wait_for_lines "$work/$end.jsonl" 2 '"reason":"ok"'
    wait_for_lines "$work/$end.jsonl" 1 '"reason":"unreachable"'
    echo "  the records of the $end side:"
    records "$work/$end.jsonl"
done
wait_for_lines "$work/near.jsonl" 1 'the far side says unreachable'
if grep -qv '^10\.80\.2\.1 ' "$work/web/logs/access.log"; then fail 'somebody else than the far side reached nginx'; fi

say '6. A stranger with a key of its own is not let in.'
mkdir "$work/stranger"
"$sidetrack" tunnel ca --out "$work/stranger/ca" >/dev/null
"$sidetrack" tunnel key --name near.example --ca "$work/stranger/ca-private.pem" --out "$work/stranger/near.pem" >/dev/null
sed -e "s#/run/example/near.pem#$work/stranger/near.pem#" -e 's#15001#15002#' -e 's#near.sock#stranger.sock#' \
    -e 's#near.jsonl#stranger.jsonl#' -e 's#^kind = "redirect"#kind = "reverse"\nto = "10.80.2.2:80"#' \
    -e '/^dst\|^ports/d' "$here/near.toml" >"$work/stranger.toml"
start stranger near "$sidetrack" up -c "$work/stranger.toml"
wait_for stranger near 127.0.0.1 15002
if on near curl -sS --max-time 60 http://127.0.0.1:15002/; then fail 'the stranger was let in'; fi
wait_for_lines "$work/far.log" 1 'not let in'
wait_for_lines "$work/stranger.jsonl" 1 '"reason":"auth_failed"'

say 'Done. The hosts, the keys and every program started here go away with this script.'
