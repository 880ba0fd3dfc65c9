"""Models as people write them train equal to plain torch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

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
    """Lists and dicts of them, modules registered late, and a Function that saves a weight."""

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
            self.loose = [[nn.Linear(6, 6)], [nn.Linear(6, 6)]]
            for number, (module,) in enumerate(self.loose):
                self.add_module(f"late{number}", module)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for weight in self.plist:
                x = torch.tanh(functional.linear(x, weight))
            for bias in self.pdict.values():
                x = x + bias
            for (module,) in self.loose:
                x = module(x)
            return Scale.apply(x, self.free).square().mean()

    _check(Holder(), list(torch.randn(4, 3, 6)), tmp_path)


@dataclass
class _Output:
    hidden: torch.Tensor
    note: str


class _Named(NamedTuple):
    hidden: torch.Tensor
    rest: dict[str, Any]


def test_outputs_of_every_shape(tmp_path: Path) -> None:
    """dict, list, (named) tuple, dataclass, None, an int and a bare parameter as an output."""

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
                "named": _Named(y, {"more": [y, None]}),
                "none": None,
                "int": 3,
                "bias": (y, self.bias),
            }[self.kind]

    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            kinds = ("dict", "list", "tuple", "data", "bias", "named", "none", "int")
            self.parts = nn.ModuleList(Part(kind) for kind in kinds)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.parts[0](x)["y"]
            x = self.parts[1](x)[0]
            x = self.parts[2](x)[1][1]
            x = self.parts[3](x).hidden
            x = self.parts[5](x).rest["more"][0]
            assert (self.parts[6](x), self.parts[7](x)) == (None, 3)
            x, bias = self.parts[4](x)
            return (x + bias).square().mean()

    _check(Whole(), list(torch.randn(4, 3, 6)), tmp_path)


class Loop(nn.Module):
    """Calls one linear seven times."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """A loss."""
        for _ in range(7):
            x = torch.tanh(self.lin(x))
        return x.square().mean()


def _both(model: Callable[..., torch.Tensor], batch: torch.Tensor) -> torch.Tensor:
    return model(batch[0]) + model(batch[1])


def _preferred(model: Callable[..., torch.Tensor], batch: torch.Tensor) -> torch.Tensor:
    """One without a gradient, as when a model is compared with what it says elsewhere."""
    chosen = model(batch[0])
    with torch.no_grad():
        other = model(batch[1])
    return -functional.logsigmoid(chosen - other)


@pytest.mark.parametrize("loss_of", [_both, _preferred])
def test_several_forwards_before_one_backward_leave_nothing_behind(
    loss_of: Callable[..., torch.Tensor], tmp_path: Path
) -> None:
    """Twenty steps; after each, no weight is in memory that was not before."""
    reference = Reference(Loop())
    model = copy.deepcopy(reference.model)
    engine, *_ = infinity.initialize(model=model, config=config_for(tmp_path))
    used = set()
    with engine:
        for batch in torch.randn(20, 2, 3, 6):
            reference.step([loss_of(reference.model, batch)])
            engine.backward(loss_of(engine, batch))
            engine.step()
            assert all(type(p) is not nn.Parameter for p in model.parameters())
            engine.flush()
            used.add(engine.stats().arena_used_bytes)
        assert len(used) == 1
        assert_close(engine.module.state_dict(), dict(reference.model.state_dict()))


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


def test_a_module_attached_later_is_the_users_own(tmp_path: Path) -> None:
    """It computes at once and gets gradients; the engine neither trains it nor takes it."""

    def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return model[0].extra(model(x)).square().mean()

    torch.manual_seed(0)
    reference = Reference(nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)))
    model, extra = copy.deepcopy(reference.model), nn.Linear(6, 3)
    engine, optimizer, *_ = infinity.initialize(model=model, config=config_for(tmp_path))
    plain_extra = copy.deepcopy(extra)
    model[0].extra, reference.model[0].extra = extra, plain_extra
    with engine:
        for x in torch.randn(3, 4, 6):
            engine.backward(loss_of(engine.module, x))
            engine.step()
            reference.step([loss_of(reference.model, x)])
            torch.testing.assert_close(extra.weight.grad, plain_extra.weight.grad)
        assert_close(engine.module.state_dict(), dict(reference.model.state_dict()))
        with pytest.raises(infinity.ConfigError, match=r"1 of .* \(3, 6\)\) are not trained"):
            optimizer.add_param_group({"params": [extra.weight]})


def test_generated_tokens_are_those_of_the_plain_model(tmp_path: Path) -> None:
    """Three rounds of three generations with a cache, then two epochs of training on them."""
    reference = Reference(_llama())
    plain, model = reference.model, _llama()
    engine, *_ = infinity.initialize(model=model, config=config_for(tmp_path))
    options = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False, "use_cache": True}
    used = set()
    with engine:
        for prompts in torch.randint(1, 96, (3, 3, 2, 4)):
            found = [model.generate(prompt, **options) for prompt in prompts]
            assert torch.equal(
                torch.stack(found), torch.stack([plain.generate(p, **options) for p in prompts])
            )
            for tokens in found * 2:
                engine.backward(_language_loss(engine, tokens))
                engine.step()
                reference.step([_language_loss(plain, tokens)])
            engine.flush()
            used.add(engine.stats().arena_used_bytes)
        assert len(used) == 1
        assert_close(engine.module.state_dict(), dict(plain.state_dict()), rtol=1e-5, atol=1e-6)
