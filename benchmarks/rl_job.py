"""A job of reinforcement learning with several roles, and faults of known kinds.

    python -m benchmarks.rl_job FOLDER --fault slow_engine --seed 1
    python -m benchmarks.rl_job FOLDER --fault slow_engine+slow_tool

Two trainer ranks (DistributedDataParallel over gloo), three rollout engines, a tool server and a
reward server are processes of their own, which talk by HTTP on this machine. In each iteration,
rank 0 sends prompts to the engines, which generate token by token with a small random policy. Each
answer goes to the tool and then to the reward. Both ranks make some optimizer steps on the answers
with a loss like GRPO's, and rank 0 sends the new weights to the engines. So that the times do not
depend on the other load of the machine, a token and an optimizer step also sleep, in place of a
device.

Each process records events with torchlens_perf, and writes a log of its own times: NAME.jsonl in the
folder. benchmarks/rl_verdicts.py compares both.
"""

from __future__ import annotations

import argparse
import dataclasses
import io
import itertools
import json
import multiprocessing
import os
import queue
import random
import socket
import threading
import time
import urllib.request
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import torchlens_perf as perf

VOCABULARY, WIDTH, PROMPT, LENGTH = 96, 64, 8, 30
ENGINES, SLOTS, SAMPLES, STEPS, TIMEOUT_S = 3, 4, 12, 3, 60
TOKEN_S, STEP_S, TOOL_S, REWARD_S = 0.012, 0.04, 0.02, 0.02
FAULTS = (
    "long_samples", "slow_engine", "loaded_engine", "slow_tool", "slow_reward", "slow_weights",
    "slow_trainer_rank", "idle_engines",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Plan:
    """The fault of a run, its seed, its length, and what is done about long iterations."""

    folder: Path
    fault: str = ""
    """One of FAULTS, or two with + between them."""
    seed: int = 0
    iterations: int = 8
    records: bool = True
    steps: int = STEPS
    """Optimizer steps in an iteration."""
    strength: float = 1.0
    """Size of the fault, relative to the usual one."""
    sizes: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """Sizes of single faults, relative to those of this module. By default, 1."""
    long_tail: bool = False
    """True if lengths vary much without a fault: by a log-normal distribution."""
    engines: int = ENGINES
    most_tokens: int = 10_000
    """No sample has more tokens."""
    more: int = 0
    """Number of samples that are sent in addition. The first SAMPLES are taken."""
    overlap: bool = False
    """True if samples of the next iteration are generated during the optimizer steps."""

    def has(self, fault: str) -> bool:
        return fault in self.fault.split("+")

    @property
    def victim(self) -> int:
        """Index of the engine that a fault of one engine is in."""
        return self.seed % ENGINES

    def excess(self, fault: str, value: float) -> float:
        """Return how much longer something takes because of this fault."""
        size = self.strength * self.sizes.get(fault, 1.0)
        return value * size if self.has(fault) else 0.0


class Policy(nn.Module):
    """A small recurrent language model with random weights."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.recurrent = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(
        self, tokens: torch.Tensor, state: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        hidden, state = self.recurrent(self.embedding(tokens), state)
        return self.head(hidden), state


class TrainedPolicy(Policy):
    """A policy whose forward pass takes as long as on a device of this speed."""

    def __init__(self, step_s: float) -> None:
        super().__init__()
        self.step_s = step_s

    def forward(
        self, tokens: torch.Tensor, state: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        time.sleep(self.step_s)
        return super().forward(tokens, state)


class Log:
    """A process's own log of its times: one JSON object a line, by CLOCK_MONOTONIC in seconds."""

    def __init__(self, folder: Path, name: str) -> None:
        self._file = open(folder / f"{name}.jsonl", "w")  # noqa: SIM115
        self._lock = threading.Lock()

    def write(self, **values: Any) -> None:
        with self._lock:
            self._file.write(json.dumps(values) + "\n")
            self._file.flush()


class Server(ThreadingHTTPServer):
    """A server on a free port of this machine, one thread a request."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, answers: dict[str, Any]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.answers = answers


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = TIMEOUT_S

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        assert isinstance(self.server, Server)
        answer = self.server.answers[self.path](body)
        self.send_response(200)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, format: str, *args: Any) -> None:
        pass


def post(port: int, path: str, body: bytes) -> bytes:
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", body)
    with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
        return answer.read()


def post_json(port: int, path: str, **values: Any) -> Any:
    return json.loads(post(port, path, json.dumps(values).encode()))


def serve(name: str, answers: dict[str, Any], ready: Connection) -> None:
    """Answer requests until the parent process says that the job has ended."""
    server = Server(answers)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    ready.send((name, server.server_address[1]))
    ready.recv()
    server.shutdown()


@dataclasses.dataclass
class Request:
    """A sample that an engine generates."""

    id: str
    prompt: list[int]
    length: int
    done: threading.Event = dataclasses.field(default_factory=threading.Event)
    tokens: list[int] = dataclasses.field(default_factory=list)
    state: torch.Tensor | None = None
    came_s: float = 0.0
    began_s: float = 0.0


class Engine:
    """Generates up to SLOTS samples at once, one token of each at a time."""

    def __init__(self, plan: Plan, index: int, log: Log) -> None:
        self._policy, self._log = Policy().eval(), log
        self._token_s = TOKEN_S
        if index == plan.victim:
            self._token_s += plan.excess("slow_engine", 1.5 * TOKEN_S)
        self._take_s = plan.excess("slow_weights", 0.15)
        self._requests: queue.SimpleQueue[Request] = queue.SimpleQueue()
        self._weights = threading.Lock()
        self._ended_s = 0.0
        threading.Thread(target=self._generate_forever, daemon=True).start()

    def generate(self, body: bytes) -> bytes:
        request = Request(**json.loads(body), came_s=time.monotonic())
        self._requests.put(request)
        request.done.wait(TIMEOUT_S)
        return json.dumps(request.tokens).encode()

    def end_all(self, body: bytes) -> bytes:
        """End the samples that are in progress."""
        self._ended_s = time.monotonic()
        return b"{}"

    def take_weights(self, body: bytes) -> bytes:
        perf.event("weights_take_begin")
        began_s = time.monotonic()
        time.sleep(self._take_s)
        weights = torch.load(io.BytesIO(body))
        with self._weights:
            self._policy.load_state_dict(weights)
        self._log.write(what="weights", begin=began_s, end=time.monotonic())
        perf.event("weights_take_end")
        return b"{}"

    @torch.no_grad()
    def _generate_forever(self) -> None:
        active: list[Request] = []
        while True:
            while len(active) < SLOTS and (not active or not self._requests.empty()):
                request = self._requests.get()
                perf.event("generation_begin", id=request.id)
                request.began_s = time.monotonic()
                with self._weights:
                    logits, request.state = self._policy(torch.tensor([request.prompt]))
                request.tokens.append(int(logits[0, -1].argmax()))
                active.append(request)
            last = torch.tensor([[request.tokens[-1]] for request in active])
            states = torch.cat(
                [request.state for request in active if request.state is not None], 1
            )
            with self._weights:
                logits, states = self._policy(last, states)
            chosen = torch.multinomial(logits[:, -1].softmax(-1), 1)[:, 0].tolist()
            time.sleep(self._token_s)
            for row, request in enumerate(active):
                request.tokens.append(chosen[row])
                request.state = states[:, row : row + 1]
                if self._is_done(request):
                    self._finish(request)
            active = [request for request in active if not request.done.is_set()]

    def _is_done(self, request: Request) -> bool:
        return len(request.tokens) >= request.length or request.came_s < self._ended_s

    def _finish(self, request: Request) -> None:
        perf.event(
            "generation_end",
            id=request.id,
            tokens_in=len(request.prompt),
            tokens_out=len(request.tokens),
        )
        self._log.write(
            what="generation", id=request.id, came=request.came_s, begin=request.began_s,
            end=time.monotonic(), tokens=len(request.tokens),
        )  # fmt: skip
        request.done.set()


def run_engine(plan: Plan, index: int, ready: Connection) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(plan.seed)
    perf.role("rollout", name=f"engine-{index}")
    engine = Engine(plan, index, Log(plan.folder, f"engine-{index}"))
    answers = {
        "/generate": engine.generate,
        "/weights": engine.take_weights,
        "/end": engine.end_all,
    }
    serve(f"engine-{index}", answers, ready)


def run_service(plan: Plan, name: str, ready: Connection) -> None:
    """Run the tool or the reward server: it counts something of the tokens, and sleeps."""
    perf.role(name)
    log = Log(plan.folder, name)
    usual_s = {"tool": TOOL_S, "reward": REWARD_S}[name]
    sleep_s = usual_s + plan.excess(f"slow_{name}", 0.4)

    def answer(body: bytes) -> bytes:
        values = json.loads(body)
        perf.event(f"{name}_begin", id=values["id"])
        began_s = time.monotonic()
        tokens = values["tokens"]
        value = sum(a < b for a, b in itertools.pairwise(tokens)) / len(tokens)
        time.sleep(sleep_s)
        log.write(what=name, id=values["id"], begin=began_s, end=time.monotonic())
        perf.event(f"{name}_end", id=values["id"])
        return json.dumps(value).encode()

    serve(name, {"/run": answer}, ready)


class Rollouts:
    """Sends the samples of an iteration through engine, tool and reward; on rank 0."""

    def __init__(self, plan: Plan, ports: dict[str, int]) -> None:
        self._plan, self._ports = plan, ports
        self._random = random.Random(plan.seed)
        self._samples = SAMPLES + plan.more
        self._pool = ThreadPoolExecutor(2 * self._samples)
        self._ahead = ThreadPoolExecutor(1)
        self._next: Future[Any] | None = None
        self._engines = [port for name, port in ports.items() if name.startswith("engine")]

    def collect(self, iteration: int) -> list[tuple[list[int], float]]:
        """Return tokens and reward of each sample."""
        ready, self._next = self._next, None
        return self._generate(iteration) if ready is None else ready.result(TIMEOUT_S)

    def collect_ahead(self, iteration: int) -> None:
        """Begin to generate the samples of the next iteration."""
        self._next = self._ahead.submit(self._generate, iteration)

    def _generate(self, iteration: int) -> list[tuple[list[int], float]]:
        lengths = [self._random.randint(LENGTH - 4, LENGTH + 4) for _ in range(self._samples)]
        if self._plan.long_tail:
            lengths = [round(self._random.lognormvariate(0, 0.25) * LENGTH) for _ in lengths]
        if self._plan.has("long_samples"):
            longer = 1 + self._plan.excess("long_samples", 4)
            lengths[self._random.randrange(SAMPLES)] = round(longer * LENGTH)
        lengths = [min(length, self._plan.most_tokens) for length in lengths]
        engines = [sample % self._plan.engines for sample in range(self._samples)]
        if self._plan.has("loaded_engine"):
            # With the usual strength, two thirds of the samples go to one engine.
            victim = self._plan.victim
            elsewhere = [sample for sample, engine in enumerate(engines) if engine != victim]
            for sample in elsewhere[:: round(2 / self._plan.strength)]:
                engines[sample] = victim
        futures = []
        for sample, (length, engine) in enumerate(zip(lengths, engines, strict=True)):
            name = f"{iteration}-{sample}"
            prompt = [self._random.randrange(VOCABULARY) for _ in range(PROMPT)]
            perf.event("sample_sent", id=name, batch=iteration)
            futures.append(self._pool.submit(self._follow, name, prompt, length, engine))
        done = itertools.islice(as_completed(futures, TIMEOUT_S), SAMPLES)
        taken = [future.result() for future in done]
        for port in self._engines if self._plan.more else ():
            post(port, "/end", b"")
        return taken

    def _follow(self, name: str, prompt: list[int], length: int, engine: int) -> tuple[Any, float]:
        tokens = post_json(
            self._engines[engine], "/generate", id=name, prompt=prompt, length=length
        )
        post_json(self._ports["tool"], "/run", id=name, tokens=tokens)
        return tokens, post_json(self._ports["reward"], "/run", id=name, tokens=tokens)

    def publish(self, model: nn.Module) -> None:
        """Send the weights to all engines, one after the other."""
        content = io.BytesIO()
        torch.save(model.state_dict(), content)
        for port in self._engines:
            post(port, "/weights", content.getvalue())


def compute_loss(model: nn.Module, tokens: torch.Tensor, rewards: torch.Tensor) -> torch.Tensor:
    """Return a loss like GRPO's: log-probabilities weighed by rewards against their mean."""
    logits, _ = model(tokens[:, :-1])
    scores = logits.log_softmax(-1).gather(2, tokens[:, 1:, None])[..., 0].mean(1)
    return -(scores * (rewards - rewards.mean()) / (rewards.std() + 1e-4)).mean()


def run_trainer(plan: Plan, rank: int, store: int, ports: dict[str, int]) -> None:
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2",
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(store),
    )  # fmt: skip
    torch.set_num_threads(1)
    torch.manual_seed(plan.seed)
    dist.init_process_group("gloo")
    perf.role("trainer", name=f"rank {rank}")
    log = Log(plan.folder, f"rank-{rank}")
    rollouts = Rollouts(plan, ports) if rank == 0 else None
    step_s = STEP_S + plan.excess("idle_engines", 0.46)
    if rank == 1:
        step_s += plan.excess("slow_trainer_rank", 0.15)
    model = DistributedDataParallel(TrainedPolicy(step_s))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
    with perf.watch(model, optimizer, dir=str(plan.folder / "runs")):
        for iteration in range(plan.iterations):
            times = {"start": time.monotonic()}
            batch: list[Any] = [None]
            if rollouts is not None:
                batch = [rollouts.collect(iteration)]
                perf.event("batch_complete", batch=iteration)
                times["complete"] = time.monotonic()
            dist.broadcast_object_list(batch, 0)
            samples = batch[0][rank::2]
            longest = min(len(tokens) for tokens, _ in samples)
            tokens = torch.tensor([each[:longest] for each, _ in samples])
            rewards = torch.tensor([reward for _, reward in samples])
            if rollouts is not None and plan.overlap and iteration + 1 < plan.iterations:
                rollouts.collect_ahead(iteration + 1)
            perf.event("steps_begin", batch=iteration)
            times["steps_begin"], own_s = time.monotonic(), 0.0
            for _ in range(plan.steps):
                began_s = time.monotonic()
                loss = compute_loss(model, tokens, rewards)
                own_s += time.monotonic() - began_s
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            perf.event("steps_end", batch=iteration)
            times["steps_end"] = time.monotonic()
            if rollouts is not None:
                perf.event("weights_publish_begin", batch=iteration)
                rollouts.publish(model.module)
                perf.event("weights_publish_end", batch=iteration)
            log.write(
                what="iteration", iteration=iteration, own=own_s, **times, end=time.monotonic()
            )
    dist.destroy_process_group()


