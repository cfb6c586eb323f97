#define _GNU_SOURCE
#include "threads.h"
#include "spool.h"

#include <pthread.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

typedef struct { uint64_t since; uint32_t self, id; } thread_t;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static thread_t *threads;
static size_t count, room;
static __thread int is_known;

static void add(uint64_t now) {
    thread_t fresh = {now, (uint32_t)(uintptr_t)pthread_self(), (uint32_t)syscall(SYS_gettid)};
    pthread_mutex_lock(&lock);
    if (count == room) {
        size_t more = room ? 2 * room : 64;
        thread_t *grown = realloc(threads, more * sizeof *grown);
        if (grown) { threads = grown; room = more; }
    }
    if (count < room) threads[count++] = fresh;
    pthread_mutex_unlock(&lock);
    is_known = 1;
}

uint64_t threads_stamp(void) {
    uint64_t now = clock_ns(CLOCK_REALTIME);
    if (!is_known) add(now);
    return now;
}

uint32_t threads_id(uint32_t self, uint64_t when) {
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

void threads_in_child(void) { pthread_mutex_init(&lock, NULL); }
