"""Settings. Here, and for who the rank is in run/identity.py, the training process reads the environment."""

from __future__ import annotations

import dataclasses
import difflib
import fnmatch
import os
import re
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from torchlens_perf.errors import RAISE, ConfigError

ENVIRONMENT_PREFIX = "TORCHLENS_PERF_"
SWITCH = "TORCHLENS_PERF"
CHILD = "_TORCHLENS_PERF_CHILD"
"""Set in the environment of each process that this package starts. Such a process records nothing."""
_ON, _OFF = ("1", "true", "yes", "on"), ("", "0", "false", "no", "off")
# Variables of ours that are not settings.
_NOT_SETTINGS = {"TORCHLENS_PERF_RUN_ID", RAISE}
SIDECAR_SETTINGS = (
    "disk_bytes", "trace_every", "trace_slow", "trace_spans_per_s", "metric_series",
    "telemetry", "capture", "build_tap", "html", "total_steps",
    "exchange", "prometheus", "coordinator", "exchange_token", "exchange_tls", "exchange_tls_name",
)  # fmt: skip
"""Those that the sidecar follows: it gets them through the ring file."""

_HOST_AND_PORT = re.compile(r"([^\s:\[\]]+|\[[0-9a-fA-F:.]+\]):[0-9]{1,5}")
# No name: to look it up may take long.
_LISTENING_ADDRESS = re.compile(r"(?:(?:localhost|[0-9]{1,3}(?:\.[0-9]{1,3}){3}|\[[0-9a-fA-F:.]+\]):)?([0-9]{1,5})")

