/* SPDX-License-Identifier: MIT OR GPL-2.0-only */
/*
 * The laboratory's peer of the packet engine: plays the clients and the server of many short TCP
 * connections, without user space. Each connection slot ("place") has one frame of 60 bytes that goes
 * round; the end of one connection begins the next, from another port.
 *
 * Seven packets each way: SYN, SYN-ACK, ACK, request, the server's FIN, the client's FIN, its
 * acknowledgement. A program cannot create frames, only send on a frame that came in. So the client sends
 * its request when its ACK has arrived at the server. Where the engine completes handshakes itself
 * ("answered"), no ACK arrives there. Then the client puts the request into its ACK, which makes six
 * packets towards the engine.
 */
#include "engine.h"
#include "peer.h"
#include <linux/if_ether.h>
#include <linux/in.h>
#include <stddef.h>

static void *(*map_lookup)(const void *map, const void *key) = (void *)BPF_FUNC_map_lookup_elem;
static long (*xdp_adjust_tail)(struct xdp_md *xdp, int delta) = (void *)BPF_FUNC_xdp_adjust_tail;
static __u64 (*ktime_coarse_ns)(void) = (void *)BPF_FUNC_ktime_get_coarse_ns;

extern char peer, places, drain;

#define swap16(x) __builtin_bswap16(x)
#define swap32(x) __builtin_bswap32(x)
#define FRAME 60
#define REQUEST 6
/* The server's initial sequence number where the engine has connections of its own to the server. */
#define FIRST 0x7ffffff0U
#define FIN 1
#define SYN 2
#define RST 4
#define PSH 8
#define ACK 16

struct ipv4 {
	__u8 head[2];
	__u16 total, id, fragment;
	__u8 ttl, protocol;
	__u16 check;
	__u32 from, to;
};

struct tcp {
	__u16 from, to;
	__u32 seq, ack;
	__u8 length, flags;
	__u16 window, check, urgent;
	__u16 payload[3];
};

struct frame {
	__u16 *link;
	struct ipv4 *ip;
	struct tcp *tcp;
};

ALWAYS_INLINE __u16 folded(__u64 sum)
{
	sum = (sum & 0xffffffff) + (sum >> 32);
	sum = (sum & 0xffff) + (sum >> 16);
	sum = (sum & 0xffff) + (sum >> 16);
	return (sum & 0xffff) + (sum >> 16);
}

/* Sums `bytes` from the TCP header on, at most what the frame has. */
ALWAYS_INLINE __u64 sum_tcp(const struct frame *f, __u32 bytes)
{
	const __u16 *words = (const void *)f->tcp;
	__u64 sum = (__u64)f->ip->from + f->ip->to + swap16(IPPROTO_TCP) + swap16(bytes);

#pragma unroll
	for (int i = 0; i < (FRAME - ETH_HLEN - 20) / 2; i++)
		sum += (__u32)i * 2 < bytes ? words[i] : 0;
	return sum;
}

ALWAYS_INLINE __u64 sum_ip(const struct frame *f)
{
	const __u32 *words = (const void *)f->ip;

	return (__u64)words[0] + words[1] + words[2] + words[3] + words[4];
}

/* The segment to send instead of the frame that came in. */
struct segment {
	__u32 from, to; /* in network byte order */
	__u16 from_port, to_port;
	__u32 seq, ack;
	__u32 payload;
	__u8 flags;
};

ALWAYS_INLINE int answer(const struct peer *p, struct frame *f, const struct segment *s)
{
#pragma unroll
	for (int i = 0; i < 6; i++)
		f->link[i] = p->link[i];
	f->ip->total = swap16(40 + s->payload);
	f->ip->ttl = 64;
	f->ip->check = 0;
	f->ip->from = s->from;
	f->ip->to = s->to;
	f->ip->check = ~folded(sum_ip(f));
	f->tcp->from = swap16(s->from_port);
	f->tcp->to = swap16(s->to_port);
	f->tcp->seq = swap32(s->seq);
	f->tcp->ack = swap32(s->ack);
	f->tcp->length = 0x50;
	f->tcp->flags = s->flags;
	f->tcp->check = 0;
	if (s->payload) {
		f->tcp->payload[0] = swap16('a' << 8 | 's');
		f->tcp->payload[1] = swap16('k' << 8 | ' ');
		f->tcp->payload[2] = swap16('i' << 8 | 't');
	}
	f->tcp->check = ~folded(sum_tcp(f, 20 + s->payload));
	return XDP_TX;
}

