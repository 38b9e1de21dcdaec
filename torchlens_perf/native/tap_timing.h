// Marks around a tapped operation on a device, from Python (cuda/stalls.py).
#ifndef TORCHLENS_PERF_NATIVE_TAP_TIMING_H
#define TORCHLENS_PERF_NATIVE_TAP_TIMING_H

#include <Python.h>

#include <atomic>

extern "C" {
#include "collective.h"
}

namespace {

// Asked before an operation that a device runs in the order of the current stream; gives what to call after it, or None.
// NULL: no device's clock runs.
PyObject *begin_timing;
std::atomic<bool> times{false};

const CollectiveMarks *marks;

// Calls a function of ours in Python, and returns what it gave; with the GIL. NULL: nothing.
PyObject *call(PyObject *function)
{
    if (function == nullptr) {
        return nullptr;
    }
    Py_INCREF(function); // it may be replaced meanwhile
    PyObject *result = PyObject_CallNoArgs(function);
    if (result == nullptr) {
        marks->pass_on(function);
    }
    Py_DECREF(function);
    if (result == Py_None) {
        Py_CLEAR(result);
    }
    return result;
}

// Around an operation that is marked from Python.
class Timing {
  public:
    void begin()
    {
        PyGILState_STATE state = PyGILState_Ensure();
        end_timing = call(begin_timing);
        PyGILState_Release(state);
    }

    void end()
    {
        if (end_timing != nullptr) {
            PyGILState_STATE state = PyGILState_Ensure();
            Py_XDECREF(call(end_timing));
            Py_CLEAR(end_timing);
            PyGILState_Release(state);
        }
    }

    // Where the operation has raised, its end is marked here.
    ~Timing() { end(); }

  private:
    PyObject *end_timing = nullptr;
};

// time_with(begin): see begin_timing; None for no such times.
PyObject *time_with(PyObject *, PyObject *function)
{
    PyObject *begin = function == Py_None ? nullptr : function;
    Py_XINCREF(begin);
    Py_XSETREF(begin_timing, begin);
    times = begin != nullptr;
    Py_RETURN_NONE;
}

} // namespace

#endif
