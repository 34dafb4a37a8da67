"""A player of the game: one socket that is not connected, 60 moves, each answered by the server that was asked."""

import socket
import sys

server = (sys.argv[1], 5000)
player = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
for number in range(60):
    move = b"move %d" % number
    # A datagram may be lost on its way: ask again.
    for attempt in range(60):
        player.settimeout(1)
        player.sendto(move, server)
        try:
            answer, peer = player.recvfrom(100)
        except socket.timeout:
            continue
        if answer == b"seen " + move:
            assert peer == server, peer
            break
    else:
        sys.exit("no answer")
print("60 moves, 60 answers")
