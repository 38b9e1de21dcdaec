"""The hooks of a watch that are about a device, in the order of attaching."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchlens_perf.errors import ConfigError

if TYPE_CHECKING:
    from torchlens_perf.config import Config
    from torchlens_perf.session import Hook


def device_hooks(config: Config) -> list[Hook]:
    """Nothing of them but the question is imported where torch was built without a device, or sees none."""
    import torch

    from torchlens_perf.devices import has_devices

    there = has_devices()
    if config.aggregate == "device" and not (there and torch.version.cuda is not None):
        raise ConfigError("aggregate='device': needs an NVIDIA GPU and a torch with CUDA")
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
