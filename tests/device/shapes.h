// Arguments and results of operators, and their shapes, which are known before the values. Part of operators.cpp.
#pragma once

#include "memory.h"
#include "operators.h"

#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include <mutex>
#include <unordered_map>

namespace device {

namespace {

using c10::DispatchKey;
using c10::IValue;
using Stack = torch::jit::Stack;

constexpr size_t MAX_KNOWN = 10'000;

bool on_device(const at::Tensor &tensor) { return tensor.defined() && tensor.device().type() == TYPE; }

// Returns the same tensor with another storage.
at::Tensor over(c10::Storage storage, const at::Tensor &like, DispatchKey key)
{
    at::Tensor result =
        at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(key), like.dtype());
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

// Returns a value of the stack with other tensors and without the device.
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

// Copies host tensors for a task: the host may change them as soon as the operator has been issued.
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

bool writes(const c10::Argument &argument)
{
    return argument.alias_info() != nullptr && argument.alias_info()->isWrite();
}

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

// Returns an operator's results as device tensors: its arguments, views of them, and tensors created by `make`.
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
            if (source != nullptr && arguments[place].isTensor() && result.defined()) { // The result is a view.
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

// Gives the tensors that the operator writes to the shapes that it has determined.
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

// Returns whether the meta device supports the operator. The answer is kept.
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
// Writes all that shapes depend on into a key. Returns false if there are arguments of other types.
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
        const double number = value.toScalar().toDouble();
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

// Gets the shapes of outputs from the meta device. A call may take a millisecond of Python, so results are cached by
// key. Returns false if the meta device does not know the shapes.
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
        return false; // The CPU's kernel accepts the arguments or raises the error.
    }
    if (lasting) {
        std::lock_guard<std::mutex> lock(known_mutex);
        if (known->size() >= MAX_KNOWN)
            known->clear();
        known->emplace(std::move(key), results);
    }
    return true;
}

// Returns whether an operator only fills tensors of the right shape, which torch has created for it.
bool only_fills(const c10::FunctionSchema &schema, const Stack &arguments)
{
    size_t place;
    for (const c10::Argument &each : schema.returns()) {
        const c10::Argument *source = aliased(schema, each, place);
        if (source == nullptr || !writes(*source))
            return false;
        // A tensor without elements may be meant to be resized.
        if (source->is_out() && arguments[place].isTensor() && arguments[place].toTensor().numel() == 0)
            return false;
    }
    return true;
}

} // namespace

} // namespace device
