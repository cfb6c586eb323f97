/*
 * A libnvidia-ml.so.1 that says what a text file tells it to: the file that FAKE_NVML names.
 * Lines, FUNCTION without its nvml prefix, GPU a number or *; later lines win:
 *
 *   init CODE                         what nvmlInitWithFlags returns
 *   gpus N                            2 unless told
 *   ancestor A B LEVEL                both ways; 50 (SYS) unless told
 *   link A LINK B                     NVLink to GPU B, or to NVSwitch where B is -1
 *   fail FUNCTION GPU CODE [FROM]     from the FROM-th call on (1: all of them); a CODE below 0
 *                                     is a signal that ends the process
 *   say FUNCTION GPU VALUE…           one value a call, the last one again and again
 *   field NUMBER GPU START STEP       a counter; fields that have no line are not supported
 *   perlink                           NVLink fields answer by link only, not for all links
 *   lost GPU TICK                     from the TICK-th nvmlDeviceGetMemoryInfo_v2 on
 *   slow FUNCTION MICROSECONDS        how long a call takes
 *   gpm GPU MILLISECONDS              from one change of the counters of GpmMetricsGet to the next;
 *                                     a GPU that has no such line does not support them
 *   metric NUMBER VALUE…              percent or MiB/s, one value a change, the last one again and
 *                                     again; metrics that have no line are not supported
 *   process GPU PID BYTES KIND        a process with a context: KIND is compute, mps or mig
 *   use GPU PID PERCENT               how much it computes; no process does unless told
 *
 * The file that FAKE_NVML_CALLS names gets a line for each call: FUNCTION GPU. Layouts and numbers are those of nvml.h.
 */
#include <fcntl.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

enum { GPUS = 16, RULES = 128, VALUES = 16, FUNCTIONS = 64, LINKS = 18, ANY = -1 };
enum { METRICS = 512 };
enum { INVALID = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7, LOST = 15 };

struct gpu { int unused; };
struct process { int gpu, pid; long long bytes; char kind[16]; };
struct process_info { unsigned pid; unsigned long long bytes; unsigned instance, compute_instance; };
struct use { int gpu, pid, percent; };
struct use_sample { unsigned pid; unsigned long long time; unsigned sm, memory, encoder, decoder; };
struct fail { char function[64]; int gpu, code, from; };
struct say { char function[64]; int gpu, count; long long values[VALUES]; };
struct counter { unsigned number; int gpu; long long start, step; };
struct slow { char function[64]; int microseconds; };
struct calls { const char *function; int count[GPUS]; };
struct pci { char legacy[16]; unsigned domain, bus, device, id, subsystem; char address[32]; };
struct memory { unsigned long long total, free, used; };
struct memory_v2 { unsigned version; unsigned long long total, reserved, free, used; };
union value { double d; unsigned u; unsigned long ul; unsigned long long ull; };
struct sample { unsigned long long time; union value value; };
struct field_value {
    unsigned number, scope;
    long long time, latency;
    int type, code;
    union value value;
};

struct gpm_support { unsigned version, supported; };
struct gpm_sample { const struct gpu *card; long long change; };
struct gpm_metric { unsigned number; int code; double value; const char *names[3]; };
struct gpm_metrics {
    unsigned version, count;
    struct gpm_sample *first, *second;
    struct gpm_metric metrics[];
};

static struct gpu gpus[GPUS];
static struct fail fails[RULES];
static struct say says[RULES];
static struct counter counters[RULES];
static struct slow slows[RULES];
static struct calls calls[FUNCTIONS];
static struct process processes[RULES];
static struct use uses[RULES];
static int process_count, use_count;
static int fail_count, say_count, counter_count, slow_count, function_count;
static int gpu_count = 2, init_code, per_link, lost_at[GPUS];
static int gpm_ms[GPUS];
static struct { int count; double values[VALUES]; } gpm_values[METRICS];
static int ancestors[GPUS][GPUS], link_ends[GPUS][LINKS];

static int number_of(const char *text) { return strcmp(text, "*") ? atoi(text) : ANY; }

static void take_say(char *line) {
    struct say *rule = &says[say_count++];
    char *save, *word = strtok_r(line, " \n", &save);
    snprintf(rule->function, sizeof rule->function, "%s", strtok_r(NULL, " \n", &save));
    rule->gpu = number_of(strtok_r(NULL, " \n", &save));
    while ((word = strtok_r(NULL, " \n", &save)) && rule->count < VALUES)
        rule->values[rule->count++] = atoll(word);
}

