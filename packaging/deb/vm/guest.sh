#!/usr/bin/env bash
# Runs inside the virtual machine of run.sh, as root: what an administrator does with the package, from its installation to its purge.
set -euo pipefail
export DEBIAN_FRONTEND=noninteractive
passed=0
ok() { passed=$((passed + 1)); echo "ok: $*"; }
fail() {
    echo "error: $*"
    journalctl --no-pager --unit sidetrack.service --lines 40 || true
    exit 1
}
# until CONDITION WHAT: waits until the command is true.
until_true() {
    local until=$((SECONDS + 180))
    until eval "$1"; do
        [ "$SECONDS" -lt "$until" ] || { cat /root/flows 2>/dev/null || true; fail "never: $2"; }
        read -rt 0.2 <> <(:) || true
    done
}
main_pid() { systemctl show --property MainPID --value sidetrack.service; }
active() { [ "$(systemctl is-active "${1:-sidetrack.service}")" = active ]; }
# What is not to be changed for good: rules, routes, settings, control groups, users, name servers, units, files of /etc.
state() {
    nft list ruleset
    for family in -4 -6; do ip "$family" rule; ip "$family" route show table all | grep -v ' proto kernel ' || true; done
    ip -brief link
    (cd /sys/fs/cgroup && find . -type d | grep -i sidetrack || true)
    (cd /etc && find . -type f ! -name '*-' ! -name .pwd.lock ! -name .updated -print0 | LC_ALL=C sort -z | xargs -0 sha256sum)
    getent passwd
    systemctl list-unit-files --no-legend | awk '{ print $1, $2 }'
    find /usr /var/lib /var/cache /var/log /run -xdev \( -path /var/lib/dpkg -o -path /var/lib/systemd -o -path /var/log/journal -o -path /run/systemd -o -path /run/udev \) -prune -o \
        -iname '*sidetrack*' ! -path '/var/lib/dpkg/*' -print
}

# Two hosts with this one as the router between them. The server counts: each line has its number, then it closes.
for name in client server; do
    ip netns add "$name"
    ip link add "$name" type veth peer name eth0 netns "$name"
    ip -n "$name" link set lo up
    ip -n "$name" link set eth0 up
    ip link set "$name" up
done
ip addr add 10.80.1.1/24 dev client
ip -n client addr add 10.80.1.2/24 dev eth0
ip addr add 192.0.2.1/24 dev server
ip -n server addr add 192.0.2.2/24 dev eth0
ip -n client route add default via 10.80.1.1
ip -n server route add default via 192.0.2.1
sysctl -qw net.ipv4.ip_forward=1
cat >/root/count.sh <<'SCRIPT'
for ((i = 1; i <= $1; i++)); do echo "$i"; read -rt 0.02 <> <(:) || true; done
SCRIPT
ip netns exec server socat TCP-LISTEN:80,fork,reuseaddr EXEC:'bash /root/count.sh 50' &
ip netns exec server socat TCP-LISTEN:443,fork,reuseaddr EXEC:'bash /root/count.sh 1500' &
listening() { [ "$(ip netns exec server ss -Htln | wc -l)" = 2 ]; }
until_true listening 'the servers listen'
ask() { ip netns exec client timeout 120 socat -u TCP:192.0.2.2:80 STDOUT | tail -n 1; }
[ "$(ask)" = 50 ] || fail 'the router does not forward'

modprobe -a nf_tables nft_tproxy nft_socket nf_tproxy_ipv4 nf_tproxy_ipv6 nft_ct nf_conntrack 2>/dev/null || true
nft add table inet mine && nft add chain inet mine input '{ type filter hook input priority 0; }' && nft add rule inet mine input counter accept
nft -s list ruleset >/dev/null
state | sed 's/counter packets .* bytes [0-9]*/counter/' >/root/before

dpkg --install /root/sidetrack.deb >/root/install.log 2>&1 || { cat /root/install.log; fail 'it cannot be installed'; }
for unit in sidetrack{,-domain,-orchestrator}.{service,socket}; do
    ! active "$unit" || fail "$unit runs after the installation"
    [ "$(systemctl is-enabled "$unit")" = disabled ] || fail "$unit is enabled"
done
systemd-analyze verify /lib/systemd/system/sidetrack*.{service,socket} >/root/verify.log 2>&1 || true
! grep -i sidetrack /root/verify.log || fail 'systemd does not like a unit'
ok "installed: $(sidetrack --version); nothing runs"
systemd-analyze security --no-pager sidetrack.service | tail -n 1

sidetrack init gateway --yes --force --dir /etc/sidetrack >/dev/null
sidetrack check /etc/sidetrack/sidetrack.toml >/dev/null || fail 'init wrote a wrong file'
systemctl enable --now sidetrack.service >/dev/null 2>&1 || fail 'the service does not start'
active || fail 'the service is not active'
[ "$(ask)" = 50 ] || fail 'no answer through the gateway'
seen() { sidetrack flows --recent 20 >/root/flows 2>&1; grep -q '192.0.2.2:80' /root/flows; }
until_true seen 'a flow is listed'
ok 'a gateway of `sidetrack init gateway` runs as a service, and its flow is listed'
[ "$(ps -o user= -p "$(main_pid)")" = sidetrack ] || fail 'it does not run as the user sidetrack'

