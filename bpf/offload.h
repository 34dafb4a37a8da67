/* SPDX-License-Identifier: MIT OR GPL-2.0-only */
/*
 * Connections that the packet engine has lent to the kernel: what the programs of engine.bpf.c and
 * crates/sys/src/bpf/offload.rs share. User space maps the memory of these maps; both sides write to it.
 *
 * A connection is found by the hash of a packet's two ends: in one line of memory stand eight places, each the upper half of
 * a hash and a number. Only user space puts places there and takes them out, so a program sees a place or does not.
 *
 * Numbers are in the byte order of the host. "Own" is the side a packet comes from, "other" the one it goes to; each side's
 * numbers are as that side sees them.
 */
#ifndef SIDETRACK_OFFLOAD_H
#define SIDETRACK_OFFLOAD_H

#include <linux/types.h>
#include <stddef.h>

/*
 * flow.state: written by user space, and set to RETURNED by a program that met a packet for user space. ENDED: a program in XDP
 * has seen both sides close, and goes on passing what is left. ASKED: user space has sent the server a SYN, and a program in XDP may
 * take the answer; it is BINDING until it has sent the first bytes, and user space waits for it so long. Then it is LENT.
 */
enum { FLOW_FREE = 0, FLOW_LENT = 1, FLOW_RETURNED = 2, FLOW_ENDED = 3, FLOW_ASKED = 4, FLOW_BINDING = 5 };

/* flow_side.fins. SECOND: the other side's had come before. */
enum { FIN_SEEN = 1, FIN_ACKED = 2, FIN_SECOND = 4 };

struct flow_side {
	/* Fixed while it is lent. */
	__u8 remote[16] __attribute__((aligned(8)));
	__u8 local[16];
	__u32 ports; /* remote << 16 | local */
	__u32 add;   /* to sequence numbers of its packets */
	/* What both write, and only ever forward. */
	__u64 sent;         /* after the last byte (or FIN) it sent; the upper half counts the turns of the lower */
	__u32 acknowledged; /* the highest number it acknowledged, as it sees the other side's numbers */
	__u32 edge;         /* the highest number its window ever allowed, likewise */
	__u32 stamp;        /* its last time stamp */
	__u32 packets;      /* that a program passed on; a frame that stands for several counts once */
	/* How the kernel takes over from user space, see joins(). */
	__u32 given;  /* segments with payload in user space's sockets since it lent the connection */
	__u32 done;   /* of these: sent on. Before user space knows: never equal */
	__u32 joined; /* not 0: nothing of it is under way in user space */
	/* Fixed while it is lent. */
	__u32 stamp_add;   /* to its time stamps */
	__u32 stamp_first; /* the other side is never shown to echo an earlier one */
	__u32 egress;      /* interface by which it is reached */
	__u8 to[6];        /* its neighbour on that interface, and our own address there */
	__u8 from[6];
	__u16 mss;         /* largest payload it takes, options included */
	__u8 shift;        /* of the windows it sends */
	__u8 shown_shift;  /* of those it is shown */
	__u32 fix;         /* change of checksums by the new addresses of its packets */
	__u32 v6;
	/* What programs in XDP write. */
	__u32 fin;  /* after its FIN */
	__u32 fins;
	__u64 last_ns;     /* CLOCK_MONOTONIC_COARSE of its last packet; 0: none yet */
};

struct flow {
	__u32 state;
	__u32 question;    /* number + 1 of that of one that is ASKED */
	__u64 answered_ns; /* CLOCK_MONOTONIC when its server's answer was taken here; 0: it was not */
	__u32 number;      /* of the answer's SYN */
	__u32 zero[3];
	struct flow_side side[2]; /* client, server */
};

/*
 * What a server was asked, in the map "questions": what its answer has to be, and the frame that is sent to it then. All that
 * follows from the answer is zero in the frame, and counts as that in its checksum: the acknowledgement, and two time stamps.
 */
struct question {
	__u64 behind_ns;    /* the worker's time is so much behind the monotonic clock */
	__u32 clock;        /* our time stamps are milliseconds of the worker's time and this */
	__u32 acknowledges; /* what the answer has to */
	__u32 shown;        /* the server's numbers begin here for the client */
	__u32 stamp;        /* the client's last */
	__u32 length;       /* of the frame */
	__u16 needs;        /* the least that MSS and window have to be */
	__u8 stamps, sack, scale; /* what it has to agree to */
	__u8 zero[3]; /* they follow in the word of scale */
	__u8 frame[988];
};

#define PLACES 8

/* Upper half: that of the hash. Lower half: number of the flow * 2 + side + 1; 0: free. */
struct bucket {
	__u64 place[PLACES];
};

/*
 * The one value of the map "lending". Each worker has so many of the flows, and a ring in "over": the number + 1 of each of
 * its flows that has ended. Programs write there from the number in "over_heads" on, and user space takes out.
 */
struct lending {
	__u64 seed;
	__u32 bucket_mask;
	__u32 share;
	__u32 ring_mask;
	__u32 zero;
};

/* The values of the map "over_heads", each in a line of memory of its own. */
struct over_head {
	__u32 head;
	__u32 zero[15];
};

/* What a packet socket's filter has decided, for tc, which sees the same packet next on the same processor. */
struct taken {
	__u32 entry; /* as in a place; 0: nothing */
	__u32 ports;
	__u32 sequence;
	__u32 acknowledgement;
};

#endif
