#define _GNU_SOURCE
#include "capture.h"
#include "buffers.h"
#include "calls.h"
#include "cupti.h"
#include "decode.h"
#include "graph_nodes.h"
#include "graphs.h"
#include "hazards.h"
#include "call_sampling.h"
#include "spool.h"
#include "subscriber.h"
#include "system.h"
#include "threads.h"

#include <dlfcn.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

/* Without KIND_SYNCHRONIZATION: that one alone doubles what recording costs (measured on an H200), and
 * the synchronising calls are recorded as calls. */
static const int gpu_kinds[] = {KIND_CONCURRENT_KERNEL, KIND_MEMCPY, KIND_MEMSET,
                                KIND_MEMCPY2, KIND_OVERHEAD, KIND_GRAPH_TRACE};
/* Every CUPTI has the first three; older ones lack some of the others. */
enum { KINDS = sizeof gpu_kinds / sizeof *gpu_kinds, NEEDED_KINDS = 3 };

/* After a window with which CUPTI leaves early: in how many nanoseconds to look what it hands over. */
enum { FIRST_LOOK = 100000 };

static struct capture capture = {.lock = PTHREAD_MUTEX_INITIALIZER, .keeps_calls = 1};

/* ---- transitions ---- */

/* Takes a step of the table in capture.h. A build with GPUTRACE_STRICT, as tests have it, ends where a step is
 * not in it; a user's program never does. */
static void move_to(enum capture_state next) {
    static const uint8_t allowed[] = {
        [OFF] = 1 << ARMED,
        [ARMED] = 1 << RECORDING,
        [RECORDING] = 1 << HOLDING,
        [HOLDING] = 1 << RECORDING | 1 << LEAVING | 1 << ARMED,
        [LEAVING] = 1 << LEFT | 1 << ARMED,
        [LEFT] = 1 << ARMED,
    };
#ifdef GPUTRACE_STRICT
    if (!(allowed[capture.state] >> next & 1)) {
        dprintf(2, "gputrace: transition from state %d to %d\n", (int)capture.state, (int)next);
        abort();
    }
#endif
    (void)allowed;
    capture.state = next;
}

static void note_moment(const char *key, uint64_t moment) {
    spool_lock();
    spool_write_moment(key, moment);
    spool_unlock();
}

static void note_now(const char *key) { note_moment(key, clock_ns(CLOCK_REALTIME)); }

/* From LEAVING back to ARMED. */
static void stay(void) {
    if (capture.state != LEAVING) return;
    subscriber_watch_all_calls(0);
    subscriber_release(capture.paused);
    move_to(ARMED);
}

/* From LEFT to ARMED. */
static void note_left(void) {
    if (capture.state != LEFT) return;
    note_now("let_go");
    if (!capture.ended) subscriber_take_if_needed(0);
    move_to(ARMED);
}

/* cuptiFinalize takes CUPTI's instrumentation out of the program, which disabling all kinds does not. It has
 * to be called where a CUDA call returns (CUPTI documentation, 'Dynamic attach and detach'). It takes 2 ms, and longer
 * while the GPU is at work (H200, CUPTI 13.0), so the writer makes that call: see let_go. */
static void on_call_end(void) {
    if (capture.state != LEAVING || pthread_mutex_trylock(&capture.lock)) return;
    if (capture.state == LEAVING) {
        cupti.finalize();
        buffers_restart_numbering();
        subscriber_forget();
        calls_reset();
        capture.has_clock = 0;
        move_to(LEFT);
        buffers_wake();
    }
    pthread_mutex_unlock(&capture.lock);
}

/* ---- what a window takes ---- */

/* At the end of the process CUDA may be gone, with all records handed over: a failure then may not have cost
 * any. */
static void flush_cupti(uint32_t force) {
    static atomic_int has_worked;
    int code = cupti.flush(force);
    if (!code) has_worked = 1;
    else if (!capture.ended || !has_worked) cupti_check(code, "cuptiActivityFlushAll");
    else {
        spool_lock();
        spool_write_info("last_flush", "the last cuptiActivityFlushAll failed: GPU activity may be missing");
        spool_unlock();
    }
}

