/* The collector: loaded by the CUDA driver into every process that starts CUDA, by way of
 * CUDA_INJECTION64_PATH, and by NVTX clients by way of NVTX_INJECTION64_PATH.
 *
 * CUPTI fills buffers and hands them over; a thread of ours decodes them and appends them to the
 * process's spool, when one is full and each second. Nothing here runs Python. CUDA calls of the program
 * do not wait for that thread; its NVTX calls and forks may, while some records are decoded or written.
 *
 * Environment: GPUTRACE_DIR, the folder of the spool; GPUTRACE_CAPTURE, when to record: all (the
 * default), profiler (from cudaProfilerStart to Stop), manual (gputrace_capture decides);
 * GPUTRACE_DELAY_NS and GPUTRACE_DURATION_NS, a window in the life of the process.
 */
#define _GNU_SOURCE
#include "buffers.h"
#include "capture.h"
#include "devices.h"
#include "spool.h"
#include "threads.h"

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

void nvtx_in_child(void);

static pthread_once_t once = PTHREAD_ONCE_INIT;
static pthread_t writer;
static int writer_runs, in_child;
static atomic_int started_ok, stopping;
/* Held by who takes over records: one that waits for it finds them written. */
static pthread_mutex_t tending = PTHREAD_MUTEX_INITIALIZER;

/* Starts or ends a window: the hooks call it for --steps. */
EXPORTED void gputrace_capture(int on) {
    if (started_ok && !in_child) capture_want(on);
}

/* Makes way for another user of CUPTI (torch.profiler), and comes back. */
EXPORTED void gputrace_pause(int pause) {
    if (started_ok && !in_child) capture_pause(pause);
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
    tend(0);
    tell_devices();
    tell_clocks();
}

/* ---- the window in the life of the process ---- */

static struct { uint64_t begin, end; int phase; } window = {UINT64_MAX, UINT64_MAX, 0};

static uint64_t environment_ns(const char *name) {
    const char *value = getenv(name);
    return value ? strtoull(value, NULL, 10) : 0;
}

static int has_window(void) { return getenv("GPUTRACE_DELAY_NS") || getenv("GPUTRACE_DURATION_NS"); }

static void set_window(void) {
    uint64_t duration = environment_ns("GPUTRACE_DURATION_NS");
    if (!has_window()) return;
    window.begin = clock_ns(CLOCK_MONOTONIC) + environment_ns("GPUTRACE_DELAY_NS");
    if (duration) window.end = window.begin + duration;
}

/* Begins or ends the window when it is time; gives back when to look again. */
static uint64_t keep_window(uint64_t now) {
    if (window.phase == 0 && now >= window.begin) { capture_want(1); window.phase = 1; }
    if (window.phase == 1 && now >= window.end) { capture_want(0); window.phase = 2; }
    return window.phase == 0 ? window.begin : window.phase == 1 ? window.end : UINT64_MAX;
}

/* ---- the thread that writes ---- */

static void *write_until_stopped(void *unused) {
    uint64_t next = clock_ns(CLOCK_MONOTONIC) + SECOND;
    int devices_told = 0;
    (void)unused;
    pthread_setname_np(pthread_self(), "gputrace");
    set_window();
    for (;;) {
        uint64_t turn = keep_window(clock_ns(CLOCK_MONOTONIC));
        buffers_wait(turn < next ? turn : next);
        if (stopping) return NULL;
        int second = clock_ns(CLOCK_MONOTONIC) >= next;
        if (second) {
            next = clock_ns(CLOCK_MONOTONIC) + SECOND;
            if (!devices_told) tell_devices();
            devices_told = 1;
            tell_clocks();
        }
        if (!tend(second)) continue;
        capture_end();
        buffers_throw_away();
        return NULL;
    }
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

static void start(void) {
    const char *directory = getenv("GPUTRACE_DIR"), *capture = getenv("GPUTRACE_CAPTURE");
    int by_profiler = capture && !strcmp(capture, "profiler");
    int by_hand = capture && !strcmp(capture, "manual");
    if (!directory || !*directory || is_under_other_tool() || spool_open(directory)) return;
    pthread_atfork(before_fork, after_fork, in_forked_child);
    tell_process();
    tell_clocks();
    capture_init(!by_profiler && !by_hand && !has_window(), by_profiler);
    started_ok = !start_writer();
    atexit(at_exit);
}

/* Opens the spool and starts the writer, once a process; 0 where that went well. */
int collector_start(void) {
    pthread_once(&once, start);
    return started_ok ? 0 : -1;
}

/* Called by the CUDA driver in cuInit. What it returns does not matter to the program. */
EXPORTED int InitializeInjection(void) {
    static pthread_once_t once_cupti = PTHREAD_ONCE_INIT;
    if (!collector_start()) pthread_once(&once_cupti, capture_start);
    return 1;
}
