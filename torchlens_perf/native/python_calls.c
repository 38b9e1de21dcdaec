/* Calls of Python functions out of marks. What they raise never reaches the user's code as an error of its own. */
#include "recorder.h"

/* Raises what interrupted a mark, in the user's code: a pending call runs where the interpreter looks for signals. */
static int raise_interruption(void *interruption)
{
    PyErr_SetObject((PyObject *)Py_TYPE((PyObject *)interruption), interruption);
    Py_DECREF((PyObject *)interruption);
    return -1;
}

/* Takes the exception that is set. An error of ours is written to the log of what nobody can catch. What is none is a
 * signal handler's, a KeyboardInterrupt or a SystemExit, as handlers run inside of Python code: it is for the user's
 * loop, to which a mark cannot return it, and comes there as soon as may be. Returns whether it was one. */
int pass_on(void *function)
{
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    PyErr_NormalizeException(&type, &value, &traceback);
    if (value != NULL && traceback != NULL) {
        PyException_SetTraceback(value, traceback);
    }
    int interrupts = value != NULL && !PyErr_GivenExceptionMatches(value, PyExc_Exception);
    if (interrupts && Py_AddPendingCall(raise_interruption, value) == 0) {
        Py_XDECREF(type);
        Py_XDECREF(traceback);
        return 1;
    }
    PyErr_Restore(type, value, traceback);
    PyErr_WriteUnraisable(function);
    return interrupts;
}

/* A pending exception of the user's stays: spans also close on the way out of a raising module. Returns NULL for what
 * was passed on. */
PyObject *call_kept(PyObject *function, PyObject *const *args, size_t count)
{
    PyObject *error_type, *error, *traceback;
    PyErr_Fetch(&error_type, &error, &traceback);
    Py_INCREF(function); /* it may be replaced while it runs */
    PyObject *result = PyObject_Vectorcall(function, args, count, NULL);
    if (result == NULL) {
        pass_on(function);
    }
    Py_DECREF(function);
    PyErr_Restore(error_type, error, traceback);
    return result;
}

/* For tests. It is not to close the recorder. */
int64_t injected_clock_ns(Recorder *self)
{
    PyObject *error_type, *error, *traceback;
    PyErr_Fetch(&error_type, &error, &traceback);
    PyObject *value = PyObject_CallNoArgs(self->clock);
    int64_t now = value != NULL ? PyLong_AsLongLong(value) : 0;
    Py_XDECREF(value);
    if (PyErr_Occurred()) {
        pass_on(self->clock);
    }
    PyErr_Restore(error_type, error, traceback);
    return now;
}
