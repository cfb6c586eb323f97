/*
 * A libcupti that knows no GPU: fake_emit gives it the records that it hands over. With -DOLD it is
 * one of before 12.8, whose API calls cannot be chosen singly; it does not tell of cuDriverGetVersion either.
 *
 * Environment: FAKE_CUPTI_TAKEN, another tool subscribed before; FAKE_CUPTI_DROPPED, a number of
 * records lost; FAKE_CUPTI_LATE_MS, how long it keeps a buffer back that is to be handed over, but for a
 * forced flush; FAKE_CUPTI_FLUSH_MS, how long a flush takes; FAKE_CUPTI_VERSION, what it says of itself;
 * FAKE_CUPTI_HW_TRACE, a GPU with hardware events; FAKE_CUPTI_REAL, the path of a libcupti of NVIDIA's that walks buffers and names
 * calls in place of this one. Misuse that would crash the program with the real one ends it here.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum { INVALID = 1, NOT_SUPPORTED = 27, TAKEN = 39, NO_MORE = 12, KINDS = 64, CALLS = 2048, PARTS = 256 };
enum { DRIVER_DOMAIN = 1, RUNTIME_DOMAIN = 2, RESOURCE_DOMAIN = 3 };
enum { DRIVER = 4, RUNTIME = 5, KERNEL = 10, NODE_CREATED = 13, NODE_CLONED = 20, GRAPH_TRACE = 51 };
enum { CU_DRIVER_GET_VERSION = 2, CU_PROFILER_START = 308, CU_PROFILER_STOP = 309, CU_GRAPH_INSTANTIATE = 509 };

typedef void (*requested_t)(uint8_t **, size_t *, size_t *);
typedef void (*completed_t)(void *, uint32_t, uint8_t *, size_t, size_t);
typedef void (*callback_t)(void *, int, uint32_t, const void *);
typedef struct { uint8_t *bytes; size_t size, used; uint64_t end, due; } part_t;

#ifdef OLD
static const size_t strides[KINDS] = {[1] = 88, [2] = 88, [3] = 200, [4] = 40, [5] = 40, [10] = 200,
                                      [17] = 40, [22] = 96, [38] = 40, [51] = 48};
#else
static const size_t strides[KINDS] = {[1] = 96, [2] = 88, [3] = 216, [4] = 40, [5] = 40, [10] = 216,
                                      [17] = 56, [22] = 96, [38] = 56, [51] = 56};
#endif

static const struct { int domain; uint32_t id; const char *name; } names[] = {
#ifndef OLD
    {1, CU_DRIVER_GET_VERSION, "cuDriverGetVersion"},
#endif
    {1, 243, "cuMemAlloc_v2"}, {1, 277, "cuMemcpyHtoDAsync_v2"}, {1, 304, "cuCtxGetCurrent"},
    {1, 307, "cuLaunchKernel"}, {1, CU_PROFILER_START, "cuProfilerStart"},
    {1, CU_PROFILER_STOP, "cuProfilerStop"}, {1, 310, "cuPointerGetAttribute"},
    {1, 509, "cuGraphInstantiateWithFlags"}, {1, 514, "cuGraphLaunch"}, {2, 10, "cudaGetLastError_v3020"}, {2, 17, "cudaGetDevice_v3020"},
    {2, 20, "cudaMalloc_v3020"}, {2, 41, "cudaMemcpyAsync_v3020"}, {2, 51, "cudaMemsetAsync_v3020"},
    {2, 131, "cudaStreamSynchronize_v3020"}, {2, 138, "cudaEventQuery_v3020"},
    {2, 211, "cudaLaunchKernel_v7000"}, {2, 311, "cudaGraphLaunch_v10000"}};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t filled = PTHREAD_COND_INITIALIZER, idle = PTHREAD_COND_INITIALIZER;
static pid_t owner;
static requested_t requested;
static completed_t completed;
static callback_t callback;
static void *callback_user;
static uint8_t on[KINDS], chosen[3][CALLS], profiler[CALLS], resources[32];
static part_t current, parts[PARTS];
static unsigned first, last;
static uint64_t dropped, late;
/* Whether a flush was forced: nothing is kept back then. */
static volatile int forced;
static uint32_t thread_ids;
static uint64_t (*timestamp)(void);
static int flushing, finalized, registrations, at_once, by_hardware;
/* Calls are numbered from 1 on again after cuptiFinalize: the largest number so far, and at that time. */
static uint32_t numbered, numbered_before;
/* Whether a record was made while single calls were chosen: such a choice can be made again. */
static int calls, choices, used, lasting, watched[3];
/* It ends where a library ends that was loaded as it was: with exit handlers, the last one first. */
static int over;

