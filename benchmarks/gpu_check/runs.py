"""Read the recording of a watch without a sidecar."""

from __future__ import annotations

from pathlib import Path

from torchlens_perf.analysis.statistics.device import DeviceStatistics
from torchlens_perf.run.ring import RingReader
from torchlens_perf.run.sketch import Sketch


def last_rings(folder: str) -> Path:
    """Return the ring file of the newest run in the folder."""
    return max(Path(folder).glob("*/rings/*.ring"), key=lambda path: path.stat().st_mtime_ns)


def device_statistics(ring: Path) -> DeviceStatistics:
    """Compute device statistics from the ring's records, as the sidecar does."""
    reader, found = RingReader(ring), DeviceStatistics()
    found.add_records(reader.read_records(final=True).records, reader.names())
    reader.close()
    return found


def stamped(ring: Path) -> dict[str, Sketch]:
    """Return the durations of device sections by section name."""
    return device_statistics(ring).stamped
