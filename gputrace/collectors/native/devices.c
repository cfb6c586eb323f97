/* What the process says of its cards and clocks. */
#define _GNU_SOURCE
#include "devices.h"
#include "spool.h"

#include <dlfcn.h>
#include <time.h>

void tell_devices(void) {
    void *cuda = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
    int (*count)(int *), (*get)(int *, int), (*bus)(char *, int, int), (*name)(char *, int, int);
    int (*uuid)(uint8_t *, int), devices = 0;
    if (!cuda) return;
    *(void **)&count = dlsym(cuda, "cuDeviceGetCount");
    *(void **)&get = dlsym(cuda, "cuDeviceGet");
    *(void **)&bus = dlsym(cuda, "cuDeviceGetPCIBusId");
    *(void **)&name = dlsym(cuda, "cuDeviceGetName");
    *(void **)&uuid = dlsym(cuda, "cuDeviceGetUuid");
    if (!count || !get || !bus || !name || count(&devices)) return;
    for (int i = 0, device; i < devices; i++) {
        device_t row = {.ordinal = (uint32_t)i};
        if (get(&device, i)) continue;
        bus(row.bus, sizeof row.bus - 1, device);
        name(row.name, sizeof row.name - 1, device);
        if (uuid) uuid(row.uuid, device);
        spool_lock();
        spool_chunk(TAG_DEVICE, &row, sizeof row, "", 0);
        spool_unlock();
    }
}

void tell_clocks(void) {
    uint64_t now[3] = {clock_ns(CLOCK_REALTIME), clock_ns(CLOCK_MONOTONIC),
                       clock_ns(CLOCK_MONOTONIC_RAW)};
    spool_lock();
    spool_chunk(TAG_CLOCK, now, sizeof now, "", 0);
    spool_unlock();
}
