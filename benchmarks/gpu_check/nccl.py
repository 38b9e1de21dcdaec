"""Checks of the NCCL plugin: it is loaded, it finds the late one of two ranks, and its cost.

Each part runs in separate processes, because NCCL looks for the plugin only at a process's first
communicator. On one rank NCCL reports no kernel: an all-reduce and a send to itself are copies. Two
ranks on one GPU are not supported by NCCL (one_gpu.py). If NCCL refuses them, the check reports
this without PASS or FAIL.

Between ranks configured as two hosts, NCCL has a progress thread even without the plugin.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu_check.lines import Checks
from benchmarks.gpu_check.nccl_ranks import STEPS
from benchmarks.gpu_check.one_gpu import refusal, small_shared_memory, two_hosts
from torchlens_perf.analysis.collectives.join import CollectiveJoin
from torchlens_perf.diagnosis.facts.collective_rows import collective_rows
from torchlens_perf.hooks.collectives import nccl_plugin
from torchlens_perf.hooks.collectives.nccl_plugin import GiveUpCause
from torchlens_perf.run.ring import RingReader

MIN_LAG_NS = 10_000_000
_DESTROY_S = 10
_REFUSED = "NCCL refused: "
_RANKS = "benchmarks.gpu_check.nccl_ranks"
_MEETING = {"MASTER_ADDR": "127.0.0.1"}
_ALONE = {**_MEETING, "MASTER_PORT": "29654", "RANK": "0", "WORLD_SIZE": "1"}
_TWO = {**_MEETING, "MASTER_PORT": "29655", "WORLD_SIZE": "2"}
_WISHES = ("off", "on")
Told = dict[str, dict[str, Any]]


def nccl1(checks: Checks) -> None:
    """Run one rank in a separate process.

    The plugin must be loaded, and must time no kernel.
    """
    version = nccl_plugin.read_nccl_version()
    if nccl_plugin.load_plugin() is None or version is None:
        checks.missing("nccl1", "the plugin", "it was not built, or this torch has no NCCL")
        return
    every = nccl_plugin.compute_timing_interval(version, asked_for=True)
    checks.value("nccl1", "NCCL; steps between timed ones", f"{version}; {every}")
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", _RANKS, "lone", folder, "on"]
        subprocess.run(command, env={**os.environ, **_ALONE}, check=True, stdout=subprocess.DEVNULL)
        found = _told(Path(folder))
    made = found["communicators"]
    checks.bar("nccl1", "communicators made with the plugin", str(made), ">= 1", made >= 1)
    value = f"{found['named']}, {found['left']}"
    met = found["named"] and not found["left"]
    checks.bar("nccl1", "the variable inside and after the watch", value, "True, False", met)
    number = found["recorded"]
    checks.bar("nccl1", "collectives recorded", str(number), str(2 * STEPS), number == 2 * STEPS)
    judge_lone_rank(checks, version, found["ended"], GiveUpCause(found["given_up"]))


def _costs(checks: Checks, part: str, where: str, told: Told) -> None:
    """Report the costs with and without the plugin: threads, CPU time, shared memory.

    NCCL starts a progress thread, which polls while timed works are unfinished.
    """
    for what, field, unit in (
        ("threads", "threads", ""), ("process CPU", "cpu_s", " s"), ("shared memory", "shared_mib", " MiB")
    ):  # fmt: skip
        value = " / ".join(f"{told[wish][field]:.4g}{unit}" for wish in reversed(_WISHES))
        checks.value(part, f"{where}: {what} with / without the plugin", value)
    for wish, name in zip(_WISHES, ("without", "with"), strict=True):
        destroy_s = told[wish]["destroy_s"]
        value = "did not end" if destroy_s is None else f"{destroy_s:.2f} s"
        met = destroy_s is not None and destroy_s <= _DESTROY_S
        what = f"{where}: communicators destroyed {name} the plugin"
        if wish == "off":
            checks.value(part, what, value)
        else:
            checks.bar(part, what, value, f"<= {_DESTROY_S} s", met)


def nccl2(checks: Checks) -> None:
    """Run two ranks with the plugin. Rank 1 has 20 ms of work before each all-reduce."""
    what = "who came last in an all-reduce"
    with tempfile.TemporaryDirectory() as folder:
        problem = _two_ranks(checks, folder, "on")
        if problem.startswith(_REFUSED):
            checks.missing("nccl2", what, problem)
            return
        if problem:
            checks.bar("nccl2", what, problem, "the ranks end", False)
            return
        told, row = _told(Path(folder)), _joined(Path(folder))
    cause = GiveUpCause(told["given_up"])
    met = cause is GiveUpCause.NOT_GIVEN_UP
    checks.bar("nccl2", "timing given up for", cause.name, "NOT_GIVEN_UP", met)
    judge_joined(checks, row)


def judge_joined(checks: Checks, row: dict[str, Any] | None) -> None:
    """Expect that rank 1 came last in the joined all-reduces, by its 20 ms of work."""
    what = "who came last in an all-reduce"
    if row is None or not row["joined"]:
        checks.bar("nccl2", what, "no joined all-reduce", "rank 1", False)
        return
    lag_ns = 1e9 * row["by_rank"]["1"]["exposed_lag_s"] / row["joined"]
    value = f"rank {row['slowest_rank']}, by {lag_ns / 1e6:.1f} ms, in {row['joined']} all-reduces"
    met = row["slowest_rank"] == 1 and lag_ns >= MIN_LAG_NS
    checks.bar("nccl2", what, value, f"rank 1, by at least {MIN_LAG_NS / 1e6:.0f} ms", met)
    by_device = f"{row['by_device']} of {row['count']}"
    checks.bar(
        "nccl2",
        "with a kernel's time by the device",
        by_device,
        "all",
        row["by_device"] == row["count"],
    )
    checks.value(
        "nccl2", "the transfer, once both were there", f"{1e3 * row['transfer_s']['p50_s']:.2f} ms"
    )


def judge_lone_rank(
    checks: Checks, version: tuple[int, ...], ended: int, cause: GiveUpCause
) -> None:
    """Expect no kernel: both collectives are copies. NCCL 2.28 reports not even the copies."""
    value = f"{ended} of {2 * STEPS}"
    checks.bar("nccl1", "of them with a kernel's time", value, f"0 of {2 * STEPS}", ended == 0)
    expected = [GiveUpCause.NOT_GIVEN_UP]
    expected += [GiveUpCause.SELF_COPY] if version >= (2, 29) else []
    bar = " or ".join(each.name for each in expected)
    checks.bar("nccl1", "timing given up for", cause.name, bar, cause in expected)


def nccl_cost(checks: Checks) -> None:
    """Measure what the plugin costs both ranks: processor time, threads, shared memory."""
    told: Told = {}
    for wish in _WISHES:
        with tempfile.TemporaryDirectory() as folder:
            problem = _two_ranks(checks, folder, wish)
            if problem:
                _not_ended(checks, "nccl_cost", "what the plugin costs", wish, problem)
                return
            told[wish] = _told(Path(folder))
    _costs(checks, "nccl_cost", "two hosts", told)


def nccl_room(checks: Checks) -> None:
    """Make three communicators of ranks in containers with 64 MB of shared memory each."""
    what = "three communicators in 64 MB of shared memory"
    prefix = small_shared_memory()
    if isinstance(prefix, str):
        checks.missing("nccl_room", what, prefix)
        return
    for wish in _WISHES:
        with tempfile.TemporaryDirectory() as folder:
            problem = _two_ranks(checks, folder, wish, prefix=prefix, groups=3)
            if wish == "off" and problem:
                checks.missing("nccl_room", what, f"nor without the plugin: {problem}")
                return
            if wish == "on":
                found = _told(Path(folder)) if not problem else {}
                value = (
                    problem or f"ended; timing given up for {GiveUpCause(found['given_up']).name}"
                )
                met = not problem and found["destroy_s"] is not None
                checks.bar("nccl_room", what, value, "the ranks end by themselves", met)


def _not_ended(checks: Checks, part: str, what: str, wish: str, problem: str) -> None:
    """Report ranks that did not exit, which is a FAIL only if ranks without the plugin do exit."""
    if wish == "off":
        checks.missing(part, what, problem)
    else:
        checks.bar(
            part, what, f"with the plugin, and not without: {problem}", "the ranks end", False
        )


def _told(folder: Path) -> dict[str, Any]:
    """Return the data that rank 0 has written to its files."""
    ended = folder / "ended-0.json"
    destroy_s = json.loads(ended.read_text()) if ended.exists() else None
    return {**json.loads((folder / "told-0.json").read_text()), "destroy_s": destroy_s}


def _two_ranks(
    checks: Checks, folder: str, wish: str, *, prefix: Sequence[str] = (), groups: int = 1
) -> str:
    """Run both ranks with `prefix` before each command. Return an error message, or ""."""
    ranks = []
    for rank in range(2):
        local = {"LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0"}
        if not prefix:
            local = {"LOCAL_WORLD_SIZE": "2", "LOCAL_RANK": str(rank)}
        command = [*prefix, sys.executable, "-m", _RANKS, "pair", folder, wish, str(groups)]
        environ = {**os.environ, **_TWO, **two_hosts(rank), **local, "RANK": str(rank)}
        ranks.append(
            subprocess.Popen(
                command, env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
            )
        )
    try:
        errors = "\n".join(rank.communicate(timeout=max(checks.left_s - 1, 0))[1] for rank in ranks)
    except subprocess.TimeoutExpired:
        return "two ranks on one GPU did not end in the part's time"
    finally:
        for each in ranks:
            each.kill()
    codes = [rank.returncode for rank in ranks]
    if any(codes):
        refused = refusal(errors)
        return f"{_REFUSED}{refused}" if refused else f"exit codes {codes}: {errors.strip()[-120:]}"
    return ""


def _joined(folder: Path) -> dict[str, Any] | None:
    """Return the joined all-reduces of both ranks, or None."""
    join = CollectiveJoin()
    for path in folder.glob("*/rings/*.ring"):
        reader = RingReader(path)
        metadata, records = reader.read_metadata(), reader.read_records(final=True).records
        rank = int(metadata["identity"]["rank"])
        join.set_ranks([rank])
        join.add_records(rank, records[records["step"] > 0], reader.names(), metadata["groups"])
        reader.close()
    join.join()
    rows = [row for row in collective_rows([join]) if row["operation"] == "allreduce"]
    return rows[0] if rows else None
