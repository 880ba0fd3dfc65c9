"""A GPT as anyone would write it in plain torch; it knows nothing of tiers or the engine."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

from infinity.demo.corpus import VOCABULARY

_INITIAL_STD = 0.02
_HEAD_WIDTH = 64


@dataclass(frozen=True)
class GPTConfig:
    """The shape of a `GPT`. The defaults have 30 million parameters.

    Args:
        layers: blocks.
        width: of the residual stream; an attention head takes at least 64 of it, or all.
        context: most tokens the model reads at once.
        vocabulary: different tokens.
        tie_head: predict with the token embedding itself instead of a matrix of its own.
    """

    layers: int = 6
    width: int = 640
    context: int = 256
    vocabulary: int = VOCABULARY
    tie_head: bool = False

    @property
    def heads(self) -> int:
        """Attention heads of a block: as many as divide the width and leave each its part."""
        most = max(1, self.width // _HEAD_WIDTH)
        return next(heads for heads in range(most, 0, -1) if self.width % heads == 0)


class Block(nn.Module):
    """Attention and a two-layer perceptron, each on normalised input and added to the stream."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.norm_1 = nn.LayerNorm(config.width)
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.project = nn.Linear(config.width, config.width)
        self.norm_2 = nn.LayerNorm(config.width)
        self.widen = nn.Linear(config.width, 4 * config.width)
        self.narrow = nn.Linear(4 * config.width, config.width)

    def forward(self, stream: torch.Tensor) -> torch.Tensor:
        """Map the stream, shape (batch, tokens, width), to its next state, of the same shape."""
        stream = stream + self.project(self._attend(self.norm_1(stream)))
        added: torch.Tensor = self.narrow(functional.gelu(self.widen(self.norm_2(stream))))
        return stream + added

    def _attend(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.qkv(x).chunk(3, dim=-1)
        )
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return mixed.transpose(1, 2).flatten(2)


class GPT(nn.Module):
    """Predicts the next token at every place of a window.

    Args:
        config: the shape. Weights are drawn from torch's global generator.
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(config.vocabulary, config.width)
        self.places = nn.Embedding(config.context, config.width)
        blocks = [Block(config) for _ in range(config.layers)]
        self.blocks = nn.ModuleList(blocks)
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        self.apply(_initialise)
        with torch.no_grad():
            for block in blocks:
                # Each block adds twice to the stream, whose variance shall not grow with depth.
                block.project.weight.mul_(1 / math.sqrt(2 * config.layers))
                block.narrow.weight.mul_(1 / math.sqrt(2 * config.layers))
        if config.tie_head:
            self.head.weight = self.tokens.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the mean loss of predicting each token from those before it.

        Args:
            ids: int64, shape (batch, tokens + 1), at most ``context`` + 1 of them.

        Returns:
            Cross-entropy in nats: fp32, a scalar.
        """
        read, wanted = ids[:, :-1], ids[:, 1:]
        stream = self.tokens(read) + self.places(torch.arange(read.shape[1], device=ids.device))
        for block in self.blocks:
            stream = block(stream)
        logits = self.head(self.norm(stream))
        return functional.cross_entropy(logits.float().flatten(0, 1), wanted.flatten())


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=_INITIAL_STD)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)
