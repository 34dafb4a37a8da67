/* SPDX-License-Identifier: MIT OR GPL-2.0-only */
/* What crates/sys has to know of the maps of wire.bpf.c; see layout.h. */
#include "layout.h"
#include "wire.h"

void layout(void)
{
	SIZE(wire_key);
	SIZE(wire);
	OFFSET(wire, state);
	OFFSET(wire, why);
	OFFSET(wire, agreed);
	OFFSET(wire, side);
	OFFSET(wire, more);
	CONSTANT(WIRE_FREE);
	CONSTANT(WIRE_JOINING);
	CONSTANT(WIRE_WIRED);
	CONSTANT(WIRE_ENDED);
	CONSTANT(WIRE_HELD);
	CONSTANT(WIRE_LEAVING);
	CONSTANT(STAMPS_KNOWN);
	CONSTANT(WIRE_KNOWN);
	CONSTANT(WIRE_STAMPS);
	CONSTANT(WIRE_SACK);
	CONSTANT(WIRE_ECN);
	CONSTANT(WIRE_FINISHED);
	CONSTANT(WIRE_RESET_BY_CLIENT);
	CONSTANT(WIRE_RESET_BY_SERVER);
	CONSTANT(WIRE_REUSED);

	SIZE(wire_more);
	OFFSET(wire_more, awaits);
	OFFSET(wire_more, limit);
	OFFSET(wire_more, expects);
	OFFSET(wire_more, clock);
	OFFSET(wire_more, stamped);
	OFFSET(wire_more, dropped);
	OFFSET(wire_more, next);
}
