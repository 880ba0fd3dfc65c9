"""Every key of DeepSpeed's schema is known, does what its kind says, and is in the document."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

import pytest

from infinity.config import load_config
from infinity.config.loading import RENAMED
from infinity.config.names import Key, all_keys
from infinity.config.reference import document
from tiering.errors import ConfigError, TieringWarning

# Dotted keys of DeepSpeed 0.19.8: the fields and aliases of its typed sections, the names that its
# other parsers look for, the arguments of its schedules, and the keys that it has removed.
DEEPSPEED_KEYS = (Path(__file__).parent / "deepspeed_keys.txt").read_text().split()
DOCUMENT = Path(__file__).parents[2] / "docs" / "config.md"

MARKED = [key for key in all_keys().values() if key.mark is not None and "." not in key.place]


def test_every_key_of_deepspeeds_schema_is_known() -> None:
    """As honoured, without effect, refused, or an old name."""
    assert sorted(DEEPSPEED_KEYS) == DEEPSPEED_KEYS
    known = {*all_keys(), *(old for old, _, _ in RENAMED)}
    assert not [key for key in DEEPSPEED_KEYS if key not in known]
    assert {key.kind for key in all_keys().values()} == {"honoured", "no effect", "refused"}


def test_old_names_lead_to_keys_that_exist() -> None:
    assert {new for _, new, _ in RENAMED} <= set(all_keys())
    assert not {old for old, _, _ in RENAMED} & set(all_keys())


def test_every_key_does_something_or_says_why_not() -> None:
    """No row of the document is without words."""
    empty = [line for line in document().splitlines() if re.search(r"\| +\|$", line)]
    assert not empty


def test_the_document_is_current() -> None:
    """`make docs` writes it."""
    assert DOCUMENT.read_text() == document()


@pytest.mark.parametrize("key", MARKED, ids=lambda key: key.place)
def test_a_key_at_the_top_is_met_as_its_kind_says(key: Key) -> None:
    """Asked for in a way that is never met: a warning or an error with the reason; null is met."""
    assert key.mark is not None
    value: Any = {"enabled": True, "autotuning_size": 2, "autotp_size": 2, "deepcompile": True}
    if key.field.annotation in {bool, str | None, int | None} or "sequence" in key.place:
        value = {bool: not key.field.default, str | None: "fp32"}.get(key.field.annotation, 8)
    refused = None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            load_config({key.place: value})
        except ConfigError as error:
            refused = str(error)
    said = refused or "".join(str(w.message) for w in caught)
    assert (refused is not None) == (key.kind == "refused")
    assert key.mark.is_met(value) or (key.place in said and key.mark.why in said)


def test_one_warning_names_the_file(tmp_path: Path) -> None:
    """And comes from the line that loads it."""
    path = tmp_path / "ds.json"
    path.write_text('{"memory_breakdown": true, "disable_allgather": true}')
    with pytest.warns(TieringWarning, match=r"ds\.json' works, but not all") as caught:
        load_config(path)
    assert [w.filename for w in caught] == [__file__]
