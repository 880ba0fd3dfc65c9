"""Ranks of one host are refused before they take together what each of them could have alone."""

from __future__ import annotations

import re
from pathlib import Path

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import infinity
from infinity.sharing import Claim, Pool, shortage
from tests.control_group import memory_group
from tests.infinity.conftest import Config, config_for, drive_of
from tests.infinity.ranks import RankPool, rank_pool
from tiering.errors import ConfigError, SpaceError

MIB = 2**20


def claim(nbytes: int, *pools: tuple[str, int]) -> Claim:
    """From pools with names and free bytes."""
    return Claim(nbytes, tuple(Pool(key, free, f"{free} bytes in {key}") for key, free in pools))


def test_what_several_ranks_claim_of_one_pool_is_added_up() -> None:
    """Up to the last byte; the sum is said line by line."""
    exact = [[claim(60, ("a", 100))], [claim(40, ("a", 100))]]
    assert shortage(exact) is None
    short = shortage([*exact, [claim(1, ("a", 100))]])
    assert short is not None
    assert short.claimed == {0: 60, 1: 40, 2: 1}
    assert short.ranks == "ranks 0, 1 and 2 together"
    assert [line.split() for line in str(short).splitlines()[1:]] == [
        ["60", "bytes", "rank", "0"],
        ["40", "bytes", "rank", "1"],
        ["1", "bytes", "rank", "2"],
        ["101", "bytes", "together"],
    ]


def test_what_one_rank_claims_twice_of_one_pool_is_added_up() -> None:
    """As for the parameters and the states in two folders on one drive."""
    assert shortage([[claim(60, ("a", 100)), claim(40, ("a", 100))]]) is None
    short = shortage([[claim(60, ("a", 100)), claim(41, ("a", 100))]])
    assert short is not None
    assert short.claimed == {0: 101}


def test_ranks_that_share_nothing_do_not_count_against_each_other() -> None:
    """As those of two hosts, or with a drive each; who is short is named alone."""
    assert shortage([[claim(60, ("a", 100))], [claim(60, ("b", 100))]]) is None
    short = shortage([[claim(60, ("a", 100))], [claim(101, ("b", 100))]])
    assert short is not None
    assert (short.claimed, short.ranks) == ({1: 101}, "rank 1")


def test_each_pool_that_a_rank_needs_whole_must_have_it() -> None:
    """The machine has room for both, their control group has not."""
    both = [[claim(60, ("machine", 200)), claim(60, ("group", 100))]] * 2
    short = shortage(both)
    assert short is not None
    assert [pool.key for pool in short.pools] == ["group"]


def test_what_fits_on_either_of_two_drives_may_go_to_the_other() -> None:
    """Who can use one of them only goes first."""
    either = claim(100, ("a", 100), ("b", 50))
    assert shortage([[either], [claim(50, ("b", 50))]]) is None
    short = shortage([[either], [claim(51, ("b", 50))]])
    assert short is not None
    assert short.claimed == {1: 51}
    short = shortage([[either], [claim(50, ("b", 50))], [claim(1, ("a", 100))]])
    assert short is not None
    assert short.claimed == {0: 100, 1: 50, 2: 1}


@given(st.lists(st.integers(0, 100), min_size=1, max_size=6), st.integers(0, 300))
def test_one_pool_is_short_just_when_the_sum_is_more_than_the_least_that_anybody_saw(
    sizes_bytes: list[int], free_bytes: int
) -> None:
    """What ranks see differs a little, as they look one after another."""
    claims = [[claim(n, ("a", free_bytes + rank))] for rank, n in enumerate(sizes_bytes)]
    assert (shortage(claims) is not None) == (sum(sizes_bytes) > free_bytes)


def model() -> nn.Module:
    """Of 4 million parameters: 32 MiB of weights and states for each of two ranks."""
    return nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(4)))


def refused(config: Config, group: str = "") -> str:
    """Why this rank could not begin; empty if it could, and trained a step."""
    made = model()
    if group:
        Path(group, "cgroup.procs").write_text("0")
    before = [parameter.data_ptr() for parameter in made.parameters()]
    try:
        engine, *_ = infinity.initialize(model=made, config=config)
    except (ConfigError, SpaceError) as error:
        assert before == [parameter.data_ptr() for parameter in made.parameters()]
        return str(error)
    with engine:
        engine.backward(engine(torch.ones(2, 1024)).square().mean())
        engine.step()
    return ""


def test_memory_that_is_there_for_one_rank_and_not_for_two_is_refused_with_the_sum(
    tmp_path: Path,
) -> None:
    """Really: in a control group that has room for one arena and a half."""
    config = config_for(tmp_path, param="cpu", optimizer="cpu")
    with memory_group(2**40) as group, rank_pool() as pool:
        assert pool(2, refused, config, str(group.folder)) == ["", ""]
        group.limit.write_text(str(int(group.usage.read_text()) + 60 * MIB))
        for text in pool(2, refused, config, str(group.folder)):
            assert text.startswith("the host memory asked for by ranks 0 and 1 together is more")
            assert f"of control group {group.folder}" in text
            found = [int(n.replace(",", "")) for n in re.findall(r"([\d,]+) bytes  rank", text)]
            together = re.search(r"([\d,]+) bytes  together", text)
            assert together
            assert sum(found) == int(together[1].replace(",", ""))
            assert all(40 * MIB < nbytes < 60 * MIB for nbytes in found)
            assert "tiering.host_memory is of each rank" in text


def test_a_drive_that_has_room_for_one_rank_and_not_for_two_is_refused_with_the_sum(
    on_ranks: RankPool, tmp_path: Path
) -> None:
    """Before anything is stored on it; with room for both they train."""
    with drive_of("48m", tmp_path / "less") as small:
        for text in on_ranks(2, refused, config_for(small)):
            assert re.match(
                r".*the record files of ranks 0 and 1 together need \d+ bytes, the drive under "
                rf"{small} has \d+ free",
                text,
            )
        assert not list(small.iterdir())
    with drive_of("80m", tmp_path / "more") as large:
        assert on_ranks(2, refused, config_for(large)) == ["", ""]
