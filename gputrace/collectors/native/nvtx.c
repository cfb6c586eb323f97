#define _GNU_SOURCE
#include "nvtx.h"
#include "capture.h"
#include "names.h"
#include "spool.h"
#include "system.h"

#include <pthread.h>
#include <stdint.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
#include <wchar.h>

enum { MODULE_CORE = 1, MODULE_CORE2 = 5, EXPORT_CALLBACKS = 1 };
enum { MESSAGE_TEXT = 1, MESSAGE_WIDE = 2, MESSAGE_REGISTERED = 3 };
#define MAX_DEPTH 64
#define MAX_OPEN_RANGES 4096

typedef void (*function_t)(void);
typedef struct {
    size_t size;
    int (*module_table)(int module, function_t ***table, unsigned *count);
} callbacks_t;

/* nvtxPayloadData_t of NVTX's payload extension (nvToolsExtPayload.h). */
typedef struct { uint64_t schema; size_t size; const void *data; } payload_t;

/* What is read of nvtxEventAttributes_t: the type of the payload at 16, the message at 40. A payload of type PAYLOADS
 * is `payloads` pieces of binary data. */
#define PAYLOADS ((int32_t)0xDFBD0009)
typedef struct {
    unsigned char before[16];
    int32_t payload_type;
    int32_t payloads;
    const payload_t *payload;
    int32_t message_type;
    const void *message;
} attributes_t;

/* What a payload says of a message, or of a communicator that is being made. */
enum { COMMUNICATOR, BYTES, PEER, RANKS, RANK, FIELDS };
typedef struct { uint64_t value[FIELDS]; uint32_t has; /* bits, by field */ } content_t;
#define NO_CONTENT ((content_t){.has = 0})

typedef struct { uint64_t start; uint32_t name, domain; content_t content; } range_t;

static __thread range_t stack[MAX_DEPTH];
static __thread int depth;
static __thread uint32_t this_thread;

/* Ranges that may end on another thread, by their id. The lock guards them and the adding of schemas; threads of the
 * program take it with no other. */
static struct { uint64_t id; range_t range; uint32_t thread; } started[MAX_OPEN_RANGES];
static uint64_t last_id;
static pthread_mutex_t started_lock = PTHREAD_MUTEX_INITIALIZER;

static uint32_t thread_id(void) {
    if (!this_thread) this_thread = (uint32_t)syscall(SYS_gettid);
    return this_thread;
}

/* Registered strings are handed back as pointers to the id of a name, and domains too, with the last file that has
 * their creation, counted from 1. Guarded by the lock of the spool. */
typedef struct { uint32_t id, file; } handle_t;
static handle_t handles[1 << 16];

static void *register_name(const char *text) {
    spool_lock();
    uint32_t id = names_add(text);
    if (id < sizeof handles / sizeof *handles && !handles[id].id) handles[id].id = id;
    spool_unlock();
    if (!id || id >= sizeof handles / sizeof *handles) return NULL;
    return &handles[id];
}

static uint32_t handle_id(const void *handle) { return handle ? ((const handle_t *)handle)->id : 0; }

static uint32_t add_name(const char *text) {
    spool_lock();
    uint32_t id = names_add(text);
    spool_unlock();
    return id;
}

/* A text of wide characters as UTF-8, as far as it fits. */
static const char *to_utf8(const wchar_t *wide, char *text, size_t room) {
    static const unsigned char first[] = {0, 0xc0, 0xe0, 0xf0};
    char *at = text;
    if (!wide) return NULL;
    for (; *wide && at + 5 < text + room; wide++) {
        uint32_t c = (uint32_t)*wide;
        int more = c < 0x80 ? 0 : c < 0x800 ? 1 : c < 0x10000 ? 2 : 3;
        *at++ = (char)(first[more] | c >> 6 * more);
        while (more--) *at++ = (char)(0x80 | (c >> 6 * more & 0x3f));
    }
    *at = 0;
    return text;
}

static uint32_t add_message_name(const attributes_t *a) {
    char text[512];
    if (!a) return 0;
    if (a->message_type == MESSAGE_REGISTERED) return handle_id(a->message);
    if (a->message_type == MESSAGE_TEXT) return add_name(a->message);
    if (a->message_type == MESSAGE_WIDE) return add_name(to_utf8(a->message, text, sizeof text));
    return 0;
}

/* Writes the creation of a domain into each file before its ranges there, which need its name. */
static void ensure_domain_written(uint32_t domain, uint32_t thread) {
    uint64_t now = clock_ns(CLOCK_REALTIME);
    nvtx_t row = {now, now, thread, 0, domain, NVTX_DOMAIN, 0, 0};
    if (!domain || handles[domain].file == spool_segment_number() + 1) return;
    handles[domain].file = spool_segment_number() + 1;
    names_ensure_written(domain);
    names_note_thread(thread);
    spool_add_record(TAG_NVTX, &row, sizeof row);
}

