/* CPU time of the training thread in each phase, and the time that it stood ready there without a CPU.
 *
 * Linux adds both up per thread (Documentation/scheduler/sched-stats.rst: /proc/PID/task/TID/schedstat, in ns). They are
 * read where a phase begins or ends: two system calls of about 1 us together. Steps shorter than MIN_STEP_NS, and those with
 * more phases than the duration of the step before allows, are not measured, to keep the cost below a hundredth.
 *
 * Where the work is on a device, a thread of autograd computes the backward pass, and the training thread waits for it.
 * The time that it stood ready counts in that phase too.
 */
#include "recorder.h"

#include <fcntl.h>
#include <stdio.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { READS_PER_MIN_STEP = 64 };
static const int64_t MIN_STEP_NS = 10000000;

/* strtoll() would look at the locale. */
static const char *parse(const char *text, int64_t *value)
{
    *value = 0;
    while (*text >= '0' && *text <= '9') {
        *value = *value * 10 + (*text++ - '0');
    }
    return *text == ' ' ? text + 1 : text;
}

static int is_still_open(const KeptFile *file)
{
    struct stat found;
    return fstat(file->descriptor, &found) == 0 && found.st_dev == file->device && found.st_ino == file->inode;
}

static int read_times(const KeptFile *file, int64_t *cpu_ns, int64_t *ready_ns)
{
    char text[96];
    ssize_t length = is_still_open(file) ? pread(file->descriptor, text, sizeof(text) - 1, 0) : -1;
    if (length <= 0) {
        return -1;
    }
    text[length] = 0;
    parse(parse(text, cpu_ns), ready_ns);
    return 0;
}

static int open_times(KeptFile *file, long thread)
{
    char path[64];
    struct stat found;
    snprintf(path, sizeof(path), "/proc/self/task/%ld/schedstat", thread);
    file->descriptor = open(path, O_RDONLY | O_CLOEXEC);
    if (file->descriptor < 0 || fstat(file->descriptor, &found) < 0) {
        return -1;
    }
    file->device = found.st_dev;
    file->inode = found.st_ino;
    return 0;
}

static void close_times(KeptFile *file)
{
    if (is_still_open(file)) {
        close(file->descriptor);
    }
}

/* On the owner's thread. Returns whether the kernel reports the times. */
int thread_time_start(ThreadTime *times)
{
    times->thread = (long)syscall(SYS_gettid);
    if (open_times(&times->file, times->thread) < 0) {
        return 0;
    }
    times->on = 1;
    if (read_times(&times->file, &times->last_cpu_ns, &times->last_ready_ns) < 0 || times->last_cpu_ns == 0) {
        thread_time_stop(times);
        return 0;
    }
    return 1;
}

static void forget_autograd(ThreadTime *times)
{
    if (times->autograd_thread) {
        times->autograd_thread = 0;
        close_times(&times->autograd_file);
    }
}

/* How long autograd's thread has stood ready since the last call; 0 without one. */
static int64_t autograd_ready_ns(ThreadTime *times)
{
    int64_t cpu_ns, ready_ns, last_ns = times->autograd_ready_ns;
    if (!times->autograd_thread || read_times(&times->autograd_file, &cpu_ns, &ready_ns) < 0) { /* it has ended */
        forget_autograd(times);
        return 0;
    }
    times->autograd_ready_ns = ready_ns;
    return ready_ns - last_ns;
}

/* On a thread that computes a backward pass: from here on, the time that it stands ready is measured too. */
void thread_time_of_autograd(ThreadTime *times)
{
    if (!times->on) {
        return;
    }
    long thread = (long)syscall(SYS_gettid);
    if (thread == times->thread || thread == times->autograd_thread) {
        return;
    }
    forget_autograd(times);
    if (open_times(&times->autograd_file, thread) == 0) {
        times->autograd_thread = thread;
        autograd_ready_ns(times);
    }
}

void thread_time_stop(ThreadTime *times)
{
    times->measured = 0;
    forget_autograd(times);
    if (times->on) {
        times->on = 0;
        close_times(&times->file);
    }
}

/* What has passed since the last call belongs to this phase. */
void thread_time_mark(ThreadTime *times, uint32_t kind)
{
    int64_t cpu_ns, ready_ns;
    if (--times->reads_left < 0 || read_times(&times->file, &cpu_ns, &ready_ns) < 0) {
        times->measured = 0;
        return;
    }
    PhaseTime *phase = &times->phases[times->paused ? KIND_WAIT : kind];
    phase->cpu_ns += cpu_ns - times->last_cpu_ns;
    phase->ready_ns += ready_ns - times->last_ready_ns;
    times->last_cpu_ns = cpu_ns;
    times->last_ready_ns = ready_ns;
    phase->ready_ns += kind == KIND_BACKWARD && !times->paused ? autograd_ready_ns(times) : 0;
}

/* At a step's end, after its last mark. Returns whether `phases` holds the step's times; decides about the next one. */
int thread_time_step(ThreadTime *times, int64_t duration_ns, PhaseTime *phases)
{
    int measured = times->measured;
    memcpy(phases, times->phases, sizeof(times->phases));
    memset(times->phases, 0, sizeof(times->phases));
    times->reads_left = READS_PER_MIN_STEP * (duration_ns / MIN_STEP_NS);
    times->paused = 0;
    int wanted = times->on && duration_ns >= MIN_STEP_NS;
    if (wanted && !measured) {
        wanted = (is_still_open(&times->file) || open_times(&times->file, times->thread) == 0)
                 && read_times(&times->file, &times->last_cpu_ns, &times->last_ready_ns) == 0;
        autograd_ready_ns(times);
    }
    times->measured = wanted;
    return measured;
}
