"""Setting and switching NCCL's profiler plugin, and notes on missing times, without a GPU."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.device.fake_nccl import ON, SEEN, FakeNccl
from tests.support.recording import Recording, recorded
from torchlens_perf import autoload
from torchlens_perf.commands.doctor import LIMITED, OK, run_checks
from torchlens_perf.config import Config
from torchlens_perf.hooks import attach
from torchlens_perf.hooks.collectives import nccl_plugin
from torchlens_perf.hooks.collectives.nccl import NcclHook
from torchlens_perf.hooks.collectives.nccl_plugin import SAMPLED_EVERY, VARIABLE
from torchlens_perf.hooks.device_hooks import create_device_hooks
from torchlens_perf.recorder import devices as device
from torchlens_perf.recorder import step_callbacks, torch_groups


@pytest.fixture
def nccl(nccl_library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeNccl:
    """Replace NCCL with one for two ranks that can load a plugin. No user settings exist."""
    made = FakeNccl(nccl_library, tmp_path, 6)
    monkeypatch.setattr(nccl_plugin, "find_plugin_file", lambda: made.file)
    monkeypatch.setattr(nccl_plugin, "load_plugin", lambda: made.plugin)
    monkeypatch.setattr(nccl_plugin, "_SYSTEM_FOLDERS", ())
    monkeypatch.setenv(VARIABLE, "")
    monkeypatch.delenv(VARIABLE)  # monkeypatch also removes the variable after the test.
    for name, value in {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "HOME": str(tmp_path)}.items():
        monkeypatch.setenv(name, value)
    return made


class Graph:
    """A replacement for torch.cuda.CUDAGraph."""


@contextmanager
def watched(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    version: tuple[int, ...] = (2, 29, 7),
    wish: str = "auto",
) -> Iterator[Recording]:
    """Return a watch with the NCCL hook, as on a machine with a GPU."""
    monkeypatch.setattr(
        attach, "create_device_hooks", lambda config: [NcclHook(wish, nccl=version)]
    )
    with recorded(folder / "run") as recording:
        yield recording
    assert recording.internal_errors == 0


def test_plugin_variable_is_set_only_during_the_watch(
    nccl: FakeNccl, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCL finds the plugin by an environment variable."""
    before = dict(os.environ)
    with watched(tmp_path, monkeypatch) as recording:
        assert nccl.load() == 6
        context = nccl.communicator()
        assert nccl.mask == ON
        assert {name: value for name, value in os.environ.items() if before.get(name) != value} == {
            VARIABLE: str(nccl.file)
        }
    assert os.environ == before
    assert nccl.mask == SEEN
    nccl.finalize(context)
    assert recording.notes == []


