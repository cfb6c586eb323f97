/* A clock in a recorded Python program: at a low rate it asks the main thread where it is.
 *
 * The clock's thread takes no lock of the interpreter, so it makes nobody wait. It queues a pending call, which the
 * main thread makes at its next check between two bytecodes, as it does with signal handlers. Until then it has not
 * left the call that it is in, if any: all ticks that came meanwhile belong there. (A sampler that takes the
 * interpreter's lock would see programs where they release it, which is not where they spend their time.)
 *
 * From 3.9 to 3.12, a pending call that another thread queues stays unseen until the main thread has waited for
 * something; the word that makes it check, eval_breaker, has to be set as well. It is found by calling the function
 * of CPython that sets it and nothing else near it.
 *
 * Each tick looks whether the main thread sleeps, as in a call that waits, or waits for the interpreter's lock (the
 * GIL). The lock and its condition are parts of the variable _PyRuntime from 3.7 on, and /proc/self/task/ID/syscall
 * (proc(5)) has the futex in which a thread waits: if that is in the variable, it is the lock's.
 *
 * A program that follows its calls (sys.setprofile, sys.settrace, sys.monitoring) would be shown ours: ticks that
 * meet such a follower are dropped.
 *
 * Threads and state: `python` is written on the main thread while no clock runs, and read by both threads. `ticker`
 * is the clock's thread; `changing` serialises starts and stops, `lock` guards `runs`. `pending` is shared by both
 * threads without a lock, by atomic operations. `resumption` is the main thread's alone.
 *
 * hooks/_gputrace_hooks/sampler.py uses this; CPython's functions come from there. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define EXPORTED __attribute__((visibility("default")))
#define SECOND 1000000000LL
#define EXTRA_DEPTH 100 /* of recursion; more than sampler.py needs */
#define TOOLS 6 /* numbers of sys.monitoring */

typedef int (*pending_call_t)(void *);

static struct {
    int (*add_pending_call)(pending_call_t, void *);
    void *(*call)(void *callable, const char *format, ...);
    void (*release)(void *object);
    void (*fetch)(void **type, void **value, void **traceback);
    void (*restore)(void *type, void *value, void *traceback);
    void *(*get_frame)(void); /* no audit hook of the program's sees it, as it would sys._getframe */
    int (*get_limit)(void); /* of recursion; this and the next may be null */
    void (*set_limit)(int limit);
    void *(*get_caller)(void *frame); /* may be null, as in Pythons that it is not needed in */
    void *none, *get_profile, *get_trace, *get_tool; /* the last one may be null */
    void *callable;
    long long period;
    int *breaker;
    uintptr_t runtime;
    size_t runtime_size;
} python;

static struct {
    pthread_mutex_t changing, lock;
    pthread_cond_t ended;
    pthread_t thread;
    pid_t process;
    long id;
    int runs;
} ticker = {.changing = PTHREAD_MUTEX_INITIALIZER};

static struct {
    int is_due, is_queued;
    void *frame;
    long long until;
} resumption;

/* Ticks that the main thread has not served yet, and how many of them met it waiting for the lock, or asleep. */
static struct {
    int is_queued;
    long ticks, waits, sleeps;
    long long since; /* CLOCK_REALTIME of the first */
} pending;

static long long read_clock(clockid_t clock) {
    struct timespec time;
    clock_gettime(clock, &time);
    return time.tv_sec * SECOND + time.tv_nsec;
}

/* Drops the exception that is set where the call itself failed for lack of stack or memory: that has no traceback.
 * Any other is from a signal handler of the program, which ran meanwhile: -1 passes it on. */
static int drop_own_exception(void) {
    void *type, *value, *traceback;
    python.fetch(&type, &value, &traceback);
    if (traceback) {
        python.restore(type, value, traceback);
        return -1;
    }
    python.release(type);
    python.release(value);
    return 0;
}

/* Whether a call of FUNCTION, a built-in one, returns anything but None; no follower sees a call from here. */
static int returns_something(void *function, const char *format, int argument) {
    void *result = python.call(function, format, argument);
    if (!result) {
        drop_own_exception();
        return 1;
    }
    python.release(result);
    return result != python.none;
}

static int is_followed(void) {
    int followed = returns_something(python.get_profile, NULL, 0);
    followed = followed || returns_something(python.get_trace, NULL, 0);
    for (int tool = 0; python.get_tool && !followed && tool < TOOLS; tool++)
        followed = returns_something(python.get_tool, "i", tool);
    return followed;
}

static int call_sampler(long count, long long first, long waited, long slept) {
    void *frame = python.get_frame();
    if (!frame) return 0;
    void *result = python.call(python.callable, "lLllO", count, first, waited, slept, frame);
    if (!result) return drop_own_exception();
    python.release(result);
    return 0;
}

