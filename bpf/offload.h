/* SPDX-License-Identifier: MIT OR GPL-2.0-only */
/*
 * The layout of offloaded connections: established connections of the packet engine whose packets the
 * kernel translates and forwards. Shared by the programs of engine.bpf.c and crates/sys/src/bpf/offload.rs.
 * User space maps the memory of these maps; programs and user space both write to it.
 *
 * The states of a connection (flow.state), and who changes them (U: user space, P: a program):
 *
 *     FREE --U: offload-----------> OFFLOADED --P: a packet for user space--> RETURNED
 *     FREE --U: sends a SYN-------> SYN_SENT --P: takes the SYN-ACK--> COMPLETING
 *     COMPLETING --P: sent the client's first bytes--> OFFLOADED
 *     COMPLETING --P: no room for the frame--> RETURNED
 *     OFFLOADED --P: both FINs acknowledged (XDP only)--> ENDED (late packets are still forwarded)
 *     any but COMPLETING --U: takes it back--> RETURNED --U: some ms later--> FREE
 *
 * User space waits while a connection is COMPLETING, which takes microseconds.
 *
 * A packet's connection is found by the hash of its two ends. The hash selects a bucket, one cache line
 * with eight places; each place holds the upper half of a hash and a number. Only user space adds and
 * removes places, each with one atomic write, so a program never sees half of one.
 *
 * Numbers are in the byte order of the host. "Own" is the side that a packet comes from, "other" the side
 * that it goes to. Each side's sequence numbers are kept as that side sees them.
 */
#ifndef SIDETRACK_OFFLOAD_H
#define SIDETRACK_OFFLOAD_H

#include <linux/types.h>
#include <stddef.h>

/* flow.state; see the diagram above. */
enum { FLOW_FREE = 0, FLOW_OFFLOADED = 1, FLOW_RETURNED = 2, FLOW_ENDED = 3, FLOW_SYN_SENT = 4, FLOW_COMPLETING = 5 };

/* flow_side.fins: a FIN was seen; it was acknowledged; the peer's FIN was seen first. */
enum { FIN_SEEN = 1, FIN_ACKED = 2, FIN_SECOND = 4 };

struct flow_side {
	/* Fixed while the connection is offloaded. */
	__u8 remote[16] __attribute__((aligned(8)));
	__u8 local[16];
	__u32 ports; /* remote << 16 | local */
	__u32 add;   /* added to the sequence numbers of its packets */
	/* Written by programs and user space. Values only ever move forward. */
	__u64 sent;         /* after the last byte (or FIN) it sent; the upper half counts wraps of the lower half, starting at 1 */
	__u32 acknowledged; /* the highest number it acknowledged, in the other side's numbers as it sees them */
	__u32 edge;         /* the highest number its window ever allowed, in the same numbers */
	__u32 stamp;        /* its last time stamp */
	__u32 packets;      /* forwarded by a program; a GSO frame that stands for several counts once */
	/* How the kernel takes over from user space; see joins(). */
	__u32 to_user;  /* segments with payload that user space got since the offload */
	__u32 user_sent;   /* how many of these user space has sent on; ~0 (never equal) until it knows */
	__u32 joined; /* not 0: user space has no segment of this side left to send */
	/* Fixed while the connection is offloaded. */
	__u32 stamp_add;   /* added to its time stamps */
	__u32 stamp_first; /* lower bound of the echoed time stamps that this side is shown */
	__u32 egress;      /* interface towards it */
	__u8 to[6];        /* its neighbour on that interface, and our own address there */
	__u8 from[6];
	__u16 mss;         /* largest payload it accepts, TCP options included */
	__u8 shift;        /* window scale of the windows it sends */
	__u8 shown_shift;  /* window scale of the windows it is shown */
	__u32 fix;         /* change of the checksums by the new addresses of its packets */
	__u32 v6;
	/* Written by programs in XDP. */
	__u32 fin;  /* sequence number after its FIN */
	__u32 fins;
	__u64 last_ns;     /* CLOCK_MONOTONIC_COARSE of its last packet; 0: none yet */
};

struct flow {
	__u32 state;
	__u32 handshake;    /* while SYN_SENT or COMPLETING: index of its handshake + 1 */
	__u64 connected_ns; /* CLOCK_MONOTONIC (coarse) when a program took its SYN-ACK; 0: none was taken */
	__u32 number;      /* sequence number of that SYN-ACK */
	__u32 zero[3];
	struct flow_side side[2]; /* client, server */
};

/*
 * A value of the map "handshakes": what the SYN-ACK of a server has to be, and the frame that is sent to the
 * server then. Everything in the frame that depends on the SYN-ACK is zero, in its checksum too: the
 * acknowledgement and two time stamps.
 */
struct handshake {
	__u64 behind_ns;    /* CLOCK_MONOTONIC minus the worker's time */
	__u32 clock;        /* our time stamps are the worker's time in milliseconds plus this */
	__u32 acknowledges; /* what the SYN-ACK has to acknowledge */
	__u32 shown;        /* the server's initial sequence number as the client sees it */
	__u32 stamp;        /* the client's last time stamp */
	__u32 length;       /* length of the frame */
	__u16 needs;        /* MSS and window of the SYN-ACK have to be at least this */
	__u8 stamps, sack, scale; /* options that the SYN-ACK has to contain (1) or must not (0) */
	__u8 zero[3]; /* they complete the 32-bit word of scale */
	__u8 frame[988];
};

#define PLACES 8

/* Upper half: upper half of the hash. Lower half: number of the flow * 2 + side + 1; 0: free. */
struct bucket {
	__u64 place[PLACES];
};

/*
 * The one value of the map "offload". Each worker has `share` of the flows, and a ring in "over" for those
 * of its flows that have ended (number + 1). Programs write into the ring at the position in "over_heads";
 * user space takes out.
 */
struct offload {
	__u64 seed;
	__u32 bucket_mask;
	__u32 share;
	__u32 ring_mask;
	__u32 zero;
};

/* The values of the map "over_heads", each in a cache line of its own. */
struct over_head {
	__u32 head;
	__u32 zero[15];
};

/*
 * The decision of a packet socket's filter, for tc, which sees the same packet next on the same
 * processor.
 */
struct taken {
	__u32 entry; /* as in a place; 0: no packet was taken */
	__u32 ports;
	__u32 sequence;
	__u32 acknowledgement;
};

#endif
