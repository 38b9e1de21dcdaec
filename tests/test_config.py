"""Settings: what is refused, and where they come from."""

from __future__ import annotations

import contextlib
import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

import torchlens_perf as perf
from torchlens_perf.config import Config, from_environment, from_settings, is_on
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
        ({"exit_timeout_s": math.nan}, "exit_timeout_s"),
        ({"exit_timeout_s": -1.0}, "exit_timeout_s"),
        ({"exit_timeout_s": math.inf}, "exit_timeout_s"),
        ({"nvtx": 1}, "nvtx"),
        ({"sidecar": None}, "sidecar"),
        ({"trace_every": 1.0}, "trace_every"),
        ({"total_steps": -1}, "total_steps"),
    ],
)
def test_bad_setting_is_named(settings: dict[str, object], named: str) -> None:
    """A value that cannot be used raises ConfigError at watch(), naming the field and the value."""
    with pytest.raises(ConfigError, match=f"^{named}=") as caught:
        perf.watch(**settings)

    assert repr(next(iter(settings.values()))).strip("[]()") in str(caught.value)


def test_unknown_setting_is_named_with_the_closest() -> None:
    """An unknown keyword raises ConfigError and says what was probably meant."""
    with pytest.raises(ConfigError, match=r"moduls is not a setting of watch\(\); did you mean modules"):
        perf.watch(moduls="all")
    with pytest.raises(ConfigError, match=r"zzz is not a setting of watch\(\) \(known: aggregate, backward_every, "):
        perf.watch(zzz=1)


@pytest.mark.parametrize("model", [3, "model", object(), [object()], {"model": object()}, [], {}])
def test_model_must_be_a_module(model: object) -> None:
    """Something that is no Module raises ConfigError naming the argument."""
    with pytest.raises(ConfigError, match=r"^model=") as caught:
        perf.watch(model)

    assert "torch.nn.Module" in str(caught.value)


def test_optimizer_must_step() -> None:
    """Something without a step() raises ConfigError naming the argument."""
    with pytest.raises(ConfigError, match=r"^optimizer=int"):
        perf.watch(None, 3)


@pytest.mark.parametrize(
    "wrong",
    [
        {"coordinator": "head"}, {"coordinator": "a b:1"}, {"coordinator": "fd00::1:1"}, {"exchange_token": "secret"},
        {"exchange_tls": "tls"}, {"exchange_tls_name": 1},
    ],
)  # fmt: skip
def test_where_the_nodes_meet(wrong: dict[str, object]) -> None:
    """A coordinator is host:port, files are named by full paths."""
    with pytest.raises(ConfigError, match=f"^{next(iter(wrong))}="):
        from_settings(wrong, {})


@pytest.mark.parametrize("wrong", ["node-0:9464", "9464/metrics", "70000", ":9464", "::1:9464", "0.0.0.0", 9464])
def test_where_prometheus_asks(wrong: object) -> None:
    """A port, or an address in digits and a port."""
    for good in ("9464", "0", "127.0.0.1:0", "[::1]:9464", "localhost:9464"):
        assert from_settings({"prometheus": good}, {}).prometheus == good
    with pytest.raises(ConfigError, match=r"^prometheus="):
        from_settings({"prometheus": wrong}, {})


def test_config_error_is_a_value_error() -> None:
    """Callers who know only the built-in errors can catch it."""
    assert issubclass(ConfigError, ValueError)
    assert issubclass(ConfigError, perf.TorchlensPerfError)


