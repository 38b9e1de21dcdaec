"""Verdicts on a vLLM engine of two tensor-parallel ranks, and the cost of its watch.

    .venv-vllm/bin/python -m benchmarks.serving_verdicts --clean 10 --slow 3 --passes 2000

One engine on the CPU serves a small model with random weights. In each run, the workers record as
with TORCHLENS_PERF=1: in clean runs, in runs with a sleep in a layer of rank 1, and in pairs of runs
with and without a watch. The last line of the output is JSON.

The cost grows with the number of collectives. `--hidden 1024 --layers 24` has the shape of a model with
half a billion parameters, whose passes take tens of milliseconds on a CPU.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

SLOW_RANK = 1
MODES = ("recorded", "plain", "without collectives", "plain")
"""How passes are recorded in turn, to measure the cost."""
_PROMPTS, _PROMPT_TOKENS = 4, 16
_WARM_UP, _SETTLE_S = 30, 4
_MODEL = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_attention_heads": 8,
    "num_key_value_heads": 8, "vocab_size": 1024, "max_position_embeddings": 2048, "hidden_act": "silu",
    "rms_norm_eps": 1e-5, "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": False,
}  # fmt: skip
_ENVIRONMENT = {
    "TORCHLENS_PERF": "1",
    "TORCHLENS_PERF_REPORT": "quiet",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    # The sampler would be compiled for half a minute.
    "TORCHDYNAMO_DISABLE": "1",
}


class WorkerExtension:
    """Methods that collective_rpc() calls in each worker."""

    def start_watch(self) -> None:
        from torchlens_perf.roles import serving

        serving._start(self)

    def stop_watch(self) -> str:
        from torchlens_perf.roles import serving

        folder = "" if serving._serving is None else str(serving._serving._watch.run_dir)
        serving._stop()
        return folder

    def slow_down(self, rank: int, seconds: float) -> None:
        """Let each forward pass of a layer of this rank take longer; 0 undoes it."""
        self.slept: list[float] = []
        layer = self.model_runner.model.model.layers[1].mlp  # type: ignore[attr-defined]
        vars(layer).pop("forward", None)
        if seconds and self.rank == rank:  # type: ignore[attr-defined]
            forward = layer.forward

            def sleep_and_forward(*args: Any, **kwargs: Any) -> Any:
                began_s = time.perf_counter()
                time.sleep(seconds)
                self.slept.append(time.perf_counter() - began_s)
                return forward(*args, **kwargs)

            layer.forward = sleep_and_forward

    def read_slept(self) -> float:
        return statistics.median(self.slept) if self.slept else 0.0

    def alternate(self) -> None:
        """Record every other pass, half of these without collectives, and time each by the CPU
        clock of the thread.

        The time in collectives is left out: a rank that waits in shared memory keeps its CPU busy.
        A pass that is not recorded ends a step too, outside of the time, so that steps stay equal.
        """
        import torch
        from vllm.distributed import parallel_state
        from vllm.v1.executor.multiproc_executor import WorkerProc

        from torchlens_perf.recorder.recorder import route_calls, unroute_calls
        from torchlens_perf.roles import serving

        self.passes: list[float] = []
        self.in_collectives, self.collectives = 0.0, 0
        self.in_pass, self.mode = False, ""
        communicator = parallel_state.get_tp_group().device_communicator
        watched, recorded = serving._serving, dict(vars(communicator))
        assert watched is not None
        marks = [name for name in serving._OPERATORS if name in recorded]
        call_module = vars(torch.nn.Module)["__call__"]

        def time_collective(call: Callable[..., Any]) -> Callable[..., Any]:
            def timed(*args: Any, **kwargs: Any) -> Any:
                self.collectives += 1
                began_s = time.thread_time()
                try:
                    return call(*args, **kwargs)
                finally:
                    self.in_collectives += time.thread_time() - began_s

            return timed

        for name in ("all_reduce", "all_gather_into_tensor", "gather"):
            shared = communicator.dist_module
            setattr(shared, name, time_collective(getattr(shared, name)))
        execute = WorkerProc._execute_worker_rpc

        def prepare(mode: str, scheduled: Any) -> None:
            for name in marks:
                vars(communicator).pop(name, None)
                if mode == "recorded":
                    setattr(communicator, name, recorded[name])
            if mode == "plain":
                unroute_calls(call_module)
                watched.begin_pass(scheduled)
            else:
                route_calls(call_module)
            serving._serving = None if mode == "plain" else watched
            self.passes.append(0.0)
            self.collectives = 0

        def timed_call(worker: Any, request: Any) -> None:
            begins, ends = request[0] == "execute_model", request[0] == "sample_tokens"
            if begins:
                scheduled = request[1][0]
                # After the last token of a request, a pass without tokens frees its memory.
                self.in_pass = scheduled.total_num_scheduled_tokens > 0
            if not self.in_pass or not (begins or ends):
                execute(worker, request)
                return
            if begins:
                mode = self.mode = MODES[len(self.passes) % len(MODES)]
                prepare(mode, scheduled)
            began_s, self.in_collectives = time.thread_time(), 0.0
            execute(worker, request)
            self.passes[-1] += time.thread_time() - began_s - self.in_collectives
            if ends and self.mode == "plain":
                watched._session.recorder.without_gradient = 1
                watched.end_pass()

        WorkerProc._execute_worker_rpc = timed_call

    def take_passes(self) -> tuple[list[float], int]:
        """Return the CPU time of each pass, in the order of MODES, and the last one's collectives."""
        return self.passes, self.collectives


