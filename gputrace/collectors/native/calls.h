/* Which API calls CUPTI records. Guarded by the lock of capture.c; the names are written in cuInit and read
 * afterwards. */
#pragma once

#include "cupti.h"

#include <stdint.h>

/* Names of the calls that are recorded, as spool ids, by domain and id; 0 for all others. */
extern uint32_t call_names[3][CALLS];

/* Fills them in, once CUPTI is loaded and with the spool locked. */
void calls_find_names(void);

/* The id of a call of the driver's; 0 where there is none of that name. */
uint32_t calls_find_id(const char *name);

/* Before there is a context: from now on calls are chosen one by one where CUPTI can do that, so that they can be
 * turned off and on again. */
void calls_enable_by_id(void);
int calls_are_by_id(void);

/* Turns the records of these calls on or off, in the cheapest way that is left; 0 where CUPTI does so. */
int calls_record(int on);

/* Whether calls that were chosen one by one are on. */
int calls_are_recorded_singly(void);

/* CUPTI has forgotten them, or may have. */
void calls_reset(void);
