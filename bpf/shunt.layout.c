/* SPDX-License-Identifier: MIT OR GPL-2.0-only */
/* What crates/sys has to know of the maps of shunt.bpf.c; see layout.h. */
#include "layout.h"
#include "shunt.h"

void layout(void)
{
	SIZE(key4);
	OFFSET(key4, source);
	OFFSET(key4, destination);
	OFFSET(key4, source_port);
	OFFSET(key4, destination_port);
	OFFSET(key4, protocol);
	SIZE(key6);
	OFFSET(key6, source);
	OFFSET(key6, destination);
	OFFSET(key6, source_port);
	OFFSET(key6, destination_port);
	OFFSET(key6, protocol);
	SIZE(flow);
	OFFSET(flow, packets);
	OFFSET(flow, bytes);
	OFFSET(flow, last_ns);
	OFFSET(flow, idle_ns);
	OFFSET(flow, generation);
	OFFSET(flow, egress);
	OFFSET(flow, mtu);
	OFFSET(flow, action);
	OFFSET(flow, ended);
	OFFSET(flow, pair);
	OFFSET(flow, installed_as);
	SIZE(settings);
	OFFSET(settings, generation);
	OFFSET(settings, alive_until_ns);
	CONSTANT(ACTION_REDIRECT);
	CONSTANT(ACTION_DROP);
	CONSTANT(PAIR_NONE);
	CONSTANT(PAIR_WAITS);
	CONSTANT(ENDED_FIN);
	CONSTANT(ENDED_RST);
	CONSTANT(ENDED_SYN);
	CONSTANT(ENDED_IDLE);
}
