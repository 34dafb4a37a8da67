#!/usr/bin/env bash
# An agent uses a key that it never sees: the service gets it, and another host gets nothing.
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
source "$here/../topology.sh"
need nginx openssl python3
sidetrack=$(sidetrack_binary)
isolate "$@"

say '1. An agent, a service that asks for a key, and another host.'
for name in agent api elsewhere; do host "$name"; done
wire agent 10.79.1.2/24 fd79:1::2/64 api 10.79.1.1/24 fd79:1::1/64
wire agent 10.79.2.2/24 fd79:2::2/64 elsewhere 10.79.2.1/24 fd79:2::1/64
key=sk-live-$(openssl rand -hex 12)
echo "$key" >"$work/key.txt"
printf '127.0.0.1 localhost\n10.79.1.1 api.example\n' >"$work/hosts"
openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 30 -subj /CN=api.example \
    -addext subjectAltName=DNS:api.example -keyout "$work/server.key" -out "$work/server.pem" 2>"$work/openssl.log"
web_server api "10.79.1.1:443 ssl; ssl_certificate $work/server.pem; ssl_certificate_key $work/server.key;
        if (\$http_authorization != \"Bearer $key\") { return 401; } set \$known yes" 'welcome'
web_server elsewhere 10.79.2.1:80 'thank you for the key' elsewhere
wait_for web api 10.79.1.1 443
wait_for elsewhere elsewhere 10.79.2.1 80
cd "$work"
# agent VARIABLE=VALUE... CMD...: the agent, started by CMD.
agent() {
    on agent unshare --mount -- sh -c 'mount --bind hosts /etc/hosts && exec "$@"' - \
        env -i PATH="$PATH" HOME=/tmp "$@" python3 "$here/agent.py" 2>&1 | tee printed | sed 's/^/    /'
}

say '2. With the key in its environment, the agent sends it elsewhere.'
agent API_KEY="$key" SSL_CERT_FILE="$work/server.pem"
grep -q 'service answers: 200 welcome' printed || fail 'the service should have answered'
grep -q "$key" elsewhere/logs/access.log || fail 'the key should have arrived elsewhere'

say '3. With a placeholder: the service gets the key, and elsewhere the placeholder is refused.'
show 'sidetrack run --secret API_KEY=file:key.txt@api.example --trust server.pem -- python3 agent.py'
: >elsewhere/logs/access.log
agent "$sidetrack" run --secret API_KEY=file:key.txt@api.example --trust server.pem --
grep -q 'my key is sidetrack-secret-' printed || fail 'the agent should have a placeholder'
grep -q 'service answers: 200 welcome' printed || fail 'the service should have got the key'
grep -q 'elsewhere answers: 403' printed || fail 'the placeholder should have been refused'
grep -q 'it has the placeholder of API_KEY' printed || fail 'the refusal should have been said'

say '4. In a jail, it reaches the service and nothing else.'
show 'sidetrack run --secret API_KEY=file:key.txt@api.example --trust server.pem --allow 10.79.1.1:443 -- python3 agent.py'
agent "$sidetrack" run --secret API_KEY=file:key.txt@api.example --trust server.pem --allow 10.79.1.1:443 --
grep -q 'service answers: 200 welcome' printed || fail 'the service is allowed'
grep -q 'elsewhere answers: not reached' printed || fail 'the other host is not allowed'
if grep -q "$key" printed; then fail 'the agent must not know the key'; fi
[ ! -s elsewhere/logs/access.log ] || fail 'nothing should have arrived elsewhere'
say 'Done: the agent has worked, and does not know the key.'
