/* What NCCL has under way, from the launch to the end of its kernel on the last channel.
 *
 * The device's times are put on the host's line by the smallest difference between the host's clock when it learns of an end
 * and the device's time of that end. What is left of the proxy thread's delay makes times too late, by the same amount on
 * begin and end.
 *
 * An operation is locked for some words' reading and writing: who finds it locked tries again some thousand times, and then
 * the event is lost, and counted. A call that reports an end to the recorder waits for the recorder's lock.
 */
#include "nccl_operations.h"

#include "nccl_mask.h"

enum { MAX_OPERATIONS = 4096, MAX_TRIES = 4096 };
static const int64_t DRIFT = 2000; /* a device's clock and the host's drift apart by less than one part in so many */

/* A collective, a send or a receive of one communicator. A cache line. */
typedef struct {
    _Atomic uint32_t busy;
    uint32_t turn;   /* of this place: handles of earlier turns say nothing */
    uint64_t ticket; /* 0: free */
    Communicator *communicator;
    uint64_t first_device_ns, last_device_ns;
    int64_t first_host_ns; /* only where the device has no clock */
    uint16_t channels, over;
    uint8_t clockless, begun;
} __attribute__((aligned(64))) Operation;

_Atomic uint64_t counters[COUNTERS];
const CollectiveMarks *_Atomic marks;
static Operation operations[MAX_OPERATIONS];
static _Atomic uint32_t next_operation;

static int try_lock(_Atomic uint32_t *busy)
{
    for (int tries = 0; tries < MAX_TRIES; tries++) {
        if (!atomic_exchange_explicit(busy, 1, memory_order_acquire)) {
            return 1;
        }
    }
    return 0;
}

static void unlock(_Atomic uint32_t *busy)
{
    atomic_store_explicit(busy, 0, memory_order_release);
}

/* The operation of a handle, with its lock; NULL if it is over. */
static Operation *locked(const void *handle)
{
    uint64_t value = value_of(handle);
    Operation *operation = &operations[value % MAX_OPERATIONS];
    if (!try_lock(&operation->busy)) {
        count(LOST);
        return NULL;
    }
    if (operation->ticket == 0 || operation->turn != (uint32_t)(value / MAX_OPERATIONS)) {
        unlock(&operation->busy);
        count(STALE);
        return NULL;
    }
    return operation;
}

/* The place is free for another. With its lock. */
static void retire(Operation *operation)
{
    operation->ticket = 0;
    operation->turn++;
}

/* What to add to a device's time for the host's, as seen until an end of which the host learnt just now. The smallest
 * difference is not forgotten, for the next one may be late by any time; but it grows, as the clocks may drift apart. */
static int64_t offset_until(HostLine *line, int64_t host_ns, uint64_t device_ns)
{
    int64_t sample_ns = host_ns - (int64_t)device_ns;
    if (!try_lock(&line->busy)) {
        int64_t known_ns = atomic_load_explicit(&line->offset_ns, memory_order_relaxed);
        return known_ns < sample_ns ? known_ns : sample_ns;
    }
    int64_t offset_ns = line->lowest_ns;
    if (offset_ns != INT64_MAX) {
        offset_ns += (host_ns - line->at_ns) / DRIFT;
    }
    if (sample_ns < offset_ns) {
        offset_ns = line->lowest_ns = sample_ns;
        line->at_ns = host_ns;
    }
    atomic_store_explicit(&line->offset_ns, offset_ns, memory_order_relaxed);
    unlock(&line->busy);
    return offset_ns;
}

/* All channels have ended. A time that cannot be this kernel's is another one's, and those that follow would be too. */
static void finish(const Operation *operation)
{
    const CollectiveMarks *attached = atomic_load_explicit(&marks, memory_order_acquire);
    if (attached == NULL) {
        return;
    }
    int64_t host_ns = host_now(), start_ns = operation->first_host_ns, end_ns = host_ns;
    enum part_time time = start_ns != 0 ? PART_BY_HOST : PART_UNTIMED;
    int possible = 1;
    if (!operation->clockless) {
        possible = operation->last_device_ns >= operation->first_device_ns;
        int64_t offset_ns = offset_until(&operation->communicator->line, host_ns, operation->last_device_ns);
        start_ns = (int64_t)operation->first_device_ns + offset_ns;
        end_ns = (int64_t)operation->last_device_ns + offset_ns;
        time = possible && !is_given_up() ? PART_BY_DEVICE : PART_UNTIMED;
    }
    if (!attached->part_over(operation->ticket, 1, time, start_ns, end_ns) || !possible) {
        give_up(IMPOSSIBLE_TIME);
    }
}