_T = TypeVar("_T")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """The settings of watch(). Each field is also an environment variable: TORCHLENS_PERF_DIR, _MODULES, ...

    Raises ConfigError, naming the field, for a value that cannot be used.
    """

    dir: str = "torchlens-perf"
    """Where run directories are made, one folder per run."""

    modules: str | int | tuple[str, ...] = "auto"
    """Which modules are timed: "auto" (two levels, at most 128), "all", "none", a number of levels, or name patterns
    like "blocks.*.attn" (a tuple; comma-separated in the environment)."""

    backward_every: int = 16
    """Backward times of modules are taken in one step of so many, and more rarely where that would cost more than 0.1 %
    of the time. 1 takes them in every step, whatever it costs; 0 never."""

    collectives: bool = True
    """Time collectives and the time blocked in them."""

    device_times: str = "auto"
    """Time phases on the device, by CUDA events: "auto", but not under CUDA_DEVICE_MAX_CONNECTIONS=1, where they would
    keep communication from overlapping with computation; "on", there too; "off"."""

    nccl: str = "off"
    """Time collectives on the device by NCCL's profiler plugin: "off"; "auto", in every step with NCCL 2.28 to 2.30;
    "on", with others from 2.27 on too, in one step of 50. NCCL then takes 33 MiB of shared memory for each process and
    communicator: where there is no room for that, nothing is timed. A plugin that somebody else has chosen stays."""

    aggregate: str = "sidecar"
    """Who merges device sections over ranks: "sidecar", without any collective; "device", together with the parts of
    the device's steps, by two all-reduces in a group of our own, once in 64 steps. For the latter all ranks must make
    the same steps: see docs/gpu.md."""

    exchange: bool = True
    """In a job of several nodes: sidecars send windows to node 0's, which judges all ranks together. Without it, each
    node's sidecar judges its own ranks."""

    coordinator: str = ""
    """In a job of several nodes: "host:port" where node 0's sidecar listens and the others find it. Without it, node 0
    takes a free port, and the others look for it in the run directory and in the job's store."""

    exchange_token: str = ""
    """A file that only this user can read, the same on all nodes: who does not know what it holds is refused by node
    0's sidecar. It matters with `coordinator`; without, the token is random and published with the address."""

    exchange_tls: str = ""
    """A folder with ca.crt, tls.crt and tls.key: sidecars of several nodes talk over TLS, and show certificates to each
    other. Without ca.crt on node 0, the others need none; then they need ca.crt alone."""

    exchange_tls_name: str = ""
    """The name in node 0's certificate; without it, the host or address that the others connect to."""

    build_tap: bool = True
    """Let the sidecar have the native tap on collectives built for the next run, where it is missing and a C++ compiler
    is there."""

    faulthandler: bool = False
    """Let the sidecar ask a hanging rank for its Python stack by SIGUSR2, where py-spy is missing or not permitted."""

    memory: bool = True
    """Record device memory, or resident memory on a CPU: there it is read once in 50 ms at most,
    on a device in one step of 16."""

    memory_history: int = 0
    """Keep the Python stack of each live block of device memory, and the last so many allocations and frees, so that
    the table of an out-of-memory error names modules and lines; each allocation takes some microseconds longer. 0: no
    stacks."""

    nvtx: bool = True
    """Push NVTX ranges when a tool listens; without one they cost nothing."""

    telemetry: bool = True
    """Let the sidecar read clocks, power, temperatures and errors of the GPUs in use by NVML, and the counters of
    InfiniBand ports. The training process only tells which GPUs it uses."""

    ring_records: int = 65536
    """Capacity of the ring file, in records of 64 bytes; rounded up to a power of two."""

    disk_bytes: int = 1 << 29
    """Most bytes of records and telemetry that a node keeps in the run directory; beyond it the oldest go, statistics
    stay."""

    sidecar: bool = True
    """Start the per-node process that reads, keeps and exports. Without it the ring files stay in the run directory
    for `torchlens-perf sidecar RUN_DIR`."""

    report: bool = True
    """Show the verdict on rank 0 when the run ends: printed on stderr, in a notebook in the cell."""

    html: bool = True
    """Let the sidecar write report.html into the run directory when the run has ended; nobody waits for it."""

    exit_timeout_s: float | None = None
    """Longest wait for the report when the run ends, in seconds. None: 1 s, but up to 10 s in a job on one node, for as
    long as the sidecar makes progress; Ctrl-C ends the wait."""

    capture: str = "ask"
    """Who may ask for a deep look at a few steps: "ask", `torchlens-perf capture` alone; "verdict", also the sidecar,
    once when a rank is named, of that one and a healthy one; "off", nobody."""

    share: str = "off"
    """Who may read a run directory: "off", this user alone, whatever the umask; "group", also the group that the file
    system gives it."""

    total_steps: int = 0
    """How many steps this watch will see, for progress and the time left in `torchlens-perf top`. 0: not known; nothing
    in a loop tells it for certain, so it is never guessed."""

    prometheus: str = ""
    """Where the sidecar answers Prometheus: a port, of the loopback interface alone, or "address:port" in digits, as
    "0.0.0.0:9464" for other machines; port 0 takes a free one. "": nowhere. Whoever reaches the port may read it."""

    trace_every: int = 100
    """Spans of one step of so many are exported over OTLP, besides the first steps; 0 exports none."""

    trace_slow: bool = True
    """Spans of steps that are slow beside those before them, and of those in which a rank is named, are exported,
    too."""

    trace_spans_per_s: int = 200
    """Most spans a second that the whole job exports, as a mean over a minute. Where a step of all ranks does not fit,
    those ranks are sent that explain it; what is left out is counted. 0: no limit."""

    metric_series: int = 2000
    """Most metric series that the whole job exports, all nodes together. Where there is no room for series of each
    rank, there is one description of the job, and ranks that stand out have series of their own."""

    def __post_init__(self) -> None:
        self._check("dir", isinstance(self.dir, str) and _is_path(self.dir), "a folder's name")
        for field in dataclasses.fields(self):
            if field.type == "bool":
                self._check(field.name, isinstance(getattr(self, field.name), bool), "True or False")
        for name in ("coordinator", "exchange_token", "exchange_tls", "exchange_tls_name"):
            self._check(name, isinstance(getattr(self, name), str), "text")
        for name in ("exchange_token", "exchange_tls"):  # the sidecar has another working directory
            path = getattr(self, name)
            self._check(name, not path or (_is_path(path) and os.path.isabs(path)), "a full path")
        good = not self.coordinator or _HOST_AND_PORT.fullmatch(self.coordinator) is not None
        self._check("coordinator", good, '"host:port" or "[address]:port"')
        good = isinstance(self.prometheus, str) and (not self.prometheus or _is_listening_address(self.prometheus))
        self._check("prometheus", good, 'a port, "address:port" or "[address]:port", with the address in digits')
        self._check("aggregate", self.aggregate in ("sidecar", "device"), '"sidecar" or "device"')
        self._check("device_times", self.device_times in ("auto", "on", "off"), '"auto", "on" or "off"')
        self._check("capture", self.capture in ("ask", "verdict", "off"), '"ask", "verdict" or "off"')
        self._check("share", self.share in ("off", "group"), '"off" or "group"')
        self._check("nccl", self.nccl in ("auto", "on", "off"), '"auto", "on" or "off"')
        self._check_number("backward_every", int, least=0)
        self._check_number("trace_every", int, least=0)
        self._check_number("trace_spans_per_s", int, least=0)
        self._check_number("metric_series", int, least=100)
        self._check_number("total_steps", int, least=0)
        self._check_number("memory_history", int, least=0, most=100_000)
        self._check_number("ring_records", int, least=1024, most=1 << 24)
        self._check_number("disk_bytes", int, least=1 << 20)
        if self.exit_timeout_s is not None:
            self._check_number("exit_timeout_s", float, least=0, most=60)
        self._check_modules()

    def _check(self, field: str, good: bool, wanted: str) -> None:
        if not good:
            raise ConfigError(f"{field}={getattr(self, field)!r}: must be {wanted}")

    def _check_number(self, field: str, kind: type, *, least: float, most: float | None = None) -> None:
        value = getattr(self, field)
        whole = kind is int
        good = isinstance(value, (int,) if whole else (int, float)) and not isinstance(value, bool)
        # `not (a <= b)` and not `a > b`: NaN is refused too.
        good = good and least <= value and (most is None or value <= most)
        limits = f"at least {least}" if most is None else f"from {least} to {most}"
        self._check(field, good, f"a {'whole ' if whole else ''}number, {limits}")

    def _check_modules(self) -> None:
        value = self.modules
        wanted = '"auto", "all", "none", a number of levels (at least 1), or a tuple of name patterns'
        if isinstance(value, list):
            object.__setattr__(self, "modules", tuple(value))
            value = self.modules
        if isinstance(value, tuple):
            self._check("modules", bool(value) and all(isinstance(p, str) and p for p in value), wanted)
        elif isinstance(value, str):
            self._check("modules", value in ("auto", "all", "none"), wanted)
        else:
            self._check("modules", isinstance(value, int) and not isinstance(value, bool) and value >= 1, wanted)

    @property
    def is_shared(self) -> bool:
        """Whether the group may read the run directory."""
        return self.share == "group"

    @property
    def ring_capacity(self) -> int:
        """ring_records as a power of two."""
        return 1 << (self.ring_records - 1).bit_length()

    def wants_module(self, name: str) -> bool:
        """Whether a name pattern chose this module; for the other forms of `modules`, False."""
        return isinstance(self.modules, tuple) and any(fnmatch.fnmatchcase(name, p) for p in self.modules)


