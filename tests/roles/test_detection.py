"""Tests of detecting the role of a process from its command line."""

from __future__ import annotations

import pytest

from torchlens_perf.roles.detection import find_role


@pytest.mark.parametrize(
    ("command", "role"),
    [
        ("python train.py --engine vllm", "other"),
        ("/usr/bin/python3 /opt/bin/vllm serve Qwen/Qwen3-4B", "rollout"),
        ("python -m vllm.entrypoints.openai.api_server --model m", "rollout"),
        ("VLLM::EngineCore_DP0", "rollout"),
        ("/opt/bin/python /opt/bin/trl vllm-serve --model m", "rollout"),
        ("python -m sglang.launch_server --model m", "rollout"),
        ("ray::ActorRolloutRefWorker.update_actor", "trainer"),
        ("ray::WorkerDict", "other"),
        ("ray::CriticWorker", "trainer"),
        ("ray::RewardManagerWorker.compute_score", "reward"),
        ("ray::vLLMHttpServer", "rollout"),
        ("ray::AgentLoopWorker.generate_sequences", "tool"),
        ("ray::IDLE", "other"),
        ("", "other"),
    ],
)
def test_role_is_in_the_command_line(command: str, role: str) -> None:
    assert find_role(command.split()) == role
