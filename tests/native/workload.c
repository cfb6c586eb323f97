/*
 * A program that uses a GPU which is not there: it plays the CUDA driver, which loads the collector,
 * and gives fake_cupti.c what that GPU did. Its arguments are what it does, one after the other:
 *
 *   inject                        what cuInit does: loads CUDA_INJECTION64_PATH
 *   nvtx                          what an NVTX client does: loads NVTX_INJECTION64_PATH
 *   sample                        one record of each kind, with values of its own
 *   plain                         the same but for the launch of a graph
 *   copies                        one of each direction, 1 to 13, in an NVTX range each
 *   ranges                        NVTX ranges and marks, some across threads and domains
 *   payloads                      what NCCL does: ranges of its domain with a payload each
 *   run MS THREADS RATE           RATE kernels, with their calls, a millisecond in each thread
 *   storm KERNELS THREADS         as many, as fast as can be
 *   meanwhile KERNELS             such a storm of one thread, with NVTX ranges, beside what follows;
 *                                 a call ends after its kernel was handed over
 *   deep RANGES                   as many, one in the other
 *   unfinished MS                 a kernel that is complete only after so long
 *   annotate MS THREADS           NVTX ranges all the time; says the longest call in microseconds
 *   fork exit|_exit               a child that ends so; ends this program if the child fails
 *   exec, spawn                   this program again, for the rest of the arguments; spawn: as a child
 *   profiler, capture, pause 0|1  cudaProfilerStart and Stop, gputrace_capture, gputrace_pause
 *   rest 0|1                      gputrace_begin_stretch, in which CUPTI stays or not
 *   leave MS                      gputrace_begin_stretch, in which CUPTI is held for so long at most
 *   replays COUNT                 of a CUDA graph of two kernels, NCCL's and a copy, 5 us with pauses; 9 where
 *                                 CUPTI records its nodes; the first one instantiates it
 *   nodes 0|1                     gputrace_record_nodes; says what it gives
 *   write                         gputrace_write
 *   train STEPS LAUNCHES US       steps in NVTX ranges: an input copy, and launches with so long between
 *   step                          gputrace_step
 *   calls                         says how many calls CUPTI made records of
 *   choices                       says how often CUPTI was asked to record other calls, or none
 *   finalized                     says how often cuptiFinalize was called
 *   registrations                 says how often a clock was registered with CUPTI
 *   released NUMBER RATE          RATE kernels a millisecond until it was called so often, or a minute
 *   graphs COUNT THREADS          instantiates as many graphs in each thread, for two milliseconds each
 *   at_once                       says how many of these calls were under way at once, at most
 *   hardware                      says whether the hardware takes the times of kernels
 *   taken                         says whether somebody subscribed to CUPTI's callbacks
 *   loaded                        says whether there is a libcupti in this process
 *   keeps                         says what gputrace_keep_cupti returns
 *   attended                      waits until somebody is told of cudaProfilerStart, a minute at most
 *   line                          waits for a line on stdin
 *   sleep MS; say, complain TEXT  on stdout and on stderr
 *   return, exit, _exit CODE      the end; so are:
 *   raise SIGNAL; wait            the latter until it is killed
 *
 * Kernels of run and storm count from 0 in each thread: gridX is their number, the stream their thread.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>
#include <wchar.h>

enum { MEMCPY = 1, MEMSET = 2, DRIVER = 4, RUNTIME = 5, KERNEL = 10, OVERHEAD = 17, PEER = 22,
       SYNC = 38, GRAPH = 51 };
enum { LAUNCH = 211, COPY = 41, GET_DEVICE = 17, GET_CONTEXT = 304, LAUNCH_DRIVER = 307,
       LAUNCH_GRAPH = 311 };
enum { THREADS = 16 };

typedef struct { uint8_t bytes[256]; } record_t;
typedef struct { int number, milliseconds, rate; long count; uint64_t longest; } job_t;

static void (*emit)(const void *, uint64_t);
static void (*fake_profiler)(int);
static int (*fake_calls)(void), (*fake_choices)(void), (*fake_finalized)(void), (*fake_attended)(void);
static int (*fake_registrations)(void), (*fake_at_once)(void), (*fake_taken)(void), (*fake_graphs)(void), (*gputrace_keep_cupti)(void);
static int (*fake_hardware)(void);
static void (*fake_instantiate)(int), (*fake_node)(uintptr_t, uintptr_t);
static void (*gputrace_capture)(int), (*gputrace_pause)(int), (*gputrace_step)(void), (*gputrace_write)(void);
static int (*gputrace_begin_stretch)(uint64_t, int), (*gputrace_record_nodes)(int);
static uint32_t correlations;
static long numbers[THREADS];

static uint64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

static void sleep_us(long us) {
    struct timespec time = {us / 1000000, us % 1000000 * 1000};
    nanosleep(&time, NULL);
}

static void put8(record_t *r, int at, int value) { r->bytes[at] = (uint8_t)value; }
static void put16(record_t *r, int at, uint16_t value) { memcpy(r->bytes + at, &value, 2); }
static void put32(record_t *r, int at, uint32_t value) { memcpy(r->bytes + at, &value, 4); }
static void put64(record_t *r, int at, uint64_t value) { memcpy(r->bytes + at, &value, 8); }

/* A record whose bytes all differ from 0, so that what is read from the wrong place shows. */
static record_t record(uint32_t kind, int start_at, uint64_t start, uint64_t end) {
    record_t r;
    memset(&r, 0xee, sizeof r);
    put32(&r, 0, kind);
    put64(&r, start_at, start);
    put64(&r, start_at + 8, end);
    return r;
}

