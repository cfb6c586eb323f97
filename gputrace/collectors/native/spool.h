/* The spool file: what a process leaves behind while it is recorded; in a long recording several files, each of
 * which can be read by itself.
 *
 * A header of 32 bytes, then chunks: a tag of four letters, the number of bytes that follow, and those bytes.
 * Records of one kind share a chunk. Everything is little-endian, times are nanoseconds of CLOCK_REALTIME. A chunk
 * cut short at the end is what a killed process was writing: readers stop there.
 * gputrace/collectors/spool/activity.py reads it; keep the two alike.
 */
#pragma once

#include <stddef.h>
#include <stdint.h>

#define SPOOL_VERSION 3u

#define TAG(a, b, c, d) \
    ((uint32_t)(a) | (uint32_t)(b) << 8 | (uint32_t)(c) << 16 | (uint32_t)(d) << 24)

enum {
    TAG_KERNEL = TAG('K', 'E', 'R', 'N'),
    TAG_COPY = TAG('C', 'O', 'P', 'Y'),
    TAG_MEMSET = TAG('M', 'S', 'E', 'T'),
    TAG_API = TAG('A', 'P', 'I', ' '),
    TAG_SYNC = TAG('S', 'Y', 'N', 'C'),
    TAG_GRAPH = TAG('G', 'R', 'P', 'H'),
    TAG_NODE = TAG('N', 'O', 'D', 'E'),
    TAG_OVERHEAD = TAG('O', 'V', 'E', 'R'),
    TAG_NVTX = TAG('N', 'V', 'T', 'X'),
    TAG_MESSAGE = TAG('M', 'E', 'S', 'G'),
    TAG_NAME = TAG('N', 'A', 'M', 'E'),   /* u32 id, bytes */
    TAG_CLOCK = TAG('C', 'L', 'O', 'K'),  /* u64 realtime, monotonic, monotonic_raw */
    TAG_LOSS = TAG('L', 'O', 'S', 'S'),   /* u64 time, u64 records, text */
    TAG_STOP = TAG('F', 'U', 'L', 'L'),   /* the first chunk: stop_t */
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
    uint64_t node; /* of a graph; 0 if it is of none */
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

/* A node of a graph: when it was made, by which thread, and the number of the node that it is a copy of, 0 if it is
 * none. */
typedef struct {
    uint64_t start, end, node, original; /* start and end are one moment */
    uint32_t thread, reserved;
} node_t;

typedef struct {
    uint64_t start, end;
    uint32_t kind, thread;
} overhead_t;

/* A row of NVTX_DOMAIN is the creation of a domain; a domain's number is the number of its name. */
enum { NVTX_PUSH_POP, NVTX_MARK, NVTX_START_END, NVTX_DOMAIN };

typedef struct {
    uint64_t start, end;
    uint32_t thread, name, domain, kind;
    uint32_t end_thread, range; /* of NVTX_START_END: the thread that ended it, and its id */
} nvtx_t;

/* A range of NCCL's with what its payload says: the communicator (0 if unknown), the bytes of the message
 * (UINT64_MAX if unknown) and the peer or root (-1 if unknown). Where there is a number of ranks, the range is the
 * making of a communicator, and the peer is the own rank. */
typedef struct {
    uint64_t start, end, communicator, bytes;
    uint32_t thread, name;
    int32_t peer, ranks;
} message_t;

/* In bytes, bytes a second and hertz; 0 where the driver has no answer. */
typedef struct {
    uint32_t ordinal, multiprocessors;
    char bus[32], name[96];
    uint8_t uuid[16];
    uint64_t memory, bandwidth, clock;
    uint32_t l2_cache, compute_major, compute_minor, reserved;
} device_t;

/* A file's first chunk, zeros until the file ends early: then why. It is written over, which needs no room on a full
 * disk. */
typedef struct {
    uint64_t time, records;
    uint32_t error, reserved; /* errno, or STOP_SIZE */
} stop_t;

/* The recording is as large as it may become. */
#define STOP_SIZE 5000u

/* Opens DIRECTORY/HOST.PID.spool, or HOST.PID-1.spool and so on; 0 where that succeeds. */
int spool_open(const char *directory);

/* Appends a record to the chunk of its kind, which is written when it is full and at spool_flush. */
void spool_add_record(uint32_t tag, const void *record, size_t size);

/* Writes a chunk of its own: HEAD, then TAIL, of SIZE bytes. */
void spool_write_chunk(uint32_t tag, const void *head, size_t head_size, const void *tail, size_t size);

/* Goes on in a new file, HOST.PID~NUMBER.spool, and removes older ones but the last KEEP. What an earlier file said
 * once has to be said again. */
void spool_begin_segment(uint32_t keep);

/* The number of the file, from 0 on. */
uint32_t spool_segment_number(void);

/* Bytes of all files in the spool's folder, and how many processes are writing there. */
uint64_t spool_folder_size(const char *directory, uint32_t *writers);

/* Lets so many more bytes be written; the next one ends the file as spool_end_at_limit does. */
void spool_set_allowance(uint64_t bytes);
int spool_has_reached_limit(void);

/* Ends the file for STOP_SIZE: nothing more is written. */
void spool_end_at_limit(void);

/* What is so for the whole process, which each file begins with; what is so from a moment on; what was lost. */
void spool_write_info(const char *key, const char *value);
void spool_write_moment(const char *key, uint64_t moment);
void spool_write_loss(uint64_t records, const char *why);

/* Writes all records that were added. Returns -1 once the disk took no more, else 0. */
int spool_flush(void);
void spool_close(void);

/* In a forked child: leaves the file to the parent. */
void spool_abandon(void);

/* Held around calls of the functions above, but for spool_open, spool_folder_size and spool_abandon. */
void spool_lock(void);
void spool_unlock(void);
