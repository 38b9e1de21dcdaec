"""Sample counters of InfiniBand and RoCE ports from /sys/class/infiniband.

No library and no special permission is needed.
"""

from __future__ import annotations

import re
from pathlib import Path

from torchlens_perf.run.hardware_samples import LINKS, Sample, build_sample
from torchlens_perf.run.processes import read_kernel_text

ROOT = Path("/sys/class/infiniband")
_WORD_BYTES = 4  # The data counters count words of four bytes.
_RESCAN_PERIOD_NS = 60_000_000_000

# Columns: quantity of a port, file below the port's folder, factor from the file's unit.
_COUNTERS = (
    ("transmitted_bytes", "counters/port_xmit_data", _WORD_BYTES),
    ("received_bytes", "counters/port_rcv_data", _WORD_BYTES),
    ("transmitted_packets", "counters/port_xmit_packets", 1),
    ("received_packets", "counters/port_rcv_packets", 1),
    ("transmit_wait_ticks", "counters/port_xmit_wait", 1),
    ("symbol_errors", "counters/symbol_error", 1),
    ("link_recoveries", "counters/link_error_recovery", 1),
    ("link_downs", "counters/link_downed", 1),
    ("receive_errors", "counters/port_rcv_errors", 1),
    ("transmit_discards", "counters/port_xmit_discards", 1),
    ("integrity_errors", "counters/local_link_integrity_errors", 1),
    ("out_of_sequence", "hw_counters/out_of_sequence", 1),
    ("sequence_errors", "hw_counters/packet_seq_err", 1),
    ("ack_timeouts", "hw_counters/local_ack_timeout_err", 1),
    ("rnr_retries", "hw_counters/rnr_nak_retry_err", 1),
    ("retries_exceeded", "hw_counters/req_transport_retries_exceeded", 1),
    ("congestion_notifications", "hw_counters/np_cnp_sent", 1),
)


class LinkTelemetry:
    """Sampler of all ports of the node."""

    def __init__(self, root: Path = ROOT) -> None:
        self._root = root
        self._ports: list[Path] = []
        self._rescan_due_ns = 0
        self._missing: set[Path] = set()
        self._before: dict[Path, Sample] = {}

    def sample(self, monotonic_ns: int, unix_ns: int) -> dict[str, Sample]:
        """Return a sample of each port by the port's name, such as "mlx5_0/1".

        monotonic_ns, unix_ns: the current time on both clocks.
        """
        if monotonic_ns >= self._rescan_due_ns:
            self._rescan_due_ns = monotonic_ns + _RESCAN_PERIOD_NS
            self._ports = find_ports(self._root)
        samples = {}
        for port in self._ports:
            state = read_kernel_text(port / "state")
            if not state:  # The adapter's driver was unloaded.
                continue
            before = self._before.get(port)
            # A text such as "400 Gb/sec (4X NDR)".
            rate = re.match(r"([0-9.]+) Gb/sec", read_kernel_text(port / "rate"))
            values = {
                "device": port.parent.parent.name,
                "port": int(port.name),
                "layer": read_kernel_text(port / "link_layer") or None,
                "active": "ACTIVE" in state,
                "rate_bits": None if rate is None else round(float(rate[1]) * 1e9),
                **{name: self._read_counter(port / file, unit) for name, file, unit in _COUNTERS},
            }
            name = f"{values['device']}/{values['port']}"
            sample = build_sample(LINKS, name, monotonic_ns, unix_ns, values, before)
            samples[name] = self._before[port] = sample
        return samples

    def _read_counter(self, file: Path, unit: int) -> int | None:
        """Return a counter, or None if the adapter lacks it or the counter's file contains "N/A"."""
        if file in self._missing:
            return None
        text = read_kernel_text(file)
        # Do not try to read a missing counter again.
        if not text.isdigit():
            self._missing.add(file)
            return None
        return int(text) * unit


def find_ports(root: Path = ROOT) -> list[Path]:
    """Return the folders of the node's ports, sorted by adapter and port number."""
    return sorted(path for path in root.glob("*/ports/*") if path.name.isdigit())
