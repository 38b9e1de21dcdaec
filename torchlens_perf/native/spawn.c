/* Starts processes of this package so that the program does not notice: its SIGCHLD handler is not called, and its
 * wait() does not return them. A child that has called exec() sends SIGCHLD when it ends, so a second process, which
 * sends no signal and ends at once, starts the third one. run/children.py has the rules for what is started. */
#include "recorder.h"

#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

enum { STACK_BYTES = 1 << 16, MAX_KEPT = 8, STREAMS = 3 };

typedef struct {
    char **arguments, **environment;
    int streams[STREAMS], kept[MAX_KEPT], kept_count;
    char *stack_end; /* of the process that calls exec() */
    pid_t pid;
    int error;
} Order;

static void reset_signals(void)
{
    for (int number = 1; number < NSIG; number++) {
        /* The terminal's signals are for the program. */
        signal(number, number == SIGINT || number == SIGQUIT ? SIG_IGN : SIG_DFL);
    }
    sigset_t none;
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, NULL);
}

/* Closes all descriptors from `first` to `last`. */
static void close_between(unsigned first, unsigned last)
{
    if (first > last || syscall(SYS_close_range, first, last, 0) == 0) {
        return;
    }
    unsigned end = (unsigned)sysconf(_SC_OPEN_MAX); /* Linux before 5.9 */
    for (unsigned each = first; each <= last && each < end; each++) {
        close((int)each);
    }
}

static int set_descriptors(Order *order)
{
    int above[STREAMS];
    for (int i = 0; i < STREAMS; i++) {
        above[i] = fcntl(order->streams[i], F_DUPFD_CLOEXEC, STREAMS);
        if (above[i] < 0) {
            return -1;
        }
    }
    for (int i = 0; i < STREAMS; i++) {
        if (dup2(above[i], i) < 0) {
            return -1;
        }
    }
    unsigned first = STREAMS;
    for (int i = 0; i < order->kept_count; i++) { /* in ascending order */
        if (fcntl(order->kept[i], F_SETFD, 0) < 0) {
            return -1;
        }
        close_between(first, (unsigned)order->kept[i] - 1);
        first = (unsigned)order->kept[i] + 1;
    }
    close_between(first, ~0U);
    return 0;
}

/* Shares the memory of the calling thread, which waits, until it calls exec(). */
static int run_program(void *argument)
{
    Order *order = argument;
    reset_signals();
    setsid();
    if (set_descriptors(order) == 0 && chdir("/") == 0) {
        execve(order->arguments[0], order->arguments, order->environment);
    }
    order->error = errno;
    _exit(127);
}

static int start_program(void *argument)
{
    Order *order = argument;
    order->pid = clone(run_program, order->stack_end, CLONE_VM | CLONE_VFORK | SIGCHLD, order);
    if (order->pid < 0) {
        order->error = errno;
    }
    _exit(0);
}

static void start(Order *order)
{
    char *stacks = mmap(NULL, 2 * STACK_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_STACK, -1, 0);
    if (stacks == MAP_FAILED) {
        order->error = errno;
        return;
    }
    order->stack_end = stacks + STACK_BYTES;
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before); /* no handler of the program runs in the new processes */
    pid_t between = clone(start_program, stacks + 2 * STACK_BYTES, CLONE_VM | CLONE_VFORK, order);
    if (between < 0) {
        order->error = errno;
    } else {
        while (waitpid(between, NULL, __WALL) < 0 && errno == EINTR) {
        }
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    munmap(stacks, 2 * STACK_BYTES);
}

/* The texts of a list of bytes, which keeps them alive; NULL with an exception set. */
static char **texts_of(PyObject *list)
{
    Py_ssize_t count = PyList_GET_SIZE(list);
    char **texts = PyMem_Calloc((size_t)count + 1, sizeof(char *));
    for (Py_ssize_t i = 0; texts != NULL && i < count; i++) {
        if (PyBytes_AsStringAndSize(PyList_GET_ITEM(list, i), &texts[i], NULL) < 0) {
            PyMem_Free(texts);
            return NULL;
        }
    }
    return texts != NULL ? texts : (char **)PyErr_NoMemory();
}

/* start_process(arguments, environment, streams, kept): lists of bytes, three descriptors, and ascending descriptors that
 * stay open. Returns the pid; 0 where a tool such as Valgrind gives the new process memory of its own. */
PyObject *start_process(PyObject *module, PyObject *args)
{
    Order order = {0};
    PyObject *arguments, *environment, *kept;
    if (!PyArg_ParseTuple(args, "O!O!(iii)O!", &PyList_Type, &arguments, &PyList_Type, &environment, &order.streams[0],
                          &order.streams[1], &order.streams[2], &PyList_Type, &kept)) {
        return NULL;
    }
    order.kept_count = (int)PyList_GET_SIZE(kept);
    if (order.kept_count > MAX_KEPT || PyList_GET_SIZE(arguments) == 0) {
        PyErr_SetString(PyExc_ValueError, "start_process() takes a program, and at most 8 descriptors to keep");
        return NULL;
    }
    for (int i = 0; i < order.kept_count; i++) {
        order.kept[i] = (int)PyLong_AsLong(PyList_GET_ITEM(kept, i));
    }
    order.arguments = PyErr_Occurred() ? NULL : texts_of(arguments);
    order.environment = order.arguments == NULL ? NULL : texts_of(environment);
    if (order.environment != NULL) {
        start(&order);
    }
    PyMem_Free(order.arguments);
    PyMem_Free(order.environment);
    if (PyErr_Occurred()) {
        return NULL;
    }
    if (order.error != 0) {
        errno = order.error;
        return PyErr_SetFromErrno(PyExc_OSError);
    }
    return PyLong_FromLong((long)order.pid);
}