/* ---- payloads: binary data, and schemas that say what is where in them ---- */

/* nvtxPayloadSchemaEntry_t and nvtxPayloadSchemaAttr_t. */
typedef struct {
    uint64_t flags, type;
    const char *name, *description;
    uint64_t detail, offset;
    const void *semantics, *reserved;
} entry_t;
typedef struct {
    uint64_t mask;
    const char *name;
    uint64_t type, flags;
    const entry_t *entries;
    size_t count, static_size, alignment;
    uint64_t id;
    void *extension;
} schema_attributes_t;
enum { HAS_ENTRIES = 1 << 4, HAS_COUNT = 1 << 5, HAS_ID = 1 << 8 };
#define FIRST_DYNAMIC_ID ((uint64_t)1 << 32)
#define SCHEMAS 128

/* Labels of NCCL and RCCL; the peer of a broadcast or a reduction is the root. */
static const struct { const char *label; int field; } labels[] = {
    {"NCCL communicator ID", COMMUNICATOR}, {"RCCL communicator ID", COMMUNICATOR},
    {"Message size [bytes]", BYTES}, {"Peer rank", PEER}, {"Root", PEER},
    {"No. of ranks", RANKS}, {"Rank", RANK}};

typedef struct { uint32_t domain; uint64_t id; uint16_t offset[FIELDS]; uint8_t size[FIELDS]; } schema_t;
static schema_t schemas[SCHEMAS];
static unsigned schema_count; /* They are only ever added, under the lock of started ranges. */

/* Bytes of an entry of a type; enumerations, which have ids of their own, are ints. */
static unsigned type_size(uint64_t type) {
    static const uint8_t sizes[] = {0, 1, 1, 2, 2, 4, 4, 8, 8, 8, 8, 1, 1, 2, 2, 4, 4, 8, 8, 4, 8, 16, 8, 8};
    return type > 0 && type < sizeof sizes ? sizes[type] : 4;
}

static uint64_t register_schema(void *domain, const schema_attributes_t *attributes) {
    schema_t schema = {.domain = handle_id(domain)};
    uint64_t at = 0;
    if (!attributes || !(attributes->mask & HAS_ENTRIES) || !(attributes->mask & HAS_COUNT)) return 0;
    for (size_t i = 0; i < attributes->count; i++) {
        const entry_t *entry = &attributes->entries[i];
        unsigned size = type_size(entry->type);
        at = entry->offset ? entry->offset : (at + size - 1) / size * size;
        for (size_t l = 0; l < sizeof labels / sizeof *labels; l++) {
            if (!entry->name || strcmp(entry->name, labels[l].label) || entry->flags || at > 4096) continue;
            schema.offset[labels[l].field] = (uint16_t)at;
            schema.size[labels[l].field] = size == 4 || size == 8 ? (uint8_t)size : 0;
        }
        at += size;
    }
    pthread_mutex_lock(&started_lock);
    unsigned count = schema_count;
    schema.id = attributes->mask & HAS_ID && attributes->id ? attributes->id : FIRST_DYNAMIC_ID + count;
    if (count < SCHEMAS) {
        schemas[count] = schema;
        __atomic_store_n(&schema_count, count + 1, __ATOMIC_RELEASE);
    }
    pthread_mutex_unlock(&started_lock);
    return schema.id;
}

static uint8_t domain_is_enabled(void *domain) { (void)domain; return 1; }

static void read_payloads(uint32_t domain, const payload_t *payloads, size_t count, content_t *content) {
    unsigned known = __atomic_load_n(&schema_count, __ATOMIC_ACQUIRE);
    for (size_t i = 0; payloads && i < count && i < 16; i++) {
        const schema_t *schema = NULL;
        for (unsigned s = 0; s < known && !schema; s++)
            if (schemas[s].id == payloads[i].schema && schemas[s].domain == domain) schema = &schemas[s];
        for (int field = 0; schema && payloads[i].data && field < FIELDS; field++) {
            unsigned size = schema->size[field], offset = schema->offset[field];
            if (!size || payloads[i].size == SIZE_MAX || offset + size > payloads[i].size) continue;
            content->value[field] = 0;
            memcpy(&content->value[field], (const char *)payloads[i].data + offset, size);
            content->has |= 1u << field;
        }
    }
}