/* On the main thread, which holds the interpreter's lock; -1 where an exception is set. */
static int serve_ticks(void *unused) {
    (void)unused;
    long long first = pending.since;
    long waited = __atomic_exchange_n(&pending.waits, 0, __ATOMIC_SEQ_CST);
    long slept = __atomic_exchange_n(&pending.sleeps, 0, __ATOMIC_SEQ_CST);
    long count = __atomic_exchange_n(&pending.ticks, 0, __ATOMIC_SEQ_CST);
    __atomic_store_n(&pending.is_queued, 0, __ATOMIC_SEQ_CST);
    if (!count || !ticker.runs || ticker.process != getpid()) return 0;
    /* Before 3.10, after a RecursionError of ours the interpreter would abort at the next one of a program that is
     * as deep. There, the limit is only a number. */
    int limit = python.get_limit ? python.get_limit() : 0;
    if (limit) python.set_limit(limit + EXTRA_DEPTH);
    int failed = is_followed() ? 0 : call_sampler(count, first, waited, slept);
    if (limit && python.get_limit() == limit + EXTRA_DEPTH) python.set_limit(limit);
    return failed;
}

/* Returns which ticks count this one, for what the main thread, whose id is the process's, waits for; NULL if it runs,
 * or could. */
static long *find_wait(void) {
    char path[48], text[160], *address;
    snprintf(path, sizeof path, "/proc/self/task/%d/syscall", getpid());
    int file = open(path, O_RDONLY | O_CLOEXEC);
    if (file < 0) return NULL;
    ssize_t length = read(file, text, sizeof text - 1);
    close(file);
    text[length > 0 ? length : 0] = 0;
    /* "running", or numbers: of the call, then its arguments. */
    long call = strtol(text, &address, 10);
    if (address == text) return NULL;
    uintptr_t argument = strtoull(address, NULL, 16);
    return call == SYS_futex && argument - python.runtime < python.runtime_size ? &pending.waits : &pending.sleeps;
}

static void tick(void) {
    long *waits = find_wait();
    if (waits) __atomic_add_fetch(waits, 1, __ATOMIC_SEQ_CST);
    if (!__atomic_load_n(&pending.ticks, __ATOMIC_SEQ_CST)) pending.since = read_clock(CLOCK_REALTIME);
    __atomic_add_fetch(&pending.ticks, 1, __ATOMIC_SEQ_CST);
    if (!__atomic_exchange_n(&pending.is_queued, 1, __ATOMIC_SEQ_CST) && python.add_pending_call(serve_ticks, NULL))
        __atomic_store_n(&pending.is_queued, 0, __ATOMIC_SEQ_CST);
    if (python.breaker) __atomic_store_n(python.breaker, 1, __ATOMIC_RELAXED);
}

static void *run_clock(void *unused) {
    double part = 0;
    ticker.id = syscall(SYS_gettid);
    pthread_mutex_lock(&ticker.lock);
    while (ticker.runs) {
        /* Golden steps: never in time with the program, and evenly spread. */
        part += 0.618034;
        part -= part >= 1;
        long long due = read_clock(CLOCK_MONOTONIC) + (long long)((0.5 + part) * python.period);
        struct timespec until = {due / SECOND, due % SECOND};
        while (ticker.runs && !pthread_cond_timedwait(&ticker.ended, &ticker.lock, &until)) {}
        if (ticker.runs) tick();
    }
    pthread_mutex_unlock(&ticker.lock);
    return unused;
}

/* Finds the word that SIGNAL_RECEIVED, called on the main thread, changes from 0 to 1. */
static int *find_breaker(void (*signal_received)(void *), void *interpreter) {
    int before[256], found = -1, count = 0;
    volatile int *words = interpreter;
    memcpy(before, interpreter, sizeof before);
    signal_received(interpreter);
    for (int i = 0; i < 256; i++) {
        if (words[i] == before[i]) continue;
        count += before[i] == 0 && words[i] == 1 ? 1 : 2;
        found = i;
    }
    return count == 1 ? (int *)interpreter + found : NULL;
}

/* Takes what is used of CPython, in the order of the declarations above. The last object is called with the number of
 * ticks, the moment of the first, how many of them met the main thread waiting for the lock, how many asleep, and the
 * frame that it is in. SIGNAL_RECEIVED is null where pending calls are seen without it; RUNTIME is _PyRuntime, of SIZE bytes, 0 if
 * unknown. To be called on the main thread with the interpreter's lock, again after the interpreter was finalized and
 * initialized anew. Returns 0; otherwise it may be tried again. */
