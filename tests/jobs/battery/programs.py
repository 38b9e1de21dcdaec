"""Programs around the training: processes, signals, threads, files, data loaders, tracers."""

from __future__ import annotations

import asyncio
import collections
import concurrent.futures
import contextlib
import contextvars
import dataclasses
import faulthandler
import gc
import multiprocessing
import os
import random
import signal
import sys
import threading
import tracemalloc
import types
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, WeightedRandomSampler

from tests.jobs.battery.registry import STEPS, Watch, case, mlp, random_batches, sgd, train


class Noise(Dataset[Tensor]):
    """Random samples, with the random state of the worker."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Tensor:
        return torch.randn(8) + index + random.random() + np.random.random()


class Stream(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        for _ in range(4):
            yield torch.randn(8)


@case("pytorch/pytorch#35795")
def persistent_workers(watch: Watch) -> Any:
    """Workers live on between epochs, and their random states with them."""
    loader = DataLoader(Noise(), 4, shuffle=True, num_workers=1, persistent_workers=True)
    model = mlp()
    optimizer = sgd(model)
    found: list[Any] = []
    with watch(model, optimizer):
        for _ in range(2):
            found.append([type(iter(loader)).__name__, len(loader)])
            for batch in loader:
                loss = model(batch).square().mean()
                loss.backward()
                optimizer.step()
                found.append(loss)
    return found


@case("pytorch/pytorch#683")
def samplers_and_streams(watch: Watch) -> Any:
    """Weighted samplers, iterable data sets, a collate function, and a loop that is left early."""
    weights = WeightedRandomSampler([1.0] * 8, 8)
    loaders = [
        DataLoader(Noise(), 2, sampler=weights, drop_last=True),
        DataLoader(Stream(), 2),
        DataLoader(Noise(), batch_size=None),
        DataLoader(Noise(), 2, collate_fn=lambda samples: torch.stack(samples[::-1])),
    ]
    found: list[Any] = []
    for loader in loaders:
        found.append(train(watch, mlp(), batches=loader))
        found.append(next(iter(loader)))
        for batch in loader:
            found.append(batch)
            break
    return found


@case("KempnerInstitute/KempnerForge#203")
def worker_that_dies(watch: Watch) -> Any:
    """A worker is ended by a signal, and the loop gets the loader's exception."""

    class Dies(Noise):
        def __getitem__(self, index: int) -> Tensor:
            if index == 5:
                os.kill(os.getpid(), signal.SIGTERM)
            return torch.ones(8) * index

    caught = []
    try:
        train(watch, mlp(), batches=DataLoader(Dies(), 2, num_workers=1))
    # It depends on the time at which the worker ends whether the loader or a connection to the worker fails.
    except (RuntimeError, ConnectionError, EOFError):
        caught.append("a worker ended")
    return caught


@dataclasses.dataclass
class Batch:
    x: Tensor

    def __len__(self) -> int:
        return len(self.x)


Pair = collections.namedtuple("Pair", ["x", "y"])


