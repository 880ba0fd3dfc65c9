"""Several ranks train as one: the same weights, whoever uses what, and no collective hangs."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import infinity
from infinity.agreement import Agreement, Collective
from infinity.comm import Communicator
from infinity.demo.corpus import Share, batches, read_corpus
from infinity.demo.model import GPT, GPTConfig
from infinity.report import EngineStats
from tests.infinity.conftest import (
    Config,
    Reference,
    Weights,
    assert_close,
    assert_equal,
    base_loss,
    base_model,
    config_for,
    samples,
    train_part,
)
from tests.infinity.ranks import RankPool, rank_pool
from tiering.errors import ConfigError, RankError


def reference(steps: int, *, clip: float = 0.0) -> Weights:
    """Plain torch with whole batches."""
    plain = Reference(base_model(), clip=clip)
    for step in range(steps):
        plain.step([base_loss(plain.model, samples(step))])
    return {k: v.detach().clone() for k, v in plain.model.state_dict().items()}


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_several_ranks_equal_one_with_accumulation_clipping_and_uneven_sizes(
    size: int, accumulation: int, on_ranks: RankPool, tmp_path: Path
) -> None:
    """Weights and norms of any number of ranks, for sizes that no number of ranks divides."""
    config = config_for(tmp_path, gradient_clipping=0.5)
    outcomes = on_ranks(size, train_part, config, 3, accumulation)
    alone, weights_alone = train_part(config, 3, 1)
    for norms, weights in outcomes:
        assert_equal(weights, outcomes[0][1])
        assert_close(weights, weights_alone, rtol=1e-5, atol=1e-6)
        assert_close(weights, reference(3, clip=0.5), rtol=1e-5, atol=1e-6)
        assert norms == outcomes[0][0]
        assert norms == pytest.approx(alone, rel=1e-5)


GPT_STEPS = 20


def train_gpt(config: Config) -> list[float]:
    """This rank's losses of its share of each batch of four windows."""
    comm = Communicator()
    torch.manual_seed(0)
    model = GPT(GPTConfig(layers=3, width=48, context=16))
    engine, *_ = infinity.initialize(model=model, config=config)
    windows = 4 // comm.size
    drawn = batches(
        read_corpus(max_bytes=2**16),
        batch=windows,
        context=16,
        seed=0,
        share=Share(comm.rank, comm.size),
    )
    losses = []
    with engine:
        for ids in itertools.islice(drawn, GPT_STEPS):
            loss = engine(ids)
            engine.backward(loss)
            engine.step()
            losses.append(float(loss.detach()))
    return losses


@pytest.mark.parametrize("stage", [0, 3])
def test_the_losses_of_a_gpt_on_two_ranks_are_those_of_one(
    stage: int, on_ranks: RankPool, tmp_path: Path
) -> None:
    """Step by step over the same batches, while it learns; clipped and with decay."""
    home = "nvme" if stage == 3 else "none"
    config = config_for(
        tmp_path,
        param=home,
        optimizer=home,
        zero_optimization={"stage": stage},
        gradient_clipping=1.0,
    )
    alone = train_gpt(config)
    first, second = on_ranks(2, train_gpt, config)
    together = [(a + b) / 2 for a, b in zip(first, second, strict=True)]
    assert len(together) == GPT_STEPS
    assert together == pytest.approx(alone, rel=1e-5)
    assert first != second
    assert alone[-1] < alone[0] - 0.5


def test_where_states_live_changes_nothing_on_two_ranks(on_ranks: RankPool, tmp_path: Path) -> None:
    """none, cpu and nvme are equal bit for bit, rank by rank."""
    found = [
        on_ranks(2, train_part, config_for(tmp_path, param=home, optimizer=home), 3, 2)[0]
        for home in ("none", "cpu", "nvme")
    ]
    for norms, weights in found[1:]:
        assert_equal(weights, found[0][1])
        assert norms == found[0][0]


class Experts(nn.Module):
    """A layer of which every caller uses some part."""

    def __init__(self, count: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(count))
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor, chosen: Sequence[int]) -> torch.Tensor:
        """Run some experts, in the order given."""
        for index in chosen:
            x = x + torch.tanh(self.experts[index](x))
        return self.head(x)


