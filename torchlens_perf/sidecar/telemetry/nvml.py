"""Wrap the NVML calls that gpu.py uses: batches of fields, activity by GPM, and XIDs.

A value that is unsupported or not permitted is not requested again. Errors are raised only if the
GPU or the driver is gone.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

# Codes of NVMLError: the GPU has fallen off the bus, needs a reset, or is not present.
LOST = frozenset({15, 16, 28})
# The driver was unloaded, or its version differs from the library's.
UNLOADED = frozenset({1, 9, 18})
GONE = LOST | UNLOADED
# Errors that a retry would repeat: invalid (the driver does not know the field), not supported, no
# permission, no such function, another version of a structure, deprecated.
NEVER = frozenset({2, 3, 4, 13, 25, 26})

_ALL_LINKS = 0xFFFFFFFF
_VALUE_OF_TYPE = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")
_MAX_LINKS = 18
# Limit of XIDs per call. Otherwise a GPU that reports without end could block the sidecar.
_MAX_XIDS = 64


def _mhz_to_hz(megahertz: int) -> int:
    return megahertz * 1_000_000


class Field(NamedTuple):
    """A field of nvmlDeviceGetFieldValues, with the name of the quantity of a GPU that it adds to."""

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
# NVIDIA has renumbered these fields. In other drivers, the same ids are settings of power
# smoothing. The ids are 251 to 253 in drivers 575.51.02 to 580.76.05, and 269 to 271 in drivers
# 580.82.07 to 610.43.02. Older drivers lack the fields. Source: src/nvml.h of
# github.com/NVIDIA/nvidia-settings.
_THROTTLE_TIMES = ("throttle_sw_thermal_ns", "throttle_hw_thermal_ns", "throttle_hw_power_brake_ns")
# Oldest driver version with these ids, and id of the first throttle time. Newest driver first.
_THROTTLE_TIME_IDS = (((580, 82), 269), ((575, 51), 251))
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


def _repeat_for_links(**fields: int) -> tuple[Field, ...]:
    return tuple(
        Field(name, number, 1, link)
        for name, number in fields.items()
        for link in range(_MAX_LINKS)
    )


# Fields of NVLink errors on Hopper, on Blackwell, and on older GPUs (sums over all links).
NVLINK_FIELDS = (
    _repeat_for_links(nvlink_replays=161, nvlink_recoveries=162, nvlink_errors=163),
    _repeat_for_links(nvlink_recoveries=215, nvlink_errors=208),
    (
        Field("nvlink_replays", 52),
        Field("nvlink_recoveries", 59),
        Field("nvlink_errors", 38),
        Field("nvlink_errors", 45),
    ),
)


class Getter(NamedTuple):
    """A function nvmlDeviceGet`function` with one value, which is a quantity of a GPU."""

    name: str
    function: str
    constant: str = ""
    """Name of the function's argument in NVML."""
    convert: Callable[[Any], Any] = lambda value: value


# Of getters with the same name, the first one that has a value counts. FAST_FIELDS and GPM, if they
# have the value, are read instead.
GETTERS = (
    Getter("power_w", "PowerUsage", convert=lambda milliwatts: milliwatts / 1e3),
    Getter("busy", "UtilizationRates", convert=lambda percents: percents.gpu / 100),
    Getter("temperature_c", "TemperatureV", "NVML_TEMPERATURE_GPU"),
    # Drivers before 570 lack the function above.
    Getter("temperature_c", "Temperature", "NVML_TEMPERATURE_GPU"),
    Getter("sm_clock_hz", "ClockInfo", "NVML_CLOCK_SM", _mhz_to_hz),
    Getter("memory_clock_hz", "ClockInfo", "NVML_CLOCK_MEM", _mhz_to_hz),
    Getter("clock_reasons", "CurrentClocksEventReasons"),
)
MAX_CLOCK = Getter("sm_clock_max_hz", "MaxClockInfo", "NVML_CLOCK_SM", _mhz_to_hz)

# GPM metrics by id. Their values are percentages.
_ACTIVITY = {1: "busy", 2: "sm_active", 3: "sm_occupancy", 5: "tensor_active", 10: "dram_active"}


def select_fast_fields(driver: str) -> tuple[Field, ...]:
    """Return the fields to read every second.

    driver: the driver's version, such as "580.82.07". For an unknown version, fields whose ids
    depend on the version are left out.
    """
    numbers = driver.split(".")
    version = (
        tuple(int(each) for each in numbers[:2])
        if all(each.isdigit() for each in numbers[:2])
        else (0,)
    )
    first_id = next((number for since, number in _THROTTLE_TIME_IDS if version >= since), None)
    if first_id is None:
        return FAST_FIELDS
    return FAST_FIELDS + tuple(
        Field(name, first_id + place) for place, name in enumerate(_THROTTLE_TIMES)
    )


class GetterCaller:
    """Caller of nvmlDeviceGet functions for one GPU. Unsupported functions are called only once."""

    def __init__(self, nvml: Any, handle: Any) -> None:
        self.nvml = nvml
        self._handle = handle
        self._never: set[tuple[object, ...]] = set()

    def call(self, name: str, *arguments: object) -> Any:
        """Return the result of nvmlDeviceGet`name`(), or None if it is not available.

        Raises NVMLError if the GPU is gone.
        """
        if (name, *arguments) in self._never:
            return None
        try:
            return getattr(self.nvml, f"nvmlDeviceGet{name}")(self._handle, *arguments)
        except self.nvml.NVMLError as error:
            if error.value in GONE:
                raise
            if error.value in NEVER:
                self._never.add((name, *arguments))
            return None

    def read(self, getters: Iterable[Getter], known: Mapping[str, object]) -> dict[str, Any]:
        """Return the values of getters whose name is not in `known`. Raises NVMLError as call()."""
        found: dict[str, Any] = {}
        for name, function, constant, convert in getters:
            if name not in known and name not in found:
                arguments = [getattr(self.nvml, constant)] if constant else []
                value = self.call(function, *arguments)
                if value is not None:
                    found[name] = convert(value)
        return found


