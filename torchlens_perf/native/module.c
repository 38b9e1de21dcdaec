/* The extension module torchlens_perf._native. */
#include "recorder.h"

#include <stddef.h>

/* Floor of any section that reads the clock twice and stores a record: what benchmarks divide by. */
static PyObject *floor_ns(PyObject *module, PyObject *rounds_object)
{
    static Record slots[1024];
    long rounds = PyLong_AsLong(rounds_object);
    if (rounds == -1 && PyErr_Occurred()) {
        return NULL;
    }
    struct timespec first, start, end;
    clock_gettime(CLOCK_MONOTONIC, &first);
    for (long i = 0; i < rounds; i++) {
        Record *slot = &slots[i & 1023];
        clock_gettime(CLOCK_MONOTONIC, &start);
        __asm__ volatile("" ::: "memory");
        clock_gettime(CLOCK_MONOTONIC, &end);
        slot->start_ns = (int64_t)start.tv_sec * 1000000000 + start.tv_nsec;
        slot->duration_ns = (int64_t)end.tv_sec * 1000000000 + end.tv_nsec - slot->start_ns;
        slot->tag = (uint64_t)i;
        __asm__ volatile("" ::: "memory");
    }
    clock_gettime(CLOCK_MONOTONIC, &end);
    int64_t total = (int64_t)(end.tv_sec - first.tv_sec) * 1000000000 + end.tv_nsec - first.tv_nsec;
    return PyLong_FromLongLong(total);
}

/* Offsets of the ring file's fields as the compiler sees them, for the test that holds run/ring.py against them. */
static PyObject *layout(PyObject *module, PyObject *unused)
{
#define FIELD(type, field) {#type "." #field, offsetof(type, field)}
    static const struct {
        const char *name;
        size_t offset;
    } fields[] = {
        FIELD(Header, magic), FIELD(Header, version), FIELD(Header, record_bytes), FIELD(Header, capacity),
        FIELD(Header, metadata_offset), FIELD(Header, metadata_bytes), FIELD(Header, names_offset),
        FIELD(Header, names_bytes), FIELD(Header, records_offset), FIELD(Header, head), FIELD(Header, step),
        FIELD(Header, unbalanced), FIELD(Header, too_deep), FIELD(Header, tool_ns), FIELD(Header, state),
        FIELD(Header, gc_ns), FIELD(Header, device_since_ns), FIELD(Header, device_step),
        FIELD(Header, device_mark), FIELD(Header, device_looked_ns),
        FIELD(Header, names_used), FIELD(Header, names_lost), FIELD(Header, metadata_revision),
        FIELD(Header, metadata_used), FIELD(Header, internal_errors), FIELD(Header, stack), FIELD(Record, tag),
        FIELD(Record, name_id), FIELD(Record, step), FIELD(Record, start_ns), FIELD(Record, duration_ns),
        FIELD(Record, nested_ns), FIELD(Record, phase_ns), FIELD(Record, value0), FIELD(Record, value1),
        FIELD(Frame, start_ns), FIELD(Frame, nested_ns), FIELD(Frame, phase_ns), FIELD(Frame, name_id),
        FIELD(Frame, kind), FIELD(Stack, depth), FIELD(Stack, frames), FIELD(Header, groups_used),
        FIELD(Header, groups), FIELD(Header, recent), FIELD(Group, name_id), FIELD(Group, issued), FIELD(Group, ended),
    };
#undef FIELD
    PyObject *offsets = PyDict_New();
    for (size_t i = 0; offsets != NULL && i < sizeof(fields) / sizeof(fields[0]); i++) {
        PyObject *offset = PyLong_FromSize_t(fields[i].offset);
        if (offset == NULL || PyDict_SetItemString(offsets, fields[i].name, offset) < 0) {
            Py_CLEAR(offsets);
        }
        Py_XDECREF(offset);
    }
    return offsets;
}

static PyMethodDef methods[] = {
    {"section", section_lookup, METH_O, "section(name) -> Section\n\nReturn the section of that name, made at first use."},
    {"set_section_decorator", section_set_decorator, METH_O, NULL},
    {"set_module_call", FASTCALL(module_call_set), METH_FASTCALL, NULL},
    {"observe_calls", module_call_observe, METH_O, NULL},
    {"start_process", start_process, METH_VARARGS, NULL},
    {"route_calls", module_call_route, METH_O, NULL},
    {"native_hook", native_hook, METH_VARARGS, NULL},
    {"unroute_calls", module_call_unroute, METH_O, NULL},
    {"timed_wait", collective_timed_wait, METH_O, NULL},
    {"collective_marks", collective_capsule, METH_NOARGS, NULL},
    {"floor_ns", floor_ns, METH_O, NULL},
    {"layout", layout, METH_NOARGS, NULL},
    {NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "torchlens_perf._native",
    .m_size = -1,
    .m_methods = methods,
};

PyMODINIT_FUNC PyInit__native(void)
{
    if (PyType_Ready(&RecorderType) < 0 || PyType_Ready(&SectionType) < 0 || PyType_Ready(&ModuleCallType) < 0 ||
        PyType_Ready(&DeviceClockType) < 0) {
        return NULL;
    }
    PyObject *module = PyModule_Create(&definition);
    if (module == NULL) {
        return NULL;
    }
    if (section_setup(module) < 0 || step_marks_setup() < 0 || PyModule_AddObjectRef(module, "Recorder", (PyObject *)&RecorderType) < 0 ||
        PyModule_AddObjectRef(module, "Section", (PyObject *)&SectionType) < 0 ||
        PyModule_AddObjectRef(module, "ModuleCall", (PyObject *)&ModuleCallType) < 0 ||
        PyModule_AddObjectRef(module, "DeviceClock", (PyObject *)&DeviceClockType) < 0) {
        Py_DECREF(module);
        return NULL;
    }
    return module;
}
