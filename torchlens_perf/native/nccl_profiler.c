/* NCCL's profiler plugin: tells the recorder when the kernels of a collective ran, by the device's clock.
 *
 * NCCL loads this library at its first communicator (NCCL_PROFILER_PLUGIN names it). The Python side loads the same file, and
 * so has the same functions and variables. NCCL calls start() and stop() on the thread that issues, and, about the
 * kernel on each channel, start() and record() on its proxy thread.
 *
 * Which collective of torch an operation belongs to is asked on the thread that issues it (CollectiveMarks.claim()): from
 * version 5 on at the call of NCCL's API, before that when the kernel is launched. Handles are numbers and not addresses,
 * so that an event of an operation that is over, or of a graph that is replayed, is known as such and passed over.
 */
#include <pthread.h>

#include "nccl_abi.h"
#include "nccl_operations.h"

#define EXPORT __attribute__((visibility("default")))

enum { MOST_COMMUNICATORS = 1024, MOST_MASKS = 4, MOST_IN_GROUP = 64 };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* of the following; nothing is called with it */
static Communicator communicators[MOST_COMMUNICATORS];
static int *masks[MOST_MASKS]; /* NCCL's own, one for each copy of NCCL in the process */
static int wanted_mask;

/* The group that the thread is issuing: its operations, and how many parts of each have not been launched. */
static __thread struct {
    uint32_t count;
    struct {
        uint64_t ticket;
        uint32_t parts;
    } promised[MOST_IN_GROUP];
} group;

static uint64_t claim(void)
{
    const CollectiveMarks *told = atomic_load_explicit(&marks, memory_order_acquire);
    uint64_t ticket = told != NULL ? told->claim() : 0;
    if (ticket == 0) {
        count(ELSEWHERE);
    }
    return ticket;
}

static void write_masks(int mask)
{
    for (int i = 0; i < MOST_MASKS; i++) {
        if (masks[i] != NULL) {
            __atomic_store_n(masks[i], mask, __ATOMIC_RELAXED);
        }
    }
}

/* A call of NCCL's API that becomes part of a graph. NCCL has read the mask for it; what follows is spared, for a kernel
 * that is timed costs a call of the host in each replay. Python writes the mask again at the step's end. */
static void *captured(void)
{
    count(CAPTURED);
    if (pthread_mutex_trylock(&lock) == 0) {
        write_masks(0);
        pthread_mutex_unlock(&lock);
    }
    return handle_of(OF_CAPTURED_API, 0);
}

/* A call of NCCL's API, in a group that launches it now or later. */
static void *called(void)
{
    uint64_t ticket = claim();
    if (ticket == 0) {
        return handle_of(OF_API, 0);
    }
    if (group.count == 0 || group.promised[group.count - 1].ticket != ticket) {
        if (group.count == MOST_IN_GROUP) {
            part_untold(ticket, 1, PART_UNTIMED);
            return handle_of(OF_API, 0);
        }
        group.promised[group.count].ticket = ticket;
        group.promised[group.count++].parts = 0;
    }
    group.promised[group.count - 1].parts++;
    return handle_of(OF_API, ticket);
}

static void promise_kept(uint64_t ticket)
{
    for (uint32_t i = 0; i < group.count; i++) {
        if (group.promised[i].ticket == ticket && group.promised[i].parts > 0) {
            group.promised[i].parts--;
            return;
        }
    }
}

/* What was called in the group and not launched as a kernel that is timed (copy engines, symmetric memory, a copy in
 * place) will not be. */
static void group_ended(void)
{
    for (uint32_t i = 0; i < group.count; i++) {
        if (group.promised[i].parts > 0) {
            part_untold(group.promised[i].ticket, group.promised[i].parts, PART_UNTIMED);
        }
    }
    group.count = 0;
}

/* The ticket of an operation that is being launched; 0 if it is not recorded. */
static uint64_t ticket_of(const void *parent, int version)
{
    if (version < 5) {
        return claim();
    }
    uint64_t ticket = type_of(parent) == OF_API ? value_of(parent) : 0;
    if (ticket != 0) {
        promise_kept(ticket);
    }
    return ticket;
}

static void *started(Communicator *communicator, uint64_t type, const void *parent, int rank,
                     const NcclDetails *details, int version)
{
    uint64_t ticket;
    switch (type) {
    case NCCL_GROUP: /* without a handle, version 4 tells nothing of what the group holds */
        return handle_of(OF_PLAN, 0);
    case NCCL_GROUP_API:
        return handle_of(OF_GROUP_API, 0);
    case NCCL_COLL_API:
        return details->coll_api.captured ? captured() : called();
    case NCCL_P2P_API:
        return details->p2p_api.captured ? captured() : called();
    case NCCL_COLL:
        ticket = ticket_of(parent, version);
        return ticket == 0 ? NULL : operation_launched(communicator, ticket, details->coll.channels, false);
    case NCCL_P2P:
        ticket = ticket_of(parent, version);
        return ticket == 0 ? NULL
                           : operation_launched(communicator, ticket, details->p2p.channels, details->p2p.peer == rank);
    case NCCL_KERNEL_CH:
        return operation_began(parent, details->kernel_ch.device_ns);
    default:
        return NULL;
    }
}

