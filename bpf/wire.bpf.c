/* SPDX-License-Identifier: MIT OR GPL-2.0-only */
/*
 * Forwards packets of flows on the wire (wire.h) from tc, on every interface that they come in by, and renews what our
 * sockets send on every interface that they leave by.
 *
 * Everything that the two hosts may send each other is passed on: FIN, RST, probes, retransmissions, segments
 * outside of the window, urgent data. They check it themselves, as they would without us. What the program cannot
 * translate is dropped and counted, never left to the kernel: without a socket, its TCP would answer with a RST.
 */
#include "offload_tc.bpf.h"
#include "wire.h"

/* Maps that this uses; user space creates them. */
extern char wires, wire_ends;

static long (*redirect_neigh)(__u32 ifindex, void *params, int length, __u64 flags) = (void *)BPF_FUNC_redirect_neigh;
static long (*clone_redirect)(struct __sk_buff *skb, __u32 ifindex, __u64 flags) = (void *)BPF_FUNC_clone_redirect;
static long (*change_tail)(struct __sk_buff *skb, __u32 length, __u64 flags) = (void *)BPF_FUNC_skb_change_tail;

/* A side of a flow, and its other side. */
struct pair {
	struct wire *wire;
	struct flow_side *own, *other;
	struct wire_more *more, *others;
	__u32 side; /* 0: the packet is the client's */
};

ALWAYS_INLINE int find(const struct ends *ends, struct pair *pair)
{
	struct wire_key key;
	const __u32 *entry;
	__u32 index;

	__builtin_memcpy(key.remote, ends->remote, 16);
	__builtin_memcpy(key.local, ends->local.address, 16);
	key.remote_port = ends->remote_port;
	key.local_port = ends->local.port;
	entry = map_lookup(&wire_ends, &key);
	if (!entry)
		return 0;
	index = *entry >> 1;
	pair->wire = map_lookup(&wires, &index);
	if (!pair->wire)
		return 0;
	pair->side = *entry & 1;
	pair->own = pair->side ? &pair->wire->side[1] : &pair->wire->side[0];
	pair->other = pair->side ? &pair->wire->side[0] : &pair->wire->side[1];
	pair->more = pair->side ? &pair->wire->more[1] : &pair->wire->more[0];
	pair->others = pair->side ? &pair->wire->more[0] : &pair->wire->more[1];
	return 1;
}

/* Ends the flow, once. */
ALWAYS_INLINE void end(const struct pair *pair, __u32 why)
{
	if (!__sync_val_compare_and_swap(&pair->wire->why, 0, why))
		*(volatile __u32 *)&pair->wire->state = WIRE_ENDED;
}

/* The whole checksum of a TCP header without payload. */
ALWAYS_INLINE void seal(struct segment *s, const struct flow_side *own)
{
	__u32 words = BARE / 4 + s->options / 4;
	__u64 sum = swap16(IPPROTO_TCP) + swap16(BARE + s->options);

	if (own->v6)
		sum += sum_words(own->remote, 1) + sum_words(own->local, 1);
	else
		sum += sum_words(AT(own->remote, 0), 0) + sum_words(AT(own->local, 0), 0);
	((__u16 *)s->tcp)[8] = 0;
#pragma unroll
	for (int i = 0; i < BARE / 4 + 10; i++)
		if ((__u32)i < words)
			sum += s->tcp[i];
	((__u16 *)s->tcp)[8] = ~fold16(sum);
}

/* Sets the length of the IP packet. */
ALWAYS_INLINE int shorten(struct __sk_buff *skb, const struct flow_side *own, __u32 tcp_bytes)
{
	__u16 ip[10];
	__u64 sum = 0;

	if (own->v6) {
		__u16 length = swap16(tcp_bytes);

		return !skb_store(skb, ETH_HLEN + 4, &length, 2, BPF_F_RECOMPUTE_CSUM);
	}
	if (load(skb, 0, 0, ip, 20))
		return 0;
	ip[1] = swap16(20 + tcp_bytes);
	ip[5] = 0;
#pragma unroll
	for (int i = 0; i < 10; i++)
		sum += ip[i];
	ip[5] = ~fold16(sum);
	return !skb_store(skb, ETH_HLEN, ip, 20, BPF_F_RECOMPUTE_CSUM);
}

