/* The little of CUPTI that the collector needs.
 *
 * Numbers and offsets are facts of the interface, the same from CUPTI 11.8 to 13.5: new versions only
 * append to records. libcupti itself is loaded at run time.
 */
#pragma once

#include <stddef.h>
#include <stdint.h>
#include <string.h>

enum { KIND_MEMCPY = 1, KIND_MEMSET = 2, KIND_KERNEL = 3, KIND_DRIVER = 4, KIND_RUNTIME = 5,
       KIND_CONCURRENT_KERNEL = 10, KIND_OVERHEAD = 17, KIND_MEMCPY2 = 22,
       KIND_SYNCHRONIZATION = 38, KIND_GRAPH_TRACE = 51 };

enum { DOMAIN_DRIVER = 1, DOMAIN_RUNTIME = 2, DOMAIN_RESOURCE = 3 };
enum { RESOURCE_NODE_CREATED = 13, RESOURCE_NODE_CLONED = 20 };
enum { THREAD_ID_SELF = 0, THREAD_ID_SYSTEM = 1, FLUSH_FORCED = 1, SITE_EXIT = 1,
       MAX_LIMIT_REACHED = 12 };

/* Ids of API calls that are looked at are below this. */
#define CALLS 2048

typedef void (*buffer_requested_t)(uint8_t **buffer, size_t *size, size_t *max_records);
typedef void (*buffer_completed_t)(void *context, uint32_t stream, uint8_t *buffer, size_t size,
                                   size_t valid);
typedef void (*callback_t)(void *user, int domain, uint32_t id, const void *data);

/* A field of a record that CUPTI wrote. */
static inline uint64_t u64_at(const void *record, size_t offset) {
    uint64_t value;
    memcpy(&value, (const char *)record + offset, sizeof value);
    return value;
}
static inline uint32_t u32_at(const void *record, size_t offset) {
    uint32_t value;
    memcpy(&value, (const char *)record + offset, sizeof value);
    return value;
}
static inline uint16_t u16_at(const void *record, size_t offset) {
    uint16_t value;
    memcpy(&value, (const char *)record + offset, sizeof value);
    return value;
}
static inline uint8_t u8_at(const void *record, size_t offset) {
    return ((const uint8_t *)record)[offset];
}

/* What libcupti offers; a function that it lacks is NULL. */
struct cupti {
    int (*version)(uint32_t *);
    int (*subscribe)(void **, callback_t, void *);
    int (*unsubscribe)(void *);
    int (*enable_callback)(uint32_t, void *, int, uint32_t);
    int (*enable_domain)(uint32_t, void *, int);
    int (*register_callbacks)(buffer_requested_t, buffer_completed_t);
    int (*enable)(int);
    int (*disable)(int);
    int (*enable_runtime_api)(uint32_t, uint8_t);
    int (*enable_driver_api)(uint32_t, uint8_t);
    int (*flush)(uint32_t);
    int (*next_record)(uint8_t *, size_t, void **);
    int (*dropped)(void *, uint32_t, size_t *);
    int (*thread_id_type)(int);
    int (*register_timestamp)(uint64_t (*)(void));
    int (*callback_name)(int, uint32_t, const char **);
    int (*finalize)(void);
    int (*enable_hw_trace)(uint8_t);
    int (*graph_node_id)(void *, uint64_t *);
    int (*result_string)(int, const char **);
};
extern struct cupti cupti;

/* Returns a handle of the libcupti that suits this process, in FOUND (PATH_MAX bytes) its path, and in WHY the
 * reason for this one; NULL where there is none. GPUTRACE_CUPTI names one by its path. */
void *find_cupti(char *found, const char **why);

/* Takes the functions of a libcupti; 0 where it has all that recording needs. */
int cupti_load(void *library);

/* Returns CODE; where it is an error, writes once for each function that it failed, since what it was to bring is
 * missing. Takes the lock of the spool; `..._locked` is for callers that hold it. */
int cupti_check(int code, const char *function);
int cupti_check_locked(int code, const char *function);
