"""each_call_fails.py FOLDER SIDECAR PHASE ERRNO...: each call to the system fails in turn, in one phase of a watch.

Started with failing_calls.c. PHASE: start or end. Prints a line of JSON for each case: which call failed, and what was
different afterwards from a process without us. The last line has how many calls there were.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import torchlens_perf as perf
from tests.jobs.test_nothing_left_behind import state
from tests.support.failing_calls import FailingCalls
from tests.support.leftovers import end_sidecars, left_behind, remove
from torchlens_perf.watch import running

folder, with_sidecar, phase, *errors = sys.argv[1:]
lines: list[str] = []


class Lines(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        lines.append(record.getMessage())


def trained(model: nn.Module) -> str:
    """Three steps; the parameters, to the last bit."""
    torch.manual_seed(0)
    for parameter in model.parameters():
        nn.init.ones_(parameter)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for (batch,) in DataLoader(TensorDataset(torch.randn(6, 4)), 2):
        model(batch).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return str([parameter.tolist() for parameter in model.parameters()])


def case(calls: FailingCalls, model: nn.Module, expected: str, nth: int, error: int) -> dict[str, Any]:
    """A watch in which one call fails. What it has changed, by name; nothing where all is well."""
    lines.clear()
    found: dict[str, Any] = {}
    before = state()
    try:
        watch = perf.watch(model, dir=folder, sidecar=with_sidecar == "sidecar", exit_timeout_s=0, ring_records=1024)
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
    if running() is not None:
        found["running"] = True
        running().close()
    watch = None
    gc.collect()
    after = state()
    different = sorted(name for name in before if before[name] != after[name])
    if different:
        found["different"] = {name: repr((before[name], after[name]))[:600] for name in different}
    if not recording:
        found["left"] = left_behind(Path(folder))
    remove(Path(folder))
    return found


def main() -> None:
    logger = logging.getLogger("torchlens_perf")
    logger.addHandler(Lines())
    logger.propagate = False
    calls, model = FailingCalls(), nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    expected = trained(model)
    for _ in range(2):  # what is imported at a first use
        case(calls, model, expected, 0, 0)
    gc.freeze()  # to collect among all that torch has made would take half of the test's time
    count = case(calls, model, expected, 0, 0)["count"]
    for each in range(
        int(os.environ.get("CASES", count))
    ):  # beyond the calls there are: each again, with another error
        nth = each % count + 1
        error = int(errors[(nth + each // count) % len(errors)])
        print(json.dumps({"nth": nth, "errno": error, **case(calls, model, expected, nth, error)}), flush=True)
    print(json.dumps({"calls": count, "afterwards": case(calls, model, expected, 0, 0)}))


main()