static void check(int good, const char *what) {
    if (good && owner == getpid() && !over) return;
    dprintf(2, "fake_cupti: %s\n", over ? "called after its end" : good ? "called in a forked child" : what);
    abort();
}

static void end(void) { over = 1; }

static uint64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

static void *of_real(const char *name) {
    static void *real;
    const char *path = getenv("FAKE_CUPTI_REAL");
    if (!path) return NULL;
    if (!real) real = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!real) dprintf(2, "fake_cupti: %s\n", dlerror());
    return real ? dlsym(real, name) : NULL;
}

/* Hands buffers over, as CUPTI does from a thread of its own. */
static void *work(void *unused) {
    (void)unused;
    for (;;) {
        pthread_mutex_lock(&lock);
        while (first == last) pthread_cond_wait(&filled, &lock);
        part_t part = parts[first % PARTS];
        pthread_mutex_unlock(&lock);
        while (now_ns() < part.due && !forced) usleep(1000);
        pthread_mutex_lock(&lock);
        parts[first % PARTS].bytes = NULL; /* from here on its owner may offer it again */
        pthread_mutex_unlock(&lock);
        completed(NULL, 0, part.bytes, part.size, part.used);
        pthread_mutex_lock(&lock);
        first++;
        pthread_cond_broadcast(&idle);
        pthread_mutex_unlock(&lock);
    }
    return NULL;
}

__attribute__((constructor)) static void begin(void) {
    const char *count = getenv("FAKE_CUPTI_DROPPED"), *ms = getenv("FAKE_CUPTI_LATE_MS");
    owner = getpid();
    late = ms ? strtoull(ms, NULL, 10) * 1000000 : 0;
    dropped = count ? strtoull(count, NULL, 10) : 0;
    atexit(end);
}

/* Kernels that run still are handed over without their times. */
static void cut_short(uint64_t now) {
    uint32_t kind;
    for (size_t at = 0; at < current.used; at += strides[kind]) {
        uint64_t end_of_it;
        memcpy(&kind, current.bytes + at, 4);
        memcpy(&end_of_it, current.bytes + at + 24, 8);
        if (kind == KERNEL && end_of_it > now) memset(current.bytes + at + 16, 0, 16);
    }
}

/* With the lock held: the buffer in use goes to the worker. */
static void let_go(void) {
    while (last - first == PARTS) pthread_cond_wait(&idle, &lock);
    if (current.used) {
        if (current.end > now_ns()) cut_short(now_ns());
        current.due = late ? now_ns() + late : 0;
        parts[last++ % PARTS] = current;
        pthread_cond_signal(&filled);
        memset(&current, 0, sizeof current);
    }
}

static void take_buffer(void) {
    size_t most = 1;
    memset(&current, 0, sizeof current);
    requested(&current.bytes, &current.size, &most);
    check(current.bytes && current.size >= 4096 && !most, "a buffer was refused");
    check((uintptr_t)current.bytes % 8 == 0, "a buffer is not aligned");
    for (unsigned i = first; i != last; i++)
        check(parts[i % PARTS].bytes != current.bytes, "a buffer is used twice");
}

/* Whether a record is wanted, which its id decides for calls. */
static int wanted(uint32_t kind, uint32_t id) {
    if (kind != DRIVER && kind != RUNTIME) return on[kind];
    int taken = chosen[kind == DRIVER ? DRIVER_DOMAIN : RUNTIME_DOMAIN][id % CALLS];
    calls += taken;
    lasting |= taken && !on[kind];
    return taken;
}

