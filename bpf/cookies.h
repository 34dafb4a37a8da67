/* SPDX-License-Identifier: MIT OR GPL-2.0-only */
/*
 * The layout that cookies.bpf.h (SYN cookies) and crates/sys/src/bpf/cookies.rs share. User space maps the
 * memory of the map "cookies", which has one value for each worker.
 */
#ifndef SIDETRACK_COOKIES_H
#define SIDETRACK_COOKIES_H

#include <linux/types.h>
#include <stddef.h>

/* What a SYN-ACK needs. Numbers are in the byte order of the host. */
struct cookies {
	__u32 on; /* 0: answer no SYNs, the other fields are not set */
	__u32 clock; /* our time stamps are the worker's time in milliseconds plus this */
	__u64 key[2];
	__u64 behind_ns; /* CLOCK_MONOTONIC minus the worker's time */
	__u16 mss4, mss6; /* announced to clients by IPv4 and by IPv6 */
	__u16 window;
	__u8 shift;
	__u8 zero;
	__u64 sent;
	__u64 zero64;
};

#endif
