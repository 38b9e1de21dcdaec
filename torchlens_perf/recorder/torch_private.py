"""List all private names of PyTorch that this package uses, with a check and the effect of absence.

A private name may only occur in this module and in the hook that uses the name. `torchlens-perf
doctor` prints this table for the installed torch. If a check fails, the hook raises HookUnavailable
and is left out, and the report notes what is not measured.
"""

from __future__ import annotations

import functools
import inspect
import pkgutil
import sys
import traceback
import types
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

from torchlens_perf.errors import HookUnavailable
from torchlens_perf.interruption import ours

OLDEST_TORCH, NEWEST_TORCH = (2, 11), (2, 15)
MODULE_CALL = "torch.nn.Module._wrapped_call_impl"
PROFILER = "torch.autograd.profiler._enable_profiler"
FLIGHT_RECORDER = "torch._C._distributed_c10d._dump_fr_trace_json"
SNAPSHOT = "torch._C._cuda_memorySnapshot"
GROUP_REGISTRATION = "torch.distributed.distributed_c10d._register_process_group"
WAIT_TENSOR = "_c10d_functional::wait_tensor"
FSDP2 = "torch.distributed.fsdp._fully_shard"
# The profiler range after which FSDP2 waits for a reduce-scatter.
FSDP2_BEFORE_WAIT = "FSDP::post_backward_reshard"
DDP_BUFFERS = "torch.nn.parallel.DistributedDataParallel._sync_buffers"
LOCAL_TENSOR = "torch.distributed.tensor.DTensor._local_tensor"
STREAM_HANDLE = "torch._C._cuda_getCurrentRawStream"
COMPILE_TIMES = "torch._dynamo.utils.calculate_time_spent"
RECOMPUTATION = "torch.utils.checkpoint._recomputation_hook"
TRACING_CONTEXT = "torch._guards.TracingContext"
NO_TORCH_FUNCTION = "torch._C.DisableTorchFunction"


class PrivateName(NamedTuple):
    """A private name of torch, a check that it works, and the effect of its absence."""

    name: str
    works: Callable[[], bool]
    without: str


def parse_torch_version(text: str) -> tuple[int, int]:
    """Return (major, minor) of a version such as "2.13.0+cpu"."""
    major, minor, *_ = text.split(".")
    return int(major), int(minor)


@functools.cache
def is_usable(name: str) -> bool:
    """Return True if this private name passes its check. Each name is checked once per process.

    Errors of missing or changed names count as a failed check. Other exceptions are raised.
    """
    try:
        return _by_name[name].works()
    except ours(
        ImportError,
        AttributeError,
        LookupError,
        TypeError,
        ValueError,
        RuntimeError,
        AssertionError,
        OSError,
    ):
        return False


def require(name: str) -> None:
    """Raise HookUnavailable if the private name fails its check."""
    if not is_usable(name):
        raise HookUnavailable(f"torch lacks {name}: {_by_name[name].without}")


def _create_callable_check(name: str, without: str) -> PrivateName:
    """Return an entry whose check only looks up the name.

    A call of the function could have side effects, such as starting threads.
    """
    return PrivateName(name, lambda: callable(pkgutil.resolve_name(name)), without)


def _create_context_check(name: str, without: str) -> PrivateName:
    """Return an entry whose check enters the context manager of this name."""

    def works() -> bool:
        with pkgutil.resolve_name(name)():
            return True

    return PrivateName(name, works, without)


def _check_module_call() -> bool:
    from torch.nn import Module

    function = Module._wrapped_call_impl
    return isinstance(function, types.FunctionType) and "_call_impl" in function.__code__.co_names


def _check_step_wrapper() -> bool:
    from torch.optim import Optimizer

    codes = [
        each
        for each in Optimizer.profile_hook_step.__code__.co_consts
        if isinstance(each, types.CodeType)
    ]
    return [(each.co_name, "self" in each.co_varnames) for each in codes] == [("wrapper", True)]


