/* Records timed events on a device, and reads their times once the device has reached them.
 *
 * Events of one stream complete in order, so one query per step is enough: once the device has reached a step's newest
 * mark, it has reached all earlier marks. Nothing here waits for the device, except a mark while the device's queue is
 * full, which sets the GIL free as torch does.
 *
 * Anchors convert device times to host times. An anchor is an event on an otherwise idle stream. The host reads its own
 * clock before it records the event and again after the event has completed. A new anchor is normally taken every
 * second: drivers return the time between events as float32 milliseconds, which is coarser for longer times. Each anchor
 * continues the time line of the previous anchor. */
#include "device_clock.h"
#include "recorder.h"

#include <dlfcn.h>
#include <math.h>
#include <stdlib.h>
#include <structmember.h>
#include <unistd.h>

enum { SUCCESS = 0, NOT_READY = 600, FAILED = -1, CAPTURING = -2, RELAXED = 2, IMPLICIT_CAPTURE = 906, MADE_IN_ADVANCE = 32, FIRST_ANCHORS = 5 };

static const int64_t ANCHOR_EVERY_NS = 1000000000, ANCHOR_TIMEOUT_NS = 50000, FIRST_TIMEOUT_NS = 1000000;
/* The first anchor is inaccurate if the device is busy: another one is tried soon. */
#define LOST INT64_MIN
static const int64_t INACCURATE_NS = 50000, RETRY_NS = 100000000;
/* An older anchor is replaced even by a less accurate one. */
static const int64_t OLDEST_ANCHOR_NS = 30000000000;

int64_t clock_now(DeviceClock *self)
{
    if (self->now != NULL) {
        PyObject *value = call_kept(self->now, NULL, 0);
        int64_t now_ns = value != NULL ? PyLong_AsLongLong(value) : 0;
        Py_XDECREF(value);
        return now_ns;
    }
    return host_now();
}

/* -- events, of the driver or in Python. Each returns a status of the driver's. */

static int failed(DeviceClock *self, int status)
{
    if (status != SUCCESS && status != NOT_READY) {
        self->status = status;
    }
    return status;
}

/* Calls a method of an object in Python with up to two arguments, and keeps a pending exception of the user's. */
static PyObject *call_method(PyObject *object, const char *name, PyObject *first, PyObject *second)
{
    PyObject *type, *error, *traceback;
    PyErr_Fetch(&type, &error, &traceback);
    PyObject *result = PyObject_CallMethod(object, name, second != NULL ? "OO" : first != NULL ? "O" : NULL, first, second);
    if (result == NULL) {
        pass_on(NULL);
    }
    PyErr_Restore(type, error, traceback);
    return result;
}

static int event_create(DeviceClock *self, void **event)
{
    if (self->events == NULL) {
        return failed(self, self->driver.create(event, 0));
    }
    *event = call_method(self->events, "create_event", NULL, NULL);
    return failed(self, *event != NULL ? SUCCESS : FAILED);
}

static void event_destroy(DeviceClock *self, void *event)
{
    if (self->events != NULL) {
        Py_DECREF((PyObject *)event);
    } else if (getpid() == self->process) { /* a child must not destroy its parent's events */
        self->driver.destroy(event);
    }
}

/* Sets the GIL free: the call blocks while the device's queue is full, and the queued work may need the GIL. */
static int event_record(DeviceClock *self, void *event, int64_t stream)
{
    int status;
    if (self->events == NULL) {
        Py_BEGIN_ALLOW_THREADS
        status = self->driver.record(event, (void *)(intptr_t)stream);
        Py_END_ALLOW_THREADS
        return failed(self, status);
    }
    PyObject *handle = PyLong_FromLongLong(stream);
    PyObject *done = handle != NULL ? call_method(self->events, "record", event, handle) : NULL;
    Py_XDECREF(handle);
    status = done != NULL ? SUCCESS : FAILED;
    Py_XDECREF(done);
    return failed(self, status);
}

static int event_query(DeviceClock *self, void *event)
{
    if (self->events == NULL) {
        return failed(self, self->driver.query(event));
    }
    PyObject *reached = call_method(event, "query", NULL, NULL);
    int status = reached == NULL ? FAILED : PyObject_IsTrue(reached) ? SUCCESS : NOT_READY;
    Py_XDECREF(reached);
    return failed(self, status);
}

