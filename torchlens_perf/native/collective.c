/* Collectives: the table of groups, records that are written when an operation is over, and timed waits.
 *
 * An operation's record is written when it has ended, by the thread that learns of it: a thread of the backend, without
 * the GIL. So writers are counted in with an atomic head, and a lock, which the training thread holds for some 20 ns an
 * operation, keeps the ring file mapped while another thread writes.
 */
#include "collective.h"

#include "recorder.h"

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static Recorder *collecting; /* changed with the GIL and the lock; read with either */
static PyObject *original_wait;
static uint32_t wait_name_id;

/* The blocking operation that the thread has issued and now waits for; its backend does not call back. */
static __thread struct {
    int pending;
    Collective collective;
} waited_for;

/* Operations that have not ended, whose backend will call back; the surplus is recorded without an end. */
enum { MOST_PENDING = 1024 };
static struct {
    int used;
    Collective collective;
} pending[MOST_PENDING];
static uint32_t next_pending;

/* The operations of the step in progress so far, on the training thread and elsewhere. */
static struct {
    uint32_t step, count;
} ordinals;

static void write_collective(Recorder *recorder, const Collective *collective, int64_t duration_ns, uint32_t flags)
{
    Record record = {
        .name_id = collective->name_id,
        .step = collective->step,
        .start_ns = collective->start_ns,
        .duration_ns = duration_ns,
        .nested_ns = collective->call_ns,
        .phase_ns = collective->ordinal,
        .value0 = collective->bytes,
        .value1 = collective->sequence | (uint64_t)collective->within << 32,
    };
    write_record_of_step(recorder, &record, KIND_COLLECTIVE, collective->depth, collective->flags | flags);
    if (collective->group < MAX_GROUPS) {
        Group *group = &recorder->header->groups[collective->group];
        if (group->ended < (uint64_t)collective->sequence + 1) {
            group->ended = (uint64_t)collective->sequence + 1;
        }
    }
}

static int is_recorded(const Collective *collective)
{
    return collecting != NULL && collecting->header != NULL && collecting->generation == collective->generation;
}

static void flush_waited_for(int64_t end_ns, uint32_t flags)
{
    if (waited_for.pending) {
        waited_for.pending = 0;
        const Collective *collective = &waited_for.collective;
        if (is_recorded(collective)) {
            write_collective(collecting, collective, flags ? end_ns - collective->start_ns : collective->call_ns, flags);
        }
    }
}

/* When recording ends: what is on its way is recorded, without an end. */
static void write_pending(void)
{
    for (uint32_t i = 0; i < MOST_PENDING; i++) {
        if (pending[i].used && is_recorded(&pending[i].collective)) {
            write_collective(collecting, &pending[i].collective, pending[i].collective.call_ns, 0);
        }
        pending[i].used = 0;
    }
}

static int issue(Collective *collective)
{
    pthread_mutex_lock(&lock);
    Recorder *recorder = collecting;
    if (recorder == NULL || recorder->header == NULL) {
        pthread_mutex_unlock(&lock);
        return 0;
    }
    flush_waited_for(0, 0);
    Header *header = recorder->header;
    Stack *stack = open_spans(recorder);
    uint64_t innermost = stack->depth < MAX_FRAMES ? stack->depth : MAX_FRAMES;
    collective->generation = recorder->generation;
    collective->step = (uint32_t)header->step;
    collective->depth = (uint32_t)stack->depth;
    collective->within = innermost > 0 ? stack->frames[innermost - 1].name_id : 0;
    if (stack != &header->stack) {
        collective->flags |= FLAG_OTHER_THREAD;
    }
    if (ordinals.step != collective->step) {
        ordinals.step = collective->step;
        ordinals.count = 0;
    }
    collective->ordinal = ordinals.count++;
    collective->start_ns = recorder_now(recorder);
    if (collective->group < MAX_GROUPS) {
        Group *group = &header->groups[collective->group];
        group->issued = (uint64_t)collective->sequence + 1;
        group->issued_ns = collective->start_ns;
    }
    pthread_mutex_unlock(&lock);
    return 1;
}

