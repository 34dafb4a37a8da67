"""Two small servers: a game that answers each move, and DNS that knows one name."""

import socket
import sys
import threading


def game(address):
    server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    server.bind((address, 5000))
    while True:
        move, player = server.recvfrom(65536)
        server.sendto(b"seen " + move, player)


def dns(address):
    server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    server.bind((address, 5353))
    while True:
        question, client = server.recvfrom(4096)
        end = question.index(0, 12) + 5
        # One answer: the name of the question, type A, class IN, 60 s, 192.0.2.53 (RFC 1035 Sec. 4).
        head = question[:2] + bytes([0x81, 0x80, 0, 1, 0, 1, 0, 0, 0, 0])
        answer = bytes([0xC0, 12, 0, 1, 0, 1, 0, 0, 0, 60, 0, 4, 192, 0, 2, 53])
        server.sendto(head + question[12:end] + answer, client)


threading.Thread(target=dns, args=(sys.argv[1],), daemon=True).start()
game(sys.argv[1])
