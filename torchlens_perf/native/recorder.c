#include "recorder.h"

#include <structmember.h>
#include <sys/prctl.h>

Recorder *active_recorder;
static uint64_t generations;

/* Open spans of a thread that is not the owner (autograd's device threads, the user's own). */
static __thread struct {
    uint64_t generation;
    Stack stack;
    uintptr_t contexts[MAX_FRAMES];
    enum { NOT_KNOWN, AUTOGRADS, ANOTHERS } whose;
} thread_spans;

Stack *other_thread_spans(Recorder *self)
{
    if (thread_spans.generation != self->generation) {
        thread_spans.generation = self->generation;
        thread_spans.stack.depth = 1; /* depth 0 is the step, which the owner keeps */
        thread_spans.stack.frames[0] = (Frame){0};
    }
    return &thread_spans.stack;
}

/* Where the contexts of the thread's open sections are. */
uintptr_t *section_contexts(Recorder *self, const Stack *stack)
{
    return stack == &self->header->stack ? self->contexts : thread_spans.contexts;
}

void nvtx_open(Recorder *self, uint32_t name_id)
{
    int known = (Py_ssize_t)name_id < PyList_GET_SIZE(self->nvtx_attributes);
    if (!known && PyList_GET_SIZE(self->nvtx_attributes) == 0) {
        return; /* who gave the list has emptied it */
    }
    PyObject *attributes = PyList_GET_ITEM(self->nvtx_attributes, known ? name_id : 0);
    Py_INCREF(attributes);
    Py_XDECREF(call_kept(self->nvtx_push, &attributes, 1));
    Py_DECREF(attributes);
}

/* Whether the running thread is one of autograd's device threads: they have names of their own, others have the
 * program's. Asked once a thread. */
static int is_autograds(void)
{
    if (thread_spans.whose == NOT_KNOWN) {
        char name[16] = "";
        prctl(PR_GET_NAME, name);
        thread_spans.whose = strncmp(name, "pt_autograd_", 12) == 0 ? AUTOGRADS : ANOTHERS;
    }
    return thread_spans.whose == AUTOGRADS;
}

/* A pass counts where it was called. Autograd's threads only call one inside of a pass that counts already. */
void count_backward(Recorder *self, const Stack *stack, int change)
{
    if (stack == &self->header->stack) {
        self->backwards += change;
    } else if (!is_autograds()) {
        self->backwards_elsewhere += change;
    }
}

/* A span of another thread is no part of the training thread's step, but for recomputation and waiting on autograd's
 * device threads while the training thread is blocked in the backward pass: that time is taken out of the backward
 * phase, which has no more than its own to give where several devices compute at once. What does not count is put down
 * as another phase's. A thread of the user's that waits (saving a checkpoint does) blocks nobody. */
uint32_t attribute_elsewhere(Recorder *self, Frame *frame, int64_t end_ns)
{
    if (self->backwards == 0 || (frame->kind != KIND_RECOMPUTE && frame->kind != KIND_WAIT) || !is_autograds()) {
        return FLAG_OTHER_THREAD;
    }
    if (self->backwards_elsewhere > 0) {
        return FLAG_OTHER_THREAD; /* autograd's thread may be computing for another thread's pass */
    }
    Stack *stack = &self->header->stack;
    uint64_t depth = stack->depth < MAX_FRAMES ? stack->depth : MAX_FRAMES;
    while (depth-- > 1) {
        Frame *phase = &stack->frames[depth];
        if (!is_phase(phase->kind)) {
            continue;
        }
        if (phase->kind != KIND_BACKWARD || frame->start_ns < phase->start_ns) {
            break;
        }
        int64_t own_ns = end_ns - frame->start_ns - frame->phase_ns;
        int64_t left_ns = end_ns - phase->start_ns - phase->phase_ns;
        int64_t counted_ns = own_ns < left_ns ? own_ns : left_ns > 0 ? left_ns : 0;
        phase->nested_ns += counted_ns;
        phase->phase_ns += counted_ns;
        frame->phase_ns += own_ns - counted_ns;
        return 0;
    }
    return FLAG_OTHER_THREAD;
}

/* Takes the spans from `depth` up off the stack, without a record. The watch may end meanwhile: then the stack may be
 * gone, and only self->header says so. */
