/* Operations whose end is reported in parts. The reporter times what the operation starts on a device: it is the NCCL
 * plugin (nccl_profiler.c), or events around the call.
 *
 * One operation of torch may start several on the device: a list of tensors, a send for each peer. The reporter
 * claims a part of what the thread is issuing, and reports later, on any thread, when that part ran. The operation's
 * record is written when all of its parts are over: from the first one's start to the last one's end.
 */
#include "recorder.h"

enum { MAX_TIMED = 1024, PLACE_BITS = 10 };
static const int64_t CLOCK_SLACK_NS = 1000000; /* by which a device's time may be early on the host's line, as the clocks drift */
_Static_assert(MAX_TIMED == 1 << PLACE_BITS, "a ticket's lower bits are the place");

typedef struct {
    uint32_t turn;  /* of this place: tickets of earlier turns say nothing */
    uint32_t parts; /* that are not over */
    int used, returned, untimed, lost;
    uint32_t flags; /* FLAG_DEVICE while all of its times are by the device's clock */
    int64_t start_ns, end_ns;
    Collective collective;
} Timed;

/* With the lock. */
static Timed timed[MAX_TIMED];
static uint32_t next_timed;
static uint64_t lost_ends;

/* The operation that the thread is issuing. */
static __thread struct {
    int issues;
    uint64_t ticket;
    Collective collective;
} issuing;

static Timed *of_ticket(uint64_t ticket)
{
    Timed *found = &timed[ticket % MAX_TIMED];
    return found->used && found->turn == ticket >> PLACE_BITS ? found : NULL;
}

static void write_without_end(Timed *each)
{
    if (collective_is_recorded(&each->collective)) {
        Collective *collective = &each->collective;
        if (each->lost) {
            collective->group = MAX_GROUPS; /* nobody knows whether it has ended: no row may say so */
        }
        collective_write(collective, collective->call_ns, 0);
    }
    each->used = 0;
}

static void settle(Timed *each)
{
    if (!each->returned || each->parts > 0) {
        return;
    }
    lost_ends += each->lost != 0;
    if (each->untimed || each->lost) {
        write_without_end(each);
        return;
    }
    if (collective_is_recorded(&each->collective)) {
        each->collective.start_ns = each->start_ns;
        collective_write(&each->collective, each->end_ns - each->start_ns, FLAG_COMPLETED | each->flags);
    }
    each->used = 0;
}

/* The functions that follow until parts_claim() are called with the lock. */

void parts_begin(void)
{
    lost_ends = 0;
}

/* The watch ends: what is under way is recorded without an end. */
void parts_end(void)
{
    for (uint32_t place = 0; place < MAX_TIMED; place++) {
        if (timed[place].used) {
            write_without_end(&timed[place]);
        }
    }
}

void parts_issued(const Collective *collective)
{
    issuing.issues = 1;
    issuing.ticket = 0;
    issuing.collective = *collective;
}

/* The call has returned. Returns whether the operation's parts report its end, so that its caller need not. */
int parts_tell(const Collective *collective, enum collective_end end)
{
    uint64_t ticket = issuing.ticket;
    issuing.issues = 0;
    issuing.ticket = 0;
    if (ticket == 0) {
        if (collective_is_recorded(collective)) {
            collective_began(collective, 0); /* nobody tells when this one begins */
        }
        return 0;
    }
    Timed *mine = of_ticket(ticket);
    if (mine == NULL) {
        return 1; /* so many were issued meanwhile that it was recorded without an end */
    }
    if (end != END_UNKNOWN || collective->flags & FLAG_EXCEPTION) {
        mine->used = 0;
        return 0;
    }
    mine->collective = *collective;
    mine->returned = 1;
    settle(mine);
    return 1;
}

uint64_t parts_claim(void)
{
    if (!issuing.issues) {
        return 0;
    }
    collective_lock();
    if (!collective_is_recorded(&issuing.collective)) {
        issuing.issues = 0;
    } else if (issuing.ticket == 0) {
        uint32_t place = next_timed++ % MAX_TIMED;
        Timed *mine = &timed[place];
        if (mine->used) {
            lost_ends += collective_is_recorded(&mine->collective);
            mine->lost = 1;
            write_without_end(mine);
        }
        *mine = (Timed){.turn = mine->turn + 1, .parts = 1, .used = 1, .flags = FLAG_DEVICE,
                        .start_ns = INT64_MAX, .collective = issuing.collective};
        issuing.ticket = (uint64_t)mine->turn << PLACE_BITS | place;
    } else {
        Timed *mine = of_ticket(issuing.ticket);
        if (mine != NULL) {
            mine->parts++;
        }
    }
    uint64_t ticket = issuing.issues ? issuing.ticket : 0;
    collective_unlock();
    return ticket;
}

void parts_began(uint64_t ticket)
{
    collective_lock();
    Timed *mine = of_ticket(ticket);
    if (ticket == 0) {
        collective_begins_unknown();
    } else if (mine != NULL && collective_is_recorded(&mine->collective)) {
        collective_began(&mine->collective, 1);
    }
    collective_unlock();
}

int parts_over(uint64_t ticket, uint32_t parts, enum part_time time, int64_t start_ns, int64_t end_ns)
{
    int possible = 1;
    collective_lock();
    Timed *mine = of_ticket(ticket);
    if (mine != NULL && parts <= mine->parts) {
        mine->parts -= parts;
        if ((time == PART_UNTIMED || time == PART_LOST) && collective_is_recorded(&mine->collective)) {
            collective_began(&mine->collective, 0);
        }
        if (time == PART_BY_DEVICE && start_ns < mine->collective.start_ns - CLOCK_SLACK_NS) {
            possible = 0; /* another one's times */
        }
        if (time == PART_LOST) {
            mine->lost = 1;
        } else if (time == PART_UNTIMED || !possible) {
            mine->untimed = 1;
        } else {
            mine->start_ns = start_ns < mine->start_ns ? start_ns : mine->start_ns;
            mine->end_ns = end_ns > mine->end_ns ? end_ns : mine->end_ns;
            mine->flags &= time == PART_BY_DEVICE ? FLAG_DEVICE : 0;
        }
        settle(mine);
    }
    collective_unlock();
    return possible;
}

/* The number of operations whose end should have been reported and was not. */
PyObject *recorder_lost_ends(Recorder *self, void *unused)
{
    return PyLong_FromUnsignedLongLong(lost_ends);
}