/* Between the moments noted for on and off, all calls that begin and end there are kept. */
static void note_calls_kept(int on) {
    spool_lock();
    uint64_t now = clock_ns(CLOCK_REALTIME);
    if (on != capture.keeps_calls) spool_write_moment(on ? "calls_on" : "calls_off", now);
    sampling_note_switch(on, now);
    spool_unlock();
    capture.keeps_calls = on;
}

/* From a moment on calls belong to no window, though CUPTI may go on recording them. */
static void leave_out_calls(uint64_t from) {
    spool_lock();
    sampling_note_switch(0, from);
    spool_unlock();
}

/* Sets what cuptiFinalize takes with it, and another profiler may have set for itself. Without buffers CUPTI must
 * not be asked for any record. The clock is registered once until then, and not for each window: after each
 * registration CUPTI takes the times of one kernel more from its default clock (pytorch/pytorch issue 192021).
 * That is the same as ours, so no time should be wrong even then. */
static int register_with_cupti(void) {
    if (buffers_register()) return -1;
    if (!capture.has_clock)
        capture.has_clock = cupti.register_timestamp && !cupti.register_timestamp(threads_timestamp);
    threads_by_self = capture.has_clock;
    if (cupti.thread_id_type) cupti.thread_id_type(threads_by_self ? THREAD_ID_SELF : THREAD_ID_SYSTEM);
    return 0;
}

/* A graph that was instantiated while GRAPH_TRACE was off, and is replayed while it is on, crashes the program: a
 * step of PyTorch as one graph, and JAX with its defaults, each in 2 of 2 programs, of which one had CUPTI record
 * for a moment before its graphs were made. Without GRAPH_TRACE, CUPTI records the nodes of such graphs: 3 windows
 * of the former and 6 of the latter, in 2 programs each, with all kernels (H200, driver 580). So GRAPH_TRACE is
 * on from the start of CUDA, and is turned on again only in programs whose graphs were seen until then. */
static void begin_window(void) {
    note_left();
    stay();
    capture.hold_ns = capture.usual_hold_ns;
    capture.stays_idle = capture.leaves_early = 0;
    if (capture.was_off && !decode_has_seen_graphs()) capture.leaves_out_replays = 1;
    if (register_with_cupti()) return;
    subscriber_take_if_needed(1);
    for (size_t i = 0; i < KINDS; i++) {
        if (gpu_kinds[i] == KIND_MEMCPY2 && capture.hazards & HAZARD_PEER_COPIES) continue;
        if (gpu_kinds[i] == KIND_GRAPH_TRACE && capture.leaves_out_replays) continue;
        int code = cupti.enable(gpu_kinds[i]);
        if (i < NEEDED_KINDS) cupti_check(code, "cuptiActivityEnable");
    }
    int with_calls = sampling_begin_window(clock_ns(CLOCK_MONOTONIC));
    if (with_calls) calls_record(1);
    move_to(RECORDING);
    note_calls_kept(with_calls);
    note_now("capture_on");
    buffers_wake(); /* the writer is to call capture_update_sampling */
}

/* The window ends before anything is turned off: otherwise a call that another thread makes meanwhile, which
 * may take as long as the flush, would lack its kernel. The flush is not forced: work that is still running on
 * the GPU would be handed over without its times. Where CUPTI leaves early, the writer does that at once. */
static void end_window(void) {
    uint64_t moment = clock_ns(CLOCK_REALTIME);
    leave_out_calls(moment);
    if (capture.records_nodes) note_moment("nodes_off", moment);
    capture.records_nodes = 0;
    capture.was_off = 1;
    int code = 0;
    for (size_t i = 0; i < KINDS; i++) {
        int own = cupti.disable(gpu_kinds[i]);
        if (i < NEEDED_KINDS && own) code = own;
    }
    if (!capture.leaves_early) flush_cupti(0);
    /* A choice of single calls lasts once some were recorded so; until then it is kept, and
     * leave_when_due undoes it. */
    int is_on = !calls_are_by_id() || buffers_had_records() ? calls_record(0) : 0;
    /* It may go on recording, and what it does not hand over is lost where it is let go of. */
    if (!capture.ended && cupti_check(code ? code : is_on, "cuptiActivityDisable"))
        capture.hazards |= HAZARD_LETTING_GO;
    capture.holding_since = clock_ns(CLOCK_MONOTONIC);
    move_to(HOLDING);
    note_moment("capture_off", moment);
}

