#include "calls.h"
#include "cupti.h"
#include "spool.h"

#include <string.h>

/* Starts of the names of calls that issue work, have it captured, wait for it, or take memory. */
static const char *const calls[] = {
    "cudaLaunch", "cudaGraphLaunch", "cudaMemcpy", "cudaMemset", "cudaMalloc", "cudaFree",
    "cudaHostAlloc", "cudaHostRegister", "cudaHostUnregister", "cudaDeviceSynchronize",
    "cudaStreamSynchronize", "cudaEventSynchronize", "cudaThreadSynchronize", "cudaMemPrefetch",
    "cudaStreamBeginCapture", "cudaStreamEndCapture", "cuStreamBeginCapture", "cuStreamEndCapture",
    "cuLaunch", "cuGraphLaunch", "cuMemcpy", "cuMemset", "cuMemAlloc", "cuMemFree", "cuMemHostAlloc",
    "cuMemHostRegister", "cuMemHostUnregister", "cuMemCreate", "cuMemMap", "cuMemUnmap",
    "cuMemRelease", "cuMemSetAccess", "cuCtxSynchronize", "cuStreamSynchronize",
    "cuEventSynchronize", "cuMemPrefetch"};

/* Single calls are chosen, in a way that can be turned off and on again: see calls_choose. */
static int chosen, lasting;

void calls_name(void) {
    for (int domain = DOMAIN_DRIVER; domain <= DOMAIN_RUNTIME; domain++)
        for (uint32_t id = 1; id < CALLS; id++) {
            const char *name = NULL;
            if (cupti.callback_name(domain, id, &name) || !name) continue;
            for (size_t i = 0; i < sizeof calls / sizeof *calls; i++)
                if (!strncmp(name, calls[i], strlen(calls[i])))
                    api_names[domain][id] = spool_name(name);
        }
}

uint32_t calls_id(const char *name) {
    for (uint32_t id = 1; id < CALLS; id++) {
        const char *own = NULL;
        if (!cupti.callback_name(DOMAIN_DRIVER, id, &own) && own && !strcmp(own, name)) return id;
    }
    return 0;
}

static int can_choose(void) { return cupti.enable_runtime_api && cupti.enable_driver_api; }

static void choose_each(int on, int named) {
    for (uint32_t id = 1; id < CALLS; id++) {
        if (!api_names[DOMAIN_RUNTIME][id] == !named) cupti.enable_runtime_api(id, (uint8_t)on);
        if (!api_names[DOMAIN_DRIVER][id] == !named) cupti.enable_driver_api(id, (uint8_t)on);
    }
}

/* Chosen one by one before there is a context, nothing else of the API is watched, which is cheap; and
 * once calls were recorded so, they can be turned off and on (lasting). Calls chosen later are not
 * recorded (all seen with CUPTI 13.0): then the whole kind is turned on and the other calls are taken
 * out, which costs more. Before 12.8 single calls cannot be chosen: decoding drops the rest. */
void calls_choose(int on) {
    if (lasting) {
        if (on != chosen) choose_each(on, 1);
        chosen = on;
        return;
    }
    (on ? cupti.enable : cupti.disable)(KIND_RUNTIME);
    (on ? cupti.enable : cupti.disable)(KIND_DRIVER);
    if (on && can_choose()) choose_each(0, 0);
}

void calls_make_last(void) { lasting = can_choose(); }
int calls_do_last(void) { return lasting; }
int calls_are_chosen(void) { return chosen; }
void calls_forget(void) { lasting = chosen = 0; }
