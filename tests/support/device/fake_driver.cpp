/* A CUDA driver without a GPU, for tests: runs the project's kernels on the CPU, under a device clock that only tests
 * move.
 *
 * A stream is a queue. Work starts when it is its turn, its events have happened and the device clock has come to where
 * the work before it ended; the clock stands still until the test lets time pass or somebody synchronizes. So "not ready
 * yet", waits between streams, capture and replay are what they are on a device, and every synchronization is counted.
 */
#include <dlfcn.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

namespace {

using Nanoseconds = uint64_t;
constexpr size_t MAX_BYTES = 1ull << 32;
enum Result { SUCCESS = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, INVALID_HANDLE = 400, NOT_READY = 600, CAPTURE_UNSUPPORTED = 900, UNKNOWN = 999 };
constexpr unsigned EVENT_DISABLE_TIMING = 2, CAPTURE_ACTIVE = 1;
constexpr Nanoseconds LAUNCH_NS = 1500, KERNEL_NS = 1000, EVENT_NS = 500, COPY_NS = 2000;

struct Event {
    bool timed = true;
    uintptr_t context = 0;
    bool happened = false;
    Nanoseconds at = 0;
    uint64_t generation = 0; /* number of its records, of which only the newest is valid */
};

/* Return the end of the work for its earliest start, or false while it must wait for another stream. */
using Work = std::function<bool(Nanoseconds start, Nanoseconds *end)>;

struct Graph {
    std::vector<Work> nodes;
};

struct Stream {
    std::deque<std::pair<Nanoseconds, Work>> queue; /* with the time at which it was enqueued */
    Nanoseconds idle_since = 0;
    Graph *capturing = nullptr;
};

Stream default_stream;
std::vector<Stream *> streams{&default_stream};
Nanoseconds now = 1000000, kernel_time;
uint64_t synchronizations, live_bytes;
std::map<std::string, uint64_t> calls;
std::map<uint64_t, size_t> allocations;
int (*run_kernel)(const char *, unsigned, unsigned, size_t, void **, unsigned);
int (*kernel_arguments)(const char *, size_t *, int);

Stream *stream_of(void *handle)
{
    return handle == nullptr ? &default_stream : static_cast<Stream *>(handle);
}

/* Always run the work that starts first, so that streams access memory in the order of time. */
bool run_first(Nanoseconds limit)
{
    std::vector<std::pair<Nanoseconds, Stream *>> ready;
    for (Stream *stream : streams) {
        if (!stream->queue.empty()) {
            ready.emplace_back(std::max(stream->idle_since, stream->queue.front().first), stream);
        }
    }
    std::stable_sort(ready.begin(), ready.end(), [](auto &a, auto &b) { return a.first < b.first; });
    for (auto &[start, stream] : ready) {
        Nanoseconds end = start;
        if (start <= limit && stream->queue.front().second(start, &end)) {
            stream->idle_since = end;
            stream->queue.pop_front();
            return true;
        }
    }
    return false;
}

void run_until(Nanoseconds limit)
{
    while (run_first(limit)) {
    }
}

void synchronize()
{
    synchronizations++;
    run_until(UINT64_MAX);
    for (Stream *stream : streams) {
        now = std::max(now, stream->idle_since);
    }
}

int enqueue(Stream *stream, Work work)
{
    if (stream->capturing != nullptr) {
        stream->capturing->nodes.push_back(std::move(work));
    } else {
        stream->queue.emplace_back(now, std::move(work));
    }
    return SUCCESS;
}

double drift;              /* seconds that the device's clock gains each second */
std::string failing;       /* the function that fails */
unsigned record_takes_us;  /* as with a full queue */
uintptr_t context = 1;     /* the current one */
int capture_mode;          /* of the thread: 0 global, 2 relaxed */

/* Return true if a device query would end a capture of this thread, or another thread's in global mode. */
bool refused()
{
    return capture_mode == 0 && std::any_of(streams.begin(), streams.end(), [](Stream *stream) { return stream->capturing != nullptr; });
}

uint64_t device_clock_ns()
{
    return kernel_time;
}

void load_kernels()
{
    if (run_kernel != nullptr) {
        return;
    }
    void *library = dlopen(getenv("FAKE_DRIVER_KERNELS"), RTLD_NOW);
    if (library == nullptr) {
        fprintf(stderr, "fake driver: %s\n", dlerror());
        abort();
    }
    run_kernel = reinterpret_cast<decltype(run_kernel)>(dlsym(library, "shim_launch"));
    kernel_arguments = reinterpret_cast<decltype(kernel_arguments)>(dlsym(library, "shim_arguments"));
    reinterpret_cast<void (*)(uint64_t (*)())>(dlsym(library, "shim_set_clock"))(device_clock_ns);
}

/* Copy the arguments at the launch, as a driver does. */
Work kernel_work(const std::string &name, unsigned grid, unsigned threads, size_t shared_bytes, void **arguments)
{
    size_t sizes[16];
    const int count = kernel_arguments(name.c_str(), sizes, 16);
    auto values = std::make_shared<std::vector<uint64_t>>(static_cast<size_t>(count));
    for (int i = 0; i < count; i++) {
        memcpy(&(*values)[static_cast<size_t>(i)], arguments[i], sizes[i]);
    }
    return [=](Nanoseconds start, Nanoseconds *end) {
        kernel_time = start + LAUNCH_NS;
        std::vector<void *> pointers;
        for (uint64_t &value : *values) {
            pointers.push_back(&value);
        }
        if (run_kernel(name.c_str(), grid, threads, shared_bytes, pointers.data(), 0) != 0) {
            abort();
        }
        *end = kernel_time + (name == "spin" ? values->at(0) : KERNEL_NS);
        return true;
    };
}

}  // namespace