static content_t read_content(uint32_t domain, const attributes_t *a) {
    content_t content = NO_CONTENT;
    if (a && a->payload_type == PAYLOADS && a->payloads > 0)
        read_payloads(domain, a->payload, (size_t)a->payloads, &content);
    return content;
}

/* Adds the message that a range of NCCL's is about, or the communicator that it makes. */
static void add_message(const range_t *range, uint64_t end, uint32_t thread) {
    const content_t *content = &range->content;
    message_t row = {range->start, end, 0, UINT64_MAX, thread, range->name, -1, 0};
    if (content->has & 1u << COMMUNICATOR) row.communicator = content->value[COMMUNICATOR];
    if (content->has & 1u << BYTES) row.bytes = content->value[BYTES];
    if (content->has & 1u << PEER) row.peer = (int32_t)content->value[PEER];
    if (content->has & 1u << RANK) row.peer = (int32_t)content->value[RANK];
    if (content->has & 1u << RANKS) row.ranks = (int32_t)content->value[RANKS];
    spool_add_record(TAG_MESSAGE, &row, sizeof row);
}

static void add_range(range_t range, uint64_t end, uint32_t thread, uint32_t kind, uint64_t id) {
    nvtx_t row = {range.start, end, thread, range.name, range.domain, kind, 0, (uint32_t)id};
    /* Communicators are mostly made before anything is recorded. */
    int makes_communicator = (range.content.has & 1u << RANKS) != 0, on = capture_is_on();
    if (kind == NVTX_START_END) row.end_thread = thread_id();
    if (!on && !makes_communicator) return;
    spool_lock();
    if (on) ensure_domain_written(range.domain, thread);
    names_note_thread(thread);
    names_ensure_written(range.name);
    if (on) spool_add_record(TAG_NVTX, &row, sizeof row);
    if (range.content.has) add_message(&range, end, thread);
    spool_unlock();
}

static int push_range(uint32_t domain, uint32_t name, content_t content) {
    if (depth < MAX_DEPTH) stack[depth] = (range_t){clock_ns(CLOCK_REALTIME), name, domain, content};
    return depth++;
}

/* Each domain has a stack of its own in NVTX. Here they share one, and a pop takes the topmost range of its domain. */
static int pop_range(uint32_t domain, const payload_t *payloads, size_t count) {
    if (depth <= 0) return -1;
    if (depth > MAX_DEPTH) return --depth;
    int at = depth - 1;
    while (at > 0 && stack[at].domain != domain) at--;
    if (stack[at].domain != domain) return -1;
    read_payloads(domain, payloads, count, &stack[at].content);
    add_range(stack[at], clock_ns(CLOCK_REALTIME), thread_id(), NVTX_PUSH_POP, 0);
    memmove(&stack[at], &stack[at + 1], (size_t)(depth - at - 1) * sizeof *stack);
    return --depth;
}

void nvtx_reset_in_child(void) { pthread_mutex_init(&started_lock, NULL); }

static uint64_t start_range(uint32_t domain, uint32_t name, content_t content) {
    pthread_mutex_lock(&started_lock);
    uint64_t id = ++last_id;
    started[id % MAX_OPEN_RANGES].id = id;
    started[id % MAX_OPEN_RANGES].thread = thread_id();
    started[id % MAX_OPEN_RANGES].range = (range_t){clock_ns(CLOCK_REALTIME), name, domain, content};
    pthread_mutex_unlock(&started_lock);
    return id;
}

static void end_range(uint64_t id) {
    pthread_mutex_lock(&started_lock);
    int known = started[id % MAX_OPEN_RANGES].id == id && id;
    range_t range = started[id % MAX_OPEN_RANGES].range;
    uint32_t thread = started[id % MAX_OPEN_RANGES].thread;
    started[id % MAX_OPEN_RANGES].id = 0;
    pthread_mutex_unlock(&started_lock);
    if (known) add_range(range, clock_ns(CLOCK_REALTIME), thread, NVTX_START_END, id);
}

static void add_mark(uint32_t domain, uint32_t name) {
    uint64_t now = clock_ns(CLOCK_REALTIME);
    add_range((range_t){now, name, domain, NO_CONTENT}, now, thread_id(), NVTX_MARK, 0);
}

