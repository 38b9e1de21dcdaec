"""Which GPUs this process computes on. The sidecar reads their clocks, power and errors; here nothing is measured."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from torchlens_perf.devices import devices_in_use

if TYPE_CHECKING:
    from torchlens_perf.session import Session

_PREFIX = "GPU-"  # NVML's; torch leaves it out


class GpuHook:
    """Tells the UUIDs of the GPUs in use as soon as there are some, and then nothing more."""

    name = "the GPU's identity"

    @contextmanager
    def attach(self, session: Session) -> Iterator[None]:
        def look() -> None:
            step = session.recorder.step
            if step & (step + 1):  # asking costs more than all else at a step's end: at the first, second, fourth ...
                return
            self._look(session)
            if session.gpus:
                session.stop_work(look)

        with session.each_step(self.name, look):
            yield

    def _look(self, session: Session) -> None:
        import torch

        if not torch.cuda.is_initialized() or torch.cuda.is_current_stream_capturing():
            return
        session.gpus = [facts_of(index) for index in devices_in_use()]
        if session.gpus:
            session.publish()


def facts_of(index: int) -> dict[str, object]:
    """What the sidecar must know of a device: its UUID as NVML writes it, its name, and torch's index."""
    import torch

    device = torch.cuda.get_device_properties(index)
    uuid = str(device.uuid)
    return {"uuid": uuid if uuid.startswith(_PREFIX) else _PREFIX + uuid, "name": device.name, "index": index}
