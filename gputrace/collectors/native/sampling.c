/* Calls cost the program as much for each as the kernels that they launch (0.2 to 0.4 us on an H200), and
 * are what can be left out: kernels, copies and memsets are always recorded. So where calls come faster
 * than RATE, they are recorded in a part of each PERIOD, as many a second on average.
 *
 * Parts begin when the wall clock is at a multiple of the period, so that the processes of a run record
 * the same steps, and hold some whole steps. A window's first whole period is recorded in any case: what
 * is short is complete. */
#define _GNU_SOURCE
#include "sampling.h"
#include "spool.h"
#include "window.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define SECOND 1000000000u
#define RATE 20000u
#define PERIOD (10ull * SECOND)
/* Two whole ones, whatever they begin with. */
#define STEPS 4u
/* Periods. */
#define LONGEST 6u

static enum { AUTO, ALL, NONE } how;
static uint64_t rate = RATE, period = PERIOD;

static atomic_ullong calls, issued;
static atomic_uint steps;

/* Since the last decision; and the calls for what was issued, of a stretch that had all calls. */
static uint64_t decided, calls_then, issued_then, usual_calls, usual_issued;
/* The part under way; length is UINT64_MAX where it has no end. */
static uint64_t part_begin, length, next;
static unsigned steps_then;
static int on, had_off;

void sampling_init(void) {
    const char *asked = getenv("GPUTRACE_API");
    how = asked && !strcmp(asked, "none") ? NONE : asked && !strcmp(asked, "all") ? ALL : AUTO;
    if (environment_number("GPUTRACE_API_RATE")) rate = environment_number("GPUTRACE_API_RATE");
    if (environment_number("GPUTRACE_API_PERIOD_NS"))
        period = environment_number("GPUTRACE_API_PERIOD_NS");
}

void sampling_count(int is_call) { (*(is_call ? &calls : &issued))++; }
void sampling_step(void) { steps++; }

/* When the wall clock is at a multiple of the period next. */
static uint64_t next_beat(uint64_t now) {
    uint64_t ahead = clock_ns(CLOCK_REALTIME) - clock_ns(CLOCK_MONOTONIC);
    return now + period - (now + ahead) % period;
}

static void begin_part(uint64_t now, uint64_t how_long) {
    part_begin = decided = now;
    length = how_long;
    calls_then = calls;
    issued_then = issued;
    steps_then = steps;
    next = next_beat(now);
    had_off = 0;
    on = 1;
}

int sampling_begin(uint64_t now) {
    begin_part(now, UINT64_MAX);
    return how != NONE;
}

/* How many calls a second the program makes; while they are not recorded, by what they issue. */
static double call_rate(uint64_t now) {
    double of_calls = (double)(calls - calls_then), of_issued = (double)(issued - issued_then);
    if (!had_off) {
        usual_calls = calls - calls_then;
        usual_issued = issued - issued_then;
    } else if (usual_issued)
        of_calls = of_issued * (double)usual_calls / (double)usual_issued;
    return of_calls * SECOND / (double)(now - decided);
}

/* A new period: which part of it has its calls recorded. */
static void decide(uint64_t now) {
    double share = (double)rate / call_rate(now); /* of none, infinity */
    begin_part(now, share < 1 ? (uint64_t)(share * (double)period) : UINT64_MAX);
    /* The beat is a little ago; or about to come, where the wall clock was set back a little. */
    if (next - now < period / 2) next += period;
    decided = next - period;
}

/* Where steps are told; those that do not come are not waited for for ever. */
static int has_steps(uint64_t now) {
    return !steps || steps - steps_then >= STEPS || now - part_begin > LONGEST * period;
}

/* The part is over. If it had to be longer than it should, the next one is as many periods away. */
static void end_part(uint64_t now) {
    uint64_t periods = length ? (now - part_begin + length / 2) / length : 0;
    if (periods > 1) next += (periods - 1) * period;
    on = 0;
    had_off = 1;
}

int sampling_keep(uint64_t now, uint64_t *look) {
    if (how != AUTO) {
        *look = UINT64_MAX;
        return how == ALL;
    }
    uint64_t over = length == UINT64_MAX ? UINT64_MAX : part_begin + length;
    if (on && now >= over && has_steps(now)) end_part(now);
    if (now >= next && !(on && over != UINT64_MAX)) {
        /* What began within a period is measured until the end of the next one. */
        if (now - decided >= period) decide(now);
        else next = next_beat(now);
        over = length == UINT64_MAX ? UINT64_MAX : part_begin + length;
    }
    *look = !on || over == UINT64_MAX ? next : now < over ? over : now + (now - part_begin) / 8;
    return on;
}