static void send(const record_t *r, uint64_t end) {
    if (emit) emit(r, end);
}

static void call_until(uint64_t end, uint32_t kind, uint32_t id, uint64_t start, uint32_t correlation,
                       uint32_t result) {
    record_t r = record(kind, 8, start, end);
    put32(&r, 4, id);
    put32(&r, 24, (uint32_t)getpid());
    put32(&r, 28, (uint32_t)syscall(SYS_gettid));
    put32(&r, 32, correlation);
    put32(&r, 36, result);
    send(&r, end);
}

static void call(uint32_t kind, uint32_t id, uint64_t start, uint32_t correlation, uint32_t result) {
    call_until(start + 900, kind, id, start, correlation, result);
}

static void on_gpu(record_t *r, int at, uint32_t device, uint32_t context, uint32_t stream) {
    put32(r, at, device);
    put32(r, at + 4, context);
    put32(r, at + 8, stream);
}

/* What the kernels that follow are called, and the graph and the node that they are runs of. */
static const char *kernel_name;
static uint32_t kernel_graph;
static uint64_t kernel_node;

static void kernel(uint64_t start, uint64_t end, uint32_t stream, uint32_t correlation, uint32_t x) {
    record_t r = record(KERNEL, 16, start, end);
    on_gpu(&r, 40, 1, 7, stream);
    put16(&r, 6, 40);
    for (int i = 0; i < 3; i++) {
        put32(&r, 52 + 4 * i, x + (uint32_t)i);
        put32(&r, 64 + 4 * i, 32u + (uint32_t)i);
    }
    put32(&r, 76, 1024);
    put32(&r, 80, 2048);
    put32(&r, 84, 16);
    put32(&r, 88, 4096);
    put64(&r, 96, 1 + x);
    put8(&r, 136, 1); /* cooperative */
    put32(&r, 92, correlation);
    const char *name = stream % 2 ? "_ZN3net5scaleIfEEvPT_f" : "sgemm_128x64";
    put64(&r, 104, (uint64_t)(uintptr_t)(kernel_name ? kernel_name : name));
    put64(&r, 144, kernel_node);
    put32(&r, 156, kernel_graph);
    send(&r, end);
}

static void copy(uint64_t start, uint32_t correlation) {
    record_t r = record(MEMCPY, 16, start, start + 500);
    on_gpu(&r, 32, 1, 7, 14);
    put8(&r, 4, 1); /* host to device */
    put8(&r, 5, 2); /* of pinned memory */
    put8(&r, 6, 3); /* to the device's */
    put8(&r, 7, 1); /* asynchronous */
    put64(&r, 8, 5000000000);
    put32(&r, 44, correlation);
    send(&r, start + 500);
}

