/* SPDX-License-Identifier: MIT OR GPL-2.0-only */
/* Which packets belong to the engine, and to which of its workers. */
#ifndef SIDETRACK_OWNER_BPF_H
#define SIDETRACK_OWNER_BPF_H

#include "packet.bpf.h"

/* Maps that this uses; user space creates them. */
extern char listens, sources, settings;

/* Spreads clients over workers: a hash of the client's address and port. */
ALWAYS_INLINE __u32 spread(const struct ends *ends)
{
	const __u32 *words = (const void *)ends->remote;
	__u32 hash = ends->remote_port * 0x9e3779b1;

	hash = (hash ^ words[0] ^ words[1]) * 0x85ebca6b;
	hash = (hash ^ words[2] ^ words[3]) * 0xc2b2ae35;
	return hash ^ (hash >> 15);
}

/* Returns the worker that a packet belongs to; -1: not the engine's. */
ALWAYS_INLINE int owner(const struct ends *ends)
{
	struct listen_key key = ends->local;
	__u32 zero = 0;
	const struct settings *set = map_lookup(&settings, &zero);
	const struct source *source = map_lookup(&sources, key.address);
	__u32 worker;

	if (!set || !set->workers)
		return -1;
	if (source && key.port >= source->first && key.port <= source->last) {
		if (source->worker != SHARED)
			return source->worker;
		worker = set->block ? (key.port - source->first) / set->block : 0;
		return worker < set->workers ? (int)worker : -1;
	}
	if (!map_lookup(&listens, &key)) {
		__builtin_memset(key.address, 0, sizeof(key.address));
		if (!map_lookup(&listens, &key))
			return -1;
	}
	return spread(ends) % set->workers;
}

#endif
