"""A watch's life in its process: what it adds, what it leaves, and what it prints at its end."""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path

import pytest
import torch
from torch import nn

import torchlens_perf as perf
from tests.support.processes import report, run, wait_for_sidecar
from tests.support.recording import recorded
from tests.view.test_terminal import SHORT_LINES
from torchlens_perf import watching
from torchlens_perf.hooks.collectives.hook import is_tapped_by_another_tool
from torchlens_perf.recorder import rank_metadata
from torchlens_perf.run.directory import RunDirectory
from torchlens_perf.run.ring import Kind


def make_model() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for _ in range(steps):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def open_sockets() -> set[str]:
    """Return the sockets among this process's descriptors."""
    links = []
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            links.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        except FileNotFoundError:
            # The descriptor that was used to list the folder is closed.
            continue
    return {link for link in links if link.startswith("socket:")}


def signal_handlers() -> dict[int, object]:
    return {number: signal.getsignal(number) for number in signal.valid_signals()}


def test_watch_adds_no_thread_socket_or_signal_handler(tmp_path: Path) -> None:
    """The file descriptors are the same after the watch."""
    model, optimizer = make_model()
    # The first steps start torch's own threads.
    train(model, optimizer, 2)
    # Close the leftovers of other tests now, and not during the measurement.
    gc.collect()
    threads, sockets, handlers = os.listdir("/proc/self/task"), open_sockets(), signal_handlers()
    descriptors = len(os.listdir("/proc/self/fd"))
    hooks = (sys.excepthook, threading.excepthook, sys.unraisablehook)
    with perf.watch(model, optimizer, dir=str(tmp_path), report="off") as watch:
        train(model, optimizer, 5)
        assert os.listdir("/proc/self/task") == threads
        assert open_sockets() == sockets
        assert signal_handlers() == handlers
        assert (sys.excepthook, threading.excepthook, sys.unraisablehook) == hooks
    assert os.listdir("/proc/self/task") == threads
    assert len(os.listdir("/proc/self/fd")) == descriptors
    wait_for_sidecar(RunDirectory(watch.run_dir))


