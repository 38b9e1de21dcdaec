"""Validation and sources of settings."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import math
import re
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import torchlens_perf as perf
from tests.support.processes import ROOT, run
from torchlens_perf import config as configuration
from torchlens_perf.config import (
    Config,
    ExchangeUrl,
    Settings,
    from_environment,
    from_settings,
    is_recording_switched_on,
)
from torchlens_perf.errors import ConfigError


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"dir": ""}, "dir"),
        ({"dir": 3}, "dir"),
        ({"modules": "some"}, "modules"),
        ({"modules": 0}, "modules"),
        ({"modules": True}, "modules"),
        ({"modules": ()}, "modules"),
        ({"modules": ["blocks.*", 3]}, "modules"),
        ({"modules": 1.5}, "modules"),
        ({"backward_every": -1}, "backward_every"),
        ({"backward_every": "16"}, "backward_every"),
        ({"backward_every": True}, "backward_every"),
        ({"ring_records": 10}, "ring_records"),
        ({"ring_records": 1 << 30}, "ring_records"),
        ({"disk_bytes": -5}, "disk_bytes"),
        ({"nvtx": 1}, "nvtx"),
        ({"sidecar": None}, "sidecar"),
        ({"trace_every": 1.0}, "trace_every"),
        ({"device_times": True}, "device_times"),
        ({"memory": True}, "memory"),
        ({"report": False}, "report"),
        ({"capture": "yes"}, "capture"),
        ({"exchange": False}, "exchange"),
        ({"export_limit": 99}, "export_limit"),
    ],
)
def test_invalid_setting_raises_with_field_and_value(
    settings: dict[str, object], named: str
) -> None:
    with pytest.raises(ConfigError, match=f"^{named}=") as caught:
        perf.watch(**settings)

    assert repr(next(iter(settings.values()))).strip("[]()") in str(caught.value)


@pytest.mark.parametrize("wrong", [math.nan, -1.0, math.inf, 61.0, True])
def test_exit_timeout_outside_0_to_60_seconds_raises(wrong: float) -> None:
    """The error uses the variable's name."""
    with pytest.raises(ConfigError, match=r"^exit_timeout_s="):
        Config(_exit_timeout_s=wrong)


def test_keywords_of_watch_are_the_fields_of_config_and_at_most_22() -> None:
    """Each keyword has the field's type and default."""
    shown = list(inspect.signature(perf.watch).parameters.values())
    fields = configuration.public_fields()

    assert len(fields) <= 22
    assert [each.name for each in shown] == [
        "model",
        "optimizer",
        *(field.name for field in fields),
        "config",
    ]
    assert [each.default for each in shown[2:-1]] == [field.default for field in fields]
    assert Settings.__annotations__.keys() == {field.name for field in fields}
    kinds = {name: each.__forward_arg__ for name, each in Settings.__annotations__.items()}
    assert kinds == {field.name: field.type for field in fields}


def test_settings_page_lists_all_settings_with_their_defaults() -> None:
    """docs/reference/settings.md has all keywords in their order, and all variables."""
    page = (ROOT / "docs/reference/settings.md").read_text()
    rows = dict(re.findall(r"^\| `([a-z_]+)` \| (\S+) \|", page, re.MULTILINE))
    fields = configuration.public_fields()
    assert list(rows) == [field.name for field in fields]
    for field in fields:
        shown = rows[field.name].strip("`").strip('"')
        assert shown == (
            str(field.default).lower() if isinstance(field.default, bool) else str(field.default)
        ), field.name
    others = configuration.fields_by_variable().keys() - {
        f"TORCHLENS_PERF_{field.name.upper()}" for field in fields
    }
    assert [name for name in others if f"| `{name}` |" not in page] == []


TYPED = """
import torchlens_perf as perf
from pathlib import Path

@perf.watch(modules=["blocks.*"], dir=Path("runs"), exchange="grpc://host:1", config=perf.Config(nccl="on"))
def train(epochs: int) -> str:
    return "trained"

with perf.watch(device_times="on", report="off", backward_every=4) as w:
    w.step_table(backend="pandas")
result: str = train(3)
"""
WRONG = {
    'perf.watch(device_times="always")': "device_times",
    'perf.watch(modules="some")': "modules",
    "perf.watch(report=False)": "report",
    "perf.watch(backward_every=1.5)": "backward_every",
    "perf.watch(moduls='all')": "moduls",
    'perf.Config(capture="yes")': "capture",
    'w.step_table(backend="arrow")': "backend",
    "w.steps()": "steps",
    'train("three")': "train",
}


