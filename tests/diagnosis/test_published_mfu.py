"""Published utilizations from the numbers of their configurations, by formulas that the counts of
real models confirm.
"""

from __future__ import annotations

import pytest
import torch

from tests.recorder.test_operators import by_tap, flops_by_pass
from tests.support.counted_models import Block, Decoder, training
from tests.support.transformer_flops import Transformer, palm_flops_per_token
from torchlens_perf.diagnosis.device_peaks import find_device_peak
from torchlens_perf.recorder import native_tap
from torchlens_perf.run.operators import Pass

GPT_3 = Transformer(layers=96, hidden=12288, heads=96, vocabulary=51200)
LLAMA_2 = Transformer(80, 8192, 64, 32000, kv_heads=8, inner=28672, gated=True)


@pytest.mark.skipif(
    native_tap.load_tap() is None,
    reason="the native tap is not built: torchlens-perf build-tap builds it",
)
@pytest.mark.parametrize(("kv_heads", "inner", "gated"), [(4, 0, False), (2, 56, True)])
def test_formula_equals_the_operations_of_a_model(kv_heads: int, inner: int, gated: bool) -> None:
    """The gradient of the embeddings' input needs no product, so all products count three times."""
    model = Decoder(lambda: Block(kv_heads=kv_heads, inner=inner, gated=gated))
    config = Transformer(2, 32, 4, 50, kv_heads, inner, gated)
    tokens = torch.randint(0, 50, (3, 20))

    counted = flops_by_pass(by_tap(training(model, tokens)))

    model_flops = counted[Pass.FORWARD] + counted[Pass.BACKWARD]
    assert model_flops == 60 * config.flops_per_token(20)


def test_gpt_3_reaches_its_published_utilization() -> None:
    """Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", 2022,
    table 5: 64 sequences on 64 A100 in 13.75 s, MFU 51.4 %.
    """
    peak = find_device_peak("NVIDIA A100-SXM4-80GB")
    assert peak is not None
    flops = 64 * 2048 * GPT_3.flops_per_token(2048)

    assert flops / 13.75 / (64 * peak.flops_per_s["bf16"]) == pytest.approx(0.514, rel=0.01)


@pytest.mark.parametrize(
    ("model", "length", "tokens_per_s", "published"),
    [(GPT_3, 2048, 716, 771e12), (GPT_3, 2048, 825, 888e12), (LLAMA_2, 4096, 1728, 768e12)],
)
def test_published_rates_of_nemo_are_reproduced(
    model: Transformer, length: int, tokens_per_s: float, published: float
) -> None:
    """Tokens/s and model FLOP/s of one GPU in NVIDIA's performance summary of NeMo 24.12."""
    assert model.flops_per_token(length) * tokens_per_s == pytest.approx(published, rel=0.01)


def test_palm_reaches_its_published_utilization() -> None:
    """Chowdhery et al., "PaLM", 2022, table 3: 238.3 K tokens/s on 6144 TPU v4, MFU 46.2 %."""
    flops = palm_flops_per_token(540.35e9, 118, 48, 256, 2048)

    assert flops * 238.3e3 / (6144 * 275e12) == pytest.approx(0.462, rel=0.01)
