"""`run` with scripts that train: they end as under `python`, whatever the end is, and the recording is kept."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest

from tests.processes import SCRIPTS, only_report, run

SCRIPT = str(SCRIPTS / "train_and_end.py")
RUN = [sys.executable, "-m", "torchlens_perf", "run"]
# Recording begins at the end of the first step.
AFTER_EIGHT, UNTIL_FIVE = 7, 4


@pytest.mark.parametrize(
    ("options", "arguments", "environment", "code", "steps"),
    [
        ([], ["everything"], {}, 0, AFTER_EIGHT),
        ([], ["crash"], {}, 1, UNTIL_FIVE),
        (["-I"], ["crash"], {}, 1, UNTIL_FIVE),
        ([], ["exit"], {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}, 3, AFTER_EIGHT),
        ([], ["SIGTERM", "no-autoload"], {}, -signal.SIGTERM, UNTIL_FIVE),
    ],
)
def test_training_ends_as_without_us(
    options: list[str], arguments: list[str], environment: dict[str, str], code: int, steps: int, tmp_path: Path
) -> None:
    """Output, traceback and exit code are equal, and each finished step is in the report."""
    environment = {"TORCHLENS_PERF_REPORT": "0", **environment}
    plain = run([sys.executable, *options, SCRIPT, *arguments], tmp_path, **environment)
    recorded = run([*RUN, *options, SCRIPT, *arguments], tmp_path, **environment)
    value = only_report(tmp_path)

    assert plain.returncode == code, plain.stderr
    assert (recorded.stdout, recorded.stderr, recorded.returncode) == (plain.stdout, plain.stderr, code)
    assert [rank["steps"] for rank in value["ranks"]] == [steps]
    assert value["run"]["program"] == "train_and_end.py"


def test_module_is_recorded_under_its_name(tmp_path: Path) -> None:
    """`run -m package.module` is recorded as that module."""
    (tmp_path / "trainer").mkdir()
    (tmp_path / "trainer" / "fit.py").write_text(Path(SCRIPT).read_text())
    done = run([*RUN, "-m", "trainer.fit", "normally"], tmp_path)

    assert done.returncode == 0, done.stderr
    assert only_report(tmp_path)["run"]["program"] == "trainer.fit"


def test_bad_variable_is_said_once(tmp_path: Path) -> None:
    """A variable that cannot be used switches recording off with one line, though two ways lead to recording."""
    for variable, text in (("TORCHLENS_PERF_RING_RECORDS", "many"), ("TORCHLENS_PERF", "perhaps")):
        done = run([*RUN, "-c", "import torch; print('ran')"], tmp_path, **{variable: text})

        assert (done.returncode, done.stdout) == (0, "ran\n")
        assert done.stderr.startswith(f"torchlens_perf is off: {variable}={text!r}: ")
        assert done.stderr.count("\n") == 1
