"""Watches that threads begin and end at the same time: one records, and no trace of it is left."""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import optimizer as torch_optimizer
from torch.utils import checkpoint
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter

import torchlens_perf as perf
from torchlens_perf.errors import ConfigError
from torchlens_perf.hooks.loop import first_step
from torchlens_perf.recorder import patch
from torchlens_perf.recorder.patch import patched

SETTINGS: dict[str, Any] = {"sidecar": False, "report": "off"}


def state_of_torch() -> dict[str, Any]:
    """Return everything that a watch changes outside itself."""
    return {
        "backward": torch.autograd._engine_run_backward,
        "save": torch.save,
        "next": _BaseDataLoaderIter.__next__,
        "iter": DataLoader.__iter__,
        "scaler": torch.amp.GradScaler.step,
        "wait": torch._C._distributed_c10d.Work.wait,
        "call": nn.Module.__call__,
        "construct": torch.optim.Optimizer.__init__,
        "checkpoint": vars(checkpoint.CheckpointFunction)["backward"],
        "recomputation": (
            checkpoint._recomputation_hook.__enter__,
            checkpoint._recomputation_hook.__exit__,
        ),
        "before": list(torch_optimizer._global_optimizer_pre_hooks.values()),
        "after": list(torch_optimizer._global_optimizer_post_hooks.values()),
        "gc": list(gc.callbacks),
        "patches": dict(patch._patches),
    }


def make() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    return model, torch.optim.AdamW(model.parameters())


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for _ in range(steps):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("threads", [2, 3, 8])
def test_torch_is_restored_after_watches_in_several_threads(tmp_path: Path, threads: int) -> None:
    """The watches begin together and end one after the other, the first one first."""
    before, begin = state_of_torch(), threading.Barrier(threads)

    def trial(number: int) -> None:
        model, optimizer = make()
        begin.wait(60)
        with perf.watch(model, optimizer, dir=str(tmp_path), **SETTINGS):
            train(model, optimizer, 5 * (number + 1))

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(trial, range(threads)))
    assert state_of_torch() == before
    assert perf.watch(**SETTINGS)._recording_watch()._session is None


def test_watches_that_begin_together_make_one_run(tmp_path: Path) -> None:
    """The first watch records, and the other ones join it."""
    together, ended = threading.Barrier(4), threading.Barrier(4)

    def enter(_: int) -> Path | None:
        together.wait(60)
        with perf.watch(dir=str(tmp_path), **SETTINGS) as watch:
            ended.wait(60)
            return watch.run_dir

    with ThreadPoolExecutor(4) as pool:
        folders = set(pool.map(enter, range(4)))
    assert len(folders) == 1


def test_watch_object_is_entered_by_only_one_of_two_threads(tmp_path: Path) -> None:
    watch, together = perf.watch(dir=str(tmp_path), **SETTINGS), threading.Barrier(2)

    def enter(_: int) -> bool:
        together.wait(60)
        try:
            watch.__enter__()
        except ConfigError:
            return False
        return True

    with ThreadPoolExecutor(2) as pool:
        assert sorted(pool.map(enter, range(2))) == [False, True]
    watch.stop()


@pytest.mark.parametrize("how", ["recorded", "joined", "off", "inside"])
def test_watch_that_ended_cannot_be_entered_again(
    tmp_path: Path, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The models of an ended watch no longer exist, so another entry would record something
    else.
    """
    if how == "off":
        monkeypatch.setenv("TORCHLENS_PERF", "0")
    watch, outer = (perf.watch(dir=str(tmp_path), **SETTINGS) for _ in range(2))
    if how == "joined":
        outer.__enter__()
    with watch:
        if how == "inside":
            with pytest.raises(ConfigError, match="entered once"):
                watch.__enter__()
    with pytest.raises(ConfigError, match="entered once"):
        watch.__enter__()
    outer.stop()


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2), (1, 2, 0)])
def test_patches_can_be_removed_in_any_order(order: tuple[int, ...]) -> None:
    class Owner:
        def method(self) -> str:
            return "original"

    class Inherits(Owner):
        pass

    for owner in (Owner, Inherits):
        before = dict(vars(owner))
        replacements: list[Callable[..., str]] = [
            lambda self, number=number: str(number) for number in range(3)
        ]
        contexts = [patched(owner, "method", each) for each in replacements]
        for context in contexts:
            context.__enter__()
        for number, place in enumerate(order):
            assert owner().method() == str(max(set(range(3)) - set(order[:number])))
            contexts[place].__exit__(None, None, None)
        assert dict(vars(owner)) == before
        assert not [key for key in patch._patches if key[0] == id(owner)]


def test_child_forked_while_a_watch_starts_has_no_hooks(tmp_path: Path) -> None:
    """The child does not inherit the lock that the thread has locked."""
    before, held, forked = state_of_torch(), threading.Event(), threading.Event()

    def hold() -> None:
        with sys.modules[perf.Watch.__module__]._changing:
            held.set()
            forked.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait(60)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            with perf.watch(dir=str(tmp_path), **SETTINGS):
                pass
            status = 0 if state_of_torch() == before else 2
        finally:
            os._exit(status)
    forked.set()
    thread.join()
    assert wait_for(child) == 0


def test_child_forked_while_hooks_are_attached_detaches_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The child writes nothing into its parent's ring."""
    from torchlens_perf.hooks import attach

    before, pids, start = state_of_torch(), [], attach.attach_hooks

    def forking_start(session: Any, *args: Any, **kwargs: Any) -> Any:
        loop = start(session, *args, **kwargs)
        child = os.fork()
        if child == 0:
            os._exit(0 if session.recorder.closed and state_of_torch() == before else 1)
        pids.append(child)
        return loop

    monkeypatch.setattr(attach, "attach_hooks", forking_start)
    with perf.watch(dir=str(tmp_path), **SETTINGS):
        assert wait_for(pids[0]) == 0


def wait_for(child: int) -> int:
    """Return the child's exit status. Kill the child after a minute."""
    deadline = time.monotonic() + 60
    while True:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > deadline:
            os.kill(child, 9)
        time.sleep(0.01)


def test_automatic_recordings_wait_for_a_step_may_end_during_a_watch() -> None:
    """Automatic recording patches the same functions as a watch while it waits for a first step."""
    before = state_of_torch()
    waiting = first_step.FirstStepTrigger(lambda optimizer: None)
    waiting.install()
    with patched(torch.autograd, "_engine_run_backward", lambda *args, **kwargs: None):
        waiting.remove()
    first_step.relay.remove_hooks()
    assert state_of_torch() == before


def test_first_steps_of_two_threads_start_one_watch(tmp_path: Path) -> None:
    """The two threads have just made their first step.

    One thread starts the watch, and the other one continues.
    """
    watches = [perf.watch(dir=str(tmp_path), **SETTINGS) for _ in range(2)]
    together = threading.Barrier(2)

    def start(watch: perf.Watch) -> bool:
        together.wait(60)
        return watch._record(in_the_middle=True, after_step_of=make()[1])

    with ThreadPoolExecutor(2) as pool:
        started = list(pool.map(start, watches))
    for watch in watches:
        watch.stop()
    assert sorted(started) == [False, True]