void communicator_begins(Communicator *communicator)
{
    communicator->line.lowest_ns = INT64_MAX;
    atomic_store_explicit(&communicator->line.offset_ns, INT64_MAX, memory_order_relaxed);
}

void *operation_launched(Communicator *communicator, uint64_t ticket, uint32_t channels)
{
    if (channels == 0 || is_given_up()) {
        part_unreported(ticket, 1, PART_UNTIMED);
        return NULL;
    }
    uint32_t place = atomic_fetch_add_explicit(&next_operation, 1, memory_order_relaxed) % MAX_OPERATIONS;
    Operation *operation = &operations[place];
    if (!try_lock(&operation->busy)) {
        count(LOST);
        part_unreported(ticket, 1, PART_LOST);
        return NULL;
    }
    uint64_t lost = operation->ticket;
    if (lost != 0) {
        retire(operation);
    }
    operation->ticket = ticket;
    operation->communicator = communicator;
    operation->first_device_ns = UINT64_MAX;
    operation->last_device_ns = 0;
    operation->first_host_ns = 0;
    operation->channels = (uint16_t)channels;
    operation->over = 0;
    operation->clockless = operation->begun = 0;
    uint64_t turn = operation->turn;
    unlock(&operation->busy);
    if (lost != 0) {
        count(LOST);
        part_unreported(lost, 1, PART_LOST);
    }
    return handle_of(OF_OPERATION, turn * MAX_OPERATIONS + place);
}

void *operation_began(const void *handle, uint64_t device_ns)
{
    if (type_of(handle) != OF_OPERATION) {
        return NULL;
    }
    Operation *operation = locked(handle);
    if (operation == NULL) {
        return NULL;
    }
    if (device_ns == 0) {
        operation->clockless = 1;
        if (operation->first_host_ns == 0) {
            operation->first_host_ns = host_now();
        }
    } else if (device_ns < operation->first_device_ns) {
        operation->first_device_ns = device_ns;
    }
    uint64_t ticket = operation->begun ? 0 : operation->ticket; /* with its first channel */
    operation->begun = 1;
    unlock(&operation->busy);
    const CollectiveMarks *attached = atomic_load_explicit(&marks, memory_order_acquire);
    if (ticket != 0 && attached != NULL) {
        attached->part_began(ticket);
    }
    return handle_of(OF_CHANNEL, value_of(handle));
}

void operation_ended(const void *handle, uint64_t device_ns)
{
    Operation *operation = type_of(handle) == OF_CHANNEL ? locked(handle) : NULL;
    if (operation == NULL) {
        return;
    }
    if (device_ns == 0) {
        operation->clockless = 1;
    } else if (device_ns > operation->last_device_ns) {
        operation->last_device_ns = device_ns;
    }
    int over = ++operation->over == operation->channels;
    Operation ended;
    if (over) {
        ended = *operation;
        retire(operation);
    }
    unlock(&operation->busy);
    if (over) {
        finish(&ended);
    }
}

void operations_lost(const Communicator *communicator)
{
    for (int i = 0; i < MAX_OPERATIONS; i++) {
        uint64_t lost = 0;
        if (try_lock(&operations[i].busy)) {
            if (operations[i].communicator == communicator && operations[i].ticket != 0) {
                lost = operations[i].ticket;
                retire(&operations[i]);
            }
            unlock(&operations[i].busy);
        }
        if (lost != 0) {
            count(LOST);
            part_unreported(lost, 1, PART_LOST);
        }
    }
}

void operations_forked(void)
{
    for (int i = 0; i < MAX_OPERATIONS; i++) {
        if (operations[i].ticket != 0) {
            retire(&operations[i]);
        }
        unlock(&operations[i].busy);
    }
}
