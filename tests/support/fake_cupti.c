/* CUPTI's callbacks without a device: call the subscriber for the functions that it has enabled. */
#include <stddef.h>
#include <stdint.h>
#include <string.h>

typedef void (*Callback)(void *, int domain, uint32_t number, const void *data);
typedef struct { int site; const char *function; const void *parameters; } Data;

static const char *const names[] = {"", "cuMemAlloc_v2", "cuLaunchKernel", "cudaMalloc_v3020", "cudaStreamSynchronize_v3020"};
enum { FUNCTIONS = 5, DRIVER = 1, RUNTIME = 2, RESOURCE = 3 };
static int first_of(int domain) { return domain == DRIVER ? 1 : 3; }

static Callback callback;
static void *userdata;
static char enabled[4][16];

int cuptiSubscribe(void **subscriber, Callback function, void *data)
{
    if (callback != NULL) {
        return 39; /* there can be only one subscriber */
    }
    callback = function, userdata = data, *subscriber = &callback;
    return 0;
}

int cuptiUnsubscribe(void *subscriber)
{
    if (subscriber != &callback || callback == NULL) {
        return 1;
    }
    callback = NULL;
    memset(enabled, 0, sizeof enabled);
    return 0;
}

int cuptiGetCallbackName(int domain, uint32_t number, const char **name)
{
    if (domain != DRIVER && domain != RUNTIME) {
        return 1;
    }
    int index = first_of(domain) + (int)number - 1;
    if (number < 1 || number > 2 || index >= FUNCTIONS) {
        return 1;
    }
    *name = names[index];
    return 0;
}

int cuptiEnableCallback(uint32_t enable, void *subscriber, int domain, uint32_t number)
{
    if (subscriber != &callback || domain < 1 || domain > 3 || number > 15) {
        return 1;
    }
    enabled[domain][number] = (char)enable;
    return 0;
}

/* Simulate a call of this function. */
void fake_call(int domain, uint32_t number)
{
    if (!enabled[domain][number]) {
        return;
    }
    if (domain == RESOURCE) {
        callback(userdata, domain, number, "not ours");
        return;
    }
    Data data = {0, names[first_of(domain) + number - 1], NULL};
    for (data.site = 0; data.site < 2; data.site++) {
        callback(userdata, domain, number, &data);
    }
}
