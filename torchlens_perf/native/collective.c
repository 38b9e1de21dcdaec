/* Collectives: the table of groups, records that are written when an operation is over, and timed waits.
 *
 * An operation's record is written when it has ended, by the thread that learns of it: a thread of the backend, without
 * the GIL. So writers are counted in with an atomic head, and a lock, which the training thread holds for some 20 ns an
 * operation, keeps the ring file mapped while another thread writes.
 */
#define _GNU_SOURCE 1 /* a recursive mutex that needs no call to begin with; Python defines it alike */
#include "collective.h"

#include "recorder.h"

/* Recursive: NVTX's functions are called inside it, and what they set free may come back here. */
static pthread_mutex_t lock = PTHREAD_RECURSIVE_MUTEX_INITIALIZER_NP;
static Recorder *collecting; /* a reference; changed with the GIL and the lock, read with either */
static _Atomic int wants_gil; /* whether it calls Python, for NVTX ranges or marks on a device; changed with the lock */
static uint32_t wait_name_id;

/* Operations that have not ended. The surplus is recorded without an end. */
enum { PENDING_BITS = 10, MAX_PENDING = 1 << PENDING_BITS, MAX_WAITED_FOR = 64 };
typedef struct {
    int used;
    Collective collective;
} Kept;
static Kept pending[MAX_PENDING];       /* those whose backend will call back */
static Kept waited_for[MAX_WAITED_FOR]; /* the blocking ones of others: each thread has one at most */
static uint32_t next_pending, next_recent;

/* The blocking operation that the thread has issued and waits for next. */
static __thread struct {
    int waits;
    uint32_t place;
    uint64_t generation; /* of its recorder, which has written it if it is closed by now */
} mine;

/* The operations of the step in progress so far, on the training thread and elsewhere. */
static struct {
    uint32_t step, count;
} ordinals;

void collective_began(const Collective *collective, int known)
{
    if (collective->group < MAX_GROUPS) {
        collecting->header->groups[collective->group].began = known ? collective->sequence + 1 : 0;
    }
}

void collective_begins_unknown(void)
{
    for (int i = 0; collecting != NULL && collecting->header != NULL && i < MAX_GROUPS; i++) {
        collecting->header->groups[i].began = 0;
    }
}

void collective_write(const Collective *collective, int64_t duration_ns, uint32_t flags)
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
    write_record_of_step(collecting, &record, KIND_COLLECTIVE, collective->depth, collective->flags | flags);
    PROBE_COLLECTIVE_END(collective->group, collective->sequence, collective->bytes, collective->step, duration_ns,
                         flags & FLAG_COMPLETED);
    if (collective->group < MAX_GROUPS) {
        Group *group = &collecting->header->groups[collective->group];
        if (group->ended < (uint64_t)collective->sequence + 1) {
            group->ended = (uint64_t)collective->sequence + 1;
        }
    }
}

int collective_is_recorded(const Collective *collective)
{
    return collecting != NULL && collecting->header != NULL && collecting->generation == collective->generation;
}

static int is_free(const Kept *kept)
{
    return !kept->used || !collective_is_recorded(&kept->collective);
}

/* The thread waits for this operation next. */
static void wait_for(const Collective *collective)
{
    for (uint32_t tried = 0; tried < MAX_WAITED_FOR; tried++) {
        if (is_free(&waited_for[mine.place])) {
            waited_for[mine.place] = (Kept){.used = 1, .collective = *collective};
            mine.waits = 1;
            mine.generation = collective->generation;
            return;
        }
        mine.place = (mine.place + 1) % MAX_WAITED_FOR;
    }
    collective_write(collective, collective->call_ns, 0);
}

static void flush_waited_for(int64_t end_ns, uint32_t flags)
{
    Kept *kept = &waited_for[mine.place];
    if (mine.waits && kept->used && kept->collective.generation == mine.generation) {
        const Collective *collective = &kept->collective;
        if (collective_is_recorded(collective)) {
            int64_t whole_ns = end_ns - collective->start_ns;
            collective_write(collective, flags & FLAG_COMPLETED ? whole_ns : collective->call_ns, flags);
        }
        kept->used = 0;
    }
    mine.waits = 0;
}

static void write_without_end(Kept *kept, uint32_t count)
{
    for (uint32_t i = 0; i < count; i++) {
        if (!is_free(&kept[i])) {
            collective_write(&kept[i].collective, kept[i].collective.call_ns, 0);
        }
        kept[i].used = 0;
    }
}

/* Takes the lock. Who has it may be in a Python function, for an NVTX range, and wait there for the GIL: so it is not
 * waited for with the GIL held. */
void collective_lock(void)
{
    while (pthread_mutex_trylock(&lock) != 0) {
        if (PyGILState_GetThisThreadState() == NULL || !PyGILState_Check()) {
            pthread_mutex_lock(&lock);
            return;
        }
        PyThreadState *state = PyEval_SaveThread();
        pthread_mutex_lock(&lock);
        pthread_mutex_unlock(&lock);
        PyEval_RestoreThread(state);
    }
}

