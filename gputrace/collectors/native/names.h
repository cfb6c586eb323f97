/* Names in the spool: texts have a number each in the process, and stand in every file that has records with that
 * number; so do the names of threads. All functions need the spool locked. */
#pragma once

#include <stdint.h>

/* Returns the number of a text, which the file has from now on; 0 stands for no text. */
uint32_t names_add(const char *text);

/* Writes the text of a number, unless the file has it: needed for each record that names one which was added
 * earlier, maybe to an earlier file. */
void names_ensure_written(uint32_t id);

/* Notes that a thread is in the records. */
void names_note_thread(uint32_t thread);

/* Writes the names of noted threads that the file lacks. */
void names_write_threads(void);
