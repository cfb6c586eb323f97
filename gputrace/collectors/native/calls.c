#include "calls.h"
#include "names.h"

#include <string.h>

/* Starts of the names of calls that issue work, have it captured, wait for it, or take memory. */
static const char *const recorded[] = {
    "cudaLaunch", "cudaGraphLaunch", "cudaMemcpy", "cudaMemset", "cudaMalloc", "cudaFree",
    "cudaHostAlloc", "cudaHostRegister", "cudaHostUnregister", "cudaDeviceSynchronize",
    "cudaStreamSynchronize", "cudaEventSynchronize", "cudaThreadSynchronize", "cudaMemPrefetch",
    "cudaStreamBeginCapture", "cudaStreamEndCapture", "cuStreamBeginCapture", "cuStreamEndCapture",
    "cuLaunch", "cuGraphLaunch", "cuMemcpy", "cuMemset", "cuMemAlloc", "cuMemFree", "cuMemHostAlloc",
    "cuMemHostRegister", "cuMemHostUnregister", "cuMemCreate", "cuMemMap", "cuMemUnmap",
    "cuMemRelease", "cuMemSetAccess", "cuCtxSynchronize", "cuStreamSynchronize",
    "cuEventSynchronize", "cuMemPrefetch"};

uint32_t call_names[3][CALLS];

/* Calls are chosen one by one, see calls_record; and such a choice is on. */
static int is_by_id, is_on;

void calls_find_names(void) {
    for (int domain = DOMAIN_DRIVER; domain <= DOMAIN_RUNTIME; domain++)
        for (uint32_t id = 1; id < CALLS; id++) {
            const char *name = NULL;
            if (cupti.callback_name(domain, id, &name) || !name) continue;
            for (size_t i = 0; i < sizeof recorded / sizeof *recorded; i++)
                if (!strncmp(name, recorded[i], strlen(recorded[i])))
                    call_names[domain][id] = names_add(name);
        }
}

uint32_t calls_find_id(const char *name) {
    for (uint32_t id = 1; id < CALLS; id++) {
        const char *own = NULL;
        if (!cupti.callback_name(DOMAIN_DRIVER, id, &own) && own && !strcmp(own, name)) return id;
    }
    return 0;
}

static int can_choose_single(void) { return cupti.enable_runtime_api && cupti.enable_driver_api; }

/* Turns the calls on or off that have a name here, or all others. */
static void set_each(int on, int with_name) {
    for (uint32_t id = 1; id < CALLS; id++) {
        if (!call_names[DOMAIN_RUNTIME][id] == !with_name) cupti.enable_runtime_api(id, (uint8_t)on);
        if (!call_names[DOMAIN_DRIVER][id] == !with_name) cupti.enable_driver_api(id, (uint8_t)on);
    }
}

/* Where calls are chosen one by one before there is a context, nothing else of the API is watched, which is cheap;
 * and once some were recorded so, they can be turned off and on again. Single calls chosen later are not recorded
 * (all seen with CUPTI 13.0): then the whole kind is turned on and the other calls are taken out, which costs
 * more. Before 12.8 single calls cannot be chosen at all: decoding drops the rest. */
int calls_record(int on) {
    if (is_by_id) {
        if (on != is_on) set_each(on, 1);
        is_on = on;
        return 0;
    }
    int (*set)(int) = on ? cupti.enable : cupti.disable;
    int of_runtime = set(KIND_RUNTIME), of_driver = set(KIND_DRIVER);
    if (on && can_choose_single()) set_each(0, 0);
    return of_runtime ? of_runtime : of_driver;
}

void calls_enable_by_id(void) { is_by_id = can_choose_single(); }
int calls_are_by_id(void) { return is_by_id; }
int calls_are_recorded_singly(void) { return is_on; }
void calls_reset(void) { is_by_id = is_on = 0; }
