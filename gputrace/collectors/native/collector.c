/* The collector: loaded by the CUDA driver into every process that starts CUDA, by way of
 * CUDA_INJECTION64_PATH, and by NVTX clients by way of NVTX_INJECTION64_PATH.
 *
 * CUPTI fills buffers and hands them over; a thread of ours decodes them and appends them to the
 * process's spool each second. Nothing here runs Python, and no call of the program waits for us.
 *
 * Environment: GPUTRACE_DIR, the folder of the spool; GPUTRACE_CAPTURE, when to record: all (the
 * default), profiler (from cudaProfilerStart to Stop), manual (gputrace_capture decides);
 * GPUTRACE_DELAY_NS and GPUTRACE_DURATION_NS, a window in the life of the process.
 */
#define _GNU_SOURCE
#include "cupti.h"
#include "library.h"
#include "spool.h"

#include <dlfcn.h>
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define EXPORTED __attribute__((visibility("default")))
#define BUFFER_BYTES (4u << 20)
#define AT_ONCE 64
#define SECOND 1000000000u

/* What CUPTI offers; a missing one stays NULL. */
static struct {
    int (*version)(uint32_t *);
    int (*subscribe)(void **, callback_t, void *);
    int (*unsubscribe)(void *);
    int (*enable_callback)(uint32_t, void *, int, uint32_t);
    int (*register_callbacks)(buffer_requested_t, buffer_completed_t);
    int (*enable)(int);
    int (*disable)(int);
    int (*enable_runtime_api)(uint32_t, uint8_t);
    int (*enable_driver_api)(uint32_t, uint8_t);
    int (*flush)(uint32_t);
    int (*next_record)(uint8_t *, size_t, void **);
    int (*dropped)(void *, uint32_t, size_t *);
    int (*thread_id_type)(int);
    int (*callback_name)(int, uint32_t, const char **);
} cupti;

void nvtx_in_child(void);

typedef struct buffer { struct buffer *next; size_t valid; uint8_t *bytes; } buffer_t;

static pthread_mutex_t queue_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t queue_filled;
static buffer_t *completed, **completed_end = &completed;
static uint8_t *spare[16];
static size_t spares;

static pthread_once_t once = PTHREAD_ONCE_INIT;
static pthread_t writer;
static int writer_runs, stopping, in_child;
static atomic_int started_ok, recording, paused, wanted;
/* CUPTI is loaded and may be used; the disk takes no more. */
static atomic_int ready, broken;
static pthread_mutex_t switch_lock = PTHREAD_MUTEX_INITIALIZER;

/* Without KIND_SYNCHRONIZATION: that one alone doubles what recording costs (measured on an H200), and
 * the synchronising calls are recorded as calls. */
static const int gpu_kinds[] = {KIND_CONCURRENT_KERNEL, KIND_MEMCPY, KIND_MEMCPY2, KIND_MEMSET,
                                KIND_OVERHEAD, KIND_GRAPH_TRACE};

/* Starts of the names of calls that issue work, wait for it, or take memory. */
static const char *const calls[] = {
    "cudaLaunch", "cudaGraphLaunch", "cudaMemcpy", "cudaMemset", "cudaMalloc", "cudaFree",
    "cudaHostAlloc", "cudaHostRegister", "cudaHostUnregister", "cudaDeviceSynchronize",
    "cudaStreamSynchronize", "cudaEventSynchronize", "cudaThreadSynchronize", "cudaMemPrefetch",
    "cuLaunch", "cuGraphLaunch", "cuMemcpy", "cuMemset", "cuMemAlloc", "cuMemFree", "cuMemHostAlloc",
    "cuMemHostRegister", "cuMemHostUnregister", "cuMemCreate", "cuMemMap", "cuMemUnmap",
    "cuMemRelease", "cuMemSetAccess", "cuCtxSynchronize", "cuStreamSynchronize",
    "cuEventSynchronize", "cuMemPrefetch"};