def run_processes(
    plan: Plan,
    engines: int,
    run_engine: Callable[[Plan, int, Connection], None],
    run_trainer: Callable[[Plan, int, int, dict[Any, int]], None],
) -> dict[Any, int]:
    """Run engines, the tool, the reward and two trainers, as forked processes, until the trainers end.

    Return the ports of the servers. Raise RuntimeError if a process fails.
    """
    context = multiprocessing.get_context("fork")
    servers, ports, pipes = [], {}, []
    work: list[tuple[Any, Any]] = [(run_engine, index) for index in range(engines)]
    work += [(run_service, "tool"), (run_service, "reward")]
    for run, which in work:
        ours, theirs = context.Pipe()
        servers.append(context.Process(target=run, args=(plan, which, theirs), daemon=True))
        servers[-1].start()
        pipes.append(ours)
    for pipe in pipes:
        server, port = pipe.recv()
        ports[server] = port
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        store = free.getsockname()[1]
    trainers = [
        context.Process(target=run_trainer, args=(plan, rank, store, ports)) for rank in range(2)
    ]
    for each in trainers:
        each.start()
    for each in trainers:
        each.join(300)
        if each.is_alive():
            each.kill()
    for pipe in pipes:
        pipe.send("end")
    for each in servers:
        each.join(10)
    if any(each.exitcode for each in (*trainers, *servers)):
        raise RuntimeError(f"exit codes {[each.exitcode for each in (*trainers, *servers)]}")
    return ports