def test_every_field_is_a_variable() -> None:
    """Each setting can be given as TORCHLENS_PERF_<FIELD>, and arrives with its type."""
    environ = {
        "TORCHLENS_PERF_DIR": "/runs",
        "TORCHLENS_PERF_MODULES": "blocks.*.attn, head",
        "TORCHLENS_PERF_BACKWARD_EVERY": "4",
        "TORCHLENS_PERF_COLLECTIVES": "off",
        "TORCHLENS_PERF_EXCHANGE": "0",
        "TORCHLENS_PERF_FAULTHANDLER": "yes",
        "TORCHLENS_PERF_MEMORY": "0",
        "TORCHLENS_PERF_MEMORY_HISTORY": "5000",
        "TORCHLENS_PERF_NVTX": "False",
        "TORCHLENS_PERF_RING_RECORDS": "2048",
        "TORCHLENS_PERF_DISK_BYTES": "5000000",
        "TORCHLENS_PERF_SIDECAR": "no",
        "TORCHLENS_PERF_REPORT": "1",
        "TORCHLENS_PERF_EXIT_TIMEOUT_S": "2.5",
        "TORCHLENS_PERF_TRACE_EVERY": "7",
        "TORCHLENS_PERF_DEVICE_TIMES": "on",
        "TORCHLENS_PERF_TELEMETRY": "0",
        "TORCHLENS_PERF_AGGREGATE": "device",
        "TORCHLENS_PERF_CAPTURE": "verdict",
        "TORCHLENS_PERF_NCCL": "on",
        "TORCHLENS_PERF_BUILD_TAP": "0",
        "TORCHLENS_PERF_SHARE": "group",
        "TORCHLENS_PERF_COORDINATOR": "head:29400",
        "TORCHLENS_PERF_EXCHANGE_TOKEN": "/secret",
        "TORCHLENS_PERF_EXCHANGE_TLS": "/tls",
        "TORCHLENS_PERF_EXCHANGE_TLS_NAME": "node-0.job",
        "TORCHLENS_PERF_TOTAL_STEPS": "10000",
        "TORCHLENS_PERF_HTML": "0",
        "TORCHLENS_PERF_TRACE_SLOW": "0",
        "TORCHLENS_PERF_TRACE_SPANS_PER_S": "1000",
        "TORCHLENS_PERF_METRIC_SERIES": "5000",
        "TORCHLENS_PERF_PROMETHEUS": "0.0.0.0:9464",
    }
    config = from_settings({}, from_environment(environ))

    assert {"TORCHLENS_PERF_" + field.name.upper() for field in dataclasses.fields(Config)} == set(environ)
    assert config == Config(
        dir="/runs", modules=("blocks.*.attn", "head"), backward_every=4, collectives=False, exchange=False,
        coordinator="head:29400", exchange_token="/secret", exchange_tls="/tls", exchange_tls_name="node-0.job",
        aggregate="device", build_tap=False, device_times="on", capture="verdict", nccl="on",
        faulthandler=True, memory=False, memory_history=5000, nvtx=False, telemetry=False,
        ring_records=2048, disk_bytes=5_000_000, sidecar=False, report=True, exit_timeout_s=2.5, trace_every=7,
        share="group", total_steps=10_000, html=False, trace_slow=False, trace_spans_per_s=1000, metric_series=5000,
        prometheus="0.0.0.0:9464",
    )  # fmt: skip


@pytest.mark.parametrize(("text", "value"), [("all", "all"), (" 3 ", 3), ("none", "none"), ("head", ("head",))])
def test_modules_from_the_environment(text: str, value: object) -> None:
    """TORCHLENS_PERF_MODULES takes the words, a number of levels, or patterns."""
    assert from_environment({"TORCHLENS_PERF_MODULES": text}) == {"modules": value}


def test_keywords_overrule_the_environment() -> None:
    """What the code says wins over what the environment says, which wins over the default."""
    told = from_environment({"TORCHLENS_PERF_BACKWARD_EVERY": "4", "TORCHLENS_PERF_TRACE_EVERY": "9"})
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
def test_bad_variable_switches_off(
    variable: str, text: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A bad environment variable disables recording with one line that names it; the code goes on."""
    monkeypatch.setenv(variable, text)
    with perf.watch() as watch:
        watch.step()

    assert watch.run_dir is None
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith(f"torchlens_perf is off: {variable}")
    assert "\n" not in line


@given(st.dictionaries(st.text(max_size=12).map(lambda s: "TORCHLENS_PERF_" + s.upper()), st.text(max_size=30)))
def test_any_environment_is_read_or_refused(environ: dict[str, str]) -> None:
    """No text makes reading the environment fail with anything but ConfigError."""
    with contextlib.suppress(ConfigError):
        from_settings({}, from_environment(environ))


@pytest.mark.parametrize(("text", "switch"), [("1", True), ("on", True), ("TRUE", True), ("0", False), ("", False)])
def test_switch(text: str, switch: bool) -> None:
    """TORCHLENS_PERF takes the usual words; without it nothing is said."""
    assert is_on({"TORCHLENS_PERF": text}) is switch
    assert is_on({}) is None


@pytest.mark.parametrize(("asked", "capacity"), [(1024, 1024), (1025, 2048), (65536, 65536), (100_000, 131072)])
def test_capacity_is_a_power_of_two(asked: int, capacity: int) -> None:
    """ring_records is rounded up to a power of two."""
    assert Config(ring_records=asked).ring_capacity == capacity