@pytest.mark.long
@pytest.mark.slow
def test_type_checker_rejects_wrong_settings(tmp_path: Path) -> None:
    """The type checker accepts all valid settings."""
    script = tmp_path / "script.py"
    script.write_text(TYPED + "".join(f"{line}\n" for line in WRONG))
    command = [
        sys.executable,
        "-m",
        "mypy",
        "--strict",
        "--no-error-summary",
        f"--cache-dir={tmp_path}",
        str(script),
    ]
    found = run(command, ROOT).stdout.splitlines()
    first = TYPED.count("\n") + 1
    errors = {
        int(line.split(":")[1]): line
        for line in found
        if ": error: " in line and script.name in line
    }

    assert sorted(errors) == list(range(first, first + len(WRONG))), found
    for number, name in enumerate(WRONG.values(), first):
        assert name in errors[number]


def test_config_object_has_priority_over_the_environment() -> None:
    """A keyword has priority over `config`.

    Defaults override nothing.
    """
    environment = from_environment(
        {"TORCHLENS_PERF_DIR": "/runs", "TORCHLENS_PERF_TRACE_EVERY": "9"}
    )
    given = Config(trace_every=7, backward_every=3)
    config = from_settings({"config": given, "backward_every": 2}, environment)

    assert (config.dir, config.trace_every, config.backward_every) == ("/runs", 7, 2)
    assert from_settings({"config": None}, environment) == from_settings({}, environment)
    with pytest.raises(ConfigError, match=r"^config=\{\}: must be a torchlens_perf.Config"):
        perf.watch(config={})


def test_dir_setting_accepts_any_path() -> None:
    """In code it is a str, a Path, or any object with `__fspath__`.

    In the environment it is text.
    """
    assert Config(dir=Path("/runs/mine")).dir == Config(dir="/runs/mine").dir == "/runs/mine"


def test_unknown_setting_raises_with_the_closest_name() -> None:
    with pytest.raises(
        ConfigError, match=r"moduls is not a setting of watch\(\); did you mean modules"
    ):
        perf.watch(moduls="all")
    with pytest.raises(
        ConfigError, match=r"zzz is not a setting of watch\(\) \(known: aggregate, backward_every, "
    ):
        perf.watch(zzz=1)


@pytest.mark.parametrize("model", [3, "model", object(), [object()], {"model": object()}, [], {}])
def test_model_that_is_no_module_raises_with_its_name(model: object) -> None:
    with pytest.raises(ConfigError, match=r"^model=") as caught:
        perf.watch(model)

    assert "torch.nn.Module" in str(caught.value)


def test_swapped_arguments_of_watch_raise() -> None:
    """An optimizer is passed as model, a model as optimizer, or a function as either."""
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters())
    with pytest.raises(
        ConfigError, match=r"^model=SGD: .* is an optimizer; write watch\(model, optimizer\)"
    ):
        perf.watch(optimizer)
    with pytest.raises(ConfigError, match=r"^model=SGD: .* is an optimizer"):
        perf.watch(optimizer, model)
    with pytest.raises(
        ConfigError, match=r"^optimizer=Linear: .* is a model: write watch\(model, optimizer\)"
    ):
        perf.watch(model, model)
    with pytest.raises(ConfigError, match=r"^model=function: .* write @watch\(\) with parentheses"):
        perf.watch(lambda: None)


def test_optimizer_without_a_step_method_raises_with_its_name() -> None:
    with pytest.raises(ConfigError, match=r"^optimizer=int"):
        perf.watch(None, 3)


@pytest.mark.parametrize(
    "wrong",
    [
        "on", "head:1", "http://head:1", "grpc://head", "grpc://a b:1", "grpc://fd00::1:1", "grpc://", "grpc://h:1/path",
        "grpc://h:1?ca=/x", "grpc://h:1?token_file=secret", "grpc://h:1?name=a&name=b", "grpc://h:1?certs=/tls",
        "grpcs://h:1", "grpcs://h:1?certs=tls", "grpcs://[::1?certs=/tls", 1, True,
    ],
)  # fmt: skip
def test_invalid_exchange_url_raises(wrong: object) -> None:
    """A URL has host:port, full paths, each parameter once, and TLS only with certificates."""
    with pytest.raises(ConfigError, match=r"^exchange=.*: must be "):
        from_settings({"exchange": wrong}, {})


