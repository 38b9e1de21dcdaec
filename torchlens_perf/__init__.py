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

    training process                        sidecar process
    hooks ──mark──▶ recorder ─▶ ring file ─▶ statistics ─▶ verdicts ─▶ run directory, OTLP

Importing the package does nothing: no thread, no patch, no file, and torch is not imported. Each
public name is imported when it is first used, so processes that record nothing start as fast as
without the package.
"""

import os as _os
import typing as _typing

from torchlens_perf.version import VERSION

__version__ = VERSION

if _typing.TYPE_CHECKING:
    from torchlens_perf.config import Config
    from torchlens_perf.errors import ConfigError, TorchlensPerfError
    from torchlens_perf.recorder.device_sections import device_section
    from torchlens_perf.recorder.recorder import Section, section
    from torchlens_perf.results.run import Run
    from torchlens_perf.roles.recording import event, role
    from torchlens_perf.watching import Watch, watch
else:
    # No module may have the name of a function: the import of a module `torchlens_perf.watch` would
    # replace the function.
    _MODULES = {
        "Config": "config", "ConfigError": "errors", "Section": "recorder.recorder", "TorchlensPerfError": "errors",
        "Watch": "watching", "device_section": "recorder.device_sections", "section": "recorder.recorder",
        "event": "roles.recording", "role": "roles.recording", "watch": "watching",
    }  # fmt: skip

    def __getattr__(name):
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from importlib import import_module

        value = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
        # Further uses find the name without this function.
        globals()[name] = value
        return value

    def __dir__():
        return sorted({*globals(), *__all__})


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
    "Config", "ConfigError", "Section", "TorchlensPerfError", "Watch", "device_section", "event", "open_run",
    "role", "section", "watch",
]  # fmt: skip
