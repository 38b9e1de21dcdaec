/* Marks that come once a step, without Python where nothing is unusual.
 *
 * native_hook() puts a C function in front of each Python hook. While `settled` is set (hooks/loop/training_loop.py), all
 * steps end with one optimizer, and C counts what the hook would count. In all other cases, C calls the hook.
 */
#include "recorder.h"

enum { MICRO_STEPS_MASK = 0xffff, WORKLOAD_SHIFT = 16, BATCH_LEVELS = 3, OLDEST_GENERATION = 2 };

enum { GRAD, VERSION, LOCAL_TENSOR, PARAM_GROUPS, PARAMS, NUMEL, INPUT_IDS, DICT, TRACING_CONTEXT, DYNAMO, COUNTERS, FRAMES, TOTAL, NAMES };
static PyObject *names[NAMES];

int step_marks_setup(void)
{
    static const char *const texts[NAMES] = {
        "grad", "_version", "_local_tensor", "param_groups", "params", "numel", "input_ids", "__dict__", "tracing_context",
        "torch._dynamo.utils", "counters", "frames", "total",
    };
    for (int i = 0; i < NAMES; i++) {
        if ((names[i] = PyUnicode_InternFromString(texts[i])) == NULL) {
            return -1;
        }
    }
    return 0;
}

/* Whether spans are NVTX ranges, or are marked with a device's events that are objects in Python. */
static inline int calls_python(const Recorder *self)
{
    return self->nvtx_push != NULL || (self->device_clock != NULL && self->device_clock->events != NULL);
}

/* The recorder, if the calling thread's marks need no Python. No mark calls Python then, but for an injected clock. With
 * a device's clock, a mark sets the GIL free, and the watch may end meanwhile. */
static inline Recorder *quiet_recorder(void)
{
    Recorder *self = active_recorder;
    int quiet = self != NULL && self->header != NULL && self->marks.settled && !self->sampled &&
                this_thread() == self->owner && !calls_python(self);
    return quiet ? self : NULL;
}

/* A new reference, or NULL for an object that is gone. */
static PyObject *referent_of(PyObject *reference)
{
#if PY_VERSION_HEX >= 0x030d0000
    PyObject *referent = NULL;
    return PyWeakref_GetRef(reference, &referent) > 0 ? referent : NULL;
#else
    PyObject *referent = PyWeakref_GetObject(reference);
    return referent == Py_None ? NULL : Py_NewRef(referent);
#endif
}

static PyObject *item_of(PyObject *dict, PyObject *key)
{
    return dict != NULL && PyDict_Check(dict) ? PyDict_GetItemWithError(dict, key) : NULL;
}

/* Changes with each frame that Dynamo compiles, and when Dynamo is imported. */
static PyObject *compiled_frames(StepMarks *marks)
{
    if (marks->kept[DYNAMO_COUNTERS] == NULL) {
        PyObject *dynamo = item_of(PyImport_GetModuleDict(), names[DYNAMO]);
        if (dynamo == NULL || !PyModule_Check(dynamo)) {
            return NULL;
        }
        marks->kept[DYNAMO_COUNTERS] = Py_XNewRef(item_of(PyModule_GetDict(dynamo), names[COUNTERS]));
    }
    PyObject *total = item_of(item_of(marks->kept[DYNAMO_COUNTERS], names[FRAMES]), names[TOTAL]);
    return total != NULL ? total : marks->kept[DYNAMO_COUNTERS];
}

static inline int is_plain(const StepMarks *marks, const PyObject *tensor)
{
    const PyObject *type = (PyObject *)Py_TYPE(tensor);
    return type == marks->kept[TENSOR_TYPE] || type == marks->kept[PARAMETER_TYPE];
}

static int64_t version_of(PyObject *tensor)
{
    PyObject *version = PyObject_GetAttr(tensor, names[VERSION]);
    int64_t value = version != NULL ? PyLong_AsLongLong(version) : -1;
    Py_XDECREF(version);
    return value;
}

