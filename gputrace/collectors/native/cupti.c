#define _GNU_SOURCE
#include "cupti.h"
#include "spool.h"

#include <dlfcn.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>

#define MAX_REPORTED 8 /* functions that failed */

struct cupti cupti;

int cupti_load(void *library) {
    static const struct { void *slot; const char *name; } symbols[] = {
        {&cupti.version, "cuptiGetVersion"},
        {&cupti.subscribe, "cuptiSubscribe"},
        {&cupti.unsubscribe, "cuptiUnsubscribe"},
        {&cupti.enable_callback, "cuptiEnableCallback"},
        {&cupti.enable_domain, "cuptiEnableDomain"},
        {&cupti.register_callbacks, "cuptiActivityRegisterCallbacks"},
        {&cupti.enable, "cuptiActivityEnable"},
        {&cupti.disable, "cuptiActivityDisable"},
        {&cupti.enable_runtime_api, "cuptiActivityEnableRuntimeApi"},
        {&cupti.enable_driver_api, "cuptiActivityEnableDriverApi"},
        {&cupti.flush, "cuptiActivityFlushAll"},
        {&cupti.next_record, "cuptiActivityGetNextRecord"},
        {&cupti.dropped, "cuptiActivityGetNumDroppedRecords"},
        {&cupti.thread_id_type, "cuptiSetThreadIdType"},
        {&cupti.register_timestamp, "cuptiActivityRegisterTimestampCallback"},
        {&cupti.callback_name, "cuptiGetCallbackName"},
        {&cupti.finalize, "cuptiFinalize"},
        {&cupti.enable_hw_trace, "cuptiActivityEnableHWTrace"},
        {&cupti.graph_node_id, "cuptiGetGraphNodeId"},
        {&cupti.result_string, "cuptiGetResultString"},
    };
    for (size_t i = 0; i < sizeof symbols / sizeof *symbols; i++) {
        void *symbol = dlsym(library, symbols[i].name);
        memcpy(symbols[i].slot, &symbol, sizeof symbol);
    }
    int complete = cupti.version && cupti.subscribe && cupti.unsubscribe && cupti.enable_callback &&
                   cupti.register_callbacks && cupti.enable && cupti.disable && cupti.flush &&
                   cupti.next_record && cupti.callback_name;
    return complete ? 0 : -1;
}

int cupti_check_locked(int code, const char *function) {
    static const char *reported[MAX_REPORTED];
    const char *name = NULL;
    char why[192];
    int at = 0;
    if (!code) return 0;
    while (at < MAX_REPORTED && reported[at] && strcmp(reported[at], function)) at++;
    if (at == MAX_REPORTED || reported[at]) return code;
    reported[at] = function;
    if (cupti.result_string && cupti.result_string(code, &name)) name = NULL;
    snprintf(why, sizeof why, "%s failed (%d%s%s)", function, code, name ? ", " : "", name ? name : "");
    spool_write_loss(0, why);
    return code;
}

int cupti_check(int code, const char *function) {
    spool_lock();
    cupti_check_locked(code, function);
    spool_unlock();
    return code;
}

/* ---- the libcupti that suits this process, which must have only one, of the major version of its CUDA runtime
 * ---- */

static const int majors[] = {13, 12, 11};

static void *open_library(const char *path, int flags, char *found) {
    void *library = dlopen(path, flags);
    if (library) snprintf(found, PATH_MAX, "%.*s", PATH_MAX - 1, path);
    return library;
}

/* Returns the major version of the CUDA runtime that is loaded, with its folder, by /proc/self/maps; 0 if none is. */
static int find_loaded_runtime(char *folder) {
    char line[PATH_MAX + 256];
    int major = 0;
    FILE *maps = fopen("/proc/self/maps", "re");
    if (!maps) return 0;
    while (!major && fgets(line, sizeof line, maps)) {
        char *path = strchr(line, '/'), *name = path ? strstr(path, "/libcudart.so.") : NULL;
        if (!name) continue;
        major = atoi(name + strlen("/libcudart.so."));
        snprintf(folder, PATH_MAX, "%.*s", (int)(name - path), path);
    }
    fclose(maps);
    return major;
}

static void *find_beside_runtime(const char *folder, int major, char *found) {
    /* Wheels of CUDA 12 have a folder a component, those of 13 one for all; toolkits have extras. */
    static const char *const places[] = {"%s/libcupti.so.%d", "%s/../../cuda_cupti/lib/libcupti.so.%d",
                                         "%s/../extras/CUPTI/lib64/libcupti.so.%d",
                                         "%s/../../../extras/CUPTI/lib64/libcupti.so.%d"};
    char path[PATH_MAX + 64];
    void *library = NULL;
    for (size_t i = 0; !library && i < sizeof places / sizeof *places; i++) {
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wformat-nonliteral"
        snprintf(path, sizeof path, places[i], folder, major);
#pragma GCC diagnostic pop
        library = open_library(path, RTLD_NOW | RTLD_GLOBAL, found);
    }
    return library;
}

/* In a folder that GPUTRACE_CUPTI_FOLDERS names, with colons between: NVIDIA's wheels that are installed with
 * gputrace, for where neither the system nor the program has a libcupti. */
static void *find_installed_wheel(int major, char *found) {
    const char *folder = getenv("GPUTRACE_CUPTI_FOLDERS");
    char path[PATH_MAX];
    void *library = NULL;
    while (!library && folder && *folder) {
        int length = (int)strcspn(folder, ":");
        snprintf(path, sizeof path, "%.*s/libcupti.so.%d", length, folder, major);
        library = open_library(path, RTLD_NOW | RTLD_GLOBAL, found);
        folder += length + (folder[length] == ':');
    }
    return library;
}

static void *find_of_major(int major, char *found) {
    char path[PATH_MAX];
    void *library;
    snprintf(path, sizeof path, "libcupti.so.%d", major);
    if ((library = open_library(path, RTLD_NOW | RTLD_GLOBAL, found))) return library;
    snprintf(path, sizeof path, "/usr/local/cuda-%d/extras/CUPTI/lib64/libcupti.so.%d", major, major);
    if ((library = open_library(path, RTLD_NOW | RTLD_GLOBAL, found))) return library;
    snprintf(path, sizeof path, "/usr/local/cuda/extras/CUPTI/lib64/libcupti.so.%d", major);
    if ((library = open_library(path, RTLD_NOW | RTLD_GLOBAL, found))) return library;
    return find_installed_wheel(major, found);
}

void *find_cupti(char *found, const char **why) {
    const char *named = getenv("GPUTRACE_CUPTI");
    char folder[PATH_MAX] = "", name[64];
    void *library;
    *why = "GPUTRACE_CUPTI names it";
    if (named && *named) return open_library(named, RTLD_NOW | RTLD_GLOBAL, found);
    *why = "the program has it loaded";
    for (size_t i = 0; i < sizeof majors / sizeof *majors; i++) {
        snprintf(name, sizeof name, "libcupti.so.%d", majors[i]);
        if ((library = open_library(name, RTLD_NOW | RTLD_NOLOAD, found))) return library;
    }
    int major = find_loaded_runtime(folder);
    *why = "it is beside the CUDA runtime of the program";
    if (major && (library = find_beside_runtime(folder, major, found))) return library;
    *why = "it is the first of the major version of the program's CUDA runtime";
    if (major && (library = find_of_major(major, found))) return library;
    *why = "no CUDA runtime is loaded, and it is the first of the newest major version";
    for (size_t i = 0; !major && i < sizeof majors / sizeof *majors; i++)
        if ((library = find_of_major(majors[i], found))) return library;
    return NULL;
}
