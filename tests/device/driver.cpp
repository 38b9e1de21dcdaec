// The calls of the CUDA driver that torchlens_perf makes for device times, so that tests of whole trainings use the
// same code as a GPU. Their costs for the host are a setting.
#include "driver.h"

#include "streams.h"

#include <memory>

namespace device {

std::atomic<Ns> record_ns{0}, query_ns{0}, elapsed_ns{0};

namespace {

enum Status { SUCCESS = 0, INVALID = 1, NOT_READY = 600 };

struct DriverEvent {
    std::shared_ptr<Moment> moment;
};

// Keeps the host's CPU busy, as a driver does.
void cost(Ns takes)
{
    for (const Ns until = now() + takes; takes > 0 && now() < until;)
        ;
}

DriverEvent &event_of(void *handle) { return *static_cast<DriverEvent *>(handle); }

} // namespace

} // namespace device

using namespace device;

DRIVER_API cuEventCreate(void **event, unsigned)
{
    *event = new DriverEvent();
    return SUCCESS;
}

DRIVER_API cuEventDestroy_v2(void *event)
{
    delete &event_of(event);
    return SUCCESS;
}

DRIVER_API cuEventRecord(void *event, void *stream_handle)
{
    cost(record_ns);
    ++counters.events;
    event_of(event).moment = stream(reinterpret_cast<int64_t>(stream_handle)).record();
    return SUCCESS;
}

DRIVER_API cuEventQuery(void *event)
{
    cost(query_ns);
    ++counters.event_queries;
    const auto &moment = event_of(event).moment;
    return !moment || moment->reached() ? SUCCESS : NOT_READY;
}

DRIVER_API cuEventElapsedTime(float *milliseconds, void *begin, void *end)
{
    cost(elapsed_ns);
    const auto &first = event_of(begin).moment, &last = event_of(end).moment;
    if (!first || !last)
        return INVALID;
    if (!first->reached() || !last->reached())
        return NOT_READY;
    *milliseconds = float(double(last->time() - first->time()) * 1e-6);
    return SUCCESS;
}

DRIVER_API cuStreamIsCapturing(void *stream_handle, int *status)
{
    *status = stream(reinterpret_cast<int64_t>(stream_handle)).capturing();
    return SUCCESS;
}

DRIVER_API cuThreadExchangeStreamCaptureMode(int *) { return SUCCESS; }