/* read_gradient_version() in Python explains the shard. */
static void read_gradient(StepMarks *marks, PyObject *parameter, Gradient *now)
{
    PyObject *gradient = PyObject_GetAttr(parameter, names[GRAD]), *shard = NULL;
    if (gradient != NULL && gradient != Py_None) {
        now->address = (int64_t)(intptr_t)gradient;
        now->version = now->shard_version = version_of(gradient);
        if (!is_plain(marks, gradient)) {
            shard = PyObject_GetAttr(gradient, names[LOCAL_TENSOR]);
            now->shard_version = shard != NULL ? version_of(shard) : now->version;
        }
    }
    pass_on(NULL); /* an attribute is missing */
    Py_XDECREF(shard);
    Py_XDECREF(gradient);
}

/* Until they are shown again, no code of the user's torch function modes and tensor subclasses runs. */
static void hide_calls(StepMarks *marks, int hide)
{
    PyObject *none[] = {Py_None, Py_None, Py_None};
    Py_XDECREF(call_kept(marks->kept[hide ? HIDE : SHOW], none, hide ? 0 : 3));
}

/* Replaces *object, which may be NULL, with its item. */
static void move_to_item(PyObject **object, PyObject *key)
{
    PyObject *item = *object != NULL ? PyObject_GetItem(*object, key) : NULL;
    Py_XSETREF(*object, item);
}

/* A new reference to the parameter at kept[PARAMETER], or NULL. find_trained_parameter() in Python explains why no
 * weak reference is kept. */
static PyObject *find_parameter(StepMarks *marks)
{
    PyObject *place = marks->kept[PARAMETER];
    PyObject *optimizer = place != NULL && PyTuple_Check(place) ? referent_of(marks->kept[OPTIMIZER]) : NULL;
    PyObject *found = optimizer != NULL ? PyObject_GetAttr(optimizer, names[PARAM_GROUPS]) : NULL;
    if (found != NULL) {
        move_to_item(&found, PyTuple_GET_ITEM(place, 0));
        move_to_item(&found, names[PARAMS]);
        move_to_item(&found, PyTuple_GET_ITEM(place, 1));
    }
    pass_on(NULL); /* the optimizer has other parameters now */
    Py_XDECREF(optimizer);
    return found;
}

static void look_at_gradient(StepMarks *marks, Gradient *now)
{
    PyObject *error_type, *error, *traceback;
    PyErr_Fetch(&error_type, &error, &traceback);
    PyObject *parameter = find_parameter(marks);
    if (parameter != NULL) {
        hide_calls(marks, 1);
        read_gradient(marks, parameter, now);
        hide_calls(marks, 0);
        Py_DECREF(parameter);
    }
    PyErr_Restore(error_type, error, traceback);
}

/* Counts a backward pass if it added to the gradient. Called when a pass begins and when it has ended. An exception of
 * the user's may be set. */
static void compare_gradient(StepMarks *marks, int ended)
{
    Gradient now = {0};
    look_at_gradient(marks, &now);
    if (marks->unseen && !ended) {
        /* The pass before this one was taken to have added to it. */
        marks->passes = now.address != 0 ? marks->passes : 0;
        marks->gradient = now;
    } else if (memcmp(&now, &marks->gradient, sizeof(now)) != 0) {
        marks->gradient = now;
        /* A gradient that changed between two backward passes was cleared. */
        marks->passes = ended ? marks->passes + (now.address != 0) : 0;
    }
    marks->unseen = 0;
}

/* Whether to leave the gradient alone: a step of one backward pass has one micro-step, whatever the pass changed. Looking
 * at it takes longer than all other marks of a step. */
static inline int is_only_pass(const StepMarks *marks)
{
    return marks->one_pass && marks->backward_passes == 0;
}

/* Python decides whether unusual forward passes without gradients are an evaluation. */
static int is_python_due(Recorder *self, int64_t now_ns)
{
    StepMarks *marks = &self->marks;
    int is_unusual = marks->without_gradient && marks->passes_lead < 0;
    return marks->busy || is_unusual || marks->step_flags || now_ns >= marks->due_ns ||
           self->header->step + 1 >= (uint64_t)marks->due_step || compiled_frames(marks) != marks->kept[COMPILED];
}

/* optimizer_end: the mark of the optimizer's end on the device, which is also the step's; or NO_MARK. begun_ns: see
 * uncharged_ns(). */
