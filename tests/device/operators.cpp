// Operators. Shapes come from the meta device at once; the CPU computes values later on a stream's thread.
//
// An operator waits for its stream and computes at once if its shapes depend on values (nonzero, item) or the meta
// device does not support it. These waits are counted, as are those of blocking copies.
#include "operators.h"

#include "memory.h"
#include "shapes.h"
#include "streams.h"

#include <ATen/Functions.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <torch/library.h>


namespace device {

namespace {

void synchronize_for(std::atomic<int64_t> &counter)
{
    ++counter;
    current_stream().synchronize();
    raise_failure();
}

void compute_at_once(const c10::OperatorHandle &op, Stack *stack, const Stack &arguments)
{
    const c10::FunctionSchema &schema = op.schema();
    synchronize_for(counters.operator_synchronizations);
    const c10::Device cpu(c10::DeviceType::CPU);
    Stack on_host, given;
    for (const IValue &each : arguments)
        on_host.push_back(converted(each, cpu, [](const at::Tensor &tensor) {
            // A tensor that may be resized needs its own copy.
            return on_device(tensor) ? on_cpu(tensor).clone() : tensor;
        }));
    given = on_host;
    op.callBoxed(&on_host);
    adopt_shapes(schema, arguments, given);
    for (size_t i = 0; i < arguments.size(); ++i)
        if (writes(schema.arguments()[i]) && arguments[i].isTensor() && on_device(arguments[i].toTensor()))
            on_cpu(arguments[i].toTensor()).copy_(given[i].toTensor());
    launch([] {});
    Stack answer = returned(schema, arguments, on_host, [](const at::Tensor &result) {
        at::Tensor made = made_like(result);
        on_cpu(made).copy_(result);
        return made;
    });
    stack->insert(stack->end(), answer.begin(), answer.end());
}

void fallback(const c10::OperatorHandle &op, Stack *stack)
{
    at::AutoDispatchBelowADInplaceOrView below;
    const c10::FunctionSchema &schema = op.schema();
    const Stack arguments = torch::jit::pop(*stack, schema.arguments().size());
    if (!has_meta(op))
        return compute_at_once(op, stack, arguments);
    const c10::Device cpu(c10::DeviceType::CPU);
    Stack shaped, results(schema.returns().size());
    if (!only_fills(schema, arguments)) {
        if (!shapes_of(op, arguments, shaped, results))
            return compute_at_once(op, stack, arguments);
        if (!shaped.empty())
            adopt_shapes(schema, arguments, shaped);
    }
    std::vector<at::Tensor> made;
    Stack answer = returned(schema, arguments, results, [&made](const at::Tensor &result) {
        made.push_back(made_like(result));
        return made.back();
    });
    auto inputs = std::make_shared<Stack>();
    for (size_t i = 0; i < arguments.size(); ++i)
        inputs->push_back(converted(arguments[i], cpu, captured));
    for (size_t i = 0; i < inputs->size(); ++i)
        if ((*inputs)[i].isNone() && schema.arguments()[i].name() == "generator")
            (*inputs)[i] = generator_on_cpu();
    std::vector<at::Tensor> outputs;
    for (const at::Tensor &each : made)
        outputs.push_back(on_cpu(each));
    if (!computing) {
        spin(kernel_ns);
        stack->insert(stack->end(), answer.begin(), answer.end());
        return;
    }
    const bool again = current_stream().capturing(); // A graph keeps the inputs for its replays.
    launch([op, inputs, again, outputs = std::move(outputs)] {
        Stack computed = again ? *inputs : std::move(*inputs);
        op.callBoxed(&computed);
        size_t filled = 0;
        size_t place;
        for (size_t i = 0; i < computed.size(); ++i) {
            const c10::Argument *source = aliased(op.schema(), op.schema().returns()[i], place);
            if (source != nullptr)
                continue;
            const auto fill = [&](const at::Tensor &result) {
                if (result.defined() && filled < outputs.size())
                    outputs[filled++].copy_(result);
            };
            if (computed[i].isTensor())
                fill(computed[i].toTensor());
            else
                for (const at::Tensor &each : computed[i].toTensorVector())
                    fill(each);
        }
    });
    stack->insert(stack->end(), answer.begin(), answer.end());
}

// -- memory, views and copies

at::Tensor empty(
    c10::IntArrayRef size, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>, std::optional<c10::Device>,
    std::optional<bool>, std::optional<c10::MemoryFormat> format)
{
    return at::detail::empty_generic(
        size, allocator(), c10::DispatchKeySet(DispatchKey::PrivateUse1), c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(
    c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
    std::optional<c10::Device>, std::optional<bool>)
{
    return at::detail::empty_strided_generic(
        size, stride, allocator(), c10::DispatchKeySet(DispatchKey::PrivateUse1), c10::dtype_or_default(dtype));
}

const at::Tensor &resize_(const at::Tensor &self, c10::IntArrayRef size, std::optional<c10::MemoryFormat>)
{
    std::vector<int64_t> strides(size.size(), 1);
    for (size_t i = size.size(); i-- > 1;)
        strides[i - 1] = strides[i] * std::max<int64_t>(size[i], 1);
    if (self.sizes() != size)
        resize(self, size, strides);
    return self;
}

at::Tensor &set_(
    at::Tensor &self, at::Storage storage, int64_t offset, c10::IntArrayRef size, c10::IntArrayRef stride)
{
    auto *impl = self.unsafeGetTensorImpl();
    impl->set_storage_keep_dtype(std::move(storage));
    impl->set_storage_offset(offset);
    if (stride.data() == nullptr) {
        impl->set_sizes_contiguous(size);
        resize(self, size, self.strides().vec());
    } else {
        resize(self, size, stride);
    }
    return self;
}

at::Tensor &set_source(at::Tensor &self, at::Storage storage)
{
    const int64_t count = storage.nbytes() / self.dtype().itemsize();
    return set_(self, std::move(storage), 0, {count}, {1});
}

at::Tensor &set_tensor(at::Tensor &self, const at::Tensor &source)
{
    return set_(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

at::Tensor &set_nothing(at::Tensor &self)
{
    return set_(self, c10::Storage(c10::Storage::use_byte_size_t(), 0, allocator(), true), 0, {0}, {1});
}

at::Tensor copy_from(const at::Tensor &source, const at::Tensor &target, bool non_blocking)
{
    at::AutoDispatchBelowADInplaceOrView below;
    const bool comes = on_device(source), stays = on_device(target);
    // Detach host tensors from Python objects, as a stream's thread has no interpreter.
    const at::Tensor from = comes ? on_cpu(source) : stays ? source.clone() : source;
    const at::Tensor to = stays ? on_cpu(target) : target.alias();
    launch([from, to] { to.copy_(from); });
    const bool pinned = !comes || stays || is_pinned(target.storage().data());
    if (comes != stays && (!non_blocking || !pinned))
        synchronize_for(counters.copy_synchronizations);
    return target;
}

at::Tensor copy_from_and_resize(const at::Tensor &source, const at::Tensor &target)
{
    if (source.sizes() != target.sizes())
        target.resize_(source.sizes());
    return copy_from(source, target, false);
}

at::Scalar item(const at::Tensor &self)
{
    synchronize_for(counters.item_synchronizations);
    at::AutoDispatchBelowADInplaceOrView below;
    return on_cpu(self).item();
}

void record_stream(at::Tensor &, c10::Stream) {} // Tasks keep the memory that they use.

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m)
{
    m.impl("empty.memory_format", empty);
    m.impl("empty_strided", empty_strided);
    m.impl("resize_", resize_);
    m.impl("set_.source_Storage_storage_offset", set_);
    m.impl("set_.source_Storage", set_source);
    m.impl("set_.source_Tensor", set_tensor);
    m.impl("set_", set_nothing);
    m.impl("as_strided", at::native::as_strided_tensorimpl);
    m.impl("view", at::native::view);
    m.impl("_reshape_alias", at::native::_reshape_alias);
    m.impl("unfold", at::native::unfold);
    m.impl("_copy_from", copy_from);
    m.impl("_copy_from_and_resize", copy_from_and_resize);
    m.impl("_local_scalar_dense", item);
    m.impl("record_stream", record_stream);
    // Run these as one kernel, as on the CPU, instead of decomposing them.
    for (const char *each : {"native_layer_norm", "native_group_norm", "native_dropout"})
        m.impl(each, torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

} // namespace

at::Tensor on_cpu(const at::Tensor &tensor)
{
    return on_device(tensor) ? over(storage_on_cpu(tensor.storage()), tensor, DispatchKey::CPU) : tensor;
}

void launch(std::function<void()> compute)
{
    ++counters.kernels;
    current_stream().enqueue(
        [compute = std::move(compute)](Stream &) {
            at::AutoDispatchBelowADInplaceOrView below;
            compute();
        },
        actual_ns(kernel_ns));
}

} // namespace device
