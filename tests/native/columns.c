/* Calls the loops over columns on random ones, sorted or not, with outputs of just the room that is
 * promised; made to be compiled with AddressSanitizer and UndefinedBehaviorSanitizer.
 *
 * Usage: columns RUNS SEED. Prints how many unions were sorted and how many not. */
#include "../../gputrace/model/native/columns.c"

#include <stdio.h>
#include <stdlib.h>

static uint64_t state;

static int64_t draw(int64_t below) {
    state ^= state << 13, state ^= state >> 7, state ^= state << 17;
    return (int64_t)(state % (uint64_t)below);
}

static int64_t *column(int64_t count) { return malloc((size_t)(count ? count : 1) * 8); }

// A set of intervals, or now and then anything.
static void fill(int64_t *start, int64_t *end, int64_t count) {
    int64_t now = draw(9) ? draw(50) - 25 : INT64_MIN + draw(3), odd = !draw(4);
    for (int64_t i = 0; i < count; i++) {
        start[i] = now += odd ? draw(99) - 49 : 1 + draw(5);
        end[i] = now += odd ? draw(99) - 49 : 1 + draw(5);
    }
    if (odd && count) end[draw(count)] = draw(2) ? INT64_MAX : INT64_MIN;
}

int main(int count, char **words) {
    if (count != 3) return 2;
    state = (uint64_t)atoll(words[2]) * 2 + 1;
    long sorted = 0, unsorted = 0;
    for (long run = atol(words[1]); run; run--) {
        int64_t mine = draw(40), others = draw(2) ? draw(4) : draw(200), both = mine + others;
        int64_t *start = column(mine), *end = column(mine), *to = column(both), *from = column(both);
        int64_t *other_start = column(others), *other_end = column(others);
        fill(start, end, mine), fill(other_start, other_end, others);
        gputrace_intersect(start, end, mine, other_start, other_end, others, from, to);
        gputrace_subtract(start, end, mine, other_start, other_end, others, from, to);
        gputrace_merge_sets(start, end, mine, other_start, other_end, others, from, to);
        int64_t *found = column(others), *covered = column(mine + 1);
        gputrace_sum_lengths(start, end, mine, covered);
        gputrace_covered_before(start, end, covered, mine, other_start, others, found);
        gputrace_contains(start, end, mine, other_start, others, (uint8_t *)found);
        gputrace_search_sorted(start, mine, other_start, others, (int32_t)draw(2), found);
        int64_t *joined = column(mine), *ends = column(mine);
        int8_t *group = calloc((size_t)mine + 1, 1);
        int32_t first = (int32_t)draw(3);
        for (int64_t i = 0; i < mine; i++) group[i] = (int8_t)draw(4);
        gputrace_join_intervals(start, end, mine, group, first, first + 2, joined, ends);
        gputrace_join_intervals(start, end, mine, NULL, 0, 0, joined, ends) < 0 ? unsorted++ : sorted++;
        int32_t *number = calloc((size_t)mine + 1, 4);
        for (int64_t i = 0; i < mine; i++) number[i] = (int32_t)draw(4) - !draw(99);
        int64_t groups = 3 + draw(2), *edges = column(groups), *falls = column(2 * groups);
        gputrace_order_by_group(number, start, mine, groups, joined, edges, falls);
        int8_t *kind = calloc((size_t)mine + 1, 1);
        for (int64_t i = 0; i < mine; i++) kind[i] = (int8_t)draw(2), number[i] = (int32_t)draw(groups);
        int64_t *state = column(4 * groups), apart = draw(9);
        gputrace_streams_in_order(number, start, end, end, kind, mine, groups, 0, draw(99), apart, state);
        int32_t width = 1 << draw(4);
        int64_t size = draw(300), low = draw(2) ? draw(200) - 100 : INT64_MIN + draw(5);
        int64_t many = mine * 8 / width;
        uint8_t *marks = calloc((size_t)size + 1, 1);
        int32_t *table = calloc((size_t)size + 1, 4), *entries = calloc((size_t)many + 1, 4);
        gputrace_mark_ids(start, width, many, low, size, marks);
        gputrace_look_up_ids(start, width, many, low, size, table, -1, entries);
        int64_t *rows = column(many);
        for (int64_t i = 0; i < many; i++) rows[i] = i;
        gputrace_index_ids(start, width, many, low, size, table, 0, rows);
        gputrace_sort_numbers(start, joined, mine);
        for (int64_t i = 1; i < mine; i++)
            if (start[i] < start[i - 1]) return 1;
        free(start), free(end), free(to), free(from), free(other_start), free(other_end);
        free(found), free(covered), free(joined), free(ends), free(marks), free(table), free(entries);
        free(group), free(rows), free(number), free(edges), free(falls), free(kind), free(state);
    }
    printf("%ld %ld\n", sorted, unsorted);
    return 0;
}