static void end_step(Recorder *self, int64_t end_ns, uint32_t flags, int64_t optimizer_end, int64_t begun_ns)
{
    StepMarks *marks = &self->marks;
    int64_t forwards = marks->forward_passes, backwards = marks->backward_passes;
    int64_t passes = marks->passes != 0 ? marks->passes : backwards > 0 && backwards < forwards ? backwards : forwards;
    passes = passes < 1 ? 1 : passes > MICRO_STEPS_MASK ? MICRO_STEPS_MASK : passes;
    write_step(self, end_ns, flags, (uint64_t)marks->memory_bytes,
               (uint64_t)passes | (uint64_t)(marks->workload + 1) << WORKLOAD_SHIFT);
    marks->training_steps++;
    marks->quiet_steps++;
    marks->passes_lead += marks->without_gradient ? 1 : -1;
    marks->without_gradient = 0;
    marks->one_pass = backwards == 1;
    marks->forward_passes = marks->backward_passes = marks->passes = 0;
    marks->workload = -1;
    device_end_step(self, (int64_t)self->header->step - 1, optimizer_end);
    if (self->header != NULL) {
        add_overhead(self, uncharged_ns(self, recorder_now(self)) - begun_ns);
    }
}

/* end_step_by_hand(tokens): ends a step of w.step(tokens). Returns whether it did; else Python has to. */
PyObject *recorder_end_step_by_hand(Recorder *self, PyObject *const *args, Py_ssize_t count)
{
    StepMarks *marks = &self->marks;
    int64_t tokens;
    if (read_integers("end_step_by_hand", args, count, 1, 1, &tokens) < 0) {
        return NULL;
    }
    int64_t now_ns = self->header != NULL ? recorder_now(self) : 0;
    if (self->header == NULL || self->sampled || self->device_clock != NULL || calls_python(self) ||
        this_thread() != self->owner || is_python_due(self, now_ns)) {
        Py_XSETREF(marks->kept[COMPILED], Py_XNewRef(compiled_frames(marks))); /* which Python looks at now */
        Py_RETURN_FALSE;
    }
    marks->by_hand = 1;
    marks->workload = tokens;
    end_step(self, now_ns, FLAG_MANUAL, NO_MARK, uncharged_ns(self, now_ns));
    Py_RETURN_TRUE;
}

/* settle(weak reference to the optimizer, name_id, its elements of the steps in progress, outermost first, place of a
 * parameter: (group, position) or None, Gradient, passes): from here on, C ends the steps. */
PyObject *recorder_settle(Recorder *self, PyObject *args)
{
    StepMarks *marks = &self->marks;
    PyObject *optimizer, *entries, *parameter;
    Gradient *now = &marks->gradient;
    if (!PyArg_ParseTuple(args, "OIO!O(LLL)L", &optimizer, &marks->optimizer_name, &PyTuple_Type, &entries, &parameter,
                          &now->address, &now->version, &now->shard_version, &marks->passes)) {
        return NULL;
    }
    Py_XSETREF(marks->kept[ENTRIES], Py_NewRef(entries));
    Py_XSETREF(marks->kept[OPTIMIZER], Py_NewRef(optimizer));
    Py_XSETREF(marks->kept[PARAMETER], Py_NewRef(parameter));
    Py_XSETREF(marks->kept[COMPILED], Py_XNewRef(compiled_frames(marks)));
    marks->one_pass = marks->unseen = 0;
    marks->settled = marks->kept[OPENED] != NULL && PyWeakref_Check(optimizer);
    if (marks->settled) {
        Py_XSETREF(marks->kept[TRACING_STATE], PyObject_GetAttr(marks->kept[TRACING], names[DICT]));
        pass_on(NULL); /* the attribute is missing: Python times backward passes */
    }
    Py_RETURN_NONE;
}

/* The state of what settle() was given: (Gradient, passes). Another thread than the owner may call this while the owner's
 * backward pass, which has set the GIL free, writes the gradient: so it is not looked at there. */
