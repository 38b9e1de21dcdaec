/* Spans that a device's clock times too, the end of a step on the device, and how far the device is. */
#include "device_clock.h"
#include "recorder.h"

enum {
    LONGEST_MARK_NS = 20000,
    MAX_UNREAD_STEPS = 256,
    WORST_ERROR_NS = 50000, /* of device times on the host's time line, at which lags are recorded */
    IS_END = 1 << 8,        /* as in run/clock.py */
    NAME_SHIFT = 32,
};
#define UNKNOWN_NS INT64_MAX /* as in run/ring.py */

/* The phases that issue work for the device, unless the budget leaves them out; modules and sections in sampled steps. */
static int is_timed(Recorder *self, uint32_t kind)
{
    switch (kind) {
    case KIND_FORWARD:
    case KIND_BACKWARD:
    case KIND_OPTIMIZER:
    case KIND_RECOMPUTE:
        self->device_phases.has_left_out |= self->device_phases.left_out && !self->sampled;
        return !self->device_phases.left_out || self->sampled;
    case KIND_MODULE:
    case KIND_SECTION:
        return self->sampled;
    default:
        return 0;
    }
}

static int is_sampled_only(uint32_t kind)
{
    return kind == KIND_MODULE || kind == KIND_SECTION;
}

/* Keeps the time of a mark out of the spans around it. What takes longer than a mark may waits for room in the device's
 * queue, as the job's next launch would have: that is the span's, and the mark is taken to cost what the last one did. */
static int64_t mark(Recorder *self, uint32_t kind)
{
    int64_t start_ns = recorder_now(self), marked = clock_mark(self->device_clock, ANY_STREAM);
    if (self->header != NULL) {
        int64_t took_ns = recorder_now(self) - start_ns, waited_ns = 0;
        if (took_ns > LONGEST_MARK_NS) {
            waited_ns = took_ns - self->device_phases.usual_ns;
            took_ns -= waited_ns;
        }
        self->device_phases.usual_ns = took_ns;
        self->device_waits_ns += waited_ns;
        add_overhead(self, took_ns);
        self->device_phases.cost_ns += is_sampled_only(kind) ? 0 : took_ns;
    }
    return marked;
}

/* Around a wait, on any thread, with the GIL: cuda/stalls.py says whether it is one of the device's stream,
 * and accounts for its own time. */
void device_stall(PyObject *function)
{
    if (function != NULL) {
        Py_XDECREF(call_kept(function, NULL, 0));
    }
}

/* The owner's spans only. */
void device_open(Recorder *self, uint32_t kind, uint64_t depth)
{
    self->device_marks[depth] = NO_MARK;
    if (is_timed(self, kind)) {
        int64_t marked = mark(self, kind);
        self->device_marks[depth] = marked;
    }
}

void device_close(Recorder *self, const Frame *frame, uint64_t depth)
{
    int64_t begin = self->device_marks[depth];
    DeviceClock *clock = self->device_clock;
    if (begin == NO_MARK) {
        return;
    }
    self->device_marks[depth] = NO_MARK;
    int64_t end = mark(self, frame->kind);
    if (end == NO_MARK || self->header == NULL || self->device_clock != clock || clock == NULL) {
        return;
    }
    clock_queue_span(clock, (MarkedSpan){frame->kind, frame->name_id, 0, (int64_t)self->header->step, begin, end, clock_now(clock)});
    if (!is_sampled_only(frame->kind) && clock->marked_on != clock->stream && clock->stream != ANY_STREAM) {
        int index = clock_stream_index(clock, clock->marked_on);
        clock->phases_on |= index >= 0 ? (uint64_t)1 << index : 0;
    }
    if (frame->kind == KIND_BACKWARD) {
        clock->backward_end = end;
    }
    clock->optimizer_end = frame->kind == KIND_OPTIMIZER ? end : NO_MARK;
}

/* -- the end of a step */

