"""The hooks of a watch that are about a device, in the order of attaching."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchlens_perf.errors import ConfigError

if TYPE_CHECKING:
    from torchlens_perf.config import Config
    from torchlens_perf.session import Hook


def check(config: Config) -> None:
    """Raises ConfigError where aggregate="device" cannot be: before anything is made, and on all ranks alike."""
    if config.aggregate != "device":
        return
    import torch
    import torch.distributed as dist

    from torchlens_perf.devices import has_devices

    if not has_devices() or torch.version.cuda is None:
        raise ConfigError("aggregate='device': needs an NVIDIA GPU and a torch with CUDA")
    if not dist.is_available() or not dist.is_initialized():
        raise ConfigError("aggregate='device': call init_process_group() before the watch begins")


def decline(config: Config) -> None:
    """This rank does not record. With aggregate="device" the others ask all ranks, and must not wait for this one."""
    if config.aggregate == "device":
        from torchlens_perf.hooks.stamps import Device, decline_merging

        decline_merging(Device())


def device_hooks(config: Config) -> list[Hook]:
    """Nothing of them but the question is imported where torch was built without a device, or sees none."""
    import torch

    from torchlens_perf.devices import has_devices

    there = has_devices()
    hooks: list[Hook] = []
    if there and config.device_times != "off":
        from torchlens_perf.hooks.device import DeviceHook

        hooks.append(DeviceHook(asked_for=config.device_times == "on"))
    if there and config.collectives:  # before a hook that makes communicators
        from torchlens_perf.hooks.nccl import NcclHook

        hooks.append(NcclHook(config.nccl))
    if there and torch.version.cuda is not None:
        from torchlens_perf.hooks.gpu import GpuHook
        from torchlens_perf.hooks.stamps import Device, StampHook

        hooks.append(GpuHook())
        hooks.append(StampHook(Device(), aggregate=config.aggregate == "device"))
    return hooks
