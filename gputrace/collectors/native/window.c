#define _GNU_SOURCE
#include "window.h"
#include "capture.h"
#include "spool.h"

#include <stdlib.h>
#include <time.h>

enum { BEFORE, WITHIN, OVER };

/* The window at hand, or the next one; the end of them all; and how often they come, for how long. */
static uint64_t begin = UINT64_MAX, end = UINT64_MAX, last = UINT64_MAX, every, length;
static int phase;

uint64_t environment_number(const char *name) {
    const char *value = getenv(name);
    return value ? strtoull(value, NULL, 10) : 0;
}

int window_is_asked(void) {
    return getenv("GPUTRACE_DELAY_NS") || getenv("GPUTRACE_DURATION_NS") || getenv("GPUTRACE_EVERY_NS");
}

uint64_t least(uint64_t one, uint64_t other) { return one < other ? one : other; }

void window_set(void) {
    uint64_t duration = environment_number("GPUTRACE_DURATION_NS");
    if (!window_is_asked()) return;
    every = environment_number("GPUTRACE_EVERY_NS");
    length = environment_number("GPUTRACE_FOR_NS");
    begin = clock_ns(CLOCK_MONOTONIC) + environment_number("GPUTRACE_DELAY_NS");
    if (duration) last = begin + duration;
    end = every ? least(begin + length, last) : last;
}

/* The first one comes at once; the later ones when the wall clock is at a multiple of their distance, so
 * that the processes of a run record at the same time. */
static void set_next(void) {
    begin = clock_ns(CLOCK_MONOTONIC) + every - clock_ns(CLOCK_REALTIME) % every;
    end = least(begin + length, last);
    phase = begin < last ? BEFORE : OVER;
}

uint64_t window_keep(uint64_t now) {
    if (phase == BEFORE && now >= begin) {
        capture_want(1);
        phase = WITHIN;
    }
    if (phase == WITHIN && now >= end) {
        capture_want(0);
        if (every) set_next();
        else phase = OVER;
    }
    return phase == BEFORE ? begin : phase == WITHIN ? end : UINT64_MAX;
}