/* A span whose device times are known. */
static void write_span(Recorder *self, const MarkedSpan *span, const MarkTime *begin, const MarkTime *end)
{
    DeviceClock *clock = self->device_clock;
    int64_t duration_ns = end->device_ns - begin->device_ns, lag_ns = begin->host_ns + duration_ns - span->issued_ns;
    int is_known = clock->anchor != NULL && clock->anchor->error_ns + clock->drift_ns <= WORST_ERROR_NS;
    Record record = {
        .name_id = span->name_id,
        .step = (uint32_t)span->step,
        .start_ns = begin->host_ns,
        .duration_ns = duration_ns,
        .value0 = span->kind,
        .value1 = !is_known ? UNKNOWN_NS : lag_ns > 0 ? (uint64_t)lag_ns : 0,
    };
    write_record_of_step(self, &record, KIND_DEVICE, 1, span->flags);
    if (clock->listener != NULL) {
        PyObject *args[] = {PyLong_FromUnsignedLong(span->kind), PyLong_FromLongLong(span->step),
                            PyLong_FromLongLong(begin->host_ns), PyLong_FromLongLong(duration_ns)};
        if (args[0] != NULL && args[1] != NULL && args[2] != NULL && args[3] != NULL) {
            Py_XDECREF(call_kept(clock->listener, args, 4));
        }
        for (int i = 0; i < 4; i++) {
            Py_XDECREF(args[i]);
        }
    }
}

/* Writes all spans whose times are known, in the order of their ends on the host. Returns how many; those of sampled
 * steps are counted apart. */
static int write_known_spans(Recorder *self, DeviceClock *clock, int *of_sampled)
{
    SpanQueue *queue = &clock->spans;
    int written = 0;
    while (queue->count > 0 && self->header != NULL && self->device_clock == clock) {
        MarkedSpan span = queue->items[queue->first];
        const MarkTime *begin = clock_time(clock, span.begin), *end = clock_time(clock, span.end);
        int is_lost = clock_is_lost(clock, span.begin) || clock_is_lost(clock, span.end) ||
                      (int64_t)self->header->step - span.step >= MAX_UNREAD_STEPS;
        if ((begin == NULL || end == NULL) && !is_lost) {
            break;
        }
        queue->first = (queue->first + 1) & (queue->capacity - 1);
        queue->count--;
        is_lost |= begin != NULL && end != NULL && end->device_ns < begin->device_ns; /* of two streams */
        /* Without one of its phases, a step has no record: the phase's time would be that of the gap. */
        is_lost |= span.kind == KIND_STEP && span.step == clock->lost_step;
        if (!is_lost) {
            write_span(self, &span, begin, end);
            written++;
            *of_sampled += is_sampled_only(span.kind);
        } else {
            clock->unread++;
            clock->lost_step = is_sampled_only(span.kind) ? clock->lost_step : span.step;
        }
    }
    return written;
}

/* The kind, name and side of the newest mark after `before` and up to `reached`, as a word of the header. */
static uint64_t describe_mark(const DeviceClock *clock, int64_t reached, int64_t before)
{
    uint64_t found = 0;
    for (size_t i = 0; i < clock->spans.count; i++) {
        const MarkedSpan *span = &clock->spans.items[(clock->spans.first + i) & (clock->spans.capacity - 1)];
        for (int is_end = 0; is_end < 2; is_end++) {
            int64_t mark = is_end ? span->end : span->begin;
            if (before < mark && mark <= reached) {
                before = mark;
                found = span->kind | (is_end ? IS_END : 0) | (uint64_t)span->name_id << NAME_SHIFT;
            }
        }
    }
    return found;
}

/* Finds the step that a mark is in. Returns 0 if the clock was created inside of that step. */
static int locate_mark(DeviceClock *clock, int64_t reached, uint64_t *place, uint64_t *what)
{
    int64_t before = NO_MARK;
    for (int64_t i = 0; i < clock->end_count; i++) {
        StepEnd end = clock->ends[(clock->first_end + i) % MAX_ENDS];
        if (end.mark > reached) {
            *place = (uint64_t)(uint32_t)(end.step + 1) | (uint64_t)(reached - before) << NAME_SHIFT;
            *what = reached > before ? describe_mark(clock, reached, before) : 0;
            return before != NO_MARK;
        }
        before = end.mark;
        *place = (uint64_t)(uint32_t)(end.step + 2); /* the begin of the step after it */
        *what = 0;
    }
    return before != NO_MARK;
}

/* Publishes how far the device is, so that the sidecar finds the device that is behind in a hang: the first and the last
 * time at which it was seen at the same mark. While the training thread is blocked, its last look stays. */
