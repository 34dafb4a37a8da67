/* SPDX-License-Identifier: MIT OR GPL-2.0-only */
/*
 * The layout of decided connections: connections that XDP handles from the SYN on, by a decision that user
 * space has made for the client before. Shared by decided.bpf.h and crates/sys/src/bpf/decided.rs. User space
 * maps the memory of all these maps except `decisions`, `devices` and `ingresses`.
 *
 * The states of a connection (decided_flow.state; P: a program changes it, U: user space):
 *
 *     FREE --P: a client's SYN--> SYN --P: SYN-ACK--> SYN_ACK --P: client's ACK--> OPEN
 *     SYN, SYN_ACK, OPEN --P: reset, refusal, both FINs acknowledged--> CLOSED (late packets are still forwarded)
 *     SYN, SYN_ACK, OPEN --U: kill--> KILLED (its packets go to user space)
 *     CLOSED, KILLED --U: release--> FREE
 *
 * A connection has a slot, and each slot has a source port of its own: `first` + the slot's number.
 * Programs take slots from the ring `decided_free`, and put slots of ended connections into the ring
 * `decided_done`. User space does the reverse, so no slot is reused before its record is written. An entry in
 * `decided_places` leads from a client's address and port to its slot.
 *
 * Numbers are in the byte order of the host. Sequence numbers are not translated: client and server use
 * each other's.
 */
#ifndef SIDETRACK_DECIDED_H
#define SIDETRACK_DECIDED_H

#include <linux/types.h>
#include <stddef.h>

/* decided_flow.state; see the diagram above. */
enum { DECIDED_FREE, DECIDED_SYN, DECIDED_SYN_ACK, DECIDED_OPEN, DECIDED_CLOSED, DECIDED_KILLED };

/* decided_flow.reason of a CLOSED connection. DECIDED_UNUSED: the bucket was full, no connection was made. */
enum { DECIDED_OK, DECIDED_CLIENT_RESET, DECIDED_SERVER_RESET, DECIDED_REFUSED, DECIDED_UNUSED };

/* decided_side.fins: its FIN was seen; it was acknowledged. */
enum { DECIDED_FIN = 1, DECIDED_FIN_ACKED = 2 };

/* Key of the map "decisions": a client, and the address that it connects to. */
struct decision_key {
	__u8 client[16] __attribute__((aligned(8)));
	__u8 local[16] __attribute__((aligned(8)));
	__u16 port;
	__u16 zero[3];
};

struct decision {
	__u32 generation; /* generation of the rules that made the decision */
	__u32 number;     /* user space's number for the decision */
	__u8 server[16] __attribute__((aligned(8)));
	__u8 source[16] __attribute__((aligned(8)));
	__u16 server_port;
	__u16 egress; /* index into "devices" */
	__u16 link[6]; /* link address of the next hop to the server, and our own address there */
};

struct decided_side {
	/* Written by programs, on the processor that handles this side's packets. */
	__u64 sent; /* after the last sequence number it used; the upper half counts wraps of the lower half, starting at 1 */
	__u64 last_ns;
	__u64 zero64;
	__u32 first;        /* its initial sequence number */
	__u32 acknowledged; /* the highest number it acknowledged */
	__u32 packets;
	__u32 fin; /* sequence number after its FIN */
	__u32 fins;
	/* Fixed when the connection begins. */
	__u32 egress; /* index into "devices" of the interface towards it */
	__u16 fix;    /* change of the TCP checksum of its packets */
	__u16 fix_ip; /* change of the IP header checksum */
	__u32 zero[3];
};

struct decided_flow {
	__u32 state;
	__u32 reason;
	__u32 decision; /* decision.number */
	__u32 bucket;   /* its bucket in "decided_places" */
	__u64 opened_ns, connected_ns, closed_ns;
	__u8 zero[24];
	__u8 client[16] __attribute__((aligned(8)));
	__u8 local[16] __attribute__((aligned(8)));
	__u8 server[16] __attribute__((aligned(8)));
	__u8 source[16] __attribute__((aligned(8)));
	/* Link addresses in the order of a frame to that side: the next hop's, our own. */
	__u16 client_port, local_port, server_port, source_port;
	__u16 to_client[6], to_server[6];
	__u8 zero2[32];
	struct decided_side side[2]; /* client, server */
};

#define DECIDED_PLACES 8

struct decided_bucket {
	__u64 place[DECIDED_PLACES]; /* upper half of the hash << 32 | slot + 1; 0: none */
};

struct decided {
	__u64 seed;
	__u32 bucket_mask;
	__u32 ring_mask;
	__u32 first; /* source port of slot 0 */
	__u32 count; /* number of slots */
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
	__u64 full;    /* SYNs that found no free slot */
	__u64 refused; /* segments with impossible sequence numbers, which were dropped */
	__u64 zero3[6];
};

#endif
