#define _GNU_SOURCE
#include "spool.h"
#include "system.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#define CHUNK_BYTES (64u << 10)
#define MAX_KINDS 9
#define HEADER_BYTES 32

/* A chunk being filled: its tag and length come first, so that one write takes it all. */
typedef struct {
    uint32_t tag, used;
    unsigned char bytes[CHUNK_BYTES];
} chunk_t;

/* Guards all that follows, and what collector.h says of it. */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static int file = -1;
/* Which file that is, since its number may become one of the program's. */
static struct stat identity;
/* A spool is open, though `file` may have to be opened again; nothing more is written to it; and something could
 * not be written meanwhile. */
static int is_open, is_full, has_lost;
/* Not from the program's heap, which may be exhausted. */
static chunk_t chunks[MAX_KINDS];
static int kinds;
/* Bytes that may still be written, and whether they were too few. */
static uint64_t allowance = UINT64_MAX;
static int is_at_limit;

/* The part of its path that all segments share, and which of them it is, from 0 on. */
static char base[PATH_MAX];
static uint32_t segment;
/* What each segment begins with: chunks of INFO. */
static unsigned char *preamble;
static size_t preamble_size;

void spool_lock(void) { pthread_mutex_lock(&lock); }
void spool_unlock(void) { pthread_mutex_unlock(&lock); }

void spool_set_allowance(uint64_t bytes) { allowance = bytes; }
int spool_has_reached_limit(void) { return is_at_limit; }

/* Writes the path of a segment, with an ending behind it; -1 where that is too long. */
static int format_path(char *path, uint32_t number, const char *ending) {
    char which[16] = "";
    if (number) snprintf(which, sizeof which, "~%06u", (unsigned)number);
    return snprintf(path, PATH_MAX, "%s%s.spool%s", base, which, ending) < PATH_MAX ? 0 : -1;
}

static int open_out_of_the_way(const char *path, int flags) {
    int low = open(path, O_WRONLY | O_APPEND | O_CLOEXEC | O_NOFOLLOW | flags, 0600);
    /* Out of the way of programs that count on low numbers, or close all they did not open. */
    int high = low < 0 ? -1 : fcntl(low, F_DUPFD_CLOEXEC, 200);
    /* Whatever umask the program has. */
    if (flags & O_CREAT && low >= 0) fchmod(low, 0600);
    if (high < 0) return low;
    close(low);
    return high;
}

/* The program may handle the signal of a limit on the size of files: one that our file causes is blocked, and
 * dropped. */
static int block_size_signal(sigset_t *before) {
    sigset_t own;
    sigemptyset(&own);
    sigaddset(&own, SIGXFSZ);
    pthread_sigmask(SIG_BLOCK, &own, before);
    return !sigismember(before, SIGXFSZ);
}

static void drop_size_signal(const sigset_t *before, int held) {
    static const struct timespec at_once;
    sigset_t own;
    int error = errno;
    sigemptyset(&own);
    sigaddset(&own, SIGXFSZ);
    if (held) sigtimedwait(&own, NULL, &at_once);
    pthread_sigmask(SIG_SETMASK, before, NULL);
    errno = error;
}

/* Ends the file, and writes why into the place kept for that. */
static void write_stop(int error) {
    stop_t stop = {.time = clock_ns(CLOCK_REALTIME), .error = (uint32_t)error};
    struct stat now;
    sigset_t before;
    is_full = 1;
    if (fstat(file, &now) || now.st_size < (off_t)(HEADER_BYTES + 8 + sizeof stop)) return;
    int held = block_size_signal(&before);
    fcntl(file, F_SETFL, fcntl(file, F_GETFL) & ~O_APPEND); /* which overrides the place */
    if (pwrite(file, &stop, sizeof stop, HEADER_BYTES + 8) < 0) is_full = 1;
    drop_size_signal(&before, held);
}

static int is_our_file(int other) {
    struct stat now;
    return !fstat(other, &now) && now.st_dev == identity.st_dev && now.st_ino == identity.st_ino;
}

static void close_file(void) {
    if (file >= 0 && is_our_file(file)) close(file);
    file = -1;
}

