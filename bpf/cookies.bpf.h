/* SPDX-License-Identifier: MIT OR GPL-2.0-only */
/*
 * SYN cookies in XDP: answers a client's SYN with a SYN-ACK whose sequence number is a cookie, so that user
 * space hears of a client only when its handshake is complete (cookies.h).
 *
 * The cookie has the format of crates/core/src/engine/cookie.rs: the worker that gets it back in the
 * client's ACK decodes it.
 */
#ifndef SIDETRACK_COOKIES_BPF_H
#define SIDETRACK_COOKIES_BPF_H

#include "cookies.h"
#include "options.bpf.h"

/* Maps that this uses; user space creates them. */
extern char cookies, listens;

#define STEP_NS 64000000000ULL
#define STAMP_BITS 63
#define ROTATE(word, bits) ((word) << (bits) | (word) >> (64 - (bits)))

ALWAYS_INLINE void sip_round(__u64 v[4])
{
	v[0] += v[1];
	v[2] += v[3];
	v[1] = ROTATE(v[1], 13) ^ v[0];
	v[3] = ROTATE(v[3], 16) ^ v[2];
	v[0] = ROTATE(v[0], 32);
	v[2] += v[1];
	v[0] += v[3];
	v[1] = ROTATE(v[1], 17) ^ v[2];
	v[3] = ROTATE(v[3], 21) ^ v[0];
	v[2] = ROTATE(v[2], 32);
}

/* SipHash-2-4 of `count` 64-bit words. */
ALWAYS_INLINE __u64 siphash(const struct cookies *c, const __u64 *words, const int count)
{
	__u64 v[4] = { c->key[0] ^ 0x736f6d6570736575, c->key[1] ^ 0x646f72616e646f6d,
		       c->key[0] ^ 0x6c7967656e657261, c->key[1] ^ 0x7465646279746573 };

#pragma unroll
	for (int i = 0; i <= count; i++) {
		__u64 word = i < count ? words[i] : (__u64)count * 8 << 56;

		v[3] ^= word;
		sip_round(v);
		sip_round(v);
		v[0] ^= word;
	}
	v[2] ^= 0xff;
#pragma unroll
	for (int i = 0; i < 4; i++)
		sip_round(v);
	return v[0] ^ v[1] ^ v[2] ^ v[3];
}

ALWAYS_INLINE __u64 two_words(const __u8 *at)
{
	const __u32 *words = (const void *)at;

	return (__u64)bpf_htonl(words[0]) << 32 | bpf_htonl(words[1]);
}

ALWAYS_INLINE __u32 cookie_of(const struct cookies *c, const struct packet *w, __u64 now, __u32 mss, const int v6)
{
	__u32 index = (mss >= 1220) + (mss >= 1300) + (mss >= 1360) + (mss >= 1400) + (mss >= 1440) + (mss >= 1448) +
		      (mss >= 1460);
	__u32 step = now / STEP_NS & 31;
	__u64 salt = 1U << 31 | step << 3 | index, ports = bpf_htonl(w->ends) | salt << 32;
	__u64 client[2] = { w->seq, salt };
	__u64 hash;

	if (v6) {
		__u64 words[5] = { two_words(w->ip + 8), two_words(w->ip + 16), two_words(w->ip + 24),
				   two_words(w->ip + 32), ports };

		hash = siphash(c, words, 5);
	} else {
		__u64 words[2] = { two_words(w->ip + 12), ports };

		hash = siphash(c, words, 2);
	}
	hash ^= siphash(c, client, 2);
	return step << 27 | index << 24 | (__u32)(hash >> 40);
}

/*
 * Writes the SYN-ACK's TCP header into scratch memory. Its options have to fit into a header of `header`
 * bytes; returns 0 if they need more.
 */
ALWAYS_INLINE int write_syn_ack(__u8 *scratch, const struct cookies *c, const struct packet *w, const struct offer *o, __u64 now,
			       __u32 cookie, __u32 header, const int v6)
{
	__u32 *words = (__u32 *)scratch;
	__u32 clock = (__u32)(now / STAMP_MS) + c->clock;
	__u32 stamp = (clock & ~STAMP_BITS) | o->has_sack << 4 | o->shift;
	/*
	 * The time stamp carries the client's window scale and SACK. Without time stamps neither is
	 * agreed on.
	 */
	__u32 needs = BARE + 4 + (o->has_stamp ? STAMPS_LENGTH + (o->shift != NO_SHIFT ? 4 : 0) : 0);

	if (header < needs)
		return 0;
	/* The low bits may have moved the stamp past the clock: a stamp must not lie in the future. */
	if (stamp > clock)
		stamp -= STAMP_BITS + 1;
	words[0] = w->ends << 16 | w->ends >> 16;
	words[1] = bpf_htonl(cookie);
	words[2] = bpf_htonl(w->seq + 1);
	words[3] = bpf_htonl(header << 26 | (TCP_SYN | TCP_ACK) << 16 | c->window);
	words[4] = 0;
#pragma unroll
	for (int i = 5; i < 15; i++)
		words[i] = 0x01010101;
	words[5] = bpf_htonl(0x02040000 | (v6 ? c->mss6 : c->mss4));
	if (o->has_stamp) {
		words[6] = bpf_htonl(o->has_sack ? 0x0402080a : STAMPS);
		words[7] = bpf_htonl(stamp);
		words[8] = bpf_htonl(o->stamp);
		if (o->shift != NO_SHIFT)
			words[9] = bpf_htonl(0x01030300 | c->shift);
	}
	return 1;
}