#define API extern "C" __attribute__((visibility("default")))
#define COUNT calls[__func__]++

API int cuModuleLoadData(void **module, const void *)
{
    COUNT;
    load_kernels();
    *module = &default_stream;
    return SUCCESS;
}

API int cuModuleGetFunction(void **function, void *, const char *name)
{
    COUNT;
    load_kernels();
    if (kernel_arguments(name, nullptr, 0) < 0) {
        return INVALID_VALUE;
    }
    *function = strdup(name);
    return SUCCESS;
}

API int cuMemAlloc_v2(uint64_t *address, size_t bytes)
{
    COUNT;
    if (bytes > MAX_BYTES) {
        return OUT_OF_MEMORY;
    }
    void *memory = aligned_alloc(256, (bytes + 255) / 256 * 256);
    memset(memory, 0xCD, bytes);
    *address = reinterpret_cast<uint64_t>(memory);
    allocations[*address] = bytes;
    live_bytes += bytes;
    return SUCCESS;
}

API int cuMemFree_v2(uint64_t address)
{
    COUNT;
    synchronizations++; /* as the real one may */
    live_bytes -= allocations[address];
    allocations.erase(address);
    free(reinterpret_cast<void *>(address));
    return SUCCESS;
}

API int cuMemAllocHost_v2(void **address, size_t bytes)
{
    COUNT;
    *address = calloc(1, bytes);
    return SUCCESS;
}

API int cuMemFreeHost(void *address)
{
    COUNT;
    free(address);
    return SUCCESS;
}

API int cuMemcpyDtoHAsync_v2(void *to, uint64_t from, size_t bytes, void *stream)
{
    COUNT;
    return enqueue(stream_of(stream), [=](Nanoseconds start, Nanoseconds *end) {
        memcpy(to, reinterpret_cast<void *>(from), bytes);
        *end = start + COPY_NS + bytes / 25;
        return true;
    });
}

API int cuMemcpyHtoDAsync_v2(uint64_t to, const void *from, size_t bytes, void *stream)
{
    COUNT;
    std::string copied(static_cast<const char *>(from), bytes);
    return enqueue(stream_of(stream), [=](Nanoseconds start, Nanoseconds *end) {
        memcpy(reinterpret_cast<void *>(to), copied.data(), copied.size());
        *end = start + COPY_NS;
        return true;
    });
}

API int cuMemcpyDtoDAsync_v2(uint64_t to, uint64_t from, size_t bytes, void *stream)
{
    COUNT;
    return enqueue(stream_of(stream), [=](Nanoseconds start, Nanoseconds *end) {
        memcpy(reinterpret_cast<void *>(to), reinterpret_cast<void *>(from), bytes);
        *end = start + KERNEL_NS;
        return true;
    });
}

API int cuThreadExchangeStreamCaptureMode(int *mode)
{
    COUNT;
    std::swap(*mode, capture_mode);
    return SUCCESS;
}

API int cuMemsetD8Async(uint64_t at, unsigned char value, size_t bytes, void *stream)
{
    COUNT;
    return enqueue(stream_of(stream), [=](Nanoseconds start, Nanoseconds *end) {
        memset(reinterpret_cast<void *>(at), value, bytes);
        *end = start + KERNEL_NS;
        return true;
    });
}

API int cuStreamCreate(void **stream, unsigned)
{
    COUNT;
    streams.push_back(new Stream);
    *stream = streams.back();
    return SUCCESS;
}

API int cuStreamIsCapturing(void *stream, int *status)
{
    COUNT;
    *status = stream_of(stream)->capturing != nullptr ? CAPTURE_ACTIVE : 0;
    return failing == __func__ ? UNKNOWN : SUCCESS;
}

API int cuStreamDestroy_v2(void *)
{
    COUNT;
    return SUCCESS; /* leaked: its queue is empty */
}

API int cuStreamSynchronize(void *handle)
{
    COUNT;
    synchronizations++;
    Stream *stream = stream_of(handle);
    while (!stream->queue.empty()) { /* other streams continue meanwhile */
        now = std::max(now + 1, std::max(stream->idle_since, stream->queue.front().first));
        run_until(now);
    }
    now = std::max(now, stream->idle_since);
    return SUCCESS;
}