/* How many records of calls were made. */
int fake_calls(void) { return calls; }

/* Whether it records kernels. */
int fake_records(void) { return on[KERNEL]; }

/* Whether it records replays of graphs as a whole, and so no node of them. */
int fake_graphs(void) { return on[GRAPH_TRACE]; }

/* How often it was asked to record other calls, or none. */
int fake_choices(void) { return choices; }

/* The thread that makes a call, as was asked for; CUPTI takes the time there too. */
static void put_thread(uint8_t *place) {
    uint32_t thread = (uint32_t)(uintptr_t)pthread_self();
    if (timestamp) timestamp();
    if (thread_ids == 1) thread = (uint32_t)syscall(SYS_gettid);
    memcpy(place, &thread, sizeof thread);
}

/* The subscriber's function, as a call begins and ends. */
static void tell_call(int domain, uint32_t id) {
    struct { uint32_t site; const char *function; } data = {0, "call"};
    callback(callback_user, domain, id, &data);
    data.site = 1;
    if (callback) callback(callback_user, domain, id, &data);
}

/* Where records have the number of the call that issued them. */
static const size_t numbers[KINDS] = {[1] = 44, [2] = 44, [3] = 92, [4] = 32, [5] = 32, [10] = 92,
                                      [22] = 60, [38] = 24, [51] = 4};

static void number(uint8_t *record, uint32_t kind) {
    uint32_t id;
    if (!numbers[kind]) return;
    memcpy(&id, record + numbers[kind], sizeof id);
    if (id > numbered) numbered = id;
    if (id) id -= numbered_before;
    memcpy(record + numbers[kind], &id, sizeof id);
}

/* What the driver does: RECORD is laid out as CUPTI 13.0 does, and complete at END. */
void fake_emit(const void *record, uint64_t end) {
    uint32_t kind, id;
    memcpy(&kind, record, 4);
    memcpy(&id, (const char *)record + 4, 4);
    pthread_mutex_lock(&lock);
    used = 1;
    if (wanted(kind, id)) {
        if (current.bytes && current.used + strides[kind] > current.size) let_go();
        if (!current.bytes) take_buffer();
        memcpy(current.bytes + current.used, record, strides[kind]);
        number(current.bytes + current.used, kind);
        if (kind == DRIVER || kind == RUNTIME) put_thread(current.bytes + current.used + 28);
        current.used += strides[kind];
        if (end > current.end) current.end = end;
    }
    pthread_mutex_unlock(&lock);
    int domain = kind == DRIVER ? DRIVER_DOMAIN : kind == RUNTIME ? RUNTIME_DOMAIN : 0;
    if (callback && domain && watched[domain]) tell_call(domain, id);
}

void fake_profiler(int start) {
    uint32_t id = start ? CU_PROFILER_START : CU_PROFILER_STOP;
    if (callback && (profiler[id] || watched[DRIVER_DOMAIN])) tell_call(DRIVER_DOMAIN, id);
}

/* What cuDriverGetVersion of fake_cuda.c calls. */
void fake_get_version(void) {
    if (callback && (profiler[CU_DRIVER_GET_VERSION] || watched[DRIVER_DOMAIN]))
        tell_call(DRIVER_DOMAIN, CU_DRIVER_GET_VERSION);
}

/* A call of MS milliseconds, whose begin and end are told. */
void fake_instantiate(int ms) {
    static int within;
    int told = callback && profiler[CU_GRAPH_INSTANTIATE];
    struct { uint32_t site; const char *function; } data = {0, "cuGraphInstantiateWithFlags"};
    if (told) callback(callback_user, DRIVER_DOMAIN, CU_GRAPH_INSTANTIATE, &data);
    int now = __atomic_add_fetch(&within, 1, __ATOMIC_SEQ_CST);
    for (int most = at_once; now > most;)
        if (__atomic_compare_exchange_n(&at_once, &most, now, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)) break;
    usleep(1000u * (unsigned)ms);
    __atomic_sub_fetch(&within, 1, __ATOMIC_SEQ_CST);
    data.site = 1;
    if (told && callback) callback(callback_user, DRIVER_DOMAIN, CU_GRAPH_INSTANTIATE, &data);
}

