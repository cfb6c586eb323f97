/* The collector: loaded by the CUDA driver into every process that starts CUDA, by way of
 * CUDA_INJECTION64_PATH, and by NVTX clients by way of NVTX_INJECTION64_PATH.
 *
 * CUPTI fills buffers and hands them over; a thread of ours decodes them and appends them to the
 * process's spool, when one is full and each second. Nothing here runs Python. CUDA calls of the program
 * do not wait for that thread; its NVTX calls and forks may, while some records are decoded or written.
 *
 * Environment: GPUTRACE_DIR, the folder of the spool; GPUTRACE_CAPTURE, when to record: all (the
 * default), profiler (from cudaProfilerStart to Stop), manual (gputrace_capture decides);
 * GPUTRACE_DELAY_NS and GPUTRACE_DURATION_NS, a window in the life of the process, of which GPUTRACE_FOR_NS
 * out of each GPUTRACE_EVERY_NS; GPUTRACE_HOLD_NS, how long to hold CUPTI after a window (10 s if it is not
 * told); GPUTRACE_SEGMENT_NS, to begin a new file so often, and GPUTRACE_SEGMENTS, how many older ones stay;
 * GPUTRACE_MAX_BYTES, what the folder may hold; GPUTRACE_API, of which parts calls are kept, see sampling.h;
 * GPUTRACE_SERIAL_GRAPHS, see graphs.h; GPUTRACE_HW_TRACE, to use hardware events, see capture.c.
 */
#define _GNU_SOURCE
#include "buffers.h"
#include "capture.h"
#include "cupti.h"
#include "sampling.h"
#include "spool.h"
#include "threads.h"
#include "window.h"

#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define EXPORTED __attribute__((visibility("default")))
#define SECOND 1000000000u
#define HOLD (10ull * SECOND)

void nvtx_in_child(void);

static pthread_once_t once = PTHREAD_ONCE_INIT;
static pthread_t writer;
static int writer_runs, in_child;
static atomic_int started_ok, stopping;
/* Held by who takes over records: one that waits for it finds them written. */
static pthread_mutex_t tending = PTHREAD_MUTEX_INITIALIZER;

/* ---- the cards and the clocks ---- */

/* Numbers of CUdevice_attribute; clocks are in kHz, the bus in bits. */
enum { CLOCK_RATE = 13, MULTIPROCESSORS = 16, MEMORY_CLOCK = 36, MEMORY_BUS = 37, L2_CACHE = 38,
       COMPUTE_MAJOR = 75, COMPUTE_MINOR = 76 };

static void add_size(void *cuda, int device, device_t *row) {
    int (*ask)(int *, int, int), (*memory)(size_t *, int);
    static const int attributes[] = {CLOCK_RATE, MULTIPROCESSORS, MEMORY_CLOCK, MEMORY_BUS, L2_CACHE,
                                     COMPUTE_MAJOR, COMPUTE_MINOR};
    int values[COMPUTE_MINOR + 1] = {0};
    size_t bytes = 0;
    *(void **)&ask = dlsym(cuda, "cuDeviceGetAttribute");
    *(void **)&memory = dlsym(cuda, "cuDeviceTotalMem_v2");
    for (size_t i = 0; ask && i < sizeof attributes / sizeof *attributes; i++)
        if (ask(&values[attributes[i]], attributes[i], device)) values[attributes[i]] = 0;
    if (memory && !memory(&bytes, device)) row->memory = bytes;
    row->clock = (uint64_t)values[CLOCK_RATE] * 1000;
    /* Two transfers a clock. */
    row->bandwidth = (uint64_t)values[MEMORY_CLOCK] * 1000 * 2 * (uint64_t)values[MEMORY_BUS] / 8;
    row->multiprocessors = (uint32_t)values[MULTIPROCESSORS];
    row->l2_cache = (uint32_t)values[L2_CACHE];
    row->compute_major = (uint32_t)values[COMPUTE_MAJOR];
    row->compute_minor = (uint32_t)values[COMPUTE_MINOR];
}

/* Writes the cards that the driver shows to this process; nothing where there is no driver. */
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
        add_size(cuda, device, &row);
        spool_lock();
        spool_chunk(TAG_DEVICE, &row, sizeof row, "", 0);
        spool_unlock();
    }
}

/* Writes the moment on three clocks, and the names of new threads. */
static void tell_clocks(void) {
    uint64_t now[3] = {clock_ns(CLOCK_REALTIME), clock_ns(CLOCK_MONOTONIC),
                       clock_ns(CLOCK_MONOTONIC_RAW)};
    spool_lock();
    spool_chunk(TAG_CLOCK, now, sizeof now, "", 0);
    spool_threads();
    spool_unlock();
}

