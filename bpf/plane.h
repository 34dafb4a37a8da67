/* SPDX-License-Identifier: MIT OR GPL-2.0-only */
/*
 * Whole connections in XDP, from the SYN on: what plane.bpf.h and crates/sys/src/bpf/plane.rs share. User space maps the
 * memory of all of it but `decisions` and `devices`.
 *
 * A connection has a slot, and each slot a source port of its own: "first" + its number. Programs take slots from the ring
 * `plane_free`, and put those of connections that have ended into the ring `plane_done`; user space does the reverse, so
 * nothing is reused before its record was made. An entry in `plane_places` leads from a client's end to its slot.
 *
 * Numbers are in the byte order of the host. Sequence numbers are not translated: client and server talk to each other.
 */
#ifndef SIDETRACK_PLANE_H
#define SIDETRACK_PLANE_H

#include <linux/types.h>
#include <stddef.h>

/* plane_flow.state. PLANE_KILLED: user space ends it, its packets are user space's. */
enum { PLANE_FREE, PLANE_SYN, PLANE_SYN_ACK, PLANE_OPEN, PLANE_CLOSED, PLANE_KILLED };

/* plane_flow.reason, of a closed one. PLANE_UNUSED: it never was a connection. */
enum { PLANE_OK, PLANE_CLIENT_RESET, PLANE_SERVER_RESET, PLANE_REFUSED, PLANE_UNUSED };

/* plane_side.fins */
enum { PLANE_FIN = 1, PLANE_FIN_ACKED = 2 };

/* What a client's connections to a listener become. */
struct plane_key {
	__u8 client[16] __attribute__((aligned(8)));
	__u8 local[16] __attribute__((aligned(8)));
	__u16 port;
	__u16 zero[3];
};

struct plane_decision {
	__u32 generation; /* of the rules it was made by */
	__u32 number;     /* user space's for it */
	__u8 server[16] __attribute__((aligned(8)));
	__u8 source[16] __attribute__((aligned(8)));
	__u16 server_port;
	__u16 egress; /* index into "devices" */
	__u16 link[6]; /* the neighbour by which the server is reached, and our own address there */
};

struct plane_side {
	/* Written by programs, on the processor that has this side's packets. */
	__u64 sent; /* after the last number it used; the upper half counts the turns of the lower */
	__u64 last_ns;
	__u64 zero64;
	__u32 first;        /* its initial sequence number */
	__u32 acknowledged; /* the highest number it acknowledged */
	__u32 packets;
	__u32 fin; /* after its FIN */
	__u32 fins;
	/* Fixed. */
	__u32 egress; /* index into "devices" of the interface by which it is reached */
	__u16 fix;    /* change of the TCP checksum of its packets */
	__u16 fix_ip; /* change of the IP header's */
	__u32 zero[3];
};

struct plane_flow {
	__u32 state;
	__u32 reason;
	__u32 decision; /* plane_decision.number */
	__u32 bucket;   /* where its place is */
	__u64 opened_ns, connected_ns, closed_ns;
	__u8 zero[24];
	__u8 client[16] __attribute__((aligned(8)));
	__u8 local[16] __attribute__((aligned(8)));
	__u8 server[16] __attribute__((aligned(8)));
	__u8 source[16] __attribute__((aligned(8)));
	/* As in a packet to the side: source, destination; the neighbour and our own address there. */
	__u16 client_port, local_port, server_port, source_port;
	__u16 to_client[6], to_server[6];
	__u8 zero2[32];
	struct plane_side side[2]; /* client, server */
};

#define PLANE_PLACES 8

struct plane_bucket {
	__u64 place[PLANE_PLACES]; /* half of the hash << 32 | slot + 1; 0: none */
};

struct plane {
	__u64 seed;
	__u32 bucket_mask;
	__u32 ring_mask;
	__u32 first; /* port of slot 0 */
	__u32 count; /* of slots */
	__u32 generation;
	__u32 zero[9];
	/* Written by programs. */
	__u32 free_head;
	__u32 done_head;
	__u32 zero1[14];
	/* Written by user space. */
	__u32 free_tail;
	__u32 zero2[15];
	/* Counters. */
	__u64 full;    /* SYNs for which there was no slot */
	__u64 refused; /* segments with impossible numbers */
	__u64 zero3[6];
};

#endif
