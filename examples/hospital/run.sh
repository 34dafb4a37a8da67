#!/usr/bin/env bash
# Two hospitals let a research centre read data: an agreement; three domains that each decide for themselves; eight steps to a
# path through functions at both ends, two of them in containers; and a consent that is withdrawn during a transfer.
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
source "$here/../topology.sh"
need curl nginx
sidetrack=$(sidetrack_binary)
isolate "$@"

# Containers need root and an engine. An ordinary user sees everything else: the same two functions inside the proxies.
if grep -q '^ *0 *0 *4294967295$' /proc/self/uid_map; then where=container; else where=inside; fi
start_engine() {
    local root=$work/image library
    need podman runc strip
    mkdir -p "$root"/{tmp,proc,dev,sys,etc}
    strip -o "$root/program" "$sidetrack"
    for library in $(ldd "$sidetrack"); do
        case $library in /*) mkdir -p "$root/$(dirname "$library")" && cp "$library" "$root$library" ;; esac
    done
    cp "$here/functions/audit.toml" "$here/functions/pseudonymise.toml" "$root"
    tar -C "$root" -cf "$work/image.tar" .
    export CONTAINERS_CONF=$work/containers.conf
    printf '%s\n' '[containers]' 'default_ulimits = ["nofile=1024:1024", "nproc=1024:1024"]' '[engine]' 'runtime = "runc"' \
        'cgroup_manager = "cgroupfs"' 'events_logger = "file"' >"$CONTAINERS_CONF"
    podman=(podman --root "$work/storage" --runroot "$work/runroot")
    "${podman[@]}" import --quiet "$work/image.tar" localhost/function:1 >/dev/null
    rm -rf "$root" "$work/image.tar"
    # No engine has an image of this name yet: the orchestrator has the archive of the lab's function, and ships it.
    "${podman[@]}" tag localhost/function:1 localhost/audit:1
    "${podman[@]}" save --quiet --format docker-archive --output "$work/audit.tar" localhost/audit:1 >/dev/null
    "${podman[@]}" untag localhost/function:1 localhost/audit:1
    audit=sha256:$("${podman[@]}" image inspect --format '{{.Id}}' localhost/function:1)
    # It serves until its input ends. That is when this script ends in any way; then nothing of it is left.
    exec {alive}> >(
        trap '' HUP INT TERM
        "${podman[@]}" system service --time=0 "unix://$work/engine.sock" >"$work/engine.log" 2>&1 &
        service=$!
        cat >/dev/null
        "${podman[@]}" rm --all --force --time 0 >/dev/null 2>&1
        kill "$service"
        wait "$service"
    )
    engine=$!
    for ((try = 0; try < 600; try++)); do
        if [ -S "$work/engine.sock" ]; then return; fi
        read -rt 0.1 <> <(:) || true
    done
    fail "podman's service does not answer: $(cat "$work/engine.log")"
}
stop_engine() {
    exec {alive}>&-
    wait "$engine" 2>/dev/null || true
}

say '1. Three domains behind their proxies. Nothing leads from one domain into another.'
for name in wan lucas lucas-db westwal westwal-db radix radix-lab; do host "$name"; done
number=0
for domain in lucas westwal radix; do
    number=$((number + 1))
    inner="$domain-db" last=10
    if [ "$domain" = radix ]; then inner=radix-lab last=20; fi
    wire "$inner" "10.83.$number.$last/24" "fd83:$number::$last/64" "$domain" "10.83.$number.1/24" "fd83:$number::1/64"
    wire "$domain" "10.83.10$number.2/24" "fd83:10$number::2/64" wan "10.83.10$number.1/24" "fd83:10$number::1/64"
    ip -n "$inner" route add default via "10.83.$number.1"
    for other in 1 2 3; do
        if [ "$other" != "$number" ]; then ip -n "$domain" route add "10.83.10$other.0/24" via "10.83.10$number.1"; fi
    done
done
# The lab's packets need a route to be caught; the proxy has no route for them.
ip -n radix route add 10.83.1.0/24 via 10.83.103.1
ip -n radix route add 10.83.2.0/24 via 10.83.103.1
on radix sh -c 'echo 1 >/proc/sys/net/ipv4/ip_forward'
on wan sh -c 'echo 1 >/proc/sys/net/ipv4/ip_forward'
web_server lucas-db 10.83.1.10:8080 'heart rates of ward 4' lucas-data
web_server westwal-db 10.83.2.10:8080 'discharges of J. Jansen' westwal-data
head -c 50000000 /dev/zero >"$work/lucas-data/html/year"
wait_for lucas-data lucas-db 10.83.1.10 8080
wait_for westwal-data westwal-db 10.83.2.10 8080

if [ "$where" = container ]; then
    say '2. Keys, proxies with two functions in containers, agents, and the orchestrator. The proxies know of no agreement yet.'
    start_engine
else
    say '2. Keys, proxies, agents, and the orchestrator. The proxies know of no agreement yet.'
    echo '    (As root you would see the functions audit and pseudonymise in containers; without it they are inside the proxies.)'
fi
"$sidetrack" tunnel ca --out "$work/ca" >/dev/null
for name in orchestrator lucas westwal radix app.radix dpo.lucas; do
    "$sidetrack" tunnel key --name "$name.example" --ca "$work/ca-private.pem" --out "$work/$name.example.pem" >/dev/null
done
head -c 32 /dev/urandom | od -An -v -tx1 | tr -d ' \n' >"$work/bridge.key"
cp "$here"/control/*.toml "$work"
if [ "$where" = container ]; then
    printf '[image."localhost/audit:1"]\narchive = "/run/example/audit.tar"\n' >>"$work/orchestrator.toml"
    sed -i '1i engine = "/run/example/engine.sock"' "$work/domain-radix.toml"
    printf '[image."localhost/audit:1"]\nid = "%s"\n' "$audit" >>"$work/domain-radix.toml"
fi
number=0
for domain in lucas westwal radix; do
    number=$((number + 1))
    echo 'version = 1' >"$work/$domain-policy.toml"
    function=pseudonymise
    if [ "$domain" = radix ]; then function=audit; fi
    cat "$here/proxy-$domain.toml" "$here/functions/$function-$where.toml" >"$work/proxy-$domain.toml"
    start "$domain-proxy" "$domain" "$sidetrack" up -c "$work/proxy-$domain.toml"
    if [ "$domain" = radix ]; then wait_for radix-proxy radix 0.0.0.0 15002
    else wait_for "$domain-proxy" "$domain" "10.83.10$number.2" 4433; fi
    start "$domain-agent" "$domain" "$sidetrack" domain serve -c "$work/domain-$domain.toml"
    wait_for "$domain-agent" "$domain" 0.0.0.0 7444
done
start orchestrator wan "$sidetrack" orchestrate serve -c "$work/orchestrator.toml"
wait_for orchestrator wan 0.0.0.0 7443
as_app=(--at 10.83.103.1:7443 --server-name orchestrator.example --identity "$work/app.radix.example.pem" --ca "$work/ca.pem")

say '3. The lab asks for data, told nothing, and is refused.'
show 'curl http://10.83.1.10:8080/    (in the lab)'
if on radix-lab curl -sS --max-time 60 http://10.83.1.10:8080/; then fail 'nobody has agreed to that'; fi
wait_for_lines "$work/radix.jsonl" 1 '"reason":"policy_denied"'

say '4. What the agreement would take.'
show 'sidetrack policy plan agreement.toml --purpose research --access read'
"$sidetrack" policy plan "$here/control/agreement.toml" --purpose research --access read | sed 's/^/    /'

if [ "$where" = container ]; then
    say '5. The application is submitted: eight steps. The lab lacks the image of its function; the sixth brings it.'
else
    say '5. The application is submitted: eight steps.'
fi
show 'sidetrack orchestrate submit application.toml'
on radix "$sidetrack" orchestrate submit "$here/control/application.toml" "${as_app[@]}" | sed 's/^/    /'

say '6. The same curl again.'
show 'curl http://10.83.1.10:8080/    (in the lab)'
page=$(on radix-lab curl -sS --max-time 60 http://10.83.1.10:8080/)
echo "    $page"
[ "$page" = 'heart rates of ward 4' ] || fail 'that is not the page'
show 'curl http://10.83.2.10:8080/'
page=$(on radix-lab curl -sS --max-time 60 http://10.83.2.10:8080/)
echo "    $page"
[ "$page" = 'discharges of patient 7' ] || fail 'that is not the page without names'
wait_for_lines "$work/radix.jsonl" 2 '"reason":"ok"'
wait_for_lines "$work/westwal.jsonl" 1 '"chain":\["decrypt","pseudonymise"\]'
grep -q '"chain":\["audit","count","encrypt"\]' "$work/radix.jsonl" || fail 'the functions should have been passed'
if [ "$where" = container ]; then
    show 'podman logs sidetrack-audit    (what the function in the container saw)'
    "${podman[@]}" logs "$("${podman[@]}" ps --format '{{.Names}}' --filter name=sidetrack-audit)" 2>/dev/null |
        grep '"orig_dst"' | cut -c 1-160 | sed 's/^/    /' || fail 'the function has seen no flow'
fi

say '7. A transfer runs; then a patient of St. Lucas takes the consent back.'
show 'curl http://10.83.1.10:8080/year >year &     (in the lab)'
on radix-lab curl -sS --max-time 60 --limit-rate 2M http://10.83.1.10:8080/year >"$work/year" 2>"$work/curl.log" &
transfer=$!
started+=("$transfer")
for ((try = 0; try < 600; try++)); do
    if [ "$(stat -c %s "$work/year" 2>/dev/null || echo 0)" -gt 1000000 ]; then break; fi
    read -rt 0.1 <> <(:) || true
done
show 'sidetrack domain consent heart-rates withdrawn    (at St. Lucas)'
on lucas "$sidetrack" domain consent heart-rates withdrawn --at 127.0.0.1:7444 --server-name lucas.example \
    --identity "$work/dpo.lucas.example.pem" --ca "$work/ca.pem" | sed 's/^/    /'
if wait "$transfer"; then fail 'the transfer should have been cut'; fi
echo "    curl: $(tail -1 "$work/curl.log")"
# Both domains end the flow. The first one resets it, and the other may see only that reset.
wait_for_lines "$work/lucas.jsonl $work/radix.jsonl" 1 '"reason":"policy_revoked"'
if on radix-lab curl -sS --max-time 60 http://10.83.1.10:8080/; then fail 'the consent is withdrawn'; fi
show 'curl http://10.83.2.10:8080/    (what Westwal lends goes on)'
page=$(on radix-lab curl -sS --max-time 60 http://10.83.2.10:8080/)
echo "    $page"
[ "$page" = 'discharges of patient 7' ] || fail 'the other data should go on'

say '8. The audit: what was asked, what was said about it, what it passed, how it ended.'
for domain in radix lucas westwal; do
    echo "  $domain:"
    if command -v jq >/dev/null; then
        jq -r '"    \(.client) -> \(.orig_dst): \(.agreement) [\(.chain | join(" -> "))] \(.bytes_down) bytes, \(.reason)"' \
            "$work/$domain.jsonl"
    else
        sed 's/^/    /' "$work/$domain.jsonl"
    fi
done
show 'sidetrack orchestrate ls'
on radix "$sidetrack" orchestrate ls "${as_app[@]}" | sed 's/^/    /'

if [ "$where" = container ]; then
    say 'The containers go with the proxies that started them.'
    for pid in "${started[@]}"; do kill -TERM "$pid" 2>/dev/null || true; done
    for pid in "${started[@]}"; do wait "$pid" 2>/dev/null || true; done
    started=()
    left=$("${podman[@]}" ps --all --format '{{.Names}}')
    stop_engine
    [ -z "$left" ] || fail "containers are left: $left"
fi

say 'Done. The domains, the keys and every program started here go away with this script.'
