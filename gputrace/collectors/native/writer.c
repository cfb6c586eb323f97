#define _GNU_SOURCE
#include "writer.h"
#include "buffers.h"
#include "capture.h"
#include "cupti.h"
#include "devices.h"
#include "names.h"
#include "spool.h"
#include "system.h"
#include "window.h"

#include <pthread.h>
#include <stdatomic.h>
#include <time.h>

static pthread_t thread;
static int is_started;
/* Set by the thread that ends the process. */
static atomic_int is_stopping;
/* Held while records are decoded, and CUPTI is let go of: who waits for it finds them written. Taken before any other
 * lock. */
static pthread_mutex_t collecting = PTHREAD_MUTEX_INITIALIZER;

/* The rest is the writer's alone once it runs. */
static const char *directory;
static uint64_t segment_ns, next_segment, kept_segments, max_bytes, bytes_before;

static int collect(int flush) {
    pthread_mutex_lock(&collecting);
    int status = capture_take_records(flush);
    pthread_mutex_unlock(&collecting);
    return status;
}

void writer_write_clocks(void) {
    uint64_t now[3] = {clock_ns(CLOCK_REALTIME), clock_ns(CLOCK_MONOTONIC),
                       clock_ns(CLOCK_MONOTONIC_RAW)};
    spool_lock();
    spool_write_chunk(TAG_CLOCK, now, sizeof now, "", 0);
    names_write_threads();
    spool_unlock();
}

/* The flush is made with the lock held, too: CUPTI may crash where it is let go of in the midst of one. */
void writer_write_now(void) {
    pthread_mutex_lock(&collecting);
    capture_flush(FLUSH_FORCED);
    capture_take_records(0);
    pthread_mutex_unlock(&collecting);
    devices_write();
    writer_write_clocks();
}

/* Begins a new file when it is time, with all that earlier ones said once. */
static void begin_segment_when_due(uint64_t now) {
    if (!segment_ns || now < next_segment) return;
    spool_lock();
    spool_begin_segment((uint32_t)kept_segments);
    spool_unlock();
    capture_note_state();
    devices_write();
    writer_write_clocks();
    /* On its beat, so that looking each second does not add up. */
    next_segment += segment_ns;
    if (next_segment <= now) next_segment = now + segment_ns;
}

/* Whether a second like the last one would be too much. Until the next look each process may write its
 * part of what is left; where there are several, one part is for another that may begin meanwhile. */
static int is_almost_full(void) {
    uint32_t writers;
    if (!max_bytes) return 0;
    uint64_t bytes = spool_folder_size(directory, &writers), before = bytes_before;
    uint64_t left = bytes < max_bytes ? max_bytes - bytes : 0;
    bytes_before = bytes;
    spool_lock();
    spool_set_allowance(writers > 1 ? left / (writers + 1) : left);
    spool_unlock();
    return bytes + (bytes > before ? bytes - before : 0) >= max_bytes;
}

/* The program goes on without us. */
static void stop_at_limit(void) {
    capture_stop_for_good();
    collect(1);
    collect(0);
    spool_lock();
    spool_end_at_limit();
    spool_unlock();
}

static void *write_until_stopped(void *unused) {
    uint64_t now = clock_ns(CLOCK_MONOTONIC), next_second = now + SECOND;
    int has_devices = 0;
    (void)unused;
    pthread_setname_np(pthread_self(), "gputrace");
    window_start();
    for (;;) {
        /* By the moment at which all was decoded, since the rate of calls is as of then. */
        uint64_t sampling = capture_update_sampling(now);
        uint64_t window = window_advance(clock_ns(CLOCK_MONOTONIC));
        buffers_wait(earlier(earlier(window, sampling), next_second));
        if (is_stopping) return NULL;
        now = clock_ns(CLOCK_MONOTONIC);
        int is_second = now >= next_second;
        if (is_second) {
            next_second = clock_ns(CLOCK_MONOTONIC) + SECOND;
            if (!has_devices) devices_write();
            has_devices = 1;
        }
        int status = collect(is_second || now >= sampling);
        if (status && !spool_has_reached_limit()) break;
        if (!is_second && !status) continue;
        writer_write_clocks();
        if (status || is_almost_full()) {
            stop_at_limit();
            return NULL;
        }
        begin_segment_when_due(clock_ns(CLOCK_MONOTONIC));
    }
    capture_end();
    buffers_discard();
    return NULL;
}

void writer_init(const char *spool_directory) {
    directory = spool_directory;
    segment_ns = environment_number("GPUTRACE_SEGMENT_NS");
    next_segment = clock_ns(CLOCK_MONOTONIC) + segment_ns;
    kept_segments = environment_number("GPUTRACE_SEGMENTS");
    max_bytes = environment_number("GPUTRACE_MAX_BYTES");
    is_almost_full();
}

int writer_start(void) {
    sigset_t before;
    buffers_init();
    block_signals(&before, BLOCK_ALL);
    is_started = !pthread_create(&thread, NULL, write_until_stopped, NULL);
    restore_signals(&before);
    return is_started ? 0 : -1;
}

void writer_stop(void) {
    is_stopping = 1;
    buffers_wake();
    if (is_started) pthread_join(thread, NULL);
    capture_take_records(0);
}

void writer_reset_in_child(void) { pthread_mutex_init(&collecting, NULL); }
