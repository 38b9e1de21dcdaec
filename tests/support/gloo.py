"""Real ranks over gloo: processes that run a function of a test module and send back its result."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.support.warm_python import WarmPython
from torchlens_perf.errors import RAISE, swallowed

# This limit is below the time limit of a test. On a busy machine a pair took 100 s.
LONGEST_S = 250.0


def run_ranks(function: Callable[[Path], Any], folder: Path, ranks: int = 2) -> list[Any]:
    """Return the result of `function(folder)` on each rank.

    The rank processes find the function by its module and name.
    """
    environment = {
        "OMP_NUM_THREADS": "1",
        "WORLD_SIZE": str(ranks),
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    processes = [
        WarmPython(
            [sys.executable, "-m", __name__, function.__module__, function.__name__, str(folder)],
            env={**os.environ, **environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for rank in range(ranks)
    ]
    try:
        finished = [process.communicate(timeout=LONGEST_S) for process in processes]
    finally:
        for process in processes:
            process.kill()
    # A rank whose peer has failed fails, too, so the errors of all are shown.
    failed = [
        errors.decode()
        for process, (_, errors) in zip(processes, finished, strict=True)
        if process.returncode
    ]
    assert not failed, "\n".join(failed)
    return [torch.load(folder / f"result-{rank}", weights_only=False) for rank in range(ranks)]


def main() -> None:
    """Run the function on one rank, and send back its result."""
    module, function, folder = sys.argv[1], sys.argv[2], Path(sys.argv[3])
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    unraisable: list[str] = []
    sys.unraisablehook = lambda raised: unraisable.append(
        f"{raised.object!r}: {raised.exc_value!r}"
    )
    os.environ[RAISE] = "1"
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(str(folder / "store"), world_size),
        rank=rank,
        world_size=world_size,
    )
    result = getattr(__import__(module, fromlist=[function]), function)(folder)
    dist.barrier()
    dist.destroy_process_group()
    assert not unraisable, unraisable
    assert not swallowed.by_place, swallowed.by_place
    data = io.BytesIO()
    torch.save(result, data)
    (folder / f"result-{rank}").write_bytes(data.getvalue())
    # Skip the interpreter's shutdown, which takes half a second of processor time with torch
    # loaded.
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
