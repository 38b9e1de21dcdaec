/* Spans that a device's clock times too: hooks/on_device/sections.py marks it where one opens and where it closes. */
#include "recorder.h"

enum { LONGEST_MARK_NS = 100000 }; /* and in run/clock.py */

/* The phases that issue work for the device, in every step; modules and sections in sampled steps, as a mark costs the
 * host microseconds and the device about one. */
static int is_timed(const Recorder *self, uint32_t kind)
{
    switch (kind) {
    case KIND_FORWARD:
    case KIND_BACKWARD:
    case KIND_OPTIMIZER:
    case KIND_RECOMPUTE:
        return 1;
    case KIND_MODULE:
    case KIND_SECTION:
        return self->sampled;
    default:
        return 0;
    }
}

/* Calls a function of hooks/on_device, which guards itself, with its time kept out of the spans around it. What takes
 * longer than a mark may waits for room in the device's queue, as the job's next launch would have: that is the span's. */
static PyObject *call(Recorder *self, PyObject *function, PyObject *const *args, size_t count)
{
    int64_t start_ns = recorder_now(self);
    PyObject *result = call_kept(function, args, count);
    if (self->header != NULL) {
        int64_t took_ns = recorder_now(self) - start_ns;
        add_overhead(self, took_ns < LONGEST_MARK_NS ? took_ns : LONGEST_MARK_NS);
    }
    return result;
}

/* Around a wait, on any thread, with the GIL: hooks/on_device/stalls.py says whether it is one of the device's stream,
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
    self->device_marks[depth] = NO_DEVICE_MARK;
    if (!is_timed(self, kind)) {
        return;
    }
    PyObject *mark = call(self, self->device_mark, NULL, 0);
    if (mark != NULL && PyLong_Check(mark)) { /* None: it cannot be marked now */
        int64_t number = PyLong_AsLongLong(mark);
        if (number == -1 && PyErr_Occurred()) {
            pass_on(self->device_mark);
            number = NO_DEVICE_MARK;
        }
        self->device_marks[depth] = number;
    }
    Py_XDECREF(mark);
}

void device_close(Recorder *self, const Frame *frame, uint64_t depth)
{
    int64_t mark = self->device_marks[depth];
    if (mark == NO_DEVICE_MARK) {
        return;
    }
    self->device_marks[depth] = NO_DEVICE_MARK;
    if (self->device_span == NULL) {
        return;
    }
    PyObject *args[3] = {PyLong_FromUnsignedLong(frame->kind), PyLong_FromUnsignedLong(frame->name_id),
                         PyLong_FromLongLong(mark)};
    if (args[0] != NULL && args[1] != NULL && args[2] != NULL) {
        Py_XDECREF(call(self, self->device_span, args, 3));
    }
    for (int i = 0; i < 3; i++) {
        Py_XDECREF(args[i]);
    }
}

static void replace(PyObject **slot, PyObject *value)
{
    PyObject *kept = value == Py_None ? NULL : value;
    Py_XINCREF(kept);
    Py_XSETREF(*slot, kept);
}

/* set_device_clock(mark, span, wait_began=None, wait_ended=None): mark() marks the device and returns a number, or
 * None; span(kind, name_id, mark) marks the end of what began there; the others are called around waits for
 * collectives. None, None: no longer. */
PyObject *recorder_set_device_clock(Recorder *self, PyObject *args)
{
    PyObject *mark, *span, *wait_began = Py_None, *wait_ended = Py_None;
    if (!PyArg_ParseTuple(args, "OO|OO", &mark, &span, &wait_began, &wait_ended)) {
        return NULL;
    }
    for (int depth = 0; depth < MAX_FRAMES; depth++) {
        self->device_marks[depth] = NO_DEVICE_MARK;
    }
    replace(&self->device_span, span);
    replace(&self->device_mark, mark);
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

/* late(kind, name_id, step, start_ns, duration_ns, flags, value0, value1, nested_ns, phase_ns): a record of a step that
 * has ended, or of this one. Part of no span. */
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