/* Both events must have been reached, `begin` first. Fails for a negative time. */
static int event_elapsed(DeviceClock *self, void *begin, void *end, int64_t *duration_ns)
{
    int status;
    double elapsed_ms = 0;
    if (self->events == NULL) {
        float milliseconds = 0;
        status = failed(self, self->driver.elapsed(&milliseconds, begin, end));
        elapsed_ms = milliseconds;
    } else {
        PyObject *milliseconds = call_method(begin, "elapsed_time", end, NULL);
        elapsed_ms = milliseconds != NULL ? PyFloat_AsDouble(milliseconds) : 0;
        status = milliseconds != NULL ? SUCCESS : FAILED;
        Py_XDECREF(milliseconds);
    }
    int is_time = elapsed_ms >= 0; /* no NaN */
    *duration_ns = is_time ? llround(elapsed_ms * 1e6) : 0;
    return status == SUCCESS && !is_time ? FAILED : status;
}

/* Queries would invalidate a capture of another thread, and fail, but for this mode of the calling thread. */
static void exchange_mode(DeviceClock *self, int *mode)
{
    if (self->driver.exchange_mode != NULL) {
        self->driver.exchange_mode(mode);
    }
}

/* Whether a graph captures the stream; FAILED after an error of the driver. */
static int is_captured(DeviceClock *self, int64_t stream)
{
    int state = 0;
    int status = self->driver.is_capturing != NULL ? self->driver.is_capturing((void *)(intptr_t)stream, &state) : SUCCESS;
    if (status == IMPLICIT_CAPTURE) { /* the default stream, while a capture forbids its use */
        return 1;
    }
    return failed(self, status) == SUCCESS ? state != 0 : FAILED;
}

/* Makes the device's context current, which may be another device's. Returns the one before, for leave_context(). */
static void *enter_context(DeviceClock *self)
{
    void *before = NULL;
    if (self->context == NULL || self->driver.get_context(&before) != SUCCESS || before == self->context) {
        return self->context;
    }
    failed(self, self->driver.set_context(self->context));
    return before;
}

static void leave_context(DeviceClock *self, void *before)
{
    if (before != self->context) {
        failed(self, self->driver.set_context(before));
    }
}

/* The calling thread's current stream of the device; CAPTURING while a graph captures it. */
int64_t clock_current_stream(DeviceClock *self)
{
    PyObject *handle = call_kept(self->read_stream, &self->index, 1);
    int64_t stream = handle != NULL && PyLong_Check(handle) ? PyLong_AsLongLong(handle) : FAILED;
    Py_XDECREF(handle);
    if (stream == FAILED && PyErr_Occurred()) {
        PyErr_Clear();
    }
    int capturing = stream >= 0 ? is_captured(self, stream) : 0;
    return capturing == FAILED ? FAILED : capturing ? CAPTURING : stream;
}

/* -- queues */

static int grow(void **items, size_t *first, size_t count, size_t *capacity, size_t item_bytes)
{
    if (count < *capacity) {
        return 1;
    }
    size_t larger = *capacity > 0 ? 2 * *capacity : 64;
    char *moved = malloc(larger * item_bytes);
    if (moved == NULL) {
        return 0;
    }
    size_t until_wrap = *capacity - *first;
    if (count > 0) {
        memcpy(moved, (char *)*items + *first * item_bytes, until_wrap * item_bytes);
        memcpy(moved + until_wrap * item_bytes, *items, *first * item_bytes);
    }
    free(*items);
    *items = moved;
    *first = 0;
    *capacity = larger;
    return 1;
}

static inline Mark *mark_at(MarkQueue *queue, size_t i)
{
    return &queue->items[(queue->first + i) & (queue->capacity - 1)];
}

int clock_queue_span(DeviceClock *self, MarkedSpan span)
{
    SpanQueue *queue = &self->spans;
    if (!grow((void **)&queue->items, &queue->first, queue->count, &queue->capacity, sizeof(span))) {
        self->unread++;
        return 0;
    }
    queue->items[(queue->first + queue->count++) & (queue->capacity - 1)] = span;
    return 1;
}

/* -- marks */

int64_t clock_missing(const DeviceClock *self)
{
    return self->captured + self->skipped + self->crowded + self->aside + self->open_ended;
}

