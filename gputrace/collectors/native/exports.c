/* What the CUDA driver, NVTX clients and the hooks call. */
#include "capture.h"
#include "collector.h"
#include "cupti.h"
#include "nvtx.h"
#include "call_sampling.h"
#include "writer.h"

#define EXPORTED __attribute__((visibility("default")))

/* Called by the CUDA driver in cuInit. What it returns does not matter to the program. */
EXPORTED int InitializeInjection(void) {
    if (!collector_start()) collector_enter_cuda();
    return 1;
}

/* Called by an NVTX client's header, once, before its first range. 1 says that we took over. */
EXPORTED int InitializeInjectionNvtx2(nvtx_export_t export_table) {
    return !collector_start() && nvtx_install(export_table);
}

/* Called by the payload extension's header, once, after the function above. */
EXPORTED int InitializeInjectionNvtxExtension(nvtx_module_t *module) {
    return !collector_start() && nvtx_install_payloads(module);
}

/* Opens or closes a window: for --steps, and for programs that are armed. */
EXPORTED void gputrace_capture(int on) {
    if (!collector_is_running()) return;
    capture_set_window(on);
    collector_start_capture_if_due();
}

/* Begins a control stretch, which gputrace_capture(1) ends. See capture_begin_stretch. */
EXPORTED int gputrace_begin_stretch(uint64_t hold_ns, int stays_idle) {
    return collector_is_running() ? capture_begin_stretch(hold_ns, stays_idle) : -1;
}

/* Records the nodes of CUDA graphs, or no longer: for --graph-nodes. See capture_record_nodes. */
EXPORTED int gputrace_record_nodes(int on) { return collector_is_running() ? capture_record_nodes(on) : -1; }

/* Makes way for another user of CUPTI (torch.profiler), and comes back. */
EXPORTED void gputrace_pause(int pause) {
    if (!collector_is_running()) return;
    capture_pause(pause);
    collector_start_capture_if_due();
}

/* Keeps CUPTI from a profiler that would crash the program; asked before one of XLA begins. See
 * capture_keep_cupti. */
EXPORTED int gputrace_keep_cupti(void) { return collector_is_running() ? capture_keep_cupti() : -1; }

/* A training step has ended. */
EXPORTED void gputrace_step(void) { sampling_count_step(); }

/* Returns when all that a window had is in the file: a notebook reads it after each cell. */
EXPORTED void gputrace_write(void) {
    if (collector_is_running()) writer_write_now();
}

/* Puts the path of the libcupti that this process would take into FOUND, of PATH_MAX bytes, and returns why
 * that one; empty and NULL where there is none. For `gputrace doctor`. */
EXPORTED const char *gputrace_find_cupti(char *found) {
    const char *why;
    return find_cupti(found, &why) ? why : NULL;
}
