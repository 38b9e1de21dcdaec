"""Page contents of any size, derived from those of a small run.

Some effects appear only in large or rare runs.
"""

from __future__ import annotations

import copy
from typing import Any, cast

import numpy as np
import numpy.typing as npt
from msgspec import structs

from torchlens_perf.page.contents import PageContents, SlowPeriod, StepMatrices
from torchlens_perf.page.matrix import encode_durations
from torchlens_perf.verdicts.stragglers.excess import relative_excess
from torchlens_perf.view.rank_tables import build_rank_table

NODE_SIZE, TENSOR_PARALLEL = 8, 4
STEP_S, EXCESS, SAMPLED_EVERY, CHECKPOINT_EVERY, EVALUATION_EVERY, WARM_UP = (
    0.25,
    0.2,
    16,
    100,
    250,
    3,
)
# The data of this rank's first steps is missing.
LATE_RANK, LATE_STEPS = 9, 24
MAX_REPORTED, MAX_MEMORY_COLUMNS, TELEMETRY_POINTS = 64, 256, 240
# Shares of STEP_S. The remaining share of a step is waiting.
_SHARES = {
    "data": 0.02,
    "forward": 0.28,
    "backward": 0.46,
    "optimizer": 0.08,
    "host": 0.04,
}


def enlarged(
    small: PageContents,
    ranks: int,
    steps: int,
    slow_rank: int,
    since: int,
    *,
    devices: bool = False,
) -> PageContents:
    """Return the page of a larger job in which one rank's forward pass becomes slower at a step.

    `small` is the page of a simulated run.
    """
    made: Any = copy.deepcopy(small)
    made["steps"] = _matrices(ranks, steps, slow_rank, since, devices=devices)
    report = made["report"]
    template = {rank["rank"]: rank for rank in report["ranks"]}
    usual, slow = (
        template[0],
        template[max(template, key=lambda each: template[each]["typical"]["own_s"])],
    )
    shown = sorted({slow_rank, *range(0, ranks, max(1, ranks // MAX_REPORTED))})
    report["ranks"] = [
        {**copy.deepcopy(slow if rank == slow_rank else usual), "rank": rank, "host": _host(rank)}
        for rank in shown
    ]
    memory = made["steps"]["memory_bytes"]
    for rank in report["ranks"]:
        rank["memory"] |= {
            "last_bytes": memory[rank["rank"]][-1],
            "max_bytes": max(memory[rank["rank"]]),
        }
        rank["memory"]["source"] = "resident memory"
    report["run"] |= {
        "world_size": ranks,
        "nodes": [_host(rank) for rank in range(0, ranks, NODE_SIZE)],
    }
    report["steps"]["count"] = steps
    report["verdicts"] = [
        structs.replace(
            each,
            rank=slow_rank,
            since_step=since,
            evidence=structs.replace(each.evidence, ranks=(slow_rank,)),
        )
        if each.kind == "straggler"
        else each
        for each in report["verdicts"]
    ]
    made["tables"] = [
        build_rank_table(report),
        *(each for each in made["tables"] if each.key != "ranks"),
    ]
    made["telemetry"] = _telemetry(shown, slow_rank, steps * STEP_S)
    return cast("PageContents", made)


def _host(rank: int) -> str:
    return f"node-{rank // NODE_SIZE:04d}"


def _matrices(ranks: int, steps: int, slow_rank: int, since: int, *, devices: bool) -> StepMatrices:
    draw = np.random.default_rng(1)
    own = {
        part: share * STEP_S * draw.lognormal(0, 0.02, (ranks, steps))
        for part, share in _SHARES.items()
    }
    own["forward"][slow_rank, since:] += EXCESS * STEP_S
    work = np.asarray(sum(own.values()))
    step = np.broadcast_to(work.max(axis=0), work.shape) * (1 + 0.001 * draw.random(work.shape))
    number = np.arange(steps)
    step = step + np.where(number % CHECKPOINT_EVERY == CHECKPOINT_EVERY - 1, 2 * STEP_S, 0.0)
    compared = (
        (number >= WARM_UP)
        & (number % SAMPLED_EVERY != 0)
        & (number % CHECKPOINT_EVERY != CHECKPOINT_EVERY - 1)
    )
    parts = {**own, "communication": step - work}
    if ranks > LATE_RANK:
        for values in (step, work, *parts.values()):
            values[LATE_RANK, :LATE_STEPS] = np.nan
    order = ("data", "forward", "backward", "optimizer", "communication", "host")
    compared_work = np.where(compared, work, np.nan)
    slow: SlowPeriod = {
        "rank": slow_rank,
        "label": f"rank {slow_rank}",
        "phase": "forward",
        "since_step": since,
        "until_step": None,
    }
    columns = -(-steps // -(-steps // MAX_MEMORY_COLUMNS))
    flags: list[list[str]] = [[] for _ in range(steps)]
    for at in range(CHECKPOINT_EVERY - 1, steps, CHECKPOINT_EVERY):
        flags[at].append("checkpoint")
    for at in range(EVALUATION_EVERY - 1, steps, EVALUATION_EVERY):
        flags[at].append("evaluation")
    memory = (
        2e9 + 1e8 * draw.random((ranks, columns)) + 5e8 * (np.arange(ranks) == slow_rank)[:, None]
    ).astype(int)
    return {
        "columns": {
            "width": 1, "first_steps": number.tolist(), "started_s": np.cumsum(np.nanmax(step, axis=0)).tolist(),
            "flags": flags,
        },
        "is_compared": True,
        "places": [
            {
                "rank": rank, "host": _host(rank), "local_rank": rank % NODE_SIZE,
                "mesh": {"dp": rank // TENSOR_PARALLEL, "tp": rank % TENSOR_PARALLEL},
            }
            for rank in range(ranks)
        ],
        "step": encode_durations(step),
        "bands": {
            "p5_s": _quantile(step, 0.05), "p50_s": _quantile(step, 0.5), "p95_s": _quantile(step, 0.95),
            "max_s": np.nanmax(step, axis=0).tolist(),
        },
        "slow": [slow],
        "work": encode_durations(compared_work),
        "others": encode_durations(compared_work / (1 + relative_excess(compared_work))),
        "parts": {part: encode_durations(parts[part]) for part in order},
        "device_parts": {part: encode_durations(0.98 * parts[part]) for part in order} if devices else {},
        "memory_bytes": memory.tolist(),
    }  # fmt: skip


def _quantile(values: npt.NDArray[np.float64], share: float) -> list[float | None]:
    return cast("list[float | None]", np.nanquantile(values, share, axis=0).tolist())


def _telemetry(ranks: list[int], slow_rank: int, end_s: float) -> list[Any]:
    """Return the telemetry of a GPU: clock and temperature. The slow rank's GPU is hot and slow."""
    time_s = np.linspace(0, end_s, TELEMETRY_POINTS)
    draw = np.random.default_rng(2)
    found = []
    for rank in ranks[:16] if slow_rank in ranks[:16] else [slow_rank, *ranks[:15]]:
        is_slow = rank == slow_rank
        for title, unit, usual, more in (
            ("GPU temperature", "Cel", 58.0, 27.0),
            ("SM clock", "Hz", 1.98e9, -0.5e9),
        ):
            values = usual * (1 + 0.01 * draw.standard_normal(TELEMETRY_POINTS)) + is_slow * more
            values = [
                None if 100 <= at < 110 else round(value, 3)
                for at, value in enumerate(values.tolist())
            ]
            found.append(
                {
                    "title": title, "unit": unit, "where": f"rank {rank}", "rank": rank,
                    "time_s": time_s.round(3).tolist(), "value": values,
                }
            )  # fmt: skip
    return sorted(found, key=lambda each: str(each["title"]))
