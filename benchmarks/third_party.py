"""Record scripts that other people wrote, and compare the first sentence of the report with py-spy.

    python -m benchmarks.third_party --repositories FOLDER --out FOLDER [--scripts NAME ...]
    python -m benchmarks.third_party --out FOLDER --show

--repositories has a checkout of each repository in COMMITS (third_party_scripts.py), named like the
repository: `git clone https://github.com/karpathy/nanoGPT FOLDER/nanoGPT`, and `git checkout` of the
commit. Nothing else is downloaded.

Run it with the Python of an environment that has torchlens_perf, py-spy, torch and torchvision from
PyTorch's index of CPU builds, and these packages: accelerate 1.15, datasets 5.2, diffusers 0.42,
evaluate 0.4, fire, gymnasium 1.4, lightning[extra] 2.6, matplotlib, peft 0.21, scikit-learn,
sentence-transformers 6.2, tensorboard, timm 1.0, torch-geometric 2.8, transformers 5.24, trl 1.16,
tyro, einops, ema-pytorch, optuna, pytorch-fid, sentencepiece, and `pip install
gymnasium[classic-control]`. Scripts whose package is missing fail and are listed.

Each script runs once, unchanged, and is recorded by TORCHLENS_PERF=1 or by the flag of torchrun. At
the same time, py-spy samples its stacks and the kernel counts its CPU time. The table has the first
sentence of the report, and how far the report's parts of a mean step differ from py-spy's.
docs/internals/third-party-scripts.md has the judgements of the sentences.
"""

from __future__ import annotations

import argparse
import glob
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torchlens_perf
from benchmarks.measure import Table
from benchmarks.planted_faults import environment
from benchmarks.third_party_data import write_data
from benchmarks.third_party_scripts import SCRIPTS, Script
from benchmarks.third_party_truth import Sampler, find_rank_processes, read_truth
from tests.support.processes import wait_for_sidecar
from tests.support.servers import free_port
from torchlens_perf.analysis.statistics.rank import WARM_UP_STEPS
from torchlens_perf.report.run_report import load_report
from torchlens_perf.run.directory import RunDirectory

_TIMEOUT_S = 240
_PARTS = ("data", "forward", "recompute", "backward", "optimizer", "communication", "host", "tool")
# Scripts must not ask the network for models and data sets that are on the disk.
_OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "HF_EVALUATE_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "CUDA_VISIBLE_DEVICES": "",
    "MPLBACKEND": "Agg",
}


