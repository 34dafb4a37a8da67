/* SPDX-License-Identifier: MIT OR GPL-2.0-only */
/*
 * The shunt's fast path. A packet of an installed flow goes straight from the interface it came in by to
 * the interface it leaves by. Every other packet goes on to the bridge or the router and to netfilter (the
 * slow path).
 *
 * These always take the slow path: fragments, IP options and extension headers, VLAN tags that are stacked or
 * that the bridge or router adds, removes or changes, protocols other than TCP and UDP, SYN, a FIN or RST that fits the connection, packets larger than the egress takes, a TTL
 * that would run out, flows that were idle for too long, entries installed under older rules, and
 * everything once user space is gone.
 */
#include "shunt.h"
#include <linux/if_ether.h>
#include <linux/in.h>
#include <linux/ip.h>
#include <linux/ipv6.h>
#include <linux/pkt_cls.h>
#include <linux/tcp.h>
#include <linux/udp.h>

static void *(*map_lookup)(const void *map, const void *key) = (void *)BPF_FUNC_map_lookup_elem;
/*
 * As exact as the kernel's tick, which is enough for times of milliseconds. Reading the hardware clock
 * would be a good part of the cost of a small packet.
 */
static __u64 (*coarse_ns)(void) = (void *)BPF_FUNC_ktime_get_coarse_ns;
static long (*tc_redirect)(__u32 ifindex, __u64 flags) = (void *)BPF_FUNC_redirect;
static long (*tc_redirect_peer)(__u32 ifindex, __u64 flags) = (void *)BPF_FUNC_redirect_peer;
static long (*xdp_redirect)(const void *map, __u64 key, __u64 flags) = (void *)BPF_FUNC_redirect_map;
static long (*fib_lookup)(void *ctx, struct bpf_fib_lookup *params, int size, __u32 flags) =
	(void *)BPF_FUNC_fib_lookup;

/* Maps. User space creates them, the loader puts their descriptors here. */
extern char flows4, flows6, settings, devices;

#define htons(x) __builtin_bswap16(x)
#define FAMILY_INET 2
#define FAMILY_INET6 10
/* Farther than any window reaches (RFC 7323 Sec. 2.3): such a number does not belong to this connection. */
#define FAR (1 << 30)
/* How long the looked-up next hop of a routed flow is used again. */
#define WAY_NS 10000000ULL
/*
 * After this much silence no packet of the direction is left inside this host: longer than a softirq may
 * take, and than the clock's tick.
 */
#define SETTLED_NS 30000000ULL

#define VLAN_ID 0x0fff

/* A VLAN tag in a frame, behind the Ethernet header. */
struct vlan {
	__u16 id;   /* with priority bits above VLAN_ID */
	__u16 type; /* of what follows */
};

/* A packet, as far as the program reads it. */
struct packet {
	void *data;
	void *end;
	__u32 ingress;
	__u32 length;   /* of the whole frame, which may stand for several packets (GSO) */
	__u32 link_header; /* bytes before the IP header */
	__u32 vlan;        /* VLAN_* */
	__u32 gso_size; /* payload of each segment of a GSO frame; 0: one packet */
	__u8 *network;
	__u8 *transport;
	__u32 ip_header; /* bytes of the IP header; kept because subtracting pointers takes CAP_PERFMON */
	__u32 ip_length;
	__u32 each; /* bytes of the IP packet, or of each packet of a GSO frame */
	__u8 protocol;
	__u8 v6;
	__u64 now;
};

/* What happens to a packet. */
enum verdict { SLOW, DROP, SEND };

ALWAYS_INLINE int fits(const struct packet *p, const void *until)
{
	return until <= p->end;
}

ALWAYS_INLINE int read_ipv4(struct packet *p, struct key4 *key)
{
	struct iphdr *ip = (void *)p->network;

	if (!fits(p, ip + 1) || ip->ihl != 5 || ip->version != 4)
		return 0;
	if (ip->frag_off & htons(0x3fff))
		return 0;
	p->ip_header = sizeof(*ip);
	p->ip_length = htons(ip->tot_len);
	p->protocol = ip->protocol;
	p->transport = (__u8 *)(ip + 1);
	key->source = ip->saddr;
	key->destination = ip->daddr;
	return 1;
}