systemctl reload sidetrack.service
reloaded() { journalctl --unit sidetrack.service --output cat | grep -q "$1"; }
until_true 'reloaded "reloaded"' 'it says that it has reloaded'
cp /etc/sidetrack/sidetrack.toml /root/good.toml
echo 'nonsense = 1' >>/etc/sidetrack/sidetrack.toml
systemctl reload sidetrack.service || true
until_true 'reloaded "nonsense"' 'it says what is wrong with the new file'
active || fail 'a wrong file ended it'
[ "$(ask)" = 50 ] || fail 'no answer after a wrong file'
cp /root/good.toml /etc/sidetrack/sidetrack.toml
ok 'a reload takes effect; one with a wrong file is refused, and the service goes on'

# A crash, and a process that stands still.
old=$(main_pid)
kill -KILL "$old"
fresh() { active && [ "$(main_pid)" != "$old" ] && [ "$(main_pid)" != 0 ]; }
until_true fresh 'it is started again after SIGKILL'
[ "$(ask)" = 50 ] || fail 'no answer after a crash'
ok 'after SIGKILL it is started again'
old=$(main_pid)
kill -STOP "$old"
until_true fresh 'the watchdog ends a process that stands still'
[ "$(ask)" = 50 ] || fail 'no answer after the watchdog'
ok 'the watchdog replaces a process that stands still'

# The sockets of the units: systemd has them while no process runs, and keeps those that a process has opened while it crashes.
systemctl stop sidetrack.service
! active || fail 'it cannot be stopped'
printf 'version = 1\ndefault = "direct"\n' >/etc/sidetrack/sidetrack.toml
for port in 900 1080; do
    printf '[[listen]]\nname = "p%s"\nkind = "reverse"\naddress = "10.80.1.1:%s"\nto = "192.0.2.2:80"\n' "$port" "$port" >>/etc/sidetrack/sidetrack.toml
done
mkdir -p /etc/systemd/system/sidetrack.socket.d /etc/systemd/system/sidetrack.service.d
printf '[Socket]\nListenStream=\nListenStream=10.80.1.1:900\n' >/etc/systemd/system/sidetrack.socket.d/test.conf
# A new process comes late enough to be missed without the sockets.
printf '[Service]\nRestartSec=3s\n' >/etc/systemd/system/sidetrack.service.d/test.conf
systemctl daemon-reload
systemctl start sidetrack.socket || fail 'the socket unit does not start'
ask_at() { ip netns exec client timeout 120 socat -u "TCP:10.80.1.1:$1" STDOUT | tail -n 1; }
[ "$(ask_at 900)" = 50 ] || fail 'a connection to the socket of the unit does not start the service'
active || fail 'the service runs on its socket'
until_true '[ "$(systemctl show --property NFileDescriptorStore --value sidetrack.service)" -gt 0 ]' 'systemd keeps the other listener'
old=$(main_pid)
kill -KILL "$old"
[ "$(ask_at 900)" = 50 ] || fail 'a connection to the socket of the unit is refused after a crash'
old=$(main_pid)
until_true '[ "$(systemctl show --property NFileDescriptorStore --value sidetrack.service)" -gt 0 ]' 'systemd keeps the listener of the next process'
kill -KILL "$old"
[ "$(ask_at 1080)" = 50 ] || fail 'a connection to the kept socket is refused after a crash'
ok 'a connection starts the service, and none is refused after SIGKILL'
systemctl stop sidetrack.socket sidetrack.service
rm -r /etc/systemd/system/sidetrack.socket.d /etc/systemd/system/sidetrack.service.d
cp /root/good.toml /etc/sidetrack/sidetrack.toml
systemctl daemon-reload
systemctl start sidetrack.service || fail 'it does not start again'

# The next version is installed while a long flow runs.
ip netns exec client timeout 300 socat -u TCP:192.0.2.2:443 STDOUT >/root/long &
long=$!
until_true '[ -s /root/long ]' 'the long flow has begun'
old=$(main_pid)
dpkg --install --force-confold /root/next.deb >/root/upgrade.log 2>&1 || { cat /root/upgrade.log; fail 'it cannot be upgraded'; }
until_true fresh 'the new version runs'
wait "$long" || true
[ "$(tail -n 1 /root/long)" = 1500 ] && [ "$(wc -l </root/long)" = 1500 ] || fail "the upgrade cut a flow: it ends with $(tail -n 1 /root/long)"
cmp -s /root/good.toml /etc/sidetrack/sidetrack.toml || fail 'an upgrade changed the configuration'
[ "$(ask)" = 50 ] || fail 'no answer after the upgrade'
ok 'an upgrade of the package goes on with the flows that run'

sidetrack doctor >/root/doctor.log 2>&1 || true
journalctl --unit sidetrack.service | sidetrack bugreport --log - --out /root/report >/root/report.log 2>&1 || { cat /root/report.log; fail 'there is no report'; }
[ -n "$(ls -A /root/report)" ] || fail 'the report is empty'
ok 'doctor and bugreport work'

dpkg --purge sidetrack >/root/purge.log 2>&1 || { cat /root/purge.log; fail 'it cannot be purged'; }
! pgrep -x sidetrack >/dev/null || fail 'a process is left'
[ "$(ask)" = 50 ] || fail 'the router does not forward after the purge'
state | sed 's/counter packets .* bytes [0-9]*/counter/' >/root/after
diff /root/before /root/after || fail 'a purge leaves the above'
ok 'after a purge rules, routes, control groups, users, units and files are as before'
echo "deb-vm: $passed passed, 0 failed"