/* Before each use: the program may have closed all files that it did not open, and have one of its own there. */
static int ensure_open(void) {
    char path[PATH_MAX];
    if (!is_open || is_full) return 0;
    if (file >= 0 && is_our_file(file)) return 1;
    file = format_path(path, segment, "") ? -1 : open_out_of_the_way(path, 0);
    if (file >= 0 && is_our_file(file)) return 1;
    if (file >= 0) close(file);
    file = -1;
    has_lost = 1;
    return 0;
}

static void skip_written(struct iovec *parts, size_t size) {
    for (; size; parts++) {
        size_t taken = size < parts->iov_len ? size : parts->iov_len;
        parts->iov_base = (unsigned char *)parts->iov_base + taken;
        parts->iov_len -= taken;
        size -= taken;
    }
}

static void note_lost_writes(void) {
    if (!has_lost) return;
    has_lost = 0;
    spool_write_loss(0, "the program had closed the file, and it could not be opened again at once");
}

static void write_all(struct iovec *parts, int count) {
    size_t left = 0;
    sigset_t before;
    for (int i = 0; i < count; i++) left += parts[i].iov_len;
    if (!left || !ensure_open()) return;
    if (left > allowance) {
        is_at_limit = 1;
        write_stop(STOP_SIZE);
        return;
    }
    if (allowance != UINT64_MAX) allowance -= left;
    int held = block_size_signal(&before);
    while (left) {
        ssize_t wrote = writev(file, parts, count);
        if (wrote < 0 && errno == EINTR) continue;
        if (wrote <= 0) break;
        left -= (size_t)wrote;
        skip_written(parts, (size_t)wrote);
    }
    drop_size_signal(&before, held);
    if (left) write_stop(errno);
    else note_lost_writes();
}

/* Creates a file that was not there: a process that executes another program, or one in another container, may have
 * left one under the same process id. */
static int create_file(const char *directory, const char *host) {
    char path[PATH_MAX], again[16] = "";
    for (int i = 1; i < 1000; i++) {
        if (snprintf(base, sizeof base, "%s/%s.%d%s", directory, host, (int)getpid(), again) >=
            (int)sizeof base || format_path(path, 0, ""))
            return -1;
        int made = open_out_of_the_way(path, O_CREAT | O_EXCL);
        if (made >= 0 || errno != EEXIST) return made;
        snprintf(again, sizeof again, "-%d", i);
    }
    return -1;
}

/* Writes what every file begins with, in one piece. */
static int write_header(int fresh) {
    struct {
        struct { char magic[8]; uint32_t version, pid; uint64_t realtime, monotonic; } head;
        struct { uint32_t tag, used; stop_t stop; } place;
    } first = {{{'G', 'P', 'U', 'T', 'R', 'S', 'P', 'L'}, SPOOL_VERSION, (uint32_t)getpid(), clock_ns(CLOCK_REALTIME),
                clock_ns(CLOCK_MONOTONIC)}, {TAG_STOP, sizeof(stop_t), {0}}};
    struct iovec parts[] = {{&first, sizeof first}, {preamble, preamble_size}};
    return writev(fresh, parts, 2) == (ssize_t)(sizeof first + preamble_size) ? 0 : -1;
}

int spool_open(const char *directory) {
    char host[HOST_NAME_MAX + 1] = "host";
    gethostname(host, sizeof host - 1);
    file = create_file(directory, host);
    if (file < 0 || fstat(file, &identity)) return -1;
    is_open = !write_header(file);
    return is_open ? 0 : (ftruncate(file, 0), -1);
}

/* The next file appears with its header, or not at all. */
void spool_begin_segment(uint32_t keep) {
    char path[PATH_MAX], fresh[PATH_MAX];
    if (spool_flush() || !ensure_open()) return;
    if (segment >= keep && !format_path(path, segment - keep, "")) unlink(path);
    if (format_path(path, segment + 1, "") || format_path(fresh, segment + 1, ".new")) return;
    int next = open_out_of_the_way(fresh, O_CREAT | O_TRUNC);
    if (next < 0 || write_header(next) || rename(fresh, path)) {
        if (next >= 0) close(next);
        unlink(fresh); /* the old one goes on */
        return;
    }
    close_file();
    file = next;
    fstat(file, &identity);
    segment++;
}

