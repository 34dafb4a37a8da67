/* SPDX-License-Identifier: MIT OR GPL-2.0-only */
/* What least.bpf.c and the laboratory share. */
#ifndef SIDETRACK_LEAST_H
#define SIDETRACK_LEAST_H

#include <linux/types.h>

/* One way of frames: to clients, to the server. */
struct way {
	__u16 link[6]; /* of who gets them, and our own */
	__u32 egress;  /* interface; 0: that by which they came */
	__u32 from;    /* the address that is changed, and what it becomes: as they stand in a packet */
	__u32 to;
	__u16 from_port, to_port;
};

/* The one value of "least". */
struct least {
	struct way way[2];
};

#endif
