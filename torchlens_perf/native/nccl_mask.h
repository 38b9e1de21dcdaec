/* Which events NCCL is asked for, in all of its communicators at once, and the state in which it is asked for none any more.
 *
 * NCCL finds a kernel's times by counting the works of each channel on the host and on the device. Some works only one of
 * the two counts: see docs/internals/decisions/0042-nccl-timing.md. A kernel that is timed afterwards gets another one's
 * times, or NCCL's thread waits for a count that never comes. So from the first such work on no kernel is timed, and for this
 * the calls and the sends are looked at from the first communicator on, also when nothing is timed.
 */
#ifndef TORCHLENS_PERF_NATIVE_NCCL_MASK_H
#define TORCHLENS_PERF_NATIVE_NCCL_MASK_H

#include <stdatomic.h>
#include <stdint.h>

/* Why timing was given up; what hooks/collectives/nccl_plugin.py has words for, in this order. */
enum cause {
    NOT_GIVEN_UP,
    CAPTURED_OPERATION,
    SELF_COPY,
    IMPOSSIBLE_TIME,
    UNSEEN_GRAPH,
    MANY_COMMUNICATORS,
    NO_ROOM,
};

extern _Atomic int timing;           /* whether NCCL is asked for the times of kernels */
extern _Atomic uint32_t given_up_for; /* enum cause */

/* A communicator whose NCCL reads this mask is made; or gone. */
void mask_used(int *mask);
void mask_unused(const int *mask);
void switch_timing(int on);
/* Nothing is timed any more, in this process. Waits for those who write the masks, on any thread. */
void give_up(enum cause why);
/* In a child process, whose parent's threads may have held the lock. */
void masks_forked(void);

static inline int is_timing(void)
{
    return atomic_load_explicit(&timing, memory_order_relaxed);
}

static inline int is_given_up(void)
{
    return atomic_load_explicit(&given_up_for, memory_order_relaxed) != NOT_GIVEN_UP;
}

#endif
