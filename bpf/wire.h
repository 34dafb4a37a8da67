/* SPDX-License-Identifier: MIT OR GPL-2.0-only */
/*
 * The layout of flows on the wire: connections that two kernel sockets had, and whose packets the kernel
 * translates and forwards from now on. Shared by wire.bpf.c and crates/sys/src/bpf/wire.rs.
 *
 * The states of a flow (wire.state), and who changes them (U: user space, P: a program):
 *
 *     FREE --U: begins------------------------> JOINING
 *     JOINING --U: both sockets owe nothing---> WIRED --P: FINs acknowledged, a RST, a new SYN--> ENDED
 *     WIRED --U: a packet came late-----------> JOINING
 *     JOINING --P: the same-------------------> ENDED
 *     WIRED --U: stops it to read its numbers-> HELD --U: it stays here----------> WIRED
 *     HELD --U: two new sockets are there-----> LEAVING --U: they need no help---> FREE
 *     any --U: removes it---------------------> FREE
 *
 * JOINING: one of two answers for every byte. What a socket has acknowledged, it has passed on, and the
 * other socket sends it again until it arrives. What no socket has acknowledged, its sender sends again, and
 * the program passes it on. So nothing has to stand still. A copy of each acknowledgement goes to the socket
 * that still waits for one, without payload, and never beyond what that socket has sent.
 *
 * HELD: packets of the flow are dropped. Their senders send them again.
 *
 * LEAVING: packets go to new sockets. A host may have bytes that the kernel passed on and that no new socket has
 * sent. The program shows a socket acknowledgements of no more than it has sent, until it has sent these bytes.
 *
 * "Own" is the side that a packet comes from, "other" the side that it goes to, as in offload.h. A side's
 * numbers are kept as that side sees them.
 */
#ifndef SIDETRACK_WIRE_H
#define SIDETRACK_WIRE_H

#include "offload.h"

/* wire.state; see the diagram above. */
enum {
	WIRE_FREE = 0,
	WIRE_JOINING = 1,
	WIRE_WIRED = 2,
	WIRE_ENDED = 3,
	WIRE_HELD = 4,
	WIRE_LEAVING = 5,
};

/* wire.why, once a flow is ENDED. */
enum { WIRE_FINISHED = 1, WIRE_RESET_BY_CLIENT = 2, WIRE_RESET_BY_SERVER = 3, WIRE_REUSED = 4 };

/* wire_more.stamped: the other side's clock is not known yet; one processor learns it; it is known. */
enum { STAMPS_UNKNOWN = 0, STAMPS_LEARNING = 1, STAMPS_KNOWN = 2 };

/* Bits of wire.agreed: it is known what both sides have agreed on; time stamps; SACK; ECN. */
enum { WIRE_KNOWN = 1, WIRE_STAMPS = 2, WIRE_SACK = 4, WIRE_ECN = 8 };

/* A packet with this mark is a copy for a socket of ours. */
#define WIRE_COPY 0x51de7ac5

/* A packet with this mark was passed on. */
#define WIRE_PASSED 0x51de7ac6

struct wire_key {
	__u8 remote[16];
	__u8 local[16];
	__u16 remote_port, local_port;
};

/* What a side has besides its part of offload.h. */
struct wire_more {
	__u32 awaits;   /* not 0: our socket towards it needs its acknowledgements: copies, or bounded ones */
	__u32 limit;    /* after the last byte that our socket has sent to it */
	__u32 expects;  /* what our socket expects from it next */
	__u32 clock;    /* our time stamps towards it: CLOCK_MONOTONIC in milliseconds plus this */
	__u32 stamped;  /* STAMPS_*: whether `stamp_add` of its packets is known */
	__u32 dropped;  /* packets of it that could not be passed on */
	__u32 next;     /* after the last byte of it that user space has passed on */
};

struct wire {
	__u32 state;
	__u32 why;
	__u32 agreed; /* WIRE_KNOWN and so on; 0 if an earlier release has put the flow here */
	__u32 zero;
	struct flow_side side[2]; /* client, server */
	struct wire_more more[2];
};

#endif
