/* A fuzz target for libFuzzer: records of CUPTI and texts of NVTX, as bytes like, through the decoder
 * into a spool in the folder GPUTRACE_DIR.
 *
 * An input is a list of pieces: a byte that says what follows, then that. Each record has memory of its
 * own, of just the bytes that the decoder may read, so that AddressSanitizer sees one too many.
 */
#include "../../gputrace/collectors/native/capture.h"
#include "../../gputrace/collectors/native/decode.h"
#include "../../gputrace/collectors/native/names.h"
#include "../../gputrace/collectors/native/nvtx.h"
#include "../../gputrace/collectors/native/call_sampling.h"
#include "../../gputrace/collectors/native/spool.h"

#include <stdlib.h>
#include <wchar.h>

typedef void (*function_t)(void);
typedef struct { size_t size; int (*module_table)(int, function_t ***, unsigned *); } callbacks_t;
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

/* What the decoder and NVTX need of the collector around them. */
struct cupti cupti;
int capture_is_on(void) { return 1; }
int sampling_accepts(uint64_t start, uint64_t end) { return start <= end; }

static const struct { uint32_t kind; size_t size; } records[] = {
    {KIND_KERNEL, 160}, {KIND_CONCURRENT_KERNEL, 160}, {KIND_MEMCPY, 48}, {KIND_MEMCPY2, 64},
    {KIND_MEMSET, 52}, {KIND_DRIVER, 40}, {KIND_RUNTIME, 40}, {KIND_SYNCHRONIZATION, 40},
    {KIND_GRAPH_TRACE, 40}, {KIND_OVERHEAD, 40}, {0xffffffff, 4},
};
enum { RECORDS = sizeof records / sizeof *records, FUNCTIONS = 16, SEGMENT = 2000 };

static function_t core[FUNCTIONS], core2[FUNCTIONS];
static function_t *core_table[FUNCTIONS], *core2_table[FUNCTIONS];

static int module_table(int module, function_t ***table, unsigned *count) {
    *table = module == 1 ? core_table : core2_table;
    *count = FUNCTIONS;
    return module == 1 || module == 5;
}

static const void *export_table(uint32_t id) {
    static const callbacks_t callbacks = {sizeof callbacks, module_table};
    return id == 1 ? &callbacks : NULL;
}

static void begin(void) {
    for (int i = 0; i < FUNCTIONS; i++) {
        core_table[i] = &core[i];
        core2_table[i] = &core2[i];
    }
    const char *folder = getenv("GPUTRACE_DIR");
    if (!folder || spool_open(folder) || !nvtx_install(export_table)) abort();
    for (uint32_t id = 0; id < CALLS; id++)
        call_names[DOMAIN_RUNTIME][id] = call_names[DOMAIN_DRIVER][id] = names_add("cudaCall");
}

static void feed_record(size_t which, const uint8_t *data, size_t size, const char *name) {
    size_t room = records[which].size, most = size < room ? size : room;
    uint8_t *record = calloc(1, room);
    uint64_t pointer = (uint64_t)(uintptr_t)name;
    if (!record) return;
    memcpy(record, data, most);
    memcpy(record, &records[which].kind, 4);
    if (room == 160) memcpy(record + 104, &pointer, 8);
    spool_lock();
    decode(record);
    spool_unlock();
    free(record);
}

static void feed_nvtx(uint8_t what, const char *text) {
    static void *domain;
    wchar_t wide[64] = {0};
    /* What is read of nvtxEventAttributes_t. */
    struct { char before[32]; int32_t type; const void *message; } attributes = {.type = what >> 3 & 3};
    size_t size = strlen(text), most = size / sizeof *wide < 63 ? size / sizeof *wide : 63;
    memcpy(wide, text, most * sizeof *wide);
    attributes.message = domain;
    if (attributes.type == 1) attributes.message = text;
    if (attributes.type == 2) attributes.message = wide;
    switch (what % 8) {
    case 0: ((int (*)(const char *))core[9])(text); break;
    case 1: ((int (*)(const wchar_t *))core[10])(wide); break;
    case 2: ((int (*)(void))core[11])(), ((int (*)(void *))core2[5])(domain); break;
    case 3: ((void (*)(const char *))core[2])(text); break;
    case 4: ((void (*)(uint64_t))core[7])(((uint64_t (*)(const char *))core[5])(text)); break;
    case 5: domain = ((void *(*)(const char *))core2[12])(text); break;
    case 6: ((int (*)(void *, const void *))core2[4])(domain, &attributes); break;
    default: ((void *(*)(void *, const wchar_t *))core2[11])(domain, wide); break;
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    static int inputs;
    if (!inputs++) begin();
    threads_by_self = inputs & 1;
    while (size > 1) {
        size_t own = size - 1 < 160 ? size - 1 : 160;
        uint8_t what = *data++;
        char *text = strndup((const char *)data, own);
        if (!text) break;
        if (what < 128) feed_record(what % RECORDS, data, own, what & 64 ? text : NULL);
        else feed_nvtx(what, text);
        free(text);
        data += own;
        size -= own + 1;
    }
    if (inputs % SEGMENT == 0) spool_begin_segment(1);
    return spool_flush();
}
