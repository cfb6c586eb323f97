/* Of which stretches calls are recorded: all, or none, or where there are too many, some. */
#ifndef GPUTRACE_SAMPLING_H
#define GPUTRACE_SAMPLING_H

#include <stdint.h>

/* Takes GPUTRACE_API: auto (the default), all, none; GPUTRACE_API_RATE, how many calls a second are not
 * too many; GPUTRACE_API_PERIOD_NS, from one stretch to the next. */
void sampling_init(void);

/* A window begins: whether calls are recorded from now on, CLOCK_MONOTONIC. */
int sampling_begin(uint64_t now);

/* Whether calls are to be recorded now, and when to look again. */
int sampling_keep(uint64_t now, uint64_t *look);

/* Records that CUPTI has made: of a call, or of something that a call issued. */
void sampling_count(int is_call);

/* The program has ended a training step. */
void sampling_step(void);

#endif
