"""Read tables of a run as data frames of pandas, polars or pyarrow."""

from __future__ import annotations

import importlib.util
import io
import sys
from typing import TYPE_CHECKING, Any

from torchlens_perf.errors import RunStoreError, printable, require
from torchlens_perf.output import logger
from torchlens_perf.results import child
from torchlens_perf.results.ask import (
    COMMAND,
    ask_sidecar,
    count_as_overhead,
    wait_until_run_is_written,
)
from torchlens_perf.run.directory import TABLES
from torchlens_perf.run.mailbox import STEPS

if TYPE_CHECKING:
    from torchlens_perf.results.ask import RunHandle

BACKENDS = ("pandas", "polars", "pyarrow")


def read_table(recorded: RunHandle, name: str, backend: str | None) -> Any:
    """Return a table of the run as a data frame, see Run.table()."""
    names = f"{', '.join(map(repr, TABLES[:-1]))} or {TABLES[-1]!r}"
    require(name in TABLES, f"name={name!r}: must be {names}")
    chosen = _choose_backend(backend)
    with count_as_overhead(recorded.session):
        return _build_frame(chosen, _request_table(recorded, name))


def _request_table(recorded: RunHandle, name: str) -> bytes:
    """Return a table as an Arrow stream. If it is missing, log the reason and return b""."""
    why = recorded.missing
    if recorded.run is not None:
        if (
            ask_sidecar(recorded, STEPS) is None
            and recorded.session is None
            and recorded.may_settle
        ):
            wait_until_run_is_written(recorded.run)
        try:
            return child.run_and_capture(COMMAND, str(recorded.run.path), name)
        except RunStoreError as error:
            why = str(error)
    logger.warning("torchlens_perf: there are no %s to show: %s", name, printable(why))
    return b""


def _choose_backend(name: str | None) -> str:
    """Return the dataframe library to use. name: None for an imported or else installed library.

    Raise ConfigError for a library that is unknown or not installed. pyarrow is always installed.
    """
    if name is None:
        frames = BACKENDS[:2]
        imported = (each for each in frames if each in sys.modules)
        return [*imported, *filter(_is_installed, frames), "pyarrow"][0]
    given = f"backend={name!r}"
    require(name in BACKENDS, f"{given}: must be 'pandas', 'polars' or 'pyarrow'")
    require(_is_installed(name), f"{given}: {name} is not installed: pip install {name}")
    return name


def _is_installed(name: str) -> bool:
    return name in sys.modules or importlib.util.find_spec(name) is not None


def _build_frame(backend: str, stream: bytes) -> Any:
    if backend == "polars":
        import polars

        return polars.read_ipc_stream(io.BytesIO(stream)) if stream else polars.DataFrame()
    import pyarrow

    if stream:
        with pyarrow.ipc.open_stream(stream) as reader:
            found = reader.read_all()
    else:
        found = pyarrow.table({})
    # Start no threads in the training process.
    return found if backend == "pyarrow" else found.to_pandas(use_threads=False)