uint32_t spool_segment_number(void) { return segment; }

void spool_end_at_limit(void) {
    if (ensure_open() && !spool_flush()) write_stop(STOP_SIZE);
}

static void flush_chunk(chunk_t *chunk) {
    struct iovec part = {chunk, 8 + chunk->used};
    if (chunk->used) write_all(&part, 1);
    chunk->used = 0;
}

static chunk_t *find_chunk(uint32_t tag) {
    for (int i = 0; i < kinds; i++)
        if (chunks[i].tag == tag) return &chunks[i];
    chunks[kinds].tag = tag;
    return &chunks[kinds++];
}

void spool_add_record(uint32_t tag, const void *record, size_t size) {
    if (!is_open || is_full) return;
    chunk_t *chunk = find_chunk(tag);
    if (chunk->used + size > CHUNK_BYTES) flush_chunk(chunk);
    memcpy(chunk->bytes + chunk->used, record, size);
    chunk->used += (uint32_t)size;
}

void spool_write_chunk(uint32_t tag, const void *head, size_t head_size, const void *tail, size_t size) {
    uint32_t start[] = {tag, (uint32_t)(head_size + size)};
    struct iovec parts[] = {{start, sizeof start}, {(void *)(uintptr_t)head, head_size},
                            {(void *)(uintptr_t)tail, size}};
    write_all(parts, 3);
}

static size_t format_info(char *text, size_t room, const char *key, const char *value) {
    int size = snprintf(text, room, "%s=%s", key, value);
    return size < 0 ? 0 : (size_t)size < room ? (size_t)size : room - 1;
}

void spool_write_moment(const char *key, uint64_t moment) {
    char text[128], number[32];
    snprintf(number, sizeof number, "%llu", (unsigned long long)moment);
    spool_write_chunk(TAG_INFO, text, format_info(text, sizeof text, key, number), "", 0);
}

void spool_write_info(const char *key, const char *value) {
    char text[4096];
    uint32_t head[2] = {TAG_INFO, (uint32_t)format_info(text, sizeof text, key, value)};
    unsigned char *grown = realloc(preamble, preamble_size + sizeof head + head[1]);
    spool_write_chunk(TAG_INFO, text, head[1], "", 0);
    if (!grown) return;
    preamble = grown;
    memcpy(preamble + preamble_size, head, sizeof head);
    memcpy(preamble + preamble_size + sizeof head, text, head[1]);
    preamble_size += sizeof head + head[1];
}

void spool_write_loss(uint64_t records, const char *why) {
    uint64_t head[2] = {clock_ns(CLOCK_REALTIME), records};
    spool_write_chunk(TAG_LOSS, head, sizeof head, why, strlen(why));
}

int spool_flush(void) {
    for (int i = 0; i < kinds; i++) flush_chunk(&chunks[i]);
    return is_full ? -1 : 0;
}

void spool_close(void) {
    spool_flush();
    close_file();
    is_open = 0;
}

void spool_abandon(void) {
    close_file();
    is_open = 0;
    pthread_mutex_init(&lock, NULL);
}

/* Each process of a recording looks at the folder for itself, so that the limit on its size holds without the
 * recorder. Each writes every second. */
#define SILENT_S 5

static int is_written_lately(const char *name, const struct stat *file) {
    size_t length = strlen(name), suffix = strlen(".spool");
    return length > suffix && !strcmp(name + length - suffix, ".spool") &&
           time(NULL) - file->st_mtime < SILENT_S;
}

uint64_t spool_folder_size(const char *directory, uint32_t *writers) {
    uint64_t bytes = 0;
    struct stat file;
    *writers = 0;
    DIR *folder = opendir(directory);
    if (!folder) return 0;
    for (struct dirent *entry; (entry = readdir(folder));)
        if (!fstatat(dirfd(folder), entry->d_name, &file, AT_SYMLINK_NOFOLLOW) &&
            S_ISREG(file.st_mode)) {
            bytes += (uint64_t)file.st_size;
            *writers += (uint32_t)is_written_lately(entry->d_name, &file);
        }
    closedir(folder);
    return bytes;
}