void collective_unlock(void)
{
    pthread_mutex_unlock(&lock);
}

/* For a reader: two ranks that differ in the operation with one sequence number wait for each other. */
static void remember(Header *header, const Collective *collective)
{
    Recent *recent = &header->recent[next_recent++ % MAX_RECENT];
    recent->key = 0;
    atomic_signal_fence(memory_order_seq_cst);
    recent->bytes = collective->bytes;
    atomic_signal_fence(memory_order_seq_cst);
    recent->key = collective->sequence | (uint64_t)(collective->name_id & 0xFFFFFF) << 32 |
                  (uint64_t)(collective->group + 1) << 56;
}

static int issue(Collective *collective)
{
    collective_lock();
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
    collective->pending = 0;
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
    PROBE_COLLECTIVE_BEGIN(collective->group, collective->sequence, collective->bytes, collective->step);
    collective->start_ns = recorder_now(recorder);
    parts_issued(collective);
    if (collective->group < MAX_GROUPS) {
        header->groups[collective->group].issued = (uint64_t)collective->sequence + 1;
        remember(header, collective);
    }
    pthread_mutex_unlock(&lock);
    return 1;
}

static void returned(Collective *collective, enum collective_end end)
{
    collective_lock();
    if (collective_is_recorded(collective)) {
        int64_t now_ns = recorder_now(collecting);
        collective->call_ns = now_ns - collective->start_ns;
        if (parts_tell(collective, end)) {
            /* recorded when its parts are over */
        } else if (end == END_BY_CALLBACK && is_free(&pending[++next_pending % MAX_PENDING])) {
            uint32_t place = next_pending % MAX_PENDING;
            collective->pending = collective->generation << PENDING_BITS | place;
            pending[place] = (Kept){.used = 1, .collective = *collective};
        } else if (end == END_BY_WAIT) {
            wait_for(collective);
        } else if (end != END_BY_RETURN) {
            collective_write(collective, collective->call_ns, 0);
        } else {
            collective_write(collective, collective->call_ns, FLAG_COMPLETED);
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

static void end_pending(uint64_t name, uint32_t flags)
{
    Kept *kept = &pending[name % MAX_PENDING];
    collective_lock();
    if (kept->used && kept->collective.pending == name && collective_is_recorded(&kept->collective)) {
        kept->used = 0;
        collective_write(&kept->collective, recorder_now(collecting) - kept->collective.start_ns, flags);
    }
    pthread_mutex_unlock(&lock);
}

static void completed(uint64_t name)
{
    end_pending(name, FLAG_COMPLETED);
}

static void failed(uint64_t name)
{
    end_pending(name, FLAG_COMPLETED | FLAG_EXCEPTION);
}

/* Takes the lock; before it the GIL if NVTX ranges are pushed, which is done in Python. The recorder is not looked at
 * without the lock: it may be closed and freed meanwhile. What is called in Python may close it on this thread, so with
 * the GIL there is a reference to it until leave(). Returns whether the GIL was taken. */
static int enter(PyGILState_STATE *state, Recorder **recorder)
{
    int gil = wants_gil;
    for (;;) {
        if (gil) {
            *state = PyGILState_Ensure();
        }
        collective_lock();
        if (gil || !wants_gil) {
            *recorder = collecting;
            if (gil) {
                Py_XINCREF(*recorder);
            }
            return gil;
        }
        pthread_mutex_unlock(&lock); /* another recorder has come */
        gil = 1;
    }
}

static void leave(int gil, PyGILState_STATE state, Recorder *recorder)
{
    pthread_mutex_unlock(&lock);
    if (gil) {
        Py_XDECREF(recorder);
        PyGILState_Release(state);
    }
}

/* Whether the thread's innermost span is a timed wait. */
static int waits(const Stack *stack)
{
    if (stack->depth == 0 || stack->depth > MAX_FRAMES) {
        return 0;
    }
    const Frame *innermost = &stack->frames[stack->depth - 1];
    return innermost->kind == KIND_WAIT && innermost->name_id == wait_name_id;
}

/* Marks a wait on the device, between two looks at the recorder: Python may set the GIL free, so the lock is not held
 * meanwhile. Returns whether the recorder still records. */
static int mark_on_device(Recorder *recorder, PyObject *function)
{
    pthread_mutex_unlock(&lock);
    device_stall(function);
    collective_lock();
    return collecting == recorder && recorder->header != NULL;
}

/* A wait inside of one is a part of it: of a Work that waits for others, or of an earlier watch's wait, which another
 * tool has wrapped. */
static int wait_began(void)
{
    PyGILState_STATE state = PyGILState_UNLOCKED;
    Recorder *recorder;
    int gil = enter(&state, &recorder), records = 0;
    if (recorder != NULL && recorder->header != NULL && !waits(open_spans(recorder))) {
        records = recorder->device_wait_began == NULL || mark_on_device(recorder, recorder->device_wait_began);
        if (records) {
            span_open(recorder, open_spans(recorder), KIND_WAIT, wait_name_id);
        }
    }
    leave(gil, state, recorder);
    return records;
}

/* Closes the thread's innermost wait. One that raised is the end of nothing: the operation may still be under way. */
static void wait_ended(int raised)
{
    PyGILState_STATE state = PyGILState_UNLOCKED;
    Recorder *recorder;
    int gil = enter(&state, &recorder);
    if (recorder != NULL && recorder->header != NULL) {
        int64_t end_ns = recorder_now(recorder);
        Stack *stack = open_spans(recorder);
        if (stack == &recorder->header->stack && waits(stack)) {
            recorder->waited_ns += end_ns - stack->frames[stack->depth - 1].start_ns;
        }
        span_close_named(recorder, KIND_WAIT, wait_name_id, end_ns, raised ? FLAG_EXCEPTION : 0, 0, 0);
        flush_waited_for(end_ns, raised ? FLAG_EXCEPTION : FLAG_COMPLETED);
        if (recorder->header != NULL && recorder->device_wait_ended != NULL) {
            mark_on_device(recorder, recorder->device_wait_ended);
        }
    }
    leave(gil, state, recorder);
}

static enum pass place(uint32_t *module)
{
    uint32_t phase = KIND_STEP;
    collective_lock();
    if (collecting != NULL && collecting->header != NULL) {
        Stack *stack = open_spans(collecting);
        uint64_t depth = stack->depth < MAX_FRAMES ? stack->depth : MAX_FRAMES;
        phase = current_phase(stack);
        while (depth-- > 0 && *module == 0) {
            uint32_t kind = stack->frames[depth].kind;
            *module = kind == KIND_MODULE || is_forward(kind) ? stack->frames[depth].name_id : 0;
        }
    }
    pthread_mutex_unlock(&lock);
    return phase == KIND_OPTIMIZER ? PASS_OPTIMIZER : phase == KIND_BACKWARD ? PASS_BACKWARD : PASS_FORWARD;
}

CollectiveMarks collective_marks = {
    .version = COLLECTIVE_MARKS_VERSION,
    .issue = issue,
    .returned = returned,
    .completed = completed,
    .wait_began = wait_began,
    .wait_ended = wait_ended,
    .claim = parts_claim,
    .part_over = parts_over,
    .part_began = parts_began,
    .pass_on = pass_on,
    .place = place,
    .failed = failed,
};

/* Whether collectives are recorded there. With the GIL. */
int collective_records(const Recorder *recorder)
{
    return recorder == collecting;
}

/* start_collectives(wait_name_id): from here on collectives are recorded here. */
PyObject *recorder_start_collectives(Recorder *self, PyObject *name_id)
{
    unsigned long value = PyLong_AsUnsignedLong(name_id);
    if (value == (unsigned long)-1 && PyErr_Occurred()) {
        return NULL;
    }
    Recorder *before = NULL;
    collective_lock();
    wait_name_id = (uint32_t)value;
    if (self->header != NULL) {
        before = collecting;
        Py_INCREF(self);
        collecting = self;
        wants_gil = self->nvtx_push != NULL || self->device_wait_began != NULL;
        self->shared = 1;
        ordinals.step = 0;
        ordinals.count = 0;
        parts_begin();
    }
    pthread_mutex_unlock(&lock);
    Py_XDECREF(before); /* not with the lock: it may be freed */
    Py_RETURN_NONE;
}

/* Before the recorder gets Python functions to call in a wait, and after it has none. Whoever is in a mark without the
 * GIL has left it on return. */
void collective_calls_python(Recorder *self, int calls)
{
    collective_lock();
    if (collecting == self) {
        wants_gil = calls;
    }
    pthread_mutex_unlock(&lock);
}

/* Before the ring file is unmapped: waits for a writer on another thread. With `forked`, in a child process, the thread
 * that held the lock may not exist. */
void collective_release(Recorder *self, int forked)
{
    if (forked) {
        lock = (pthread_mutex_t)PTHREAD_RECURSIVE_MUTEX_INITIALIZER_NP;
    }
    collective_lock();
    int collects = collecting == self;
    if (collects) {
        if (self->header != NULL && !forked) {
            write_without_end(waited_for, MAX_WAITED_FOR);
            write_without_end(pending, MAX_PENDING);
            parts_end();
        }
        collecting = NULL;
        wants_gil = 0;
    }
    self->header = NULL;
    pthread_mutex_unlock(&lock);
    if (collects) {
        Py_DECREF(self); /* its caller has one too */
    }
}
