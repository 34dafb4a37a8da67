/* SPDX-License-Identifier: MIT OR GPL-2.0-only */
/*
 * SYNs that XDP answers with cookies: what answer.bpf.h and crates/sys/src/bpf/answer.rs share. User space maps the memory of
 * the map "cookies", which has one value for each worker.
 */
#ifndef SIDETRACK_ANSWER_H
#define SIDETRACK_ANSWER_H

#include <linux/types.h>
#include <stddef.h>

/* Numbers are in the byte order of the host. */
struct cookies {
	__u32 on; /* 0: the rest is not to be used */
	__u32 clock; /* our time stamps are milliseconds of the worker's time and this */
	__u64 key[2];
	__u64 behind_ns; /* the worker's time is so much behind the monotonic clock */
	__u16 mss4, mss6; /* that clients are told */
	__u16 window;
	__u8 shift;
	__u8 zero;
	__u64 answered;
	__u64 zero64;
};

#endif
