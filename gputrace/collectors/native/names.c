/* Names of the records: each has a number in the process, and is in each file that has records of it. */
#include "spool.h"

#include <stdlib.h>
#include <string.h>

/* By number less 1, with the file that last had it, counted from 1. */
static struct name { char *text; uint32_t told; } *names;
static size_t count, most;

/* Numbers by content: open addressing, grown at half full. */
static uint32_t *places;
static size_t room;

static size_t hash(const char *text) { /* FNV-1a */
    uint64_t h = 14695981039346656037u;
    for (; *text; text++) h = (h ^ (unsigned char)*text) * 1099511628211u;
    return (size_t)h;
}

static size_t place_of(const char *text) {
    size_t at = hash(text) & (room - 1);
    while (places[at] && strcmp(names[places[at] - 1].text, text)) at = (at + 1) & (room - 1);
    return at;
}

static int grow(void) {
    size_t larger = room ? room * 2 : 1024;
    struct name *more = realloc(names, larger / 2 * sizeof *names);
    if (!more) return -1;
    names = more;
    most = larger / 2;
    uint32_t *fresh = calloc(larger, sizeof *fresh);
    if (!fresh) return -1;
    free(places);
    places = fresh;
    room = larger;
    for (size_t i = 0; i < count; i++) places[place_of(names[i].text)] = (uint32_t)i + 1;
    return 0;
}

void spool_use(uint32_t id) {
    if (!id || id > count || names[id - 1].told == spool_segment() + 1) return;
    names[id - 1].told = spool_segment() + 1;
    spool_chunk(TAG_NAME, &id, sizeof id, names[id - 1].text, strlen(names[id - 1].text));
}

uint32_t spool_name(const char *text) {
    if (!text || ((count >= most || count * 2 >= room) && grow())) return 0;
    size_t at = place_of(text);
    if (!places[at]) {
        names[count] = (struct name){strdup(text), 0};
        if (!names[count].text) return 0;
        places[at] = (uint32_t)++count;
    }
    spool_use(places[at]);
    return places[at];
}
