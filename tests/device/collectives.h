// The exchanges and computations of collectives. Part of process_group.cpp.
#pragma once

#include "operators.h"
#include "transport.h"

#include <ATen/ATen.h>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <torch/csrc/distributed/c10d/Types.hpp>

namespace device {

namespace {

using at::Tensor;
using c10d::OpType;
using Tensors = std::vector<Tensor>;

// One operation in the form that its task runs: on CPU tensors that share the device's memory.
struct Operation {
    std::function<std::vector<Part>()> prepare;
    std::function<void()> finish;
    size_t bytes;
    OpType type;
    Tensors results;
};

Part part(int peer, const Tensor &out, const Tensor &in)
{
    return {
        peer, out.defined() ? out.data_ptr() : nullptr, out.defined() ? out.nbytes() : 0,
        in.defined() ? in.data_ptr() : nullptr, in.defined() ? in.nbytes() : 0};
}

Tensors all_on_cpu(const Tensors &tensors)
{
    Tensors result;
    for (const Tensor &each : tensors)
        result.push_back(on_cpu(each));
    return result;
}

size_t bytes_of(const Tensors &tensors)
{
    size_t sum = 0;
    for (const Tensor &each : tensors)
        sum += each.nbytes();
    return sum;
}

// Reduces in the order of the ranks, so that all ranks get the same result.
Tensor reduced(const Tensors &values, const c10d::ReduceOp &op)
{
    Tensor sum = values[0].clone();
    for (size_t i = 1; i < values.size(); ++i) {
        switch (op.op_) {
        case c10d::ReduceOp::SUM:
        case c10d::ReduceOp::AVG:
        case c10d::ReduceOp::PREMUL_SUM: sum.add_(values[i]); break;
        case c10d::ReduceOp::PRODUCT: sum.mul_(values[i]); break;
        case c10d::ReduceOp::MIN: sum = at::minimum(sum, values[i]); break;
        case c10d::ReduceOp::MAX: sum = at::maximum(sum, values[i]); break;
        default: TORCH_CHECK(false, "the device does not know this reduction");
        }
    }
    if (op.op_ == c10d::ReduceOp::AVG)
        sum.div_(int64_t(values.size()));
    if (op.op_ == c10d::ReduceOp::PREMUL_SUM) {
        // torch 2.11 has this name only; 2.13 keeps it in addition to a new one.
        const auto *factor = static_cast<const c10d::NCCLPreMulSumSupplement *>(op.supplement_.get());
        factor->tensor_factor.defined() ? sum.mul_(factor->tensor_factor.cpu()) : sum.mul_(factor->double_factor);
    }
    return sum;
}

// Creates the operations of one rank.
class Operations {
public:
    Operations(int rank, int size) : rank_(rank), size_(size) {}

    // out: the part of the inputs that is sent to a peer. in: the place for the data of a peer. finish: called after
    // all data has arrived.
    template <typename Out, typename In, typename Finish>
    Operation operation(
        OpType type, Tensors outputs, Tensors inputs, Tensors results, size_t bytes, Out out, In in,
        Finish finish) const
    {
        struct Buffers {
            Tensors inputs, outputs, come;
        };
        auto buffers = std::make_shared<Buffers>(Buffers{all_on_cpu(inputs), all_on_cpu(outputs), Tensors(size_)});
        return {
            [buffers, out, in, rank = rank_, size = size_] {
                std::vector<Part> parts;
                for (Tensor &each : buffers->inputs)
                    each = each.contiguous();
                for (int peer = 0; peer < size; ++peer) {
                    if (peer == rank)
                        continue;
                    const Tensor place = in(peer, buffers->outputs);
                    if (place.defined())
                        buffers->come[peer] = at::empty(place.sizes(), place.options());
                    parts.push_back(part(peer, out(peer, buffers->inputs), buffers->come[peer]));
                }
                return parts;
            },
            [buffers, finish] { finish(buffers->inputs, buffers->outputs, buffers->come); }, bytes, type, results};
    }

    Operation allreduced(const Tensor &tensor, const c10d::ReduceOp &op) const
    {
        return operation(
            OpType::ALLREDUCE, {tensor}, {tensor}, {tensor}, tensor.nbytes(),
            [](int, const Tensors &in) { return in[0]; }, [](int, const Tensors &out) { return out[0]; },
            [op, rank = rank_](const Tensors &in, Tensors &out, Tensors come) {
                come[rank] = in[0];
                out[0].copy_(reduced(come, op));
            });
    }
    Operation gathered(const Tensors &outputs, const Tensor &input, OpType type, Tensors results = {}) const
    {
        return operation(
            type, outputs, {input}, results.empty() ? outputs : results, bytes_of(outputs),
            [](int, const Tensors &in) { return in[0]; }, [](int peer, const Tensors &out) { return out[peer]; },
            [rank = rank_](const Tensors &in, Tensors &out, const Tensors &come) {
                for (size_t i = 0; i < out.size(); ++i)
                    out[i].copy_((int(i) == rank ? in[0] : come[i]).view(out[i].sizes()));
            });
    }
    Operation scattered(const Tensor &output, const Tensors &inputs, const c10d::ReduceOp &op, OpType type) const
    {
        return operation(
            type, {output}, inputs, {output}, bytes_of(inputs), [](int peer, const Tensors &in) { return in[peer]; },
            [](int, const Tensors &out) { return out[0]; },
            [op, rank = rank_](const Tensors &in, Tensors &out, Tensors come) {
                come[rank] = in[rank].view(out[0].sizes());
                out[0].copy_(reduced(come, op));
            });
    }
    Operation exchanged(const Tensors &outputs, const Tensors &inputs, OpType type) const
    {
        return operation(
            type, outputs, inputs, outputs, bytes_of(inputs), [](int peer, const Tensors &in) { return in[peer]; },
            [](int peer, const Tensors &out) { return out[peer]; },
            [rank = rank_](const Tensors &in, Tensors &out, const Tensors &come) {
                for (size_t i = 0; i < out.size(); ++i)
                    out[i].copy_(int(i) == rank ? in[i] : come[i]);
            });
    }
    static Operation point_to_point(const Tensor &tensor, int peer, bool sends)
    {
        auto here = std::make_shared<Tensor>(on_cpu(tensor)), moved = std::make_shared<Tensor>();
        return {
            [here, moved, sends, peer]() -> std::vector<Part> {
                *moved = sends ? here->contiguous() : at::empty(here->sizes(), here->options());
                Part only = sends ? part(peer, *moved, Tensor()) : part(peer, Tensor(), *moved);
                only.sends = sends;
                only.receives = !sends;
                return {only};
            },
            [here, moved, sends] {
                if (!sends)
                    here->copy_(*moved);
            },
            tensor.nbytes(), OpType::SEND, {tensor}};
    }

    Tensors chunks(const Tensor &tensor) const
    {
        Tensors result;
        const Tensor flat = tensor.view({size_, -1});
        for (int i = 0; i < size_; ++i)
            result.push_back(flat[i]);
        return result;
    }

private:
    const int rank_, size_;
};

} // namespace

} // namespace device