/*
 * Swaps sender and receiver in the Ethernet and IP headers and writes the IP length for a TCP header of
 * `header` bytes.
 */
ALWAYS_INLINE void turn_round(struct packet *w, __u32 header, const int v6)
{
	__u16 *eth = (__u16 *)w->eth;
	__u32 *ip = (__u32 *)w->ip, *from = (__u32 *)(w->ip + SOURCE_AT(v6)), *to = (__u32 *)(w->ip + TARGET_AT(v6));
	__u64 sum = 0;

#pragma unroll
	for (int i = 0; i < 3; i++) {
		__u16 half = eth[i];

		eth[i] = eth[i + 3];
		eth[i + 3] = half;
	}
#pragma unroll
	for (int i = 0; i < WORDS(v6); i++) {
		__u32 word = from[i];

		from[i] = to[i];
		to[i] = word;
	}
	if (v6) {
		ip[0] = bpf_htonl(0x60000000);
		*(__u16 *)(w->ip + 4) = swap16(header);
		w->ip[7] = 64;
		return;
	}
	w->ip[1] = 0;
	*(__u16 *)(w->ip + 2) = swap16(20 + header);
	/* Don't fragment; the packet identifier is 0. */
	ip[1] = bpf_htonl(0x00004000);
	ip[2] = bpf_htonl(64 << 24 | IPPROTO_TCP << 16);
#pragma unroll
	for (int i = 0; i < 5; i++)
		sum += ip[i];
	*(__u16 *)(w->ip + 10) = ~fold16(sum);
}

/* Turns a client's SYN into the SYN-ACK in place and sends it. Returns UP if user space has to answer. */
ALWAYS_INLINE int send_cookie(struct xdp_md *xdp, __u32 worker, const int v6)
{
	__u32 zero = 0, header, tcp = ETH_HLEN + IP_BYTES(v6);
	struct cookies *c = map_lookup(&cookies, &worker);
	__u8 *scratch = map_lookup(&scratches, &zero);
	struct offer *o;
	struct packet w;
	__u64 now, sum;

	if (!c || !scratch || !c->on || !read_packet(xdp, &w, v6) || w.payload)
		return UP;
	o = (struct offer *)(scratch + OFFER_AT);
	header = (w.tcp[12] >> 4) * 4;
	if (!read_offer(xdp, scratch, tcp + BARE, header - BARE, o))
		return UP;
	/*
	 * A SYN without options has no room for the MSS option, but the shortest Ethernet frame is
	 * padded behind it.
	 */
	if (header == BARE && w.tcp + BARE + 4 <= w.end)
		header += 4;
	now = ktime_ns() - c->behind_ns;
	if (!write_syn_ack(scratch, c, &w, o, now, cookie_of(c, &w, now, o->mss, v6), header, v6))
		return UP;
	sum = sum_words(w.ip + SOURCE_AT(v6), v6) + sum_words(w.ip + TARGET_AT(v6), v6) + swap16(IPPROTO_TCP) +
	      swap16(header);
	HIDE(header);
	if (header < BARE || header > BARE + 40)
		return UP;
	sum += (__u32)csum_diff(0, 0, (void *)scratch, header & 0x7c, 0);
	*(__u16 *)(scratch + 16) = ~fold16(sum);
	turn_round(&w, header, v6);
	if (xdp_store(xdp, tcp, scratch, header))
		return XDP_DROP;
	__sync_fetch_and_add(&c->sent, 1);
	/* Not XDP_TX: a veth would send the frame only to a peer that has an XDP program or GRO. */
	return tc_redirect(xdp->ingress_ifindex, 0);
}

/*
 * Answers a packet of this worker if it is a SYN to an address that the engine listens on. Returns UP
 * for every other packet.
 */
ALWAYS_INLINE int cookie_own(struct xdp_md *xdp, const struct ends *ends, __u32 worker, const int v6)
{
	struct listen_key key = ends->local;
	__u8 flags = 0;

	if (xdp_load(xdp, ETH_HLEN + IP_BYTES(v6) + 13, &flags, 1) ||
	    (flags & (TCP_SYN | TCP_ACK | TCP_RST | TCP_FIN)) != TCP_SYN)
		return UP;
	if (!map_lookup(&listens, &key)) {
		__builtin_memset(key.address, 0, sizeof(key.address));
		if (!map_lookup(&listens, &key))
			return UP;
	}
	return send_cookie(xdp, worker, v6);
}

#endif
