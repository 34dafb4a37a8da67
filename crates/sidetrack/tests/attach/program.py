"""A program that runs before it is attached to. It does what its input says, and prints one line for each order."""
import os
import socket
import sys

kept = []


def order(words):
    """Returns what is printed."""
    what, rest = words[0], words[1:]
    if what == "child":
        # The child goes on with the orders; its parent waits for it.
        pid = os.fork()
        if pid:
            os.waitpid(pid, 0)
            os._exit(0)
        return "child"
    if what == "by-child":
        # A child does it, and ends.
        read, write = os.pipe()
        pid = os.fork()
        if not pid:
            os.write(write, order(rest).encode())
            os._exit(0)
        os.waitpid(pid, 0)
        return os.read(read, 100).decode()
    if what == "open":
        kept.append(socket.create_connection((rest[0], int(rest[1])), 60))
        return "open"
    if what == "use":
        kept[-1].sendall(b"ping")
        return kept[-1].recv(100).decode()
    if what == "tcp":
        with socket.create_connection((rest[0], int(rest[1])), 60) as client:
            client.sendall(b"ping")
            return client.recv(100).decode()
    if what == "udp":
        family = socket.AF_INET6 if ":" in rest[0] else socket.AF_INET
        with socket.socket(family, socket.SOCK_DGRAM) as client:
            client.settimeout(60)
            client.sendto(b"ping", (rest[0], int(rest[1])))
            return client.recv(100).decode()
    if what == "name":
        return socket.gethostbyname(rest[0])
    if what == "listen":
        server = socket.create_server((rest[0], 0))
        kept.append(server)
        return str(server.getsockname()[1])
    if what == "accept":
        client, _ = kept[-1].accept()
        with client:
            client.sendall(client.recv(100))
        return "served"
    if what == "raw":
        with socket.socket(socket.AF_INET, socket.SOCK_RAW, 1) as client:
            client.sendto(bytes(8), (rest[0], 0))
        return "sent"
    return "unknown order"


for line in sys.stdin:
    try:
        print(order(line.split()), flush=True)
    except OSError as error:
        print(type(error).__name__, flush=True)
