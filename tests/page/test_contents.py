"""The data in a page have the same numbers as the report and the run directory."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.page.conftest import SINCE_STEP, SLOW_RANK, STEPS
from tests.support.page_matrices import Steps, decoded
from tests.support.reports import as_json
from torchlens_perf.errors import RunStoreError
from torchlens_perf.page.contents import EncodedMatrix, PageContents
from torchlens_perf.page.document import html
from torchlens_perf.page.gather import device_grid, step_matrices
from torchlens_perf.page.gather.run_contents import gather_contents
from torchlens_perf.page.matrix import LOG_STEP
from torchlens_perf.report.run_report import load_report
from torchlens_perf.run.directory import RunDirectory
from torchlens_perf.run.records import PARTS
from torchlens_perf.verdicts.stragglers.excess import relative_excess

RANKS = 8


def table_of(run: RunDirectory, kind: str) -> Any:
    """Return all rows of a kind of file, as a dictionary of arrays."""
    table = pa.concat_tables(
        [pq.read_table(path) for path in sorted((run.path / kind).glob("*.parquet"))]
    )
    return {name: np.array(table.column(name).to_pylist()) for name in table.column_names}


def cells(matrix: EncodedMatrix) -> np.ndarray:
    return decoded(matrix, RANKS)


def near(found: np.ndarray, expected: np.ndarray) -> bool:
    """Return True if two arrays are equal within the matrix's accuracy, with the same missing
    cells.
    """
    assert (np.isnan(found) == np.isnan(expected)).all()
    known = np.isfinite(expected) & (expected > 1e-9)
    return bool((np.abs(np.log(found[known] / expected[known])) <= LOG_STEP / 2 * 1.001).all())


def test_report_in_the_page_equals_report_json(
    simulated: RunDirectory, shown: PageContents
) -> None:
    """Only the heat map is left out, because the matrices replace it."""
    expected = {**as_json(load_report(simulated)), "heat": None}

    assert json.loads(json.dumps(shown["thinned_report"])) == expected


def test_matrices_equal_the_steps_in_the_run_directory(
    simulated: RunDirectory, shown: PageContents
) -> None:
    """Durations, parts and work of each step and rank are compared, within the stated error."""
    steps, matrices = table_of(simulated, "steps"), shown["steps"]
    assert matrices is not None
    assert matrices["columns"]["width"] == 1
    at = (steps["rank"], steps["step"] - matrices["columns"]["first_steps"][0])

    def expected(column: str) -> np.ndarray:
        found = np.full((RANKS, STEPS), np.nan)
        found[at] = steps[column] / 1e9
        return found

    assert near(cells(matrices["step"]), expected("duration_ns"))
    assert {part for part in PARTS if steps[f"{part}_ns"].any()} == set(matrices["parts"])
    for part, matrix in matrices["parts"].items():
        assert near(cells(matrix), expected(f"{part}_ns")), part
    work = expected("work_ns")
    # Warm-up steps are not compared.
    work[:, :3] = np.nan
    assert near(cells(matrices["work"]), work)


def test_ranks_in_the_page_have_hosts_and_mesh_coordinates(shown: PageContents) -> None:
    assert shown["steps"] is not None
    places = shown["steps"]["places"]

    assert [place["rank"] for place in places] == list(range(RANKS))
    assert [place["mesh"] for place in places[:3]] == [
        {"tp": 0, "dp": 0},
        {"tp": 1, "dp": 0},
        {"tp": 0, "dp": 1},
    ]
    assert len({place["host"] for place in places}) == 2


def test_planted_slow_rank_is_in_verdict_and_matrices(shown: PageContents) -> None:
    matrices = shown["steps"]
    assert matrices is not None
    (slow,) = matrices["slow"]
    excess = Steps(matrices).excess()
    others = [rank for rank in range(RANKS) if rank != SLOW_RANK]

    assert shown["report"]["verdicts"][0].rank == slow["rank"] == SLOW_RANK
    assert (slow["phase"], slow["until_step"]) == ("forward", None)
    assert abs(slow["since_step"] - SINCE_STEP) <= 2
    assert np.nanmean(excess[SLOW_RANK, SINCE_STEP + 2 :]) > 0.2
    assert np.nanmean(excess[SLOW_RANK, : SINCE_STEP - 2]) < 0.05
    assert np.nanmean(excess[others]) < 0.05


def test_work_in_the_page_is_compared_with_the_median_of_other_ranks(shown: PageContents) -> None:
    matrices = shown["steps"]
    assert matrices is not None
    steps = Steps(matrices)
    judged = relative_excess(steps.work_s)

    assert np.isfinite(judged).any()
    np.testing.assert_allclose(steps.excess(), judged, atol=1.5 * LOG_STEP)


def test_ranks_of_other_populations_are_not_compared_in_the_page() -> None:
    work = np.array([[1.0, 2.0], [1.0, np.nan], [3.0, 4.0], [5.0, 6.0], [1.0, 0.0]])
    others = step_matrices._others_median_s(work, ["first", "first", "last", "last", "alone"])

    np.testing.assert_allclose(
        others, [[1.0, np.nan], [1.0, np.nan], [5.0, 6.0], [3.0, 4.0], [np.nan] * 2]
    )


def test_spans_of_whole_steps_equal_their_records(
    simulated: RunDirectory, shown: PageContents
) -> None:
    """Each record is a span with its kind, name, start and duration, and no span is missing."""
    spans, names = table_of(simulated, "spans"), shown["traces"]["names"]
    left_out = {"step", "thread_time", "memory"}
    for step in shown["traces"]["steps"][:6]:
        assert [trace["rank"] for trace in step["ranks"]] == list(range(RANKS))
        for trace in step["ranks"]:
            mine = (spans["rank"] == trace["rank"]) & (spans["step"] == step["step"])
            begin_ns = spans["start_ns"][mine & (spans["kind"] == "step")][0]
            chosen = mine & ~np.isin(spans["kind"], list(left_out))
            start_us = np.round((spans["start_ns"][chosen] - begin_ns) / 1e3, 1).tolist()
            length_us = np.round(spans["duration_ns"][chosen] / 1e3, 1).tolist()
            named = spans["kind"][chosen].tolist(), spans["name"][chosen].tolist()
            expected = Counter(zip(*named, start_us, length_us, strict=True))
            found = Counter(
                (kind, names[name], start, length)
                for row in trace["rows"]
                for kind, name, start, length in zip(
                    row["kind"], row["name"], row["start_us"], row["duration_us"], strict=True
                )
            )
            assert found == expected


def test_whole_steps_in_the_page_have_the_stated_reasons(
    simulated: RunDirectory, shown: PageContents
) -> None:
    """The order is a typical slow step, the slowest step, and the first slow step."""
    steps = table_of(simulated, "steps")
    longest = {step: steps["duration_ns"][steps["step"] == step].max() for step in range(3, STEPS)}
    found = {row["why"]: row["step"] for row in reversed(shown["traces"]["steps"])}
    numbers = [row["step"] for row in shown["traces"]["steps"]]

    assert shown["traces"]["steps"][0]["why"] == f"typical step while rank {SLOW_RANK} is slow"
    assert numbers[0] >= SINCE_STEP
    assert found["slowest"] == max(longest, key=lambda step: longest[step])
    assert abs(found[f"first slow step of rank {SLOW_RANK}"] - SINCE_STEP) <= 2
    assert found[f"typical step before rank {SLOW_RANK} was slow"] < SINCE_STEP
    assert {0, STEPS - 1} <= set(numbers)
    assert len(set(numbers)) == len(numbers) > 20


def test_collectives_of_whole_steps_have_last_rank_and_waits(
    simulated: RunDirectory, shown: PageContents
) -> None:
    """The last rank has the shortest duration.

    The wait of the other ranks is their additional duration.
    """
    spans = table_of(simulated, "spans")
    step = shown["traces"]["steps"][0]
    of_world = [each for each in step["collectives"] if each["group"] == "default_pg"]
    of_step = (spans["step"] == step["step"]) & (spans["kind"] == "collective")
    world = of_step & (spans["name"] == "allreduce group=0 dtype=bfloat16")
    durations = dict(
        zip(spans["rank"][world].tolist(), spans["duration_ns"][world].tolist(), strict=True)
    )
    shortest = min(durations, key=lambda rank: durations[rank])

    (row,) = of_world
    assert row["last_rank"] == shortest
    assert row["wait_us"] == {
        str(rank): pytest.approx((length - durations[shortest]) / 1e3, abs=0.06)
        for rank, length in durations.items()
    }
    longest = max(durations.values())
    assert row["arrival_us"] == {
        str(rank): pytest.approx((longest - length) / 1e3, abs=0.06)
        for rank, length in durations.items()
    }
    data_groups = [each for each in step["collectives"] if each["group"] == "mesh_dp"]
    assert {each["last_rank"] for each in data_groups if str(SLOW_RANK) in each["wait_us"]} == {
        SLOW_RANK
    }
    operations = zip(
        spans["name"][of_step].tolist(), spans["value1"][of_step].tolist(), strict=True
    )
    assert len(step["collectives"]) == len(set(operations))


@pytest.mark.parametrize("budget_bytes", [48_000, 80_000, 150_000])
def test_small_budget_widens_columns_and_drops_steps(
    simulated: RunDirectory, budget_bytes: int
) -> None:
    """The page has a note, and still has all verdicts."""
    small = gather_contents(simulated, budget_bytes)
    whole = gather_contents(simulated)
    assert small["steps"] is not None
    said = " ".join(small["thinned"]["sentences"])

    assert len(html.contents_as_json(small)) <= budget_bytes * 1.05
    assert small["report"]["verdicts"] == whole["report"]["verdicts"]
    assert (small["steps"]["columns"]["width"] > 1) == (budget_bytes < 80_000)
    if small["steps"]["columns"]["width"] > 1:
        assert f"is the mean of {small['steps']['columns']['width']} steps" in said
    fewer = len(whole["traces"]["steps"]) - len(small["traces"]["steps"])
    assert fewer > 0
    assert (
        f"Left out of {len(whole['traces']['steps'])} chosen steps, because the page has no room:"
        f" {fewer}." in said
    )
    assert whole["thinned"]["sentences"] == []


def test_work_of_ranks_judged_by_devices_is_measured_by_the_device_clock(
    on_device: RunDirectory,
) -> None:
    """The work and the device parts equal those of the report."""
    shown = gather_contents(on_device)
    matrices = shown["steps"]
    assert matrices is not None
    work, parts = (
        decoded(matrices["work"], 4),
        {name: decoded(each, 4) for name, each in matrices["device_parts"].items()},
    )

    for row, rank in enumerate(shown["report"]["ranks"]):
        assert rank["device"] is not None
        assert rank["device"]["work_s"] is not None
        assert np.nanmedian(work[row]) == pytest.approx(rank["device"]["work_s"]["p50_s"], rel=0.05)
        for part, seconds in rank["device"]["parts"].items():
            if seconds > 1e-4:
                assert np.nanmean(parts[part][row]) == pytest.approx(seconds, rel=0.1), part
    lanes = {row["lane"] for trace in shown["traces"]["steps"][0]["ranks"] for row in trace["rows"]}
    assert {"host", "device", "collectives on the device"} <= lanes


def test_damaged_file_is_noted_and_the_rest_is_shown(
    simulated: RunDirectory, tmp_path_factory: pytest.TempPathFactory
) -> None:
    copy = RunDirectory(tmp_path_factory.mktemp("damaged") / "run")
    shutil.copytree(simulated.path, copy.path)
    (copy.steps / "node-0000-000099.parquet").write_bytes(b"PAR1 and no more")
    (path,) = copy.spans.glob("*.parquet")
    path.write_bytes(path.read_bytes()[:5000])
    shown = gather_contents(copy)

    assert shown["steps"] is not None
    assert shown["traces"]["steps"] == []
    assert any(
        "node-0000-000099.parquet cannot be read" in each for each in shown["thinned"]["sentences"]
    )


def test_page_of_a_missing_run_is_an_error_with_its_path(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    with pytest.raises(RunStoreError, match="is not a run directory"):
        gather_contents(RunDirectory(tmp_path_factory.mktemp("empty")))


def test_report_windows_are_shown_if_device_steps_are_too_many(
    on_device: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A note says that there are too many steps to join."""
    each = gather_contents(on_device)
    monkeypatch.setattr(device_grid, "MAX_STEPS", 10)
    shown = gather_contents(on_device)
    assert each["steps"] is not None
    assert shown["steps"] is not None

    assert each["thinned"]["sentences"] == []
    assert any(
        line.startswith("Device times are medians") for line in shown["thinned"]["sentences"]
    )
    exact, windows = (
        decoded(found["steps"]["work"], 4) for found in (each, shown) if found["steps"] is not None
    )
    for row in range(4):
        assert np.nanmean(windows[row]) == pytest.approx(np.nanmean(exact[row]), rel=0.02)
