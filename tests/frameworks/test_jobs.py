"""Tests of jobs of installed frameworks, each with a planted fault and the lines of
docs/guides/frameworks.md.

Each job runs with and without recording.

The losses are bit-equal, the steps equal the framework's count, and the verdict names the fault.

`make test-frameworks` runs these tests.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util
import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest

from tests.support.processes import ROOT, only_report, run, torchrun
from torchlens_perf.run.ring import Flag

FOLDER = Path(__file__).parent
ABORTS = "terminate called without an active exception"
"""Message of a torch thread at the end, seen once in 60 ends of an unrecorded fsdp2_loop."""
DOCS = ROOT / "docs/guides/frameworks.md"
VERSIONS = ROOT / "docs/internals/framework-tests.md"


@dataclasses.dataclass(frozen=True)
class Job:
    """A job and the expected contents of its report."""

    packages: tuple[str, ...]
    """Packages under test by their names in pip."""
    verdict: tuple[str, int | None, str | None]
    """Kind, rank and phase of the first verdict."""
    ranks: int = 2
    micro_steps: int = 1
    modules: frozenset[str] = frozenset({"0", "4"})
    sections: frozenset[str] = frozenset()
    seen: tuple[str, ...] = ()
    """Other work in some of its steps: evaluation, saving."""
    says: str = ""
    """Part of the first verdict's text."""
    itself: bool = False
    """True if the job starts its ranks itself."""
    framework: str = "none"
    """The frameworks that the report must name."""


SLOW_DATA, SLOW_HOST = ("straggler", 1, "data"), ("straggler", 1, "host")
JOBS = {
    "hf_trainer": Job(
        ("transformers",), SLOW_DATA, micro_steps=2, modules=frozenset({"bert.encoder.layer.0"}),
        seen=("evaluation", "saving"),
        framework="accelerate, transformers.trainer",
    ),
    "lightning_fit": Job(
        ("lightning",), SLOW_DATA, micro_steps=2, modules=frozenset({"model.0"}), seen=("evaluation", "saving"),
        framework="lightning",
    ),
    "lightning_profiler": Job(
        # The profiler does not see the LightningModule, so the model is what its step calls.
        ("lightning",), ("data_bound", None, "data"), ranks=1, micro_steps=2, modules=frozenset({"0"}),
        sections=frozenset({"run_training_batch", "[Strategy]SingleDeviceStrategy.backward"}),
        seen=("evaluation", "saving"),
        framework="lightning",
    ),
    "accelerate_loop": Job(("accelerate",), SLOW_DATA, micro_steps=2, framework="accelerate"),
    "fabric_loop": Job(("lightning",), SLOW_DATA, modules=frozenset({"0"}), framework="lightning"),
    "trl_peft": Job(
        ("trl", "peft"), SLOW_DATA, micro_steps=2, modules=frozenset({"transformer.h.0"}),
        framework="accelerate, transformers.trainer, trl.trainer",
    ),
    "deepspeed_loop": Job(("deepspeed",), SLOW_DATA, micro_steps=2, framework="deepspeed"),
    "accelerate_deepspeed": Job(
        ("accelerate", "deepspeed"), SLOW_DATA, micro_steps=2,
        framework="accelerate, deepspeed",
    ),
    "in_backward_loop": Job(("torch",), ("data_bound", None, "data"), ranks=1),
    "ray_train": Job(("ray",), SLOW_DATA, ranks=2, itself=True, framework="ray.train"),
    "torchtune_loop": Job(
        ("torchtune", "torchao"), SLOW_DATA, micro_steps=2, modules=frozenset({"layers.0"}),
        framework="torchtune",
    ),
    "vision_loop": Job(("torch",), SLOW_DATA, modules=frozenset({"1", "4"}), seen=("evaluation",)),
    "titan_loop": Job(("torch",), SLOW_HOST, micro_steps=2, sections=frozenset({"batch"})),
    "plain_loop": Job(("torch",), SLOW_HOST, micro_steps=2, sections=frozenset({"get_batch"}), seen=("evaluation",)),
    "fsdp2_loop": Job(("torch",), SLOW_DATA),
    "pipeline_loop": Job(
        ("torch",), ("not_compared", None, None), micro_steps=4, modules=frozenset(), says=" Rank 1 has "
    ),
    "dcp_async": Job(("torch",), SLOW_DATA, seen=("saving",)),
    "embedding_loop": Job(("torch",), SLOW_HOST, modules=frozenset({"dense"})),
    "gymnasium_loop": Job(
        ("gymnasium",), ("host_bound", None, "host"), ranks=1, modules=frozenset(), sections=frozenset({"environment"}),
        # The agent acts in the first step, so the recording counts acting as a part of each step.
        seen=("evaluation",),
    ),
}  # fmt: skip


def installed(job: Job) -> bool:
    """Return True if all packages of the job are installed."""
    return all(importlib.util.find_spec(package) is not None for package in job.packages)