@case("huggingface/accelerate#1627")
def batches_of_many_kinds(watch: Watch) -> Any:
    """Batches are mappings, named tuples, dataclasses, generators, text or empty."""
    x = torch.ones(2, 8)
    kinds: list[Any] = [
        collections.UserDict(x=x), Pair(x, None), Batch(x), types.SimpleNamespace(x=x), [], "text",
        iter([x]), {"x": [x, {"y": "text"}]}, None, {1, 2}, np.ones(3), collections.deque([x]), object,
    ]  # fmt: skip

    class Kinds(IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            return iter(kinds)

    model = mlp()
    optimizer = sgd(model)
    names = []
    with watch(model, optimizer):
        for batch in DataLoader(Kinds(), batch_size=None):
            names.append(type(batch).__name__)
            model(torch.randn(2, 8)).sum().backward()
            optimizer.step()
    return [names, model]


def _square(x: float) -> float:
    return x * x


@case("DataDog/dd-trace-py#11762")
def process_pools_that_end(watch: Watch) -> Any:
    """Workers of a pool that was started inside a watch end, and the program with them."""

    def pool(step: int) -> Any:
        if step:
            return None
        context = multiprocessing.get_context("fork")
        with concurrent.futures.ProcessPoolExecutor(2, mp_context=context) as workers:
            return list(workers.map(_square, range(4)))

    return train(watch, mlp(), at_step=pool)


@case("awslabs/hybrid-model-factory#4", slow=True)
def checkpoints_by_a_process_pool(watch: Watch) -> Any:
    """torch.save is pickled by its name and runs in processes that fork or spawn."""

    def save(step: int) -> Any:
        if step != 1:
            return None
        files = []
        for kind in ("fork", "spawn"):
            context = multiprocessing.get_context(kind)
            with concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as workers:
                workers.submit(torch.save, torch.ones(3), f"{kind}.pt").result()
            process = context.Process(target=torch.save, args=(torch.ones(3), f"{kind}-process.pt"))
            process.start()
            process.join()
            files += [process.exitcode, torch.load(f"{kind}.pt"), torch.load(f"{kind}-process.pt")]
        return [*files, torch.save.__name__, torch.save is torch.serialization.save]

    return train(watch, mlp(), at_step=save)


def _train_in_child(queue: Any) -> None:
    model = mlp()
    x = torch.ones(2, 8, requires_grad=True)
    torch.einsum("ij,kj->ik", model(x), model(x)).sum().backward()
    sgd(model).step()
    queue.put(len(os.listdir("/proc/self/task")))


@case("pytorch/pytorch#17199")
def training_in_forked_processes(watch: Watch) -> Any:
    """A forked child trains while the parent is watched, and both end."""
    context = multiprocessing.get_context("fork")

    def fork(step: int) -> Any:
        if step > 1:
            return None
        queue = context.SimpleQueue()
        process = context.Process(target=_train_in_child, args=(queue,))
        process.start()
        process.join()
        return [process.exitcode, queue.get()]

    return train(watch, mlp(), at_step=fork)


@case()
def fork_and_exit_inside(watch: Watch) -> Any:
    """A child leaves the loop by sys.exit(), so the parent's `with` block unwinds in it too."""

    def fork(step: int) -> Any:
        child = os.fork()
        if child == 0:
            os._exit(step) if step % 2 else sys.exit(step + 10)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    try:
        return train(watch, mlp(), at_step=fork)
    except SystemExit as ended:
        # Only the parent writes an outcome.
        os._exit(ended.code)


@case()
def exit_inside(watch: Watch) -> Any:
    train(watch, mlp(), at_step=lambda step: sys.exit(7) if step == 2 else None)


@case("Lightning-AI/pytorch-lightning#1455")
def signal_handlers_are_kept(watch: Watch) -> Any:
    """The program's handlers are called, and no other handler takes their place."""
    calls: list[int] = []
    numbers = [
        signal.SIGTERM,
        signal.SIGUSR1,
        signal.SIGUSR2,
        signal.SIGINT,
        signal.SIGHUP,
        signal.SIGPROF,
    ]
    for number in numbers:
        signal.signal(number, lambda received, frame: calls.append(received))

    def send(step: int) -> Any:
        for number in numbers:
            os.kill(os.getpid(), number)
        return [getattr(signal.getsignal(number), "__name__", "") for number in range(1, 32)]

    found = train(watch, mlp(), at_step=send)
    return [found, calls, signal.pthread_sigmask(signal.SIG_BLOCK, [])]


class TimeLimit(Exception):
    """Exception that handlers of time limits and preemptions raise."""


@case("celery/celery#6873")
def time_limits_by_signals(watch: Watch) -> Any:
    """An exception of a signal handler reaches the program, wherever it interrupts."""

    def interrupt(number: int, frame: Any) -> None:
        raise TimeLimit

    signal.signal(signal.SIGUSR1, interrupt)
    caught = 0
    model = mlp()
    # Signals arrive at code of a hook, because a hook of the user's own model runs between ours.
    model[0].register_forward_hook(lambda *arguments: os.kill(os.getpid(), signal.SIGUSR1))
    with watch(model, sgd(model)):
        for batch in random_batches():
            try:
                model(batch)
            except TimeLimit:
                caught += 1
    return caught


@case()
def preemption_that_saves_and_exits(watch: Watch) -> Any:
    """A handler of SIGTERM saves a checkpoint and exits with the program's own code."""
    model = mlp()

    def preempt(number: int, frame: Any) -> None:
        torch.save(model.state_dict(), "checkpoint.pt")
        print("saved", sorted(torch.load("checkpoint.pt")), flush=True)
        sys.exit(85)

    signal.signal(signal.SIGTERM, preempt)
    return train(watch, model, at_step=lambda step: os.kill(os.getpid(), signal.SIGTERM))


@case(sidecar=True)
def children_of_the_program_only(watch: Watch) -> Any:
    """os.wait() returns only the program's own children, and its SIGCHLD handler is called for them."""
    calls: list[int] = []
    signal.signal(signal.SIGCHLD, lambda number, frame: calls.append(number))

    def fork(step: int) -> Any:
        child = os.fork()
        if child == 0:
            os._exit(step)
        ended, status = os.wait()
        return [ended == child, os.waitstatus_to_exitcode(status)]

    found = train(watch, mlp(), at_step=fork)
    return [found, len(calls)]


@case(sidecar=True)
def children_are_ignored(watch: Watch) -> Any:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    found = train(watch, mlp())
    with contextlib.suppress(ChildProcessError):
        found.append(os.wait())
    return found


@case("crewAIInc/crewAI#4822")
def context_variables_and_threads(watch: Watch) -> Any:
    """Threads and tasks train, and keep their own context variables."""
    variable = contextvars.ContextVar("variable", default="unset")
    model = mlp()
    seen: list[Any] = []
    model.register_forward_hook(lambda *arguments: seen.append(variable.get()))

    def work(name: str) -> None:
        before = variable.get()
        variable.set(name)
        model(torch.ones(2, 8)).sum().backward()
        seen.append([before, variable.get(), len(contextvars.copy_context())])

    async def tasks() -> None:
        await asyncio.gather(asyncio.to_thread(work, "thread"))
        work("loop")
        loop = asyncio.get_running_loop()
        seen.append([variable.get(), loop.is_running(), len(asyncio.all_tasks())])

    def both(step: int) -> Any:
        thread = threading.Thread(target=work, args=(f"thread {step}",))
        thread.start()
        thread.join()
        asyncio.run(tasks())
        return threading.active_count()

    return [train(watch, model, at_step=both), seen]


@case("python/cpython#56201")
def generators_and_coroutines_left_open(watch: Watch) -> Any:
    """Training runs inside a generator that is closed in the middle of a step."""
    model = mlp()
    ends: list[str] = []

    def steps() -> Iterator[Tensor]:
        try:
            with watch(model):
                for batch in random_batches():
                    yield model(batch)
        except GeneratorExit:
            ends.append("closed")
            raise
        finally:
            ends.append("finally")

    running = steps()
    found = [next(running), next(running)]
    running.close()
    return [found, ends]


@case("coveragepy/coveragepy#683")
def tracers_and_profilers_of_the_program(watch: Watch) -> Any:
    """The program's trace and profile functions stay, and see all lines of the program."""
    lines: collections.Counter[tuple[str, int]] = collections.Counter()

    def trace(frame: Any, event: str, argument: Any) -> Any:
        if frame.f_code.co_filename == __file__:
            lines[frame.f_code.co_name, frame.f_lineno - frame.f_code.co_firstlineno] += (
                event == "line"
            )
        return trace

    def body(model: nn.Module, batch: Tensor) -> Tensor:
        loss = model(batch).sum()
        loss.backward()
        return loss

    model = mlp()
    optimizer = sgd(model)
    sys.settrace(trace)
    threading.settrace(trace)
    sys.setprofile(trace)
    try:
        with watch(model, optimizer):
            for batch in random_batches():
                body(model, batch)
                optimizer.step()
        kept = sys.gettrace() is trace, sys.getprofile() is trace
    finally:
        sys.settrace(None)
        sys.setprofile(None)
        threading.settrace(None)  # type: ignore[arg-type]
    return [kept, sorted(each for each in lines.items() if each[0][0] == "body"), model]


@case("meta-pytorch/tnt#534")
def garbage_collection_stays_off(watch: Watch) -> Any:
    """The program decides when garbage is collected."""
    gc.collect()
    gc.disable()
    gc.set_threshold(1234, 5, 6)
    collections_: list[str] = []
    gc.callbacks.append(lambda phase, info: collections_.append(phase))

    def collect(step: int) -> Any:
        if step % 2:
            gc.collect(0)
        return [
            gc.isenabled(),
            gc.get_threshold(),
            gc.get_debug(),
            len(collections_),
        ]

    return train(watch, mlp(), at_step=collect)


@case()
def garbage_callbacks_are_cleared(watch: Watch) -> Any:
    return train(watch, mlp(), at_step=lambda step: gc.callbacks.clear())


@case("pytest-dev/pytest#1403")
def warnings_are_errors(watch: Watch) -> Any:
    """With -W error, each warning of anybody ends the program."""
    warnings.simplefilter("error")
    found = train(watch, mlp(), torch.optim.AdamW(mlp().parameters()))
    return [found, warnings.filters[0][0]]


@case("python/cpython#84559")
def diagnostics_of_the_interpreter(watch: Watch) -> Any:
    """faulthandler, tracemalloc, hooks of sys, the recursion limit and the switch interval."""
    faulthandler.enable(file=sys.__stderr__)
    tracemalloc.start(3)
    sys.setswitchinterval(0.02)
    hooks = sys.excepthook, sys.unraisablehook, threading.excepthook, sys.displayhook

    def state(step: int) -> Any:
        return [
            faulthandler.is_enabled(), tracemalloc.is_tracing(), tracemalloc.get_traceback_limit(),
            sys.getrecursionlimit(), sys.getswitchinterval(), len(sys.meta_path), len(sys.path_hooks),
            hooks == (sys.excepthook, sys.unraisablehook, threading.excepthook, sys.displayhook),
        ]  # fmt: skip

    found = train(watch, mlp(), at_step=state)
    tracemalloc.stop()
    return found


@case("borgbackup/borg#1059")
def files_of_a_daemon(watch: Watch) -> Any:
    """A program closes all descriptors, and opens its own files under the same numbers."""
    files: list[Any] = []

    def become_daemon(step: int) -> None:
        if step == 1:
            os.closerange(3, 256)
            files.extend(Path(f"mine.{number}").open("w") for number in range(12))  # noqa: SIM115
        for file in files:
            file.write(f"step {step}\n")

    found = train(watch, mlp(), at_step=become_daemon)
    errors = []
    for file in files:
        try:
            file.close()
        except OSError as error:
            errors.append(str(error))
    return [found, errors, [Path(file.name).read_text() for file in files]]


@case()
def environment_is_cleared(watch: Watch) -> Any:
    """The program clears its environment, removes its folder and changes its umask."""

    def clear(step: int) -> Any:
        if step == 1:
            os.environ.clear()
            os.mkdir("gone")
            os.chdir("gone")
            os.rmdir("../gone")
            os.umask(0o777)
        return None

    found = train(watch, mlp(), at_step=clear)
    return [found, os.umask(0o022), dict(os.environ)]


@case("cornellius-gp/gpytorch#2631")
def several_trainings_in_one_process(watch: Watch) -> Any:
    """Trials of a search follow each other, and one of them fails."""
    found: list[Any] = []
    for trial in range(3):
        try:
            found.append(train(watch, mlp(), at_step=lambda step, t=trial: 1 / (t - 1 or step - 2)))
        except ZeroDivisionError as error:
            found.append(error)
    return [found, STEPS, threading.active_count()]