static void take_metric(char *line) {
    char *save, *word = strtok_r(line, " \n", &save);
    unsigned number = (unsigned)atoi(strtok_r(NULL, " \n", &save)) % METRICS;
    while ((word = strtok_r(NULL, " \n", &save)) && gpm_values[number].count < VALUES)
        gpm_values[number].values[gpm_values[number].count++] = atof(word);
}

static void take(char *line) {
    char name[64], gpu[16];
    int a, b, c, from = 1;
    long long start, step;
    unsigned number;
    if (sscanf(line, "init %d", &a) == 1) init_code = a;
    else if (sscanf(line, "gpus %d", &a) == 1) gpu_count = a;
    else if (sscanf(line, "ancestor %d %d %d", &a, &b, &c) == 3) ancestors[a][b] = ancestors[b][a] = c;
    else if (sscanf(line, "link %d %d %d", &a, &b, &c) == 3) link_ends[a][b] = c;
    else if (sscanf(line, "process %d %d %lld %15s", &a, &b, &start, gpu) == 4) {
        processes[process_count] = (struct process){a, b, start, ""};
        strcpy(processes[process_count++].kind, gpu);
    } else if (sscanf(line, "use %d %d %d", &a, &b, &c) == 3)
        uses[use_count++] = (struct use){a, b, c};
    else if (sscanf(line, "lost %d %d", &a, &b) == 2) lost_at[a] = b;
    else if (sscanf(line, "slow %63s %d", name, &a) == 2) {
        strcpy(slows[slow_count].function, name);
        slows[slow_count++].microseconds = a;
    } else if (sscanf(line, "field %u %15s %lld %lld", &number, gpu, &start, &step) == 4)
        counters[counter_count++] = (struct counter){number, number_of(gpu), start, step};
    else if (sscanf(line, "fail %63s %15s %d %d", name, gpu, &a, &from) >= 3) {
        strcpy(fails[fail_count].function, name);
        fails[fail_count].gpu = number_of(gpu);
        fails[fail_count].code = a;
        fails[fail_count++].from = from;
    } else if (!strncmp(line, "say ", 4)) take_say(line);
    else if (!strncmp(line, "perlink", 7)) per_link = 1;
    else if (sscanf(line, "gpm %d %d", &a, &b) == 2) gpm_ms[a] = b;
    else if (!strncmp(line, "metric ", 7)) take_metric(line);
}

static void read_script(void) {
    char line[512];
    FILE *file = fopen(getenv("FAKE_NVML") ? getenv("FAKE_NVML") : "/dev/null", "r");
    for (int a = 0; a < GPUS; a++) {
        for (int b = 0; b < GPUS; b++) ancestors[a][b] = 50;
        for (int link = 0; link < LINKS; link++) link_ends[a][link] = -2;
    }
    while (file && fgets(line, sizeof line, file)) take(line);
    if (file) fclose(file);
}

static int calls_of(const char *function, int gpu) {
    for (int at = 0; at < function_count; at++)
        if (!strcmp(calls[at].function, function)) return calls[at].count[gpu];
    return 0;
}

/* Threads of one process may call at a time. */
static int count_call(const char *function, int gpu) {
    static int taken;
    int at = 0;
    while (__sync_lock_test_and_set(&taken, 1)) usleep(10);
    while (at < function_count && strcmp(calls[at].function, function)) at++;
    if (at == function_count) calls[function_count++].function = function;
    int count = ++calls[at].count[gpu];
    __sync_lock_release(&taken);
    return count;
}

/* One write, so that what is told is there however the process ends. */
static void tell_call(const char *function, int gpu) {
    static int file = -2;
    if (file == -2) {
        const char *path = getenv("FAKE_NVML_CALLS");
        file = path ? open(path, O_WRONLY | O_CREAT | O_TRUNC | O_APPEND, 0600) : -1;
    }
    if (file >= 0) dprintf(file, "%s %d\n", function, gpu);
}

static int applies(const char *rule, int rule_gpu, const char *function, int gpu) {
    return (!strcmp(rule, "*") || !strcmp(rule, function)) && (rule_gpu == ANY || rule_gpu == gpu);
}

