"""Reading back what a watch without a sidecar has recorded."""

from __future__ import annotations

from pathlib import Path

from torchlens_perf.analysis.statistics.device import DeviceStatistics
from torchlens_perf.run.ring import Reader
from torchlens_perf.run.sketch import Sketch


def last_rings(folder: str) -> Path:
    """The ring file of the newest run below."""
    return max(Path(folder).glob("*/rings/*.ring"), key=lambda path: path.stat().st_mtime_ns)


def device_statistics(ring: Path) -> DeviceStatistics:
    """What the sidecar would make of its records of the device."""
    reader, found = Reader(ring), DeviceStatistics()
    found.add(reader.read(final=True).records, reader.names())
    reader.close()
    return found


def stamped(ring: Path) -> dict[str, Sketch]:
    """Device sections by name."""
    return device_statistics(ring).stamped
