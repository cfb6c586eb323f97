#define _GNU_SOURCE
#include "buffers.h"
#include "cupti.h"
#include "spool.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <time.h>

#define BUFFER_BYTES (4u << 20)
#define AT_ONCE 64
#define SECOND 1000000000u

typedef struct buffer { struct buffer *next; size_t valid; uint8_t *bytes; } buffer_t;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t filled;
static buffer_t *completed, **completed_end = &completed;
static uint8_t *spare[16];
static size_t spares;
static int woken;
static atomic_int seen;

void buffers_init(void) {
    pthread_condattr_t monotonic;
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_cond_init(&filled, &monotonic);
}

static void requested(uint8_t **buffer, size_t *size, size_t *max_records) {
    uint8_t *bytes = NULL;
    pthread_mutex_lock(&lock);
    if (spares) bytes = spare[--spares];
    pthread_mutex_unlock(&lock);
    /* CUPTI before 12.9 may crash on a refusal, so there is no upper bound. */
    if (!bytes && posix_memalign((void **)&bytes, 64, BUFFER_BYTES)) bytes = NULL;
    *buffer = bytes;
    *size = bytes ? BUFFER_BYTES : 0;
    *max_records = 0;
}

static void give_back(uint8_t *bytes) {
    pthread_mutex_lock(&lock);
    if (spares < sizeof spare / sizeof *spare) { spare[spares++] = bytes; bytes = NULL; }
    pthread_mutex_unlock(&lock);
    free(bytes);
}

static void is_completed(void *context, uint32_t stream, uint8_t *bytes, size_t size, size_t valid) {
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
    seen = 1;
    pthread_mutex_lock(&lock);
    *completed_end = buffer;
    completed_end = &buffer->next;
    pthread_cond_signal(&filled);
    pthread_mutex_unlock(&lock);
}

void buffers_register(void) { cupti.register_callbacks(requested, is_completed); }

int buffers_seen(void) { return seen; }

void buffers_wait(uint64_t until) {
    struct timespec at = {(time_t)(until / SECOND), (long)(until % SECOND)};
    pthread_mutex_lock(&lock);
    while (!woken && !completed && clock_ns(CLOCK_MONOTONIC) < until)
        if (pthread_cond_timedwait(&filled, &lock, &at)) break;
    woken = 0;
    pthread_mutex_unlock(&lock);
}

void buffers_wake(void) {
    pthread_mutex_lock(&lock);
    woken = 1;
    pthread_cond_signal(&filled);
    pthread_mutex_unlock(&lock);
}

static buffer_t *take_completed(void) {
    pthread_mutex_lock(&lock);
    buffer_t *first = completed;
    completed = NULL;
    completed_end = &completed;
    pthread_mutex_unlock(&lock);
    return first;
}

static void take(const void *record, uint64_t calls_from) {
    uint32_t kind = u32_at(record, 0);
    int is_call = kind == KIND_RUNTIME || kind == KIND_DRIVER;
    if (!is_call || u64_at(record, 16) >= calls_from) decode(record);
}

int buffers_drain(uint64_t calls_from) {
    for (buffer_t *buffer = take_completed(), *next; buffer; buffer = next) {
        void *record = NULL;
        next = buffer->next;
        for (int more = 1; more;) {
            /* A few at a time: NVTX calls of the program, and its forks, wait for this lock. */
            spool_lock();
            for (int i = 0; more && i < AT_ONCE; i++) {
                more = !cupti.next_record(buffer->bytes, buffer->valid, &record);
                if (more) take(record, calls_from);
            }
            spool_unlock();
        }
        give_back(buffer->bytes);
        free(buffer);
    }
    spool_lock();
    int status = spool_flush();
    spool_unlock();
    return status;
}

void buffers_throw_away(void) {
    for (buffer_t *buffer = take_completed(), *next; buffer; buffer = next) {
        next = buffer->next;
        free(buffer->bytes);
        free(buffer);
    }
}

void buffers_lock(void) { pthread_mutex_lock(&lock); }
void buffers_unlock(void) { pthread_mutex_unlock(&lock); }
void buffers_in_child(void) { pthread_mutex_init(&lock, NULL); }
