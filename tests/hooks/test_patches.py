"""Functions of torch that a watch replaces look and pickle as torch's own."""

from __future__ import annotations

import concurrent.futures
import copy
import inspect
import multiprocessing
import pickle
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.fsdp._fully_shard
from torch import nn
from torch.autograd import profiler
from torch.distributed import distributed_c10d
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data._utils import fetch

from tests.support.long import long
from tests.support.recording import EVERYTHING, recorded
from torchlens_perf.hooks.loop.first_step import FirstStepTrigger
from torchlens_perf.hooks.loop.optimizer import relay
from torchlens_perf.recorder import patch
from torchlens_perf.recorder.patch import patched

FSDP = sys.modules["torch.distributed.fsdp._fully_shard._fsdp_param_group"]
ON_DEVICE_OR_LATER: list[tuple[Any, str]] = [
    (torch.cuda.memory, "_record_memory_history"),
    (torch.cuda.CUDAGraph, "capture_begin"),
    (torch.cuda.CUDAGraph, "capture_end"),
    (torch.cuda.CUDAGraph, "replay"),
    (DistributedDataParallel, "_sync_buffers"),
    (FSDP, "foreach_all_gather_copy_out"),
    (FSDP, "foreach_reduce"),
    (FSDP.FSDPParamGroup, "post_backward"),
    (FSDP.FSDPParamGroup, "finalize_backward"),
    (fetch._MapDatasetFetcher, "fetch"),
    (fetch._IterableDatasetFetcher, "fetch"),
    (distributed_c10d, "_register_process_group"),
    (profiler, "_enable_profiler"),
    (profiler, "_prepare_profiler"),
]
"""Patches that a watch makes on devices, of FSDP2, in captures, or with later versions of torch."""


def pickled(value: object) -> bytes | str:
    try:
        return pickle.dumps(value)
    except (TypeError, AttributeError, pickle.PicklingError) as error:
        return type(error).__name__


def signature(function: Any) -> str:
    try:
        return str(inspect.signature(function))
    except ValueError:
        return "none"


def describe(owner: Any, name: str) -> dict[str, object]:
    """Return all that the program can see of a function, apart from its type."""
    function = getattr(owner, name)
    names = ("__name__", "__qualname__", "__module__", "__doc__")
    found = {each: getattr(function, each, None) for each in names}
    return {**found, "signature": signature(function), "pickle": pickled(function)}


def check_places(places: list[tuple[Any, str]], plain: list[dict[str, object]]) -> None:
    for (owner, name), before in zip(places, plain, strict=True):
        function = getattr(owner, name)
        assert describe(owner, name) == before
        assert copy.copy(function) is copy.deepcopy(function) is function
        if isinstance(before["pickle"], bytes):
            assert pickle.loads(before["pickle"]) is function


def model_and_optimizer() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(4, 1)
    return model, torch.optim.SGD(model.parameters(), lr=0.01)


def test_every_patch_of_a_watch_looks_and_pickles_as_the_function_it_replaces(
    tmp_path: Path,
) -> None:
    with recorded(tmp_path, *model_and_optimizer(), **EVERYTHING):
        made = [stack[-1] for stack in patch._patches.values()]
        # A method of pybind11 can be neither pickled nor inspected, and has a generated name.
        made = [each for each in made if each.owner is not distributed_c10d.Work]
        places = [(each.owner, each.name) for each in made if not each.inherited]
        during = [describe(*place) for place in places]
        check_places(places, during)
        inherited = [(each.owner, each.name) for each in made if each.inherited]
        names = {name for _, name in places}
        assert {"save", "_engine_run_backward", "__next__", "__iter__", "__init__"} <= names
        check_places(inherited, [describe(*place) for place in inherited])

    check_places(places, during)


def test_patches_of_devices_and_captures_look_as_the_functions_they_replace() -> None:
    places = [(owner, name) for owner, name in ON_DEVICE_OR_LATER if hasattr(owner, name)]
    assert len(places) > 10
    plain = [describe(*place) for place in places]
    for (owner, name), before in zip(places, plain, strict=True):
        if not inspect.isfunction(getattr(owner, name)):
            # Private functions of torch that are written in C are pickled in another way.
            before["pickle"] = "PicklingError"
    with ExitStack() as attached:
        for owner, name in places:
            original = getattr(owner, name)
            forward: Callable[..., Any] = lambda *args, _call=original: _call(*args)  # noqa: E731
            attached.enter_context(patched(owner, name, forward))
            assert getattr(owner, name) is not original
        check_places(places, plain)


def test_other_names_of_a_function_are_the_same_function(tmp_path: Path) -> None:
    with recorded(tmp_path, *model_and_optimizer()):
        assert torch.save is torch.serialization.save
        assert torch.autograd._engine_run_backward is torch.autograd.graph._engine_run_backward
    assert torch.save is torch.serialization.save


def test_class_is_replaced_only_where_it_is_used() -> None:
    """Other users of torch.profiler.record_function keep the class."""
    with patched(FSDP, "record_function", lambda *args: None):
        assert profiler.record_function is torch.profiler.record_function
        assert isinstance(torch.profiler.record_function, type)


def test_bound_methods_and_earlier_references_pickle_inside_a_watch(tmp_path: Path) -> None:
    scaler, earlier = torch.amp.GradScaler("cpu"), torch.serialization.load
    with recorded(tmp_path, *model_and_optimizer()):
        assert pickle.loads(pickle.dumps(scaler.step)).__func__ is torch.amp.GradScaler.step
        assert pickle.loads(pickle.dumps(earlier)) is torch.load


def test_pickle_of_a_replaced_function_loads_without_this_package(tmp_path: Path) -> None:
    with recorded(tmp_path, *model_and_optimizer()):
        (tmp_path / "save.pickle").write_bytes(pickle.dumps(torch.save))
    program = (
        "import pickle, sys; save = pickle.load(open(sys.argv[1], 'rb')); import torch;"
        " print(save is torch.save, 'torchlens_perf' in sys.modules)"
    )
    run = [sys.executable, "-S", "-c", program, str(tmp_path / "save.pickle")]
    paths = ":".join(path for path in sys.path if path.endswith("site-packages"))
    # Else torch loads the installed package itself.
    env = {"PYTHONPATH": paths, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    done = subprocess.run(run, env=env, capture_output=True, text=True)

    assert done.stdout == "True False\n", done.stderr


@pytest.mark.parametrize("method", ["fork", *long("spawn", "forkserver")])
def test_pool_of_processes_writes_checkpoints_inside_a_watch(method: str, tmp_path: Path) -> None:
    context: Any = multiprocessing.get_context(method)
    state, files = {"a": torch.ones(2)}, [tmp_path / "pool.pt", tmp_path / "process.pt"]
    torch.set_num_threads(1)
    with recorded(tmp_path, *model_and_optimizer()):
        with concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as pool:
            pool.submit(torch.save, state, files[0]).result(60)
        process = context.Process(target=torch.save, args=(state, files[1]))
        process.start()
        process.join(60)

    assert [torch.load(file)["a"].tolist() for file in files] == [[1.0, 1.0]] * 2


def test_count_of_backward_passes_before_the_first_step_is_invisible() -> None:
    place = (torch.autograd, "_engine_run_backward")
    plain = describe(*place)
    original, waiting = (
        torch.autograd._engine_run_backward,
        FirstStepTrigger(lambda optimizer: None),
    )
    waiting.install()
    try:
        assert torch.autograd._engine_run_backward is not original
        check_places([place], [plain])
    finally:
        waiting.remove()
        relay.remove_hooks()
    assert torch.autograd._engine_run_backward is original
