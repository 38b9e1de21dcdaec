/* NCCL without a GPU: loads the plugin that NCCL_PROFILER_PLUGIN names, and calls it as NCCL 2.28 (interface 5) and 2.29 (6)
 * do: the same order, the same threads, the mask read where NCCL reads it.
 *
 * The structures are written from the documented layout, whole, and apart from those that the plugin reads with. The
 * device's clock is the caller's: every time is a parameter. With -DPROGRAM it is a program, for the thread sanitizer.
 */
#define _GNU_SOURCE 1
#include <dlfcn.h>
#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { GROUP = 1, COLL = 2, P2P = 4, KERNEL_CH = 64, GROUP_API = 256, COLL_API = 512, P2P_API = 1024 };
enum { KERNEL_CH_STOP = 22, GROUP_START_API_STOP = 23, GROUP_END_API_START = 24, MAX_CHANNELS = 64, MAX_QUEUED = 256 };

struct coll {
    uint64_t sequence;
    const char *func;
    const void *sendbuff;
    void *recvbuff;
    size_t count;
    int root;
    const char *datatype;
    uint8_t channels, warps;
    const char *algo, *proto;
};
struct p2p {
    const char *func;
    void *buff;
    const char *datatype;
    size_t count;
    int peer;
    uint8_t channels;
};
struct kernel_ch {
    uint8_t channel;
    uint64_t p_timer;
};
struct proxy_op {
    int pid;
    uint8_t channel;
    int peer, steps, chunk_size, is_send;
};

typedef struct {
    uint64_t type;
    void *parent;
    int rank;
    union {
        struct {
            bool captured;
            int depth;
        } group_api;
        struct {
            const char *func;
            size_t count;
            const char *datatype;
            int root;
            void *stream;
            bool captured;
        } coll_api;
        struct {
            const char *func;
            size_t count;
            const char *datatype;
            void *stream;
            bool captured;
        } p2p_api;
        struct {
            struct coll coll;
            void *parent_group;
        };
        struct {
            struct p2p p2p;
            void *p2p_parent_group;
        };
        struct proxy_op proxy_op;
        struct kernel_ch kernel_ch;
    };
} EventV5;

typedef union {
    size_t trans_size;
    int appended;
    void *data;
    struct {
        uint64_t p_timer;
    } kernel_ch;
} StateArguments;

typedef void (*Log)(int, unsigned long, const char *, int, const char *, ...);
typedef struct {
    const char *name;
    int (*init)(void **, uint64_t, int *, const char *, int, int, int, Log);
    int (*start)(void *, void **, EventV5 *);
    int (*stop)(void *);
    int (*record)(void *, int, StateArguments *);
    int (*finalize)(void *);
} ProfilerV5;

static const ProfilerV5 *v5;
static int event_mask; /* NCCL's own, which the plugin writes */

/* An operation from its call to the end of its kernel. */
typedef struct {
    int type, channels, peer, mask, captured, to_oneself;
    void *api, *handle;
    void *kernels[MAX_CHANNELS];
} Task;

static void start_task(void *context, int rank, Task *task);

static __thread struct {
    int depth, mask, queued;
    void *api, *coll_api;
    Task *tasks[MAX_QUEUED];
} group;

static void log_nothing(int level, unsigned long flags, const char *file, int line, const char *format, ...)
{
    (void)level, (void)flags, (void)file, (void)line, (void)format;
}

/* Load the plugin as an NCCL of this interface does, which tries the newest one first. Return the interface, or 0. */
int fake_load(int newest)
{
    const char *name = getenv("NCCL_PROFILER_PLUGIN");
    void *library = name != NULL ? dlopen(name, RTLD_NOW | RTLD_LOCAL) : NULL;
    v5 = NULL;
    if (library == NULL) {
        return 0;
    }
    if (newest >= 6 && (v5 = dlsym(library, "ncclProfiler_v6")) != NULL) {
        return 6;
    }
    return (v5 = dlsym(library, "ncclProfiler_v5")) != NULL ? 5 : 0;
}

static int start_nothing(void *context, void **handle, EventV5 *event)
{
    (void)event;
    *handle = context;
    return 0;
}

static int stop_nothing(void *handle)
{
    (void)handle;
    return 0;
}

static int record_nothing(void *handle, int state, StateArguments *arguments)
{
    (void)handle, (void)state, (void)arguments;
    return 0;
}