static int start_v4(void *context, void **handle, NcclEventV4 *event)
{
    *handle =
        context == NULL ? NULL : started(context, event->type, event->parent, event->rank, &event->details, 4);
    return NCCL_SUCCESS;
}

static int start_v5(void *context, void **handle, NcclEventV5 *event)
{
    *handle =
        context == NULL ? NULL : started(context, event->type, event->parent, event->rank, &event->details, 5);
    return NCCL_SUCCESS;
}

static int stop(void *handle)
{
    if (type_of(handle) == OF_GROUP_API) {
        group_ended();
    }
    return NCCL_SUCCESS;
}

static int record(void *handle, int state, NcclState *arguments)
{
    if (state == NCCL_KERNEL_CH_STOP && arguments != NULL) {
        operation_ended(handle, arguments->kernel_device_ns);
    }
    return NCCL_SUCCESS;
}

/* Without a context, where there are too many communicators, nothing of it is recorded. */
static int init(void **context, int *mask)
{
    count(COMMUNICATORS);
    *context = NULL;
    pthread_mutex_lock(&lock);
    for (int i = 0; i < MOST_MASKS; i++) {
        if (masks[i] == mask || masks[i] == NULL) {
            masks[i] = mask;
            break;
        }
    }
    for (int i = 0; i < MOST_COMMUNICATORS && *context == NULL; i++) {
        Communicator *communicator = &communicators[i];
        if (!communicator->used) {
            communicator->used = 1;
            communicator->mask = mask;
            atomic_store_explicit(&communicator->distrusted, 0, memory_order_relaxed);
            *context = communicator;
        }
    }
    __atomic_store_n(mask, wanted_mask, __ATOMIC_RELAXED);
    pthread_mutex_unlock(&lock);
    return NCCL_SUCCESS;
}

static int init_v4(void **context, int *mask, const char *name, uint64_t id, int nodes, int ranks, int rank, NcclLog log)
{
    (void)name, (void)id, (void)nodes, (void)ranks, (void)rank, (void)log;
    return init(context, mask);
}

static int init_v5(void **context, uint64_t id, int *mask, const char *name, int nodes, int ranks, int rank, NcclLog log)
{
    (void)name, (void)id, (void)nodes, (void)ranks, (void)rank, (void)log;
    return init(context, mask);
}

/* After its last communicator a copy of NCCL may be unloaded, and its mask with it. */
static int finalize(void *context)
{
    if (context == NULL) {
        return NCCL_SUCCESS;
    }
    Communicator *gone = context;
    operations_lost(gone);
    pthread_mutex_lock(&lock);
    gone->used = 0;
    int last = 1;
    for (int i = 0; i < MOST_COMMUNICATORS; i++) {
        last &= !communicators[i].used || communicators[i].mask != gone->mask;
    }
    for (int i = 0; last && i < MOST_MASKS; i++) {
        if (masks[i] == gone->mask) {
            masks[i] = NULL;
        }
    }
    pthread_mutex_unlock(&lock);
    return NCCL_SUCCESS;
}

EXPORT const NcclProfilerV4 ncclProfiler_v4 = {"torchlens_perf", init_v4, start_v4, stop, record, finalize};
EXPORT const NcclProfilerV5 ncclProfiler_v5 = {"torchlens_perf", init_v5, start_v5, stop, record, finalize};
EXPORT const NcclProfilerV5 ncclProfiler_v6 = {"torchlens_perf", init_v5, start_v5, stop, record, finalize};

/* What to record with; NULL for nothing. Returns 0 for another version of the interface. */
EXPORT int torchlens_perf_nccl_attach(const CollectiveMarks *told)
{
    if (told != NULL && told->version != COLLECTIVE_MARKS_VERSION) {
        return 0;
    }
    atomic_store_explicit(&marks, told, memory_order_release);
    return 1;
}

/* Whether NCCL is to tell of its operations, from the next ones on, in communicators that there are or will be. */
EXPORT void torchlens_perf_nccl_switch(int on)
{
    pthread_mutex_lock(&lock);
    wanted_mask = on ? NCCL_COLL | NCCL_P2P | NCCL_KERNEL_CH : 0;
    write_masks(wanted_mask);
    pthread_mutex_unlock(&lock);
}

EXPORT void torchlens_perf_nccl_counters(uint64_t *values)
{
    for (int i = 0; i < COUNTERS; i++) {
        values[i] = atomic_load_explicit(&counters[i], memory_order_relaxed);
    }
}
