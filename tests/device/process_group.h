// The device's process group.
#pragma once

#include "streams.h"

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

namespace device {

// The duration of a collective after all ranks have reached it.
extern std::atomic<Ns> latency_ns;
extern std::atomic<double> bytes_per_second;

c10::intrusive_ptr<c10d::Backend> create_process_group(
    const c10::intrusive_ptr<c10d::Store> &store, int rank, int size, double timeout_s);

} // namespace device
