/* A libcuda.so.1 with two GPUs. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

/* Told to who watches calls. */
int cuDriverGetVersion(int *version) {
    void *cupti = dlopen("libcupti.so.13", RTLD_NOW | RTLD_NOLOAD);
    void (*tell)(void) = NULL;
    if (cupti) *(void **)&tell = dlsym(cupti, "fake_get_version");
    if (tell) tell();
    *version = 13000;
    return 0;
}

int cuDeviceGetCount(int *count) {
    *count = 2;
    return 0;
}

int cuDeviceGet(int *device, int ordinal) {
    *device = ordinal;
    return 0;
}

int cuDeviceGetPCIBusId(char *text, int size, int device) {
    snprintf(text, (size_t)size, "0000:%02X:00.0", 0x3b - 0x20 * device);
    return 0;
}

int cuDeviceGetName(char *text, int size, int device) {
    snprintf(text, (size_t)size, "Fake GPU %d", device);
    return 0;
}

/* An H200's, which nsys shows as 1.98 GHz, 132 multiprocessors and 4,814,304,000,000 bytes a second. */
int cuDeviceGetAttribute(int *value, int attribute, int device) {
    static const int values[] = {[13] = 1980000, [16] = 132, [36] = 3201000, [37] = 6016,
                                 [38] = 62914560, [75] = 9, [76] = 0};
    (void)device;
    if (attribute < 0 || attribute > 76) return 1;
    *value = values[attribute];
    return 0;
}

int cuDeviceTotalMem_v2(size_t *bytes, int device) {
    *bytes = 150109880320 + (size_t)device;
    return 0;
}

int cuDeviceGetUuid(uint8_t *uuid, int device) {
    memset(uuid, 0xa0 + device, 16);
    return 0;
}
