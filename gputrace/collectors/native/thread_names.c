/* Names of the threads in the records, as the kernel has them: read within a second after a thread's
 * first record, by then mostly as the program set them. */
#include "spool.h"

#include <stdio.h>
#include <string.h>

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
