#define _GNU_SOURCE
#include "system.h"

#include <stdlib.h>
#include <time.h>

uint64_t clock_ns(int clock) {
    struct timespec now;
    clock_gettime(clock, &now);
    return (uint64_t)now.tv_sec * SECOND + (uint64_t)now.tv_nsec;
}

uint64_t environment_number(const char *name) {
    const char *value = getenv(name);
    return value ? strtoull(value, NULL, 10) : 0;
}

void block_signals(sigset_t *before, int faults) {
    static const int of_faults[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGSYS};
    sigset_t blocked;
    sigfillset(&blocked);
    for (size_t i = 0; faults == ALLOW_FAULTS && i < sizeof of_faults / sizeof *of_faults; i++)
        sigdelset(&blocked, of_faults[i]);
    pthread_sigmask(SIG_BLOCK, &blocked, before);
}

void restore_signals(const sigset_t *before) { pthread_sigmask(SIG_SETMASK, before, NULL); }
