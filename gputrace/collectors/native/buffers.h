/* Buffers of activity records: CUPTI fills them, the writer decodes and writes them. */
#pragma once

#include <stdint.h>

void buffers_init(void);

/* Tells CUPTI where its buffers come from and go to; 0 where it takes note of that. */
int buffers_register(void);

/* Waits until a buffer is completed, buffers_wake was called, or CLOCK_MONOTONIC says UNTIL. */
void buffers_wait(uint64_t until);
void buffers_wake(void);

/* What CUPTI completes from now on numbers calls anew. */
void buffers_number_anew(void);

/* Whether CUPTI has ever completed a buffer with records. */
int buffers_seen(void);

/* Decodes and writes all that is completed. Returns -1 once the disk took no more. */
int buffers_drain(void);
void buffers_throw_away(void);

/* Around fork; in the child nothing is locked. */
void buffers_lock(void);
void buffers_unlock(void);
void buffers_in_child(void);
