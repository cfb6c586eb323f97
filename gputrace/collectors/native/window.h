/* Windows in the life of the process: --delay, --duration, --every. */
#pragma once

#include <stdint.h>

/* A variable of the environment as a number; 0 where there is none. */
uint64_t environment_number(const char *name);

uint64_t least(uint64_t one, uint64_t other);

int window_is_asked(void);

/* From now on, the start of CUDA. */
void window_set(void);

/* Begins or ends a window when it is time; gives back when to look again. CLOCK_MONOTONIC. */
uint64_t window_keep(uint64_t now);
