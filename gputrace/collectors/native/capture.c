#define _GNU_SOURCE
#include "capture.h"
#include "buffers.h"
#include "calls.h"
#include "cupti.h"
#include "graphs.h"
#include "hazards.h"
#include "sampling.h"
#include "spool.h"
#include "subscriber.h"
#include "threads.h"

#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

/* Without KIND_SYNCHRONIZATION: that one alone doubles what recording costs (measured on an H200), and
 * the synchronising calls are recorded as calls. */
static const int gpu_kinds[] = {KIND_CONCURRENT_KERNEL, KIND_MEMCPY, KIND_MEMSET,
                                KIND_MEMCPY2, KIND_OVERHEAD, KIND_GRAPH_TRACE};
/* Of these: all of CUPTI have the first, and older ones lack some of the others. */
enum { NEEDED = 3 };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static int over;
static atomic_int wanted, paused, ready, recording;
/* Whether calls are kept while the rest is recorded, as the file says: without a word, yes. */
static int with_calls = 1;
/* The nodes of CUDA graphs are recorded, each by itself. */
static int by_node;
/* CUPTI is to be let go of, and was. */
static atomic_int leaving, left;
static int had_window, stopped, stays;
static int hazards;
static uint32_t cupti_version;
/* CUPTI is held for so long after each window: what the GPU is still at then comes with its times, and for
 * a window that follows no calls need be chosen anew, which costs more. Then it is let go of, since even
 * an idle CUPTI costs something. In a few control stretches it stays: idle it costs a step too little to
 * be seen in them, and each time that it comes back the dearer way to choose calls costs a third of one
 * (ResNet-18 and GPT-2 on an H100, CUPTI 13.0). */
static uint64_t hold, hold_now, off_since;

void capture_init(int from_start, int profiler, uint64_t hold_ns) {
    wanted = from_start;
    subscriber_init(profiler);
    hold = hold_now = hold_ns;
}

int capture_is_on(void) { return recording || (wanted && !paused && !ready); }

/* At the end of the process CUDA may be gone, with all records handed over: a failure then is not known to
 * have cost any. */
static void flush_all(uint32_t force) {
    static atomic_int worked;
    int code = cupti.flush(force);
    if (!code) worked = 1;
    else if (!over || !worked) cupti_check(code, "cuptiActivityFlushAll");
    else {
        spool_lock();
        spool_info("last_flush", "the last cuptiActivityFlushAll failed: GPU activity may be missing");
        spool_unlock();
    }
}

static void tell_moment(const char *key, uint64_t moment) {
    spool_lock();
    spool_moment(key, moment);
    spool_unlock();
}

static void tell_now(const char *key) { tell_moment(key, clock_ns(CLOCK_REALTIME)); }

/* Between the two moments all calls are kept that begin and end there. */
static void keep_calls(int on) {
    spool_lock();
    uint64_t now = clock_ns(CLOCK_REALTIME);
    if (on != with_calls) spool_moment(on ? "calls_on" : "calls_off", now);
    sampling_turn(on, now);
    spool_unlock();
    with_calls = on;
}

/* Those that are recorded to make the choice last, and belong to no window. */
static void leave_out_calls(uint64_t from) {
    spool_lock();
    sampling_turn(0, from);
    spool_unlock();
}

/* cuptiFinalize takes CUPTI's instrumentation out of the program, which disabling all kinds does not;
 * it is to be called where a CUDA call of the program returns (CUPTI documentation, 'Dynamic attach and
 * detach'). So every call is watched until the next one does. */
static void leave(int begin) {
    if (begin == leaving || subscriber_watch_all(begin)) return;
    leaving = begin;
    if (!begin) subscriber_release(paused);
}

void capture_call_ends(void) {
    if (!leaving || pthread_mutex_trylock(&lock)) return;
    if (leaving) {
        leaving = 0;
        cupti.finalize();
        buffers_number_anew();
        subscriber_forget();
        calls_forget();
        left = 1;
        buffers_wake();
    }
    pthread_mutex_unlock(&lock);
}

/* What CUPTI forgets when it is let go of, and another profiler may have set. Without a place for its
 * records CUPTI must not be asked for any. */
static int set_up(void) {
    if (buffers_register()) return -1;
    threads_by_self = cupti.register_timestamp && !cupti.register_timestamp(threads_stamp);
    if (cupti.thread_id_type) cupti.thread_id_type(threads_by_self ? THREAD_ID_SELF : THREAD_ID_SYSTEM);
    return 0;
}

/* CUPTI has a record of each replay while GRAPH_TRACE is on, else one of each node (its documentation,
 * 'CUDA Graphs'). The former come only of graphs that were instantiated while it was on: so it is off for
 * some steps, later, and never from the start. */
static void set_by_node(int on) {
    if (on) tell_now("nodes_on");
    if (on) cupti_check(cupti.disable(KIND_GRAPH_TRACE), "cuptiActivityDisable");
    else cupti_check(cupti.enable(KIND_GRAPH_TRACE), "cuptiActivityEnable");
    if (!on) tell_now("nodes_off");
    by_node = on;
}

