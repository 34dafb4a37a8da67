/* SPDX-License-Identifier: MIT OR GPL-2.0-only */
/*
 * Checks and translates packets of offloaded connections (offload.h), and forwards them from tc.
 * offload_xdp.bpf.h does it from XDP with the same checks.
 *
 * Programs forward segments inside the window, with or without payload, whose options are those of every
 * usual sender: none, time stamps, SACK.
 *
 * User space gets everything else: SYN, RST, other options, a segment larger than the receiver accepts or
 * outside the window, a TTL that would run out, and FIN (XDP forwards FINs too).
 */
#ifndef SIDETRACK_OFFLOAD_BPF_H
#define SIDETRACK_OFFLOAD_BPF_H

#include "offload.h"
#include "packet.bpf.h"

/* Maps that this uses; user space creates them. */
extern char buckets, flows, offload;

#define BLOCKS_MAX 4
/* The TCP header of a segment, and what was read of it. */
struct segment {
	__u32 tcp[BARE / 4 + 15]; /* as long as the 4-bit header length can say */
	__u32 options;            /* bytes of options */
	__u32 payload;
	__u32 stamps;  /* not 0: the options begin with time stamps */
	__u32 blocks;  /* number of SACK blocks; SACK is the last option */
	__u32 ttl;
};

ALWAYS_INLINE __u32 sequence_of(const struct segment *s)
{
	return bpf_htonl(s->tcp[1]);
}

ALWAYS_INLINE __u32 acknowledgement_of(const struct segment *s)
{
	return bpf_htonl(s->tcp[2]);
}

ALWAYS_INLINE __u8 flags_of(const struct segment *s)
{
	return ((const __u8 *)s->tcp)[13];
}

ALWAYS_INLINE __u32 window_of(const struct segment *s)
{
	return swap16(((const __u16 *)s->tcp)[7]);
}

/* The sequence number after its last byte or FIN. */
ALWAYS_INLINE __u32 end_of(const struct segment *s)
{
	return sequence_of(s) + s->payload + (flags_of(s) & TCP_FIN ? 1 : 0);
}

/* Whether the options have the usual layout; finds time stamps and SACK blocks. */
ALWAYS_INLINE int understood(struct segment *s)
{
	__u32 rest = s->options;
	__u32 word = bpf_htonl(s->tcp[BARE / 4]);

	if (!rest)
		return 1;
	if (word == STAMPS && rest >= STAMPS_LENGTH) {
		s->stamps = 1;
		rest -= STAMPS_LENGTH;
		if (!rest)
			return 1;
		word = bpf_htonl(s->tcp[(BARE + STAMPS_LENGTH) / 4]);
	}
	if ((word & 0xffffff00) != SACK || (word & 0xff) + 2 != rest || rest < 12 || rest > 36 || (rest - 4) & 7)
		return 0;
	s->blocks = (rest - 4) / 8;
	return 1;
}

/* Reads the TCP header and options behind the ends that were read already. */
ALWAYS_INLINE int read_segment(void *ctx, int xdp, const struct ends *ends, struct segment *s)
{
	__u8 ip[8] ALIGNED;
	__u32 length, header, at = ends->transport;

	if (load(ctx, xdp, 0, ip, sizeof(ip)))
		return 0;
	if (ip[0] >> 4 == 4) {
		/* Not 20: the packet has IP options. */
		if (at != 20 || load(ctx, xdp, 8, &s->ttl, 1))
			return 0;
		length = (__u32)ip[2] << 8 | ip[3];
	} else {
		length = ((__u32)ip[4] << 8 | ip[5]) + 40;
		s->ttl = ip[7];
	}
	if (load(ctx, xdp, at, s->tcp, BARE))
		return 0;
	header = (((const __u8 *)s->tcp)[12] >> 4) * 4;
	if (header < BARE || length < at + header)
		return 0;
	s->payload = length - at - header;
	s->options = (header - BARE) & 0x3c;
	if (s->options && load(ctx, xdp, at + BARE, s->tcp + BARE / 4, s->options))
		return 0;
	return 1;
}

/*
 * Looks up the entry of a packet between these ends, as it stands in a place. Returns 0 if there is
 * none.
 */
ALWAYS_INLINE __u32 entry_of(const struct ends *ends)
{
	const __u64 *remote = (const void *)ends->remote;
	const __u64 *local = (const void *)ends->local.address;
	__u32 zero = 0, index, tag, entry = 0;
	const struct offload *set = map_lookup(&offload, &zero);
	const struct bucket *bucket;
	__u64 hash;

	if (!set)
		return 0;
	hash = mix(mix(mix(mix(set->seed, remote[0]), remote[1]), local[0]), local[1]);
	hash = mix(hash, (__u32)ends->remote_port << 16 | ends->local.port);
	index = (__u32)hash & set->bucket_mask;
	tag = hash >> 32;
	bucket = map_lookup(&buckets, &index);
	if (!bucket)
		return 0;
#pragma unroll
	for (int i = 0; i < PLACES; i++) {
		__u64 place = *(volatile const __u64 *)&bucket->place[i];

		if (place >> 32 == tag && (__u32)place)
			entry = (__u32)place;
	}
	return entry;
}