static void peer_copy(uint64_t start, uint32_t correlation) {
    record_t r = record(PEER, 16, start, start + 600);
    on_gpu(&r, 32, 1, 7, 15);
    put8(&r, 4, 10);
    put8(&r, 5, 3);
    put8(&r, 6, 3);
    put64(&r, 8, 4096);
    put32(&r, 44, 1);
    put32(&r, 52, 0);
    put32(&r, 60, correlation);
    send(&r, start + 600);
}

static void fill(uint64_t start, uint32_t correlation) {
    record_t r = record(MEMSET, 16, start, start + 700);
    on_gpu(&r, 32, 0, 8, 16);
    put32(&r, 4, 255);
    put64(&r, 8, 64);
    put32(&r, 44, correlation);
    put16(&r, 50, 3);
    send(&r, start + 700);
}

static void graph(uint64_t start, uint64_t end, uint32_t correlation) {
    record_t r = record(GRAPH, 8, start, end);
    put32(&r, 4, correlation);
    put32(&r, 24, 1);
    put32(&r, 28, 99);
    put32(&r, 32, 7);
    put32(&r, 36, 17);
    send(&r, end);
}

static void synchronization(uint64_t start, uint32_t correlation) {
    record_t r = record(SYNC, 8, start, start + 850);
    put32(&r, 4, 3);
    put32(&r, 24, correlation);
    put32(&r, 28, 7);
    put32(&r, 32, 18);
    put32(&r, 36, 5);
    send(&r, start + 850);
}

static void overhead(uint64_t start) {
    record_t r = record(OVERHEAD, 24, start, start + 950);
    put32(&r, 4, 6 << 16);
    put32(&r, 8, 2);
    put32(&r, 12, (uint32_t)getpid());
    put32(&r, 16, (uint32_t)syscall(SYS_gettid));
    send(&r, start + 950);
}

/* All a microsecond after the other; correlations count from 101. */
static void plain(uint64_t start) {
    call(RUNTIME, LAUNCH, start, 101, 0);
    call(RUNTIME, GET_DEVICE, start, 102, 0);
    call(DRIVER, LAUNCH_DRIVER, start + 1000, 103, 2);
    call(DRIVER, GET_CONTEXT, start + 1000, 104, 0);
    kernel(start + 2000, start + 2400, 13, 101, 11);
    copy(start + 3000, 105);
    peer_copy(start + 4000, 106);
    fill(start + 5000, 107);
    synchronization(start + 7000, 109);
    overhead(start + 8000);
}

static void sample(void) {
    uint64_t start = now_ns() - 1000000;
    plain(start);
    graph(start + 6000, start + 6800, 108);
}

static void work(int thread) {
    uint32_t correlation = __atomic_add_fetch(&correlations, 1, __ATOMIC_RELAXED);
    uint64_t now = now_ns();
    call(RUNTIME, LAUNCH, now - 3000, correlation, 0);
    kernel(now - 2000, now - 500, (uint32_t)thread, correlation, (uint32_t)numbers[thread]++);
}

/* A record of each node of the replay of graph 99, which begins then; the copy takes half a microsecond. */
static void nodes(uint64_t start, uint32_t correlation) {
    static const char *const names[] = {"sgemm_128x64", "ncclDevKernel_AllReduce_Sum_f32_RING_LL", "adam"};
    copy(start, correlation);
    kernel_graph = 99;
    for (uint32_t i = 0; i < 3; i++) {
        kernel_name = names[i];
        kernel_node = 2000 + i;
        kernel(start + 2000 + i * 2500, start + 3000 + i * 2500, 14, correlation, i);
    }
    kernel_graph = 0;
    kernel_node = 0;
    kernel_name = NULL;
}

/* Three kernels are captured, and copied as the graph is instantiated: 1000 to 1002 as 2000 to 2002. */
static void capture_nodes(void) {
    for (uintptr_t i = 0; fake_node && i < 3; i++) fake_node(1000 + i, 0);
    for (uintptr_t i = 0; fake_node && i < 3; i++) {
        fake_node(2000 + i, 0);
        fake_node(2000 + i, 1000 + i);
    }
}

