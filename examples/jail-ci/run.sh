#!/usr/bin/env bash
# A build in a jail: it downloads from the registry that its profile allows, and cannot send a file elsewhere.
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
source "$here/../topology.sh"
need curl nginx
sidetrack=$(sidetrack_binary)
isolate "$@"

say '1. A build machine, a registry of packages, and another host.'
for name in builder registry elsewhere; do host "$name"; done
wire builder 10.78.1.2/24 fd78:1::2/64 registry 10.78.1.1/24 fd78:1::1/64
wire builder 10.78.2.2/24 fd78:2::2/64 elsewhere 10.78.2.1/24 fd78:2::1/64
web_server registry 10.78.1.1:80 'package 1.0'
web_server elsewhere 10.78.2.1:80 'thank you for the file' elsewhere
wait_for web registry 10.78.1.1 80
wait_for elsewhere elsewhere 10.78.2.1 80
cd "$work"
build() { on builder env -i PATH="$PATH" HOME=/tmp "$@" sh "$here/build.sh"; }

say '2. Without a jail, a step of the build sends a file elsewhere.'
printed=$(build)
echo "$printed" | sed 's/^/    /'
[[ $printed == *'sent elsewhere: thank you for the file'* ]] || fail 'the build should have reached the other host'

say '3. What would be refused? --audit carries all and says it.'
show 'sidetrack run --profile build.profile --audit -- sh build.sh'
printed=$(build "$sidetrack" run --profile "$here/build.profile" --audit -- 2>&1)
echo "$printed" | sed 's/^/    /'
[[ $printed == *'10.78.2.1:80: would be refused'* ]] || fail 'the other host should have been named'

say '4. In the jail: the package is downloaded, nothing is sent, and the job fails with exit code 120.'
show 'sidetrack run --profile build.profile --fail-on-deny -- sh build.sh'
status=0
printed=$(build "$sidetrack" run --profile "$here/build.profile" --fail-on-deny -- 2>&1) || status=$?
echo "$printed" | sed 's/^/    /'
echo "    exit code $status"
[[ $printed == *'downloaded: package 1.0'* ]] || fail 'the registry is allowed'
[[ $printed != *'elsewhere: '* && $printed != *'told elsewhere'* ]] || fail 'nothing should have left'
[[ $printed == *'10.78.2.1:80: denied by policy'*'--allow 10.78.2.1:80'* ]] || fail 'the refusal should have been said'
[[ $printed == *'elsewhere.invalid: denied by policy'* ]] || fail 'the name should have been refused'
[ "$status" = 120 ] || fail 'it should have been 120'
say 'Done: nothing was installed on the build machine, and nothing is left on it.'