/* Brings the state in line with the requests; with the lock held. */
static void settle(void) {
    int on = capture.wanted && !capture.paused && !capture.ended;
    sigset_t before;
    if (capture.state == OFF || on == (capture.state == RECORDING)) return;
    block_signals(&before, ALLOW_FAULTS);
    if (on) begin_window();
    else end_window();
    restore_signals(&before);
}

/* ---- requests ---- */

int capture_is_late(void) { return capture.is_late; }

int capture_is_on(void) {
    return capture.state == RECORDING || (capture.state == OFF && capture.wanted && !capture.paused);
}

void capture_set_window(int on) {
    pthread_mutex_lock(&capture.lock);
    capture.wanted = on && !capture.is_full;
    settle();
    pthread_mutex_unlock(&capture.lock);
}

/* Not where there are graphs, see hazards.c. */
static int may_let_go(void) {
    return cupti.finalize && !(capture.hazards & HAZARD_LETTING_GO) && !decode_has_seen_graphs();
}

int capture_begin_stretch(uint64_t hold_ns, int stays_idle) {
    int status = -1;
    pthread_mutex_lock(&capture.lock);
    if (capture.state == RECORDING && may_let_go()) {
        capture.wanted = 0;
        capture.leaves_early = !stays_idle;
        settle();
        capture.hold_ns = hold_ns;
        capture.stays_idle = stays_idle;
        status = 0;
    }
    pthread_mutex_unlock(&capture.lock);
    buffers_wake(); /* the writer is to call capture_update_sampling */
    return status;
}

/* CUPTI has a record of each replay while GRAPH_TRACE is on, else one of each node (its documentation,
 * 'CUDA Graphs'). The former come only of graphs that were instantiated while it was on: so it is turned off
 * for some steps, later, and never from the start. */
int capture_record_nodes(int on) {
    sigset_t before;
    int status = -1;
    pthread_mutex_lock(&capture.lock);
    if (capture.state == RECORDING && on != capture.records_nodes &&
        (!on || decode_has_graphs_without_nodes())) {
        block_signals(&before, ALLOW_FAULTS);
        if (on) note_now("nodes_on");
        if (on) cupti_check(cupti.disable(KIND_GRAPH_TRACE), "cuptiActivityDisable");
        else cupti_check(cupti.enable(KIND_GRAPH_TRACE), "cuptiActivityEnable");
        if (!on) note_now("nodes_off");
        capture.records_nodes = on;
        restore_signals(&before);
        status = 0;
    }
    pthread_mutex_unlock(&capture.lock);
    return status;
}

/* Whether CUPTI may have records of ours. */
static int may_have_records(void) {
    return capture.state == RECORDING || capture.state == HOLDING || calls_are_recorded_singly();
}

void capture_pause(int pause) {
    pthread_mutex_lock(&capture.lock);
    int is_ready = capture.state != OFF, begins = is_ready && pause && !capture.paused;
    capture.paused = pause;
    if (pause) capture.has_made_way = 1;
    if (pause) note_left();
    if (pause) stay();
    if (is_ready && !pause) {
        buffers_restart_numbering();
        subscriber_take_if_needed(0);
    }
    settle();
    /* The other profiler would be handed what is left of ours, and may reset CUPTI. */
    if (begins && may_have_records()) flush_cupti(FLUSH_FORCED);
    if (begins) note_now("paused");
    if (is_ready && pause) {
        if (calls_are_recorded_singly()) calls_record(0);
        calls_reset();
        subscriber_release(1);
        capture.has_clock = 0;
    }
    pthread_mutex_unlock(&capture.lock);
    if (!pause) return;
    spool_lock();
    spool_write_loss(0, "recording paused for another profiler in the program");
    spool_unlock();
}

