/* During which parts of a window calls are kept: all of it, none, or some where there are too many.
 *
 * Parts are decided with the lock of capture.c held. What is said of moments, on CLOCK_REALTIME, and of calls that
 * are decoded needs the lock of the spool. Steps are counted without any. */
#pragma once

#include <stdint.h>

/* Reads GPUTRACE_API: auto (the default), all, none; GPUTRACE_API_RATE, how many calls a second are not too
 * many; GPUTRACE_API_PERIOD_NS, from one part to the next. */
void sampling_init(void);

/* A window begins, at NOW on CLOCK_MONOTONIC; returns whether CUPTI is to record calls in it. */
int sampling_begin_window(uint64_t now);

/* Returns whether calls are to be kept from now on; LOOK becomes when to ask again. */
int sampling_update(uint64_t now, uint64_t *look);

/* The program has ended a training step. */
void sampling_count_step(void);

/* From a moment on calls are kept, or left out. */
void sampling_note_switch(int on, uint64_t moment);

/* Counts a call that is decoded; returns whether it is kept, since it begins and ends while calls are. */
int sampling_accepts(uint64_t start, uint64_t end);

/* To be called before calls are decoded: notices that the wall clock was set back. */
void sampling_check_clock(void);
