#define _GNU_SOURCE
#include "devices.h"
#include "spool.h"

#include <dlfcn.h>

/* Numbers of CUdevice_attribute; clocks are in kHz, the bus in bits. */
enum { CLOCK_RATE = 13, MULTIPROCESSORS = 16, MEMORY_CLOCK = 36, MEMORY_BUS = 37, L2_CACHE = 38,
       COMPUTE_MAJOR = 75, COMPUTE_MINOR = 76 };

static void read_properties(void *cuda, int device, device_t *row) {
    int (*get_attribute)(int *, int, int), (*get_memory)(size_t *, int);
    static const int attributes[] = {CLOCK_RATE, MULTIPROCESSORS, MEMORY_CLOCK, MEMORY_BUS, L2_CACHE,
                                     COMPUTE_MAJOR, COMPUTE_MINOR};
    int values[COMPUTE_MINOR + 1] = {0};
    size_t bytes = 0;
    *(void **)&get_attribute = dlsym(cuda, "cuDeviceGetAttribute");
    *(void **)&get_memory = dlsym(cuda, "cuDeviceTotalMem_v2");
    for (size_t i = 0; get_attribute && i < sizeof attributes / sizeof *attributes; i++)
        if (get_attribute(&values[attributes[i]], attributes[i], device)) values[attributes[i]] = 0;
    if (get_memory && !get_memory(&bytes, device)) row->memory = bytes;
    row->clock = (uint64_t)values[CLOCK_RATE] * 1000;
    /* Two transfers a clock. */
    row->bandwidth = (uint64_t)values[MEMORY_CLOCK] * 1000 * 2 * (uint64_t)values[MEMORY_BUS] / 8;
    row->multiprocessors = (uint32_t)values[MULTIPROCESSORS];
    row->l2_cache = (uint32_t)values[L2_CACHE];
    row->compute_major = (uint32_t)values[COMPUTE_MAJOR];
    row->compute_minor = (uint32_t)values[COMPUTE_MINOR];
}

void devices_write(void) {
    void *cuda = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
    int (*count)(int *), (*get)(int *, int), (*get_bus)(char *, int, int), (*get_name)(char *, int, int);
    int (*get_uuid)(uint8_t *, int), devices = 0;
    if (!cuda) return;
    *(void **)&count = dlsym(cuda, "cuDeviceGetCount");
    *(void **)&get = dlsym(cuda, "cuDeviceGet");
    *(void **)&get_bus = dlsym(cuda, "cuDeviceGetPCIBusId");
    *(void **)&get_name = dlsym(cuda, "cuDeviceGetName");
    *(void **)&get_uuid = dlsym(cuda, "cuDeviceGetUuid");
    if (!count || !get || !get_bus || !get_name || count(&devices)) return;
    for (int i = 0, device; i < devices; i++) {
        device_t row = {.ordinal = (uint32_t)i};
        if (get(&device, i)) continue;
        get_bus(row.bus, sizeof row.bus - 1, device);
        get_name(row.name, sizeof row.name - 1, device);
        if (get_uuid) get_uuid(row.uuid, device);
        read_properties(cuda, device, &row);
        spool_lock();
        spool_write_chunk(TAG_DEVICE, &row, sizeof row, "", 0);
        spool_unlock();
    }
}
