"""Sample clocks, power, temperatures, throttling, errors and activity of GPUs through NVML.

NVML needs no CUDA context. A call usually takes microseconds, but a GPU that falls off the bus can
block a call for seconds. The sampler therefore measures the duration of each sample, and samples a
slow GPU less often.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from typing import Any

from torchlens_perf.analysis.statistics.hardware import GpuProperties
from torchlens_perf.run.hardware_samples import GPUS, Sample, build_sample
from torchlens_perf.run.processes import clock_without_cpu_wait_ns
from torchlens_perf.sidecar.telemetry.nvml import (
    GETTERS,
    GONE,
    MAX_CLOCK,
    NEVER,
    SLOW_FIELDS,
    UNLOADED,
    FieldReader,
    GetterCaller,
    GpmReader,
    ProcessUseReader,
    XidReader,
    find_nvlink_fields,
    handle_address,
    select_fast_fields,
)

_SECOND_NS = 1_000_000_000
_SLOW_FIELDS_NS = 10 * _SECOND_NS
_GPM_AGAIN_NS = 60 * _SECOND_NS
_LONGEST_WAIT_NS = 60 * _SECOND_NS
# A sample should not take longer, because the same thread reads the rings.
_SLOW_SAMPLE_NS = 50_000_000
_MIN_IDLE_RATIO = 20
_SLOW_SAMPLES_BEFORE_NOTE = 3
_GPU, _MIG = "GPU-", "MIG-"


class GpuTelemetry:
    """Sampler of the GPUs that the ranks use. Loads NVML at the first sample. Not thread-safe."""

    def __init__(self, clock_ns: Callable[[], int] = clock_without_cpu_wait_ns) -> None:
        """clock_ns: a clock for the duration of calls.

        The default clock excludes time without a CPU, because a busy machine is not a slow driver.
        """
        self._clock_ns = clock_ns
        self._nvml: Any = None  # pynvml while NVML is initialised
        self._driver = ""  # version
        self._pids: Collection[int] = ()
        self._xids: XidReader | None = None
        self._gpus: dict[str, _OpenGpu] = {}
        self._before: dict[str, Sample] = {}
        self._xid_counts: Counter[str] = Counter()
        self._last_xids: dict[str, int] = {}
        self._library_backoff = _RetryDelay()
        self._backoffs: dict[str, _RetryDelay] = {}
        self.facts: dict[str, GpuProperties] = {}
        """Facts about each sampled GPU, by UUID."""
        self.losses: Counter[str] = Counter()
        """Number of times that the driver lost a GPU, by UUID.

        The key "" counts reloads of the driver.
        """
        self.slow_samples: Counter[str] = Counter()
        """Number of samples that took longer than 50 ms, by UUID."""
        self.notes: list[str] = []
        """Reasons why values are not measured, without duplicates."""

    def sample_gpus(
        self, uuids: Collection[str], monotonic_ns: int, unix_ns: int, pids: Collection[int] = ()
    ) -> dict[str, Sample]:
        """Return samples of these GPUs, without lost GPUs and GPUs that are paused after a failure.

        monotonic_ns, unix_ns: the current time on both clocks. pids: processes of the job's ranks.
        """
        self._pids = pids
        unused = self._gpus.keys() - set(uuids)
        for uuid in unused:
            self._gpus.pop(uuid).close()
        if not uuids or not self._init_nvml(monotonic_ns):
            return {}
        samples: dict[str, Sample] = {}
        try:
            # Remove unused GPUs from the event set.
            if unused:
                self._recreate_event_set()
            # Read XIDs before sampling, because the XID of a lost GPU cannot be read later.
            self._read_xids()
            for uuid in uuids:
                if monotonic_ns >= self._backoffs.setdefault(uuid, _RetryDelay()).until_ns:
                    sample = self._sample_gpu(uuid, monotonic_ns, unix_ns)
                    if sample is not None:
                        samples[uuid] = self._before[uuid] = sample
            self._library_backoff.reset()
        except self._nvml.NVMLError as error:
            self._discard_handles(error, monotonic_ns)
        return samples

    def _sample_gpu(self, uuid: str, monotonic_ns: int, unix_ns: int) -> Sample | None:
        """Return a sample, or None for a lost GPU. Raises NVMLError for an unloaded driver."""
        nvml, backoff = self._nvml, self._backoffs[uuid]
        begun_ns = self._clock_ns()
        try:
            gpu = self._gpus.get(uuid)
            opened = gpu is not None
            if gpu is None:
                gpu = self._gpus[uuid] = _OpenGpu(nvml, uuid, self._driver, self._add_note)
                self.facts[uuid] = gpu.facts
                gpu.reports_xids = self._xids is not None and self._xids.register_gpu(gpu.handle)
            known = {
                "xids": self._xid_counts[uuid] if gpu.reports_xids else None,
                "last_xid": self._last_xids.get(uuid),
                **gpu.users.read(self._pids),
            }
            sample = gpu.read_sample(self._before.get(uuid), monotonic_ns, unix_ns, known)
            backoff.reset()
        except nvml.NVMLError as error:
            if error.value in UNLOADED:
                raise
            self._close_lost_gpu(uuid, error)
            backoff.extend(monotonic_ns)
            sample = None
        took_ns = self._clock_ns() - begun_ns
        # The first sample also opens the GPU. Opening may take long, so the first sample never
        # counts as slow.
        if opened and took_ns > _SLOW_SAMPLE_NS:
            backoff.until_ns = max(backoff.until_ns, monotonic_ns + _MIN_IDLE_RATIO * took_ns)
            self.slow_samples[uuid] += 1
            if self.slow_samples[uuid] == _SLOW_SAMPLES_BEFORE_NOTE:
                self._add_note(
                    f"{uuid}: its driver takes {took_ns / 1e9:.2g} s to answer; it is sampled less"
                    " often"
                )
        return sample

    def _read_xids(self) -> None:
        by_address = {handle_address(gpu.handle): uuid for uuid, gpu in self._gpus.items()}
        for where, xid in self._xids.read_reports() if self._xids is not None else ():
            if where in by_address:
                self._xid_counts[by_address[where]] += 1
                self._last_xids[by_address[where]] = xid

    def _recreate_event_set(self) -> None:
        """Replace the event set. A set that contains a lost GPU reports no XIDs of other GPUs."""
        if self._xids is not None:
            self._xids.close()
        self._xids = XidReader(self._nvml)
        for gpu in self._gpus.values():
            gpu.reports_xids = self._xids.register_gpu(gpu.handle)

    def _init_nvml(self, now_ns: int) -> bool:
        """Initialise NVML, if the retry delay is over. Return True if it is initialised."""
        if self._nvml is not None:
            return True
        if now_ns < self._library_backoff.until_ns:
            return False
        import pynvml

        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError as error:
            self._library_backoff.extend(now_ns)
            remedy = (
                "; in a container, set NVIDIA_DRIVER_CAPABILITIES to compute,utility"
                if error.value == pynvml.NVML_ERROR_LIBRARY_NOT_FOUND
                else ""
            )
            self._add_note(f"GPU telemetry is not measured: {error}{remedy}")
            return False
        self._nvml, self._xids = pynvml, XidReader(pynvml)
        self._driver = ""
        with contextlib.suppress(pynvml.NVMLError):
            self._driver = _decode_text(pynvml.nvmlSystemGetDriverVersion())
        return True

    def _close_lost_gpu(self, uuid: str, error: Exception) -> None:
        gpu = self._gpus.pop(uuid, None)
        if gpu is None:
            if uuid not in self.losses:  # A note already reports a lost GPU.
                self._add_note(f"{uuid}: no telemetry because NVML cannot open it: {error}")
            return
        self.losses[uuid] += 1
        gpu.close()
        self._recreate_event_set()
        xid = (
            f"its last XID is {self._last_xids[uuid]}" if uuid in self._last_xids else "for its XID"
        )
        self._add_note(
            f"{uuid}: no telemetry while the driver reports: {error}; see the kernel's log (dmesg),"
            f" {xid}"
        )

    def _discard_handles(self, error: Exception, now_ns: int) -> None:
        """Close NVML. All handles became invalid when the driver was unloaded or replaced."""
        self.losses[""] += 1
        self._add_note(f"GPU telemetry was interrupted because the driver was reloaded: {error}")
        self.close()
        self._library_backoff.extend(now_ns)

    def _add_note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    def close(self) -> None:
        """Free all handles and shut down NVML. The next sample would initialise it again."""
        if self._nvml is None:
            return
        for gpu in self._gpus.values():
            gpu.close()
        self._gpus.clear()
        if self._xids is not None:
            self._xids.close()
        with contextlib.suppress(self._nvml.NVMLError):
            self._nvml.nvmlShutdown()
        self._nvml = self._xids = None


def query_gpu_support() -> tuple[str, int, int] | str:
    """Return driver version, number of GPUs and number of GPUs with GPM, or NVML's error."""
    import pynvml as nvml

    try:
        nvml.nvmlInit()
        try:
            handles = [
                nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())
            ]
            return (
                _decode_text(nvml.nvmlSystemGetDriverVersion()),
                len(handles),
                sum(_supports_gpm(nvml, h) for h in handles),
            )
        finally:
            nvml.nvmlShutdown()
    except nvml.NVMLError as error:
        return str(error)