/* Counts the call, takes its time, and gives the code it returns. */
static int enter(const char *function, const struct gpu *card) {
    if (!card) return INVALID;
    int gpu = (int)(card - gpus), call = count_call(function, gpu), code = 0;
    tell_call(function, gpu);
    for (int at = 0; at < slow_count; at++)
        if (!strcmp(slows[at].function, function)) usleep(slows[at].microseconds);
    for (int at = 0; at < fail_count; at++)
        if (applies(fails[at].function, fails[at].gpu, function, gpu) && call >= fails[at].from)
            code = fails[at].code;
    if (code < 0) raise(-code);
    return lost_at[gpu] && calls_of("DeviceGetMemoryInfo_v2", gpu) >= lost_at[gpu] ? LOST : code;
}

static long long value(const char *function, const struct gpu *card, long long otherwise) {
    int gpu = (int)(card - gpus), call = calls_of(function, gpu);
    for (int at = 0; at < say_count; at++) {
        struct say *rule = &says[at];
        if (applies(rule->function, rule->gpu, function, gpu))
            otherwise = rule->values[call <= rule->count ? call - 1 : rule->count - 1];
    }
    return otherwise;
}

static unsigned long long now_us(void) {
    struct timeval now;
    gettimeofday(&now, NULL);
    return now.tv_sec * 1000000ULL + now.tv_usec;
}

