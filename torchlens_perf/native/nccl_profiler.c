/* NCCL's profiler plugin: reports to the recorder when the kernels of a collective ran, by the device's clock.
 *
 * NCCL loads this library at its first communicator (NCCL_PROFILER_PLUGIN names it). The Python side loads the same file, and
 * so has the same functions and variables. NCCL calls start() and stop() on the thread that issues, and, about the
 * kernel on each channel, start() and record() on its proxy thread.
 *
 * Which collective of torch an operation belongs to is asked at the call of NCCL's API, on the thread that issues it
 * (CollectiveMarks.claim()). Handles are numbers and not addresses, so that an event of an operation that is over, or of
 * a graph that is replayed, is known as such and passed over.
 */
#include "nccl_abi.h"
#include "nccl_mask.h"
#include "nccl_operations.h"

#include <stdbool.h>
#include <sys/statvfs.h>

#define EXPORT __attribute__((visibility("default")))

enum { MAX_COMMUNICATORS = 1024, MAX_IN_GROUP = 64 };

static Communicator communicators[MAX_COMMUNICATORS];

/* For its first timed kernel each communicator takes so much shared memory in each process, and does not look whether it
 * got it (NVIDIA/nccl pull request 2326): 33 MiB and some more. */
static const uint64_t POOL_BYTES = 34 << 20;

/* The group that the thread is issuing: its operations, and how many parts of each have not been launched. */
static __thread struct {
    uint32_t count;
    uint64_t crowded; /* the last one that there was no room for */
    struct {
        uint64_t ticket;
        uint32_t parts;
    } promised[MAX_IN_GROUP];
} group;

static uint64_t claim(void)
{
    const CollectiveMarks *attached = atomic_load_explicit(&marks, memory_order_acquire);
    uint64_t ticket = attached != NULL ? attached->claim() : 0;
    if (ticket == 0) {
        count(ELSEWHERE);
    }
    return ticket;
}

/* A call of NCCL's API, in a group that launches it now or later. */
static void *called(bool captured)
{
    if (captured) {
        give_up(CAPTURED_OPERATION);
    }
    uint64_t ticket = is_timing() ? claim() : 0;
    if (ticket == 0) {
        return handle_of(OF_API, 0);
    }
    if (group.count == 0 || group.promised[group.count - 1].ticket != ticket) {
        if (group.count == MAX_IN_GROUP) {
            if (group.crowded != ticket) {
                count(CROWDED);
                group.crowded = ticket;
            }
            part_unreported(ticket, 1, PART_UNTIMED);
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
            part_unreported(group.promised[i].ticket, group.promised[i].parts, PART_UNTIMED);
        }
    }
    group.count = 0;
}

/* An operation is being launched. */
static void *launched(Communicator *communicator, const void *parent, uint32_t channels)
{
    uint64_t ticket = type_of(parent) == OF_API ? value_of(parent) : 0;
    if (ticket == 0) {
        return NULL;
    }
    promise_kept(ticket);
    return operation_launched(communicator, ticket, channels);
}

static void *started(Communicator *communicator, const NcclEvent *event)
{
    const NcclDetails *details = &event->details;
    switch (event->type) {
    case NCCL_GROUP: /* without a handle, NCCL might not report what the group holds */
        return handle_of(OF_NOTHING, 0);
    case NCCL_GROUP_API:
        return handle_of(is_timing() ? OF_GROUP_API : OF_NOTHING, 0);
    case NCCL_COLL_API:
        return called(details->coll_api.captured);
    case NCCL_P2P_API:
        return called(details->p2p_api.captured);
    case NCCL_COLL:
        return launched(communicator, event->parent, details->coll.channels);
    case NCCL_P2P:
        if (details->p2p.peer == event->rank) {
            give_up(SELF_COPY);
        }
        return launched(communicator, event->parent, details->p2p.channels);
    case NCCL_KERNEL_CH:
        return operation_began(event->parent, details->kernel_ch.device_ns);
    default:
        return NULL;
    }
}