static void turn_on(void) {
    leave(0);
    hold_now = hold;
    stays = 0;
    if (set_up()) return;
    subscriber_take_if_needed(1);
    for (size_t i = 0; i < sizeof gpu_kinds / sizeof *gpu_kinds; i++) {
        if (gpu_kinds[i] == KIND_MEMCPY2 && hazards & HAZARD_PEER_COPIES) continue;
        int code = cupti.enable(gpu_kinds[i]);
        if (i < NEEDED) cupti_check(code, "cuptiActivityEnable");
    }
    int of_calls = sampling_begin(clock_ns(CLOCK_MONOTONIC));
    if (of_calls) calls_choose(1);
    recording = had_window = 1;
    keep_calls(of_calls);
    tell_now("capture_on");
    buffers_wake(); /* to look when it is time for `capture_sample` */
}

/* The window ends before anything is turned off: of a call that another thread makes meanwhile, which may
 * take as long as the flush, the kernel would be missing. What the GPU is still at comes when it is done: a
 * forced flush would hand it over without its times. */
static void turn_off(void) {
    uint64_t moment = clock_ns(CLOCK_REALTIME);
    leave_out_calls(moment);
    if (by_node) tell_moment("nodes_off", moment);
    by_node = 0;
    for (size_t i = 0; i < sizeof gpu_kinds / sizeof *gpu_kinds; i++) cupti.disable(gpu_kinds[i]);
    flush_all(0);
    /* Before calls were recorded, what is chosen must stay so, or could not be turned on again: then
     * let_go does it. */
    if (!calls_do_last() || buffers_seen()) calls_choose(0);
    recording = 0;
    off_since = clock_ns(CLOCK_MONOTONIC);
    tell_moment("capture_off", moment);
}

/* Signals are the program's: none may come to a thread that CUPTI starts for us. Those that a fault of
 * the thread itself causes are left. */
static void hold_signals(sigset_t *before) {
    static const int faults[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGSYS};
    sigset_t held;
    sigfillset(&held);
    for (size_t i = 0; i < sizeof faults / sizeof *faults; i++) sigdelset(&held, faults[i]);
    pthread_sigmask(SIG_BLOCK, &held, before);
}

/* Brings recording in line with what is wanted; called with the lock held. */
static void settle(void) {
    int on = wanted && !paused && !over;
    sigset_t before;
    if (!ready || on == recording) return;
    hold_signals(&before);
    if (on) turn_on();
    else turn_off();
    pthread_sigmask(SIG_SETMASK, &before, NULL);
}

void capture_want(int on) {
    pthread_mutex_lock(&lock);
    wanted = on && !stopped;
    settle();
    pthread_mutex_unlock(&lock);
}

/* Not where there are graphs, see hazards.c. */
static int may_let_go(void) {
    return cupti.finalize && !(hazards & HAZARD_LETTING_GO) && !decode_has_seen_graphs();
}

int capture_rest(uint64_t hold_ns, int is_to_stay) {
    int status = -1;
    pthread_mutex_lock(&lock);
    if (recording && may_let_go()) {
        wanted = 0;
        hold_now = hold_ns;
        settle();
        stays = is_to_stay;
        status = 0;
    }
    pthread_mutex_unlock(&lock);
    buffers_wake(); /* to look when the time to hold CUPTI is over */
    return status;
}

int capture_nodes(int on) {
    sigset_t before;
    int status = -1;
    pthread_mutex_lock(&lock);
    if (recording && on != by_node && (!on || decode_has_unknown_graphs())) {
        hold_signals(&before);
        set_by_node(on);
        pthread_sigmask(SIG_SETMASK, &before, NULL);
        status = 0;
    }
    pthread_mutex_unlock(&lock);
    return status;
}

/* Whether CUPTI may have records of ours. */
static int has_some(void) { return !leaving && (recording || calls_are_chosen() || had_window); }

void capture_pause(int pause) {
    pthread_mutex_lock(&lock);
    int begins = ready && pause && !paused;
    paused = pause;
    if (ready && pause) leave(0);
    if (ready && !pause) buffers_number_anew();
    settle();
    /* The other one would be handed what is left of ours, and may reset CUPTI. */
    if (begins && has_some()) flush_all(FLUSH_FORCED);
    if (begins) tell_now("paused");
    if (ready && pause) {
        if (calls_are_chosen()) calls_choose(0);
        calls_forget();
        subscriber_release(1);
    }
    pthread_mutex_unlock(&lock);
    if (!pause) return;
    spool_lock();
    spool_loss(0, "recording paused for another profiler in the program");
    spool_unlock();
}

