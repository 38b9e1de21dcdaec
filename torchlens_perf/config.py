"""Settings of watch(): keywords, variables of the environment, and their checks."""

from __future__ import annotations

import dataclasses
import difflib
import fnmatch
import functools
import os
import re
from collections.abc import Callable, Iterable, Mapping
from typing import (
    Any,
    Literal,
    NamedTuple,
    TypedDict,
    TypeVar,
    get_args,
    get_origin,
    get_type_hints,
)

from torchlens_perf.errors import RAISE, ConfigError, require
from torchlens_perf.interruption import ours

ENVIRONMENT_PREFIX = "TORCHLENS_PERF_"
SWITCH = "TORCHLENS_PERF"
CHILD = "_TORCHLENS_PERF_CHILD"
"""Set in the environment of each process that this package starts. Such a process records
nothing.
"""
EXCHANGE_TOKEN = "TORCHLENS_PERF_EXCHANGE_TOKEN"
"""The token for nodes that join an exchange. The sidecar receives it in this variable, never
in a file.
"""
_ON, OFF = ("1", "true", "yes", "on"), ("", "0", "false", "no", "off")
# Variables of this package that are not settings.
_NOT_SETTINGS = {"TORCHLENS_PERF_RUN_ID", "TORCHLENS_PERF_ROLE", RAISE}

# Patterns are compiled when they are used, which few programs do.
_MASKED = r"(?<=\btoken=)[^&#'\"]*|(?<=://)[^/?#@'\"]*(?=@)"
"""Secret parts of a URL, which messages hide."""
_HOST_AND_PORT = r"([^\s:@\[\]]+|\[[0-9a-fA-F:.]+\]):[0-9]{1,5}"
# Host names are refused as listening addresses, because name resolution may take long.
_LISTENING_ADDRESS = (
    r"(?:(?:localhost|[0-9]{1,3}(?:\.[0-9]{1,3}){3}|\[[0-9a-fA-F:.]+\]):)?([0-9]{1,5})"
)

_T = TypeVar("_T")


class Settings(TypedDict, total=False):
    """The keywords of watch(), for type checkers and editors. Config documents them."""

    dir: str | os.PathLike[str]
    modules: Literal["auto", "all", "none"] | int | tuple[str, ...] | list[str]
    budget: float
    backward_every: int
    collectives: bool
    device_times: Literal["auto", "on", "off"]
    nccl: Literal["auto", "on", "off"]
    aggregate: Literal["sidecar", "device"]
    exchange: Literal["auto", "off"] | str
    memory: Literal["usage", "history", "off"]
    nvtx: bool
    telemetry: bool
    ring_records: int
    disk_bytes: int
    sidecar: bool
    report: Literal["page", "quiet", "text", "off"]
    capture: Literal["ask", "verdict", "off"]
    share: Literal["off", "group"]
    prometheus: str
    trace_every: int
    export_limit: int


class WatchSettings(Settings, total=False):
    """Settings, or a Config with settings."""

    config: Config | None


class Secret(str):
    """Text that repr() hides."""

    def __repr__(self) -> str:
        return "'***'"