CHOICES = ((0, 1), (2,)), ((1, 0), (0, 1, 2)), ((), (3, 2, 1)), ((3,), (3,)), ((2, 0), ())
ALIKE = ((0, 1), (0, 1))
# Long enough alike for a promise, which then does not hold for one rank, for both, for neither.
PROMISED = (*(ALIKE,) * 3, ((0, 1), (2,)), *(ALIKE,) * 3, ((3, 0), (1, 0)), ALIKE, ((), ()))


Choices = Sequence[tuple[Sequence[int], Sequence[int]]]


def expert_loss(
    model: Callable[..., torch.Tensor], choices: Choices, rank: int, step: int
) -> torch.Tensor:
    """Of one rank's choice and data at a step."""
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + rank))
    return functional.mse_loss(model(x, choices[step][rank]), torch.ones(4, 4))


def train_experts(config: Config, choices: Choices) -> Weights:
    rank = Communicator().rank
    engine, *_ = infinity.initialize(model=Experts(4), config=config)
    with engine:
        for step in range(len(choices)):
            engine.backward(expert_loss(engine, choices, rank, step))
            engine.step()
        return engine.module.state_dict()


@pytest.mark.parametrize("choices", [CHOICES, PROMISED], ids=["different", "promised"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_experts_that_only_some_ranks_use_get_the_mean_with_zero_where_unused(
    stage: int, choices: Choices, on_ranks: RankPool, tmp_path: Path
) -> None:
    """Collectives follow what any rank needs, so none waits for one that another never calls."""
    home = "nvme" if stage == 3 else "none"
    config = config_for(tmp_path, param=home, optimizer=home, zero_optimization={"stage": stage})
    plain = Reference(Experts(4))
    for step in range(len(choices)):
        # The mean over ranks: a rank that did not use an expert counts as zero.
        plain.step([expert_loss(plain.model, choices, rank, step) for rank in range(2)])
    expected = {k: v.detach() for k, v in plain.model.state_dict().items()}
    for weights in on_ranks(2, train_experts, config, choices):
        assert_close(weights, expected, rtol=1e-5, atol=1e-6)


def count_exchanges(config: Config) -> list[int]:
    """How often the ranks tell each other something, step by step."""
    engine, *_ = infinity.initialize(model=base_model(), config=config)
    counts = []
    with engine:
        for step in range(6):
            before = engine.exchanges
            engine.backward(base_loss(engine, samples(step)))
            engine.step()
            counts.append(engine.exchanges - before)
    return counts


def test_ranks_that_do_the_same_again_need_not_tell_each_other(
    on_ranks: RankPool, tmp_path: Path
) -> None:
    """From the third step on they meet once, and compare gradients and norms; that is all."""
    for counts in on_ranks(2, count_exchanges, config_for(tmp_path)):
        assert counts[0] > 10
        assert counts[3:] == [3, 3, 3]


def look_at_phases(config: Config) -> list[tuple[float, EngineStats, float]]:
    """Before and behind three steps: figures, and the moments around each look at them."""
    engine, *_ = infinity.initialize(model=base_model(), config=config)
    looks = []
    with engine:
        for steps in (0, 3):
            for step in range(steps):
                engine.backward(base_loss(engine, samples(step)))
                engine.step()
            before_s = time.perf_counter()
            looks.append((before_s, engine.stats(), time.perf_counter()))
    return looks


@pytest.mark.parametrize("stage", [0, 3])
def test_waits_for_other_ranks_are_told_by_hop_and_add_up_with_the_phases(
    stage: int, on_ranks: RankPool, tmp_path: Path
) -> None:
    """What is waited in a gather is not in the phase of that name as well."""
    home = "nvme" if stage == 3 else "none"
    config = config_for(
        tmp_path,
        param=home,
        optimizer=home,
        zero_optimization={"stage": stage},
        wall_clock_breakdown=True,
    )
    hops = {"read", "write", "exchange", "gather", "reduce"}
    for (first_s, first, second_s), (third_s, last, fourth_s) in on_ranks(
        2, look_at_phases, config
    ):
        assert set(last.waited_s) == hops
        assert all(last.waited_s[hop] > 0 for hop in ("exchange", "reduce"))
        assert (last.waited_s["gather"] > 0) == (stage == 3)
        assert all(last.spent_s[f"wait for {hop}"] == last.waited_s[hop] for hop in hops)
        assert all(last.spent_s[name] >= spent - 1e-9 for name, spent in first.spent_s.items())
        passed_s = sum(last.spent_s.values()) - sum(first.spent_s.values())
        assert third_s - second_s - 1e-6 <= passed_s <= fourth_s - first_s + 1e-6


def look_alone(config: Config) -> tuple[Weights, list[float]]:
    """Rank 0 looks at weights, evaluates and takes a state_dict by itself, at odd moments."""
    rank = Communicator().rank
    model = base_model()
    engine, *_ = infinity.initialize(model=model, config=config)
    seen = []
    with engine:
        for step in range(4):
            inputs, targets = samples(step)
            part = slice(4 * rank, 4 * rank + 4)
            loss = base_loss(engine, (inputs[part], targets[part]))
            if rank == 0 and step % 2:
                seen.append(float(model[4].weight.detach().sum()))
            engine.backward(loss)
            if rank == 0:
                engine.module.state_dict()
            engine.step()
            if rank == 1:
                with torch.no_grad():
                    seen.append(float(base_loss(engine, samples(9))))
        if rank == 0:
            seen.append(float(sum(v.sum() for v in engine.module.state_dict().values())))
        return (engine.module.state_dict() if rank == 1 else {}), seen


def test_one_rank_may_look_at_weights_and_evaluate_on_its_own(
    on_ranks: RankPool, tmp_path: Path
) -> None:
    """The others serve it wherever they are; everybody sees weights of one and the same step."""
    outcomes = on_ranks(2, look_alone, config_for(tmp_path))
    _, weights = train_part(config_for(tmp_path), 4, 1)
    assert_close(outcomes[1][0], weights, rtol=1e-5, atol=1e-6)
    assert [len(seen) for _, seen in outcomes] == [3, 4]


def differ(kind: str, config: Config) -> str:
    """Build something else on rank 1; returns the error."""
    rank = Communicator().rank
    model: nn.Module = base_model()
    config = {**config, "zero_optimization": dict(config["zero_optimization"])}
    if rank == 1 and kind == "layer":
        model = nn.Sequential(*model, nn.Linear(100, 3))
    if rank == 1 and kind == "dtype":
        model[4].to(torch.bfloat16)
    if rank == 1 and kind == "bucket":
        config["zero_optimization"]["reduce_bucket_size"] = 7
    if rank == 1 and kind == "order":
        model = nn.Sequential(model[0], model[2], model[1], *model[3:])
        model.add_module("0", model[0])
        model = nn.ModuleDict(dict(reversed(list(model.named_children()))))
    if rank == 1 and kind == "key":
        config["zero_optimization"]["stag"] = 3
    if rank == 1 and kind == "path":
        config["zero_optimization"]["offload_param"] = {
            "device": "nvme",
            "nvme_path": "/proc/nowhere",
        }
    with pytest.raises((ConfigError, RankError, OSError)) as caught:
        infinity.initialize(model=model, config=config)
    return str(caught.value)


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("layer", "parameter '5.weight' of shape"),
        ("dtype", "torch.bfloat16"),
        ("bucket", "reduce_bucket_size = 7"),
        ("order", "rank 1 has parameter"),
        ("key", "zero_optimization.stag"),
        ("path", "/proc/nowhere"),
    ],
)
def test_ranks_that_disagree_all_hear_of_the_first_difference(
    kind: str, said: str, on_ranks: RankPool, tmp_path: Path
) -> None:
    """Also of what is wrong on one rank only; and the same processes can train afterwards."""
    for text in on_ranks(2, differ, kind, config_for(tmp_path)):
        assert said in text
    on_ranks(2, train_part, config_for(tmp_path), 1, 1)