ALWAYS_INLINE struct flow *flow_of(__u32 entry)
{
	__u32 index = (entry - 1) >> 1;

	return entry ? map_lookup(&flows, &index) : 0;
}

ALWAYS_INLINE int is_between(const struct flow_side *own, const struct ends *ends)
{
	const __u64 *remote = (const void *)own->remote, *local = (const void *)own->local;
	const __u64 *from = (const void *)ends->remote, *to = (const void *)ends->local.address;

	return remote[0] == from[0] && remote[1] == from[1] && local[0] == to[0] && local[1] == to[1] &&
	       own->ports == ((__u32)ends->remote_port << 16 | ends->local.port);
}

/* Moves a sequence number forward, never back, while other processors may move it too. */
ALWAYS_INLINE void forward32(__u32 *number, __u32 to)
{
#pragma unroll
	for (int i = 0; i < 3; i++) {
		__u32 old = *(volatile __u32 *)number;

		if (!AFTER(to, old) || __sync_val_compare_and_swap(number, old, to) == old)
			return;
	}
}

ALWAYS_INLINE void forward64(__u64 *number, __u32 to)
{
#pragma unroll
	for (int i = 0; i < 3; i++) {
		__u64 old = *(volatile __u64 *)number;
		__u64 new = old + (__u32)(to - (__u32)old);

		if (!AFTER(to, old) || __sync_val_compare_and_swap(number, old, new) == old)
			return;
	}
}

/*
 * Whether the program may forward this segment without overtaking one of this side that user space still
 * has to send. Sets `joined` once that holds for good.
 *
 * In tc, user space counts how many of the segments it got (`to_user`) it has sent on (`user_sent`); when both are
 * equal, nothing is left. In XDP the sequence number tells: a segment that follows the last byte user space
 * has sent overtakes nothing. (In tc it does not tell: the packet socket gets its copy before tc runs.)
 *
 * Acknowledgements without payload may overtake each other, because a receiver learns nothing new from an
 * old one. But until the other side has joined they are left to user space, which holds them back. So the
 * other side's sender pauses and its segments in user space run out.
 */
ALWAYS_INLINE int joins(struct flow_side *own, const struct flow_side *other, const struct segment *s, int xdp)
{
	volatile __u32 *to_user = &own->to_user, *user_sent = &own->user_sent, *joined = &own->joined;
	int is_bare = end_of(s) == sequence_of(s);

	if (*joined)
		return 1;
	if (is_bare && !*(volatile const __u32 *)&other->joined)
		return 0;
	if (xdp ? !is_bare && sequence_of(s) == (__u32)*(volatile __u64 *)&own->sent : *to_user == *user_sent) {
		*joined = 1;
		return 1;
	}
	if (xdp && !is_bare)
		__sync_fetch_and_add(&own->to_user, 1);
	return is_bare;
}

/* Whether the segment lies in the receiver's window and acknowledges nothing that was not sent. */
ALWAYS_INLINE int in_window(const struct flow_side *own, const struct flow_side *other, const struct segment *s)
{
	__u32 sent = *(volatile const __u64 *)&other->sent;
	__u32 end = sequence_of(s) + s->payload;

	return !AFTER(acknowledgement_of(s) - other->add, sent) &&
	       !AFTER(end + own->add, *(volatile const __u32 *)&other->edge + 1);
}

ALWAYS_INLINE void note(struct flow_side *own, const struct segment *s)
{
	__u32 end = end_of(s), acknowledged = acknowledgement_of(s);

	if (s->stamps && !AFTER(sequence_of(s), *(volatile __u64 *)&own->sent))
		own->stamp = bpf_htonl(s->tcp[BARE / 4 + 1]);
	if (end != sequence_of(s))
		forward64(&own->sent, end);
	forward32(&own->acknowledged, acknowledged);
	forward32(&own->edge, acknowledged + (window_of(s) << (own->shift & 15)));
	__sync_fetch_and_add(&own->packets, 1);
	own->last_ns = ktime_coarse_ns();
}

/*
 * Records FINs and their acknowledgements. Returns whether both sides have closed. The two sides' packets may be
 * handled on two processors at the same time. So each marks what it has seen before it reads what the other has
 * marked: at least one of the two sees both marks.
 */
