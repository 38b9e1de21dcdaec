/* What the Python tap and Work.wait call: the functions of collective.h as methods of the recorder. */
#include "recorder.h"

PyObject *recorder_issue(Recorder *self, PyObject *const *args, Py_ssize_t count)
{
    int64_t values[5]; /* name_id, group, sequence, flags, bytes */
    if (read_integers("issue", args, count, 5, 5, values) < 0) {
        return NULL;
    }
    Collective collective = {
        .name_id = (uint32_t)values[0],
        .group = (uint32_t)values[1],
        .sequence = (uint32_t)values[2],
        .flags = (uint32_t)values[3],
        .bytes = (uint64_t)values[4],
    };
    if (!collective_records(self) || !collective_marks.issue(&collective)) {
        Py_RETURN_NONE;
    }
    return PyBytes_FromStringAndSize((const char *)&collective, sizeof(collective));
}

PyObject *recorder_returned(Recorder *self, PyObject *const *args, Py_ssize_t count)
{
    if (count < 1 || !PyBytes_Check(args[0]) || PyBytes_GET_SIZE(args[0]) != sizeof(Collective)) {
        PyErr_SetString(PyExc_TypeError, "returned() takes what issue() gave, and how the end is known");
        return NULL;
    }
    int64_t values[2] = {0}; /* end, flags */
    if (read_integers("returned", args + 1, count - 1, 1, 2, values) < 0) {
        return NULL;
    }
    Collective collective;
    memcpy(&collective, PyBytes_AS_STRING(args[0]), sizeof(collective));
    collective.flags |= (uint32_t)values[1];
    collective_marks.returned(&collective, (enum collective_end)values[0]);
    Py_RETURN_NONE;
}

/* begin_wait(): whether it is recorded; then end_wait() must follow. */
PyObject *recorder_begin_wait(Recorder *self, PyObject *unused)
{
    return PyBool_FromLong(collective_records(self) && collective_marks.wait_began());
}

PyObject *recorder_end_wait(Recorder *self, PyObject *const *args, Py_ssize_t count)
{
    int64_t raised = 0;
    if (read_integers("end_wait", args, count, 0, 1, &raised) < 0) {
        return NULL;
    }
    if (collective_records(self)) {
        collective_marks.wait_ended(raised != 0);
    }
    Py_RETURN_NONE;
}

/* Among the arguments, the Work is the first. */
static PyObject *timed_wait(PyObject *wait, PyObject *const *args, Py_ssize_t count, PyObject *kwnames)
{
    int records = collective_marks.wait_began();
    PyObject *result = PyObject_Vectorcall(wait, args, (size_t)count, kwnames);
    if (records) {
        collective_marks.wait_ended(result == NULL);
    }
    return result;
}

/* A hook of native_hook() for a function that torch's dispatcher does not see. parts: function, recorder, name_id, group, how
 * the end is known, attribute of the first argument with its size in bytes or None. A blocking call is a wait from its
 * begin on, so that its time without a CPU is no work of this rank. */
PyObject *collective_call(PyObject *parts, PyObject *const *args, Py_ssize_t count, PyObject *kwnames)
{
    Recorder *self = (Recorder *)PyTuple_GET_ITEM(parts, 1);
    PyObject *function = PyTuple_GET_ITEM(parts, 0), *attribute = PyTuple_GET_ITEM(parts, 5), *result;
    enum collective_end end = (enum collective_end)PyLong_AsLong(PyTuple_GET_ITEM(parts, 4));
    PyObject *size = attribute != Py_None && count > 0 ? PyObject_GetAttr(args[0], attribute) : NULL;
    Collective collective = {
        .name_id = (uint32_t)PyLong_AsUnsignedLong(PyTuple_GET_ITEM(parts, 2)),
        .group = (uint32_t)PyLong_AsUnsignedLong(PyTuple_GET_ITEM(parts, 3)),
        .bytes = size != NULL ? PyLong_AsUnsignedLongLong(size) : 0,
    };
    Py_XDECREF(size);
    pass_on(NULL); /* the attribute is missing, or no size */
    int issued = self->header != NULL && collective.group < MAX_GROUPS && collective_records(self);
    if (issued) {
        collective.sequence = (uint32_t)self->header->groups[collective.group].issued;
        issued = collective_marks.issue(&collective);
    }
    if (issued && end == END_BY_WAIT) {
        collective_marks.returned(&collective, end);
        return timed_wait(function, args, count, kwnames);
    }
    result = PyObject_Vectorcall(function, args, (size_t)count, kwnames);
    if (issued) {
        collective.flags = result == NULL ? FLAG_EXCEPTION : 0;
        collective_marks.returned(&collective, end);
    }
    return result;
}

static PyMethodDef timed_wait_method = {"wait", FASTCALL(timed_wait), METH_FASTCALL | METH_KEYWORDS, NULL};

/* timed_wait(wait): a method for the class `Work` that times its `wait`. Each holds the wait that it was made for:
 * where another tool has wrapped an earlier watch's, one stands inside of the other. Made of the same types as
 * pybind11's methods: Dynamo calls those of a type that it does not know without their object. */
PyObject *collective_timed_wait(PyObject *module, PyObject *wait)
{
    PyObject *target = PyInstanceMethod_Check(wait) ? PyInstanceMethod_GET_FUNCTION(wait) : wait;
    PyObject *function = PyCFunction_New(&timed_wait_method, target);
    PyObject *method = function != NULL ? PyInstanceMethod_New(function) : NULL;
    Py_XDECREF(function);
    return method;
}

PyObject *collective_capsule(PyObject *module, PyObject *unused)
{
    return PyCapsule_New(&collective_marks, COLLECTIVE_MARKS_CAPSULE, NULL);
}

/* claim(): the ticket of what the thread is issuing, with one more part. */
PyObject *recorder_claim(Recorder *self, PyObject *unused)
{
    return PyLong_FromUnsignedLongLong(collective_marks.claim());
}

/* part_over(ticket, start_ns, end_ns): by the device's clock; without times, which nothing will report. */
PyObject *recorder_part_over(Recorder *self, PyObject *const *args, Py_ssize_t count)
{
    int64_t values[3] = {0}; /* ticket, start_ns, end_ns */
    if (read_integers("part_over", args, count, 1, 3, values) < 0) {
        return NULL;
    }
    enum part_time time = count == 3 ? PART_BY_DEVICE : PART_UNTIMED;
    return PyBool_FromLong(collective_marks.part_over((uint64_t)values[0], 1, time, values[1], values[2]));
}