def call_different_things(config: Config) -> str:
    rank = Communicator().rank
    engine, *_ = infinity.initialize(model=base_model(), config=config)
    text = ""
    try:
        engine.backward(base_loss(engine, samples(0)))
        if rank == 0:
            engine.step()
        else:
            engine.close()
    except RankError as error:
        text = str(error)
    with contextlib.suppress(RankError):
        engine.close()
    return text


def test_ranks_in_different_calls_are_told_which(on_ranks: RankPool, tmp_path: Path) -> None:
    """Instead of waiting for each other."""
    texts = on_ranks(2, call_different_things, config_for(tmp_path))
    assert any("0: engine.step(), 1: engine.close()" in text for text in texts)


def fail_then_end(kind: str, config: Config) -> str:
    """Rank 1 fails in a forward, and closes or goes on, to leave later; what rank 0 hears."""
    rank = Communicator().rank
    engine, *_ = infinity.initialize(model=base_model(), config=config)
    if rank == 1:
        with pytest.raises(IndexError):
            engine(torch.tensor([[10**6]]))
        if kind == "goes on":
            engine.backward(base_loss(engine, samples(0)))
            engine.step()
            engine.abandon()
        engine.close()
        return ""
    text = ""
    try:
        for step in range(2):
            engine.backward(base_loss(engine, samples(step)))
            engine.step()
    except RankError as error:
        text = str(error)
    engine.abandon()
    return text