/* A node of a graph is made in this thread, or copied from another one; what it is called is its number. */
void fake_node(uintptr_t node, uintptr_t original) {
    uintptr_t graph[7] = {1, 0, node, original};
    struct { const void *context, *stream, *descriptor; } data = {NULL, NULL, graph};
    uint32_t id = original ? NODE_CLONED : NODE_CREATED;
    if (callback && resources[id]) callback(callback_user, RESOURCE_DOMAIN, id, &data);
}

/* How many such calls were under way at once, at most. */
int fake_at_once(void) { return at_once; }

/* Whether somebody has the place of a subscriber. */
int fake_taken(void) { return callback != NULL; }

/* How often cuptiFinalize was called. */
int fake_finalized(void) { return finalized; }

/* How often a clock was registered. */
int fake_registrations(void) { return registrations; }

/* Whether somebody is told of cuProfilerStart. */
int fake_attended(void) { return callback && profiler[CU_PROFILER_START]; }

/* ---- what CUPTI offers ---- */

int cuptiGetVersion(uint32_t *version) {
    const char *told = getenv("FAKE_CUPTI_VERSION");
    *version = told ? (uint32_t)atoi(told) : 130000;
    return 0;
}

int cuptiSubscribe(void **subscriber, callback_t function, void *user) {
    check(1, "");
    if (getenv("FAKE_CUPTI_TAKEN") || callback) return TAKEN;
    callback = function;
    callback_user = user;
    *subscriber = &callback;
    return 0;
}

int cuptiUnsubscribe(void *subscriber) {
    check(subscriber == &callback, "no such subscriber");
    callback = NULL;
    return 0;
}

int cuptiEnableCallback(uint32_t enable, void *subscriber, int domain, uint32_t id) {
    check(subscriber == &callback && callback, "no such subscriber");
    check(domain == DRIVER_DOMAIN || (domain == RESOURCE_DOMAIN && id < 32), "no such callback");
    if (domain == RESOURCE_DOMAIN) resources[id] = (uint8_t)enable;
    else profiler[id % CALLS] = (uint8_t)enable;
    return 0;
}

int cuptiEnableDomain(uint32_t enable, void *subscriber, int domain) {
    check(subscriber == &callback && callback && domain > 0 && domain < 3, "no such domain");
    watched[domain] = (int)enable;
    if (domain == DRIVER_DOMAIN) memset(profiler, (int)enable, sizeof profiler);
    return 0;
}

#ifndef OLD
int cuptiGetGraphNodeId(void *node, uint64_t *id) {
    *id = (uintptr_t)node;
    return node ? 0 : INVALID;
}
#endif

/* CUPTI is as if it had never been used; what was not flushed is gone. */
int cuptiFinalize(void) {
    check(1, "");
    pthread_mutex_lock(&lock);
    check(!current.used, "finalized before it was flushed");
    check(!by_hardware, "finalized with hardware events");
    check(!flushing, "finalized in the midst of a flush");
    callback = NULL;
    watched[1] = watched[2] = lasting = 0;
    memset(profiler, 0, sizeof profiler);
    memset(on, 0, sizeof on);
    memset(chosen, 0, sizeof chosen);
    thread_ids = 0;
    timestamp = NULL;
    requested = NULL;
    numbered_before = numbered;
    finalized++;
    pthread_mutex_unlock(&lock);
    return 0;
}

int cuptiActivityRegisterCallbacks(requested_t request, completed_t complete) {
    pthread_t worker;
    check(request && complete, "no callbacks");
    pthread_mutex_lock(&lock);
    /* Without a thread there are no callbacks either: a program may be short of memory. */
    int failed = !completed && pthread_create(&worker, NULL, work, NULL);
    if (!failed) {
        requested = request;
        completed = complete;
    }
    pthread_mutex_unlock(&lock);
    return failed ? INVALID : 0;
}