/* The place of a stream among those with marks; -1 if there are too many. */
int clock_stream_index(DeviceClock *self, int64_t handle)
{
    int empty = -1;
    for (int i = 0; i < MAX_STREAMS; i++) {
        if (self->streams[i].used && self->streams[i].handle == handle) {
            return i;
        }
        if (!self->streams[i].used && empty < 0) {
            empty = i;
        }
    }
    if (empty >= 0) {
        DeviceStream *stream = &self->streams[empty];
        stream->used = 1;
        stream->handle = handle;
        stream->ended = 0;
        stream->read = 0;
    }
    return empty;
}

static void *take_event(DeviceClock *self)
{
    void *event = NULL;
    if (self->pooled > 0) {
        return self->pool[--self->pooled];
    }
    if (self->made >= self->max_events) {
        return NULL;
    }
    self->made++;
    if (event_create(self, &event) != SUCCESS) {
        self->made--;
        return NULL;
    }
    return event;
}

static void give_back(DeviceClock *self, void *event)
{
    if (event != NULL) {
        self->pool[self->pooled++] = event; /* it has room for all that were made */
    }
}

static void release_anchor(DeviceClock *self, Anchor *anchor)
{
    if (anchor != NULL && --anchor->users == 0) {
        give_back(self, anchor->event);
        free(anchor);
    }
}

/* Records an event on the stream. Returns its number, or NO_MARK with a count of what is missing. */
static int64_t mark_on(DeviceClock *self, int64_t handle)
{
    int index = clock_stream_index(self, handle);
    void *event = index >= 0 ? take_event(self) : NULL;
    if (event == NULL) {
        if (index < 0 || self->made >= self->max_events) {
            self->crowded++;
        } else {
            self->skipped++;
        }
        return NO_MARK;
    }
    Anchor *anchor = self->anchor;
    anchor->users++;
    int status = event_record(self, event, handle);
    /* The GIL was free: the streams may have others by now. */
    index = status == SUCCESS ? clock_stream_index(self, handle) : -1;
    MarkQueue *pending = index >= 0 ? &self->streams[index].pending : NULL;
    if (pending == NULL ||
        !grow((void **)&pending->items, &pending->first, pending->count, &pending->capacity, sizeof(Mark))) {
        self->skipped++;
        event_destroy(self, event); /* it may be one that cannot be recorded */
        self->made--;
        release_anchor(self, anchor);
        return NO_MARK;
    }
    self->marked_on = handle;
    pending->count++;
    *mark_at(pending, pending->count - 1) = (Mark){++self->marked, event, anchor};
    return self->marked;
}

/* Marks the calling thread's current stream. only_on: the only stream that is marked; another one is passed over,
 * without a mark or a count. */
static int64_t mark_current(DeviceClock *self, int64_t only_on)
{
    if (self->behind || self->anchor == NULL || self->reading) {
        self->skipped++;
        return NO_MARK;
    }
    int64_t handle = clock_current_stream(self);
    if (handle < 0) {
        self->captured += handle == CAPTURING;
        self->skipped += handle != CAPTURING;
        return NO_MARK;
    }
    if (only_on != ANY_STREAM && handle != only_on) {
        int index = clock_stream_index(self, handle);
        self->passed_over |= index >= 0 ? (uint64_t)1 << index : 0;
        return NO_MARK;
    }
    return mark_on(self, handle);
}

int64_t clock_mark(DeviceClock *self, int64_t only_on)
{
    Py_INCREF(self); /* the watch may end while the GIL is free */
    void *before = enter_context(self);
    int64_t mark = mark_current(self, only_on);
    leave_context(self, before);
    Py_DECREF(self);
    return mark;
}

/* -- anchors */

static Anchor *build_anchor(void *event, int64_t before_ns, int64_t after_ns)
{
    Anchor *anchor = malloc(sizeof(*anchor));
    if (anchor != NULL) {
        *anchor = (Anchor){event, (before_ns + after_ns) / 2, (after_ns - before_ns + 1) / 2, 0, 1};
    }
    return anchor;
}