ALWAYS_INLINE int mark_fins(struct flow_side *own, struct flow_side *other, const struct segment *s)
{
	__u32 theirs = *(volatile __u32 *)&other->fins;

	if (flags_of(s) & TCP_FIN && !(*(volatile __u32 *)&own->fins & FIN_SEEN)) {
		*(volatile __u32 *)&own->fin = end_of(s);
		__sync_fetch_and_or(&own->fins, FIN_SEEN | (theirs & FIN_SEEN ? FIN_SECOND : 0));
	}
	if ((theirs & (FIN_SEEN | FIN_ACKED)) != FIN_SEEN ||
	    AFTER(*(volatile __u32 *)&other->fin, acknowledgement_of(s) - other->add))
		return 0;
	__sync_fetch_and_or(&other->fins, FIN_ACKED);
	return __sync_fetch_and_or(&own->fins, 0) & FIN_ACKED;
}

/* Whether a program forwards this packet of an offloaded connection. If so, the packet is counted. */
ALWAYS_INLINE int judge(struct flow *flow, struct flow_side *own, struct flow_side *other, __u32 gso_size,
			struct segment *s, int xdp)
{
	__u32 state = *(volatile __u32 *)&flow->state;
	__u8 flags = flags_of(s);

	if ((state != FLOW_OFFLOADED && state != FLOW_ENDED) || (flags & TCP_SYN) || !(flags & TCP_ACK) || s->ttl <= 1)
		return 0;
	if (!in_window(own, other, s))
		return 0;
	if ((flags & (xdp ? TCP_RST : TCP_FIN | TCP_RST)) || !understood(s) ||
	    (gso_size ? gso_size : s->payload) + s->options > other->mss) {
		/*
		 * Packets that follow must not overtake this one, so all go to user space from now on.
		 * (An ENDED connection stays: user space takes it back soon anyway.)
		 */
		__sync_val_compare_and_swap(&flow->state, FLOW_OFFLOADED, FLOW_RETURNED);
		return 0;
	}
	if (!joins(own, other, s, xdp))
		return 0;
	note(own, s);
	return 1;
}

/* One's complement sums of words in network byte order; folded() reduces them to 16 bits at the end. */
ALWAYS_INLINE __u64 replaced(__u64 sum, __u32 old, __u32 new)
{
	return sum + (__u32)~old + new;
}

/* Writes a word of the segment. Returns `sum` plus the change of the checksum. */
ALWAYS_INLINE __u64 put(struct segment *s, __u32 at, __u32 new, __u64 sum)
{
	sum = replaced(sum, s->tcp[at], bpf_htonl(new));
	s->tcp[at] = bpf_htonl(new);
	return sum;
}

ALWAYS_INLINE __u32 rescaled(const struct flow_side *own, const struct flow_side *other, __u32 window)
{
	if (own->shift == other->shown_shift)
		return window;
	window = (window << (own->shift & 15)) >> (other->shown_shift & 15);
	return window > 0xffff ? 0xffff : window;
}

/*
 * Translates ports, sequence numbers, window and time stamps. Returns the change of the checksum,
 * without the addresses.
 */
ALWAYS_INLINE __u64 translate(struct segment *s, const struct flow_side *own, const struct flow_side *other)
{
	__u32 word = bpf_htonl(s->tcp[3]);
	__u64 sum = 0;

	sum = put(s, 0, other->ports << 16 | other->ports >> 16, sum);
	sum = put(s, 1, sequence_of(s) + own->add, sum);
	sum = put(s, 2, acknowledgement_of(s) - other->add, sum);
	sum = put(s, 3, (word & 0xffff0000) | rescaled(own, other, word & 0xffff), sum);
	if (s->stamps) {
		__u32 echo = bpf_htonl(s->tcp[BARE / 4 + 2]) - other->stamp_add;

		sum = put(s, BARE / 4 + 1, bpf_htonl(s->tcp[BARE / 4 + 1]) + own->stamp_add, sum);
		sum = put(s, BARE / 4 + 2, AFTER(other->stamp_first, echo) ? other->stamp_first : echo, sum);
	}
	return sum;
}

/* Translates the edges of the SACK blocks that begin at byte `first` of the segment. */
ALWAYS_INLINE __u64 translate_blocks(struct segment *s, __u32 first, const struct flow_side *other)
{
	__u64 sum = 0;

#pragma unroll
	for (int i = 0; i < BLOCKS_MAX * 2; i++) {
		__u32 at = first / 4 + i;

		if ((__u32)i < s->blocks * 2 && at < sizeof(s->tcp) / 4)
			sum = put(s, at, bpf_htonl(s->tcp[at]) - other->add, sum);
	}
	return sum;
}

#endif
