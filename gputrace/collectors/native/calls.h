/* Which calls CUPTI records, and how it is told so. */
#pragma once

#include <stdint.h>

/* Gives the calls that matter their names, once CUPTI is loaded and with the spool locked. */
void calls_name(void);

/* The id of a call of the driver's, 0 where there is none of that name. */
uint32_t calls_id(const char *name);

/* Before there is a context: from now on calls are chosen, where CUPTI can, in a way that can be turned
 * off and on again. */
void calls_make_last(void);
int calls_do_last(void);

/* Turns the records of the calls that matter on and off, by the cheapest way that is left. */
void calls_choose(int on);

/* Whether they are on in the way that lasts. */
int calls_are_chosen(void);

/* CUPTI has forgotten them, or may. */
void calls_forget(void);