/*
 * Makes of a copy what our socket needs: the acknowledgement without payload or FIN, at the number that the socket
 * expects, for no more than the socket has sent: a number beyond would not count for it.
 */
ALWAYS_INLINE int to_socket(struct __sk_buff *skb, const struct pair *pair, struct segment *s)
{
	const struct wire_more *more = pair->more;
	__u32 limit = *(volatile __u32 *)&more->limit;
	__u32 bytes = BARE + s->options, at = ETH_HLEN + (pair->own->v6 ? 40 : 20);
	__u8 *flags = (__u8 *)s->tcp + 13;

	skb->mark = 0;
	s->tcp[1] = bpf_htonl(*(volatile __u32 *)&more->expects);
	if (AFTER(acknowledgement_of(s), limit))
		s->tcp[2] = bpf_htonl(limit);
	*flags &= TCP_ACK | TCP_RST;
	((__u16 *)s->tcp)[9] = 0; /* the urgent pointer */
	seal(s, pair->own);
	if (s->payload && change_tail(skb, at + bytes, 0))
		return TC_ACT_SHOT;
	if (!shorten(skb, pair->own, bytes) || skb_store(skb, at, s->tcp, BARE, BPF_F_RECOMPUTE_CSUM))
		return TC_ACT_SHOT;
	return TC_ACT_UNSPEC;
}

/* The other side has seen our time stamps so far; this side's continue them. */
ALWAYS_INLINE void learn_stamps(const struct pair *pair, const struct segment *s)
{
	if (__sync_val_compare_and_swap(&pair->more->stamped, STAMPS_UNKNOWN, STAMPS_LEARNING) != STAMPS_UNKNOWN)
		return;
	pair->own->stamp_add =
		(__u32)(ktime_ns() / 1000000) + pair->others->clock - bpf_htonl(s->tcp[BARE / 4 + 1]);
	/* It may echo stamps that we sent: to this side they are as old as its first one here. */
	pair->own->stamp_first = bpf_htonl(s->tcp[BARE / 4 + 1]);
	*(volatile __u32 *)&pair->more->stamped = STAMPS_KNOWN;
}

/*
 * Whether the segment may move the flow on. A forged one does not: its numbers fit no window. While JOINING all do, as
 * the numbers of the sides are not known to each other yet. SLACK is more than our sockets' last window, which the
 * other host may not know of.
 */
#define SLACK 0x10000
ALWAYS_INLINE int fits(const struct pair *pair, const struct segment *s)
{
	__u32 sent = *(volatile const __u64 *)&pair->other->sent;
	__u32 edge = *(volatile const __u32 *)&pair->other->edge;

	if (!(flags_of(s) & TCP_ACK))
		return 0;
	return *(volatile __u32 *)&pair->wire->state == WIRE_JOINING ||
	       (!AFTER(acknowledgement_of(s) - pair->other->add, sent + SLACK) &&
		!AFTER(end_of(s) + pair->own->add, edge + SLACK));
}

/* Takes note of what moves the flow on. */
ALWAYS_INLINE void follow(const struct pair *pair, const struct segment *s)
{
	if (flags_of(s) & TCP_RST) {
		/* The other host takes it only at the very number that it expects next (RFC 5961 Sec. 3.2). */
		if (sequence_of(s) + pair->own->add == *(volatile __u32 *)&pair->other->acknowledged)
			end(pair, pair->side ? WIRE_RESET_BY_SERVER : WIRE_RESET_BY_CLIENT);
		return;
	}
	if (!fits(pair, s))
		return;
	note(pair->own, s);
	if (mark_fins(pair->own, pair->other, s))
		end(pair, WIRE_FINISHED);
}

