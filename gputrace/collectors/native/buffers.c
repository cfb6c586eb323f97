#define _GNU_SOURCE
#include "buffers.h"
#include "cupti.h"
#include "decode.h"
#include "call_sampling.h"
#include "spool.h"
#include "system.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdlib.h>
#include <time.h>

/* Each thread that makes calls gets a buffer, and CUPTI clears it first: 4 MiB took 0.35 ms on an H200, 2 ms in
 * new memory, and XLA's pools have 200 threads. This size has room for two thousand launches. */
#define BUFFER_BYTES (512u << 10)
#define RESERVE_BYTES (64u << 10)
#define RESERVES 16
#define MAX_SPARES 64
#define RECORDS_AT_ONCE 64

/* What is known of a buffer lies in front of its bytes: taking one over needs no memory. */
typedef struct buffer {
    struct buffer *next;
    size_t valid, size;
    unsigned numbering;
    _Alignas(64) uint8_t bytes[];
} buffer_t;

/* Guards the lists; taken by threads of CUPTI's and of the program, and by the writer, for a few instructions. */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t filled;
static buffer_t *completed, **completed_end = &completed;
static buffer_t *spare, *reserve;
static size_t spares;
static int is_woken;
static atomic_int had_records, was_refused;
/* Buffers that CUPTI has, of the current numbering. */
static atomic_int lent;
static atomic_uint numbering;

/* Costs no memory before it is used. */
static void make_reserve(void) {
    static _Alignas(64) uint8_t places[RESERVES][sizeof(buffer_t) + RESERVE_BYTES];
    for (int i = 0; i < RESERVES; i++) {
        buffer_t *buffer = (buffer_t *)(void *)places[i];
        buffer->size = RESERVE_BYTES;
        buffer->next = reserve;
        reserve = buffer;
    }
}

void buffers_init(void) {
    pthread_condattr_t monotonic;
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_cond_init(&filled, &monotonic);
    make_reserve();
}

static buffer_t *take_from(buffer_t **list) {
    pthread_mutex_lock(&lock);
    buffer_t *first = *list;
    if (first) *list = first->next;
    if (first && list == &spare) spares--;
    pthread_mutex_unlock(&lock);
    return first;
}

static buffer_t *allocate(void) {
    void *place;
    if (posix_memalign(&place, 64, sizeof(buffer_t) + BUFFER_BYTES)) return NULL;
    buffer_t *buffer = place;
    buffer->size = BUFFER_BYTES;
    return buffer;
}

/* CUPTI before 12.9 may crash where it is refused a buffer: so their number has no bound, and where no memory is
 * left, it gets the reserve, whose buffers come back as fast as they are written. */
static void buffer_requested(uint8_t **bytes, size_t *size, size_t *max_records) {
    buffer_t *buffer = take_from(&spare);
    if (!buffer) buffer = allocate();
    if (!buffer) buffer = take_from(&reserve);
    if (!buffer) was_refused = 1;
    else {
        buffer->numbering = numbering;
        lent++;
    }
    *bytes = buffer ? buffer->bytes : NULL;
    *size = buffer ? buffer->size : 0;
    *max_records = 0;
}

static void recycle(buffer_t *buffer) {
    pthread_mutex_lock(&lock);
    int is_reserve = buffer->size != BUFFER_BYTES, keep = is_reserve || spares < MAX_SPARES;
    if (keep) {
        buffer->next = is_reserve ? reserve : spare;
        *(is_reserve ? &reserve : &spare) = buffer;
        spares += !is_reserve;
    }
    pthread_mutex_unlock(&lock);
    if (!keep) free(buffer);
}

static void buffer_completed(void *context, uint32_t stream, uint8_t *bytes, size_t size, size_t valid) {
    size_t lost = 0;
    (void)size;
    if (cupti.dropped && !cupti.dropped(context, stream, &lost) && lost) {
        spool_lock();
        spool_write_loss(lost, "CUPTI had no room for them");
        spool_unlock();
    }
    if (!bytes) return;
    buffer_t *buffer = (buffer_t *)(void *)(bytes - offsetof(buffer_t, bytes));
    if (buffer->numbering == numbering) lent--;
    if (!valid) {
        recycle(buffer);
        return;
    }
    buffer->next = NULL;
    buffer->valid = valid;
    buffer->numbering = numbering;
    had_records = 1;
    pthread_mutex_lock(&lock);
    *completed_end = buffer;
    completed_end = &buffer->next;
    pthread_cond_signal(&filled);
    pthread_mutex_unlock(&lock);
}

int buffers_register(void) {
    int code = cupti.register_callbacks(buffer_requested, buffer_completed);
    return cupti_check(code, "cuptiActivityRegisterCallbacks");
}

void buffers_restart_numbering(void) {
    numbering++;
    lent = 0;
}

int buffers_had_records(void) { return had_records; }
int buffers_are_back(void) { return lent <= 0; }

void buffers_wait(uint64_t until) {
    struct timespec at = {(time_t)(until / SECOND), (long)(until % SECOND)};
    pthread_mutex_lock(&lock);
    while (!is_woken && !completed && clock_ns(CLOCK_MONOTONIC) < until)
        if (pthread_cond_timedwait(&filled, &lock, &at)) break;
    is_woken = 0;
    pthread_mutex_unlock(&lock);
}

void buffers_wake(void) {
    pthread_mutex_lock(&lock);
    is_woken = 1;
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

int buffers_decode(void) {
    static unsigned decoded;
    buffer_t *buffer = take_completed();
    spool_lock();
    /* Before this look came all that is decoded below. */
    sampling_check_clock();
    spool_unlock();
    for (buffer_t *next; buffer; buffer = next) {
        void *record = NULL;
        next = buffer->next;
        if (buffer->numbering != decoded) decode_restart_numbering();
        decoded = buffer->numbering;
        for (int end = 0; !end;) {
            /* A few at a time: NVTX calls of the program, and its forks, wait for this lock. */
            spool_lock();
            for (int i = 0; !end && i < RECORDS_AT_ONCE; i++) {
                end = cupti.next_record(buffer->bytes, buffer->valid, &record);
                if (!end) decode(record);
            }
            if (end != MAX_LIMIT_REACHED) cupti_check_locked(end, "cuptiActivityGetNextRecord");
            spool_unlock();
        }
        recycle(buffer);
    }
    spool_lock();
    if (atomic_exchange(&was_refused, 0)) spool_write_loss(0, "there was no memory for CUPTI's records");
    int status = spool_flush();
    spool_unlock();
    return status;
}

void buffers_discard(void) {
    for (buffer_t *buffer = take_completed(), *next; buffer; buffer = next) {
        next = buffer->next;
        recycle(buffer);
    }
}

void buffers_lock(void) { pthread_mutex_lock(&lock); }
void buffers_unlock(void) { pthread_mutex_unlock(&lock); }
void buffers_reset_in_child(void) { pthread_mutex_init(&lock, NULL); }
