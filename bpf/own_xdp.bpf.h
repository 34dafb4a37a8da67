/* SPDX-License-Identifier: MIT OR GPL-2.0-only */
/*
 * Hands the engine's frames to the AF_XDP socket of their queue; answers clients' SYNs with cookies where that is wanted.
 */
#ifndef SIDETRACK_OWN_XDP_BPF_H
#define SIDETRACK_OWN_XDP_BPF_H

#include "cookies.bpf.h"
#include "owner.bpf.h"

/* Maps that this uses; user space creates them. */
extern char sockets;

ALWAYS_INLINE int own_xdp(struct xdp_md *xdp, const int with_cookies)
{
	struct ends ends = {};
	__u16 ethertype = 0;
	int worker, action = UP;

	if (read_plain(xdp, &ends)) {
		worker = owner(&ends);
		if (worker < 0)
			return XDP_PASS;
		if (with_cookies)
			action = ends.transport == 20 ? cookie_own(xdp, &ends, worker, 0) : cookie_own(xdp, &ends, worker, 1);
		return action == UP ? xdp_redirect(&sockets, xdp->rx_queue_index, XDP_PASS) : action;
	}
	if (xdp_load(xdp, 12, &ethertype, sizeof(ethertype)))
		return XDP_PASS;
	if (read(xdp, 1, swap16(ethertype), &ends) == FOREIGN || owner(&ends) < 0)
		return XDP_PASS;
	return xdp_redirect(&sockets, xdp->rx_queue_index, XDP_PASS);
}

#endif