@pytest.mark.parametrize("kind", ["closes", "goes on"])
def test_a_reason_is_told_unless_its_rank_went_on(
    kind: str, on_ranks: RankPool, tmp_path: Path
) -> None:
    """Who caught an error and trained on ends later of something else."""
    text = on_ranks(2, fail_then_end, kind, config_for(tmp_path))[0]
    assert text
    assert ("rank 1 failed: IndexError" in text) == (kind == "closes")


def train_from_other_seeds(config: Config) -> Weights:
    rank = Communicator().rank
    engine, *_ = infinity.initialize(model=base_model(seed=rank), config=config)
    with engine:
        return engine.module.state_dict()


def buffered(config: Config) -> Weights:
    """Buffers of other values on each rank, of many types and layouts."""
    rank = Communicator().rank
    model = nn.Linear(3, 2)
    model.register_buffer("scalar", torch.tensor(rank))
    model.register_buffer("flags", torch.tensor([rank == 0, True]))
    model.register_buffer("narrow", torch.full((3,), rank, dtype=torch.bfloat16))
    model.register_buffer("turned", (torch.arange(6.0).view(2, 3) + rank).t())
    model.register_buffer("expanded", torch.full((2, 1), rank).expand(2, 4))
    model.register_buffer("one", torch.tensor(float(rank)).expand(3, 3))
    model.register_buffer("empty", torch.zeros(0, 3))
    engine, *_ = infinity.initialize(model=model, config=config)
    with engine:
        return {name: buffer.clone() for name, buffer in model.named_buffers()}


def test_all_ranks_start_from_the_buffers_of_the_first(on_ranks: RankPool, tmp_path: Path) -> None:
    """Also from those whose elements share memory."""
    first, second = on_ranks(2, buffered, config_for(tmp_path))
    assert_equal(first, second)
    assert torch.equal(first["turned"], torch.arange(6.0).view(2, 3).t())
    assert not first["expanded"].any()
    assert not first["one"].any()


def test_all_ranks_start_from_the_values_of_the_first(on_ranks: RankPool, tmp_path: Path) -> None:
    """Whatever they were built with."""
    for weights in on_ranks(2, train_from_other_seeds, config_for(tmp_path)):
        assert_equal(weights, dict(base_model(seed=0).state_dict()))