def _check_recomputation() -> bool:
    from torch.utils import checkpoint

    def collect_names(code: types.CodeType) -> set[str]:
        inner = (each for each in code.co_consts if isinstance(each, types.CodeType))
        return set(code.co_names).union(*map(collect_names, inner))

    # Checkpointing enters `_recomputation_hook` around each recomputed forward pass.
    uses_it = "_recomputation_hook" in collect_names(checkpoint._checkpoint_hook.__init__.__code__)
    contexts = (checkpoint._recomputation_hook.__enter__, checkpoint._recomputation_hook.__exit__)
    return uses_it and all(map(callable, (*contexts, checkpoint.CheckpointFunction.backward)))


def _check_dispatcher_tap() -> bool:
    import torch

    key = torch._C.DispatchKey.BackendSelect
    torch._C._dispatch_keyset_full_after(key)
    return callable(torch._C._dispatch_library) and torch._C._dispatch_dump(
        "c10d::allreduce_"
    ).startswith("name: ")


def _check_work_wait() -> bool:
    from torch._C._distributed_c10d import Work

    original = Work.wait
    setattr(Work, "wait", original)  # noqa: B010 -- checks that the class can be patched
    return callable(original)


def _check_skip_code() -> bool:
    _skip_code_objects([_check_skip_code.__code__])
    return True


def _create_cuda_check(*names: str) -> Callable[[], bool]:
    """Return a check that torch has these functions. The check passes in a build without CUDA."""

    def has_functions() -> bool:
        import torch

        return not torch.backends.cuda.is_built() or all(
            callable(getattr(torch._C, name)) for name in names
        )

    return has_functions


def is_profile_prepared(profile: Any) -> bool:
    """Return True if a torch.autograd.profiler.profile has been prepared and has not ended."""
    return bool(getattr(profile, "entered", False)) and profile.kineto_results is None


def create_all_threads_config() -> Any:
    """Return a profiler configuration that records all threads, and that any thread may end."""
    from torch._C._profiler import _ExperimentalConfig

    return _ExperimentalConfig(profile_all_threads=True)


def _check_profiler() -> bool:
    import torch
    from torch.autograd import profiler

    calls = (
        profiler._prepare_profiler, profiler._enable_profiler, profiler._run_on_profiler_stop,
        torch._C._autograd._clear_callbacks,
    )  # fmt: skip
    unused = profiler.profile(use_kineto=True, experimental_config=create_all_threads_config())
    return (
        all(map(callable, calls))
        and not is_profile_prepared(unused)
        and profiler._is_profiler_enabled in (True, False)
    )


def _check_fsdp2() -> bool:
    from torch.distributed.fsdp._fully_shard import _fsdp_collectives, _fsdp_param_group

    group = _fsdp_param_group.FSDPParamGroup
    used, unshard = (
        inspect.unwrap(each).__code__ for each in (group.post_backward, group.wait_for_unshard)
    )
    return (
        {"record_function", "reduce_grads", "foreach_reduce"} <= set(used.co_names)
        and any(FSDP2_BEFORE_WAIT in str(each) for each in used.co_consts)
        and "foreach_all_gather_copy_out" in unshard.co_names
        and "all_gather_event" in _fsdp_collectives.AllGatherResult._fields
        and callable(group.finalize_backward)
    )


