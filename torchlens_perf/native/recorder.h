/* The recorder and its marks.
 *
 * Everything here runs with the GIL held, which is the only lock: a mark takes no other, allocates nothing and makes no
 * system call but the clock's vDSO read.
 */
#ifndef TORCHLENS_PERF_RECORDER_H
#define TORCHLENS_PERF_RECORDER_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <pthread.h>
#include <stdatomic.h>
#include <sys/types.h>

#include "collective.h"
#include "device_clock.h"
#include "layout.h"
#include "probes.h"

#ifdef Py_GIL_DISABLED
#error "the GIL is the only lock of marks: setup.py builds nothing for a free-threaded Python"
#endif

#define FASTCALL(function) ((PyCFunction)(void (*)(void))(function))

/* See thread_time.c. */
typedef struct {
    int64_t cpu_ns, ready_ns;
} PhaseTime;

/* An open file. The program may close its number and open a file of its own under it. */
typedef struct {
    int descriptor;
    dev_t device;
    ino_t inode;
} KeptFile;

typedef struct {
    int on, measured, paused;
    KeptFile file;
    long thread; /* its native id */
    PhaseTime last;
    int64_t marked_ns, read_ns; /* when a phase began or ended last, and when the kernel's times were read last */
    int64_t crowded_until_ns;   /* other threads wanted this one's CPU a moment ago */
    int64_t wall_ns[LAST_PHASE + 1]; /* in each phase since then, by kind */
    long autograd_thread; /* that of the device, which computes the backward pass; 0: none is known */
    KeptFile autograd_file;
    int64_t autograd_ready_ns;
    PhaseTime phases[LAST_PHASE + 1]; /* by kind; KIND_STEP: outside of all phases */
} ThreadTime;

/* See step_marks.c: what use_torch() is given, in this order, and what settle() is. */
enum {
    OPENED, HIDE, SHOW, TENSOR_TYPE, PARAMETER_TYPE, GRAD_ENABLED, TRACING, GIVEN,
    OPTIMIZER = GIVEN, ENTRIES, PARAMETER, COMPILED, DYNAMO_COUNTERS, TRACING_STATE, KEPT
};

typedef struct {
    int64_t address, version, shard_version; /* 0: there is no gradient */
} Gradient;

typedef struct {
    int settled;          /* not 0: all steps end with kept[OPTIMIZER], and C ends them */
    int by_hand;          /* not 0: all steps end with w.step(), and C ends most: passes without gradients are only noted */
    int busy;             /* callbacks that Python runs at the end of each step */
    int without_gradient; /* not 0: the step has forward passes without gradients */
    int64_t passes_lead;  /* twice the steps that have such passes, minus all steps; from 0 on, such passes are usual */
    unsigned passes_name; /* of such passes, while the loop trains; 0: they have the name of their module */
    int step_open;        /* open calls of kept[OPTIMIZER]'s step, each inside the other; kept[OPENED] does not show them */
    uint64_t opened_at;   /* records written when the outermost of these calls began */
    unsigned optimizer_name;
    int64_t due_ns, due_step; /* from then on, Python ends the step */
    int64_t forward_passes, backward_passes, workload, step_flags, memory_bytes;
    int64_t training_steps, optimizer_steps, returned_steps;
    int64_t quiet_steps; /* that C has ended since Python has last reset this */
    int64_t collection_ns; /* when Python began to collect garbage; 0: it does not */
    int64_t passes;      /* backward passes that the gradient of kept[PARAMETER] is the sum of */
    Gradient gradient;   /* as of the last backward pass */
    int one_pass;        /* the last step had one backward pass: then the gradient is not looked at before a second */
    int unseen;          /* the gradient may have changed since it was looked at */
    PyObject *kept[KEPT];
} StepMarks;

/* See module_call.c. In some steps the calls of modules inside of a forward pass are not timed, so that a recorder keeps
 * to its budget. */
