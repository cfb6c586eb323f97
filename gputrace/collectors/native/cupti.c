#include "cupti.h"

#include <dlfcn.h>

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
