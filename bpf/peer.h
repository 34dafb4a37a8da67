/* SPDX-License-Identifier: MIT OR GPL-2.0-only */
/* The layout that peer.bpf.c and the laboratory share. */
#ifndef SIDETRACK_PEER_H
#define SIDETRACK_PEER_H

#include <linux/types.h>

/* Number of client addresses. */
#define CLIENTS 16

enum { VACANT, OPENING, OPENED, ASKED, CLOSING };

/* The one value of "peer". */
struct peer {
	__u16 link[6]; /* link addresses of the engine, and our own */
	__u32 front;   /* the address that clients connect to, and the server's, in network byte order */
	__u32 server;
	__u32 clients; /* the first client address, in the byte order of the host */
	__u32 ports;   /* number of ports that each place uses in turn */
	__u16 port, server_port;
	__u32 answered; /* not 0: the engine completes handshakes itself, with both ends */
	__u32 zero;
	__u64 opened, completed, server_closed, reset, unexpected, corrupt, checked, received, sent;
};

struct place {
	__u32 turn;
	__u32 step;
	__u64 since_ns;
	__u32 theirs; /* initial sequence number of the other end, as the client sees it */
	__u32 zero;
};

#endif
