#include "subscriber.h"
#include "calls.h"
#include "cupti.h"
#include "graph_nodes.h"
#include "graphs.h"

/* All of this is guarded by the lock of capture.c, but for on_call, which reads what was set before CUPTI knew of it. */
static void *subscriber;
static int by_profiler, serial, notes_nodes;
static uint32_t profiler_start_id, profiler_stop_id, own_id;
static const struct subscriber_handlers *tell;

void subscriber_init(int heeds_profiler, const struct subscriber_handlers *handlers) {
    by_profiler = heeds_profiler;
    tell = handlers;
}

void subscriber_find_calls(int serial_graphs, int nodes) {
    profiler_start_id = calls_find_id("cuProfilerStart");
    profiler_stop_id = calls_find_id("cuProfilerStop");
    own_id = calls_find_id("cuDriverGetVersion");
    serial = serial_graphs;
    notes_nodes = nodes;
}

/* CUPTI calls it in the thread of the program that makes the call. */
static void on_call(void *user, int domain, uint32_t id, const void *data) {
    (void)user;
    if (domain == DOMAIN_RESOURCE) {
        graph_nodes_note(id, data);
        return;
    }
    int ends = u32_at(data, 0) == SITE_EXIT;
    if (domain == DOMAIN_DRIVER) graphs_serialize_call(id, ends);
    if (!ends) return;
    if (by_profiler && domain == DOMAIN_DRIVER && id == profiler_start_id) tell->profiler(1);
    if (by_profiler && domain == DOMAIN_DRIVER && id == profiler_stop_id) tell->profiler(0);
    tell->call_ends();
}

static void watch_needed_calls(void) {
    if (by_profiler) {
        cupti.enable_callback(1, subscriber, DOMAIN_DRIVER, profiler_start_id);
        cupti.enable_callback(1, subscriber, DOMAIN_DRIVER, profiler_stop_id);
    }
    if (serial) graphs_watch(subscriber);
    if (notes_nodes) graph_nodes_watch(subscriber);
}

int subscriber_take(void) {
    if (subscriber) return 0;
    if (cupti.subscribe(&subscriber, on_call, NULL)) subscriber = NULL;
    if (!subscriber) return -1;
    watch_needed_calls();
    return 0;
}

void subscriber_take_if_needed(int records) {
    if (by_profiler || notes_nodes || (serial && records)) subscriber_take();
}

void subscriber_release(int to_profiler) {
    if (!subscriber || by_profiler || ((serial || notes_nodes) && !to_profiler)) return;
    cupti.unsubscribe(subscriber);
    subscriber_forget();
}

int subscriber_watch_own_call(void) {
    if (!own_id || subscriber_take()) return -1;
    return cupti.enable_callback(1, subscriber, DOMAIN_DRIVER, own_id);
}

int subscriber_watch_all_calls(int on) {
    if (!cupti.enable_domain || subscriber_take()) return -1;
    cupti.enable_domain((uint32_t)on, subscriber, DOMAIN_RUNTIME);
    cupti.enable_domain((uint32_t)on, subscriber, DOMAIN_DRIVER);
    if (!on) watch_needed_calls(); /* the domain has taken these with it */
    return 0;
}

void subscriber_forget(void) {
    subscriber = NULL;
    graphs_unlock();
}
