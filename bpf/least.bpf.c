/* SPDX-License-Identifier: MIT OR GPL-2.0-only */
/*
 * A lower bound for the laboratory: the least work that a program between clients and a server can do. It
 * replaces one address and port by another, updates both checksums and writes the next hop's link address.
 * It knows no connections and keeps no record. The packet engine is measured against it.
 */
#include "engine.h"
#include "least.h"
#include <linux/if_ether.h>
#include <linux/in.h>

static void *(*map_lookup)(const void *map, const void *key) = (void *)BPF_FUNC_map_lookup_elem;
static long (*xdp_redirect)(const void *map, __u64 key, __u64 flags) = (void *)BPF_FUNC_redirect_map;
static long (*redirect)(__u32 ifindex, __u64 flags) = (void *)BPF_FUNC_redirect;

extern char least, sockets;

#define swap16(x) __builtin_bswap16(x)

struct frame {
	__u16 link[6];
	__u16 kind;
	__u8 head[2];
	__u16 total, id, fragment;
	__u8 ttl, protocol;
	__u16 check;
	__u32 from, to;
	__u16 from_port, to_port;
	__u32 seq, ack;
	__u16 flags, window, tcp_check, urgent;
} __attribute__((packed, aligned(2)));

ALWAYS_INLINE struct frame *frame_of(struct xdp_md *xdp)
{
	struct frame *f = (void *)(long)xdp->data;

	if ((void *)(f + 1) > (void *)(long)xdp->data_end)
		return 0;
	return f->kind == swap16(ETH_P_IP) && f->head[0] == 0x45 && f->protocol == IPPROTO_TCP ? f : 0;
}

ALWAYS_INLINE __u16 folded(__u64 sum)
{
	sum = (sum & 0xffffffff) + (sum >> 32);
	sum = (sum & 0xffff) + (sum >> 16);
	sum = (sum & 0xffff) + (sum >> 16);
	return (sum & 0xffff) + (sum >> 16);
}

ALWAYS_INLINE int pass(struct frame *f, const struct way *way)
{
	__u64 change = (__u64)(__u32)~way->from + way->to;

	f->check = ~folded((__u16)~f->check + change);
	change += (__u16)~way->from_port + (__u64)way->to_port;
	f->tcp_check = ~folded((__u16)~f->tcp_check + change);
#pragma unroll
	for (int i = 0; i < 6; i++)
		f->link[i] = way->link[i];
	return way->egress ? redirect(way->egress, 0) : XDP_TX;
}

SECTION("xdp/least") int xdp_least(struct xdp_md *xdp)
{
	struct frame *f = frame_of(xdp);
	__u32 zero = 0;
	const struct least *l = map_lookup(&least, &zero);

	if (!f || !l)
		return XDP_PASS;
	if (f->from == l->way[0].from && f->from_port == l->way[0].from_port) {
		f->from = l->way[0].to;
		f->from_port = l->way[0].to_port;
		return pass(f, &l->way[0]);
	}
	if (f->to == l->way[1].from && f->to_port == l->way[1].from_port) {
		f->to = l->way[1].to;
		f->to_port = l->way[1].to_port;
		return pass(f, &l->way[1]);
	}
	return XDP_PASS;
}

/* Sends the frame to an AF_XDP socket, whose process does the same work. */
SECTION("xdp/least_socket") int xdp_least_socket(struct xdp_md *xdp)
{
	return frame_of(xdp) ? xdp_redirect(&sockets, 0, XDP_PASS) : XDP_PASS;
}

SECTION("license") char _license[] = "Dual MIT/GPL";

SECTION("layout") const __u32 _layout[] = { sizeof(struct way), sizeof(struct least) };
