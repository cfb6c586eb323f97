/* CUDA graphs that several threads make: one call at a time, where CUPTI could not bear more. */
#pragma once

#include <stdint.h>

/* Has SUBSCRIBER be told of the calls that make or change graphs. */
void graphs_watch(void *subscriber);

/* A call of the driver's begins or ends in this thread: where it makes a graph, waits until no other thread makes
 * one. */
void graphs_serialize_call(uint32_t id, int ends);

/* Whether any such call has ended. */
int graphs_were_made(void);

/* Calls are no longer watched: the end of one that has begun will not be seen. */
void graphs_unlock(void);
