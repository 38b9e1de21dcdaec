"""`torchlens-perf import FILE... --out DIR`: profiles of other tools as a run directory."""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path
from typing import Any

from torchlens_perf.commands.perfetto_trace import parse_profile
from torchlens_perf.commands.progress import Progress
from torchlens_perf.errors import ConfigError, RunStoreError, printable
from torchlens_perf.run import ownership


def add_command(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "import",
        description=(
            "Make a run directory from traces of torch.profiler, one per rank, or from SQLite exports"
            " of Nsight Systems, so that report, compare and query can read them."
        ),
    )
    parser.add_argument("files", type=parse_profile, nargs="+", metavar="[RANK=]FILE")
    parser.add_argument(
        "--out", type=Path, required=True, metavar="DIR", help="the run directory to create"
    )
    parser.add_argument(
        "--steps",
        metavar="PATTERN",
        help=(
            "regular expression for the names of annotations or NVTX ranges that are steps; default:"
            " ProfilerStep#N, or names such as step 12"
        ),
    )
    parser.set_defaults(command=_run_import)


def _run_import(options: argparse.Namespace) -> int:
    from torchlens_perf.run.directory import RunDirectory
    from torchlens_perf.sidecar.loop import run_sidecar
    from torchlens_perf.sidecar.node import Sidecar
    from torchlens_perf.sidecar.start.process import acquire_lock, write_report
    from torchlens_perf.simulate.imported import DEFAULT_STEPS, ImportedRank, find_steps

    pattern = options.steps or DEFAULT_STEPS
    try:
        re.compile(pattern)
    except re.error as error:
        raise ConfigError(f"--steps {pattern!r} is no regular expression: {error}") from None
    run = RunDirectory(options.out.absolute())
    if run.nodes.exists():
        raise RunStoreError(f"{run.path} already is a run directory: choose another --out")
    with Progress("importing", quiet=options.quiet) as progress:
        traces = _read_traces(options.files)
        steps_of = {rank: find_steps(trace, pattern) for rank, trace in traces.items()}
        # Sequence numbers of collectives are comparable if all ranks begin with the same step.
        common = set.intersection(*({each.number for each in steps} for steps in steps_of.values()))
        if not common:
            raise RunStoreError("the files have no step in common: name files of the same steps")
        run.create()
        with ownership.restrict_new_files_like(run.nodes):
            lock = acquire_lock(run)
            try:
                size = max([len(traces), *(1 + rank for rank in traces)])
                ranks = []
                for rank, trace in sorted(traces.items()):
                    steps = [each for each in steps_of[rank] if each.number in common]
                    ranks.append(ImportedRank(run, "imported", rank, size, trace, steps))
                sidecar = Sidecar(run, "imported", None, write_report)
                for done in range(len(common)):
                    for each in ranks:
                        each.write_step(each.steps[done])
                    sidecar.read_rings()
                    sidecar.count_records()
                    progress(done + 1, len(common))
                for each in ranks:
                    each.close()
                run_sidecar(sidecar, lock, None)
            finally:
                # No file may stay in shared memory, even after Ctrl-C.
                lock.remove()
    if not options.quiet:
        print(
            f"torchlens-perf: imported {len(traces)} ranks, steps {min(common)} to {max(common)}, into"
            f" {printable(str(run.path))}",
            file=sys.stderr,
        )
    return 0


def _read_traces(files: list[tuple[int | None, Path]]) -> dict[int, Any]:
    """Return the trace of each rank. Raise RunStoreError."""
    from torchlens_perf.timeline.nsys_export import is_sqlite, read_nsys_export
    from torchlens_perf.timeline.profiler_trace import read_profiler_trace

    found: dict[int, Any] = {}
    for given_rank, path in files:
        try:
            traces = read_nsys_export(path) if is_sqlite(path) else [read_profiler_trace(path)]
        except OSError as error:
            raise RunStoreError(f"{path} cannot be read: {error.strerror or error}") from None
        for trace in traces:
            # A single file, and the processes of one export, need no ranks.
            unnamed = len(found) if len(files) == 1 else None
            ranks = (given_rank, None if len(traces) > 1 else trace.rank, unnamed)
            rank = next((each for each in ranks if each is not None), None)
            if rank is None:
                raise RunStoreError(f"{path} does not name its rank: write RANK={path}")
            if rank in found:
                raise RunStoreError(f"{path} and {found[rank].path} are both of rank {rank}")
            found[rank] = trace
    return found