ALWAYS_INLINE __u32 first_of(__u32 place, __u32 turn)
{
	return place << 16 | (turn & 0x7ff) << 5;
}

/* The server's initial sequence number, computed from the client's. */
ALWAYS_INLINE __u32 server_first(__u32 first)
{
	return first * 0x9e3779b1 ^ 0x7ffffff0;
}

ALWAYS_INLINE __u32 address_of(const struct peer *p, __u32 place)
{
	return swap32(p->clients + place % CLIENTS);
}

ALWAYS_INLINE __u16 port_of(const struct peer *p, __u32 place, __u32 turn)
{
	return 1024 + place / CLIENTS * p->ports + turn % p->ports;
}

ALWAYS_INLINE int begin(struct peer *p, struct place *place, __u32 number, struct segment *s)
{
	__u32 zero = 0;
	const __u32 *draining = map_lookup(&drain, &zero);

	if (!draining || *(const volatile __u32 *)draining) {
		place->step = VACANT;
		return 0;
	}
	place->turn++;
	place->step = OPENING;
	place->since_ns = ktime_coarse_ns();
	p->opened++;
	s->from = address_of(p, number);
	s->to = p->front;
	s->from_port = port_of(p, number, place->turn);
	s->to_port = p->port;
	s->seq = first_of(number, place->turn);
	s->ack = 0;
	s->flags = SYN;
	return 1;
}

/* Plays a client. Returns 0 if nothing is to be sent. */
ALWAYS_INLINE int client(struct peer *p, const struct frame *f, __u32 payload, struct segment *s)
{
	__u32 address = swap32(f->ip->to) - p->clients, port = swap16(f->tcp->to) - 1024;
	__u32 number = port / (p->ports ? p->ports : 1) * CLIENTS + address, first;
	__u32 seq = swap32(f->tcp->seq), ack = swap32(f->tcp->ack);
	__u8 flags = f->tcp->flags & (SYN | FIN | RST | ACK);
	struct place *place = map_lookup(&places, &number);

	if (!place || address >= CLIENTS || port_of(p, number, place->turn) != port + 1024) {
		p->unexpected++;
		return 0;
	}
	if (flags & RST) {
		p->reset++;
		return begin(p, place, number, s);
	}
	first = first_of(number, place->turn);
	if (place->step == OPENING && flags == (SYN | ACK) && ack == first + 1 &&
	    (p->answered || seq == server_first(first))) {
		place->theirs = seq;
		place->step = p->answered ? ASKED : OPENED;
		s->seq = first + 1;
		s->ack = seq + 1;
		s->flags = p->answered ? PSH | ACK : ACK;
		s->payload = p->answered ? REQUEST : 0;
		return 1;
	}
	if (place->step == ASKED && flags == (FIN | ACK) && ack == first + 1 + REQUEST && seq == place->theirs + 1 &&
	    !payload) {
		place->step = CLOSING;
		s->seq = first + 1 + REQUEST;
		s->ack = place->theirs + 2;
		s->flags = FIN | ACK;
		return 1;
	}
	if (place->step == CLOSING && flags == ACK && ack == first + 2 + REQUEST && seq == place->theirs + 2) {
		p->completed++;
		return begin(p, place, number, s);
	}
	/* The engine may acknowledge bytes that it still buffers: that is expected. */
	if (!(p->answered && place->step == ASKED && flags == ACK && !payload))
		p->unexpected++;
	return 0;
}

/*
 * Plays the server of an engine that completes the handshake itself. Every reply follows from the
 * segment alone.
 */
ALWAYS_INLINE int server_of_engine(struct peer *p, const struct frame *f, __u32 payload, struct segment *s)
{
	__u32 seq = swap32(f->tcp->seq), ack = swap32(f->tcp->ack);
	__u8 flags = f->tcp->flags & (SYN | FIN | RST | ACK);

	s->ack = seq + 1;
	if (flags == SYN) {
		s->seq = FIRST;
		s->flags = SYN | ACK;
		return 1;
	}
	if (flags == ACK && payload == REQUEST && ack == FIRST + 1) {
		s->seq = FIRST + 1;
		s->ack = seq + REQUEST;
		s->flags = FIN | ACK;
		return 1;
	}
	if (flags == (FIN | ACK) && ack == FIRST + 2) {
		p->server_closed++;
		s->seq = FIRST + 2;
		s->flags = ACK;
		return 1;
	}
	if (flags != ACK || payload || (ack != FIRST + 1 && ack != FIRST + 2))
		p->unexpected++;
	return 0;
}

