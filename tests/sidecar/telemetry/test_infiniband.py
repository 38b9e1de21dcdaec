"""Tests of counters of InfiniBand and RoCE ports, from a folder like the one in /sys."""

from __future__ import annotations

from pathlib import Path

from torchlens_perf.sidecar.telemetry.infiniband import LinkTelemetry

SECOND = 1_000_000_000
FILES = {
    "state": "4: ACTIVE", "rate": "400 Gb/sec (4X NDR)", "link_layer": "InfiniBand",
    "counters/port_xmit_data": "1000", "counters/port_rcv_data": "2000", "counters/port_xmit_packets": "30",
    "counters/port_rcv_packets": "40", "counters/port_xmit_wait": "5", "counters/symbol_error": "1",
    "counters/link_error_recovery": "0", "counters/link_downed": "2", "counters/port_rcv_errors": "3",
    "counters/port_xmit_discards": "0", "counters/local_link_integrity_errors": "0",
    "hw_counters/out_of_sequence": "7", "hw_counters/packet_seq_err": "8", "hw_counters/local_ack_timeout_err": "9",
    "hw_counters/rnr_nak_retry_err": "0", "hw_counters/req_transport_retries_exceeded": "0",
    "hw_counters/np_cnp_sent": "11",
}  # fmt: skip


def port(root: Path, device: str = "mlx5_0", number: int = 1, **changed: str | None) -> Path:
    """Make a port's folder.

    changed: text of each file by its name without folders, or None for a missing file.
    """
    folder = root / device / "ports" / str(number)
    for name, text in FILES.items():
        text = changed.get(name.rpartition("/")[2], text)
        if text is not None:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text + "\n")
    return folder


def test_counters_are_converted_to_their_units(tmp_path: Path) -> None:
    """Data counters count words of four bytes. The port's speed is converted to bits per second."""
    port(tmp_path)
    (sample,) = LinkTelemetry(tmp_path).sample(5 * SECOND, 77).values()

    assert (sample.name, sample["layer"], sample["active"], sample["rate_bits"]) == (
        "mlx5_0/1",
        "InfiniBand",
        True,
        4 * 10**11,
    )
    assert (sample["transmitted_bytes"], sample["received_bytes"]) == (4000, 8000)
    assert (
        sample["transmitted_packets"],
        sample["received_packets"],
        sample["transmit_wait_ticks"],
    ) == (
        30,
        40,
        5,
    )
    assert (
        sample["symbol_errors"],
        sample["link_recoveries"],
        sample["link_downs"],
        sample["receive_errors"],
    ) == (1, 0, 2, 3)
    assert (sample["out_of_sequence"], sample["sequence_errors"], sample["ack_timeouts"]) == (
        7,
        8,
        9,
    )
    assert (sample["congestion_notifications"], sample["interval_ns"], sample.grown) == (
        11,
        None,
        {},
    )


def test_second_sample_contains_the_growth_of_counters(tmp_path: Path) -> None:
    """The growth of a counter that was reset is counted from 0."""
    folder, links = port(tmp_path), LinkTelemetry(tmp_path)
    links.sample(SECOND, 0)
    (folder / "counters/port_rcv_data").write_text("2500\n")
    (folder / "counters/link_downed").write_text("1\n")
    (folder / "state").write_text("1: DOWN\n")
    (sample,) = links.sample(6 * SECOND, 0).values()

    assert {name: more for name, more in sample.grown.items() if more} == {
        "received_bytes": 2000,
        "link_downs": 1,
    }
    assert (sample["interval_ns"], sample["active"]) == (5 * SECOND, False)


def test_missing_port_counters_are_none(tmp_path: Path) -> None:
    """A RoCE port lacks some counters, and other ports have "N/A" in the files."""
    port(
        tmp_path, "rocep1s0", 2, port_xmit_wait=None, symbol_error="N/A (no PMA)", out_of_sequence=None,
        link_layer="Ethernet", rate="invalid",
    )  # fmt: skip
    (sample,) = LinkTelemetry(tmp_path).sample(SECOND, 0).values()

    assert (sample.name, sample["layer"], sample["rate_bits"]) == ("rocep1s0/2", "Ethernet", None)
    assert (sample["transmit_wait_ticks"], sample["symbol_errors"], sample["out_of_sequence"]) == (
        None,
        None,
        None,
    )
    assert sample["sequence_errors"] == 8


def test_new_ports_are_sampled_and_removed_ports_disappear(tmp_path: Path) -> None:
    """A new port is found within a minute. A removed port disappears at once."""
    links = LinkTelemetry(tmp_path / "infiniband")
    assert links.sample(0, 0) == {}
    folder = port(tmp_path / "infiniband")
    assert links.sample(30 * SECOND, 0) == {}
    assert set(links.sample(61 * SECOND, 0)) == {"mlx5_0/1"}
    (folder / "state").unlink()
    assert links.sample(62 * SECOND, 0) == {}
