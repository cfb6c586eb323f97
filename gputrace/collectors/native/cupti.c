#include "cupti.h"
#include "spool.h"

#include <dlfcn.h>
#include <stdio.h>

#define MOST_TOLD 8

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
    static const char *told[MOST_TOLD];
    const char *name = NULL;
    char why[192];
    int at = 0;
    if (!code) return 0;
    while (at < MOST_TOLD && told[at] && strcmp(told[at], function)) at++;
    if (at == MOST_TOLD || told[at]) return code;
    told[at] = function;
    if (cupti.result_string && cupti.result_string(code, &name)) name = NULL;
    snprintf(why, sizeof why, "%s failed (%d%s%s)", function, code, name ? ", " : "", name ? name : "");
    spool_loss(0, why);
    return code;
}

int cupti_check(int code, const char *function) {
    spool_lock();
    cupti_check_locked(code, function);
    spool_unlock();
    return code;
}
