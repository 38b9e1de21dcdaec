/* Make system calls fail, or never return. Loaded with LD_PRELOAD, so real code paths run without mocks.
 *
 * In the process, by ctypes: arm(paths, nth, error) makes the nth call on one of these paths fail (failing_calls.py).
 * In the process and its children, by the environment: calls on FAILING_PATHS fail with the errno FAILING_WITH. If
 * FAILING_WITH is "hang", they do not return. If FAILING_WHILE is set, both last only as long as this file exists.
 * Each affected call adds a line with the process's id to the file FAILING_LOG.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/vfs.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
#include <dirent.h>

enum { EACH = -1, MAX_PATHS = 4096 };

static char armed_paths[MAX_PATHS], first_call[512];
static long armed_nth, seen;
static int armed_error, armed;

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

/* `paths` are prefixes joined by ':', or "*" for all calls. `nth` counts from 1. 0: no call, -1: each call. */
void arm(const char *paths, long nth, int error)
{
    snprintf(armed_paths, sizeof armed_paths, "%s", paths);
    first_call[0] = 0;
    armed_nth = nth;
    armed_error = error;
    seen = 0;
    armed = 1;
}

/* Return the number of calls since arm(). */
long counted(void)
{
    return seen;
}

long disarm(void)
{
    armed = 0;
    return seen;
}

/* Return the failed call as "name path". */
const char *failed_call(void)
{
    return first_call;
}

static int matches(const char *prefixes, const char *path)
{
    while (*prefixes) {
        size_t length = strcspn(prefixes, ":");
        if ((length == 1 && *prefixes == '*') || (length && path && strncmp(path, prefixes, length) == 0)) {
            return 1;
        }
        prefixes += length + (prefixes[length] == ':');
    }
    return 0;
}

static int there(const char *path)
{
    return syscall(SYS_faccessat, AT_FDCWD, path, F_OK) == 0;
}

/* Block like a disk whose server is gone: only SIGKILL, or the server's return, ends the call. */
static int hang(const char *while_there)
{
    while (!while_there || there(while_there)) {
        struct timespec moment = {0, 10000000};
        syscall(SYS_nanosleep, &moment, NULL);
    }
    return 0;
}

static int fail(int error)
{
    errno = error;
    return 1;
}

/* Return true and set errno if this call must fail. */
static int fails(const char *name, const char *path)
{
    if (armed && matches(armed_paths, path)) {
        ++seen;
        if (seen == armed_nth || armed_nth == EACH) {
            snprintf(first_call, sizeof first_call, "%s %s", name, path ? path : "");
            return fail(armed_error);
        }
    }
    const char *paths = getenv("FAILING_PATHS"), *log = getenv("FAILING_LOG");
    if (paths && matches(paths, path)) {
        const char *with = getenv("FAILING_WITH"), *while_there = getenv("FAILING_WHILE");
        if (log) {
            char line[1024];
            int length = snprintf(line, sizeof line, "%d %s %s\n", getpid(), name, path ? path : "");
            int file = (int)syscall(SYS_openat, AT_FDCWD, log, O_WRONLY | O_APPEND | O_CREAT, 0600);
            syscall(SYS_write, file, line, length);
            syscall(SYS_close, file);
        }
        if (with && (!while_there || there(while_there))) {
            return strcmp(with, "hang") == 0 ? hang(while_there) : fail(atoi(with));
        }
    }
    return 0;
}

/* Return the path of an open file, for calls on descriptors and relative to them. */
static const char *path_of(int descriptor, const char *path, char *buffer, size_t size)
{
    char link[64];
    if (path && path[0] == '/') {
        return path;
    }
    if (descriptor == AT_FDCWD) {
        ssize_t length = syscall(SYS_getcwd, buffer, size);
        if (length > 0) {
            snprintf(buffer + length - 1, size - length, "/%s", path ? path : "");
        }
        return length > 0 ? buffer : path;
    }
    snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
    ssize_t length = syscall(SYS_readlinkat, AT_FDCWD, link, buffer, size - 1);
    if (length < 0) {
        return path;
    }
    buffer[length] = 0;
    if (path && *path) {
        snprintf(buffer + length, size - length, "/%s", path);
    }
    return buffer;
}

#define AT(descriptor, path) path_of(descriptor, path, buffer, sizeof buffer)
#define BUFFER char buffer[4096]