typedef struct {
    int left_out;       /* not 0: in this step, calls are not timed */
    int has_left_out;   /* not 0: in this step, a call was not timed */
    int in_pass;        /* not 0: the owner is in a pass without gradients, inside of which calls are not timed */
    int until_measured; /* calls until the cost of one is measured */
    int64_t mask;       /* one step in mask + 1 has times of modules; 0: all but one in 64; EVERY_STEP: all */
    int64_t calls, steps;                /* timed calls, and steps in which none was left out, since the start */
    int64_t measured_calls, measured_ns; /* those whose cost was measured, and what they cost */
} ModuleBudget;

enum { EVERY_STEP = -1 };

/* What every mark touches comes first, so that a mark with cold caches needs few cache lines. */
typedef struct {
    PyObject_HEAD
    Header *header; /* NULL once closed: every mark is then a no-op */
    Record *records;
    uint64_t mask;
    uintptr_t owner; /* the recorded thread: its open spans are kept in the ring file */
    PyObject *clock; /* NULL: CLOCK_MONOTONIC */
    PyObject *nvtx_push, *nvtx_pop;
    DeviceClock *device_clock; /* NULL: there is none, see device.c */
    uint64_t generation;   /* tells this recorder's names and thread stacks from those of an earlier one */
    int shared;            /* not 0: records are also written without the GIL, see collective.c */
    int sampled;           /* not 0: module calls show their arguments and results to their observers */
    int backwards;         /* open BACKWARD spans of the owner */
    int backwards_elsewhere; /* the same of the user's other threads */
    ModuleBudget modules;
    PyObject *nvtx_attributes;
    PyObject *intern;
    PyObject *device_wait_began, *device_wait_ended, *device_step_ended;
    int64_t device_waits_ns; /* how long marks waited for room in the device's queue, in total */
    struct {
        int left_out;     /* not 0: in this step, the device does not time phases */
        int has_left_out; /* not 0: in this step, a phase was not timed */
        int64_t mask;     /* phases are timed in one step of mask + 1; EVERY_STEP: in all */
        int64_t cost_ns, steps; /* of marks of phases, and steps with all of them, since the start */
        int64_t usual_ns;       /* the last mark that did not wait */
    } device_phases;
    int64_t late_ns;         /* what reading the marks of sampled steps cost later steps, in total */
    int64_t waited_ns; /* how long the owner was blocked in collectives, in total */
    StepMarks marks;
    ThreadTime thread_time;
    int64_t device_marks[MAX_FRAMES]; /* where the owner's open spans began on the device */
    uintptr_t contexts[MAX_FRAMES];   /* in which its open sections were entered, see section.c */
    Py_buffer buffer;
} Recorder;

extern Recorder *active_recorder; /* what sections write to; NULL: they do nothing */
extern PyTypeObject RecorderType, SectionType, ModuleCallType;

Stack *other_thread_spans(Recorder *self);
uintptr_t *section_contexts(Recorder *self, const Stack *stack);
int interrupted(void);
int pass_on(void *function);
PyObject *call_kept(PyObject *function, PyObject *const *args, size_t count);
int64_t injected_clock_ns(Recorder *self);
void nvtx_open(Recorder *self, uint32_t name_id);
void device_open(Recorder *self, uint32_t kind, uint64_t depth);
void device_stall(PyObject *function);
void device_close(Recorder *self, const Frame *frame, uint64_t depth);
PyObject *recorder_set_device_clock(Recorder *self, PyObject *args);
PyObject *recorder_record_completed(Recorder *self, PyObject *const *args, Py_ssize_t count);
PyObject *recorder_queue_device_span(Recorder *self, PyObject *const *args, Py_ssize_t count);
PyObject *recorder_end_device_step(Recorder *self, PyObject *unused);
PyObject *recorder_read_last_device_times(Recorder *self, PyObject *unused);
void device_end_step(Recorder *self, int64_t step, int64_t boundary);
void count_backward(Recorder *self, const Stack *stack, int change);
uint32_t attribute_elsewhere(Recorder *self, Frame *frame, int64_t end_ns);
void spans_drop(Recorder *self, Stack *stack, uint64_t depth);
void span_close_named(Recorder *self, uint32_t kind, uint32_t name_id, int64_t end_ns, uint32_t flags,
                      uint64_t value0, uint64_t value1);
