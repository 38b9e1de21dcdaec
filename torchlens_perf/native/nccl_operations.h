/* The halves of the NCCL plugin: nccl_profiler.c is what NCCL calls, nccl_operations.c knows what is under way on the
 * device, and puts its times on the host's line. nccl_mask.c chooses which events NCCL reports.
 */
#ifndef TORCHLENS_PERF_NATIVE_NCCL_OPERATIONS_H
#define TORCHLENS_PERF_NATIVE_NCCL_OPERATIONS_H

#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

#include "collective.h"

enum handle_type { OF_OPERATION = 1, OF_CHANNEL, OF_API, OF_GROUP_API, OF_NOTHING };

/* What hooks/collectives/nccl_plugin.py reads, in this order, and behind it why timing was given up. */
enum counter {
    COMMUNICATORS, /* made since the library was loaded */
    ELSEWHERE,     /* that were not issued by a recorded call of torch.distributed */
    CROWDED,       /* that were in one group with so many others that they are not remembered */
    LOST,          /* whose kernels did not report their end */
    STALE,         /* events of operations that are over */
    COUNTERS,
};

/* What to add to a device's time for the host's. One per communicator: it has one device and one reporting thread. */
typedef struct {
    _Atomic uint32_t busy;
    int64_t lowest_ns, at_ns; /* the smallest difference, and when that was; INT64_MAX before the first */
    _Atomic int64_t offset_ns;
} HostLine;

typedef struct {
    _Atomic uint32_t used;
    int *mask;
    HostLine line;
} Communicator;

extern _Atomic uint64_t counters[COUNTERS];
extern const CollectiveMarks *_Atomic marks; /* NULL: nobody records */

/* Nothing is known of it. */
void communicator_begins(Communicator *communicator);
/* An operation is launched. Returns its handle, or NULL if its times will not be reported. channels: of its kernel. */
void *operation_launched(Communicator *communicator, uint64_t ticket, uint32_t channels);
/* Its kernel has begun on a channel. device_ns: 0 where the device has no clock. */
void *operation_began(const void *handle, uint64_t device_ns);
/* It has ended on the channel whose handle operation_began() gave. */
void operation_ended(const void *handle, uint64_t device_ns);
/* Nothing more will be reported about the operations in progress there. */
void operations_lost(const Communicator *communicator);
/* In a child process: what is under way is the parent's, and its threads may have held the locks. */
void operations_forked(void);

static inline void count(enum counter which)
{
    atomic_fetch_add_explicit(&counters[which], 1, memory_order_relaxed);
}

/* A handle is a number: its lowest byte says what it names. */
static inline void *handle_of(enum handle_type type, uint64_t value)
{
    return (void *)(uintptr_t)(value << 8 | type);
}

static inline enum handle_type type_of(const void *handle)
{
    return (enum handle_type)((uintptr_t)handle & 0xff);
}

static inline uint64_t value_of(const void *handle)
{
    return (uint64_t)(uintptr_t)handle >> 8;
}

/* Parts of a collective whose times will not be reported. */
static inline void part_unreported(uint64_t ticket, uint32_t parts, enum part_time time)
{
    const CollectiveMarks *attached = atomic_load_explicit(&marks, memory_order_acquire);
    if (attached != NULL) {
        attached->part_over(ticket, parts, time, 0, 0);
    }
}

/* Of what is under way, begins may not be reported any more. */
static inline void begins_unknown(void)
{
    const CollectiveMarks *attached = atomic_load_explicit(&marks, memory_order_acquire);
    if (attached != NULL) {
        attached->part_began(0);
    }
}

#endif
