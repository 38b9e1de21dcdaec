/* Calls of Python functions out of marks. What they raise never reaches the user's code as an error of its own. */
#include "recorder.h"

#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>

/* Raises what interrupted a mark, in the user's code: a pending call runs where the interpreter looks for signals. */
static int raise_interruption(void *interruption)
{
    PyErr_SetObject((PyObject *)Py_TYPE((PyObject *)interruption), interruption);
    Py_DECREF((PyObject *)interruption);
    return -1;
}

/* Returns 1 if the exception that is set, which stays set, interrupts this package's code: interruption.py has the rule. */
int interrupted(void)
{
    PyObject *type, *value, *traceback, *answer = NULL;
    if (!PyErr_Occurred()) {
        return 0;
    }
    PyErr_Fetch(&type, &value, &traceback);
    PyErr_NormalizeException(&type, &value, &traceback);
    if (value != NULL && traceback != NULL) {
        PyException_SetTraceback(value, traceback);
    }
    int interrupts = !PyErr_GivenExceptionMatches(type, PyExc_Exception);
    if (!interrupts && value != NULL) {
        PyObject *module = PyImport_ImportModule("torchlens_perf.interruption");
        answer = module != NULL ? PyObject_CallMethod(module, "is_interruption", "O", value) : NULL;
        Py_XDECREF(module);
        interrupts = answer == Py_True;
        Py_XDECREF(answer);
    }
    PyErr_Restore(type, value, traceback); /* drops what the question has raised */
    return interrupts;
}

/* Raises an exception in what runs next on this thread. Other threads than the first one have no pending calls. */
static int raise_soon(PyObject *interruption)
{
    if (getpid() != (pid_t)syscall(SYS_gettid)) {
        return PyThreadState_SetAsyncExc(PyThread_get_thread_ident(), (PyObject *)Py_TYPE(interruption)) == 1;
    }
    if (Py_AddPendingCall(raise_interruption, Py_NewRef(interruption)) == 0) {
        return 1;
    }
    Py_DECREF(interruption);
    return 0;
}

/* Whether errors of ours are raised, for tests: see errors.py. */
static int is_strict(void)
{
    const char *raise = getenv("TORCHLENS_PERF_RAISE");
    return raise != NULL && strcmp(raise, "1") == 0;
}

/* Takes the exception that is set, if any. One that interrupts is for the user's loop, to which a mark cannot return it,
 * and comes there as soon as may be. Others are written to the log of what nobody can catch, or dropped if `function` is
 * NULL, where they are expected. Returns whether it was one that interrupts. */
int pass_on(void *function)
{
    PyObject *type, *value, *traceback;
    int interrupts = interrupted();
    PyErr_Fetch(&type, &value, &traceback);
    int raised = (interrupts || (function != NULL && is_strict())) && value != NULL && raise_soon(value);
    if (type != NULL && !raised && (function != NULL || interrupts)) {
        PyErr_Restore(type, value, traceback);
        PyErr_WriteUnraisable(function);
        return interrupts;
    }
    Py_XDECREF(type);
    Py_XDECREF(value);
    Py_XDECREF(traceback);
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