ALWAYS_INLINE int dropped(const struct pair *pair)
{
	__sync_fetch_and_add(&pair->more->dropped, 1);
	return TC_ACT_SHOT;
}

ALWAYS_INLINE int pass(struct __sk_buff *skb, const struct pair *pair, struct segment *s)
{
	__u32 each = (skb->gso_size ? skb->gso_size : s->payload) + s->options;
	__u64 sum = 0;

	if (s->ttl <= 1 || each > pair->other->mss || !understood(s))
		return dropped(pair);
	if (s->stamps)
		learn_stamps(pair, s);
	follow(pair, s);
	if (s->stamps && *(volatile __u32 *)&pair->others->stamped != STAMPS_KNOWN)
		/* It echoes one of ours, and we know none of the other side that it could stand for: 0 does not count as an echo. */
		sum = put(s, BARE / 4 + 2, 0, 0);
	if (!rewrite(skb, s, pair->own, pair->other, sum))
		return dropped(pair);
	skb->mark = WIRE_PASSED;
	return redirect_neigh(pair->other->egress, 0, 0, 0);
}

/* Sets a word. Returns `sum` plus the change of a checksum over it. */
ALWAYS_INLINE __u64 set(__u32 *word, __u32 new, __u64 sum)
{
	sum = replaced(sum, *word, new);
	*word = new;
	return sum;
}

ALWAYS_INLINE __u64 set16(__u32 *words, const __u8 *new, __u64 sum)
{
#pragma unroll
	for (int i = 0; i < 4; i++)
		sum = set(words + i, *(const __u32 *)(new + 4 * i), sum);
	return sum;
}

/* Bytes before the TCP header that an ICMP error quotes: both IP headers, without options, and its own. */
#define ERROR4 (20 + 8 + 20)
#define ERROR6 (40 + 8 + 40)

/*
 * Passes an ICMP error on to the side whose packet it quotes, which has to recognise it: by both ends and the sequence
 * number (RFC 5927 Sec. 4.1). It comes from where that side sends to. So a path whose MTU shrinks is found (RFC 1191,
 * RFC 8201).
 */
ALWAYS_INLINE int pass_error4(struct __sk_buff *skb, const struct flow_side *to)
{
	__u32 ip[5], quote[7];
	__u64 sum = 0;

	if (load(skb, 0, 0, ip, 20) || load(skb, 0, 28, quote, 28))
		return TC_ACT_SHOT;
	((__u16 *)ip)[5] = 0;
	ip[3] = *(const __u32 *)(to->local + 12);
	ip[4] = *(const __u32 *)(to->remote + 12);
#pragma unroll
	for (int i = 0; i < 5; i++)
		sum += ip[i];
	((__u16 *)ip)[5] = ~fold16(sum);
	/* What its own checksum makes up for in the quoted header changes the one of ICMP by nothing. */
	sum = replaced((__u16) ~((__u16 *)quote)[5], quote[3], *(const __u32 *)(to->remote + 12));
	sum = replaced(sum, quote[4], *(const __u32 *)(to->local + 12));
	((__u16 *)quote)[5] = ~fold16(sum);
	quote[3] = *(const __u32 *)(to->remote + 12);
	quote[4] = *(const __u32 *)(to->local + 12);
	sum = set(quote + 5, bpf_htonl(to->ports), 0);
	sum = set(quote + 6, bpf_htonl(bpf_htonl(quote[6]) - to->add), sum);
	if (skb_store(skb, ETH_HLEN, ip, 20, 0) || skb_store(skb, ETH_HLEN + 28, quote, 28, 0) ||
	    l4_checksum(skb, ETH_HLEN + 20 + 2, 0, folded(sum), 0))
		return TC_ACT_SHOT;
	return redirect_neigh(to->egress, 0, 0, 0);
}

