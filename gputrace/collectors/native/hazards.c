#define _GNU_SOURCE
#include "hazards.h"

#include <link.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

/* Parts of the paths of libraries that are loaded when XLA starts CUDA. JAX starts it before it loads XLA itself. */
static const char *const xla_libraries[] = {"/jaxlib/", "xla_cuda", "libtensorflow", "_pywrap_tensorflow",
                                  "/torch_xla/", NULL};

/* Each with what was seen, where, and in how many runs.
 *
 * Peer copies: JAX 0.11 on one H100 or H200, driver 580, CUPTI 13.0.1 (130001), a step as one CUDA graph that
 * has child graphs, whose parameters XLA sets anew in each step (cuGraphExecChildGraphNodeSetParams). With
 * CONCURRENT_KERNEL, GRAPH_TRACE, MEMCPY and MEMCPY2 on, the graph fails with CUDA_ERROR_LAUNCH_FAILED within
 * 30 steps, in 71 of 92 runs. Without MEMCPY2 in none of 44, without MEMCPY in none of 4, with neither in
 * none of 30, with CUPTI 13.5.25 (130500) and all of them in none of 3. It did not help to turn kinds off
 * around the calls that make or change graphs (25 of 33 such runs failed), nor other settings of CUPTI's buffers.
 *
 * Letting go: the same program, of smaller matrices, died with SIGSEGV in 8 of 8 runs at the first
 * cuptiFinalize after graphs had been launched. PyTorch does not call it in programs with CUDA graphs
 * either. So it is not called after a graph was seen in any program (capture.c), and not at all in those
 * that make graphs sooner or later. XLA's own profiler calls it as it ends: graphs that were made while we
 * recorded then failed with CUDA_ERROR_ILLEGAL_ADDRESS in 17 of 17 runs (JAX 0.11 under jax.profiler, H100),
 * so it does not get CUPTI after any was made.
 *
 * Graphs at once: see graphs.c; of CUPTI 13.0, and not tried with others.
 *
 * Recording again after a profiler of XLA: one of one program of JAX 0.11 under jax.profiler died with SIGSEGV
 * when CUPTI 13.0.1 was taken up again (H100). The hooks do not ask for it (wrappers.py). */
static const struct {
    uint32_t before;
    const char *const *libraries;
    int hazard;
} known[] = {
    {130500, xla_libraries, HAZARD_PEER_COPIES},
    {UINT32_MAX, xla_libraries, HAZARD_GRAPHS_AT_ONCE | HAZARD_LETTING_GO},
};

static int is_one_of(struct dl_phdr_info *library, size_t size, void *parts) {
    (void)size;
    for (const char *const *part = parts; *part; part++)
        if (library->dlpi_name && strstr(library->dlpi_name, *part)) return 1;
    return 0;
}

int hazards_find(uint32_t version) {
    const char *asked = getenv("GPUTRACE_SERIAL_GRAPHS");
    int found = 0;
    for (size_t i = 0; i < sizeof known / sizeof *known; i++)
        if (version < known[i].before && dl_iterate_phdr(is_one_of, (void *)(uintptr_t)known[i].libraries))
            found |= known[i].hazard;
    if (asked && *asked)
        found = *asked == '1' ? found | HAZARD_GRAPHS_AT_ONCE : found & ~HAZARD_GRAPHS_AT_ONCE;
    return found;
}