PyObject *recorder_unsettle(Recorder *self, PyObject *unused)
{
    StepMarks *marks = &self->marks;
    marks->settled = 0;
    if (marks->unseen) {
        marks->gradient = (Gradient){0};
        if (this_thread() == self->owner) {
            look_at_gradient(marks, &marks->gradient);
        }
        marks->unseen = 0;
    }
    return Py_BuildValue("(LLL)L", marks->gradient.address, marks->gradient.version, marks->gradient.shard_version,
                         marks->passes);
}

/* compare_gradient(ended): at the begin or end of a backward pass that Python times while C ends the steps. */
PyObject *recorder_compare_gradient(Recorder *self, PyObject *ended)
{
    compare_gradient(&self->marks, ended == Py_True);
    Py_RETURN_NONE;
}

/* show_open_step(): adds the optimizer's step that C has begun, and those inside it, to the steps in progress. */
PyObject *recorder_show_open_step(Recorder *self, PyObject *unused)
{
    for (int i = 0; i < self->marks.step_open; i++) {
        if (PyList_Append(self->marks.kept[OPENED], PyTuple_GET_ITEM(self->marks.kept[ENTRIES], i)) < 0) {
            return NULL;
        }
    }
    self->marks.step_open = 0;
    Py_RETURN_NONE;
}

/* use_torch(optimizer steps in progress, functions that hide calls from the user's torch functions and that end this,
 * Tensor, Parameter, is_grad_enabled, locals of torch's tracing) */
PyObject *recorder_use_torch(Recorder *self, PyObject *args)
{
    if (PyTuple_GET_SIZE(args) != GIVEN || !PyList_CheckExact(PyTuple_GET_ITEM(args, OPENED))) {
        return PyErr_Format(PyExc_TypeError, "use_torch() takes a list and %d objects", GIVEN - 1);
    }
    for (int i = 0; i < GIVEN; i++) {
        Py_XSETREF(self->marks.kept[i], Py_NewRef(PyTuple_GET_ITEM(args, i)));
    }
    Py_RETURN_NONE;
}

/* -- the hooks. `parts` begins with the hook in Python. */

static PyObject *in_python(PyObject *parts, PyObject *const *args, Py_ssize_t count, PyObject *kwnames)
{
    return PyObject_Vectorcall(PyTuple_GET_ITEM(parts, 0), args, (size_t)count, kwnames);
}

static int is_settled_optimizer(Recorder *self, PyObject *const *args, Py_ssize_t count)
{
    PyObject *optimizer = self != NULL && count == 3 ? referent_of(self->marks.kept[OPTIMIZER]) : NULL;
    Py_XDECREF(optimizer); /* the caller has one */
    return optimizer != NULL && optimizer == args[0] && self->backwards == 0;
}

/* Whether a step has no closure. */
static int is_plain_step(PyObject *args, PyObject *kwargs)
{
    return PyTuple_CheckExact(args) && PyDict_CheckExact(kwargs) && PyDict_GET_SIZE(kwargs) == 0 &&
           (PyTuple_GET_SIZE(args) == 1 || (PyTuple_GET_SIZE(args) == 2 && PyTuple_GET_ITEM(args, 1) == Py_None));
}

/* Arguments: the optimizer, and the arguments of its step. A step that an exception has ended seems to be open, but records
 * were written since then, or more steps begin than are inside each other. */
static PyObject *optimizer_begins(PyObject *parts, PyObject *const *args, Py_ssize_t count, PyObject *kwnames)
{
    Recorder *self = quiet_recorder();
    if (!is_settled_optimizer(self, args, count) || PyList_GET_SIZE(self->marks.kept[OPENED]) != 0 ||
        (self->marks.step_open > 0 && (self->header->head != self->marks.opened_at ||
         self->marks.step_open == PyTuple_GET_SIZE(self->marks.kept[ENTRIES]))) || !is_plain_step(args[1], args[2])) {
        return in_python(parts, args, count, kwnames);
    }
    if (self->marks.step_open++ > 0) {
        Py_RETURN_NONE;
    }
    self->marks.opened_at = self->header->head;
    Py_INCREF(self); /* a mark on a device sets the GIL free, and the watch may end */
    span_open(self, &self->header->stack, KIND_OPTIMIZER, self->marks.optimizer_name);
    Py_DECREF(self);
    Py_RETURN_NONE;
}

