// Counts what the operators of one step compute, from the shapes that a RecordFunction callback receives.
//
// The callback is registered once and enabled for single steps. It changes no dispatch key, keeps no tensor and reads no
// value. Where it is disabled, torch finds an empty list of callbacks, as before. The costs are those of
// torch.utils.flop_counter; tests/recorder/test_operators.py compares the two. They differ in three points:
// the backward pass of attention counts its recomputed scores as recomputation, the gradient of a grouped convolution's
// weight is not multiplied by the number of groups, and there are formulas for operators that torch counts as 0.
#ifndef TORCHLENS_PERF_NATIVE_OPERATORS_H
#define TORCHLENS_PERF_NATIVE_OPERATORS_H

#include <Python.h>

#include <ATen/SequenceNumber.h>
#include <ATen/core/Tensor.h>
#include <ATen/record_function.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <atomic>
#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

extern "C" {
#include "collective.h"
}

namespace operators {

using Inputs = c10::ArrayRef<const c10::IValue>;

// As Work in run/operators.py.
enum Work : uint32_t { PRODUCT = 1, CONVOLUTION, ATTENTION, CAUSAL_ATTENTION, RECURRENT };

struct Cost {
    Work work = PRODUCT;
    uint64_t flops = 0;
    uint64_t recomputed = 0; // part of them that repeats the forward pass
    uint64_t bytes = 0;      // of operands and results, each moved once
    c10::ScalarType dtype = c10::ScalarType::Undefined;
};

// A tensor whose shape is what will be computed: no subclass, fake or batched tensor, whose inner calls count instead.
const at::Tensor *plain(const c10::IValue &value)
{
    constexpr c10::DispatchKeySet wrapped({c10::DispatchKey::Python, c10::DispatchKey::Functionalize,
                                           c10::DispatchKey::FuncTorchBatched, c10::DispatchKey::FuncTorchGradWrapper});
    if (!value.isTensor() || !value.toTensor().defined()) {
        return nullptr;
    }
    const at::Tensor &tensor = value.toTensor();
    bool hidden = tensor.key_set().has_any(wrapped) || tensor.is_meta() || tensor.is_nested() ||
                  tensor.unsafeGetTensorImpl()->has_symbolic_sizes_strides();
    return hidden ? nullptr : &tensor;
}

// Operands of an operator. Raises no error where they are missing: `valid` is false then.
struct Operands {
    Inputs inputs;
    bool valid = true;
    uint64_t bytes = 0;
    c10::ScalarType dtype = c10::ScalarType::Undefined;

    at::IntArrayRef shape(size_t index, size_t least_dimensions = 1)
    {
        const at::Tensor *tensor = index < inputs.size() ? plain(inputs[index]) : nullptr;
        if (tensor == nullptr || tensor->sizes().size() < least_dimensions) {
            valid = false;
            static const std::vector<int64_t> none(8, 0);
            return none;
        }
        bytes += tensor->nbytes();
        if (dtype == c10::ScalarType::Undefined) {
            dtype = tensor->scalar_type();
        }
        return tensor->sizes();
    }

    bool flag(size_t index) const
    {
        return index < inputs.size() && inputs[index].isBool() && inputs[index].toBool();
    }

    std::vector<int64_t> integers(size_t index) const
    {
        return index < inputs.size() && inputs[index].isIntList() ? inputs[index].toIntVector() : std::vector<int64_t>();
    }

