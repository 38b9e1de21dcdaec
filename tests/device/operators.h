// Operators as tasks of a stream.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>

namespace device {

at::Tensor on_cpu(const at::Tensor &tensor); // A CPU tensor with the same memory, for a task.
void launch(std::function<void()> compute);  // Issues a kernel with the usual duration to the current stream.

} // namespace device
