"""Floating-point operations of transformers from the numbers of their configuration.

Published utilizations rest on these formulas. Results are for training: a forward pass, and a
backward pass with twice its operations.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Transformer:
    """A decoder. Defaults are those of GPT-3."""

    layers: int
    hidden: int
    heads: int
    vocabulary: int
    kv_heads: int = 0
    """0: as many as heads."""
    inner: int = 0
    """Size of the hidden layer of an MLP; 0: 4 times `hidden`."""
    gated: bool = False
    """True for MLPs with three matrices (SwiGLU)."""

    @property
    def matrix_parameters(self) -> int:
        """Parameters that are multiplied with every token, without the output layer."""
        kv = self.hidden * (self.kv_heads or self.heads) // self.heads
        attention = 2 * self.hidden * (self.hidden + kv)
        mlp = (3 if self.gated else 2) * self.hidden * (self.inner or 4 * self.hidden)
        return self.layers * (attention + mlp)

    def flops_per_token(self, length: int) -> float:
        """Return model FLOPs per token, with causal attention counted in full.

        length: tokens in a sequence.
        """
        attention = 12 * self.layers * self.hidden * length
        return 6 * (self.matrix_parameters + self.hidden * self.vocabulary) + attention


def palm_flops_per_token(
    parameters: float, layers: int, heads: int, head_size: int, length: int
) -> float:
    """Return model FLOPs per token by the formula in PaLM's appendix B."""
    return 6 * parameters + 12 * layers * heads * head_size * length