static PyObject *optimizer_ended(PyObject *parts, PyObject *const *args, Py_ssize_t count, PyObject *kwnames)
{
    Recorder *self = quiet_recorder();
    int64_t end_ns = self != NULL ? recorder_now(self) : 0;
    int open = self != NULL ? self->marks.step_open : 0;
    if (!is_settled_optimizer(self, args, count) || open == 0 || (open == 1 && is_python_due(self, end_ns))) {
        return in_python(parts, args, count, kwnames);
    }
    self->marks.returned_steps++;
    if (--self->marks.step_open > 0) {
        Py_RETURN_NONE;
    }
    int64_t begun_ns = uncharged_ns(self, end_ns);
    Py_INCREF(self);
    if (self->device_clock != NULL) {
        self->device_clock->optimizer_end = NO_MARK;
    }
    span_close_named(self, KIND_OPTIMIZER, self->marks.optimizer_name, end_ns, 0, 0, 0);
    if (self->header != NULL) {
        self->marks.optimizer_steps++;
        end_step(self, end_ns, 0, self->device_clock != NULL ? self->device_clock->optimizer_end : NO_MARK, begun_ns);
    }
    Py_DECREF(self);
    Py_RETURN_NONE;
}

static int is_tracing(const StepMarks *marks)
{
    PyObject *context = item_of(marks->kept[TRACING_STATE], names[TRACING_CONTEXT]);
    return marks->kept[TRACING_STATE] == NULL || (context != NULL && context != Py_None);
}

/* Opens a span, and charges the time since `begun_ns`, a result of uncharged_ns(), to this package. */
static void open_charged(Recorder *self, uint32_t kind, uint32_t name_id, int64_t begun_ns)
{
    if (self->header == NULL) {
        return;
    }
    Stack *stack = &self->header->stack;
    uint64_t depth = span_open(self, stack, kind, name_id);
    if (self->header != NULL && depth > 0 && depth < MAX_FRAMES) {
        int64_t tool_ns = uncharged_ns(self, stack->frames[depth].start_ns) - begun_ns;
        stack->frames[depth - 1].nested_ns += tool_ns;
        stack->frames[depth - 1].phase_ns += tool_ns;
        self->header->tool_ns += (uint64_t)tool_ns;
    }
}

/* parts: hook, recorder, torch's function, name_id, on_backward_end */
static PyObject *backward(PyObject *parts, PyObject *const *args, Py_ssize_t count, PyObject *kwnames)
{
    Recorder *self = quiet_recorder();
    if (self == NULL || (PyObject *)self != PyTuple_GET_ITEM(parts, 1) || self->backwards > 0 || self->marks.busy ||
        is_tracing(&self->marks)) {
        return in_python(parts, args, count, kwnames);
    }
    int64_t begun_ns = uncharged_ns(self, recorder_now(self));
    uint32_t name_id = (uint32_t)PyLong_AsUnsignedLong(PyTuple_GET_ITEM(parts, 3));
    if (!is_only_pass(&self->marks)) {
        compare_gradient(&self->marks, 0);
    }
    open_charged(self, KIND_BACKWARD, name_id, begun_ns);
    PyObject *result = PyObject_Vectorcall(PyTuple_GET_ITEM(parts, 2), args, (size_t)count, kwnames);
    if (self->header == NULL) {
        return result;
    }
    int64_t end_ns = recorder_now(self), ended_ns = uncharged_ns(self, end_ns);
    span_close_named(self, KIND_BACKWARD, name_id, end_ns, result == NULL ? FLAG_EXCEPTION : 0, 0, 0);
    if (self->header != NULL && self->backwards == 0) {
        if (self->marks.settled) {
            if (is_only_pass(&self->marks)) {
                self->marks.passes = self->marks.unseen = 1;
            } else {
                compare_gradient(&self->marks, 1);
            }
            self->marks.backward_passes++;
            if (self->header != NULL) {
                add_overhead(self, uncharged_ns(self, recorder_now(self)) - ended_ns);
            }
        } else { /* something unusual happened inside of the pass, such as an optimizer's step */
            Py_XDECREF(call_kept(PyTuple_GET_ITEM(parts, 4), NULL, 0));
        }
    }
    return result;
}