static void publish_progress(Recorder *self, DeviceClock *clock)
{
    int64_t reached = clock_last_reached(clock), now_ns = clock_now(clock);
    uint64_t place, what;
    if (reached == NO_MARK || self->header == NULL) {
        return;
    }
    if (self->device_phases.mask != EVERY_STEP) { /* ranks with other numbers of marks in a step cannot be compared */
        self->header->device_step = 0;
        clock->reached = NO_MARK;
        return;
    }
    if (reached != clock->reached) {
        clock->reached = reached;
        clock->is_located = locate_mark(clock, reached, &place, &what);
        if (!clock->is_located) {
            return;
        }
        self->header->device_since_ns = (uint64_t)now_ns;
        self->header->device_step = place;
        self->header->device_mark = what;
    }
    if (clock->is_located) {
        self->header->device_looked_ns = (uint64_t)now_ns;
    }
}

static void remember_end(DeviceClock *clock, int64_t mark, int64_t step)
{
    if (clock->end_count == MAX_ENDS) {
        clock->first_end = (clock->first_end + 1) % MAX_ENDS;
        clock->end_count--;
    }
    clock->ends[(clock->first_end + clock->end_count++) % MAX_ENDS] = (StepEnd){mark, step};
}

/* Closes waits whose end is missing, and counts a step in which a phase waited on a stream that is not the compute
 * stream. */
static void finish_waits(Recorder *self, DeviceClock *clock)
{
    if (clock->has_waited && self->device_step_ended != NULL) {
        Py_XDECREF(call_kept(self->device_step_ended, NULL, 0));
    }
    clock->aside += (clock->phases_on & clock->passed_over) != 0;
    clock->phases_on = clock->passed_over = 0;
    clock->has_waited = self->header != NULL && self->backwards > 0;
}

static void queue_step(Recorder *self, DeviceClock *clock, int64_t boundary, int64_t stream, int64_t step)
{
    uint32_t flags = self->device_phases.has_left_out ? FLAG_WITHOUT_PHASES : 0;
    int64_t missing = clock_missing(clock);
    if (boundary != NO_MARK && clock->boundary != NO_MARK && missing == clock->missing_before) {
        clock_queue_span(clock, (MarkedSpan){KIND_STEP, 0, flags, step, clock->boundary, boundary, clock_now(clock)});
    }
    self->device_phases.steps += !self->device_phases.has_left_out;
    self->device_phases.has_left_out = 0;
    clock->boundary = boundary;
    clock->missing_before = missing;
    if (boundary != NO_MARK) {
        remember_end(clock, boundary, step);
        clock->stream = stream;
    }
}

/* Times the step that ends, and writes what is known of earlier steps. boundary: a mark that was just made on the training
 * thread, or NO_MARK to make one. */
void device_end_step(Recorder *self, int64_t step, int64_t boundary)
{
    DeviceClock *clock = self->device_clock;
    int of_sampled = 0;
    if (clock == NULL) {
        return;
    }
    Py_INCREF(clock);
    int64_t start_ns = recorder_now(self), captured = clock->captured;
    if (boundary == NO_MARK) {
        boundary = clock_mark(clock, ANY_STREAM);
        int64_t waited_ns = self->header != NULL ? recorder_now(self) - start_ns - LONGEST_MARK_NS : 0;
        if (waited_ns > 0) { /* for room in the device's queue, which is no overhead */
            self->device_waits_ns += waited_ns;
            add_overhead(self, -waited_ns);
        }
    }
    int64_t stream = clock->marked_on;
    if (self->header != NULL) {
        finish_waits(self, clock);
    }
    if (self->header != NULL) {
        queue_step(self, clock, boundary, stream, step);
        start_ns = recorder_now(self);
        int is_capturing = boundary == NO_MARK && (clock->captured != captured || clock_current_stream(clock) < 0);
        if (!is_capturing) {
            clock_read(clock, 2);
            publish_progress(self, clock);
        }
        int written = self->header != NULL ? write_known_spans(self, clock, &of_sampled) : 0;
        if (of_sampled > 0 && self->header != NULL) { /* reading the marks of an earlier step takes time in this one */
            int64_t late_ns = (recorder_now(self) - start_ns) * of_sampled / written;
            self->late_ns += late_ns;
            add_overhead(self, late_ns);
        }
    }
    Py_DECREF(clock);
}

