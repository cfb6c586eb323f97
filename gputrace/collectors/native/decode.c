#include "decode.h"
#include "cupti.h"
#include "names.h"
#include "call_sampling.h"
#include "spool.h"
#include "threads.h"

#include <stdatomic.h>

int threads_by_self;

/* CUPTI numbers calls from 1 on again after cuptiFinalize: what is added to their ids, and the largest id since
 * then. */
static uint32_t id_offset, largest_id;

void decode_restart_numbering(void) {
    id_offset += largest_id;
    largest_id = 0;
}

static uint32_t correlation_at(const void *r, size_t offset) {
    uint32_t id = u32_at(r, offset);
    if (!id) return 0;
    if (id > largest_id) largest_id = id;
    return id_offset + id;
}

static atomic_int has_seen_graphs;

/* By id, of which a thousand are told apart: graphs that were replayed as a whole, and graphs with known nodes. */
enum { GRAPHS = 1024 };
static uint8_t is_replayed[GRAPHS], has_nodes[GRAPHS];

int decode_has_seen_graphs(void) { return has_seen_graphs; }

int decode_has_graphs_without_nodes(void) {
    int any = 0;
    spool_lock();
    for (size_t i = 0; i < GRAPHS; i++) any |= is_replayed[i] && !has_nodes[i];
    spool_unlock();
    return any;
}

static uint32_t system_thread(uint32_t thread, uint64_t when) {
    return threads_by_self ? threads_system_id(thread, when) : thread;
}

static void decode_kernel(const void *r) {
    kernel_t k = {.start = u64_at(r, 16), .end = u64_at(r, 24), .device = u32_at(r, 40),
                  .context = u32_at(r, 44), .stream = u32_at(r, 48), .correlation = correlation_at(r, 92),
                  .graph = u32_at(r, 156), .registers = u16_at(r, 6),
                  .static_shared = (int32_t)u32_at(r, 76), .dynamic_shared = (int32_t)u32_at(r, 80),
                  .local_per_thread = u32_at(r, 84), .local_total = u32_at(r, 88),
                  .launch_type = u8_at(r, 136), .grid_id = (int64_t)u64_at(r, 96), .node = u64_at(r, 144)};
    const char *name = (const char *)(uintptr_t)u64_at(r, 104);
    for (size_t i = 0; i < 3; i++) {
        k.grid[i] = (int32_t)u32_at(r, 52 + 4 * i);
        k.block[i] = (int32_t)u32_at(r, 64 + 4 * i);
    }
    if (k.graph) has_seen_graphs = has_nodes[k.graph % GRAPHS] = 1;
    k.name = names_add(name);
    spool_add_record(TAG_KERNEL, &k, sizeof k);
}

static void decode_copy(const void *r, int peer) {
    copy_t c = {.start = u64_at(r, 16), .end = u64_at(r, 24), .bytes = u64_at(r, 8),
                .device = u32_at(r, 32), .context = u32_at(r, 36), .stream = u32_at(r, 40),
                .copy_kind = u8_at(r, 4), .source_kind = u8_at(r, 5),
                .destination_kind = u8_at(r, 6), .flags = u8_at(r, 7)};
    c.correlation = correlation_at(r, peer ? 60 : 44);
    c.source_device = peer ? u32_at(r, 44) : UINT32_MAX;
    c.destination_device = peer ? u32_at(r, 52) : UINT32_MAX;
    spool_add_record(TAG_COPY, &c, sizeof c);
}

static void decode_memset(const void *r) {
    memset_t m = {.start = u64_at(r, 16), .end = u64_at(r, 24), .bytes = u64_at(r, 8),
                  .device = u32_at(r, 32), .context = u32_at(r, 36), .stream = u32_at(r, 40),
                  .correlation = correlation_at(r, 44), .value = u32_at(r, 4), .memory_kind = u16_at(r, 50)};
    spool_add_record(TAG_MEMSET, &m, sizeof m);
}

static void decode_api(const void *r, uint32_t domain) {
    uint32_t id = u32_at(r, 4);
    api_t a = {.start = u64_at(r, 8), .end = u64_at(r, 16), .correlation = correlation_at(r, 32),
               .driver = domain == DOMAIN_DRIVER, .result = (int32_t)u32_at(r, 36)};
    a.name = id < CALLS ? call_names[domain][id] : 0;
    if (!a.name || !sampling_accepts(a.start, a.end)) return; /* not one of ours, or left out */
    a.thread = system_thread(u32_at(r, 28), a.start);
    names_note_thread(a.thread);
    names_ensure_written(a.name);
    spool_add_record(TAG_API, &a, sizeof a);
}

static void decode_sync(const void *r) {
    sync_t s = {.start = u64_at(r, 8), .end = u64_at(r, 16), .type = u32_at(r, 4),
                .context = u32_at(r, 28), .stream = u32_at(r, 32), .correlation = correlation_at(r, 24),
                .event = u32_at(r, 36)};
    spool_add_record(TAG_SYNC, &s, sizeof s);
}

static void decode_graph(const void *r) {
    graph_t g = {.start = u64_at(r, 8), .end = u64_at(r, 16), .device = u32_at(r, 24),
                 .context = u32_at(r, 32), .stream = u32_at(r, 36), .correlation = correlation_at(r, 4),
                 .graph = u32_at(r, 28)};
    has_seen_graphs = is_replayed[g.graph % GRAPHS] = 1;
    spool_add_record(TAG_GRAPH, &g, sizeof g);
}

static void decode_overhead(const void *r) {
    /* The object is a process and a thread where its kind says so (CUPTI_ACTIVITY_OBJECT_THREAD). */
    overhead_t o = {.start = u64_at(r, 24), .end = u64_at(r, 32), .kind = u32_at(r, 4)};
    if (u32_at(r, 8) == 2) o.thread = system_thread(u32_at(r, 16), o.start);
    spool_add_record(TAG_OVERHEAD, &o, sizeof o);
}

void decode(const void *record) {
    switch (u32_at(record, 0)) {
    case KIND_KERNEL:
    case KIND_CONCURRENT_KERNEL: decode_kernel(record); break;
    case KIND_MEMCPY: decode_copy(record, 0); break;
    case KIND_MEMCPY2: decode_copy(record, 1); break;
    case KIND_MEMSET: decode_memset(record); break;
    case KIND_DRIVER: decode_api(record, DOMAIN_DRIVER); break;
    case KIND_RUNTIME: decode_api(record, DOMAIN_RUNTIME); break;
    case KIND_SYNCHRONIZATION: decode_sync(record); break;
    case KIND_GRAPH_TRACE: decode_graph(record); break;
    case KIND_OVERHEAD: decode_overhead(record); break;
    default: break;
    }
}
