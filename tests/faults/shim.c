/*
 * Faults of the machine, by LD_PRELOAD, in the processes of one run. Environment:
 *
 *   FAULT_IN        recorder or program: where (a program has GPUTRACE_DIR); everywhere unless told
 *   FAULT_DISK      ERRNO BYTES NEEDLE: once so many bytes were written to files whose path has the
 *                   needle in it, writing to them and making them fails
 *   FAULT_SLOW      MICROSECONDS NEEDLE: each write to such a file takes so much longer
 *   FAULT_CLOCK     AT NS, again and again: from AT (CLOCK_MONOTONIC, ns) on the wall clock is NS later
 *   FAULT_MEMORY    FROM TO: the FROM-th to TO-th request for memory by the collector is refused
 *   FAULT_THREADS   no thread is made for the collector
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <link.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

enum { JUMPS = 16 };

static int disk_error, no_threads, jumps;
static long long disk_room;
static atomic_llong written;
static unsigned slow_us;
static char disk_needle[64], slow_needle[64];
static struct { long long at, by; } jump[JUMPS];
static unsigned refused_from, refused_to;
static atomic_uint requests;
static uintptr_t collector_low, collector_high;

#define REAL(name)                                                          \
    static __typeof__(&name) real;                                          \
    if (!real) *(void **)&real = dlsym(RTLD_NEXT, #name)

__attribute__((constructor)) static void begin(void) {
    const char *where = getenv("FAULT_IN"), *text;
    int in_program = getenv("GPUTRACE_DIR") != NULL, size;
    if (where && strcmp(where, in_program ? "program" : "recorder")) return;
    if ((text = getenv("FAULT_DISK"))) sscanf(text, "%d %lld %63s", &disk_error, &disk_room, disk_needle);
    if ((text = getenv("FAULT_SLOW"))) sscanf(text, "%u %63s", &slow_us, slow_needle);
    if ((text = getenv("FAULT_MEMORY"))) sscanf(text, "%u %u", &refused_from, &refused_to);
    no_threads = getenv("FAULT_THREADS") != NULL;
    for (text = getenv("FAULT_CLOCK"); text && jumps < JUMPS; text += size)
        if (sscanf(text, "%lld %lld%n", &jump[jumps].at, &jump[jumps].by, &size) == 2) jumps++;
        else break;
}

/* ---- the disk ---- */

static int leads_to(int file, const char *needle) {
    char link[32], path[4096];
    int saved = errno;
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    ssize_t size = file > 2 ? readlink(link, path, sizeof path - 1) : -1;
    errno = saved;
    if (size < 0) return 0;
    path[size] = 0;
    return strstr(path, needle) != NULL;
}

/* How many of so many bytes are taken; -1 where none is. */
static ssize_t room_for(int file, size_t size) {
    if (slow_us && leads_to(file, slow_needle)) usleep(slow_us);
    if (!disk_error || !leads_to(file, disk_needle)) return (ssize_t)size;
    long long room = disk_room - atomic_fetch_add(&written, (long long)size);
    if (room >= (long long)size) return (ssize_t)size;
    if (room > 0) return (ssize_t)room;
    errno = disk_error;
    return -1;
}

ssize_t write(int file, const void *bytes, size_t size) {
    REAL(write);
    ssize_t room = room_for(file, size);
    return room < 0 ? -1 : real(file, bytes, (size_t)room);
}

ssize_t pwrite64(int file, const void *bytes, size_t size, off64_t at) {
    REAL(pwrite64);
    ssize_t room = room_for(file, size);
    return room < 0 ? -1 : real(file, bytes, (size_t)room, at);
}

/* Over what is there: a full disk has room for that. */
ssize_t pwrite(int file, const void *bytes, size_t size, off_t at) {
    REAL(pwrite);
    int is_full = disk_error == ENOSPC || disk_error == EDQUOT;
    if (disk_error && !is_full && room_for(file, size) < 0) return -1;
    return real(file, bytes, size, at);
}

ssize_t writev(int file, const struct iovec *parts, int count) {
    REAL(writev);
    size_t size = 0;
    for (int i = 0; i < count; i++) size += parts[i].iov_len;
    ssize_t room = room_for(file, size);
    if (room < 0) return -1;
    if ((size_t)room == size) return real(file, parts, count);
    struct iovec first = parts[0];
    if (first.iov_len > (size_t)room) first.iov_len = (size_t)room;
    return real(file, &first, 1);
}