ALWAYS_INLINE int pass_error6(struct __sk_buff *skb, const struct flow_side *to)
{
	__u32 ip[10], quote[12];
	__u64 sum = 0;

	if (load(skb, 0, 0, ip, 40) || load(skb, 0, 48, quote, 48))
		return TC_ACT_SHOT;
	sum = set16(ip + 2, to->local, sum);
	sum = set16(ip + 6, to->remote, sum);
	sum = set16(quote + 2, to->remote, sum);
	sum = set16(quote + 6, to->local, sum);
	sum = set(quote + 10, bpf_htonl(to->ports), sum);
	sum = set(quote + 11, bpf_htonl(bpf_htonl(quote[11]) - to->add), sum);
	if (skb_store(skb, ETH_HLEN, ip, 40, 0) || skb_store(skb, ETH_HLEN + 48, quote, 48, 0) ||
	    l4_checksum(skb, ETH_HLEN + 40 + 2, 0, folded(sum), 0))
		return TC_ACT_SHOT;
	return redirect_neigh(to->egress, 0, 0, 0);
}

/* A new connection between these ends: the sockets that came from the flow are gone. */
ALWAYS_INLINE void forget_sockets(const struct pair *pair)
{
	*(volatile __u32 *)&pair->more->awaits = 0;
	*(volatile __u32 *)&pair->others->awaits = 0;
}

/*
 * While LEAVING: an acknowledgement of more than our new socket has sent is one of bytes that were passed on before.
 * The socket would drop it. It gets one of all that it has sent.
 */
ALWAYS_INLINE int bound(struct __sk_buff *skb, const struct pair *pair, const struct ends *ends)
{
	__u32 limit, at = ETH_HLEN + ends->transport;
	struct segment s = {};
	__u64 sum;

	if (!read_segment(skb, 0, ends, &s))
		return TC_ACT_UNSPEC;
	if (flags_of(&s) & TCP_SYN)
		forget_sockets(pair);
	limit = *(volatile __u32 *)&pair->more->limit;
	if (!*(volatile __u32 *)&pair->more->awaits || !(flags_of(&s) & TCP_ACK) ||
	    !AFTER(acknowledgement_of(&s), limit))
		return TC_ACT_UNSPEC;
	sum = put(&s, 2, limit, 0);
	if (skb_store(skb, at + 8, s.tcp + 2, 4, BPF_F_RECOMPUTE_CSUM) || l4_checksum(skb, at + 16, 0, folded(sum), 0))
		return TC_ACT_SHOT;
	return TC_ACT_UNSPEC;
}

SECTION("tc/wire") int tc_wire(struct __sk_buff *skb)
{
	struct ends ends = {};
	struct segment s = {};
	struct pair pair;
	enum verdict what;
	__u32 state;

	/* A tagged frame comes again, without its tag, by the interface of its VLAN. */
	if (skb->vlan_present)
		return TC_ACT_UNSPEC;
	what = read(skb, 0, swap16(skb->protocol), &ends);
	if (what == FOREIGN || !find(&ends, &pair))
		return TC_ACT_UNSPEC;
	state = *(volatile __u32 *)&pair.wire->state;
	/* While a socket still sends, an error may be about its packets. */
	if (state == WIRE_FREE || (what == ERROR && (state == WIRE_JOINING || state == WIRE_LEAVING)))
		return TC_ACT_UNSPEC;
	if (state == WIRE_HELD)
		return TC_ACT_SHOT;
	if (state == WIRE_LEAVING)
		return bound(skb, &pair, &ends);
	if (what == ERROR) {
		if (ends.transport != (pair.own->v6 ? ERROR6 : ERROR4))
			return TC_ACT_SHOT;
		return pair.own->v6 ? pass_error6(skb, pair.other) : pass_error4(skb, pair.other);
	}
	if (!read_segment(skb, 0, &ends, &s))
		return dropped(&pair);
	if (skb->mark == WIRE_COPY)
		return state == WIRE_JOINING ? to_socket(skb, &pair, &s) : TC_ACT_SHOT;
	if (flags_of(&s) & TCP_SYN) {
		/* The host has forgotten the flow and begins a new one. It asks again when this entry is gone. */
		if (state != WIRE_JOINING && !(flags_of(&s) & TCP_ACK))
			end(&pair, WIRE_REUSED);
		return state == WIRE_JOINING ? TC_ACT_UNSPEC : TC_ACT_SHOT;
	}
	if (state == WIRE_JOINING && (*(volatile __u32 *)&pair.more->awaits || flags_of(&s) & TCP_RST)) {
		skb->mark = WIRE_COPY;
		clone_redirect(skb, skb->ingress_ifindex, BPF_F_INGRESS);
		skb->mark = 0;
	}
	return pass(skb, &pair, &s);
}

