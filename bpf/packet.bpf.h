/* SPDX-License-Identifier: MIT OR GPL-2.0-only */
/*
 * The common ground of the packet engine's programs: the kernel's helper functions, reading the two ends of a packet
 * (from a socket filter, tc or XDP), checksums, and reading and writing whole packets in place (XDP only).
 *
 * In place only plain packets are read: no IP options, extension headers or fragments, and all bytes are there.
 */
#ifndef SIDETRACK_PACKET_BPF_H
#define SIDETRACK_PACKET_BPF_H

#include "engine.h"

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

/* Maps that this uses; user space creates them. */
extern char scratches;

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

#define TCP_FIN 1
#define TCP_SYN 2
#define TCP_RST 4
#define TCP_ACK 16
#define BARE 20
/* NOP NOP TIMESTAMPS(10), and NOP NOP SACK without its length. */
#define STAMPS 0x0101080a
#define STAMPS_LENGTH 12
#define SACK 0x01010500
#define AFTER(a, b) ((__s32)((__u32)(a) - (__u32)(b)) > 0)

ALWAYS_INLINE __u64 mix(__u64 hash, __u64 word)
{
	hash = (hash ^ word) * 0x9e3779b97f4a7c15;
	return hash ^ (hash >> 32);
}

ALWAYS_INLINE __u32 folded(__u64 sum)
{
	sum = (sum & 0xffffffff) + (sum >> 32);
	sum = (sum & 0xffffffff) + (sum >> 32);
	sum = (sum & 0xffff) + (sum >> 16);
	sum = (sum & 0xffff) + (sum >> 16);
	return sum;
}

ALWAYS_INLINE __u16 fold16(__u64 sum)
{
	return folded(sum);
}

/*
 * Hides the value of a number from the compiler, so that it keeps the bounds checks that the verifier
 * wants to see.
 */
#define HIDE(number) __asm__ volatile("" : "+r"(number))

enum { UP = -1, FORWARD = -2 };

/* A packet, as far as it is read. `v6` below: an address is one word in IPv4 and four words in IPv6. */
struct packet {
	__u8 *eth, *ip, *tcp, *end;
	__u32 ends;    /* both ports in network byte order */
	__u32 total;   /* bytes of the IP packet */
	__u32 payload;
	__u32 seq, ack;
	__u8 flags;
	/*
	 * Set by decided.bpf.h: the reason why this packet ends its connection, or NO_END; and the state
	 * it found.
	 */
	__u32 ending, state;
};

#define NO_END 0xff

#define WORDS(v6) ((v6) ? 4 : 1)
#define SOURCE_AT(v6) ((v6) ? 8 : 12)
#define TARGET_AT(v6) ((v6) ? 24 : 16)
#define IP_BYTES(v6) ((v6) ? 40 : 20)

ALWAYS_INLINE int read_packet(struct xdp_md *xdp, struct packet *w, const int v6)
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
	w->state = 0;
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
ALWAYS_INLINE int finish(struct xdp_md *xdp, struct packet *w, const int v6)
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
ALWAYS_INLINE void readdress(struct packet *w, const __u8 *source, const __u8 *target, __u32 fix, const int v6)
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

#endif
