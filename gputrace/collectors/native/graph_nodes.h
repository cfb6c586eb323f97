/* Which thread made each node of the program's CUDA graphs, and when: for --graph-nodes. */
#pragma once

#include <stdint.h>

/* Has SUBSCRIBER be told of nodes that are made or copied; nothing where this CUPTI cannot number them. */
void graph_nodes_watch(void *subscriber);

/* CUPTI tells of a resource, in the thread of the program that makes it. */
void graph_nodes_note(uint32_t id, const void *resource);

/* Adds all nodes that were noted to the spool. */
void graph_nodes_write(void);
