"""The port of /metrics during a sidecar's life: off by default, and open until the last scrape."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
import threading
import time
import urllib.error
from pathlib import Path
from typing import Any

import pytest

from tests.support.live_ranks import LiveRanks
from tests.support.ranks import Rank
from tests.support.scrapes import Scrape, ScrapedSimulation, scrape
from tests.support.servers import free_port, wait_for
from torchlens_perf.exporters import Exporter, Receiver
from torchlens_perf.run.directory import RunDirectory
from torchlens_perf.run.installation import build_install_command
from torchlens_perf.run.ring import Kind
from torchlens_perf.run.sidecar_lock import SidecarLock
from torchlens_perf.sidecar.loop import run_sidecar
from torchlens_perf.sidecar.metrics_port import MetricsPort
from torchlens_perf.sidecar.node import Sidecar

WORK = {"data": 1, "forward": 4, "communication": 2, "backward": 6, "host": 1}


def of_ranks(directory: RunDirectory, **settings: Any) -> tuple[Sidecar, list[Rank]]:
    """Return a sidecar and its two ranks, which have finished steps."""
    ranks = [Rank(directory, rank, **settings) for rank in range(2)]
    for rank in ranks:
        rank.steps(20, **WORK)
    sidecar = Sidecar(directory, "node-a", None, lambda run, asked: None)
    sidecar.read_rings()
    return sidecar, ranks


def round_of(sidecar: Sidecar, port: MetricsPort) -> None:
    """Run one round of the sidecar in the same order as loop.py."""
    sidecar.read_rings()
    port.open_or_update(sidecar)
    sidecar.count_records()
    sidecar.judge_ranks(time.monotonic())
    sidecar.export_results()
    port.show_final_values(sidecar)


def test_metrics_port_is_closed_by_default(
    run: RunDirectory,
) -> None:
    """No metrics are computed while the port is closed."""
    sidecar, ranks = of_ranks(run)
    port = MetricsPort()
    round_of(sidecar, port)
    assert port.address is None
    assert not sidecar.receivers
    close(sidecar, ranks)


def close(sidecar: Sidecar, ranks: list[Rank]) -> None:
    for rank in ranks:
        rank.close()
    sidecar.close()


def test_used_port_is_reported_and_opened_once_free(run: RunDirectory) -> None:
    """Meanwhile, the second sidecar works without the port."""
    first, now_s = MetricsPort(), [0.0]
    sidecar, ranks = of_ranks(run, prometheus="0")
    round_of(sidecar, first)
    assert first.address is not None
    taken = str(first.address.port)
    for source in sidecar.sources:
        facts = source.state.facts
        facts.settings = dataclasses.replace(facts.settings, prometheus=taken)
    second = MetricsPort(clock=lambda: now_s[0])
    second.open_or_update(sidecar)
    assert second.address is None
    (note,) = [each for each in sidecar.state.notes if "/metrics" in each]
    assert f"there is no /metrics at 127.0.0.1:{taken}: Address already in use" in note
    first.close(lingers=False)
    second.open_or_update(sidecar)
    assert second.address is None, "the port was retried too early"
    now_s[0] += 6
    second.open_or_update(sidecar)
    assert second.address == ("127.0.0.1", int(taken))
    assert not [each for each in sidecar.state.notes if "/metrics" in each]
    second.close(lingers=False)
    close(sidecar, ranks)


def test_missing_prometheus_client_is_noted_with_the_package_name(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sidecar continues."""
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    for name in [
        name for name in sys.modules if name.startswith("torchlens_perf.exporters.prometheus.")
    ]:
        monkeypatch.delitem(sys.modules, name)
    sidecar, ranks = of_ranks(run, prometheus="0")
    port = MetricsPort()
    for _ in range(3):
        round_of(sidecar, port)
    (note,) = [each for each in sidecar.state.notes if "/metrics" in each]
    assert f"it needs prometheus_client: {build_install_command('prometheus')}" in note
    assert port.address is None
    close(sidecar, ranks)


@pytest.mark.slow
def test_successor_of_a_killed_sidecar_shows_its_open_alerts(tmp_path: Path) -> None:
    """The alerts are shown until they end."""
    with ScrapedSimulation(tmp_path, 4, "constant:rank=2,share=0.3,until=900") as simulation:
        simulation.add_blocks(20)
        (before,) = simulation.scraped().samples("torch_train_alert")
        simulation.port.close(lingers=False)
        simulation.simulation.sidecar.receivers.clear()
        simulation.port = MetricsPort()
        simulation.add_blocks()
        assert simulation.scraped().samples("torch_train_alert") == [before]
        simulation.add_blocks(60)
        assert simulation.scraped().samples("torch_train_alert") == []
        assert (
            simulation.scraped().value(
                "torch_train_stragglers", torch_train_straggler_class="slow_compute"
            )
            == 0
        )


