/* Sections: `with section:`.
 *
 * `with` looks `__enter__` and `__exit__` up on the type and binds them, which for ordinary methods allocates two bound
 * methods: 45 ns of a 120 ns section on CPython 3.11. So every section gets a type of its own, on which the two are
 * callables without `__get__`: nothing is bound, and each knows its section.
 */
#include "recorder.h"

#include <structmember.h>

enum { MAX_SECTIONS = 4096 }; /* names made up in a loop must not grow the process; the surplus shares one section */

typedef struct {
    PyObject_HEAD
    PyObject *name;
    uint64_t generation; /* of the recorder that name_id belongs to */
    uint32_t name_id;
} Section;

/* What `__enter__` and `__exit__` are on a section's type. */
typedef struct {
    PyObject_HEAD
    vectorcallfunc vectorcall;
    Section *section; /* borrowed: sections are never freed */
} SectionMark;

static PyObject *sections;  /* name -> Section; they live as long as the process, like their types */
static PyObject *overflow_name;

enum { RECENTS = 64 };
static struct recent {
    PyObject *name;
    PyObject *section; /* borrowed: sections are never freed */
} recents[RECENTS];
static PyObject *decorator; /* (section, function) -> wrapped function; recorder/recorder.py's */

/* Asks Python for the name's id, once a section and recorder. A name that cannot be had is one of "(other)", and counted.
 * Another thread may end the watch meanwhile, and begin another one. Returns -1 where a signal's handler has raised. */
static int section_resolve(Section *self, Recorder *recorder)
{
    PyObject *value = PyObject_CallOneArg(recorder->intern, self->name);
    long name_id = value != NULL && PyLong_Check(value) ? PyLong_AsLong(value) : -1;
    Py_XDECREF(value);
    if (interrupted()) {
        return -1;
    }
    /* Names cannot be had of a watch that has ended: that is no error. */
    pass_on(recorder->header != NULL ? recorder->intern : NULL); /* runs Python too */
    if (recorder->header == NULL) {
        return 0;
    }
    if (name_id < 0) {
        atomic_fetch_add_explicit((_Atomic uint64_t *)&recorder->header->internal_errors, 1, memory_order_relaxed);
        name_id = 0;
    }
    self->name_id = (uint32_t)name_id;
    self->generation = recorder->generation;
    return 0;
}

/* Names what runs, of what takes turns on one thread: each task of asyncio has a context of its own. 0: there is none
 * yet, which is made when a context variable is first set. */
static uintptr_t running_context(void)
{
    return (uintptr_t)PyThreadState_Get()->context;
}

static PyObject *section_enter(SectionMark *self, PyObject *const *args, size_t nargsf, PyObject *kwnames)
{
    Section *section = self->section;
    Recorder *recorder = active_recorder;
    if (recorder != NULL) {
        Py_INCREF(recorder);
        if (section->generation != recorder->generation && section_resolve(section, recorder) < 0) {
            Py_DECREF(recorder);
            return NULL;
        }
        if (recorder->header != NULL && section->generation == recorder->generation) {
            Stack *stack = open_spans(recorder);
            uint64_t depth = span_open(recorder, stack, KIND_SECTION, section->name_id);
            if (depth < MAX_FRAMES && recorder->header != NULL) {
                section_contexts(recorder, stack)[depth] = running_context();
            }
        }
        Py_DECREF(recorder);
    }
    return Py_NewRef((PyObject *)section);
}

/* The depth of the innermost open span of this section that was entered where this code runs. Another task's is another
 * one, under the same name: its duration would be exchanged with this one's. MAX_FRAMES: there is none, it was dropped,
 * and counted, when a span around it closed first, or it was entered before recording began. */
static uint64_t section_depth(Recorder *recorder, const Stack *stack, uint32_t name_id)
{
    const uintptr_t *contexts = section_contexts(recorder, stack);
    uintptr_t context = running_context();
    uint64_t depth = stack->depth < MAX_FRAMES ? stack->depth : MAX_FRAMES;
    while (depth-- > 0) {
        const Frame *frame = &stack->frames[depth];
        if (frame->name_id == name_id && frame->kind == KIND_SECTION &&
            (contexts[depth] == context || contexts[depth] == 0)) {
            return depth;
        }
    }
    return MAX_FRAMES;
}

static PyObject *section_exit(SectionMark *self, PyObject *const *args, size_t nargsf, PyObject *kwnames)
{
    Section *section = self->section;
    Recorder *recorder = active_recorder;
    if (recorder != NULL && section->generation == recorder->generation) {
        uint32_t flags = PyVectorcall_NARGS(nargsf) > 0 && args[0] != Py_None ? FLAG_EXCEPTION : 0;
        int64_t end_ns = recorder_now(recorder);
        Py_INCREF(recorder);
        Stack *stack = open_spans(recorder);
        if (stack->depth > MAX_FRAMES) { /* not kept; taken to be the innermost */
            span_close(recorder, stack, stack->depth - 1, end_ns, flags, 0, 0);
        } else {
            uint64_t depth = section_depth(recorder, stack, section->name_id);
            if (depth < MAX_FRAMES) {
                span_close(recorder, stack, depth, end_ns, flags, 0, 0);
            }
        }
        Py_DECREF(recorder);
    }
    Py_RETURN_NONE;
}

