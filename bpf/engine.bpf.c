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
#include "own_xdp.bpf.h"
#include "offload_tc.bpf.h"
#include "offload_xdp.bpf.h"
#include "decided.bpf.h"

SECTION("socket/own") int socket_own(struct __sk_buff *skb)
{
	struct ends ends = {};

	return read(skb, 0, swap16(skb->protocol), &ends) != FOREIGN && owner(&ends) >= 0 ? -1 : 0;
}

/* Like socket/own, but leaves out packets of offloaded connections: tc forwards them. */
SECTION("socket/offload") int socket_offload(struct __sk_buff *skb)
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

/* Like tc/own, and forwards the packets that socket/offload has left out. */
SECTION("tc/offload") int tc_offload(struct __sk_buff *skb)
{
	struct ends ends = {};

	if (read(skb, 0, swap16(skb->protocol), &ends) != SEGMENT)
		return TC_ACT_UNSPEC;
	switch (pass_on(skb, &ends)) {
	case NOT_TAKEN:
		if (owner(&ends) < 0)
			return TC_ACT_UNSPEC;
		count_to_user(skb, &ends);
		return TC_ACT_SHOT;
	case FAILED:
		return TC_ACT_SHOT;
	default:
		return TC_ACT_REDIRECT;
	}
}

SECTION("xdp/own") int xdp_own(struct xdp_md *xdp)
{
	return own_xdp(xdp, 0);
}

/* Like xdp/own, but answers SYNs with cookies. */
SECTION("xdp/own_cookie") int xdp_own_cookie(struct xdp_md *xdp)
{
	return own_xdp(xdp, 1);
}

/* Like xdp/own, but forwards packets of offloaded connections. */
SECTION("xdp/offload") int xdp_offload(struct xdp_md *xdp)
{
	int action = offload_own(xdp);

	return action == UP ? own_xdp(xdp, 0) : action;
}

SECTION("xdp/offload_cookie") int xdp_offload_cookie(struct xdp_md *xdp)
{
	int action = offload_own(xdp);

	return action == UP ? own_xdp(xdp, 1) : action;
}

/* Like xdp/own, but handles decided connections from the SYN on. */
SECTION("xdp/decided") int xdp_decided(struct xdp_md *xdp)
{
	int action = decided_own(xdp);

	return action == UP ? own_xdp(xdp, 0) : action;
}

SECTION("xdp/both") int xdp_both(struct xdp_md *xdp)
{
	int action = decided_own(xdp);

	if (action == UP)
		action = offload_own(xdp);
	return action == UP ? own_xdp(xdp, 0) : action;
}

SECTION("license") char _license[] = "Dual MIT/GPL";
