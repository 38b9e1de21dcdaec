"""Make system calls fail in turn in one phase of a watch, and compare with a process without the
package.

    usage: each_call_fails.py FOLDER SIDECAR PHASE ERRNO...

Started with failing_calls.c. PHASE is start or end. By default, the first call of each line of the
package fails. With CASES=all each call fails, and with CASES=NUMBER that many calls fail, each call
several times with different errors.

Prints a line of JSON for each case: the call that failed, and the differences from a process
without the package. The last line of output has the number of calls.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import torchlens_perf as perf
from tests.support.failing_calls import FailingCalls
from tests.support.leftovers import end_sidecars, remaining_folders, remove
from tests.support.process_state import state
from torchlens_perf import watching

folder, with_sidecar, phase, *errors = sys.argv[1:]
lines: list[str] = []
PACKAGE = os.path.dirname(perf.__file__)


class Lines(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        lines.append(record.getMessage())


class Places:
    """A profile function that finds the first system call of each line of the package."""

    def __init__(self, calls: FailingCalls) -> None:
        self._calls, self._before = calls, 0
        self.first: dict[tuple[str, int], int] = {}

    def __call__(self, frame: FrameType | None, event: str, _: object) -> None:
        if event not in ("c_return", "c_exception", "return"):
            return
        counted, before = self._calls.counted(), self._before
        self._before = counted
        if counted <= before:
            return
        while frame is not None and not frame.f_code.co_filename.startswith(PACKAGE):
            frame = frame.f_back
        if frame is not None:
            self.first.setdefault((frame.f_code.co_filename, frame.f_lineno), before + 1)


def trained(model: nn.Module) -> str:
    """Train three steps. Return the exact parameters."""
    torch.manual_seed(0)
    for parameter in model.parameters():
        nn.init.ones_(parameter)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for (batch,) in DataLoader(TensorDataset(torch.randn(6, 4)), 2):
        model(batch).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return str([parameter.tolist() for parameter in model.parameters()])


def case(
    calls: FailingCalls, model: nn.Module, expected: str, nth: int, error: int
) -> dict[str, Any]:
    """Run a watch in which one call fails.

    Return the differences by name. The differences are empty if the failure was harmless.
    """
    lines.clear()
    found: dict[str, Any] = {}
    before = state()
    try:
        config = perf.Config(
            dir=folder, sidecar=with_sidecar == "sidecar", _exit_timeout_s=0, ring_records=1024
        )
        watch = perf.watch(model, config=config)
        if phase == "start":
            calls.arm(["*"], nth, error)
            watch.__enter__()
            counted, failed = calls.disarm()
        else:
            watch.__enter__()
        end_sidecars()
        recording = watch.run_dir is not None
        if trained(model) != expected:
            found["parameters"] = "differ"
        if phase == "end":
            calls.arm(["*"], nth, error)
        watch.__exit__(None, None, None)
        if phase == "end":
            counted, failed = calls.disarm()
    except BaseException as raised:
        counted, failed = calls.disarm()
        found["raised"] = repr(raised)
        recording = False
    end_sidecars()
    found |= {"call": failed, "count": counted, "recording": recording, "lines": list(lines)}
    if watching._running is not None:
        found["running"] = True
        watching._running.close()
    watch = None
    gc.collect()
    after = state()
    different = sorted(name for name in before if before[name] != after[name])
    if different:
        found["different"] = {name: repr((before[name], after[name]))[:600] for name in different}
    if not recording:
        found["left"] = remaining_folders(Path(folder))
    remove(Path(folder))
    return found


def main() -> None:
    logger = logging.getLogger("torchlens_perf")
    logger.addHandler(Lines())
    logger.propagate = False
    calls, model = FailingCalls(), nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    expected = trained(model)
    # The first run imports modules.
    for _ in range(2):
        case(calls, model, expected, 0, 0)
    # Exclude torch's objects from collections, which would take half of the test's time.
    gc.freeze()
    wanted = os.environ.get("CASES", "")
    places = Places(calls)
    sys.setprofile(None if wanted else places)
    count = case(calls, model, expected, 0, 0)["count"]
    sys.setprofile(None)
    turns = (
        list(places.first.values())
        if not wanted
        else range(1, (count if wanted == "all" else int(wanted)) + 1)
    )
    for number, turn in enumerate(turns):
        nth, rounds = (turn - 1) % count + 1, (turn - 1) // count
        # In each round, a call fails with another error. If there are few calls, each place also
        # uses another error.
        error = int(errors[((nth if wanted else number) + rounds) % len(errors)])
        print(
            json.dumps({"nth": nth, "errno": error, **case(calls, model, expected, nth, error)}),
            flush=True,
        )
    print(json.dumps({"calls": count, "afterwards": case(calls, model, expected, 0, 0)}))


main()
