// Stream-ordered collectives like NCCL's: the host issues them without waiting.
//
// An asynchronous collective runs on the group's own stream, after all work issued so far to the current stream.
// Waiting for it makes the current stream wait. A synchronous one runs on the current stream and returns no work. A
// collective begins on all ranks when the last one has reached it. It takes a latency plus the time for its bytes.

#include "process_group.h"

#include "collectives.h"
#include "memory.h"

#include <ATen/ATen.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

namespace device {

std::atomic<Ns> latency_ns{50'000};
std::atomic<double> bytes_per_second{10e9};

namespace {

using WorkPtr = c10::intrusive_ptr<c10d::Work>;

class AsyncWork final : public c10d::Work {
public:
    AsyncWork(int rank, OpType type, std::shared_ptr<Moment> end, Tensors results, bool blocks_host, uint64_t sequence)
        : Work(rank, type), end_(std::move(end)), results_(std::move(results)), blocks_host_(blocks_host),
          sequence_(sequence)
    {
        future_ = c10::make_intrusive<c10::ivalue::Future>(
            c10::ListType::create(c10::TensorType::get()), std::vector<c10::Device>{c10::Device(TYPE, 0)});
        future_->markCompleted(c10::IValue(results_)); // Records this point of the group's stream.
    }
    bool isCompleted() override { return end_->reached(); }
    bool isSuccess() const override { return end_->reached(); }
    Tensors result() override { return results_; }
    void synchronize() override { current_stream().wait(end_); }
    bool wait(std::chrono::milliseconds) override
    {
        synchronize();
        if (blocks_host_) {
            ++counters.stream_synchronizations;
            current_stream().synchronize();
            raise_failure();
        }
        return true;
    }
    c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }
    uint64_t getSequencenumber() const override { return sequence_; }

private:
    std::shared_ptr<Moment> end_;
    Tensors results_;
    bool blocks_host_;
    uint64_t sequence_;
    c10::intrusive_ptr<c10::ivalue::Future> future_;
};

class Group final : public c10d::Backend {
public:
    Group(const c10::intrusive_ptr<c10d::Store> &store, int rank, int size, Ns timeout_ns)
        : Backend(rank, size), make_{rank, size}, state_(std::make_shared<State>(rank, size, timeout_ns)),
          stream_(new_stream()),
          options_(c10::make_intrusive<Options>("asyncdev", std::chrono::milliseconds(timeout_ns / 1'000'000)))
    {
        store->set("address" + std::to_string(rank), state_->transport.address());
        for (int peer = 0; peer < rank; ++peer)
            state_->transport.connect_to(peer, store->get_to_str("address" + std::to_string(peer)), timeout_ns);
        state_->transport.accept_others(timeout_ns);
    }

    const std::string getBackendName() const override { return "asyncdev"; }
    c10::intrusive_ptr<Options> getBackendOptions() override { return options_; }
    void setSequenceNumberForGroup() override {}
    uint64_t getSequenceNumberForGroup() override { return sequence_; }
    bool supportsCoalescing() const override { return true; }

    void startCoalescing() override { coalescing_ = true; }
    WorkPtr endCoalescing() override
    {
        coalescing_ = false;
        std::vector<Operation> operations = std::move(coalesced_);
        coalesced_.clear();
        return operations.empty() ? nullptr : issue(std::move(operations), OpType::COALESCED, true);
    }

    WorkPtr allreduce(Tensors &tensors, const c10d::AllreduceOptions &opts) override
    {
        return all(tensors, opts.asyncOp, OpType::ALLREDUCE, [&](Tensor &each) {
            return make_.allreduced(each, opts.reduceOp);
        });
    }
    WorkPtr allreduce_coalesced(Tensors &tensors, const c10d::AllreduceCoalescedOptions &opts) override
    {
        return all(
            tensors, opts.asyncOp, OpType::ALLREDUCE_COALESCED,
            [&](Tensor &each) { return make_.allreduced(each, opts.reduceOp); });
    }
    WorkPtr reduce(Tensors &tensors, const c10d::ReduceOptions &opts) override
    {
        return all(tensors, opts.asyncOp, OpType::REDUCE, [&](Tensor &each) {
            Operation operation = make_.allreduced(each, opts.reduceOp);
            if (rank_ != opts.rootRank)
                operation.finish = [] {};
            operation.type = OpType::REDUCE;
            return operation;
        });
    }
    WorkPtr broadcast(Tensors &tensors, const c10d::BroadcastOptions &opts) override
    {
        return all(tensors, opts.asyncOp, OpType::BROADCAST, [&](Tensor &each) {
            const bool root = rank_ == opts.rootRank;
            return make_.operation(
                OpType::BROADCAST, {each}, root ? Tensors{each} : Tensors{}, {each}, each.nbytes(),
                [root](int, const Tensors &in) { return root ? in[0] : Tensor(); },
                [from = opts.rootRank](int peer, const Tensors &out) { return peer == from ? out[0] : Tensor(); },
                [root](const Tensors &, Tensors &out, const Tensors &come) {
                    for (const Tensor &each : come)
                        if (!root && each.defined())
                            out[0].copy_(each);
                });
        });
    }
    WorkPtr allgather(
        std::vector<Tensors> &outputs, Tensors &inputs, const c10d::AllgatherOptions &opts) override
    {
        return single(make_.gathered(outputs[0], inputs[0], OpType::ALLGATHER), opts.asyncOp);
    }
    WorkPtr _allgather_base(Tensor &output, Tensor &input, const c10d::AllgatherOptions &opts) override
    {
        return single(make_.gathered(make_.chunks(output), input, OpType::_ALLGATHER_BASE, {output}), opts.asyncOp);
    }
    WorkPtr allgather_into_tensor_coalesced(
        Tensors &outputs, Tensors &inputs, const c10d::AllgatherOptions &opts) override
    {
        std::vector<Operation> operations;
        for (size_t i = 0; i < outputs.size(); ++i)
            operations.push_back(
                make_.gathered(make_.chunks(outputs[i]), inputs[i], OpType::_ALLGATHER_BASE, {outputs[i]}));
        return issue(std::move(operations), OpType::COALESCED, opts.asyncOp);
    }
    WorkPtr reduce_scatter(
        Tensors &outputs, std::vector<Tensors> &inputs, const c10d::ReduceScatterOptions &opts) override
    {
        return single(make_.scattered(outputs[0], inputs[0], opts.reduceOp, OpType::REDUCE_SCATTER), opts.asyncOp);
    }
    WorkPtr _reduce_scatter_base(Tensor &output, Tensor &input, const c10d::ReduceScatterOptions &opts) override
    {
        return single(
            make_.scattered(output, make_.chunks(input), opts.reduceOp, OpType::_REDUCE_SCATTER_BASE), opts.asyncOp);
    }
    WorkPtr reduce_scatter_tensor_coalesced(
        Tensors &outputs, Tensors &inputs, const c10d::ReduceScatterOptions &opts) override
    {
        std::vector<Operation> operations;
        for (size_t i = 0; i < outputs.size(); ++i)
            operations.push_back(
                make_.scattered(outputs[i], make_.chunks(inputs[i]), opts.reduceOp, OpType::_REDUCE_SCATTER_BASE));
        return issue(std::move(operations), OpType::COALESCED, opts.asyncOp);
    }
    WorkPtr gather(std::vector<Tensors> &outputs, Tensors &inputs, const c10d::GatherOptions &opts) override
    {
        const bool root = rank_ == opts.rootRank;
        return single(
            make_.operation(
                OpType::GATHER, root ? outputs[0] : Tensors{}, inputs, root ? outputs[0] : Tensors{},
                inputs[0].nbytes(),
                [root, to = opts.rootRank](int peer, const Tensors &in) { return peer == to ? in[0] : Tensor(); },
                [root](int peer, const Tensors &out) { return root ? out[peer] : Tensor(); },
                [root, rank = rank_](const Tensors &in, Tensors &out, const Tensors &come) {
                    for (size_t i = 0; root && i < out.size(); ++i)
                        out[i].copy_(int(i) == rank ? in[0] : come[i]);
                }),
            opts.asyncOp);
    }
    WorkPtr scatter(Tensors &outputs, std::vector<Tensors> &inputs, const c10d::ScatterOptions &opts) override
    {
        const bool root = rank_ == opts.rootRank;
        return single(
            make_.operation(
                OpType::SCATTER, outputs, root ? inputs[0] : Tensors{}, outputs, outputs[0].nbytes(),
                [root](int peer, const Tensors &in) { return root ? in[peer] : Tensor(); },
                [from = opts.rootRank](int peer, const Tensors &out) { return peer == from ? out[0] : Tensor(); },
                [root, rank = rank_, from = opts.rootRank](const Tensors &in, Tensors &out, const Tensors &come) {
                    out[0].copy_(root ? in[rank] : come[from]);
                }),
            opts.asyncOp);
    }
    WorkPtr alltoall(Tensors &outputs, Tensors &inputs, const c10d::AllToAllOptions &opts) override
    {
        return single(make_.exchanged(outputs, inputs, OpType::ALLTOALL), opts.asyncOp);
    }
    WorkPtr alltoall_base(
        Tensor &output, Tensor &input, std::vector<int64_t> &output_splits, std::vector<int64_t> &input_splits,
        const c10d::AllToAllOptions &opts) override
    {
        const auto split = [this](const Tensor &tensor, const std::vector<int64_t> &sizes) {
            return sizes.empty() ? tensor.chunk(size_) : tensor.split_with_sizes(sizes);
        };
        return single(
            make_.exchanged(split(output, output_splits), split(input, input_splits), OpType::ALLTOALL_BASE),
            opts.asyncOp);
    }
    WorkPtr send(Tensors &tensors, int to, int) override
    {
        return single(make_.point_to_point(tensors[0], to, true), true);
    }
    WorkPtr recv(Tensors &tensors, int from, int) override
    {
        return single(make_.point_to_point(tensors[0], from, false), true);
    }
    WorkPtr barrier(const c10d::BarrierOptions &opts) override
    {
        const auto nothing = [](int, const Tensors &) { return Tensor(); };
        std::vector<Operation> operations{
            make_.operation(OpType::BARRIER, {}, {}, {}, 0, nothing, nothing, [](auto &&...) {})};
        WorkPtr work = issue(std::move(operations), OpType::BARRIER, opts.asyncOp);
        if (!opts.asyncOp) {
            ++counters.stream_synchronizations;
            current_stream().synchronize();
            raise_failure();
        }
        return work;
    }

private:
    // State for tasks, which may run after the group has been destroyed.
    struct State {
        State(int rank, int size, Ns timeout_ns) : transport(rank, size), timeout_ns(timeout_ns) {}
        Transport transport;
        Ns timeout_ns;
        bool broken = false;
    };

    template <typename Make> WorkPtr all(Tensors &tensors, bool async, OpType type, Make make)
    {
        std::vector<Operation> operations;
        for (Tensor &each : tensors)
            operations.push_back(make(each));
        return issue(std::move(operations), type, async);
    }
    WorkPtr single(Operation operation, bool async)
    {
        const OpType type = operation.type;
        std::vector<Operation> operations;
        operations.push_back(std::move(operation));
        return issue(std::move(operations), type, async);
    }

    WorkPtr issue(std::vector<Operation> operations, OpType type, bool async)
    {
        if (coalescing_) {
            for (Operation &each : operations)
                coalesced_.push_back(std::move(each));
            return nullptr;
        }
        std::lock_guard<std::mutex> lock(mutex_); // DDP's reducer issues from autograd's thread.
        ++counters.collectives;
        Stream &current = current_stream(), &on = async ? stream_ : current;
        if (async)
            on.wait(current.record());
        if (last_ != nullptr)
            on.wait(last_); // Keeps the order of a group's collectives across streams.
        Tensors results;
        size_t bytes = 0;
        for (Operation &each : operations) {
            results.insert(results.end(), each.results.begin(), each.results.end());
            each.results.clear(); // Tensors known to Python must not be freed on a stream's thread.
            bytes += each.bytes;
        }
        const Ns takes_ns = latency_ns + Ns(double(bytes) / bytes_per_second * 1e9);
        const bool pair = operations[0].type == OpType::SEND; // These have no sequence number common to all ranks.
        const int64_t what = pair ? int64_t(OpType::SEND) : ++sequence_ << 8 | int64_t(type);
        on.enqueue(
            [state = state_, operations = std::move(operations), what](Stream &self) {
                run(*state, operations, what, self);
            },
            takes_ns);
        last_ = on.record();
        if (!async)
            return nullptr;
        const int64_t before = exchange_current_stream(stream_.id);
        WorkPtr work = c10::make_intrusive<AsyncWork>(rank_, type, last_, results, type == OpType::BARRIER, sequence_);
        exchange_current_stream(before);
        return work;
    }

    static void run(State &state, const std::vector<Operation> &operations, int64_t what, Stream &self)
    {
        if (state.broken)
            return; // An earlier error has been reported, and the data is invalid.
        at::AutoDispatchBelowADInplaceOrView below;
        try {
            std::vector<Part> parts;
            for (const Operation &each : operations)
                for (const Part &one : each.prepare())
                    parts.push_back(one);
            const Ns last_ns =
                state.transport.exchange(parts, what, self.line - clock_offset(), state.timeout_ns);
            self.line = std::max(self.line, last_ns + clock_offset());
            for (const Operation &each : operations)
                each.finish();
        } catch (...) {
            state.broken = true;
            throw;
        }
    }

    const Operations make_;
    std::shared_ptr<State> state_;
    Stream &stream_;
    c10::intrusive_ptr<Options> options_;
    std::mutex mutex_;
    std::shared_ptr<Moment> last_;
    std::atomic<int64_t> sequence_{0};
    bool coalescing_ = false;
    std::vector<Operation> coalesced_;
};

} // namespace

c10::intrusive_ptr<c10d::Backend> create_process_group(
    const c10::intrusive_ptr<c10d::Store> &store, int rank, int size, double timeout_s)
{
    return c10::make_intrusive<Group>(store, rank, size, Ns(timeout_s * 1e9));
}

} // namespace device
