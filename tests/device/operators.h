// Operators as tasks of a stream.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>

namespace device {

at::Tensor on_cpu(const at::Tensor &tensor); // the same memory, for a task to compute on; of the CPU: itself
void launch(std::function<void()> compute);  // a kernel on the current stream, which takes a kernel's time

} // namespace device
