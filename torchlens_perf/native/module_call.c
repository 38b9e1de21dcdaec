/* ModuleCall: stands in an nn.Module's `_compiled_call_impl` slot and times each call of the module.
 *
 * It holds the module weakly: the module's own dictionary holds this object, and a strong reference back would keep a
 * deleted model, and its device memory, until the garbage collector runs.
 */
#include "recorder.h"

#include <structmember.h>

typedef struct {
    PyObject_HEAD
    vectorcallfunc vectorcall;
    Recorder *recorder;
    PyObject *function; /* called with the module first, or alone where there is no module */
    PyObject *module;   /* weak reference, or NULL */
    PyObject *before;   /* observer of the arguments in sampled steps, or NULL */
    PyObject *after;    /* observer of the result in sampled steps, or NULL */
    PyObject *forward;  /* observer of the result of each call that is a forward pass, or NULL */
    uint32_t name_id;
    PyObject *weak_references;
} ModuleCall;

/* Observers run outside the module's span, and their time is kept out of the spans around it. They guard themselves
 * (hooks/module.py): what still comes out of one is a KeyboardInterrupt, which is for the user's loop. */
static int observe(ModuleCall *self, PyObject *observer, PyObject *const *args, size_t count, PyObject *kwnames)
{
    Recorder *recorder = self->recorder;
    int64_t start_ns = recorder_now(recorder);
    PyObject *ignored = PyObject_Vectorcall(observer, args, count, kwnames);
    Py_XDECREF(ignored);
    if (recorder->header != NULL) {
        add_overhead(recorder, recorder_now(recorder) - start_ns);
    }
    return ignored == NULL ? -1 : 0;
}

/* What a weak reference is of; NULL, without an error: it is gone. PyWeakref_GetObject() leaves Python with 3.15. */
static PyObject *referent(PyObject *reference)
{
    PyObject *object = NULL;
#if PY_VERSION_HEX >= 0x030d0000
    PyWeakref_GetRef(reference, &object);
#else
    object = PyWeakref_GetObject(reference);
    if (object == Py_None) {
        return NULL;
    }
    Py_XINCREF(object);
#endif
    return object;
}

static PyObject *call_with_module(ModuleCall *self, PyObject *const *args, size_t nargsf, PyObject *kwnames)
{
    PyObject *module = referent(self->module);
    if (module == NULL) {
        if (!PyErr_Occurred()) {
            PyErr_SetString(PyExc_ReferenceError, "the watched module no longer exists");
        }
        return NULL;
    }
    Py_ssize_t count = PyVectorcall_NARGS(nargsf);
    Py_ssize_t total = count + (kwnames != NULL ? PyTuple_GET_SIZE(kwnames) : 0);
    PyObject *few[8];
    PyObject **with_module = few;
    if (total + 1 > 8) {
        with_module = PyMem_Malloc((size_t)(total + 1) * sizeof(PyObject *));
        if (with_module == NULL) {
            Py_DECREF(module);
            return PyErr_NoMemory();
        }
    }
    with_module[0] = module;
    for (Py_ssize_t i = 0; i < total; i++) {
        with_module[i + 1] = args[i];
    }
    PyObject *result = PyObject_Vectorcall(self->function, with_module, (size_t)count + 1, kwnames);
    if (with_module != few) {
        PyMem_Free(with_module);
    }
    Py_DECREF(module);
    return result;
}

static inline PyObject *call_target(ModuleCall *self, PyObject *const *args, size_t nargsf, PyObject *kwnames)
{
    if (self->module != NULL) {
        return call_with_module(self, args, nargsf, kwnames);
    }
    return PyObject_Vectorcall(self->function, args, nargsf, kwnames);
}