static void returned(Collective *collective, enum collective_end end)
{
    pthread_mutex_lock(&lock);
    if (is_recorded(collective)) {
        int64_t now_ns = recorder_now(collecting);
        collective->call_ns = now_ns - collective->start_ns;
        if (end == END_BY_CALLBACK) {
            uint32_t place = next_pending++ % MOST_PENDING;
            collective->pending = place;
            if (pending[place].used && is_recorded(&pending[place].collective)) {
                write_collective(collecting, collective, collective->call_ns, 0);
                collective->pending = MOST_PENDING;
            } else {
                pending[place].used = 1;
                pending[place].collective = *collective;
            }
        } else if (end == END_BY_WAIT) {
            waited_for.pending = 1;
            waited_for.collective = *collective;
        } else if (end == END_UNKNOWN) {
            write_collective(collecting, collective, collective->call_ns, 0);
        } else if (end == END_BY_RETURN) {
            write_collective(collecting, collective, collective->call_ns, FLAG_COMPLETED);
            Record record = {
                .name_id = collective->name_id,
                .step = collective->step,
                .start_ns = collective->start_ns,
                .duration_ns = collective->call_ns,
            };
            Stack *stack = open_spans(collecting);
            int elsewhere = stack != &collecting->header->stack;
            credit(stack, collective->call_ns, collective->call_ns);
            write_record_of_step(collecting, &record, KIND_WAIT, stack->depth, elsewhere ? FLAG_OTHER_THREAD : 0);
            collecting->waited_ns += elsewhere ? 0 : collective->call_ns;
        }
    }
    pthread_mutex_unlock(&lock);
}

static void completed(const Collective *collective)
{
    pthread_mutex_lock(&lock);
    if (collective->pending < MOST_PENDING && is_recorded(collective)) {
        pending[collective->pending].used = 0;
        int64_t end_ns = recorder_now(collecting);
        write_collective(collecting, collective, end_ns - collective->start_ns, FLAG_COMPLETED);
    }
    pthread_mutex_unlock(&lock);
}

/* NVTX ranges are pushed from Python. The GIL is taken before the lock, never inside. */
static int needs_gil(void)
{
    Recorder *recorder = collecting;
    return recorder != NULL && recorder->nvtx_push != NULL;
}

static int wait_began(void)
{
    int gil = needs_gil();
    PyGILState_STATE state = gil ? PyGILState_Ensure() : PyGILState_UNLOCKED;
    pthread_mutex_lock(&lock);
    Recorder *recorder = collecting;
    int records = recorder != NULL && recorder->header != NULL;
    if (records) {
        span_open(recorder, open_spans(recorder), KIND_WAIT, wait_name_id);
    }
    pthread_mutex_unlock(&lock);
    if (gil) {
        PyGILState_Release(state);
    }
    return records;
}

/* Closes the thread's innermost wait. */
static void wait_ended(void)
{
    int gil = needs_gil();
    PyGILState_STATE state = gil ? PyGILState_Ensure() : PyGILState_UNLOCKED;
    pthread_mutex_lock(&lock);
    Recorder *recorder = collecting;
    if (recorder != NULL && recorder->header != NULL) {
        int64_t end_ns = recorder_now(recorder);
        Stack *stack = open_spans(recorder);
        uint64_t innermost = stack->depth <= MAX_FRAMES ? stack->depth : 0;
        if (innermost > 0 && stack == &recorder->header->stack && stack->frames[innermost - 1].kind == KIND_WAIT) {
            recorder->waited_ns += end_ns - stack->frames[innermost - 1].start_ns;
        }
        span_close_named(recorder, KIND_WAIT, wait_name_id, end_ns, 0, 0, 0);
        flush_waited_for(end_ns, FLAG_COMPLETED);
    }
    pthread_mutex_unlock(&lock);
    if (gil) {
        PyGILState_Release(state);
    }
}

static CollectiveMarks marks = {
    .version = COLLECTIVE_MARKS_VERSION,
    .issue = issue,
    .returned = returned,
    .completed = completed,
    .wait_began = wait_began,
    .wait_ended = wait_ended,
};

