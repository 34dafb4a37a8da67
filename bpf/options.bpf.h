/* SPDX-License-Identifier: MIT OR GPL-2.0-only */
/* Reads the TCP options of a SYN or SYN-ACK. */
#ifndef SIDETRACK_OPTIONS_BPF_H
#define SIDETRACK_OPTIONS_BPF_H

#include "packet.bpf.h"

/* Nanoseconds of one unit of our time stamps. */
#define STAMP_MS 1000000ULL
/* No window scale was offered; the largest one that counts (RFC 7323 Sec. 2.3). */
#define NO_SHIFT 15
#define SHIFT_MAX 14
/* At most this many options are read, NOPs included. */
#define OPTIONS_MAX 24
/* Where in the scratch memory the SYN's options are read. The SYN-ACK is built at offset 0. */
#define OPTIONS_AT 128
#define OPTION(at) scratch[OPTIONS_AT + ((at) & 63)]
#define OFFER_AT 256

/*
 * The options of a SYN, and the parser's position `at`. It lies in scratch memory on purpose: the verifier
 * tracks nothing there, so it does not explore every combination of options.
 */
struct offer {
	__u32 at;
	__u32 mss, shift, stamp;
	__u32 has_stamp, has_sack;
};

/* Reads one option (or NOP) at o->at. Returns 0 at the end of the list and on a malformed option. */
ALWAYS_INLINE int read_option(const __u8 *scratch, __u32 bytes, volatile struct offer *o)
{
	__u32 i = o->at, kind, size;

	if (i >= bytes)
		return 0;
	kind = OPTION(i);
	if (kind == 1) {
		o->at = i + 1;
		return 1;
	}
	if (!kind) {
		o->at = bytes;
		return 0;
	}
	size = OPTION(i + 1);
	if (size < 2 || i + size > bytes)
		return 0;
	if (kind == 2 && size == 4) {
		o->mss = OPTION(i + 2) << 8 | OPTION(i + 3);
	} else if (kind == 3 && size == 3) {
		o->shift = OPTION(i + 2) < SHIFT_MAX ? OPTION(i + 2) : SHIFT_MAX;
	} else if (kind == 4 && size == 2) {
		o->has_sack = 1;
	} else if (kind == 8 && size == 10) {
		o->stamp = (__u32)OPTION(i + 2) << 24 | (__u32)OPTION(i + 3) << 16 | (__u32)OPTION(i + 4) << 8 |
			   OPTION(i + 5);
		o->has_stamp = 1;
	}
	o->at = i + size;
	return 1;
}

/*
 * Reads `bytes` of options from offset `at` of the frame into `o`. Returns 0 if user space has to judge
 * them (too long, malformed or too many).
 */
ALWAYS_INLINE int read_offer(struct xdp_md *xdp, __u8 *scratch, __u32 at, __u32 bytes, volatile struct offer *o)
{
	o->at = o->stamp = o->has_stamp = o->has_sack = 0;
	o->mss = 536;
	o->shift = NO_SHIFT;
	HIDE(bytes);
	if (!bytes)
		return 1;
	if (bytes > 40 || xdp_load(xdp, at, scratch + OPTIONS_AT, bytes))
		return 0;
	for (int n = 0; n < OPTIONS_MAX; n++)
		if (!read_option(scratch, bytes, o))
			break;
	return o->at >= bytes;
}

#endif