def run(script: Script, repositories: Path, out: Path) -> None:
    """Run the script in a new folder, with py-spy and the kernel's counters next to it."""
    folder = out / script.name
    shutil.rmtree(folder, ignore_errors=True)
    places = {"repositories": str(repositories), "data": str(out / "data")}
    environ = {**environment(), **_OFFLINE, "HF_HOME": str(folder / "cache")}
    for name, value in script.environment:
        value = value.format(**places)
        environ[name] = f"{value}:{environ[name]}" if name == "PYTHONPATH" else value
    _prepare(script, folder, places, environ)
    recorded = {**environ, "TORCHLENS_PERF_DIR": str(folder / "runs")}
    checkout = repositories / script.repository.partition("/")[2]
    path = str(checkout / script.path.format(**places))
    command = [path, *shlex.split(script.arguments.format(**places))]
    if script.ranks > 1:
        flags = ["--nproc-per-node", str(script.ranks), "--master-port", str(free_port())]
        flags += ["--logs-specs", "torchlens_perf"]
        command = ["-m", "torch.distributed.run", *flags, *command]
    else:
        recorded["TORCHLENS_PERF"] = "1"
    begun_s = time.monotonic()
    with open(folder / "log", "wb") as log:
        process = subprocess.Popen(
            [sys.executable, *command],
            cwd=folder / script.folder,
            env=recorded,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    samplers = [
        Sampler(pid, folder / f"stacks-{rank}.json")
        for rank, pid in enumerate(find_rank_processes(process.pid, script.ranks))
    ]
    try:
        code = process.wait(script.stop_after_s or _TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)
        try:
            code = process.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            code = process.wait()
    for each in samplers:
        each.finish()
    found = {"exit": code, "seconds": time.monotonic() - begun_s, "load": os.getloadavg()[0]}
    (folder / "result.json").write_text(json.dumps(found))
    for each in _find_runs(folder):
        wait_for_sidecar(each)


def _prepare(
    script: Script, folder: Path, places: Mapping[str, str], environ: Mapping[str, str]
) -> None:
    """Create the folder of the run with its data."""
    for each in (script.folder, *script.folders):
        (folder / each).mkdir(parents=True, exist_ok=True)
    for pattern, target in script.copies:
        (folder / target).mkdir(parents=True, exist_ok=True)
        for source in map(Path, glob.glob(pattern.format(**places))):
            copy = shutil.copytree if source.is_dir() else shutil.copy
            copy(source, folder / target / source.name)
    for source, target in script.links:
        link = folder / target.format(**places)
        link.parent.mkdir(parents=True, exist_ok=True)
        if not link.is_symlink():
            link.symlink_to(source.format(**places))
    for each in script.prepare:
        command = [sys.executable, each.format(**places)]
        subprocess.run(command, cwd=folder, env=environ, check=True, capture_output=True)


def _find_runs(folder: Path) -> list[RunDirectory]:
    return [RunDirectory(path.parent) for path in (folder / "runs").glob("*/nodes")]


def judge(script: Script, folder: Path) -> dict[str, Any]:
    """Return what the report of the longest recorded run says, and what was measured otherwise."""
    found: dict[str, Any] = json.loads((folder / "result.json").read_text())
    stacks = sorted(folder.glob("stacks-*.json"))
    truths = [read_truth(path, script.passes) for path in stacks]
    found["truth"] = [each for each in truths if each is not None]
    reports = [(load_report(each), each) for each in _find_runs(folder)]
    if not reports:
        return found
    report, run_directory = max(reports, key=lambda each: each[0]["steps"]["count"])
    lost = report["lost_time"]
    return found | {
        "ranks": report["run"]["world_size"],
        "steps": report["steps"]["count"],
        "p50_s": report["steps"]["p50_s"],
        "verdicts": [each.sentence for each in report["verdicts"]],
        "findings": [each.text for each in report["verdicts"]],
        "kinds": [each.kind for each in report["verdicts"]],
        "lost_time": lost and {each.name: each.share for each in lost.classes},
        "actions": [each.action for each in report["verdicts"] if each.because],
        "parts": _read_parts(run_directory.path),
    }


def _read_parts(run_directory: Path) -> dict[str, float]:
    """Return the share of each part in the time of all steps after the warm-up."""
    table = torchlens_perf.open_run(run_directory).table("steps", "pyarrow")
    if not table.num_rows:
        return {}
    steps = table.column("step").to_numpy()
    warm = steps >= steps.min() + WARM_UP_STEPS
    sums = {part: float(table.column(f"{part}_ns").to_numpy()[warm].sum()) for part in _PARTS}
    total = sum(sums.values())
    return {part: seconds / total for part, seconds in sums.items()} if total else {}


def compare_parts(result: Mapping[str, Any]) -> tuple[dict[str, float], dict[str, float]] | None:
    """Return the shares of the parts in the report, and those of py-spy; None where one is missing.

    The shares are without this tool's time, most of which is its start in py-spy's loop.
    """
    truths = result["truth"]
    if not truths or not result["parts"]:
        return None
    sampled = {part: sum(each.phases.get(part, 0.0) for each in truths) for part in _PARTS}
    both = []
    for each in (dict(result["parts"]), sampled):
        each.pop("tool")
        # py-spy cannot see a wait for other ranks inside the backward pass.
        if result["ranks"] > 1:
            each["backward"] += each.pop("communication")
        both.append({part: share / sum(each.values()) for part, share in each.items()})
    ours, theirs = both
    return ours, theirs


def _difference(result: Mapping[str, Any]) -> str:
    """Return the part whose share differs most from py-spy's, with both shares."""
    both = compare_parts(result)
    if both is None:
        return "not measured"
    ours, theirs = both
    worst = max(ours, key=lambda part: abs(theirs[part] - ours[part]))
    return f"{worst} {ours[worst]:.0%}, py-spy {theirs[worst]:.0%}"


def _cpu_wait(result: Mapping[str, Any]) -> str:
    waits = [each.cpu_wait for each in result["truth"] if each.cpu_wait is not None]
    return f"{sum(waits) / len(waits):.0%}" if waits else "not measured"


def show(out: Path) -> int:
    """Print a row for each script that was run. Return the number of scripts without a report."""
    table = Table(
        "script", "ranks", "steps", "step", "first sentence", "precise actions", "largest difference",
        "waiting for a CPU, by the kernel",
    )  # fmt: skip
    missing = 0
    for script in SCRIPTS:
        folder = out / script.name
        if not (folder / "result.json").exists():
            continue
        result = judge(script, folder)
        if not result.get("verdicts"):
            missing += 1
            table.row(script.name, script.ranks, "", "", f"no report, exit {result['exit']}")
            continue
        p50_s = result["p50_s"]
        table.row(
            script.name,
            result["ranks"],
            result["steps"],
            "" if p50_s is None else f"{1e3 * p50_s:.3g} ms",
            result["findings"][0],
            ", ".join(result["actions"]),
            _difference(result),
            _cpu_wait(result),
        )
    return missing


def main() -> int:
    """Parse the command line, run the scripts, and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [each.name for each in SCRIPTS]
    parser.add_argument("--repositories", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--scripts", nargs="+", choices=names, default=names)
    parser.add_argument("--show", action="store_true", help="only print the results in --out")
    options = parser.parse_args()
    out = options.out.absolute()
    # A shell that starts this program in the background lets children ignore Ctrl-C.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if not options.show:
        if options.repositories is None:
            parser.error("--repositories is needed to run the scripts")
        out.mkdir(parents=True, exist_ok=True)
        write_data(out / "data")
        for script in SCRIPTS:
            if script.name in options.scripts:
                run(script, options.repositories.absolute(), out)
                print(f"{script.name} has ended", file=sys.stderr, flush=True)
    return int(show(out) > 0)


if __name__ == "__main__":
    sys.exit(main())