PRIVATE_NAMES = (
    PrivateName(
        MODULE_CALL,
        _check_module_call,
        "modules have no times once another tool has replaced torch.nn.Module.__call__ and put it"
        " back",
    ),
    _create_callable_check("torch.autograd._engine_run_backward", "the backward pass is not timed"),
    _create_callable_check(
        "torch.autograd.Variable._execution_engine.queue_callback",
        "waiting at the end of the backward pass counts as backward, and slow ranks cannot be"
        " distinguished from waiting ones",
    ),
    PrivateName(
        "torch.optim.Optimizer.profile_hook_step",
        _check_step_wrapper,
        "an optimizer that calls its base class's step may count as two steps",
    ),
    PrivateName(
        RECOMPUTATION,
        _check_recomputation,
        "recomputation is distinguished from the backward pass only where watched modules are run"
        " again",
    ),
    _create_context_check(
        NO_TORCH_FUNCTION,
        "the user's own torch function modes and tensor classes see the hooks that are attached to"
        " tensors",
    ),
    _create_context_check(
        "torch._C._DisableTorchDispatch", "a restored checkpoint's count of steps is not read"
    ),
    _create_callable_check(
        "torch.utils.data.dataloader._BaseDataLoaderIter", "waiting for data is not timed"
    ),
    _create_callable_check(
        "torch.utils.data._utils.fetch._MapDatasetFetcher.fetch", "loader workers are not measured"
    ),
    _create_callable_check(
        "torch.utils.data._utils.fetch._IterableDatasetFetcher.fetch",
        "loader workers are not measured",
    ),
    PrivateName(
        "torch.ops.c10d at BackendSelect", _check_dispatcher_tap, "collectives are not recorded"
    ),
    PrivateName(
        "torch._C._distributed_c10d.Work.wait",
        _check_work_wait,
        "time blocked in collectives is not measured",
    ),
    PrivateName(
        GROUP_REGISTRATION,
        lambda: (
            callable(pkgutil.resolve_name(GROUP_REGISTRATION))
            and isinstance(
                pkgutil.resolve_name("torch.distributed.distributed_c10d._world").pg_map, dict
            )
        ),
        "without the native tap, collectives are not recorded",
    ),
    PrivateName(
        TRACING_CONTEXT,
        lambda: pkgutil.resolve_name(TRACING_CONTEXT).try_get() is None,
        "backward passes of the compiler count as the job's",
    ),
    PrivateName(
        "torch._C._dynamo.eval_frame.set_code_exec_strategy",
        _check_skip_code,
        "torch.compile compiles our hooks where it meets them",
    ),
    PrivateName(FSDP2, _check_fsdp2, "what a device waits for in FSDP2 counts as its own work"),
    _create_callable_check(
        DDP_BUFFERS, "a device's waiting for DDP's buffers counts as its own work"
    ),
    PrivateName(
        LOCAL_TENSOR,
        lambda: (
            "_local_tensor" in pkgutil.resolve_name("torch.distributed.tensor.DTensor").__slots__
        ),
        "gradients that FSDP2 accumulates count as one micro-step",
    ),
    PrivateName(
        STREAM_HANDLE,
        _create_cuda_check("_cuda_getCurrentRawStream"),
        "each mark on the device costs the host about a microsecond more",
    ),
    PrivateName(
        "torch._C._cuda_attach_out_of_memory_observer",
        _create_cuda_check("_cuda_attach_out_of_memory_observer"),
        "if a rank runs out of device memory, no table shows what held it",
    ),
    PrivateName(
        SNAPSHOT,
        _create_cuda_check("_cuda_memorySnapshot"),
        "if a rank runs out of device memory, no table shows what held it; captures have no memory"
        " snapshot",
    ),
    PrivateName(
        "torch.cuda.memory._record_memory_history",
        _create_cuda_check("_cuda_isHistoryEnabled", "_cuda_record_memory_history"),
        "memory history is off, and tables of device memory have no stacks",
    ),
    PrivateName(
        COMPILE_TIMES,
        lambda: isinstance(pkgutil.resolve_name(COMPILE_TIMES)()["total_wall_time"], (int, float)),
        "the report does not show how long torch.compile took",
    ),
    PrivateName(PROFILER, _check_profiler, "nothing is captured"),
    _create_callable_check(FLIGHT_RECORDER, "captures contain no flight-recorder entries"),
)
_by_name = {entry.name: entry for entry in PRIVATE_NAMES}


def get_private_device_type() -> str:
    """Return the type of devices that are added to torch by other packages, such as "npu"."""
    import torch

    return str(torch._C._get_privateuse1_backend_name())


