#ifndef GPUTRACE_LIBRARY_H
#define GPUTRACE_LIBRARY_H

/* A handle of libcupti, and in FOUND (PATH_MAX bytes) what it was opened as; NULL where there is none.
 * GPUTRACE_CUPTI names one by its path. WHY is by what this one was chosen. */
void *find_cupti(char *found, const char **why);

#endif
