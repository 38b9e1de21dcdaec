// Costs of the driver's calls for the host.
#pragma once

#include <atomic>
#include <cstdint>

#define DRIVER_API extern "C" __attribute__((visibility("default"))) int

namespace device {

extern std::atomic<int64_t> record_ns, query_ns, elapsed_ns;

} // namespace device
