/* A call takes as much room as the kernel that it launches, in the spool and in the trace, and calls are
 * what can be left out: kernels, copies and memsets are always kept. So where calls come faster than RATE,
 * those of a part of each PERIOD are kept, as many a second on average.
 *
 * CUPTI records all calls throughout a window, and decoding leaves out those outside the parts. To turn
 * CUPTI's records of calls off and on while the program makes calls saves its steps no time, and some
 * fifty times in 6 s broke them for good: 2.6 came of each launch, and a fifth of all had no times (CUPTI
 * 13.0 on an H200).
 *
 * Parts begin when the wall clock is at a multiple of the period, so that the processes of a run keep
 * the same steps, and hold some whole steps. A window's first whole period is kept in any case: what
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
/* At most one begins in each period: these reach back ten minutes, where records come seconds late. Of
 * what was before them all calls are kept, which claims nothing that is not so. */
#define STRETCHES 64u
/* By more than this, from one look to the next, nothing but setting it makes a clock fall behind. */
#define SET_BACK (SECOND / 1000)

static enum { AUTO, ALL, NONE } how;
static uint64_t rate = RATE, period = PERIOD;

static atomic_ullong calls;
static atomic_uint steps;

/* Since the last decision. */
static uint64_t decided, calls_then;
/* The part under way; length is UINT64_MAX where it has no end. */
static uint64_t part_begin, length, next;
static unsigned steps_then;
static int on;

/* The last stretches between parts, KNOWN up to LATEST; end is UINT64_MAX of one that lasts. */
static struct { uint64_t begin, end; } left_out[STRETCHES];
static unsigned latest, known;

void sampling_init(void) {
    const char *asked = getenv("GPUTRACE_API");
    how = asked && !strcmp(asked, "none") ? NONE : asked && !strcmp(asked, "all") ? ALL : AUTO;
    if (environment_number("GPUTRACE_API_RATE")) rate = environment_number("GPUTRACE_API_RATE");
    if (environment_number("GPUTRACE_API_PERIOD_NS"))
        period = environment_number("GPUTRACE_API_PERIOD_NS");
}

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
    steps_then = steps;
    next = next_beat(now);
    on = 1;
}

int sampling_begin(uint64_t now) {
    begin_part(now, UINT64_MAX);
    return how != NONE;
}

/* How many calls a second the program makes. */
static double call_rate(uint64_t now) {
    return (double)(calls - calls_then) * SECOND / (double)(now - decided);
}

/* A new period: of which part of it the calls are kept. */
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

static int is_left_out(void) { return known && left_out[latest].end == UINT64_MAX; }

void sampling_turn(int keep, uint64_t moment) {
    int was_left_out = is_left_out();
    if (keep && was_left_out) left_out[latest].end = moment;
    if (keep || was_left_out) return;
    latest = (latest + 1) % STRETCHES;
    left_out[latest].begin = moment;
    left_out[latest].end = UINT64_MAX;
    if (known < STRETCHES) known++;
}

int sampling_takes(uint64_t start, uint64_t end) {
    calls++;
    for (unsigned i = 0; i < known; i++) {
        unsigned at = (latest + STRETCHES - i) % STRETCHES;
        if (start >= left_out[at].end) return 1;
        if (end > left_out[at].begin) return 0;
    }
    return 1;
}

/* Moments come a second time then, and no call may be taken for one of the first: rather too many are kept,
 * while the stretch lasts. */
void sampling_see_clock(void) {
    static int64_t ahead;
    int64_t before = ahead;
    ahead = (int64_t)(clock_ns(CLOCK_REALTIME) - clock_ns(CLOCK_MONOTONIC));
    if (before - ahead >= SET_BACK) known = (unsigned)is_left_out();
}