    uint64_t element_bytes() const { return dtype == c10::ScalarType::Undefined ? 0 : c10::elementSize(dtype); }
};

uint64_t elements(at::IntArrayRef shape)
{
    uint64_t count = 1;
    for (int64_t size : shape) {
        count *= static_cast<uint64_t>(size);
    }
    return count;
}

uint64_t spatial(at::IntArrayRef shape)
{
    return shape.size() < 2 ? 0 : elements(shape.slice(2));
}

// Operands at First and First + 1: matrices, vectors or stacks of matrices.
template <size_t First> Cost product(Operands &of)
{
    at::IntArrayRef left = of.shape(First), right = of.shape(First + 1);
    uint64_t columns = right.size() < 2 ? 1 : right.back();
    return {PRODUCT, 2 * elements(left) * columns, 0, elements(left.slice(0, left.size() - 1)) * columns * of.element_bytes()};
}

// Groups of rows, of columns, or of the summed dimension, each with its own matrix: the tokens that experts receive.
Cost grouped_product(Operands &of)
{
    at::IntArrayRef left = of.shape(0, 2), right = of.shape(1, 2);
    uint64_t groups = left.size() == 3 && right.size() == 2 ? left[0] : 1;
    return {PRODUCT, 2 * elements(left) * right.back() / std::max<uint64_t>(groups, 1)};
}

// Output of a convolution that is not transposed, per image and channel.
uint64_t convolved(at::IntArrayRef image, at::IntArrayRef weight, const Operands &of)
{
    const auto strides = of.integers(3), paddings = of.integers(4), dilations = of.integers(5);
    const auto at_axis = [](const std::vector<int64_t> &values, size_t axis, int64_t missing) {
        return values.empty() ? missing : values[std::min(axis, values.size() - 1)];
    };
    uint64_t count = 1;
    for (size_t axis = 0; axis + 2 < image.size() && axis + 2 < weight.size(); axis++) {
        int64_t reach = at_axis(dilations, axis, 1) * (weight[axis + 2] - 1) + 1;
        int64_t room = image[axis + 2] + 2 * at_axis(paddings, axis, 0) - reach;
        count *= room < 0 ? 0 : room / std::max<int64_t>(at_axis(strides, axis, 1), 1) + 1;
    }
    return count;
}

// (input, weight, bias, stride, padding, dilation, transposed, ...)
Cost convolution(Operands &of)
{
    at::IntArrayRef image = of.shape(0, 3), weight = of.shape(1, 3);
    uint64_t places = of.flag(6) ? spatial(image) : convolved(image, weight, of);
    return {CONVOLUTION, 2 * places * elements(weight) * image[0], 0, image[0] * weight[0] * places * of.element_bytes()};
}

// (gradient, input, weight, bias_sizes, stride, padding, dilation, transposed, output_padding, groups, output_mask)
Cost convolution_backward(Operands &of)
{
    at::IntArrayRef gradient = of.shape(0, 3), image = of.shape(1, 3), weight = of.shape(2, 3);
    uint64_t once = 2 * (of.flag(7) ? spatial(image) : spatial(gradient)) * elements(weight) * image[0];
    const bool masked = of.inputs.size() > 10 && of.inputs[10].isBoolList();
    uint64_t passes = 2;
    if (masked) {
        const auto mask = of.inputs[10].toBoolList();
        passes = mask.size() < 2 ? 2 : (mask.get(0) ? 1 : 0) + (mask.get(1) ? 1 : 0);
    }
    return {CONVOLUTION, passes * once, 0, of.bytes / 2};
}

// Query, key and value at First, with shape [batch, heads, length, size]; the flag at Causal.
template <size_t First, size_t Causal, bool Backward> Cost attention(Operands &of)
{
    at::IntArrayRef query = of.shape(First, 4), key = of.shape(First + 1, 4), value = of.shape(First + 2, 4);
    uint64_t scores = static_cast<uint64_t>(query[0]) * query[1] * query[2] * key[2];
    uint64_t once = 2 * scores * (query[3] + value[3]), repeated = 2 * scores * query[3];
    Cost cost{of.flag(Causal) ? CAUSAL_ATTENTION : ATTENTION, once};
    cost.bytes = static_cast<uint64_t>(query[0]) * query[1] * query[2] * value[3] * of.element_bytes();
    if (Backward) {
        cost.flops = 2 * once + repeated;
        cost.recomputed = repeated;
    }
    return cost;
}

// Input [time, batch, size] or [sum of lengths, size], then the weights: one by one, or as a list.
template <bool Listed, uint64_t Passes> Cost recurrent(Operands &of)
{
    at::IntArrayRef input = of.shape(0, 2);
    uint64_t steps = elements(input) / std::max<uint64_t>(input.back(), 1), weights = 0;
    if (Listed) {
        if (of.inputs.size() > 1 && of.inputs[1].isTensorList()) {
            for (const at::Tensor &weight : of.inputs[1].toTensorVector()) {
                weights += weight.dim() == 2 ? weight.numel() : 0;
            }
        }
    } else {
        weights = elements(of.shape(1, 2)) + elements(of.shape(2, 2));
    }
    of.valid = of.valid && weights > 0;
    return {RECURRENT, 2 * Passes * steps * weights};
}

using Formula = Cost (*)(Operands &);

Formula find_formula(std::string_view name)
{
    static const auto &formulas = *new std::unordered_map<std::string_view, Formula>{
        {"aten::mm", product<0>},
        {"aten::bmm", product<0>},
        {"aten::addmm", product<1>},
        {"aten::baddbmm", product<1>},
        {"aten::_scaled_mm", product<0>},
        {"aten::convolution", convolution},
        {"aten::convolution_overrideable", convolution},
        {"aten::convolution_backward", convolution_backward},
        {"aten::convolution_backward_overrideable", convolution_backward},
        {"aten::_scaled_dot_product_flash_attention", attention<0, 4, false>},
        {"aten::_scaled_dot_product_efficient_attention", attention<0, 6, false>},
        {"aten::_scaled_dot_product_cudnn_attention", attention<0, 6, false>},
        {"aten::_scaled_dot_product_flash_attention_backward", attention<1, 11, true>},
        {"aten::_scaled_dot_product_efficient_attention_backward", attention<1, 11, true>},
        {"aten::_scaled_dot_product_cudnn_attention_backward", attention<1, 14, true>},
        // torch.utils.flop_counter has no formula for the following.
        {"aten::_scaled_dot_product_flash_attention_for_cpu", attention<0, 4, false>},
        {"aten::_scaled_dot_product_flash_attention_for_cpu_backward", attention<1, 7, true>},
        {"aten::mv", product<0>},
        {"aten::addmv", product<1>},
        {"aten::addbmm", product<1>},
        {"aten::_addmm_activation", product<1>},
        {"aten::_int_mm", product<0>},
        {"aten::_grouped_mm", grouped_product},
        {"aten::_scaled_grouped_mm", grouped_product},
        {"aten::mkldnn_rnn_layer", recurrent<false, 1>},
        {"aten::mkldnn_rnn_layer_backward", recurrent<false, 2>},
        {"aten::_cudnn_rnn", recurrent<true, 1>},
        {"aten::_cudnn_rnn_backward", recurrent<true, 2>},
    };
    auto found = formulas.find(name);
    return found == formulas.end() ? nullptr : found->second;
}

// -- the calls of one step

struct Sum {
    uint64_t flops = 0, bytes = 0, calls = 0;
    int64_t duration_ns = 0;