def remove_optimizer_step_hooks(hooks: Collection[Callable[..., Any]]) -> None:
    """Remove the global hooks of all optimizers' steps that are in `hooks`."""
    from torch.optim import optimizer

    for registered in (
        optimizer._global_optimizer_pre_hooks,
        optimizer._global_optimizer_post_hooks,
    ):
        for number in [number for number, hook in registered.items() if hook in hooks]:
            del registered[number]


def get_module_call_function() -> Callable[..., Any]:
    """Return torch's function that each call of a module runs."""
    from torch.nn import Module

    name = "_wrapped_call_impl" if is_usable(MODULE_CALL) else "__call__"
    return getattr(Module, name)


def is_module_compiled(module: Any) -> bool:
    """Return True if torch.compile(module) created this module, or module.compile() was called."""
    return (
        type(module).__name__ == "OptimizedModule"
        or module.__dict__.get("_compiled_call_impl") is not None
    )


def read_compiler_config(module: Any) -> dict[str, Any] | None:
    """Return the compiler's settings for a compiled module; None if its backend reports none."""
    compiled = module.__dict__.get("_compiled_call_impl") or module
    read = getattr(compiled, "get_compiler_config", None)
    return read() if callable(read) else None


def queue_backward_end_callback(callback: Callable[[], None]) -> None:
    """Run `callback` when the backward pass in progress has computed all gradients."""
    from torch.autograd import Variable

    Variable._execution_engine.queue_callback(callback)


def get_tracing_context_reader() -> Callable[[], object]:
    """Return a function whose result is None unless torch.compile is tracing on
    the calling thread.
    """
    if not is_usable(TRACING_CONTEXT):
        return lambda: None
    return pkgutil.resolve_name(TRACING_CONTEXT).try_get


def get_tracing_locals() -> object:
    """Return the thread's variables with torch.compile's tracing context, or None if unknown."""
    if not is_usable(TRACING_CONTEXT):
        return None
    return getattr(pkgutil.resolve_name("torch._guards"), "_TLS", None)


def get_no_torch_function_context() -> Callable[[], AbstractContextManager[object]]:
    """Return a context manager that hides calls from the user's torch function modes and tensor
    subclasses.
    """
    return pkgutil.resolve_name(NO_TORCH_FUNCTION) if is_usable(NO_TORCH_FUNCTION) else nullcontext


def get_no_torch_dispatch_context() -> AbstractContextManager[object]:
    """Return a context manager that hides operators from the user's dispatch modes.

    Check "torch._C._DisableTorchDispatch" first.
    """
    return pkgutil.resolve_name("torch._C._DisableTorchDispatch")()


def get_local_shard(tensor: Any) -> Any:
    """Return the local shard of a DTensor, or any other tensor unchanged."""
    return getattr(tensor, "_local_tensor", tensor)


def find_steps_in_progress() -> list[int] | None:
    """Return the ids of optimizers whose step() is in progress, innermost first, or None if
    unknown.
    """
    if not is_usable("torch.optim.Optimizer.profile_hook_step"):
        return None
    return [
        id(frame.f_locals.get("self"))
        for frame, _ in traceback.walk_stack(sys._getframe(1))
        if frame.f_code.co_name == "wrapper"
        and frame.f_globals.get("__name__") == "torch.optim.optimizer"
    ]


def get_stream_handle_reader() -> Callable[[int], int] | None:
    """Return the function that reads the handle of a CUDA device's current stream, or None."""
    import torch

    # A build without CUDA passes the check, but lacks the function.
    reader = getattr(torch._C, "_cuda_getCurrentRawStream", None)
    return reader if is_usable(STREAM_HANDLE) else None


def read_compile_s() -> float | None:
    """Return the total time of torch.compile in this process in seconds, or None if unknown.

    Dynamo is not imported: a process that has not imported Dynamo has compiled nothing.
    """
    module = sys.modules.get("torch._dynamo.utils")
    if module is None:
        return 0.0
    if not is_usable(COMPILE_TIMES):
        return None
    return float(module.calculate_time_spent()["total_wall_time"])


