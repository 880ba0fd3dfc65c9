"""Models as people write them train equal to plain torch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import infinity
from tests.infinity.conftest import Reference, assert_close, config_for, train

transformers = pytest.importorskip("transformers", reason="transformers is not installed")


def _llama() -> nn.Module:
    config = transformers.LlamaConfig(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        use_cache=False,
    )
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config)


def _gpt2() -> nn.Module:
    config = transformers.GPT2Config(
        vocab_size=96,
        n_positions=32,
        n_embd=32,
        n_layer=3,
        n_head=4,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,
    )
    torch.manual_seed(0)
    return transformers.GPT2LMHeadModel(config)


def _language_loss(model: Callable[..., Any], tokens: torch.Tensor) -> torch.Tensor:
    return model(input_ids=tokens, labels=tokens).loss  # type: ignore[no-any-return]


@pytest.mark.parametrize("checkpointing", ["none", "non-reentrant", "reentrant"])
@pytest.mark.parametrize("make", [_llama, _gpt2])
def test_transformers_train_equal_to_plain_torch(
    make: Callable[[], nn.Module], checkpointing: str, tmp_path: Path
) -> None:
    """Tied embeddings, dataclass outputs and both kinds of activation checkpointing; five steps."""
    model: Any = make()
    model.train()
    if checkpointing != "none":
        enable = getattr(
            model, "activation_checkpointing_enable", model.gradient_checkpointing_enable
        )
        enable({"use_reentrant": checkpointing == "reentrant"})
    batches = list(torch.randint(0, 96, (5, 2, 16)))
    expected_losses, expected = Reference(model).train(5, loss_of=_language_loss, batches=batches)
    losses, weights = train(
        model, config_for(tmp_path), steps=5, loss_of=_language_loss, batches=batches
    )
    assert losses == pytest.approx(expected_losses, rel=1e-6)
    assert_close(weights, expected, rtol=1e-5, atol=1e-6)


def _check(model: nn.Module, batches: list[Any], tmp_path: Path, steps: int = 4) -> None:
    """Train with everything on NVMe and compare with the reference."""

    def loss_of(module: nn.Module, batch: Any) -> torch.Tensor:
        return module(batch)  # type: ignore[no-any-return]

    expected_losses, expected = Reference(model).train(steps, loss_of=loss_of, batches=batches)
    losses, weights = train(
        model, config_for(tmp_path), steps=steps, loss_of=loss_of, batches=batches
    )
    assert losses == pytest.approx(expected_losses, rel=1e-6)
    assert_close(weights, expected)


def test_a_weight_used_outside_its_owner(tmp_path: Path) -> None:
    """A scale and a weight of a sub-module that is never called itself."""

    class Inner(nn.Module):
        def __init__(self, shape: tuple[int, ...]) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.rand(shape))
            self.lin = nn.Linear(16, 16)

    class Outer(nn.Module):
        def __init__(self, shape: tuple[int, ...]) -> None:
            super().__init__()
            self.inner = Inner(shape)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x * self.inner.scale + self.inner.lin.weight.sum()).square().mean()

    for shape in ((1,), (16,)):
        _check(Outer(shape), list(torch.randn(4, 3, 16)), tmp_path)


def test_a_functional_tied_head(tmp_path: Path) -> None:
    """logits = h @ embedding.T: one stored copy, the gradient is the sum of both uses."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(20, 8)
            self.mix = nn.Linear(8, 8)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            hidden = self.mix(self.embed(tokens))
            logits = functional.linear(hidden, self.embed.weight)
            return functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())

    _check(Tied(), list(torch.randint(0, 20, (4, 2, 5))), tmp_path)


def test_containers_of_parameters_and_custom_functions(tmp_path: Path) -> None:
    """ParameterList, ParameterDict, and an autograd Function that saves a weight."""

    class Scale(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x, weight)
            return x * weight

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
            x, weight = ctx.saved_tensors
            return grad * weight, (grad * x).sum(0)

    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.plist = nn.ParameterList([nn.Parameter(torch.randn(6, 6)) for _ in range(5)])
            self.pdict = nn.ParameterDict({k: nn.Parameter(torch.randn(6)) for k in "abc"})
            self.free = nn.Parameter(torch.randn(6))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for weight in self.plist:
                x = torch.tanh(functional.linear(x, weight))
            for bias in self.pdict.values():
                x = x + bias
            return Scale.apply(x, self.free).square().mean()

    _check(Holder(), list(torch.randn(4, 3, 6)), tmp_path)


@dataclass
class _Output:
    hidden: torch.Tensor
    note: str


