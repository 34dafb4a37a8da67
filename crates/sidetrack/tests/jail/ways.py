"""Tries each way out of a jail and prints `row TAB result TAB detail`. `blocked`: nothing was reached. `design`: what is meant to work works.

The neighbour has 10.77.0.2 and fd00:77::2, this host 10.77.0.1. Nothing here may take long, or change the host.
"""

import array, ctypes, errno, fcntl, os, select, socket, struct, subprocess, sys

V4, V6, HOST = "10.77.0.2", "fd00:77::2", "10.77.0.1"
ALLOWED = int(os.environ["ALLOWED_PORT"])
HOST_PORT = int(os.environ["HOST_PORT"])
LIBC = ctypes.CDLL(None, use_errno=True)
PARENT = os.getppid()
ROWS = []


class Reached(Exception):
    pass


def row(name, result="blocked"):
    def add(function):
        ROWS.append((name, result, function))
        return function

    return add


def tcp(family, to, kind=socket.SOCK_STREAM, protocol=0, before=None, data=b"x"):
    with socket.socket(family, kind, protocol) as client:
        client.settimeout(20)
        if before:
            before(client)
        client.connect(to)
        client.sendall(data)
        answer = client.recv(100)
        if answer:
            raise Reached(answer)
        raise OSError(errno.ECONNRESET, "closed")


def udp(family, to, before=None, data=b"x", protocol=0):
    with socket.socket(family, socket.SOCK_DGRAM, protocol) as client:
        if before:
            before(client)
        client.sendto(data, to)
        # No answer is no proof: the neighbour counts packets.
        if select.select([client], [], [], 0.02)[0]:
            raise Reached(client.recv(100))


def opens(family, kind=socket.SOCK_STREAM, protocol=0):
    with socket.socket(family, kind, protocol):
        raise Reached("opened")


def call(number, *arguments):
    if LIBC.syscall(number, *arguments) < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    raise Reached("done")


def tool(*arguments):
    try:
        ended = subprocess.run(arguments, capture_output=True, text=True, timeout=20)
    except FileNotFoundError:
        raise OSError(errno.ENOENT, "no such tool")
    if ended.returncode == 0:
        raise Reached("done")
    raise OSError(errno.EPERM, ended.stderr.strip()[:60])


def question(name, kind=1):
    labels = b"".join(bytes([len(label)]) + label.encode() for label in name.split("."))
    return b"\x12\x34\x01\x00\x00\x01\x00\x00\x00\x00\x00\x00" + labels + b"\x00" + struct.pack(">HH", kind, 1)


def ask(name, server="198.18.0.1", kind=1):
    """The code and the number of answers of a DNS server."""
    family = socket.AF_INET6 if ":" in server else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as client:
        client.settimeout(20)
        client.connect((server, 53))
        client.send(question(name, kind))
        reply = client.recv(512)
        return reply[3] & 15, struct.unpack(">H", reply[6:8])[0]


def refused_name(*arguments, **more):
    code, answers = ask(*arguments, **more)
    if (code, answers) != (3, 0):
        raise Reached(f"code {code}, {answers} answers")


# TCP
row("TCP over IPv4")(lambda: tcp(socket.AF_INET, (V4, 10001)))
row("TCP over IPv6")(lambda: tcp(socket.AF_INET6, (V6, 10002)))
row("an IPv4 address written as IPv6")(lambda: tcp(socket.AF_INET6, ("::ffff:" + V4, 10003)))
row("an IPv4 address behind NAT64")(lambda: tcp(socket.AF_INET6, ("64:ff9b::a4d:2", 10004)))
row("another port of an allowed host")(lambda: tcp(socket.AF_INET, (V4, ALLOWED + 1)))
row("SNI or Host of an allowed name to another address")(
    lambda: tcp(socket.AF_INET, (V4, 80), data=b"GET / HTTP/1.1\r\nHost: allowed.invalid\r\n\r\n"))
row("a source address of the host")(lambda: tcp(socket.AF_INET, (V4, 10005), before=lambda s: s.bind((HOST, 0))))
row("IP source routing")(lambda: tcp(socket.AF_INET, (V4, 10006), before=lambda s: s.setsockopt(
    socket.IPPROTO_IP, socket.IP_OPTIONS, b"\x83\x07\x04" + socket.inet_aton(V4) + b"\x00")))
row("Multipath TCP")(lambda: tcp(socket.AF_INET, (V4, 10007), protocol=262))
row("binding to an interface of the host")(lambda: tcp(socket.AF_INET, (V4, 10008), before=lambda s: s.setsockopt(
    socket.SOL_SOCKET, socket.SO_BINDTODEVICE, b"jail0\0")))
row("a mark on the socket")(lambda: tcp(socket.AF_INET, (V4, 10009), before=lambda s: s.setsockopt(
    socket.SOL_SOCKET, socket.SO_MARK, 1)))
row("a transparent socket")(lambda: tcp(socket.AF_INET, (V4, 10010), before=lambda s: s.setsockopt(
    socket.IPPROTO_IP, 19, 1)))
