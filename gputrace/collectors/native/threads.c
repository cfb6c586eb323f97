#define _GNU_SOURCE
#include "threads.h"
#include "system.h"

#include <pthread.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

typedef struct { uint64_t since; uint32_t self, id; } thread_t;

/* Taken by threads of the program as they become known, and by the writer. */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static thread_t *threads;
static size_t count, capacity;
static __thread int is_known;

static void add_this_thread(uint64_t now) {
    thread_t fresh = {now, (uint32_t)(uintptr_t)pthread_self(), (uint32_t)syscall(SYS_gettid)};
    pthread_mutex_lock(&lock);
    if (count == capacity) {
        size_t more = capacity ? 2 * capacity : 64;
        thread_t *grown = realloc(threads, more * sizeof *grown);
        if (grown) { threads = grown; capacity = more; }
    }
    if (count < capacity) threads[count++] = fresh;
    pthread_mutex_unlock(&lock);
    is_known = 1;
}

uint64_t threads_timestamp(void) {
    uint64_t now = clock_ns(CLOCK_REALTIME);
    if (!is_known) add_this_thread(now);
    return now;
}

uint32_t threads_system_id(uint32_t self, uint64_t when) {
    uint32_t id = 0;
    pthread_mutex_lock(&lock);
    /* The newest first: records come soon after they were made. */
    for (size_t i = count; i-- > 0;) {
        if (threads[i].self != self) continue;
        id = threads[i].id;
        if (threads[i].since <= when) break;
    }
    pthread_mutex_unlock(&lock);
    return id;
}

void threads_reset_in_child(void) { pthread_mutex_init(&lock, NULL); }