#define PATH_CALL(type, name, error, parameters, arguments) \
    type name parameters \
    { \
        BUFFER; \
        return fails(#name, AT(AT_FDCWD, path)) ? error : REAL(name) arguments; \
    }
#define AT_CALL(type, name, error, parameters, arguments) \
    type name parameters \
    { \
        BUFFER; \
        return fails(#name, AT(descriptor, path)) ? error : REAL(name) arguments; \
    }

#define MODE_OF(flags, mode) \
    mode_t mode = 0; \
    if (flags & (O_CREAT | __O_TMPFILE)) { \
        va_list list; \
        va_start(list, flags); \
        mode = va_arg(list, mode_t); \
        va_end(list); \
    }
#define OPEN_CALL(name) \
    int name(const char *path, int flags, ...) \
    { \
        BUFFER; \
        MODE_OF(flags, mode) \
        return fails(#name, AT(AT_FDCWD, path)) ? -1 : REAL(name)(path, flags, mode); \
    }
#define OPENAT_CALL(name) \
    int name(int descriptor, const char *path, int flags, ...) \
    { \
        BUFFER; \
        MODE_OF(flags, mode) \
        return fails(#name, AT(descriptor, path)) ? -1 : REAL(name)(descriptor, path, flags, mode); \
    }

OPEN_CALL(open)
OPEN_CALL(open64)
OPENAT_CALL(openat)
OPENAT_CALL(openat64)
PATH_CALL(int, mkdir, -1, (const char *path, mode_t mode), (path, mode))
AT_CALL(int, mkdirat, -1, (int descriptor, const char *path, mode_t mode), (descriptor, path, mode))
PATH_CALL(int, unlink, -1, (const char *path), (path))
AT_CALL(int, unlinkat, -1, (int descriptor, const char *path, int flags), (descriptor, path, flags))
PATH_CALL(int, rmdir, -1, (const char *path), (path))
PATH_CALL(int, access, -1, (const char *path, int mode), (path, mode))
AT_CALL(int, faccessat, -1, (int descriptor, const char *path, int mode, int flags), (descriptor, path, mode, flags))
PATH_CALL(int, stat, -1, (const char *path, struct stat *found), (path, found))
PATH_CALL(int, stat64, -1, (const char *path, struct stat64 *found), (path, found))
PATH_CALL(int, lstat, -1, (const char *path, struct stat *found), (path, found))
PATH_CALL(int, lstat64, -1, (const char *path, struct stat64 *found), (path, found))
AT_CALL(int, fstatat, -1, (int descriptor, const char *path, struct stat *found, int flags),
        (descriptor, path, found, flags))
AT_CALL(int, fstatat64, -1, (int descriptor, const char *path, struct stat64 *found, int flags),
        (descriptor, path, found, flags))
PATH_CALL(int, statfs, -1, (const char *path, struct statfs *found), (path, found))
PATH_CALL(int, statvfs, -1, (const char *path, struct statvfs *found), (path, found))
PATH_CALL(int, statvfs64, -1, (const char *path, struct statvfs64 *found), (path, found))
PATH_CALL(ssize_t, readlink, -1, (const char *path, char *text, size_t size), (path, text, size))
AT_CALL(ssize_t, readlinkat, -1, (int descriptor, const char *path, char *text, size_t size),
        (descriptor, path, text, size))
PATH_CALL(DIR *, opendir, NULL, (const char *path), (path))

int symlink(const char *target, const char *path)
{
    BUFFER;
    return fails("symlink", AT(AT_FDCWD, path)) ? -1 : REAL(symlink)(target, path);
}

int symlinkat(const char *target, int descriptor, const char *path)
{
    BUFFER;
    return fails("symlinkat", AT(descriptor, path)) ? -1 : REAL(symlinkat)(target, descriptor, path);
}

int rename(const char *from, const char *path)
{
    BUFFER;
    return fails("rename", AT(AT_FDCWD, path)) ? -1 : REAL(rename)(from, path);
}

#define FALLOCATE(name, offset_type) \
    int name(int descriptor, offset_type offset, offset_type size) \
    { \
        BUFFER; \
        return fails(#name, AT(descriptor, "")) ? errno : REAL(name)(descriptor, offset, size); \
    }
FALLOCATE(posix_fallocate, off_t)
FALLOCATE(posix_fallocate64, off64_t)

#define MMAP(name, offset_type) \
    void *name(void *address, size_t size, int protection, int flags, int descriptor, offset_type offset) \
    { \
        BUFFER; \
        if (descriptor >= 0 && fails(#name, AT(descriptor, ""))) { \
            return MAP_FAILED; \
        } \
        return (void *)syscall(SYS_mmap, address, size, protection, flags, descriptor, offset); \
    }
MMAP(mmap, off_t)
MMAP(mmap64, off64_t)

int flock(int descriptor, int operation)
{
    BUFFER;
    return fails("flock", AT(descriptor, "")) ? -1 : REAL(flock)(descriptor, operation);
}

ssize_t write(int descriptor, const void *data, size_t size)
{
    BUFFER;
    return fails("write", AT(descriptor, "")) ? -1 : (ssize_t)REAL(write)(descriptor, data, size);
}

ssize_t read(int descriptor, void *data, size_t size)
{
    BUFFER;
    return fails("read", AT(descriptor, "")) ? -1 : (ssize_t)REAL(read)(descriptor, data, size);
}

/* These calls have no path. They are counted if the paths are "*" or contain their name. */
char *getcwd(char *text, size_t size)
{
    return fails("getcwd", "getcwd") ? NULL : REAL(getcwd)(text, size);
}

int gethostname(char *text, size_t size)
{
    return fails("gethostname", "gethostname") ? -1 : REAL(gethostname)(text, size);
}

int memfd_create(const char *name, unsigned flags)
{
    return fails("memfd_create", "memfd_create") ? -1 : REAL(memfd_create)(name, flags);
}

int fsync(int descriptor)
{
    BUFFER;
    return fails("fsync", AT(descriptor, "")) ? -1 : REAL(fsync)(descriptor);
}

int pipe2(int ends[2], int flags)
{
    return fails("pipe2", "pipe2") ? -1 : REAL(pipe2)(ends, flags);
}

pid_t fork(void)
{
    return fails("fork", "fork") ? -1 : REAL(fork)();
}

/* A wrapper of vfork() would return twice in one frame, so use fork(), which costs more and does the same. */
pid_t vfork(void)
{
    return fails("fork", "fork") ? -1 : REAL(fork)();
}