/* Use a plugin that does nothing, to measure NCCL's side of the calls. 0: use the loaded plugin. */
void fake_use_nothing(int nothing)
{
    static const ProfilerV5 *loaded;
    static const ProfilerV5 idle = {.start = start_nothing, .stop = stop_nothing, .record = record_nothing};
    loaded = v5 != &idle ? v5 : loaded;
    v5 = nothing ? &idle : loaded;
}

int fake_mask(void)
{
    return __atomic_load_n(&event_mask, __ATOMIC_RELAXED);
}

void *fake_communicator(int ranks, int rank)
{
    void *context = NULL;
    v5->init(&context, 0xabcdef, &event_mask, "group", 1, ranks, rank, log_nothing);
    return context;
}

void fake_finalize(void *context)
{
    v5->finalize(context);
}

#include "fake_works.h"

/* As a communicator's plugin, or an older one of ours, would have it. */
void fake_set_mask(int mask)
{
    __atomic_store_n(&event_mask, mask, __ATOMIC_RELAXED);
}

static void stop(void *handle)
{
    if (handle != NULL) {
        v5->stop(handle);
    }
}

/* Call NCCL's API: an all-reduce, or a send to a peer (peer >= 0). It is launched when its group ends. */
Task *fake_call(void *context, int peer, int channels, int captured)
{
    Task *task = calloc(1, sizeof *task);
    task->type = peer >= 0 ? P2P : COLL;
    task->channels = channels;
    task->peer = peer;
    task->captured = captured;
    group.mask = fake_mask();
    if (group.mask != 0) {
        if (group.api == NULL) {
            EventV5 event = {.type = GROUP_API, .group_api = {captured, group.depth}};
            v5->start(context, &group.api, &event);
            if (group.api != NULL) {
                v5->record(group.api, GROUP_START_API_STOP, NULL);
            }
        }
    }
    if (group.mask & (KERNEL_CH | (peer >= 0 ? P2P_API | P2P : COLL_API | COLL))) {
        EventV5 event = {.type = peer >= 0 ? P2P_API : COLL_API, .parent = group.api};
        if (peer >= 0) {
            event.p2p_api.func = "Send", event.p2p_api.count = 1024, event.p2p_api.datatype = "ncclFloat32";
            event.p2p_api.stream = &group, event.p2p_api.captured = captured;
        } else {
            event.coll_api.func = "AllReduce", event.coll_api.count = 1024, event.coll_api.datatype = "ncclFloat32";
            event.coll_api.stream = &group, event.coll_api.captured = captured;
        }
        v5->start(context, &group.coll_api, &event);
        task->api = group.coll_api;
    }
    stop(group.coll_api); /* also that of an earlier call, as NCCL does */
    task->mask = group.mask; /* read before the plugin was notified of the call */
    if (group.queued < MAX_QUEUED) {
        group.tasks[group.queued++] = task;
    }
    return task;
}

/* Runs on the launching thread. */
static void start_task(void *context, int rank, Task *task)
{
    if (!(task->mask & (task->type | KERNEL_CH))) {
        return;
    }
    EventV5 event = {.type = (uint64_t)task->type, .parent = task->api, .rank = rank};
    if (task->type == P2P) {
        event.p2p = (struct p2p){.func = "Send", .peer = task->peer, .channels = (uint8_t)task->channels};
    } else {
        event.coll = (struct coll){.func = "AllReduce", .count = 1024, .channels = (uint8_t)task->channels};
    }
    v5->start(context, &task->handle, &event);
}

void fake_group_start(void)
{
    group.depth++;
}

/* Launch the calls since the group began. `kernels` is true if they run as timed kernels. */
void fake_group_end(void *context, int rank, int kernels)
{
    if (group.depth > 0) {
        group.depth--;
    }
    void *plan = NULL;
    int told = group.queued > 0 && group.tasks[0]->mask & (COLL | P2P | KERNEL_CH);
    if (kernels && told) {
        v5->record(group.api, GROUP_END_API_START, NULL);
        EventV5 event = {.type = GROUP};
        v5->start(context, &plan, &event);
    }
    for (int i = 0; kernels && i < group.queued; i++) {
        start_task(context, rank, group.tasks[i]);
    }
    for (int i = 0; i < group.queued; i++) {
        stop(group.tasks[i]->handle);
        if (kernels) {
            works_enqueued(context, rank, group.tasks[i]);
        }
    }
    stop(plan);
    stop(group.api);
    group.api = NULL;
    group.queued = 0;
}