uint32_t kind_of_call(Recorder *self, Stack *stack);
void add_overhead(Recorder *self, int64_t tool_ns);
int read_integers(const char *name, PyObject *const *args, Py_ssize_t count, Py_ssize_t least, Py_ssize_t most,
                  int64_t *values);
int thread_time_start(ThreadTime *times);
void thread_time_stop(ThreadTime *times);
void thread_time_of_autograd(ThreadTime *times);
void thread_time_mark(ThreadTime *times, uint32_t kind, int is_last);
int thread_time_step(ThreadTime *times, int64_t duration_ns, PhaseTime *phases);
PyObject *recorder_start_collectives(Recorder *self, PyObject *name_id);
PyObject *recorder_issue(Recorder *self, PyObject *const *args, Py_ssize_t count);
PyObject *recorder_returned(Recorder *self, PyObject *const *args, Py_ssize_t count);
PyObject *recorder_begin_wait(Recorder *self, PyObject *unused);
PyObject *recorder_end_wait(Recorder *self, PyObject *const *args, Py_ssize_t count);
PyObject *collective_call(PyObject *parts, PyObject *const *args, Py_ssize_t count, PyObject *kwnames);
PyObject *collective_timed_wait(PyObject *module, PyObject *wait);
PyObject *collective_capsule(PyObject *module, PyObject *unused);
extern CollectiveMarks collective_marks;
int collective_records(const Recorder *recorder);
void collective_lock(void);
void collective_unlock(void);
int collective_is_recorded(const Collective *collective);
/* With the lock: its kernel has begun; or nobody tells that of it. Of all groups, nobody tells. */
void collective_began(const Collective *collective, int known);
void collective_begins_unknown(void);
void collective_write(const Collective *collective, int64_t duration_ns, uint32_t flags);
void parts_begin(void);
void parts_end(void);
void parts_issued(const Collective *collective);
int parts_tell(const Collective *collective, enum collective_end end);
uint64_t parts_claim(void);
void parts_began(uint64_t ticket);
int parts_over(uint64_t ticket, uint32_t parts, enum part_time time, int64_t start_ns, int64_t end_ns);
PyObject *recorder_claim(Recorder *self, PyObject *unused);
PyObject *recorder_part_over(Recorder *self, PyObject *const *args, Py_ssize_t count);
PyObject *recorder_lost_ends(Recorder *self, void *unused);
void collective_calls_python(Recorder *self, int calls);
void collective_release(Recorder *self, int forked);
PyObject *section_lookup(PyObject *module, PyObject *name);
PyObject *section_set_decorator(PyObject *module, PyObject *function);
PyObject *module_call_set(PyObject *module, PyObject *const *args, Py_ssize_t count);
PyObject *module_call_observe(PyObject *module, PyObject *function);
PyObject *start_process(PyObject *module, PyObject *args);
PyObject *module_call_route(PyObject *module, PyObject *function);
PyObject *module_call_unroute(PyObject *module, PyObject *function);
int section_setup(PyObject *module);
void write_step(Recorder *self, int64_t end_ns, uint32_t flags, uint64_t value0, uint64_t value1);
int gradients_enabled(Recorder *self);
int count_forward(Recorder *self, int is_timed, int gradients);
PyObject *native_hook(PyObject *module, PyObject *args);
PyObject *recorder_end_step_by_hand(Recorder *self, PyObject *const *args, Py_ssize_t count);
PyObject *recorder_settle(Recorder *self, PyObject *args);
PyObject *recorder_unsettle(Recorder *self, PyObject *unused);
PyObject *recorder_show_open_step(Recorder *self, PyObject *unused);
PyObject *recorder_compare_gradient(Recorder *self, PyObject *ended);
PyObject *recorder_use_torch(Recorder *self, PyObject *args);
int step_marks_setup(void);