def _is_listening_address(text: str) -> bool:
    found = _LISTENING_ADDRESS.fullmatch(text)
    return found is not None and int(found[1]) < 1 << 16


def _is_path(text: str) -> bool:
    try:
        return bool(text) and b"\0" not in os.fsencode(text)
    except UnicodeEncodeError:
        return False


def _flag(text: str) -> bool:
    if text.strip().lower() in _ON:
        return True
    if text.strip().lower() in _OFF:
        return False
    raise ValueError("must be 1 or 0")


def _modules(text: str) -> str | int | tuple[str, ...]:
    text = text.strip()
    if text in ("auto", "all", "none"):
        return text
    if text.lstrip("-").isdigit():
        return int(text)
    return tuple(part.strip() for part in text.split(","))


_PARSERS: dict[str, Callable[[str], Any]] = {"str": str, "int": int, "float | None": float, "bool": _flag}


def is_on(environ: Mapping[str, str]) -> bool | None:
    """Return whether TORCHLENS_PERF is on or off; None if it is not set. Raises ConfigError for another value.

    It is off in the processes that this package starts.
    """
    if CHILD in environ:
        return False
    text = environ.get(SWITCH)
    if text is None:
        return None
    try:
        return _flag(text)
    except ValueError as error:
        raise ConfigError(f"{SWITCH}={text!r}: {error}") from None


def from_environment(environ: Mapping[str, str]) -> dict[str, Any]:
    """The settings in TORCHLENS_PERF_* variables. Raises ConfigError for one that is unknown or cannot be read."""
    fields = {ENVIRONMENT_PREFIX + field.name.upper(): field for field in dataclasses.fields(Config)}
    settings = {}
    for variable, text in environ.items():
        if not variable.startswith(ENVIRONMENT_PREFIX) or variable in _NOT_SETTINGS:
            continue
        field = fields.get(variable)
        if field is None:
            raise ConfigError(f"{variable} is not a setting{_closest(variable, fields)}")
        try:
            value: Any = _modules(text) if field.name == "modules" else _PARSERS[str(field.type)](text)
            Config(**{field.name: value})
        except ConfigError as error:
            raise ConfigError(f"{variable}: {error}") from None
        except ValueError:
            raise ConfigError(f"{variable}={text!r}: cannot be read as {field.name}") from None
        settings[field.name] = value
    return settings


def from_settings(settings: Mapping[str, Any], environment: Mapping[str, Any]) -> Config:
    """The configuration of a watch(): its keywords, then the settings of the environment, then the defaults.

    Raises ConfigError for an unknown keyword or a value that cannot be used.
    """
    known = {field.name for field in dataclasses.fields(Config)}
    for name in settings:
        if name not in known:
            raise ConfigError(f"{name} is not a setting of watch(){_closest(name, known)}")
    return Config(**{**environment, **settings})


def _closest(name: str, known: Mapping[str, Any] | set[str]) -> str:
    matches = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {matches[0]}?" if matches else f" (known: {', '.join(sorted(known))})"