def is_autograd_compiled() -> bool:
    """Return True if compiled autograd is enabled.

    Gradient hooks would then become part of compiled graphs.
    """
    module = sys.modules.get("torch._dynamo.compiled_autograd")
    return bool(getattr(module, "compiled_autograd_enabled", False))


def break_graph_at(function: Any) -> Any:
    """Let Dynamo break the graph at calls of `function`. Return `function`.

    Functions written in C always break the graph.
    """
    if isinstance(function, types.FunctionType):
        function._torchdynamo_disable = True  # type: ignore[attr-defined]
    return function


def call_without_dynamo(function: Callable[[Any], object], argument: Any) -> None:
    """Call a function once, while Dynamo translates neither it nor the functions that it calls."""
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is not None:
        function = dynamo.disable(function)
    function(argument)


_CACHED = functools._lru_cache_wrapper
_FUNCTIONS = (types.FunctionType, staticmethod, classmethod, property, _CACHED)
_HOOK_BODIES = ("call_hook", "guarded")
"""Functions of this package that run a hook's body, which calls functions of other packages such as
json, but none of the user. Dynamo also skips the functions that they call.
"""
_skipped_modules: dict[str, types.ModuleType] = {}
"""Modules whose functions Dynamo skips. Looking at all functions takes milliseconds."""


def make_dynamo_skip_package() -> None:
    """Let Dynamo skip all frames of this package.

    After a graph break, at backward() or in an optimizer, Dynamo tries to compile every Python
    function that runs, including hooks and the functions that hooks call.
    """
    if not is_usable("torch._C._dynamo.eval_frame.set_code_exec_strategy"):
        return
    package = __name__.partition(".")[0]
    for name, module in list(sys.modules.items()):
        # Exclude recorder.py: its wrappers are compiled together with the user's functions.
        ours = name.startswith(package + ".") and not name.endswith(".recorder")
        if ours and _skipped_modules.get(name) is not module:
            _skipped_modules[name] = module
            _skip_code_objects(_find_code_objects(module))


def _skip_code_objects(codes: Iterable[types.CodeType]) -> None:
    # Do the same as torch._dynamo.skip(), without the slow import of torch._dynamo.
    from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy

    # Skip a frame, but not the frames that it calls, because these may be the user's.
    skip = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.DEFAULT)
    skip_with_calls = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP)
    for code in codes:
        set_code_exec_strategy(code, skip_with_calls if code.co_name in _HOOK_BODIES else skip)


def _find_code_objects(module: types.ModuleType) -> Iterator[types.CodeType]:
    """Yield the code of all functions that are defined in a module, also inside other functions."""
    codes = []
    for value in vars(module).values():
        # Names that a module has imported from elsewhere are most of its names.
        if getattr(value, "__module__", None) == module.__name__:
            for member in vars(value).values() if isinstance(value, type) else (value,):
                if isinstance(member, _FUNCTIONS):
                    function: Any = member.fget if isinstance(member, property) else member
                    while hasattr(function, "__wrapped__"):
                        function = function.__wrapped__
                    code = getattr(function, "__code__", None)
                    if code is not None and code.co_filename == module.__file__:
                        codes.append(code)
    while codes:
        code = codes.pop()
        yield code
        codes += [each for each in code.co_consts if isinstance(each, types.CodeType)]


def runs_float32_in_tf32(backend: Any) -> bool:
    """Return True if products of float32 run in TF32 on CUDA devices.

    backend: torch.backends.cuda.matmul, or torch.backends.cudnn.conv for convolutions.
    """
    import torch

    chosen = getattr(backend, "fp32_precision", "none")
    if chosen == "none":
        chosen = getattr(torch.backends, "fp32_precision", "none")
    if chosen == "none":
        return bool(getattr(backend, "allow_tf32", torch.backends.cudnn.allow_tf32))
    return bool(chosen == "tf32")