class FieldReader:
    """Reader of several fields of a GPU in one call. Missing fields are read only once."""

    def __init__(self, getters: GetterCaller, fields: Sequence[Field]) -> None:
        self._getters = getters
        self._fields = tuple(fields)

    def read(self) -> dict[str, float]:
        """Return sums of equally named fields. Raises NVMLError if the GPU is gone."""
        asked = tuple((each.id, each.scope) for each in self._fields)
        values = (self._getters.call("FieldValues", asked) if asked else None) or ()
        found: dict[str, float] = {}
        never = set()
        for field, value in zip(self._fields, values, strict=False):
            code = value.nvmlReturn
            if code in GONE:
                raise self._getters.nvml.NVMLError(code)
            if code in NEVER:
                never.add(field)
            elif code == 0 and value.valueType < len(_VALUE_OF_TYPE):
                number = getattr(value.value, _VALUE_OF_TYPE[value.valueType]) * field.scale
                found[field.name] = found.get(field.name, 0) + number
        if never:
            self._fields = tuple(each for each in self._fields if each not in never)
        return found


def find_nvlink_fields(getters: GetterCaller) -> FieldReader:
    """Return a reader of this GPU's fields for NVLink errors. It has no fields without NVLink."""
    readers = (FieldReader(getters, fields) for fields in NVLINK_FIELDS)
    return next((each for each in readers if each.read()), FieldReader(getters, ()))


class GpmReader:
    """Reader of a GPU's activity from its performance monitors. Needs Hopper or later.

    Some tools reserve these monitors. NVML then reports an error, and the activity is missing.
    """

    def __init__(self, nvml: Any, handle: Any) -> None:
        """Raises NVMLError if the GPU has no GPM or the process may not use it."""
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
        """Return each activity as a share of the time since the last call. Raises NVMLError."""
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
            # Other code in this process may have shut down NVML.
            with contextlib.suppress(self._nvml.NVMLError):
                self._nvml.nvmlGpmSampleFree(sample)
        self._samples.clear()


class ProcessUseReader:
    """Reader of the use of a GPU by processes outside the job."""

    def __init__(self, getters: GetterCaller) -> None:
        self._getters = getters
        self._seen_us = 0

    def read(self, job: Collection[int]) -> dict[str, Any]:
        """Return `others_busy` and `other_pid` since the last call, or {} if they are not known.

        job: process ids of the job's ranks. If the driver lists none of them, it uses the ids of
        another PID namespace, and the others cannot be told from the ranks. Raises NVMLError if
        the GPU is lost.
        """
        samples = self._getters.call("ProcessUtilization", self._seen_us) or ()
        self._seen_us = max((each.timeStamp for each in samples), default=self._seen_us)
        used = {int(each.pid): each.smUtil / 100 for each in samples}
        others = {pid: share for pid, share in used.items() if pid not in job}
        if len(others) == len(used):
            return {}
        return {
            "others_busy": min(1.0, sum(others.values())),
            "other_pid": max(
                (pid for pid, share in others.items() if share), key=used.__getitem__, default=None
            ),
        }


class XidReader:
    """Reader of XIDs, the driver's error reports, for all registered GPUs. Reading never blocks."""

    def __init__(self, nvml: Any) -> None:
        self._nvml = nvml
        self._set: Any = None
        # Without an event set, register_gpu() returns False for every GPU.
        with contextlib.suppress(nvml.NVMLError):
            self._set = nvml.nvmlEventSetCreate()

    def register_gpu(self, handle: Any) -> bool:
        """Register a GPU. Return True if the driver will report its XIDs."""
        if self._set is None:
            return False
        try:
            self._nvml.nvmlDeviceRegisterEvents(
                handle, self._nvml.nvmlEventTypeXidCriticalError, self._set
            )
        except self._nvml.NVMLError as error:
            if error.value in UNLOADED:
                raise
            # XIDs are not supported or not permitted. If the GPU is lost, other calls raise the
            # error.
            return False
        return True

    def read_reports(self) -> Iterator[tuple[int, int]]:
        """Yield the address of the GPU's handle and the XID, for each report since the last call.

        Raises NVMLError if the driver is unloaded.
        """
        if self._set is None:
            return
        for _ in range(_MAX_XIDS):
            try:
                event = self._nvml.nvmlEventSetWait_v2(self._set, 0)
            except self._nvml.NVMLError as error:
                if error.value in UNLOADED:
                    raise
                # There are no more reports, or a lost GPU in the event set hides them.
                return
            yield handle_address(event.device), int(event.eventData)

    def close(self) -> None:
        if self._set is not None:
            with contextlib.suppress(self._nvml.NVMLError):
                self._nvml.nvmlEventSetFree(self._set)
            self._set = None


def handle_address(handle: Any) -> int:
    """Return the address in a handle, which identifies the GPU."""
    return ctypes.cast(handle, ctypes.c_void_p).value or 0
