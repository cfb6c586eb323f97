/* The spool file: what one process leaves behind while it is recorded; in a ring, several, of which each
 * can be read by itself.
 *
 * A header of 32 bytes, then chunks: a tag of four letters, the length of what follows in bytes,
 * and that. Records of one kind share a chunk. Everything is little-endian, times are nanoseconds of
 * CLOCK_REALTIME. A chunk cut short at the end is what a killed process was writing: readers stop
 * there. gputrace/collectors/spool/activity.py reads it; keep the two alike.
 */
#pragma once

#include <stddef.h>
#include <stdint.h>

#define SPOOL_VERSION 2u

#define TAG(a, b, c, d) \
    ((uint32_t)(a) | (uint32_t)(b) << 8 | (uint32_t)(c) << 16 | (uint32_t)(d) << 24)

enum {
    TAG_KERNEL = TAG('K', 'E', 'R', 'N'),
    TAG_COPY = TAG('C', 'O', 'P', 'Y'),
    TAG_MEMSET = TAG('M', 'S', 'E', 'T'),
    TAG_API = TAG('A', 'P', 'I', ' '),
    TAG_SYNC = TAG('S', 'Y', 'N', 'C'),
    TAG_GRAPH = TAG('G', 'R', 'P', 'H'),
    TAG_OVERHEAD = TAG('O', 'V', 'E', 'R'),
    TAG_NVTX = TAG('N', 'V', 'T', 'X'),
    TAG_MESSAGE = TAG('M', 'E', 'S', 'G'),
    TAG_NAME = TAG('N', 'A', 'M', 'E'),   /* u32 id, bytes */
    TAG_CLOCK = TAG('C', 'L', 'O', 'K'),  /* u64 realtime, monotonic, monotonic_raw */
    TAG_LOSS = TAG('L', 'O', 'S', 'S'),   /* u64 time, u64 records, text */
    TAG_FULL = TAG('F', 'U', 'L', 'L'),   /* the first chunk: stop_t */
    TAG_INFO = TAG('I', 'N', 'F', 'O'),   /* text "key=value" */
    TAG_DEVICE = TAG('D', 'E', 'V', 'I'),
    TAG_THREAD = TAG('T', 'H', 'R', 'D')  /* u32 thread, name */
};

typedef struct {
    uint64_t start, end;
    uint32_t device, context, stream, correlation, name, graph;
    int32_t grid[3], block[3];
    uint32_t registers;
    int32_t static_shared, dynamic_shared;
    uint32_t local_per_thread, local_total, launch_type;
    int64_t grid_id;
} kernel_t;

typedef struct {
    uint64_t start, end, bytes;
    uint32_t device, context, stream, correlation, source_device, destination_device;
    uint8_t copy_kind, source_kind, destination_kind, flags;
    uint32_t reserved;
} copy_t;

typedef struct {
    uint64_t start, end, bytes;
    uint32_t device, context, stream, correlation, value, memory_kind;
} memset_t;

typedef struct {
    uint64_t start, end;
    uint32_t name, thread, correlation, driver;
    int32_t result;
    uint32_t reserved;
} api_t;

typedef struct {
    uint64_t start, end;
    uint32_t type, context, stream, correlation, event, reserved;
} sync_t;

typedef struct {
    uint64_t start, end;
    uint32_t device, context, stream, correlation, graph, reserved;
} graph_t;

typedef struct {
    uint64_t start, end;
    uint32_t kind, thread;
} overhead_t;

/* The creation of a domain has the domain's number, which is its name's, and no name. */
enum { NVTX_PUSH_POP, NVTX_MARK, NVTX_START_END, NVTX_DOMAIN };

typedef struct {
    uint64_t start, end;
    uint32_t thread, name, domain, kind;
    uint32_t end_thread, range; /* of NVTX_START_END: the thread that ended it, and its number */
} nvtx_t;

/* A range of NCCL's with what its payload says: the communicator (0: not said), the bytes of the message
 * (UINT64_MAX: not said) and the peer or root in it (-1: not said); or, where there is a number of ranks,
 * a communicator that is made, and the rank in it. */
typedef struct {
    uint64_t start, end, communicator, bytes;
    uint32_t thread, name;
    int32_t peer, ranks;
} message_t;

/* In bytes, bytes a second and hertz; 0 where the driver does not say. */
typedef struct {
    uint32_t ordinal, multiprocessors;
    char bus[32], name[96];
    uint8_t uuid[16];
    uint64_t memory, bandwidth, clock;
    uint32_t l2_cache, compute_major, compute_minor, reserved;
} device_t;

/* Where a file's first chunk says why nothing follows: zeros until then. Writing over it takes no room
 * on a disk that has none. */
typedef struct {
    uint64_t time, records;
    uint32_t error, reserved; /* errno, or STOP_SIZE */
} stop_t;

/* The recording has become as large as it may. */
#define STOP_SIZE 5000u

/* Opens DIRECTORY/HOST.PID.spool, or HOST.PID-1.spool and so on; 0 where that succeeds. */
int spool_open(const char *directory);

/* Appends one record to the chunk of its kind; the chunk is written when full or at spool_flush. */
void spool_add(uint32_t tag, const void *record, size_t size);

/* Appends a chunk of its own. */
void spool_chunk(uint32_t tag, const void *head, size_t head_size, const void *tail, size_t size);

/* Goes on in a new file, HOST.PID~NUMBER.spool, which can be read without those before it: of these
 * the last KEEP stay. What was told once, and is needed again, is to be told again. */
void spool_rotate(uint32_t keep);

/* The number of the file, from 0 on. */
uint32_t spool_segment(void);

/* Bytes in the folder of the spool, of all processes, and how many of these are writing. */
uint64_t spool_folder_bytes(const char *directory, uint32_t *writers);

/* Lets so many bytes be written from now on; at the next one it stops as at spool_stop(STOP_SIZE). */
void spool_allow(uint64_t bytes);
int spool_is_at_limit(void);

/* Writes nothing more, and says why: STOP_SIZE. */
void spool_stop(uint32_t why);

/* The id of a name; each file has it before the first record that has it. 0 stands for none. */
uint32_t spool_name(const char *text);

/* To be called for a record that has an id which spool_name gave before. */
void spool_use(uint32_t id);

/* What the process says of itself, in each file; and that something is so from a moment on. */
void spool_info(const char *key, const char *value);
void spool_moment(const char *key, uint64_t moment);
void spool_loss(uint64_t records, const char *why);

/* Writes all that has been added. Returns 0, or -1 once the disk took no more. */
int spool_flush(void);
void spool_close(void);

/* Notes that a thread is in the records; spool_threads writes the names of those it has not told. */
void spool_thread(uint32_t thread);
void spool_threads(void);
void spool_forget_threads(void);

/* In a forked child: forgets the file, which is the parent's. */
void spool_forget(void);

uint64_t clock_ns(int which);

/* Serialises the functions above; held by callers that add several things. */
void spool_lock(void);
void spool_unlock(void);
