// The tap on c10d's operators, in C++: built against the torch at hand by `torchlens-perf build-tap` (recorder/native_tap.py).
//
// A kernel at BackendSelect sees every collective and point-to-point operation, also those that DDP's reducer, FSDP2,
// DTensor and compiled graphs issue from C++, and sends it on unchanged. hooks/collectives/hook.py does the same in Python
// where this is not built, at some 50 us an operation.
//
// Once attached it stays, and passes everything on at once where no watch is on. The dispatcher lets nobody take a kernel
// away safely while another thread dispatches: that thread's operation then raises "fallthrough_kernel was executed", in
// the job, or runs a kernel that is freed; and in a forked child the dispatcher's mutex may be held for ever.
#include <Python.h>

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/jit/frontend/function_schema_parser.h>
#include <torch/library.h>

#include <pthread.h>

#include <atomic>
#include <exception>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <unordered_map>
#include <unordered_set>

#include "operators.h"
#include "tap_timing.h"

namespace {

constexpr uint32_t FLAG_EXCEPTION = 1, FLAG_ASYNC = 2;

// (operator, group, dtype, peer, device, backend's sequence)
// -> (name_id, slot, first sequence, called back, waited for)
PyObject *describe;
std::atomic<bool> on{false}; // a watch is
// By operator; with the GIL. Not destroyed at the process's end either.
auto &libraries = *new std::unordered_map<std::string, std::unique_ptr<torch::Library>>;
constexpr char OWNER[] = "torchlens_perf's native tap"; // so torch_dispatcher.find_kernel_owner() knows it

const c10::DispatchKeySet below_tap(c10::DispatchKeySet::FULL_AFTER, c10::DispatchKey::BackendSelect);

// An operator, and where it has its arguments.
struct Operator {
    std::string name;
    size_t arguments = 0;
    int group = -1, async_op = -1, peer = -1;
    bool point_to_point = false;
    bool payload = true; // a barrier's tensor is none
    bool returns = true, returns_work = false;
};

// What is described once. The device is of it: a group has a backend for each, and only some tell an operation's end.
struct Key {
    const Operator *called;
    std::string_view group;
    int64_t peer; // see peer_of()
    c10::ScalarType dtype; // Undefined where there is no payload
    c10::DeviceType device;

