"""Detect the role of a process that has set none. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence

# Actors of Ray have the names of their classes, such as verl's. Its workers that train and generate are
# known by their trainer.
_COMMANDS = {
    "trainer": re.compile(r"^ray::\w*(ActorRolloutRef|Critic|TaskRunner|Trainer|Learner)"),
    "reward": re.compile(r"^ray::\w*(Reward|Judge|Verifier)"),
    "tool": re.compile(r"^ray::\w*(Tool|Env|Sandbox|AgentLoop)"),
    "rollout": re.compile(
        r"^ray::\w*(Rollout|Generat|LLMServer|HttpServer|LLMEngine)|^(VLLM|sglang)::"
        r"|\b(vllm\.entrypoints|vllm serve|vllm-serve|sglang\.launch_server)\b"
    ),
}


def find_role(command: Sequence[str]) -> str:
    """Return the role of the process with this command line; "other" if it is not known."""
    title = " ".join(command)
    return next((role for role, known in _COMMANDS.items() if known.search(title)), "other")