static void mark_dealloc(PyObject *self)
{
    Py_TYPE(self)->tp_free(self);
}

static PyTypeObject SectionMarkType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "torchlens_perf._native.SectionMark",
    .tp_basicsize = sizeof(SectionMark),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL,
    .tp_dealloc = mark_dealloc,
    .tp_call = PyVectorcall_Call,
    .tp_vectorcall_offset = offsetof(SectionMark, vectorcall),
};

static PyObject *section_call(Section *self, PyObject *args, PyObject *kwargs)
{
    PyObject *function;
    if (!PyArg_ParseTuple(args, "O:section", &function)) {
        return NULL;
    }
    return PyObject_CallFunctionObjArgs(decorator, (PyObject *)self, function, NULL);
}

static PyObject *section_repr(Section *self)
{
    return PyUnicode_FromFormat("section(%R)", self->name);
}

static PyMemberDef section_members[] = {
    {"name", T_OBJECT, offsetof(Section, name), READONLY, NULL},
    {NULL},
};

PyTypeObject SectionType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "torchlens_perf._native.Section",
    .tp_doc = "A named part of the step: a context manager, nestable and re-entrant, and a decorator.",
    .tp_basicsize = sizeof(Section),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE,
    .tp_call = (ternaryfunc)section_call,
    .tp_repr = (reprfunc)section_repr,
    .tp_members = section_members,
};

static int add_mark(PyObject *attributes, const char *name, vectorcallfunc function, SectionMark **mark)
{
    *mark = PyObject_New(SectionMark, &SectionMarkType);
    if (*mark == NULL) {
        return -1;
    }
    (*mark)->vectorcall = function;
    (*mark)->section = NULL;
    int status = PyDict_SetItemString(attributes, name, (PyObject *)*mark);
    Py_DECREF(*mark); /* the dictionary holds it */
    return status;
}

static Section *section_new(PyObject *name)
{
    SectionMark *enter, *leave;
    PyObject *type = NULL;
    Section *section = NULL;
    PyObject *attributes = Py_BuildValue("{s:(),s:s}", "__slots__", "__module__", "torchlens_perf._native");
    if (attributes == NULL || add_mark(attributes, "__enter__", (vectorcallfunc)section_enter, &enter) < 0 ||
        add_mark(attributes, "__exit__", (vectorcallfunc)section_exit, &leave) < 0) {
        goto done;
    }
    type = PyObject_CallFunction((PyObject *)&PyType_Type, "s(O)O", "Section", (PyObject *)&SectionType, attributes);
    if (type == NULL) {
        goto done;
    }
    section = (Section *)((PyTypeObject *)type)->tp_alloc((PyTypeObject *)type, 0);
    if (section == NULL) {
        goto done;
    }
    section->name = Py_NewRef(name);
    enter->section = section;
    leave->section = section;
done:
    Py_XDECREF(type); /* the section holds it */
    Py_XDECREF(attributes);
    return section;
}

PyObject *section_lookup(PyObject *module, PyObject *name)
{
    /* A name is nearly always a constant in the code, the same object at every call. */
    struct recent *recent = &recents[((uintptr_t)name >> 4) % RECENTS];
    if (recent->name == name) {
        return Py_NewRef(recent->section);
    }
    if (!PyUnicode_Check(name)) {
        PyErr_Format(PyExc_TypeError, "section() takes a name, got %.80s", Py_TYPE(name)->tp_name);
        return NULL;
    }
    PyObject *section = PyDict_GetItemWithError(sections, name);
    if (section != NULL) {
        Py_XSETREF(recent->name, Py_NewRef(name)); /* held, so that no other object can come to lie at its address */
        recent->section = section;
        return Py_NewRef(section);
    }
    if (PyErr_Occurred()) {
        return NULL;
    }
    if (PyDict_GET_SIZE(sections) >= MAX_SECTIONS) {
        return Py_XNewRef(PyDict_GetItem(sections, overflow_name));
    }
    section = (PyObject *)section_new(name);
    if (section != NULL && PyDict_SetItem(sections, name, section) < 0) {
        Py_CLEAR(section);
    }
    return section;
}

PyObject *section_set_decorator(PyObject *module, PyObject *function)
{
    Py_XSETREF(decorator, Py_NewRef(function));
    Py_RETURN_NONE;
}

int section_setup(PyObject *module)
{
    if (PyType_Ready(&SectionMarkType) < 0) {
        return -1;
    }
    sections = PyDict_New();
    overflow_name = PyUnicode_InternFromString("(other sections)");
    if (sections == NULL || overflow_name == NULL) {
        return -1;
    }
    PyObject *overflow = section_lookup(module, overflow_name);
    Py_XDECREF(overflow);
    return overflow == NULL ? -1 : 0;
}
