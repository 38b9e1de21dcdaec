/* CPU time of the training thread in each phase, and the time that it stood ready there without a CPU.
 *
 * Linux adds both up per thread (Documentation/scheduler/sched-stats.rst: /proc/PID/task/TID/schedstat, in ns). They are
 * read where a phase begins or ends: two system calls, which take 1 us, and 5 us once other work has used the caches.
 * Steps shorter than MIN_STEP_NS are not measured, and phases that follow each other within SHARED_NS share a reading, or
 * fewer while the CPU is crowded: share() tells how, and decision 0070 how well.
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

static const int64_t MIN_STEP_NS = 10000000, SHARED_NS = 10000000, SHARED_IF_CROWDED_NS = 500000, CROWDED_NS = 100000000;
enum { CROWDED_SHARE = 50 }; /* it lacked a CPU for more than a 50th of the time */

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

static int read_times(const KeptFile *file, PhaseTime *times)
{
    char text[96];
    ssize_t length = is_still_open(file) ? pread(file->descriptor, text, sizeof(text) - 1, 0) : -1;
    if (length <= 0) {
        return -1;
    }
    text[length] = 0;
    parse(parse(text, &times->cpu_ns), &times->ready_ns);
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
    if (read_times(&times->file, &times->last) < 0 || times->last.cpu_ns == 0) {
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
    PhaseTime now;
    int64_t last_ns = times->autograd_ready_ns;
    if (!times->autograd_thread || read_times(&times->autograd_file, &now) < 0) { /* it has ended */
        forget_autograd(times);
        return 0;
    }
    times->autograd_ready_ns = now.ready_ns;
    return now.ready_ns - last_ns;
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

static void begin_sharing(ThreadTime *times, int64_t now_ns)
{
    times->read_ns = times->marked_ns = now_ns;
    memset(times->wall_ns, 0, sizeof(times->wall_ns));
}

/* Gives the times since the last reading to the phases since then, by their durations. */
static void share(ThreadTime *times, double cpu_ns, double ready_ns)
{
    double whole_ns = (double)(times->marked_ns - times->read_ns);
    for (uint32_t kind = KIND_STEP; kind <= LAST_PHASE && whole_ns > 0; kind++) {
        double part = (double)times->wall_ns[kind] / whole_ns;
        times->phases[kind].cpu_ns += (int64_t)(part * cpu_ns);
        times->phases[kind].ready_ns += (int64_t)(part * ready_ns);
    }
}

/* What has passed since the last call belongs to this phase. After a step's last mark, the next step has its own times. */
void thread_time_mark(ThreadTime *times, uint32_t kind, int is_last)
{
    PhaseTime now, last = times->last;
    int64_t now_ns = host_now();
    kind = times->paused ? KIND_WAIT : kind;
    times->wall_ns[kind] += now_ns - times->marked_ns;
    times->marked_ns = now_ns;
    int64_t since_ns = now_ns - times->read_ns;
    if (since_ns < (now_ns < times->crowded_until_ns ? SHARED_IF_CROWDED_NS : SHARED_NS) && !is_last) {
        return;
    }
    if (read_times(&times->file, &now) < 0) {
        times->measured = 0;
        return;
    }
    times->last = now;
    if ((now.ready_ns - last.ready_ns) * CROWDED_SHARE > since_ns) {
        times->crowded_until_ns = now_ns + CROWDED_NS;
    }
    share(times, (double)(now.cpu_ns - last.cpu_ns), (double)(now.ready_ns - last.ready_ns));
    times->phases[KIND_BACKWARD].ready_ns += times->wall_ns[KIND_BACKWARD] > 0 ? autograd_ready_ns(times) : 0;
    begin_sharing(times, now_ns);
}

/* At a step's end, after its last mark. Returns whether `phases` holds the step's times; decides about the next one. */
int thread_time_step(ThreadTime *times, int64_t duration_ns, PhaseTime *phases)
{
    int measured = times->measured;
    memcpy(phases, times->phases, sizeof(times->phases));
    memset(times->phases, 0, sizeof(times->phases));
    times->paused = 0;
    int wanted = times->on && duration_ns >= MIN_STEP_NS;
    if (wanted && !measured) {
        wanted = (is_still_open(&times->file) || open_times(&times->file, times->thread) == 0)
                 && read_times(&times->file, &times->last) == 0;
        autograd_ready_ns(times);
        begin_sharing(times, host_now());
    }
    times->measured = wanted;
    return measured;
}
