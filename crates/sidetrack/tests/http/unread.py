"""Sends a placeholder in every way that is not read as a request. Prints one line for each."""
import os, socket, sys, threading

KEY = os.environ['API_KEY'].encode()
PLAIN, MAIL, DATAGRAMS, NAME = sys.argv[1], sys.argv[2], sys.argv[3], sys.argv[4]


def at(text):
    host, port = text.rsplit(':', 1)
    return host, int(port)


def connect(to):
    made = socket.create_connection(at(to), timeout=60)
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return made


def echoed(made, sent):
    made.sendall(sent)
    back = b''
    while len(back) < len(sent):
        more = made.recv(65536)
        if not more:
            return False
        back += more
    return back == sent


def is_reset(made, sent):
    try:
        made.sendall(sent)
        made.recv(1)
    except (ConnectionResetError, BrokenPipeError):
        return True
    return False


# The server has echoed the first part before the second one leaves: they are read apart.
divided = 0
for cut in range(1, len(KEY)):
    with connect(PLAIN) as made:
        divided += echoed(made, b'x' + KEY[:cut]) and is_reset(made, KEY[cut:] + b'y')
print('divided', divided, 'of', len(KEY) - 1)

with connect(PLAIN) as made:
    print('at once', is_reset(made, KEY))

with connect(PLAIN) as made:
    single = all(echoed(made, KEY[at:at + 1]) for at in range(len(KEY) - 1))
    print('byte by byte', single and is_reset(made, KEY[-1:]))

with connect(PLAIN) as made:
    print('nearly', echoed(made, (KEY[:-1] + b'?') * 1000))

with connect(PLAIN) as made:
    many = b's' * (8 << 20)
    writer = threading.Thread(target=made.sendall, args=(many,))
    writer.start()
    left = len(many)
    while left:
        left -= len(made.recv(65536)) or left
    writer.join()
    print('behind many bytes', is_reset(made, KEY))

# By name, which rules match, and the server speaks first.
with connect(f'{NAME}:{at(MAIL)[1]}') as made:
    lines = made.makefile('rb')
    greeting = lines.readline()
    made.sendall(b'EHLO here\r\n')
    answer = lines.readline()
    print('mail', greeting + answer, is_reset(made, b'AUTH PLAIN ' + KEY + b'\r\n'))

# The connection begins with a request, and then speaks another protocol.
with connect(f'{NAME}:80') as made:
    made.sendall(f'GET / HTTP/1.1\r\nHost: {NAME}\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n'.encode())
    head = b''
    while b'\r\n\r\n' not in head:
        head += made.recv(4096)
    print('upgraded', head.split()[1], echoed(made, b'hello'), is_reset(made, KEY))

def bound():
    """A socket whose port has another number than the server's: to its own port, the command speaks with itself."""
    while True:
        made = socket.socket(type=socket.SOCK_DGRAM)
        made.bind(('', 0))
        if made.getsockname()[1] != at(DATAGRAMS)[1]:
            return made


made = bound()
made.settimeout(0.5)


def asked(payload):
    """What comes first: an echo of the datagram, which may be lost, or a placeholder."""
    for _ in range(100):
        made.sendto(payload, at(DATAGRAMS))
        try:
            while True:
                came = made.recv(2048)
                if KEY in came:
                    return 'placeholder'
                if came == payload:
                    return 'echo'
        except TimeoutError:
            pass
    return 'nothing'


before = asked(b'hello')
made.sendto(b'a' + KEY + b'b', at(DATAGRAMS))
print('datagrams', before, asked(b'again'))

for name in (KEY.decode() + '.' + NAME, KEY[:20].decode() + '.' + KEY[20:].decode() + '.' + NAME):
    try:
        print('name', socket.getaddrinfo(name, 80))
    except socket.gaierror as error:
        print('name', error.errno == socket.EAI_NONAME)
