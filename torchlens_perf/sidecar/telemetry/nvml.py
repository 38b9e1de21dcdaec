"""What NVML reports about one GPU, call by call: fields in one batch, activity by GPM, and XIDs. Only for gpu.py.

What a GPU, its driver or our rights do not give is remembered and not asked for again. Errors that say that the GPU, or
the driver, is gone are raised.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

# Codes of NVMLError. The GPU has fallen off the bus, needs a reset, or is not there.
LOST = frozenset({15, 16, 28})
# The driver was unloaded, or is another one than the library's.
UNLOADED = frozenset({1, 9, 18})
GONE = LOST | UNLOADED
# It would be the same the next time: invalid (a field that is newer than the driver), not supported, no permission,
# no such function, another version of a structure, deprecated.
NEVER = frozenset({2, 3, 4, 13, 25, 26})

_ALL_LINKS = 0xFFFFFFFF
_VALUE_OF_TYPE = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")
_MAX_LINKS = 18
_MAX_XIDS = 64  # that are taken at once: a GPU that floods us must not keep us


class Field(NamedTuple):
    """A field of nvmlDeviceGetFieldValues, and what of a GpuSample it is, or is a part of."""

    name: str
    id: int
    scale: float = 1
    scope: int = 0


FAST_FIELDS = (
    Field("power_w", 186, 1e-3),
    Field("energy_j", 83, 1e-3),
    Field("memory_temperature_c", 82),
    Field("throttle_power_ns", 74),
    Field("throttle_thermal_ns", 75),
    Field("throttle_sync_boost_ns", 76),
    Field("throttle_board_limit_ns", 77),
    Field("throttle_low_utilization_ns", 78),
    Field("throttle_reliability_ns", 79),
    Field("pcie_replays", 94),
    Field("pcie_transmitted_bytes", 197),
    Field("pcie_received_bytes", 198),
    Field("nvlink_transmitted_bytes", 138, 1024, _ALL_LINKS),
    Field("nvlink_received_bytes", 139, 1024, _ALL_LINKS),
)
# NVIDIA has renumbered these, to the ids of settings of power smoothing and back: by src/nvml.h of
# github.com/NVIDIA/nvidia-settings, whose tags are drivers' versions, 251 to 253 from 575.51.02 to 580.76.05, and 269
# to 271 from 580.82.07 to 610.43.02; none before.
_THROTTLE_TIMES = ("throttle_sw_thermal_ns", "throttle_hw_thermal_ns", "throttle_hw_power_brake_ns")
_FIRST_THROTTLE_TIMES = (((580, 82), 269), ((575, 51), 251))  # the driver, and the first id; the newest driver first
SLOW_FIELDS = (
    Field("ecc_corrected", 3),
    Field("ecc_uncorrected", 4),
    Field("remapped_rows", 142),
    Field("remapped_rows", 143),
    Field("remapping_pending", 144),
    Field("remapping_failed", 145),
    Field("power_limit_w", 190, 1e-3),
    Field("recovery_action", 230),
)


def _of_links(**fields: int) -> tuple[Field, ...]:
    return tuple(Field(name, number, 1, link) for name, number in fields.items() for link in range(_MAX_LINKS))


# Errors of NVLink, by how a GPU reports them: as Hopper, as Blackwell, and, for older ones, as sums over the links.
NVLINK_FIELDS = (
    _of_links(nvlink_replays=161, nvlink_recoveries=162, nvlink_errors=163),
    _of_links(nvlink_recoveries=215, nvlink_errors=208),
    (
        Field("nvlink_replays", 52),
        Field("nvlink_recoveries", 59),
        Field("nvlink_errors", 38),
        Field("nvlink_errors", 45),
    ),
)

# GPM's metrics, in percent.
_ACTIVITY = {1: "busy", 2: "sm_active", 3: "sm_occupancy", 5: "tensor_active", 10: "dram_active"}


def fast_fields(driver: str) -> tuple[Field, ...]:
    """What is asked for each second. driver: its version, as "580.82.07"; where it is not known, only what has the same
    id in all drivers."""
    numbers = driver.split(".")
    version = tuple(int(each) for each in numbers[:2]) if all(each.isdigit() for each in numbers[:2]) else (0,)
    first_id = next((number for since, number in _FIRST_THROTTLE_TIMES if version >= since), None)
    if first_id is None:
        return FAST_FIELDS
    return FAST_FIELDS + tuple(Field(name, first_id + place) for place, name in enumerate(_THROTTLE_TIMES))


class Fields:
    """Fields of one GPU, asked for in one call. Those that it does not have are left out of the next."""

    def __init__(self, nvml: Any, handle: Any, fields: Sequence[Field]) -> None:
        self._nvml = nvml
        self._handle = handle
        self._fields = list(fields)

    def read(self) -> dict[str, float]:
        """By name; parts of the same quantity are added up. Raises NVMLError where the GPU is gone."""
        if not self._fields:
            return {}
        try:
            values = self._nvml.nvmlDeviceGetFieldValues(self._handle, [(each.id, each.scope) for each in self._fields])
        except self._nvml.NVMLError as error:
            if error.value in GONE:
                raise
            if error.value in NEVER:
                self._fields.clear()
            return {}
        found: dict[str, float] = {}
        never = []
        for field, value in zip(self._fields, values, strict=True):
            code = value.nvmlReturn
            if code in GONE:
                raise self._nvml.NVMLError(code)
            if code in NEVER:
                never.append(field)
            elif code == 0 and value.valueType < len(_VALUE_OF_TYPE):
                number = getattr(value.value, _VALUE_OF_TYPE[value.valueType]) * field.scale
                found[field.name] = found.get(field.name, 0) + number
        if never:
            self._fields = [field for field in self._fields if field not in never]
        return found


def nvlink_fields(nvml: Any, handle: Any) -> Fields:
    """The fields in which this GPU reports errors of NVLink; none where it has no NVLink."""
    for fields in NVLINK_FIELDS:
        asked = Fields(nvml, handle, fields)
        if asked.read():
            return asked
    return Fields(nvml, handle, ())


class Getters:
    """NVML's functions of one GPU. One that it does not support is not called again."""

    def __init__(self, nvml: Any, handle: Any) -> None:
        self._nvml = nvml
        self._handle = handle
        self._never: set[tuple[object, ...]] = set()

    def ask(self, name: str, *arguments: object) -> Any:
        """The answer of nvmlDeviceGet`name`; None where there is none. Raises NVMLError where the GPU is gone."""
        if (name, *arguments) in self._never:
            return None
        try:
            return getattr(self._nvml, f"nvmlDeviceGet{name}")(self._handle, *arguments)
        except self._nvml.NVMLError as error:
            if error.value in GONE:
                raise
            if error.value in NEVER:
                self._never.add((name, *arguments))
            return None