/* The first part of a plain list, tuple or dict, borrowed; NULL if it has none. */
static PyObject *first_part(PyObject *batch)
{
    PyObject *value = NULL;
    Py_ssize_t position = 0;
    if (PyList_CheckExact(batch) || PyTuple_CheckExact(batch)) {
        value = PySequence_Fast_GET_SIZE(batch) > 0 ? PySequence_Fast_GET_ITEM(batch, 0) : NULL;
    } else if (PyDict_CheckExact(batch) && (value = PyDict_GetItemWithError(batch, names[INPUT_IDS])) == NULL &&
               !PyErr_Occurred()) {
        PyDict_Next(batch, &position, NULL, &value);
    }
    return value;
}

/* Adds the elements of the tensor that is first in all containers of a batch, as find_batch_array() in Python would
 * find it. Returns 0 if Python has to search. */
static int add_workload(Recorder *self, PyObject *batch)
{
    PyObject *part = batch;
    for (int level = 0; level < BATCH_LEVELS && (part = first_part(batch)) != NULL; level++) {
        batch = part;
    }
    if (!is_plain(&self->marks, batch)) {
        pass_on(NULL); /* a key's comparison with a text failed */
        return 0;
    }
    hide_calls(&self->marks, 1);
    PyObject *numel = PyObject_CallMethodNoArgs(batch, names[NUMEL]);
    int64_t elements = numel != NULL ? PyLong_AsLongLong(numel) : -1;
    Py_XDECREF(numel);
    pass_on(NULL); /* the tensor's size is symbolic */
    hide_calls(&self->marks, 0);
    if (elements >= 0) {
        self->marks.workload = (self->marks.workload > 0 ? self->marks.workload : 0) + elements;
    }
    return elements >= 0;
}

/* parts: hook, recorder, torch's function, name_id, add_workload_of_batch */
static PyObject *next_batch(PyObject *parts, PyObject *const *args, Py_ssize_t count, PyObject *kwnames)
{
    Recorder *self = quiet_recorder();
    if (self == NULL || (PyObject *)self != PyTuple_GET_ITEM(parts, 1)) {
        return in_python(parts, args, count, kwnames);
    }
    int64_t begun_ns = uncharged_ns(self, recorder_now(self));
    uint32_t name_id = (uint32_t)PyLong_AsUnsignedLong(PyTuple_GET_ITEM(parts, 3));
    open_charged(self, KIND_DATA, name_id, begun_ns);
    PyObject *batch = PyObject_Vectorcall(PyTuple_GET_ITEM(parts, 2), args, (size_t)count, kwnames);
    int raised = batch == NULL && !PyErr_ExceptionMatches(PyExc_StopIteration);
    int64_t end_ns = recorder_now(self);
    if (self->header != NULL) {
        span_close_named(self, KIND_DATA, name_id, end_ns, raised ? FLAG_EXCEPTION : 0, 0, 0);
    }
    if (batch != NULL && (quiet_recorder() != self || !add_workload(self, batch))) {
        PyObject *iterator_and_batch[] = {args[0], batch};
        PyObject *ignored = PyObject_Vectorcall(PyTuple_GET_ITEM(parts, 4), iterator_and_batch, 2, NULL);
        if (ignored == NULL) {
            Py_CLEAR(batch);
        }
        Py_XDECREF(ignored);
    }
    if (self->header != NULL) {
        add_overhead(self, recorder_now(self) - end_ns);
    }
    return batch;
}

/* Whether the calling thread computes gradients: 1, 0, or -1 if that is not known. */
int gradients_enabled(Recorder *self)
{
    PyObject *is_enabled = self->marks.kept[GRAD_ENABLED];
    PyObject *enabled = is_enabled != NULL ? PyObject_CallNoArgs(is_enabled) : NULL;
    int answer = enabled == Py_True ? 1 : enabled == Py_False ? 0 : -1;
    Py_XDECREF(enabled);
    if (answer < 0) {
        pass_on(NULL);
    }
    return answer;
}

/* At the end of an outermost module's call, of which gradients_enabled() is known. Returns 0 if Python has to count the
 * call. Of a module that is not timed, such as a copy with averaged weights, only a pass without gradients counts. */
