/* A libcuda.so.1 with two GPUs. */
#include <stdint.h>
#include <stdio.h>
#include <string.h>

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

int cuDeviceGetUuid(uint8_t *uuid, int device) {
    memset(uuid, 0xa0 + device, 16);
    return 0;
}