static void load(void *library) {
    static const struct { void *slot; const char *name; } symbols[] = {
        {&cupti.version, "cuptiGetVersion"},
        {&cupti.subscribe, "cuptiSubscribe"},
        {&cupti.unsubscribe, "cuptiUnsubscribe"},
        {&cupti.enable_callback, "cuptiEnableCallback"},
        {&cupti.register_callbacks, "cuptiActivityRegisterCallbacks"},
        {&cupti.enable, "cuptiActivityEnable"},
        {&cupti.disable, "cuptiActivityDisable"},
        {&cupti.enable_runtime_api, "cuptiActivityEnableRuntimeApi"},
        {&cupti.enable_driver_api, "cuptiActivityEnableDriverApi"},
        {&cupti.flush, "cuptiActivityFlushAll"},
        {&cupti.next_record, "cuptiActivityGetNextRecord"},
        {&cupti.dropped, "cuptiActivityGetNumDroppedRecords"},
        {&cupti.thread_id_type, "cuptiSetThreadIdType"},
        {&cupti.callback_name, "cuptiGetCallbackName"},
    };
    for (size_t i = 0; i < sizeof symbols / sizeof *symbols; i++) {
        void *symbol = dlsym(library, symbols[i].name);
        memcpy(symbols[i].slot, &symbol, sizeof symbol);
    }
}

/* ---- buffers ---- */

static void buffer_requested(uint8_t **buffer, size_t *size, size_t *max_records) {
    uint8_t *bytes = NULL;
    pthread_mutex_lock(&queue_lock);
    if (spares) bytes = spare[--spares];
    pthread_mutex_unlock(&queue_lock);
    /* CUPTI before 12.9 may crash on a refusal, so there is no upper bound. */
    if (!bytes && posix_memalign((void **)&bytes, 64, BUFFER_BYTES)) bytes = NULL;
    *buffer = bytes;
    *size = bytes ? BUFFER_BYTES : 0;
    *max_records = 0;
}

static void give_back(uint8_t *bytes) {
    pthread_mutex_lock(&queue_lock);
    if (spares < sizeof spare / sizeof *spare) { spare[spares++] = bytes; bytes = NULL; }
    pthread_mutex_unlock(&queue_lock);
    free(bytes);
}

static void buffer_completed(void *context, uint32_t stream, uint8_t *bytes, size_t size,
                             size_t valid) {
    size_t lost = 0;
    (void)size;
    if (cupti.dropped && !cupti.dropped(context, stream, &lost) && lost) {
        spool_lock();
        spool_loss(lost, "CUPTI had no room for them");
        spool_unlock();
    }
    buffer_t *buffer = valid ? malloc(sizeof *buffer) : NULL;
    if (!buffer) {
        if (bytes) give_back(bytes);
        return;
    }
    *buffer = (buffer_t){NULL, valid, bytes};
    pthread_mutex_lock(&queue_lock);
    *completed_end = buffer;
    completed_end = &buffer->next;
    pthread_cond_signal(&queue_filled);
    pthread_mutex_unlock(&queue_lock);
}

static buffer_t *take_completed(void) {
    pthread_mutex_lock(&queue_lock);
    buffer_t *first = completed;
    completed = NULL;
    completed_end = &completed;
    pthread_mutex_unlock(&queue_lock);
    return first;
}

/* Decodes and writes all that is completed. Returns -1 once the disk took no more. */
static int drain(void) {
    int status = 0;
    for (buffer_t *buffer = take_completed(), *next; buffer; buffer = next) {
        void *record = NULL;
        next = buffer->next;
        for (int more = 1; more;) {
            /* A few at a time: NVTX calls of the program, and its forks, wait for this lock. */
            spool_lock();
            for (int i = 0; more && i < AT_ONCE; i++) {
                more = !cupti.next_record(buffer->bytes, buffer->valid, &record);
                if (more) decode(record);
            }
            spool_unlock();
        }
        give_back(buffer->bytes);
        free(buffer);
    }
    spool_lock();
    status = spool_flush();
    spool_unlock();
    return status;
}

static void throw_away(void) {
    for (buffer_t *buffer = take_completed(), *next; buffer; buffer = next) {
        next = buffer->next;
        free(buffer->bytes);
        free(buffer);
    }
}

/* ---- on and off ---- */