def run_job(plan: Plan) -> Path:
    """Run the job. Return its run directory. Raise RuntimeError if a process fails."""
    plan.folder.mkdir(parents=True, exist_ok=True)
    name = f"rl-{plan.fault.replace('+', '-') or 'clean'}-{plan.seed}-{os.getpid()}"
    os.environ["TORCHLENS_PERF_RUN_ID"] = name
    os.environ["TORCHLENS_PERF"] = str(int(plan.records))
    # torch is imported once, before the processes are made.
    run_processes(plan, plan.engines, run_engine, run_trainer)
    return plan.folder / "runs" / name


def main() -> None:
    parser = argparse.ArgumentParser(description="A job of reinforcement learning with a fault.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--fault", default="", help=f"one or two (A+B) of {', '.join(FAULTS)}")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--iterations", type=int, default=8)
    parser.add_argument("--steps", type=int, default=STEPS, help="optimizer steps per iteration")
    parser.add_argument("--strength", type=float, default=1.0, help="size of the fault")
    parser.add_argument("--long-tail", action="store_true", help="lengths vary much")
    parser.add_argument("--engines", type=int, default=ENGINES)
    parser.add_argument("--most-tokens", type=int, default=10_000)
    parser.add_argument("--more", type=int, default=0, help="samples that are sent in addition")
    parser.add_argument("--overlap", action="store_true", help="generate during optimizer steps")
    parser.add_argument("--off", action="store_true", help="record nothing")
    given = vars(parser.parse_args())
    plan = Plan(records=not given.pop("off"), **given)
    if unknown := {*plan.fault.split("+")} - {*FAULTS, ""}:
        parser.error(f"unknown fault: {', '.join(unknown)}")
    print(run_job(plan))


if __name__ == "__main__":
    main()
