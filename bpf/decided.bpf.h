/* SPDX-License-Identifier: MIT OR GPL-2.0-only */
/*
 * Handles decided connections in XDP from the SYN on (decided.h): follows the handshake, sequence numbers and
 * FINs, translates addresses and ports, and forwards.
 *
 * User space gets every packet about which there is doubt: headers other than the plain ones, fragments,
 * clients without a decision, a full table, packets of no known connection.
 */
#ifndef SIDETRACK_DECIDED_BPF_H
#define SIDETRACK_DECIDED_BPF_H

#include "decided.h"
#include "packet.bpf.h"

/* Maps that this uses; user space creates them. */
extern char decided, decided_flows, decided_places, decided_free, decided_done, decisions, devices, ingresses;

/* Writes the new headers of a packet of "own" and sends it out by the other side's interface. */
ALWAYS_INLINE int rewrite_decided(struct xdp_md *xdp, struct packet *w, const struct decided_side *own, const struct decided_side *other,
			     const __u16 *link, const __u8 *source, const __u8 *target, __u32 ends, const int v6)
{
	__u16 *check = (__u16 *)(w->tcp + 16);

	if (!finish(xdp, w, v6))
		return XDP_DROP;
	*check = ~fold16((__u64)(__u16)~*check + own->fix);
	readdress(w, source, target, own->fix_ip, v6);
	*(__u32 *)w->tcp = ends;
#pragma unroll
	for (int i = 0; i < 6; i++)
		((__u16 *)w->eth)[i] = link[i];
	return xdp_redirect(&devices, other->egress, 0);
}

ALWAYS_INLINE __u32 both_ports(__u16 first, __u16 second)
{
	return bpf_htonl((__u32)first << 16 | second);
}

/* Forwards a packet of this side. */
ALWAYS_INLINE int forward_decided(struct xdp_md *xdp, struct packet *w, struct decided_flow *f, int is_client, const int v6)
{
	int from = is_client ? 0 : 1;

	return rewrite_decided(xdp, w, &f->side[from], &f->side[1 - from], is_client ? f->to_server : f->to_client,
			  is_client ? f->source : f->local, is_client ? f->server : f->client,
			  is_client ? both_ports(f->source_port, f->server_port) :
				      both_ports(f->local_port, f->client_port),
			  v6);
}

/* Gives a slot back to user space. Its state is set already. */
ALWAYS_INLINE void return_slot(struct decided *p, __u32 slot)
{
	__u32 at = __sync_fetch_and_add(&p->done_head, 1) & p->ring_mask;
	__u64 *place = map_lookup(&decided_done, &at);

	if (place)
		*(volatile __u64 *)place = slot + 1;
}

/*
 * Closes a connection once. Two processors may see the end at the same time, one for each side: the one
 * that changes the state gives the slot back.
 */
ALWAYS_INLINE void close_decided(struct decided *p, struct decided_flow *f, const struct packet *w)
{
	if (w->state >= DECIDED_CLOSED ||
	    __sync_val_compare_and_swap(&f->state, w->state, DECIDED_CLOSED) != w->state)
		return;
	f->closed_ns = ktime_ns();
	*(volatile __u32 *)&f->reason = w->ending;
	return_slot(p, f->source_port - p->first);
}

ALWAYS_INLINE void seen(struct decided_side *own)
{
	own->packets++;
	own->last_ns = ktime_coarse_ns();
}

/*
 * Checks and records the sequence numbers of a segment after the handshake. Returns 0 if they are
 * impossible.
 */
ALWAYS_INLINE int follow(struct decided_side *own, struct decided_side *other, struct packet *w, __u32 reset)
{
	__u32 end = w->seq + w->payload + (w->flags & TCP_FIN ? 1 : 0), sent = own->sent;
	__u32 peer = other->sent;

	if (w->flags & TCP_RST) {
		/*
		 * A reset ends the connection only with a sequence number that the receiver certainly
		 * accepts (RFC 5961). Others are forwarded.
		 */
		if (w->seq == other->acknowledged || w->seq == sent)
			w->ending = reset;
		return 1;
	}
	if (!(w->flags & TCP_ACK) || AFTER(w->ack, peer) || (__s32)(end - sent) > 1 << 30 ||
	    (__s32)(end - sent) < -(1 << 30))
		return 0;
	if (AFTER(end, sent))
		own->sent += end - sent;
	if (AFTER(w->ack, own->acknowledged))
		own->acknowledged = w->ack;
	if (w->flags & TCP_FIN && !(own->fins & DECIDED_FIN)) {
		own->fin = end;
		own->fins |= DECIDED_FIN;
	}
	if (other->fins == DECIDED_FIN && !AFTER(other->fin, w->ack)) {
		other->fins = DECIDED_FIN | DECIDED_FIN_ACKED;
		if (own->fins & DECIDED_FIN_ACKED)
			w->ending = DECIDED_OK;
	}
	return 1;
}

