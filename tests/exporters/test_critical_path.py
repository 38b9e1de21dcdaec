"""The critical path over OTLP equals that of the report, has few names, and costs little."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest

from tests.support.otlp_receiver import Receiver
from tests.support.recorded_run import environment
from tests.support.simulations import simulation
from torchlens_perf.diagnosis.lost_time import find_critical_path, join_classes
from torchlens_perf.diagnosis.step_times import USES, read_judged_rows
from torchlens_perf.exporters import semantics
from torchlens_perf.simulate.simulation import Topology
from torchlens_perf.verdicts.stragglers.detector import StragglerDetector
from torchlens_perf.verdicts.words.report import PathClass


def run_program(folder: Path, told: dict[str, str], *arguments: str) -> str:
    command = [sys.executable, "-m", "torchlens_perf", *arguments]
    done = subprocess.run(
        command, env=environment(folder, told), capture_output=True, text=True, check=True
    )
    return done.stdout


@pytest.mark.parametrize(
    "arguments",
    [("--ranks", "4", "--fault", "constant:rank=2,share=0.2"), ("--topology", "dp=2,pp=2")],
    ids=["slow rank", "pipeline"],
)
def test_received_classes_equal_the_report(
    receiver: Receiver, tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    run = str(tmp_path / "run")
    told = {
        "OTEL_EXPORTER_OTLP_ENDPOINT": receiver.endpoint("http/protobuf"),
        "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf",
    }
    run_program(tmp_path, told, "simulate", *arguments, "--steps", "200", "--out", run)
    report = json.loads(run_program(tmp_path, {}, "report", run, "--json"))

    points = [each for each in receiver.points() if each.metric == semantics.CRITICAL_PATH]
    found = {each.attributes[semantics.CRITICAL_PATH_CLASS]: each.value for each in points}
    classes = msgspec.convert(report["lost_time"]["classes"], list[PathClass])
    assert {frozenset(each.attributes) for each in points} == {
        frozenset([semantics.CRITICAL_PATH_CLASS])
    }
    assert sum(found.values()) == pytest.approx(sum(each.s_per_step for each in classes))
    # Rounding may leave a few nanoseconds of a class.
    wanted = join_classes([each for each in classes if each.s_per_step > 1e-6])
    assert {name: value for name, value in found.items() if value > 1e-6} == pytest.approx(
        wanted, rel=1e-4
    )


def judged(topology: Topology, steps: int) -> StragglerDetector:
    detector, run = StragglerDetector(), simulation("constant:rank=1,share=0.2", topology=topology)
    for rank in range(topology.rank_count):
        detector.set_placement(rank, topology.placement(rank))
    for part in run.steps(steps):
        for population, block in part.detector_rows(1):
            detector.add_bin_batch(population, block)
        detector.judge()
    return detector


@pytest.mark.long
def test_thousands_of_judged_ranks_take_less_than_a_second_of_cpu_time() -> None:
    detector = judged(Topology(4096), 192)
    begin_s = time.process_time()
    times = read_judged_rows(detector)
    assert times is not None
    path_ns = find_critical_path(times)
    # The bar is one second of a core. A slow or busy machine takes several times as long.
    assert time.process_time() - begin_s < 5
    assert (len(times.ranks), len(times.steps)) == (4096, 64)
    mean_ns = float(times.uses_ns.sum(axis=2).mean())
    assert sum(path_ns.values()) == pytest.approx(mean_ns, rel=1e-3)


def test_ranks_of_all_populations_are_in_the_judged_rows() -> None:
    times = read_judged_rows(judged(Topology(2, pp=2), 64))
    assert times is not None
    assert (times.ranks, len(set(times.populations)), times.pipelined) == ((0, 1, 2, 3), 2, True)
    assert times.uses_ns.shape == (4, len(times.steps), len(USES))


def test_judged_rows_are_none_until_there_are_enough() -> None:
    assert read_judged_rows(StragglerDetector()) is None
    assert read_judged_rows(judged(Topology(4), 8)) is None


def test_names_of_classes_are_bounded() -> None:
    classes = [PathClass(f"section {at}", 1.0, 0.1, ("section",)) for at in range(9)]
    classes += [PathClass("saving and evaluation", 1.0, 0.1, ("saving", "evaluation"))] * 2
    assert join_classes([*classes, *[PathClass("slow rank", 1.0, 0.1)] * 2]) == {
        **{f"section {at}": 1.0 for at in range(4)},
        "other sections": 5.0, "saving": 2.0, "slow rank": 2.0,
    }  # fmt: skip
