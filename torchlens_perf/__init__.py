"""Measure the time of each training step on every rank, and report which rank is slow, why, and
what to do.

::

    import torchlens_perf as perf

    with perf.watch(model, optimizer) as w:
        for batch in loader:
            with perf.section("augment"):
                batch = augment(batch)
            loss = model(batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

The training process only writes marks into a memory-mapped file; one sidecar process per node does
everything else::

    training process: hooks ──mark──▶ Recorder ──▶ ring file ─▶ sidecar: statistics ─▶ verdict ─▶
    run directory, OTLP

Importing the package does nothing: no thread, no patch, no file, and torch is not imported.
"""

import os as _os
import sys as _sys
from typing import TYPE_CHECKING as _TYPE_CHECKING

# A sidecar process needs none of these names. Importing them would take four times as long as the
# rest of its start (sidecar/start/wait.py), while the job makes its first steps.
if getattr(_sys, "argv", [])[:2] != [__path__[0], "sidecar"]:  # as in run/children.py
    from torchlens_perf.config import Config
    from torchlens_perf.errors import ConfigError, TorchlensPerfError
    from torchlens_perf.recorder.device_sections import device_section
    from torchlens_perf.recorder.recorder import Section, section
    from torchlens_perf.version import VERSION
    from torchlens_perf.watch import Watch, watch

    __version__ = VERSION

    if _TYPE_CHECKING:
        from torchlens_perf.results.run import Run


def open_run(run_dir: "str | _os.PathLike[str]") -> "Run":
    """Return the results of a live or finished run from its run directory.

        run = perf.open_run("torchlens-perf/20261121-013205-3fa9c1d2")
        print(run.summary())
        steps = run.step_table("pandas")

    Raise RunStoreError, a TorchlensPerfError, for a folder that is not a run directory.
    """
    from torchlens_perf.results.run import Run

    return Run(run_dir)


__all__ = [
    "Config", "ConfigError", "Section", "TorchlensPerfError", "Watch", "device_section", "open_run", "section", "watch",
]  # fmt: skip
