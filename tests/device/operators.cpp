// Operators: shapes are known at once, by the meta device; values are computed later, by the CPU, in the stream's thread.
//
// An operator whose shapes depend on values (nonzero, item), or that the meta device does not know, waits for its stream
// and computes at once. Such waits are counted, as are those of blocking copies.
#include "operators.h"

#include "memory.h"
#include "streams.h"

#include <ATen/EmptyTensor.h>
#include <ATen/Functions.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <torch/library.h>

#include <unordered_map>

namespace device {

namespace {

using c10::DispatchKey;
using c10::IValue;
using Stack = torch::jit::Stack;

constexpr size_t MAX_KNOWN = 10'000;

bool on_device(const at::Tensor &tensor) { return tensor.defined() && tensor.device().type() == TYPE; }

// The same tensor over another storage.
at::Tensor over(c10::Storage storage, const at::Tensor &like, DispatchKey key)
{
    at::Tensor result = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(key), like.dtype());
    auto *impl = result.unsafeGetTensorImpl();
    impl->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
    if (like.dim() == 0)
        impl->set_wrapped_number(like.unsafeGetTensorImpl()->is_wrapped_number());
    if (like.is_conj())
        result._set_conj(true);
    if (like.is_neg())
        result._set_neg(true);
    return result;
}

at::Tensor on_meta(const at::Tensor &tensor)
{
    const c10::Device meta(c10::DeviceType::Meta);
    return over(
        c10::Storage(c10::make_intrusive<c10::StorageImpl>(
            c10::StorageImpl::use_byte_size_t(), tensor.storage().nbytes(), c10::DataPtr(nullptr, meta),
            c10::GetAllocator(c10::DeviceType::Meta), true)),
        tensor, DispatchKey::Meta);
}

// A value of the stack with other tensors, and without the device.
template <typename Convert> IValue converted(const IValue &value, c10::Device to, const Convert &convert)
{
    if (value.isTensor())
        return convert(value.toTensor());
    if (value.isTensorList()) {
        c10::List<at::Tensor> list;
        for (const at::Tensor &each : value.toTensorVector())
            list.push_back(convert(each));
        return list;
    }
    if (value.isOptionalTensorList()) {
        c10::List<std::optional<at::Tensor>> list;
        for (const std::optional<at::Tensor> &each : value.toOptionalTensorVector())
            list.push_back(each && each->defined() ? std::optional(convert(*each)) : each);
        return list;
    }
    if (value.isDevice() && value.toDevice().type() == TYPE)
        return to;
    if (value.isGenerator() && value.toGenerator().device().type() == TYPE)
        return to.type() == c10::DeviceType::CPU ? IValue(generator_on_cpu()) : IValue();
    return value;
}

at::Tensor meta_of(const at::Tensor &tensor)
{
    return !tensor.defined() || (!on_device(tensor) && tensor.dim() == 0) ? tensor : on_meta(tensor);
}

// For a task: the host may write to its own tensors as soon as the operator has been issued.
at::Tensor captured(const at::Tensor &tensor)
{
    if (!tensor.defined() || on_device(tensor))
        return on_cpu(tensor);
    if (tensor.unsafeGetTensorImpl()->is_wrapped_number())
        return tensor;
    return tensor.clone();
}

at::Tensor made_like(const at::Tensor &meta)
{
    return at::detail::empty_strided_generic(
        meta.sizes(), meta.strides(), allocator(), c10::DispatchKeySet(DispatchKey::PrivateUse1), meta.scalar_type());
}

const c10::Argument *aliased(const c10::FunctionSchema &schema, const c10::Argument &result, size_t &place)
{
    if (result.alias_info() == nullptr)
        return nullptr;
    for (place = 0; place < schema.arguments().size(); ++place) {
        const auto *info = schema.arguments()[place].alias_info();
        if (info != nullptr && info->beforeSets() == result.alias_info()->beforeSets())
            return &schema.arguments()[place];
    }
    return nullptr;
}

bool writes(const c10::Argument &argument) { return argument.alias_info() != nullptr && argument.alias_info()->isWrite(); }

bool tells_shapes_only(const c10::FunctionSchema &schema)
{
    for (const c10::Argument &each : schema.returns()) {
        const auto kind = each.type()->kind();
        const bool list = kind == c10::TypeKind::ListType &&
            each.type()->expectRef<c10::ListType>().getElementType()->kind() == c10::TypeKind::TensorType;
        if (kind != c10::TypeKind::TensorType && !list)
            return false;
    }
    return true;
}

// What an operator returns, as tensors of the device. `fill`: what is new and is to be filled with each result.
Stack returned(
    const c10::FunctionSchema &schema, const Stack &arguments, const Stack &results,
    const std::function<at::Tensor(const at::Tensor &)> &make)
{
    Stack answer;
    for (size_t i = 0; i < results.size(); ++i) {
        size_t place;
        const c10::Argument *source = aliased(schema, schema.returns()[i], place);
        if (source != nullptr && writes(*source)) {
            answer.push_back(arguments[place]);
        } else if (results[i].isTensor()) {
            const at::Tensor &result = results[i].toTensor();
            if (source != nullptr && arguments[place].isTensor() && result.defined()) { // a view
                const at::Tensor &base = arguments[place].toTensor();
                answer.emplace_back(over(base.storage(), result, DispatchKey::PrivateUse1));
            } else {
                answer.emplace_back(result.defined() ? make(result) : result);
            }
        } else if (results[i].isTensorList()) {
            TORCH_CHECK(source == nullptr, schema.operator_name(), " returns views, which the device does not know");
            c10::List<at::Tensor> list;
            for (const at::Tensor &each : results[i].toTensorVector())
                list.push_back(each.defined() ? make(each) : each);
            answer.emplace_back(list);
        } else {
            answer.push_back(results[i]);
        }
    }
    return answer;
}

void resize(const at::Tensor &self, c10::IntArrayRef sizes, c10::IntArrayRef strides)
{
    auto *impl = self.unsafeGetTensorImpl();
    const size_t needed =
        at::detail::computeStorageNbytes(sizes, strides, self.dtype().itemsize(), self.storage_offset());
    if (needed > self.storage().nbytes())
        resize_storage(*self.storage().unsafeGetStorageImpl(), needed);
    impl->set_sizes_and_strides(sizes, strides);
}

// Tensors that are written to have the shapes that the operator has given them.
void adopt_shapes(const c10::FunctionSchema &schema, const Stack &arguments, const Stack &shaped)
{
    for (size_t i = 0; i < arguments.size(); ++i) {
        if (!writes(schema.arguments()[i]))
            continue;
        const auto adopt = [](const at::Tensor &tensor, const at::Tensor &as) {
            if (on_device(tensor) && (tensor.sizes() != as.sizes() || tensor.strides() != as.strides()))
                resize(tensor, as.sizes(), as.strides());
        };
        if (arguments[i].isTensor()) {
            adopt(arguments[i].toTensor(), shaped[i].toTensor());
        } else if (arguments[i].isTensorList()) {
            const auto tensors = arguments[i].toTensorVector(), as = shaped[i].toTensorVector();
            for (size_t j = 0; j < tensors.size(); ++j)
                adopt(tensors[j], as[j]);
        }
    }
}

// Whether the meta device is asked at all; remembered, and so is a no of its.
std::mutex judged_mutex;
std::unordered_map<c10::OperatorName, bool> judged;

bool has_meta(const c10::OperatorHandle &op)
{
    std::lock_guard<std::mutex> lock(judged_mutex);
    const auto found = judged.find(op.operator_name());
    if (found != judged.end())
        return found->second;
    bool has = tells_shapes_only(op.schema()) && op.operator_name().name.compare(0, 6, "aten::") == 0;
    for (const c10::Argument &each : op.schema().returns())
        has = has && (each.type()->kind() != c10::TypeKind::ListType || each.alias_info() == nullptr);
    return judged.emplace(op.operator_name(), has).first->second;
}

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
            // A copy of its own where it may be resized.
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

// What shapes depend on, written down; false where something else is among the arguments.
bool describe(const IValue &value, std::string &key)
{
    const auto add = [&key](const void *what, size_t bytes) { key.append(static_cast<const char *>(what), bytes); };
    const auto add_tensor = [&](const at::Tensor &tensor) {
        key += '/';
        if (!tensor.defined())
            return;
        const auto type = tensor.scalar_type();
        const auto device = tensor.device().type();
        const bool wrapped = tensor.unsafeGetTensorImpl()->is_wrapped_number();
        const int64_t dim = tensor.dim();
        add(&type, sizeof type), add(&device, sizeof device), add(&wrapped, 1), add(&dim, sizeof dim);
        add(tensor.sizes().data(), dim * sizeof dim), add(tensor.strides().data(), dim * sizeof dim);
    };
    key += ' ';
    if (value.isTensor()) {
        add_tensor(value.toTensor());
    } else if (value.isTensorList()) {
        for (const at::Tensor &each : value.toTensorVector())
            add_tensor(each);
    } else if (value.isNone()) {
        key += '-';
    } else if (value.isInt() || value.isBool() || value.isDouble()) {
        const double number = value.isDouble() ? value.toDouble() : double(value.isInt() ? value.toInt() : value.toBool());
        key += value.isInt() ? 'i' : value.isBool() ? 'b' : 'd';
        add(&number, sizeof number);
    } else if (value.isIntList()) {
        for (const int64_t each : value.toIntVector())
            add(&each, sizeof each);
    } else if (value.isBoolList()) {
        for (const bool each : value.toBoolList())
            key += each ? '1' : '0';
    } else {
        return false;
    }
    return true;
}

// What the meta device says of outputs; it may take a millisecond of Python, so it is asked once for the same shapes.
// False where it does not know.
bool shapes_of(const c10::OperatorHandle &op, const Stack &arguments, Stack &shaped, Stack &results)
{
    static std::mutex known_mutex;
    static auto *known = new std::unordered_map<std::string, Stack>();
    std::string key = c10::toString(op.operator_name());
    bool lasting = true;
    for (size_t i = 0; lasting && i < arguments.size(); ++i)
        lasting = op.schema().arguments()[i].alias_info() == nullptr && describe(arguments[i], key);
    if (lasting) {
        std::lock_guard<std::mutex> lock(known_mutex);
        const auto found = known->find(key);
        if (found != known->end()) {
            results = found->second;
            return true;
        }
    }
    for (const IValue &each : arguments)
        shaped.push_back(converted(each, c10::Device(c10::DeviceType::Meta), meta_of));
    results = shaped;
    try {
        op.callBoxed(&results);
    } catch (const c10::NotImplementedError &) {
        std::lock_guard<std::mutex> lock(judged_mutex);
        judged[op.operator_name()] = false;
        return false;
    } catch (const std::exception &) {
        return false; // the CPU will say what is wrong, or take it
    }
    if (lasting) {
        std::lock_guard<std::mutex> lock(known_mutex);
        if (known->size() >= MAX_KNOWN)
            known->clear();
        known->emplace(std::move(key), results);
    }
    return true;
}

// Whether an operator only fills tensors that it is given, whose shapes are right: torch has made them for it.
bool only_fills(const c10::FunctionSchema &schema, const Stack &arguments)
{
    size_t place;
    for (const c10::Argument &each : schema.returns()) {
        const c10::Argument *source = aliased(schema, each, place);
        if (source == nullptr || !writes(*source))
            return false;
        // One of no elements may be there to be resized.
        if (source->is_out() && arguments[place].isTensor() && arguments[place].toTensor().numel() == 0)
            return false;
    }
    return true;
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
    launch([op, inputs, outputs = std::move(outputs)] {
        Stack computed = std::move(*inputs);
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

// -- what is not computed: memory, views, copies

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
    // The host's tensors without what belongs to an interpreter, which a stream's thread has not.
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

void record_stream(at::Tensor &, c10::Stream) {} // tasks hold the memory that they use

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
    // As one kernel, as the CPU has them, and not made of others.
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
        Ns(kernel_ns * slowness));
}

} // namespace device
