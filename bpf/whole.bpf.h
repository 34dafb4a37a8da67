/* SPDX-License-Identifier: MIT OR GPL-2.0-only */
/*
 * Reads and writes packets in place, in XDP. Only plain packets are read: no IP options, extension headers
 * or fragments, and all bytes are there.
 */
/*
 * Hides the value of a number from the compiler, so that it keeps the bounds checks that the verifier
 * wants to see.
 */
#define HIDE(number) __asm__ volatile("" : "+r"(number))

enum { UP = -1, FORWARD = -2 };

ALWAYS_INLINE __u16 fold16(__u64 sum)
{
	return folded(sum);
}

/* A packet, as far as it is read. `v6` below: an address is one word in IPv4 and four words in IPv6. */
struct whole {
	__u8 *eth, *ip, *tcp, *end;
	__u32 ends;    /* both ports in network byte order */
	__u32 total;   /* bytes of the IP packet */
	__u32 payload;
	__u32 seq, ack;
	__u8 flags;
	/*
	 * Set by plane.bpf.h: the reason why this packet ends its connection, or NO_END; and the state
	 * it found.
	 */
	__u32 ending, state;
};

#define NO_END 0xff

#define WORDS(v6) ((v6) ? 4 : 1)
#define SOURCE_AT(v6) ((v6) ? 8 : 12)
#define TARGET_AT(v6) ((v6) ? 24 : 16)
#define IP_BYTES(v6) ((v6) ? 40 : 20)

ALWAYS_INLINE int read_whole(struct xdp_md *xdp, struct whole *w, const int v6)
{
	__u8 *eth = (void *)(long)xdp->data, *end = (void *)(long)xdp->data_end;
	__u8 *ip = eth + ETH_HLEN, *tcp = ip + IP_BYTES(v6);
	__u32 header, total;

	if (tcp + BARE > end)
		return 0;
	if (v6) {
		if (ip[0] >> 4 != 6 || ip[6] != IPPROTO_TCP || ip[7] <= 1)
			return 0;
		total = 40 + swap16(*(__u16 *)(ip + 4));
	} else {
		if (ip[0] != 0x45 || ip[9] != IPPROTO_TCP || ip[8] <= 1 || (*(__u16 *)(ip + 6) & swap16(0xbfff)))
			return 0;
		total = swap16(*(__u16 *)(ip + 2));
	}
	header = (tcp[12] >> 4) * 4;
	if (header < BARE || total < IP_BYTES(v6) + header || ip + total > end)
		return 0;
	w->eth = eth;
	w->ip = ip;
	w->tcp = tcp;
	w->end = end;
	w->ends = *(__u32 *)tcp;
	w->total = total;
	w->payload = total - IP_BYTES(v6) - header;
	w->seq = bpf_htonl(*(__u32 *)(tcp + 4));
	w->ack = bpf_htonl(*(__u32 *)(tcp + 8));
	w->flags = tcp[13];
	w->ending = NO_END;
	w->state = PLANE_FREE;
	return 1;
}

ALWAYS_INLINE int same(const void *one, const void *other, const int v6)
{
	const __u32 *a = one, *b = other;

	return v6 ? a[0] == b[0] && a[1] == b[1] && a[2] == b[2] && a[3] == b[3] : a[0] == b[0];
}

/* The address's first word in 16 bytes: an IPv4 address stands in the last four. */
#define AT(address, v6) ((address) + ((v6) ? 0 : 12))

ALWAYS_INLINE __u64 sum_words(const void *from, const int v6)
{
	const __u32 *words = from;
	__u64 sum = 0;

#pragma unroll
	for (int i = 0; i < WORDS(v6); i++)
		sum += words[i];
	return sum;
}

/*
 * Room for the largest packet that AF_XDP takes, and the most bytes that one checksum call takes in
 * every kernel.
 */
#define SCRATCH 4096
#define CHUNK 512

/*
 * Completes a TCP checksum that the sender left to its network card: such a one covers the addresses
 * only. Returns 0 if the packet is too long.
 */
ALWAYS_INLINE int finish(struct xdp_md *xdp, struct whole *w, const int v6)
{
	__u32 left = w->total - IP_BYTES(v6), zero = 0;
	__u8 *scratch;
	__u16 *check = (__u16 *)(w->tcp + 16);
	__u64 sum = sum_words(w->ip + SOURCE_AT(v6), v6) + sum_words(w->ip + TARGET_AT(v6), v6) +
		    swap16(IPPROTO_TCP) + swap16(left);

	if (fold16(sum) != *check)
		return 1;
	scratch = map_lookup(&scratches, &zero);
	HIDE(left);
	if (!scratch || !left || left > SCRATCH - 4)
		return 0;
	*check = 0;
	/* Zero the rest of the last word if the length is odd. */
	*(__u32 *)(scratch + (left & (SCRATCH - 4))) = 0;
	if (xdp_load(xdp, ETH_HLEN + IP_BYTES(v6), scratch, left))
		return 0;
#pragma unroll
	for (int i = 0; i < SCRATCH / CHUNK; i++) {
		__u32 bytes = left < CHUNK ? left : CHUNK, words = (bytes + 3) & ~3U;

		HIDE(words);
		if (words > CHUNK)
			return 0;
		sum += (__u32)csum_diff(0, 0, scratch + i * CHUNK, words, 0);
		left -= bytes;
	}
	*check = ~fold16(sum);
	return 1;
}

/*
 * Writes new addresses and decrements the TTL. "fix" is the change of the IP header checksum by the
 * addresses.
 */
ALWAYS_INLINE void readdress(struct whole *w, const __u8 *source, const __u8 *target, __u32 fix, const int v6)
{
	__u32 *from = (__u32 *)(w->ip + SOURCE_AT(v6)), *to = (__u32 *)(w->ip + TARGET_AT(v6));
	__u16 *check = (__u16 *)(w->ip + 10);

	if (v6) {
		w->ip[7]--;
	} else {
		/* One hop less is 0x0100 less in the word of the TTL. */
		*check = ~fold16((__u64)(__u16)~*check + fix + (__u16)~swap16(0x0100));
		w->ip[8]--;
	}
#pragma unroll
	for (int i = 0; i < WORDS(v6); i++) {
		from[i] = ((const __u32 *)AT(source, v6))[i];
		to[i] = ((const __u32 *)AT(target, v6))[i];
	}
}
