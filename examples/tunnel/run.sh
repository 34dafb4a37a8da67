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

say '2. The near side joins the far side by an invitation: one line of text, used once.'
cp "$here/far.toml" "$here/near.toml" "$work"
show 'sidetrack tunnel invite near.example --address 10.80.1.1 --to 10.80.2.0/24      (on far)'
start invite far "$sidetrack" tunnel invite near.example -c "$work/far.toml" --address 10.80.1.1 --to 10.80.2.0/24
invite=${started[-1]}
wait_for_lines "$work/invite.log" 1 '^sidetrack1:'
invitation=$(grep -m 1 '^sidetrack1:' "$work/invite.log")
echo "    $invitation"
show 'sidetrack tunnel join sidetrack1:... --name far --to 10.80.2.0/24               (on near)'
on near "$sidetrack" tunnel join "$invitation" -c "$work/near.toml" --name far --to 10.80.2.0/24 | sed 's/^/    /'
wait "$invite" || fail 'the far side should know that the near side has joined'

say '3. Both ends. The commands have made the keys and completed both files.'
sed 's/^/    | /' "$work/far.toml" "$work/near.toml"
start far far "$sidetrack" up -c "$work/far.toml"
wait_for far far 0.0.0.0 4433
start near near "$sidetrack" up -c "$work/near.toml"
wait_for_lines "$work/near.log" 1 ': ready'

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
"$sidetrack" tunnel key --name near.example --out "$work/stranger.pem" >/dev/null
sed -e 's#near.example.pem#stranger.pem#' -e 's#near.sock#stranger.sock#' -e 's#near.jsonl#stranger.jsonl#' \
    -e 's#^kind = "redirect"#kind = "reverse"\naddress = "127.0.0.1:15002"\nto = "10.80.2.2:80"#' -e '/^dst/d' \
    "$work/near.toml" >"$work/stranger.toml"
start stranger near "$sidetrack" up -c "$work/stranger.toml"
wait_for stranger near 127.0.0.1 15002
if on near curl -sS --max-time 60 http://127.0.0.1:15002/; then fail 'the stranger was let in'; fi
wait_for_lines "$work/far.log" 1 'not let in'
wait_for_lines "$work/stranger.jsonl" 1 '"reason":"auth_failed"'

say 'Done. The hosts, the keys and every program started here go away with this script.'
