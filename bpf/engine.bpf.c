/* SPDX-License-Identifier: MIT OR GPL-2.0-only */
/*
 * The programs of the packet engine; this file holds the sections only, the parts are in the headers.
 *
 * They all decide which packets belong to the engine, and to which worker: packets to an address and port
 * that the engine listens on, packets to a source address and port of its connections to servers, and ICMP
 * errors that quote a packet from either. Four kinds of program need that decision:
 *
 * - the filter of a packet socket;
 * - the choice among the packet sockets of the workers (fanout);
 * - tc, so that the kernel's TCP does not answer what a packet socket has taken;
 * - XDP, which hands the frame to an AF_XDP socket.
 *
 * The kernel keeps fragments, packets with IPv6 extension headers or VLAN tags, and everything that is
 * neither TCP nor such an ICMP error.
 */
#include "engine.h"
#include "answer.h"
#include "offload.h"
#include "plane.h"
#include <linux/if_ether.h>
#include <linux/in.h>
#include <linux/pkt_cls.h>

static void *(*map_lookup)(const void *map, const void *key) = (void *)BPF_FUNC_map_lookup_elem;
static long (*xdp_redirect)(const void *map, __u64 key, __u64 flags) = (void *)BPF_FUNC_redirect_map;
static long (*skb_load)(const void *ctx, __u32 at, void *to, __u32 length, __u32 from) =
	(void *)BPF_FUNC_skb_load_bytes_relative;
static long (*xdp_load)(void *ctx, __u32 at, void *to, __u32 length) = (void *)BPF_FUNC_xdp_load_bytes;

static long (*adjust_head)(struct xdp_md *xdp, int by) = (void *)BPF_FUNC_xdp_adjust_head;
static long (*adjust_tail)(struct xdp_md *xdp, int by) = (void *)BPF_FUNC_xdp_adjust_tail;
static long (*xdp_store)(void *ctx, __u32 at, const void *from, __u32 length) = (void *)BPF_FUNC_xdp_store_bytes;
static __u64 (*ktime_ns)(void) = (void *)BPF_FUNC_ktime_get_ns;
static __s64 (*csum_diff)(const void *from, __u32 from_size, const void *to, __u32 to_size, __u32 seed) =
	(void *)BPF_FUNC_csum_diff;
static __u64 (*ktime_coarse_ns)(void) = (void *)BPF_FUNC_ktime_get_coarse_ns;
static long (*skb_store)(struct __sk_buff *skb, __u32 at, const void *from, __u32 length, __u64 flags) =
	(void *)BPF_FUNC_skb_store_bytes;
static long (*l4_checksum)(struct __sk_buff *skb, __u32 at, __u64 from, __u64 to, __u64 flags) =
	(void *)BPF_FUNC_l4_csum_replace;
static long (*tc_redirect)(__u32 ifindex, __u64 flags) = (void *)BPF_FUNC_redirect;

/* Maps. User space creates them, the loader puts their descriptors here. */
extern char listens, sources, settings, sockets, scratches, cookies;
extern char buckets, flows, lending, taken, over, over_heads, questions;
extern char plane, plane_flows, plane_places, plane_free, plane_done, decisions, devices, ingresses;

#define swap16(x) __builtin_bswap16(x)
#define bpf_htonl(x) __builtin_bswap32(x)
/* Aligned for reading whole words. */
#define ALIGNED __attribute__((aligned(8)))
#define FROM_NETWORK_HEADER 1
#define ICMP 1
#define ICMPV6 58

/* Both ends of a packet. For a packet that an ICMP error quotes: swapped, so that `local` is ours again. */
struct ends {
	struct listen_key local;
	__u8 remote[16] ALIGNED;
	__u16 remote_port;
	__u32 transport; /* offset of the TCP header from the IP header */
};

/* What kind of packet this is: not the engine's protocol, a TCP segment, an ICMP error that quotes one. */
enum verdict { FOREIGN, SEGMENT, ERROR };

/* Copies bytes of the packet; `at` counts from the IP header. */
ALWAYS_INLINE int load(void *ctx, int xdp, __u32 at, void *to, __u32 length)
{
	return xdp ? xdp_load(ctx, ETH_HLEN + at, to, length) :
		     skb_load(ctx, at, to, length, FROM_NETWORK_HEADER);
}

ALWAYS_INLINE void map4(__u8 *to, const __u8 *from)
{
	__u32 *words = (void *)to;

	words[0] = 0;
	words[1] = 0;
	words[2] = bpf_htonl(0xffff);
	words[3] = *(const __u32 *)from;
}

