#ifndef GPUTRACE_LIBRARY_H
#define GPUTRACE_LIBRARY_H

/* A handle of libcupti, and in FOUND (PATH_MAX bytes) what it was opened as; NULL where there is none.
 * GPUTRACE_CUPTI names one by its path. */
void *find_cupti(char *found);

#endif
