/* When CUPTI records, and when it is out of the program's way. */
#pragma once

#include <stdint.h>

/* Whether to record from the start of CUDA on, whether cudaProfilerStart and Stop decide, and for how
 * many nanoseconds after a window to hold CUPTI. */
void capture_init(int from_start, int by_profiler, uint64_t hold);

/* Called in cuInit, where no context is: finds CUPTI and begins, or leaves a word why not. */
void capture_start(void);

/* A call of CUDA's has ended: where CUPTI is to be let go of, it is now. */
void capture_call_ends(void);

/* Begins or ends a window. */
void capture_want(int on);

/* Ends a window for a control stretch, in which CUPTI is out of the program's way after so many
 * nanoseconds; capture_want(1) ends it. With `stays` CUPTI is not let go of but idle. Returns 0, or -1
 * where nothing is recorded now or CUPTI cannot be let go of, or the program has CUDA graphs, and nothing
 * has changed. */
int capture_rest(uint64_t hold, int stays);

/* From now on, or no longer, the nodes of CUDA graphs are recorded in place of whole replays. Returns 0, or
 * -1 where nothing is recorded, or no replay of a graph was seen whose nodes are not known, and nothing has
 * changed. */
int capture_nodes(int on);

/* Makes way for another user of CUPTI, and comes back. */
void capture_pause(int pause);

/* Before another user begins that lets go of CUPTI at its end: keeps the only subscriber from it and goes on
 * where the CUDA graphs of the program would not survive that, see hazards.c. Returns 0, or -1 where it may
 * have CUPTI. */
int capture_keeps(void);

/* Whether what happens belongs to the recording. */
int capture_is_on(void);

/* Has CUPTI hand over what is complete, or where forced all that it has. */
void capture_flush(uint32_t force);

/* What the writer does, time and again: takes over what CUPTI has completed, all of it where FLUSH
 * says so, and lets go of CUPTI after a window. Returns -1 once the disk took no more. */
int capture_tend(int flush);

/* Has calls left out and kept again where they are too many; gives back when to look again, at this or
 * for letting go of CUPTI. */
uint64_t capture_sample(uint64_t now);

/* Says in a new file that recording goes on. */
void capture_goes_on(void);

/* Ends recording, and lets go of CUPTI at the next capture_tend: the program goes on without us. */
void capture_stop(void);

/* Ends recording: the process ends, or the disk takes no more. */
void capture_end(void);

void capture_lock(void);
void capture_unlock(void);
void capture_in_child(void);