ALWAYS_INLINE int refuse(struct decided *p)
{
	__sync_fetch_and_add(&p->refused, 1);
	return XDP_DROP;
}

ALWAYS_INLINE int from_server(struct decided *p, struct decided_flow *f, struct packet *w)
{
	struct decided_side *client = &f->side[0], *server = &f->side[1];
	__u32 state = w->state = *(volatile __u32 *)&f->state;

	if (state == DECIDED_KILLED)
		return UP;
	if (state == DECIDED_CLOSED)
		return FORWARD;
	if (w->flags & TCP_SYN) {
		int again = state == DECIDED_SYN_ACK && w->seq == server->first;

		if (!(w->flags & TCP_ACK) || w->flags & (TCP_RST | TCP_FIN) || w->ack != client->first + 1 ||
		    (state != DECIDED_SYN && !again))
			return refuse(p);
		if (!again) {
			server->first = w->seq;
			server->sent = (1ULL << 32 | w->seq) + 1 + w->payload;
			server->acknowledged = w->ack;
			f->connected_ns = ktime_ns();
			/* Fails if user space has killed it meanwhile. */
			if (__sync_val_compare_and_swap(&f->state, DECIDED_SYN, DECIDED_SYN_ACK) != DECIDED_SYN)
				return UP;
		}
	} else if (state == DECIDED_SYN) {
		if (w->flags & TCP_RST && w->ack == client->first + 1)
			w->ending = DECIDED_REFUSED;
		/* Anything else, perhaps of an earlier connection, is forwarded: the client answers it. */
	} else if (!follow(server, client, w, DECIDED_SERVER_RESET)) {
		return refuse(p);
	}
	seen(server);
	return FORWARD;
}

ALWAYS_INLINE int from_client(struct decided *p, struct decided_flow *f, struct packet *w)
{
	struct decided_side *client = &f->side[0], *server = &f->side[1];
	__u32 state = w->state = *(volatile __u32 *)&f->state;

	if (state == DECIDED_KILLED)
		return UP;
	if (state == DECIDED_CLOSED)
		return FORWARD;
	if (w->flags & TCP_SYN) {
		/*
		 * A retransmitted SYN, or a SYN on a live connection, which the server answers with a
		 * challenge ACK.
		 */
		if (w->flags & (TCP_ACK | TCP_RST | TCP_FIN))
			return refuse(p);
		/* A new attempt while the server has not answered the first. */
		if (state == DECIDED_SYN && w->seq != client->first) {
			client->first = w->seq;
			client->sent = (1ULL << 32 | w->seq) + 1 + w->payload;
		}
	} else if (state == DECIDED_SYN) {
		if (!(w->flags & TCP_RST))
			return UP;
		if (w->seq == client->first + 1)
			w->ending = DECIDED_CLIENT_RESET;
	} else {
		if (state == DECIDED_SYN_ACK && !(w->flags & TCP_RST)) {
			/*
			 * If the ACK does not acknowledge this server's SYN, the client may be one that
			 * user space serves.
			 */
			if (!(w->flags & TCP_ACK) || AFTER(w->ack, (__u32)server->sent) || !AFTER(w->ack, server->first))
				return UP;
			w->state = DECIDED_OPEN;
			if (__sync_val_compare_and_swap(&f->state, DECIDED_SYN_ACK, DECIDED_OPEN) == DECIDED_KILLED)
				return UP;
		}
		if (!follow(client, server, w, DECIDED_CLIENT_RESET))
			return refuse(p);
	}
	seen(client);
	return FORWARD;
}

/* Takes a free slot. Returns p->count if there is none. */
ALWAYS_INLINE __u32 take_slot(struct decided *p)
{
#pragma unroll
	for (int i = 0; i < 4; i++) {
		__u32 head = *(volatile __u32 *)&p->free_head, at = head & p->ring_mask;
		__u64 *place;
		__u32 slot;

		if (head == *(volatile __u32 *)&p->free_tail)
			break;
		place = map_lookup(&decided_free, &at);
		if (!place)
			break;
		slot = *(volatile __u64 *)place;
		if (__sync_val_compare_and_swap(&p->free_head, head, head + 1) == head)
			return slot;
	}
	__sync_fetch_and_add(&p->full, 1);
	return p->count;
}