/* A call outside any group of the caller, for which NCCL creates one. */
Task *fake_collective(void *context, int rank, int channels)
{
    fake_group_start();
    Task *task = fake_call(context, -1, channels, 0);
    fake_group_end(context, rank, 1);
    return task;
}

/* Replay a graph: its tasks start again on one of CUDA's threads. */
void fake_replay(void *context, int rank, Task *task)
{
    task->handle = NULL;
    start_task(context, rank, task);
    stop(task->handle);
    works_replayed(context, task);
}

/* Runs on the proxy thread: the kernel has begun on a channel. */
void fake_kernel_began(void *context, Task *task, int channel, uint64_t p_timer)
{
    if (!(task->mask & KERNEL_CH)) {
        return;
    }
    EventV5 event = {.type = KERNEL_CH, .parent = task->handle, .kernel_ch = {(uint8_t)channel, p_timer}};
    v5->start(context, &task->kernels[channel], &event);
}

/* Runs on the proxy thread: the kernel has ended. The handle stays, for a test that reports the end again. */
void fake_kernel_ended(Task *task, int channel, uint64_t p_timer)
{
    void *handle = task->kernels[channel];
    if (handle != NULL) {
        StateArguments arguments = {.kernel_ch = {p_timer}};
        v5->record(handle, KERNEL_CH_STOP, &arguments);
        stop(handle);
    }
}

/* Runs on the proxy thread, which checks posted works in order. Return how many works it still waits for. */
int fake_progress(void *context)
{
    Works *works = works_of(context);
    int left = 0;
    for (int i = 0; works != NULL && i < works->posted; i++) {
        Posted *posted = &works->queue[i];
        Stamp *began = &works->began[posted->channel][posted->work % RING];
        Stamp *ended = &works->ended[posted->channel][posted->work % RING];
        if (!posted->has_begun && began->work >= posted->work) {
            posted->has_begun = 1;
            fake_kernel_began(context, posted->task, posted->channel, began->device_ns);
        }
        if (posted->has_begun && ended->work >= posted->work) {
            fake_kernel_ended(posted->task, posted->channel, ended->device_ns);
        } else {
            works->queue[left++] = *posted;
        }
    }
    if (works != NULL) {
        works->posted = left;
    }
    return left;
}

/* Begin and end all channels of an operation one after the other. */
void fake_kernel(void *context, Task *task, uint64_t first_ns, uint64_t last_ns)
{
    for (int channel = 0; channel < task->channels; channel++) {
        fake_kernel_began(context, task, channel, first_ns == 0 ? 0 : first_ns + (uint64_t)channel);
    }
    for (int channel = task->channels - 1; channel >= 0; channel--) {
        fake_kernel_ended(task, channel, last_ns == 0 ? 0 : last_ns - (uint64_t)channel);
    }
}

void fake_free(Task *task)
{
    free(task);
}

static uint64_t now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000 + (uint64_t)now.tv_nsec;
}

/* The recorder's interface, native/collective.h: what the tap calls around an operation. */
typedef struct {
    uint32_t name_id, group, sequence, flags;
    uint64_t bytes, generation;
    int64_t start_ns, call_ns;
    uint32_t step, depth, within, ordinal;
    uint64_t pending;
} Collective;
typedef struct {
    int version;
    int (*issue)(Collective *);
    void (*returned)(Collective *, int);
    void (*completed)(uint64_t);
    int (*wait_began)(void);
    void (*wait_ended)(int);
    uint64_t (*claim)(void);
    int (*part_over)(uint64_t, uint32_t, int, int64_t, int64_t);
    void (*part_began)(uint64_t);
} Marks;
enum { END_UNKNOWN = 2 };

/* Nanoseconds of a collective of so many channels, call, launch and kernel, in a tight loop; with marks, inside of a tapped
 * call, whose own share is not subtracted. */
double fake_cost_ns(void *context, const Marks *marks, int channels, int rounds)
{
    Task task = {.type = COLL, .channels = channels};
    uint64_t begin_ns = now_ns();
    for (int i = 0; i < rounds; i++) {
        Collective collective = {.name_id = 1, .group = 1000, .sequence = (uint32_t)i};
        if (marks != NULL) {
            marks->issue(&collective);
        }
        if (context != NULL) {
            group.depth++;
            group.mask = fake_mask();
            task.mask = group.mask;
            task.api = NULL, task.handle = NULL;
            if (group.mask != 0) { /* each mask used here has calls */
                EventV5 grouped = {.type = GROUP_API}, called = {.type = COLL_API};
                v5->start(context, &group.api, &grouped);
                v5->record(group.api, GROUP_START_API_STOP, NULL);
                called.parent = group.api;
                v5->start(context, &group.coll_api, &called);
                task.api = group.coll_api;
            }
            stop(group.coll_api);
            group.tasks[group.queued++] = &task;
            fake_group_end(context, 0, 1);
        }
        if (marks != NULL) {
            marks->returned(&collective, END_UNKNOWN);
        }
        if (context != NULL && task.mask & KERNEL_CH) {
            uint64_t device_ns = now_ns();
            fake_kernel(context, &task, device_ns, device_ns + 100);
        }
    }
    return (double)(now_ns() - begin_ns) / rounds;
}

