"""Automatic recording of an unmodified script, and the message if nothing starts it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.support.long import long_except
from tests.support.processes import only_report, run, run_warm

MODEL = """
import torch
from torch import nn
model = nn.Linear(4, 4)
def backward():
    loss = model(torch.ones(2, 4)).sum()
    loss.backward()
    return loss
"""
UPDATE = """
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 0.1 * parameter.grad
            parameter.grad = None
"""
NOTHING = "torchlens_perf recorded nothing"


def recorded(script: str, folder: Path, *arguments: str, **environment: str) -> tuple[int, str]:
    """Run a script as a user would, with TORCHLENS_PERF=1. Return the exit code and stderr."""
    (folder / "script.py").write_text(MODEL + script)
    done = run_warm(
        [sys.executable, *(arguments or ["script.py"])], folder, TORCHLENS_PERF="1", **environment
    )
    return done.returncode, done.stderr


@pytest.mark.long
def test_backward_passes_end_steps_if_the_script_has_no_optimizer(tmp_path: Path) -> None:
    """Steps are recorded from the second backward pass on, and the model is found by
    its gradients.
    """
    code, stderr = recorded(f"for _ in range(30):\n    backward()\n{UPDATE}", tmp_path)
    value = only_report(tmp_path)

    assert code == 0
    assert NOTHING not in stderr
    assert [(rank["steps"], rank["first_step"]) for rank in value["ranks"]] == [(28, 1)]
    assert {"forward", "backward"} <= set(value["ranks"][0]["phases"])
    assert [module["name"] for module in value["modules"]] == ["Linear"]
    assert [
        note
        for note in value["quality"]["notes"]
        if note.startswith("no optimizer's step was seen")
    ]


@pytest.mark.long
def test_recording_starts_at_the_first_optimizer_step_if_an_optimizer_exists(
    tmp_path: Path,
) -> None:
    script = """
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(12):
    for _ in range(8):
        backward()
    optimizer.step()
    optimizer.zero_grad()
"""
    recorded(script, tmp_path)
    value = only_report(tmp_path)

    assert [rank["steps"] for rank in value["ranks"]] == [11]
    assert value["steps"]["micro_steps"] == 8


SILENT = {
    "inference": ("with torch.no_grad():\n    model(torch.ones(2, 4))", "and 0 backward passes"),
    "one backward pass": ("backward()", "and 1 backward pass."),
    "an optimizer that never steps": (
        "optimizer = torch.optim.SGD(model.parameters())\nfor _ in range(5): backward()", "and 5 backward passes",
    ),
    "gradients without a loop": (
        "torch.autograd.grad(model(torch.ones(2, 4)).sum(), model.weight)", "and 1 backward pass.",
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    "name", long_except({"inference", "an optimizer that never steps"}, SILENT)
)
def test_one_line_of_advice_is_printed_if_the_script_has_nothing_to_record(
    name: str, tmp_path: Path
) -> None:
    """No directory is created, and the exit code is the script's."""
    script, seen = SILENT[name]
    code, stderr = recorded(f"{script}\nraise SystemExit(3)", tmp_path)

    (line,) = [line for line in stderr.splitlines() if NOTHING in line]
    assert code == 3
    assert seen in line
    assert "Next: " in line
    assert not (tmp_path / "torchlens-perf").exists()


def test_message_about_no_recording_comes_after_the_traceback_of_a_crash(tmp_path: Path) -> None:
    code, stderr = recorded("raise ValueError('mine')", tmp_path)

    assert code == 1
    assert stderr.index("ValueError: mine") < stderr.index(NOTHING)


QUIET = {
    "an installed tool": (["-m", "torch.utils.collect_env"], {}),
    "another local rank": (["script.py"], {"LOCAL_RANK": "1"}),
    "no torch": (["-c", "print(1)"], {}),
    "off": (["script.py"], {"TORCHLENS_PERF": "0"}),
}


@pytest.mark.parametrize(("arguments", "environment"), QUIET.values(), ids=QUIET)
def test_tools_launchers_and_other_ranks_print_no_message_if_nothing_is_recorded(
    arguments: list[str], environment: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "script.py").write_text(MODEL)
    start = run_warm if arguments == ["script.py"] else run
    done = start([sys.executable, *arguments], tmp_path, **{"TORCHLENS_PERF": "1", **environment})

    assert done.returncode == 0, done.stderr
    assert NOTHING not in done.stderr


PROBES = {
    "a version": "print(torch.__version__)",
    "a device": "print(torch.accelerator.is_available(), torch.get_num_threads())",
    "a tensor": "print(torch.ones(2, 2) @ torch.ones(2, 2))",
    "a file": "torch.save({'a': torch.ones(2)}, 'x.pt'); torch.load('x.pt')",
    "a class": "from torch import nn\nclass Net(nn.Module): pass",
}


def test_program_without_a_model_prints_nothing_to_stderr(tmp_path: Path) -> None:
    """A build script may read the output of `python -c "import torch; ..."` including stderr."""
    for name, script in PROBES.items():
        done = run_warm(
            [sys.executable, "-c", f"import torch\n{script}"], tmp_path, TORCHLENS_PERF="1"
        )

        assert (done.returncode, done.stderr) == (0, ""), name


@pytest.mark.long
def test_child_processes_print_no_message_about_missing_recording(tmp_path: Path) -> None:
    """Forked and spawned child processes inherit the state of their parent."""
    script = """
import multiprocessing, os
def work(): pass
if __name__ == "__main__":
    for method in ("fork", "spawn"):
        child = multiprocessing.get_context(method).Process(target=work)
        child.start(); child.join()
    if os.fork() == 0: raise SystemExit(0)
    os.wait()
"""
    code, stderr = recorded(script, tmp_path)

    assert (code, stderr.count(NOTHING)) == (0, 1)


@pytest.mark.long
def test_watch_in_the_script_turns_off_automatic_recording(tmp_path: Path) -> None:
    """Automatic recording starts neither inside the watch nor later, and prints no message."""
    script = f"""
import torchlens_perf as perf
with perf.watch(model) as w:
    for _ in range(8):
        backward()
        w.step()
for _ in range(8):
    backward()
{UPDATE}
assert torch.autograd._engine_run_backward.__module__ == "torch.autograd.graph"
"""
    code, stderr = recorded(script, tmp_path)
    value = only_report(tmp_path)

    assert (code, NOTHING in stderr) == (0, False)
    assert [(rank["steps"], rank["first_step"]) for rank in value["ranks"]] == [(8, 0)]


def test_temporary_patches_are_removed_once_automatic_recording_has_started(tmp_path: Path) -> None:
    script = """
from torch.optim.optimizer import _global_optimizer_post_hooks
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
names = []
for _ in range(4):
    names.append(torch.autograd._engine_run_backward.__code__.co_name)
    backward()
    optimizer.step()
print(names)
"""
    (tmp_path / "script.py").write_text(MODEL + script)
    done = run_warm([sys.executable, "script.py"], tmp_path, TORCHLENS_PERF="1")

    assert done.stdout == f"{['count_backward', *3 * ['call_native']]}\n"