int count_forward(Recorder *self, int is_timed, int gradients)
{
    if (gradients < 0 || (is_timed && quiet_recorder() != self)) {
        return 0;
    }
    self->marks.forward_passes += is_timed && gradients;
    self->marks.without_gradient |= !gradients;
    return 1;
}

/* Python calls this before and after each garbage collection, and nothing can catch what is raised in it. Without Python
 * code, no signal handler of the program runs here: its exception would be lost.
 * parts: hook, recorder, name_id, flag of steps with a collection of the oldest generation */
static PyObject *collection(PyObject *parts, PyObject *const *args, Py_ssize_t count, PyObject *kwnames)
{
    Recorder *self = (Recorder *)PyTuple_GET_ITEM(parts, 1);
    if (!PyObject_TypeCheck(self, &RecorderType) || count != 2 || !PyDict_Check(args[1]) || calls_python(self)) {
        return in_python(parts, args, count, kwnames);
    }
    PyObject *generation = PyDict_GetItemString(args[1], "generation");
    int oldest = generation != NULL && PyLong_AsLong(generation) == OLDEST_GENERATION;
    uint32_t name_id = (uint32_t)PyLong_AsUnsignedLong(PyTuple_GET_ITEM(parts, 2));
    int begins = PyUnicode_Check(args[0]) && PyUnicode_CompareWithASCIIString(args[0], "start") == 0;
    int64_t now_ns = self->header != NULL ? recorder_now(self) : 0;
    if (self->header == NULL) {
        Py_RETURN_NONE;
    }
    if (!begins && self->marks.collection_ns > 0) { /* 0: the watch began during this collection */
        self->header->gc_ns += (uint64_t)(now_ns - self->marks.collection_ns);
    }
    if (begins && oldest) {
        span_open(self, open_spans(self), KIND_SECTION, name_id);
    } else if (oldest) {
        span_close_named(self, KIND_SECTION, name_id, now_ns, 0, 0, 0);
        self->marks.step_flags |= PyLong_AsLongLong(PyTuple_GET_ITEM(parts, 3));
    }
    self->marks.collection_ns = begins ? now_ns : 0;
    Py_RETURN_NONE;
}

/* native_hook(event, hook, *other parts) -> a function that stands in for the hook */
PyObject *native_hook(PyObject *module, PyObject *args)
{
    enum { NEXT_BATCH = 3, HOOKS = 6 };
    static PyMethodDef hooks[HOOKS] = {
        {"optimizer_begins", FASTCALL(optimizer_begins), METH_FASTCALL | METH_KEYWORDS, NULL},
        {"optimizer_ended", FASTCALL(optimizer_ended), METH_FASTCALL | METH_KEYWORDS, NULL},
        {"backward", FASTCALL(backward), METH_FASTCALL | METH_KEYWORDS, NULL},
        {"next_batch", FASTCALL(next_batch), METH_FASTCALL | METH_KEYWORDS, NULL},
        {"collection", FASTCALL(collection), METH_FASTCALL | METH_KEYWORDS, NULL},
        {"collective", FASTCALL(collective_call), METH_FASTCALL | METH_KEYWORDS, NULL},
    };
    static const Py_ssize_t parts_of[HOOKS] = {1, 1, 5, 5, 4, 6};
    PyObject *event = PyTuple_GET_SIZE(args) > 0 ? PyTuple_GET_ITEM(args, 0) : Py_None;
    for (int i = 0; i < HOOKS && PyUnicode_Check(event); i++) {
        if (PyUnicode_CompareWithASCIIString(event, hooks[i].ml_name) == 0 &&
            PyTuple_GET_SIZE(args) == parts_of[i] + 1) {
            PyObject *parts = PyTuple_GetSlice(args, 1, PyTuple_GET_SIZE(args));
            PyObject *function = parts != NULL ? PyCFunction_New(&hooks[i], parts) : NULL;
            Py_XDECREF(parts);
            if (function != NULL && i == NEXT_BATCH) { /* it replaces a method */
                Py_SETREF(function, PyInstanceMethod_New(function));
            }
            return function;
        }
    }
    return PyErr_Format(PyExc_TypeError, "no hook %R", args);
}
