/* SPDX-License-Identifier: MIT OR GPL-2.0-only */
/*
 * What the packet engine's programs and crates/sys/src/bpf/engine.rs share. Addresses are those of IPv6, an IPv4 one as
 * ::ffff:a.b.c.d; ports are in the byte order of the host.
 */
#ifndef SIDETRACK_ENGINE_H
#define SIDETRACK_ENGINE_H

#include <linux/bpf.h>
#include <linux/types.h>

#define SECTION(name) __attribute__((section(name), used))
#define ALWAYS_INLINE static inline __attribute__((always_inline))

/* Where clients connect to; an address of zeros stands for every one. */
struct listen_key {
	__u8 address[16] __attribute__((aligned(4)));
	__u16 port;
	__u16 zero;
};

/* Which ports of an address connections to servers come from, and whose they are. */
struct source {
	__u16 first;
	__u16 last;
	__u32 worker; /* or SHARED: each worker owns a block of the ports */
};

#define SHARED 0xffffffff

/* The one value of the settings map. */
struct settings {
	__u32 workers;
	__u32 block; /* ports of each worker where they are shared */
};

#endif
