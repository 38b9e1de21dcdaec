"""A watch in a `with`, with start() and stop(), and as decorator, its repr, and wrong use."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import torchlens_perf as perf
from tests.support.processes import report, run_warm, runs
from tests.test_watch import make_model, train
from torchlens_perf import watching
from torchlens_perf.errors import ConfigError
from torchlens_perf.watching import _warn_not_started

QUIET = {"sidecar": False, "report": "off"}

TRAIN = """
import os, sys
import torch
import torchlens_perf as perf

model = torch.nn.Sequential(torch.nn.Linear(4, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

def train():
    for _ in range(12):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
"""


def test_start_and_stop_work_like_the_context_manager(tmp_path: Path) -> None:
    """A second stop(), or one before start(), has no effect."""
    model, optimizer = make_model()
    watch = perf.watch(model, optimizer, dir=tmp_path, **QUIET)
    watch.stop()
    assert watch.start() is watch
    assert watching._running is watch
    train(model, optimizer, 5)
    watch.stop()
    watch.stop()

    assert watching._running is None
    assert watch.run_dir is not None
    with pytest.raises(ConfigError, match="a watch is entered once"):
        watch.start()


@pytest.mark.parametrize("way", ["falls off the end", "raises", "forked by multiprocessing"])
def test_started_watch_is_stopped_at_the_end_of_the_process(way: str, tmp_path: Path) -> None:
    """The report is printed in each way in which Python runs its finalizers."""
    work = {
        "falls off the end": "perf.watch(model, optimizer).start()\ntrain()",
        "raises": "perf.watch(model, optimizer).start()\ntrain()\nraise SystemExit(3)",
        "forked by multiprocessing": (
            "import multiprocessing\n"
            "def child():\n    torch.set_num_threads(1)\n    perf.watch(model, optimizer).start()\n"
            "    train()\n"
            "process ="
            " multiprocessing.get_context('fork').Process(target=child)\nprocess.start()\nprocess.join()\n"
            "sys.exit(process.exitcode)"
        ),
    }[way]
    done = run_warm(
        [sys.executable, "-c", TRAIN + work], tmp_path, TORCHLENS_PERF_EXIT_TIMEOUT_S="60"
    )

    assert done.returncode == (3 if way == "raises" else 0), done.stderr
    assert "12 steps" in done.stderr, done.stderr


def test_each_call_of_a_decorated_function_is_a_run(tmp_path: Path) -> None:
    """Arguments, result, name and exception are the function's."""
    model, optimizer = make_model()
    seen = []

    @perf.watch(model, optimizer, dir=tmp_path, **QUIET)
    def fit(steps: int, *, fails: bool = False) -> str:
        """Its own text."""
        watch = watching._running
        assert watch is not None
        train(model, optimizer, steps)
        seen.append((watch.run_dir, watch._session.recorder.step))
        if fails:
            raise KeyError("mine")
        return "fitted"

    assert (fit(3), fit(4), watching._running) == ("fitted", "fitted", None)
    assert (fit.__name__, fit.__doc__) == ("fit", "Its own text.")
    with pytest.raises(KeyError, match="mine"):
        fit(2, fails=True)
    assert watching._running is None
    assert len({folder for folder, _ in seen}) == 3
    assert [step for _, step in seen] == [3, 4, 2]


def test_decorated_function_inside_a_watch_joins_it(tmp_path: Path) -> None:
    @perf.watch(dir=tmp_path, **QUIET)
    def fit() -> Path | None:
        inner = watching._running
        return None if inner is None else inner.run_dir

    with perf.watch(dir=tmp_path, **QUIET) as outer:
        assert fit() == outer.run_dir
        assert watching._running is outer


def test_step_before_the_start_is_reported_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """step() on a watch that was not started records nothing.

    After the end of a watch, step() prints no message.
    """
    _warn_not_started.cache_clear()
    watch = perf.watch(dir=tmp_path, **QUIET)
    watch.step()
    perf.watch(dir=tmp_path, **QUIET).step()
    assert [
        each.message for each in caplog.records if "before the watch is started" in each.message
    ] == [
        "torchlens_perf: step() records nothing before the watch is started: use `with watch(...)"
        " as w:`, or w.start()"
    ]
    caplog.clear()
    _warn_not_started.cache_clear()
    with watch:
        watch.step()
    watch.step()
    assert caplog.records == []


def test_coroutines_and_generators_cannot_be_decorated() -> None:
    """The body of a coroutine or a generator does not run within the call."""

    async def coroutine() -> None: ...

    def generator() -> Iterator[int]:
        yield 1

    for function in (coroutine, generator, 3):
        with pytest.raises(
            ConfigError, match=r"must be a plain function; use `with watch\(\):` inside of it"
        ):
            perf.watch()(function)


def test_repr_of_a_watch_has_models_state_and_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = make_model()
    watch = perf.watch(model, optimizer, dir=tmp_path, **QUIET)
    assert repr(watch) == "<Watch of Sequential, SGD: not started>"
    with watch:
        train(model, optimizer, 3)
        where = f", run_dir='{watch.run_dir}'>"
        assert repr(watch) == f"<Watch of Sequential, SGD: recording, step 3{where}"
        with perf.watch() as inner:
            assert repr(inner) == f"<Watch of what is trained: recording, step 3{where}"
    assert repr(watch) == f"<Watch of Sequential, SGD: ended{where}"
    monkeypatch.setenv("TORCHLENS_PERF", "0")
    assert repr(perf.watch({"head": model})) == "<Watch of Sequential: off>"


def test_config_accepts_a_path_as_dir(tmp_path: Path) -> None:
    """An additional keyword of watch() has priority over `config`."""
    config = perf.Config(dir=tmp_path / "other", sidecar=False, report="off")
    with perf.watch(config=config, dir=tmp_path / "runs", budget=0.02) as watch:
        assert watch._config == perf.Config(
            dir=str(tmp_path / "runs"), sidecar=False, report="off", budget=0.02
        )

    assert watch.run_dir is not None
    assert watch.run_dir.parent == tmp_path / "runs"
    assert not (tmp_path / "other").exists()


def test_watch_has_only_the_documented_public_names() -> None:
    """All other attributes begin with an underscore."""
    names = {name for name in (*dir(perf.Watch), *vars(perf.watch())) if not name.startswith("_")}
    assert names == {
        "log_to", "mlperf", "on_verdict", "report_html", "run_dir", "start", "step", "step_table",
        "steps_by_hand", "stop", "summary", "tag",
    }  # fmt: skip


@pytest.mark.parametrize("where", ["code", "environment", "environment of a recorded script"])
def test_modules_pattern_without_a_match_is_reported(where: str, tmp_path: Path) -> None:
    """In code it raises ValueError.

    In the environment it is one line, like any invalid variable.
    """
    settings = "modules=['block.*']" if where == "code" else ""
    code = (
        f"{TRAIN}\nwith perf.watch(model, optimizer, {settings}) as w:\n   "
        " train()\nprint('trained', w.run_dir)"
    )
    told = {} if where == "code" else {"TORCHLENS_PERF_MODULES": "block.*"}
    switch = {"TORCHLENS_PERF": "1"} if "recorded" in where else {}
    done = run_warm([sys.executable, "-c", code], tmp_path, **told, **switch)

    message = (
        'modules="block.*" matches no module. Names are matched against model.named_modules(), for'
        ' example "0"'
    )
    if where == "code":
        assert done.returncode == 1
        assert done.stderr.rstrip().endswith(f"ConfigError: {message}")
        assert issubclass(ConfigError, ValueError)
    else:
        assert (done.returncode, done.stdout) == (0, "trained None\n"), done.stderr
        assert done.stderr == f"torchlens_perf is off: TORCHLENS_PERF_MODULES: {message}\n"


@pytest.mark.parametrize(
    ("variable", "value", "advice"),
    [
        ("TORCHLENS_PERF_EXCHANGES", "off", "did you mean TORCHLENS_PERF_EXCHANGE?"),
        ("TORCHLENS_PERF_REPORT", "0", '"page", "quiet", "text" or "off"'),
        ("TORCHLENS_PERF_EXCHANGE_TOKEN", "/run/secrets/token", "token_file="),
    ],
)
@pytest.mark.parametrize("way", ["watch", "unchanged"])
def test_invalid_environment_variables_never_stop_a_job(
    variable: str, value: str, advice: str, way: str, tmp_path: Path
) -> None:
    """One line says what to write. The job trains and ends as usual."""
    script = TRAIN + (
        "with perf.watch(model, optimizer):\n    train()" if way == "watch" else "train()"
    )
    told = {variable: value, **({} if way == "watch" else {"TORCHLENS_PERF": "1"})}
    done = run_warm([sys.executable, "-c", script], tmp_path, **told)

    assert done.returncode == 0, done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"torchlens_perf is off: {variable}")
    assert advice in line


def test_token_stays_out_of_everything_written(tmp_path: Path) -> None:
    """Only the sidecar's environment has the token; no file, log or report does."""
    by_code = "exchange='grpc://127.0.0.1:9?token=S3CRET-1'"
    for number, settings in enumerate((by_code, "exchange='grpc://127.0.0.1:9'")):
        folder = tmp_path / str(number)
        folder.mkdir()
        code = (
            f"{TRAIN}\nimport pathlib\nfrom torchlens_perf.run import directory\n"
            f"with perf.watch(model, optimizer, {settings}) as w:\n    train()\n"
            "    w.summary()\n    ring = pathlib.Path(w._session.ring_path).read_bytes()\n"
            "    print(w, w._config, ring.count(b'S3CRET'))\n"
            "    pid = directory.find_sidecar_lock(w.run_dir.name).read_text().split()[0]\n"
            "    print(pathlib.Path(f'/proc/{pid}/environ').read_bytes().count(b'TOKEN=S3CRET-1'))\n"
        )
        told = {} if settings == by_code else {"TORCHLENS_PERF_EXCHANGE_TOKEN": "S3CRET-1"}
        done = run_warm(
            [sys.executable, "-c", code], folder, TORCHLENS_PERF_EXIT_TIMEOUT_S="60", **told
        )

        assert done.returncode == 0, done.stderr
        shown, in_environment = done.stdout.splitlines()
        assert "S3CRET" not in done.stderr + shown
        assert shown.endswith(" 0")
        assert in_environment == "1"
        (made,) = runs(folder)
        assert report(made)["ranks"][0]["steps"] == 12
        written = [path for path in folder.rglob("*") if path.is_file()]
        assert written
        assert [path for path in written if b"S3CRET" in path.read_bytes()] == []
