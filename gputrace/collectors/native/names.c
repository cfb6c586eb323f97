#define _GNU_SOURCE
#include "names.h"
#include "spool.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* By number less 1, each with the last file that has it, counted from 1. */
static struct name { char *text; uint32_t file; } *names;
static size_t count, capacity;

/* Numbers by content: open addressing, grown at half full. */
static uint32_t *slots;
static size_t slot_count;

static size_t hash(const char *text) { /* FNV-1a */
    uint64_t h = 14695981039346656037u;
    for (; *text; text++) h = (h ^ (unsigned char)*text) * 1099511628211u;
    return (size_t)h;
}

static size_t find_slot(const char *text) {
    size_t at = hash(text) & (slot_count - 1);
    while (slots[at] && strcmp(names[slots[at] - 1].text, text)) at = (at + 1) & (slot_count - 1);
    return at;
}

static int grow(void) {
    size_t larger = slot_count ? slot_count * 2 : 1024;
    struct name *more = realloc(names, larger / 2 * sizeof *names);
    if (!more) return -1;
    names = more;
    capacity = larger / 2;
    uint32_t *fresh = calloc(larger, sizeof *fresh);
    if (!fresh) return -1;
    free(slots);
    slots = fresh;
    slot_count = larger;
    for (size_t i = 0; i < count; i++) slots[find_slot(names[i].text)] = (uint32_t)i + 1;
    return 0;
}

void names_ensure_written(uint32_t id) {
    uint32_t file = spool_segment_number() + 1;
    if (!id || id > count || names[id - 1].file == file) return;
    names[id - 1].file = file;
    spool_write_chunk(TAG_NAME, &id, sizeof id, names[id - 1].text, strlen(names[id - 1].text));
}

uint32_t names_add(const char *text) {
    if (!text || ((count >= capacity || count * 2 >= slot_count) && grow())) return 0;
    size_t at = find_slot(text);
    if (!slots[at]) {
        names[count] = (struct name){strdup(text), 0};
        if (!names[count].text) return 0;
        slots[at] = (uint32_t)++count;
    }
    names_ensure_written(slots[at]);
    return slots[at];
}

/* Names of threads, as the kernel has them: read within a second after a thread's first record, by then mostly as
 * the program set them. */

#define MAX_THREADS 4096u /* a power of two; threads beyond three quarters of it stay without a name */

/* Threads in the records of one file, and the ones without a name there yet. */
static uint32_t noted[MAX_THREADS], unnamed[MAX_THREADS];
static size_t noted_count, unnamed_count;
static uint32_t last_noted, file_of_noted;

static void forget_threads_of_earlier_file(void) {
    if (file_of_noted == spool_segment_number()) return;
    file_of_noted = spool_segment_number();
    memset(noted, 0, sizeof noted);
    noted_count = unnamed_count = last_noted = 0;
}

void names_note_thread(uint32_t thread) {
    forget_threads_of_earlier_file();
    if (thread == last_noted || !thread) return;
    last_noted = thread;
    size_t at = thread % MAX_THREADS;
    for (; noted[at]; at = (at + 1) % MAX_THREADS)
        if (noted[at] == thread) return;
    if (noted_count >= MAX_THREADS / 4 * 3) return;
    noted[at] = thread;
    noted_count++;
    unnamed[unnamed_count++] = thread;
}

void names_write_threads(void) {
    forget_threads_of_earlier_file();
    while (unnamed_count) {
        char path[64], name[64];
        uint32_t thread = unnamed[--unnamed_count];
        snprintf(path, sizeof path, "/proc/self/task/%u/comm", (unsigned)thread);
        FILE *file = fopen(path, "re");
        if (!file) continue; /* it has ended */
        size_t size = fread(name, 1, sizeof name, file);
        fclose(file);
        while (size && (name[size - 1] == '\n' || !name[size - 1])) size--;
        if (size) spool_write_chunk(TAG_THREAD, &thread, sizeof thread, name, size);
    }
}
