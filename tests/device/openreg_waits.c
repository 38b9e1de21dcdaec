// Counts how often the host waits for OpenReg, the device of torch_openreg. Loaded with LD_PRELOAD.
//
// A wait for a stream records an event and waits for it. A wait for the device waits for each stream. Such waits count
// more than once.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>

static _Atomic long waits;

long openreg_waits(void)
{
    return waits;
}

// Python loads the library for itself alone: RTLD_NEXT would not find it.
static void *original(const char *name)
{
    void *library = dlopen("libopenreg.so", RTLD_LAZY | RTLD_NOLOAD);
    void *function = library == NULL ? NULL : dlsym(library, name);
    if (function == NULL)
        abort();
    return function;
}

int orDeviceSynchronize(void)
{
    ++waits;
    return ((int (*)(void))original("orDeviceSynchronize"))();
}

int orStreamSynchronize(void *stream)
{
    ++waits;
    return ((int (*)(void *))original("orStreamSynchronize"))(stream);
}

int orEventSynchronize(void *event)
{
    ++waits;
    return ((int (*)(void *))original("orEventSynchronize"))(event);
}