int capture_keep_cupti(void) {
    pthread_mutex_lock(&capture.lock);
    int is_in_use = capture.state == RECORDING || (capture.state != OFF && buffers_had_records());
    int has_graphs = !(capture.hazards & HAZARD_GRAPHS_AT_ONCE) || graphs_were_made();
    int is_needed = is_in_use && capture.hazards & HAZARD_LETTING_GO && has_graphs;
    int status = is_needed ? subscriber_take() : -1;
    pthread_mutex_unlock(&capture.lock);
    return status;
}

void capture_stop_for_good(void) {
    pthread_mutex_lock(&capture.lock);
    capture.wanted = 0;
    capture.is_full = 1;
    settle();
    capture.hold_ns = 0;
    pthread_mutex_unlock(&capture.lock);
}

/* CUDA may be gone: in LEAVING, calls are watched on. */
void capture_end(void) {
    pthread_mutex_lock(&capture.lock);
    if (capture.state == LEAVING) move_to(ARMED);
    capture.ended = 1;
    settle();
    capture_flush(FLUSH_FORCED);
    pthread_mutex_unlock(&capture.lock);
}

/* ---- what the writer does, time and again ---- */

void capture_flush(uint32_t force) {
    if (may_have_records() && !capture.paused) flush_cupti(force);
}

/* After a window: turns off calls that were chosen only so that the choice would last, and lets go of CUPTI. */
static void leave_when_due(void) {
    if (capture.state == OFF || capture.state == RECORDING || capture.paused || capture.ended) return;
    if (calls_are_recorded_singly() && buffers_had_records()) calls_record(0);
    if (capture.state != HOLDING || calls_are_recorded_singly()) return;
    int is_over = clock_ns(CLOCK_MONOTONIC) - capture.holding_since >= capture.hold_ns;
    if (!is_over && !(capture.leaves_early && buffers_are_back())) return;
    flush_cupti(FLUSH_FORCED);
    buffers_decode();
    if (capture.stays_idle) note_now("idle");
    int leaves = !capture.stays_idle && may_let_go();
    if (leaves && subscriber_watch_own_call()) leaves = !subscriber_watch_all_calls(1);
    move_to(leaves ? LEAVING : ARMED);
}

/* In LEAVING: makes a call, at the end of which CUPTI is let go of. No thread of the program waits for that, but for
 * what the driver locks meanwhile. Where CUPTI does not tell of that call, the next one of the program has to do. */
static void let_go(void) {
    void *cuda = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
    int (*get_version)(int *) = NULL, version;
    if (cuda) *(void **)&get_version = dlsym(cuda, "cuDriverGetVersion");
    if (get_version) get_version(&version);
    pthread_mutex_lock(&capture.lock);
    note_left();
    if (capture.state == LEAVING) subscriber_watch_all_calls(1);
    pthread_mutex_unlock(&capture.lock);
}

int capture_take_records(int flush) {
    if (flush) capture_flush(0);
    graph_nodes_write();
    int status = buffers_decode();
    pthread_mutex_lock(&capture.lock);
    note_left();
    leave_when_due();
    int leaves = capture.state == LEAVING;
    pthread_mutex_unlock(&capture.lock);
    if (leaves) let_go();
    return status;
}

uint64_t capture_update_sampling(uint64_t now) {
    uint64_t look = UINT64_MAX;
    pthread_mutex_lock(&capture.lock);
    uint64_t since = capture.holding_since, hold_ends = since + capture.hold_ns;
    if (capture.state == RECORDING) {
        int on = sampling_update(now, &look);
        if (on != capture.keeps_calls) note_calls_kept(on);
    } else if (capture.state == HOLDING) {
        if (hold_ends > now) look = hold_ends;
        if (capture.leaves_early) look = earlier(look, now + FIRST_LOOK + (now > since ? now - since : 0) / 4);
    }
    pthread_mutex_unlock(&capture.lock);
    return look;
}

void capture_note_state(void) {
    pthread_mutex_lock(&capture.lock);
    int on = capture.keeps_calls;
    capture.keeps_calls = 1; /* what a file says that says nothing */
    if (capture.state == RECORDING) {
        note_calls_kept(on);
        note_now("capture_on");
        if (capture.records_nodes) note_now("nodes_on");
    }
    pthread_mutex_unlock(&capture.lock);
}

