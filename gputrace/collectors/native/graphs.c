/* CUPTI 13.0 notes what the copies and memsets of a graph are in a map without a lock, whenever the driver
 * copies nodes. Where two threads had it do so at once, the program crashed, in cuGraphInstantiate or later
 * (on two H200: 8 threads that kept their graphs, 2 runs of 6; JAX, 5 of 93). With one instantiation
 * at a time the first never did (9 runs). Other calls copy nodes too: so all that make or change a graph
 * wait for each other, but not those that launch one: at graph level these do not look at that map.
 *
 * That needs CUPTI's only place for a subscriber, which others may want. So it is done only where XLA is,
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
#define SHORT_LOOKS 100u
#define LOOK_US 50u
/* No program is to hang for our sake: a call may wait for the GPU, and that for another thread. */
#define MOST_LOOKS 10000u

/* By the ids of calls. */
static uint8_t makes_graphs[CALLS];
/* The thread within such a call, by pthread_self, which is never 0. */
static atomic_uintptr_t maker;
static atomic_int made;

static int is_of_graphs(uint32_t id) {
    static const char start[] = "cuGraph";
    const char *name = NULL;
    if (cupti.callback_name(DOMAIN_DRIVER, id, &name) || !name) return 0;
    if (strncmp(name, start, strlen(start))) return 0;
    return !strstr(name, "Launch") && !strstr(name, "Upload") && !strstr(name, "Graphics");
}

void graphs_watch(void *subscriber) {
    for (uint32_t id = 1; id < CALLS; id++) {
        makes_graphs[id] = (uint8_t)is_of_graphs(id);
        if (makes_graphs[id]) cupti.enable_callback(1, subscriber, DOMAIN_DRIVER, id);
    }
}

void graphs_call(uint32_t id, int ends) {
    uintptr_t self = (uintptr_t)pthread_self(), nobody = 0;
    if (id >= CALLS || !makes_graphs[id]) return;
    if (ends) {
        made = 1;
        atomic_compare_exchange_strong(&maker, &self, 0);
        return;
    }
    for (unsigned i = 0; i < MOST_LOOKS && maker != self; i++) {
        if (atomic_compare_exchange_strong(&maker, &nobody, self)) return;
        nobody = 0;
        if (i < SHORT_LOOKS) sched_yield();
        else usleep(LOOK_US);
    }
}

void graphs_forget(void) { maker = 0; }
int graphs_were_made(void) { return made; }
