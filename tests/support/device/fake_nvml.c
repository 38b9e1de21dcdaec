/* libnvidia-ml.so.1 without a GPU: the functions that telemetry calls, with NVML's own signatures and structures.
 *
 * What they answer is in the file that FAKE_NVML names, which is read again whenever it has changed:
 *
 *   gpus N                      as many GPUs; their UUIDs are GPU-00000000-0000-0000-0000-00000000000N, or
 *   gpu I uuid TEXT
 *   gpu I KEY VALUE             temperature, power_mw, sm_mhz, sm_max_mhz, memory_mhz, reasons, busy, memory_used,
 *                               memory_total; a key that is not there is not supported
 *   gpu I field ID[.SCOPE] N    a value of nvmlDeviceGetFieldValues; a field that is not there is not supported
 *   gpu I lost 1                every call about it fails with GPU_IS_LOST, and so does waiting for events of it
 *   gpu I code ID CODE          this field alone fails with the code
 *   gpu I gpm ID PERCENT        a GPM metric; a GPU without any does not support GPM
 *   gpu I process PID PERCENT   the use of the GPU by a process; without any, no process has used it
 *   gpu I xid N                 one XID, told once each time the file is read
 *   fail FUNCTION CODE [AFTER [GPU]]   the function fails with this code, after as many calls, for one GPU or all
 *   sleep FUNCTION MILLISECONDS
 *
 * As in NVML, everything fails with UNINITIALIZED before nvmlInit and after nvmlShutdown. `restart N`: a number that
 * has changed means that the driver was reloaded, and the library is uninitialised.
 */
#define _GNU_SOURCE
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>

#define EXPORT __attribute__((visibility("default")))
enum { SUCCESS = 0, UNINITIALIZED = 1, INVALID = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7, TIMEOUT = 10, LOST = 15, VERSION = 25 };
enum { MAX_GPUS = 16, MAX_KEYS = 256, MAX_FAILURES = 16, MAX_CALLS = 64, MAX_XIDS = 256 };

typedef struct {
    char name[32];
    double value;
} Key;

typedef struct {
    char uuid[96];
    Key keys[MAX_KEYS];
    int count;
} Gpu;

typedef struct {
    char function[64];
    int code, gpu;
    long after, seen;
} Failure;

typedef struct {
    Gpu *gpu;
    double percent[512];
} GpmSample;

static Gpu gpus[MAX_GPUS];
static Failure failures[MAX_FAILURES], sleeps[MAX_FAILURES];
static struct { char function[64]; long count; } calls[MAX_CALLS];
static struct { Gpu *gpu; unsigned long long xid; } xids[MAX_XIDS];
static int gpu_count, failure_count, sleep_count, xid_head, xid_tail, initialised, restart;
static long allocated;
static unsigned registered;
static struct timespec read_at;
static char driver[32] = "580.126.09";

static void read_line(const char *line)
{
    int gpu, code, only, number;
    long after = 0;
    double value;
    char first[64], second[96];
    if (sscanf(line, "driver %31s", driver) == 1)
        return;
    if (sscanf(line, "gpus %d", &number) == 1)
        gpu_count = number;
    else if (sscanf(line, "restart %d", &number) == 1) {
        if (number != restart)
            initialised = 0;
        restart = number;
    } else if (sscanf(line, "fail %63s %d", first, &code) == 2 && failure_count < MAX_FAILURES) {
        Failure *failure = &failures[failure_count++];
        only = -1;
        sscanf(line, "fail %*s %*d %ld %d", &after, &only);
        *failure = (Failure){.code = code, .gpu = only, .after = after};
        strcpy(failure->function, first);
    } else if (sscanf(line, "sleep %63s %d", first, &number) == 2 && sleep_count < MAX_FAILURES) {
        sleeps[sleep_count].code = number;
        strcpy(sleeps[sleep_count++].function, first);
    } else if (sscanf(line, "gpu %d uuid %95s", &gpu, second) == 2)
        strcpy(gpus[gpu].uuid, second);
    else if (sscanf(line, "gpu %d xid %d", &gpu, &number) == 2) {
        xids[xid_tail % MAX_XIDS].gpu = &gpus[gpu];
        xids[xid_tail++ % MAX_XIDS].xid = (unsigned)number;
    } else if (sscanf(line, "gpu %d %15s %15s %lf", &gpu, first, second, &value) == 4) {
        Key *key = &gpus[gpu].keys[gpus[gpu].count++];
        snprintf(key->name, sizeof key->name, "%.15s %.15s", first, second);
        key->value = value;
    } else if (sscanf(line, "gpu %d %31s %lf", &gpu, first, &value) == 3) {
        Key *key = &gpus[gpu].keys[gpus[gpu].count++];
        snprintf(key->name, sizeof key->name, "%.31s", first);
        key->value = value;
    }
}