class ExchangeUrl(NamedTuple):
    """The parts of grpc://HOST:PORT?token_file=FILE and
    grpcs://HOST:PORT?certs=FOLDER&name=NAME.
    """

    address: str
    """HOST:PORT; "" where node 0 takes a free port and publishes it."""
    token: str = ""
    token_file: str = ""
    certs: str = ""
    name: str = ""

    @classmethod
    def parse(cls, text: str) -> ExchangeUrl:
        """Parse a URL. Raise a ValueError that describes the expected form."""
        from urllib.parse import parse_qsl, urlsplit

        try:
            url = urlsplit(text)
        except ours(ValueError):
            # Raise without the original error, because its message could contain the token.
            raise ValueError("a URL with host:port or [address]:port") from None
        require(
            url.scheme in ("grpc", "grpcs") and url.path in ("", "/") and not url.fragment,
            '"auto", "off", or a URL such as grpc://HOST:PORT or grpcs://HOST:PORT?certs=FOLDER',
        )
        has_place = re.fullmatch(_HOST_AND_PORT, url.netloc) is not None
        require(
            has_place or (not url.netloc and url.scheme == "grpcs"),
            "a URL with host:port or [address]:port",
        )
        query = parse_qsl(url.query, keep_blank_values=True)
        require(
            len(dict(query)) == len(query) and {name for name, _ in query} <= {*cls._fields[1:]},
            "a URL with token, token_file, certs and name only, each at most once",
        )
        found = cls(url.netloc, **dict(query))
        require(
            bool(found.certs) == (url.scheme == "grpcs"),
            "a URL with certs=FOLDER if it begins with grpcs://, and only then",
        )
        # The sidecar runs in another working directory.
        paths = filter(None, (found.token_file, found.certs))
        require(
            all(os.path.isabs(path) and _is_path(path) for path in paths),
            "a URL in which token_file and certs are full paths",
        )
        return found

    def without_token(self) -> str:
        """Return the URL, without the token itself."""
        from urllib.parse import urlencode

        given = {
            name: value
            for name, value in self._asdict().items()
            if value and name not in ("address", "token")
        }
        query = urlencode(given, safe="/")
        return f"grpc{'s' * bool(self.certs)}://{self.address}{'?' * bool(query)}{query}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Settings of watch(). Each field is also an environment variable: TORCHLENS_PERF_DIR,
    _MODULES, ...

    Raise ConfigError, which names the field, for an invalid value.
    """

    dir: str | os.PathLike[str] = "torchlens-perf"
    """Folder in which each run creates its run directory."""

    modules: Literal["auto", "all", "none"] | int | tuple[str, ...] | list[str] = "auto"
    """Modules to time: "auto" (two levels, at most 128), "all", "none", a number of levels, or name patterns
    like "blocks.*.attn" (a tuple or list; comma-separated in the environment)."""

    budget: float = 0.005
    """Largest share of the step time that recording may take in the training process. Above it, modules inside of a
    model are timed in fewer steps, on all ranks in the same ones. If the rest still exceeds it, phases are timed on a
    device in one step of 2 to 64. Everything else is always recorded, and may exceed the budget in steps of a few
    milliseconds. 0: no limit, and everything is timed in every step."""

    backward_every: int = 16
    """Time the backward pass of modules in one step of this many, and less often if it would cost more than a fifth
    of the budget. 1 times every step at any cost; 0 none."""

    collectives: bool = True
    """Time collectives, and how long each rank is blocked in them."""

    device_times: Literal["auto", "on", "off"] = "auto"
    """Time phases on the device with CUDA events. "auto" does not with CUDA_DEVICE_MAX_CONNECTIONS=1, where events
    would keep communication from overlapping with computation; "on" always does; "off" never."""

    nccl: Literal["auto", "on", "off"] = "off"
    """Time collectives on the device with NCCL's profiler plugin. "off" does not; "auto" does in every step with NCCL
    2.28 to 2.30; "on" also does in one step of 50 with later versions. NCCL then needs 33 MiB of shared
    memory per process and communicator; without that, nothing is timed. A plugin that the job has chosen is kept."""

    aggregate: Literal["sidecar", "device"] = "sidecar"
    """Where device sections are merged over ranks: "sidecar", without collectives; "device", with two all-reduces in a
    process group of its own, once in 64 steps. For "device", all ranks must make the same steps: see
    docs/explanation/device-time.md."""

    exchange: Literal["auto", "off"] | str = "auto"
    """How the sidecars of several nodes connect. "auto": node 0 listens on a free port, which other nodes find in the
    run directory or the job's store. "off": each node judges its own ranks only. A URL such as "grpc://HOST:PORT": node
    0 listens there.

    Parameters of the URL: token_file=FILE with a token that other nodes must present; certs=FOLDER, with grpcs://, for
    TLS with ca.crt, tls.crt and tls.key; name=NAME, the name in node 0's certificate. "grpcs://?certs=FOLDER" is "auto"
    with TLS. The token may also be given as token=TOKEN or in the variable TORCHLENS_PERF_EXCHANGE_TOKEN."""

    memory: Literal["usage", "history", "off"] = "usage"
    """Record device memory in one step of 16, or a CPU process's resident memory a few times a second. "history" also
    keeps the Python stack of each live block of device memory and the last 20,000 allocations. The report on an
    out-of-memory error then names modules and lines, and each allocation takes some microseconds longer."""

    nvtx: bool = True
    """Push NVTX ranges while a tool such as Nsight Systems is attached. Without one
    they cost nothing.
    """

    telemetry: bool = True
    """Read CPU time, memory, disk and network of the ranks' processes, clocks, power, temperatures and errors of the
    GPUs in use by NVML, and the counters of InfiniBand ports. The sidecar does that; the training process only names
    its GPUs."""

    ring_records: int = 65536
    """Capacity of the ring file, in records of 64 bytes, rounded up to a power of two."""

    disk_bytes: int = 1 << 29
    """Limit of the records and telemetry of one node in the run directory, in bytes. Beyond it the oldest are removed.
    Statistics stay."""

    sidecar: bool = True
    """Start one sidecar process per node, which reads, stores and exports the records. Without it, ring files stay in
    the run directory until `torchlens-perf sidecar RUN_DIR` reads them."""

    report: Literal["page", "quiet", "text", "off"] = "page"
    """Output of rank 0 at the end of the run: "page" prints the report (on stderr, or in a notebook cell) and writes
    report.html into the run directory; "quiet" only writes the page; "text" only prints; "off" does neither."""

    capture: Literal["ask", "verdict", "off"] = "ask"
    """What may start a capture of a few steps: "ask", only `torchlens-perf capture`; "verdict", also the first slow
    rank, which is captured together with a healthy one; "off", nothing."""

    share: Literal["off", "group"] = "off"
    """Who may read the run directory: "off", only this user, whatever the umask; "group", also the group of the
    folder."""

    prometheus: str = ""
    """Address of the Prometheus endpoint /metrics: a port on the loopback interface, or "address:port" in digits, such
    as "0.0.0.0:9464" for other machines. Port 0 chooses a free one; "" opens none. All who reach the port can read."""

    trace_every: int = 100
    """Export the spans of one step of this many over OTLP, and also those of the first steps, of slow steps, and of
    steps in which a rank becomes slow. 0 exports none."""

    export_limit: int = 2000
    """Limit of metric series that all nodes of the job export together. Ten spans per second are allowed for each 100.
    Beyond the limit, series of the whole job and of slow ranks are exported, and the others are counted. 0: no
    limit."""

    # Fields below are only for callbacks of frameworks, tests and environment variables. Variables
    # have these names without the underscore.
    _exchange_token: str = ""
    _faulthandler: bool = False
    """Let a rank print its stack on SIGUSR2 with faulthandler, where py-spy is not permitted."""
    _exit_timeout_s: float | None = None
    """Longest wait for the report when the run ends, in seconds. None: 1 s, and on one node up to 10 s while the
    sidecar makes progress. Ctrl-C ends the wait."""
    _trace_slow: bool = True
    """Also export the spans of slow steps and of steps in which a rank becomes slow."""
    _total_steps: int = 0
    """Total steps of the run, for the time left in `torchlens-perf top`. 0: unknown."""

    def __post_init__(self) -> None:
        is_folder = isinstance(self.dir, (str, os.PathLike)) and _is_path(self.dir)
        self._check("dir", is_folder, "a folder's name")
        object.__setattr__(self, "dir", os.fspath(self.dir))
        for name, kind in _field_types().items():
            value = getattr(self, name)
            if kind is bool:
                self._check(name, isinstance(value, bool), "True or False")
            elif get_origin(kind) is Literal:
                choices = get_args(kind)
                is_choice = isinstance(value, str) and value in choices
                self._check(name, is_choice, _choices_text(choices))
        self._check(
            "prometheus",
            self.prometheus == "" or _is_listening_address(self.prometheus),
            'a port, "address:port" or "[address]:port", with the address in digits',
        )
        for name, limits in _LIMITS.items():
            self._check_number(name, *limits)
        if self._exit_timeout_s is not None:
            self._check_number("_exit_timeout_s", float, 0, 60)
        self._check("export_limit", not 0 < self.export_limit < 100, "0, or at least 100")
        if isinstance(self.modules, list):
            object.__setattr__(self, "modules", tuple(self.modules))
        self._check(
            "modules",
            _selects_modules(self.modules),
            '"auto", "all", "none", a number of levels (at least 1), or a tuple of name patterns',
        )
        self._check_exchange()

    def _check(self, field: str, good: bool, wanted: str) -> None:
        if not good:
            value = re.sub(_MASKED, "***", repr(getattr(self, field)))
            raise ConfigError(f"{field.lstrip('_')}={value}: must be {wanted}")

    def _check_number(self, field: str, kind: type, least: int, most: int | None) -> None:
        value = getattr(self, field)
        is_number = isinstance(value, (int, kind)) and not isinstance(value, bool)
        # `a <= b` instead of `not a > b`, which would accept NaN.
        good = is_number and least <= value and (most is None or value <= most)
        limits = f"at least {least}" if most is None else f"from {least} to {most}"
        self._check(field, good, f"a {'whole ' if kind is int else ''}number, {limits}")

    def _check_exchange(self) -> None:
        """Remove the token from the URL, which may be written and shown."""
        token = self._exchange_token
        if self.exchange not in ("auto", "off"):
            try:
                url = ExchangeUrl.parse(self.exchange if isinstance(self.exchange, str) else "")
            except ours(ValueError) as error:
                self._check("exchange", False, str(error))
            token = url.token or token
            object.__setattr__(self, "exchange", url.without_token())
        object.__setattr__(self, "_exchange_token", Secret(token))
        self._check(
            "_exchange_token",
            not token.startswith("/") and token.isprintable(),
            "the token itself; name a file by token_file=FILE in the URL of `exchange`",
        )

    @property
    def prints_report(self) -> bool:
        """True if rank 0 shows the report when the run ends."""
        return self.report in ("page", "text")

    @property
    def writes_page(self) -> bool:
        """True if the sidecar writes report.html when the run has ended."""
        return self.report in ("page", "quiet")

    @property
    def is_shared(self) -> bool:
        """True if the group may read the run directory."""
        return self.share == "group"

    @property
    def ring_capacity(self) -> int:
        """Capacity of the ring file in records, a power of two."""
        return 1 << (self.ring_records - 1).bit_length()

    def matches_module_pattern(self, name: str) -> bool:
        """Return True if a name pattern matches this module.

        Only a tuple of patterns in `modules` matches any module.
        """
        return isinstance(self.modules, tuple) and any(
            fnmatch.fnmatchcase(name, p) for p in self.modules
        )


_LIMITS: dict[str, tuple[type, int, int | None]] = {
    "budget": (float, 0, 1),
    "backward_every": (int, 0, None),
    "trace_every": (int, 0, None),
    "export_limit": (int, 0, None),
    "_total_steps": (int, 0, None),
    "ring_records": (int, 1024, 1 << 24),
    "disk_bytes": (int, 1 << 20, None),
}
"""Type, least and largest value of the fields that are numbers."""


def _is_listening_address(text: object) -> bool:
    found = re.fullmatch(_LISTENING_ADDRESS, text) if isinstance(text, str) else None
    return found is not None and int(found[1]) < 1 << 16


def _selects_modules(value: object) -> bool:
    if isinstance(value, tuple):
        return bool(value) and all(isinstance(each, str) and each for each in value)
    if isinstance(value, str):
        return value in ("auto", "all", "none")
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _is_path(text: str | os.PathLike[str]) -> bool:
    try:
        return bool(text) and b"\0" not in os.fsencode(text)
    except UnicodeEncodeError:
        return False


@functools.cache
def _field_types() -> dict[str, Any]:
    """Return the types of Config's fields by name."""
    return get_type_hints(Config)