row("the port of our own listener")(lambda: tcp(socket.AF_INET, (V4, 9)))
row("a guessed address of a name (198.18.0.0/15)")(lambda: tcp(socket.AF_INET, ("198.19.7.7", 80)))


@row("TCP Fast Open, data in the SYN")
def _():
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as client:
        client.settimeout(20)
        client.sendto(b"x", socket.MSG_FASTOPEN, (V4, 10011))
        if answer := client.recv(10):
            raise Reached(answer)
        raise OSError(errno.ECONNRESET, "closed")


# UDP and multicast
row("UDP over IPv4")(lambda: udp(socket.AF_INET, (V4, 10020)))
row("UDP over IPv6")(lambda: udp(socket.AF_INET6, (V6, 10021)))
row("QUIC (UDP 443)")(lambda: udp(socket.AF_INET, (V4, 443), data=b"\xc0" + bytes(1199)))
row("UDP to an allowed TCP port")(lambda: udp(socket.AF_INET, (V4, ALLOWED)))
row("broadcast")(lambda: udp(socket.AF_INET, ("255.255.255.255", 10022), before=lambda s: s.setsockopt(
    socket.SOL_SOCKET, socket.SO_BROADCAST, 1)))
row("subnet broadcast")(lambda: udp(socket.AF_INET, ("10.77.0.255", 10023), before=lambda s: s.setsockopt(
    socket.SOL_SOCKET, socket.SO_BROADCAST, 1)))
row("multicast over IPv4 (mDNS)")(lambda: udp(socket.AF_INET, ("224.0.0.251", 5353)))
row("multicast over IPv6")(lambda: udp(socket.AF_INET6, ("ff02::fb", 5353)))
row("IPv6 extension headers")(lambda: udp(socket.AF_INET6, (V6, 10024), before=lambda s: s.setsockopt(
    socket.IPPROTO_IPV6, 59, bytes([0, 0, 1, 4, 0, 0, 0, 0]))))
row("a datagram with TTL 1 (traceroute)")(lambda: udp(socket.AF_INET, (V4, 33434), before=lambda s: s.setsockopt(
    socket.IPPROTO_IP, socket.IP_TTL, 1)))

# Other protocols
row("ICMP by a raw socket")(lambda: opens(socket.AF_INET, socket.SOCK_RAW, 1))
row("ICMP by a ping socket")(lambda: opens(socket.AF_INET, socket.SOCK_DGRAM, 1))
row("ICMPv6 by a raw socket")(lambda: opens(socket.AF_INET6, socket.SOCK_RAW, 58))
row("packets with their own IP header")(lambda: opens(socket.AF_INET, socket.SOCK_RAW, 255))
row("a raw TCP segment")(lambda: opens(socket.AF_INET, socket.SOCK_RAW, 6))
row("frames (AF_PACKET)")(lambda: opens(socket.AF_PACKET, socket.SOCK_RAW, 0x0300))
row("SCTP")(lambda: opens(socket.AF_INET, socket.SOCK_STREAM, 132))
row("SCTP, one to many")(lambda: opens(socket.AF_INET, socket.SOCK_SEQPACKET, 132))
row("UDP-Lite")(lambda: udp(socket.AF_INET, (V4, 10030), protocol=136))
row("DCCP")(lambda: opens(socket.AF_INET, 6, 33))
row("virtual machines (AF_VSOCK)")(lambda: opens(40, socket.SOCK_STREAM, 0))
row("Bluetooth")(lambda: opens(31, socket.SOCK_SEQPACKET, 0))
row("kernel cryptography (AF_ALG)")(lambda: opens(38, socket.SOCK_SEQPACKET, 0))
row("AF_XDP")(lambda: opens(44, socket.SOCK_RAW, 0))


@row("all other socket families")
def _():
    for family in set(range(3, 64)) - {10, 16}:
        try:
            socket.socket(family, socket.SOCK_DGRAM, 0).close()
        except OSError:
            continue
        raise Reached(f"family {family}")


row("io_uring")(lambda: call(425, 4, ctypes.create_string_buffer(256)))

# The namespace itself
row("a new interface by netlink")(lambda: tool("ip", "link", "add", "way", "type", "dummy"))
row("other routes")(lambda: tool("ip", "route", "replace", "default", "via", "127.0.0.2", "dev", "lo"))
row("other firewall rules")(lambda: tool("nft", "flush", "ruleset"))
row("netfilter sockets")(lambda: opens(socket.AF_NETLINK, socket.SOCK_RAW, 12))


@row("a TUN interface")
def _():
    tun = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(tun, 0x400454CA, struct.pack("16sH", b"way0", 0x1001))
    raise Reached("made")


def enter(path):
    descriptor = os.open(path, os.O_RDONLY)
    if LIBC.setns(descriptor, 0) != 0:
        raise OSError(ctypes.get_errno(), "setns")
    raise Reached("entered")


row("setns to the first process")(lambda: enter("/proc/1/ns/net"))
row("setns to our parent")(lambda: enter(f"/proc/{PARENT}/ns/net"))