ALWAYS_INLINE void take_ports(struct ends *ends, const __u16 *ports, __u32 at, int quoted)
{
	ends->transport = at;
	ends->remote_port = swap16(quoted ? ports[1] : ports[0]);
	ends->local.port = swap16(quoted ? ports[0] : ports[1]);
	ends->local.zero = 0;
}

/*
 * Reads the IPv4 header at an offset, and the ports behind it. Returns the protocol, 0 if the packet is
 * left to the kernel.
 */
ALWAYS_INLINE int read4(void *ctx, int xdp, __u32 at, struct ends *ends, __u32 *after, int quoted)
{
	__u8 ip[20] ALIGNED;
	__u16 ports[2] ALIGNED = {};
	__u32 length;

	if (load(ctx, xdp, at, ip, sizeof(ip)) || ip[0] >> 4 != 4)
		return 0;
	/* A quoted packet may have "more fragments" set: its TCP ports are there all the same. */
	if ((ip[6] & 0x1f) || ip[7] || (!quoted && (ip[6] & 0x20)))
		return 0;
	length = (ip[0] & 0xf) * 4;
	map4(quoted ? ends->local.address : ends->remote, ip + 12);
	map4(quoted ? ends->remote : ends->local.address, ip + 16);
	*after = at + length;
	if (ip[9] == IPPROTO_TCP) {
		if (load(ctx, xdp, at + length, ports, sizeof(ports)))
			return 0;
		take_ports(ends, ports, at + length, quoted);
	}
	return ip[9];
}

ALWAYS_INLINE int read6(void *ctx, int xdp, __u32 at, struct ends *ends, __u32 *after, int quoted)
{
	__u8 ip[40] ALIGNED;
	__u16 ports[2] ALIGNED = {};

	if (load(ctx, xdp, at, ip, sizeof(ip)) || ip[0] >> 4 != 6)
		return 0;
	__builtin_memcpy(quoted ? ends->local.address : ends->remote, ip + 8, 16);
	__builtin_memcpy(quoted ? ends->remote : ends->local.address, ip + 24, 16);
	*after = at + sizeof(ip);
	if (ip[6] == IPPROTO_TCP) {
		if (load(ctx, xdp, *after, ports, sizeof(ports)))
			return 0;
		take_ports(ends, ports, *after, quoted);
	}
	return ip[6];
}

/* Reads the ends of a packet, or of the packet that an ICMP error quotes. */
ALWAYS_INLINE enum verdict read(void *ctx, int xdp, __u16 ethertype, struct ends *ends)
{
	__u32 after = 0;
	__u8 kind = 0;
	int protocol;

	if (ethertype == ETH_P_IP) {
		protocol = read4(ctx, xdp, 0, ends, &after, 0);
		if (protocol != ICMP)
			return protocol == IPPROTO_TCP ? SEGMENT : FOREIGN;
		if (load(ctx, xdp, after, &kind, 1) || (kind != 3 && kind != 11 && kind != 12))
			return FOREIGN;
		return read4(ctx, xdp, after + 8, ends, &after, 1) == IPPROTO_TCP ? ERROR : FOREIGN;
	}
	if (ethertype == ETH_P_IPV6) {
		protocol = read6(ctx, xdp, 0, ends, &after, 0);
		if (protocol != ICMPV6)
			return protocol == IPPROTO_TCP ? SEGMENT : FOREIGN;
		if (load(ctx, xdp, after, &kind, 1) || kind < 1 || kind > 4)
			return FOREIGN;
		return read6(ctx, xdp, after + 8, ends, &after, 1) == IPPROTO_TCP ? ERROR : FOREIGN;
	}
	return FOREIGN;
}

/* Spreads clients over workers: a hash of the client's address and port. */
ALWAYS_INLINE __u32 spread(const struct ends *ends)
{
	const __u32 *words = (const void *)ends->remote;
	__u32 hash = ends->remote_port * 0x9e3779b1;

	hash = (hash ^ words[0] ^ words[1]) * 0x85ebca6b;
	hash = (hash ^ words[2] ^ words[3]) * 0xc2b2ae35;
	return hash ^ (hash >> 15);
}

/* Returns the worker that a packet belongs to; -1: not the engine's. */
ALWAYS_INLINE int owner(const struct ends *ends)
{
	struct listen_key key = ends->local;
	__u32 zero = 0;
	const struct settings *set = map_lookup(&settings, &zero);
	const struct source *source = map_lookup(&sources, key.address);
	__u32 worker;

	if (!set || !set->workers)
		return -1;
	if (source && key.port >= source->first && key.port <= source->last) {
		if (source->worker != SHARED)
			return source->worker;
		worker = set->block ? (key.port - source->first) / set->block : 0;
		return worker < set->workers ? (int)worker : -1;
	}
	if (!map_lookup(&listens, &key)) {
		__builtin_memset(key.address, 0, sizeof(key.address));
		if (!map_lookup(&listens, &key))
			return -1;
	}
	return spread(ends) % set->workers;
}