/* end_device_step(): before the record of the step in progress is written. */
PyObject *recorder_end_device_step(Recorder *self, PyObject *unused)
{
    if (self->header != NULL) {
        device_end_step(self, (int64_t)self->header->step, NO_MARK);
    }
    Py_RETURN_NONE;
}

/* read_last_device_times(): at the end of a watch, without a wait for the device. What it has not reached is unread. */
PyObject *recorder_read_last_device_times(Recorder *self, PyObject *unused)
{
    DeviceClock *clock = (DeviceClock *)Py_XNewRef(self->device_clock);
    int of_sampled = 0;
    if (clock != NULL && self->header != NULL && clock_current_stream(clock) >= 0) {
        /* The first call ends a step at the newest mark, and the second one reads up to this mark. */
        clock_read(clock, MAX_BEHIND);
        clock_read(clock, MAX_BEHIND);
        write_known_spans(self, clock, &of_sampled);
    }
    if (clock != NULL) {
        clock->unread += (int64_t)clock->spans.count;
        clock->spans.count = 0;
    }
    Py_XDECREF(clock);
    Py_RETURN_NONE;
}

static void replace(PyObject **slot, PyObject *value)
{
    Py_XSETREF(*slot, value == Py_None ? NULL : Py_NewRef(value));
}

/* set_device_clock(clock, wait_began=None, wait_ended=None, step_ended=None): clock is a DeviceClock, or None for no
 * clock. The others are called around waits for collectives, and at the end of a step with such waits. */
PyObject *recorder_set_device_clock(Recorder *self, PyObject *args)
{
    PyObject *clock, *wait_began = Py_None, *wait_ended = Py_None, *step_ended = Py_None;
    if (!PyArg_ParseTuple(args, "O|OOO", &clock, &wait_began, &wait_ended, &step_ended)) {
        return NULL;
    }
    if (clock != Py_None && !PyObject_TypeCheck(clock, &DeviceClockType)) {
        return PyErr_Format(PyExc_TypeError, "set_device_clock() takes a DeviceClock, got %s", Py_TYPE(clock)->tp_name);
    }
    for (int depth = 0; depth < MAX_FRAMES; depth++) {
        self->device_marks[depth] = NO_MARK;
    }
    replace((PyObject **)&self->device_clock, clock);
    replace(&self->device_step_ended, step_ended);
    int waits = wait_began != Py_None && wait_ended != Py_None;
    if (waits) {
        collective_calls_python(self, 1); /* first: a wait without the GIL must not see them */
    }
    replace(&self->device_wait_began, wait_began);
    replace(&self->device_wait_ended, wait_ended);
    if (!waits) {
        collective_calls_python(self, self->nvtx_push != NULL);
    }
    Py_RETURN_NONE;
}

/* queue_device_span(kind, name_id, begin, end): two marks of the device's clock. */
PyObject *recorder_queue_device_span(Recorder *self, PyObject *const *args, Py_ssize_t count)
{
    int64_t values[4];
    DeviceClock *clock = self->device_clock;
    if (read_integers("queue_device_span", args, count, 4, 4, values) < 0) {
        return NULL;
    }
    if (clock != NULL && self->header != NULL) {
        clock_queue_span(clock, (MarkedSpan){(uint32_t)values[0], (uint32_t)values[1], 0, (int64_t)self->header->step,
                                             values[2], values[3], clock_now(clock)});
    }
    Py_RETURN_NONE;
}

/* record_completed(kind, name_id, step, start_ns, duration_ns, flags, value0, value1, nested_ns, phase_ns): a record of a
 * step that has ended, or of this one. Part of no span. */
PyObject *recorder_record_completed(Recorder *self, PyObject *const *args, Py_ssize_t count)
{
    int64_t values[10] = {0};
    if (read_integers("record_completed", args, count, 5, 10, values) < 0) {
        return NULL;
    }
    if (self->header != NULL) {
        Record record = {
            .name_id = (uint32_t)values[1],
            .step = (uint32_t)values[2],
            .start_ns = values[3],
            .duration_ns = values[4],
            .nested_ns = values[8],
            .phase_ns = values[9],
            .value0 = (uint64_t)values[6],
            .value1 = (uint64_t)values[7],
        };
        write_record_of_step(self, &record, (uint32_t)values[0], 1, (uint32_t)values[5]);
    }
    Py_RETURN_NONE;
}
