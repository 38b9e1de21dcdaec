"""The exception that ends a run, as its process reports it."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from torchlens_perf.hooks import failure
from torchlens_perf.hooks.failure import describe_failure, find_new_exception
from torchlens_perf.run.failure import MAX_MESSAGE, Failure


class Raising(nn.Module):
    def __init__(self, error: BaseException | None = None) -> None:
        super().__init__()
        self.error, self.layer = error, nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        if self.error is not None:
            raise self.error
        return self.layer(x)


class InBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise ValueError("in backward")


class Optimizer(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:
        raise ValueError("in the optimizer")


class Rows:
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Tensor:
        raise ValueError("a bad row")


def fail_in_forward() -> None:
    blocks = nn.ModuleList([Raising(), Raising(ValueError("in a block"))])
    model = nn.Sequential(blocks[0], blocks[1])
    nn.Sequential(nn.Identity(), nn.ModuleDict({"model": model})["model"])(torch.ones(1, 4))


def fail_in_the_model() -> None:
    Raising(ValueError("in the model"))(torch.ones(1, 4))


def fail_in_backward() -> None:
    InBackward.apply(torch.ones(2, requires_grad=True)).sum().backward()


def fail_in_the_optimizer() -> None:
    Optimizer([nn.Parameter(torch.ones(2))], lr=0.1).step()


def fail_in_the_loader() -> None:
    next(iter(DataLoader(Rows())))  # type: ignore[arg-type]


def fail_in_the_loop() -> None:
    raise ValueError("in the loop")


def fail_in_torch() -> None:
    torch.ones(2, 3) @ torch.ones(2, 3)


def exception_of(function: Callable[[], None]) -> BaseException:
    try:
        function()
    except BaseException as error:
        return error
    raise AssertionError("nothing was raised")


def describe(function: Callable[[], None], step: int = 7) -> Failure:
    found = describe_failure(exception_of(function), step)
    assert found is not None
    return found


def raising(error: BaseException) -> Callable[[], None]:
    def fail() -> None:
        raise error

    return fail


@pytest.mark.parametrize(
    ("fail", "phase", "module", "function"),
    [
        (fail_in_forward, "forward", "1.1", "forward"),
        (fail_in_the_model, "forward", "Raising", "forward"),
        (fail_in_backward, "backward", "", "backward"),
        (fail_in_the_optimizer, "optimizer", "", "step"),
        (fail_in_the_loader, "data", "", "__getitem__"),
        (fail_in_the_loop, "", "", "fail_in_the_loop"),
        (fail_in_torch, "", "", "fail_in_torch"),
    ],
)
def test_failure_has_its_phase_module_and_line(
    fail: Callable[[], None], phase: str, module: str, function: str
) -> None:
    found = describe(fail)

    assert (found["phase"], found["module"], found["step"]) == (phase, module, 7)
    assert found["where"].startswith("test_failure.py:")
    assert found["where"].endswith(f" in {function}")


def test_module_inside_wrappers_has_the_name_that_reports_show() -> None:
    model = nn.DataParallel(nn.Sequential(nn.Linear(4, 4), Raising(ValueError("bad"))))

    assert describe(lambda: model(torch.ones(1, 4)))["module"] == "1"


@pytest.mark.parametrize(
    ("error", "kind", "exit_code"),
    [
        (ValueError("x"), "ValueError", None),
        (torch.OutOfMemoryError("x"), "torch.OutOfMemoryError", None),
        (MemoryError(), "MemoryError", None),
        (AssertionError(), "AssertionError", None),
        (SystemExit(3), "SystemExit", 3),
        (SystemExit("why"), "SystemExit", 1),
        (StopIteration(), "StopIteration", None),
    ],
)
def test_failure_has_the_type_of_the_exception(
    error: BaseException, kind: str, exit_code: int | None
) -> None:
    found = describe(raising(error))

    assert (found["type"], found["exit_code"]) == (kind, exit_code)


@pytest.mark.parametrize(
    "error", [KeyboardInterrupt(), SystemExit(), SystemExit(0), GeneratorExit()]
)
def test_program_that_ends_on_purpose_has_not_failed(error: BaseException) -> None:
    assert describe_failure(exception_of(raising(error)), 0) is None
    assert describe_failure(None, 0) is None


def test_exit_code_after_an_exception_is_reported_with_the_exception() -> None:
    """torch.multiprocessing.spawn() ends its processes in this way."""

    def log_and_exit() -> None:
        try:
            fail_in_the_loop()
        except ValueError:
            sys.exit(1)

    found = describe(log_and_exit)

    assert (found["type"], found["exit_code"]) == ("ValueError", 1)
    assert found["where"].endswith(" in fail_in_the_loop")


@pytest.mark.parametrize(
    ("error", "lost"),
    [
        (RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer"), True),
        (ConnectionResetError(104, "Connection reset by peer"), True),
        (torch.distributed.DistBackendError("NCCL error"), True),
        (torch.distributed.DistNetworkError("the client socket has timed out"), True),
        (RuntimeError("shape mismatch"), False),
        (ValueError("Connection closed by peer"), False),
    ],
)
def test_lost_connection_is_told_from_a_failure_of_the_rank(error: Exception, lost: bool) -> None:
    assert describe(raising(error))["lost_peer"] is lost


def test_message_is_one_short_line_without_escape_sequences() -> None:
    found = describe(raising(ValueError("\x1b[31mred\nnext\t" + "long " * 1000)))

    assert found["message"].startswith("?[31mred next long")
    assert len(found["message"]) == MAX_MESSAGE


class Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


def test_exception_whose_text_cannot_be_made_has_no_message() -> None:
    assert describe(raising(Unprintable()))["message"] == ""


def test_exceptions_from_before_a_watch_do_not_end_it(monkeypatch: pytest.MonkeyPatch) -> None:
    old = ValueError("old")
    monkeypatch.setattr(sys, "last_value", old, raising=False)
    earlier = failure.current_exceptions()
    assert find_new_exception(earlier) is None
    new = ValueError("new")
    monkeypatch.setattr(sys, "last_value", new)

    assert find_new_exception(earlier) is new


def test_exception_that_a_prompt_has_printed_does_not_end_a_watch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "last_value", ValueError("in an earlier cell"), raising=False)
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)

    assert find_new_exception(()) is None


def test_line_is_that_of_the_script_for_code_in_installed_packages(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import json\njson.loads('{')\n")
    found = describe(lambda: runpy.run_path(str(script)) and None)

    assert found["where"] == "script.py:2 in <module>"


class UnprintableRuntimeError(RuntimeError):
    def __str__(self) -> str:
        raise KeyError("no text")


def test_failure_without_a_text_is_reported() -> None:
    """A RuntimeError is also searched for words on a lost connection."""
    found = describe(raising(UnprintableRuntimeError()))

    assert (found["message"], found["lost_peer"]) == ("", False)
