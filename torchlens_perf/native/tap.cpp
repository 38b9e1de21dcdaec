// The tap on c10d's operators, in C++: built against the torch at hand by `torchlens-perf build-tap` (native_tap.py).
//
// A kernel at BackendSelect sees every collective and point-to-point operation, also those that DDP's reducer, FSDP2,
// DTensor and compiled graphs issue from C++, and sends it on unchanged. hooks/collective.py does the same in Python
// where this is not built, at some 50 us an operation.
#include <Python.h>

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/library.h>

#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

extern "C" {
#include "collective.h"
}

namespace {

constexpr uint32_t FLAG_EXCEPTION = 1, FLAG_ASYNC = 2;

const CollectiveMarks *marks;
// (operator, group, dtype, peer, on_cpu, backend's sequence) -> (name_id, slot, first sequence, called back, waited for)
PyObject *describe;
std::vector<std::unique_ptr<torch::Library>> libraries;

const c10::DispatchKeySet below_tap(c10::DispatchKeySet::FULL_AFTER, c10::DispatchKey::BackendSelect);

// Where an operator has its arguments.
struct Arguments {
    std::string name;
    int group = -1, async_op = -1, peer = -1;
    bool point_to_point = false;
    bool payload = true; // a barrier's tensor is none
};

// Operations of one kind on one group.
struct Calls {
    uint32_t name_id = 0, slot = 0;
    std::shared_ptr<std::atomic<uint32_t>> next_sequence;
    std::atomic<bool> calls_back{false};
    bool waited_for = false; // the end of the caller's wait is the end: not where waiting only orders a device's streams
};

std::mutex lock; // of the three tables
std::unordered_map<const void *, Arguments> arguments_of;
std::unordered_map<std::string, Calls> calls_of;
std::unordered_map<std::string, std::shared_ptr<std::atomic<uint32_t>>> sequence_of;

const Arguments &arguments(const c10::OperatorHandle &op)
{
    const c10::FunctionSchema &schema = op.schema();
    std::lock_guard<std::mutex> guard(lock);
    auto [found, is_new] = arguments_of.try_emplace(&schema);
    if (is_new) {
        Arguments &places = found->second;
        places.name = schema.name();
        places.payload = places.name.find("barrier") == std::string::npos;
        for (size_t i = 0; i < schema.arguments().size(); i++) {
            const std::string &name = schema.arguments()[i].name();
            if (name == "process_group") {
                places.group = static_cast<int>(i);
            } else if (name == "async_op") {
                places.async_op = static_cast<int>(i);
            } else if (name == "root_rank" || name == "dst" || name == "src") {
                places.peer = static_cast<int>(i);
            }
            places.point_to_point |= name == "tag";
        }
    }
    return found->second;
}

uint64_t bytes_of(const c10::IValue &value)
{
    if (value.isTensor()) {
        const at::Tensor &tensor = value.toTensor();
        return tensor.defined() ? tensor.nbytes() : 0;
    }
    uint64_t bytes = 0;
    if (value.isTensorList()) {
        for (const at::Tensor &tensor : value.toTensorVector()) {
            bytes += tensor.nbytes();
        }
    } else if (value.isList()) {
        for (const c10::IValue &part : value.toListRef()) {
            bytes += bytes_of(part);
        }
    }
    return bytes;
}

at::Tensor first_tensor(const c10::IValue &value)
{
    if (value.isTensor()) {
        return value.toTensor();
    }
    if (value.isTensorList()) {
        auto tensors = value.toTensorList();
        return tensors.empty() ? at::Tensor() : tensors.get(0);
    }
    if (value.isList() && !value.toListRef().empty()) {
        return first_tensor(value.toListRef()[0]);
    }
    return at::Tensor();
}

// Asks Python for the names: once for each operation, group, type and peer.
bool fill(Calls &calls, const Arguments &places, const std::string &group_name, const char *dtype, int64_t peer,
          bool on_cpu, int64_t backend_sequence)
{
    PyGILState_STATE state = PyGILState_Ensure();
    PyObject *told = PyObject_CallFunction(describe, "sssLOL", places.name.c_str(), group_name.c_str(), dtype,
                                           static_cast<long long>(peer), on_cpu ? Py_True : Py_False,
                                           static_cast<long long>(backend_sequence));
    unsigned int name_id = 0, slot = 0, first = 0;
    int calls_back = 0, waited_for = 0;
    bool filled =
        told != nullptr && PyArg_ParseTuple(told, "IIIpp", &name_id, &slot, &first, &calls_back, &waited_for);
    if (filled) {
        calls.name_id = name_id;
        calls.slot = slot;
        calls.calls_back = calls_back != 0;
        calls.waited_for = waited_for != 0;
        // Point-to-point operations are counted by pair and direction, others by group.
        std::string counted = group_name;
        if (places.point_to_point) {
            counted = places.name + '/' + group_name + '/' + std::to_string(peer);
            first = 0;
        }
        auto &shared = sequence_of[counted];
        if (!shared) {
            shared = std::make_shared<std::atomic<uint32_t>>(first);
        }
        calls.next_sequence = shared;
    } else {
        PyErr_WriteUnraisable(describe);
    }
    Py_XDECREF(told);
    PyGILState_Release(state);
    return filled;
}

Calls *find_calls(const Arguments &places, c10d::ProcessGroup &group, const at::Tensor &tensor, int64_t peer)
{
    const std::string &group_name = group.getGroupName();
    const char *dtype = tensor.defined() && places.payload ? c10::toString(tensor.scalar_type()) : "";
    std::string key = places.name + '/' + group_name + '/' + dtype + '/' + std::to_string(peer);
    {
        std::lock_guard<std::mutex> guard(lock);
        auto found = calls_of.find(key);
        if (found != calls_of.end()) {
            return found->second.next_sequence ? &found->second : nullptr;
        }
    }
    int64_t backend_sequence = -1;
    try {
        backend_sequence = static_cast<int64_t>(group.getSequenceNumberForGroup());
    } catch (const std::exception &) {
        // this backend does not count
    }
    Calls *calls;
    {
        std::lock_guard<std::mutex> guard(lock);
        calls = &calls_of[key]; // stays where it is: an unordered_map does not move its values
    }
    if (!calls->next_sequence) {
        // Without the lock: the GIL is waited for in here, and its holder may be waiting for the lock.
        fill(*calls, places, group_name, dtype, peer, !tensor.defined() || tensor.is_cpu(), backend_sequence);
    }
    return calls->next_sequence ? calls : nullptr;
}

c10::intrusive_ptr<c10::ivalue::Future> future_of(const torch::jit::Stack &stack, Calls &calls)
{
    if (!calls.calls_back || stack.empty() || !stack.back().isCustomClass()) {
        return {};
    }
    try {
        auto work = stack.back().toCustomClass<c10d::Work>();
        return work ? work->getFuture() : nullptr;
    } catch (const std::exception &) {
        calls.calls_back = false; // "Work::getFuture not implemented": asking again would cost an exception each time
        return {};
    }
}

void collective_tap(const c10::OperatorHandle &op, c10::DispatchKeySet keys, torch::jit::Stack *stack)
{
    const Arguments &places = arguments(op);
    size_t count = op.schema().arguments().size();
    const c10::IValue *given = stack->data() + (stack->size() - count);
    at::Tensor tensor = first_tensor(given[0]);
    Collective collective{};
    Calls *calls = nullptr;
    bool is_async = places.async_op < 0 || given[places.async_op].toBool();
    if (places.group >= 0 && !(tensor.defined() && tensor.is_meta())) {
        auto group = given[places.group].toCustomClass<c10d::ProcessGroup>();
        int64_t peer = places.peer < 0 ? -1 : given[places.peer].toInt();
        calls = find_calls(places, *group, tensor, peer);
    }
    if (calls != nullptr) {
        collective.name_id = calls->name_id;
        collective.group = calls->slot;
        collective.sequence = calls->next_sequence->fetch_add(1);
        collective.flags = is_async ? FLAG_ASYNC : 0;
        collective.bytes = places.payload ? bytes_of(given[0]) : 0;
        if (!marks->issue(&collective)) {
            calls = nullptr;
        }
    }
    tensor.reset();
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
    if (op.schema().returns().empty()) {
        marks->returned(&collective, END_BY_RETURN);
        return;
    }
    auto future = future_of(*stack, *calls);
    if (!future) {
        marks->returned(&collective, is_async || !calls->waited_for ? END_UNKNOWN : END_BY_WAIT);
        return;
    }
    marks->returned(&collective, END_BY_CALLBACK);
    // On a thread of the backend, or at once if it has ended. Takes no GIL, keeps no tensor.
    future->addCallback([collective](c10::ivalue::Future &ended) mutable {
        if (ended.hasError()) {
            collective.flags |= FLAG_EXCEPTION;
        }
        marks->completed(&collective);
    });
}

void wait_tap(const c10::OperatorHandle &op, c10::DispatchKeySet keys, torch::jit::Stack *stack)
{
    const c10::IValue &given = stack->back();
    bool records = !(given.isTensor() && given.toTensor().is_meta()) && marks->wait_began();
    struct Ending {
        bool records;
        ~Ending()
        {
            if (records) {
                marks->wait_ended();
            }
        }
    } ending{records};
    op.redispatchBoxed(keys & below_tap, stack);
}

// attach(marks, operators, wait_operators, describe)
PyObject *attach(PyObject *, PyObject *args)
{
    PyObject *capsule, *operators, *wait_operators, *function;
    if (!PyArg_ParseTuple(args, "OO!O!O", &capsule, &PyList_Type, &operators, &PyList_Type, &wait_operators,
                          &function)) {
        return nullptr;
    }
    auto told = static_cast<const CollectiveMarks *>(PyCapsule_GetPointer(capsule, COLLECTIVE_MARKS_CAPSULE));
    if (told == nullptr) {
        return nullptr;
    }
    if (told->version != COLLECTIVE_MARKS_VERSION) {
        PyErr_SetString(PyExc_RuntimeError, "built for another version of torchlens_perf");
        return nullptr;
    }
    marks = told;
    Py_INCREF(function);
    Py_XSETREF(describe, function);
    {
        std::lock_guard<std::mutex> guard(lock);
        calls_of.clear();
        sequence_of.clear();
    }
    try {
        for (PyObject *names : {operators, wait_operators}) {
            for (Py_ssize_t i = 0; i < PyList_GET_SIZE(names); i++) {
                const char *text = PyUnicode_AsUTF8(PyList_GET_ITEM(names, i));
                if (text == nullptr) {
                    libraries.clear();
                    return nullptr;
                }
                std::string name(text);
                size_t colons = name.find("::");
                auto library = std::make_unique<torch::Library>(torch::Library::IMPL, name.substr(0, colons),
                                                                c10::DispatchKey::BackendSelect, __FILE__, __LINE__);
                const std::string in_namespace = name.substr(colons + 2);
                if (names == operators) {
                    library->impl(in_namespace.c_str(), torch::CppFunction::makeFromBoxedFunction<&collective_tap>());
                } else {
                    library->impl(in_namespace.c_str(), torch::CppFunction::makeFromBoxedFunction<&wait_tap>());
                }
                libraries.push_back(std::move(library));
            }
        }
    } catch (const std::exception &error) {
        libraries.clear();
        PyErr_SetString(PyExc_RuntimeError, error.what());
        return nullptr;
    }
    Py_RETURN_NONE;
}

PyObject *detach(PyObject *, PyObject *)
{
    libraries.clear();
    Py_CLEAR(describe);
    Py_RETURN_NONE;
}

PyMethodDef methods[] = {
    {"attach", attach, METH_VARARGS, nullptr},
    {"detach", detach, METH_NOARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_torchlens_perf_tap", nullptr, -1, methods, nullptr, nullptr,
                          nullptr, nullptr};

} // namespace

PyMODINIT_FUNC PyInit__torchlens_perf_tap()
{
    return PyModule_Create(&definition);
}