def hops(_: Any) -> None:
    comm = Communicator()
    comm.open(torch.device("cpu"), timeout_s=60)
    mine = torch.arange(16.0) + 100 * comm.rank
    assert comm.waited_s == {"exchange": 0, "gather": 0, "reduce": 0}
    before_s = time.perf_counter()
    whole = comm.all_gather(mine, torch.empty(32))
    assert 0 < comm.waited_s["gather"] <= time.perf_counter() - before_s
    assert comm.waited_s["exchange"] == comm.waited_s["reduce"] == 0
    assert torch.equal(whole, torch.cat([torch.arange(16.0), torch.arange(16.0) + 100]))
    summed = comm.reduce_scatter(torch.arange(32.0) * (comm.rank + 1), torch.empty(16))
    assert torch.equal(summed, torch.arange(32.0)[16 * comm.rank : 16 * comm.rank + 16] * 3)
    assert comm.exchange([float(comm.rank), 7.0]) == [[0.0, 7.0], [1.0, 7.0]]
    comm.close()


def test_the_hops_gather_in_order_and_sum(on_ranks: RankPool) -> None:
    """Over gloo."""
    on_ranks(2, hops, None)


def forget_first(config: Config) -> Weights:
    """Of two micro-batches the first is forgotten; who used fewer experts gets there sooner."""
    rank = Communicator().rank
    engine, *_ = infinity.initialize(model=Experts(4), config=config)
    with engine:
        for step in range(len(CHOICES)):
            engine.backward(expert_loss(engine, CHOICES, rank, (step + 1) % len(CHOICES)))
            engine.zero_grad()
            engine.backward(expert_loss(engine, CHOICES, rank, step))
            engine.step()
        return engine.module.state_dict()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_forgotten_gradients_are_forgotten_on_all_ranks(
    stage: int, on_ranks: RankPool, tmp_path: Path
) -> None:
    """Also those that a rank still sums when another has come to zero_grad already."""
    home = "nvme" if stage == 3 else "none"
    config = config_for(tmp_path, param=home, optimizer=home, zero_optimization={"stage": stage})
    expected = on_ranks(2, train_experts, config, CHOICES)[0]
    for weights in on_ranks(2, forget_first, config):
        assert_equal(weights, expected)


def forget_alone(config: Config) -> str:
    rank = Communicator().rank
    engine, *_ = infinity.initialize(model=base_model(), config=config)
    engine.backward(base_loss(engine, samples(0)))
    with pytest.raises(RankError) as caught:
        (engine.step, engine.zero_grad)[rank]()
    engine.abandon()
    return str(caught.value)


def test_one_rank_cannot_forget_what_is_of_all(on_ranks: RankPool, tmp_path: Path) -> None:
    """Its part of the sums would be gone, and the others' not."""
    for text in on_ranks(2, forget_alone, config_for(tmp_path)):
        assert "0: engine.step(), 1: engine.zero_grad()" in text


def test_one_rank_copies_nothing() -> None:
    """The shard is the whole."""
    comm, shard = Communicator(), torch.arange(16.0)
    assert comm.all_gather(shard, torch.empty(16)) is shard
    assert comm.reduce_scatter(shard, torch.empty(16)) is shard
    assert comm.exchange([3.0]) == [[3.0]]
    assert comm.waited_s == {}


def train_without_samples(config: Config) -> Weights:
    """Rank 1 has no samples from the second step on; it only steps."""
    rank = Communicator().rank
    engine, *_ = infinity.initialize(model=base_model(), config=config)
    with engine:
        for step in range(3):
            for micro in range(2):
                if rank == 0 or step == 0:
                    engine.backward(base_loss(engine, samples(10 * step + micro)))
                engine.step()
        return engine.module.state_dict()


@pytest.mark.parametrize("stage", [1, 3])
def test_a_rank_without_samples_steps_with_the_others(
    stage: int, on_ranks: RankPool, tmp_path: Path
) -> None:
    """It counts as zero, and its weights stay the same as theirs."""
    config = config_for(
        tmp_path,
        param="none",
        optimizer="none",
        gradient_accumulation_steps=2,
        zero_optimization={"stage": stage},
    )
    plain = Reference(base_model())
    for step in range(3):
        losses = [base_loss(plain.model, samples(10 * step + micro)) for micro in range(2)]
        share = 1 if step == 0 else 2
        plain.step([loss / share for loss in losses])
    expected = {k: v.detach() for k, v in plain.model.state_dict().items()}
    for weights in on_ranks(2, train_without_samples, config):
        assert_close(weights, expected, rtol=1e-5, atol=1e-6)