int capture_keeps(void) {
    pthread_mutex_lock(&lock);
    int is_needed = ready && (recording || buffers_seen()) && hazards & HAZARD_LETTING_GO;
    int has_graphs = !(hazards & HAZARD_GRAPHS_AT_ONCE) || graphs_were_made();
    int status = is_needed && has_graphs ? subscriber_take() : -1;
    pthread_mutex_unlock(&lock);
    return status;
}

/* After a window: CUPTI is let go of, once; and calls that were chosen only to last are turned off. */
static void let_go(void) {
    if (left) {
        left = 0;
        tell_now("let_go");
        if (!over) subscriber_take_if_needed(0);
    }
    if (recording || paused || over || !ready) return;
    if (calls_are_chosen() && buffers_seen()) calls_choose(0);
    if (had_window && !wanted && !calls_are_chosen() &&
        clock_ns(CLOCK_MONOTONIC) - off_since >= hold_now) {
        had_window = 0;
        flush_all(FLUSH_FORCED);
        buffers_drain();
        if (stays) tell_now("idle");
        else if (may_let_go()) leave(1);
    }
}

uint64_t capture_sample(uint64_t now) {
    uint64_t look = UINT64_MAX;
    pthread_mutex_lock(&lock);
    if (recording) {
        int on = sampling_keep(now, &look);
        if (on != with_calls) keep_calls(on);
    } else if (had_window && off_since + hold_now > now) look = off_since + hold_now;
    pthread_mutex_unlock(&lock);
    return look;
}

void capture_goes_on(void) {
    pthread_mutex_lock(&lock);
    int on = with_calls;
    with_calls = 1; /* what a file says without a word */
    if (recording) keep_calls(on);
    if (recording) tell_now("capture_on");
    if (by_node) tell_now("nodes_on");
    pthread_mutex_unlock(&lock);
}

void capture_stop(void) {
    pthread_mutex_lock(&lock);
    wanted = 0;
    stopped = 1;
    settle();
    hold_now = 0;
    pthread_mutex_unlock(&lock);
}

void capture_flush(uint32_t force) {
    if (has_some() && !paused) flush_all(force);
}

int capture_tend(int flush) {
    if (flush) capture_flush(0);
    int status = buffers_drain();
    pthread_mutex_lock(&lock);
    let_go();
    pthread_mutex_unlock(&lock);
    return status;
}

void capture_end(void) {
    pthread_mutex_lock(&lock);
    leaving = 0;
    over = 1;
    settle();
    if (ready) capture_flush(FLUSH_FORCED);
    pthread_mutex_unlock(&lock);
}

void capture_lock(void) { pthread_mutex_lock(&lock); }
void capture_unlock(void) { pthread_mutex_unlock(&lock); }

void capture_in_child(void) {
    ready = recording = leaving = 0;
    pthread_mutex_init(&lock, NULL);
}

static void stand_down(const char *why) {
    spool_lock();
    spool_info("no_gpu_activity", why);
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
    int is_there = cupti.enable_hw_trace && cupti_version >= HW_TRACE_SINCE;
    if (is_there && !cupti_check(cupti.enable_hw_trace(1), "cuptiActivityEnableHWTrace"))
        hazards |= HAZARD_LETTING_GO;
    spool_lock();
    if (!is_there) spool_loss(0, "no hardware event tracing, which takes CUPTI 13.4 Update 1");
    else if (hazards & HAZARD_LETTING_GO) spool_info("hw_trace", "on");
    spool_unlock();
}

static void tell_cupti(const char *found, const char *why) {
    char text[16];
    cupti.version(&cupti_version);
    snprintf(text, sizeof text, "%u", cupti_version);
    spool_lock();
    spool_info("cupti", found);
    spool_info("cupti_why", why);
    spool_info("cupti_version", text);
    calls_name();
    hazards = hazards_of(cupti_version);
    if (hazards & HAZARD_PEER_COPIES)
        spool_info("left_out", "copies between GPUs: this CUPTI crashes programs of XLA that have them recorded");
    spool_unlock();
    subscriber_look(hazards & HAZARD_GRAPHS_AT_ONCE);
}

static void begin(void) {
    pthread_mutex_lock(&lock);
    use_hardware_events();
    subscriber_release(0);
    ready = 1;
    if (!paused) calls_make_last();
    if (calls_do_last() && !wanted && sampling_begin(clock_ns(CLOCK_MONOTONIC)) && !set_up()) {
        calls_choose(1);
        leave_out_calls(0);
    }
    settle();
    pthread_mutex_unlock(&lock);
}

static void find_and_begin(void) {
    char found[PATH_MAX] = "";
    const char *why;
    void *library = find_cupti(found, &why);
    if (!library) { stand_down("no libcupti was found"); return; }
    if (cupti_load(library)) { stand_down("libcupti lacks functions"); return; }
    tell_cupti(found, why);
    if (subscriber_take()) stand_down("another tool in the process holds CUPTI");
    else begin();
}

void capture_start(void) {
    sigset_t before;
    hold_signals(&before);
    find_and_begin();
    pthread_sigmask(SIG_SETMASK, &before, NULL);
}