EXPORTED int gputrace_ticker_prepare(void *const functions[9], void *const objects[5],
                                     long long period, void *signal_received, void *interpreter,
                                     void *runtime, size_t size) {
    int *breaker = NULL;
    if (ticker.runs && ticker.process == getpid()) return 0;
    if (signal_received) {
        breaker = find_breaker((void (*)(void *))signal_received, interpreter);
        if (!breaker) return -1;
    }
    python.add_pending_call = (int (*)(pending_call_t, void *))functions[0];
    python.call = (void *(*)(void *, const char *, ...))functions[1];
    python.release = (void (*)(void *))functions[2];
    python.fetch = (void (*)(void **, void **, void **))functions[3];
    python.restore = (void (*)(void *, void *, void *))functions[4];
    python.get_frame = (void *(*)(void))functions[5];
    python.get_limit = (int (*)(void))functions[6];
    python.set_limit = (void (*)(int))functions[7];
    python.get_caller = (void *(*)(void *))functions[8];
    python.none = objects[0];
    python.get_profile = objects[1];
    python.get_trace = objects[2];
    python.get_tool = objects[3];
    python.callable = objects[4];
    python.period = period;
    python.breaker = breaker;
    python.runtime = (uintptr_t)runtime;
    python.runtime_size = size;
    return 0;
}

static int start_clock(void) {
    pthread_condattr_t monotonic;
    pthread_attr_t small;
    sigset_t all, before;
    pthread_mutex_init(&ticker.lock, NULL);
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_cond_init(&ticker.ended, &monotonic);
    pthread_attr_init(&small);
    pthread_attr_setstacksize(&small, 256 * 1024);
    pending.ticks = pending.waits = pending.sleeps = pending.is_queued = 0;
    ticker.runs = 1;
    /* Signals are the program's: none may be delivered to the clock's thread. */
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int failed = pthread_create(&ticker.thread, &small, run_clock, NULL);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (failed) ticker.runs = 0;
    return failed;
}

/* Starts the clock, unless it runs. Returns 0, or an error number. */
EXPORTED int gputrace_ticker_start(void) {
    if (ticker.process != getpid()) {
        /* What a forked child has of the threads of its parent is of no use. */
        pthread_mutex_init(&ticker.changing, NULL);
        ticker.process = getpid();
        ticker.runs = 0;
        resumption.is_due = resumption.is_queued = 0;
    }
    pthread_mutex_lock(&ticker.changing);
    int failed = ticker.runs ? 0 : start_clock();
    pthread_mutex_unlock(&ticker.changing);
    return failed;
}

/* On the main thread, which holds the interpreter's lock: starts the clock once the frame that forks goes on or has
 * ended; asks again while functions that it calls are at work. */
static int start_after_fork(void *unused) {
    resumption.is_queued = 0;
    if (!resumption.is_due || ticker.process != getpid()) return 0;
    int is_early = python.get_frame() != resumption.frame;
    if (is_early && read_clock(CLOCK_MONOTONIC) < resumption.until &&
        !python.add_pending_call(start_after_fork, unused)) {
        resumption.is_queued = 1;
        return 0;
    }
    resumption.is_due = 0;
    gputrace_ticker_start();
    return 0;
}

/* Starts the clock when the caller's caller, the frame that forks, goes on: from 3.13 on, Python counts threads after
 * the functions that it calls after a fork. To be called on the main thread with the interpreter's lock. Returns 0,
 * or -1 where that is impossible. */
EXPORTED int gputrace_ticker_resume(void) {
    void *frame = python.get_caller ? python.get_caller(python.get_frame()) : NULL;
    if (!frame) return -1;
    /* To be compared only. */
    python.release(frame);
    resumption.frame = frame;
    resumption.until = read_clock(CLOCK_MONOTONIC) + SECOND / 20;
    resumption.is_due = 1;
    if (!resumption.is_queued && python.add_pending_call(start_after_fork, NULL)) {
        resumption.is_due = 0;
        return -1;
    }
    resumption.is_queued = 1;
    return 0;
}

/* Stops the clock; returns when the system no longer counts its thread. */
EXPORTED void gputrace_ticker_stop(void) {
    resumption.is_due = 0;
    if (ticker.process != getpid()) return;
    pthread_mutex_lock(&ticker.changing);
    if (ticker.runs) {
        pthread_mutex_lock(&ticker.lock);
        ticker.runs = 0;
        pthread_cond_signal(&ticker.ended);
        pthread_mutex_unlock(&ticker.lock);
        pthread_join(ticker.thread, NULL);
        for (int i = 0; i < 1000 && !syscall(SYS_tgkill, getpid(), ticker.id, 0); i++) usleep(10);
    }
    pthread_mutex_unlock(&ticker.changing);
}