def test_valid_exchange_url_is_parsed() -> None:
    """Without an address, node 0 publishes one. "/" and spaces in paths do not change."""
    for text, parts in {
        "grpc://head:1": ("head:1", "", "", "", ""),
        "grpc://[fd00::1]:29400?token_file=/secret": ("[fd00::1]:29400", "", "/secret", "", ""),
        "grpcs://?certs=/my+tls&name=n0": ("", "", "", "/my tls", "n0"),
    }.items():
        assert ExchangeUrl.parse(text) == parts
        assert Config(exchange=text).exchange == text


@pytest.mark.parametrize(
    "settings",
    [
        {"exchange": "grpc://head:1?token=S3CRET"},
        {"exchange": "grpcs://head:1?certs=/tls&token=S3CRET&name=n0"},
        {"_exchange_token": "S3CRET"},
    ],
)
def test_token_is_only_in_the_private_field_of_config(settings: dict[str, str]) -> None:
    config = Config(**settings)

    assert config._exchange_token == "S3CRET"
    assert (
        "S3CRET" not in f"{config!r} {config.exchange} {dataclasses.asdict(config)!r}"
        f" {from_environment({})!r}"
    )
    told = from_environment(
        {f"TORCHLENS_PERF_{name.lstrip('_').upper()}": text for name, text in settings.items()}
    )
    assert "S3CRET" not in repr(told)
    assert Config(**told) == config


