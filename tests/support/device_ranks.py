"""Ranks that train on the asynchronous device, each in a separate process."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, ParamSpec

import torch
import torch.distributed as dist

from tests.device import device
from tests.support.recording import Record, Recording, recorded
from torchlens_perf.run.ring import Kind

DEVICE = device.NAME
MS = 1_000_000
_P = ParamSpec("_P")


class Trained(NamedTuple):
    """Recording of one rank's device, and the rank's own results."""

    spans: list[Record]
    """DEVICE records."""
    marks: int
    """Events recorded by the watch in each of the last steps."""
    events: float
    """All events recorded in each of the last steps."""
    synchronizations: int
    loss: list[float]
    parameters: list[torch.Tensor]
    metadata: dict[str, Any]
    longer: float = 1.0
    """Factor by which the device works longer than requested. The times below are divided by it."""

    def of(self, kind: Kind, name: str | None = None) -> list[Record]:
        """Return the device spans of a kind, optionally only those with one name."""
        return [each for each in self.spans if each.value0 == kind and name in (None, each.name)]

    def stalls_ms(self, step: int, name: str | None = None) -> float:
        """Return the milliseconds that the compute stream waited in a step."""
        return (
            sum(each.duration_ns for each in self.of(Kind.WAIT, name) if each.step == step)
            / self._ms
        )

    def work_ms(self) -> dict[int, float]:
        """Return the milliseconds of device work without waits, by step."""
        return {
            each.step: each.duration_ns / self._ms - self.stalls_ms(each.step)
            for each in self.of(Kind.STEP)
        }

    @property
    def _ms(self) -> float:
        return MS * self.longer


def host_is_ahead(test: Callable[_P, None]) -> Callable[_P, None]:
    """Repeat a test with a slower device if the host did not issue work in time.

    On a busy machine the host may be late, and then the device waits for the host.

    The second try uses a device that works six times as long.

    The test's `tmp_path` must be passed by name. Each try has its own folder inside it.
    """

    @functools.wraps(test)
    def tried(*args: _P.args, **kwargs: _P.kwargs) -> None:
        folder = kwargs["tmp_path"]
        assert isinstance(folder, Path)
        for longer in (1, 6):
            (folder / str(longer)).mkdir()
            os.environ[device.LONGER] = str(longer)
            try:
                test(*args, **{**kwargs, "tmp_path": folder / str(longer)})  # type: ignore[arg-type]
                return
            except AssertionError:
                if longer > 1:
                    raise
            finally:
                del os.environ[device.LONGER]

    return tried


def begin(folder: Path) -> None:
    """Make the device this process's accelerator, and create a default group for CPU and device."""
    device.load()
    rank, ranks = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    store = dist.FileStore(str(folder / "device-store"), ranks)
    dist.init_process_group(f"cpu:gloo,{DEVICE}:{DEVICE}", store=store, rank=rank, world_size=ranks)


def train(
    folder: Path, make: Callable[[], tuple[Any, Any]], step: Callable[[Any, Any, int], torch.Tensor],
    *, steps: int = 24, watched: bool = True, **settings: Any,
) -> Trained:  # fmt: skip
    """Train with or without a watch.

    The loop waits for the device every eighth step, as scripts that print do.

    `make` returns the model and its optimizer. `step` makes the step with the given number and
    returns the loss.
    """
    torch.manual_seed(7)
    model, optimizer = make()
    loss: list[float] = []
    counted: dict[str, int] = {}

    def loop() -> None:
        before_synchronizations = device.synchronizations()
        printed = 0
        for number in range(steps):
            if number == steps // 2:
                counted["events"], counted["marks"] = device.counters()["events"], marks(recording)
            result = step(model, optimizer, number)
            if number % 8 == 7:
                was = device.synchronizations()
                loss.append(float(result.detach()))
                printed += device.synchronizations() - was
        counted["synchronizations"] = device.synchronizations() - before_synchronizations - printed
        counted["events"] = device.counters()["events"] - counted["events"]
        counted["marks"] = marks(recording) - counted["marks"]

    recording = Recording()
    if watched:
        settings = {"backward_every": 0, "modules": "all", **settings}
        with recorded(
            folder / f"rank-{os.environ['RANK']}", model, optimizer, **settings
        ) as recording:
            loop()
            torch.accelerator.synchronize()
            # Events are read at the end of a step.
            for _ in range(2):
                assert recording.watch is not None
                recording.watch.step()
                time.sleep(0.05)
    else:
        loop()
    return Trained(
        [each for each in recording.records if each.kind == Kind.DEVICE],
        round(counted["marks"] / (steps - steps // 2)),
        counted["events"] / (steps - steps // 2),
        counted["synchronizations"],
        loss,
        [parameter_of(each) for each in model.parameters()],
        recording.metadata,
        device.longer(),
    )


def parameter_of(parameter: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of the parameter, on the CPU."""
    local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
    return local.detach().cpu()


def marks(recording: Recording) -> int:
    """Return the number of events that the watch's clock has recorded, except its anchors."""
    if recording.watch is None:
        return 0
    return int(getattr(recording.watch._session.clocks.current, "marked", 0))  # type: ignore[union-attr]
