/* CUDA graphs that several threads make: one call at a time, where CUPTI could not bear more. */
#pragma once

#include <stdint.h>

/* Has SUBSCRIBER told of the calls. */
void graphs_watch(void *subscriber);

/* A call of the driver's begins or ends in this thread: where it makes a graph, waits until no other does. */
void graphs_call(uint32_t id, int ends);

/* Whether any such call has ended. */
int graphs_were_made(void);

/* Nothing is told any more, of no call's end either. */
void graphs_forget(void);