@row("a namespace of its own")
def _():
    child = os.fork()
    if child == 0:
        # CLONE_NEWUSER | CLONE_NEWNET: it may have every right there, and there is no way to anywhere.
        try:
            if LIBC.unshare(0x10000000 | 0x40000000) == 0:
                with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as client:
                    client.connect((V4, 10040))
                os._exit(1)
        except OSError:
            pass
        os._exit(0)
    if os.waitpid(child, 0)[1] != 0:
        raise Reached("connected")


# Processes and descriptors of the host
@row("ptrace of a process outside")
def _():
    if LIBC.ptrace(16, PARENT, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "ptrace")
    raise Reached("attached")


@row("memory of a process outside")
def _():
    os.close(os.open(f"/proc/{PARENT}/mem", os.O_RDWR))
    raise Reached("opened")


@row("descriptors of a process outside")
def _():
    os.close(os.open(f"/proc/{PARENT}/fd/0", os.O_RDONLY))
    raise Reached("opened")


@row("a copy of a descriptor (pidfd_getfd)")
def _():
    pidfd = os.pidfd_open(PARENT)
    call(438, pidfd, 3, 0)


@row("an inherited socket")
def _():
    os.write(int(os.environ["INHERITED"]), b"x")
    raise Reached("sent")


@row("typing into the terminal (TIOCSTI)")
def _():
    try:
        fcntl.ioctl(0, 0x5412, b"x")
    except OSError as error:
        if error.errno == errno.EPERM:
            return
        raise Reached(error)
    raise Reached("typed")


def unix(address):
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.connect(address)
        raise Reached("connected")


row("an abstract unix socket of the host")(lambda: unix("\0" + os.environ["ABSTRACT"]))
row("a unix socket of a daemon of the host")(lambda: unix(os.environ["SOCKET_PATH"]))


@row("a unix socket through a link")
def _():
    link = os.environ["SOCKET_PATH"] + ".link"
    os.link(os.environ["SOCKET_PATH"], link)
    unix(link)


# Names
row("the name of another host")(lambda: refused_name("secret.invalid"))
row("data in a name that is not allowed")(lambda: refused_name("a" * 60 + ".secret.invalid"))
row("data in records of other types")(lambda: refused_name("secret.invalid", kind=16))
row("data in long labels of a wildcard")(lambda: refused_name("b" * 60 + ".wild.invalid"))
row("another DNS server, another name")(lambda: refused_name("secret.invalid", server=V4))
row("another DNS server over IPv6")(lambda: refused_name("secret.invalid", server=V6))
row("DNS over TCP to another server")(lambda: tcp(socket.AF_INET, (V4, 53)))
row("DNS over TLS")(lambda: tcp(socket.AF_INET, (V4, 853)))
row("DNS over HTTPS")(lambda: tcp(socket.AF_INET, (V4, 443)))


@row("resolv.conf written anew")
def _():
    os.close(os.open("/etc/resolv.conf", os.O_WRONLY))
    raise Reached("opened to write")


@row("resolv.conf uncovered")
def _():
    if LIBC.umount2(b"/etc/resolv.conf", 2) != 0:
        raise OSError(ctypes.get_errno(), "umount")
    raise Reached("uncovered")


# This host
row("127.0.0.1 of the host")(lambda: tcp(socket.AF_INET, ("127.0.0.1", HOST_PORT)))
row("::1 of the host")(lambda: tcp(socket.AF_INET6, ("::1", HOST_PORT)))
row("0.0.0.0")(lambda: tcp(socket.AF_INET, ("0.0.0.0", HOST_PORT)))
row("another loopback address")(lambda: tcp(socket.AF_INET, ("127.9.9.9", HOST_PORT)))
row("an address of the host")(lambda: tcp(socket.AF_INET, (HOST, HOST_PORT)))
row("cloud metadata")(lambda: tcp(socket.AF_INET, ("169.254.169.254", 80)))
row("link-local addresses")(lambda: tcp(socket.AF_INET6, ("fe80::1", 80, 0, 1)))

# What is meant to work
row("the allowed destination", "design")(lambda: tcp(socket.AF_INET, (V4, ALLOWED)))
row("a proxy at an allowed destination", "design")(lambda: tcp(
    socket.AF_INET, (V4, ALLOWED), data=b"CONNECT elsewhere.invalid:443 HTTP/1.1\r\n\r\n"))


@row("a server of its own", "design")
def _():
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()):
        raise Reached("connected")


@row("pairs of unix sockets", "design")
def _():
    one, other = socket.socketpair()
    one.send(b"x")
    raise Reached(other.recv(1))


@row("a unix socket of its own", "design")
def _():
    path = os.environ["SOCKET_PATH"] + ".own"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as server:
        server.bind(path)
        server.listen()
        unix(path)


ONLY = os.environ.get("ONLY")
for name, expected, function in ROWS:
    if ONLY and name not in ONLY.split(","):
        continue
    try:
        function()
        found = ("blocked", "")
    except Reached as reached:
        found = ("design" if expected == "design" else "REACHED", str(reached.args[0]))
    except OSError as error:
        found = ("blocked", errno.errorcode.get(error.errno, str(error)))
    print(name, found[0], found[1], sep="\t", flush=True)