#include "offload.bpf.h"
#include "whole.bpf.h"
#include "plane.bpf.h"
#include "answer.bpf.h"
#include "ask.bpf.h"
#include "carry.bpf.h"

SECTION("socket/own") int socket_own(struct __sk_buff *skb)
{
	struct ends ends = {};

	return read(skb, 0, swap16(skb->protocol), &ends) != FOREIGN && owner(&ends) >= 0 ? -1 : 0;
}

/* Like socket/own, but leaves out packets of offloaded connections: tc forwards them. */
SECTION("socket/rest") int socket_rest(struct __sk_buff *skb)
{
	struct ends ends = {};
	enum verdict verdict = read(skb, 0, swap16(skb->protocol), &ends);

	if (verdict == SEGMENT && passes(skb, 0, skb->gso_size, &ends))
		return 0;
	return verdict != FOREIGN && owner(&ends) >= 0 ? -1 : 0;
}

SECTION("socket/worker") int socket_worker(struct __sk_buff *skb)
{
	struct ends ends = {};

	if (read(skb, 0, swap16(skb->protocol), &ends) == FOREIGN)
		return 0;
	return owner(&ends);
}

/*
 * Drops segments only. The kernel may see ICMP errors as well: it finds no connection of its own for
 * them.
 */
SECTION("tc/own") int tc_own(struct __sk_buff *skb)
{
	struct ends ends = {};

	if (read(skb, 0, swap16(skb->protocol), &ends) == SEGMENT && owner(&ends) >= 0)
		return TC_ACT_SHOT;
	return TC_ACT_UNSPEC;
}

/* Like tc/own, and forwards the packets that socket/rest has left out. */
SECTION("tc/rest") int tc_rest(struct __sk_buff *skb)
{
	struct ends ends = {};

	if (read(skb, 0, swap16(skb->protocol), &ends) != SEGMENT)
		return TC_ACT_UNSPEC;
	switch (pass_on(skb, &ends)) {
	case NOT_TAKEN:
		if (owner(&ends) < 0)
			return TC_ACT_UNSPEC;
		count_given(skb, &ends);
		return TC_ACT_SHOT;
	case FAILED:
		return TC_ACT_SHOT;
	default:
		return TC_ACT_REDIRECT;
	}
}

/*
 * Reads the ends of a plain TCP packet in place. Nearly all packets are plain, and this costs a fraction
 * of read().
 */
ALWAYS_INLINE int read_plain(struct xdp_md *xdp, struct ends *ends)
{
	const __u8 *ip = (void *)((long)xdp->data + ETH_HLEN), *end = (void *)(long)xdp->data_end;
	const __u16 *ports;
	__u32 at;

	if (ip + 20 + 4 > end)
		return 0;
	if (*(const __u16 *)(ip - 2) == swap16(ETH_P_IP)) {
		if (ip[0] != 0x45 || ip[9] != IPPROTO_TCP || (*(const __u16 *)(ip + 6) & swap16(0x3fff)))
			return 0;
		map4(ends->remote, ip + 12);
		map4(ends->local.address, ip + 16);
		ports = (const __u16 *)(ip + 20);
		at = 20;
	} else if (*(const __u16 *)(ip - 2) == swap16(ETH_P_IPV6)) {
		if (ip + 40 + 4 > end || ip[0] >> 4 != 6 || ip[6] != IPPROTO_TCP)
			return 0;
		__builtin_memcpy(ends->remote, ip + 8, 16);
		__builtin_memcpy(ends->local.address, ip + 24, 16);
		ports = (const __u16 *)(ip + 40);
		at = 40;
	} else {
		return 0;
	}
	take_ports(ends, ports, at, 0);
	return 1;
}

ALWAYS_INLINE int own_xdp(struct xdp_md *xdp, const int answers)
{
	struct ends ends = {};
	__u16 ethertype = 0;
	int worker, action = UP;

	if (read_plain(xdp, &ends)) {
		worker = owner(&ends);
		if (worker < 0)
			return XDP_PASS;
		if (answers)
			action = ends.transport == 20 ? answer_own(xdp, &ends, worker, 0) : answer_own(xdp, &ends, worker, 1);
		return action == UP ? xdp_redirect(&sockets, xdp->rx_queue_index, XDP_PASS) : action;
	}
	if (xdp_load(xdp, 12, &ethertype, sizeof(ethertype)))
		return XDP_PASS;
	if (read(xdp, 1, swap16(ethertype), &ends) == FOREIGN || owner(&ends) < 0)
		return XDP_PASS;
	return xdp_redirect(&sockets, xdp->rx_queue_index, XDP_PASS);
}

