/* SPDX-License-Identifier: MIT OR GPL-2.0-only */
/*
 * Forwards packets of offloaded connections in tc, by the checks and the translation of offload.bpf.h.
 *
 * A packet meets two programs on one processor: first the filter of the packet socket, which decides (passes()),
 * then tc, which forwards the packet (pass_on()) if the filter has left it out of the socket.
 */
#ifndef SIDETRACK_OFFLOAD_TC_BPF_H
#define SIDETRACK_OFFLOAD_TC_BPF_H

#include "offload.bpf.h"

/* Maps that this uses; user space creates them. */
extern char taken;

/*
 * BPF_F_IPV6 (Linux 6.16), with BPF_F_PSEUDO_HDR. IPv6 has no header checksum that would cancel the
 * change of the addresses.
 */
#define F_IPV6 (1ULL << 7)

enum passed { NOT_TAKEN, FAILED, PASSED };

/*
 * Decides about one packet in the socket's filter, and leaves the decision for tc, which sees the packet
 * next on this processor.
 */
ALWAYS_INLINE int passes(struct __sk_buff *skb, int xdp, __u32 gso_size, const struct ends *ends)
{
	__u32 zero = 0, entry = entry_of(ends);
	struct taken *seen = map_lookup(&taken, &zero);
	struct flow *flow = flow_of(entry);
	struct segment s = {};
	struct flow_side *own, *other;

	if (!seen)
		return 0;
	/* Forget a decision about an earlier packet that never reached tc. */
	seen->entry = 0;
	if (!flow)
		return 0;
	own = entry & 1 ? &flow->side[0] : &flow->side[1];
	other = entry & 1 ? &flow->side[1] : &flow->side[0];
	if (!is_between(own, ends) || !read_segment(skb, xdp, ends, &s) ||
	    !judge(flow, own, other, gso_size, &s, 0))
		return 0;
	seen->entry = entry;
	seen->ports = s.tcp[0];
	seen->sequence = s.tcp[1];
	seen->acknowledgement = s.tcp[2];
	return 1;
}

/*
 * Counts a packet of an offloaded connection that user space gets. This has to happen in tc: by now the
 * packet is in the socket and in the socket's own count. If the filter, which runs earlier, counted it,
 * user space could see the count before the packet, and take it for one that it has handled already. This
 * side's next packet meets the filter only after this.
 */
ALWAYS_INLINE void count_to_user(struct __sk_buff *skb, const struct ends *ends)
{
	__u32 entry = entry_of(ends);
	struct flow *flow = flow_of(entry);
	struct flow_side *own;
	struct segment s = {};

	if (!flow || *(volatile __u32 *)&flow->state != FLOW_OFFLOADED)
		return;
	own = entry & 1 ? &flow->side[0] : &flow->side[1];
	if (*(volatile __u32 *)&own->joined || !is_between(own, ends) || !read_segment(skb, 0, ends, &s))
		return;
	if (s.payload)
		__sync_fetch_and_add(&own->to_user, 1);
}

/* Writes the new IP header: addresses, TTL one less. */
ALWAYS_INLINE int rewrite_ip(struct __sk_buff *skb, const struct flow_side *own, const struct flow_side *other)
{
	__u32 ip[10];
	__u64 sum;

	if (own->v6) {
		if (load(skb, 0, 0, ip, 40))
			return 0;
		((__u8 *)ip)[7]--;
		__builtin_memcpy(ip + 2, other->local, 16);
		__builtin_memcpy(ip + 6, other->remote, 16);
		return !skb_store(skb, ETH_HLEN, ip, 40, 0);
	}
	if (load(skb, 0, 0, ip, 20))
		return 0;
	sum = replaced((__u16) ~((__u16 *)ip)[5], ((__u16 *)ip)[4], 0);
	((__u8 *)ip)[8]--;
	sum = replaced(sum, 0, ((__u16 *)ip)[4]);
	((__u16 *)ip)[5] = ~folded(sum + own->fix);
	ip[3] = *(const __u32 *)(other->local + 12);
	ip[4] = *(const __u32 *)(other->remote + 12);
	return !skb_store(skb, ETH_HLEN, ip, 20, 0);
}

/*
 * Updates the TCP checksum by the change. A checksum that the sender left to the network card covers the
 * addresses only.
 */
ALWAYS_INLINE int fix_checksum(struct __sk_buff *skb, const struct flow_side *own, __u32 at, __u64 sum)
{
	if (l4_checksum(skb, at, 0, folded(sum), 0))
		return 0;
	if (own->v6 && !l4_checksum(skb, at, 0, own->fix, BPF_F_PSEUDO_HDR | F_IPV6))
		return 1;
	return !l4_checksum(skb, at, 0, own->fix, BPF_F_PSEUDO_HDR);
}

/* Translates the packet and its checksums; `sum` is what has changed before. The link-layer addresses stay. */
ALWAYS_INLINE int rewrite(struct __sk_buff *skb, struct segment *s, const struct flow_side *own,
			  const struct flow_side *other, __u64 sum)
{
	__u32 tcp = ETH_HLEN + (own->v6 ? 40 : 20);

	sum += translate(s, own, other);
	if (s->stamps)
		sum += translate_blocks(s, BARE + STAMPS_LENGTH + 4, other);
	else
		sum += translate_blocks(s, BARE + 4, other);
	if (!rewrite_ip(skb, own, other))
		return 0;
	if (skb_store(skb, tcp, s->tcp, BARE + (s->options & 0x3c), 0))
		return 0;
	return fix_checksum(skb, own, tcp + 16, sum);
}

/* Forwards the packet if the socket's filter has decided so. */
ALWAYS_INLINE enum passed pass_on(struct __sk_buff *skb, const struct ends *ends)
{
	__u32 zero = 0, entry;
	struct taken *seen = map_lookup(&taken, &zero);
	struct flow_side *own, *other;
	struct segment s = {};
	struct flow *flow;

	if (!seen || !seen->entry)
		return NOT_TAKEN;
	entry = seen->entry;
	flow = flow_of(entry);
	if (!flow || !read_segment(skb, 0, ends, &s) || seen->ports != s.tcp[0] || seen->sequence != s.tcp[1] ||
	    seen->acknowledgement != s.tcp[2])
		return NOT_TAKEN;
	seen->entry = 0;
	own = entry & 1 ? &flow->side[0] : &flow->side[1];
	other = entry & 1 ? &flow->side[1] : &flow->side[0];
	/* Destination and source address are adjacent in the frame, and so are `to` and `from`. */
	if (!understood(&s) || skb_store(skb, 0, other->to, 12, 0) || !rewrite(skb, &s, own, other, 0))
		return FAILED;
	return tc_redirect(other->egress, 0) == TC_ACT_REDIRECT ? PASSED : FAILED;
}

#endif
