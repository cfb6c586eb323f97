// Loops over columns for which numpy needs several passes: sets of intervals, sorting, lookups of ids.
// Each is described by the function of intervals.py or events.py that calls it, which does the same
// with numpy where this library is missing.
//
// Sets are sorted and disjoint, and hold no empty interval. The caller gives outputs enough room for
// everything that can be written.

#include <stdint.h>
#include <string.h>

#define EXPORTED __attribute__((visibility("default")))

// Returns the first position from `at` on whose value is greater, or `count`. A near one is found in a
// few steps, which is quick where one column is followed along another.
static int64_t first_greater(const int64_t *sorted, int64_t at, int64_t count, int64_t value) {
    int64_t end = at;
    for (int64_t step = 1; end < count && sorted[end] <= value; step *= 2) {
        at = end + 1;
        end += step;
    }
    if (end > count) end = count;
    while (at < end) {
        int64_t middle = at + (end - at) / 2;
        if (sorted[middle] <= value) at = middle + 1;
        else end = middle;
    }
    return at;
}

// Joins intervals that overlap or touch; with `group`, only intervals of groups from `low` to below
// `high`. Returns how many are written, or -1 where they are not sorted by start.
EXPORTED int64_t gputrace_join_intervals(const int64_t *start, const int64_t *end, int64_t count,
                                const int8_t *group, int32_t low, int32_t high, int64_t *starts,
                                int64_t *ends) {
    int64_t joined = 0, last = INT64_MIN;
    for (int64_t i = 0; i < count; i++) {
        if (group && (group[i] < low || group[i] >= high)) continue;
        if (end[i] <= start[i]) continue;
        if (start[i] < last) return -1;
        last = start[i];
        if (joined && last <= ends[joined - 1]) {
            if (end[i] > ends[joined - 1]) ends[joined - 1] = end[i];
        } else {
            starts[joined] = last;
            ends[joined++] = end[i];
        }
    }
    return joined;
}

// Writes what is in both sets; returns how many intervals, at most as many as both sets have.
EXPORTED int64_t gputrace_intersect(const int64_t *start, const int64_t *end, int64_t count,
                                       const int64_t *other_start, const int64_t *other_end,
                                       int64_t others, int64_t *starts, int64_t *ends) {
    int64_t i = 0, j = 0, common = 0;
    while (i < count && j < others) {
        if (end[i] <= other_start[j]) {
            i = first_greater(end, i, count, other_start[j]);
        } else if (other_end[j] <= start[i]) {
            j = first_greater(other_end, j, others, start[i]);
        } else {
            int mine_ends = end[i] < other_end[j];
            starts[common] = start[i] > other_start[j] ? start[i] : other_start[j];
            ends[common++] = mine_ends ? end[i] : other_end[j];
            if (mine_ends) i++;
            else j++;
        }
    }
    return common;
}

// Writes what is in the first set only; returns how many intervals, at most as many as both sets have.
EXPORTED int64_t gputrace_subtract(const int64_t *start, const int64_t *end, int64_t count,
                                     const int64_t *other_start, const int64_t *other_end,
                                     int64_t others, int64_t *starts, int64_t *ends) {
    int64_t j = 0, left = 0;
    for (int64_t i = 0; i < count; i++) {
        int64_t from = start[i];
        j = first_greater(other_end, j, others, from);
        for (; j < others && other_start[j] < end[i]; j++) {
            if (other_start[j] > from) {
                starts[left] = from;
                ends[left++] = other_start[j];
            }
            from = other_end[j];
            if (from >= end[i]) break;  // It may reach into the next.
        }
        if (from < end[i]) {
            starts[left] = from;
            ends[left++] = end[i];
        }
    }
    return left;
}

// Appends intervals `i` to below `until` of a set to one of `joined` intervals, which all start before
// them; returns how many it has then.
static int64_t append_intervals(const int64_t *start, const int64_t *end, int64_t i, int64_t until,
                      int64_t *starts, int64_t *ends, int64_t joined) {
    for (; joined && i < until && start[i] <= ends[joined - 1]; i++)
        if (end[i] > ends[joined - 1]) ends[joined - 1] = end[i];
    memcpy(starts + joined, start + i, (size_t)(until - i) * sizeof *starts);
    memcpy(ends + joined, end + i, (size_t)(until - i) * sizeof *ends);
    return joined + until - i;
}