CASES = [
    pytest.param(
        name,
        id=name,
        marks=[
            pytest.mark.skipif(
                not installed(job),
                reason=(
                    f"{' and '.join(job.packages)}: not in this environment: make test-frameworks"
                ),
            ),
            pytest.mark.long,
        ],
    )
    for name, job in JOBS.items()
]


def facts(name: str, folder: Path, package: Path) -> dict[str, Any]:
    """Run a job with the package in `package`. Return the parsed last line of rank 0."""
    job, script = JOBS[name], str(FOLDER / "jobs" / f"{name}.py")
    command = (
        [sys.executable, script]
        if job.ranks == 1 or job.itself
        else torchrun(script, ranks=job.ranks)
    )
    quiet = {"PYTHONWARNINGS": "ignore", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(package)}
    for _ in range(3):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        done = run(command, folder, timeout_s=200, **quiet)
        if ABORTS not in done.stderr:
            break
    assert done.returncode == 0, done.stderr[-3000:]
    (line,) = [line for line in done.stdout.splitlines() if line.startswith('{"losses"')]
    value: dict[str, Any] = json.loads(line)
    return value


@pytest.mark.distributed
@pytest.mark.parametrize("name", CASES)
def test_job_of_a_framework_names_the_fault_and_keeps_its_losses(name: str, tmp_path: Path) -> None:
    """Each step is counted, and the first verdict is about the planted fault."""
    job = JOBS[name]
    expected = facts(name, tmp_path / "without", FOLDER / "without")
    found = facts(name, tmp_path / "with", ROOT)
    report = only_report(tmp_path / "with")
    kind, rank, phase = job.verdict
    # On a busy machine, a verdict about CPU contention may be added.
    first = next(each for each in report["verdicts"] if each.kind != "lack_of_cpu")

    assert not (tmp_path / "without" / "torchlens-perf").exists()
    assert found == expected, "the losses are not the same"
    assert [row["steps"] for row in report["ranks"]] == [expected["steps"]] * job.ranks
    assert report["quality"]["lost"] == 0
    assert report["steps"]["micro_steps"] == job.micro_steps
    assert report["run"]["settings"]["framework"] == job.framework
    assert (first.kind, first.rank, first.phase) == (kind, rank, phase), first.sentence
    assert job.says in first.sentence
    assert job.modules <= {row["name"] for row in report["modules"]}
    assert job.sections <= {row["name"] for row in report["sections"]}
    found_in = tagged(tmp_path / "with")
    assert [kind for kind, steps in found_in.items() if steps] == list(job.seen)
    for kind, steps in expected.get("tagged", {}).items():
        assert found_in[kind] == steps, kind


def tagged(folder: Path) -> dict[str, list[int]]:
    """Return the steps of rank 0 with additional work, by kind of work."""
    (file,) = folder.glob("torchlens-perf/2*/steps/*.parquet")
    rows = pyarrow.parquet.read_table(file, columns=["rank", "step", "flags"]).to_pylist()
    kinds = {"evaluation": Flag.EVALUATION, "saving": Flag.CHECKPOINT}
    return {
        kind: [row["step"] for row in rows if not row["rank"] and row["flags"] & flag]
        for kind, flag in kinds.items()
    }


def test_docs_show_the_lines_that_the_jobs_use() -> None:
    """Code in docs/guides/frameworks.md is exactly the lines between "paste" and "end" of a job."""
    shown = re.findall(r"<!-- (\w+) -->\n```python\n(.*?)```", DOCS.read_text(), re.DOTALL)

    assert len(shown) >= 5
    for name, code in shown:
        assert code == pasted(name), name


def pasted(name: str) -> str:
    """Return the lines that a user pastes from a job, without indentation."""
    lines = (FOLDER / "jobs" / f"{name}.py").read_text().splitlines()
    begin = next(index for index, line in enumerate(lines) if line.strip() == "# -- paste")
    end = next(index for index, line in enumerate(lines) if line.strip() == "# -- end")
    margin = len(lines[begin]) - len(lines[begin].lstrip())
    return "".join(f"{line[margin:]}\n" for line in lines[begin + 1 : end])


def test_docs_list_the_installed_framework_versions() -> None:
    """docs/internals/framework-tests.md has a row for each job, with the versions
    installed here.
    """
    rows = dict(re.findall(r"^\| `(\w+)` \| ([^|]*\d) \|", VERSIONS.read_text(), re.MULTILINE))

    assert set(rows) == set(JOBS)
    for name, job in JOBS.items():
        listed = dict(each.rsplit(" ", 1) for each in rows[name].split(", "))
        assert set(listed) == set(job.packages), name
        for package in job.packages:
            if importlib.util.find_spec(package) is not None:
                version = importlib.metadata.version(package).partition("+")[0]
                assert version.split(".")[:2] == listed[package].split(".")[:2], (
                    f"{package} is {version}"
                )
