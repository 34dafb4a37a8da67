/* SPDX-License-Identifier: MIT OR GPL-2.0-only */
/*
 * The layout that the shunt's fast path and crates/sys/src/bpf/flow.rs share. shunt.layout.c tells Rust its
 * sizes and offsets.
 *
 * Only the kernel's own headers are used, no libbpf. Helpers are called by number (linux/bpf.h, enum
 * bpf_func_id).
 */
#ifndef SIDETRACK_SHUNT_H
#define SIDETRACK_SHUNT_H

#include <linux/bpf.h>
#include <linux/types.h>
#include <stddef.h>

#define SECTION(name) __attribute__((section(name), used))
#define ALWAYS_INLINE static inline __attribute__((always_inline))

/* One direction of a flow as it comes in. Addresses and ports are in network byte order. */
struct key4 {
	__u32 ingress; /* interface index */
	__u32 source;
	__u32 destination;
	__u16 source_port;
	__u16 destination_port;
	__u8 protocol;
	__u8 zero[3];
};

struct key6 {
	__u32 ingress;
	__u8 source[16];
	__u8 destination[16];
	__u16 source_port;
	__u16 destination_port;
	__u8 protocol;
	__u8 zero[3];
};

/* What happens to a packet that fits the entry. */
enum { ACTION_REDIRECT = 0, ACTION_DROP = 1 };

/* flow.ended: set by the program, never cleared. Once it is not 0, this direction takes the slow path. */
enum {
	ENDED_FIN = 1,
	ENDED_RST = 2,
	ENDED_SYN = 4,
	ENDED_IDLE = 8,
};

struct flow {
	__u64 packets;
	__u64 bytes;         /* bytes of IP packets, as conntrack counts them */
	__u64 last_ns;       /* CLOCK_MONOTONIC_COARSE of the latest packet; before the first: of the installation */
	__u64 idle_ns;       /* the entry ends after this time without a packet */
	__u32 generation;    /* generation of the rules that allowed it */
	__u32 egress;        /* interface index */
	__u32 mtu;           /* of the egress, in bytes of an IP packet */
	__u32 sequence_end;  /* behind the last byte of data sent in this direction */
	__u32 acknowledged;  /* latest acknowledgement sent in this direction */
	__u32 action;
	__u32 known;         /* not 0: sequence numbers and link addresses are valid */
	__u32 ended;
	__u8 link[12];       /* destination and source link address: of the first packet (bridged), of the next hop (routed) */
	__u32 pair;          /* PAIR_* */
	__u64 installed_as;  /* user space's number for the entry */
	__u64 way_ns;        /* routed: when the next hop was looked up last */
	__u32 way_mtu;       /* routed: the largest IP packet the route is known to take; 0: no route known */
	__u32 vlan;          /* bridged: VLAN_* of its packets */
};

/* flow.vlan: the tag of the packets of a direction. The low 12 bits of a tagged one are the VLAN's number. */
enum {
	VLAN_UNKNOWN = 0,        /* no packet was seen yet */
	VLAN_TAGGED = 0x10000,
	VLAN_UNTAGGED = 0x20000,
	VLAN_MIXED = 0x40000,    /* the two directions have different tags: the bridge changes them */
	VLAN_STACKED = 0x80000,  /* several tags, or one of 802.1ad */
};

/*
 * flow.pair: whether the egress is one end of a pair (veth, netkit) whose other end is in another
 * network namespace.
 */
enum {
	PAIR_NONE = 0,   /* no: packets go out by the egress */
	PAIR_WAITS = 1,  /* yes, but an earlier packet may still be in the egress' queue */
	PAIR_ACROSS = 2, /* yes: packets are injected at the other end (bpf_redirect_peer) */
};

/* The one value of the settings map. */
struct settings {
	__u32 generation;    /* entries of another generation take the slow path */
	__u32 zero;
	__u64 alive_until_ns; /* user space renews this; after it, every packet takes the slow path */
};

#endif