void spans_drop(Recorder *self, Stack *stack, uint64_t depth)
{
    while (stack->depth > depth) {
        if (--stack->depth >= MAX_FRAMES) {
            continue;
        }
        uint32_t kind = stack->frames[stack->depth].kind;
        if (kind == KIND_BACKWARD) {
            count_backward(self, stack, -1);
        }
        if (self->nvtx_pop != NULL) {
            Py_XDECREF(call_kept(self->nvtx_pop, NULL, 0));
            if (self->header == NULL) {
                return;
            }
        }
    }
}

/* The outermost watched module is the forward phase, or the recompute phase inside a backward pass (activation
 * checkpointing); the ones it calls are modules. */
uint32_t kind_of_call(Recorder *self, Stack *stack)
{
    uint64_t depth = stack->depth < MAX_FRAMES ? stack->depth : MAX_FRAMES;
    while (depth-- > 0) {
        uint32_t kind = stack->frames[depth].kind;
        if (is_forward(kind)) {
            return KIND_MODULE;
        }
        if (kind == KIND_BACKWARD) {
            return KIND_RECOMPUTE;
        }
    }
    int inside_backward = self->backwards > 0 && (stack == &self->header->stack || is_autograds());
    return inside_backward ? KIND_RECOMPUTE : KIND_FORWARD;
}

/* Closes the innermost open span of that kind and name. There may be none: it was dropped, and counted, when a span
 * around it closed first, or it was opened before recording began. */
void span_close_named(Recorder *self, uint32_t kind, uint32_t name_id, int64_t end_ns, uint32_t flags,
                      uint64_t value0, uint64_t value1)
{
    Stack *stack = open_spans(self);
    uint64_t depth = stack->depth;
    if (depth > MAX_FRAMES) { /* not kept; taken to be the innermost */
        stack->depth--;
        self->header->too_deep++;
        return;
    }
    while (depth-- > 0) {
        Frame *frame = &stack->frames[depth];
        if (frame->kind == kind && frame->name_id == name_id) {
            span_close(self, stack, depth, end_ns, flags, value0, value1);
            return;
        }
    }
}

void add_overhead(Recorder *self, int64_t tool_ns)
{
    credit(open_spans(self), tool_ns, tool_ns);
    self->header->tool_ns += (uint64_t)tool_ns;
}

static int recorder_init(Recorder *self, PyObject *args, PyObject *kwargs)
{
    static char *keywords[] = {"buffer", "intern", "clock", NULL};
    PyObject *buffer, *intern, *clock = Py_None;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OO|O", keywords, &buffer, &intern, &clock)) {
        return -1;
    }
    if (self->generation != 0) {
        PyErr_SetString(PyExc_TypeError, "a Recorder is initialised once");
        return -1;
    }
    if (PyObject_GetBuffer(buffer, &self->buffer, PyBUF_WRITABLE) < 0) {
        return -1;
    }
    Header *header = self->buffer.buf;
    uint64_t length = (uint64_t)self->buffer.len;
    if (length < sizeof(Header) || header->record_bytes != sizeof(Record) || header->capacity == 0 ||
        (header->capacity & (header->capacity - 1)) != 0 || header->records_offset > length ||
        header->records_offset < sizeof(Header) || header->records_offset % sizeof(uint64_t) != 0 ||
        header->capacity > (length - header->records_offset) / sizeof(Record)) {
        PyBuffer_Release(&self->buffer);
        PyErr_SetString(PyExc_ValueError, "the buffer does not hold a ring file of this layout");
        return -1;
    }
    self->header = header;
    self->records = (Record *)((char *)self->buffer.buf + header->records_offset);
    self->mask = header->capacity - 1;
    self->generation = ++generations;
    self->owner = this_thread();
    self->marks.workload = -1;
    self->modules.mask = self->device_phases.mask = EVERY_STEP;
    self->intern = Py_NewRef(intern);
    self->clock = clock != Py_None ? Py_NewRef(clock) : NULL;
    header->stack.depth = 0;
    span_open(self, &header->stack, KIND_STEP, 0);
    PROBE_STEP_BEGIN(header->step);
    return 0;
}

static void recorder_release(Recorder *self, int forked)
{
    if (active_recorder == self) {
        active_recorder = NULL;
    }
    collective_release(self, forked);
    thread_time_stop(&self->thread_time);
    if (self->buffer.obj != NULL) {
        PyBuffer_Release(&self->buffer);
    }
}