class MaxNorm(nn.Module):
    """Clamps its weight in each forward, as layers with a bounded norm do."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Through both."""
        with torch.no_grad():
            self.last.weight.clamp_(-0.05, 0.05)
        return self.last(torch.tanh(self.first(x)))


def max_norm_loss(model: Callable[..., torch.Tensor], step: int) -> torch.Tensor:
    """The same on every rank."""
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
    return functional.mse_loss(model(x), torch.ones(4, 4))


def train_max_norm(config: Config) -> tuple[list[float], Weights]:
    """Long enough that gathers are promised, and begun before they are needed."""
    model = MaxNorm()
    engine, *_ = infinity.initialize(model=model, config=config)
    norms = []
    with engine:
        for step in range(6):
            engine.backward(max_norm_loss(engine, step))
            engine.step()
            norms.append(engine.get_global_grad_norm() or 0.0)
        model.load_state_dict({k: torch.full_like(v, 0.5) for k, v in model.state_dict().items()})
        norms.append(float(max_norm_loss(engine, 0).detach()))
        return norms, engine.module.state_dict()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_weight_that_is_changed_while_it_is_gathered_again_is_the_changed_one(
    stage: int, on_ranks: RankPool, tmp_path: Path
) -> None:
    """Though its gather for backward was begun before."""
    config = config_for(
        tmp_path, param="none", optimizer="none", zero_optimization={"stage": stage}
    )
    norms, weights = train_max_norm(config)
    for found_norms, found in on_ranks(2, train_max_norm, config):
        assert found_norms == pytest.approx(norms, rel=1e-4)
        assert_close(found, weights, rtol=1e-4, atol=1e-6)


def fail_in_a_part(_: Any) -> list[str]:
    """Rank 1 cannot make its first collective, catches that, and goes on; what each is told."""
    comm = Communicator()
    comm.open(torch.device("cpu"), timeout_s=5)
    agreement, told = Agreement(comm), []
    failing = [comm.rank == 1]

    def part() -> torch.Tensor:
        if failing.pop() if failing else False:
            raise OSError("the shard cannot be read")
        return comm.all_gather(torch.full((4,), float(comm.rank)), torch.empty(8))

    number = agreement.add(Collective(part))
    for _ in range(2):
        try:
            agreement.perform(number)
        except OSError as error:
            comm.leave_reason(error)
            told.append(str(error))
        except RankError as error:
            told.append(str(error))
            break
    comm.close()
    return told


def test_a_rank_that_failed_in_a_collective_gets_nothing_more_from_the_others() -> None:
    """It would be that of another collective; the others hear why it has gone."""
    with rank_pool() as pool:  # of its own, which is broken by this
        first, second = pool(2, fail_in_a_part, None)
    assert second[0] == "the shard cannot be read"
    assert "did not make a collective that the others made" in second[1]
    assert "rank 1 failed: OSError: the shard cannot be read" in first[0]


def sums_beside_backward(config: Config) -> tuple[list[int], int]:
    """How many sums were under way as each block's backward began, and after backward."""
    model = base_model()
    engine, *_ = infinity.initialize(model=model, config=config)
    under_way = engine._parts.optimizer._gradients[0]._reduction.under_way
    counts: list[int] = []
    for block in model[1:4]:
        block.register_full_backward_pre_hook(lambda *_: counts.append(len(under_way)))
    with engine:
        inputs, targets = samples(0)
        engine.backward(base_loss(engine, (inputs[:4], targets[:4])))
        left = len(under_way)
        engine.step()
    return counts, left


@pytest.mark.parametrize("stage", [2, 3])
def test_gradients_are_summed_while_backward_goes_on(
    stage: int, on_ranks: RankPool, tmp_path: Path
) -> None:
    """One unit's at a time, and none is left when backward has ended."""
    home = {"param": "none", "optimizer": "cpu"} if stage < 3 else {}
    config = config_for(tmp_path, **home, zero_optimization={"stage": stage})
    config["train_micro_batch_size_per_gpu"] = "auto"
    for counts, left in on_ranks(2, sums_beside_backward, config):
        assert counts == [1, 1, 1]
        assert left == 0
