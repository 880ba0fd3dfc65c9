"""The demo's parts that need no engine: its text, its model and its command line."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path

import pytest
import torch

from infinity.demo import options as demo_options
from infinity.demo.corpus import Share, batches, read_corpus
from infinity.demo.model import GPT, GPTConfig
from infinity.demo.options import engine_config, parse

TINY = GPTConfig(layers=2, width=32, context=16)


def numel(model: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def test_the_text_is_the_same_every_time() -> None:
    text = read_corpus(max_bytes=1 << 20)
    assert text.dtype == torch.uint8
    assert text.shape == (1 << 20,)
    assert torch.equal(text, read_corpus(max_bytes=1 << 20))


def test_the_text_follows_the_names_of_the_files_and_leaves_out_what_is_not_the_library(
    tmp_path: Path,
) -> None:
    for name in ("b.py", "a/z.py", "a.py", "test/c.py", "site-packages/d.py", "e.txt"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"[{name}]")
    text = bytes(read_corpus(tmp_path).tolist()).decode()
    assert text == "[a.py][a/z.py][b.py]"


def test_a_folder_without_sources_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no Python sources"):
        read_corpus(tmp_path)


def test_batches_are_windows_of_the_text_and_repeat_with_their_seed() -> None:
    text = torch.arange(200, dtype=torch.uint8)
    first = list(itertools.islice(batches(text, batch=3, context=5, seed=7), 4))
    again = list(itertools.islice(batches(text, batch=3, context=5, seed=7), 4))
    other = next(batches(text, batch=3, context=5, seed=8))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[0], other)
    for ids in first:
        assert ids.dtype == torch.int64
        assert ids.shape == (3, 6)
        assert torch.equal(ids - ids[:, :1], torch.arange(6).expand(3, 6))


def test_ranks_share_a_batch_out_among_them() -> None:
    """Together they have what one would have whose batch is as large; nobody has another's."""
    text = torch.arange(200, dtype=torch.uint8)
    whole = batches(text, batch=6, context=5, seed=7)
    parts = [batches(text, batch=2, context=5, seed=7, share=Share(r, 3)) for r in range(3)]
    for _ in range(4):
        assert torch.equal(next(whole), torch.cat([next(part) for part in parts]))


def test_a_text_of_just_one_window_is_enough_and_a_shorter_one_is_refused() -> None:
    text = torch.arange(6, dtype=torch.uint8)
    assert torch.equal(next(batches(text, batch=1, context=5, seed=0))[0], text.long())
    with pytest.raises(ValueError, match="a window is 7 bytes"):
        next(batches(text, batch=1, context=6, seed=0))


def test_the_default_model_has_thirty_million_parameters() -> None:
    with torch.device("meta"):
        assert 29e6 < numel(GPT(GPTConfig())) < 31e6


@pytest.mark.parametrize("width", [1, 48, 64, 200, 640])
def test_every_width_has_heads_that_divide_it(width: int) -> None:
    config = dataclasses.replace(TINY, width=width)
    assert width % config.heads == 0
    loss = GPT(config)(torch.zeros(2, 5, dtype=torch.int64))
    assert loss.shape == ()


def test_the_model_predicts_from_earlier_tokens_only() -> None:
    """Changing the last token of a window changes no prediction but the last."""
    torch.manual_seed(0)
    model = GPT(TINY)
    stream = torch.randn(1, 8, TINY.width)
    changed = stream.clone()
    changed[0, -1] += 1
    before, after = model.blocks[0](stream), model.blocks[0](changed)
    assert torch.equal(before[0, :-1], after[0, :-1])
    assert not torch.equal(before[0, -1], after[0, -1])


def test_an_untrained_model_knows_nothing() -> None:
    torch.manual_seed(0)
    loss = GPT(TINY)(torch.randint(256, (8, 17)))
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(5.545, abs=0.1)


def test_a_tied_head_is_the_embedding() -> None:
    tied = GPT(dataclasses.replace(TINY, tie_head=True))
    assert tied.head.weight is tied.tokens.weight
    assert numel(GPT(TINY)) - numel(tied) == 256 * TINY.width


def test_the_model_learns() -> None:
    torch.manual_seed(0)
    model = GPT(TINY)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    drawn = batches(read_corpus(max_bytes=1 << 16), batch=4, context=TINY.context, seed=0)
    losses = []
    for ids in itertools.islice(drawn, 30):
        loss = model(ids)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert sum(losses[-5:]) / 5 < losses[0] - 1


def test_the_default_budget_is_a_quarter_of_the_states() -> None:
    assert parse([]).budget_bytes(10**6) == 10**6 * 14 // 4
    assert parse(["--dtype", "fp32"]).budget_bytes(10**6) == 10**6 * 16 // 4
    assert parse([]).budget_bytes(1000) == 2 << 20
    assert parse(["--offload", "cpu"]).budget_bytes(1000) is None
    assert parse(["--host-memory", "3M"]).budget_bytes(1000) == 3 << 20


def test_the_least_traffic_is_that_of_weights_twice_and_the_optimizer_state() -> None:
    assert parse([]).least_read_bytes == 16
    assert parse([]).least_written_bytes == 14


@pytest.mark.parametrize(
    ("text", "nbytes"), [("1000", 1000), ("2K", 2048), ("1.5m", 3 << 19), ("1G", 1 << 30)]
)
def test_sizes_may_end_in_a_unit(text: str, nbytes: int) -> None:
    assert parse(["--host-memory", text]).host_memory_bytes == nbytes


@pytest.mark.parametrize(
    "arguments",
    [
        ["--host-memory", "lots"],
        ["--host-memory", "0"],
        ["--steps", "0"],
        ["--offload", "tape"],
    ],
)
def test_a_mistake_on_the_command_line_is_refused(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse(arguments)
    assert arguments[0] in capsys.readouterr().err


def test_smoke_is_the_smallest_size() -> None:
    options = parse(["--smoke"])
    assert options.steps == demo_options._SMOKE["steps"]
    assert options.model.width == demo_options._SMOKE["width"]


def test_only_nvme_has_a_path() -> None:
    for offload in ("none", "cpu"):
        zero = engine_config(parse(["--offload", offload]), 1000)["zero_optimization"]
        assert zero == {
            "stage": 3,
            "offload_param": {"device": offload},
            "offload_optimizer": {"device": offload},
        }
    config = engine_config(parse(["--path", "somewhere"]), 10**6)
    assert "'nvme_path': 'somewhere'" in str(config)
    assert config["tiering"] == {
        "compute_dtype": "auto",
        "aio_backend": "auto",
        "host_memory": 3_500_000,
    }