ALWAYS_INLINE int read_ipv6(struct packet *p, struct key6 *key)
{
	struct ipv6hdr *ip = (void *)p->network;

	if (!fits(p, ip + 1) || ip->version != 6)
		return 0;
	p->ip_header = sizeof(*ip);
	p->ip_length = htons(ip->payload_len) + sizeof(*ip);
	p->protocol = ip->nexthdr;
	p->transport = (__u8 *)(ip + 1);
	__builtin_memcpy(key->source, &ip->saddr, 16);
	__builtin_memcpy(key->destination, &ip->daddr, 16);
	return 1;
}

ALWAYS_INLINE int read_ports(struct packet *p, __u16 *source, __u16 *destination)
{
	struct udphdr *ports = (void *)p->transport;

	if (p->protocol == IPPROTO_TCP ? !fits(p, p->transport + sizeof(struct tcphdr))
				       : p->protocol != IPPROTO_UDP || !fits(p, ports + 1))
		return 0;
	*source = ports->source;
	*destination = ports->dest;
	return 1;
}

/* Looks up the entry of the opposite direction, whose packets come in where this direction's leave. */
ALWAYS_INLINE struct flow *opposite(const struct packet *p, const struct flow *flow, const void *key)
{
	if (p->v6) {
		const struct key6 *this = key;
		struct key6 other = { .ingress = flow->egress, .protocol = this->protocol };

		__builtin_memcpy(other.source, this->destination, 16);
		__builtin_memcpy(other.destination, this->source, 16);
		other.source_port = this->destination_port;
		other.destination_port = this->source_port;
		return map_lookup(&flows6, &other);
	} else {
		const struct key4 *this = key;
		struct key4 other = { .ingress = flow->egress, .protocol = this->protocol };

		other.source = this->destination;
		other.destination = this->source;
		other.source_port = this->destination_port;
		other.destination_port = this->source_port;
		return map_lookup(&flows4, &other);
	}
}

/*
 * Whether a FIN or RST fits what was seen of the connection. One that does not fit is forwarded on the fast
 * path, and the end host judges it by RFC 5961. Conntrack must not see it: it was made liberal and would
 * accept it.
 */
ALWAYS_INLINE int end_fits(const struct packet *p, const struct flow *flow, const void *key,
			   __u32 sequence, int reset)
{
	struct flow *other;

	if (!flow->known || sequence == flow->sequence_end)
		return 1;
	other = opposite(p, flow, key);
	if (!other || !other->known || sequence == other->acknowledged)
		return 1;
	/* A retransmitted FIN, perhaps with data that is not acknowledged yet. */
	return !reset && (__s32)(sequence - other->acknowledged) >= 0 &&
	       (__s32)(flow->sequence_end - sequence) >= 0;
}

/* Whether the segment may take the fast path. Updates what is known of the connection. */
ALWAYS_INLINE int judge_tcp(const struct packet *p, struct flow *flow, const void *key)
{
	const struct tcphdr *tcp = (void *)p->transport;
	__u32 header = p->ip_header + tcp->doff * 4;
	__u32 sequence = __builtin_bswap32(tcp->seq);
	__u32 data = p->ip_length > header ? p->ip_length - header : 0;

	if (tcp->syn) {
		/*
		 * Another connection on the same addresses and ports, or a forged SYN: conntrack
		 * decides.
		 */
		flow->ended |= ENDED_SYN;
		return 0;
	}
	if (tcp->rst || tcp->fin) {
		if (!end_fits(p, flow, key, sequence, tcp->rst))
			return 1;
		flow->ended |= tcp->rst ? ENDED_RST : ENDED_FIN;
		return 0;
	}
	if (flow->known) {
		__s32 ahead = (__s32)(sequence - flow->sequence_end);

		if (ahead > FAR || ahead < -FAR)
			return 0;
		if ((__s32)(sequence + data - flow->sequence_end) > 0)
			flow->sequence_end = sequence + data;
	} else {
		flow->sequence_end = sequence + data;
	}
	if (tcp->ack)
		flow->acknowledged = __builtin_bswap32(tcp->ack_seq);
	return 1;
}

