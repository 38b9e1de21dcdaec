/* How collectives are recorded, for the methods of the recorder and for the native tap (tap.cpp), which is built apart
 * from this extension, against the torch at hand, and gets at these functions through a capsule.
 *
 * All of it may be called on any thread, with or without the GIL.
 */
#ifndef TORCHLENS_PERF_NATIVE_COLLECTIVE_H
#define TORCHLENS_PERF_NATIVE_COLLECTIVE_H

#include <stdint.h>
#include <time.h>

#define COLLECTIVE_MARKS_CAPSULE "torchlens_perf._native.collective_marks"
enum { COLLECTIVE_MARKS_VERSION = 7 };

/* The clock of all records. */
static inline int64_t host_now(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

/* One operation: what the tap knows of it, and what issue() adds. */
typedef struct {
    uint32_t name_id;
    uint32_t group; /* slot in the ring file's table of groups; beyond the table: not shown there */
    uint32_t sequence;
    uint32_t flags;
    uint64_t bytes;
    uint64_t generation; /* of the recorder that was there when it was issued */
    int64_t start_ns;
    int64_t call_ns; /* how long the issuing call took */
    uint32_t step;
    uint32_t depth;
    uint32_t within; /* name of the span that it was issued in */
    uint32_t ordinal; /* among the step's operations */
    uint64_t pending; /* names it among those that have not ended; 0: it is not kept there */
} Collective;

enum collective_end {
    END_BY_CALLBACK, /* completed() or failed() will be called */
    END_BY_WAIT,     /* the issuing thread waits for it at once: the end of that wait is its end */
    END_UNKNOWN,     /* nothing reports the end */
    END_BY_RETURN,   /* the call itself was blocked until the end */
};

/* What is known of the times of a part that is over. */
enum part_time {
    PART_BY_DEVICE, /* the device's clock, put on the host's time line */
    PART_BY_HOST,   /* when the host learnt of it */
    PART_UNTIMED,   /* nothing reports them */
    PART_LOST,      /* they should have been reported, and were not */
};

/* What an operator is called for. As Pass in run/operators.py. */
enum pass { PASS_FORWARD, PASS_BACKWARD, PASS_RECOMPUTE, PASS_OPTIMIZER };

typedef struct {
    int version;
    /* Before the operation. Returns 0, and records nothing, if nobody records. */
    int (*issue)(Collective *collective);
    /* After the issuing call. */
    void (*returned)(Collective *collective, enum collective_end end);
    /* The operation is over that returned() has named so: a callback keeps nothing else, and so needs no heap. */
    void (*completed)(uint64_t pending);
    /* A wait of the calling thread, in a functional collective's wait_tensor. Returns 0 if it is not recorded. */
    int (*wait_began)(void);
    void (*wait_ended)(int raised);
    /* The operation that the calling thread is issuing has one more part, which part_over() will report. Returns the
     * operation's ticket, of 42 bits; 0 if the thread issues none, or it is not recorded. */
    uint64_t (*claim)(void);
    /* That many parts of it are over. Returns 0 for times that cannot be this operation's: it had not been issued. */
    int (*part_over)(uint64_t ticket, uint32_t parts, enum part_time time, int64_t start_ns, int64_t end_ns);
    /* The kernel of one of its parts has begun: so a reader sees whose device has not come to it. A ticket of 0: begins
     * are not reported any more, and those that were say nothing. */
    void (*part_began)(uint64_t ticket);
    /* With the GIL and an exception set, which it takes: out of the PyObject `function`. A signal handler's comes to the
     * user's loop; others are written to the log. Returns whether it was a signal handler's. */
    int (*pass_on)(void *function);
    /* The pass that the calling thread is in by its open spans, and the innermost module, which is not set without one. */
    enum pass (*place)(uint32_t *module);
    /* As completed(), with an error. */
    void (*failed)(uint64_t pending);
} CollectiveMarks;

#endif
