"""The tools, one adapter function each: it trains under the tool and returns the named ranks."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.detectors.protocol import Named
from benchmarks.peers_tools import replace_cupti
from benchmarks.planted_training import Section, no_section, prepare, train
from benchmarks.planted_truth import Truth

WARM_UP_STEPS = 3
REPORT_EVERY_STEPS = 45
"""nvidia-resiliency-ext reports at these intervals. Its default is 60 s."""


class Job:
    """One rank's training program, which an adapter runs under its tool."""

    def __init__(self, truth: Truth, rank: int, folder: Path) -> None:
        self.truth, self.rank, self.folder = truth, rank, folder
        self.model, self.optimizer, self._loader, self._planted = prepare(truth, rank)
        self.seconds: list[float] = []

    def train(
        self,
        each_step: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext,
        section: Section = no_section,
        after_step: Callable[[], None] = lambda: None,
    ) -> None:
        """Run the loop. `section` marks data, forward, backward and optimizer."""
        loader: Any = self._loader
        if section is not no_section:
            loader = _marked(loader, section)
        self.seconds = train(
            self.model, self.optimizer, loader, self._planted, each_step, section, after_step
        )


def _marked(loader: Any, section: Section) -> Iterator[Any]:
    batches = iter(loader)
    while True:
        with section("data"):
            batch = next(batches, None)
        if batch is None:
            return
        yield batch


def slowest_step(job: Job) -> list[Named]:
    """Name the rank with the longest mean step, as on a dashboard. No tool watches the loop."""
    job.train()
    own = job.seconds[WARM_UP_STEPS:]
    means = [torch.zeros(1, dtype=torch.float64) for _ in range(job.truth.ranks)]
    dist.all_gather(means, torch.tensor([sum(own) / len(own)], dtype=torch.float64))
    return [Named(int(torch.cat(means).argmax()))]


def torchlens_perf(job: Job) -> list[Named]:
    """Return the verdicts of the live sidecar at the end, as `report` shows them."""
    import torchlens_perf as perf
    from benchmarks.planted_training import wait_for_sidecar
    from torchlens_perf.report.build import build_report
    from torchlens_perf.run.directory import RunDirectory
    from torchlens_perf.verdicts.node_state import load_all

    with perf.watch(job.model, job.optimizer, dir=str(job.folder), report="quiet") as watch:
        job.train()
    if job.rank != 0 or watch.run_dir is None:
        return []
    wait_for_sidecar(watch.run_dir)
    run = RunDirectory(watch.run_dir)
    return verdicts_as_answer(build_report(run.run_id, load_all(run))["verdicts"])


def verdicts_as_answer(verdicts: Any) -> list[Named]:
    """Return the ranks of the verdicts on slow ranks. Past ones are last, as in the report."""
    found = []
    for each in verdicts:
        if each.kind.startswith("straggler") and each.rank is not None:
            lead = Named(each.rank, each.phase, each.since_step, each.cost_s_per_step)
            found += [lead, *(Named(rank) for rank in each.ranks if rank != each.rank)]
    return found


def resiliency_ext(job: Job) -> list[Named]:
    """Return the ranks with a relative score of a section below 0.75, worst first.

    Sections, scores and threshold are the package's own. Without CUDA it times no kernels, and its
    generate_report() would synchronize the device, so its ReportGenerator is called directly.
    """
    if not torch.cuda.is_available():
        replace_cupti()
    from nvidia_resiliency_ext.straggler import Detector

    Detector.initialize(gather_on_rank0=True)
    reports, steps = [], 0

    def report() -> None:
        nonlocal steps
        steps += 1
        if steps % REPORT_EVERY_STEPS == 0:
            reports.append(Detector.reporter.generate_report(Detector._get_section_summaries(), {}))
            Detector._reset_sections_elapseds()

    job.train(
        section=lambda name: Detector.detection_section(name, profile_cuda=False),
        after_step=report,
    )
    Detector.shutdown()
    if job.rank != 0:
        return []
    named: dict[int, Named] = {}
    for one in reversed(reports):
        slow = one.identify_stragglers()["straggler_sections_relative"]
        for each in scores_as_answer(slow, one.section_relative_perf_scores):
            named.setdefault(each.rank, each)
    return list(named.values())


def scores_as_answer(
    slow: Mapping[str, Any], scores: Mapping[str, Mapping[int, float]]
) -> list[Named]:
    """Return the stragglers of one report of nvidia-resiliency-ext, lowest score first."""
    ranked = sorted(
        (scores[section][each.rank], each.rank, section)
        for section, ranks in slow.items()
        for each in ranks
    )
    return [Named(rank, section) for _, rank, section in ranked]


def traceml(job: Job) -> list[Named]:
    """Train under TraceML. Its launcher writes the summary that traceml_answer() reads."""
    import traceml_ai

    traceml_ai.init(mode="auto")
    model: nn.Module = job.model.module  # type: ignore[assignment]
    job.train(lambda: traceml_ai.trace_step(model))
    return []


_TRACEML_PHASES = {
    "INPUT_STRAGGLER": "data",
    "COMPUTE_STRAGGLER": "forward",
    "H2D_STRAGGLER": "h2d",
    "STRAGGLER": None,
}


def traceml_answer(summary: Path) -> list[Named]:
    """Return the rank in the diagnosis of TraceML's final_summary.json.

    Diagnoses of other kinds (COMPUTE_BOUND, BALANCED ...) name no rank.
    """
    diagnosis = json.loads(summary.read_text())["step_time"]["diagnosis"]
    if diagnosis["kind"] not in _TRACEML_PHASES:
        return []
    return [Named(int(rank), _TRACEML_PHASES[diagnosis["kind"]]) for rank in diagnosis["ranks"]]


@dataclasses.dataclass(frozen=True)
class Tool:
    """A tool and how its runs are started."""

    watch: Callable[[Job], list[Named]] | None
    """The adapter. Rank 0's answer counts. None: the tool does not run here."""
    remark: str
    """What exactly runs, or why it does not."""
    environment: str = ""
    """Folder of the tool's Python in .venv-peers; "" for the benchmark's own."""
    summary: Callable[[Path], list[Named]] | None = None
    """Reads the file of a tool whose own launcher starts the ranks."""


CONTROL = "slowest step"
"""Nothing watches this loop. The cost of watching is a ratio to its steps."""
TOOLS = {
    "torchlens_perf": Tool(torchlens_perf, "live, with its sidecar"),
    "TraceML": Tool(
        traceml, "0.5.0, live, `traceml run --mode summary`", "traceml", traceml_answer
    ),
    "nvidia-resiliency-ext": Tool(
        resiliency_ext,
        f"0.4.1, live; without CUDA section times only, a report every {REPORT_EVERY_STEPS} steps",
        "nvidia-resiliency-ext",
    ),
    CONTROL: Tool(slowest_step, "the longest mean step; nothing watches (control)"),
    "lm-resiliency": Tool(None, "0.2.0 does not run here: needs CUDA"),
}