ALWAYS_INLINE int server(struct peer *p, const struct frame *f, __u32 payload, struct segment *s)
{
	__u32 seq = swap32(f->tcp->seq), ack = swap32(f->tcp->ack), number = seq >> 16;
	__u32 first = seq & ~31U, own = server_first(first);
	__u8 flags = f->tcp->flags & (SYN | FIN | RST | ACK);
	struct place *place = map_lookup(&places, &number);

	if (!place || first != first_of(number, place->turn) || flags & RST) {
		p->unexpected++;
		return 0;
	}
	s->ack = first + 1 + REQUEST;
	if (flags == SYN && seq == first) {
		s->seq = own;
		s->ack = first + 1;
		s->flags = SYN | ACK;
		return 1;
	}
	if (flags == ACK && payload == REQUEST && seq == first + 1 && ack == own + 1) {
		s->seq = own + 1;
		s->flags = FIN | ACK;
		return 1;
	}
	if (flags == ACK && !payload && place->step == OPENED && seq == first + 1 && ack == own + 1) {
		/* The client's turn: this frame becomes its request. */
		place->step = ASKED;
		s->from = address_of(p, number);
		s->to = p->front;
		s->from_port = port_of(p, number, place->turn);
		s->to_port = p->port;
		s->seq = first + 1;
		s->ack = own + 1;
		s->flags = PSH | ACK;
		s->payload = REQUEST;
		return 1;
	}
	if (flags == (FIN | ACK) && seq == first + 1 + REQUEST && ack == own + 2) {
		p->server_closed++;
		s->seq = own + 2;
		s->ack = first + 2 + REQUEST;
		s->flags = ACK;
		return 1;
	}
	p->unexpected++;
	return 0;
}

/*
 * Pads the frame to the shortest Ethernet frame. Packets that the engine sends through its kernel,
 * before it knows the route, are shorter.
 */
ALWAYS_INLINE void fill_up(struct xdp_md *xdp)
{
	__u32 length = xdp->data_end - xdp->data;

	if (length < FRAME)
		xdp_adjust_tail(xdp, FRAME - length);
}

SECTION("xdp/peer") int xdp_peer(struct xdp_md *xdp)
{
	__u8 *data;
	struct frame frame, *f = &frame;
	struct segment s = {};
	__u32 zero = 0, bytes, header, payload;
	struct peer *p = map_lookup(&peer, &zero);
	int sends;

	fill_up(xdp);
	data = (void *)(long)xdp->data;
	frame.link = (void *)data;
	frame.ip = (void *)(data + ETH_HLEN);
	frame.tcp = (void *)(data + ETH_HLEN + 20);
	if (!p || data + FRAME > (__u8 *)(long)xdp->data_end)
		return XDP_PASS;
	if (f->link[6] != swap16(ETH_P_IP) || f->ip->head[0] != 0x45 || f->ip->protocol != IPPROTO_TCP)
		return XDP_PASS;
	bytes = swap16(f->ip->total) - 20;
	header = (f->tcp->length >> 4) * 4;
	payload = bytes - header;
	if (bytes > FRAME - ETH_HLEN - 20 || header < 20 || header > bytes || (payload && payload != REQUEST))
		return XDP_PASS;
	p->received++;
	if (!(p->received & 63)) {
		p->checked++;
		if (folded(sum_ip(f)) != 0xffff || folded(sum_tcp(f, bytes)) != 0xffff)
			p->corrupt++;
	}
	s.from = f->ip->to;
	s.to = f->ip->from;
	s.from_port = swap16(f->tcp->to);
	s.to_port = swap16(f->tcp->from);
	if (f->ip->from == p->front && f->tcp->from == swap16(p->port))
		sends = client(p, f, payload, &s);
	else if (f->ip->to == p->server && f->tcp->to == swap16(p->server_port))
		sends = p->answered ? server_of_engine(p, f, payload, &s) : server(p, f, payload, &s);
	else
		return XDP_PASS;
	if (!sends)
		return XDP_DROP;
	p->sent++;
	return answer(p, f, &s);
}

SECTION("license") char _license[] = "Dual MIT/GPL";

SECTION("layout") const __u32 _layout[] = { sizeof(struct peer), sizeof(struct place), offsetof(struct peer, opened) };
