"""What every engine trains: one GPT and one stream of batches, the same to the last bit.

Plain torch, so that any interpreter with torch can run it. Weights are drawn in bf16, the type they
are stored in, so every engine's fp32 master weights start from the same values.

Note: the type to compute in. Matrix products in bf16 are slower than in fp32 by orders of magnitude
on processors without units for them. There every engine computes in fp32 on weights stored in bf16.
Ours widens the parameters by itself; for the others the layers here do. `_Widened` keeps the stored
weight for backward, not the wide copy, and widens again: a wide copy of every matrix would live
from forward to backward, and the peak memory of those engines would be blamed for it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

_INITIAL_STD = 0.02
_WINDOWS = 64  # of text there is, in all: a few steps see parts of it again and learn


@dataclass(frozen=True)
class Shape:
    """Of the model.

    Args:
        layers: blocks.
        width: of the residual stream.
        heads: of attention; they divide the width.
        vocabulary: different tokens.
        context: tokens of a window.

    Raises:
        ValueError: the heads do not divide the width, or a number is below 1.
    """

    layers: int
    width: int
    heads: int
    vocabulary: int
    context: int

    def __post_init__(self) -> None:
        if min(self.layers, self.width, self.heads, self.vocabulary, self.context) < 1:
            raise ValueError(f"all numbers of a shape are 1 at least, got {self}")
        if self.width % self.heads:
            raise ValueError(f"{self.heads} heads do not divide a width of {self.width}")

    @property
    def parameter_numel(self) -> int:
        """Elements of all parameters."""
        block = 12 * self.width**2 + 13 * self.width
        tables = 2 * self.vocabulary + self.context + 2  # the last two are the closing norm's
        return self.layers * block + tables * self.width

    @property
    def largest_numel(self) -> int:
        """Elements of the largest parameter."""
        return self.width * max(4 * self.width, self.vocabulary, self.context)

    def step_flop(self, batch: int) -> int:
        """Floating-point operations of a step: forward and backward, without what is recomputed.

        6 N T + 12 L W S T, where T are the step's tokens, N the parameters that are multiplied
        with (all but the two tables, which are only looked up in), L layers, W width and S context.
        A parameter takes a product and a sum for each token in forward, and twice that in backward;
        so do the two products of attention, counted as if nothing were masked.

        Source: Chowdhery et al., PaLM, 2022, appendix B.

        Args:
            batch: windows.
        """
        tables = (self.vocabulary + self.context) * self.width
        attention = 12 * self.layers * self.width * self.context
        return (6 * (self.parameter_numel - tables) + attention) * batch * self.context


SIZES = {
    # Many small blocks, so that a quarter of their states still holds a few of them at once.
    "tiny": Shape(layers=12, width=64, heads=1, vocabulary=256, context=32),
    "30m": Shape(layers=6, width=640, heads=10, vocabulary=256, context=256),
    "120m": Shape(layers=12, width=896, heads=14, vocabulary=2048, context=256),
    "134m": Shape(layers=12, width=768, heads=12, vocabulary=32000, context=256),
    "1.3b": Shape(layers=24, width=2048, heads=16, vocabulary=32000, context=1024),
}


class _Widened(torch.autograd.Function):
    """A linear layer on a weight of fewer bits than its input."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401 - torch's
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.bias_dtype = None if bias is None else bias.dtype
        wide_bias = None if bias is None else bias.to(x.dtype)
        return functional.linear(x, weight.to(x.dtype), wide_bias)

    @staticmethod
    def backward(
        ctx: Any,  # noqa: ANN401 - torch's
        gradient: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        x, weight = ctx.saved_tensors
        rows = gradient.flatten(0, -2)
        of_weight = (rows.t() @ x.flatten(0, -2)).to(weight.dtype)
        of_bias = None if ctx.bias_dtype is None else rows.sum(0).to(ctx.bias_dtype)
        return gradient @ weight.to(gradient.dtype), of_weight, of_bias


class Linear(nn.Linear):
    """Computes in its input's type."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (..., in) to (..., out), both of one type."""
        if self.weight.dtype == x.dtype:
            return functional.linear(x, self.weight, self.bias)
        mapped: torch.Tensor = _Widened.apply(x, self.weight, self.bias)  # type: ignore[no-untyped-call]
        return mapped


class LayerNorm(nn.LayerNorm):
    """Computes in its input's type."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise the last dimension."""
        weight, bias = self.weight.to(x.dtype), self.bias.to(x.dtype)
        return functional.layer_norm(x, self.normalized_shape, weight, bias, self.eps)


class Block(nn.Module):
    """Attention and a two-layer perceptron, each added to the stream."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width = shape.width
        self.heads = shape.heads
        self.before_mixing, self.before_mapping = LayerNorm(width), LayerNorm(width)
        self.look = Linear(width, 3 * width)
        self.mixed = Linear(width, width)
        self.up = Linear(width, 4 * width)
        self.down = Linear(4 * width, width)

    def forward(self, stream: torch.Tensor) -> torch.Tensor:
        """Map the stream, shape (batch, tokens, width), to its next state."""
        parts = self.look(self.before_mixing(stream)).chunk(3, dim=-1)
        query, key, value = (p.unflatten(-1, (self.heads, -1)).transpose(1, 2) for p in parts)
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        stream = stream + self.mixed(seen.transpose(1, 2).flatten(2))
        added: torch.Tensor = self.down(functional.gelu(self.up(self.before_mapping(stream))))
        return stream + added


class GPT(nn.Module):
    """Predicts the next token at every place of a window.

    Args:
        shape: its numbers.
        compute_dtype: type to compute in; None: the type the weights have when they are used.
        checkpointing: whether blocks are recomputed in backward.
    """

    def __init__(
        self,
        shape: Shape,
        *,
        compute_dtype: torch.dtype | None = None,
        checkpointing: bool = False,
    ) -> None:
        super().__init__()
        self.compute_dtype = compute_dtype
        self.checkpointing = checkpointing
        self.tokens = nn.Embedding(shape.vocabulary, shape.width)
        self.places = nn.Embedding(shape.context, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = LayerNorm(shape.width)
        self.head = Linear(shape.width, shape.vocabulary, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the mean cross-entropy of each next token, in nats: fp32, a scalar.

        Args:
            ids: int64, shape (batch, context + 1).
        """
        read, wanted = ids[:, :-1], ids[:, 1:]
        places = self.places(torch.arange(read.shape[1], device=ids.device))
        stream = self.tokens(read)
        dtype = self.compute_dtype or stream.dtype
        stream = stream.to(dtype) + places.to(dtype)
        for block in self.blocks:
            if self.checkpointing:
                stream = checkpoint(block, stream, use_reentrant=False)
            else:
                stream = block(stream)
        logits = self.head(self.norm(stream))
        return functional.cross_entropy(logits.float().flatten(0, 1), wanted.flatten())


def build(
    shape: Shape,
    *,
    seed: int,
    compute_dtype: torch.dtype | None,
    checkpointing: bool = False,
) -> GPT:
    """A model with bf16 weights drawn from the seed, the same for every engine on one machine.

    Args:
        shape: its numbers.
        seed: of the weights.
        compute_dtype: see `GPT`.
        checkpointing: see `GPT`.
    """
    with _default_dtype(torch.bfloat16):
        model = GPT(shape, compute_dtype=compute_dtype, checkpointing=checkpointing)
    drawing = torch.device("cuda" if torch.cuda.is_available() else "cpu")  # the faster one
    generator = torch.Generator(drawing).manual_seed(seed)
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            drawn = torch.empty_like(parameter, device=drawing)
            drawn.normal_(std=_INITIAL_STD, generator=generator)
            parameter.data.copy_(drawn)
        else:
            nn.init.constant_(parameter, float(not name.endswith("bias")))
    return model


@contextlib.contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Build in this type at once: a wide model first would be a peak of its own."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def batches(shape: Shape, *, batch: int, seed: int) -> Iterator[torch.Tensor]:
    """Windows of a short random text, for ever.

    Args:
        shape: for vocabulary and context.
        batch: windows at once.
        seed: of the text and of the windows.

    Yields:
        int64, shape (batch, context + 1).
    """
    generator = torch.Generator().manual_seed(seed)
    text = torch.randint(shape.vocabulary, (_WINDOWS * shape.context,), generator=generator)
    windows = text.unfold(0, shape.context + 1, 1)
    while True:
        yield windows[torch.randint(len(windows), (batch,), generator=generator)]
