/* What the collector asks of the system: clocks, numbers of the environment, signals. */
#pragma once

#include <signal.h>
#include <stdint.h>

#define SECOND 1000000000u

/* Nanoseconds of one of the clocks of clock_gettime(2). */
uint64_t clock_ns(int clock);

/* A variable of the environment as a number; 0 where it is not set. */
uint64_t environment_number(const char *name);

/* Signals belong to the program, and none may be delivered to a thread of ours or of CUPTI's: blocks them in
 * this thread, whose new threads inherit that. BEFORE gets what restore_signals takes. Where FAULTS says so,
 * signals that a fault of the thread itself causes stay unblocked. */
enum { BLOCK_ALL, ALLOW_FAULTS };
void block_signals(sigset_t *before, int faults);
void restore_signals(const sigset_t *before);

static inline uint64_t earlier(uint64_t one, uint64_t other) { return one < other ? one : other; }