/* CUPTI has no record of the whole of a replay whose graph was instantiated while it recorded nodes. */
static void replays(int count) {
    static int is_whole = -1;
    if (is_whole < 0) {
        is_whole = fake_graphs && fake_graphs();
        capture_nodes();
    }
    for (int i = 0; i < count; i++) {
        uint32_t correlation = __atomic_add_fetch(&correlations, 1, __ATOMIC_RELAXED);
        uint64_t start = now_ns();
        call(RUNTIME, LAUNCH_GRAPH, start, correlation, 0);
        if (fake_graphs && !fake_graphs()) nodes(start + 1000, correlation);
        else if (is_whole) graph(start + 1000, start + 6000, correlation);
        sleep_us(20);
    }
}

static void *run(void *argument) {
    const job_t *job = argument;
    for (uint64_t end = now_ns() + (uint64_t)job->milliseconds * 1000000; now_ns() < end;) {
        for (int i = 0; i < job->rate; i++) work(job->number);
        call(RUNTIME, GET_DEVICE, now_ns() - 1000, 0, 0);
        copy(now_ns() - 1000, 0);
        sleep_us(1000);
    }
    return NULL;
}

static void *storm(void *argument) {
    const job_t *job = argument;
    for (long i = 0; i < job->count; i++) work(job->number);
    return NULL;
}

static void in_threads(void *(*function)(void *), int threads, job_t like, job_t *jobs) {
    pthread_t started[THREADS];
    for (int i = 0; i < threads && i < THREADS; i++) {
        jobs[i] = like;
        jobs[i].number = i;
        pthread_create(&started[i], NULL, function, &jobs[i]);
    }
    for (int i = 0; i < threads && i < THREADS; i++) pthread_join(started[i], NULL);
}

/* ---- NVTX, as its header does it ---- */

typedef void (*function_t)(void);
typedef struct {
    uint16_t version, size;
    uint32_t category;
    int32_t color_type;
    uint32_t color;
    int32_t payload_type, reserved;
    uint64_t payload;
    int32_t message_type;
    const void *message;
} attributes_t;

static function_t core[16], core2[16], *core_slots[16], *core2_slots[16];

static int module_table(int module, function_t ***table, unsigned *count) {
    if (module != 1 && module != 5) return 0;
    for (int i = 1; i < 16; i++) {
        core_slots[i] = &core[i];
        core2_slots[i] = &core2[i];
    }
    *table = module == 1 ? core_slots : core2_slots;
    *count = 16;
    return 1;
}

static const void *export_table(uint32_t id) {
    static const struct { size_t size; int (*get)(int, function_t ***, unsigned *); } callbacks = {
        sizeof callbacks, module_table};
    return id == 1 ? &callbacks : NULL;
}

/* The payload extension, as its header hands it to an injected library. */
typedef struct { uint64_t schema; size_t size; const void *data; } payload_t;
typedef struct {
    uint64_t flags, type;
    const char *name, *description;
    uint64_t detail, offset;
    const void *semantics, *reserved;
} entry_t;
typedef struct {
    uint64_t mask;
    const char *name;
    uint64_t type, flags;
    const entry_t *entries;
    size_t count, static_size, alignment;
    uint64_t id;
    void *extension;
} schema_t;
static intptr_t payload_slots[63];
static struct { size_t id, count; intptr_t *slots; } payload_segment = {0, 63, payload_slots};
static struct {
    uint16_t version, size, module, compatibility;
    size_t segments;
    void *segment, *get_export;
    const void *information;
} payload_module = {3, sizeof payload_module, 2, 0x0104, 1, &payload_segment, NULL, NULL};

/* A communicator of 4 ranks, in which this is rank 2; an all-reduce of 4 MiB; and a send of 8192 bytes
 * to rank 3. The first payload is there when its range ends, as NCCL has it. */
