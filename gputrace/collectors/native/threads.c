#define _GNU_SOURCE
#include "threads.h"
#include "spool.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
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

/* Names of the threads in the records, as the kernel has them: read within a second after a thread's
 * first record, by then mostly as the program set them. */

#define MOST 4096u /* a power of two; threads beyond three quarters of it stay without a name */

static uint32_t seen[MOST], fresh[MOST];
static size_t seen_count, fresh_count;
static uint32_t last;

void spool_thread(uint32_t thread) {
    if (thread == last || !thread) return;
    last = thread;
    size_t at = thread % MOST;
    for (; seen[at]; at = (at + 1) % MOST)
        if (seen[at] == thread) return;
    if (seen_count >= MOST / 4 * 3) return;
    seen[at] = thread;
    seen_count++;
    fresh[fresh_count++] = thread;
}

void spool_threads(void) {
    while (fresh_count) {
        char path[64], name[64];
        uint32_t thread = fresh[--fresh_count];
        snprintf(path, sizeof path, "/proc/self/task/%u/comm", (unsigned)thread);
        FILE *file = fopen(path, "re");
        if (!file) continue; /* it has ended */
        size_t size = fread(name, 1, sizeof name, file);
        fclose(file);
        while (size && (name[size - 1] == '\n' || !name[size - 1])) size--;
        if (size) spool_chunk(TAG_THREAD, &thread, sizeof thread, name, size);
    }
}

void spool_forget_threads(void) {
    memset(seen, 0, sizeof seen);
    seen_count = fresh_count = last = 0;
}
