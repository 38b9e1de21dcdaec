"""Training under the real `opentelemetry-instrument` is recorded, and its results do not change."""

from __future__ import annotations

import os
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.support.long import long
from tests.support.otlp_receiver import ReceivedSpan, Receiver
from tests.support.processes import SCRIPTS, only_report, run, run_warm, runs, torchrun
from torchlens_perf.exporters import semantics

pytestmark = pytest.mark.distributed

TRAIN = str(SCRIPTS / "train_traced.py")
# The console script `opentelemetry-instrument` makes the same call.
INSTRUMENT = [
    sys.executable,
    "-c",
    "from opentelemetry.instrumentation.auto_instrumentation import run; run()",
]
EVERY_STEP = {"TORCHLENS_PERF_TRACE_EVERY": "1"}
# OpenTelemetry's loader logs this if an exporter or instrumentor cannot be loaded.
LOADER_FAILED = "Failed to auto initialize OpenTelemetry"
NO_EXPORTERS = {f"OTEL_{signal}_EXPORTER": "none" for signal in ("TRACES", "METRICS", "LOGS")}


def losses(stdout: str) -> list[str]:
    return [line for line in stdout.splitlines() if line.startswith("loss")]


@pytest.fixture(scope="module")
def expected_losses(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[str]]:
    """Return the losses of runs without this package and OpenTelemetry's SDK, by number of ranks."""
    folder = tmp_path_factory.mktemp("unwatched")
    found = {
        1: losses(run_warm([sys.executable, TRAIN], folder).stdout),
        2: losses(run_warm(torchrun(TRAIN), folder).stdout),
    }
    assert {count: len(lines) for count, lines in found.items()} == {1: 8, 2: 8}
    return found


@pytest.mark.long
def test_spans_of_both_ranks_are_exported_once_and_losses_unchanged(
    receiver: Receiver, expected_losses: dict[int, list[str]], tmp_path: Path
) -> None:
    """The user's own spans arrive too. The losses are equal to the bit."""
    done = run(
        [*INSTRUMENT, *torchrun(TRAIN)],
        tmp_path,
        OTEL_EXPORTER_OTLP_ENDPOINT=receiver.endpoint("grpc"),
        OTEL_EXPERIMENTAL_RESOURCE_DETECTORS="torchlens_perf",
        **EVERY_STEP,
    )
    assert done.returncode == 0, done.stderr
    assert LOADER_FAILED not in done.stderr, done.stderr
    assert losses(done.stdout) == expected_losses[2]
    value = only_report(tmp_path)
    # The process of torchrun is instrumented too, but trains nothing and must not warn.
    assert "torchlens_perf recorded nothing" not in done.stderr
    assert [rank["steps"] for rank in value["ranks"]] == [7, 7]

    spans = receiver.spans()
    assert len({(span.trace_id, span.span_id) for span in spans}) == len(spans)
    user_spans, our_spans = by_rank(spans, "users"), by_rank(spans, semantics.SCOPE)
    assert user_spans == {
        (rank, name): count
        for rank in (0, 1)
        for name, count in (("my training", 1), ("my step", 8))
    }
    steps_of = {f"{semantics.SPAN_RANK} {rank}" for rank in (0, 1)}
    assert {key: count for key, count in our_spans.items() if key[1] in {semantics.SPAN_STEP, *steps_of}} == {
        (0, semantics.SPAN_STEP): 7, (0, f"{semantics.SPAN_RANK} 0"): 7, (1, f"{semantics.SPAN_RANK} 1"): 7,
    }  # fmt: skip
    assert {span.scope.partition(" ")[0] for span in spans} == {"users", semantics.SCOPE}
    # Recording began in the first optimizer step: the span that was active then on rank 0 is the
    # run's parent.
    (first,) = [s for s in spans if s.name == "my step" and s.resource[semantics.RANK] == 0][:1]
    (whole,) = [span for span in spans if span.name == semantics.SPAN_RUN]
    assert (whole.trace_id, whole.parent_id) == (first.trace_id, first.span_id)
    roots = [span for span in spans if span.name == semantics.SPAN_STEP]
    assert {span.links for span in roots} == {((first.trace_id, first.span_id),)}
    steps = {span.attributes[semantics.STEP] for span in spans if span.name in steps_of}
    assert steps == set(range(1, 8))


def by_rank(spans: list[ReceivedSpan], scope: str) -> Counter[tuple[int, str]]:
    """Count a scope's spans by rank and name.

    The rank is in the resource: the resource detector or the exporter has set it.
    """
    return Counter(
        (span.resource[semantics.RANK], span.name) for span in spans if span.scope.startswith(scope)
    )


@pytest.mark.long
@pytest.mark.parametrize(
    ("arguments", "variables"),
    [
        (["--watch"], {"TORCHLENS_PERF": "1"}),
        *long(
            ([], {}),
            (["--watch"], {}),
            ([], {"TORCHLENS_PERF": "1"}),
            ([], {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}),
            ([], {"OTEL_SDK_DISABLED": "true"}),
        ),
    ],
)
def test_several_ways_to_start_recording_make_one_run(
    arguments: list[str],
    variables: dict[str, str],
    expected_losses: dict[int, list[str]],
    tmp_path: Path,
) -> None:
    done = run(
        [*INSTRUMENT, sys.executable, TRAIN, *arguments], tmp_path, **NO_EXPORTERS, **variables
    )
    assert done.returncode == 0, done.stderr
    assert losses(done.stdout) == expected_losses[1]
    # With --watch the script records from its start, otherwise recording begins in the first step.
    assert [rank["steps"] for rank in only_report(tmp_path)["ranks"]] == [8 if arguments else 7]


