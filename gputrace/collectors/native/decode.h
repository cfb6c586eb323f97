/* Records of CUPTI to records of the spool. All with the spool locked, but for what says otherwise. */
#pragma once

#include "calls.h"

#include <stdint.h>

/* Adds one record to the spool. */
void decode(const void *record);

/* The records that follow were made after CUPTI was let go of, or used by others: ids of calls in them begin at 1
 * again, and are made to go on from the ones before. Needs no lock: the writer alone decodes. */
void decode_restart_numbering(void);

/* Whether a graph was in any record. Needs no lock. */
int decode_has_seen_graphs(void);

/* Whether a graph was replayed of which no node was seen. Takes the lock. */
int decode_has_graphs_without_nodes(void);

/* Whether records name threads by pthread_self; set before records come. */
extern int threads_by_self;