    void add(uint64_t more_flops, uint64_t more_bytes, int64_t more_ns)
    {
        flops += more_flops;
        bytes += more_bytes;
        duration_ns += more_ns;
        calls++;
    }
};

// Module, phase, work and dtype.
using Key = std::tuple<uint32_t, uint32_t, uint32_t, uint32_t>;
struct Step {
    std::map<Key, Sum> counted;
    std::unordered_map<std::string, Sum> others; // operators without a formula
    int64_t duration_ns = 0;                     // of all operators, without those inside others
    uint64_t calls = 0;
    // By thread and autograd's sequence number: the module in which a node of the graph was created.
    std::map<std::pair<uint64_t, int64_t>, uint32_t> modules;
};

std::mutex step_lock;
Step &step = *new Step; // not destroyed at the process's end: a thread may still be in an operator
std::atomic<bool> counting{false};
at::CallbackHandle operator_handle = at::INVALID_CALLBACK_HANDLE, node_handle = at::INVALID_CALLBACK_HANDLE;
const CollectiveMarks *spans;

struct Call {
    const char *name = nullptr; // kept by the RecordFunction
    Formula formula = nullptr;
    bool valid = false, repeated = false; // repeated: an inner call of the same operator counts instead
    Cost cost;
    int64_t start_ns = 0, inside_ns = 0;
    int raising = std::uncaught_exceptions();
};

struct Node {
    uint32_t module = 0;
    bool creates_graph = false;
};

// Calls that have begun on this thread, outermost first; and the nodes of a backward pass likewise.
thread_local std::vector<Call> calls;
thread_local std::vector<Node> nodes;

// The index of a call or node, which its end removes with everything above it: so a lost end is made good. The end may
// come on another thread, and is ignored there.
struct Place : at::ObserverContext {
    Place(size_t index, const void *list) : index(index), list(list) {}
    size_t index;
    const void *list;
};

template <class Item> std::unique_ptr<at::ObserverContext> push(std::vector<Item> &list, const Item &item)
{
    list.push_back(item);
    return std::make_unique<Place>(list.size() - 1, &list);
}

template <class Item> std::optional<Item> pop(std::vector<Item> &list, const at::ObserverContext *context)
{
    auto *place = static_cast<const Place *>(context);
    if (place == nullptr || place->list != &list || place->index >= list.size()) {
        return std::nullopt;
    }
    Item item = list[place->index];
    list.resize(place->index);
    return item;
}

std::unique_ptr<at::ObserverContext> begin_operator(const at::RecordFunction &function)
{
    if (!counting.load(std::memory_order_relaxed) || !function.operator_name().has_value()) {
        return nullptr; // a region that torch names, not an operator
    }
    try {
        Call call;
        call.name = function.name();
        call.formula = find_formula(call.name);
        if (call.formula != nullptr) {
            Operands operands{function.inputs()};
            call.cost = call.formula(operands);
            call.valid = operands.valid;
            call.cost.bytes += operands.bytes;
            call.cost.dtype = operands.dtype;
            for (Call &outer : calls) {
                if (outer.valid && call.valid) {
                    if (std::string_view(outer.name) == call.name) {
                        outer.repeated = true; // autocast calls again with the dtype that the product runs in
                    } else if (!outer.repeated) {
                        call.valid = false; // part of a counted operator
                    }
                }
            }
        }
        call.start_ns = host_now();
        return push(calls, call);
    } catch (const std::exception &) {
        return nullptr;
    }
}

uint32_t find_phase(uint32_t &module)
{
    uint32_t phase = spans->place(&module);
    if (!nodes.empty()) {
        // Autograd's own operators run without gradients, unless a graph of the backward pass is asked for.
        if (c10::GradMode::is_enabled() && !nodes.back().creates_graph) {
            return PASS_RECOMPUTE;
        }
        module = nodes.back().module;
        return PASS_BACKWARD;
    }
    return phase;
}

void add_cost(const Call &call, int64_t duration_ns, uint32_t module, uint32_t phase)
{
    const Cost &cost = call.cost;
    const uint32_t dtype = static_cast<uint32_t>(cost.dtype);
    step.counted[Key{module, phase, cost.work, dtype}].add(cost.flops - cost.recomputed, cost.bytes, duration_ns);
    if (cost.recomputed != 0) {
        step.counted[Key{module, PASS_RECOMPUTE, cost.work, dtype}].add(cost.recomputed, 0, 0);
    }
}

void end_operator(const at::RecordFunction &, at::ObserverContext *context)
{
    const std::optional<Call> popped = pop(calls, context);
    if (!popped) {
        return;
    }
    const Call &call = *popped;
    int64_t duration_ns = host_now() - call.start_ns;
    if (!calls.empty()) {
        calls.back().inside_ns += duration_ns;
    }
    if (!counting.load(std::memory_order_relaxed)) {
        return;
    }
    try {
        // Checkpointing ends recomputation by an exception in an operator, before its kernel has run.
        bool counts = call.valid && !call.repeated && std::uncaught_exceptions() <= call.raising;
        uint32_t module = 0, phase = counts ? find_phase(module) : 0;
        std::lock_guard<std::mutex> guard(step_lock);
        step.calls++;
        if (calls.empty()) {
            step.duration_ns += duration_ns;
        }
        if (counts) {
            add_cost(call, duration_ns, module, phase);
            if (phase == PASS_FORWARD || phase == PASS_RECOMPUTE) {
                step.modules[{at::RecordFunction::currentThreadId(), at::sequence_number::peek()}] = module;
            }
            // The time inside belongs to this operator, not to those around it.
            return;
        }
        for (const Call &outer : calls) {
            if (outer.valid && !outer.repeated) {
                return;
            }
        }
        step.others[call.name].add(0, 0, duration_ns - call.inside_ns);
    } catch (const std::exception &) {
        // out of memory: this call is missing
    }
}

std::unique_ptr<at::ObserverContext> begin_node(const at::RecordFunction &function)
{
    try {
        uint32_t module = 0;
        {
            std::lock_guard<std::mutex> guard(step_lock);
            auto found = step.modules.upper_bound({function.forwardThreadId(), function.seqNr()});
            if (found != step.modules.end() && found->first.first == function.forwardThreadId()) {
                module = found->second;
            }
        }
        return push(nodes, Node{module, c10::GradMode::is_enabled()});
    } catch (const std::exception &) {
        return nullptr;
    }
}

void end_node(const at::RecordFunction &, at::ObserverContext *context)
{
    pop(nodes, context);
}

// -- from Python, with the GIL

// start_counting(): until stop_counting(). Registers the callbacks once; they are never removed, because another thread
// may be running them.
PyObject *start_counting(PyObject *, PyObject *)
{
    if (spans == nullptr) {
        PyErr_SetString(PyExc_RuntimeError, "attach() has not been called");
        return nullptr;
    }
    try {
        {
            std::lock_guard<std::mutex> guard(step_lock);
            step = Step();
        }
        counting = true;
        if (operator_handle == at::INVALID_CALLBACK_HANDLE) {
            operator_handle = at::addGlobalCallback(at::RecordFunctionCallback(begin_operator, end_operator)
                                                        .needsInputs(true)
                                                        .scopes({at::RecordScope::FUNCTION}));
            node_handle = at::addGlobalCallback(
                at::RecordFunctionCallback(begin_node, end_node).scopes({at::RecordScope::BACKWARD_FUNCTION}));
        } else {
            at::reenableCallback(operator_handle);
            at::reenableCallback(node_handle);
        }
    } catch (const std::exception &error) {
        PyErr_SetString(PyExc_RuntimeError, error.what());
        return nullptr;
    }
    Py_RETURN_NONE;
}

// stop_counting() -> (calls, ns, [(module, phase, work, dtype, flops, bytes, calls, ns)], [(operator, calls, ns)])
PyObject *stop_counting(PyObject *, PyObject *)
{
    Step ended;
    counting = false;
    if (operator_handle != at::INVALID_CALLBACK_HANDLE) {
        at::disableCallback(operator_handle);
        at::disableCallback(node_handle);
    }
    {
        std::lock_guard<std::mutex> guard(step_lock);
        std::swap(ended, step);
    }
    PyObject *counted = PyList_New(0), *others = PyList_New(0);
    const auto append = [](PyObject *list, PyObject *row) {
        bool failed = list == nullptr || row == nullptr || PyList_Append(list, row) < 0;
        Py_XDECREF(row);
        return !failed;
    };
    bool whole = counted != nullptr && others != nullptr;
    for (const auto &[key, sum] : ended.counted) {
        const char *dtype = c10::toString(static_cast<c10::ScalarType>(std::get<3>(key)));
        whole = whole && append(counted, Py_BuildValue("IIIsKKKL", std::get<0>(key), std::get<1>(key), std::get<2>(key), dtype,
                                                       static_cast<unsigned long long>(sum.flops),
                                                       static_cast<unsigned long long>(sum.bytes),
                                                       static_cast<unsigned long long>(sum.calls),
                                                       static_cast<long long>(sum.duration_ns)));
    }
    for (const auto &[name, sum] : ended.others) {
        whole = whole && append(others, Py_BuildValue("sKL", name.c_str(), static_cast<unsigned long long>(sum.calls),
                                                      static_cast<long long>(sum.duration_ns)));
    }
    if (!whole) {
        Py_XDECREF(counted);
        Py_XDECREF(others);
        return nullptr;
    }
    return Py_BuildValue("KLNN", static_cast<unsigned long long>(ended.calls), static_cast<long long>(ended.duration_ns),
                         counted, others);
}

} // namespace operators

#endif
