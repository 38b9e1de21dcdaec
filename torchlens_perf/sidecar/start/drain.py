"""Read the rings of killed jobs into their run directories, see run/dead_runs.py."""

from __future__ import annotations

import logging
from pathlib import Path

from torchlens_perf.errors import RunStoreError, TorchlensPerfError
from torchlens_perf.output import sidecar_logger as logger
from torchlens_perf.run.dead_runs import OLD_S, DeadRun, find_dead_runs
from torchlens_perf.run.directory import RunDirectory, remove_empty_user_folders
from torchlens_perf.run.place.node import override_namespace_digest
from torchlens_perf.run.ring import HEAD, reading_ring
from torchlens_perf.sidecar import priority
from torchlens_perf.sidecar.start import process
from torchlens_perf.store.without_pandas import block_pandas_import


def drain_run(dead: DeadRun) -> str:
    """Read a dead run's rings into its run directory, if it still exists. Return a description.

    The rings are removed afterwards. Raises RunStoreError if the run directory cannot be written.
    """
    override_namespace_digest(dead.digest)
    name, bytes_ = dead.run_id, sum(ring.stat().st_size for ring in dead.rings)
    what = f"{len(dead.rings)} rings ({bytes_ >> 20} MB) of {name}, whose processes are dead, were "
    run = RunDirectory(Path(name) if dead.path is None else dead.path)
    is_there = dead.path is not None and run.nodes.is_dir()
    # read_or_replay() saves the records, and removes rings whose records are all saved.
    if is_there and any(path.exists() for path in run.local_rings()):
        process.read_or_replay(run.path, dead.node)
    if any(_has_records(ring) for ring in dead.rings) and is_there:
        raise RunStoreError(f"{run.path} cannot be written")
    lock = process.acquire_lock(run)
    for ring in dead.rings:
        run.remove_ring(ring)
    run.remove_local_leftovers()
    lock.remove()
    return what + (f"read into {run.path}" if is_there else "removed: their run directory is gone")


def _has_records(path: Path) -> bool:
    """Return True if a ring has records that this version can read."""
    with reading_ring(path) as reader:
        return reader is not None and bool(reader.read_metadata()) and reader.read_counter(HEAD) > 0


def drain_old_runs(old_s: float = OLD_S, but: str = "") -> int:
    """Drain all old dead runs one after the other. Blocks while a disk does not respond.

    old_s: minimum age of a dead run. but: id of a run to skip.
    """
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    priority.lower_priority()
    block_pandas_import()
    for dead in list(find_dead_runs(old_s)):
        # Another process may have drained this run in the meantime.
        if dead.run_id != but and any(ring.exists() for ring in dead.rings):
            try:
                logger.info("%s", drain_run(dead))
            except (OSError, TorchlensPerfError) as error:
                logger.warning("the rings in %s stay: %s", dead.rings[0].parent, error)
    remove_empty_user_folders()
    return 0
