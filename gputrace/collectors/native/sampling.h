/* Of which parts of the time calls are kept: of all of it, or none, or where there are too many, some. */
#pragma once

#include <stdint.h>

/* Takes GPUTRACE_API: auto (the default), all, none; GPUTRACE_API_RATE, how many calls a second are not
 * too many; GPUTRACE_API_PERIOD_NS, from one part to the next. */
void sampling_init(void);

/* A window begins, CLOCK_MONOTONIC: whether CUPTI is to record calls. It does so to the window's end. */
int sampling_begin(uint64_t now);

/* Whether calls are to be kept now, and when to look again. */
int sampling_keep(uint64_t now, uint64_t *look);

/* The program has ended a training step. */
void sampling_step(void);

/* The others of this file are called with the spool locked; moments are CLOCK_REALTIME's.
 *
 * From a moment on calls are kept, or left out. */
void sampling_turn(int on, uint64_t moment);

/* A call is decoded: whether it is kept, as one that begins and ends where calls are. */
int sampling_takes(uint64_t start, uint64_t end);

/* To be called before calls are decoded: notices that the wall clock was set back. */
void sampling_see_clock(void);
