/* SPDX-License-Identifier: MIT OR GPL-2.0-only */
/*
 * How a layout file tells compile.rs sizes, offsets and constants: each becomes a line ".ascii "->name value"" of the
 * assembler text that clang -S writes. compile.rs makes Rust constants of these lines.
 */
#ifndef SIDETRACK_LAYOUT_H
#define SIDETRACK_LAYOUT_H

#include <stddef.h>

#define EXPORT(name, value) __asm__ volatile("\n.ascii \"->" name " %0\"" : : "i"(value))
#define SIZE(type) EXPORT(#type " SIZE", sizeof(struct type))
#define OFFSET(type, member) EXPORT(#type " " #member, offsetof(struct type, member))
#define CONSTANT(name) EXPORT("- " #name, name)

#endif
