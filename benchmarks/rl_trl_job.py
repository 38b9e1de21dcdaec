"""GRPO of TRL with several roles, and one fault of a known kind; no line of it records an event of a sample.

    python -m benchmarks.rl_trl_job FOLDER --fault slow_engine --seed 1

Two trainer ranks (TRL's GRPOTrainer over gloo), three engines, a tool server and a reward server are
processes of their own. The engines serve an OpenAI-compatible endpoint with Hugging Face's generate()
and a tiny random model, two requests at a time. TRL's `rollout_func` asks them with the `openai` client
in two turns, with a call of the tool between, and the reward function asks the reward server. So that
times do not depend on the other load of the machine, a token and an optimizer step also sleep.

Only the weights are sent by code of the job, because TRL sends them to vLLM only: two events.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import openai
import torch
import torch.distributed as dist
import transformers
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    GenerationConfig,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedTokenizerFast,
    TrainerCallback,
)
from transformers.generation.streamers import BaseStreamer
from trl import GRPOConfig, GRPOTrainer

import torchlens_perf as perf
from benchmarks.rl_job import (
    ENGINES,
    FAULTS,
    STEP_S,
    TIMEOUT_S,
    Log,
    Plan,
    post,
    post_json,
    run_processes,
)  # fmt: skip

VOCABULARY, PER_RANK, LENGTH, LAST = 96, 3, 16, 3
SLOTS, TOKEN_S = 2, 0.03
SIZES = {
    "slow_engine": 2.0, "slow_tool": 5.0, "slow_reward": 5.0, "slow_weights": 4.0, "slow_trainer_rank": 2.0,
    "idle_engines": 4.0,
}  # fmt: skip
"""Sizes of faults relative to those of rl_job.py. Iterations are several times as long as there."""


def create_model() -> Any:
    torch.manual_seed(0)
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCABULARY, n_positions=512, n_embd=32, n_layer=1, n_head=2, bos_token_id=1,
            eos_token_id=1, pad_token_id=0,
        )
    )  # fmt: skip


class SlowSteps:
    """Makes forward passes in training as slow as on a device of this speed, and notes their times."""

    def __init__(self, model: Any, sleep_s: float) -> None:
        self._sleep_s = sleep_s
        self.calls: list[tuple[float, float]] = []
        # TRL replaces the forward pass of the whole model.
        model.transformer.register_forward_pre_hook(self._sleep)

    def _sleep(self, module: Any, inputs: Any) -> None:
        if torch.is_grad_enabled():
            began_s = time.monotonic()
            time.sleep(self._sleep_s)
            self.calls.append((began_s, time.monotonic()))


class Engine:
    """Answers up to SLOTS chat requests at once, in parts of one token."""

    def __init__(self, plan: Plan, index: int, log: Log) -> None:
        self._model, self._log, self._slots = create_model().eval(), log, threading.Semaphore(SLOTS)
        is_slow = index == plan.victim
        self._token_s = TOKEN_S + (plan.excess("slow_engine", 1.5 * TOKEN_S) if is_slow else 0)
        self._take_s = plan.excess("slow_weights", 0.25)

    def chat(self, request: dict[str, Any], send: Any) -> None:
        prompt = [int(word[1:]) for each in request["messages"] for word in each["content"].split()]
        parts = Parts(self._token_s, send)
        length = request["max_tokens"]
        with self._slots, torch.no_grad():
            self._model.generate(
                input_ids=torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                generation_config=GenerationConfig(
                    max_new_tokens=length, min_new_tokens=length, do_sample=True, pad_token_id=0,
                    eos_token_id=1,
                ),
                streamer=parts,
            )  # fmt: skip
            usage = {"prompt_tokens": len(prompt), "completion_tokens": length}
            send({"choices": [], "usage": {**usage, "total_tokens": len(prompt) + length}})
        self._log.write(
            what="generation",
            id=request["user"],
            begin=parts.first_s,
            end=time.monotonic(),
            tokens=length,
        )

    def take(self, body: bytes) -> None:
        perf.event("weights_take_begin")
        time.sleep(self._take_s)
        values = torch.frombuffer(bytearray(body), dtype=torch.float32)
        torch.nn.utils.vector_to_parameters(values, self._model.parameters())
        perf.event("weights_take_end")


class Parts(BaseStreamer):
    """Sends each token as it comes, at the speed of the engine."""

    def __init__(self, token_s: float, send: Any) -> None:
        self._token_s, self._send, self._is_prompt = token_s, send, True
        self.first_s = 0.0

    def put(self, value: torch.Tensor) -> None:
        if self._is_prompt:
            self._is_prompt = False
            return
        time.sleep(self._token_s)
        self.first_s = self.first_s or time.monotonic()
        delta = {"role": "assistant", "content": f"w{int(value)} "}
        self._send({"choices": [{"index": 0, "delta": delta, "finish_reason": None}]})

    def end(self) -> None:
        pass


class _Handler(BaseHTTPRequestHandler):
    engine: Engine

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        if self.path == "/weights":
            self.engine.take(body)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        self.engine.chat(json.loads(body), self._send)
        self.wfile.write(b"data: [DONE]\n\n")

    def _send(self, part: dict[str, Any]) -> None:
        whole = {"id": "x", "object": "chat.completion.chunk", "created": 0, "model": "m", **part}
        self.wfile.write(b"data: " + json.dumps(whole).encode() + b"\n\n")
        self.wfile.flush()

    def log_message(self, format: str, *args: Any) -> None:
        pass


def run_engine(plan: Plan, index: int, ready: Connection) -> None:
    torch.set_num_threads(1)
    perf.role("rollout", name=f"engine-{index}")
    engine = Engine(plan, index, Log(plan.folder, f"engine-{index}"))
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"engine": engine}))
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    ready.send((f"engine-{index}", server.server_address[1]))
    ready.recv()


class Rollouts:
    """Generates the samples of a rank: a turn, the tool, and a short last turn."""

    def __init__(self, plan: Plan, rank: int, ports: dict[str, int], log: Log) -> None:
        self._plan, self._rank, self._ports, self._log = plan, rank, ports, log
        self._random = random.Random(plan.seed)
        self._pool = ThreadPoolExecutor(PER_RANK)
        self.iteration = -1
        self.started_s = 0.0
        self._clients = [
            openai.OpenAI(
                base_url=f"http://127.0.0.1:{port}/v1",
                api_key="-",
                timeout=TIMEOUT_S,
                max_retries=0,
            )
            for name, port in ports.items()
            if name.startswith("engine")
        ]

    def __call__(self, prompts: list[str], trainer: Any) -> dict[str, Any]:
        self.started_s = time.monotonic()
        self.iteration += 1
        plan, count = self._plan, 2 * PER_RANK
        lengths = [self._random.randint(LENGTH - 3, LENGTH + 3) for _ in range(count)]
        if plan.has("long_samples"):
            lengths[self._random.randrange(count)] = round(
                LENGTH * (1 + plan.excess("long_samples", 5))
            )
        engines = [index % ENGINES for index in range(count)]
        if plan.has("loaded_engine"):
            elsewhere = [index for index, engine in enumerate(engines) if engine != plan.victim]
            for index in elsewhere[:: round(2 / plan.strength)]:
                engines[index] = plan.victim
        mine = range(self._rank * PER_RANK, (self._rank + 1) * PER_RANK)
        texts = prompts * PER_RANK if len(prompts) == 1 else prompts
        done = [
            self._pool.submit(
                self._follow, f"{self.iteration}-{index}", texts[index % PER_RANK], lengths[index],
                engines[index],
            )
            for index in mine
        ]  # fmt: skip
        completions = [each.result(TIMEOUT_S) for each in done]
        return {
            "prompt_ids": [[int(word[1:]) for word in text.split()] for text in texts],
            "completion_ids": completions,
            "logprobs": None,
            "sample": [f"{self.iteration}-{index}" for index in mine],
        }

    def _follow(self, name: str, prompt: str, length: int, engine: int) -> list[int]:
        messages: list[Any] = [{"role": "user", "content": prompt}]
        tokens = self._ask(engine, f"{name}-0", messages, length)
        began_s = time.monotonic()
        post_json(self._ports["tool"], "/run", id=name, tokens=tokens)
        self._log.write(what="tool", id=name, begin=began_s, end=time.monotonic())
        messages += [
            {"role": "assistant", "content": " ".join(f"w{each}" for each in tokens)},
            {"role": "user", "content": "w7"},
        ]
        tokens += self._ask(engine, f"{name}-1", messages, LAST)
        self._log.write(what="answer", id=name, end=time.monotonic())
        return tokens

    def _ask(self, engine: int, name: str, messages: list[Any], length: int) -> list[int]:
        stream = self._clients[engine].chat.completions.create(
            model="m", messages=messages, max_tokens=length, user=name, stream=True,
            stream_options={"include_usage": True},
        )  # fmt: skip
        texts = [part.choices[0].delta.content for part in stream if part.choices]
        return [int(each[1:]) for each in texts]


class Publish(TrainerCallback):
    """Sends the weights to all engines after the last step of an iteration; on rank 0."""

    def __init__(
        self,
        plan: Plan,
        rollouts: Rollouts,
        ports: dict[str, int],
        log: Log,
        model: Any,
        steps: SlowSteps,
    ) -> None:
        self._plan, self._rollouts, self._ports, self._log = plan, rollouts, ports, log
        self._model, self._steps = model, steps

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step % self._plan.steps:
            return
        steps_end_s, calls = time.monotonic(), self._steps.calls
        if self._log.rank == 0:
            perf.event("weights_publish_begin")
            values = torch.nn.utils.parameters_to_vector(self._model.parameters()).detach()
            for name, port in self._ports.items():
                if name.startswith("engine"):
                    post(port, "/weights", values.numpy().tobytes())
            perf.event("weights_publish_end")
        end_s = time.monotonic()
        # No rank asks for samples of old weights.
        dist.barrier()
        self._log.write(
            what="iteration", iteration=self._rollouts.iteration, start=self._rollouts.started_s,
            complete=calls[0][0], steps_begin=calls[0][0], steps_end=steps_end_s,
            own=sum(end - begin for begin, end in calls), end=end_s,
        )  # fmt: skip
        calls.clear()


class RankLog(Log):
    def __init__(self, folder: Path, rank: int) -> None:
        super().__init__(folder, f"rank-{rank}")
        self.rank = rank


def run_trainer(plan: Plan, rank: int, store: int, ports: dict[str, int]) -> None:
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2",
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(store), ACCELERATE_USE_CPU="1",
    )  # fmt: skip
    torch.set_num_threads(1)
    step_s = STEP_S + plan.excess("idle_engines", 0.5)
    if rank == 1:
        step_s += plan.excess("slow_trainer_rank", 0.15)
    model = create_model()
    slow = SlowSteps(model, step_s)
    log = RankLog(plan.folder, rank)
    rollouts = Rollouts(plan, rank, ports, log)
    pool = ThreadPoolExecutor(PER_RANK)

    def ask(name: str, tokens: list[int]) -> float:
        return post_json(ports["reward"], "/run", id=name, tokens=tokens)

    def judge(
        completions: list[Any], completion_ids: list[list[int]], sample: list[str], **rest: Any
    ) -> list[float]:
        began_s = time.monotonic()
        found = [*pool.map(ask, sample, completion_ids)]
        log.write(what="reward", iteration=rollouts.iteration, begin=began_s, end=time.monotonic())
        return found

    words = {"[PAD]": 0, "[EOS]": 1, **{f"w{index}": index for index in range(2, VOCABULARY)}}
    raw = Tokenizer(models.WordLevel(words, unk_token="[PAD]"))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="[PAD]", eos_token="[EOS]")
    data = Dataset.from_dict(
        {"prompt": [f"w{index % 60 + 2} w{index % 7 + 2}" for index in range(200)]}
    )
    args = GRPOConfig(
        str(plan.folder / "out"), per_device_train_batch_size=PER_RANK // plan.steps, num_generations=3,
        steps_per_generation=plan.steps, gradient_accumulation_steps=1, max_steps=plan.iterations * plan.steps,
        max_completion_length=256, logging_steps=1000, save_strategy="no", use_cpu=True, bf16=False,
        report_to="none", disable_tqdm=True, gradient_checkpointing=False, learning_rate=1e-5, seed=plan.seed,
        num_iterations=1, beta=0.0,
    )  # fmt: skip
    trainer = GRPOTrainer(
        model, reward_funcs=[judge], args=args, train_dataset=data, processing_class=tokenizer,
        rollout_func=rollouts, callbacks=[Publish(plan, rollouts, ports, log, model, slow)],
    )  # fmt: skip
    with perf.watch(dir=str(plan.folder / "runs")):
        trainer.train()


def run_job(plan: Plan) -> Path:
    """Run the job. Return its run directory. Raise RuntimeError if a process fails."""
    plan.folder.mkdir(parents=True, exist_ok=True)
    name = f"trl-{plan.fault.replace('+', '-') or 'clean'}-{plan.seed}-{os.getpid()}"
    os.environ.update(
        TORCHLENS_PERF_RUN_ID=name, TORCHLENS_PERF=str(int(plan.records)), HF_HUB_OFFLINE="1",
        TRL_EXPERIMENTAL_SILENCE="1",
    )  # fmt: skip
    # The libraries are imported once, before the processes are made.
    ports = run_processes(plan, ENGINES, run_engine, run_trainer)
    (plan.folder / "ports.json").write_text(json.dumps(ports))
    return plan.folder / "runs" / name


def main() -> None:
    parser = argparse.ArgumentParser(description="GRPO of TRL with a fault.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--fault", default="", help=f"one or two (A+B) of {', '.join(FAULTS)}")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--iterations", type=int, default=6)
    parser.add_argument("--off", action="store_true", help="record nothing")
    given = parser.parse_args()
    transformers.logging.set_verbosity_error()
    plan = Plan(given.folder, given.fault, given.seed, given.iterations, not given.off, sizes=SIZES)
    print(run_job(plan))


if __name__ == "__main__":
    main()