static inline int64_t recorder_now(Recorder *self)
{
    return self->clock != NULL ? injected_clock_ns(self) : host_now();
}

/* A point in time without what is charged to this package already, and without waits for room in a device's queue. The
 * difference of two points is what is left to charge. */
static inline int64_t uncharged_ns(Recorder *self, int64_t now_ns)
{
    return now_ns - (int64_t)self->header->tool_ns - self->device_waits_ns;
}

static inline int is_phase(uint32_t kind)
{
    return kind >= KIND_DATA && kind <= LAST_PHASE;
}

static inline int is_forward(uint32_t kind)
{
    return kind == KIND_FORWARD || kind == KIND_RECOMPUTE;
}

/* Names the running thread. The compiler's builtin is one register read, pthread_self() a call through the PLT. */
static inline uintptr_t this_thread(void)
{
#ifndef __has_builtin
#define __has_builtin(builtin) 0
#endif
#if __has_builtin(__builtin_thread_pointer)
    return (uintptr_t)__builtin_thread_pointer();
#else
    return (uintptr_t)pthread_self();
#endif
}

static inline Stack *open_spans(Recorder *self)
{
    return this_thread() == self->owner ? &self->header->stack : other_thread_spans(self);
}

/* A reader sees these stores in this order: slot invalid, its fields, its stamp, the head. With several writers the
 * head goes first, and a reader finds the slot unfinished. */
static inline void write_record_of_step(Recorder *self, const Record *record, uint32_t kind, uint64_t depth,
                                        uint32_t flags)
{
    Header *header = self->header;
    int shared = self->shared;
    uint64_t sequence = shared ? atomic_fetch_add_explicit((_Atomic uint64_t *)&header->head, 1, memory_order_relaxed)
                               : header->head;
    Record *slot = &self->records[sequence & self->mask];
    uint64_t tag = (uint32_t)(sequence + 1) | (uint64_t)kind << 32 | (depth & 0xff) << 40 | (uint64_t)flags << 48;

    atomic_store_explicit((_Atomic uint64_t *)&slot->tag, 0, memory_order_relaxed);
    atomic_thread_fence(memory_order_release);
    slot->name_id = record->name_id;
    slot->step = record->step;
    slot->start_ns = record->start_ns;
    slot->duration_ns = record->duration_ns;
    slot->nested_ns = record->nested_ns;
    slot->phase_ns = record->phase_ns;
    slot->value0 = record->value0;
    slot->value1 = record->value1;
    atomic_store_explicit((_Atomic uint64_t *)&slot->tag, tag, memory_order_release);
    if (!shared) {
        atomic_store_explicit((_Atomic uint64_t *)&header->head, sequence + 1, memory_order_release);
    }
    /* The ring is larger than the caches: the next slot is fetched while the user's code runs. */
    __builtin_prefetch(&self->records[(sequence + 1) & self->mask], 1);
}

/* A record of the step in progress. */
static inline void write_record(Recorder *self, Record *record, uint32_t kind, uint64_t depth, uint32_t flags)
{
    record->step = (uint32_t)self->header->step;
    write_record_of_step(self, record, kind, depth, flags);
}

/* The phase that the owner is in. */
static inline uint32_t current_phase(const Stack *stack)
{
    uint64_t depth = stack->depth < MAX_FRAMES ? stack->depth : MAX_FRAMES;
    while (depth-- > 1) {
        if (is_phase(stack->frames[depth].kind)) {
            return stack->frames[depth].kind;
        }
    }
    return KIND_STEP;
}

