"""`try` changes settings of torch in a real job and measures what they gain."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.processes import clean_environ
from torchlens_perf.commands.cli import main
from torchlens_perf.commands.try_settings import parse_settings
from torchlens_perf.config import TRIED
from torchlens_perf.errors import ConfigError

SHOW = """
import json, torch, torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model = nn.parallel.DistributedDataParallel(nn.Linear(4, 4), find_unused_parameters=True)
loader = DataLoader([1, 2, 3], 2, num_workers=0)
optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
print(json.dumps({
    "workers": loader.num_workers, "prefetch": loader.prefetch_factor, "batch": loader.batch_size,
    "unused": model.find_unused_parameters, "foreach": optimizer.defaults["foreach"],
    "threads": torch.get_num_threads(), "precision": torch.get_float32_matmul_precision(),
}))
"""
JOB = """
import time, torch, sys
from torch import nn
from torch.utils.data import DataLoader, Dataset
class Slow(Dataset):
    def __len__(self):
        return 400
    def __getitem__(self, index):
        time.sleep(0.01)
        return torch.ones(8)
model = nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for batch in DataLoader(Slow(), batch_size=4):
    model(batch).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def show(**settings: object) -> dict[str, object]:
    environment = clean_environ() | {"TORCHLENS_PERF": "1", "TORCHLENS_PERF_REPORT": "off"}
    if settings:
        environment[TRIED] = json.dumps(
            {key.replace("__", "."): value for key, value in settings.items()}
        )
    shown = subprocess.run(
        [sys.executable, "-c", "import torchlens_perf.autoload as a; a.autoload()\n" + SHOW],
        env=environment, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return json.loads(shown.stdout)  # type: ignore[no-any-return]


def test_settings_reach_torch_and_nothing_else_changes() -> None:
    usual = show()
    assert usual == {
        "workers": 0, "prefetch": None, "batch": 2, "unused": True, "foreach": False,
        "threads": usual["threads"], "precision": "highest",
    }  # fmt: skip
    changed = show(
        loader__num_workers=2, loader__prefetch_factor=4, ddp__find_unused_parameters=False,
        optimizer__foreach=True, torch__num_threads=1, torch__float32_matmul_precision="high",
    )  # fmt: skip
    assert changed == {
        "workers": 2, "prefetch": 4, "batch": 2, "unused": False, "foreach": True, "threads": 1,
        "precision": "high",
    }  # fmt: skip


def test_prefetching_without_workers_is_left_out() -> None:
    assert show(loader__prefetch_factor=4, loader__persistent_workers=True)["prefetch"] is None


def test_values_are_json_and_unknown_names_get_a_suggestion() -> None:
    texts = [
        "loader.num_workers=4",
        "gc.freeze=True",
        "torch.float32_matmul_precision=high",
        "OMP_NUM_THREADS=1",
    ]
    assert parse_settings(texts) == {
        "loader.num_workers": 4, "gc.freeze": True, "torch.float32_matmul_precision": "high",
        "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    with pytest.raises(ConfigError, match=r"did you mean 'loader\.num_workers'"):
        parse_settings(["loader.num_worker=4"])


@pytest.mark.long
def test_workers_for_a_slow_dataset_are_measured_as_a_gain(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(JOB)
    ours = [sys.executable, "-m", "torchlens_perf"]
    tried = [*ours, "try", "--set", "loader.num_workers=4", "--times", "3", "--"]
    made = subprocess.run(
        [*tried, *ours, "run", "job.py"], cwd=tmp_path, env=clean_environ(), capture_output=True, text=True
    )  # fmt: skip
    assert made.returncode == 0, made
    assert "FASTER" in made.stdout
    (row,) = map(json.loads, (tmp_path / "torchlens-perf" / "tries.jsonl").read_text().splitlines())
    assert row["settings"] == ["loader.num_workers=4"]
    # Four items of 10 ms are read by one process before, by four processes after.
    assert 0.01 < row["gain_s"] < 0.05
    assert row["low_s"] > 0


def test_run_without_advice_needs_settings(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from tests.support.simulated_runs import simulate_run

    run = simulate_run(tmp_path / "run")
    assert main(["try", "--run", str(run), "--", "true"]) == 2
    assert "use --set" in capsys.readouterr().err