/*
 * A bridged flow keeps the link addresses of its first packet. Packets with other ones are left to the
 * bridge.
 */
ALWAYS_INLINE int same_link(const struct packet *p, struct flow *flow)
{
	const __u32 *frame = p->data;
	__u32 *link = (__u32 *)flow->link;

	if (flow->known)
		return frame[0] == link[0] && frame[1] == link[1] && frame[2] == link[2];
	link[0] = frame[0];
	link[1] = frame[1];
	link[2] = frame[2];
	return 1;
}

/*
 * Whether the packet is in the VLAN of its flow. A tagged packet may be forwarded as it is only if the
 * packets of the opposite direction have the same tag: otherwise the bridge adds, removes or changes tags. So
 * the first tagged packet of a connection takes the slow path.
 */
ALWAYS_INLINE int same_vlan(const struct packet *p, struct flow *flow, const void *key)
{
	struct flow *other;

	if (flow->known || flow->vlan == VLAN_MIXED)
		return flow->vlan == p->vlan;
	flow->vlan = p->vlan;
	other = opposite(p, flow, key);
	if (!other || other->vlan == VLAN_UNKNOWN)
		return p->vlan == VLAN_UNTAGGED;
	if (other->vlan == p->vlan)
		return 1;
	other->vlan = VLAN_MIXED;
	flow->vlan = VLAN_MIXED;
	return 0;
}

ALWAYS_INLINE __u32 length_of_each(const struct packet *p)
{
	__u32 header = p->ip_header;

	if (!p->gso_size)
		return p->ip_length;
	if (p->protocol == IPPROTO_TCP)
		header += ((struct tcphdr *)p->transport)->doff * 4;
	else
		header += sizeof(struct udphdr);
	return header + p->gso_size;
}

ALWAYS_INLINE enum verdict judge(const struct packet *p, struct flow *flow, const void *key, int routed)
{
	const struct settings *s;
	__u32 zero = 0;
	__u64 now = p->now;

	s = map_lookup(&settings, &zero);
	if (!s || s->generation != flow->generation || now > s->alive_until_ns)
		return SLOW;
	if (flow->ended)
		return SLOW;
	if (now > flow->last_ns && now - flow->last_ns > flow->idle_ns) {
		flow->ended |= ENDED_IDLE;
		return SLOW;
	}
	/* Entries do not say to which VLAN they belong. */
	if (flow->action == ACTION_DROP)
		return routed || p->vlan == VLAN_UNTAGGED ? DROP : SLOW;
	/* Larger than the egress takes: the slow path answers with an ICMP error or fragments it. */
	if (p->each > flow->mtu)
		return SLOW;
	if (!routed && (!same_vlan(p, flow, key) || !same_link(p, flow)))
		return SLOW;
	if (p->protocol == IPPROTO_TCP && !judge_tcp(p, flow, key))
		return SLOW;
	return SEND;
}

ALWAYS_INLINE void count(const struct packet *p, struct flow *flow)
{
	/* A GSO frame counts as one packet and with all its bytes, as in conntrack. */
	__u64 bytes = p->gso_size ? p->length - p->link_header : p->ip_length;

	__sync_fetch_and_add(&flow->packets, 1);
	__sync_fetch_and_add(&flow->bytes, bytes);
	/* The coarse clock does not move within a tick: skip the write. */
	if (flow->last_ns != p->now) {
		if (flow->pair == PAIR_WAITS && p->now > flow->last_ns && p->now - flow->last_ns > SETTLED_NS)
			flow->pair = PAIR_ACROSS;
		flow->last_ns = p->now;
	}
	if (!flow->known)
		flow->known = 1;
}

/*
 * Looks up the entry of a packet. Returns 0 if there is none, if a router's packet has a tag, or if the
 * packet is of a kind that always takes the slow path.
 */
