"""The benchmark that records scripts of other people, on a script whose time is known."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.third_party import compare_parts, judge, run
from benchmarks.third_party_scripts import COMMITS, SCRIPTS, Script
from benchmarks.third_party_truth import Frame, Interval, find_phase, find_truth

TORCH = "/env/site-packages/torch"
LOADER = Frame("__next__", f"{TORCH}/utils/data/dataloader.py")
MODULE = Frame("_call_impl", f"{TORCH}/nn/modules/module.py")
BACKWARD = Frame("backward", f"{TORCH}/autograd/__init__.py")
STEP = Frame("step", f"{TORCH}/optim/sgd.py")
START = Frame("attach", "/env/torchlens_perf/hooks/attach.py")
TRAINING = """
import time, torch

class Slow(torch.utils.data.Dataset):
    def __len__(self):
        return 200
    def __getitem__(self, index):
        time.sleep(0.02)
        return torch.ones(64)

model = torch.nn.Sequential(torch.nn.Linear(64, 512), torch.nn.Linear(512, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

def evaluate():
    with torch.no_grad():
        time.sleep(0.05)

for step, batch in enumerate(torch.utils.data.DataLoader(Slow())):
    for _ in range(4):
        loss = model(batch.repeat(512, 1)).sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    time.sleep(0.01)
    if step % 15 == 14:
        evaluate()
"""


def frame(name: str, file: str = "/job/train.py") -> Frame:
    return Frame(name, file)


@pytest.mark.parametrize(
    ("stack", "phase"),
    [
        ((frame("main"), LOADER, frame("fetch", f"{TORCH}/utils/data/_utils/fetch.py")), "data"),
        ((frame("main"), LOADER, frame("__getitem__"), MODULE, frame("forward")), "data"),
        ((frame("main"), MODULE, frame("forward")), "forward"),
        ((frame("main"), BACKWARD), "backward"),
        ((frame("main"), BACKWARD, frame("unpack"), MODULE, frame("forward")), "recompute"),
        ((frame("main"), STEP, frame("closure"), MODULE, frame("forward")), "forward"),
        ((frame("main"), STEP), "optimizer"),
        ((frame("main"), Frame("zero_grad", f"{TORCH}/optim/optimizer.py")), "host"),
        ((frame("main"), Frame("step", f"{TORCH}/optim/lr_scheduler.py")), "host"),
        ((frame("main"), STEP, START), "tool"),
        (
            (frame("main"), frame("timed", "/env/torchlens_perf/hooks/backward.py"), BACKWARD),
            "backward",
        ),
        (
            (
                frame("main"),
                STEP,
                frame("__call__", "/env/torchlens_perf/hooks/loop/optimizer.py"),
                frame("training_step"),
            ),
            "host",
        ),
        ((frame("main"),), "host"),
    ],
)
def test_innermost_function_of_torch_decides_the_phase(
    stack: tuple[Frame, ...], phase: str
) -> None:
    assert find_phase(stack) == phase


def test_shares_are_of_the_time_from_the_second_step_to_the_last() -> None:
    main = frame("main")
    first_step = [(main,), (main, BACKWARD), (main, STEP, START)]
    test = (main, frame("test"), MODULE)
    stacks = [*first_step, (main, BACKWARD), test, (main, LOADER), (main, STEP), (main,)]
    intervals = [Interval(place, place + 1, stack) for place, stack in enumerate(stacks)]
    # The thread waits for a CPU in a quarter of the time, and runs in half of it.
    kernel = [(s, int(0.5e9 * s), int(0.25e9 * s)) for s in range(9)]
    truth = find_truth(intervals, kernel, "test$")
    assert truth is not None
    assert truth.loop_s == 4
    quarter = pytest.approx(0.25)
    assert truth.phases == dict.fromkeys(("backward", "forward", "data", "optimizer"), quarter)
    assert truth.passes == quarter
    assert (truth.running, truth.cpu_wait) == (pytest.approx(0.5), pytest.approx(0.25))
    assert find_truth(intervals[:1], kernel, "test$") is None


def test_every_script_has_a_commit_and_its_own_name() -> None:
    assert {each.repository for each in SCRIPTS} <= COMMITS.keys()
    assert len({each.name for each in SCRIPTS}) == len(SCRIPTS)


@pytest.mark.long
def test_report_and_py_spy_agree_on_a_script_that_waits_for_data(tmp_path: Path) -> None:
    checkout = tmp_path / "repositories" / "code"
    checkout.mkdir(parents=True)
    (checkout / "train.py").write_text(TRAINING)
    script = Script("waits", "someone/code", "train.py", passes="evaluate$")
    run(script, tmp_path / "repositories", tmp_path / "out")
    found = judge(script, tmp_path / "out" / "waits")
    assert found["exit"] == 0
    assert found["steps"] == 199  # The first of the 200 steps is not recorded.
    (truth,) = found["truth"]
    ours, sampled = compare_parts(found)
    assert sampled["data"] == pytest.approx(ours["data"], abs=0.1)
    assert sampled["host"] == pytest.approx(ours["host"], abs=0.1)
    assert truth.passes == pytest.approx(0.05 / (0.05 + 15 * found["p50_s"]), abs=0.05)
    assert found["kinds"][0] in ("data_bound", "lack_of_cpu")
