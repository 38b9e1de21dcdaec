"""Detect the role of a process that has set none. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence

_SERVERS = re.compile(
    r"\b(vllm\.entrypoints|vllm serve|vllm-serve|trl\.scripts\.vllm_serve|sglang\.launch_server)|^(VLLM|sglang)::"
)
_ACTOR = re.compile(r"^ray::(\w+)")
_ACTORS = {
    # Workers of verl that train and generate are known by their trainer.
    "trainer": re.compile(r"ActorRolloutRef|Critic|TaskRunner|Trainer|Learner"),
    "reward": re.compile(r"Reward|Judge|Verifier"),
    "rollout": re.compile(r"Rollout|Generat|vLLM|SGLang|LLMServer|LLMEngine", re.IGNORECASE),
    "tool": re.compile(r"Tool|Env|Sandbox|AgentLoop"),
}


def find_role(command: Sequence[str]) -> tuple[str, str]:
    """Return role and name of the process with this command line; "other" if nothing is known."""
    title = " ".join(command)
    actor = _ACTOR.match(title)
    if actor is not None:
        for role, names in _ACTORS.items():
            if names.search(actor[1]):
                return role, actor[1]
    elif _SERVERS.search(title):
        return "rollout", ""
    return "other", ""
