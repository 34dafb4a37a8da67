/* SPDX-License-Identifier: MIT OR GPL-2.0-only */
/*
 * The layout that the packet engine's programs and crates/sys/src/bpf/engine.rs share: which addresses and
 * ports are the engine's. Addresses have 16 bytes; an IPv4 address is written as ::ffff:a.b.c.d. Ports are
 * in the byte order of the host.
 */
#ifndef SIDETRACK_ENGINE_H
#define SIDETRACK_ENGINE_H

#include <linux/bpf.h>
#include <linux/types.h>

#define SECTION(name) __attribute__((section(name), used))
#define ALWAYS_INLINE static inline __attribute__((always_inline))

/* An address and port that the engine listens on. An address of zeros stands for every address. */
struct listen_key {
	__u8 address[16] __attribute__((aligned(4)));
	__u16 port;
	__u16 zero;
};

/* The source ports of an address that the engine uses towards servers, and the worker that owns them. */
struct source {
	__u16 first;
	__u16 last;
	__u32 worker; /* SHARED: each worker owns a block of the ports */
};

#define SHARED 0xffffffff

/* The one value of the settings map. */
struct settings {
	__u32 workers;
	__u32 block; /* number of ports in each worker's block of SHARED ports */
};

#endif