/* Returns the depth of the new span. The clock is read last, so that the span does not hold our own work.
 *
 * Where a span is an NVTX range or the device's clock times it, opening and closing set the GIL free, and so another
 * thread, or what is called, may end the watch meanwhile: self->header is NULL then and the stack gone. So the caller has a
 * reference to the recorder, and looks at self->header before it goes on. */
static inline uint64_t span_open(Recorder *self, Stack *stack, uint32_t kind, uint32_t name_id)
{
    uint64_t depth = stack->depth++;
    if (depth >= MAX_FRAMES) {
        return depth;
    }
    if (self->nvtx_push != NULL) {
        nvtx_open(self, name_id);
        if (self->header == NULL) {
            return depth;
        }
    }
    if (self->device_clock != NULL && stack == &self->header->stack) {
        stack->depth = depth; /* what it costs is the span's around it */
        device_open(self, kind, depth);
        if (self->header == NULL) {
            return depth;
        }
        stack->depth = depth + 1;
    }
    if (is_phase(kind) && self->thread_time.measured && stack == &self->header->stack) {
        stack->depth = depth;
        thread_time_mark(&self->thread_time, current_phase(stack), 0);
        stack->depth = depth + 1;
    }
    Frame *frame = &stack->frames[depth];
    frame->nested_ns = 0;
    frame->phase_ns = 0;
    frame->name_id = name_id;
    frame->kind = kind;
    if (kind == KIND_BACKWARD) {
        count_backward(self, stack, 1);
    }
    PROBE_PHASE_BEGIN(kind);
    frame->start_ns = recorder_now(self);
    return depth;
}

/* Gives time to the innermost open span, as time that is not its own. */
static inline void credit(Stack *stack, int64_t nested_ns, int64_t phase_ns)
{
    if (stack->depth > 0 && stack->depth <= MAX_FRAMES) {
        Frame *parent = &stack->frames[stack->depth - 1];
        parent->nested_ns += nested_ns;
        parent->phase_ns += phase_ns;
    }
}

/* Closes the span at `depth`. Spans still open above it lost their end (a raising optimizer, interleaved tasks): they
 * are counted and dropped, so that the stack heals itself. */
static inline void span_close(Recorder *self, Stack *stack, uint64_t depth, int64_t end_ns, uint32_t flags,
                              uint64_t value0, uint64_t value1)
{
    if (stack->depth <= depth) {
        return; /* dropped, and counted, by a span around it */
    }
    if (stack->depth != depth + 1) {
        self->header->unbalanced += stack->depth - depth - 1;
    }
    if (depth >= MAX_FRAMES) {
        stack->depth = depth;
        self->header->too_deep++;
        return;
    }
    Frame frame = stack->frames[depth];
    if (stack->depth == depth + 1 && frame.kind >= KIND_MODULE && self->nvtx_pop == NULL) {
        stack->depth = depth;
    } else {
        spans_drop(self, stack, depth);
        if (self->header == NULL) {
            return;
        }
    }
    int64_t duration_ns = end_ns - frame.start_ns;
    if (is_phase(frame.kind) && self->thread_time.measured && stack == &self->header->stack) {
        thread_time_mark(&self->thread_time, frame.kind, 0);
    }
    if (stack != &self->header->stack) {
        flags |= attribute_elsewhere(self, &frame, end_ns);
    }
    credit(stack, duration_ns, is_phase(frame.kind) ? duration_ns : frame.phase_ns);
    Record record = {
        .name_id = frame.name_id,
        .start_ns = frame.start_ns,
        .duration_ns = duration_ns,
        .nested_ns = frame.nested_ns,
        .phase_ns = frame.phase_ns,
        .value0 = value0,
        .value1 = value1,
    };
    write_record(self, &record, frame.kind, depth, flags);
    PROBE_PHASE_END(frame.kind, duration_ns, record.step);
    if (self->device_clock != NULL && stack == &self->header->stack) {
        device_close(self, &frame, depth);
    }
}

#endif