// Writes what is in either set; returns how many intervals, at most as many as both sets have.
EXPORTED int64_t gputrace_merge_sets(const int64_t *start, const int64_t *end, int64_t count,
                                const int64_t *other_start, const int64_t *other_end,
                                int64_t others, int64_t *starts, int64_t *ends) {
    int64_t i = 0, j = 0, joined = 0;
    while (i < count && j < others) {
        int64_t until = first_greater(start, i, count, other_start[j]);
        joined = append_intervals(start, end, i, until, starts, ends, joined);
        i = until;
        if (i == count) break;
        until = first_greater(other_start, j, others, start[i]);
        joined = append_intervals(other_start, other_end, j, until, starts, ends, joined);
        j = until;
    }
    joined = append_intervals(start, end, i, count, starts, ends, joined);
    return append_intervals(other_start, other_end, j, others, starts, ends, joined);
}

// Writes how much of a set lies before each interval, and at the end all of it; numpy's sums of the
// numbers so far take six times as long.
EXPORTED void gputrace_sum_lengths(const int64_t *start, const int64_t *end, int64_t count,
                                   int64_t *covered) {
    int64_t sum = 0;
    for (int64_t i = 0; i < count; i++) {
        covered[i] = sum;
        sum += end[i] - start[i];
    }
    covered[count] = sum;
}

// Writes how much of a set lies before each time; `covered` says how much lies before each interval.
EXPORTED void gputrace_covered_before(const int64_t *start, const int64_t *end, const int64_t *covered,
                              int64_t count, const int64_t *times, int64_t asked, int64_t *before) {
    int64_t i = 0;
    for (int64_t k = 0; k < asked; k++) {
        if (k && times[k] < times[k - 1]) i = 0;
        i = first_greater(start, i, count, times[k]);
        if (!i) before[k] = 0;
        else if (times[k] >= end[i - 1]) before[k] = covered[i];
        else before[k] = covered[i - 1] + (times[k] - start[i - 1]);
    }
}

// Writes whether each time is in a set.
EXPORTED void gputrace_contains(const int64_t *start, const int64_t *end, int64_t count,
                                const int64_t *times, int64_t asked, uint8_t *inside) {
    int64_t i = 0;
    for (int64_t k = 0; k < asked; k++) {
        if (k && times[k] < times[k - 1]) i = 0;
        i = first_greater(start, i, count, times[k]);
        inside[k] = i && times[k] < end[i - 1];
    }
}

// Writes where each time belongs in a sorted column: before its equals, or after them.
EXPORTED void gputrace_search_sorted(const int64_t *sorted, int64_t count, const int64_t *times,
                              int64_t asked, int32_t after_equals, int64_t *places) {
    int64_t i = 0;
    for (int64_t k = 0; k < asked; k++) {
        if (k && times[k] < times[k - 1]) i = 0;
        if (after_equals) i = first_greater(sorted, i, count, times[k]);
        else i = times[k] == INT64_MIN ? 0 : first_greater(sorted, i, count, times[k] - 1);
        places[k] = i;
    }
}

// Writes the rows in order of their group, from 0 to below `groups`, rows of one group in their order,
// and where each group's rows end. The first half of `falls`, of 2 * `groups` numbers, says whether the
// group's starts fall anywhere; the other half is scratch. Writes no order where a group is out of range.
EXPORTED void gputrace_order_by_group(const int32_t *group, const int64_t *start, int64_t count,
                             int64_t groups, int64_t *order, int64_t *ends, int64_t *falls) {
    int64_t *last = falls + groups;
    for (int64_t g = 0; g < groups; g++) ends[g] = falls[g] = 0, last[g] = INT64_MIN;
    for (int64_t i = 0; i < count; i++) {
        if (group[i] < 0 || group[i] >= groups) return;
        ends[group[i]]++;
    }
    for (int64_t g = 0, at = 0; g < groups; g++) {
        int64_t many = ends[g];
        ends[g] = at;
        at += many;
    }
    for (int64_t i = 0; i < count; i++) {
        int32_t g = group[i];
        order[ends[g]++] = i;
        falls[g] |= start[i] < last[g];
        last[g] = start[i];
    }
}