API int cuCtxSynchronize()
{
    COUNT;
    synchronize();
    return SUCCESS;
}

API int cuEventCreate(void **event, unsigned flags)
{
    COUNT;
    *event = new Event{(flags & EVENT_DISABLE_TIMING) == 0, context};
    return failing == __func__ ? UNKNOWN : SUCCESS;
}

API int cuCtxGetCurrent(void **current)
{
    *current = reinterpret_cast<void *>(context);
    return SUCCESS;
}

API int cuCtxSetCurrent(void *current)
{
    context = reinterpret_cast<uintptr_t>(current);
    return SUCCESS;
}

API int cuEventDestroy_v2(void *)
{
    COUNT;
    return SUCCESS; /* leaked: streams may hold it */
}

API int cuEventRecord(void *handle, void *stream_handle)
{
    COUNT;
    auto *event = static_cast<Event *>(handle);
    Stream *stream = stream_of(stream_handle);
    if (failing == __func__) {
        return UNKNOWN;
    }
    if (event->context != context) {
        return INVALID_HANDLE;
    }
    if (record_takes_us < 1000) { /* a sleep would take longer */
        const clock_t until = clock() + record_takes_us;
        while (record_takes_us > 0 && clock() < until) {
        }
    } else {
        usleep(record_takes_us);
    }
    if (stream->capturing != nullptr) {
        return SUCCESS; /* an edge of the graph, which never happens outside it */
    }
    const uint64_t generation = ++event->generation;
    event->happened = false;
    return enqueue(stream, [=](Nanoseconds start, Nanoseconds *end) {
        *end = start + EVENT_NS;
        if (generation == event->generation) {
            event->happened = true;
            event->at = *end;
        }
        return true;
    });
}

API int cuEventQuery(void *handle)
{
    COUNT;
    if (refused()) {
        return CAPTURE_UNSUPPORTED; /* and the capture would be lost */
    }
    run_until(now);
    auto *event = static_cast<Event *>(handle);
    return event->generation == 0 || (event->happened && event->at <= now) ? SUCCESS : NOT_READY;
}

API int cuEventSynchronize(void *)
{
    COUNT;
    synchronize();
    return SUCCESS;
}

API int cuEventElapsedTime(float *milliseconds, void *from_handle, void *to_handle)
{
    COUNT;
    auto *from = static_cast<Event *>(from_handle), *to = static_cast<Event *>(to_handle);
    if (refused()) {
        return CAPTURE_UNSUPPORTED;
    }
    if (!from->timed || !to->timed || from->generation == 0 || to->generation == 0) {
        return INVALID_VALUE;
    }
    run_until(now);
    if (!from->happened || !to->happened || from->at > now || to->at > now) {
        return NOT_READY;
    }
    *milliseconds = static_cast<float>(static_cast<double>(static_cast<int64_t>(to->at - from->at)) * (1 + drift) * 1e-6);
    return SUCCESS;
}

API int cuStreamWaitEvent(void *stream, void *handle, unsigned)
{
    COUNT;
    auto *event = static_cast<Event *>(handle);
    const uint64_t generation = event->generation;
    return enqueue(stream_of(stream), [=](Nanoseconds start, Nanoseconds *end) {
        if (generation == event->generation && generation > 0 && !event->happened) {
            return false;
        }
        *end = generation == event->generation ? std::max(start, event->at) : start;
        return true;
    });
}

API int cuLaunchKernel(void *function, unsigned grid, unsigned, unsigned, unsigned threads, unsigned, unsigned,
                       unsigned shared_bytes, void *stream, void **arguments, void **)
{
    COUNT;
    return enqueue(stream_of(stream),
                   kernel_work(static_cast<char *>(function), grid, threads, shared_bytes, arguments));
}

API int cuStreamBeginCapture_v2(void *stream, int)
{
    COUNT;
    stream_of(stream)->capturing = new Graph;
    return SUCCESS;
}

API int cuStreamEndCapture(void *stream, void **graph)
{
    COUNT;
    *graph = stream_of(stream)->capturing;
    stream_of(stream)->capturing = nullptr;
    return SUCCESS;
}

API int cuGraphLaunch(void *graph, void *stream)
{
    COUNT;
    for (const Work &node : static_cast<Graph *>(graph)->nodes) {
        enqueue(stream_of(stream), node);
    }
    return SUCCESS;
}

/* For tests. */
API void fake_advance(uint64_t duration_ns)
{
    now += duration_ns;
    run_until(now);
}

API void fake_set_drift(double gained)
{
    drift = gained;
}

API void fake_fail(const char *function)
{
    failing = function;
}

API void fake_slow_records(unsigned microseconds)
{
    record_takes_us = microseconds;
}

API uint64_t fake_now_ns()
{
    return now;
}

API uint64_t fake_synchronizations()
{
    return synchronizations;
}

API uint64_t fake_device_bytes()
{
    return live_bytes;
}

API uint64_t fake_calls(const char *name)
{
    return calls[name];
}
