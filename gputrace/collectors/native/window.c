#define _GNU_SOURCE
#include "window.h"
#include "capture.h"
#include "system.h"

#include <stdlib.h>
#include <time.h>

/* The next window, or the open one; the end of the last; and how often they come, for how long. */
static uint64_t begin = UINT64_MAX, end = UINT64_MAX, last_end = UINT64_MAX, period, length;
static enum { BEFORE, WITHIN, OVER } phase;

int window_is_requested(void) {
    return getenv("GPUTRACE_DELAY_NS") || getenv("GPUTRACE_DURATION_NS") || getenv("GPUTRACE_EVERY_NS");
}

void window_start(void) {
    uint64_t duration = environment_number("GPUTRACE_DURATION_NS");
    if (!window_is_requested()) return;
    period = environment_number("GPUTRACE_EVERY_NS");
    length = environment_number("GPUTRACE_FOR_NS");
    begin = clock_ns(CLOCK_MONOTONIC) + environment_number("GPUTRACE_DELAY_NS");
    if (duration) last_end = begin + duration;
    end = period ? earlier(begin + length, last_end) : last_end;
}

/* The first window comes at once; later ones when the wall clock is at a multiple of their period, so that the
 * processes of a run record at the same time. */
static void plan_next_window(void) {
    begin = clock_ns(CLOCK_MONOTONIC) + period - clock_ns(CLOCK_REALTIME) % period;
    end = earlier(begin + length, last_end);
    phase = begin < last_end ? BEFORE : OVER;
}

uint64_t window_advance(uint64_t now) {
    if (phase == BEFORE && now >= begin) {
        capture_set_window(1);
        phase = WITHIN;
    }
    if (phase == WITHIN && now >= end) {
        capture_set_window(0);
        if (period) plan_next_window();
        else phase = OVER;
    }
    return phase == BEFORE ? begin : phase == WITHIN ? end : UINT64_MAX;
}
