#define _GNU_SOURCE
#include "collector.h"
#include "buffers.h"
#include "capture.h"
#include "devices.h"
#include "nvtx.h"
#include "call_sampling.h"
#include "spool.h"
#include "system.h"
#include "threads.h"
#include "window.h"
#include "writer.h"

#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#define USUAL_HOLD (10ull * SECOND)

/* Read by any thread of the program; written by the one that starts, ends or forks it. */
static atomic_int is_running;

int collector_is_running(void) { return is_running; }

static void at_exit(void) {
    if (!is_running) return;
    capture_end();
    writer_stop();
    devices_write();
    writer_write_clocks();
    spool_lock();
    spool_write_info("ended", "exit");
    spool_close();
    spool_unlock();
    is_running = 0;
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
    is_running = 0;
    spool_abandon();
    writer_reset_in_child();
    nvtx_reset_in_child();
    buffers_reset_in_child();
    threads_reset_in_child();
    capture_reset_in_child();
}

static void write_process(void) {
    static const char *const variables[] = {
        "RANK", "WORLD_SIZE", "LOCAL_RANK", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK", "PMI_RANK", "PMI_SIZE", "SLURM_PROCID", "SLURM_NTASKS",
        "SLURM_LOCALID", "PMIX_RANK", "PMI_LOCAL_RANK", "MPI_LOCALRANKID", "HOROVOD_RANK",
        "HOROVOD_SIZE", "CUDA_VISIBLE_DEVICES", "TORCHELASTIC_RESTART_COUNT"};
    for (size_t i = 0; i < sizeof variables / sizeof *variables; i++)
        if (getenv(variables[i])) spool_write_info(variables[i], getenv(variables[i]));
    spool_write_info("program", program_invocation_short_name);
}

static int is_under_other_tool(void) {
    return getenv("NSYS_PROFILING_SESSION_ID") || getenv("QUADD_INJECTION_PROXY");
}

static void give_up(void) {
    spool_lock();
    spool_write_info("no_gpu_activity", "no thread could be started to write what it does");
    spool_write_info("ended", "without a thread");
    spool_close();
    spool_unlock();
}

static void start(void) {
    const char *capture = getenv("GPUTRACE_CAPTURE"), *directory = getenv("GPUTRACE_DIR");
    int by_profiler = capture && !strcmp(capture, "profiler");
    int is_late = capture && !strcmp(capture, "late"), by_hand = is_late || (capture && !strcmp(capture, "manual"));
    if (!directory || !*directory || is_under_other_tool() || spool_open(directory)) return;
    writer_init(strdup(directory)); /* the program may change its environment */
    pthread_atfork(before_fork, after_fork, in_forked_child);
    write_process();
    writer_write_clocks();
    int from_later = by_profiler || by_hand || environment_number("GPUTRACE_DELAY_NS");
    if (!from_later) spool_write_info("capture_from", "start");
    capture_init(!from_later && !window_is_requested(), from_later, is_late, by_profiler,
                 getenv("GPUTRACE_HOLD_NS") ? environment_number("GPUTRACE_HOLD_NS") : USUAL_HOLD);
    sampling_init();
    is_running = !writer_start();
    if (is_running) atexit(at_exit);
    else give_up();
}

int collector_start(void) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, start);
    return is_running ? 0 : -1;
}

/* Exit handlers run in reverse: a libcupti that we have loaded ends before ones that were there earlier, and we
 * have to be done with it by then. */
static void start_capture(void) {
    capture_start();
    atexit(at_exit);
}

static void start_capture_once(void) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, start_capture);
}

/* A window may open while another thread is in cuInit: each sets its own flag before it looks at the other's, so
 * at least one of them sees both. */
static atomic_int has_cuda;

void collector_enter_cuda(void) {
    has_cuda = 1;
    if (!capture_is_late() || capture_is_on()) start_capture_once();
}

void collector_start_capture_if_due(void) {
    if (has_cuda && capture_is_on()) start_capture_once();
}