static void payloads(void) {
    enum { INT = 5, UINT64 = 18, SIZE = 22, STATIC = 1 << 24, MASK = 1 << 2 | 1 << 4 | 1 << 5 | 1 << 8 };
    const char *id = "NCCL communicator ID", *bytes = "Message size [bytes]";
    const entry_t makes[] = {{0, UINT64, id, 0, 0, 0, 0, 0}, {0, INT, "No. of ranks", 0, 0, 8, 0, 0},
                             {0, INT, "Rank", 0, 0, 12, 0, 0}};
    /* Without offsets, entries lie as in a C struct. */
    const entry_t moves[] = {{0, UINT64, id, 0, 0, 0, 0, 0}, {0, SIZE, bytes, 0, 0, 0, 0, 0},
                             {0, INT, "Peer rank", 0, 0, 0, 0, 0}};
    schema_t init = {MASK, "init", 1, 0, makes, 3, 0, 0, STATIC, NULL};
    schema_t sum = {MASK, "sum", 1, 0, moves, 2, 0, 0, STATIC + 5, NULL};
    schema_t send = {MASK, "send", 1, 0, moves, 3, 0, 0, STATIC + 9, NULL};
    struct { uint64_t id; int ranks, rank; } made = {0xfedcba9876543210u, 4, 2};
    struct { uint64_t id; size_t bytes; int peer; } message = {0xfedcba9876543210u, 4 << 20, 3};
    payload_t data = {STATIC, sizeof made, &made};
    attributes_t plain = {3, sizeof plain, 0, 0, 0, 0, 0, 0, 1, "ncclCommInitRank"}, with = plain;
    uint64_t (*schema)(void *, const schema_t *) = (void *)payload_slots[0];
    int (*end_with)(void *, const payload_t *, size_t) = (void *)payload_slots[4];
    int (*begin)(void *, const void *) = (void *)core2[4];
    if (!schema || !end_with || !begin) return;
    void *domain = ((void *(*)(const char *))core2[12])("NCCL");
    if (schema(domain, &init) != STATIC || !schema(domain, &sum) || !schema(domain, &send))
        dprintf(2, "workload: a schema was not taken\n");
    begin(domain, &plain);
    end_with(domain, &data, 1);
    with.payload_type = (int32_t)0xDFBD0009;
    with.reserved = 1;
    with.payload = (uint64_t)(uintptr_t)&data;
    for (int i = 0; i < 2; i++) {
        with.message = i ? "ncclSend" : "ncclAllReduce";
        data = (payload_t){STATIC + (i ? 9 : 5), sizeof message, &message};
        begin(domain, &with);
        ((int (*)(void *))core2[5])(domain);
        message.bytes = 8192;
    }
    data.schema = 77; /* which nobody registered */
    begin(domain, &with);
    ((int (*)(void *))core2[5])(domain);
}

static int push(const char *text) { return core[9] ? ((int (*)(const char *))core[9])(text) : -2; }
static int pop(void) { return core[11] ? ((int (*)(void))core[11])() : -2; }

static uint64_t start(const char *text) { return ((uint64_t (*)(const char *))core[5])(text); }
static void *end(void *id) {
    ((void (*)(uint64_t))core[7])((uint64_t)(uintptr_t)id);
    return NULL;
}

static void *elsewhere(void *unused) {
    push("elsewhere");
    pop();
    return unused;
}

static void ranges(void) {
    pthread_t thread;
    void *domain, *name;
    attributes_t text = {3, sizeof text, 0, 0, 0, 0, 0, 0, 1, "inner"}, registered = text;
    if (!core[9]) return;
    domain = ((void *(*)(const char *))core2[12])("trainer");
    name = ((void *(*)(void *, const char *))core2[10])(domain, "registered");
    registered.message_type = 3;
    registered.message = name;
    push("outer");
    ((int (*)(const void *))core[8])(&text);
    ((int (*)(void *, const void *))core2[4])(domain, &registered);
    pop();
    ((int (*)(void *))core2[5])(domain);
    pop();
    uint64_t one = start("one"), two = start("two");
    end((void *)(uintptr_t)one);
    pthread_create(&thread, NULL, end, (void *)(uintptr_t)two);
    pthread_join(thread, NULL);
    end((void *)(uintptr_t)two);
    ((void (*)(const char *))core[2])("mark");
    ((void (*)(void *, const void *))core2[1])(domain, &registered);
    pthread_create(&thread, NULL, elsewhere, NULL);
    pthread_join(thread, NULL);
    /* Names of wide characters. */
    push("before");
    if (core[10]) ((int (*)(const wchar_t *))core[10])(L"wide é");
    push("within");
    pop();
    pop();
    pop();
    if (pop() >= 0) dprintf(2, "workload: popped what was not there\n");
}