static void read_script(void)
{
    const char *path = getenv("FAKE_NVML");
    struct stat status;
    char line[256];
    if (!path || stat(path, &status) ||
        (status.st_mtim.tv_sec == read_at.tv_sec && status.st_mtim.tv_nsec == read_at.tv_nsec))
        return;
    FILE *file = fopen(path, "r");
    if (!file)
        return;
    read_at = status.st_mtim;
    gpu_count = failure_count = sleep_count = 0;
    memset(gpus, 0, sizeof gpus);
    for (int i = 0; i < MAX_GPUS; i++)
        snprintf(gpus[i].uuid, sizeof gpus[i].uuid, "GPU-00000000-0000-0000-0000-%012d", i);
    while (fgets(line, sizeof line, file))
        read_line(line);
    fclose(file);
}

static const double *find(const Gpu *gpu, const char *name)
{
    for (int i = 0; i < gpu->count; i++)
        if (!strcmp(gpu->keys[i].name, name))
            return &gpu->keys[i].value;
    return NULL;
}

static int enter(const char *function, const Gpu *gpu)
{
    read_script();
    for (int i = 0; i < MAX_CALLS; i++) {
        if (!calls[i].function[0])
            strcpy(calls[i].function, function);
        if (!strcmp(calls[i].function, function)) {
            calls[i].count++;
            break;
        }
    }
    for (int i = 0; i < sleep_count; i++)
        if (!strcmp(sleeps[i].function, function))
            nanosleep(&(struct timespec){.tv_nsec = sleeps[i].code * 1000000L}, NULL);
    for (int i = 0; i < failure_count; i++) {
        Failure *failure = &failures[i];
        if (!strcmp(failure->function, function) && (failure->gpu < 0 || gpu == &gpus[failure->gpu]) &&
            failure->seen++ >= failure->after)
            return failure->code;
    }
    if (!initialised && strcmp(function, "nvmlInitWithFlags"))
        return UNINITIALIZED;
    return gpu && find(gpu, "lost") ? LOST : SUCCESS;
}

#define ENTER(gpu)                            \
    int entered = enter(__func__, gpu);       \
    if (entered)                              \
        return entered

static int answer(const Gpu *gpu, const char *name, unsigned *value)
{
    const double *found = find(gpu, name);
    if (!found)
        return NOT_SUPPORTED;
    *value = (unsigned)*found;
    return SUCCESS;
}

EXPORT int nvmlInitWithFlags(unsigned flags)
{
    (void)flags;
    ENTER(NULL);
    initialised = 1;
    return SUCCESS;
}

EXPORT int nvmlShutdown(void)
{
    ENTER(NULL);
    initialised = 0;
    registered = 0;
    return SUCCESS;
}

EXPORT const char *nvmlErrorString(int code)
{
    (void)code;
    return "an error of the fake";
}

EXPORT int nvmlSystemGetDriverVersion(char *text, unsigned size)
{
    ENTER(NULL);
    snprintf(text, size, "%s", driver);
    return SUCCESS;
}

EXPORT int nvmlDeviceGetCount_v2(unsigned *count)
{
    ENTER(NULL);
    *count = (unsigned)gpu_count;
    return SUCCESS;
}

EXPORT int nvmlDeviceGetHandleByIndex_v2(unsigned index, Gpu **handle)
{
    ENTER(NULL);
    *handle = &gpus[index];
    return index < (unsigned)gpu_count ? SUCCESS : INVALID;
}

EXPORT int nvmlDeviceGetHandleByUUID(const char *uuid, Gpu **handle)
{
    ENTER(NULL);
    for (int i = 0; i < gpu_count; i++)
        if (!strcmp(gpus[i].uuid, uuid)) {
            *handle = &gpus[i];
            return find(&gpus[i], "lost") ? LOST : SUCCESS;
        }
    return NOT_FOUND;
}

