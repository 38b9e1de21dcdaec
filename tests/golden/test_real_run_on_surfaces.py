"""All surfaces show the same numbers of a real run of two ranks.

The rank, the cost and the share of the first verdict, the overhead with its interval, and how often
calls of modules are timed are followed through reports, pages, `top`, `serve`, summaries, OTLP and
Prometheus. tests/page/browser compares what a browser and a terminal draw.
"""

from __future__ import annotations

import dataclasses
import html
import json
import re
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import torchlens_perf as perf
from tests.support.otlp_receiver import ReceivedPoint, Receiver
from tests.support.page_server import PageServer
from tests.support.processes import clean_environ, run_warm, runs
from tests.support.scrapes import Scrape, scrape
from tests.support.servers import free_port
from torchlens_perf.analysis.statistics.quantities import format_duration, format_percent
from torchlens_perf.diagnosis.lost_time import SLOW_RANK
from torchlens_perf.exporters import semantics
from torchlens_perf.report.run_report import load_report
from torchlens_perf.run.directory import RunDirectory
from torchlens_perf.view.lost_time_tables import build_critical_path_table
from torchlens_perf.view.step_words import describe_overhead

pytestmark = pytest.mark.distributed

# Rank 1 sleeps in the forward pass. Rank 0 prints its summary after the run.
_JOB = """
import dataclasses, json, time
import torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
import torchlens_perf as perf

class Slow(nn.Linear):
    def forward(self, x):
        time.sleep(0.005 * dist.get_rank())
        return super().forward(x)

torch.set_num_threads(1)
dist.init_process_group("gloo")
model = DistributedDataParallel(nn.Sequential(Slow(32, 64), *(nn.ReLU() for _ in range(30))))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
with perf.watch(model, optimizer) as w:
    for _ in range(400):
        model(torch.randn(16, 32)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
if dist.get_rank() == 0:
    print(json.dumps(dataclasses.asdict(w.summary())))
time.sleep(0.3)
dist.destroy_process_group()
"""
SLOW = 1


@dataclasses.dataclass
class Trained:
    """A finished run, its report, and what the exporters had received at its end."""

    run: RunDirectory
    report: dict[str, Any]
    summary: dict[str, Any]
    scraped: Scrape
    points: list[ReceivedPoint]

    @property
    def verdict(self) -> dict[str, Any]:
        first: dict[str, Any] = self.report["verdicts"][0]
        return first

    def texts(self) -> dict[str, str]:
        """Return the facts as each screen must show them."""
        quality: Any = self.report["quality"]
        return {
            "rank": f"rank {SLOW}",
            "cost": format_duration(self.verdict["cost_s_per_step"]),
            "share": format_percent(self.verdict["cost_share"]),
            "overhead": describe_overhead(quality),
        }

    def missing(self, text: str, *without: str) -> dict[str, str]:
        """Return the facts that a text lacks, except for those in `without`."""
        shown = re.sub(r"[\s│|]+", " ", text)
        found = self.texts().items()
        return {name: each for name, each in found if name not in without and each not in shown}


class _Scraper(threading.Thread):
    """Requests /metrics until the sidecar has ended, which waits for a last request."""

    def __init__(self, port: int) -> None:
        super().__init__(daemon=True)
        self._address, self.has_ended = f"127.0.0.1:{port}", threading.Event()
        self.last: Scrape | None = None

    def run(self) -> None:
        while not self.has_ended.wait(0.3):
            try:
                self.last = scrape(self._address)
            except OSError:
                continue


def command(*arguments: str) -> str:
    """Return what a command prints on a wide screen."""
    return subprocess.run(
        [sys.executable, "-m", "torchlens_perf", *arguments],
        capture_output=True, text=True, check=True, env=clean_environ({"COLUMNS": "400"}),
    ).stdout  # fmt: skip