/* A function that gives one number of a card; arguments between card and answer are in `more`. */
#define ARGUMENTS(...) , ##__VA_ARGS__
#define ONE(name, type, otherwise, more)                                        \
    int nvml##name(struct gpu *card more, type *out) {                          \
        int code = enter(#name, card);                                          \
        if (!code) *out = (type)value(#name, card, otherwise);                  \
        return code;                                                            \
    }

ONE(DeviceGetMaxClockInfo, unsigned, kind == 1 ? 1980 : 3201, ARGUMENTS(int kind))
ONE(DeviceGetApplicationsClock, unsigned, kind == 1 ? 1830 : 3201, ARGUMENTS(int kind))
ONE(DeviceGetClockInfo, unsigned, kind == 1 ? 1755 : 2619, ARGUMENTS(int kind))
ONE(DeviceGetMaxPcieLinkGeneration, unsigned, 5, )
ONE(DeviceGetMaxPcieLinkWidth, unsigned, 16, )
ONE(DeviceGetCurrPcieLinkGeneration, unsigned, 4, )
ONE(DeviceGetCurrPcieLinkWidth, unsigned, 8, )
ONE(DeviceGetEnforcedPowerLimit, unsigned, 700000, )
ONE(DeviceGetPowerUsage, unsigned, 250000, )
ONE(DeviceGetTemperature, unsigned, 41, ARGUMENTS(int kind __attribute__((unused))))
ONE(DeviceGetCurrentClocksThrottleReasons, unsigned long long, 8, )
#ifndef OLD_DRIVER
ONE(DeviceGetCurrentClocksEventReasons, unsigned long long, 4, )
#endif
ONE(DeviceGetPcieThroughput, unsigned, 1, ARGUMENTS(int kind __attribute__((unused))))

int nvmlInitWithFlags(unsigned flags) {
    (void)flags;
    read_script();
    return init_code;
}

int nvmlShutdown(void) { return 0; }

int nvmlSystemGetDriverVersion(char *text, unsigned size) {
    snprintf(text, size, "580.159.03");
    return 0;
}

int nvmlDeviceGetCount_v2(unsigned *count) {
    *count = gpu_count;
    return 0;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned gpu, struct gpu **card) {
    *card = &gpus[gpu];
    return enter("DeviceGetHandleByIndex_v2", *card);
}

int nvmlDeviceGetName(struct gpu *card, char *text, unsigned size) {
    snprintf(text, size, "Fake H200");
    return enter("DeviceGetName", card);
}

int nvmlDeviceGetCudaComputeCapability(struct gpu *card, int *major, int *minor) {
    int code = enter("DeviceGetCudaComputeCapability", card);
    if (!code) *major = (int)value("DeviceGetCudaComputeCapability", card, 9);
    *minor = 0;
    return code;
}

int nvmlDeviceGetUUID(struct gpu *card, char *text, unsigned size) {
    snprintf(text, size, "GPU-0000-%ld", (long)(card - gpus));
    return enter("DeviceGetUUID", card);
}

static void address(int gpu, struct pci *pci) {
    memset(pci, 0, sizeof *pci);
    snprintf(pci->address, sizeof pci->address, "00000000:%02X:00.0", gpu < 0 ? 0xF0 : 0xA6 + gpu);
}

int nvmlDeviceGetPciInfo_v3(struct gpu *card, struct pci *pci) {
    if (card) address((int)(card - gpus), pci);
    return enter("DeviceGetPciInfo_v3", card);
}

int nvmlDeviceGetMemoryInfo(struct gpu *card, struct memory *memory) {
    int code = enter("DeviceGetMemoryInfo", card);
    if (!code) *memory = (struct memory){1000, 400, 600};
    return code;
}

int nvmlDeviceGetMemoryInfo_v2(struct gpu *card, struct memory_v2 *memory) {
    int code = enter("DeviceGetMemoryInfo_v2", card);
    if (!code && memory->version != 0x2000028) code = 25;
    if (!code) memory->used = value("DeviceGetMemoryInfo_v2", card, 500);
    return code;
}

int nvmlDeviceGetMigMode(struct gpu *card, unsigned *current, unsigned *pending) {
    int code = enter("DeviceGetMigMode", card);
    if (!code) *current = *pending = (unsigned)value("DeviceGetMigMode", card, 0);
    return code;
}

int nvmlDeviceGetCpuAffinity(struct gpu *card, unsigned words, unsigned long *set) {
    int code = enter("DeviceGetCpuAffinity", card);
    memset(set, 0, words * sizeof *set);
    set[0] = 0x107; /* 0, 1, 2, 8 */
    set[1] = 1;     /* 64 */
    return code;
}

int nvmlDeviceGetMemoryAffinity(struct gpu *card, unsigned words, unsigned long *set, int scope) {
    int code = enter("DeviceGetMemoryAffinity", card);
    memset(set, 0, words * sizeof *set);
    set[0] = scope == 0 ? 2 : 0; /* node 1 */
    return code;
}

int nvmlDeviceGetTopologyCommonAncestor(struct gpu *a, struct gpu *b, int *level) {
    int code = enter("DeviceGetTopologyCommonAncestor", a);
    if (!code) *level = ancestors[a - gpus][b - gpus];
    return code;
}

int nvmlDeviceGetP2PStatus(struct gpu *a, struct gpu *b, int what, int *status) {
    int code = enter("DeviceGetP2PStatus", a);
    (void)b;
    if (!code) *status = what == 2 && link_ends[a - gpus][0] == -2 ? 5 : 0;
    return code;
}

static int enter_link(const char *function, const struct gpu *card, unsigned link) {
    int code = enter(function, card);
    return code ? code : link < LINKS ? 0 : INVALID;
}

int nvmlDeviceGetNvLinkState(struct gpu *card, unsigned link, unsigned *active) {
    int code = enter_link("DeviceGetNvLinkState", card, link);
    if (!code) *active = link_ends[card - gpus][link] != -2;
    return code;
}

int nvmlDeviceGetNvLinkRemoteDeviceType(struct gpu *card, unsigned link, unsigned *type) {
    int code = enter_link("DeviceGetNvLinkRemoteDeviceType", card, link);
    if (!code) *type = link_ends[card - gpus][link] == -1 ? 2 : 0;
    return code;
}

int nvmlDeviceGetNvLinkRemotePciInfo_v2(struct gpu *card, unsigned link, struct pci *pci) {
    int code = enter_link("DeviceGetNvLinkRemotePciInfo_v2", card, link);
    if (!code) address(link_ends[card - gpus][link], pci);
    return code;
}

int nvmlDeviceGetUtilizationRates(struct gpu *card, unsigned out[2]) {
    int code = enter("DeviceGetUtilizationRates", card);
    if (!code) out[0] = (unsigned)value("DeviceGetUtilizationRates", card, 77);
    return code;
}

/* A ring that has two new samples, 40 % and 60 %, each time it is read: as two calls, one for the
 * room that is needed and one for the samples. */
int nvmlDeviceGetSamples(struct gpu *card, int kind, unsigned long long last, int *type,
                         unsigned *count, struct sample *samples) {
    int code = enter("DeviceGetSamples", card);
    unsigned long long now = now_us();
    if (code || kind != 1) return code ? code : INVALID;
    *type = 1;
    if (!samples) return *count = 100, 0;
    if (last >= now) return NOT_FOUND;
    *count = 2;
    for (int at = 0; at < 2; at++) samples[at].time = now - 1 + at, samples[at].value.u = 40 + 20 * at;
    return 0;
}

/* As two calls: one for the room that is needed, and one for the processes. */
static int list(const char *function, struct gpu *card, int mps, unsigned *count,
                struct process_info *out) {
    int code = enter(function, card), found = 0;
    for (int at = 0; !code && at < process_count; at++) {
        struct process *each = &processes[at];
        int is_mps = !strcmp(each->kind, "mps"), in_mig = !strcmp(each->kind, "mig");
        if (each->gpu != card - gpus || is_mps != mps) continue;
        unsigned instance = in_mig ? 3 : ~0u;
        if (out) out[found] = (struct process_info){each->pid, each->bytes, instance, instance};
        found++;
    }
    *count = found;
    return code ? code : !out && found ? INSUFFICIENT_SIZE : 0;
}

int nvmlDeviceGetComputeRunningProcesses_v3(struct gpu *card, unsigned *count,
                                            struct process_info *out) {
    return list("DeviceGetComputeRunningProcesses", card, 0, count, out);
}

int nvmlDeviceGetMPSComputeRunningProcesses_v3(struct gpu *card, unsigned *count,
                                               struct process_info *out) {
    return list("DeviceGetMPSComputeRunningProcesses", card, 1, count, out);
}

int nvmlDeviceGetProcessUtilization(struct gpu *card, struct use_sample *out, unsigned *count,
                                    unsigned long long last) {
    int code = enter("DeviceGetProcessUtilization", card), found = 0;
    for (int at = 0; !code && at < use_count; at++) {
        if (uses[at].gpu != card - gpus) continue;
        if (out) out[found] = (struct use_sample){uses[at].pid, last + 1, uses[at].percent, 0, 0, 0};
        found++;
    }
    *count = found;
    return code ? code : !found ? NOT_FOUND : out ? 0 : INSUFFICIENT_SIZE;
}

static int read_field(const struct gpu *card, struct field_value *field) {
    int gpu = (int)(card - gpus), nvlink = field->number >= 138 && field->number <= 141;
    if (nvlink && (per_link ? field->scope > 1 : field->scope != ~0u)) return NOT_SUPPORTED;
    for (int at = 0; at < counter_count; at++) {
        struct counter *counter = &counters[at];
        if (counter->number != field->number || (counter->gpu != ANY && counter->gpu != gpu)) continue;
        field->type = 3;
        field->value.ull = counter->start + counter->step * calls_of("DeviceGetMemoryInfo_v2", gpu);
        return 0;
    }
    return NOT_SUPPORTED;
}

int nvmlDeviceGetFieldValues(struct gpu *card, int count, struct field_value *fields) {
    int code = enter("DeviceGetFieldValues", card);
    for (int at = 0; !code && at < count; at++) fields[at].code = read_field(card, &fields[at]);
    return code;
}

int nvmlGpmQueryDeviceSupport(struct gpu *card, struct gpm_support *support) {
    int code = enter("GpmQueryDeviceSupport", card);
    if (!code) support->supported = gpm_ms[card - gpus] > 0;
    return code;
}

int nvmlGpmSampleAlloc(struct gpm_sample **sample) {
    *sample = calloc(1, sizeof **sample);
    return 0;
}

int nvmlGpmSampleGet(struct gpu *card, struct gpm_sample *sample) {
    static unsigned long long began;
    int code = enter("GpmSampleGet", card);
    if (!began) began = now_us();
    sample->card = card;
    if (!code) sample->change = (now_us() - began) / 1000 / gpm_ms[card - gpus];
    return code;
}

/* Between two samples without a change, the memory's metric (10) is not a number, others are 0. */
int nvmlGpmMetricsGet(struct gpm_metrics *asked) {
    int code = enter("GpmMetricsGet", asked->second->card);
    int changed = asked->first->change < asked->second->change;
    for (unsigned at = 0; !code && at < asked->count; at++) {
        struct gpm_metric *metric = &asked->metrics[at];
        int count = gpm_values[metric->number % METRICS].count;
        long long turn = asked->second->change <= count ? asked->second->change : count;
        metric->code = count ? 0 : NOT_SUPPORTED;
        metric->value = metric->number == 10 ? 0.0 / 0.0 : 0.0;
        if (changed && count) metric->value = gpm_values[metric->number % METRICS].values[turn - 1];
    }
    return code;
}