/* Directions 1 to 13, of kind bytes each, with a call in a range of NVTX's. */
static void copies(void) {
    for (int kind = 1; kind <= 13; kind++) {
        char text[16];
        snprintf(text, sizeof text, "copy %d", kind);
        push(text);
        uint64_t start = now_ns();
        sleep_us(50);
        call(RUNTIME, COPY, start, 200u + (uint32_t)kind, 0);
        pop();
        record_t r = record(MEMCPY, 16, now_ns(), now_ns() + 100);
        on_gpu(&r, 32, 1, 7, 14);
        put8(&r, 4, kind);
        put8(&r, 5, 1 + kind % 7);
        put8(&r, 6, 3);
        put64(&r, 8, (uint64_t)kind);
        put32(&r, 44, 200u + (uint32_t)kind);
        send(&r, now_ns());
    }
}

static void *instantiate(void *argument) {
    job_t *job = argument;
    for (long i = 0; i < job->count && fake_instantiate; i++) fake_instantiate(2);
    return NULL;
}

static void *annotate(void *argument) {
    job_t *job = argument;
    for (uint64_t end = now_ns() + (uint64_t)job->milliseconds * 1000000; now_ns() < end;) {
        uint64_t before = now_ns();
        push("range");
        pop();
        uint64_t took = now_ns() - before;
        if (took > job->longest) job->longest = took;
        job->count++;
    }
    return NULL;
}

/* The GPU does all at once, and waits for the next launch. */
static void train(int steps, int launches, int us) {
    for (int step = 0; step < steps; step++) {
        char text[16];
        snprintf(text, sizeof text, "step %d", step);
        push(text);
        for (int i = 0; i <= launches; i++) {
            uint64_t begin = now_ns();
            uint32_t correlation = ++correlations;
            while (now_ns() < begin + 1000u * (uint64_t)us) {}
            call(RUNTIME, i ? LAUNCH : COPY, begin, correlation, 0);
            if (i) kernel(begin + 1000, begin + 3000, 1, correlation, (uint32_t)step);
            else copy(begin + 1000, correlation);
        }
        pop();
        if (gputrace_step) gputrace_step();
    }
}

/* ---- the driver ---- */

static void find(void) {
    void *cupti = dlopen(getenv("GPUTRACE_CUPTI") ? getenv("GPUTRACE_CUPTI") : "libcupti.so.13",
                         RTLD_NOW | RTLD_NOLOAD);
    void *collector = dlopen(getenv("CUDA_INJECTION64_PATH"), RTLD_NOW | RTLD_NOLOAD);
    if (cupti) {
        *(void **)&emit = dlsym(cupti, "fake_emit");
        *(void **)&fake_calls = dlsym(cupti, "fake_calls");
        *(void **)&fake_choices = dlsym(cupti, "fake_choices");
        *(void **)&fake_finalized = dlsym(cupti, "fake_finalized");
        *(void **)&fake_registrations = dlsym(cupti, "fake_registrations");
        *(void **)&fake_attended = dlsym(cupti, "fake_attended");
        *(void **)&fake_profiler = dlsym(cupti, "fake_profiler");
        *(void **)&fake_instantiate = dlsym(cupti, "fake_instantiate");
        *(void **)&fake_at_once = dlsym(cupti, "fake_at_once");
        *(void **)&fake_taken = dlsym(cupti, "fake_taken");
        *(void **)&fake_graphs = dlsym(cupti, "fake_graphs");
        *(void **)&fake_hardware = dlsym(cupti, "fake_hardware");
        *(void **)&fake_node = dlsym(cupti, "fake_node");
    }
    if (collector) {
        *(void **)&gputrace_capture = dlsym(collector, "gputrace_capture");
        *(void **)&gputrace_begin_stretch = dlsym(collector, "gputrace_begin_stretch");
        *(void **)&gputrace_record_nodes = dlsym(collector, "gputrace_record_nodes");
        *(void **)&gputrace_pause = dlsym(collector, "gputrace_pause");
        *(void **)&gputrace_keep_cupti = dlsym(collector, "gputrace_keep_cupti");
        *(void **)&gputrace_step = dlsym(collector, "gputrace_step");
        *(void **)&gputrace_write = dlsym(collector, "gputrace_write");
    }
}

