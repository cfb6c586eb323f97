/*
 * A libcupti whose driver goes away: fake_cupti.c, which it loads, with functions that fail.
 * FAULT_CUPTI: NAME CODE FROM, where the FROM-th call and all later ones of the function (of any, for
 * the name *) give the code, and do nothing.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stddef.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static char failing[64];
static int code;
static unsigned from;
static atomic_uint calls;
static void *working;

__attribute__((constructor)) static void begin(void) {
    const char *text = getenv("FAULT_CUPTI");
    working = dlopen("libcupti.so.13", RTLD_NOW);
    if (text && sscanf(text, "%63s %d %u", failing, &code, &from) != 3) abort();
}

static int fails(const char *name) {
    if (strcmp(failing, "*") && strcmp(failing, name)) return 0;
    return 1 + atomic_fetch_add(&calls, 1) >= from ? code : 0;
}

#define FUNCTION(name, parameters, arguments)                         \
    int name parameters {                                             \
        int (*real) parameters, failed = fails(#name);                \
        *(void **)&real = dlsym(working, #name);                      \
        return failed ? failed : real arguments;                      \
    }

typedef void (*any_t)(void);

FUNCTION(cuptiGetVersion, (uint32_t *a), (a))
FUNCTION(cuptiSubscribe, (void **a, any_t b, void *c), (a, b, c))
FUNCTION(cuptiUnsubscribe, (void *a), (a))
FUNCTION(cuptiEnableCallback, (uint32_t a, void *b, int c, uint32_t d), (a, b, c, d))
FUNCTION(cuptiEnableDomain, (uint32_t a, void *b, int c), (a, b, c))
FUNCTION(cuptiFinalize, (void), ())
FUNCTION(cuptiActivityRegisterCallbacks, (any_t a, any_t b), (a, b))
FUNCTION(cuptiActivityEnable, (int a), (a))
FUNCTION(cuptiActivityDisable, (int a), (a))
FUNCTION(cuptiActivityEnableDriverApi, (uint32_t a, uint8_t b), (a, b))
FUNCTION(cuptiActivityEnableRuntimeApi, (uint32_t a, uint8_t b), (a, b))
FUNCTION(cuptiActivityFlushAll, (uint32_t a), (a))
FUNCTION(cuptiActivityGetNextRecord, (uint8_t *a, size_t b, void **c), (a, b, c))
FUNCTION(cuptiActivityGetNumDroppedRecords, (void *a, uint32_t b, size_t *c), (a, b, c))
FUNCTION(cuptiActivityRegisterTimestampCallback, (any_t a), (a))
FUNCTION(cuptiSetThreadIdType, (uint32_t a), (a))
FUNCTION(cuptiGetCallbackName, (int a, uint32_t b, const char **c), (a, b, c))