def test_client_that_blocks_the_port_does_not_delay_the_sidecar(tmp_path: Path) -> None:
    """Rounds and shutdown take as long as usual."""
    import socket

    with ScrapedSimulation(tmp_path, 2) as simulation:
        simulation.add_blocks()
        assert simulation.port.address is not None
        with socket.create_connection(simulation.port.address) as hanging:
            hanging.sendall(b"GET /metrics HTTP/1.1\r\n")
            began_s = time.monotonic()
            for _ in range(50):
                simulation.port.open_or_update(simulation.simulation.sidecar)
            assert time.monotonic() - began_s < 3.0
            simulation.port.close(lingers=True)
            assert time.monotonic() - began_s < 3.0


def test_only_steps_sent_to_a_tracing_backend_are_exemplars(tmp_path: Path) -> None:
    sent: dict[int, tuple[int, int]] = {3: (0xABC, 0xDEF)}
    with ScrapedSimulation(tmp_path, 2) as simulation:
        simulation.add_blocks(2)
        assert "trace_id" not in simulation.scraped().text
    with ScrapedSimulation(tmp_path / "sent", 2) as simulation:
        tracing = Exporter()
        tracing.spans_sent = sent
        simulation.simulation.sidecar.exporter = tracing
        # With another receiver, steps are exported before the port is open.
        simulation.simulation.sidecar.receivers.append(Receiver())
        simulation.add_blocks(2)
        found = [sample for sample in simulation.scraped().all() if sample.exemplar]
    assert {sample.name for sample in found} == {
        "torch_train_step_duration_seconds_bucket", "torch_train_step_own_time_seconds_bucket",
    }  # fmt: skip
    assert {sample.exemplar.labels["trace_id"] for sample in found} == {f"{0xABC:032x}"}


def test_port_stays_open_until_the_last_values_are_scraped(run: RunDirectory) -> None:
    """The last values may show that a process died.

    After the last values have been scraped, the port is free.
    """
    sidecar, ranks = of_ranks(run, prometheus="0")
    port, lock = MetricsPort(last_scrape_timeout_s=60), SidecarLock(run.path / "lock")
    round_of(sidecar, port)
    address = port.address
    before = scrape(address)
    assert before.value("torch_train_ranks") == 2
    for rank in ranks:
        rank.begin(Kind.FORWARD, "forward")
        rank.close()
    assert lock.acquire()
    assert not run_sidecar(sidecar, lock, None, port)
    ending = threading.Thread(target=port.close, kwargs={"lingers": True})
    ending.start()
    assert ending.is_alive()
    after = scrape(address)
    ending.join(10)
    assert not ending.is_alive()
    assert after.value("torch_train_ranks") == 0
    assert after.value("torch_train_processes_ended_total", torch_train_process_end="closed") == 2
    with pytest.raises(urllib.error.URLError):
        scrape(address)


def test_shutdown_does_not_wait_for_a_scrape_if_there_never_was_one(run: RunDirectory) -> None:
    sidecar, ranks = of_ranks(run, prometheus="0")
    port = MetricsPort()
    round_of(sidecar, port)
    began_s = time.monotonic()
    port.close(lingers=True)
    assert time.monotonic() - began_s < 15
    close(sidecar, ranks)


@pytest.mark.distributed
def test_steps_of_a_real_job_appear_in_scrapes(tmp_path: Path) -> None:
    """The training processes themselves do not listen on the port."""
    at, found = free_port(), list[Scrape]()
    with LiveRanks(tmp_path, 2, TORCHLENS_PERF_PROMETHEUS=str(at)) as job:

        def steps() -> bool:
            with contextlib.suppress(OSError):
                found.append(scrape(f"127.0.0.1:{at}"))
            return bool(found and len(found[-1].samples("torch_train_steps_total")) == 2)

        assert wait_for(steps, 90)
        (sidecar,) = job.sidecar_pids()
        holders = {pid for pid in (*job.rank_pids().values(), sidecar) if _listens(pid, at)}
        assert holders == {sidecar}


def _listens(pid: int, port: int) -> bool:
    """Return True if the process has the listening socket."""
    lines = Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]
    listening = [f"0100007F:{port:04X}", "00000000:0000", "0A"]
    (inode,) = [line.split()[9] for line in lines if line.split()[1:4] == listening]
    return any(
        os.readlink(each) == f"socket:[{inode}]" for each in Path(f"/proc/{pid}/fd").iterdir()
    )
