/* What NCCL has under way, from the launch to the end of its kernel on the last channel.
 *
 * The device's times are put on the host's line by the smallest difference, over the last second, between the host's clock
 * when it learns of an end and the device's time of that end. What is left of the proxy thread's delay makes
 * times too late, by the same amount on begin and end.
 *
 * Nothing here waits: a lock that is not free after some tries is an event lost, and counted.
 */
#include "nccl_operations.h"

#include <time.h>

enum { MOST_OPERATIONS = 4096, MOST_TRIES = 4096 };
static const int64_t WINDOW_NS = 500000000;

/* A collective, a send or a receive of one communicator. A cache line. */
typedef struct {
    _Atomic uint32_t busy;
    uint32_t turn;   /* of this place: handles of earlier turns say nothing */
    uint64_t ticket; /* 0: free */
    Communicator *communicator;
    uint64_t first_device_ns, last_device_ns;
    int64_t first_host_ns; /* only where the device has no clock */
    uint16_t channels, over;
    uint8_t clockless;
} __attribute__((aligned(64))) Operation;

_Atomic uint64_t counters[COUNTERS];
const CollectiveMarks *_Atomic marks;
static Operation operations[MOST_OPERATIONS];
static _Atomic uint32_t next_operation;

static struct {
    _Atomic uint32_t busy;
    int64_t since_ns, lowest_ns, before_ns;
    _Atomic int64_t offset_ns;
} host_line = {.lowest_ns = INT64_MAX, .before_ns = INT64_MAX, .offset_ns = INT64_MAX};

static int64_t host_now(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

static int try_lock(_Atomic uint32_t *busy)
{
    for (int tries = 0; tries < MOST_TRIES; tries++) {
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
    Operation *operation = &operations[value % MOST_OPERATIONS];
    if (!try_lock(&operation->busy)) {
        count(LOST);
        return NULL;
    }
    if (operation->ticket == 0 || operation->turn != (uint32_t)(value / MOST_OPERATIONS)) {
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

/* What to add to a device's time for the host's, as seen until an end of which the host learnt just now. There is one
 * line: communicators on several devices in one process would need one each. */
static int64_t offset_until(int64_t host_ns, uint64_t device_ns)
{
    int64_t sample_ns = host_ns - (int64_t)device_ns;
    if (!try_lock(&host_line.busy)) {
        int64_t known_ns = atomic_load_explicit(&host_line.offset_ns, memory_order_relaxed);
        return known_ns < sample_ns ? known_ns : sample_ns;
    }
    int64_t age_ns = host_ns - host_line.since_ns;
    if (age_ns >= WINDOW_NS) {
        host_line.before_ns = age_ns < 2 * WINDOW_NS ? host_line.lowest_ns : INT64_MAX;
        host_line.lowest_ns = INT64_MAX;
        host_line.since_ns = host_ns;
    }
    if (sample_ns < host_line.lowest_ns) {
        host_line.lowest_ns = sample_ns;
    }
    int64_t offset_ns = host_line.lowest_ns < host_line.before_ns ? host_line.lowest_ns : host_line.before_ns;
    atomic_store_explicit(&host_line.offset_ns, offset_ns, memory_order_relaxed);
    unlock(&host_line.busy);
    return offset_ns;
}

static void distrust(Communicator *communicator)
{
    if (!atomic_exchange_explicit(&communicator->distrusted, 1, memory_order_relaxed)) {
        count(DISTRUSTED);
    }
}

static int is_distrusted(const Communicator *communicator)
{
    return atomic_load_explicit(&communicator->distrusted, memory_order_relaxed);
}

/* All channels have ended. NCCL finds a kernel's times by counting the works of each channel on the host and on the device.
 * A copy to oneself (2.27 to 2.30), and a broadcast of some versions (nccl#2369), is counted by the device alone: from
 * then on the times are those of earlier kernels. So what began before it was issued, or ended before it began, is the
 * end of all trust in its communicator. */
static void finish(const Operation *operation)
{
    const CollectiveMarks *told = atomic_load_explicit(&marks, memory_order_acquire);
    if (told == NULL) {
        return;
    }
    Communicator *communicator = operation->communicator;
    int64_t host_ns = host_now(), start_ns = operation->first_host_ns, end_ns = host_ns;
    enum part_time time = start_ns != 0 ? PART_BY_HOST : PART_UNTIMED;
    if (!operation->clockless) {
        if (operation->last_device_ns < operation->first_device_ns) {
            distrust(communicator);
        }
        int64_t offset_ns = offset_until(host_ns, operation->last_device_ns);
        start_ns = (int64_t)operation->first_device_ns + offset_ns;
        end_ns = (int64_t)operation->last_device_ns + offset_ns;
        time = is_distrusted(communicator) ? PART_UNTIMED : PART_BY_DEVICE;
    }
    if (!told->part_over(operation->ticket, 1, time, start_ns, end_ns)) {
        distrust(communicator);
    }
}

void *operation_launched(Communicator *communicator, uint64_t ticket, uint32_t channels, bool to_oneself)
{
    if (to_oneself) {
        distrust(communicator);
    }
    if (channels == 0 || is_distrusted(communicator)) {
        part_untold(ticket, 1, PART_UNTIMED);
        return NULL;
    }
    uint32_t place = atomic_fetch_add_explicit(&next_operation, 1, memory_order_relaxed) % MOST_OPERATIONS;
    Operation *operation = &operations[place];
    if (!try_lock(&operation->busy)) {
        count(LOST);
        part_untold(ticket, 1, PART_LOST);
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
    operation->clockless = 0;
    uint64_t turn = operation->turn;
    unlock(&operation->busy);
    if (lost != 0) {
        count(LOST);
        part_untold(lost, 1, PART_LOST);
    }
    return handle_of(OF_OPERATION, turn * MOST_OPERATIONS + place);
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
    unlock(&operation->busy);
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
    for (int i = 0; i < MOST_OPERATIONS; i++) {
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
            part_untold(lost, 1, PART_LOST);
        }
    }
}
