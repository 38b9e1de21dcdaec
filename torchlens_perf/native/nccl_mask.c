/* NCCL's event masks: nccl_mask.h. */
#include "nccl_mask.h"

#include <pthread.h>
#include <stddef.h>

#include "nccl_abi.h"
#include "nccl_operations.h"

enum { MAX_MASKS = 4 };

/* What is asked for always, until timing is given up: by NCCL's sources this makes it post nothing to its proxy thread. */
static const int SEEN = NCCL_COLL_API | NCCL_P2P_API | NCCL_P2P;
static const int TIMED = NCCL_COLL | NCCL_KERNEL_CH;

_Atomic int timing;
_Atomic uint32_t given_up_for;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* of the following; nothing is called with it */
static struct {
    int *place; /* NCCL's own, one for each copy of NCCL in the process */
    int users;
} masks[MAX_MASKS];

static int wanted_mask(void)
{
    return is_given_up() ? 0 : SEEN | (is_timing() ? TIMED : 0);
}

/* With the lock. */
static void write_masks(void)
{
    for (int i = 0; i < MAX_MASKS; i++) {
        if (masks[i].place != NULL) {
            __atomic_store_n(masks[i].place, wanted_mask(), __ATOMIC_RELAXED);
        }
    }
}

/* One that there is no room for stays 0. */
void mask_used(int *mask)
{
    int set = 0;
    pthread_mutex_lock(&lock);
    for (int i = 0; i < MAX_MASKS; i++) {
        if (masks[i].place == mask || masks[i].place == NULL) {
            masks[i].place = mask;
            masks[i].users++;
            set = wanted_mask();
            break;
        }
    }
    __atomic_store_n(mask, set, __ATOMIC_RELAXED);
    pthread_mutex_unlock(&lock);
}

/* After its last communicator a copy of NCCL may be unloaded, and its mask with it. */
void mask_unused(const int *mask)
{
    pthread_mutex_lock(&lock);
    for (int i = 0; i < MAX_MASKS; i++) {
        if (masks[i].place == mask && --masks[i].users == 0) {
            masks[i].place = NULL;
        }
    }
    pthread_mutex_unlock(&lock);
}

void switch_timing(int on)
{
    pthread_mutex_lock(&lock);
    atomic_store_explicit(&timing, on, memory_order_relaxed);
    write_masks();
    pthread_mutex_unlock(&lock);
}

void give_up(enum cause why)
{
    uint32_t before = NOT_GIVEN_UP;
    if (atomic_compare_exchange_strong_explicit(&given_up_for, &before, why, memory_order_relaxed,
                                                memory_order_relaxed)) {
        switch_timing(0);
        begins_unknown();
    }
}

void masks_forked(void)
{
    pthread_mutex_init(&lock, NULL);
    switch_timing(0);
}
