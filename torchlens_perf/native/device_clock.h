/* The clock of a device. device_clock.c makes marks and reads their times; device.c marks spans with it. */
#ifndef TORCHLENS_PERF_DEVICE_CLOCK_H
#define TORCHLENS_PERF_DEVICE_CLOCK_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <sys/types.h>

enum { NO_MARK = -1, ANY_STREAM = -1, MAX_STREAMS = 64, MAX_BEHIND = 64, MAX_ENDS = 256 };

/* An event whose time is also known on the host's CLOCK_MONOTONIC, with this error. Its time on the device's time line
 * begins at the first anchor. */
typedef struct {
    void *event;
    int64_t host_ns, error_ns, device_ns;
    int64_t users; /* marks that are measured from it, and the clock */
} Anchor;

/* A mark that has not been read. */
typedef struct {
    int64_t number;
    void *event;
    Anchor *anchor;
} Mark;

/* A span that the device may not have reached yet. */
typedef struct {
    uint32_t kind, name_id, flags;
    int64_t step, begin, end;
    int64_t issued_ns; /* when its end was marked, by the host's clock */
} MarkedSpan;

/* Queues that grow. Elements are at (first + i) & (capacity - 1). */
typedef struct {
    Mark *items;
    size_t first, count, capacity;
} MarkQueue;

typedef struct {
    MarkedSpan *items;
    size_t first, count, capacity;
} SpanQueue;

typedef struct {
    int used;
    int64_t handle;
    MarkQueue pending;
    struct {
        int64_t number;
        void *event;
    } ends[MAX_BEHIND + 2]; /* the newest mark at the end of each step that has not been read */
    int ended;
    int64_t read; /* the newest mark that has been read */
} DeviceStream;

/* What a mark's time is, by its number modulo the capacity. device_ns: LOST if it could not be read. */
typedef struct {
    int64_t number, device_ns, host_ns;
} MarkTime;

typedef struct {
    int64_t mark, step;
} StepEnd;

/* Functions of the CUDA driver. HIP's have the same parameters. */
typedef struct {
    int (*create)(void **event, unsigned flags);
    int (*destroy)(void *event);
    int (*record)(void *event, void *stream);
    int (*query)(void *event);
    int (*elapsed)(float *milliseconds, void *begin, void *end);
    int (*is_capturing)(void *stream, int *status);
    int (*exchange_mode)(int *mode);
    int (*get_context)(void **context); /* may be missing, as the next one */
    int (*set_context)(void *context);
} EventDriver;

typedef struct {
    PyObject_HEAD
    EventDriver driver;
    void *context; /* of the device, in which all calls are made */
    PyObject *events; /* events in Python, which are used instead of the driver; or NULL */
    PyObject *read_stream, *index; /* read_stream(index) returns the calling thread's current stream */
    PyObject *now;                 /* NULL: CLOCK_MONOTONIC */
    PyObject *listener;            /* receives the spans whose times are known; or NULL */
    int64_t idle_stream;
    pid_t process;
    void **pool;
    int64_t pooled, made, max_events;
    MarkTime *times;
    int64_t max_times;
    DeviceStream streams[MAX_STREAMS];
    Anchor *anchor;
    int64_t anchored_ns;
    void *late_event; /* an anchor's event that did not complete in time, and when it was recorded */
    int64_t late_ns;
    int behind;
    int reading; /* no mark and no second reading meanwhile: events in Python may call back */
    int64_t marked, marked_on, drift_ns, status;
    int64_t captured, skipped, crowded, aside, open_ended, unread;
    /* Of the step in progress: streams on which phases ended, and on which mark(only_on) did nothing. By index. */
    uint64_t phases_on, passed_over;
    int has_waited; /* a wait was marked: Python closes those that lack an end */
    int64_t stream; /* the compute stream: the one of the last step's end */
    int64_t backward_end, optimizer_end; /* marks */
    int64_t boundary, missing_before;
    int64_t lost_step; /* the last step with a phase whose time is lost */
    SpanQueue spans;
    StepEnd ends[MAX_ENDS]; /* the last mark of each recent step, oldest first, in a circle */
    int64_t first_end, end_count;
    int64_t reached; /* the mark that is published, if it is located in a step */
    int is_located;
} DeviceClock;

extern PyTypeObject DeviceClockType;

int64_t clock_now(DeviceClock *self);
int64_t clock_mark(DeviceClock *self, int64_t only_on);
int64_t clock_current_stream(DeviceClock *self);
int64_t clock_missing(const DeviceClock *self);
int clock_stream_index(DeviceClock *self, int64_t handle);
int clock_queue_span(DeviceClock *self, MarkedSpan span);
void clock_read(DeviceClock *self, int max_steps);
int64_t clock_last_reached(DeviceClock *self);
const MarkTime *clock_time(const DeviceClock *self, int64_t mark);
int clock_is_lost(const DeviceClock *self, int64_t mark);

#endif