/* ---- the process ---- */

void capture_lock(void) { pthread_mutex_lock(&capture.lock); }
void capture_unlock(void) { pthread_mutex_unlock(&capture.lock); }

void capture_reset_in_child(void) {
    capture.state = OFF;
    capture.wanted = 0;
    pthread_mutex_init(&capture.lock, NULL);
}

void capture_init(int from_start, int from_later, int is_late, int by_profiler, uint64_t hold_ns) {
    static const struct subscriber_handlers handlers = {capture_set_window, on_call_end};
    capture.wanted = from_start;
    capture.was_off = from_later;
    capture.is_late = is_late;
    capture.usual_hold_ns = capture.hold_ns = hold_ns;
    subscriber_init(by_profiler, &handlers);
}

static void note_no_activity(const char *why) {
    spool_lock();
    spool_write_info("no_gpu_activity", why);
    spool_flush();
    spool_unlock();
}

/* GPUs from Blackwell on take the times of kernels themselves, which CUPTI reads in place of its own
 * semaphores where it is asked to before there is a context (its documentation, 'Hardware Event System').
 * That cannot be undone, so CUPTI is not let go of. Before 13.4 Update 1 it crashed in cudaGraphInstantiate
 * and leaked a hundred bytes a kernel, by its release notes. Not tried on such a GPU. */
enum { HW_TRACE_SINCE = 130401 };

static void use_hardware_events(void) {
    const char *asked = getenv("GPUTRACE_HW_TRACE");
    if (!asked || !*asked) return;
    int is_there = cupti.enable_hw_trace && capture.version >= HW_TRACE_SINCE;
    if (is_there && !cupti_check(cupti.enable_hw_trace(1), "cuptiActivityEnableHWTrace"))
        capture.hazards |= HAZARD_LETTING_GO;
    spool_lock();
    if (!is_there) spool_write_loss(0, "no hardware event tracing, which takes CUPTI 13.4 Update 1");
    else if (capture.hazards & HAZARD_LETTING_GO) spool_write_info("hw_trace", "on");
    spool_unlock();
}

static void examine_cupti(const char *path, const char *why) {
    char text[16];
    cupti.version(&capture.version);
    snprintf(text, sizeof text, "%u", capture.version);
    spool_lock();
    spool_write_info("cupti", path);
    spool_write_info("cupti_why", why);
    spool_write_info("cupti_version", text);
    calls_find_names();
    capture.hazards = hazards_find(capture.version);
    if (capture.hazards & HAZARD_PEER_COPIES)
        spool_write_info("left_out",
                         "copies between GPUs: this CUPTI crashes XLA programs when it records them");
    spool_unlock();
    int with_xla = capture.hazards & HAZARD_GRAPHS_AT_ONCE;
    subscriber_find_calls(with_xla, !with_xla && environment_number("GPUTRACE_GRAPH_NODES"));
}

static void arm(void) {
    pthread_mutex_lock(&capture.lock);
    use_hardware_events();
    subscriber_release(0);
    move_to(ARMED);
    if (!capture.paused && !capture.is_late) calls_enable_by_id();
    int waits = calls_are_by_id() && !capture.wanted;
    if (waits && sampling_begin_window(clock_ns(CLOCK_MONOTONIC)) && !register_with_cupti()) {
        calls_record(1);
        leave_out_calls(0);
    }
    settle();
    pthread_mutex_unlock(&capture.lock);
}

void capture_start(void) {
    char path[PATH_MAX] = "";
    const char *why;
    sigset_t before;
    block_signals(&before, ALLOW_FAULTS); /* CUPTI starts threads */
    void *library = find_cupti(path, &why);
    if (!library) note_no_activity("no libcupti was found");
    else if (cupti_load(library)) note_no_activity("libcupti lacks functions");
    else {
        examine_cupti(path, why);
        if (subscriber_take() && !capture.has_made_way)
            note_no_activity("another tool in the process holds CUPTI");
        else arm();
    }
    restore_signals(&before);
}
