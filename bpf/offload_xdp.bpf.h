/* SPDX-License-Identifier: MIT OR GPL-2.0-only */
/*
 * Forwards packets of offloaded connections in XDP. Uses the checks and the translation of offload.bpf.h.
 * Unlike tc, XDP has the packet alone (no packet socket got a copy), so it forwards FINs too, and tells
 * user space when both sides have closed.
 */
#ifndef SIDETRACK_OFFLOAD_XDP_BPF_H
#define SIDETRACK_OFFLOAD_XDP_BPF_H

#include "handshake.bpf.h"
#include "offload.bpf.h"

/* Maps that this uses; user space creates them. */
extern char over, over_heads;

ALWAYS_INLINE void ends_of(const struct packet *w, struct ends *ends, const int v6)
{
	if (v6) {
		__builtin_memcpy(ends->remote, w->ip + SOURCE_AT(1), 16);
		__builtin_memcpy(ends->local.address, w->ip + TARGET_AT(1), 16);
	} else {
		map4(ends->remote, w->ip + SOURCE_AT(0));
		map4(ends->local.address, w->ip + TARGET_AT(0));
	}
	take_ports(ends, (const __u16 *)w->tcp, 0, 0);
}

ALWAYS_INLINE int take_segment(struct xdp_md *xdp, const struct packet *w, struct segment *s, const int v6)
{
	__u32 at = IP_BYTES(v6) + BARE;

#pragma unroll
	for (int i = 0; i < BARE / 4; i++)
		s->tcp[i] = ((const __u32 *)w->tcp)[i];
	s->payload = w->payload;
	s->ttl = w->ip[v6 ? 7 : 8];
	s->options = (((w->tcp[12] >> 4) * 4) - BARE) & 0x3c;
	return !s->options || !load(xdp, 1, at, s->tcp + BARE / 4, s->options);
}

/* Puts a connection that both sides have closed into its worker's ring, once. */
ALWAYS_INLINE void tell_over(struct flow *flow, __u32 number)
{
	__u32 zero = 0, worker, at;
	const struct offload *set = map_lookup(&offload, &zero);
	struct over_head *head;
	__u64 *place;

	if (__sync_val_compare_and_swap(&flow->state, FLOW_OFFLOADED, FLOW_ENDED) != FLOW_OFFLOADED || !set || !set->share)
		return;
	worker = number / set->share;
	head = map_lookup(&over_heads, &worker);
	if (!head)
		return;
	at = worker * (set->ring_mask + 1) + (__sync_fetch_and_add(&head->head, 1) & set->ring_mask);
	place = map_lookup(&over, &at);
	if (place)
		*(volatile __u64 *)place = number + 1;
}

ALWAYS_INLINE void follow_fins(struct flow *flow, struct flow_side *own, struct flow_side *other, const struct segment *s,
			       __u32 number)
{
	if (mark_fins(own, other, s))
		tell_over(flow, number);
}

/* Translates the headers and sends the packet out by the other side's interface. */
ALWAYS_INLINE int forward_offloaded(struct xdp_md *xdp, struct packet *w, struct segment *s, const struct flow_side *own,
			   const struct flow_side *other, const int v6)
{
	__u16 *check = (__u16 *)(w->tcp + 16);
	__u32 options = s->options;
	__u64 sum;

	if (!finish(xdp, w, v6))
		return XDP_DROP;
	sum = translate(s, own, other);
	if (s->blocks)
		sum += translate_blocks(s, s->stamps ? BARE + STAMPS_LENGTH + 4 : BARE + 4, other);
	*check = ~fold16((__u64)(__u16)~*check + folded(sum) + own->fix);
#pragma unroll
	for (int i = 0; i < 4; i++)
		((__u32 *)w->tcp)[i] = s->tcp[i];
	readdress(w, other->local, other->remote, own->fix, v6);
#pragma unroll
	for (int i = 0; i < 3; i++)
		((__u32 *)w->eth)[i] = ((const __u32 *)other->to)[i];
	HIDE(options);
	if (options && (options > sizeof(s->tcp) - BARE ||
			xdp_store(xdp, ETH_HLEN + IP_BYTES(v6) + BARE, s->tcp + BARE / 4, options)))
		return XDP_DROP;
	return tc_redirect(other->egress, 0);
}

ALWAYS_INLINE int offload_packet(struct xdp_md *xdp, const int v6)
{
	struct flow_side *own, *other;
	struct segment s = {};
	struct ends ends = {};
	struct flow *flow;
	struct packet w;
	__u32 entry;

	if (!read_packet(xdp, &w, v6))
		return UP;
	ends_of(&w, &ends, v6);
	entry = entry_of(&ends);
	flow = flow_of(entry);
	if (!flow)
		return UP;
	own = entry & 1 ? &flow->side[0] : &flow->side[1];
	other = entry & 1 ? &flow->side[1] : &flow->side[0];
	if (own->v6 != (__u32)v6 || !is_between(own, &ends))
		return UP;
	if (*(volatile __u32 *)&flow->state == FLOW_SYN_SENT)
		return entry & 1 ? UP : take_syn_ack(xdp, &w, flow, own, other, v6);
	if (!take_segment(xdp, &w, &s, v6) || !judge(flow, own, other, 0, &s, 1))
		return UP;
	follow_fins(flow, own, other, &s, (entry - 1) >> 1);
	return forward_offloaded(xdp, &w, &s, own, other, v6);
}

ALWAYS_INLINE int offload_own(struct xdp_md *xdp)
{
	__u8 *eth = (void *)(long)xdp->data, *end = (void *)(long)xdp->data_end;

	if (eth + ETH_HLEN > end)
		return UP;
	if (*(__u16 *)(eth + 12) == swap16(ETH_P_IP))
		return offload_packet(xdp, 0);
	if (*(__u16 *)(eth + 12) == swap16(ETH_P_IPV6))
		return offload_packet(xdp, 1);
	return UP;
}

#endif
