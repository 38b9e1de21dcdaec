/* The two halves of the NCCL plugin: nccl_profiler.c is what NCCL calls, nccl_operations.c knows what is under way on the
 * device, and puts its times on the host's line.
 */
#ifndef TORCHLENS_PERF_NATIVE_NCCL_OPERATIONS_H
#define TORCHLENS_PERF_NATIVE_NCCL_OPERATIONS_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>

#include "collective.h"

enum handle_type { OF_OPERATION = 1, OF_CHANNEL, OF_API, OF_CAPTURED_API, OF_GROUP_API, OF_PLAN };

/* What nccl_plugin.py reads, in this order. */
enum counter {
    COMMUNICATORS, /* made since the library was loaded */
    ELSEWHERE,     /* that were not issued by a recorded call of torch.distributed */
    CAPTURED,      /* that became part of a graph */
    LOST,          /* whose kernels did not tell of their end */
    STALE,         /* events of operations that are over */
    DISTRUSTED,    /* communicators whose device times were those of other operations */
    COUNTERS,
};

typedef struct {
    int used;
    int *mask;
    _Atomic int distrusted; /* NCCL tells the times of other operations as this communicator's */
} Communicator;

extern _Atomic uint64_t counters[COUNTERS];
extern const CollectiveMarks *_Atomic marks; /* NULL: nobody records */

/* An operation is launched; its handle, or NULL where its times will not be told. channels: that its kernel runs on. */
void *operation_launched(Communicator *communicator, uint64_t ticket, uint32_t channels, bool to_oneself);
/* Its kernel has begun on a channel. device_ns: 0 where the device has no clock. */
void *operation_began(const void *handle, uint64_t device_ns);
/* It has ended on the channel whose handle operation_began() gave. */
void operation_ended(const void *handle, uint64_t device_ns);
/* No more will be told of what is under way there. */
void operations_lost(const Communicator *communicator);

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

/* Parts of a collective of which no times will be told. */
static inline void part_untold(uint64_t ticket, uint32_t parts, enum part_time time)
{
    const CollectiveMarks *told = atomic_load_explicit(&marks, memory_order_acquire);
    if (told != NULL) {
        told->part_over(ticket, parts, time, 0, 0);
    }
}

#endif
