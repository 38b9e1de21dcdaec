"""Operations of models in transformers equal those of torch's counter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.recorder.test_operators import by_tap, by_torch, flops_by_pass
from torchlens_perf.recorder import native_tap

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

pytestmark = pytest.mark.skipif(
    native_tap.load_tap() is None,
    reason="the native tap is not built: torchlens-perf build-tap builds it",
)
SMALL = {
    "vocab_size": 100,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
}
TOKENS, LAYERS, CHOSEN = 48, 2, 2


def t5() -> Any:
    config = transformers.T5Config(
        vocab_size=100, d_model=32, d_ff=64, d_kv=8, num_layers=2, num_heads=4,
        decoder_start_token_id=0, pad_token_id=0,
    )  # fmt: skip
    return transformers.T5ForConditionalGeneration(config)


def bert() -> Any:
    return transformers.BertForMaskedLM(transformers.BertConfig(**SMALL))


def llama() -> Any:
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**SMALL, num_key_value_heads=2, bos_token_id=1, eos_token_id=2)
    )


def training(model: Any) -> Callable[[], None]:
    ids = torch.randint(3, 90, (2, TOKENS // 2))
    return lambda: model(input_ids=ids, labels=ids).loss.backward()


@pytest.mark.parametrize("make", [t5, bert, llama])
def test_operations_of_a_model_equal_those_of_torchs_counter(make: Callable[[], Any]) -> None:
    step = training(make())
    step()

    assert flops_by_pass(by_tap(step)).total() == by_torch(step).get_total_flops() > 0


def test_experts_in_grouped_products_are_counted_by_routed_tokens() -> None:
    """torch 2.13 has no formula for these products."""
    config = transformers.MixtralConfig(
        **SMALL, num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=CHOSEN,
        bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    step = training(transformers.MixtralForCausalLM(config))
    step()
    # Gate, up and down of 32 x 64 each, in a forward pass and a backward pass twice as long.
    experts = 2 * 3 * LAYERS * TOKENS * CHOSEN * 3 * 32 * 64

    more = flops_by_pass(by_tap(step)).total() - by_torch(step).get_total_flops()
    assert more == experts