static int start(void *context, void **handle, NcclEvent *event)
{
    *handle = context == NULL ? NULL : started(context, event);
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

/* Whether there is room for the pools of one more communicator on this node, and of all that may not have theirs yet. */
static bool has_room(int nodes, int ranks)
{
    uint64_t known = 1;
    for (int i = 0; i < MAX_COMMUNICATORS; i++) {
        known += atomic_load_explicit(&communicators[i].used, memory_order_relaxed) != 0;
    }
    struct statvfs shared_memory;
    if (statvfs("/dev/shm", &shared_memory) != 0) {
        return false;
    }
    uint64_t local_ranks = nodes > 0 ? (uint64_t)(ranks + nodes - 1) / (uint64_t)nodes : (uint64_t)ranks;
    return (uint64_t)shared_memory.f_bavail * shared_memory.f_frsize >= known * local_ranks * POOL_BYTES;
}

/* One without a context is not looked at: it might do what only the host or only the device counts. */
static int init(void **context, uint64_t id, int *mask, const char *name, int nodes, int ranks, int rank, NcclLog log)
{
    (void)name, (void)id, (void)rank, (void)log;
    count(COMMUNICATORS);
    *context = NULL;
    if (!has_room(nodes, ranks)) {
        give_up(NO_ROOM);
    }
    mask_used(mask);
    for (int i = 0; i < MAX_COMMUNICATORS; i++) {
        Communicator *communicator = &communicators[i];
        if (!atomic_exchange_explicit(&communicator->used, 1, memory_order_acquire)) {
            communicator->mask = mask;
            communicator_begins(communicator);
            *context = communicator;
            return NCCL_SUCCESS;
        }
    }
    give_up(MANY_COMMUNICATORS);
    return NCCL_SUCCESS;
}

static int finalize(void *context)
{
    if (context != NULL) {
        Communicator *gone = context;
        operations_lost(gone);
        mask_unused(gone->mask);
        atomic_store_explicit(&gone->used, 0, memory_order_release);
    }
    return NCCL_SUCCESS;
}

EXPORT const NcclProfiler ncclProfiler_v5 = {"torchlens_perf", init, start, stop, record, finalize};
/* Version 6 adds types of events. */
EXPORT const NcclProfiler ncclProfiler_v6 = {"torchlens_perf", init, start, stop, record, finalize};

/* What to record with; NULL for nothing. Returns 0 for another version of the interface. */
EXPORT int torchlens_perf_nccl_attach(const CollectiveMarks *attached)
{
    if (attached != NULL && attached->version != COLLECTIVE_MARKS_VERSION) {
        return 0;
    }
    atomic_store_explicit(&marks, attached, memory_order_release);
    return 1;
}

/* Whether NCCL is to report its kernels, from the next ones on, in communicators that there are or will be. */
EXPORT void torchlens_perf_nccl_switch(int on)
{
    switch_timing(on);
}

/* A CUDA graph is replayed of which nobody knows what it holds: nothing of communicators that are yet to be made. */
EXPORT void torchlens_perf_nccl_unseen_graph(void)
{
    if (atomic_load_explicit(&counters[COMMUNICATORS], memory_order_relaxed) > 0) {
        give_up(UNSEEN_GRAPH);
    }
}

/* In a child process: nothing is recorded or timed. */
EXPORT void torchlens_perf_nccl_forked(void)
{
    atomic_store_explicit(&marks, NULL, memory_order_release);
    masks_forked();
    operations_forked();
    for (int i = 0; i < MAX_COMMUNICATORS; i++) {
        atomic_store_explicit(&communicators[i].line.busy, 0, memory_order_relaxed);
    }
}

EXPORT void torchlens_perf_nccl_counters(uint64_t *values)
{
    for (int i = 0; i < COUNTERS; i++) {
        values[i] = atomic_load_explicit(&counters[i], memory_order_relaxed);
    }
    values[COUNTERS] = atomic_load_explicit(&given_up_for, memory_order_relaxed);
}