static int has_cupti(void) { return emit != NULL; }

static void load(const char *variable, const char *symbol) {
    const char *path = getenv(variable);
    void *library = path ? dlopen(path, RTLD_NOW | RTLD_LOCAL) : NULL, *entry = NULL;
    if (library) entry = dlsym(library, symbol);
    else if (path) dprintf(2, "workload: %s\n", dlerror());
    if (entry && !strcmp(symbol, "InitializeInjection")) ((int (*)(void))entry)();
    else if (entry) ((int (*)(const void *(*)(uint32_t)))entry)(export_table);
    entry = library ? dlsym(library, "InitializeInjectionNvtxExtension") : NULL;
    if (entry && strcmp(symbol, "InitializeInjection")) ((int (*)(void *))entry)(&payload_module);
    find();
}

static void released(int times, int rate) {
    for (int ms = 0; ms < 60000 && fake_finalized && fake_finalized() < times; ms++) {
        for (int i = 0; i < rate; i++) work(0);
        call(RUNTIME, GET_DEVICE, now_ns(), 0, 0);
        sleep_us(1000);
    }
}

static void attended(void) {
    for (int ms = 0; ms < 60000 && fake_attended && !fake_attended(); ms++) sleep_us(1000);
}

static void fork_child(const char *how) {
    int status = 0;
    pid_t child = fork();
    if (!child) {
        if (core[9]) {
            push("in the child");
            pop();
            end((void *)(uintptr_t)start("in the child"));
        }
        if (gputrace_capture) gputrace_capture(0);
        if (gputrace_pause) gputrace_pause(1);
        if (!strcmp(how, "exit")) exit(0);
        _exit(0);
    }
    waitpid(child, &status, 0);
    if (status) {
        dprintf(2, "workload: a child failed (%x)\n", (unsigned)status);
        _exit(99);
    }
}

static void again(char **arguments) {
    char *program[64] = {"workload"};
    for (int i = 0; i < 62 && arguments[i]; i++) program[i + 1] = arguments[i];
    execv("/proc/self/exe", program);
    _exit(98);
}

static int spawn(char **arguments) {
    int status = 0;
    pid_t child = fork();
    if (!child) again(arguments);
    waitpid(child, &status, 0);
    return status ? 97 : 0;
}

static void in_parallel(const char *what, int a, int threads, int c) {
    static job_t jobs[THREADS];
    job_t like = {.milliseconds = a, .rate = c, .count = threads ? a / threads : 0};
    void *(*function)(void *) = !strcmp(what, "run") ? run : !strcmp(what, "storm") ? storm : annotate;
    if (function == annotate) like.count = 0;
    in_threads(function, threads, like, jobs);
    if (function != annotate) return;
    uint64_t longest = 0;
    long count = 0;
    for (int i = 0; i < threads; i++) {
        if (jobs[i].longest > longest) longest = jobs[i].longest;
        count += jobs[i].count;
    }
    printf("%ld %llu\n", count, (unsigned long long)longest / 1000);
    fflush(stdout);
}

static void *busy(void *argument) {
    for (long i = (long)(intptr_t)argument; i > 0; i--) {
        uint32_t correlation = __atomic_add_fetch(&correlations, 1, __ATOMIC_RELAXED);
        uint64_t now = now_ns();
        kernel(now - 2000, now - 500, THREADS - 1, correlation, (uint32_t)numbers[THREADS - 1]++);
        call_until(now_ns(), RUNTIME, LAUNCH, now, correlation, 0);
        if (!core[9]) continue;
        push("busy");
        end((void *)(uintptr_t)start("started"));
        pop();
    }
    return NULL;
}

static void meanwhile(long count) {
    pthread_t thread;
    pthread_create(&thread, NULL, busy, (void *)(intptr_t)count);
    pthread_detach(thread);
}

static void deep(int ranges) {
    char text[16];
    for (int i = 0; i < ranges; i++) {
        snprintf(text, sizeof text, "%d", i);
        push(text);
    }
    while (ranges--) pop();
}

static void say(int (*number)(void)) {
    printf("%d\n", number ? number() : 0);
    fflush(stdout);
}

