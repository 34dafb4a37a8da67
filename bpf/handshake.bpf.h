/* SPDX-License-Identifier: MIT OR GPL-2.0-only */
/*
 * Takes the SYN-ACK of a server for user space. User space has sent the server a SYN and left here what the
 * SYN-ACK has to be and which frame follows it (struct handshake of offload.h). The program turns the frame
 * with the SYN-ACK into that frame, which acknowledges it and carries the client's first bytes. From then
 * on the connection is offloaded.
 *
 * User space gets the SYN-ACK instead if it does not agree to exactly the options that were offered, if it
 * is malformed, or if its buffer has no room for the other frame.
 */
#ifndef SIDETRACK_HANDSHAKE_BPF_H
#define SIDETRACK_HANDSHAKE_BPF_H

#include "offload.bpf.h"
#include "options.bpf.h"

/* Maps that this uses; user space creates them. */
extern char handshakes;

/*
 * Checks the TCP checksum of a segment without payload, whose options are in the scratch memory. A checksum
 * that the sender left to its network card (it covers the addresses only) is accepted too.
 */
ALWAYS_INLINE int is_intact(struct xdp_md *xdp, const struct packet *w, __u8 *scratch, __u32 options, const int v6)
{
	__u8 bare[BARE] ALIGNED;
	__u64 sum = sum_words(w->ip + SOURCE_AT(v6), v6) + sum_words(w->ip + TARGET_AT(v6), v6) + swap16(IPPROTO_TCP) +
		    swap16(BARE + options);

	if (fold16(sum) == *(const __u16 *)(w->tcp + 16))
		return 1;
	if (xdp_load(xdp, ETH_HLEN + IP_BYTES(v6), bare, BARE))
		return 0;
	HIDE(options);
	sum += (__u32)csum_diff(0, 0, (void *)bare, BARE, 0);
	sum += (__u32)csum_diff(0, 0, (void *)(scratch + OPTIONS_AT), options & 0x3c, 0);
	return fold16(sum) == 0xffff;
}

/* Whether this packet is the expected SYN-ACK. Its options are in the scratch memory then. */
ALWAYS_INLINE int is_expected(struct xdp_md *xdp, const struct packet *w, const struct handshake *q, __u8 *scratch, const int v6)
{
	volatile struct offer *o = (struct offer *)(scratch + OFFER_AT);
	__u32 options = (w->tcp[12] >> 4) * 4 - BARE;

	if ((w->flags & (TCP_SYN | TCP_ACK | TCP_RST | TCP_FIN)) != (TCP_SYN | TCP_ACK) || w->payload ||
	    w->ack != q->acknowledges || swap16(*(const __u16 *)(w->tcp + 14)) < q->needs)
		return 0;
	return read_offer(xdp, scratch, ETH_HLEN + IP_BYTES(v6) + BARE, options, o) && o->mss >= q->needs &&
	       o->has_stamp == q->stamps && o->has_sack == q->sack && (o->shift != NO_SHIFT) == q->scale &&
	       is_intact(xdp, w, scratch, options, v6);
}

/* Writes into the connection what follows from the SYN-ACK: sequence offsets, window, MSS, time stamps. */
ALWAYS_INLINE void apply_syn_ack(struct flow *flow, struct flow_side *server, struct flow_side *client, const struct handshake *q,
			 const struct offer *o, __u32 seq, __u32 window)
{
	__u32 clock = (__u32)((ktime_ns() - q->behind_ns) / STAMP_MS) + q->clock;

	flow->number = seq;
	server->add = q->shown - seq;
	server->sent = 1ULL << 32 | (__u32)(seq + 1);
	server->edge = q->acknowledges + window;
	server->stamp = o->stamp;
	server->stamp_first = o->stamp;
	server->stamp_add = clock - o->stamp;
	server->mss = o->mss < server->mss ? o->mss : server->mss;
	server->shift = q->scale ? o->shift : 0;
	client->stamp_add = clock - q->stamp;
	/*
	 * The coarse clock, as for packets. With the exact one a packet could seem to come before the
	 * SYN-ACK.
	 */
	flow->connected_ns = ktime_coarse_ns();
}

/* Makes a frame longer by `by` bytes (shorter if negative), at whichever end there is room. */
ALWAYS_INLINE int stretch(struct xdp_md *xdp, __s32 by)
{
	if (by > 0 && !adjust_head(xdp, -by))
		return 1;
	return !by || !adjust_tail(xdp, by);
}

/* Fills in what user space could not know when it built the frame: acknowledgement and time stamps. */
ALWAYS_INLINE int complete(struct xdp_md *xdp, const struct handshake *q, const struct flow_side *server, __u32 seq,
			   const int v6)
{
	__u8 *tcp = (__u8 *)(long)xdp->data + ETH_HLEN + IP_BYTES(v6), *end = (void *)(long)xdp->data_end;
	__u32 *words = (__u32 *)tcp;
	__u64 sum;

	if (tcp + BARE > end)
		return 0;
	sum = (__u16)~*(__u16 *)(tcp + 16);
	words[2] = bpf_htonl(seq + 1);
	sum += words[2];
	if (q->stamps) {
		if (tcp + BARE + STAMPS_LENGTH > end)
			return 0;
		words[6] = bpf_htonl(server->stamp + server->stamp_add);
		words[7] = bpf_htonl(server->stamp);
		sum += (__u64)words[6] + words[7];
	}
	*(__u16 *)(tcp + 16) = ~fold16(sum);
	return 1;
}

/* Handles a packet of a server whose SYN-ACK is awaited. */
ALWAYS_INLINE int take_syn_ack(struct xdp_md *xdp, const struct packet *w, struct flow *flow, struct flow_side *server,
			      struct flow_side *client, const int v6)
{
	__u32 zero = 0, index = flow->handshake - 1, seq = w->seq, window = swap16(*(const __u16 *)(w->tcp + 14)), length;
	struct handshake *q = map_lookup(&handshakes, &index);
	__u8 *scratch = map_lookup(&scratches, &zero);
	const struct offer *o;
	int packet;

	if (!q || !scratch || !is_expected(xdp, w, q, scratch, v6))
		return UP;
	o = (const struct offer *)(scratch + OFFER_AT);
	length = q->length;
	HIDE(length);
	if (length < ETH_HLEN + BARE || length > sizeof(q->frame) ||
	    __sync_val_compare_and_swap(&flow->state, FLOW_SYN_SENT, FLOW_COMPLETING) != FLOW_SYN_SENT)
		return UP;
	if (!stretch(xdp, (__s32)length - (__s32)(w->end - w->eth))) {
		__sync_val_compare_and_swap(&flow->state, FLOW_COMPLETING, FLOW_RETURNED);
		return UP;
	}
	apply_syn_ack(flow, server, client, q, o, seq, window);
	packet = !xdp_store(xdp, 0, q->frame, length) && complete(xdp, q, server, seq, v6);
	/*
	 * User space may reuse the handshake once the state is OFFLOADED: it is not read any more from here
	 * on.
	 */
	__sync_val_compare_and_swap(&flow->state, FLOW_COMPLETING, FLOW_OFFLOADED);
	/* If the frame could not be completed it counts as lost: user space retransmits the bytes. */
	return packet ? tc_redirect(server->egress, 0) : XDP_DROP;
}

#endif