class Gpm:
    """Activity of a GPU between two samples of its performance monitors: Hopper and later.

    Other tools use the same monitors, not always side by side. A refusal is no error of ours: activity is then absent.
    """

    def __init__(self, nvml: Any, handle: Any) -> None:
        """Raises NVMLError where there is no GPM, or it is not ours to use."""
        self._nvml = nvml
        self._handle = handle
        self._samples: list[Any] = []
        if not nvml.nvmlGpmQueryDeviceSupport(handle).isSupportedDevice:
            raise nvml.NVMLError(nvml.NVML_ERROR_NOT_SUPPORTED)
        self._request = nvml.c_nvmlGpmMetricsGet_t()
        self._request.version = nvml.NVML_GPM_METRICS_GET_VERSION
        self._request.numMetrics = len(_ACTIVITY)
        for metric, number in zip(self._request.metrics, _ACTIVITY, strict=False):
            metric.metricId = number
        try:
            for _ in range(2):
                self._samples.append(nvml.nvmlGpmSampleAlloc())
            nvml.nvmlGpmSampleGet(handle, self._samples[0])
        except nvml.NVMLError:
            self.close()
            raise

    def read(self) -> dict[str, float]:
        """Shares of the time since the last call. Raises NVMLError."""
        older, newer = self._samples
        self._nvml.nvmlGpmSampleGet(self._handle, newer)
        self._samples = [newer, older]
        self._request.sample1, self._request.sample2 = older, newer
        self._nvml.nvmlGpmMetricsGet(self._request)
        metrics = self._request.metrics[: len(_ACTIVITY)]
        return {
            _ACTIVITY[metric.metricId]: metric.value / 100
            for metric in metrics
            if metric.nvmlReturn == 0 and math.isfinite(metric.value)
        }

    def close(self) -> None:
        for sample in self._samples:
            with contextlib.suppress(self._nvml.NVMLError):  # the library may have been shut down under us
                self._nvml.nvmlGpmSampleFree(sample)
        self._samples.clear()


class Xids:
    """The driver's reports of errors, of all GPUs that were added. Asked for, never waited for."""

    def __init__(self, nvml: Any) -> None:
        self._nvml = nvml
        self._set: Any = None
        with contextlib.suppress(nvml.NVMLError):  # then no GPU can be added, and each says None
            self._set = nvml.nvmlEventSetCreate()

    def add(self, handle: Any) -> bool:
        """Whether the driver reports XIDs of this GPU from now on."""
        if self._set is None:
            return False
        try:
            self._nvml.nvmlDeviceRegisterEvents(handle, self._nvml.nvmlEventTypeXidCriticalError, self._set)
        except self._nvml.NVMLError as error:
            if error.value in UNLOADED:
                raise
            return False  # not supported, no right to it, or lost: which its own calls say
        return True

    def read(self) -> Iterator[tuple[int, int]]:
        """The address of the GPU's handle and the XID, of each since the last call. Raises NVMLError if all is gone."""
        if self._set is None:
            return
        for _ in range(_MAX_XIDS):
            try:
                event = self._nvml.nvmlEventSetWait_v2(self._set, 0)
            except self._nvml.NVMLError as error:
                if error.value in UNLOADED:
                    raise
                return  # a timeout: there are no more; or one of the GPUs is lost, and hides the others' XIDs
            yield address(event.device), int(event.eventData)

    def close(self) -> None:
        if self._set is not None:
            with contextlib.suppress(self._nvml.NVMLError):
                self._nvml.nvmlEventSetFree(self._set)
            self._set = None


def address(handle: Any) -> int:
    """A number that distinguishes one handle from another."""
    return ctypes.cast(handle, ctypes.c_void_p).value or 0