def _choices_text(choices: tuple[str, ...]) -> str:
    *others, last = (f'"{each}"' for each in choices)
    return f"{', '.join(others)} or {last}"


def _parse_flag(text: str) -> bool:
    if text.strip().lower() in _ON:
        return True
    if text.strip().lower() in OFF:
        return False
    raise ValueError("must be 1 or 0")


def _parse_modules(text: str) -> str | int | tuple[str, ...]:
    text = text.strip()
    if text in ("auto", "all", "none"):
        return text
    if text.lstrip("-").isdigit():
        return int(text)
    return tuple(part.strip() for part in text.split(","))


_PARSERS: dict[Any, Callable[[str], Any]] = {
    int: int,
    float: float,
    float | None: float,
    bool: _parse_flag,
}
"""Functions that parse a variable, by the field's type. Other fields take the text."""


def is_recording_switched_on(environ: Mapping[str, str]) -> bool | None:
    """Return whether TORCHLENS_PERF is on or off; None if it is not set. Raise ConfigError for an
    invalid value.

    The setting is off in processes that this package starts.
    """
    if CHILD in environ:
        return False
    text = environ.get(SWITCH)
    if text is None:
        return None
    try:
        return _parse_flag(text)
    except ours(ValueError) as error:
        raise ConfigError(f"{SWITCH}={text!r}: {error}") from None