static void mark_ex(const attributes_t *a) { add_mark(0, add_message_name(a)); }
static void mark_a(const char *text) { add_mark(0, add_name(text)); }
static uint64_t start_ex(const attributes_t *a) { return start_range(0, add_message_name(a), read_content(0, a)); }
static uint64_t start_a(const char *text) { return start_range(0, add_name(text), NO_CONTENT); }
static int push_ex(const attributes_t *a) { return push_range(0, add_message_name(a), read_content(0, a)); }
static int push_a(const char *text) { return push_range(0, add_name(text), NO_CONTENT); }
static void mark_w(const wchar_t *text) { char t[512]; mark_a(to_utf8(text, t, sizeof t)); }
static uint64_t start_w(const wchar_t *text) {
    char t[512];
    return start_a(to_utf8(text, t, sizeof t));
}
static int push_w(const wchar_t *text) { char t[512]; return push_a(to_utf8(text, t, sizeof t)); }
static void domain_mark(void *d, const attributes_t *a) { add_mark(handle_id(d), add_message_name(a)); }
static uint64_t domain_start(void *d, const attributes_t *a) {
    return start_range(handle_id(d), add_message_name(a), read_content(handle_id(d), a));
}
static void domain_end(void *d, uint64_t id) { (void)d; end_range(id); }
static int domain_push(void *d, const attributes_t *a) {
    return push_range(handle_id(d), add_message_name(a), read_content(handle_id(d), a));
}
static int pop_core(void) { return pop_range(0, NULL, 0); }
static int domain_pop(void *d) { return pop_range(handle_id(d), NULL, 0); }
/* Where the message of a range is in its payload, it has no name here; the range is there for its pop. */
static int push_payload(void *d, const payload_t *payloads, size_t count) {
    content_t content = NO_CONTENT;
    read_payloads(handle_id(d), payloads, count, &content);
    return push_range(handle_id(d), 0, content);
}
static int pop_payload(void *d, const payload_t *payloads, size_t count) {
    return pop_range(handle_id(d), payloads, count);
}
static void *domain_string(void *d, const char *text) { (void)d; return register_name(text); }
static void *domain_string_w(void *d, const wchar_t *text) {
    char t[512];
    return domain_string(d, to_utf8(text, t, sizeof t));
}
/* Domains are written outside of windows too. */
static void *domain_create(const char *name) {
    handle_t *handle = register_name(name);
    spool_lock();
    if (handle) ensure_domain_written(handle->id, thread_id());
    spool_unlock();
    return handle;
}
static void *domain_create_w(const wchar_t *name) {
    char t[512];
    return domain_create(to_utf8(name, t, sizeof t));
}
static void domain_destroy(void *d) { (void)d; }

/* Puts functions, by their ids, into the table of a client's module. */
static void fill_table(const callbacks_t *callbacks, int module, const function_t *functions, unsigned known) {
    function_t **table;
    unsigned count;
    if (!callbacks->module_table(module, &table, &count)) return;
    for (unsigned id = 0; id < known && id < count; id++)
        if (functions[id] && table[id]) *table[id] = functions[id];
}

int nvtx_install(nvtx_export_t export_table) {
    const callbacks_t *callbacks = export_table(EXPORT_CALLBACKS);
    static const function_t core[] = {
        NULL, (function_t)mark_ex, (function_t)mark_a, (function_t)mark_w, (function_t)start_ex,
        (function_t)start_a, (function_t)start_w, (function_t)end_range, (function_t)push_ex,
        (function_t)push_a, (function_t)push_w, (function_t)pop_core};
    static const function_t core2[] = {
        NULL, (function_t)domain_mark, (function_t)domain_start, (function_t)domain_end,
        (function_t)domain_push, (function_t)domain_pop, NULL, NULL, NULL, NULL,
        (function_t)domain_string, (function_t)domain_string_w, (function_t)domain_create,
        (function_t)domain_create_w, (function_t)domain_destroy};
    if (!callbacks) return 0;
    fill_table(callbacks, MODULE_CORE, core, sizeof core / sizeof *core);
    fill_table(callbacks, MODULE_CORE2, core2, sizeof core2 / sizeof *core2);
    return 1;
}

/* What the header of an extension hands over (nvtxExtTypes.h). */
typedef struct { size_t id, count; intptr_t *slots; } segment_t;
struct nvtx_module {
    uint16_t version, size, module, compatibility;
    size_t segment_count;
    segment_t *segments;
    void *get_export;
    const void *information;
};
enum { MODULE_PAYLOAD = 2 };

int nvtx_install_payloads(nvtx_module_t *module) {
    static const struct { unsigned id; function_t function; } functions[] = {
        {0, (function_t)register_schema}, {3, (function_t)push_payload}, {4, (function_t)pop_payload},
        {7, (function_t)domain_is_enabled}};
    if (!module || module->module != MODULE_PAYLOAD || !module->segment_count) return 0;
    for (size_t i = 0; i < sizeof functions / sizeof *functions; i++)
        if (functions[i].id < module->segments->count)
            module->segments->slots[functions[i].id] = (intptr_t)functions[i].function;
    return 1;
}