static int recorder_traverse(Recorder *self, visitproc visit, void *arg)
{
    Py_VISIT(self->intern);
    Py_VISIT(self->clock);
    Py_VISIT(self->nvtx_push);
    Py_VISIT(self->nvtx_pop);
    Py_VISIT(self->nvtx_attributes);
    Py_VISIT(self->device_clock);
    Py_VISIT(self->device_step_ended);
    Py_VISIT(self->device_wait_began);
    Py_VISIT(self->device_wait_ended);
    for (int i = 0; i < KEPT; i++) {
        Py_VISIT(self->marks.kept[i]);
    }
    return 0;
}

static int recorder_clear(Recorder *self)
{
    Py_CLEAR(self->intern);
    Py_CLEAR(self->clock);
    Py_CLEAR(self->nvtx_push);
    Py_CLEAR(self->nvtx_pop);
    Py_CLEAR(self->nvtx_attributes);
    Py_CLEAR(self->device_clock);
    Py_CLEAR(self->device_step_ended);
    Py_CLEAR(self->device_wait_began);
    Py_CLEAR(self->device_wait_ended);
    self->marks.settled = 0;
    for (int i = 0; i < KEPT; i++) {
        Py_CLEAR(self->marks.kept[i]);
    }
    return 0;
}

static void recorder_dealloc(Recorder *self)
{
    PyObject_GC_UnTrack(self);
    recorder_release(self, 0);
    recorder_clear(self);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

/* Reads a fastcall argument vector of integers; the optional ones that are missing keep their value. */
int read_integers(const char *name, PyObject *const *args, Py_ssize_t count, Py_ssize_t least, Py_ssize_t most,
                  int64_t *values)
{
    if (count < least || count > most) {
        PyErr_Format(PyExc_TypeError, "%s() takes %zd to %zd integers, got %zd", name, least, most, count);
        return -1;
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        values[i] = PyLong_AsLongLong(args[i]);
        if (values[i] == -1 && PyErr_Occurred()) {
            return -1;
        }
    }
    return 0;
}

static PyObject *recorder_begin(Recorder *self, PyObject *const *args, Py_ssize_t count)
{
    int64_t values[2]; /* kind, name_id */
    if (read_integers("begin", args, count, 2, 2, values) < 0) {
        return NULL;
    }
    if (self->header != NULL) {
        span_open(self, open_spans(self), (uint32_t)values[0], (uint32_t)values[1]);
    }
    Py_RETURN_NONE;
}

static PyObject *recorder_end(Recorder *self, PyObject *const *args, Py_ssize_t count)
{
    int64_t values[5] = {0}; /* kind, name_id, flags, value0, value1 */
    if (read_integers("end", args, count, 2, 5, values) < 0) {
        return NULL;
    }
    int64_t end_ns = recorder_now(self);
    if (self->header != NULL) {
        span_close_named(self, (uint32_t)values[0], (uint32_t)values[1], end_ns, (uint32_t)values[2],
                         (uint64_t)values[3], (uint64_t)values[4]);
    }
    Py_RETURN_NONE;
}

static PyObject *recorder_drop(Recorder *self, PyObject *const *args, Py_ssize_t count)
{
    int64_t values[2]; /* kind, name_id */
    if (read_integers("drop", args, count, 2, 2, values) < 0) {
        return NULL;
    }
    if (self->header != NULL) {
        Stack *stack = open_spans(self);
        uint64_t depth = stack->depth < MAX_FRAMES ? stack->depth : MAX_FRAMES;
        while (depth-- > 1) {
            Frame *frame = &stack->frames[depth];
            if (frame->kind == (uint32_t)values[0] && frame->name_id == (uint32_t)values[1]) {
                self->header->unbalanced += stack->depth - depth;
                spans_drop(self, stack, depth);
                break;
            }
        }
    }
    Py_RETURN_NONE;
}

static PyObject *recorder_record_span(Recorder *self, PyObject *const *args, Py_ssize_t count)
{
    int64_t values[7] = {0}; /* kind, name_id, start_ns, duration_ns, flags, value0, value1 */
    if (read_integers("record_span", args, count, 4, 7, values) < 0) {
        return NULL;
    }
    if (self->header != NULL) {
        Stack *stack = open_spans(self);
        uint32_t kind = (uint32_t)values[0];
        if (is_phase(kind)) {
            credit(stack, values[3], values[3]);
        }
        Record record = {
            .name_id = (uint32_t)values[1],
            .start_ns = values[2],
            .duration_ns = values[3],
            .value0 = (uint64_t)values[5],
            .value1 = (uint64_t)values[6],
        };
        uint32_t other = stack != &self->header->stack ? FLAG_OTHER_THREAD : 0;
        write_record(self, &record, kind, stack->depth, (uint32_t)values[4] | other);
    }
    Py_RETURN_NONE;
}

/* One record for each phase of the step, with the phase's kind in its flags. */
static void write_thread_time(Recorder *self, int64_t start_ns, int64_t duration_ns)
{
    PhaseTime phases[LAST_PHASE + 1];
    if (!self->thread_time.on) {
        return;
    }
    if (self->thread_time.measured) {
        thread_time_mark(&self->thread_time, current_phase(&self->header->stack), 1);
    }
    if (!thread_time_step(&self->thread_time, duration_ns, phases)) {
        return;
    }
    for (uint32_t kind = KIND_STEP; kind <= LAST_PHASE; kind++) {
        if (phases[kind].cpu_ns > 0 || phases[kind].ready_ns > 0) {
            Record record = {
                .start_ns = start_ns,
                .duration_ns = duration_ns,
                .value0 = (uint64_t)phases[kind].cpu_ns,
                .value1 = (uint64_t)phases[kind].ready_ns,
            };
            write_record(self, &record, KIND_THREAD_TIME, 1, kind);
        }
    }
}

/* Whether a step has times of modules, or of phases on the device. The choice depends on nothing but the step's number, so that all ranks choose the
 * same steps, and looks random, so that it does not coincide with what a loop does periodically. A step of a longer
 * period also belongs to all shorter ones. recorder/budget.py explains the periods. */
static int is_chosen(int64_t mask, uint64_t step)
{
    uint32_t mixed = (uint32_t)step; /* by the finalizer of MurmurHash3 */
    mixed = (mixed ^ mixed >> 16) * 0x85ebca6bu;
    mixed = (mixed ^ mixed >> 13) * 0xc2b2ae35u;
    mixed ^= mixed >> 16;
    return mask == 0 ? mixed % 64 != 63 : (mixed & (uint32_t)mask) == 0;
}

/* Ends the step in progress. */
void write_step(Recorder *self, int64_t end_ns, uint32_t flags, uint64_t value0, uint64_t value1)
{
    Frame *frame = &self->header->stack.frames[0];
    write_thread_time(self, frame->start_ns, end_ns - frame->start_ns);
    Record record = {
        .start_ns = frame->start_ns,
        .duration_ns = end_ns - frame->start_ns,
        .nested_ns = frame->nested_ns,
        .phase_ns = frame->phase_ns,
        .value0 = value0,
        .value1 = value1,
    };
    ModuleBudget *modules = &self->modules;
    modules->steps += !modules->has_left_out;
    write_record(self, &record, KIND_STEP, 0, flags | (modules->has_left_out ? FLAG_WITHOUT_MODULES : 0));
    PROBE_STEP_END(record.step, record.duration_ns);
    frame->start_ns = end_ns;
    frame->nested_ns = 0;
    frame->phase_ns = 0;
    self->header->step++;
    modules->has_left_out = 0;
    uint64_t step = self->header->step;
    modules->left_out = modules->mask != EVERY_STEP && !is_chosen(modules->mask, step);
    self->device_phases.left_out = self->device_phases.mask != EVERY_STEP && !is_chosen(self->device_phases.mask, step);
    PROBE_STEP_BEGIN(self->header->step);
}

static PyObject *recorder_next_step(Recorder *self, PyObject *const *args, Py_ssize_t count)
{
    int64_t values[3] = {0}; /* flags, value0, value1 */
    if (read_integers("next_step", args, count, 0, 3, values) < 0) {
        return NULL;
    }
    int64_t end_ns = recorder_now(self);
    if (self->header == NULL) {
        return PyLong_FromLong(0);
    }
    write_step(self, end_ns, (uint32_t)values[0], (uint64_t)values[1], (uint64_t)values[2]);
    return PyLong_FromUnsignedLongLong(self->header->step);
}

static PyObject *recorder_add_overhead(Recorder *self, PyObject *const *args, Py_ssize_t count)
{
    int64_t tool_ns;
    if (read_integers("add_overhead", args, count, 1, 1, &tool_ns) < 0) {
        return NULL;
    }
    if (self->header != NULL) {
        add_overhead(self, tool_ns);
    }
    Py_RETURN_NONE;
}

/* start_thread_time(): measures from here on. Returns whether the kernel reports the times. */
static PyObject *recorder_start_thread_time(Recorder *self, PyObject *unused)
{
    return PyBool_FromLong(self->header != NULL && this_thread() == self->owner &&
                           thread_time_start(&self->thread_time));
}

/* computes_backward(): the calling thread computes a backward pass, which the owner waits for. */
static PyObject *recorder_computes_backward(Recorder *self, PyObject *unused)
{
    if (self->header != NULL) {
        thread_time_of_autograd(&self->thread_time);
    }
    Py_RETURN_NONE;
}

/* take_over(owner_ended): makes the calling thread the owner. Returns whether it is the owner afterwards. Refuses while
 * the owner is inside a span, unless its thread has ended, and while the caller is inside a span that is no section. */
static PyObject *recorder_take_over(Recorder *self, PyObject *owner_ended)
{
    if (self->header == NULL) {
        Py_RETURN_FALSE;
    }
    if (this_thread() == self->owner) {
        Py_RETURN_TRUE;
    }
    Stack *here = &self->header->stack, *there = other_thread_spans(self);
    if (there->depth > MAX_FRAMES || (here->depth > 1 && owner_ended != Py_True)) {
        Py_RETURN_FALSE;
    }
    for (uint64_t depth = 1; depth < there->depth; depth++) {
        if (there->frames[depth].kind != KIND_SECTION) {
            Py_RETURN_FALSE;
        }
    }
    if (here->depth > 1) {
        self->header->unbalanced += here->depth - 1;
        spans_drop(self, here, 1);
        if (self->header == NULL) {
            Py_RETURN_FALSE;
        }
    }
    for (uint64_t depth = 1; depth < there->depth; depth++) {
        here->frames[depth] = there->frames[depth];
        self->contexts[depth] = thread_spans.contexts[depth];
        self->device_marks[depth] = NO_MARK;
    }
    here->depth = there->depth;
    there->depth = 1;
    self->owner = this_thread();
    if (self->thread_time.on) {
        thread_time_stop(&self->thread_time);
        memset(&self->thread_time, 0, sizeof(self->thread_time));
        thread_time_start(&self->thread_time);
    }
    Py_RETURN_TRUE;
}

/* pause_own_work(paused): around a wait that is no span, the end of the backward pass. */
static PyObject *recorder_pause_own_work(Recorder *self, PyObject *wanted)
{
    ThreadTime *times = &self->thread_time;
    int paused = wanted == Py_True;
    if (self->header != NULL && this_thread() == self->owner && times->measured && times->paused != paused) {
        thread_time_mark(times, paused ? current_phase(&self->header->stack) : KIND_WAIT, 0);
        times->paused = paused;
    }
    Py_RETURN_NONE;
}

static PyObject *recorder_now_ns(Recorder *self, PyObject *unused)
{
    return PyLong_FromLongLong(recorder_now(self));
}

static PyObject *recorder_intern(Recorder *self, PyObject *name)
{
    if (self->intern == NULL) {
        PyErr_SetString(PyExc_TypeError, "the Recorder is not initialised");
        return NULL;
    }
    return PyObject_CallOneArg(self->intern, name);
}

static PyObject *recorder_activate(Recorder *self, PyObject *unused)
{
    active_recorder = self->header != NULL ? self : NULL;
    Py_RETURN_NONE;
}

static PyObject *recorder_deactivate(Recorder *self, PyObject *unused)
{
    if (active_recorder == self) {
        active_recorder = NULL;
    }
    Py_RETURN_NONE;
}

static PyObject *recorder_close(Recorder *self, PyObject *unused)
{
    if (self->header != NULL && this_thread() == self->owner) {
        spans_drop(self, &self->header->stack, 1); /* the step in progress stays, for the reader to see */
    }
    recorder_release(self, 0);
    Py_RETURN_NONE;
}

/* In a forked child: forgets the ring file, which stays the parent's, without a store to it. */
static PyObject *recorder_abandon(Recorder *self, PyObject *unused)
{
    recorder_release(self, 1);
    Py_RETURN_NONE;
}

static PyObject *recorder_set_nvtx(Recorder *self, PyObject *args)
{
    PyObject *push, *pop, *attributes;
    if (!PyArg_ParseTuple(args, "OOO!", &push, &pop, &PyList_Type, &attributes)) {
        return NULL;
    }
    if (PyList_GET_SIZE(attributes) == 0) {
        PyErr_SetString(PyExc_ValueError, "the attributes of name 0 are missing");
        return NULL;
    }
    collective_calls_python(self, 1); /* first */
    Py_XSETREF(self->nvtx_push, Py_NewRef(push));
    Py_XSETREF(self->nvtx_pop, Py_NewRef(pop));
    Py_XSETREF(self->nvtx_attributes, Py_NewRef(attributes));
    Py_RETURN_NONE;
}

/* A number of the header, which begins at `offset`; 0 once closed. */
static PyObject *recorder_get_from_header(Recorder *self, void *offset)
{
    return PyLong_FromUnsignedLongLong(self->header ? *(uint64_t *)((char *)self->header + (size_t)offset) : 0);
}

static PyObject *recorder_get_closed(Recorder *self, void *closure)
{
    return PyBool_FromLong(self->header == NULL);
}

static PyMethodDef recorder_methods[] = {
    {"begin", FASTCALL(recorder_begin), METH_FASTCALL, NULL},
    {"end", FASTCALL(recorder_end), METH_FASTCALL, NULL},
    {"drop", FASTCALL(recorder_drop), METH_FASTCALL, NULL},
    {"record_span", FASTCALL(recorder_record_span), METH_FASTCALL, NULL},
    {"next_step", FASTCALL(recorder_next_step), METH_FASTCALL, NULL},
    {"add_overhead", FASTCALL(recorder_add_overhead), METH_FASTCALL, NULL},
    {"start_collectives", (PyCFunction)recorder_start_collectives, METH_O, NULL},
    {"issue", FASTCALL(recorder_issue), METH_FASTCALL, NULL},
    {"returned", FASTCALL(recorder_returned), METH_FASTCALL, NULL},
    {"claim", (PyCFunction)recorder_claim, METH_NOARGS, NULL},
    {"part_over", FASTCALL(recorder_part_over), METH_FASTCALL, NULL},
    {"begin_wait", (PyCFunction)recorder_begin_wait, METH_NOARGS, NULL},
    {"end_wait", FASTCALL(recorder_end_wait), METH_FASTCALL, NULL},
    {"computes_backward", (PyCFunction)recorder_computes_backward, METH_NOARGS, NULL},
    {"start_thread_time", (PyCFunction)recorder_start_thread_time, METH_NOARGS, NULL},
    {"take_over", (PyCFunction)recorder_take_over, METH_O, NULL},
    {"pause_own_work", (PyCFunction)recorder_pause_own_work, METH_O, NULL},
    {"now_ns", (PyCFunction)recorder_now_ns, METH_NOARGS, NULL},
    {"intern", (PyCFunction)recorder_intern, METH_O, NULL},
    {"activate", (PyCFunction)recorder_activate, METH_NOARGS, NULL},
    {"deactivate", (PyCFunction)recorder_deactivate, METH_NOARGS, NULL},
    {"close", (PyCFunction)recorder_close, METH_NOARGS, NULL},
    {"abandon", (PyCFunction)recorder_abandon, METH_NOARGS, NULL},
    {"set_nvtx", (PyCFunction)recorder_set_nvtx, METH_VARARGS, NULL},
    {"set_device_clock", (PyCFunction)recorder_set_device_clock, METH_VARARGS, NULL},
    {"queue_device_span", FASTCALL(recorder_queue_device_span), METH_FASTCALL, NULL},
    {"end_device_step", (PyCFunction)recorder_end_device_step, METH_NOARGS, NULL},
    {"read_last_device_times", (PyCFunction)recorder_read_last_device_times, METH_NOARGS, NULL},
    {"record_completed", FASTCALL(recorder_record_completed), METH_FASTCALL, NULL},
    {"end_step_by_hand", FASTCALL(recorder_end_step_by_hand), METH_FASTCALL, NULL},
    {"settle", (PyCFunction)recorder_settle, METH_VARARGS, NULL},
    {"unsettle", (PyCFunction)recorder_unsettle, METH_NOARGS, NULL},
    {"show_open_step", (PyCFunction)recorder_show_open_step, METH_NOARGS, NULL},
    {"compare_gradient", (PyCFunction)recorder_compare_gradient, METH_O, NULL},
    {"use_torch", (PyCFunction)recorder_use_torch, METH_VARARGS, NULL},
    {NULL},
};

static PyMemberDef recorder_members[] = {
    {"sampled", T_INT, offsetof(Recorder, sampled), 0, NULL},
    {"backwards", T_INT, offsetof(Recorder, backwards), READONLY, NULL},
    {"settled", T_INT, offsetof(Recorder, marks.settled), 0, NULL},
    {"unseen", T_INT, offsetof(Recorder, marks.unseen), 0, NULL},
    {"busy", T_INT, offsetof(Recorder, marks.busy), 0, NULL},
    {"without_gradient", T_INT, offsetof(Recorder, marks.without_gradient), 0, NULL},
    {"passes_lead", T_LONGLONG, offsetof(Recorder, marks.passes_lead), 0, NULL},
    {"passes_name", T_UINT, offsetof(Recorder, marks.passes_name), 0, NULL},
    {"due_ns", T_LONGLONG, offsetof(Recorder, marks.due_ns), 0, NULL},
    {"due_step", T_LONGLONG, offsetof(Recorder, marks.due_step), 0, NULL},
    {"forward_passes", T_LONGLONG, offsetof(Recorder, marks.forward_passes), 0, NULL},
    {"backward_passes", T_LONGLONG, offsetof(Recorder, marks.backward_passes), 0, NULL},
    {"workload", T_LONGLONG, offsetof(Recorder, marks.workload), 0, NULL},
    {"step_flags", T_LONGLONG, offsetof(Recorder, marks.step_flags), 0, NULL},
    {"memory_bytes", T_LONGLONG, offsetof(Recorder, marks.memory_bytes), 0, NULL},
    {"training_steps", T_LONGLONG, offsetof(Recorder, marks.training_steps), 0, NULL},
    {"optimizer_steps", T_LONGLONG, offsetof(Recorder, marks.optimizer_steps), 0, NULL},
    {"returned_steps", T_LONGLONG, offsetof(Recorder, marks.returned_steps), 0, NULL},
    {"quiet_steps", T_LONGLONG, offsetof(Recorder, marks.quiet_steps), 0, NULL},
    {"module_mask", T_LONGLONG, offsetof(Recorder, modules.mask), 0, NULL},
    {"module_calls", T_LONGLONG, offsetof(Recorder, modules.calls), READONLY, NULL},
    {"module_steps", T_LONGLONG, offsetof(Recorder, modules.steps), READONLY, NULL},
    {"measured_calls", T_LONGLONG, offsetof(Recorder, modules.measured_calls), READONLY, NULL},
    {"measured_ns", T_LONGLONG, offsetof(Recorder, modules.measured_ns), READONLY, NULL},
    {"phase_mask", T_LONGLONG, offsetof(Recorder, device_phases.mask), 0, NULL},
    {"phases_ns", T_LONGLONG, offsetof(Recorder, device_phases.cost_ns), READONLY, NULL},
    {"phase_steps", T_LONGLONG, offsetof(Recorder, device_phases.steps), READONLY, NULL},
    {"device_waits_ns", T_LONGLONG, offsetof(Recorder, device_waits_ns), READONLY, NULL},
    {"waited_ns", T_LONGLONG, offsetof(Recorder, waited_ns), READONLY, NULL},
    {"late_ns", T_LONGLONG, offsetof(Recorder, late_ns), READONLY, NULL},
    {NULL},
};

static PyGetSetDef recorder_properties[] = {
    {"step", (getter)recorder_get_from_header, NULL, NULL, (void *)offsetof(Header, step)},
    {"written", (getter)recorder_get_from_header, NULL, NULL, (void *)offsetof(Header, head)},
    {"tool_ns", (getter)recorder_get_from_header, NULL, NULL, (void *)offsetof(Header, tool_ns)},
    {"lost_ends", (getter)recorder_lost_ends, NULL, NULL, NULL},
    {"closed", (getter)recorder_get_closed, NULL, NULL, NULL},
    {NULL},
};

PyTypeObject RecorderType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "torchlens_perf._native.Recorder",
    .tp_basicsize = sizeof(Recorder),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .tp_new = PyType_GenericNew,
    .tp_init = (initproc)recorder_init,
    .tp_dealloc = (destructor)recorder_dealloc,
    .tp_traverse = (traverseproc)recorder_traverse,
    .tp_clear = (inquiry)recorder_clear,
    .tp_methods = recorder_methods,
    .tp_members = recorder_members,
    .tp_getset = recorder_properties,
};