@pytest.fixture(scope="module")
def trained(_one_receiver: Receiver, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    _one_receiver.clear()
    folder, port = tmp_path_factory.mktemp("trained"), free_port()
    (folder / "job.py").write_text(_JOB)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    scraper = _Scraper(port)
    scraper.start()
    done = run_warm(
        [sys.executable, *launcher, "job.py"], folder,
        TORCHLENS_PERF_REPORT="page", TORCHLENS_PERF_PROMETHEUS=str(port),
        TORCHLENS_PERF_BUDGET="0.0005", OTEL_EXPORTER_OTLP_ENDPOINT=_one_receiver.endpoint("http"),
        OTEL_EXPORTER_OTLP_PROTOCOL="http/protobuf", PYTHONPATH=str(Path(__file__).parents[2]),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (run,) = runs(folder)
    scraper.has_ended.set()
    scraper.join()
    (line,) = [each for each in done.stdout.splitlines() if each.startswith("{")]
    assert scraper.last is not None
    report = json.loads(command("report", str(run.path), "--json"))
    verdict, quality = report["verdicts"][0], report["quality"]
    # Without these facts, the tests would compare nothing.
    assert (verdict["kind"], verdict["rank"], report["steps"]["count"]) == ("straggler", SLOW, 400)
    assert quality["module_period"] > 1
    assert quality["overhead_low"] < quality["overhead_share"] < quality["overhead_high"]
    return Trained(run, report, json.loads(line), scraper.last, _one_receiver.points())


def test_terminal_shows_the_facts_of_the_json(trained: Trained) -> None:
    assert trained.missing(command("report", "--all", str(trained.run.path))) == {}
    assert trained.missing(trained.run.report.read_text()) == {}
    assert trained.missing(command("top", str(trained.run.path), "--once")) == {}


def test_page_and_server_show_the_facts_of_the_json(trained: Trained) -> None:
    folder, name = trained.run.path.parent, trained.run.run_id
    with PageServer(folder) as server:
        viewer = server.viewer()
        contents, page = viewer.json(f"/runs/{name}/api/contents"), viewer.page(name)
        # On a busy machine, the list shows a run as being read at first.
        deadline_s = time.monotonic() + 60
        while "READING" in (in_list := viewer.list()) and time.monotonic() < deadline_s:
            time.sleep(0.2)

    for text in (page, trained.run.report.with_suffix(".html").read_text()):
        assert trained.missing(_words(text)) == {}
    assert trained.missing(_words(in_list).lower(), "cost", "overhead") == {}
    assert f'title="{trained.texts()["cost"]} per step = ' in in_list
    for part in ("verdicts", "quality", "steps", "goodput", "lost_time"):
        assert contents["report"][part] == trained.report[part], part


def test_summary_has_the_facts_of_the_json(trained: Trained) -> None:
    opened = perf.open_run(trained.run.path).summary()
    for found in (trained.summary, dataclasses.asdict(opened)):
        verdict = found["verdicts"][0]
        for name in ("kind", "rank", "phase", "cost_s_per_step", "cost_share", "since_step"):
            assert verdict[name] == trained.verdict[name], name
        for name in ("overhead_share", "overhead_low", "overhead_high", "module_period"):
            assert found[name] == trained.report["quality"][name], name
    assert trained.missing(str(opened)) == {}
    assert trained.missing(_words(opened.html)) == {}


def test_tables_have_the_facts_of_the_json(trained: Trained) -> None:
    cost, share = trained.verdict["cost_s_per_step"], trained.verdict["cost_share"]
    lost = trained.report["lost_time"]
    (slow,) = [each for each in lost["classes"] if each["name"] == SLOW_RANK]
    assert (slow["ranks"], slow["s_per_step"]) == ([SLOW], pytest.approx(cost))
    assert slow["share"] == pytest.approx(share)
    gains = {each["change"]: (each["gain_s"], each["share"]) for each in lost["changes"]}
    assert gains[f"rank={SLOW}@median"] == (cost, share)
    critical_path = build_critical_path_table(load_report(trained.run))
    assert critical_path is not None
    assert format_percent(share) in critical_path.columns[2].texts()


def test_exporters_have_the_facts_of_the_json(trained: Trained) -> None:
    rank, report = str(SLOW), trained.report
    cost_s = trained.verdict["cost_s_per_step"]
    points = {
        (each.metric, *map(str, each.attributes.values())): each.value for each in trained.points
    }
    costs = [
        value for (name, *labels), value in points.items()
        if name == semantics.STRAGGLER_COST and rank in labels
    ]  # fmt: skip
    assert costs == [cost_s]
    assert trained.scraped.value(
        "torch_train_straggler_cost_seconds", torch_distributed_rank=rank
    ) == pytest.approx(cost_s)
    goodput = {name: each["seconds"] for name, each in report["goodput"]["classes"].items()}
    for name, seconds in goodput.items():
        if seconds:
            assert points[semantics.GOODPUT, name] == pytest.approx(seconds), name


def _words(page: str) -> str:
    """Return the text of a page without its scripts and styles."""
    text = re.sub(r"<(script|style)\b.*?</\1>", " ", page, flags=re.DOTALL)
    return html.unescape(re.sub(r"<[^>]*>", "", text))