class Engine:
    """A vLLM engine whose passes are timed."""

    def __init__(self, folder: Path, options: argparse.Namespace) -> None:
        from vllm import LLM

        config = {**_MODEL, "hidden_size": options.hidden, "intermediate_size": 2 * options.hidden,
                  "num_hidden_layers": options.layers}  # fmt: skip
        (folder / "config.json").write_text(json.dumps(config))
        self._llm = LLM(
            str(folder), tensor_parallel_size=2, load_format="dummy", skip_tokenizer_init=True, dtype="float32",
            max_model_len=1024, enforce_eager=True, max_num_seqs=8, enable_prefix_caching=False,
            worker_extension_cls="benchmarks.serving_verdicts.WorkerExtension",
        )  # fmt: skip
        self.call = self._llm.collective_rpc

    def shut_down(self) -> None:
        """End the processes of the engine. Its parent would wait for them at its exit."""
        self._llm.llm_engine.engine_core.shutdown()

    def generate(self, tokens: int) -> list[list[int]]:
        """Return the tokens of each answer."""
        from vllm import SamplingParams

        sampling = SamplingParams(
            temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False
        )
        prompts = [
            {
                "prompt_token_ids": [
                    (7 * number + place) % 900 + 10 for place in range(_PROMPT_TOKENS)
                ]
            }
            for number in range(_PROMPTS)
        ]
        answers = self._llm.generate(prompts, sampling, use_tqdm=False)
        return [list(each.outputs[0].token_ids) for each in answers]


def read_slow_ranks(folder: str) -> dict[str, Any]:
    """Return what the report of a run says of slow ranks."""
    report = subprocess.run(
        [sys.executable, "-m", "torchlens_perf", "report", "--json", folder],
        capture_output=True, text=True, check=True, env={**os.environ, "TORCHLENS_PERF": "0"},
    ).stdout  # fmt: skip
    found = json.loads(report)
    return {
        "steps": found["steps"]["count"],
        "step_s": found["steps"]["p50_s"],
        "overhead": found["quality"]["overhead_share"],
        "sections": {each["name"]: each["calls"] for each in found["sections"]},
        "slow": [
            {"rank": each["rank"], "cost_s": each["cost_s_per_step"], "text": each["text"]}
            for each in found["verdicts"]
            if each["rank"] is not None
        ],
    }