SECTION("xdp/own") int xdp_own(struct xdp_md *xdp)
{
	return own_xdp(xdp, 0);
}

/* Like xdp/own, but answers SYNs with cookies. */
SECTION("xdp/own_answer") int xdp_own_answer(struct xdp_md *xdp)
{
	return own_xdp(xdp, 1);
}

/* Like xdp/own, but forwards packets of offloaded connections. */
SECTION("xdp/rest") int xdp_rest(struct xdp_md *xdp)
{
	int action = carry_own(xdp);

	return action == UP ? own_xdp(xdp, 0) : action;
}

SECTION("xdp/rest_answer") int xdp_rest_answer(struct xdp_md *xdp)
{
	int action = carry_own(xdp);

	return action == UP ? own_xdp(xdp, 1) : action;
}

/* Like xdp/own, but handles decided connections from the SYN on. */
SECTION("xdp/plane") int xdp_plane(struct xdp_md *xdp)
{
	int action = plane_own(xdp);

	return action == UP ? own_xdp(xdp, 0) : action;
}

SECTION("xdp/both") int xdp_both(struct xdp_md *xdp)
{
	int action = plane_own(xdp);

	if (action == UP)
		action = carry_own(xdp);
	return action == UP ? own_xdp(xdp, 0) : action;
}

SECTION("license") char _license[] = "Dual MIT/GPL";

/* For crates/sys/src/bpf/offload.rs, which compares its idea of the layout with this. */
#define PLACE(type, member) offsetof(struct type, member)
SECTION("layout") const __u32 _layout[] = {
	sizeof(struct flow), sizeof(struct flow_side), sizeof(struct bucket), sizeof(struct lending), sizeof(struct taken),
	PLACE(flow, question), PLACE(flow, answered_ns), PLACE(flow, number), PLACE(flow, side), PLACE(flow_side, remote), PLACE(flow_side, local), PLACE(flow_side, ports),
	PLACE(flow_side, add), PLACE(flow_side, sent), PLACE(flow_side, acknowledged), PLACE(flow_side, edge),
	PLACE(flow_side, stamp), PLACE(flow_side, packets), PLACE(flow_side, given), PLACE(flow_side, done),
	PLACE(flow_side, joined), PLACE(flow_side, stamp_add), PLACE(flow_side, stamp_first),
	PLACE(flow_side, egress), PLACE(flow_side, to), PLACE(flow_side, from), PLACE(flow_side, mss),
	PLACE(flow_side, shift), PLACE(flow_side, shown_shift), PLACE(flow_side, fix), PLACE(flow_side, v6),
	PLACE(flow_side, fin), PLACE(flow_side, fins), PLACE(flow_side, last_ns),
	sizeof(struct question), PLACE(question, behind_ns), PLACE(question, clock), PLACE(question, acknowledges),
	PLACE(question, shown), PLACE(question, stamp), PLACE(question, length), PLACE(question, needs), PLACE(question, stamps),
	PLACE(question, sack), PLACE(question, scale), PLACE(question, frame),
};

/* The same for crates/sys/src/bpf/plane.rs. */
SECTION("plane_layout") const __u32 _plane_layout[] = {
	sizeof(struct plane_key), sizeof(struct plane_decision), sizeof(struct plane_flow), sizeof(struct plane_side),
	sizeof(struct plane_bucket), sizeof(struct plane), PLACE(plane_flow, reason), PLACE(plane_flow, decision),
	PLACE(plane_flow, bucket), PLACE(plane_flow, opened_ns), PLACE(plane_flow, connected_ns),
	PLACE(plane_flow, closed_ns), PLACE(plane_flow, client), PLACE(plane_flow, local), PLACE(plane_flow, server),
	PLACE(plane_flow, source), PLACE(plane_flow, client_port), PLACE(plane_flow, to_client),
	PLACE(plane_flow, to_server), PLACE(plane_flow, side), PLACE(plane_side, last_ns), PLACE(plane_side, first),
	PLACE(plane_side, acknowledged), PLACE(plane_side, packets), PLACE(plane_side, fins), PLACE(plane_side, egress),
	PLACE(plane, generation), PLACE(plane, free_head), PLACE(plane, free_tail), PLACE(plane, full),
	PLACE(plane, refused),
};

/* The same for crates/sys/src/bpf/answer.rs. */
SECTION("answer_layout") const __u32 _answer_layout[] = {
	sizeof(struct cookies), PLACE(cookies, on), PLACE(cookies, clock), PLACE(cookies, key), PLACE(cookies, behind_ns),
	PLACE(cookies, mss4), PLACE(cookies, mss6), PLACE(cookies, window), PLACE(cookies, shift), PLACE(cookies, answered),
};
