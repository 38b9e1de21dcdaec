"""Events of generate() of Hugging Face's models."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

from torchlens_perf.roles import recording, trl_hooks
from torchlens_perf.roles.event_file import NOT_GIVEN


def _follow_generate(model: Any, *args: Any, **kwargs: Any) -> Generator[None, Any, None]:
    # The hooks of TRL record each sample of the batch.
    if trl_hooks.rollout.is_open:
        return
    sample = recording.make_id()
    recording.record("generation_begin", sample)
    result = yield
    given = kwargs.get("input_ids", kwargs.get("inputs", args[0] if args else None))
    sequences = getattr(result, "sequences", result)
    tokens_in = tokens_out = NOT_GIVEN
    if given is not None and len(given) == len(sequences) == 1:
        # The rows of a batch end with padding, which only the device could count.
        tokens_in, tokens_out = given.shape[1], sequences.shape[1] - 1
        if not model.config.is_encoder_decoder:
            tokens_out = sequences.shape[1] - tokens_in
    recording.record("generation_end", sample, tokens_in=tokens_in, tokens_out=tokens_out)


FOLLOWERS = {"transformers.generation.utils": {"GenerationMixin.generate": _follow_generate}}
