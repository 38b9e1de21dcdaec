"""Count implicit waits of every kind that a watch adds to training, by CUPTI (driver_calls.py)."""

from __future__ import annotations

import gc
import tempfile
from collections import Counter
from collections.abc import Callable, Container

import torch

import torchlens_perf as perf
from benchmarks.gpu_check.driver_calls import KINDS, Calls
from benchmarks.gpu_check.gpt import trainer
from benchmarks.gpu_check.lines import Checks

# This many steps take some seconds, in which the watch reduces windows, compares clocks and reads
# memory.
STEPS, WARM_UP = 200, 20
_MODULE = 'extern "C" __global__ void of_the_check_{number}(void) {{}}'


def waits(checks: Checks) -> None:
    """Count the waits in steps without a watch, and with a watch that has every hook.

    First, check that the counter counts each kind of wait.
    """
    try:
        counter = Calls()
    except (RuntimeError, OSError) as error:
        checks.missing("waits", "calls that wait", str(error))
        return
    with counter as calls:
        _compare(checks, calls)


def _compare(checks: Checks, calls: Calls) -> None:
    blind = _blind(checks, calls)
    model, step = trainer(batch=2)
    for _ in range(WARM_UP):
        step()
    without = _steps(calls, step)
    # A section that exists before the watch makes the watch allocate device memory at its start.
    perf.device_section("step")

    def watched_step() -> None:
        with perf.device_section("step"):
            step()

    with tempfile.TemporaryDirectory() as folder:
        with calls.counted() as begun:
            watch = perf.watch(model, dir=folder, sidecar=False, report="off", modules="all")
            watch.__enter__()
        for _ in range(WARM_UP):
            watched_step()
        with_watch = _steps(calls, watched_step)
        with calls.counted() as ended:
            watch.__exit__(None, None, None)
    for what, found in (
        ("in steps without a watch", without),
        ("when it begins", begun),
        ("when it ends", ended),
    ):
        checks.value("waits", f"calls that wait, {what}", _words(found))
    judge_added(checks, with_watch - without, blind)


def judge_added(checks: Checks, added: Counter[str], blind: Container[str]) -> None:
    """Expect that a watch adds no call that waits. blind: kinds that the counter does not see."""
    for kind in KINDS:
        what = f"{kind}: calls that a watch adds in {STEPS} steps"
        if kind in blind:
            checks.missing("waits", what, "the counter does not see them here")
            continue
        found = Counter({name: count for name, count in added.items() if name.startswith(kind)})
        checks.bar("waits", what, _words(found), "none", not found)


def _blind(checks: Checks, calls: Calls) -> set[str]:
    """Make one call of each kind, and return the kinds that the counter does not count."""
    import cupy

    torch.zeros(1, device="cuda").item()
    device, host = cupy.cuda.alloc(1 << 20), torch.zeros(1 << 20, dtype=torch.uint8)
    planted: dict[str, Callable[[], object]] = {
        "synchronize": torch.cuda.synchronize,
        "device memory": _allocate,
        "host memory": lambda: torch.empty(77 << 20, dtype=torch.uint8).pin_memory(),
        "module": lambda: cupy.RawModule(code=_MODULE.format(number=1)).get_function(
            "of_the_check_1"
        ),
        "blocking copy": lambda: cupy.cuda.runtime.memcpy(device.ptr, host.data_ptr(), 1 << 20, 1),
    }
    blind = set()
    for kind, call in planted.items():
        with calls.counted() as found:
            call()
        seen = any(name.startswith(kind) for name in found)
        checks.value("waits", f"a planted one, {kind}", _words(found) if seen else "not seen")
        if not seen:
            blind.add(kind)
    return blind


def _allocate() -> None:
    kept = torch.empty(333 << 20, dtype=torch.uint8, device="cuda")
    del kept
    torch.cuda.empty_cache()


def _steps(calls: Calls, step: Callable[[], None]) -> Counter[str]:
    torch.cuda.synchronize()
    gc.collect()
    with calls.counted() as found:
        for _ in range(STEPS):
            step()
    return found


def _words(found: Counter[str]) -> str:
    return ", ".join(f"{name} {count}" for name, count in sorted(found.items())) or "none"