@pytest.mark.long
@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"OTEL_PYTHON_DISABLED_INSTRUMENTATIONS": "requests, torchlens_perf"}, ""),
        *long(
            ({"OTEL_PYTHON_DISABLED_INSTRUMENTATIONS": "*"}, ""),
            ({"TORCHLENS_PERF": "0"}, ""),
            ({"TORCHLENS_PERF": "perhaps"}, "torchlens_perf is off: TORCHLENS_PERF='perhaps'"),
            (
                {"TORCHLENS_PERF_MODULEZ": "1"},
                "torchlens_perf is off: TORCHLENS_PERF_MODULEZ is not a setting",
            ),
        ),
    ],
)
def test_disabled_or_misconfigured_job_runs_unrecorded(
    variables: dict[str, str], message: str, expected_losses: dict[int, list[str]], tmp_path: Path
) -> None:
    """An invalid variable is reported once."""
    done = run([*INSTRUMENT, sys.executable, TRAIN], tmp_path, **NO_EXPORTERS, **variables)
    assert done.returncode == 0, done.stderr
    assert losses(done.stdout) == expected_losses[1]
    assert done.stderr.count("torchlens_perf") == message.count("torchlens_perf")
    assert message in done.stderr
    assert runs(tmp_path) == []


@pytest.mark.long
@pytest.mark.parametrize(
    ("variables", "recorded"), [({}, False), *long(({"TORCHLENS_PERF": "1"}, True))]
)
def test_exporter_that_is_not_installed_prevents_instrumentation(
    variables: dict[str, str], recorded: bool, expected_losses: dict[int, list[str]], tmp_path: Path
) -> None:
    """OpenTelemetry's loader stops before it loads this package's instrumentor.

    With TORCHLENS_PERF=1 the run is recorded nevertheless.
    """
    exporters = {**NO_EXPORTERS, "OTEL_TRACES_EXPORTER": "not_installed"}
    done = run([*INSTRUMENT, sys.executable, TRAIN], tmp_path, **exporters, **variables)
    assert done.returncode == 0, done.stderr
    assert LOADER_FAILED in done.stderr
    assert losses(done.stdout) == expected_losses[1]
    assert len(runs(tmp_path)) == recorded


def test_command_line_option_overrides_the_environment_variable(tmp_path: Path) -> None:
    """Each setting is an option of `opentelemetry-instrument`."""
    chosen = tmp_path / "chosen"
    done = run(
        [
            *INSTRUMENT,
            "--torchlens_perf_dir",
            str(chosen / "torchlens-perf"),
            sys.executable,
            TRAIN,
        ],
        tmp_path,
        TORCHLENS_PERF_DIR=str(tmp_path / "not this one"),
        **NO_EXPORTERS,
    )
    assert done.returncode == 0, done.stderr
    assert only_report(chosen)["ranks"][0]["steps"] == 7
    assert not (tmp_path / "not this one").exists()


INSTRUMENT_IN_CODE = """
import os, sys, torch
from torchlens_perf.instrumentation.instrumentor import TorchlensPerfInstrumentor
from torchlens_perf import watching
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
def step():
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
instrumentor = TorchlensPerfInstrumentor()
assert instrumentor is TorchlensPerfInstrumentor()
instrumentor.instrument()
instrumentor.instrument()
for _ in range(6):
    step()
assert watching._running is not None
instrumentor.uninstrument()
assert watching._running is None and "TORCHLENS_PERF" not in os.environ
for _ in range(3):
    step()
assert watching._running is None
instrumentor.instrument()
instrumentor.uninstrument()  # before anything trained
step()
assert watching._running is None
"""


def test_steps_between_instrument_and_uninstrument_are_recorded(tmp_path: Path) -> None:
    """The script calls both functions after it has imported torch."""
    done = run_warm([sys.executable, "-c", INSTRUMENT_IN_CODE], tmp_path)
    assert done.returncode == 0, done.stderr
    assert only_report(tmp_path)["ranks"][0]["steps"] == 5


def test_sidecar_is_not_instrumented(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """OpenTelemetry's folder instruments each Python process that has it in PYTHONPATH.

    The sidecar's PYTHONPATH contains only the user's other folders.
    """
    from opentelemetry.instrumentation import auto_instrumentation

    from torchlens_perf.run import children

    (folder,) = auto_instrumentation.__path__
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((folder, str(tmp_path), folder + os.sep)))
    monkeypatch.setattr(sys, "path", [folder, *sys.path])
    environment = children.build_environment()
    entries = environment["PYTHONPATH"].split(os.pathsep)
    assert str(tmp_path) in entries
    assert not [
        entry for entry in entries + children.build_search_path() if entry.startswith(folder)
    ]
