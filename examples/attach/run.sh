#!/usr/bin/env bash
# A server that runs already: its outgoing connections are limited and shown, without a restart, and then left alone again.
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
source "$here/../topology.sh"
need curl nginx python3
sidetrack=$(sidetrack_binary)
need_root 'it moves a process into a control group'
isolate "$@"

say '1. A server with an app that downloads for its clients, a registry, and another host.'
for name in server client registry elsewhere; do host "$name"; done
wire server 10.79.0.1/24 fd79::1/64 client 10.79.0.2/24 fd79::2/64
wire server 10.79.1.2/24 fd79:1::2/64 registry 10.79.1.1/24 fd79:1::1/64
wire server 10.79.2.2/24 fd79:2::2/64 elsewhere 10.79.2.1/24 fd79:2::1/64
web_server registry 10.79.1.1:80 'package 1.0'
web_server elsewhere 10.79.2.1:80 'a secret place' elsewhere
start app server python3 "$here/app.py" 10.79.0.1
app=$!
wait_for web registry 10.79.1.1 80
wait_for elsewhere elsewhere 10.79.2.1 80
wait_for app server 10.79.0.1 8000
ask() { on client curl -sS --max-time 60 "http://10.79.0.1:8000/$1"; }
print() { sed 's/^/    /' <<<"$1"; }

say '2. The app reaches both.'
for to in 10.79.1.1:80 10.79.2.1:80; do printed=$(ask $to); print "$printed"; done
[ "$printed" = 'a secret place' ] || fail 'the app should have reached the other host'

say '3. Attached: only the registry. The app is not restarted, and its clients notice nothing else.'
show "sidetrack attach --allow 10.79.1.1:80 --report $app"
start attached server "$sidetrack" attach --allow 10.79.1.1:80 --report "$app"
attached=$!
wait_for_lines "$work/attached.log" 1 'attached to'
printed=$(ask 10.79.1.1:80)
print "$printed"
[ "$printed" = 'package 1.0' ] || fail 'the registry is allowed'
printed=$(ask 10.79.2.1:80)
print "$printed"
[[ $printed == failed:* ]] || fail 'the other host should have been refused'

say '4. Detached, as by Ctrl-C. What was reached and what was refused:'
kill -INT "$attached"
status=0
wait "$attached" || status=$?
print "$(cat "$work/attached.log")"
[ "$status" = 0 ] || fail "the exit code should have been 0, and is $status"
grep -q 'reached 10.79.1.1 (tcp 80) by python' "$work/attached.log" || fail 'the registry should be in the report'
grep -q 'refused 10.79.2.1 (tcp 80) by python' "$work/attached.log" || fail 'the other host should be in the report'

say '5. Everything is as before.'
printed=$(ask 10.79.2.1:80)
print "$printed"
[ "$printed" = 'a secret place' ] || fail 'the app should reach the other host again'
if [ -n "$(on server ip rule show | grep fwmark || true)" ]; then fail 'no rule should be left'; fi
say 'Done: the app ran all the time.'
