/* What CUPTI is known not to survive, and in which programs; it is left out or done otherwise there. */
#pragma once

#include <stdint.h>

enum {
    /* Recording copies between GPUs. */
    HAZARD_PEER_COPIES = 1,
    /* Threads that make CUDA graphs at the same time. */
    HAZARD_GRAPHS_AT_ONCE = 2,
    /* Letting go of CUPTI once there is a CUDA graph. */
    HAZARD_LETTING_GO = 4
};

/* The hazards of this program with a CUPTI of VERSION, as cuptiGetVersion has it; to be asked in cuInit.
 * GPUTRACE_SERIAL_GRAPHS, 1 or 0, decides the second. */
int hazards_find(uint32_t version);