def public_fields() -> list[dataclasses.Field[Any]]:
    """Return the fields of Config that are keywords of watch()."""
    return [field for field in dataclasses.fields(Config) if not field.name.startswith("_")]


def fields_by_variable() -> dict[str, dataclasses.Field[Any]]:
    """Return the field of each TORCHLENS_PERF_* variable."""
    fields = [field for field in dataclasses.fields(Config) if field.name != "_total_steps"]
    return {ENVIRONMENT_PREFIX + field.name.lstrip("_").upper(): field for field in fields}


def from_environment(environ: Mapping[str, str]) -> dict[str, Any]:
    """Return the settings in TORCHLENS_PERF_* variables.

    Raise ConfigError for an unknown or invalid one.
    """
    fields = fields_by_variable()
    settings: dict[str, Any] = {}
    for variable, text in environ.items():
        if not variable.startswith(ENVIRONMENT_PREFIX) or variable in _NOT_SETTINGS:
            continue
        field = fields.get(variable)
        if field is None:
            raise ConfigError(f"{variable} is not a setting{_suggest_name(variable, fields)}")
        try:
            value: Any = (
                _parse_modules(text)
                if field.name == "modules"
                else _PARSERS.get(_field_types()[field.name], str)(text)
            )
            checked = Config(**{field.name: value})
        except ConfigError as error:
            raise ConfigError(f"{variable}: {error}") from None
        except ours(ValueError):
            raise ConfigError(
                f"{variable}={text!r}: not a valid {field.name.lstrip('_')}, see docs/reference/settings.md"
            ) from None
        settings[field.name] = getattr(checked, field.name)
        if checked._exchange_token:
            settings["_exchange_token"] = checked._exchange_token
    return settings


def from_settings(settings: Mapping[str, Any], environment: Mapping[str, Any]) -> Config:
    """Return the configuration of a watch().

    A keyword overrides a value of `config` that is not the default, which overrides the
    environment. Raise ConfigError for an unknown keyword or a value that cannot be used.
    """
    keywords = dict(settings)
    given = keywords.pop("config", None)
    known = {field.name for field in public_fields()}
    for name in keywords:
        if name not in known:
            raise ConfigError(f"{name} is not a setting of watch(){_suggest_name(name, known)}")
    chosen = {}
    if given is not None:
        require(isinstance(given, Config), f"config={given!r}: must be a torchlens_perf.Config")
        values = ((field, getattr(given, field.name)) for field in dataclasses.fields(Config))
        chosen = {field.name: value for field, value in values if value != field.default}
    return Config(**{**environment, **chosen, **keywords})


def _suggest_name(name: str, known: Iterable[str]) -> str:
    """Return the end of a message on an unknown name: a similar known name, or all of them."""
    names = sorted(known)
    matches = difflib.get_close_matches(name, names, n=1)
    return f"; did you mean {matches[0]}?" if matches else f" (known: {', '.join(names)})"
