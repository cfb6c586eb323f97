#define _GNU_SOURCE
#include "spool.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define CHUNK_BYTES (64u << 10)
#define KINDS 8
#define HEAD_BYTES 32

/* A chunk being filled: its tag and length come first, so that one write takes it all. */
typedef struct {
    uint32_t tag, used;
    unsigned char bytes[CHUNK_BYTES];
} chunk_t;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static int file = -1;
static int full;
static chunk_t *chunks[KINDS];

/* Names by content: open addressing, grown at half full. */
static struct name { char *text; uint32_t id; } *names;
static size_t name_room, name_count;

uint64_t clock_ns(int which) {
    struct timespec now;
    clock_gettime(which, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

void spool_lock(void) { pthread_mutex_lock(&lock); }
void spool_unlock(void) { pthread_mutex_unlock(&lock); }

/* Says in the place kept for it that the file ends here, and why. */
static void tell_full(int error) {
    stop_t stop = {.time = clock_ns(CLOCK_REALTIME), .error = (uint32_t)error};
    struct stat now;
    full = 1;
    if (fstat(file, &now) || now.st_size < (off_t)(HEAD_BYTES + 8 + sizeof stop)) return;
    fcntl(file, F_SETFL, fcntl(file, F_GETFL) & ~O_APPEND); /* which overrides the place */
    if (pwrite(file, &stop, sizeof stop, HEAD_BYTES + 8) < 0) return;
}

static void write_all(const void *bytes, size_t size) {
    const unsigned char *at = bytes;
    while (size && file >= 0 && !full) {
        ssize_t wrote = write(file, at, size);
        if (wrote < 0 && errno == EINTR) continue;
        if (wrote <= 0) {
            tell_full(errno);
            return;
        }
        at += wrote;
        size -= (size_t)wrote;
    }
}

/* A file that was not there: a process that executes another program, or one of another container,
 * may have left one under the same number. */
static int create(const char *directory, const char *host) {
    char path[PATH_MAX], again[16] = "";
    for (int i = 1; i < 1000; i++) {
        if (snprintf(path, sizeof path, "%s/%s.%d%s.spool", directory, host, (int)getpid(), again) >=
            (int)sizeof path)
            return -1;
        int made = open(path, O_WRONLY | O_CREAT | O_EXCL | O_APPEND | O_CLOEXEC, 0600);
        if (made >= 0 || errno != EEXIST) return made;
        snprintf(again, sizeof again, "-%d", i);
    }
    return -1;
}

int spool_open(const char *directory) {
    char host[HOST_NAME_MAX + 1] = "host";
    struct { char magic[8]; uint32_t version, pid; uint64_t realtime, monotonic; } head = {
        "GPUTRSPL", SPOOL_VERSION, (uint32_t)getpid(), clock_ns(CLOCK_REALTIME),
        clock_ns(CLOCK_MONOTONIC)};
    gethostname(host, sizeof host - 1);
    file = create(directory, host);
    if (file < 0) return -1;
    /* Out of the way of programs that count on low numbers, or close all they did not open. */
    int high = fcntl(file, F_DUPFD_CLOEXEC, 200);
    if (high >= 0) { close(file); file = high; }
    struct { uint32_t tag, used; stop_t stop; } place = {TAG_FULL, sizeof(stop_t), {0}};
    write_all(&head, sizeof head);
    write_all(&place, sizeof place);
    return full ? -1 : 0;
}

static void write_chunk(chunk_t *chunk) {
    if (!chunk->used) return;
    write_all(chunk, 8 + chunk->used);
    chunk->used = 0;
}

void spool_add(uint32_t tag, const void *record, size_t size) {
    if (file < 0 || full) return;
    for (int i = 0; i < KINDS; i++) {
        if (!chunks[i]) {
            chunks[i] = malloc(sizeof *chunks[i]);
            if (!chunks[i]) return;
            chunks[i]->tag = tag;
            chunks[i]->used = 0;
        }
        if (chunks[i]->tag != tag) continue;
        if (chunks[i]->used + size > CHUNK_BYTES) write_chunk(chunks[i]);
        memcpy(chunks[i]->bytes + chunks[i]->used, record, size);
        chunks[i]->used += (uint32_t)size;
        return;
    }
}

void spool_chunk(uint32_t tag, const void *head, size_t head_size, const void *tail, size_t size) {
    struct { uint32_t tag, used; } start = {tag, (uint32_t)(head_size + size)};
    unsigned char *bytes = malloc(sizeof start + head_size + size);
    if (!bytes) return;
    memcpy(bytes, &start, sizeof start);
    memcpy(bytes + sizeof start, head, head_size);
    if (size) memcpy(bytes + sizeof start + head_size, tail, size);
    write_all(bytes, sizeof start + head_size + size);
    free(bytes);
}

static size_t hash(const char *text) { /* FNV-1a */
    uint64_t h = 14695981039346656037u;
    for (; *text; text++) h = (h ^ (unsigned char)*text) * 1099511628211u;
    return (size_t)h;
}

static int grow_names(void) {
    size_t room = name_room ? name_room * 2 : 1024;
    struct name *old = names, *fresh = calloc(room, sizeof *fresh);
    if (!fresh) return -1;
    for (size_t i = 0; i < name_room; i++) {
        if (!old[i].text) continue;
        size_t at = hash(old[i].text) & (room - 1);
        while (fresh[at].text) at = (at + 1) & (room - 1);
        fresh[at] = old[i];
    }
    names = fresh;
    name_room = room;
    free(old);
    return 0;
}

uint32_t spool_name(const char *text) {
    if (!text || (name_count * 2 >= name_room && grow_names())) return 0;
    size_t at = hash(text) & (name_room - 1);
    for (; names[at].text; at = (at + 1) & (name_room - 1))
        if (!strcmp(names[at].text, text)) return names[at].id;
    names[at].text = strdup(text);
    if (!names[at].text) return 0;
    names[at].id = (uint32_t)++name_count;
    spool_chunk(TAG_NAME, &names[at].id, 4, text, strlen(text));
    return names[at].id;
}

void spool_info(const char *key, const char *value) {
    char text[4096];
    int size = snprintf(text, sizeof text, "%s=%s", key, value);
    if (size > 0)
        spool_chunk(TAG_INFO, text, (size_t)size < sizeof text ? (size_t)size : sizeof text - 1, "", 0);
}

void spool_loss(uint64_t records, const char *why) {
    uint64_t head[2] = {clock_ns(CLOCK_REALTIME), records};
    spool_chunk(TAG_LOSS, head, sizeof head, why, strlen(why));
}

int spool_flush(void) {
    for (int i = 0; i < KINDS && chunks[i]; i++) write_chunk(chunks[i]);
    return full ? -1 : 0;
}

void spool_close(void) {
    if (file < 0) return;
    spool_flush();
    close(file);
    file = -1;
}

void spool_forget(void) {
    if (file >= 0) close(file);
    file = -1;
    pthread_mutex_init(&lock, NULL);
}