def test_outputs_of_every_shape(tmp_path: Path) -> None:
    """dict, list, tuple, dataclass, None, an int and a bare parameter as a module's output."""

    class Part(nn.Module):
        def __init__(self, kind: str) -> None:
            super().__init__()
            self.lin = nn.Linear(6, 6)
            self.bias = nn.Parameter(torch.randn(6))
            self.kind = kind

        def forward(self, x: torch.Tensor) -> Any:
            y = torch.tanh(self.lin(x))
            return {
                "dict": {"y": y, "n": None},
                "list": [y, 3],
                "tuple": (y, (None, y)),
                "data": _Output(y, "x"),
                "bias": (y, self.bias),
            }[self.kind]

    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleList(Part(k) for k in ("dict", "list", "tuple", "data", "bias"))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.parts[0](x)["y"]
            x = self.parts[1](x)[0]
            x = self.parts[2](x)[1][1]
            x = self.parts[3](x).hidden
            x, bias = self.parts[4](x)
            return (x + bias).square().mean()

    _check(Whole(), list(torch.randn(4, 3, 6)), tmp_path)


def test_a_module_called_many_times_and_two_forwards_in_one_loss(tmp_path: Path) -> None:
    """loss = f(x1) + f(x2), where f calls one linear seven times."""

    class Loop(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(6, 6)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(7):
                x = torch.tanh(self.lin(x))
            return x.square().mean()

    def loss_of(module: Callable[..., torch.Tensor], batch: torch.Tensor) -> torch.Tensor:
        return module(batch[0]) + module(batch[1])

    model, batches = Loop(), list(torch.randn(4, 2, 3, 6))
    _, expected = Reference(model).train(4, loss_of=loss_of, batches=batches)
    _, weights = train(model, config_for(tmp_path), steps=4, loss_of=loss_of, batches=batches)
    assert_close(weights, expected)


class Whole(nn.Module):
    """A backbone whose norms save their weights as they are, and a method that uses weights."""

    def __init__(self) -> None:
        super().__init__()
        layers = (nn.Linear(6, 6), nn.LayerNorm(6), nn.Tanh(), nn.Linear(6, 6), nn.LayerNorm(6))
        self.backbone = nn.Sequential(*layers)
        self.scale, self.head = nn.Parameter(torch.rand(6)), nn.Linear(6, 2)

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        """Not the forward, and no module's."""
        return self.backbone(x) * self.scale @ self.head.weight.t()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The same with a bias."""
        return self.encode(x) + self.head.bias


@pytest.mark.parametrize("part", ["", "backbone"])
def test_the_model_or_a_part_of_it_may_be_called_without_the_engine(
    part: str, tmp_path: Path
) -> None:
    """In training and in evaluation; backward is that of the engine's own forward."""
    reference = Reference(Whole())
    model = copy.deepcopy(reference.model)
    engine, *_ = infinity.initialize(model=model, config=config_for(tmp_path))
    called, plain = (m.get_submodule(part) for m in (model, reference.model))
    with engine:
        for x in torch.randn(3, 4, 6):
            with torch.no_grad():
                torch.testing.assert_close(called(x), plain(x))
            engine.backward(called(x).square().mean())
            engine.step()
            reference.step([plain(x).square().mean()])
        assert_close(engine.module.state_dict(), dict(reference.model.state_dict()))


def test_weights_used_outside_of_all_modules_are_seen_and_a_backward_of_that_is_refused(
    tmp_path: Path,
) -> None:
    """Autograd holds the weight itself there, which is away by then; no gradient is wrong."""
    plain = Whole()
    model = copy.deepcopy(plain)
    engine, *_ = infinity.initialize(model=model, config=config_for(tmp_path))
    x = torch.randn(4, 6)
    with engine:
        for loss_of in (
            lambda m: m.encode(x).square().mean(),
            lambda m: sum(p.square().sum() for p in m.parameters()),
        ):
            loss = loss_of(model)
            torch.testing.assert_close(loss, loss_of(plain))
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                engine.backward(loss)
            engine.zero_grad()
        assert_close(engine.module.state_dict(), dict(plain.state_dict()))


def test_layers_that_are_skipped_or_permuted(tmp_path: Path) -> None:
    """A graph that changes every step costs time, never a wrong number."""

    class Changing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(6))

        def forward(self, batch: tuple[torch.Tensor, list[int]]) -> torch.Tensor:
            x, order = batch
            for index in order:
                x = torch.tanh(self.layers[index](x))
            return x.square().mean()

    orders = [[0, 1, 2, 3, 4, 5], [5, 3, 1], [2, 0, 4, 1], [0, 1, 2, 3, 4, 5], [3]]
    _check(Changing(), [(torch.randn(3, 6), order) for order in orders], tmp_path, steps=5)