/* ---- what the hooks call ---- */

/* Starts or ends a window: the hooks call it for --steps. */
EXPORTED void gputrace_capture(int on) {
    if (started_ok && !in_child) capture_want(on);
}

/* Begins a control stretch, which gputrace_capture(1) ends: the hooks call it. See capture_rest. */
EXPORTED int gputrace_rest(uint64_t hold, int stays) {
    return started_ok && !in_child ? capture_rest(hold, stays) : -1;
}

/* Records the nodes of CUDA graphs, or no longer: the hooks call it for --graph-nodes. See capture_nodes. */
EXPORTED int gputrace_nodes(int on) {
    return started_ok && !in_child ? capture_nodes(on) : -1;
}

/* Makes way for another user of CUPTI (torch.profiler), and comes back. */
EXPORTED void gputrace_pause(int pause) {
    if (started_ok && !in_child) capture_pause(pause);
}

/* Keeps CUPTI from a profiler that would crash the program; the hooks ask before one of XLA begins. See
 * capture_keeps. */
EXPORTED int gputrace_keeps(void) { return started_ok && !in_child ? capture_keeps() : -1; }

/* The hooks call it as a step ends. */
EXPORTED void gputrace_step(void) { sampling_step(); }

/* Puts the path of the libcupti that this process would take into FOUND, of PATH_MAX bytes, and returns why
 * that one; empty and NULL where there is none. For `gputrace doctor`. */
EXPORTED const char *gputrace_find_cupti(char *found) {
    const char *why;
    return find_cupti(found, &why) ? why : NULL;
}

static int tend(int flush) {
    pthread_mutex_lock(&tending);
    int status = capture_tend(flush);
    pthread_mutex_unlock(&tending);
    return status;
}

/* Returns when all that a window had is in the file: a notebook reads it after each cell. */
EXPORTED void gputrace_write(void) {
    if (!started_ok || in_child) return;
    capture_flush(FLUSH_FORCED);
    tend(0);
    tell_devices();
    tell_clocks();
}

/* ---- the files, in a recording of hours ---- */

static const char *directory;
static uint64_t segment_ns, next_segment, keep, max_bytes, bytes_before;

static void read_limits(void) {
    segment_ns = environment_number("GPUTRACE_SEGMENT_NS");
    next_segment = clock_ns(CLOCK_MONOTONIC) + segment_ns;
    keep = environment_number("GPUTRACE_SEGMENTS");
    max_bytes = environment_number("GPUTRACE_MAX_BYTES");
}

/* Begins a new file when it is time, with all that those before it told once. */
static void keep_segments(uint64_t now) {
    if (!segment_ns || now < next_segment) return;
    spool_lock();
    spool_rotate((uint32_t)keep);
    spool_unlock();
    capture_goes_on();
    tell_devices();
    tell_clocks();
    /* On its beat, so that looking each second does not add up. */
    next_segment += segment_ns;
    if (next_segment <= now) next_segment = now + segment_ns;
}

/* Whether a second like the last one would be too much. Until the next look each process may write its
 * part of what is left; where there are several, one part is for another that may begin meanwhile. */
static int is_too_large(void) {
    uint32_t writers;
    if (!max_bytes) return 0;
    uint64_t bytes = spool_folder_bytes(directory, &writers), before = bytes_before;
    uint64_t left = bytes < max_bytes ? max_bytes - bytes : 0;
    bytes_before = bytes;
    spool_lock();
    spool_allow(writers > 1 ? left / (writers + 1) : left);
    spool_unlock();
    return bytes + (bytes > before ? bytes - before : 0) >= max_bytes;
}

/* The program goes on without us. */
static void stop_at_limit(void) {
    capture_stop();
    tend(1);
    tend(0);
    spool_lock();
    spool_stop(STOP_SIZE);
    spool_unlock();
}

/* ---- the thread that writes ---- */

static void *write_until_stopped(void *unused) {
    uint64_t now = clock_ns(CLOCK_MONOTONIC), next = now + SECOND;
    int devices_told = 0;
    (void)unused;
    pthread_setname_np(pthread_self(), "gputrace");
    window_set();
    for (;;) {
        /* Of the moment at which all was taken over: how many calls there are is told by that. */
        uint64_t sample = capture_sample(now);
        uint64_t turn = window_keep(clock_ns(CLOCK_MONOTONIC));
        buffers_wait(least(least(turn, sample), next));
        if (stopping) return NULL;
        now = clock_ns(CLOCK_MONOTONIC);
        int second = now >= next;
        if (second) {
            next = clock_ns(CLOCK_MONOTONIC) + SECOND;
            if (!devices_told) tell_devices();
            devices_told = 1;
        }
        int status = tend(second || now >= sample);
        if (status && !spool_is_at_limit()) break;
        if (!second && !status) continue;
        tell_clocks();
        if (status || is_too_large()) {
            stop_at_limit();
            return NULL;
        }
        keep_segments(clock_ns(CLOCK_MONOTONIC));
    }
    capture_end();
    buffers_throw_away();
    return NULL;
}

