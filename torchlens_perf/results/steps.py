"""w.steps(): the run's steps as a frame of pandas or polars."""

from __future__ import annotations

import importlib.util
import io
import sys
from typing import TYPE_CHECKING, Any

from torchlens_perf.errors import ConfigError, RunStoreError, printable
from torchlens_perf.output import logger
from torchlens_perf.results import child
from torchlens_perf.results.ask import COMMAND, ask, own_work, settle
from torchlens_perf.run.mailbox import STEPS

if TYPE_CHECKING:
    from torchlens_perf.results.ask import Recorded

BACKENDS = ("pandas", "polars")


def steps(recorded: Recorded, backend: str | None) -> Any:
    """See Watch.steps()."""
    name = _backend(backend)
    with own_work(recorded.session):
        return _frame(name, _read(recorded))


def _read(recorded: Recorded) -> bytes:
    """The steps as a stream of Arrow's; b"" where there are none, which is said in the log."""
    why = recorded.missing
    if recorded.run is not None:
        if ask(recorded, STEPS) is None and recorded.session is None:
            settle(recorded.run)
        try:
            return child.output(COMMAND, str(recorded.run.path), "steps")
        except RunStoreError as error:
            why = str(error)
    logger.warning("torchlens_perf: there are no steps to show: %s", printable(why))
    return b""


def _backend(name: str | None) -> str:
    """Which of BACKENDS to use. Raises ConfigError for another one, or where none is installed."""
    if name is None:
        found = next((each for each in BACKENDS if each in sys.modules), None)
        found = found or next((each for each in BACKENDS if _is_installed(each)), None)
        if found is None:
            raise ConfigError("steps() makes a frame of pandas or polars: install one of them")
        return found
    if name not in BACKENDS:
        raise ConfigError(f"backend={name!r}: must be {' or '.join(map(repr, BACKENDS))}")
    if not _is_installed(name):
        raise ConfigError(f"backend={name!r}: {name} is not installed")
    return name


def _is_installed(name: str) -> bool:
    return name in sys.modules or importlib.util.find_spec(name) is not None


def _frame(backend: str, stream: bytes) -> Any:
    if backend == "polars":
        import polars

        return polars.read_ipc_stream(io.BytesIO(stream)) if stream else polars.DataFrame()
    import pandas

    if not stream:
        return pandas.DataFrame()
    import pyarrow

    with pyarrow.ipc.open_stream(stream) as reader:
        return reader.read_all().to_pandas(use_threads=False)  # no thread in the training process