/* Copies an address; an IPv4 address becomes ::ffff:a.b.c.d. */
ALWAYS_INLINE void copy_address(__u8 *to, const __u8 *from, const int v6)
{
	__u32 *words = (void *)to;
	const __u32 *to_user = (const void *)from;

	words[0] = v6 ? to_user[0] : 0;
	words[1] = v6 ? to_user[1] : 0;
	words[2] = v6 ? to_user[2] : bpf_htonl(0xffff);
	words[3] = v6 ? to_user[3] : to_user[0];
}

ALWAYS_INLINE void fill(struct decided_flow *f, const struct decision *d, const struct packet *w,
			const struct decision_key *key, __u32 ingress, __u32 port, const int v6)
{
	struct decided_side *client = &f->side[0], *server = &f->side[1];
	__u64 outer = sum_words(AT(key->client, v6), v6) + sum_words(AT(key->local, v6), v6);
	__u64 inner = sum_words(AT(d->source, v6), v6) + sum_words(AT(d->server, v6), v6);
	__u64 ports_outer = w->ends & 0xffff, ports_inner = swap16(port) + swap16(d->server_port);

	ports_outer += w->ends >> 16;
	__builtin_memcpy(f->client, key->client, 16);
	__builtin_memcpy(f->local, key->local, 16);
	__builtin_memcpy(f->server, d->server, 16);
	__builtin_memcpy(f->source, d->source, 16);
	f->client_port = swap16(w->ends & 0xffff);
	f->local_port = key->port;
	f->server_port = d->server_port;
	f->source_port = port;
	/* Packets to the client go to the neighbour that its SYN came from. */
#pragma unroll
	for (int i = 0; i < 6; i++) {
		f->to_client[i] = ((const __u16 *)w->eth)[(i + 3) % 6];
		f->to_server[i] = d->link[i];
	}
	f->decision = d->number;
	f->reason = DECIDED_UNUSED;
	f->opened_ns = ktime_ns();
	f->connected_ns = 0;
	__builtin_memset(f->side, 0, sizeof(f->side));
	client->fix_ip = fold16((__u16)~fold16(outer) + inner);
	server->fix_ip = fold16((__u16)~fold16(inner) + outer);
	client->fix = fold16((__u16)~fold16(outer + ports_outer) + inner + ports_inner);
	server->fix = fold16((__u16)~fold16(inner + ports_inner) + outer + ports_outer);
	client->first = w->seq;
	client->sent = (1ULL << 32 | w->seq) + 1 + w->payload;
	client->egress = ingress;
	server->egress = d->egress;
	seen(client);
}

/*
 * Begins a connection for a client's SYN if there is a decision. Sets w->ending to DECIDED_UNUSED if the
 * bucket is full.
 */
ALWAYS_INLINE struct decided_flow *begin(struct xdp_md *xdp, struct decided *p, struct packet *w, struct decided_bucket *bucket,
			      __u32 index, __u32 tag, const int v6)
{
	struct decision_key key = {};
	const struct decision *d;
	struct decided_flow *f;
	__u32 slot, ifindex = xdp->ingress_ifindex;
	__u32 *ingress;
	__u64 place;

	copy_address(key.client, w->ip + SOURCE_AT(v6), v6);
	copy_address(key.local, w->ip + TARGET_AT(v6), v6);
	key.port = swap16(w->ends >> 16);
	d = map_lookup(&decisions, &key);
	if (!d || d->generation != *(volatile __u32 *)&p->generation)
		return 0;
	ingress = map_lookup(&ingresses, &ifindex);
	if (!ingress)
		return 0;
	slot = take_slot(p);
	f = map_lookup(&decided_flows, &slot);
	if (!f || slot >= p->count)
		return 0;
	fill(f, d, w, &key, *ingress, p->first + slot, v6);
	f->bucket = index;
	*(volatile __u32 *)&f->state = DECIDED_SYN;
	place = (__u64)tag << 32 | (slot + 1);
#pragma unroll
	for (int i = 0; i < DECIDED_PLACES; i++) {
		__u64 old = *(volatile __u64 *)&bucket->place[i];

		if (!old && __sync_val_compare_and_swap(&bucket->place[i], 0, place) == 0)
			return f;
	}
	/* The place of a closed connection can be reused. */
#pragma unroll
	for (int i = 0; i < DECIDED_PLACES; i++) {
		__u64 old = *(volatile __u64 *)&bucket->place[i];
		__u32 other = (__u32)old - 1;
		const struct decided_flow *resting = map_lookup(&decided_flows, &other);

		if (resting && *(const volatile __u32 *)&resting->state == DECIDED_CLOSED &&
		    __sync_val_compare_and_swap(&bucket->place[i], old, place) == old)
			return f;
	}
	w->ending = DECIDED_UNUSED;
	w->state = DECIDED_SYN;
	return f;
}

