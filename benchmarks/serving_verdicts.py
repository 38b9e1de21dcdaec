"""Verdicts on a vLLM engine of two tensor-parallel ranks, and the cost of its watch.

    .venv-vllm/bin/python -m benchmarks.serving_verdicts --clean 10 --slow 3 --pairs 10

One engine on the CPU serves a small model with random weights. In each run, the workers record as
with TORCHLENS_PERF=1: in clean runs, in runs with a sleep in a layer of rank 1, and in pairs of runs
with and without a watch. The last line of the output is JSON.
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

    def time_passes(self) -> None:
        """Time the calls of the engine by the CPU clock of the thread, without the collectives.

        A rank that waits in a collective of shared memory, or for the engine, keeps its CPU busy.
        """
        from vllm.distributed import parallel_state
        from vllm.v1.executor.multiproc_executor import WorkerProc

        self.passes: list[float] = []
        self.in_collectives = 0.0

        def time_collective(call: Callable[..., Any]) -> Callable[..., Any]:
            def timed(*args: Any, **kwargs: Any) -> Any:
                began_s = time.thread_time()
                try:
                    return call(*args, **kwargs)
                finally:
                    self.in_collectives += time.thread_time() - began_s

            return timed

        shared = parallel_state.get_tp_group().device_communicator.dist_module
        for name in ("all_reduce", "all_gather_into_tensor", "gather"):
            setattr(shared, name, time_collective(getattr(shared, name)))
        execute = WorkerProc._execute_worker_rpc

        def timed_call(worker: Any, request: Any) -> None:
            began_s, self.in_collectives = time.thread_time(), 0.0
            execute(worker, request)
            seconds = time.thread_time() - began_s - self.in_collectives
            if request[0] == "execute_model":
                self.passes.append(seconds)
            elif request[0] == "sample_tokens" and self.passes:
                self.passes[-1] += seconds

        WorkerProc._execute_worker_rpc = timed_call

    def take_pass_times(self) -> list[float]:
        """Return the CPU times of all passes since the last call."""
        passes, self.passes = self.passes, []
        return passes


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


def estimate_cost(pairs: list[tuple[float, float]]) -> dict[str, float]:
    """Return the median of the relative differences, with a 95% interval by resampling."""
    shares = [with_watch / without - 1 for with_watch, without in pairs]
    chance = random.Random(0)
    medians = sorted(statistics.median(chance.choices(shares, k=len(shares))) for _ in range(2000))
    return {"median": statistics.median(shares), "low": medians[50], "high": medians[1950]}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clean", type=int, default=0)
    parser.add_argument("--slow", type=int, default=0)
    parser.add_argument("--pairs", type=int, default=0)
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
        engine.call("time_passes")
        pairs: list[dict[bool, float]] = []
        for number in range(options.pairs):
            pairs.append({})
            for watched in (True, False) if number % 2 else (False, True):
                if watched:
                    engine.call("start_watch")
                    # The sidecar imports its libraries for some seconds.
                    time.sleep(_SETTLE_S)
                engine.generate(_WARM_UP)
                engine.call("take_pass_times")
                answers.append(engine.generate(options.tokens))
                passes = [each for rank in engine.call("take_pass_times") for each in rank]
                # Other programs make some passes longer.
                pairs[-1][watched] = statistics.median(passes)
                if watched:
                    engine.call("stop_watch")
            print("pair", pairs[-1], flush=True)
        results["same_tokens"] = all(each == expected for each in answers)
        if len(pairs) > 1:
            results["cost"] = estimate_cost([(each[True], each[False]) for each in pairs])
            results["pass_cpu_s"] = statistics.median(each[False] for each in pairs)
        engine.shut_down()
        print(json.dumps(results), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
