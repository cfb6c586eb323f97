/* Buffers of activity records: CUPTI fills them, the writer decodes and writes them. */
#pragma once

#include <stdint.h>

void buffers_init(void);

/* Tells CUPTI where buffers come from and go to; 0 where it accepts that. */
int buffers_register(void);

/* Waits until a buffer is completed, buffers_wake was called, or CLOCK_MONOTONIC says UNTIL. */
void buffers_wait(uint64_t until);
void buffers_wake(void);

/* CUPTI was let go of, or somebody else had it: it has no buffer of ours, and in those that it completes from now on,
 * calls are numbered from 1 again. */
void buffers_restart_numbering(void);

/* Whether CUPTI has ever completed a buffer with records. */
int buffers_had_records(void);

/* Whether CUPTI has none of our buffers. It keeps one back until the GPU has done all that the records in it are of;
 * so once nothing is recorded any more, none is left of which it lacks the times. */
int buffers_are_back(void);

/* Decodes and writes all completed buffers. Returns -1 once the disk took no more. */
int buffers_decode(void);

/* Drops them. */
void buffers_discard(void);

/* Around a fork; in the child nothing is locked. */
void buffers_lock(void);
void buffers_unlock(void);
void buffers_reset_in_child(void);
