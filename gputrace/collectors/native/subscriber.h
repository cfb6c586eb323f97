/* CUPTI's only place for a tool that is told of CUDA's calls: ours while there is need. */
#pragma once

/* Whether cudaProfilerStart and Stop decide what is recorded. */
void subscriber_init(int by_profiler);

/* To be called in cuInit, before the first of those below: what the program needs us to be told:
 * SERIAL_GRAPHS, whether calls that make graphs are to wait for each other. */
void subscriber_look(int serial_graphs);

/* Takes the place; -1 where another tool has it. */
int subscriber_take(void);

/* Takes it where it is needed while CUPTI records, or before. */
void subscriber_take_if_needed(int records);

/* Leaves it to others unless it is needed, and for another profiler unless cudaProfilerStart is heeded. */
void subscriber_release(int to_profiler);

/* Has `capture_call_ends` called as any call of CUDA's ends, or no more; -1 where that cannot be. */
int subscriber_watch_all(int on);

/* CUPTI was let go of, and the place with it. */
void subscriber_forget(void);
