"""Tests of files of any size in a run directory.

A file that is too large is reported in one line, and the rest of the run is shown.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.support.long import long
from tests.support.page_server import PageServer
from tests.support.processes import ROOT
from torchlens_perf.run.directory import RunDirectory
from torchlens_perf.serve.readers import _call_with_read_errors
from torchlens_perf.sidecar.rings.oom_files import OomTableReader
from torchlens_perf.store import segments
from torchlens_perf.verdicts import node_state

pytestmark = pytest.mark.distributed

_SPARSE_BYTES = 100 << 30
_MEMORY_BYTES = 3 << 30
"""Memory limit of a command in these tests: more than it needs, and far less than the files
claim.
"""
_ID = "20261121-013205-3fa9"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = (
        tmp_path_factory.mktemp("whole") / f"run-{os.getpid()}"
    )  # Parallel tests must not share a run.
    command = ["simulate", "--ranks", "2", "--steps", "64", "--out", str(made), "--quiet"]
    subprocess.run(
        [sys.executable, "-m", "torchlens_perf", *command],
        check=True,
        capture_output=True,
        cwd=ROOT,
    )
    return made


@pytest.fixture
def run(whole: Path, tmp_path: Path) -> RunDirectory:
    shutil.copytree(whole, tmp_path / "run")
    return RunDirectory(tmp_path / "run")


def sparse(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "wb") as file:
        file.truncate(_SPARSE_BYTES)


def nested(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("[" * 500_000)


def many_rows(path: Path) -> None:
    """Write a file of some kilobytes with 20 million rows."""
    path.parent.mkdir(parents=True, exist_ok=True)
    table = pa.table({name: pa.array(np.zeros(20_000_000, np.int64)) for name in ("step", "time")})
    pq.write_table(table, path, compression="zstd")
    assert path.stat().st_size < 1 << 20


def many_columns(path: Path) -> None:
    """Write a file of the same size with few rows in many columns."""
    path.parent.mkdir(parents=True, exist_ok=True)
    zeros = pa.array(np.zeros(1_000_000, np.int64))
    pq.write_table(pa.table({f"c{at}": zeros for at in range(300)}), path, compression="zstd")


def repeated_text(path: Path) -> None:
    """Write a million rows with the same text of a megabyte, which is a terabyte in total."""
    path.parent.mkdir(parents=True, exist_ok=True)
    texts = pa.DictionaryArray.from_arrays(
        pa.array(np.zeros(1_000_000, np.int32)), pa.array(["x" * (1 << 20)])
    )
    writer = pq.ParquetWriter(
        path, pa.schema([("process", texts.type)]), compression="zstd", store_schema=False
    )
    writer.write_table(pa.table({"process": texts}))
    writer.close()


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "torchlens_perf", *arguments],
        capture_output=True, text=True, timeout=120, check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_DATA, (_MEMORY_BYTES, _MEMORY_BYTES)),
    )  # fmt: skip


@pytest.mark.parametrize("make", [sparse, nested])
def test_report_names_json_files_that_are_too_large_to_read(
    run: RunDirectory, make: Callable[[Path], None]
) -> None:
    names = ["nodes/other-0001.json", f"captures/{_ID}.request.json"]
    for name in names:
        make(run.path / name)
    done = command("report", str(run.path), "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    for name in names:
        (note,) = [each for each in report["quality"]["notes"] if Path(name).name in each]
        assert "\n" not in note
    assert report["steps"]["count"] == 64


def test_report_of_a_single_too_large_state_is_one_line(run: RunDirectory) -> None:
    (state,) = run.nodes.glob("*.json")
    sparse(state)
    done = command("report", str(run.path))
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1), done.stderr
    assert f"{state} cannot be read: it has {_SPARSE_BYTES} bytes" in done.stderr
    with pytest.raises(node_state.DamagedStateError, match="at most"):
        node_state.load(state)


@pytest.mark.parametrize("make", [sparse, many_rows, *long(many_columns, repeated_text)])
def test_page_names_parquet_files_that_are_too_large_to_read(
    run: RunDirectory, make: Callable[[Path], None], tmp_path: Path
) -> None:
    (state,) = run.nodes.glob("*.json")
    made = tmp_path / "made"
    make(made)
    bad = [
        run.path / folder / f"{state.stem}-{number:06}.parquet"
        for number, folder in enumerate(("steps", "spans", "gpus"), 900)
    ]
    for path in bad:
        path.parent.mkdir(exist_ok=True)
        os.link(made, path)
    done = command("report", str(run.path), "--html", str(tmp_path / "page.html"))
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "page.html").read_text()
    for path in bad:
        assert f"{path.name} cannot be read" in page


@pytest.mark.long
@pytest.mark.parametrize("make", [sparse, many_rows, many_columns, repeated_text])
def test_replay_leaves_out_a_segment_that_is_too_large_to_read(
    run: RunDirectory, make: Callable[[Path], None]
) -> None:
    (state,) = run.nodes.glob("*.json")
    bad = run.spans / f"{state.stem}-000009.parquet"
    make(bad)
    notes: list[str] = []
    assert list(segments.read_chunks(run, state.stem, notes))
    assert bad.name in notes[0]


def test_oversized_ring_list_files_are_ignored(run: RunDirectory, tmp_path: Path) -> None:
    (state,) = run.nodes.glob("*.json")
    sparse(run.node_rings_path(state.stem))
    assert run.rings_in_run_directory(state.stem) == []
    sparse(run.oom / "rank00000-3.json")
    OomTableReader(run).add_new_tables({}, at_once=True)


# -- the live page


def allocate(size: int) -> int:
    return len(bytearray(size))


def test_reader_process_of_the_live_page_has_a_memory_limit() -> None:
    """A viewer gets a message. The test needs its own process, because the limit is permanent."""
    program = (
        "import resource\n"
        "from torchlens_perf.serve.readers import _call_with_read_errors, _prepare_reader\n"
        "_prepare_reader('torchlens_perf.serve.run_list')\n"
        "from tests.security.test_large_files import allocate\n"
        "print(_call_with_read_errors(allocate, (1 << 20,)))\n"
        "limit = resource.getrlimit(resource.RLIMIT_DATA)[0]\n"
        "assert 0 < limit <= 8 << 30\n"
        "try:\n    _call_with_read_errors(allocate, (limit,))\n"
        "except Exception as error:\n    print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, check=True
    )
    first, second = done.stdout.splitlines()
    assert first == "1048576"
    assert "GiB of memory, the limit of a reader" in second
    assert _call_with_read_errors.__name__  # The program's text uses this function by name.


@pytest.mark.long
@pytest.mark.parametrize("make", [sparse, many_rows])
def test_live_page_names_files_that_cannot_be_read(
    run: RunDirectory, make: Callable[[Path], None]
) -> None:
    (state,) = run.nodes.glob("*.json")
    make(run.steps / f"{state.stem}-000009.parquet")
    sparse(run.nodes / "other-0001.json")
    with PageServer(run.path.parent) as server:
        page = server.viewer().page("run")
    assert f"{state.stem}-000009.parquet cannot be read" in page
    assert "other-0001.json cannot be read" in page