/* Returns NULL if the event does not complete in time: other work keeps the device's front end busy. */
static Anchor *take_anchor(DeviceClock *self, int64_t timeout_ns)
{
    /* torch may give its stream to the program as well. */
    void *event = is_captured(self, self->idle_stream) == 0 ? take_event(self) : NULL;
    if (event == NULL) {
        return NULL;
    }
    int64_t before_ns = clock_now(self);
    int status = event_record(self, event, self->idle_stream);
    while (status == SUCCESS && (status = event_query(self, event)) == NOT_READY) {
        if (clock_now(self) - before_ns > timeout_ns) {
            give_back(self, self->late_event);
            self->late_event = event;
            self->late_ns = before_ns;
            return NULL;
        }
        status = SUCCESS;
    }
    int64_t after_ns = clock_now(self); /* the host may have been interrupted */
    int is_usable = status == SUCCESS && after_ns - before_ns <= 2 * timeout_ns;
    Anchor *anchor = is_usable ? build_anchor(event, before_ns, after_ns) : NULL;
    if (anchor == NULL) {
        give_back(self, event);
    }
    return anchor;
}

/* The late event, if the device has reached it and the anchor in use is old. */
static Anchor *take_late_anchor(DeviceClock *self, int64_t now_ns)
{
    Anchor *old = self->anchor, *anchor = NULL;
    if (self->late_event != NULL && (old == NULL || now_ns - old->host_ns > OLDEST_ANCHOR_NS) &&
        event_query(self, self->late_event) == SUCCESS &&
        (anchor = build_anchor(self->late_event, self->late_ns, now_ns)) != NULL) {
        self->late_event = NULL;
    }
    return anchor;
}

/* Without a new anchor, the old one stays in use. Its drift is measured when the next one is taken. */
static void refresh_anchor(DeviceClock *self)
{
    int64_t now_ns = clock_now(self), since_ns = 0;
    Anchor *old = self->anchor, *late = take_late_anchor(self, now_ns), *anchor = take_anchor(self, ANCHOR_TIMEOUT_NS);
    self->anchored_ns = now_ns;
    if (anchor == NULL) {
        anchor = late;
    } else {
        release_anchor(self, late);
    }
    if (anchor == NULL) {
        return;
    }
    if (old != NULL) {
        if (event_elapsed(self, old->event, anchor->event, &since_ns) != SUCCESS) {
            release_anchor(self, anchor);
            return;
        }
        int64_t drift_ns = llabs(old->host_ns + since_ns - anchor->host_ns) - old->error_ns - anchor->error_ns;
        self->drift_ns = drift_ns > 0 ? drift_ns : 0; /* of the last interval: after a pause, it is long */
        anchor->device_ns = old->device_ns + since_ns;
    }
    self->anchor = anchor;
    release_anchor(self, old);
}

static void take_first_anchor(DeviceClock *self)
{
    for (int i = 0; i < FIRST_ANCHORS; i++) {
        Anchor *anchor = take_anchor(self, FIRST_TIMEOUT_NS), *best = self->anchor;
        if (anchor != NULL && (best == NULL || anchor->error_ns < best->error_ns)) {
            self->anchor = anchor;
            anchor = best;
        }
        release_anchor(self, anchor);
    }
    self->anchored_ns = clock_now(self);
}

/* -- reading */

const MarkTime *clock_time(const DeviceClock *self, int64_t mark)
{
    const MarkTime *time = mark > 0 ? &self->times[mark % self->max_times] : NULL;
    return time != NULL && time->number == mark && time->device_ns != LOST ? time : NULL;
}

/* Whether the time of a mark will not be known: it could not be read, or a later mark has its place. */
int clock_is_lost(const DeviceClock *self, int64_t mark)
{
    const MarkTime *time = mark > 0 ? &self->times[mark % self->max_times] : NULL;
    return time == NULL || time->number > mark || (time->number == mark && time->device_ns == LOST);
}

/* Reads all marks up to the end of the oldest unread step. Returns 0 if the device has not reached that mark yet. */
static int read_oldest_step(DeviceClock *self, DeviceStream *stream)
{
    MarkQueue *pending = &stream->pending;
    int64_t last = stream->ends[0].number, duration_ns;
    if (event_query(self, stream->ends[0].event) != SUCCESS) {
        return 0;
    }
    while (pending->count > 0 && mark_at(pending, 0)->number <= last) {
        Mark *mark = mark_at(pending, 0);
        int status = event_elapsed(self, mark->anchor->event, mark->event, &duration_ns);
        if (status == NOT_READY) { /* two threads marked the stream at once */
            return 0;
        }
        int64_t device_ns = status == SUCCESS ? mark->anchor->device_ns + duration_ns : LOST;
        self->times[mark->number % self->max_times] =
            (MarkTime){mark->number, device_ns, mark->anchor->host_ns + duration_ns};
        stream->read = mark->number;
        give_back(self, mark->event);
        release_anchor(self, mark->anchor);
        pending->first = (pending->first + 1) & (pending->capacity - 1);
        pending->count--;
    }
    memmove(&stream->ends[0], &stream->ends[1], (size_t)--stream->ended * sizeof(stream->ends[0]));
    return 1;
}

