#!/usr/bin/env bash
# The packet engine in front of two LDAP directories: the first request chooses the directory, and a value is rewritten.
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
source "$here/../topology.sh"
need_root 'the packet engine loads BPF programs'
need slapd slapadd ldapsearch jq ethtool
sidetrack=$(sidetrack_binary)
isolate "$@"

say '1. Three hosts: client - proxy - server.'
for name in client proxy server; do host "$name"; done
wire client 10.88.1.2/24 fd88:1::2/64 proxy 10.88.1.1/24 fd88:1::1/64
wire proxy 10.88.2.1/24 fd88:2::1/64 server 10.88.2.2/24 fd88:2::2/64

say '2. Two directories on the server, with one person each.'
# directory NAME PORT: an OpenLDAP server for dc=NAME.
directory() {
    local folder=$work/$1
    mkdir "$folder"
    cat >"$folder/slapd.conf" <<CONF
include /etc/ldap/schema/core.schema
include /etc/ldap/schema/cosine.schema
include /etc/ldap/schema/inetorgperson.schema
pidfile $folder/pid
modulepath /usr/lib/ldap
moduleload back_mdb
database mdb
suffix "dc=$1"
rootdn "cn=admin,dc=$1"
rootpw secret
directory $folder
maxsize 16777216
CONF
    printf 'dn: dc=%s\nobjectClass: domain\ndc: %s\n\ndn: cn=ada,dc=%s\nobjectClass: inetOrgPerson\ncn: ada\nsn: lovelace\nmail: ada@old.%s\n' \
        "$1" "$1" "$1" "$1" >"$folder/entries.ldif"
    slapadd -q -f "$folder/slapd.conf" -l "$folder/entries.ldif"
    start "$1" server slapd -d 0 -h "ldap://10.88.2.2:$2" -f "$folder/slapd.conf"
    wait_for "$1" server 10.88.2.2 "$2"
}
directory first 1389
directory second 2389

say '3. The proxy.'
for_this_kernel "$here/proxy.toml" client proxy server
show "sidetrack up -c ${here##*/}/proxy.toml"
sed 's/^/    | /' "$config"
start proxy proxy "$sidetrack" up -c "$config"
# The engine has no listening socket: it says when it is ready.
wait_for_lines "$work/proxy.log" 1 ': ready'

# search BASE [OPTION...]: prints the mail address that the search brings.
search() {
    local base=$1
    shift
    show "ldapsearch -H ldap://10.88.1.1 -b $base $*"
    mail=$(on client ldapsearch -LLL -x -o nettimeout=60 -H ldap://10.88.1.1 -b "$base" "$@" '(cn=ada)' mail | sed -n 's/^mail: //p')
    echo "    mail: $mail"
}

say '4. The directory is chosen by the name in the first request.'
search dc=first -D cn=admin,dc=first -w secret
[ "$mail" = ada@old.first ] || fail 'the first directory should have answered'
search dc=second -D cn=admin,dc=second -w secret
[ "$mail" = ada@new.second ] || fail 'the second directory should have answered, with the value rewritten'

say '5. An anonymous client names nothing when it binds: its search chooses.'
search dc=second
[ "$mail" = ada@new.second ] || fail 'the second directory should have answered'

wait_for_lines "$work/proxy.jsonl" 3 '"reason"'
echo "  the proxy's records:"
records "$work/proxy.jsonl"
say 'Done.'
