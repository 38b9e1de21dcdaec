"""Verdicts on a vLLM engine of two tensor-parallel ranks, and the cost of its watch.

    .venv-vllm/bin/python -m benchmarks.serving_verdicts --clean 10 --slow 3 --passes 2000

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

    def alternate(self) -> None:
        """Record every other pass, and time each pass by the CPU clock of the thread.

        Collectives are left out: a rank that waits in shared memory keeps its CPU busy.
        """
        from vllm.distributed import parallel_state
        from vllm.v1.executor.multiproc_executor import WorkerProc

        from torchlens_perf.roles import serving

        self.passes: list[float] = []
        self.in_collectives = 0.0
        communicator = parallel_state.get_tp_group().device_communicator
        watched, recorded = serving._serving, dict(vars(communicator))

        def time_collective(call: Callable[..., Any]) -> Callable[..., Any]:
            def timed(*args: Any, **kwargs: Any) -> Any:
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

        def timed_call(worker: Any, request: Any) -> None:
            if request[0] == "execute_model":
                is_recorded = len(self.passes) % 2 == 0
                serving._serving = watched if is_recorded else None
                for name in ("all_reduce", "all_gather"):
                    vars(communicator).pop(name, None)
                    if is_recorded:
                        setattr(communicator, name, recorded[name])
                self.passes.append(0.0)
            began_s, self.in_collectives = time.thread_time(), 0.0
            execute(worker, request)
            if request[0] in ("execute_model", "sample_tokens") and self.passes:
                self.passes[-1] += time.thread_time() - began_s - self.in_collectives

        WorkerProc._execute_worker_rpc = timed_call

    def take_passes(self) -> list[float]:
        """Return the CPU time of each pass. The first is recorded, the second is not, and so on."""
        return self.passes


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
    """Return the median difference of a recorded pass and the next one, with a 95% interval."""
    more, chance = [first - second for first, second in pairs], random.Random(0)
    medians = sorted(statistics.median(chance.choices(more, k=len(more))) for _ in range(1000))
    pass_s = statistics.median(second for _, second in pairs)
    return {
        "pairs": len(pairs),
        "pass_cpu_s": pass_s,
        "share": statistics.median(more) / pass_s,
        "low": medians[25] / pass_s,
        "high": medians[975] / pass_s,
    }


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
            while len((ranks := engine.call("take_passes"))[0]) < options.passes:
                answers.append(engine.generate(options.tokens))
            pairs = [pair for rank in ranks for pair in zip(rank[::2], rank[1::2], strict=False)]
            results["cost"] = estimate_cost(pairs)
            print(results["cost"], flush=True)
        results["same_tokens"] = all(each == expected for each in answers)
        engine.shut_down()
        print(json.dumps(results), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