int main(int count, char **words) {
    (void)count;
    for (char **w = words + 1; *w; w++) {
        const char *what = *w;
        if (!strcmp(what, "inject")) {
            dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
            load("CUDA_INJECTION64_PATH", "InitializeInjection");
        } else if (!strcmp(what, "nvtx")) load("NVTX_INJECTION64_PATH", "InitializeInjectionNvtx2");
        else if (!strcmp(what, "sample")) sample();
        else if (!strcmp(what, "plain")) plain(now_ns() - 1000000);
        else if (!strcmp(what, "copies")) copies();
        else if (!strcmp(what, "step")) { if (gputrace_step) gputrace_step(); }
        else if (!strcmp(what, "write")) { if (gputrace_write) gputrace_write(); }
        else if (!strcmp(what, "ranges")) ranges();
        else if (!strcmp(what, "payloads")) payloads();
        else if (!strcmp(what, "attended")) attended();
        else if (!strcmp(what, "line")) while (getchar() > '\n') continue;
        else if (!strcmp(what, "exec")) again(w + 1);
        else if (!strcmp(what, "spawn")) return spawn(w + 1);
        else if (!strcmp(what, "wait")) for (;;) pause();
        else if (!strcmp(what, "say")) { printf("%s\n", *++w); fflush(stdout); }
        else if (!strcmp(what, "complain")) fprintf(stderr, "%s\n", *++w);
        else if (!strcmp(what, "finalized")) say(fake_finalized);
        else if (!strcmp(what, "registrations")) say(fake_registrations);
        else if (!strcmp(what, "at_once")) say(fake_at_once);
        else if (!strcmp(what, "taken")) say(fake_taken);
        else if (!strcmp(what, "loaded")) { find(); say(has_cupti); }
        else if (!strcmp(what, "keeps")) say(gputrace_keep_cupti);
        else if (!strcmp(what, "hardware")) say(fake_hardware);
        else if (!strcmp(what, "calls")) say(fake_calls);
        else if (!strcmp(what, "choices")) say(fake_choices);
        else if (!strcmp(what, "fork")) fork_child(*++w);
        else {
            int number = atoi(*++w);
            if (!strcmp(what, "return")) return number;
            if (!strcmp(what, "exit")) exit(number);
            if (!strcmp(what, "_exit")) _exit(number);
            if (!strcmp(what, "raise")) raise(number);
            if (!strcmp(what, "sleep")) sleep_us(1000L * number);
            if (!strcmp(what, "profiler") && fake_profiler) fake_profiler(number);
            if (!strcmp(what, "capture") && gputrace_capture) gputrace_capture(number);
            if (!strcmp(what, "pause") && gputrace_pause) gputrace_pause(number);
            if (!strcmp(what, "replays")) replays(number);
            if (!strcmp(what, "nodes")) printf("%d\n", gputrace_record_nodes ? gputrace_record_nodes(number) : 0);
            if (!strcmp(what, "rest") && gputrace_begin_stretch) gputrace_begin_stretch(0, number);
            if (!strcmp(what, "leave") && gputrace_begin_stretch)
                gputrace_begin_stretch(1000000u * (uint64_t)number, 0);
            if (!strcmp(what, "meanwhile")) meanwhile(number);
            if (!strcmp(what, "deep")) deep(number);
            if (!strcmp(what, "released")) {
                released(number, atoi(w[1]));
                w++;
            }
            if (!strcmp(what, "unfinished"))
                kernel(now_ns(), now_ns() + 1000000u * (uint64_t)number, 1, 1, 0);
            if (!strcmp(what, "storm") || !strcmp(what, "annotate")) {
                in_parallel(what, number, atoi(w[1]), 0);
                w++;
            }
            if (!strcmp(what, "graphs")) {
                job_t jobs[THREADS];
                in_threads(instantiate, atoi(*++w), (job_t){.count = number}, jobs);
            }
            if (!strcmp(what, "train")) {
                train(number, atoi(w[1]), atoi(w[2]));
                w += 2;
            }
            if (!strcmp(what, "run")) {
                in_parallel(what, number, atoi(w[1]), atoi(w[2]));
                w += 2;
            }
        }
    }
    return 0;
}
