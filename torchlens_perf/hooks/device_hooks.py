"""Selection of the device hooks of a watch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from torchlens_perf.errors import ConfigError
from torchlens_perf.recorder.devices import find_cuda_devices_in_use

if TYPE_CHECKING:
    from torchlens_perf.config import Config
    from torchlens_perf.cuda.device import CudaDevice
    from torchlens_perf.recorder.session import Hook, Session
    from torchlens_perf.run.rank_facts import Gpu

# Prefix of GPU UUIDs in NVML. torch's UUIDs lack it.
_PREFIX = "GPU-"


def check_merging_config(config: Config) -> None:
    """Raise ConfigError if aggregate="device" cannot work.

    The check runs before anything is created and has the same result on all ranks.
    """
    if config.aggregate != "device":
        return
    import torch.distributed as dist

    from torchlens_perf.recorder.devices import find_accelerator

    if find_device_for_kernels(find_accelerator()) is None:
        raise ConfigError("aggregate='device': needs an NVIDIA GPU and a torch with CUDA")
    if not dist.is_available() or not dist.is_initialized():
        raise ConfigError("aggregate='device': call init_process_group() before the watch begins")


def decline_configured_merging(config: Config) -> None:
    """Tell the other ranks that this rank cannot merge windows, because it does not record.

    With aggregate="device" all ranks must agree to merge. The other ranks would wait forever
    without an answer from this rank.
    """
    if config.aggregate == "device":
        from torchlens_perf.recorder.devices import find_accelerator

        device = find_device_for_kernels(find_accelerator())
        if device is not None:
            device.all_ranks_agree(device.create_process_group(), able=False)


def find_device_for_kernels(kind: str) -> CudaDevice | None:
    """Return the device for device sections and merging, or None if its kernels cannot run."""
    import torch

    if kind != "cuda" or torch.version.cuda is None:
        return None
    from torchlens_perf.cuda.device import CudaDevice

    return CudaDevice()


def create_device_hooks(config: Config) -> list[Hook]:
    """Return the device hooks in the order of attachment.

    The hooks' modules are imported only if torch has a device.
    """
    import torch

    from torchlens_perf.recorder.devices import find_accelerator

    kind = find_accelerator()
    stamped = find_device_for_kernels(kind) if kind else None
    aggregate = config.aggregate == "device"
    known = None
    if stamped is not None and aggregate:
        from torchlens_perf.cuda.steps import PendingSteps

        known = PendingSteps()
    hooks: list[Hook] = []
    if kind and config.device_times != "off":
        from torchlens_perf.cuda.device_times import DeviceTimesHook

        hooks.append(DeviceTimesHook(asked_for=config.device_times == "on", kind=kind, known=known))
        if config.collectives:
            from torchlens_perf.hooks.collectives.data_parallel import DataParallelHook

            hooks.append(DataParallelHook())
    # Must precede DeviceSectionHook, which creates a communicator: NCCL loads a plugin only at the
    # first communicator.
    if kind and config.collectives:
        from torchlens_perf.hooks.collectives.nccl import NcclHook

        hooks.append(NcclHook(config.nccl))
    if kind == "cuda" and torch.version.cuda is not None:
        hooks.append(GpuIdentityHook())
    if stamped is not None:
        from torchlens_perf.cuda.section_stamper import DeviceSectionHook

        # Must come after DeviceTimesHook, which fills `known`.
        hooks.append(DeviceSectionHook(stamped, aggregate=aggregate, known=known))
    return hooks


class GpuIdentityHook:
    """Hook that publishes the UUIDs of the GPUs in use once, as soon as torch uses a GPU."""

    name = "the GPU's identity"

    @contextmanager
    def attach(self, session: Session) -> Iterator[None]:
        import torch

        def publish_once() -> None:
            if not torch.cuda.is_initialized() or torch.cuda.is_current_stream_capturing():
                return
            gpus = [read_gpu_identity(index) for index in find_cuda_devices_in_use()]
            if gpus:
                session.facts.gpus = gpus
                session.publish()
                session.step_callbacks.remove(publish_once)

        with session.run_throttled(self.name, publish_once):
            yield


def read_gpu_identity(index: int) -> Gpu:
    """Return the UUID in NVML's form, the name and torch's index of a GPU, for the sidecar."""
    import torch

    device = torch.cuda.get_device_properties(index)
    uuid = str(device.uuid)
    return {
        "uuid": uuid if uuid.startswith(_PREFIX) else _PREFIX + uuid,
        "name": device.name,
        "index": index,
    }