static void end_step_on(DeviceStream *stream)
{
    MarkQueue *pending = &stream->pending;
    if (pending->count > 0) {
        Mark *newest = mark_at(pending, pending->count - 1);
        if ((stream->ended == 0 || stream->ends[stream->ended - 1].number != newest->number) &&
            stream->ended < MAX_BEHIND + 2) {
            stream->ends[stream->ended].number = newest->number;
            stream->ends[stream->ended++].event = newest->event;
        }
    } else if (stream->ended == 0) {
        stream->used = 0; /* the driver may give a later stream the same handle */
    }
}

static void read_streams(DeviceClock *self, int max_steps)
{
    int behind = 0;
    for (int i = 0; i < MAX_STREAMS; i++) {
        DeviceStream *stream = &self->streams[i];
        if (!stream->used) {
            continue;
        }
        for (int step = 0; step < max_steps && stream->ended > 0 && read_oldest_step(self, stream); step++) {
        }
        end_step_on(stream);
        behind = stream->ended > behind ? stream->ended : behind;
    }
    self->behind = behind > (self->behind ? 0 : MAX_BEHIND);
    int is_accurate = self->anchor != NULL && self->anchor->error_ns <= INACCURATE_NS;
    if (clock_now(self) - self->anchored_ns >= (is_accurate ? ANCHOR_EVERY_NS : RETRY_NS)) {
        refresh_anchor(self);
    }
}

/* Reads the marks that the device has reached. Called at the end of each step: queries the device once for each stream
 * with marks, and once more for each step that it has completed, up to max_steps. */
void clock_read(DeviceClock *self, int max_steps)
{
    if (!self->reading) {
        int mode = RELAXED;
        void *before = enter_context(self);
        self->reading = 1;
        exchange_mode(self, &mode);
        read_streams(self, max_steps);
        exchange_mode(self, &mode);
        self->reading = 0;
        leave_context(self, before);
    }
}

/* The newest mark of the stream that has been read. A stream that has reached none is after the mark that the host made
 * before its first one. */
static int64_t last_read(DeviceStream *stream)
{
    int64_t mark = stream->read > 0 ? stream->read : mark_at(&stream->pending, 0)->number - 1;
    return mark > 0 ? mark : NO_MARK;
}

/* The last mark that the device has reached on the stream that is furthest behind; NO_MARK without one. Called at a
 * step's end after clock_read(). The device is queried only if it has not reached the end of the previous step, by a
 * binary search: five queries two steps behind and nine sixty steps behind, with eight marks in a step. A query of an
 * H200 takes 0.3 us, and the rest of the search 0.1 us. */
int64_t clock_last_reached(DeviceClock *self)
{
    DeviceStream *stream = NULL;
    for (int i = 0; i < MAX_STREAMS; i++) {
        int has_marks = self->streams[i].used && (self->streams[i].ended > 0 || self->streams[i].read > 0);
        if (has_marks && (stream == NULL || self->streams[i].ended > stream->ended)) {
            stream = &self->streams[i];
        }
    }
    if (stream == NULL || stream->ended < 2 || self->reading) {
        return stream == NULL ? NO_MARK : last_read(stream);
    }
    size_t low = 0, high = stream->pending.count; /* marks before `low` have been reached, and none from `high` on */
    int mode = RELAXED;
    void *before = enter_context(self);
    self->reading = 1;
    exchange_mode(self, &mode);
    while (low < high) {
        size_t middle = (low + high) / 2;
        if (event_query(self, mark_at(&stream->pending, middle)->event) == SUCCESS) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    exchange_mode(self, &mode);
    self->reading = 0;
    leave_context(self, before);
    return low > 0 ? mark_at(&stream->pending, low - 1)->number : last_read(stream);
}

/* -- the type */

static int find_driver(EventDriver *driver, const char *path, PyObject *names)
{
    void **functions[] = {
        (void **)&driver->create, (void **)&driver->destroy, (void **)&driver->record, (void **)&driver->query,
        (void **)&driver->elapsed, (void **)&driver->is_capturing, (void **)&driver->exchange_mode,
        (void **)&driver->get_context, (void **)&driver->set_context,
    };
    enum { FUNCTIONS = sizeof(functions) / sizeof(functions[0]), NEEDED = FUNCTIONS - 2 };
    void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL); /* stays loaded */
    for (int i = 0; i < FUNCTIONS && library != NULL; i++) {
        const char *name = i < PyTuple_GET_SIZE(names) ? PyUnicode_AsUTF8(PyTuple_GET_ITEM(names, i)) : NULL;
        *functions[i] = name != NULL ? dlsym(library, name) : NULL;
        if (*functions[i] == NULL && i < NEEDED) {
            PyErr_Format(PyExc_OSError, "%s has no %s", path, name != NULL ? name : "name");
            return -1;
        }
    }
    if (library == NULL) {
        PyErr_Format(PyExc_OSError, "%s", dlerror());
        return -1;
    }
    return 0;
}

