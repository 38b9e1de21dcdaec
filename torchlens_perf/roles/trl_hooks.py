"""Events of TRL's GRPOTrainer: one batch of samples, and the optimizer steps on them, are an iteration.

Each rank generates samples of its own, and all ranks know the number of the iteration.
"""

from __future__ import annotations

import itertools
import time
import weakref
from collections.abc import Callable, Generator, Sequence
from typing import Any
from urllib.parse import urlsplit

from torchlens_perf.roles import recording
from torchlens_perf.roles.event_file import NOT_GIVEN
from torchlens_perf.roles.recording import record

Following = Generator[None, Any, None]
BETWEEN_TURNS = "tool", "between turns"


class Rollout:
    """The iteration of this process's trainer."""

    def __init__(self, trainer: Any = None, batch: str = "") -> None:
        # The trainer belongs to the user, who may delete it.
        self._trainer = (lambda: None) if trainer is None else weakref.ref(trainer)
        self.batch, self.is_open = batch, trainer is not None
        """True from the request for samples until they have rewards."""
        self.is_generating = self.is_stepping = False
        self.ids: list[str] = []
        """Samples of this rank, of which the hooks of openai add those that they see."""
        self.sent_ns = time.monotonic_ns()
        """When the samples were sent, after the weights."""
        self.turns: list[tuple[int, int]] = []
        """Begin and end of each turn of their generation; empty if a function of the user generates."""

    @property
    def trainer(self) -> Any:
        return self._trainer()

    @property
    def engine(self) -> tuple[str, str] | None:
        """Role and address of the server that generates; None if this process does."""
        args = self.trainer.args
        if not args.use_vllm or args.vllm_mode != "server":
            return None
        url = args.vllm_server_base_url or f"//{args.vllm_server_host}:{args.vllm_server_port}"
        return "rollout", urlsplit(url).netloc.rpartition("@")[2]

    def record_all(self, name: str, of: tuple[str, str] | None = None) -> None:
        # They are one call.
        now_ns = time.monotonic_ns()
        for each in self.ids:
            record(name, each, of=of, time_ns=now_ns)

    def end_steps(self) -> None:
        if self.is_stepping:
            self.is_stepping = False
            record("steps_end", batch=self.batch)


rollout = Rollout()


def _count_steps(trainer: Any) -> int:
    """Return the number of steps on one batch of samples."""
    return int(trainer.args.steps_per_generation * trainer.num_iterations)


def _follow_batch(trainer: Any, *args: Any, **kwargs: Any) -> Following:
    global rollout
    if not trainer.model.training:
        return
    rank = trainer.accelerator.process_index
    recording.detect_role("trainer", f"rank {rank}")
    rollout.end_steps()
    rollout = mine = Rollout(trainer, str(trainer._step // _count_steps(trainer)))
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
    mine.sent_ns, mine.is_generating = time.monotonic_ns(), True
    result = yield
    mine.is_generating = False
    if mine.ids:
        return
    prompt_ids, completion_ids, masks = result[:3]
    rank = trainer.accelerator.process_index
    # The first turn may begin with sending the weights.
    turns = mine.turns or [(0, time.monotonic_ns())]
    turns[0] = mine.sent_ns, turns[0][1]
    for index, completion in enumerate(completion_ids):
        mine.ids.append(sample := f"{mine.batch}-{rank}-{index}")
        prompt = len(prompt_ids[index * len(prompt_ids) // len(completion_ids)])
        mask = [1] * len(completion) if masks is None else masks[index]
        record("sample_sent", sample, batch=mine.batch, time_ns=mine.sent_ns)
        _record_turns(sample, prompt, mask, turns, mine.engine)


def _record_turns(
    sample: str,
    prompt: int,
    mask: Sequence[int],
    turns: Sequence[tuple[int, int]],
    engine: tuple[str, str] | None,
) -> None:
    """Record the turns of a sample, and its tools between them. Samples without a call have fewer turns.

    prompt: number of tokens. mask: 0 for the tokens of tools, which are before each further turn.
    """
    runs = [(value, len(list(run))) for value, run in itertools.groupby(mask, bool)]
    # A mask of a function of the user says nothing of turns. The last turn may have no token.
    count = 1 if len(turns) == 1 else 1 + sum(not is_made for is_made, _ in runs)
    ended_ns, tokens = 0, [length for is_made, length in runs if is_made]
    for number, (begin_ns, end_ns) in enumerate(turns[:count]):
        if number:
            record("tool_begin", sample, of=BETWEEN_TURNS, time_ns=ended_ns)
            record("tool_end", sample, of=BETWEEN_TURNS, time_ns=begin_ns)
        made = sum(tokens[number : number + 1] if count > 1 else tokens)
        record("generation_begin", sample, of=engine, time_ns=begin_ns)
        record(
            "generation_end",
            sample,
            tokens_in=prompt if number == 0 else NOT_GIVEN,
            tokens_out=made,
            of=engine,
            time_ns=end_ns,
        )
        ended_ns = end_ns


def _follow_turn(*args: Any, **kwargs: Any) -> Following:
    begin_ns = time.monotonic_ns()
    yield
    rollout.turns.append((begin_ns, time.monotonic_ns()))


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
    mine.sent_ns = time.monotonic_ns()


def _follow_step_end(handler: Any, args: Any, state: Any, *rest: Any, **kwargs: Any) -> Following:
    trainer = rollout.trainer
    is_of_batch = rollout.is_stepping and trainer is not None and trainer.state is state
    if is_of_batch and not trainer._step % _count_steps(trainer):
        rollout.end_steps()
    yield


FOLLOWERS: dict[str, dict[str, Callable[..., Following]]] = {
    "trl.trainer.grpo_trainer": {
        "GRPOTrainer._generate_and_score_completions": _follow_batch,
        "GRPOTrainer._generate": _follow_generate,
        "GRPOTrainer._generate_single_turn": _follow_turn,
    },
    "trl.extras.profiling": {
        "ProfilingContext.__enter__": _follow_part("begin"),
        "ProfilingContext.__exit__": _follow_part("end"),
    },
    "trl.generation.vllm_generation": {"VLLMGeneration.sync_weights": _follow_weights},
    "transformers.trainer_callback": {"CallbackHandler.on_step_end": _follow_step_end},
}