/* Turns the records of the calls that matter on and off.
 *
 * Before there is a context, these calls are put in one by one: nothing else is watched then, and that
 * is cheap. What is put in later is not recorded (seen with CUPTI 13.0): there the whole kind is
 * turned on and the other calls are taken out, which costs more. Before 12.8 single calls cannot be
 * chosen: all are recorded, and decoding drops the rest. */
static void set_calls(int on, int early) {
    static int put_in;
    int single = cupti.enable_runtime_api && cupti.enable_driver_api;
    if (on) put_in = early && single;
    if (!put_in) {
        (on ? cupti.enable : cupti.disable)(KIND_RUNTIME);
        (on ? cupti.enable : cupti.disable)(KIND_DRIVER);
    }
    if (!single || !(put_in || on)) return;
    for (uint32_t id = 1; id < 2048; id++) {
        if (!api_names[DOMAIN_RUNTIME][id] == !put_in) cupti.enable_runtime_api(id, on && put_in);
        if (!api_names[DOMAIN_DRIVER][id] == !put_in) cupti.enable_driver_api(id, on && put_in);
    }
}

/* Brings recording in line with what is wanted; called with switch_lock held. EARLY says that the
 * driver is just starting, and there is no context yet. */
static void settle(int early) {
    int on = wanted && !paused && !in_child && !broken;
    if (on == recording || !ready) return;
    if (on) cupti.register_callbacks(buffer_requested, buffer_completed);
    for (size_t i = 0; i < sizeof gpu_kinds / sizeof *gpu_kinds; i++)
        (on ? cupti.enable : cupti.disable)(gpu_kinds[i]);
    set_calls(on, early);
    if (!on) cupti.flush(FLUSH_FORCED);
    recording = on;
    spool_lock();
    char text[32];
    snprintf(text, sizeof text, "%llu", (unsigned long long)clock_ns(CLOCK_REALTIME));
    spool_info(on ? "capture_on" : "capture_off", text);
    spool_unlock();
}

static void want(int on) {
    pthread_mutex_lock(&switch_lock);
    wanted = on;
    settle(0);
    pthread_mutex_unlock(&switch_lock);
}

int collector_is_on(void) { return recording || (wanted && !paused && !ready); }

/* Starts or ends a window, for --steps and the Python interface. */
EXPORTED void gputrace_capture(int on) {
    if (started_ok && !in_child) want(on);
}

/* Makes way for another user of CUPTI (torch.profiler), and comes back. */
EXPORTED void gputrace_pause(int pause) {
    if (!started_ok || in_child) return;
    pthread_mutex_lock(&switch_lock);
    paused = pause;
    settle(0);
    pthread_mutex_unlock(&switch_lock);
    if (!pause) return;
    spool_lock();
    spool_loss(0, "recording paused for another profiler in the program (torch.profiler)");
    spool_unlock();
}

static uint32_t profiler_start_id, profiler_stop_id;

static void on_profiler(void *user, int domain, uint32_t id, const void *data) {
    (void)user;
    if (domain != DOMAIN_DRIVER || u32_at(data, 0) != 1) return; /* on leaving the call */
    if (id == profiler_start_id) want(1);
    if (id == profiler_stop_id) want(0);
}

static void name_calls(void) {
    for (int domain = DOMAIN_DRIVER; domain <= DOMAIN_RUNTIME; domain++)
        for (uint32_t id = 1; id < 2048; id++) {
            const char *name = NULL;
            if (cupti.callback_name(domain, id, &name) || !name) continue;
            if (!strcmp(name, "cuProfilerStart")) profiler_start_id = id;
            if (!strcmp(name, "cuProfilerStop")) profiler_stop_id = id;
            for (size_t i = 0; i < sizeof calls / sizeof *calls; i++)
                if (!strncmp(name, calls[i], strlen(calls[i])))
                    api_names[domain][id] = spool_name(name);
        }
}

/* ---- the devices ---- */