/* DeviceClock(source, names, read_stream, index, idle_stream, now_ns=None, max_events=32768): source is the path of a
 * driver's library with functions of these names, in the order of EventDriver; or an object with events in Python. */
static int clock_init(DeviceClock *self, PyObject *args, PyObject *kwargs)
{
    static char *keywords[] = {"source", "names", "read_stream", "index", "idle_stream", "now_ns", "max_events", NULL};
    PyObject *source, *names, *read_stream, *index, *now = Py_None;
    long long idle_stream, max_events = 32768;
    if (self->pool != NULL) {
        PyErr_SetString(PyExc_TypeError, "a DeviceClock is initialised once");
        return -1;
    }
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OO!OOL|OL", keywords, &source, &PyTuple_Type, &names, &read_stream,
                                     &index, &idle_stream, &now, &max_events) ||
        (PyUnicode_Check(source) && find_driver(&self->driver, PyUnicode_AsUTF8(source), names) < 0)) {
        return -1;
    }
    self->events = PyUnicode_Check(source) ? NULL : Py_NewRef(source);
    self->read_stream = Py_NewRef(read_stream);
    self->index = Py_NewRef(index);
    self->now = now != Py_None ? Py_NewRef(now) : NULL;
    self->idle_stream = idle_stream;
    self->process = getpid();
    self->max_events = max_events;
    self->max_times = 2 * max_events;
    self->pool = calloc((size_t)max_events, sizeof(*self->pool));
    self->times = calloc((size_t)self->max_times, sizeof(*self->times));
    self->marked_on = self->boundary = self->backward_end = self->optimizer_end = self->reached = NO_MARK;
    self->stream = ANY_STREAM;
    if (self->pool == NULL || self->times == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    if (self->driver.get_context != NULL && self->driver.set_context != NULL) {
        self->driver.get_context(&self->context);
    }
    int mode = RELAXED;
    exchange_mode(self, &mode);
    for (void *event; self->pooled < MADE_IN_ADVANCE && self->made < max_events && event_create(self, &event) == SUCCESS;) {
        self->made++;
        give_back(self, event);
    }
    take_first_anchor(self);
    exchange_mode(self, &mode);
    return 0;
}

static int clock_traverse(DeviceClock *self, visitproc visit, void *arg)
{
    Py_VISIT(self->events);
    Py_VISIT(self->read_stream);
    Py_VISIT(self->now);
    Py_VISIT(self->listener);
    return 0;
}

static int clock_clear(DeviceClock *self)
{
    Py_CLEAR(self->read_stream);
    Py_CLEAR(self->now);
    Py_CLEAR(self->listener);
    return 0;
}

