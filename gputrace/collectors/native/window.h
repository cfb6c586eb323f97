/* Windows in the life of the process: --delay, --duration, --every. Used by the thread of writer.c alone. */
#pragma once

#include <stdint.h>

/* Whether the environment asks for any. */
int window_is_requested(void);

/* The life of the process begins now. */
void window_start(void);

/* Opens or closes a window when it is time; returns when to look again. Both on CLOCK_MONOTONIC. */
uint64_t window_advance(uint64_t now);