ALWAYS_INLINE struct flow *find(struct packet *p, struct key4 *key4, struct key6 *key6, const int routed)
{
	struct ethhdr *frame = p->data;
	__u16 type;

	if (!fits(p, frame + 1) || p->vlan == VLAN_STACKED)
		return 0;
	p->network = (__u8 *)(frame + 1);
	p->link_header = sizeof(*frame);
	type = frame->h_proto;
	if (!routed && type == htons(ETH_P_8021Q) && p->vlan == VLAN_UNTAGGED) {
		const struct vlan *tag = (void *)p->network;

		if (!fits(p, tag + 1))
			return 0;
		p->vlan = VLAN_TAGGED | (htons(tag->id) & VLAN_ID);
		p->network = (__u8 *)(tag + 1);
		p->link_header = sizeof(*frame) + sizeof(*tag);
		type = tag->type;
	}
	if (type == htons(ETH_P_IP)) {
		if (!read_ipv4(p, key4) || !read_ports(p, &key4->source_port, &key4->destination_port))
			return 0;
		key4->ingress = p->ingress;
		key4->protocol = p->protocol;
		return map_lookup(&flows4, key4);
	}
	if (type == htons(ETH_P_IPV6)) {
		p->v6 = 1;
		if (!read_ipv6(p, key6) || !read_ports(p, &key6->source_port, &key6->destination_port))
			return 0;
		key6->ingress = p->ingress;
		key6->protocol = p->protocol;
		return map_lookup(&flows6, key6);
	}
	return 0;
}

/*
 * Keeps the ends of two branches apart: merged, they would read a packet at an offset in a register, which takes
 * CAP_PERFMON.
 */
#define APART __asm__ volatile("" ::: "memory")

ALWAYS_INLINE int hops_left(const struct packet *p)
{
	__u8 hops;

	if (p->v6) {
		struct ipv6hdr *ip = (void *)p->network;

		if (!fits(p, ip + 1))
			return 0;
		hops = ip->hop_limit;
		APART;
	} else {
		struct iphdr *ip = (void *)p->network;

		if (!fits(p, ip + 1))
			return 0;
		hops = ip->ttl;
		APART;
	}
	return hops > 1;
}

/*
 * Looks up the next hop of a routed packet in the kernel's tables and keeps it with the flow. If two
 * processors do this at the moment when the route changes, one packet may get a mixture of both link
 * addresses; no host accepts that packet.
 */
ALWAYS_INLINE int find_way(void *ctx, const struct packet *p, struct flow *flow)
{
	struct bpf_fib_lookup way = {};

	if (p->v6) {
		struct ipv6hdr *ip = (void *)p->network;

		if (!fits(p, ip + 1))
			return 0;
		way.family = FAMILY_INET6;
		__builtin_memcpy(way.ipv6_src, &ip->saddr, 16);
		__builtin_memcpy(way.ipv6_dst, &ip->daddr, 16);
	} else {
		struct iphdr *ip = (void *)p->network;

		if (!fits(p, ip + 1))
			return 0;
		way.family = FAMILY_INET;
		way.tos = ip->tos;
		way.ipv4_src = ip->saddr;
		way.ipv4_dst = ip->daddr;
	}
	way.l4_protocol = p->protocol;
	way.tot_len = p->each;
	way.ifindex = p->ingress;
	/* The route leads to another egress than the one that was allowed: the slow path decides. */
	if (fib_lookup(ctx, &way, sizeof(way), 0) != BPF_FIB_LKUP_RET_SUCCESS || way.ifindex != flow->egress)
		return 0;
	__builtin_memcpy(flow->link, way.dmac, ETH_ALEN);
	__builtin_memcpy(flow->link + ETH_ALEN, way.smac, ETH_ALEN);
	flow->way_mtu = p->each;
	flow->way_ns = p->now;
	return 1;
}

/*
 * Whether the next hop of a routed packet is known and stands in flow->link. A recent lookup is used again
 * for packets no larger than the one it was made for. Packets that are not plain take the slow path.
 */
ALWAYS_INLINE int route(void *ctx, const struct packet *p, struct flow *flow)
{
	if (!hops_left(p))
		return 0;
	/* way_mtu is 0 until a route was found. */
	if (flow->way_mtu >= p->each && p->now - flow->way_ns < WAY_NS)
		return 1;
	return find_way(ctx, p, flow);
}