@pytest.mark.parametrize(
    "wrong",
    ["grpc://head?token=S3CRET", "http://head:1?token=S3CRET&name=x", "grpc://S3CRET@head:1", "grpc://[::1?token=S3CRET",
     "grpc://head:1?certs=x&token=S3CRET", "grpc://head:1?token=/S3CRET"],
)  # fmt: skip
def test_token_is_not_in_error_messages(wrong: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Config(exchange=wrong)
    assert "S3CRET" not in str(caught.value)


def test_file_name_as_token_is_rejected() -> None:
    """Older versions accepted a file name, which must not be used as the token."""
    with pytest.raises(ConfigError, match="token_file=FILE") as caught:
        from_environment({"TORCHLENS_PERF_EXCHANGE_TOKEN": "/run/secrets/token"})
    assert "/run/secrets" not in str(caught.value)


@pytest.mark.parametrize(
    "wrong", ["node-0:9464", "9464/metrics", "70000", ":9464", "::1:9464", "0.0.0.0", 9464]
)
def test_invalid_prometheus_address_raises(wrong: object) -> None:
    """The value is a port, or a numeric address and a port."""
    for good in ("9464", "0", "127.0.0.1:0", "[::1]:9464", "localhost:9464"):
        assert from_settings({"prometheus": good}, {}).prometheus == good
    with pytest.raises(ConfigError, match=r"^prometheus="):
        from_settings({"prometheus": wrong}, {})


def test_config_error_is_a_value_error() -> None:
    """Callers can catch a ConfigError without knowing this package's errors."""
    assert issubclass(ConfigError, ValueError)
    assert issubclass(ConfigError, perf.TorchlensPerfError)


def test_every_setting_is_an_environment_variable() -> None:
    """TORCHLENS_PERF_<FIELD> is converted to the field's type."""
    environ = {
        "TORCHLENS_PERF_DIR": "/runs",
        "TORCHLENS_PERF_MODULES": "blocks.*.attn, head",
        "TORCHLENS_PERF_BUDGET": "0.005",
        "TORCHLENS_PERF_BACKWARD_EVERY": "4",
        "TORCHLENS_PERF_COLLECTIVES": "off",
        "TORCHLENS_PERF_EXCHANGE": "grpc://head:29400?token_file=/secret",
        "TORCHLENS_PERF_EXCHANGE_TOKEN": "token",
        "TORCHLENS_PERF_MEMORY": "history",
        "TORCHLENS_PERF_NVTX": "False",
        "TORCHLENS_PERF_RING_RECORDS": "2048",
        "TORCHLENS_PERF_DISK_BYTES": "5000000",
        "TORCHLENS_PERF_SIDECAR": "no",
        "TORCHLENS_PERF_REPORT": "text",
        "TORCHLENS_PERF_EXIT_TIMEOUT_S": "2.5",
        "TORCHLENS_PERF_TRACE_EVERY": "7",
        "TORCHLENS_PERF_TRACE_SLOW": "0",
        "TORCHLENS_PERF_DEVICE_TIMES": "on",
        "TORCHLENS_PERF_TELEMETRY": "0",
        "TORCHLENS_PERF_AGGREGATE": "device",
        "TORCHLENS_PERF_CAPTURE": "verdict",
        "TORCHLENS_PERF_NCCL": "on",
        "TORCHLENS_PERF_FAULTHANDLER": "1",
        "TORCHLENS_PERF_SHARE": "group",
        "TORCHLENS_PERF_EXPORT_LIMIT": "5000",
        "TORCHLENS_PERF_PROMETHEUS": "0.0.0.0:9464",
    }
    config = from_settings({}, from_environment(environ))

    names = {field.name.lstrip("_").upper() for field in dataclasses.fields(Config)} - {
        "TOTAL_STEPS"
    }
    assert {f"TORCHLENS_PERF_{name}" for name in names} == set(environ)
    assert config == Config(
        dir="/runs", modules=("blocks.*.attn", "head"), budget=0.005, backward_every=4, collectives=False,
        exchange="grpc://head:29400?token_file=/secret", aggregate="device", device_times="on", capture="verdict",
        nccl="on", memory="history",
        nvtx=False, telemetry=False, ring_records=2048, disk_bytes=5_000_000,
        sidecar=False, report="text", trace_every=7, share="group", export_limit=5000, prometheus="0.0.0.0:9464",
        _exchange_token="token", _exit_timeout_s=2.5, _trace_slow=False,
        _faulthandler=True,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("text", "value"), [("all", "all"), (" 3 ", 3), ("none", "none"), ("head", ("head",))]
)
def test_modules_variable_accepts_keywords_levels_and_patterns(text: str, value: object) -> None:
    """The variable is TORCHLENS_PERF_MODULES."""
    assert from_environment({"TORCHLENS_PERF_MODULES": text}) == {"modules": value}


def test_keywords_have_priority_over_the_environment() -> None:
    """The environment has priority over the default."""
    told = from_environment(
        {"TORCHLENS_PERF_BACKWARD_EVERY": "4", "TORCHLENS_PERF_TRACE_EVERY": "9"}
    )
    config = from_settings({"backward_every": 2}, told)

    assert (config.backward_every, config.trace_every, config.nvtx) == (2, 9, True)


@pytest.mark.parametrize(
    ("variable", "text"),
    [
        ("TORCHLENS_PERF_BACKWARD_EVERY", "often"),
        ("TORCHLENS_PERF_BACKWARD_EVERY", "-3"),
        ("TORCHLENS_PERF_EXIT_TIMEOUT_S", "nan"),
        ("TORCHLENS_PERF_NVTX", "maybe"),
        ("TORCHLENS_PERF_MODULES", ","),
        ("TORCHLENS_PERF_MODULES", "-2"),
        ("TORCHLENS_PERF_DIR", ""),
        ("TORCHLENS_PERF_BACKWARD_EVRY", "3"),
        ("TORCHLENS_PERF", "perhaps"),
    ],
)
def test_invalid_variable_disables_recording_with_one_line(
    variable: str, text: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The line has the variable's name, and the code continues."""
    monkeypatch.setenv(variable, text)
    with perf.watch() as watch:
        watch.step()

    assert watch.run_dir is None
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith(f"torchlens_perf is off: {variable}")
    assert "\n" not in line


@given(
    st.dictionaries(
        st.text(max_size=12).map(lambda s: "TORCHLENS_PERF_" + s.upper()), st.text(max_size=30)
    )
)
def test_any_environment_value_is_accepted_or_raises_config_error(environ: dict[str, str]) -> None:
    with contextlib.suppress(ConfigError):
        from_settings({}, from_environment(environ))


@pytest.mark.parametrize(
    ("text", "switch"), [("1", True), ("on", True), ("TRUE", True), ("0", False), ("", False)]
)
def test_torchlens_perf_variable_accepts_usual_boolean_words(text: str, switch: bool) -> None:
    """The variable is TORCHLENS_PERF, which may be missing."""
    assert is_recording_switched_on({"TORCHLENS_PERF": text}) is switch
    assert is_recording_switched_on({}) is None


@pytest.mark.parametrize(
    ("asked", "capacity"), [(1024, 1024), (1025, 2048), (65536, 65536), (100_000, 131072)]
)
def test_ring_records_setting_is_rounded_up_to_a_power_of_two(asked: int, capacity: int) -> None:
    assert Config(ring_records=asked).ring_capacity == capacity