def _supports_gpm(nvml: Any, handle: Any) -> bool:
    try:
        return bool(nvml.nvmlGpmQueryDeviceSupport(handle).isSupportedDevice)
    except nvml.NVMLError:
        return False


class _OpenGpu:
    """The open handle of one GPU. It is valid until the driver loses the GPU."""

    def __init__(self, nvml: Any, uuid: str, driver: str, note: Callable[[str], None]) -> None:
        """Raises NVMLError if NVML does not find the GPU."""
        self._nvml = nvml
        self._uuid = uuid
        self._note = note
        self.handle = _find_handle(nvml, uuid)
        self._getters = GetterCaller(nvml, self.handle)
        self.users = ProcessUseReader(self._getters)
        self._fast = FieldReader(self._getters, select_fast_fields(driver))
        self._slow = [
            FieldReader(self._getters, SLOW_FIELDS),
            find_nvlink_fields(self._getters),
        ]
        self._slow_values: dict[str, float] = {}
        self._slow_due_ns = self._gpm_due_ns = 0
        self._gpm: GpmReader | None = None
        self.reports_xids = False
        pci = self._getters.call("PciInfo")
        self.facts = GpuProperties(
            self._getters.call("Name"), _decode_text(pci.busId) if pci is not None else None
        )
        self._fixed = self._getters.read([MAX_CLOCK], {})

    def read_sample(
        self,
        before: Sample | None,
        monotonic_ns: int,
        unix_ns: int,
        known: Mapping[str, Any],
    ) -> Sample:
        """Return a sample with all readable values, and with the known ones.

        Values of slow fields are at most ten seconds old.

        Raises NVMLError if the GPU is lost.
        """
        values: dict[str, Any] = {
            **self._fixed,
            **self._read_slow_fields(monotonic_ns),
            **self._fast.read(),
            **self._read_activity(monotonic_ns),
        }
        values |= self._getters.read(GETTERS, values)
        memory = self._getters.call("MemoryInfo", self._nvml.nvmlMemory_v2)
        if memory is not None:
            values.update(memory_used_bytes=memory.used, memory_total_bytes=memory.total)
        values |= known
        flags = {"remapping_pending", "remapping_failed"} & values.keys()
        values |= {name: bool(values[name]) for name in flags}
        values["uuid"] = self._uuid
        return build_sample(GPUS, self._uuid, monotonic_ns, unix_ns, values, before)

    def _read_slow_fields(self, now_ns: int) -> dict[str, float]:
        if now_ns >= self._slow_due_ns:
            self._slow_due_ns = now_ns + _SLOW_FIELDS_NS
            for fields in self._slow:
                self._slow_values.update(fields.read())
        return self._slow_values

    def _read_activity(self, now_ns: int) -> dict[str, float]:
        """Return the GPU's activity from GPM, or {} if GPM is missing or reserved."""
        try:
            if self._gpm is not None:
                return self._gpm.read()
            if now_ns >= self._gpm_due_ns:
                self._gpm_due_ns = now_ns + _GPM_AGAIN_NS
                self._gpm = GpmReader(self._nvml, self.handle)
        except self._nvml.NVMLError as error:
            if error.value in GONE:
                raise
            if error.value in NEVER:
                self._gpm_due_ns = 1 << 62
            # Add a note about a missing permission, but not about an unsupported function.
            if error.value not in NEVER or error.value == self._nvml.NVML_ERROR_NO_PERMISSION:
                self._note(
                    f"{self._uuid}: activity of SMs, tensor cores and memory is not measured: GPM"
                    f" reports {error}"
                )
            self.close()
        return {}

    def close(self) -> None:
        """Free the GPM samples that NVML has allocated for this GPU."""
        if self._gpm is not None:
            self._gpm.close()
            self._gpm = None


class _RetryDelay:
    """Delay after a failure: one second at first, doubled by each failure up to a minute."""

    def __init__(self) -> None:
        self.until_ns = 0
        self._next_ns = _SECOND_NS

    def extend(self, now_ns: int) -> None:
        self.until_ns = now_ns + self._next_ns
        self._next_ns = min(_LONGEST_WAIT_NS, 2 * self._next_ns)

    def reset(self) -> None:
        self._next_ns = _SECOND_NS


def _find_handle(nvml: Any, uuid: str) -> Any:
    """Return the handle of a GPU or MIG instance. torch gives both UUIDs that begin with "GPU-"."""
    try:
        return nvml.nvmlDeviceGetHandleByUUID(uuid)
    except nvml.NVMLError as error:
        if error.value != nvml.NVML_ERROR_NOT_FOUND or not uuid.startswith(_GPU):
            raise
        return nvml.nvmlDeviceGetHandleByUUID(_MIG + uuid.removeprefix(_GPU))


def _decode_text(value: bytes | str) -> str:
    return value.decode() if isinstance(value, bytes) else value
