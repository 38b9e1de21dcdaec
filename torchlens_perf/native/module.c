/* The extension module torchlens_perf._native. */
#include "recorder.h"

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
