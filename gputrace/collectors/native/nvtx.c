/* NVTX ranges of the user and of NCCL: the functions that an NVTX client calls once this library is
 * named by NVTX_INJECTION64_PATH. Cheap: a clock read and a thread-local stack. */
#define _GNU_SOURCE
#include "capture.h"
#include "spool.h"

#include <pthread.h>
#include <stdint.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
#include <wchar.h>

int collector_start(void);

enum { MODULE_CORE = 1, MODULE_CORE2 = 5, EXPORT_CALLBACKS = 1 };
enum { MESSAGE_TEXT = 1, MESSAGE_WIDE = 2, MESSAGE_REGISTERED = 3 };
#define DEEPEST 64
#define OPEN_RANGES 4096

typedef void (*function_t)(void);
typedef struct {
    size_t size;
    int (*module_table)(int module, function_t ***table, unsigned *count);
} callbacks_t;

/* What is read of nvtxEventAttributes_t: the type of the message at 32, the message at 40. */
typedef struct {
    unsigned char before[32];
    int32_t message_type;
    const void *message;
} attributes_t;

typedef struct { uint64_t start; uint32_t name, domain; } open_t;

static __thread open_t stack[DEEPEST];
static __thread int depth;
static __thread uint32_t own_thread;

/* Ranges that may end on another thread, by their number. */
static struct { uint64_t id; open_t range; uint32_t thread; } started[OPEN_RANGES];
static uint64_t last_id;
static pthread_mutex_t started_lock = PTHREAD_MUTEX_INITIALIZER;

static uint32_t thread_id(void) {
    if (!own_thread) own_thread = (uint32_t)syscall(SYS_gettid);
    return own_thread;
}

/* Registered strings are handed back as pointers to a name id; so are domains. */
typedef struct { uint32_t id, told; } handle_t;
static handle_t handles[1 << 16];

static void *handle_of(const char *text) {
    spool_lock();
    uint32_t id = spool_name(text);
    if (id < sizeof handles / sizeof *handles && !handles[id].id) handles[id].id = id;
    spool_unlock();
    if (!id || id >= sizeof handles / sizeof *handles) return NULL;
    return &handles[id];
}

static uint32_t id_of(const void *handle) { return handle ? ((const handle_t *)handle)->id : 0; }

static uint32_t name_of_text(const char *text) {
    spool_lock();
    uint32_t id = spool_name(text);
    spool_unlock();
    return id;
}