ALWAYS_INLINE __u64 hash_of(const struct decided *p, const struct packet *w, const int v6)
{
	const __u32 *from = (void *)(w->ip + SOURCE_AT(v6)), *to = (void *)(w->ip + TARGET_AT(v6));
	__u64 hash = p->seed;

	if (v6) {
		hash = mix(mix(hash, (__u64)from[0] << 32 | from[1]), (__u64)from[2] << 32 | from[3]);
		hash = mix(mix(hash, (__u64)to[0] << 32 | to[1]), (__u64)to[2] << 32 | to[3]);
	} else {
		hash = mix(hash, (__u64)from[0] << 32 | to[0]);
	}
	return mix(hash, w->ends);
}

ALWAYS_INLINE int decided_packet(struct xdp_md *xdp, struct decided *p, const int v6)
{
	struct packet w;
	struct decided_flow *f;
	struct decided_bucket *bucket;
	__u32 slot, index, tag;
	__u64 hash, found = 0, at = 0;
	int action, is_client;

	if (!read_packet(xdp, &w, v6))
		return UP;
	slot = swap16(w.ends >> 16) - p->first;
	if (slot < p->count) {
		f = map_lookup(&decided_flows, &slot);
		if (f && *(volatile __u32 *)&f->state && same(w.ip + TARGET_AT(v6), AT(f->source, v6), v6) &&
		    same(w.ip + SOURCE_AT(v6), AT(f->server, v6), v6) && swap16(w.ends & 0xffff) == f->server_port &&
		    *(const __u32 *)(f->server + 8) == (v6 ? *(const __u32 *)(w.ip + SOURCE_AT(v6) + 8) : bpf_htonl(0xffff)))
			goto server;
	}
	hash = hash_of(p, &w, v6);
	index = (__u32)hash & p->bucket_mask;
	tag = hash >> 32;
	bucket = map_lookup(&decided_places, &index);
	if (!bucket)
		return UP;
#pragma unroll
	for (__u32 i = 0; i < DECIDED_PLACES; i++) {
		__u64 place = *(volatile __u64 *)&bucket->place[i];
		__u64 differs = (place >> 32) ^ tag, mask = ((differs | -differs) >> 63) - 1;

		/* Without branches: the verifier would follow every combination of them. */
		HIDE(mask);
		found = (found & ~mask) | (place & mask);
		at = (at & ~mask) | (i & mask);
	}
	slot = (__u32)found - 1;
	f = map_lookup(&decided_flows, &slot);
	if (f && same(w.ip + SOURCE_AT(v6), AT(f->client, v6), v6) &&
	    same(w.ip + TARGET_AT(v6), AT(f->local, v6), v6) && w.ends == both_ports(f->client_port, f->local_port)) {
		if ((w.flags & (TCP_SYN | TCP_ACK)) != TCP_SYN || *(volatile __u32 *)&f->state != DECIDED_CLOSED)
			goto client;
		/* A new SYN after the end: the next connection between these ends. */
		__sync_val_compare_and_swap(&bucket->place[at & (DECIDED_PLACES - 1)], found, 0);
	}
	if ((w.flags & (TCP_SYN | TCP_ACK | TCP_RST | TCP_FIN)) != TCP_SYN)
		return UP;
	f = begin(xdp, p, &w, bucket, index, tag, v6);
	action = f && w.ending == NO_END ? FORWARD : UP;
	is_client = 1;
	goto judged;
client:
	action = from_client(p, f, &w);
	is_client = 1;
	goto judged;
server:
	action = from_server(p, f, &w);
	is_client = 0;
judged:
	if (f && w.ending != NO_END)
		close_decided(p, f, &w);
	return action == FORWARD && f ? forward_decided(xdp, &w, f, is_client, v6) : action;
}

ALWAYS_INLINE int decided_own(struct xdp_md *xdp)
{
	__u8 *eth = (void *)(long)xdp->data, *end = (void *)(long)xdp->data_end;
	__u32 zero = 0;
	struct decided *p = map_lookup(&decided, &zero);

	if (!p || eth + ETH_HLEN > end)
		return UP;
	if (*(__u16 *)(eth + 12) == swap16(ETH_P_IP))
		return decided_packet(xdp, p, 0);
	if (*(__u16 *)(eth + 12) == swap16(ETH_P_IPV6))
		return decided_packet(xdp, p, 1);
	return UP;
}

#endif
