"""Events of TRL's GRPOTrainer: one batch of samples, and the optimizer steps on them, are an iteration.

Each rank generates samples of its own, and all ranks know the number of the iteration.
"""

from __future__ import annotations

import functools
import time
import weakref
from collections.abc import Callable, Generator
from typing import Any
from urllib.parse import urlsplit

from torchlens_perf.roles import recording
from torchlens_perf.roles.recording import record

Following = Generator[None, Any, None]


class Rollout:
    """The iteration of this process's trainer."""

    def __init__(self, trainer: Any = None, batch: str = "") -> None:
        # The trainer belongs to the user, who may delete it.
        self._trainer = (lambda: None) if trainer is None else weakref.ref(trainer)
        self.batch, self.is_open = batch, trainer is not None
        """True from the request for samples until they have rewards."""
        self.is_stepping = False
        self.requests: list[str] = []
        """Samples that were requested from an OpenAI-compatible server."""
        self.count = 0
        """Number of samples of this rank, if no server was asked."""
        self.sent_ns = time.monotonic_ns()
        self.turn_ns: tuple[int, int] | None = None
        """Begin and end of the first generation of all samples."""
        self.tool_users: list[int] = []

    @property
    def trainer(self) -> Any:
        return self._trainer()

    @property
    def ids(self) -> list[str]:
        return self.requests or [self.id(index) for index in range(self.count)]

    def id(self, index: int) -> str:
        return f"{self.batch}-{self.trainer.accelerator.process_index}-{index}"

    @property
    def engine(self) -> tuple[str, str] | None:
        """Role and address of the server that generates; None if this process does."""
        args = self.trainer.args
        if not args.use_vllm or args.vllm_mode != "server":
            return None
        url = args.vllm_server_base_url
        return "rollout", (
            urlsplit(url).netloc if url else f"{args.vllm_server_host}:{args.vllm_server_port}"
        )

    def record_all(self, name: str, of: tuple[str, str] | None = None) -> None:
        # They are one call.
        now_ns = time.monotonic_ns()
        for each in self.ids:
            record(name, each, of=of, time_ns=now_ns)

    def end_steps(self) -> None:
        if self.is_stepping:
            record("steps_end", batch=self.batch)
        self.is_stepping = False


rollout = Rollout()


def _follow_batch(trainer: Any, *args: Any, **kwargs: Any) -> Following:
    global rollout
    if not trainer.model.training:
        return
    rank = trainer.accelerator.process_index
    recording.detect_role("trainer", f"rank {rank}")
    rollout.end_steps()
    every = trainer.args.steps_per_generation * trainer.num_iterations
    rollout = mine = Rollout(trainer, str(trainer._step // every))
    try:
        yield
        if rank == 0:
            record("batch_complete", batch=mine.batch)
        mine.is_stepping = True
        record("steps_begin", batch=mine.batch)
    finally:
        mine.is_open = False


def _follow_generate(trainer: Any, prompts: Any, *args: Any, **kwargs: Any) -> Following:
    mine = rollout
    if not mine.is_open:
        return
    mine.count, mine.sent_ns = len(prompts), time.monotonic_ns()
    result = yield
    if mine.requests:
        return
    prompt_ids, completion_ids, masks = result[:3]
    mine.count = len(completion_ids)
    begin_ns, end_ns = mine.turn_ns or (mine.sent_ns, time.monotonic_ns())
    for index, completion in enumerate(completion_ids):
        sample, prompt = mine.id(index), prompt_ids[index * len(prompt_ids) // len(completion_ids)]
        record("sample_sent", sample, batch=mine.batch, time_ns=mine.sent_ns)
        record("generation_begin", sample, of=mine.engine, time_ns=begin_ns)
        # The mask is 0 for the tokens of tools.
        tokens = len(completion) if masks is None else int(sum(masks[index]))
        record(
            "generation_end", sample, tokens_in=len(prompt), tokens_out=tokens, of=mine.engine,
            time_ns=end_ns,
        )  # fmt: skip


def _follow_turn(trainer: Any, *args: Any, **kwargs: Any) -> Following:
    mine = rollout
    if not mine.is_open:
        return
    begin_ns = time.monotonic_ns()
    users = sorted(set(mine.tool_users))
    mine.tool_users.clear()
    yield
    # The weights may have been sent meanwhile, which begins the turn again.
    begin_ns = max(begin_ns, mine.sent_ns)
    if mine.turn_ns is None:
        mine.turn_ns = begin_ns, time.monotonic_ns()
    for index in users:
        record("generation_begin", mine.id(index), of=mine.engine, time_ns=begin_ns)
        record("generation_end", mine.id(index), of=mine.engine)


def _follow_tools(trainer: Any, *args: Any, **kwargs: Any) -> Following:
    mine = rollout
    if mine.is_open:
        for index, tools in enumerate(trainer._sync_tool_dicts):
            for name, tool in tools.items():
                tools[name] = _time_tool(mine, index, tool)
    yield


def _time_tool(mine: Rollout, index: int, tool: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(tool)
    def call(*args: Any, **kwargs: Any) -> Any:
        of = "tool", str(tool.__name__)
        mine.tool_users.append(index)
        record("tool_begin", mine.id(index), of=of)
        try:
            return tool(*args, **kwargs)
        finally:
            record("tool_end", mine.id(index), of=of)

    return call


def _follow_part(edge: str) -> Callable[..., Following]:
    def follow(context: Any, *args: Any) -> Following:
        name = context.name.rpartition(".")[2]
        if rollout.is_open and name in rollout.trainer.reward_func_names:
            rollout.record_all(f"reward_{edge}", ("reward", name))
        elif rollout.is_open and name == "_get_per_token_logps_and_entropies":
            rollout.record_all(f"logprobs_{edge}")
        yield

    return follow


def _follow_weights(generation: Any, *args: Any, **kwargs: Any) -> Following:
    mine = rollout
    record("weights_publish_begin")
    yield
    record("weights_publish_end")
    if mine.turn_ns is None:
        mine.sent_ns = time.monotonic_ns()


def _follow_step_end(handler: Any, args: Any, state: Any, *rest: Any, **kwargs: Any) -> Following:
    trainer = rollout.trainer
    if rollout.is_stepping and trainer is not None:
        every = trainer.args.steps_per_generation * trainer.num_iterations
        if trainer.state is state and not trainer._step % every:
            rollout.end_steps()
    yield


FOLLOWERS: dict[str, dict[str, Callable[..., Following]]] = {
    "trl.trainer.grpo_trainer": {
        "GRPOTrainer._generate_and_score_completions": _follow_batch,
        "GRPOTrainer._generate": _follow_generate,
        "GRPOTrainer._generate_single_turn": _follow_turn,
        "GRPOTrainer._tool_call_loop": _follow_tools,
    },
    "trl.extras.profiling": {
        "ProfilingContext.__enter__": _follow_part("begin"),
        "ProfilingContext.__exit__": _follow_part("end"),
    },
    "trl.generation.vllm_generation": {"VLLMGeneration.sync_weights": _follow_weights},
    "transformers.trainer_callback": {"CallbackHandler.on_step_end": _follow_step_end},
}