/* UTF-8 of a text of wide characters, as far as it fits. */
static const char *narrow(const wchar_t *wide, char *text, size_t room) {
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

static uint32_t name_of(const attributes_t *a) {
    char text[512];
    if (!a) return 0;
    if (a->message_type == MESSAGE_REGISTERED) return id_of(a->message);
    if (a->message_type == MESSAGE_TEXT) return name_of_text(a->message);
    if (a->message_type == MESSAGE_WIDE) return name_of_text(narrow(a->message, text, sizeof text));
    return 0;
}

/* The creation of a domain: ranges within need its name, so each file tells of it before them. */
static void tell_domain(uint32_t domain, uint32_t thread) {
    uint64_t now = clock_ns(CLOCK_REALTIME);
    nvtx_t row = {now, now, thread, 0, domain, NVTX_DOMAIN, 0, 0};
    if (!domain || handles[domain].told == spool_segment() + 1) return;
    handles[domain].told = spool_segment() + 1;
    spool_use(domain);
    spool_thread(thread);
    spool_add(TAG_NVTX, &row, sizeof row);
}

static void add(open_t range, uint64_t end, uint32_t thread, uint32_t kind, uint64_t number) {
    nvtx_t row = {range.start, end, thread, range.name, range.domain, kind, 0, (uint32_t)number};
    if (kind == NVTX_START_END) row.end_thread = thread_id();
    if (!capture_is_on()) return;
    spool_lock();
    tell_domain(range.domain, thread);
    spool_thread(thread);
    spool_use(range.name);
    spool_add(TAG_NVTX, &row, sizeof row);
    spool_unlock();
}

static int push(uint32_t domain, uint32_t name) {
    if (depth < DEEPEST) stack[depth] = (open_t){clock_ns(CLOCK_REALTIME), name, domain};
    return depth++;
}

/* Each domain has a stack of its own; here they share one, and a pop takes its domain's topmost. */
static int pop(uint32_t domain) {
    if (depth <= 0) return -1;
    if (depth > DEEPEST) return --depth;
    int at = depth - 1;
    while (at > 0 && stack[at].domain != domain) at--;
    if (stack[at].domain != domain) return -1;
    add(stack[at], clock_ns(CLOCK_REALTIME), thread_id(), NVTX_PUSH_POP, 0);
    memmove(&stack[at], &stack[at + 1], (size_t)(depth - at - 1) * sizeof *stack);
    return --depth;
}

/* In a forked child, whose parent's threads may have held the lock. */
void nvtx_in_child(void) { pthread_mutex_init(&started_lock, NULL); }

static uint64_t start(uint32_t domain, uint32_t name) {
    pthread_mutex_lock(&started_lock);
    uint64_t id = ++last_id;
    started[id % OPEN_RANGES].id = id;
    started[id % OPEN_RANGES].thread = thread_id();
    started[id % OPEN_RANGES].range = (open_t){clock_ns(CLOCK_REALTIME), name, domain};
    pthread_mutex_unlock(&started_lock);
    return id;
}

static void end(uint64_t id) {
    pthread_mutex_lock(&started_lock);
    int known = started[id % OPEN_RANGES].id == id && id;
    open_t range = started[id % OPEN_RANGES].range;
    uint32_t thread = started[id % OPEN_RANGES].thread;
    started[id % OPEN_RANGES].id = 0;
    pthread_mutex_unlock(&started_lock);
    if (known) add(range, clock_ns(CLOCK_REALTIME), thread, NVTX_START_END, id);
}

static void mark(uint32_t domain, uint32_t name) {
    uint64_t now = clock_ns(CLOCK_REALTIME);
    add((open_t){now, name, domain}, now, thread_id(), NVTX_MARK, 0);
}

static void mark_ex(const attributes_t *a) { mark(0, name_of(a)); }
static void mark_a(const char *text) { mark(0, name_of_text(text)); }
static uint64_t start_ex(const attributes_t *a) { return start(0, name_of(a)); }
static uint64_t start_a(const char *text) { return start(0, name_of_text(text)); }
static int push_ex(const attributes_t *a) { return push(0, name_of(a)); }
static int push_a(const char *text) { return push(0, name_of_text(text)); }
static void mark_w(const wchar_t *text) { char t[512]; mark_a(narrow(text, t, sizeof t)); }
static uint64_t start_w(const wchar_t *text) {
    char t[512];
    return start_a(narrow(text, t, sizeof t));
}
static int push_w(const wchar_t *text) { char t[512]; return push_a(narrow(text, t, sizeof t)); }
static void domain_mark(void *d, const attributes_t *a) { mark(id_of(d), name_of(a)); }
static uint64_t domain_start(void *d, const attributes_t *a) { return start(id_of(d), name_of(a)); }
static void domain_end(void *d, uint64_t id) { (void)d; end(id); }
static int domain_push(void *d, const attributes_t *a) { return push(id_of(d), name_of(a)); }
static int pop_core(void) { return pop(0); }
static int domain_pop(void *d) { return pop(id_of(d)); }
static void *domain_string(void *d, const char *text) { (void)d; return handle_of(text); }
static void *domain_string_w(void *d, const wchar_t *text) {
    char t[512];
    return domain_string(d, narrow(text, t, sizeof t));
}
/* A domain is told outside windows too. */
static void *domain_create(const char *name) {
    handle_t *handle = handle_of(name);
    spool_lock();
    if (handle) tell_domain(handle->id, thread_id());
    spool_unlock();
    return handle;
}
static void *domain_create_w(const wchar_t *name) {
    char t[512];
    return domain_create(narrow(name, t, sizeof t));
}
static void domain_destroy(void *d) { (void)d; }

static void set(function_t **table, unsigned count, unsigned id, function_t function) {
    if (id < count && table[id]) *table[id] = function;
}

/* Called by the client's NVTX header, once, before its first range. 1 says that we took over. */
__attribute__((visibility("default"))) int InitializeInjectionNvtx2(
    const void *(*export_table)(uint32_t id)) {
    const callbacks_t *callbacks = export_table(EXPORT_CALLBACKS);
    function_t **table;
    unsigned count;
    if (!callbacks || collector_start()) return 0;
    if (callbacks->module_table(MODULE_CORE, &table, &count)) {
        set(table, count, 1, (function_t)mark_ex);
        set(table, count, 2, (function_t)mark_a);
        set(table, count, 3, (function_t)mark_w);
        set(table, count, 4, (function_t)start_ex);
        set(table, count, 5, (function_t)start_a);
        set(table, count, 6, (function_t)start_w);
        set(table, count, 7, (function_t)end);
        set(table, count, 8, (function_t)push_ex);
        set(table, count, 9, (function_t)push_a);
        set(table, count, 10, (function_t)push_w);
        set(table, count, 11, (function_t)pop_core);
    }
    if (callbacks->module_table(MODULE_CORE2, &table, &count)) {
        set(table, count, 1, (function_t)domain_mark);
        set(table, count, 2, (function_t)domain_start);
        set(table, count, 3, (function_t)domain_end);
        set(table, count, 4, (function_t)domain_push);
        set(table, count, 5, (function_t)domain_pop);
        set(table, count, 10, (function_t)domain_string);
        set(table, count, 11, (function_t)domain_string_w);
        set(table, count, 12, (function_t)domain_create);
        set(table, count, 13, (function_t)domain_create_w);
        set(table, count, 14, (function_t)domain_destroy);
    }
    return 1;
}