static void clock_dealloc(DeviceClock *self)
{
    PyObject_GC_UnTrack(self);
    for (int i = 0; i < MAX_STREAMS && self->pool != NULL; i++) {
        MarkQueue *pending = &self->streams[i].pending;
        for (size_t k = 0; k < pending->count; k++) {
            give_back(self, mark_at(pending, k)->event);
            release_anchor(self, mark_at(pending, k)->anchor);
        }
        free(pending->items);
    }
    if (self->pool != NULL) {
        release_anchor(self, self->anchor);
        give_back(self, self->late_event);
    }
    while (self->pooled > 0) {
        event_destroy(self, self->pool[--self->pooled]);
    }
    free(self->pool);
    free(self->times);
    free(self->spans.items);
    clock_clear(self);
    Py_CLEAR(self->events);
    Py_CLEAR(self->index);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static PyObject *mark_or_none(int64_t mark)
{
    if (mark == NO_MARK) {
        Py_RETURN_NONE;
    }
    return PyLong_FromLongLong(mark);
}

/* mark(only_on=ANY_STREAM) */
static PyObject *method_mark(DeviceClock *self, PyObject *const *args, Py_ssize_t count)
{
    int64_t only_on = ANY_STREAM;
    if (read_integers("mark", args, count, 0, 1, &only_on) < 0) {
        return NULL;
    }
    self->has_waited |= count > 0;
    return mark_or_none(clock_mark(self, only_on));
}

/* span(begin, end): start in host time and duration in device time; None until the device has reached both marks. */
static PyObject *method_span(DeviceClock *self, PyObject *const *args, Py_ssize_t count)
{
    int64_t marks[2];
    if (read_integers("span", args, count, 2, 2, marks) < 0) {
        return NULL;
    }
    const MarkTime *begin = clock_time(self, marks[0]), *end = clock_time(self, marks[1]);
    if (begin == NULL || end == NULL) {
        Py_RETURN_NONE;
    }
    return Py_BuildValue("LL", begin->host_ns, end->device_ns - begin->device_ns);
}

/* read_reached_marks(max_steps=2) */
static PyObject *method_read(DeviceClock *self, PyObject *const *args, Py_ssize_t count)
{
    int64_t max_steps = 2;
    if (read_integers("read_reached_marks", args, count, 0, 1, &max_steps) < 0) {
        return NULL;
    }
    if (clock_current_stream(self) != CAPTURING) {
        clock_read(self, (int)max_steps);
    }
    Py_RETURN_NONE;
}

static PyObject *method_last_reached(DeviceClock *self, PyObject *unused)
{
    return mark_or_none(clock_current_stream(self) == CAPTURING ? NO_MARK : clock_last_reached(self));
}

static PyObject *get_error(DeviceClock *self, void *unused)
{
    if (self->anchor == NULL) {
        Py_RETURN_NONE;
    }
    return PyLong_FromLongLong(self->anchor->error_ns + self->drift_ns);
}

static PyObject *get_missing(DeviceClock *self, void *unused)
{
    return PyLong_FromLongLong(clock_missing(self));
}

static PyMethodDef clock_methods[] = {
    {"mark", FASTCALL(method_mark), METH_FASTCALL, NULL},
    {"span", FASTCALL(method_span), METH_FASTCALL, NULL},
    {"read_reached_marks", FASTCALL(method_read), METH_FASTCALL, NULL},
    {"find_last_reached_mark", (PyCFunction)method_last_reached, METH_NOARGS, NULL},
    {NULL},
};

#define COUNTER(name, flags) {#name, T_LONGLONG, offsetof(DeviceClock, name), flags, NULL}
static PyMemberDef clock_members[] = {
    COUNTER(marked, READONLY), COUNTER(marked_on, READONLY), COUNTER(made, READONLY), COUNTER(drift_ns, READONLY),
    COUNTER(captured, READONLY), COUNTER(skipped, READONLY), COUNTER(crowded, READONLY), COUNTER(aside, READONLY),
    COUNTER(open_ended, 0), COUNTER(unread, READONLY), COUNTER(status, READONLY), COUNTER(stream, 0),
    COUNTER(backward_end, 0),
    {"listener", T_OBJECT, offsetof(DeviceClock, listener), 0, NULL},
    {NULL},
};

static PyGetSetDef clock_properties[] = {
    {"error_ns", (getter)get_error, NULL, NULL, NULL},
    {"missing_marks", (getter)get_missing, NULL, NULL, NULL},
    {NULL},
};

PyTypeObject DeviceClockType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "torchlens_perf._native.DeviceClock",
    .tp_basicsize = sizeof(DeviceClock),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .tp_new = PyType_GenericNew,
    .tp_init = (initproc)clock_init,
    .tp_dealloc = (destructor)clock_dealloc,
    .tp_traverse = (traverseproc)clock_traverse,
    .tp_clear = (inquiry)clock_clear,
    .tp_methods = clock_methods,
    .tp_members = clock_members,
    .tp_getset = clock_properties,
};
