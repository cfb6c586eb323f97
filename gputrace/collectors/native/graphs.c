/* Whenever the driver copies nodes of a graph, CUPTI 13.0 writes down its copies and memsets in a map without a
 * lock. Where two threads did so at once, the program crashed, in cuGraphInstantiate or later (on two H200: 8
 * threads that kept their graphs, 2 runs of 6; JAX, 5 of 93). With one instantiation at a time the first never did
 * (9 runs). Other calls copy nodes too: so all calls that make or change a graph wait for each other. Calls that
 * launch one do not: at graph level they do not look at that map.
 *
 * That needs CUPTI's only place for a subscriber, which others may want. So it is done only in programs with XLA,
 * which has a thread for each GPU: see hazards.h. */
#define _GNU_SOURCE
#include "graphs.h"
#include "cupti.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <string.h>
#include <unistd.h>

/* Most calls are over in a microsecond. */
#define YIELDS 100u
#define SLEEP_US 50u
/* No program is to hang because of us: a call may wait for the GPU, which may wait for another thread. */
#define MAX_TRIES 10000u

/* By the ids of calls. */
static uint8_t makes_graphs[CALLS];
/* The thread within such a call, by pthread_self, which is never 0: a lock that a thread may give up waiting for. */
static atomic_uintptr_t owner;
static atomic_int were_made;

static int is_graph_call(uint32_t id) {
    static const char start[] = "cuGraph";
    const char *name = NULL;
    if (cupti.callback_name(DOMAIN_DRIVER, id, &name) || !name) return 0;
    if (strncmp(name, start, strlen(start))) return 0;
    return !strstr(name, "Launch") && !strstr(name, "Upload") && !strstr(name, "Graphics");
}

void graphs_watch(void *subscriber) {
    for (uint32_t id = 1; id < CALLS; id++) {
        makes_graphs[id] = (uint8_t)is_graph_call(id);
        if (makes_graphs[id]) cupti.enable_callback(1, subscriber, DOMAIN_DRIVER, id);
    }
}

void graphs_serialize_call(uint32_t id, int ends) {
    uintptr_t self = (uintptr_t)pthread_self(), nobody = 0;
    if (id >= CALLS || !makes_graphs[id]) return;
    if (ends) {
        were_made = 1;
        atomic_compare_exchange_strong(&owner, &self, 0);
        return;
    }
    for (unsigned i = 0; i < MAX_TRIES && owner != self; i++) {
        if (atomic_compare_exchange_strong(&owner, &nobody, self)) return;
        nobody = 0;
        if (i < YIELDS) sched_yield();
        else usleep(SLEEP_US);
    }
}

void graphs_unlock(void) { owner = 0; }
int graphs_were_made(void) { return were_made; }