static void tell_devices(void) {
    void *cuda = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
    int (*count)(int *), (*get)(int *, int), (*bus)(char *, int, int), (*name)(char *, int, int);
    int (*uuid)(uint8_t *, int), devices = 0;
    if (!cuda) return;
    *(void **)&count = dlsym(cuda, "cuDeviceGetCount");
    *(void **)&get = dlsym(cuda, "cuDeviceGet");
    *(void **)&bus = dlsym(cuda, "cuDeviceGetPCIBusId");
    *(void **)&name = dlsym(cuda, "cuDeviceGetName");
    *(void **)&uuid = dlsym(cuda, "cuDeviceGetUuid");
    if (!count || !get || !bus || !name || count(&devices)) return;
    for (int i = 0, device; i < devices; i++) {
        device_t row = {.ordinal = (uint32_t)i};
        if (get(&device, i)) continue;
        bus(row.bus, sizeof row.bus - 1, device);
        name(row.name, sizeof row.name - 1, device);
        if (uuid) uuid(row.uuid, device);
        spool_lock();
        spool_chunk(TAG_DEVICE, &row, sizeof row, "", 0);
        spool_unlock();
    }
}

static void tell_clocks(void) {
    uint64_t now[3] = {clock_ns(CLOCK_REALTIME), clock_ns(CLOCK_MONOTONIC),
                       clock_ns(CLOCK_MONOTONIC_RAW)};
    spool_lock();
    spool_chunk(TAG_CLOCK, now, sizeof now, "", 0);
    spool_unlock();
}

/* ---- the thread that writes ---- */

static uint64_t environment_ns(const char *name) {
    const char *value = getenv(name);
    return value ? strtoull(value, NULL, 10) : 0;
}

static void *write_until_stopped(void *unused) {
    uint64_t begin = clock_ns(CLOCK_MONOTONIC), delay = environment_ns("GPUTRACE_DELAY_NS"),
             duration = environment_ns("GPUTRACE_DURATION_NS"), next = begin + SECOND;
    int devices_told = 0, window = delay || duration, phase = 0;
    (void)unused;
    pthread_setname_np(pthread_self(), "gputrace");
    for (;;) {
        uint64_t now = clock_ns(CLOCK_MONOTONIC), wake = next;
        if (window && phase == 0 && now >= begin + delay) { want(1); phase = 1; }
        if (window && phase == 1 && duration && now >= begin + delay + duration) {
            want(0);
            phase = 2;
        }
        if (window && phase == 0 && begin + delay < wake) wake = begin + delay;
        if (window && phase == 1 && duration && begin + delay + duration < wake)
            wake = begin + delay + duration;
        struct timespec at = {(time_t)(wake / SECOND), (long)(wake % SECOND)};
        pthread_mutex_lock(&queue_lock);
        while (!stopping && !completed && clock_ns(CLOCK_MONOTONIC) < wake)
            if (pthread_cond_timedwait(&queue_filled, &queue_lock, &at)) break;
        int stop = stopping;
        pthread_mutex_unlock(&queue_lock);
        if (stop) return NULL;
        if (clock_ns(CLOCK_MONOTONIC) >= next) {
            next = clock_ns(CLOCK_MONOTONIC) + SECOND;
            if (recording) cupti.flush(0);
            if (!devices_told) { tell_devices(); devices_told = 1; }
            tell_clocks();
        }
        if (drain()) {
            broken = 1;
            want(0);
            throw_away();
            return NULL;
        }
    }
}

static int start_writer(void) {
    pthread_condattr_t monotonic;
    sigset_t all, before;
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_cond_init(&queue_filled, &monotonic);
    /* Signals are the program's: none may come to our thread. */
    sigfillset(&all);
    pthread_sigmask(SIG_BLOCK, &all, &before);
    writer_runs = !pthread_create(&writer, NULL, write_until_stopped, NULL);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return writer_runs ? 0 : -1;
}

static void at_exit(void) {
    if (!started_ok || in_child) return;
    want(0);
    pthread_mutex_lock(&queue_lock);
    stopping = 1;
    pthread_cond_signal(&queue_filled);
    pthread_mutex_unlock(&queue_lock);
    if (writer_runs) pthread_join(writer, NULL);
    drain();
    tell_devices();
    tell_clocks();
    spool_lock();
    spool_info("ended", "exit");
    spool_close();
    spool_unlock();
    started_ok = 0;
}

static void before_fork(void) {
    pthread_mutex_lock(&switch_lock);
    pthread_mutex_lock(&queue_lock);
    spool_lock();
}