    bool operator==(const Key &) const = default;
};

struct KeyHash {
    size_t operator()(const Key &key) const
    {
        return c10::get_hash(key.called, key.group, key.peer, key.dtype, key.device);
    }
};

// Operations of one key in one watch.
struct Calls {
    uint32_t watch = 0;
    uint32_t name_id = 0, slot = 0;
    std::atomic<uint32_t> *next_sequence = nullptr; // none: it could not be described
    bool calls_back = false;
    // The end of the caller's wait is the end: not where waiting only orders a device's streams.
    bool waited_for = false;
};

// Counts the operations of a group, or of a pair of peers and a direction.
struct Counter {
    uint32_t watch = 0;
    std::atomic<uint32_t> next{0};
};

std::atomic<uint32_t> watch_number{0};

// Each thread asks for itself, so that finding takes no lock. Most operations have the key of the one before.
thread_local std::unordered_map<Key, Calls, KeyHash> calls_of;
thread_local std::pair<const Key, Calls> *latest;

// Nothing is ever taken out of these: a thread that is still in an operation when the watch ends may hold it.
std::mutex lock; // of the following
std::unordered_map<std::string, Operator> operators_by_name;
std::unordered_map<std::string, Counter> counters;
std::unordered_set<std::string> group_names;

bool is_class(const c10::Argument &argument, const char *name)
{
    return argument.type()->str() == std::string("__torch__.torch.classes.c10d.") + name;
}

// Of an argument or a result of such a class; valid for as long as that is.
template <class Class> Class *object_in(const c10::IValue &value)
{
    return static_cast<Class *>(value.toObjectRef().getSlot(0).toCapsule().get());
}

const Operator &known_operator(const std::string &name)
{
    std::lock_guard<std::mutex> guard(lock);
    auto found = operators_by_name.find(name);
    if (found != operators_by_name.end()) {
        return found->second;
    }
    c10::OperatorName parsed = torch::jit::parseName(name);
    c10::OperatorHandle handle =
        c10::Dispatcher::singleton().findSchemaOrThrow(parsed.name.c_str(), parsed.overload_name.c_str());
    const c10::FunctionSchema &schema = handle.schema();
    Operator known;
    known.name = name;
    known.arguments = schema.arguments().size();
    known.payload = name.find("barrier") == std::string::npos;
    known.returns = !schema.returns().empty();
    known.returns_work = known.returns && is_class(schema.returns().back(), "Work");
    for (size_t i = 0; i < schema.arguments().size(); i++) {
        const c10::Argument &argument = schema.arguments()[i];
        const std::string &role = argument.name();
        if (role == "process_group" && is_class(argument, "ProcessGroup")) {
            known.group = static_cast<int>(i);
        } else if (role == "async_op") {
            known.async_op = static_cast<int>(i);
        } else if (role == "root_rank" || role == "dst" || role == "src" || role == "output_split_sizes") {
            known.peer = static_cast<int>(i);
        }
        known.point_to_point |= role == "tag";
    }
    return operators_by_name.emplace(name, std::move(known)).first->second;
}

uint64_t bytes_of(const c10::IValue &value)
{
    if (value.isTensor()) {
        const at::Tensor &tensor = value.toTensor();
        return tensor.defined() ? tensor.nbytes() : 0;
    }
    uint64_t bytes = 0;
    if (value.isList()) {
        for (const c10::IValue &part : value.toListRef()) {
            bytes += bytes_of(part);
        }
    }
    return bytes;
}

const at::Tensor *first_tensor(const c10::IValue &value)
{
    if (value.isTensor()) {
        return value.toTensor().defined() ? &value.toTensor() : nullptr;
    }
    return value.isList() && !value.toListRef().empty() ? first_tensor(value.toListRef()[0]) : nullptr;
}

// The position of a root or a peer. Of an all-to-all that is split by rows, as tokens are, the bytes of a row; -1 if it
// is not, and where there are too many sizes to name.
int64_t peer_of(const c10::IValue &value, const at::Tensor *tensor)
{
    if (value.isInt()) {
        return value.toInt();
    }
    bool counts = tensor != nullptr && tensor->dim() > 0 && value.isIntList() && !value.toIntList().empty();
    return counts && calls_of.size() < 256 ? tensor->stride(0) * static_cast<int64_t>(tensor->element_size()) : -1;
}

// Asks Python for the names.
void fill(Calls &calls, const Key &key, int64_t backend_sequence)
{
    PyGILState_STATE state = PyGILState_Ensure();
    PyObject *function = describe; // another watch may replace it meanwhile
    if (function != nullptr) {
        Py_INCREF(function);
        const Operator &called = *key.called;
        const std::string group(key.group);
        const char *dtype = key.dtype == c10::ScalarType::Undefined ? "" : c10::toString(key.dtype);
        PyObject *result = PyObject_CallFunction(function, "sssLsL", called.name.c_str(), group.c_str(), dtype,
                                                 static_cast<long long>(key.peer),
                                                 c10::DeviceTypeName(key.device, true).c_str(),
                                                 static_cast<long long>(backend_sequence));
        unsigned int name_id = 0, slot = 0, first = 0;
        int calls_back = 0, waited_for = 0;
        if (result != nullptr && PyArg_ParseTuple(result, "IIIpp", &name_id, &slot, &first, &calls_back, &waited_for)) {
            calls.name_id = name_id;
            calls.slot = slot;
            calls.calls_back = calls_back != 0;
            calls.waited_for = waited_for != 0;
            // Point-to-point operations are counted by pair and direction, others by group.
            std::string counted = group;
            if (called.point_to_point) {
                counted = called.name + '/' + group + '/' + std::to_string(key.peer);
                first = 0;
            }
            std::lock_guard<std::mutex> guard(lock);
            Counter &counter = counters[counted];
            if (counter.watch != calls.watch) {
                counter.watch = calls.watch;
                counter.next = first;
            }
            calls.next_sequence = &counter.next;
        } else if (marks->pass_on(function)) {
            calls.watch--; // the next operation asks again
        }
        Py_XDECREF(result);
        Py_DECREF(function);
    }
    PyGILState_Release(state);
}

Calls *find_calls(Key key, c10d::ProcessGroup &group)
{
    uint32_t watch = watch_number.load(std::memory_order_relaxed);
    if (latest == nullptr || latest->second.watch != watch || !(latest->first == key)) {
        auto found = calls_of.find(key);
        if (found == calls_of.end()) {
            std::lock_guard<std::mutex> guard(lock);
            key.group = *group_names.emplace(key.group).first;
            found = calls_of.try_emplace(key).first;
        }
        latest = &*found; // stays where it is, whatever Python does meanwhile
    }
    Calls &calls = latest->second;
    if (calls.watch != watch) {
        int64_t backend_sequence = -1;
        try {
            backend_sequence = static_cast<int64_t>(group.getSequenceNumberForGroup());
        } catch (const std::exception &) {
            // this backend does not count
        }
        calls = Calls{watch};
        fill(calls, key, backend_sequence);
    }
    return calls.next_sequence ? &calls : nullptr;
}

c10::intrusive_ptr<c10::ivalue::Future> future_of(const c10::IValue &result, Calls &calls)
{
    try {
        c10d::Work *work = object_in<c10d::Work>(result);
        return work ? work->getFuture() : nullptr;
    } catch (const std::exception &) {
        calls.calls_back = false; // "Work::getFuture not implemented": asking again would cost an exception each time
        return {};
    }
}

void tapped(const Operator &called, const c10::OperatorHandle &op, c10::DispatchKeySet keys, torch::jit::Stack *stack)
{
    if (!on.load(std::memory_order_acquire)) {
        op.redispatchBoxed(keys & below_tap, stack);
        return;
    }
    const c10::IValue *given = stack->data() + (stack->size() - called.arguments);
    const at::Tensor *tensor = first_tensor(given[0]);
    // Who gathers nothing has tensors in the second argument alone.
    const at::Tensor *placed = tensor == nullptr && called.arguments > 1 ? first_tensor(given[1]) : tensor;
    c10::DeviceType device = placed == nullptr ? c10::kCPU : placed->device().type();
    Collective collective{};
    Calls *calls = nullptr;
    bool is_async = called.async_op < 0 || given[called.async_op].toBool();
    if (called.group >= 0 && device != c10::kMeta) {
        auto &group = *object_in<c10d::ProcessGroup>(given[called.group]);
        calls = find_calls({.called = &called,
                            .group = group.getGroupName(),
                            .peer = called.peer < 0 ? -1 : peer_of(given[called.peer], tensor),
                            .dtype = tensor != nullptr && called.payload ? tensor->scalar_type()
                                                                         : c10::ScalarType::Undefined,
                            .device = device},
                           group);
    }
    if (calls != nullptr) {
        collective.name_id = calls->name_id;
        collective.group = calls->slot;
        collective.sequence = calls->next_sequence->fetch_add(1);
        collective.flags = is_async ? FLAG_ASYNC : 0;
        collective.bytes = called.payload ? bytes_of(given[0]) : 0;
        calls = marks->issue(&collective) ? calls : nullptr;
    }
    Timing timing;
    if (calls != nullptr && !is_async && device != c10::kCPU && times.load(std::memory_order_relaxed)) {
        timing.begin();
    }
    try {
        op.redispatchBoxed(keys & below_tap, stack);
    } catch (...) {
        if (calls != nullptr) {
            collective.flags |= FLAG_EXCEPTION;
            marks->returned(&collective, END_UNKNOWN);
        }
        throw;
    }
    if (calls == nullptr) {
        return;
    }
    timing.end();
    if (!called.returns) {
        marks->returned(&collective, END_BY_RETURN);
        return;
    }
    c10::intrusive_ptr<c10::ivalue::Future> future;
    if (calls->calls_back && called.returns_work) {
        future = future_of(stack->back(), *calls);
    }
    if (!future) {
        marks->returned(&collective, is_async || !calls->waited_for ? END_UNKNOWN : END_BY_WAIT);
        return;
    }
    marks->returned(&collective, END_BY_CALLBACK);
    // On a thread of the backend, or at once if it has ended. Takes no GIL, keeps no tensor, and looks at no value, so
    // that no stream has to be waited for.
    future->addCallback(
        [pending = collective.pending](c10::ivalue::Future &ended) {
            (ended.hasError() ? marks->failed : marks->completed)(pending);
        },
        false);
}

class Tap : public c10::OperatorKernel {
  public:
    explicit Tap(const Operator &called) : called(called) {}

