/* CPU time of the training thread, and the time that it stood ready without a CPU, in its own work alone.
 *
 * Linux adds both up per thread (Documentation/scheduler/sched-stats.rst: /proc/PID/task/TID/schedstat, in ns). They are
 * read at a step's end and around waits for other ranks: one system call each. Steps shorter than LEAST_STEP_NS, and
 * those with very many waits, are not measured, to keep the cost below a thousandth.
 */
#include "recorder.h"

#include <fcntl.h>
#include <stdio.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { MOST_READS = 32 };
static const int64_t LEAST_STEP_NS = 10000000;

/* strtoll() would look at the locale. */
static const char *parse(const char *text, int64_t *value)
{
    *value = 0;
    while (*text >= '0' && *text <= '9') {
        *value = *value * 10 + (*text++ - '0');
    }
    return *text == ' ' ? text + 1 : text;
}

static int read_times(ThreadTime *times, int64_t *cpu_ns, int64_t *ready_ns)
{
    char text[96];
    ssize_t length = pread(times->descriptor, text, sizeof(text) - 1, 0);
    if (length <= 0) {
        return -1;
    }
    text[length] = 0;
    parse(parse(text, cpu_ns), ready_ns);
    return 0;
}

/* On the owner's thread. Returns whether the kernel tells. */
int thread_time_start(ThreadTime *times)
{
    char path[64];
    snprintf(path, sizeof(path), "/proc/self/task/%ld/schedstat", (long)syscall(SYS_gettid));
    times->descriptor = open(path, O_RDONLY | O_CLOEXEC);
    if (times->descriptor < 0) {
        return 0;
    }
    times->on = 1;
    times->measured = 0;
    if (read_times(times, &times->cpu_ns, &times->ready_ns) < 0 || times->cpu_ns == 0) {
        thread_time_stop(times);
        return 0;
    }
    return 1;
}

void thread_time_stop(ThreadTime *times)
{
    if (times->on) {
        times->on = 0;
        close(times->descriptor);
    }
}

void thread_time_wait_began(ThreadTime *times)
{
    if (!times->measured || times->waits_open++ > 0) {
        return;
    }
    if (++times->reads > MOST_READS || read_times(times, &times->wait_cpu_ns, &times->wait_ready_ns) < 0) {
        times->measured = 0;
    }
}

void thread_time_wait_ended(ThreadTime *times)
{
    int64_t cpu_ns, ready_ns;
    if (!times->measured || times->waits_open == 0 || --times->waits_open > 0) {
        return;
    }
    if (read_times(times, &cpu_ns, &ready_ns) < 0) {
        times->measured = 0;
        return;
    }
    times->waited_cpu_ns += cpu_ns - times->wait_cpu_ns;
    times->waited_ready_ns += ready_ns - times->wait_ready_ns;
}

/* At a step's end. Returns whether the step was measured. */
int thread_time_step(ThreadTime *times, int64_t duration_ns, int64_t *cpu_ns, int64_t *ready_ns)
{
    if (!times->on) {
        return 0;
    }
    int measured = times->measured && times->waits_open == 0;
    int wanted = duration_ns >= LEAST_STEP_NS;
    if (measured || wanted) {
        int64_t cpu_now_ns, ready_now_ns;
        if (read_times(times, &cpu_now_ns, &ready_now_ns) < 0) {
            times->measured = 0;
            return 0;
        }
        *cpu_ns = cpu_now_ns - times->cpu_ns - times->waited_cpu_ns;
        *ready_ns = ready_now_ns - times->ready_ns - times->waited_ready_ns;
        times->cpu_ns = cpu_now_ns;
        times->ready_ns = ready_now_ns;
    }
    times->waited_cpu_ns = times->waited_ready_ns = 0;
    times->reads = 0;
    times->waits_open = 0;
    times->measured = wanted;
    return measured;
}
