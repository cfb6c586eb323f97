/* Which thread a record is of.
 *
 * CUPTI can put the system's thread id into its records, with a system call for each: 4 % of a step that
 * is bound by launches (measured on an H200). By default it puts pthread_self there. Threads make
 * themselves known when CUPTI asks them for a timestamp, and the one is found for the other.
 */
#pragma once

#include <stdint.h>

/* CLOCK_REALTIME in nanoseconds, as CUPTI has it by default; takes note of a new thread. */
uint64_t threads_timestamp(void);

/* The system's id of the thread whose pthread_self, cut to 32 bits, is SELF at a moment; 0 where it
 * never took a timestamp. A thread that has ended may leave its pthread_self to a new one. */
uint32_t threads_system_id(uint32_t self, uint64_t when);

/* In a forked child, whose parent's threads may have held the lock. */
void threads_reset_in_child(void);
