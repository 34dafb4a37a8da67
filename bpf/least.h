/* SPDX-License-Identifier: MIT OR GPL-2.0-only */
/* The layout that least.bpf.c and the laboratory share. */
#ifndef SIDETRACK_LEAST_H
#define SIDETRACK_LEAST_H

#include <linux/types.h>

/* How frames of one direction are changed: to clients, or to the server. */
struct way {
	__u16 link[6]; /* of the next hop, and our own */
	__u32 egress;  /* interface; 0: the one they came in by */
	__u32 from;    /* the address that is replaced, and by what, in network byte order */
	__u32 to;
	__u16 from_port, to_port;
};

/* The one value of the map "least". */
struct least {
	struct way way[2];
};

#endif
