// Replays a dependency graph of host calls and GPU operations, one item after another. walk() in
// graph.py does the same, and graph.py says what is computed.

#include <stdint.h>
#include <stdlib.h>

#define EXPORTED __attribute__((visibility("default")))

// Columns of the graph by item, in the order of REPLAYED in graph.py.
struct graph {
    const int64_t *order, *thread, *gap, *hand, *hand_lag, *own, *slot;
    const int64_t *stream, *latency, *spacing, *residual, *ns, *group;
};

// What items wait for: the causes of item i, and their lags, are from first[i] to below first[i + 1].
struct edges {
    const int64_t *first, *cause, *lag;
};

static const int64_t LONG_AGO = -((int64_t)1 << 60);

// Returns when the causes of an item have ended, each with its lag; not before `when`.
static int64_t after_causes(const struct edges *edges, int64_t item, const int64_t *ended, int64_t when) {
    for (int64_t i = edges->first[item]; i < edges->first[item + 1]; i++) {
        int64_t due = ended[edges->cause[i]] + edges->lag[i];
        if (due > when) when = due;
    }
    return when;
}

// Writes when each item ends into `ended`, which holds zeros. Returns 0, or -1 without memory.
EXPORTED int gputrace_replay(const struct graph *g, const struct edges *waits,
                             const struct edges *after, int64_t items, int64_t threads,
                             int64_t streams, int64_t groups, int64_t *ended) {
    size_t size = (size_t)(threads + streams + 4 * groups + 3 * items);
    int64_t *memory = calloc(size + 1, sizeof *memory);
    if (!memory) return -1;
    int64_t *thread_free = memory, *stream_free = thread_free + threads;
    int64_t *missing = stream_free + streams, *arrived = missing + groups;
    int64_t *first = arrived + groups, *last = first + groups;
    int64_t *began = last + groups, *returned = began + items, *next = returned + items;
    for (int64_t i = 0; i < streams; i++) stream_free[i] = LONG_AGO;
    for (int64_t i = 0; i < groups; i++) arrived[i] = LONG_AGO, first[i] = last[i] = -1;
    for (int64_t i = 0; i < items; i++)
        if (g->group[i] >= 0) missing[g->group[i]]++;
    for (int64_t position = 0; position < items; position++) {
        int64_t i = g->order[position], thread = g->thread[i], stream = g->stream[i];
        int64_t begin = 0, end = 0;
        if (thread >= 0) {
            begin = thread_free[thread] + g->gap[i];
            if (g->hand[i] >= 0) {
                int64_t handed_over = returned[g->hand[i]] + g->hand_lag[i];
                if (handed_over > begin) begin = handed_over;
            }
            end = begin + g->own[i];
        }
        if (stream >= 0) {
            int64_t start = begin + g->latency[i], ready = stream_free[stream] + g->spacing[i];
            start = after_causes(after, i, ended, ready > start ? ready : start) + g->residual[i];
            began[i] = start;
            int64_t group = g->group[i];
            if (group < 0) {
                ended[i] = stream_free[stream] = start + g->ns[i];
            } else {
                next[i] = -1;
                if (last[group] < 0) first[group] = i;
                else next[last[group]] = i;
                last[group] = i;
                if (start > arrived[group]) arrived[group] = start;
                if (!--missing[group])  // The last to arrive lets all of them begin.
                    for (int64_t j = first[group]; j >= 0; j = next[j])
                        ended[j] = stream_free[g->stream[j]] = arrived[group] + g->ns[j];
            }
        }
        if (thread >= 0) {
            end = after_causes(waits, i, ended, end);
            if (g->slot[i] >= 0 && began[g->slot[i]] > end) end = began[g->slot[i]];
            returned[i] = thread_free[thread] = end;
            if (stream < 0) ended[i] = end;
        }
    }
    free(memory);
    return 0;
}