EXPORT int nvmlDeviceGetUUID(Gpu *gpu, char *text, unsigned size)
{
    ENTER(gpu);
    snprintf(text, size, "%s", gpu->uuid);
    return SUCCESS;
}

EXPORT int nvmlDeviceGetName(Gpu *gpu, char *text, unsigned size)
{
    ENTER(gpu);
    snprintf(text, size, "NVIDIA H200");
    return SUCCESS;
}

typedef struct {
    char bus_id_legacy[16];
    unsigned domain, bus, device, pci_device_id, subsystem_id;
    char bus_id[32];
} PciInfo;

EXPORT int nvmlDeviceGetPciInfo_v3(Gpu *gpu, PciInfo *info)
{
    ENTER(gpu);
    snprintf(info->bus_id, sizeof info->bus_id, "00000000:%02X:00.0", (unsigned)(gpu - gpus));
    return SUCCESS;
}

EXPORT int nvmlDeviceGetTemperature(Gpu *gpu, unsigned sensor, unsigned *degrees)
{
    (void)sensor;
    ENTER(gpu);
    return answer(gpu, "temperature", degrees);
}

EXPORT int nvmlDeviceGetPowerUsage(Gpu *gpu, unsigned *milliwatts)
{
    ENTER(gpu);
    return answer(gpu, "power_mw", milliwatts);
}

EXPORT int nvmlDeviceGetClockInfo(Gpu *gpu, unsigned type, unsigned *megahertz)
{
    ENTER(gpu);
    return answer(gpu, type == 2 ? "memory_mhz" : "sm_mhz", megahertz);
}

EXPORT int nvmlDeviceGetMaxClockInfo(Gpu *gpu, unsigned type, unsigned *megahertz)
{
    (void)type;
    ENTER(gpu);
    return answer(gpu, "sm_max_mhz", megahertz);
}

EXPORT int nvmlDeviceGetCurrentClocksEventReasons(Gpu *gpu, unsigned long long *reasons)
{
    ENTER(gpu);
    unsigned bits = 0;
    int code = answer(gpu, "reasons", &bits);
    *reasons = bits;
    return code;
}

EXPORT int nvmlDeviceGetUtilizationRates(Gpu *gpu, unsigned *percents)
{
    ENTER(gpu);
    percents[1] = 0;
    return answer(gpu, "busy", percents);
}

typedef struct {
    unsigned version;
    unsigned long long total, reserved, free, used;
} Memory;

EXPORT int nvmlDeviceGetMemoryInfo_v2(Gpu *gpu, Memory *memory)
{
    ENTER(gpu);
    const double *used = find(gpu, "memory_used"), *total = find(gpu, "memory_total");
    if (memory->version != 0x02000028)
        return VERSION;
    if (!used || !total)
        return NOT_SUPPORTED;
    memory->used = (unsigned long long)*used;
    memory->total = (unsigned long long)*total;
    return SUCCESS;
}

typedef struct {
    uint32_t id, scope;
    int64_t timestamp, latency_us;
    uint32_t type, code;
    union { double real; uint32_t small; unsigned long long large; } value;
} FieldValue;

EXPORT int nvmlDeviceGetFieldValues(Gpu *gpu, int count, FieldValue *values)
{
    ENTER(gpu);
    for (int i = 0; i < count; i++) {
        char name[32];
        snprintf(name, sizeof name, "field %u", values[i].id);
        const double *found = find(gpu, name);
        if (!found) {
            snprintf(name, sizeof name, "field %u.%u", values[i].id, values[i].scope);
            found = find(gpu, name);
        }
        snprintf(name, sizeof name, "code %u", values[i].id);
        const double *code = find(gpu, name);
        values[i].code = code ? (uint32_t)*code : found ? SUCCESS : NOT_SUPPORTED;
        if (values[i].code)
            continue;
        /* Use the driver's types: one for small unsigned values, another one for counters. */
        values[i].type = *found < 4e9 ? 1 : 3;
        if (values[i].type == 1)
            values[i].value.small = (uint32_t)*found;
        else
            values[i].value.large = (unsigned long long)*found;
    }
    return SUCCESS;
}

/* Processes. Every call has new samples, one microsecond after the newest one that the caller has. */

typedef struct {
    unsigned pid;
    unsigned long long time_us;
    unsigned sm, memory, encoder, decoder;
} ProcessSample;

