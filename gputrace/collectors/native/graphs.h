/* CUDA graphs that several threads make: one call at a time, where CUPTI could not bear more. */
#ifndef GPUTRACE_GRAPHS_H
#define GPUTRACE_GRAPHS_H

#include <stdint.h>

/* Whether that is to be seen to: the program has a library that does so, or GPUTRACE_SERIAL_GRAPHS says
 * 1 (or 0). To be asked in cuInit. */
int graphs_are_at_risk(void);

/* Has SUBSCRIBER told of the calls. */
void graphs_watch(void *subscriber);

/* A call of the driver's begins or ends in this thread: where it makes a graph, waits until no other does. */
void graphs_call(uint32_t id, int ends);

/* Nothing is told any more, of no call's end either. */
void graphs_forget(void);

#endif
