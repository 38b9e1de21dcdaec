/* ModuleCall: times the calls of one nn.Module.
 *
 * Nothing is stored in the module or in its class, so that pickles, copies and torch.compile see no difference. Every call
 * of a module runs the function nn.Module.__call__. route_calls() replaces that function's vectorcall pointer, as
 * PyFunction_SetVectorcall() allows. The replacement looks the module up in a table of addresses.
 */
#include "recorder.h"

#include <stddef.h>

typedef struct {
    PyObject_HEAD
    vectorcallfunc vectorcall;
    Recorder *recorder;
    PyObject *function; /* called with the module first */
    uintptr_t entered; /* the thread that is in the class's own __call__ and has not reached nn.Module's yet; or 0 */
    uint32_t name_id;
    int only_counts;    /* not 0: the forward observer would only count the call, see count_forward() */
    PyObject *before;   /* observer of the arguments in sampled steps, or NULL */
    PyObject *after;    /* observer of the result in sampled steps, or NULL */
    PyObject *forward;  /* observer of the result of each call that is a forward pass, or NULL */
} ModuleCall;

/* The modules whose calls are timed, by address: open addressing, at most half full. The caller removes a module's entry
 * before the module's memory is freed, by the callback of a weak reference. */
typedef struct {
    PyObject *module; /* borrowed */
    ModuleCall *call; /* NULL: the observer knows the module, and its calls are not timed */
} Entry;

static struct {
    Entry *entries;
    size_t mask, used;
} table;

static vectorcallfunc plain_call; /* the vectorcall of an ordinary Python function */

static PyObject *routed_call(PyObject *function, PyObject *const *args, size_t nargsf, PyObject *kwnames);

static inline size_t place_of(const PyObject *module)
{
    return (size_t)(((uint64_t)(uintptr_t)module >> 4) * 0x9e3779b97f4a7c15u >> 20) & table.mask;
}

static inline Entry *entry_of(const PyObject *module)
{
    if (table.used == 0) {
        return NULL;
    }
    for (size_t i = place_of(module);; i = (i + 1) & table.mask) {
        if (table.entries[i].module == module) {
            return &table.entries[i];
        }
        if (table.entries[i].module == NULL) {
            return NULL;
        }
    }
}

static void put(Entry entry)
{
    size_t i = place_of(entry.module);
    while (table.entries[i].module != NULL) {
        i = (i + 1) & table.mask;
    }
    table.entries[i] = entry;
    table.used++;
}