// Returns whether nothing is odd in rows of some streams, numbered by `group` from 0 to below `groups`:
// none is longer than `longest`; on each stream starts and ids of launches never fall, but unknown ones;
// and no row of kind `kernel` outlasts the next one by more than `rounded`, or the start of the one after
// it. `state`, of 4 * `groups` numbers, is scratch.
EXPORTED int32_t gputrace_streams_in_order(const int32_t *group, const int64_t *start, const int64_t *end,
                                           const int64_t *issued, const int8_t *kind, int64_t count,
                                           int64_t groups, int32_t kernel, int64_t longest,
                                           int64_t rounded, int64_t *state) {
    enum { STARTED, ISSUED, ENDED, ENDED_BEFORE, EACH };
    for (int64_t at = 0; at < EACH * groups; at++) state[at] = INT64_MIN / 2;
    for (int64_t i = 0; i < count; i++) {
        int64_t *of = state + EACH * group[i];
        if (start[i] < of[STARTED] || end[i] - start[i] > longest) return 0;
        of[STARTED] = start[i];
        if (issued[i] != -1) {
            if (issued[i] < of[ISSUED]) return 0;
            of[ISSUED] = issued[i];
        }
        if (kind[i] != kernel) continue;
        if (of[ENDED] - rounded > end[i] || of[ENDED_BEFORE] - rounded > start[i]) return 0;
        of[ENDED_BEFORE] = of[ENDED];
        of[ENDED] = end[i];
    }
    return 1;
}

enum { DIGIT_BITS = 11, DIGITS = 6, VALUES = 1 << DIGIT_BITS };

// Sorts numbers by their digits, in as many passes as there are digits that differ. `scratch` is as long.
EXPORTED void gputrace_sort_numbers(int64_t *numbers, int64_t *scratch, int64_t count) {
    // The sign is the highest bit: inverted, negative numbers come first.
    const uint64_t sign = (uint64_t)1 << 63;
    int64_t places[DIGITS][VALUES] = {0};
    for (int64_t i = 0; i < count; i++)
        for (int32_t digit = 0; digit < DIGITS; digit++)
            places[digit][((uint64_t)numbers[i] ^ sign) >> digit * DIGIT_BITS & (VALUES - 1)]++;
    int64_t *from = numbers, *to = scratch;
    for (int32_t digit = 0; digit < DIGITS && count; digit++) {
        int64_t *place = places[digit], at = 0;
        int32_t shift = digit * DIGIT_BITS;
        if (place[((uint64_t)from[0] ^ sign) >> shift & (VALUES - 1)] == count) continue;
        for (int32_t value = 0; value < VALUES; value++) {
            int64_t many = place[value];
            place[value] = at;
            at += many;
        }
        for (int64_t i = 0; i < count; i++)
            to[place[((uint64_t)from[i] ^ sign) >> shift & (VALUES - 1)]++] = from[i];
        int64_t *swap = from;
        from = to;
        to = swap;
    }
    if (from != numbers)
        for (int64_t i = 0; i < count; i++) numbers[i] = from[i];
}

#define FOR_EACH_ID(TYPE, ACTION)                                                  \
    for (int64_t i = 0; i < count; i++) {                                          \
        int64_t at = (int64_t)((uint64_t)((const TYPE *)ids)[i] - (uint64_t)low);  \
        ACTION;                                                                    \
    }
#define FOR_ALL_IDS(ACTION)                               \
    switch (width) {                                      \
        case 1: FOR_EACH_ID(int8_t, ACTION); break;       \
        case 2: FOR_EACH_ID(int16_t, ACTION); break;      \
        case 4: FOR_EACH_ID(int32_t, ACTION); break;      \
        case 8: FOR_EACH_ID(int64_t, ACTION); break;      \
    }

// Marks each id at its distance from `low`; ids from `low + size` on are left out.
EXPORTED void gputrace_mark_ids(const void *ids, int32_t width, int64_t count, int64_t low,
                            int64_t size, uint8_t *marks) {
    FOR_ALL_IDS(if ((uint64_t)at < (uint64_t)size) marks[at] = 1)
}

// Writes the first row of each id into a table by distance from `low`, whose entries are all `missing`
// before; ids from `low + size` on are left out.
EXPORTED void gputrace_index_ids(const void *ids, int32_t width, int64_t count, int64_t low,
                             int64_t size, int32_t *table, int32_t missing, const int64_t *rows) {
    FOR_ALL_IDS(if ((uint64_t)at < (uint64_t)size && table[at] == missing) table[at] = (int32_t)rows[i])
}

// Writes the table's entry for each id; `missing` for ids beyond it.
EXPORTED void gputrace_look_up_ids(const void *ids, int32_t width, int64_t count, int64_t low,
                                  int64_t size, const int32_t *table, int32_t missing,
                                  int32_t *entries) {
    FOR_ALL_IDS(entries[i] = (uint64_t)at < (uint64_t)size ? table[at] : missing)
}