    void operator()(const c10::OperatorHandle &op, c10::DispatchKeySet keys, torch::jit::Stack *stack)
    {
        tapped(called, op, keys, stack);
    }

  private:
    const Operator &called;
};

void wait_tap(const c10::OperatorHandle &op, c10::DispatchKeySet keys, torch::jit::Stack *stack)
{
    const c10::IValue &given = stack->back();
    bool records = on.load(std::memory_order_acquire) && !(given.isTensor() && given.toTensor().is_meta()) && marks->wait_began();
    struct Ending {
        bool records;
        int raising = std::uncaught_exceptions();
        ~Ending()
        {
            if (records) {
                marks->wait_ended(std::uncaught_exceptions() > raising);
            }
        }
    } ending{records};
    op.redispatchBoxed(keys & below_tap, stack);
}

// attach(marks, operators, wait_operators, describe): what an earlier watch has attached is there.
PyObject *attach(PyObject *, PyObject *args)
{
    PyObject *capsule, *operators, *wait_operators, *function;
    if (!PyArg_ParseTuple(args, "OO!O!O", &capsule, &PyList_Type, &operators, &PyList_Type, &wait_operators,
                          &function)) {
        return nullptr;
    }
    auto attached = static_cast<const CollectiveMarks *>(PyCapsule_GetPointer(capsule, COLLECTIVE_MARKS_CAPSULE));
    if (attached == nullptr) {
        return nullptr;
    }
    if (attached->version != COLLECTIVE_MARKS_VERSION) {
        PyErr_SetString(PyExc_RuntimeError, "built for another version of torchlens_perf");
        return nullptr;
    }
    marks = operators::spans = attached;
    Py_INCREF(function);
    Py_XSETREF(describe, function);
    watch_number++;
    try {
        for (PyObject *names : {operators, wait_operators}) {
            for (Py_ssize_t i = 0; i < PyList_GET_SIZE(names); i++) {
                const char *text = PyUnicode_AsUTF8(PyList_GET_ITEM(names, i));
                if (text == nullptr) {
                    return nullptr;
                }
                std::string name(text);
                if (libraries.count(name) != 0) {
                    continue;
                }
                size_t colons = name.find("::");
                auto library = std::make_unique<torch::Library>(torch::Library::IMPL, name.substr(0, colons),
                                                                c10::DispatchKey::BackendSelect, OWNER, 0);
                const std::string in_namespace = name.substr(colons + 2);
                if (names == operators) {
                    auto tap = std::make_unique<Tap>(known_operator(name));
                    library->impl(in_namespace.c_str(), torch::CppFunction::makeFromBoxedFunctor(std::move(tap)));
                } else {
                    library->impl(in_namespace.c_str(), torch::CppFunction::makeFromBoxedFunction<&wait_tap>());
                }
                libraries.emplace(std::move(name), std::move(library));
            }
        }
    } catch (const std::exception &error) {
        PyErr_SetString(PyExc_RuntimeError, error.what());
        return nullptr;
    }
    on.store(true, std::memory_order_release);
    Py_RETURN_NONE;
}

// From here on everything is passed on at once. Takes no lock: it may be a forked child's.
PyObject *detach(PyObject *, PyObject *)
{
    on.store(false, std::memory_order_release);
    Py_CLEAR(describe);
    Py_RETURN_NONE;
}

PyMethodDef methods[] = {
    {"attach", attach, METH_VARARGS, nullptr},
    {"detach", detach, METH_NOARGS, nullptr},
    {"time_with", time_with, METH_O, nullptr},
    {"start_counting", operators::start_counting, METH_NOARGS, nullptr},
    {"stop_counting", operators::stop_counting, METH_NOARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_torchlens_perf_tap", nullptr, -1, methods, nullptr, nullptr,
                          nullptr, nullptr};

} // namespace

PyMODINIT_FUNC PyInit__torchlens_perf_tap()
{
    // A forked child must not find them held by a thread that it does not have. Once: a process that loads the library
    // under a second path runs this function again.
    static const int registered = pthread_atfork([] { std::lock(lock, operators::step_lock); },
                                                 [] { lock.unlock(), operators::step_lock.unlock(); },
                                                 [] { lock.unlock(), operators::step_lock.unlock(); });
    (void)registered;
    return PyModule_Create(&definition);
}