static void after_fork(void) {
    spool_unlock();
    pthread_mutex_unlock(&queue_lock);
    pthread_mutex_unlock(&switch_lock);
}

/* A forked child cannot use CUDA; it leaves the file to its parent. */
static void in_forked_child(void) {
    in_child = 1;
    recording = 0;
    started_ok = 0;
    spool_forget();
    nvtx_in_child();
    pthread_mutex_init(&queue_lock, NULL);
    pthread_mutex_init(&switch_lock, NULL);
}

/* ---- entry ---- */

static void tell_process(void) {
    static const char *const variables[] = {
        "RANK", "WORLD_SIZE", "LOCAL_RANK", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK", "PMI_RANK", "PMI_SIZE", "SLURM_PROCID", "SLURM_NTASKS",
        "SLURM_LOCALID", "HOROVOD_RANK", "HOROVOD_SIZE", "CUDA_VISIBLE_DEVICES"};
    for (size_t i = 0; i < sizeof variables / sizeof *variables; i++)
        if (getenv(variables[i])) spool_info(variables[i], getenv(variables[i]));
}

static int is_under_other_tool(void) {
    return getenv("NSYS_PROFILING_SESSION_ID") || getenv("QUADD_INJECTION_PROXY");
}

static void start(void) {
    const char *directory = getenv("GPUTRACE_DIR");
    if (!directory || !*directory || is_under_other_tool() || spool_open(directory)) return;
    pthread_atfork(before_fork, after_fork, in_forked_child);
    tell_process();
    tell_clocks();
    const char *capture = getenv("GPUTRACE_CAPTURE");
    wanted = !(capture && (!strcmp(capture, "profiler") || !strcmp(capture, "manual"))) &&
             !getenv("GPUTRACE_DELAY_NS") && !getenv("GPUTRACE_DURATION_NS");
    started_ok = 1;
    if (start_writer()) started_ok = 0;
    atexit(at_exit);
}

/* Opens the spool and starts the writer, once a process; 0 where that went well. */
int collector_start(void) {
    pthread_once(&once, start);
    return started_ok ? 0 : -1;
}

static void stand_down(const char *why) {
    spool_lock();
    spool_info("no_gpu_activity", why);
    spool_flush();
    spool_unlock();
}

static void start_cupti(void) {
    char found[PATH_MAX] = "", text[64];
    uint32_t version = 0;
    void *library = find_cupti(found), *subscriber = NULL;
    const char *capture = getenv("GPUTRACE_CAPTURE");
    if (!library) { stand_down("no libcupti was found"); return; }
    load(library);
    if (!cupti.version || !cupti.register_callbacks || !cupti.enable || !cupti.disable ||
        !cupti.flush || !cupti.next_record || !cupti.callback_name) {
        stand_down("libcupti lacks functions");
        return;
    }
    cupti.version(&version);
    snprintf(text, sizeof text, "%u", version);
    spool_lock();
    spool_info("cupti", found);
    spool_info("cupti_version", text);
    spool_unlock();
    if (cupti.subscribe && cupti.subscribe(&subscriber, on_profiler, NULL)) {
        stand_down("another tool in the process holds CUPTI");
        return;
    }
    spool_lock();
    name_calls();
    spool_unlock();
    if (capture && !strcmp(capture, "profiler") && cupti.enable_callback) {
        cupti.enable_callback(1, subscriber, DOMAIN_DRIVER, profiler_start_id);
        cupti.enable_callback(1, subscriber, DOMAIN_DRIVER, profiler_stop_id);
    } else if (cupti.unsubscribe) {
        cupti.unsubscribe(subscriber); /* others may want it; the activity interface needs none */
    }
    if (cupti.thread_id_type) cupti.thread_id_type(THREAD_ID_SYSTEM);
    pthread_mutex_lock(&switch_lock);
    ready = 1;
    settle(1);
    pthread_mutex_unlock(&switch_lock);
}

/* Called by the CUDA driver in cuInit. What it returns does not matter to the program. */
EXPORTED int InitializeInjection(void) {
    static pthread_once_t once_cupti = PTHREAD_ONCE_INIT;
    if (!collector_start()) pthread_once(&once_cupti, start_cupti);
    return 1;
}
