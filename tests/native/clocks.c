/* In place of system.c, for call_sampling.c alone: clocks that a test sets. */
#include "../../gputrace/collectors/native/system.h"

#include <stdlib.h>
#include <time.h>

uint64_t fake_realtime, fake_monotonic;

uint64_t clock_ns(int which) { return which == CLOCK_MONOTONIC ? fake_monotonic : fake_realtime; }

uint64_t environment_number(const char *name) {
    return getenv(name) ? strtoull(getenv(name), NULL, 10) : 0;
}
