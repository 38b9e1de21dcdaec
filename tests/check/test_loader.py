"""The storage of a dataset is measured, and the number of workers of its DataLoader is proven."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from torchlens_perf.check import loader as check
from torchlens_perf.check.loader import Trial
from torchlens_perf.errors import ConfigError

READ_S = 0.01
RECORDED = Path(__file__).parent / "counters"


class SlowReads(Dataset[Any]):
    def __len__(self) -> int:
        return 200

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(READ_S)
        return torch.zeros(2)


def slow_collate(rows: list[Any]) -> torch.Tensor:
    time.sleep(READ_S)
    return torch.stack(rows)


@pytest.mark.parametrize(
    ("kind", "file", "mount", "expected"),
    [
        (
            "nfs",
            "mountstats",
            "/mnt/nfs",
            {"reads": 34096, "bytes": 1792122744, "server_ms": 464840},
        ),
        ("nfs", "mountstats", "/", {}),
        ("lustre", "llite", "", {"reads": 1, "bytes": 4194304}),
        ("gpfs", "mmpmon", "scratch", {"reads": 59420404, "bytes": 205607400434}),
        ("gpfs", "mmpmon", "other", {}),
        ("ext4", "mmpmon", "scratch", {}),
    ],
)
def test_recorded_counters_of_file_systems_are_read(
    kind: str, file: str, mount: str, expected: dict[str, int]
) -> None:
    assert check.parse_counters(kind, (RECORDED / f"{file}.txt").read_text(), mount) == expected


def test_counters_of_another_mount_are_not_read() -> None:
    other = "device a:/b mounted on /mnt/empty with fstype nfs4 statvers=1.1\n\tage: 1\n"
    text = other + (RECORDED / "mountstats.txt").read_text()
    assert check.parse_counters("nfs", text, "/mnt/empty") == {}


def test_reads_from_storage_are_told_from_the_page_cache(tmp_path: Path) -> None:
    """Pages on a disk can be dropped. Those in memory alone cannot."""
    for name, size in ("large", 5 << 20), ("small", 10_000):
        (tmp_path / name).write_bytes(os.urandom(size))
        with open(tmp_path / name, "rb") as file:
            os.fsync(file.fileno())
    found = {each.kind: each for each in check.measure_mount(check.list_files(tmp_path), 8)}

    assert {len(each.times_s) for each in found.values()} == {5, 64, 1, 2}
    assert (found["sequential"].bytes, found["small files"].bytes) == (5 << 20, 10_000)
    assert found["sequential"].cached_share == found["small files"].cached_share == 0
    assert "in the page cache before: 0.0%" in found["random"].describe()
    assert "in the page cache before: unknown" in found["metadata"].describe()


@pytest.mark.skipif(not os.access("/dev/shm", os.W_OK), reason="no /dev/shm")
def test_pages_that_stay_in_the_cache_are_counted(tmp_path_factory: pytest.TempPathFactory) -> None:
    file = Path("/dev/shm") / f"torchlens-{os.getpid()}"
    file.write_bytes(bytes(20_000))
    try:
        assert check.drop_pages(file) == 1
        small = check.measure_mount([file], 0.1)
    finally:
        file.unlink()
    assert [len(each.times_s) for each in small] == [0, 0, 1, 1]
    assert small[0].describe() == "sequential: not measured, no file is of the size for it"


def test_file_system_without_counters_has_none(tmp_path: Path) -> None:
    assert check.read_counters(Path("/proc")) == {}


def test_times_of_a_worker_add_up() -> None:
    loader = DataLoader(SlowReads(), 2, collate_fn=slow_collate)
    found = check.try_workers(loader, 2, lambda: None, 0.1)

    assert READ_S <= found.times_s["read"] < 3 * READ_S
    assert READ_S <= found.times_s["collate"] < 2 * READ_S
    assert found.times_s["decode"] < READ_S
    assert sum(found.times_s.values()) == pytest.approx(2 * found.period_s, rel=0.2)
    assert loader.num_workers == 0
    assert "2 workers: a batch every" in found.describe()


@pytest.mark.parametrize(
    ("read_s", "decode_s", "step_s", "expected"),
    [
        (0.08, 0.0, 0.02, 4),
        (0.08, 0.0, 0.2, 1),
        (0.0, 0.08, 0.06, 2),
        # The two CPUs need 40 ms for a batch: more workers than CPUs do not help.
        (0.0, 0.08, 0.01, 2),
    ],
)
def test_workers_are_enough_for_the_step_or_for_the_cpus(
    read_s: float, decode_s: float, step_s: float, expected: int
) -> None:
    times_s = {"decode": decode_s, "collate": 0.0, "waiting for a CPU": 0.05}
    one = Trial(1, read_s + decode_s + 0.05, times_s)
    assert check.predict_workers(one, step_s, cpus=2) == expected


def make_loader() -> DataLoader[Any]:
    return DataLoader(SlowReads(), 4)


@pytest.mark.parametrize(
    ("step_ms", "first", "code"),
    [
        (20.0, "OK  num_workers=2: 20.0 ms per step of 20.0 ms (predicted: num_workers=2;", 0),
        (
            8.0,
            "SLOW DATA  num_workers=4: 15.0 ms per step of 8.00 ms (predicted: num_workers=5;",
            1,
        ),
    ],
)
def test_steps_that_wait_with_all_numbers_of_workers_have_slow_data(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
    step_ms: float, first: str, code: int,
) -> None:  # fmt: skip
    """Another bound, such as a network, allows a batch in 15 ms, which the prediction does not know."""

    def plant(loader: Any, workers: int, *arguments: Any) -> Trial:
        period_s = 0.04 if workers == 1 else max(step_ms / 1e3, 0.04 / workers, 0.015)
        times_s = {"read": 0.04, "decode": 0.0, "collate": 0.0, "waiting for a CPU": 0.0}
        return Trial(workers, period_s, times_s)

    monkeypatch.setattr(check, "try_workers", plant)
    (tmp_path / "small").write_bytes(bytes(10))
    options = argparse.Namespace(
        data=str(tmp_path), loader=f"{__name__}:make_loader", step_ms=step_ms, seconds=1
    )
    assert check.check_data(options) == code

    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(first)
    assert lines[1].startswith(
        "1 worker: a batch every 40.0 ms; a worker's time for it: read 40.0 ms"
    )


def test_command_tries_a_loader(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "import time\nfrom torch.utils.data import DataLoader\n"
        "class Reads(list):\n    def __getitem__(self, index):\n        time.sleep(0.02)\n        return 0\n"
        "def make():\n    return DataLoader(Reads(range(200)), 2)\n"
    )
    command = [
        sys.executable,
        "-m",
        "torchlens_perf",
        "check",
        "--seconds",
        "1",
        "--data",
        "own.py",
    ]
    done = subprocess.run(
        [*command, "--loader", "own:make", "--step-ms", "40"],
        cwd=tmp_path, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode in (0, 1), done.stderr
    assert "per step of 40.0 ms (predicted: num_workers=" in done.stdout
    assert "\nsmall files: " in done.stdout


def test_reads_between_two_readings_of_the_counters_are_told() -> None:
    before = {"reads": 10, "bytes": 1000}
    after = {"reads": 14, "bytes": 5000}

    assert check.describe_counters(before, after) == "by the file system: 4 reads of 4.0 KB"
    timed = check.describe_counters(before | {"server_ms": 0}, after | {"server_ms": 10})
    assert timed == "by the file system: 4 reads of 4.0 KB, 10.0 ms in all"


def test_too_few_batches_are_an_error() -> None:
    with pytest.raises(ConfigError, match="too few batches to try 2 workers"):
        check.try_workers(DataLoader(SlowReads(), 100), 2, lambda: None, 0.1)
