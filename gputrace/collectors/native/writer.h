/* The thread that writes: it decodes what CUPTI hands over, when a buffer is full and each second; opens and
 * closes windows; begins new files in a recording of hours; and stops at the limit on its size. */
#pragma once

/* Reads the limits on files, in DIRECTORY, which is kept. */
void writer_init(const char *directory);

/* Starts the thread, or ends it and waits for that. 0, or -1 where no thread can be had. */
int writer_start(void);
void writer_stop(void);

/* Writes all that CUPTI hands over at once, the GPUs and the clocks; may be called by any thread. */
void writer_write_now(void);

/* Writes the moment on three clocks, and the names of threads that are new in the records. */
void writer_write_clocks(void);

/* In a forked child, which has no such thread. */
void writer_reset_in_child(void);
