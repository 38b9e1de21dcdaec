// Device memory, which is the host's: blocks that tasks keep alive until they have run, whatever the host frees.
#pragma once

#include <ATen/core/Generator.h>
#include <c10/core/Allocator.h>
#include <c10/core/Storage.h>

#include <memory>

namespace device {

constexpr auto TYPE = c10::DeviceType::PrivateUse1;

c10::Allocator *allocator();
c10::Storage storage_on_cpu(const c10::Storage &on_device); // the same memory
void resize_storage(c10::StorageImpl &storage, size_t bytes); // its contents follow in the stream
at::Generator generator_on_cpu();                             // that draws for the device, in the streams' threads
bool is_pinned(const void *address);
void raise_failure(); // throws what a task has met

} // namespace device