static int refuses(const char *path, int flags) {
    if (!disk_error || !(flags & O_CREAT) || !strstr(path, disk_needle)) return 0;
    if (atomic_load(&written) < disk_room) return 0;
    errno = disk_error;
    return 1;
}

#define OPENS(name)                                                     \
    int name(const char *path, int flags, ...) {                        \
        REAL(name);                                                     \
        va_list rest;                                                   \
        va_start(rest, flags);                                          \
        mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(rest, mode_t) : 0; \
        va_end(rest);                                                   \
        return refuses(path, flags) ? -1 : real(path, flags, mode);     \
    }

OPENS(open)
OPENS(open64)

/* ---- the clock ---- */

static long long monotonic_ns(void) {
    struct timespec now;
    syscall(SYS_clock_gettime, CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000LL + now.tv_nsec;
}

static long long later_by(void) {
    long long now = jumps ? monotonic_ns() : 0, sum = 0;
    for (int i = 0; i < jumps; i++)
        if (now >= jump[i].at) sum += jump[i].by;
    return sum;
}

int clock_gettime(clockid_t clock, struct timespec *time) {
    REAL(clock_gettime);
    int failed = real(clock, time);
    if (failed || clock != CLOCK_REALTIME || !jumps) return failed;
    long long ns = time->tv_sec * 1000000000LL + time->tv_nsec + later_by();
    time->tv_sec = ns / 1000000000LL;
    time->tv_nsec = ns % 1000000000LL;
    return 0;
}

time_t time(time_t *place) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (place) *place = now.tv_sec;
    return now.tv_sec;
}

int gettimeofday(struct timeval *restrict place, void *restrict zone) {
    struct timespec now;
    (void)zone;
    clock_gettime(CLOCK_REALTIME, &now);
    place->tv_sec = now.tv_sec;
    place->tv_usec = now.tv_nsec / 1000;
    return 0;
}

/* ---- memory and threads, of the collector alone ---- */

static int take_range(struct dl_phdr_info *info, size_t size, void *unused) {
    (void)size, (void)unused;
    if (!strstr(info->dlpi_name, "_collector")) return 0;
    collector_low = info->dlpi_addr;
    for (int i = 0; i < info->dlpi_phnum; i++) {
        const ElfW(Phdr) *part = &info->dlpi_phdr[i];
        uintptr_t end = info->dlpi_addr + part->p_vaddr + part->p_memsz;
        if (part->p_type == PT_LOAD && end > collector_high) collector_high = end;
    }
    return 1;
}

void *dlopen(const char *path, int flags) {
    REAL(dlopen);
    void *library = real(path, flags);
    if (library && path && !collector_low && strstr(path, "_collector"))
        dl_iterate_phdr(take_range, NULL);
    return library;
}

static int is_collector(const void *caller) {
    uintptr_t at = (uintptr_t)caller;
    return collector_low && at >= collector_low && at < collector_high;
}

static int is_refused(const void *caller) {
    if (!refused_from || !is_collector(caller)) return 0;
    unsigned number = 1 + atomic_fetch_add(&requests, 1);
    if (number < refused_from || number > refused_to) return 0;
    errno = ENOMEM;
    return 1;
}

#define CALLER __builtin_return_address(0)

extern void *__libc_malloc(size_t), *__libc_calloc(size_t, size_t), *__libc_realloc(void *, size_t);

void *malloc(size_t size) { return is_refused(CALLER) ? NULL : __libc_malloc(size); }
void *calloc(size_t count, size_t size) {
    return is_refused(CALLER) ? NULL : __libc_calloc(count, size);
}
void *realloc(void *old, size_t size) {
    return is_refused(CALLER) ? NULL : __libc_realloc(old, size);
}

int posix_memalign(void **place, size_t alignment, size_t size) {
    REAL(posix_memalign);
    return is_refused(CALLER) ? ENOMEM : real(place, alignment, size);
}

char *strdup(const char *text) {
    size_t size = strlen(text) + 1;
    char *copy = is_refused(CALLER) ? NULL : __libc_malloc(size);
    return copy ? memcpy(copy, text, size) : NULL;
}

int pthread_create(pthread_t *thread, const pthread_attr_t *like, void *(*function)(void *), void *with) {
    REAL(pthread_create);
    return no_threads && is_collector(CALLER) ? EAGAIN : real(thread, like, function, with);
}