def test_plugin_variable_set_by_another_tool_is_kept_after_the_watch(
    nccl: FakeNccl, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with watched(tmp_path, monkeypatch):
        monkeypatch.setenv(VARIABLE, "another")
    assert os.environ[VARIABLE] == "another"


@pytest.mark.parametrize("where", ["variable", "empty variable", "file", "own file", "library"])
def test_plugin_of_another_tool_is_kept_and_noted(
    where: str, nccl: FakeNccl, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other plugin may be chosen in any way that NCCL supports."""
    settings = f"NCCL_DEBUG=INFO\n{VARIABLE}=another\n"
    if "variable" in where:
        monkeypatch.setenv(VARIABLE, "another" if where == "variable" else "")
    elif where == "library":
        (tmp_path / "libnccl-profiler.so").touch()
        monkeypatch.setenv("LD_LIBRARY_PATH", f"/nowhere:{tmp_path}")
    elif where == "file":
        (tmp_path / ".nccl.conf").write_text(settings)
    else:
        (tmp_path / "settings").write_text(settings)
        monkeypatch.setenv("NCCL_CONF_FILE", str(tmp_path / "settings"))
    before = dict(os.environ)
    with watched(tmp_path, monkeypatch) as recording:
        assert os.environ == before
        assert recording.watch._session.clocks.collective_listener is not None
    assert os.environ == before
    (note,) = recording.notes
    assert "end times of asynchronous collectives are missing" in note
    assert "another profiler plugin is configured and is kept" in note


def test_plugin_set_by_the_launchers_installation_is_replaced(
    nccl: FakeNccl, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The launcher may run with another Python, whose plugin is a different file."""
    monkeypatch.setenv(
        VARIABLE, "/elsewhere/torchlens_perf/_nccl_profiler.cpython-310-x86_64-linux-gnu.so"
    )
    with watched(tmp_path, monkeypatch) as recording:
        assert os.environ[VARIABLE] == str(nccl.file)
    assert VARIABLE not in os.environ
    assert recording.notes == []


def test_nccl_settings_without_a_plugin_do_not_prevent_timing(
    nccl: FakeNccl, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCL's configuration file may have other settings or a commented-out variable."""
    (tmp_path / ".nccl.conf").write_text(f"NCCL_DEBUG=INFO\n#{VARIABLE}=another\n")
    with watched(tmp_path, monkeypatch):
        assert os.environ[VARIABLE] == str(nccl.file)


def on_in(nccl: FakeNccl, recording: Recording, steps: int) -> list[int]:
    """Return the steps in which the hook requests NCCL's reports on kernels."""
    steps_on = []
    for step in range(steps):
        if nccl.mask == ON:
            steps_on.append(step)
        recording.watch.step()
    return steps_on


@pytest.mark.parametrize(
    ("version", "wish", "every"),
    [
        ((2, 28, 9), "auto", 1), ((2, 30, 7), "auto", 1), ((2, 30, 7), "on", 1),
        ((2, 31, 2), "on", SAMPLED_EVERY), ((3, 0, 1), "on", SAMPLED_EVERY),
    ],
)  # fmt: skip
def test_one_step_in_50_is_timed_with_an_untested_nccl_version(
    version: tuple[int, ...], wish: str, every: int, nccl: FakeNccl, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """With a tested NCCL version, all steps are timed."""
    with watched(tmp_path, monkeypatch, version=version, wish=wish) as recording:
        nccl.load()
        context = nccl.communicator()
        assert on_in(nccl, recording, 2 * SAMPLED_EVERY + 1) == list(
            range(0, 2 * SAMPLED_EVERY + 1, every)
        )
    nccl.finalize(context)
    sampled = [note for note in recording.notes if "in one step of 50" in note]
    assert len(sampled) == (every > 1)


def test_plugin_is_off_by_default_and_events_are_used(
    nccl: FakeNccl, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plugin needs shared memory, which containers may lack. A note gives the setting."""
    assert Config().nccl == "off"
    with watched(tmp_path, monkeypatch, wish="off") as recording:
        assert VARIABLE not in os.environ
        assert recording.watch._session.clocks.collective_listener is not None
    (note,) = recording.notes
    assert note.endswith('NCCL\'s profiler plugin is not used: nccl="auto" enables it')


@pytest.mark.parametrize("wish", ["auto", "on"])
def test_plugin_is_not_set_if_shared_memory_is_too_small(
    wish: str, nccl: FakeNccl, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The note gives the needed and the free size. NCCL itself would use a null pointer."""
    free = os.statvfs("/dev/shm")
    monkeypatch.setattr(nccl_plugin, "POOL_BYTES", free.f_bavail * free.f_frsize + (1 << 30))
    with watched(tmp_path, monkeypatch, wish=wish) as recording:
        assert VARIABLE not in os.environ
    (note,) = recording.notes
    assert re.search(
        r"NCCL needs \d+ MiB of shared memory for it, and /dev/shm has \d+ MiB left", note
    )


def test_free_shared_memory_is_required_for_all_ranks_of_the_node(tmp_path: Path) -> None:
    """A missing folder counts as one without free space."""
    assert nccl_plugin.find_shared_memory_problem(1, tmp_path) == ""
    assert "34 MiB" in nccl_plugin.find_shared_memory_problem(
        1, Path("/proc")
    )  # `/proc` has no free space.
    assert "272 MiB" in nccl_plugin.find_shared_memory_problem(8, tmp_path / "missing")


def test_timing_ends_if_shared_memory_is_too_small_for_a_later_communicator(
    nccl: FakeNccl, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Timing does not start again, and a note gives the reason."""
    with watched(tmp_path, monkeypatch) as recording:
        nccl.load()
        first = nccl.communicator()
        assert nccl.mask == ON
        second = nccl.communicator(ranks=10_000_000)
        assert nccl.mask == 0
        recording.watch._session.step_callbacks._run_callbacks(
            recording.watch._session.step_callbacks._throttled
        )
    for context in (first, second):
        nccl.finalize(context)
    assert any(
        "shared memory has no room for the data that NCCL needs to time another communicator" in n
        for n in recording.notes
    )


def test_plugin_is_not_set_for_an_old_nccl(
    nccl: FakeNccl, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with watched(tmp_path, monkeypatch, version=(2, 27, 7)) as recording:
        assert VARIABLE not in os.environ
    (note,) = recording.notes
    assert "NCCL 2.27.7 does not report kernel times; 2.28 and newer versions do" in note


@pytest.mark.parametrize("version", [(2, 31, 2), (2, 32, 3)])
def test_plugin_is_set_for_an_untested_nccl_version_only_on_request(
    version: tuple[int, ...], nccl: FakeNccl, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with watched(tmp_path, monkeypatch, version=version) as recording:
        assert VARIABLE not in os.environ
        assert recording.watch._session.clocks.collective_listener is not None
    (note,) = recording.notes
    assert 'nccl="auto" times NCCL 2.28 to 2.30, and this is' in note
    monkeypatch.setattr(nccl_plugin, "read_nccl_version", lambda: version)
    for wish, offered in (("auto", False), ("on", True)):
        nccl_plugin.offer_at_import(os.environ, wish)
        assert (VARIABLE in os.environ) == offered


def test_single_rank_has_no_nccl_notes(
    nccl: FakeNccl, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCL runs no kernel in a job with one rank."""
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    with watched(tmp_path, monkeypatch, version=(2, 27, 7)) as recording:
        pass
    assert recording.notes == []


def test_nccl_timing_is_off_during_graph_captures(
    nccl: FakeNccl, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The methods of torch.cuda.CUDAGraph are restored after the watch."""
    asked: list[Any] = []

    def capture(name: str) -> Any:
        return lambda graph, *args, **kwargs: asked.append((name, nccl.mask, args, kwargs))

    monkeypatch.setattr(torch.cuda.CUDAGraph, "capture_begin", capture("begin"))
    monkeypatch.setattr(torch.cuda.CUDAGraph, "capture_end", capture("end"))
    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", capture("replay"))
    before = dict(vars(torch.cuda.CUDAGraph))
    monkeypatch.setattr(step_callbacks, "_THROTTLE_NS", 0)
    with watched(tmp_path, monkeypatch) as recording:
        nccl.load()
        context = nccl.communicator()
        graph = Graph()
        torch.cuda.CUDAGraph.capture_begin(graph, pool=7)
        recording.watch.step()  # The whole step may be part of a capture.
        assert nccl.mask == SEEN
        torch.cuda.CUDAGraph.capture_end(graph)
        assert nccl.mask == ON
        torch.cuda.CUDAGraph.replay(graph)  # The graph contains no NCCL operation.
        assert nccl.mask == ON
        cuda_graph = torch.cuda.CUDAGraph
        wrapped = cuda_graph.capture_begin, cuda_graph.capture_end, cuda_graph.replay
    assert asked == [
        ("begin", SEEN, (), {"pool": 7}),
        ("end", SEEN, (), {}),
        ("replay", ON, (), {}),
    ]
    assert recording.notes == []
    assert dict(vars(torch.cuda.CUDAGraph)) == before
    for function in wrapped:  # Another tool may still refer to the wrapped functions.
        function(Graph())
        assert nccl.mask == SEEN
    nccl.finalize(context)


def test_timing_ends_after_a_collective_in_a_graph_capture(
    nccl: FakeNccl, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The current watch and the next one note the reason and use events."""
    for name in ("capture_begin", "capture_end", "replay"):
        monkeypatch.setattr(torch.cuda.CUDAGraph, name, lambda graph: None)
    monkeypatch.setattr(step_callbacks, "_THROTTLE_NS", 0)
    text = "an operation of NCCL was captured in a CUDA graph"
    with watched(tmp_path, monkeypatch) as recording:
        nccl.load()
        context = nccl.communicator()
        graph = Graph()
        torch.cuda.CUDAGraph.capture_begin(graph)
        task = nccl.call(context, -1, 1, 1)
        nccl.group_end(context, 0, 1)
        torch.cuda.CUDAGraph.capture_end(graph)
        for _ in range(2):
            torch.cuda.CUDAGraph.replay(graph)
            nccl.replay(context, 0, task)
            assert nccl.mask == 0
        recording.watch.step()
        assert recording.watch._session.clocks.collective_listener is not None
        assert sum(text in note for note in recording.watch._session.facts.notes) == 1
    (note,) = recording.notes
    assert "end times of asynchronous collectives are missing from here on" in note
    assert nccl.mask == 0

    with watched(tmp_path / "again", monkeypatch) as recording:
        assert recording.watch._session.clocks.collective_listener is not None
        assert VARIABLE not in os.environ
        assert nccl.mask == 0
    (note,) = recording.notes
    assert text in note
    nccl.finalize(context)


def test_end_of_nccl_timing_is_noted_if_no_step_follows(
    nccl: FakeNccl, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with watched(tmp_path, monkeypatch) as recording:
        nccl.load()
        context = nccl.communicator()
        nccl.call(context, 0, 1, 0)
        nccl.group_end(context, 0, 1)
    assert any("a rank sent to itself, as in all-to-all" in note for note in recording.notes)
    nccl.finalize(context)


def test_replay_of_a_graph_with_unknown_contents_ends_timing(
    nccl: FakeNccl, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Graphs that were captured in an earlier watch, or replayed before the first communicator,
    have known contents.
    """
    for name in ("capture_begin", "capture_end", "replay"):
        monkeypatch.setattr(torch.cuda.CUDAGraph, name, lambda graph: None)
    graph, earlier = Graph(), Graph()
    with watched(tmp_path / "first", monkeypatch):
        torch.cuda.CUDAGraph.replay(earlier)
        nccl.load()
        context = nccl.communicator()
        torch.cuda.CUDAGraph.capture_begin(graph)
        torch.cuda.CUDAGraph.capture_end(graph)
    with watched(tmp_path / "second", monkeypatch) as recording:
        for known in (graph, earlier):
            torch.cuda.CUDAGraph.replay(known)
            assert nccl.mask == ON
        torch.cuda.CUDAGraph.replay(Graph())
        assert nccl.mask == 0
    (note,) = recording.notes
    assert "a CUDA graph was replayed that was captured outside of watch()" in note
    nccl.finalize(context)


def test_nccl_timing_is_off_in_a_forked_child(
    nccl: FakeNccl, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Timing continues in the parent process."""
    with watched(tmp_path, monkeypatch):
        nccl.load()
        context = nccl.communicator()
        child = os.fork()
        if child == 0:
            os._exit(0 if nccl.mask == SEEN and VARIABLE not in os.environ else 1)
        assert os.waitpid(child, 0)[1] == 0
        assert nccl.mask == ON
    nccl.finalize(context)


def test_plugin_is_set_before_the_first_communicator_is_created(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The hook for aggregate="device" creates a communicator. NCCL looks for a plugin only once."""
    monkeypatch.setattr(device, "has_cuda_devices", lambda: True)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    names = [type(hook).__name__ for hook in create_device_hooks(Config(aggregate="device"))]
    assert names == [
        "DeviceTimesHook",
        "DataParallelHook",
        "NcclHook",
        "GpuIdentityHook",
        "DeviceSectionHook",
    ]


def test_timing_continues_after_a_graph_capture_that_failed_to_begin(
    nccl: FakeNccl, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch raises and does not call the function that ends a capture."""

    def refused(graph: object) -> None:
        raise RuntimeError("a capture is under way")

    monkeypatch.setattr(torch.cuda.CUDAGraph, "capture_begin", refused)
    with watched(tmp_path, monkeypatch):
        nccl.load()
        context = nccl.communicator()
        with pytest.raises(RuntimeError, match="under way"):
            torch.cuda.CUDAGraph.capture_begin(Graph())
        assert nccl.mask == ON
    nccl.finalize(context)


def test_plugin_file_of_another_version_is_not_set_and_noted(
    nccl: FakeNccl, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The note says what to do."""
    monkeypatch.setattr(nccl.plugin, "attach", lambda: False)
    with watched(tmp_path, monkeypatch) as recording:
        assert VARIABLE not in os.environ
    (note,) = recording.notes
    assert "built for another version of torchlens_perf: reinstall it" in note


def test_operations_without_nccl_times_are_noted(
    nccl: FakeNccl, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A first note is made at once, and a last note has the number of operations.

    Notes of an earlier watch are not repeated.
    """
    monkeypatch.setattr(step_callbacks, "_THROTTLE_NS", 0)
    with watched(tmp_path, monkeypatch) as recording:
        nccl.load()
        context = nccl.communicator()
        for _ in range(3):
            nccl.collective(context, 0, 1)
        recording.watch.step()
        at_once = list(recording.watch._session.facts.notes)
        nccl.collective(context, 0, 1)
    text = "NCCL operations were not issued through torch.distributed and are not recorded"
    assert f"some {text}" in at_once
    assert f"4 {text}" in recording.notes

    with watched(tmp_path, monkeypatch) as recording:
        recording.watch.step()
    assert recording.notes == []
    nccl.finalize(context)


def test_communicators_created_without_the_plugin_are_noted(
    nccl: FakeNccl, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCL has not loaded the plugin for these communicators. A note gives advice once, and
    collectives are timed by events instead.
    """
    monkeypatch.setattr(step_callbacks, "_THROTTLE_NS", 0)
    backends = {("0", "cuda"): "gloo", ("1", "cuda"): "nccl"}
    monkeypatch.setattr(torch_groups, "get_group_backend", lambda *group: backends[group])
    with watched(tmp_path, monkeypatch) as recording:
        inside = recording.watch._session
        inside.metadata.device_groups.add(("0", "cuda"))
        # The training settings are recorded at the end of one of the first steps.
        for _ in range(4):
            recording.watch.step()
        assert inside.clocks.collective_listener is None
        inside.metadata.device_groups.add(("1", "cuda"))
        recording.watch.step()
        works = list(inside.step_callbacks._each_step)
        recording.watch.step()
        assert inside.clocks.collective_listener is not None
        assert list(inside.step_callbacks._each_step) == works
    (note,) = recording.notes
    assert "Enter watch() before init_process_group()" in note
    assert inside.clocks.collective_listener is None


def test_communicators_created_with_the_plugin_are_timed_without_events(
    nccl: FakeNccl, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The communicators may be older than the watch, as with automatic recording."""
    monkeypatch.setattr(step_callbacks, "_THROTTLE_NS", 0)
    monkeypatch.setenv(VARIABLE, str(nccl.file))
    monkeypatch.setattr(torch_groups, "get_group_backend", lambda *group: "nccl")
    nccl.load()
    context = nccl.communicator()
    with watched(tmp_path, monkeypatch) as recording:
        recording.watch._session.metadata.device_groups.add(("0", "cuda"))
        recording.watch.step()
        assert recording.watch._session.clocks.collective_listener is None
        assert nccl.mask == ON
    assert recording.notes == []
    nccl.finalize(context)


@pytest.mark.parametrize(
    ("told", "offered"),
    [
        ({}, False),
        ({"TORCHLENS_PERF_NCCL": "auto"}, True),
        ({"TORCHLENS_PERF_NCCL": "auto", "TORCHLENS_PERF_COLLECTIVES": "0"}, False),
    ],
)
def test_plugin_is_set_at_import_of_torch_with_automatic_recording(
    told: dict[str, str], offered: bool, nccl: FakeNccl, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Automatic recording begins after the first step, later than the first communicator."""
    from torchlens_perf.hooks.loop.optimizer import relay

    monkeypatch.setattr(nccl_plugin, "read_nccl_version", lambda: (2, 29, 7))
    # Automatic recording is already waiting for a step.
    monkeypatch.setattr(relay, "after", object())
    for name, value in {"TORCHLENS_PERF": "1", **told}.items():
        monkeypatch.setenv(name, value)
    autoload.autoload()
    assert (os.environ.get(VARIABLE) == str(nccl.file)) == offered
    assert (VARIABLE in os.environ) == offered
    nccl_plugin.withdraw_plugin(os.environ, nccl.file)
    assert VARIABLE not in os.environ


def test_plugin_is_not_set_if_torch_lacks_a_suitable_nccl(
    nccl: FakeNccl, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch has an old NCCL, or none from NVIDIA."""
    for version in (None, (2, 26, 2)):
        monkeypatch.setattr(nccl_plugin, "read_nccl_version", lambda found=version: found)
        nccl_plugin.offer_at_import(os.environ, "auto")
        assert VARIABLE not in os.environ


def test_nccl_version_has_no_suffix_and_is_none_without_cuda(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """This torch may lack CUDA, or have the NCCL of another vendor."""
    monkeypatch.setattr(torch.version, "cuda", None)
    assert nccl_plugin.read_nccl_version() is None
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: False)
    assert nccl_plugin.read_nccl_version() is None
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 29, 7, "rc1"))
    assert nccl_plugin.read_nccl_version() == (2, 29, 7)


@pytest.mark.parametrize(
    ("version", "chosen", "severity", "words"),
    [
        ((2, 29, 7), None, OK, "timed by the device in every step"),
        ((2, 31, 2), None, LIMITED, "=on, which times one step of 50"),
        ((2, 26, 2), None, LIMITED, "not timed"), ((2, 29, 7), "another", LIMITED, "another plugin was chosen"),
    ],
)  # fmt: skip
def test_doctor_prints_one_line_about_nccl(
    version: tuple[int, ...], chosen: str | None, severity: int, words: str, nccl: FakeNccl,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """The line has advice. If torch has no NCCL, doctor prints no line about it."""
    monkeypatch.setattr(nccl_plugin, "read_nccl_version", lambda: None)
    assert not any("NCCL" in check.subject for check in run_checks())
    monkeypatch.setattr(nccl_plugin, "read_nccl_version", lambda: version)
    if chosen is not None:
        monkeypatch.setenv(VARIABLE, chosen)
    (check,) = (check for check in run_checks() if "NCCL" in check.subject)
    assert check.severity == severity
    assert words in str(check)
    assert bool(check.remedy) == (severity == LIMITED)


def test_package_never_sets_torch_nccl_enable_timing() -> None:
    """TORCH_NCCL_ENABLE_TIMING makes each collective record two events.

    Only the user may set the variable.
    """
    package = Path(nccl_plugin.__file__).parents[2]
    sources = [
        path for pattern in ("*.py", "*.c", "*.cpp", "*.h") for path in package.rglob(pattern)
    ]
    assert len(sources) > 100
    assert [path.name for path in sources if "ENABLE_TIMING" in path.read_text()] == []
