/* A thread captures a node within the call that would launch it otherwise. To instantiate a graph copies its nodes,
 * and records of kernels have the number of a copy: so it is noted of which node (CUPTI documentation, 'CUDA
 * Graphs').
 *
 * CUPTI calls with locks of its own held, so nothing is waited for here: what is noted goes into a list without a
 * lock, which the writer takes as a whole. */
#define _GNU_SOURCE
#include "graph_nodes.h"
#include "cupti.h"
#include "names.h"
#include "spool.h"
#include "system.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

/* A program that makes graphs all the time is not to fill the disk. */
#define MAX_NODES (1u << 20)

typedef struct noted {
    struct noted *next;
    node_t node;
} noted_t;

static _Atomic(noted_t *) unwritten;
static atomic_uint count;

void graph_nodes_watch(void *subscriber) {
    if (!cupti.graph_node_id) return;
    cupti.enable_callback(1, subscriber, DOMAIN_RESOURCE, RESOURCE_NODE_CREATED);
    cupti.enable_callback(1, subscriber, DOMAIN_RESOURCE, RESOURCE_NODE_CLONED);
}

void graph_nodes_note(uint32_t id, const void *resource) {
    /* Of CUpti_ResourceData, the descriptor; of CUpti_GraphData, the node and the one that it is a copy of. */
    const void *graph = (const void *)(uintptr_t)u64_at(resource, 16);
    void *node = (void *)(uintptr_t)u64_at(graph, 16), *original = (void *)(uintptr_t)u64_at(graph, 24);
    uint64_t now = clock_ns(CLOCK_REALTIME);
    node_t made = {.start = now, .end = now};
    if (count >= MAX_NODES || cupti.graph_node_id(node, &made.node)) return;
    if (id == RESOURCE_NODE_CLONED && cupti.graph_node_id(original, &made.original)) return;
    noted_t *noted = malloc(sizeof *noted);
    if (!noted) return;
    made.thread = (uint32_t)syscall(SYS_gettid);
    noted->node = made;
    noted->next = unwritten;
    while (!atomic_compare_exchange_weak(&unwritten, &noted->next, noted)) continue;
    count++;
}

void graph_nodes_write(void) {
    spool_lock();
    for (noted_t *noted = atomic_exchange(&unwritten, NULL), *next; noted; noted = next) {
        next = noted->next;
        names_note_thread(noted->node.thread);
        spool_add_record(TAG_NODE, &noted->node, sizeof noted->node);
        free(noted);
    }
    spool_unlock();
}
