/* A call takes as much room as the kernel that it launches, in the spool and in the trace, and calls can be left out:
 * kernels, copies and memsets are always kept. So where the program makes more calls a second than `rate`, they
 * are kept in a part of each period only, of a length at which `rate` calls a second are kept on average.
 *
 * CUPTI records all calls throughout a window, and decoding leaves out the ones outside the parts. Turning CUPTI's
 * records of calls off and on while the program makes calls saves its steps no time, and doing so some fifty times
 * in 6 s broke them for good: each launch had 2.6 records, and a fifth of all records no times (CUPTI 13.0 on an
 * H200).
 *
 * Parts begin when the wall clock is at a multiple of the period, so that the processes of a run keep the same
 * steps, and hold some whole steps. A window's first whole period is kept in any case, so that short recordings are
 * complete. */
#define _GNU_SOURCE
#include "call_sampling.h"
#include "system.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define USUAL_RATE 20000u
#define USUAL_PERIOD (10ull * SECOND)
/* Of a part, so that two are whole wherever it begins. */
#define MIN_STEPS 4u
/* Periods that a part waits for its steps. */
#define MAX_PERIODS 6u
/* At most one begins in each period: these reach back ten minutes, and records come seconds late. All calls from
 * before them are kept, which is what a file says that says nothing. */
#define MAX_GAPS 64u
/* A clock that falls behind by more than this from one look to the next was set. */
#define SET_BACK (SECOND / 1000)

static enum { AUTO, ALL, NONE } mode;
static uint64_t rate = USUAL_RATE, period = USUAL_PERIOD;

static atomic_ullong calls;
static atomic_uint steps;

/* The last decision, on CLOCK_MONOTONIC, and the calls until then. */
static uint64_t decided, calls_then;
/* The part at hand or the last one, of a length that is UINT64_MAX where it has no end; and the next beat at which
 * one may begin. */
static uint64_t part_begin, length, next;
static unsigned steps_then;
static int is_within_part;

/* The last gaps between parts, on CLOCK_REALTIME: `gap_count` of them, up to `last_gap`. The end of one that lasts is
 * UINT64_MAX. */
static struct { uint64_t begin, end; } gaps[MAX_GAPS];
static unsigned last_gap, gap_count;

void sampling_init(void) {
    const char *asked = getenv("GPUTRACE_API");
    mode = asked && !strcmp(asked, "none") ? NONE : asked && !strcmp(asked, "all") ? ALL : AUTO;
    if (environment_number("GPUTRACE_API_RATE")) rate = environment_number("GPUTRACE_API_RATE");
    if (environment_number("GPUTRACE_API_PERIOD_NS"))
        period = environment_number("GPUTRACE_API_PERIOD_NS");
}

void sampling_count_step(void) { steps++; }

/* When the wall clock is next at a multiple of the period, on CLOCK_MONOTONIC. */
static uint64_t next_beat(uint64_t now) {
    uint64_t ahead = clock_ns(CLOCK_REALTIME) - clock_ns(CLOCK_MONOTONIC);
    return now + period - (now + ahead) % period;
}

static void begin_part(uint64_t now, uint64_t part_length) {
    part_begin = decided = now;
    length = part_length;
    calls_then = calls;
    steps_then = steps;
    next = next_beat(now);
    is_within_part = 1;
}

int sampling_begin_window(uint64_t now) {
    begin_part(now, UINT64_MAX);
    return mode != NONE;
}

/* Calls a second since the last decision. */
static double call_rate(uint64_t now) {
    return (double)(calls - calls_then) * SECOND / (double)(now - decided);
}

/* Begins a period, and decides for how long of it calls are kept. */
static void plan_period(uint64_t now) {
    double share = (double)rate / call_rate(now); /* infinite where there were no calls */
    begin_part(now, share < 1 ? (uint64_t)(share * (double)period) : UINT64_MAX);
    /* The beat is a little ago; or about to come, where the wall clock was set back a little. */
    if (next - now < period / 2) next += period;
    decided = next - period;
}

/* In programs that report their steps; a part does not wait forever for steps that do not come. */
static int has_enough_steps(uint64_t now) {
    return !steps || steps - steps_then >= MIN_STEPS || now - part_begin > MAX_PERIODS * period;
}

/* Where the part had to be several times as long as it should, the next one is as many periods away. */
static void end_part(uint64_t now) {
    uint64_t periods = length ? (now - part_begin + length / 2) / length : 0;
    if (periods > 1) next += (periods - 1) * period;
    is_within_part = 0;
}

int sampling_update(uint64_t now, uint64_t *look) {
    if (mode != AUTO) {
        *look = UINT64_MAX;
        return mode == ALL;
    }
    uint64_t over = length == UINT64_MAX ? UINT64_MAX : part_begin + length;
    if (is_within_part && now >= over && has_enough_steps(now)) end_part(now);
    if (now >= next && !(is_within_part && over != UINT64_MAX)) {
        /* Where the last decision was made within a period, calls are counted until the end of the next. */
        if (now - decided >= period) plan_period(now);
        else next = next_beat(now);
        over = length == UINT64_MAX ? UINT64_MAX : part_begin + length;
    }
    *look = !is_within_part || over == UINT64_MAX ? next : now < over ? over : now + (now - part_begin) / 8;
    return is_within_part;
}

static int is_in_gap(void) { return gap_count && gaps[last_gap].end == UINT64_MAX; }

void sampling_note_switch(int keep, uint64_t moment) {
    int was_in_gap = is_in_gap();
    if (keep && was_in_gap) gaps[last_gap].end = moment;
    if (keep || was_in_gap) return;
    last_gap = (last_gap + 1) % MAX_GAPS;
    gaps[last_gap].begin = moment;
    gaps[last_gap].end = UINT64_MAX;
    if (gap_count < MAX_GAPS) gap_count++;
}

int sampling_accepts(uint64_t start, uint64_t end) {
    calls++;
    for (unsigned i = 0; i < gap_count; i++) {
        unsigned at = (last_gap + MAX_GAPS - i) % MAX_GAPS;
        if (start >= gaps[at].end) return 1;
        if (end > gaps[at].begin) return 0;
    }
    return 1;
}

/* Then moments come a second time, and a new call must not be taken for one in an old gap: gaps are forgotten, but
 * for one that lasts. */
void sampling_check_clock(void) {
    static int64_t ahead;
    int64_t before = ahead;
    ahead = (int64_t)(clock_ns(CLOCK_REALTIME) - clock_ns(CLOCK_MONOTONIC));
    if (before - ahead >= SET_BACK) gap_count = (unsigned)is_in_gap();
}