def estimate_cost(ranks: list[tuple[list[float], int]]) -> dict[str, Any]:
    """Return the mean difference of a recorded pass and the next one, with 95% intervals.

    The means leave out 5% of the pairs at either end, which something else has interrupted.
    """
    plain_s = [each for passes, _ in ranks for each in passes[1::2]]
    more: dict[str, list[float]] = {
        mode: [
            recorded - plain
            for passes, _ in ranks
            for recorded, plain in zip(passes[at :: len(MODES)], passes[at + 1 :: len(MODES)], strict=False)
        ]
        for at, mode in enumerate(MODES)
        if mode != "plain"
    }  # fmt: skip
    chance, collectives = random.Random(0), ranks[0][1]

    def estimate(rounds: int) -> list[tuple[float, float]]:
        found = []
        for number in range(rounds + 1):
            drawn = [
                chance.choices(each, k=len(each)) if number else each for each in more.values()
            ]
            whole_s, without_s = map(_trimmed_mean, drawn)
            found.append((whole_s, (whole_s - without_s) / max(1, collectives)))
        return found

    (whole_s, each_s), *draws = estimate(1000)
    interval = [sorted(column)[at] for column in zip(*draws, strict=True) for at in (25, 974)]
    pass_s = statistics.median(plain_s)
    return {
        "pairs": len(more["recorded"]),
        "pass_cpu_s": pass_s,
        "collectives": collectives,
        "cost_s": whole_s,
        "share": whole_s / pass_s,
        "median_share": statistics.median(more["recorded"]) / pass_s,
        "share_interval": [each / pass_s for each in interval[:2]],
        "cost_s_per_collective": each_s,
        "collective_interval": interval[2:],
        "cost_s_without_collectives": whole_s - each_s * collectives,
    }


def describe_cost(cost: dict[str, Any], layers: int) -> str:
    low, high = cost["share_interval"]
    return (
        f"{1e6 * cost['cost_s_without_collectives']:.0f} us per pass"
        f" + {1e6 * cost['cost_s_per_collective']:.1f} us per collective, of {cost['collectives']};"
        f" {cost['share']:.2%} [{low:.2%}, {high:.2%}] of a pass of {1e3 * cost['pass_cpu_s']:.1f} ms"
        f" of CPU time with {layers} layers ({cost['pairs']} pairs)"
    )


def _trimmed_mean(values: list[float]) -> float:
    cut = len(values) // 20
    return statistics.fmean(sorted(values)[cut : len(values) - cut])


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clean", type=int, default=0)
    parser.add_argument("--slow", type=int, default=0)
    parser.add_argument("--passes", type=int, default=0, help="to measure the cost")
    parser.add_argument("--tokens", type=int, default=240)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--sleep", type=float, default=0.02)
    options = parser.parse_args(arguments)
    os.environ.update(_ENVIRONMENT)
    results: dict[str, Any] = {"clean": [], "slow": []}
    with tempfile.TemporaryDirectory() as folder:
        os.environ.setdefault("TORCHLENS_PERF_DIR", f"{folder}/runs")
        os.chdir(folder)
        engine = Engine(Path(folder), options)
        engine.generate(20)
        engine.call("stop_watch")
        expected = engine.generate(options.tokens)
        results["tokens"] = sum(map(len, expected))
        answers, runs = [], []
        for kind in ["clean"] * options.clean + ["slow"] * options.slow:
            engine.call("slow_down", args=(SLOW_RANK, options.sleep if kind == "slow" else 0.0))
            engine.call("start_watch")
            engine.generate(_WARM_UP)
            answers.append(engine.generate(options.tokens))
            runs.append((kind, engine.call("stop_watch")[0], engine.call("read_slept")[SLOW_RANK]))
            print(*runs[-1], flush=True)
        time.sleep(_SETTLE_S)  # The last sidecar writes its run.
        for kind, run, slept_s in runs:
            results[kind].append({"planted_s": slept_s, **read_slow_ranks(run)})
            print(kind, results[kind][-1], flush=True)
        engine.call("slow_down", args=(SLOW_RANK, 0.0))
        if options.passes:
            engine.call("start_watch")
            engine.generate(_WARM_UP)
            # The sidecar imports its libraries for some seconds.
            time.sleep(_SETTLE_S)
            engine.call("alternate")
            while len((ranks := engine.call("take_passes"))[0][0]) < options.passes:
                answers.append(engine.generate(options.tokens))
            results["cost"] = estimate_cost(ranks)
            print(describe_cost(results["cost"], options.layers), flush=True)
        results["same_tokens"] = all(each == expected for each in answers)
        engine.shut_down()
        print(json.dumps(results), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
