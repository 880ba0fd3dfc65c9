"""Activation checkpointing: parts of a forward run again in backward, and find their weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import infinity
from tests.infinity.conftest import Reference, assert_close, base_model, config_for, train


class Adapted(nn.Module):
    """A frozen norm and a frozen linear with a trained adapter."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.base = nn.LayerNorm(8), nn.Linear(8, 8)
        self.down, self.up = nn.Linear(8, 2, bias=False), nn.Linear(2, 8, bias=False)
        for frozen in (self.norm, self.base):
            frozen.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Add to the input."""
        x = self.norm(x)
        return x + torch.tanh(self.base(x) + self.up(self.down(x)))


class Stack(nn.Module):
    """Checkpointed blocks, and a head that is trained as well."""

    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Adapted() for _ in range(3))
        self.head = nn.Linear(8, 5)
        self.reentrant = reentrant
        self.present: list[list[int]] = []
        """The blocks with frozen weights in memory, as backward leaves each block."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """A loss."""
        for block in self.blocks:
            if x.requires_grad:
                x.register_hook(self._look)
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return self.head(x).square().mean()

    def _look(self, _gradient: torch.Tensor) -> None:
        frozen = [block.base.weight for block in self.blocks]
        self.present.append([i for i, p in enumerate(frozen) if type(p) is nn.Parameter])


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("with_gradient", [True, False])
@pytest.mark.parametrize("reentrant", [False, True])
def test_frozen_weights_under_checkpointing_train_what_torch_trains_and_are_let_go(
    reentrant: bool, with_gradient: bool, tmp_path: Path
) -> None:
    """Two micro-batches; an input with a gradient, and one without."""
    plain, model = Reference(Stack(reentrant=reentrant)), Stack(reentrant=reentrant)
    looks = 2 + with_gradient if with_gradient or not reentrant else 0
    config = config_for(tmp_path, gradient_accumulation_steps=2)
    engine, *_ = infinity.initialize(model=model, config=config)
    with engine:
        for batch in torch.randn(3, 2, 4, 8):
            parts = [part.clone().requires_grad_(with_gradient) for part in batch]
            plain.step([plain.model(part) for part in parts])
            for part in parts:
                model.present.clear()
                engine.backward(engine(part))
                engine.step()
                assert all(type(p) is not nn.Parameter for p in model.parameters())
                # When backward leaves a block, none of those behind it is left in memory.
                assert len(model.present) == looks
                assert all(set(present) <= {2 - i} for i, present in enumerate(model.present))
        assert_close(engine.module.state_dict(), dict(plain.model.state_dict()))


class Choosy(nn.Module):
    """Takes, and returns, more than tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(6, 6)

    def forward(
        self,
        x: torch.Tensor,
        nothing: None,
        times: int,
        kind: str,
        pair: tuple[torch.Tensor, None],
        *,
        flag: bool,
    ) -> tuple[torch.Tensor, None, tuple[torch.Tensor, str]]:
        """Use all of it."""
        assert nothing is pair[1] is None
        y = torch.tanh(self.lin(x)) * times
        y = y * pair[0] if kind == "mask" and flag else y
        return y, None, (y.square(), kind)


class Choices(nn.Module):
    """Checkpoints such blocks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Choosy() for _ in range(3))

    def forward(self, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """A loss."""
        x, y = batch
        for block in self.blocks:
            x, nothing, (square, kind) = checkpoint(
                block, x, None, 3, "mask", (y, None), flag=True, use_reentrant=False
            )
            assert (nothing, kind) == (None, "mask")
        return (x + square).mean()


def test_a_checkpointed_block_may_take_and_return_more_than_tensors(tmp_path: Path) -> None:
    """None, a number, a word, nested tuples and a keyword, as with torch alone."""

    def loss_of(module: Callable[..., Any], batch: Any) -> torch.Tensor:
        return module(batch)  # type: ignore[no-any-return]

    batches = [(torch.randn(4, 6), torch.randn(4, 6)) for _ in range(3)]
    losses, expected = Reference(Choices()).train(3, loss_of=loss_of, batches=batches)
    found, weights = train(
        Choices(), config_for(tmp_path), steps=3, loss_of=loss_of, batches=batches
    )
    assert found == pytest.approx(losses, rel=1e-6)
    assert_close(weights, expected)


class Segments(nn.Module):
    """Checkpoints several modules of the list as one."""

    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.inner = base_model()
        self.reentrant = reentrant

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits."""
        first, *blocks, last = self.inner
        segment = nn.Sequential(*blocks)
        return last(checkpoint(segment, first(tokens), use_reentrant=self.reentrant))


@pytest.mark.parametrize("reentrant", [False, True])
def test_several_units_may_be_checkpointed_as_one(reentrant: bool, tmp_path: Path) -> None:
    """Those that run again first are away when backward comes to them."""
    expected = Reference(Segments(reentrant=reentrant)).train(3)[1]
    weights = train(Segments(reentrant=reentrant), config_for(tmp_path), steps=3)[1]
    assert_close(weights, expected)