static int start_writer(void) {
    sigset_t all, before;
    buffers_init();
    /* Signals are the program's: none may come to our thread. */
    sigfillset(&all);
    pthread_sigmask(SIG_BLOCK, &all, &before);
    writer_runs = !pthread_create(&writer, NULL, write_until_stopped, NULL);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return writer_runs ? 0 : -1;
}

static void at_exit(void) {
    if (!started_ok || in_child) return;
    capture_end();
    stopping = 1;
    buffers_wake();
    if (writer_runs) pthread_join(writer, NULL);
    capture_tend(0);
    tell_devices();
    tell_clocks();
    spool_lock();
    spool_info("ended", "exit");
    spool_close();
    spool_unlock();
    started_ok = 0;
}

static void before_fork(void) {
    capture_lock();
    buffers_lock();
    spool_lock();
}

static void after_fork(void) {
    spool_unlock();
    buffers_unlock();
    capture_unlock();
}

/* A forked child cannot use CUDA; it leaves the file to its parent. */
static void in_forked_child(void) {
    in_child = 1;
    started_ok = 0;
    pthread_mutex_init(&tending, NULL);
    spool_forget();
    nvtx_in_child();
    buffers_in_child();
    threads_in_child();
    capture_in_child();
}

/* ---- entry ---- */

static void tell_process(void) {
    static const char *const variables[] = {
        "RANK", "WORLD_SIZE", "LOCAL_RANK", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK", "PMI_RANK", "PMI_SIZE", "SLURM_PROCID", "SLURM_NTASKS",
        "SLURM_LOCALID", "PMIX_RANK", "PMI_LOCAL_RANK", "MPI_LOCALRANKID", "HOROVOD_RANK",
        "HOROVOD_SIZE", "CUDA_VISIBLE_DEVICES"};
    for (size_t i = 0; i < sizeof variables / sizeof *variables; i++)
        if (getenv(variables[i])) spool_info(variables[i], getenv(variables[i]));
    spool_info("program", program_invocation_short_name);
}

static int is_under_other_tool(void) {
    return getenv("NSYS_PROFILING_SESSION_ID") || getenv("QUADD_INJECTION_PROXY");
}

static void give_up(void) {
    spool_lock();
    spool_info("no_gpu_activity", "no thread could be started to write what it does");
    spool_info("ended", "without a thread");
    spool_close();
    spool_unlock();
}

static void start(void) {
    const char *capture = getenv("GPUTRACE_CAPTURE");
    int by_profiler = capture && !strcmp(capture, "profiler");
    int by_hand = capture && !strcmp(capture, "manual");
    directory = getenv("GPUTRACE_DIR");
    if (!directory || !*directory || is_under_other_tool() || spool_open(directory)) return;
    directory = strdup(directory); /* the program may change its environment */
    read_limits();
    is_too_large();
    pthread_atfork(before_fork, after_fork, in_forked_child);
    tell_process();
    tell_clocks();
    if (!by_profiler && !by_hand && !environment_number("GPUTRACE_DELAY_NS"))
        spool_info("capture_from", "start");
    capture_init(!by_profiler && !by_hand && !window_is_asked(), by_profiler,
                 getenv("GPUTRACE_HOLD_NS") ? environment_number("GPUTRACE_HOLD_NS") : HOLD);
    sampling_init();
    started_ok = !start_writer();
    if (started_ok) atexit(at_exit);
    else give_up();
}

/* Opens the spool and starts the writer, once a process; 0 where that went well. */
int collector_start(void) {
    pthread_once(&once, start);
    return started_ok ? 0 : -1;
}

/* Exit handlers run in reverse: a libcupti that we have loaded ends before those that were there
 * earlier, and we must be done with it by then. */
static void start_capture(void) {
    capture_start();
    atexit(at_exit);
}

/* Called by the CUDA driver in cuInit. What it returns does not matter to the program. */
EXPORTED int InitializeInjection(void) {
    static pthread_once_t once_cupti = PTHREAD_ONCE_INIT;
    if (!collector_start()) pthread_once(&once_cupti, start_capture);
    return 1;
}
