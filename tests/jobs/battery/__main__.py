"""Run cases in one mode, each in a forked child, and write one outcome per case.

Arguments: `plain`, `watch` or `environment`, the folder for outcomes, and names of cases.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import signal
import sys
import traceback
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch._dynamo

import tests.jobs.battery.autograd
import tests.jobs.battery.compilers
import tests.jobs.battery.modules
import tests.jobs.battery.programs  # noqa: F401
from tests.jobs.battery.registry import CASES, Case, Watch

# A case that hangs ends by SIGALRM, unless it uses SIGALRM itself.
_TIMEOUT_S = 120


def describe(value: Any) -> Any:
    """Return nested lists and texts that are equal only if types and bits are equal."""
    if isinstance(value, torch.Tensor) and value.is_nested:
        return ["nested", *map(describe, value.unbind())]
    if isinstance(value, torch.Tensor):
        data = value.detach().to_dense() if value.is_sparse else value.detach()
        digest = hashlib.sha256(data.contiguous().flatten().view(torch.uint8).numpy().tobytes())
        kind = f"{type(value).__name__} {value.dtype} {tuple(value.shape)} {value.requires_grad}"
        return f"{kind} {digest.hexdigest()[:16]}"
    if isinstance(value, np.ndarray):
        return f"{value.dtype} {value.shape} {hashlib.sha256(value.tobytes()).hexdigest()[:16]}"
    if isinstance(value, torch.nn.Module):
        return [repr(value), sorted(vars(value)), describe(value.state_dict())]
    if isinstance(value, Mapping):
        return [[repr(key), describe(each)] for key, each in value.items()]
    if isinstance(value, (list, tuple)):
        return [type(value).__name__, *map(describe, value)]
    if isinstance(value, BaseException):
        return f"{type(value).__name__}: {value}"
    return repr(value)


def watching(mode: str, case: Case) -> Watch:
    """Return what the case calls as `watch`."""
    if mode != "watch":
        return lambda *arguments: contextlib.nullcontext()
    import torchlens_perf

    settings: dict[str, Any] = {"modules": "all", "backward_every": 1, "sidecar": case.sidecar}
    return lambda *arguments: torchlens_perf.watch(*arguments, report="off", **settings)


def run_case(case: Case, mode: str, outcome: Path) -> None:
    """Run one case in this process, and write its outcome."""
    random.seed(1)
    np.random.seed(2)
    torch.manual_seed(3)
    signal.alarm(_TIMEOUT_S)
    found: dict[str, Any] = {}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            found["result"] = describe(case.run(watching(mode, case)))
        except BaseException as error:
            found["result"] = "raised " + describe(error)
            traceback.print_exc()
            raise
        finally:
            generators = [torch.get_rng_state(), np.random.get_state(), random.getstate()]
            found["generators"] = hashlib.sha256(repr(describe(generators)).encode()).hexdigest()
            found["warnings"] = [f"{each.category.__name__}: {each.message}" for each in caught]
            outcome.write_text(json.dumps(found))


def use_own_files(folder: Path) -> None:
    """Redirect the standard streams of this process, and enter an empty folder."""
    folder.mkdir()
    for number, name in ((1, "stdout"), (2, "stderr")):
        descriptor = os.open(folder / name, os.O_WRONLY | os.O_CREAT)
        os.dup2(descriptor, number)
        os.close(descriptor)
    home = folder / "home"
    home.mkdir()
    os.chdir(home)
    os.environ["TORCHLENS_PERF_DIR"] = str(folder / "runs")


def main() -> None:
    mode, folder, *names = sys.argv[1:]
    if mode == "watch":
        # Forked children need not import it again.
        import torchlens_perf.hooks.attach  # noqa: F401
    for name in names:
        sys.stdout.flush()
        child = os.fork()
        if child == 0:
            place = Path(folder, name)
            use_own_files(place)
            run_case(CASES[name], mode, place / "outcome")
            return
        _, status = os.waitpid(child, 0)
        Path(folder, name, "code").write_text(str(os.waitstatus_to_exitcode(status)))


if __name__ == "__main__":
    main()