static PyObject *module_call(ModuleCall *self, PyObject *const *args, size_t nargsf, PyObject *kwnames)
{
    Recorder *recorder = self->recorder;
    if (recorder->header == NULL) {
        return call_target(self, args, nargsf, kwnames);
    }
    int observed = recorder->sampled;
    if (observed && self->before != NULL) {
        if (observe(self, self->before, args, (size_t)PyVectorcall_NARGS(nargsf), kwnames) < 0) {
            return NULL;
        }
        if (recorder->header == NULL) { /* another thread ended the watch while the observer ran */
            return call_target(self, args, nargsf, kwnames);
        }
    }
    Stack *stack = open_spans(recorder);
    uint32_t kind = kind_of_call(recorder, stack);
    uint64_t depth = span_open(recorder, stack, kind, self->name_id);
    PyObject *result = call_target(self, args, nargsf, kwnames);
    if (recorder->header == NULL) { /* the watch ended inside this call */
        return result;
    }
    int64_t end_ns = recorder_now(recorder);
    span_close(recorder, stack, depth, end_ns, result == NULL ? FLAG_EXCEPTION : 0, 0, 0);
    if (observed && self->after != NULL && result != NULL && observe(self, self->after, &result, 1, NULL) < 0) {
        Py_CLEAR(result);
    }
    if (kind == KIND_FORWARD && self->forward != NULL && result != NULL &&
        observe(self, self->forward, &result, 1, NULL) < 0) {
        Py_CLEAR(result);
    }
    return result;
}

static int module_call_init(ModuleCall *self, PyObject *args, PyObject *kwargs)
{
    static char *keywords[] = {"recorder", "name_id", "function", "module", "before", "after", "forward", NULL};
    PyObject *recorder, *function, *module = Py_None, *before = Py_None, *after = Py_None, *forward = Py_None;
    unsigned int name_id;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!IO|OOOO", keywords, &RecorderType, &recorder, &name_id, &function,
                                     &module, &before, &after, &forward)) {
        return -1;
    }
    if (self->recorder != NULL) {
        PyErr_SetString(PyExc_TypeError, "a ModuleCall is initialised once");
        return -1;
    }
    if (module != Py_None) {
        self->module = PyWeakref_NewRef(module, NULL);
        if (self->module == NULL) {
            return -1;
        }
    }
    Py_INCREF(recorder);
    self->recorder = (Recorder *)recorder;
    Py_INCREF(function);
    self->function = function;
    if (before != Py_None) {
        Py_INCREF(before);
        self->before = before;
    }
    if (after != Py_None) {
        Py_INCREF(after);
        self->after = after;
    }
    if (forward != Py_None) {
        Py_INCREF(forward);
        self->forward = forward;
    }
    self->name_id = name_id;
    self->vectorcall = (vectorcallfunc)module_call;
    return 0;
}

static int module_call_traverse(ModuleCall *self, visitproc visit, void *arg)
{
    Py_VISIT(self->recorder);
    Py_VISIT(self->function);
    Py_VISIT(self->module);
    Py_VISIT(self->before);
    Py_VISIT(self->after);
    Py_VISIT(self->forward);
    return 0;
}

static int module_call_clear(ModuleCall *self)
{
    Py_CLEAR(self->recorder);
    Py_CLEAR(self->function);
    Py_CLEAR(self->module);
    Py_CLEAR(self->before);
    Py_CLEAR(self->after);
    Py_CLEAR(self->forward);
    return 0;
}

static void module_call_dealloc(ModuleCall *self)
{
    PyObject_GC_UnTrack(self);
    if (self->weak_references != NULL) {
        PyObject_ClearWeakRefs((PyObject *)self);
    }
    module_call_clear(self);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static PyMemberDef module_call_members[] = {
    {"function", T_OBJECT, offsetof(ModuleCall, function), READONLY, NULL},
    {"module", T_OBJECT, offsetof(ModuleCall, module), READONLY, NULL},
    {NULL},
};

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
    .tp_members = module_call_members,
    .tp_call = PyVectorcall_Call,
    .tp_vectorcall_offset = offsetof(ModuleCall, vectorcall),
    .tp_weaklistoffset = offsetof(ModuleCall, weak_references),
};

/* Dynamo inlines a type's `__call__` where it is a function in Python. Who calls a ModuleCall gets its vectorcall. */
PyObject *module_call_set_traced(PyObject *module, PyObject *function)
{
    if (PyDict_SetItemString(ModuleCallType.tp_dict, "__call__", function) < 0) {
        return NULL;
    }
    PyType_Modified(&ModuleCallType);
    Py_RETURN_NONE;
}