/*
 * What our socket sends while its flow is JOINING acknowledges and offers what the other host does by now. Its own
 * numbers stand still. Their end is what a copy may acknowledge, and what the socket acknowledges itself is where a copy may
 * stand: the socket would take one that stands before that for an old packet. A host that has long gone on would take
 * its packets for forged ones (RFC 5961 Sec. 5.2).
 */
ALWAYS_INLINE int renew(struct __sk_buff *skb, const struct pair *pair, struct segment *s, __u32 at)
{
	__u32 acknowledged = *(volatile __u32 *)&pair->other->acknowledged;
	__u32 window = *(volatile __u32 *)&pair->other->edge - acknowledged;
	__u32 to = acknowledged - pair->own->add;
	__u64 sum = 0;

	forward32(&pair->more->limit, end_of(s));
	if (flags_of(s) & TCP_ACK)
		forward32(&pair->more->expects, acknowledgement_of(s));
	if (!(flags_of(s) & TCP_ACK) || flags_of(s) & TCP_RST || !AFTER(to, acknowledgement_of(s)))
		return TC_ACT_UNSPEC;
	window >>= pair->own->shown_shift & 15;
	if (window > 0xffff)
		window = 0xffff;
	sum = put(s, 2, to, sum);
	sum = put(s, 3, (bpf_htonl(s->tcp[3]) & 0xffff0000) | window, sum);
	if (skb_store(skb, at + 8, s->tcp + 2, 8, BPF_F_RECOMPUTE_CSUM) || l4_checksum(skb, at + 16, 0, folded(sum), 0))
		return TC_ACT_SHOT;
	return TC_ACT_UNSPEC;
}

SECTION("tc/wire_out") int tc_wire_out(struct __sk_buff *skb)
{
	struct ends ends = {}, back = {};
	struct segment s = {};
	struct pair pair;
	__u32 state;

	if (skb->mark == WIRE_PASSED) {
		skb->mark = 0;
		return TC_ACT_UNSPEC;
	}
	if (read(skb, 0, swap16(skb->protocol), &ends) != SEGMENT)
		return TC_ACT_UNSPEC;
	/* The entry is that of packets which come from where this one goes. */
	__builtin_memcpy(back.remote, ends.local.address, 16);
	__builtin_memcpy(back.local.address, ends.remote, 16);
	back.remote_port = ends.local.port;
	back.local.port = ends.remote_port;
	if (!find(&back, &pair))
		return TC_ACT_UNSPEC;
	state = *(volatile __u32 *)&pair.wire->state;
	/* No socket sends this: the kernel's TCP answers a packet that came too late for one, or another connection was begun. */
	if (state == WIRE_WIRED || state == WIRE_ENDED || state == WIRE_HELD)
		return TC_ACT_SHOT;
	if (state != WIRE_JOINING && state != WIRE_LEAVING)
		return TC_ACT_UNSPEC;
	if (!read_segment(skb, 0, &ends, &s))
		return TC_ACT_UNSPEC;
	if (state == WIRE_LEAVING) {
		if (flags_of(&s) & TCP_SYN)
			forget_sockets(&pair);
		forward32(&pair.more->limit, end_of(&s));
		return TC_ACT_UNSPEC;
	}
	return renew(skb, &pair, &s, ETH_HLEN + ends.transport);
}

SECTION("license") char _license[] = "Dual MIT/GPL";
