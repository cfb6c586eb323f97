/*
 * What stands for CUDA in the program that faults are injected into: it loads what the driver would
 * load, and gives fake_cupti.c a call and a kernel for each launch, if anybody listens.
 *
 * Each launch is noted in the program's ledger (ledger.py has its layout): memory that is shared with
 * a file, so that it outlives every end of the program and needs no descriptor.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum { RUNTIME = 5, KERNEL = 10, LAUNCH = 211, MOST = 65536, ALTERNATE = 1 << 16 };

typedef struct { uint64_t ready, pid, ended, launches, steps, left, times[MOST]; } ledger_t;

static void (*emit)(const void *, uint64_t);
static ledger_t *ledger;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static uint32_t correlations;
static int hurried;

static uint64_t clock_ns(int which) {
    struct timespec now;
    clock_gettime(which, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

static void put32(uint8_t *record, int at, uint32_t value) { memcpy(record + at, &value, 4); }
static void put64(uint8_t *record, int at, uint64_t value) { memcpy(record + at, &value, 8); }

/* The collector loads it as CUDA starts, or where the program is armed, as the first window opens. */
static void find_cupti(void) {
    void *found = emit ? NULL : dlopen("libcupti.so.13", RTLD_NOW | RTLD_NOLOAD);
    if (found) *(void **)&emit = dlsym(found, "fake_emit");
}

/* As cuInit does: 1 where somebody may listen. PATH is the ledger's; it stays in memory to the last. */
int gpu_start(const char *path) {
    const char *injected = getenv("CUDA_INJECTION64_PATH");
    void *library = injected ? dlopen(injected, RTLD_NOW | RTLD_LOCAL) : NULL, *entry;
    int file = open(path, O_RDWR | O_CLOEXEC);
    ledger = mmap(NULL, sizeof *ledger, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    if (!library || !(entry = dlsym(library, "InitializeInjection"))) return 0;
    ((int (*)(void))entry)();
    find_cupti();
    return 1;
}

static void call(uint64_t now, uint32_t correlation) {
    uint8_t record[256] = {0};
    put32(record, 0, RUNTIME);
    put32(record, 4, LAUNCH);
    put64(record, 8, now - 3000);
    put64(record, 16, now - 2100);
    put32(record, 24, (uint32_t)getpid());
    put32(record, 28, (uint32_t)syscall(SYS_gettid));
    put32(record, 32, correlation);
    emit(record, now);
}

static void kernel(uint64_t now, uint32_t correlation, uint32_t number) {
    uint8_t record[256] = {0};
    put32(record, 0, KERNEL);
    put64(record, 16, now - 2000);
    put64(record, 24, now - 500);
    put32(record, 44, 7);
    put32(record, 48, 13);
    put32(record, 52, number);
    put32(record, 92, correlation);
    put64(record, 104, (uint64_t)(uintptr_t)"sgemm_128x64");
    emit(record, now);
}

/* One kernel, whose grid is as wide as its number. */
void gpu_launch(void) {
    pthread_mutex_lock(&lock);
    uint32_t number = (uint32_t)ledger->launches, correlation = ++correlations;
    uint64_t now = clock_ns(CLOCK_REALTIME);
    if (number < MOST) {
        ledger->times[number] = clock_ns(CLOCK_MONOTONIC);
        find_cupti();
        if (emit) {
            call(now, correlation);
            kernel(now, correlation, number);
        }
        ledger->launches = number + 1;
    }
    pthread_mutex_unlock(&lock);
}

static void *hurry(void *unused) {
    struct timespec pause = {0, 500000};
    while (hurried) {
        gpu_launch();
        nanosleep(&pause, NULL);
    }
    return unused;
}

/* A thread that launches until the process ends. */
int gpu_hurry(void) {
    pthread_t thread;
    hurried = 1;
    return pthread_create(&thread, NULL, hurry, NULL) || pthread_detach(thread);
}

static void on_fault(int number) {
    static const char text[] = "handled on a stack of its own\n";
    int here = (char *)&number > (char *)0;
    _exit(write(1, text, sizeof text - 1) > 0 && here ? 42 : 43);
}

/* Has a signal handled on a stack of its own, as programs do that look for overflows of the stack. */
int gpu_own_stack(int number) {
    stack_t stack = {.ss_sp = malloc(ALTERNATE), .ss_size = ALTERNATE};
    struct sigaction action = {.sa_handler = on_fault, .sa_flags = SA_ONSTACK};
    return !stack.ss_sp || sigaltstack(&stack, NULL) || sigaction(number, &action, NULL);
}