/* Recorder.collect(wait_name_id): from here on collectives are recorded here. */
PyObject *recorder_collect(Recorder *self, PyObject *name_id)
{
    unsigned long value = PyLong_AsUnsignedLong(name_id);
    if (value == (unsigned long)-1 && PyErr_Occurred()) {
        return NULL;
    }
    pthread_mutex_lock(&lock);
    wait_name_id = (uint32_t)value;
    if (self->header != NULL) {
        collecting = self;
        self->shared = 1;
        ordinals.step = 0;
        ordinals.count = 0;
    }
    pthread_mutex_unlock(&lock);
    Py_RETURN_NONE;
}

/* Before the ring file is unmapped: waits for a writer on another thread. With `forked`, in a child process, the thread
 * that held the lock may not exist. */
void collective_release(Recorder *self, int forked)
{
    if (forked) {
        lock = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
    }
    pthread_mutex_lock(&lock);
    if (collecting == self) {
        if (self->header != NULL && !forked) {
            flush_waited_for(0, 0);
            write_pending();
        }
        collecting = NULL;
    }
    self->header = NULL;
    pthread_mutex_unlock(&lock);
}

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
    if (self != collecting || !issue(&collective)) {
        Py_RETURN_NONE;
    }
    return PyBytes_FromStringAndSize((const char *)&collective, sizeof(collective));
}

PyObject *recorder_returned(Recorder *self, PyObject *const *args, Py_ssize_t count)
{
    if (count != 2 || !PyBytes_Check(args[0]) || PyBytes_GET_SIZE(args[0]) != sizeof(Collective)) {
        PyErr_SetString(PyExc_TypeError, "returned() takes what issue() gave, and how the end is known");
        return NULL;
    }
    long end = PyLong_AsLong(args[1]);
    if (end == -1 && PyErr_Occurred()) {
        return NULL;
    }
    Collective collective;
    memcpy(&collective, PyBytes_AS_STRING(args[0]), sizeof(collective));
    returned(&collective, (enum collective_end)end);
    Py_RETURN_NONE;
}

PyObject *recorder_begin_wait(Recorder *self, PyObject *unused)
{
    if (self == collecting) {
        wait_began();
    }
    Py_RETURN_NONE;
}

PyObject *recorder_end_wait(Recorder *self, PyObject *unused)
{
    if (self == collecting) {
        wait_ended();
    }
    Py_RETURN_NONE;
}

static PyObject *timed_wait(PyObject *work, PyObject *const *args, Py_ssize_t count, PyObject *kwnames)
{
    PyObject *few[8];
    Py_ssize_t total = count + (kwnames != NULL ? PyTuple_GET_SIZE(kwnames) : 0);
    if (total + 1 > 8) {
        PyErr_SetString(PyExc_TypeError, "wait() takes fewer arguments");
        return NULL;
    }
    few[0] = work;
    for (Py_ssize_t i = 0; i < total; i++) {
        few[i + 1] = args[i];
    }
    int records = wait_began();
    PyObject *result = PyObject_Vectorcall(original_wait, few, (size_t)count + 1, kwnames);
    if (records) {
        wait_ended();
    }
    return result;
}

static PyMethodDef timed_wait_method = {"wait", (PyCFunction)(void (*)(void))timed_wait, METH_FASTCALL | METH_KEYWORDS,
                                        NULL};

/* timed_wait(Work, wait): a method for the class `Work` that times its `wait`. */
PyObject *collective_timed_wait(PyObject *module, PyObject *args)
{
    PyTypeObject *type;
    PyObject *wait;
    if (!PyArg_ParseTuple(args, "O!O", &PyType_Type, &type, &wait)) {
        return NULL;
    }
    Py_INCREF(wait);
    Py_XSETREF(original_wait, wait);
    return PyDescr_NewMethod(type, &timed_wait_method);
}

PyObject *collective_capsule(PyObject *module, PyObject *unused)
{
    return PyCapsule_New(&marks, COLLECTIVE_MARKS_CAPSULE, NULL);
}