static int set_kind(int kind, uint8_t value) {
    check(kind > 0 && kind < KINDS && strides[kind], "no such kind");
    check(requested != NULL, "enabled before there are callbacks");
    pthread_mutex_lock(&lock);
    on[kind] = value;
    choices += kind == DRIVER || kind == RUNTIME;
    if (kind == DRIVER) memset(chosen[DRIVER_DOMAIN], value, CALLS);
    if (kind == RUNTIME) memset(chosen[RUNTIME_DOMAIN], value, CALLS);
    pthread_mutex_unlock(&lock);
    return 0;
}

int cuptiActivityEnable(int kind) { return set_kind(kind, 1); }
int cuptiActivityDisable(int kind) { return set_kind(kind, 0); }

#ifndef OLD
/* As seen with 13.0: calls can be taken out at any time, and put in only before there is a context, or
 * after some were recorded that were put in so. */
static int choose(int domain, uint32_t id, uint8_t value) {
    check(requested && id < CALLS, "enabled before there are callbacks");
    pthread_mutex_lock(&lock);
    choices++;
    if (!value || !used || lasting) chosen[domain][id] = value;
    pthread_mutex_unlock(&lock);
    return 0;
}

int cuptiActivityEnableDriverApi(uint32_t id, uint8_t value) {
    return choose(DRIVER_DOMAIN, id, value);
}
int cuptiActivityEnableRuntimeApi(uint32_t id, uint8_t value) {
    return choose(RUNTIME_DOMAIN, id, value);
}
#endif

#ifndef OLD
int cuptiActivityEnableHWTrace(uint8_t enable) {
    check(!used, "hardware events after there is a context");
    by_hardware = enable && getenv("FAKE_CUPTI_HW_TRACE");
    return by_hardware ? 0 : NOT_SUPPORTED;
}
#endif

/* Whether the hardware takes the times. */
int fake_hardware(void) { return by_hardware; }

/* Without force only buffers whose records are all complete. Returns when they are handed over, unless
 * they are kept back. */
int cuptiActivityFlushAll(uint32_t force) {
    const char *ms = getenv("FAKE_CUPTI_FLUSH_MS");
    check(force <= 1, "no such flag");
    __atomic_add_fetch(&flushing, 1, __ATOMIC_SEQ_CST);
    if (ms) usleep(1000 * (unsigned)atoi(ms));
    pthread_mutex_lock(&lock);
    if (force || current.end <= now_ns()) let_go();
    forced = (int)force;
    for (unsigned until = last; (force || !late) && (int)(until - first) > 0;)
        pthread_cond_wait(&idle, &lock);
    forced = 0;
    pthread_mutex_unlock(&lock);
    __atomic_sub_fetch(&flushing, 1, __ATOMIC_SEQ_CST);
    return 0;
}

int cuptiActivityGetNextRecord(uint8_t *buffer, size_t valid, void **record) {
    static int (*real)(uint8_t *, size_t, void **), asked;
    check(buffer && record, "no buffer");
    if (!asked) *(void **)&real = of_real("cuptiActivityGetNextRecord");
    asked = 1;
    if (real) return real(buffer, valid, record);
    uint8_t *at = *record ? *record : buffer;
    uint32_t kind;
    if (*record) {
        memcpy(&kind, at, 4);
        at += strides[kind];
    }
    if (at >= buffer + valid) return NO_MORE;
    *record = at;
    return 0;
}

int cuptiActivityGetNumDroppedRecords(void *context, uint32_t stream, size_t *count) {
    (void)context, (void)stream;
    *count = dropped;
    dropped = 0;
    return 0;
}

#ifndef OLD
int cuptiActivityRegisterTimestampCallback(uint64_t (*function)(void)) {
    check(function != NULL, "no function");
    timestamp = function;
    registrations++;
    return 0;
}
#endif

int cuptiSetThreadIdType(uint32_t type) {
    thread_ids = type;
    return 0;
}

int cuptiGetCallbackName(int domain, uint32_t id, const char **name) {
    static int (*real)(int, uint32_t, const char **), asked;
    if (!asked) *(void **)&real = of_real("cuptiGetCallbackName");
    asked = 1;
    if (real) return real(domain, id, name);
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (names[i].domain == domain && names[i].id == id) {
            *name = names[i].name;
            return 0;
        }
    return INVALID;
}
