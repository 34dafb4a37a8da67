/* SPDX-License-Identifier: MIT OR GPL-2.0-only */
/* What crates/sys has to know of the maps of engine.bpf.c; see layout.h. */
#include "cookies.h"
#include "decided.h"
#include "layout.h"
#include "offload.h"
#include "packet.bpf.h"

void layout(void)
{
	SIZE(listen_key);
	SIZE(source);
	SIZE(settings);
	CONSTANT(SHARED);
	CONSTANT(SCRATCH);

	SIZE(flow);
	OFFSET(flow, state);
	OFFSET(flow, handshake);
	OFFSET(flow, connected_ns);
	OFFSET(flow, number);
	OFFSET(flow, side);
	SIZE(flow_side);
	OFFSET(flow_side, remote);
	OFFSET(flow_side, local);
	OFFSET(flow_side, ports);
	OFFSET(flow_side, add);
	OFFSET(flow_side, sent);
	OFFSET(flow_side, acknowledged);
	OFFSET(flow_side, edge);
	OFFSET(flow_side, stamp);
	OFFSET(flow_side, packets);
	OFFSET(flow_side, to_user);
	OFFSET(flow_side, user_sent);
	OFFSET(flow_side, joined);
	OFFSET(flow_side, stamp_add);
	OFFSET(flow_side, stamp_first);
	OFFSET(flow_side, egress);
	OFFSET(flow_side, to);
	OFFSET(flow_side, from);
	OFFSET(flow_side, mss);
	OFFSET(flow_side, shift);
	OFFSET(flow_side, shown_shift);
	OFFSET(flow_side, fix);
	OFFSET(flow_side, v6);
	OFFSET(flow_side, fin);
	OFFSET(flow_side, fins);
	OFFSET(flow_side, last_ns);
	CONSTANT(FLOW_FREE);
	CONSTANT(FLOW_OFFLOADED);
	CONSTANT(FLOW_RETURNED);
	CONSTANT(FLOW_ENDED);
	CONSTANT(FLOW_SYN_SENT);
	CONSTANT(FLOW_COMPLETING);
	CONSTANT(FIN_SEEN);
	CONSTANT(FIN_ACKED);
	CONSTANT(FIN_SECOND);

	SIZE(bucket);
	CONSTANT(PLACES);
	SIZE(offload);
	SIZE(taken);
	SIZE(over_head);

	SIZE(handshake);
	OFFSET(handshake, behind_ns);
	OFFSET(handshake, clock);
	OFFSET(handshake, acknowledges);
	OFFSET(handshake, shown);
	OFFSET(handshake, stamp);
	OFFSET(handshake, length);
	OFFSET(handshake, needs);
	OFFSET(handshake, stamps);
	OFFSET(handshake, sack);
	OFFSET(handshake, scale);
	OFFSET(handshake, frame);

	SIZE(decision_key);
	SIZE(decision);
	SIZE(decided_flow);
	OFFSET(decided_flow, state);
	OFFSET(decided_flow, reason);
	OFFSET(decided_flow, decision);
	OFFSET(decided_flow, bucket);
	OFFSET(decided_flow, opened_ns);
	OFFSET(decided_flow, connected_ns);
	OFFSET(decided_flow, closed_ns);
	OFFSET(decided_flow, client);
	OFFSET(decided_flow, local);
	OFFSET(decided_flow, server);
	OFFSET(decided_flow, source);
	OFFSET(decided_flow, client_port);
	OFFSET(decided_flow, to_client);
	OFFSET(decided_flow, to_server);
	OFFSET(decided_flow, side);
	SIZE(decided_side);
	OFFSET(decided_side, sent);
	OFFSET(decided_side, last_ns);
	OFFSET(decided_side, first);
	OFFSET(decided_side, acknowledged);
	OFFSET(decided_side, packets);
	OFFSET(decided_side, fins);
	OFFSET(decided_side, egress);
	SIZE(decided_bucket);
	CONSTANT(DECIDED_PLACES);
	SIZE(decided);
	OFFSET(decided, seed);
	OFFSET(decided, bucket_mask);
	OFFSET(decided, ring_mask);
	OFFSET(decided, first);
	OFFSET(decided, count);
	OFFSET(decided, generation);
	OFFSET(decided, free_head);
	OFFSET(decided, free_tail);
	OFFSET(decided, full);
	OFFSET(decided, refused);
	CONSTANT(DECIDED_FREE);
	CONSTANT(DECIDED_SYN);
	CONSTANT(DECIDED_SYN_ACK);
	CONSTANT(DECIDED_OPEN);
	CONSTANT(DECIDED_KILLED);
	CONSTANT(DECIDED_FIN);
	CONSTANT(DECIDED_OK);
	CONSTANT(DECIDED_CLIENT_RESET);
	CONSTANT(DECIDED_SERVER_RESET);
	CONSTANT(DECIDED_REFUSED);

	SIZE(cookies);
	OFFSET(cookies, on);
	OFFSET(cookies, clock);
	OFFSET(cookies, key);
	OFFSET(cookies, behind_ns);
	OFFSET(cookies, mss4);
	OFFSET(cookies, mss6);
	OFFSET(cookies, window);
	OFFSET(cookies, shift);
	OFFSET(cookies, sent);
}