EXPORT int nvmlDeviceGetProcessUtilization(Gpu *gpu, ProcessSample *samples, unsigned *count, unsigned long long since_us)
{
    ENTER(gpu);
    unsigned found = 0, room = *count, pid;
    for (int i = 0; i < gpu->count; i++)
        if (sscanf(gpu->keys[i].name, "process %u", &pid) == 1) {
            if (found < room)
                samples[found] = (ProcessSample){pid, since_us + 1, (unsigned)gpu->keys[i].value, 0, 0, 0};
            found++;
        }
    *count = found;
    return !found ? NOT_FOUND : found > room ? INSUFFICIENT_SIZE : SUCCESS;
}

/* Events. */

static char the_set;

EXPORT int nvmlEventSetCreate(void **set)
{
    ENTER(NULL);
    allocated++;
    *set = &the_set;
    return SUCCESS;
}

EXPORT int nvmlEventSetFree(void *set)
{
    (void)set;
    allocated--;
    registered = 0;
    return enter(__func__, NULL);
}

EXPORT int nvmlDeviceRegisterEvents(Gpu *gpu, unsigned long long types, void *set)
{
    ENTER(gpu);
    if (types != 8 || set != &the_set)
        return INVALID;
    registered |= 1u << (gpu - gpus);
    return SUCCESS;
}

typedef struct {
    Gpu *gpu;
    unsigned long long type, data;
    unsigned gpu_instance, compute_instance;
} EventData;

EXPORT int nvmlEventSetWait_v2(void *set, EventData *data, unsigned timeout_ms)
{
    (void)set;
    ENTER(NULL);
    if (timeout_ms)
        abort(); /* no caller may wait */
    for (int i = 0; i < gpu_count; i++)
        if (registered & 1u << i && find(&gpus[i], "lost"))
            return LOST;
    while (xid_head < xid_tail) {
        int at = xid_head++ % MAX_XIDS;
        if (registered & 1u << (xids[at].gpu - gpus)) {
            *data = (EventData){.gpu = xids[at].gpu, .type = 8, .data = xids[at].xid};
            return SUCCESS;
        }
    }
    return TIMEOUT;
}

/* GPM. */

typedef struct {
    uint32_t id, code;
    double value;
    char *texts[3];
} Metric;

typedef struct {
    uint32_t version, count;
    GpmSample *older, *newer;
    Metric metrics[333]; /* at least: the newest header has more */
} Metrics;

EXPORT int nvmlGpmQueryDeviceSupport(Gpu *gpu, unsigned *support)
{
    ENTER(gpu);
    if (support[0] != 1)
        return VERSION;
    support[1] = find(gpu, "gpm 2") != NULL;
    return SUCCESS;
}

EXPORT int nvmlGpmSampleAlloc(GpmSample **sample)
{
    ENTER(NULL);
    allocated++;
    *sample = calloc(1, sizeof **sample);
    return SUCCESS;
}

EXPORT int nvmlGpmSampleFree(GpmSample *sample)
{
    allocated--;
    free(sample);
    return enter(__func__, NULL);
}

EXPORT int nvmlGpmSampleGet(Gpu *gpu, GpmSample *sample)
{
    ENTER(gpu);
    sample->gpu = gpu;
    for (int i = 0; i < 512; i++) {
        char name[32];
        snprintf(name, sizeof name, "gpm %d", i);
        const double *found = i <= 10 ? find(gpu, name) : NULL;
        sample->percent[i] = found ? *found : -1;
    }
    return SUCCESS;
}

EXPORT int nvmlGpmMetricsGet(Metrics *request)
{
    ENTER(request->newer ? request->newer->gpu : NULL);
    if (request->version != 1)
        return VERSION;
    if (!request->older || !request->newer || request->older->gpu != request->newer->gpu)
        return INVALID;
    for (uint32_t i = 0; i < request->count; i++) {
        Metric *metric = &request->metrics[i];
        double older = request->older->percent[metric->id], newer = request->newer->percent[metric->id];
        metric->code = newer < 0 ? NOT_SUPPORTED : SUCCESS;
        metric->value = (older + newer) / 2;
    }
    return SUCCESS;
}

/* For the tests: the number of a function's calls, and the current allocations. */

EXPORT long fake_calls(const char *function)
{
    for (int i = 0; i < MAX_CALLS; i++)
        if (!strcmp(calls[i].function, function))
            return calls[i].count;
    return 0;
}

EXPORT long fake_allocated(void)
{
    return allocated;
}