/*
 * Decrements the TTL (hop limit) and updates the checksum by RFC 1624: the TTL is the high byte of its
 * 16-bit word.
 */
ALWAYS_INLINE void one_hop(struct packet *p)
{
	if (p->v6) {
		struct ipv6hdr *ip = (void *)p->network;

		if (fits(p, ip + 1))
			ip->hop_limit--;
		APART;
	} else {
		struct iphdr *ip = (void *)p->network;
		__u32 sum;

		if (!fits(p, ip + 1))
			return;
		sum = (__u32)ip->check + htons(0x0100);
		ip->check = (__u16)(sum + (sum >= 0xffff));
		ip->ttl--;
	}
}

ALWAYS_INLINE int rewrite(void *ctx, struct packet *p, struct flow *flow)
{
	const __u32 *link = (const __u32 *)flow->link;
	__u32 *frame = p->data;

	if (!route(ctx, p, flow) || !fits(p, frame + 3))
		return 0;
	frame[0] = link[0];
	frame[1] = link[1];
	frame[2] = link[2];
	one_hop(p);
	return 1;
}

ALWAYS_INLINE enum verdict run(void *ctx, struct packet *p, struct flow **entry, int routed)
{
	struct key4 key4 = {};
	struct key6 key6 = {};
	struct flow *flow = find(p, &key4, &key6, routed);
	enum verdict verdict;

	if (!flow)
		return SLOW;
	p->now = coarse_ns();
	p->each = length_of_each(p);
	verdict = judge(p, flow, p->v6 ? (void *)&key6 : (void *)&key4, routed);
	if (verdict == SEND && routed && !rewrite(ctx, p, flow))
		return SLOW;
	if (verdict != SLOW)
		count(p, flow);
	*entry = flow;
	return verdict;
}

ALWAYS_INLINE int tc(struct __sk_buff *skb, int routed)
{
	struct packet p = {
		.data = (void *)(long)skb->data,
		.end = (void *)(long)skb->data_end,
		.ingress = skb->ifindex,
		.length = skb->len,
		.gso_size = skb->gso_size,
		.vlan = VLAN_UNTAGGED,
	};
	struct flow *flow = 0;

	/* A router's tagged packets are for another interface. */
	if (skb->vlan_present && routed)
		return TC_ACT_UNSPEC;
	if (skb->vlan_present)
		p.vlan = skb->vlan_proto == htons(ETH_P_8021Q) ? VLAN_TAGGED | (skb->vlan_tci & VLAN_ID)
							       : VLAN_STACKED;
	switch (run(skb, &p, &flow, routed)) {
	case SEND:
		if (flow->pair == PAIR_ACROSS)
			return tc_redirect_peer(flow->egress, 0);
		return tc_redirect(flow->egress, 0);
	case DROP:
		return TC_ACT_SHOT;
	default:
		return TC_ACT_UNSPEC;
	}
}

ALWAYS_INLINE int xdp(struct xdp_md *ctx, int routed)
{
	struct packet p = {
		.data = (void *)(long)ctx->data,
		.end = (void *)(long)ctx->data_end,
		.ingress = ctx->ingress_ifindex,
		.vlan = VLAN_UNTAGGED,
	};
	struct flow *flow = 0;

	switch (run(ctx, &p, &flow, routed)) {
	case SEND:
		/* If the device is gone, the packet takes the slow path. */
		return xdp_redirect(&devices, flow->egress, XDP_PASS);
	case DROP:
		return XDP_DROP;
	default:
		return XDP_PASS;
	}
}

/*
 * One program each for bridging and routing: the verifier makes a tc program that may write to packets
 * copy each header first, which costs bridged packets time.
 */
SECTION("tc/bridge") int tc_bridge(struct __sk_buff *skb)
{
	return tc(skb, 0);
}

SECTION("tc/route") int tc_route(struct __sk_buff *skb)
{
	return tc(skb, 1);
}

SECTION("xdp/bridge") int xdp_bridge(struct xdp_md *ctx)
{
	return xdp(ctx, 0);
}

SECTION("xdp/route") int xdp_route(struct xdp_md *ctx)
{
	return xdp(ctx, 1);
}

SECTION("license") char _license[] = "Dual MIT/GPL";
