// Device memory, which is host memory. Tasks keep blocks alive until they have run, even if the host frees them.
#pragma once

#include <ATen/core/Generator.h>
#include <c10/core/Allocator.h>
#include <c10/core/Storage.h>

#include <memory>

namespace device {

constexpr auto TYPE = c10::DeviceType::PrivateUse1;

c10::Allocator *allocator();
c10::Storage storage_on_cpu(const c10::Storage &on_device);   // Shares the memory.
void resize_storage(c10::StorageImpl &storage, size_t bytes); // Contents are copied in the stream.
at::Generator generator_on_cpu();                             // Draws for the device on the streams' threads.
bool is_pinned(const void *address);
void raise_failure(); // Throws the error of a task.

} // namespace device
