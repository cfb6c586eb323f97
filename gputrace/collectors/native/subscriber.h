/* CUPTI's only place for a tool that is told of CUDA calls: ours while there is need. */
#pragma once

struct subscriber_handlers {
    void (*profiler)(int on);  /* the program calls cudaProfilerStart or Stop, where that is heeded */
    void (*call_ends)(void);   /* any call that is watched is about to return */
};

/* Whether cudaProfilerStart and Stop decide what is recorded, and whom to tell. */
void subscriber_init(int by_profiler, const struct subscriber_handlers *handlers);

/* To be called once CUPTI is found, before the functions below: finds the calls that have to be watched. SERIAL_GRAPHS:
 * whether calls that make graphs have to wait for each other. NODES: whether the nodes of graphs are noted. */
void subscriber_find_calls(int serial_graphs, int nodes);

/* Takes the place; -1 where another tool has it. */
int subscriber_take(void);

/* Takes it where that is needed: always, or with RECORDS while CUPTI records. */
void subscriber_take_if_needed(int records);

/* Leaves it to others unless it is needed; to another profiler unless cudaProfilerStart is heeded. */
void subscriber_release(int to_profiler);

/* Watches the call that the collector makes, cuDriverGetVersion; -1 where that cannot be. */
int subscriber_watch_own_call(void);

/* Watches every call of CUDA, or no longer; -1 where that cannot be. */
int subscriber_watch_all_calls(int on);

/* CUPTI was let go of, and the place with it. */
void subscriber_forget(void);