def test_short_report_is_printed_at_the_end_of_a_watch(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Rank 0 prints it on stderr, and the run directory contains all files."""
    model, optimizer = make_model()
    with perf.watch(
        model, optimizer, dir=str(tmp_path), config=perf.Config(_exit_timeout_s=20)
    ) as watch:
        train(model, optimizer, 60)
    out, err = capfd.readouterr()
    made = RunDirectory(watch.run_dir)
    wait_for_sidecar(made)

    assert out == ""
    assert "60 steps" in err
    assert f"  full report torchlens-perf report {watch.run_dir} --all\n" in err
    assert err.count("\n") <= SHORT_LINES
    assert "Typical step" not in err
    assert "Typical step" in made.report.read_text()
    assert made.report.read_text().count("  directory   ") == 1
    assert sorted(path.name for path in watch.run_dir.iterdir()) == [
        "nodes",
        "report.txt",
        "spans",
        "steps",
    ]
    assert report(made)["ranks"][0]["steps"] == 60


def test_rings_stay_in_the_run_directory_without_a_sidecar(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """With sidecar=False no process is started. The command `sidecar` can read the rings later."""
    model, optimizer = make_model()
    with perf.watch(model, optimizer, dir=str(tmp_path), sidecar=False) as watch:
        train(model, optimizer, 25)
    _, err = capfd.readouterr()
    rings = list((watch.run_dir / "rings").iterdir())
    by_hand = run([sys.executable, "-m", "torchlens_perf", "sidecar", str(watch.run_dir)], tmp_path)

    assert err == f"torchlens_perf: recorded. Next: torchlens-perf sidecar {watch.run_dir}\n"
    assert len(rings) == 1
    assert by_hand.returncode == 0, by_hand.stderr
    assert report(RunDirectory(watch.run_dir))["ranks"][0]["steps"] == 25
    assert not rings[0].exists()


def test_each_watch_is_a_separate_run(tmp_path: Path) -> None:
    model, optimizer = make_model()
    folders = []
    for steps in (10, 20):
        with perf.watch(model, optimizer, dir=str(tmp_path), sidecar=False, report="off") as watch:
            train(model, optimizer, steps)
        folders.append(watch.run_dir)

    assert len(set(folders)) == 2
    assert all((folder / "rings").is_dir() for folder in folders)


def test_entering_a_watch_again_raises(tmp_path: Path) -> None:
    """A watch cannot be entered inside or after itself."""
    watch = perf.watch(dir=str(tmp_path), sidecar=False, report="off")
    with watch, pytest.raises(perf.ConfigError, match="entered once"), watch:
        pass
    assert watching._running is None


def test_exception_in_the_body_passes_through_a_watch(tmp_path: Path) -> None:
    """The user gets the same exception object, and all hooks are removed."""
    model, optimizer = make_model()
    raised = KeyboardInterrupt()

    def interrupted() -> None:
        with perf.watch(model, optimizer, dir=str(tmp_path), sidecar=False, report="off"):
            train(model, optimizer, 2)
            raise raised

    with pytest.raises(KeyboardInterrupt) as caught:
        interrupted()

    assert caught.value is raised
    assert watching._running is None
    assert nn.Module.__call__ is nn.Module._wrapped_call_impl


def test_watch_does_nothing_with_the_variable_set_to_0(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """With TORCHLENS_PERF=0 a watch creates nothing and changes nothing."""
    monkeypatch.setenv("TORCHLENS_PERF", "0")
    model, optimizer = make_model()
    before = dict(model.__dict__)
    with perf.watch(model, optimizer, dir=str(tmp_path / "runs")) as watch:
        train(model, optimizer, 2)
        watch.step()
        assert model.__dict__ == before
    assert watch.run_dir is None
    assert not (tmp_path / "runs").exists()


def test_importing_the_package_has_no_side_effects() -> None:
    """The import loads no torch, NumPy or OpenTelemetry, starts no thread and opens no file."""
    program = (
        "import os, sys, threading\nbefore = set(os.listdir('/proc/self/fd'))\nimport"
        " torchlens_perf\nheavy = {'torch', 'numpy', 'opentelemetry', 'pyarrow', 'rich', 'nvtx'} &"
        " set(sys.modules)\nprint(heavy, threading.active_count(), set(os.listdir('/proc/self/fd'))"
        " == before)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )

    assert done.stdout == "set() 1 True\n"


def test_forked_child_records_nothing_into_the_parents_ring(tmp_path: Path) -> None:
    """A forked child has no recorder and can train."""
    model, optimizer = make_model()
    with perf.watch(model, optimizer, dir=str(tmp_path), sidecar=False, report="off") as watch:
        train(model, optimizer, 3)
        child = os.fork()
        if child == 0:
            train(model, optimizer, 50)
            with perf.section("child"):
                pass
            os._exit(0 if watching._running is None else 1)
        assert os.waitpid(child, 0)[1] == 0
        train(model, optimizer, 4)
    by_hand = run([sys.executable, "-m", "torchlens_perf", "sidecar", str(watch.run_dir)], tmp_path)
    value = report(RunDirectory(watch.run_dir))

    assert by_hand.returncode == 0, by_hand.stderr
    assert value["ranks"][0]["steps"] == 7
    assert value["sections"] == []


def test_watch_in_a_forked_child_records_collectives(tmp_path: Path) -> None:
    """The child's watch does not mistake the parent's tap for another tool's, and records each wait
    once.
    """
    import torch.distributed as dist
    from torch._C._distributed_c10d import Work

    before = vars(Work)["wait"], is_tapped_by_another_tool("c10d::allreduce_")
    told = tmp_path / "told"
    with recorded(tmp_path / "parent", config=perf.Config(_faulthandler=True)) as parent:
        session = watching._running._session
        child = os.fork()
        if child == 0:
            with contextlib.suppress(BaseException):
                left = (
                    vars(Work)["wait"] is not before[0],
                    is_tapped_by_another_tool("c10d::allreduce_"),
                )
                dist.init_process_group(
                    "gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1
                )
                with recorded(tmp_path / "child") as own:
                    dist.all_reduce(torch.ones(4))
                    dist.all_reduce(torch.ones(4), async_op=True).wait()
                told.write_text(
                    repr((left, own.names(Kind.WAIT), len(own.of(Kind.COLLECTIVE)), own.notes))
                )
            os._exit(0)
        os.waitpid(child, 0)
        with_stack = session.ring_path.with_suffix(".stack").exists()
        written = session.recorder.written

    assert told.read_text() == repr(((False, before[1]), ["wait"] * 2, 2, []))
    assert with_stack
    assert written == len(parent.records)
    assert (vars(Work)["wait"], is_tapped_by_another_tool("c10d::allreduce_")) == before


def test_patches_are_removed_in_a_forked_child_only(tmp_path: Path) -> None:
    """Module calls of the child are the original ones.

    The parent keeps its patches.
    """
    model, optimizer = make_model()
    plain = patches(model)
    with perf.watch(model, optimizer, dir=str(tmp_path), sidecar=False, report="off"):
        watched = patches(model)
        child = os.fork()
        if child == 0:
            os._exit(0 if patches(model) == plain else 1)
        assert os.waitpid(child, 0)[1] == 0
        assert patches(model) == watched != plain
    assert patches(model) == plain


def patches(model: nn.Module) -> list[object]:
    """Return everything that a watch patches in this process."""
    from torch.utils.data import DataLoader
    from torch.utils.data.dataloader import _BaseDataLoaderIter

    return [
        _BaseDataLoaderIter.__next__, DataLoader.__iter__, torch.save, torch.autograd._engine_run_backward,
        torch.amp.GradScaler.step, torch._C._distributed_c10d.Work.wait, len(gc.callbacks),
    ]  # fmt: skip


@pytest.mark.slow  # A thread marks while the others wait.
def test_forked_children_end_while_another_thread_records(tmp_path: Path) -> None:
    """Forty forks happen while another thread records without pause."""
    stop = threading.Event()

    def mark() -> None:
        while not stop.is_set():
            with perf.section("busy"):
                pass

    with perf.watch(dir=str(tmp_path), sidecar=False, report="off") as watch:
        thread = threading.Thread(target=mark)
        thread.start()
        for _ in range(40):
            child = os.fork()
            if child == 0:
                with perf.section("child"):
                    pass
                os._exit(0)
            deadline = time.monotonic() + 10
            while os.waitpid(child, os.WNOHANG) == (0, 0):
                assert time.monotonic() < deadline
                time.sleep(0.0005)
        watch.step()
        stop.set()
        thread.join()


def test_failing_hook_is_disabled_and_training_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The error is logged, counted and reported."""
    from torchlens_perf.errors import RAISE, swallowed

    monkeypatch.setenv(RAISE, "0")
    monkeypatch.setattr(swallowed, "by_place", type(swallowed.by_place)())
    model, optimizer = make_model()
    with perf.watch(model, optimizer, dir=str(tmp_path), sidecar=False, report="off") as watch:
        watching._running._session.step_callbacks.add("broken", lambda: 1 / 0)
        train(model, optimizer, 30)
    lines = [record.getMessage() for record in caplog.records]
    swallowed.by_place.clear()
    run([sys.executable, "-m", "torchlens_perf", "sidecar", str(watch.run_dir)], tmp_path)
    value = report(RunDirectory(watch.run_dir))

    assert lines == [
        "torchlens_perf: work at a step's end failed and was skipped, training goes on:"
        " ZeroDivisionError: division by zero"
    ]
    assert value["ranks"][0]["steps"] == 30
    assert any("1 internal errors" in note for note in value["quality"]["notes"])
    assert any("failed and was switched off" in note for note in value["quality"]["notes"])


def test_outer_watch_finds_the_model_despite_a_nested_watch(tmp_path: Path) -> None:
    """The model is found at the first optimizer step."""
    model, optimizer = make_model()
    with (
        perf.watch(dir=str(tmp_path), sidecar=False, report="off"),
        perf.watch(optimizer=optimizer),
    ):
        train(model, optimizer, 2)
        assert watching._running._loop._roots


@pytest.mark.parametrize("way", ["recording", "inside another", "off"])
def test_deleted_model_and_optimizer_are_freed_during_a_watch(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A watch keeps no reference to the model or the optimizer."""
    if way == "off":
        monkeypatch.setenv("TORCHLENS_PERF", "0")
    outer = perf.watch(torch.nn.Identity(), dir=str(tmp_path), sidecar=False, report="off")
    model, optimizer = make_model()
    left = [weakref.ref(each) for each in (model, optimizer, *model.parameters())]
    with outer if way == "inside another" else contextlib.nullcontext():
        with perf.watch(model, optimizer, dir=str(tmp_path), sidecar=False, report="off"):
            train(model, optimizer, 2)
            del model, optimizer
            gc.collect()
            assert [each() for each in left if each() is not None] == []


def test_start_of_an_inference_run_ends_with_its_first_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time without a CPU at the start does not grow with the run, even without training."""
    looks = itertools.count()
    monkeypatch.setattr(rank_metadata, "main_thread_cpu_wait_ns", lambda pid: next(looks))
    monkeypatch.setattr(rank_metadata, "_start_reported_by", None)
    model = nn.Linear(4, 4)
    with recorded(tmp_path, model) as recording, torch.no_grad():
        for _ in range(20):
            model(torch.ones(2, 4))
        until_here = next(looks)

    assert len(recording.steps) > 10
    assert recording.metadata["start_cpu_wait_ns"] < until_here