#ifdef PROGRAM
/* Marks that count. Several threads call them, as they do with the recorder. */
static _Atomic uint64_t claimed, told;
static __thread uint64_t ticket;
static uint64_t claim(void)
{
    claimed++;
    return ticket;
}
static _Atomic uint64_t begun;

static void part_began(uint64_t which)
{
    begun += which != 0;
}

static int part_over(uint64_t which, uint32_t parts, int time, int64_t start_ns, int64_t end_ns)
{
    (void)which, (void)time, (void)start_ns, (void)end_ns;
    told += parts;
    return 1;
}

enum { THREADS = 3, ROUNDS = 3000, IN_FLIGHT = 32 };
typedef struct {
    void *context;
    Task *_Atomic queue[IN_FLIGHT];
    _Atomic int ended;
} Stream;

static void *proxy(void *argument)
{
    Stream *stream = argument;
    for (int ended = 0; !ended;) {
        ended = stream->ended;
        for (int i = 0; i < IN_FLIGHT; i++) {
            Task *task = stream->queue[i];
            if (task != NULL) {
                uint64_t device_ns = now_ns();
                fake_kernel(stream->context, task, device_ns - 100, device_ns);
                fake_kernel_ended(task, 0, device_ns); /* again, and too late */
                fake_free(task);
                stream->queue[i] = NULL;
            }
        }
    }
    return NULL;
}

static void *issuer(void *argument)
{
    Stream *stream = argument;
    for (int i = 0; i < ROUNDS; i++) {
        ticket = (uint64_t)i + 1;
        while (stream->queue[i % IN_FLIGHT] != NULL) {
            sched_yield();
        }
        stream->queue[i % IN_FLIGHT] = fake_collective(stream->context, 0, 4);
    }
    stream->ended = 1;
    return NULL;
}

int main(void)
{
    static const Marks counting = {.version = 7, .claim = claim, .part_over = part_over, .part_began = part_began};
    void *library = dlopen(getenv("NCCL_PROFILER_PLUGIN"), RTLD_NOW | RTLD_LOCAL);
    int (*attach)(const Marks *) = (int (*)(const Marks *))dlsym(library, "torchlens_perf_nccl_attach");
    void (*turn)(int) = (void (*)(int))dlsym(library, "torchlens_perf_nccl_switch");
    void (*give_up)(void) = (void (*)(void))dlsym(library, "torchlens_perf_nccl_unseen_graph");
    void (*read_counters)(uint64_t *) = (void (*)(uint64_t *))dlsym(library, "torchlens_perf_nccl_counters");
    if (fake_load(6) != 6 || !attach(&counting)) {
        return 2;
    }
    turn(1);
    static Stream streams[THREADS];
    pthread_t issuers[THREADS], proxies[THREADS];
    for (int i = 0; i < THREADS; i++) {
        streams[i].context = fake_communicator(8, i);
        pthread_create(&issuers[i], NULL, issuer, &streams[i]);
        pthread_create(&proxies[i], NULL, proxy, &streams[i]);
    }
    for (int i = 0; i < 200; i++) {
        turn(i % 4 != 0);
        fake_finalize(fake_communicator(2, 0));
        sched_yield();
    }
    turn(1);
    for (int i = 0; i < 1000000 && claimed < THREADS * ROUNDS / 2; i++) {
        sched_yield();
    }
    give_up();
    for (int i = 0; i < THREADS; i++) {
        pthread_join(issuers[i], NULL);
        pthread_join(proxies[i], NULL);
        fake_finalize(streams[i].context);
    }
    attach(NULL);
    uint64_t values[6];
    read_counters(values);
    printf("claimed %llu told %llu lost %llu\n", (unsigned long long)claimed, (unsigned long long)told,
           (unsigned long long)values[3]);
    return claimed == told ? 0 : 1;
}
#endif