static int make_room(void)
{
    if (table.entries != NULL && 2 * (table.used + 1) <= table.mask + 1) {
        return 0;
    }
    size_t size = table.entries == NULL ? 64 : 2 * (table.mask + 1);
    Entry *entries = PyMem_Calloc(size, sizeof(Entry)), *old = table.entries;
    if (entries == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    size_t old_size = old == NULL ? 0 : table.mask + 1;
    table.entries = entries;
    table.mask = size - 1;
    table.used = 0;
    for (size_t i = 0; i < old_size; i++) {
        if (old[i].module != NULL) {
            put(old[i]);
        }
    }
    PyMem_Free(old);
    return 0;
}

static void take_out(Entry *entry)
{
    size_t hole = (size_t)(entry - table.entries);
    table.entries[hole].module = NULL;
    table.used--;
    /* The entries behind it move up, so that a search from their place still finds them. */
    for (size_t i = (hole + 1) & table.mask; table.entries[i].module != NULL; i = (i + 1) & table.mask) {
        Entry moved = table.entries[i];
        table.entries[i].module = NULL;
        table.used--;
        put(moved);
    }
}

/* set_module_call(address, call): None removes the module, and Ellipsis makes it known without timing its calls. */
PyObject *module_call_set(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    if (count != 2 || !(args[1] == Py_None || args[1] == Py_Ellipsis ||
                        (Py_IS_TYPE(args[1], &ModuleCallType) && ((ModuleCall *)args[1])->recorder != NULL))) {
        PyErr_SetString(PyExc_TypeError, "set_module_call() takes an address, and a ModuleCall, None or Ellipsis");
        return NULL;
    }
    PyObject *key = PyLong_AsVoidPtr(args[0]);
    if (key == NULL) {
        if (!PyErr_Occurred()) {
            PyErr_SetString(PyExc_ValueError, "invalid address 0");
        }
        return NULL;
    }
    Entry *entry = entry_of(key);
    if (args[1] == Py_None) {
        if (entry != NULL) {
            ModuleCall *removed = entry->call;
            take_out(entry);
            Py_XDECREF(removed);
        }
        Py_RETURN_NONE;
    }
    if (entry == NULL && make_room() < 0) {
        return NULL;
    }
    ModuleCall *call = args[1] == Py_Ellipsis ? NULL : (ModuleCall *)Py_NewRef(args[1]);
    if (entry != NULL) {
        ModuleCall *replaced = entry->call;
        entry->call = call;
        Py_XDECREF(replaced);
    } else {
        put((Entry){key, call});
    }
    Py_RETURN_NONE;
}

static PyObject *call_observer; /* called with outermost modules that are not in the table; or NULL */
static int inside_known;        /* not 0: the recorded thread is in a call of a known module that is not timed */

/* observe_calls(function or None) */
PyObject *module_call_observe(PyObject *module, PyObject *function)
{
    Py_XSETREF(call_observer, function == Py_None ? NULL : Py_NewRef(function));
    inside_known = 0;
    Py_RETURN_NONE;
}

static int is_observed(Recorder *self)
{
    return call_observer != NULL && !inside_known && self != NULL && self->header != NULL &&
           this_thread() == self->owner && kind_of_call(self, &self->header->stack) == KIND_FORWARD;
}

/* The name of a forward pass: that of its module, or one for all passes without gradients in a loop that trains. */
static inline uint32_t name_of_pass(const Recorder *self, int gradients, uint32_t name_id)
{
    return gradients == 0 && self->marks.passes_name != 0 ? self->marks.passes_name : name_id;
}

/* Calls a module that is not timed. The observer returns True if the module is known from now on: then the modules that
 * it calls are not shown to the observer. Its pass without gradients is timed in a loop that trains: such a module is a
 * reference network, a teacher, or a copy with averaged weights. */
static PyObject *untimed_call(int is_known, PyObject *function, PyObject *const *args, size_t nargsf, PyObject *kwnames)
{
    Recorder *self = active_recorder;
    if (PyVectorcall_NARGS(nargsf) == 0 || !is_observed(self)) {
        return plain_call(function, args, nargsf, kwnames);
    }
    Py_INCREF(self); /* the watch may end in the calls below */
    if (!is_known) {
        int64_t start_ns = recorder_now(self);
        PyObject *answer = call_kept(call_observer, args, 1);
        is_known = answer == Py_True;
        Py_XDECREF(answer);
        if (active_recorder == self && self->header != NULL) {
            add_overhead(self, recorder_now(self) - start_ns);
        }
    }
    int gradients = is_known ? gradients_enabled(self) : -1;
    uint32_t name_id = name_of_pass(self, gradients, 0);
    uint64_t depth = name_id != 0 && self->header != NULL
                         ? span_open(self, &self->header->stack, KIND_FORWARD, name_id)
                         : 0;
    inside_known = is_known;
    self->modules.in_pass += depth > 0;
    PyObject *result = plain_call(function, args, nargsf, kwnames);
    inside_known = 0;
    self->modules.in_pass -= depth > 0;
    if (depth > 0 && self->header != NULL) {
        int64_t end_ns = recorder_now(self);
        span_close(self, &self->header->stack, depth, end_ns, result == NULL ? FLAG_EXCEPTION : 0, 0, 0);
    }
    if (is_known && result != NULL && active_recorder == self && self->header != NULL) {
        count_forward(self, 0, gradients);
    }
    Py_DECREF(self);
    return result;
}

/* Observers run outside the module's span, and their time is kept out of the spans around it. They guard themselves
 * (hooks/module.py): what still comes out of one is a KeyboardInterrupt, which is for the user's loop. Returns 1 if the
 * observer returned True. */
static int observe(ModuleCall *self, PyObject *observer, PyObject *const *args, size_t count, PyObject *kwnames)
{
    Recorder *recorder = self->recorder;
    int64_t start_ns = recorder_now(recorder);
    PyObject *answer = PyObject_Vectorcall(observer, args, count, kwnames);
    Py_XDECREF(answer);
    if (recorder->header != NULL) {
        add_overhead(recorder, recorder_now(recorder) - start_ns);
    }
    return answer == NULL ? -1 : answer == Py_True;
}

static inline PyObject *call_untimed(PyObject *function, PyObject *const *args, size_t nargsf, PyObject *kwnames)
{
    if (PyFunction_Check(function) && ((PyFunctionObject *)function)->vectorcall == routed_call) {
        return plain_call(function, args, nargsf, kwnames);
    }
    return PyObject_Vectorcall(function, args, nargsf, kwnames);
}

/* Whether a call is not timed: one inside of a forward pass without gradients, or of any in this step. Captures and
 * profilers see all calls. */
static int is_left_out(Recorder *self)
{
    if (self == NULL || !(self->modules.left_out || self->modules.in_pass) || self->header == NULL ||
        self->nvtx_push != NULL || (self->marks.step_flags & FLAG_CAPTURED)) {
        return 0;
    }
    if (self->modules.in_pass && this_thread() == self->owner) {
        return 1;
    }
    if (!self->modules.left_out || self->sampled || kind_of_call(self, open_spans(self)) != KIND_MODULE) {
        return 0;
    }
    self->modules.has_left_out = 1;
    return 1;
}

/* When a call began whose cost is to be measured, or 0. */
static inline int64_t measure_call(Recorder *self)
{
    enum { CALLS_BETWEEN = 61 }; /* few models repeat after a multiple of it, so that all modules have their turn */
    if (self == NULL || --self->modules.until_measured >= 0 || self->header == NULL) {
        return 0;
    }
    self->modules.until_measured = CALLS_BETWEEN;
    return recorder_now(self);
}

static void call_measured(ModuleBudget *modules, int64_t cost_ns)
{
    enum { LONGEST_NS = 20000 }; /* a longer one was interrupted */
    if (cost_ns >= 0 && cost_ns < LONGEST_NS) {
        modules->measured_calls++;
        modules->measured_ns += cost_ns;
    }
}

/* entered_ns: when the call began, if its cost is measured. */
static PyObject *timed_call(ModuleCall *self, PyObject *function, PyObject *const *args, size_t nargsf,
                            PyObject *kwnames, int64_t entered_ns)
{
    Recorder *recorder = self->recorder;
    if (recorder->header == NULL) {
        return call_untimed(function, args, nargsf, kwnames);
    }
    int observed = recorder->sampled;
    if (observed && self->before != NULL) {
        size_t count = (size_t)PyVectorcall_NARGS(nargsf), module = count > 0; /* observers do not get the module */
        if (observe(self, self->before, args + module, count - module, kwnames) < 0) {
            return NULL;
        }
        if (recorder->header == NULL) { /* another thread ended the watch while the observer ran */
            return call_untimed(function, args, nargsf, kwnames);
        }
    }
    Stack *stack = open_spans(recorder);
    uint32_t kind = kind_of_call(recorder, stack);
    int gradients = kind == KIND_FORWARD ? gradients_enabled(recorder) : -1;
    uint32_t name_id = name_of_pass(recorder, gradients, self->name_id);
    int is_pass = name_id != self->name_id && stack == &recorder->header->stack;
    uint64_t depth = span_open(recorder, stack, kind, name_id);
    int64_t opened_ns = entered_ns != 0 && depth < MAX_FRAMES && recorder->header != NULL && !observed
                            ? stack->frames[depth].start_ns
                            : 0;
    recorder->modules.calls += kind == KIND_MODULE;
    recorder->modules.in_pass += is_pass;
    PyObject *result = call_untimed(function, args, nargsf, kwnames);
    recorder->modules.in_pass -= is_pass;
    if (recorder->header == NULL) { /* the watch ended inside this call */
        return result;
    }
    int64_t end_ns = recorder_now(recorder);
    span_close(recorder, stack, depth, end_ns, result == NULL ? FLAG_EXCEPTION : 0, 0, 0);
    if (opened_ns != 0) {
        call_measured(&recorder->modules, opened_ns - entered_ns + recorder_now(recorder) - end_ns);
    }
    if (observed && self->after != NULL && result != NULL && observe(self, self->after, &result, 1, NULL) < 0) {
        Py_CLEAR(result);
    }
    if (kind == KIND_FORWARD && self->forward != NULL && result != NULL &&
        !(recorder->marks.by_hand && gradients == 0 && stack == &recorder->header->stack && count_forward(recorder, 0, 0)) &&
        !(self->only_counts && count_forward(recorder, 1, gradients))) {
        self->only_counts = observe(self, self->forward, &result, 1, NULL);
        if (self->only_counts < 0) {
            self->only_counts = 0;
            Py_CLEAR(result);
        }
    }
    return result;
}

static PyObject *module_call(ModuleCall *self, PyObject *const *args, size_t nargsf, PyObject *kwnames)
{
    if (is_left_out(self->recorder)) {
        return call_untimed(self->function, args, nargsf, kwnames);
    }
    return timed_call(self, self->function, args, nargsf, kwnames, 0);
}

/* Stands in for the vectorcall of nn.Module.__call__, and of a class's own __call__. The own one mostly calls nn.Module's
 * through super(): the outer of the two calls is timed. Python 3.11 runs such an inner call without its vectorcall. */
static PyObject *routed_call(PyObject *function, PyObject *const *args, size_t nargsf, PyObject *kwnames)
{
    if (is_left_out(active_recorder)) {
        return plain_call(function, args, nargsf, kwnames);
    }
    int64_t entered_ns = measure_call(active_recorder);
    Entry *entry = PyVectorcall_NARGS(nargsf) > 0 ? entry_of(args[0]) : NULL;
    ModuleCall *call = entry != NULL ? entry->call : NULL;
    if (call == NULL || call->recorder->header == NULL) {
        return untimed_call(entry != NULL, function, args, nargsf, kwnames);
    }
    int is_own = function != call->function;
    if (!is_own && call->entered == this_thread()) {
        call->entered = 0;
        return plain_call(function, args, nargsf, kwnames);
    }
    if (is_own) {
        call->entered = this_thread();
    }
    Py_INCREF(call);
    PyObject *result = timed_call(call, function, args, nargsf, kwnames, entered_ns);
    if (is_own && call->entered == this_thread()) {
        call->entered = 0;
    }
    Py_DECREF(call);
    return result;
}

static void set_vectorcall(PyObject *function, vectorcallfunc vectorcall)
{
#if PY_VERSION_HEX >= 0x030c0000
    PyFunction_SetVectorcall((PyFunctionObject *)function, vectorcall);
#else
    ((PyFunctionObject *)function)->vectorcall = vectorcall;
#endif
}

/* route_calls(function): returns False where that is not possible, or has been done. */
PyObject *module_call_route(PyObject *module, PyObject *function)
{
    if (!PyFunction_Check(function)) {
        Py_RETURN_FALSE;
    }
    vectorcallfunc current = ((PyFunctionObject *)function)->vectorcall;
    if (current == NULL || current == routed_call || (plain_call != NULL && current != plain_call)) {
        Py_RETURN_FALSE;
    }
    plain_call = current;
    set_vectorcall(function, routed_call);
    Py_RETURN_TRUE;
}

PyObject *module_call_unroute(PyObject *module, PyObject *function)
{
    if (PyFunction_Check(function) && ((PyFunctionObject *)function)->vectorcall == routed_call) {
        set_vectorcall(function, plain_call);
    }
    Py_RETURN_NONE;
}

static int module_call_init(ModuleCall *self, PyObject *args, PyObject *kwargs)
{
    static char *keywords[] = {"recorder", "name_id", "function", "before", "after", "forward", NULL};
    PyObject *recorder, *function, *before = Py_None, *after = Py_None, *forward = Py_None;
    unsigned int name_id;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!IO|OOO", keywords, &RecorderType, &recorder, &name_id, &function,
                                     &before, &after, &forward)) {
        return -1;
    }
    if (self->recorder != NULL) {
        PyErr_SetString(PyExc_TypeError, "a ModuleCall is initialised once");
        return -1;
    }
    self->recorder = (Recorder *)Py_NewRef(recorder);
    self->function = Py_NewRef(function);
    self->before = before != Py_None ? Py_NewRef(before) : NULL;
    self->after = after != Py_None ? Py_NewRef(after) : NULL;
    self->forward = forward != Py_None ? Py_NewRef(forward) : NULL;
    self->name_id = name_id;
    self->vectorcall = (vectorcallfunc)module_call;
    return 0;
}

static int module_call_traverse(ModuleCall *self, visitproc visit, void *arg)
{
    Py_VISIT(self->recorder);
    Py_VISIT(self->function);
    Py_VISIT(self->before);
    Py_VISIT(self->after);
    Py_VISIT(self->forward);
    return 0;
}

static int module_call_clear(ModuleCall *self)
{
    Py_CLEAR(self->recorder);
    Py_CLEAR(self->function);
    Py_CLEAR(self->before);
    Py_CLEAR(self->after);
    Py_CLEAR(self->forward);
    return 0;
}

static void module_call_dealloc(ModuleCall *self)
{
    PyObject_GC_UnTrack(self);
    module_call_clear(self);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

PyTypeObject ModuleCallType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "torchlens_perf._native.ModuleCall",
    .tp_basicsize = sizeof(ModuleCall),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL,
    .tp_new = PyType_GenericNew,
    .tp_init = (initproc)module_call_init,
    .tp_dealloc = (destructor)module_call_dealloc,
    .tp_traverse = (traverseproc)module_call_traverse,
    .tp_clear = (inquiry)module_call_clear,
    .tp_call = PyVectorcall_Call,
    .tp_vectorcall_offset = offsetof(ModuleCall, vectorcall),
};
