"""The hooks of a watch that are about a device, in the order of attaching."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from torchlens_perf.errors import ConfigError
from torchlens_perf.recorder.devices import devices_in_use

if TYPE_CHECKING:
    from torchlens_perf.config import Config
    from torchlens_perf.hooks.on_device.cuda_device import Device
    from torchlens_perf.recorder.session import Hook, Session
    from torchlens_perf.run.identity import Gpu

_PREFIX = "GPU-"  # NVML's; torch leaves it out


def check(config: Config) -> None:
    """Raises ConfigError where aggregate="device" cannot be: before anything is made, and on all ranks alike."""
    if config.aggregate != "device":
        return
    import torch.distributed as dist

    from torchlens_perf.recorder.devices import accelerator

    if merging_device(accelerator()) is None:
        raise ConfigError("aggregate='device': needs an NVIDIA GPU and a torch with CUDA")
    if not dist.is_available() or not dist.is_initialized():
        raise ConfigError("aggregate='device': call init_process_group() before the watch begins")


def decline(config: Config) -> None:
    """This rank does not record. With aggregate="device" the others ask all ranks, and must not wait for this one."""
    if config.aggregate == "device":
        from torchlens_perf.hooks.on_device.cuda_device import decline_merging
        from torchlens_perf.recorder.devices import accelerator

        device = merging_device(accelerator())
        if device is not None:
            decline_merging(device)


def merging_device(kind: str) -> Device | None:
    """The device whose memory is stamped, reduced and merged over ranks; None where the kernels do not run."""
    import torch

    if kind != "cuda" or torch.version.cuda is None:
        return None
    from torchlens_perf.hooks.on_device.cuda_device import Device

    return Device()


def device_hooks(config: Config) -> list[Hook]:
    """Nothing of them but the question is imported where torch has no device, or sees none."""
    import torch

    from torchlens_perf.recorder.devices import accelerator

    there = accelerator()
    stamped, aggregate = merging_device(there) if there else None, config.aggregate == "device"
    known = None
    if stamped is not None and aggregate:
        from torchlens_perf.cuda.steps import KnownSteps

        known = KnownSteps()
    hooks: list[Hook] = []
    if there and config.device_times != "off":
        from torchlens_perf.hooks.on_device.sections import DeviceHook

        hooks.append(DeviceHook(asked_for=config.device_times == "on", kind=there, known=known))
        if config.collectives:
            from torchlens_perf.hooks.on_device.data_parallel import DataParallelHook

            hooks.append(DataParallelHook())
    if there and config.collectives:  # before a hook that makes communicators
        from torchlens_perf.hooks.on_device.nccl import NcclHook

        hooks.append(NcclHook(config.nccl))
    if there == "cuda" and torch.version.cuda is not None:
        hooks.append(GpuHook())
    if stamped is not None:
        from torchlens_perf.hooks.on_device.stamps import StampHook

        hooks.append(StampHook(stamped, aggregate=aggregate, known=known))  # behind what makes steps known
    return hooks


class GpuHook:
    """Tells the UUIDs of the GPUs in use as soon as there are some, and then nothing more."""

    name = "the GPU's identity"

    @contextmanager
    def attach(self, session: Session) -> Iterator[None]:
        def publish_once() -> None:
            step = session.recorder.step
            if step & (step + 1):  # asking costs more than all else at a step's end: at the first, second, fourth ...
                return
            if self._publish(session):
                session.step_callbacks.remove(publish_once)

        with session.each_step(self.name, publish_once):
            yield

    def _publish(self, session: Session) -> bool:
        """Returns whether there are GPUs to tell of."""
        import torch

        if not torch.cuda.is_initialized() or torch.cuda.is_current_stream_capturing():
            return False
        gpus = [facts_of(index) for index in devices_in_use()]
        if gpus:
            session.publish(gpus=gpus)
        return bool(gpus)


def facts_of(index: int) -> Gpu:
    """What the sidecar must know of a device: its UUID as NVML writes it, its name, and torch's index."""
    import torch

    device = torch.cuda.get_device_properties(index)
    uuid = str(device.uuid)
    return {"uuid": uuid if uuid.startswith(_PREFIX) else _PREFIX + uuid, "name": device.name, "index": index}
