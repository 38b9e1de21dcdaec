"""`torchlens-perf doctor`: show which data a run in this environment can record, and remedies.

`summarize()` is the command's usual output. With `--verbose` the command prints each check. Checks
that need no torch are made first, because its import takes seconds.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import os
import platform
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator

from torchlens_perf import config
from torchlens_perf.commands.command import versions_text
from torchlens_perf.errors import ConfigError, RunStoreError
from torchlens_perf.run import directory
from torchlens_perf.run.installation import build_install_command
from torchlens_perf.run.rings import memory
from torchlens_perf.store.run_folders import default_folder

OK, LIMITED, BROKEN = "ok", "limited", "broken"
_STORED, _EXPORT = "run directories", "OpenTelemetry"
_LABELS = {"system": "system", _STORED: "stored", _EXPORT: "export"}
"""Labels of the checks whose findings are shown if they pass."""


@dataclasses.dataclass(frozen=True)
class Check:
    """One examined part of the environment, its state, and the remedy."""

    severity: str
    """OK, LIMITED (it works, with less data or at a higher cost) or BROKEN."""
    subject: str
    finding: str
    remedy: str = ""
    records: str = ""
    """Data that a run has if the severity is OK."""

    def __str__(self) -> str:
        remedy = f"; {self.remedy}" if self.remedy and self.severity != OK else ""
        return f"{self.severity:<7} {self.subject}: {self.finding}{remedy}"


def summarize(checks: Iterable[Check]) -> Iterator[str]:
    """Yield lines as checks are made: the system, each problem with its remedy, and what a run records."""
    records, results = [], Counter[str]()
    for check in checks:
        results[check.severity] += 1
        if check.severity != OK:
            yield _format_line(check.severity, f"{check.subject}: {check.finding}")
        elif check.subject in _LABELS:
            yield _format_line(_LABELS[check.subject], check.finding)
        if check.severity != OK and check.remedy:
            yield _format_line("", f"fix: {check.remedy}")
        records += [check.records] if check.records and check.severity == OK else []
    if records and not results[BROKEN]:
        yield _format_line("recorded", ", ".join(records))
    passed = f"{results[OK]} of {results.total()} checks passed"
    nothing = "" if results[OK] < results.total() else ", nothing to do"
    yield _format_line("details", f"torchlens-perf doctor --verbose ({passed}{nothing})")


def _format_line(label: str, text: str) -> str:
    return f"{label:<9} {text}"


def run_checks() -> Iterator[Check]:
    """Yield all checks in order. This imports torch and leaves no process or file behind."""
    from torchlens_perf.recorder.recorder import find_recording_obstacle

    of_collectives = (_check_tap, _check_nccl) if find_recording_obstacle() is None else ()
    checks = (
        _check_system, _check_recorder, _check_autoload, _check_settings, _check_ring_folder, _check_run_directory,
        _check_export, _check_stacks, _check_libraries, _check_nvtx_tools, _check_torch, check_telemetry,
        *of_collectives, _check_vllm,
    )  # fmt: skip
    for check in checks:
        try:
            yield from check()
        except Exception as error:
            name = check.__name__.strip("_").removeprefix("check_")
            yield Check(BROKEN, name, f"could not be examined: {type(error).__name__}: {error}")


def _check_system() -> list[Check]:
    return [
        Check(
            OK if sys.platform == "linux" else BROKEN,
            "system",
            f"{versions_text()}, {platform.system()} {platform.machine()}",
            "record on Linux",
        )
    ]


def _check_recorder() -> list[Check]:
    from torchlens_perf.recorder.recorder import find_recording_obstacle

    obstacle = find_recording_obstacle()
    if obstacle is not None:
        problem = f"torchlens_perf is off: {obstacle.problem}"
        return [Check(BROKEN, "recorder", problem, obstacle.remedy)]
    return [
        Check(OK, "recorder", "native", records="steps, phases, modules, data loading, collectives")
    ]


def _check_tap() -> Iterator[Check]:
    from torchlens_perf.commands.tap_build import find_obstacle
    from torchlens_perf.hooks.collectives import process_group_hooks
    from torchlens_perf.recorder import native_tap

    hooked = process_group_hooks.are_available()
    is_loaded = native_tap.load_tap() is not None
    finding = "native" + (", which costs less than torch's own hooks" if hooked else "")
    if not is_loaded:
        problems = "; ".join(native_tap.list_tap_problems())
        finding = (
            f"{problems or 'not compiled for this torch'}. Each collective takes {9 if hooked else 50} us"
            " longer, asynchronous ones have no end times, and FLOPs are not counted"
        )
    yield Check(
        OK if is_loaded else LIMITED,
        "tap on collectives",
        finding,
        find_obstacle() or "torchlens-perf build-tap",
        records="end of asynchronous collectives, FLOPs",
    )


def _check_nccl() -> list[Check]:
    """Return no check if torch has no NCCL of NVIDIA."""
    from torchlens_perf.hooks.collectives import nccl_plugin

    nccl, file = nccl_plugin.read_nccl_version(), nccl_plugin.find_plugin_file()
    if nccl is None:
        return []
    subject = f"kernels of NCCL {'.'.join(map(str, nccl))}"
    by_default, asked_for = (
        nccl_plugin.compute_timing_interval(nccl, asked_for=asked) for asked in (False, True)
    )
    other = None if file is None else nccl_plugin.find_other_plugin(os.environ, file)
    problems = (
        (
            nccl_plugin.load_plugin() is None,
            nccl_plugin.find_plugin_problem(),
            "reinstall with a C compiler, into a folder that only you can write",
        ),
        (asked_for == 0, "not timed", "use NCCL 2.28 to 2.30"),
        (other is not None, "another plugin was chosen", f"remove {other}"),
        (
            by_default == 0,
            "not timed with this NCCL",
            f"set TORCHLENS_PERF_NCCL=on, which times one step of {asked_for} (docs/guides/gpu.md)",
        ),
    )
    for is_found, problem, remedy in problems:
        if is_found:
            finding = f"{problem}: end times of asynchronous collectives are missing"
            return [Check(LIMITED, subject, finding, remedy)]
    finding = (
        "timed by the device in every step if communicators are created inside a watch; a thread"
        " of NCCL polls while a timed kernel runs, which takes CPU time"
    )
    return [Check(OK, subject, finding, records="NCCL kernels")]


def _check_vllm() -> list[Check]:
    """Return no check where vLLM is not installed."""
    from torchlens_perf.roles.serving import describe_vllm

    return [
        Check(
            OK if usable else LIMITED,
            "workers of vLLM",
            finding,
            "install a newer torchlens-perf",
            records="vLLM's workers",
        )
        for usable, finding in describe_vllm()
    ]


def _check_torch() -> Iterator[Check]:
    try:
        import torch
    except ImportError as error:
        yield Check(BROKEN, "torch", f"cannot be imported: {error}", "pip install torch")
        return
    from torchlens_perf.recorder import devices, torch_private

    version = torch_private.parse_torch_version(torch.__version__)
    oldest, newest = torch_private.OLDEST_TORCH, torch_private.NEWEST_TORCH
    tested = "tested with {}.{} to {}.{}".format(*oldest, *newest)
    finding = torch.__version__ + (f" ({tested})" if version > newest else "")
    yield Check(
        OK if version >= oldest else LIMITED, "torch", finding, f"install a torch that was {tested}"
    )
    names = torch_private.PRIVATE_NAMES
    missing = [entry for entry in names if not torch_private.is_usable(entry.name)]
    found = f"{len(names) - len(missing)} of {len(names)} private names that hooks use are there"
    yield Check(OK, "torch's internals", found)
    for entry in missing:
        finding = f"missing: {entry.without}"
        yield Check(LIMITED, entry.name, finding, "install a newer torchlens-perf")
    kind = devices.find_accelerator()
    yield from _check_device(kind)
    if kind == "cuda":
        yield from _check_cuda()


def _check_device(kind: str) -> Iterator[Check]:
    import torch

    from torchlens_perf.recorder.device_abilities import ABILITIES, find_ability_problem

    if not kind:
        yield Check(OK, "device", "CPU: host times are the device's times")
    for ability in ABILITIES if kind else ():
        found = find_ability_problem(ability, torch.device(kind))
        finding = f"missing ({found}): {ability.without}" if found else "works"
        yield Check(
            LIMITED if found else OK,
            f"{kind}: {ability.name}",
            finding,
            "install a newer torch for this device",
        )


def _check_cuda() -> Iterator[Check]:
    import torch

    from torchlens_perf.cuda import driver, kernels
    from torchlens_perf.recorder.devices import CONNECTIONS

    one_connection = os.environ.get(CONNECTIONS) == "1"
    how = (
        f"device times are not recorded, because {CONNECTIONS}=1"
        if one_connection
        else "phases are timed by events"
    )
    yield Check(
        LIMITED if one_connection else OK,
        "device times",
        f"{torch.cuda.get_device_name()}: {how}",
        "set TORCHLENS_PERF_DEVICE_TIMES=on; communication then does not overlap computation",
        records="device times",
    )
    severity, remedy = LIMITED, "use perf.section()"
    if torch.version.cuda is None:
        finding = "not timed in a ROCm build: the timing kernels read NVIDIA's clock"
    elif not kernels.has_cupy():
        finding = "not timed: CuPy is missing"
        remedy = f"{build_install_command('cuda13')} (CUDA 12: [cuda12])"
    else:
        driver.CudaDriver()  # If this raises, run_checks() yields a BROKEN check.
        severity, finding = OK, "CuPy compiles the kernels at their first use"
    yield Check(severity, "device sections", finding, remedy, records="device sections")


def check_telemetry() -> Iterator[Check]:
    """Yield checks of the hardware counters that the sidecar can read."""
    import torch

    from torchlens_perf.sidecar.telemetry import infiniband
    from torchlens_perf.sidecar.telemetry.gpu import query_gpu_support

    if torch.version.cuda is not None and torch.cuda.is_available():
        found = query_gpu_support()
        if isinstance(found, str):
            finding = f"none: NVML reports {found}"
        else:
            driver, gpus, with_gpm = found
            activity = f"GPM on {with_gpm} of {gpus} GPUs"
            finding = f"NVML, driver {driver}; activity of SMs and memory: {activity}"
        yield Check(
            LIMITED if isinstance(found, str) else OK,
            "GPU telemetry",
            finding,
            "install the driver's libnvidia-ml.so.1; in a container set"
            " NVIDIA_DRIVER_CAPABILITIES=compute,utility",
            records="GPU telemetry",
        )
    ports = len(infiniband.find_ports())
    yield Check(
        OK,
        "network telemetry",
        f"{ports} ports of InfiniBand or RoCE adapters"
        if ports
        else "no InfiniBand or RoCE adapter",
        records="network telemetry" if ports else "",
    )


def _check_autoload() -> Iterable[Check]:
    from torchlens_perf.autoload import AUTOLOAD_SWITCH, is_autoload_off

    if is_autoload_off(os.environ):
        finding = f"{AUTOLOAD_SWITCH}={os.environ[AUTOLOAD_SWITCH]} switches them off"
        return [
            Check(
                LIMITED,
                "TORCHLENS_PERF=1 and the torchrun flag",
                finding,
                f"unset {AUTOLOAD_SWITCH}",
            )
        ]
    return map(_check_entry_point, ("torch.backends", "torchrun.logs_specs"))


def _check_entry_point(group: str) -> Check:
    entries = importlib.metadata.entry_points(group=group)
    found = any(entry.name == "torchlens_perf" for entry in entries)
    return Check(
        OK if found else LIMITED,
        f"entry point {group}",
        "installed"
        if found
        else "not installed, so TORCHLENS_PERF=1 and the torchrun flag record nothing",
        build_install_command(),
    )


def _check_settings() -> list[Check]:
    subject = "TORCHLENS_PERF* variables"
    try:
        switch = config.is_recording_switched_on(os.environ)
        configured = config.from_environment(os.environ)
    except ConfigError as error:
        return [Check(BROKEN, subject, f"recording is off: {error}", "correct its value")]
    text = {None: "not set", True: "on", False: "off"}[switch]
    settings = [f"{name.lstrip('_')}={value!r}" for name, value in configured.items()]
    return [Check(OK, subject, ", ".join([f"TORCHLENS_PERF {text}", *settings]))]


def _check_ring_folder() -> list[Check]:
    folders = list(directory.create_local_folders(f"doctor-{os.getpid()}"))
    kinds = [memory.is_on_file_system(folder, memory.IN_MEMORY) for folder in folders]
    for folder in folders:
        folder.rmdir()
    if not folders:
        finding = f"neither /dev/shm nor {tempfile.gettempdir()} can be written"
        return [Check(BROKEN, "ring files", finding, "set TMPDIR to a folder that can be written")]
    place = folders[0].parent
    free = shutil.disk_usage(place).free
    finding = f"in {place}, {free >> 20} MB free; in anonymous memory if the space is too small"
    remedy = (
        "mount a tmpfs at /dev/shm (docker run --shm-size=1g), so that the last records survive if"
        " rank and sidecar are both killed"
    )
    if kinds[0]:
        return [Check(OK, "ring files", finding)]
    return [Check(LIMITED, "ring files", f"in anonymous memory, linked from {place}", remedy)]


def _check_run_directory() -> list[Check]:
    folder = default_folder().absolute()
    try:
        probe = directory.RunDirectory(folder / f".doctor-{os.getpid()}")
        probe.create()
        shutil.rmtree(probe.path)
        directory.remove_if_empty(folder)
    except RunStoreError as error:
        return [Check(BROKEN, _STORED, str(error), "set TORCHLENS_PERF_DIR to a writable folder")]
    return [Check(OK, _STORED, f"in {folder}")]


def _check_export() -> list[Check]:
    from torchlens_perf.exporters.delivery.endpoint_address import (
        parse_endpoint_address,
        remove_credentials,
    )
    from torchlens_perf.exporters.otlp_environment import GRPC, HTTP, read_enabled_signals

    shared = os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT", "")
    ways: dict[str, list[str]] = {}
    wrong_port = False
    for signal, how in read_enabled_signals(os.environ).items():
        endpoint = os.environ.get(f"OTEL_EXPORTER_OTLP_{signal.upper()}_ENDPOINT") or shared
        wrong_port |= how == HTTP and parse_endpoint_address(endpoint).host.endswith(":4317")
        address = remove_credentials(endpoint) or "the default endpoint"
        where = f", to {address}" if how in (HTTP, GRPC) else ""
        ways.setdefault(where, []).append(f"{signal} by {how}")
    finding = "; ".join(f"{', '.join(sent)}{where}" for where, sent in ways.items()) or (
        "off: no endpoint is configured (OTEL_EXPORTER_OTLP_ENDPOINT), so no data is sent over"
        " the network"
    )
    remedy = "set OTEL_EXPORTER_OTLP_PROTOCOL=grpc: port 4317 is usually for gRPC"
    return [Check(LIMITED if wrong_port else OK, _EXPORT, finding, remedy)]


def _check_stacks() -> list[Check]:
    """Check that a sidecar can read Python stacks, by reading the stack of this process."""
    from torchlens_perf.run import tracer
    from torchlens_perf.sidecar.host.stacks import read_main_stack

    needed = tracer.must_name_tracer()
    if needed:
        tracer.allow_tracer(os.getpid())
    stack = read_main_stack(os.getpid())
    if needed:
        tracer.allow_tracer(0)
    subject = "Python stacks"
    if stack.lines:
        return [Check(OK, subject, "py-spy can read stacks", records=subject)]
    return [Check(LIMITED, subject, f"none: {stack.reason}")]


def _check_libraries() -> Iterator[Check]:
    from torchlens_perf.roles.libraries import find_problems

    for problem in find_problems():
        yield Check(
            LIMITED, "events of libraries", problem, "if a run lacks its events, see the job's log"
        )


def _check_nvtx_tools() -> list[Check]:
    import nvtx

    attributes = nvtx.get_domain("torchlens_perf").get_event_attributes(message="doctor")
    finding = (
        "a tool is attached"
        if attributes is not None
        else "no tool is attached, so no NVTX calls are made"
    )
    return [Check(OK, "NVTX", finding)]
