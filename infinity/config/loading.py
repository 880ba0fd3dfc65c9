"""A file in, a checked `Config` out; or one error with all that is wrong with it.

What a file may say and what does nothing here is told in one warning.
"""

from __future__ import annotations

import copy
import json
import math
import os
import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeAlias

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from infinity.config.fields import NoEffect, Section
from infinity.config.names import mark_of, own_parts, suggestion
from infinity.config.root import Config, disagreements
from infinity.config.spelling import did_you_mean, nearest
from tiering.errors import ConfigError, TieringWarning

Raw: TypeAlias = dict[str, Any]
Source: TypeAlias = str | os.PathLike[str] | Mapping[str, object]


class _Renamed(NamedTuple):
    """A key that has another name now."""

    old: str
    new: str
    convert: Callable[[object], object] = lambda value: value
    """None from it: nothing is asked for."""


def _on_cpu(value: object) -> object:
    if value in (False, "auto", None):
        return None
    return {"device": "cpu"} if value is True else value


def _stage_of(value: object) -> object:
    return {"stage": int(value)} if isinstance(value, bool) else value


_ZERO: Final = "zero_optimization."
RENAMED: Final = (
    _Renamed("bfloat16", "bf16"),
    _Renamed(f"{_ZERO}cpu_offload", f"{_ZERO}offload_optimizer", _on_cpu),
    _Renamed(f"{_ZERO}cpu_offload_param", f"{_ZERO}offload_param", _on_cpu),
    _Renamed(f"{_ZERO}cpu_offload_params", f"{_ZERO}offload_param", _on_cpu),
    _Renamed(
        f"{_ZERO}stage3_gather_fp16_weights_on_model_save",
        f"{_ZERO}stage3_gather_16bit_weights_on_model_save",
    ),
    *(
        _Renamed(f"{_ZERO}{name}", f"{_ZERO}stage3_{name}")
        for name in (
            *("prefetch_bucket_size", "param_persistence_threshold", "max_live_parameters"),
            *("model_persistence_threshold", "max_reuse_distance", "allgather_sequential"),
            *("gather_16bit_weights_on_model_save", "module_granularity_threshold"),
            "use_all_reduce_for_fetch_params",
        )
    ),
)


def load_config(source: Source | Config) -> Config:
    """Read and check a configuration.

    Args:
        source: a mapping, or the path of a JSON file; one that is loaded already is given back.

    Raises:
        ConfigError: the file cannot be read, or has problems; all of them are listed.

    Warns:
        TieringWarning: the file has keys that do nothing here, or have other names now.
    """
    if isinstance(source, Config):
        return source
    raw = copy.deepcopy(_mapping(source))
    name = "" if isinstance(source, Mapping) else f" {os.fspath(source)!r}"
    problems: list[str] = []
    remarks = list(_rename(raw, problems))
    config, broken = _checked(raw, problems)
    if config is not None:
        problems += [message for keys, message in disagreements(config) if not _touch(keys, broken)]
    if problems or config is None:
        lines = "".join(f"\n  - {problem}" for problem in problems)
        raise ConfigError(f"the configuration{name} has {len(problems)} problem(s):{lines}")
    remarks += _remarks(config, raw, "")
    if remarks:
        lines = "".join(f"\n  - {remark}" for remark in remarks)
        warnings.warn(
            f"the configuration{name} works, but not all of it does what it says:{lines}",
            TieringWarning,
            stacklevel=2,
        )
    return config


def _mapping(source: Source) -> Raw:
    if isinstance(source, Mapping):
        return dict(source)
    if not isinstance(source, (str, os.PathLike)):
        raise ConfigError(f"the configuration must be a mapping or a path, got {source!r}")
    try:
        text = Path(source).read_text(encoding="utf-8")
        loaded = json.loads(text, object_pairs_hook=_without_repetition)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"the configuration file {os.fspath(source)!r} cannot be read: {error}"
        ) from error
    if not isinstance(loaded, dict):
        raise ConfigError(f"the configuration file {os.fspath(source)!r} must hold a JSON object")
    return loaded


def _without_repetition(pairs: list[tuple[str, object]]) -> Raw:
    """An object of the file; JSON would silently take the last of two values."""
    counts = Counter(key for key, _ in pairs)
    twice = [repr(key) for key, count in counts.items() if count > 1]
    if twice:
        raise ValueError(f"{', '.join(twice)} stands there more than once in one section")
    return dict(pairs)


def _rename(raw: Raw, problems: list[str]) -> Iterator[str]:
    """Put what has an old name under its new one, in place."""
    if isinstance(raw.get("zero_optimization"), bool):
        raw["zero_optimization"] = _stage_of(raw["zero_optimization"])
        yield 'zero_optimization: is a section now; write {"stage": 1} for true'
    for old, new, convert in RENAMED:
        section, _, name = old.rpartition(".")
        holder = raw.get(section) if section else raw
        if not isinstance(holder, dict) or name not in holder:
            continue
        value, target = convert(holder.pop(name)), new.rpartition(".")[2]
        if value is not None and target in holder:
            problems.append(f"{old}: is the old name of {new}, which is there too; leave it out")
        elif value is not None:
            holder[target] = value
        yield f"{old}: is now called {new}"


def _checked(raw: Raw, problems: list[str]) -> tuple[Config | None, set[str]]:
    """The configuration without what is wrong in it, which is added to the problems.

    Returns:
        The rest of the configuration, and the keys that were left out of it.
    """
    rest, broken = copy.deepcopy(raw), set[str]()
    while isinstance(result := _attempt(rest), ValidationError):
        lines = _problems(result)
        problems += [f"{key}: {text}" if key else text for key, text in lines.items()]
        broken |= set(lines)
        places = [tuple(own_parts(error["loc"])) for error in result.errors()]
        if not [place for place in places if _leave_out(rest, place)]:
            return None, broken
    return result, broken


def _attempt(raw: Raw) -> Config | ValidationError:
    try:
        return Config.model_validate(raw)
    except ValidationError as error:
        return error


def _leave_out(raw: Raw, place: tuple[int | str, ...]) -> bool:
    """Delete the innermost key of a place; what is missing goes with all that is around it."""
    holder: Any = raw
    for depth, part in enumerate(place):
        if part not in holder:
            return raw.pop(str(place[0]), None) is not None
        if depth == len(place) - 1 or not isinstance(holder[part], dict):
            del holder[part]
            return True
        holder = holder[part]
    return False


def _touch(keys: tuple[str, ...], broken: set[str]) -> bool:
    """Whether one of the keys, or what it is in or holds, is wrong in itself."""
    return any(
        f"{a}.".startswith(f"{b}.") or f"{b}.".startswith(f"{a}.") for a in keys for b in broken
    )


def _problems(error: ValidationError) -> dict[str, str]:
    """What is wrong by key; a value that fits no alternative is one problem."""
    lines: dict[str, list[str]] = {}
    for problem in error.errors():
        place = ".".join(map(str, own_parts(problem["loc"])))
        key = f"{place}.type" if problem["type"].startswith("union_tag") else place
        lines.setdefault(key, []).append(_in_words(problem, place))
    # That "auto" would do as well goes without saying.
    kept = {
        key: [t for t in texts if not t.startswith("must be 'auto',")]
        for key, texts in lines.items()
    }
    return {key: "; or ".join(kept[key] or texts) for key, texts in lines.items()}


def _in_words(problem: ErrorDetails, place: str) -> str:
    kind, context = problem["type"], problem.get("ctx", {})
    if kind == "extra_forbidden":
        return f"unknown key{suggestion(place)}"
    if kind in {"missing", "union_tag_not_found"}:
        return "is required"
    if kind in {"model_type", "model_attributes_type", "dict_type"}:
        return f"must be a section in braces, got {problem['input']!r}"
    if kind == "union_tag_invalid":
        meant = nearest(context["tag"], re.findall(r"'(\w+)'", context["expected_tags"]))
        wrong = f"must be one of {context['expected_tags']}, got {context['tag']!r}"
        return wrong + did_you_mean(meant)
    if kind == "value_error":
        return problem["msg"].removeprefix("Value error, ")
    return f"{problem['msg'].replace('Input should be', 'must be')}, got {problem['input']!r}"


def _remarks(section: Section, raw: Mapping[str, object], prefix: str) -> Iterator[str]:
    """What the file says that does not happen, or not quite."""
    for name, value in raw.items():
        field = type(section).model_fields[name]
        mark, used = mark_of(field), getattr(section, name)
        if isinstance(mark, NoEffect) and not mark.is_met(value):
            yield f"{prefix}{name}: no effect: {mark.why}"
        elif isinstance(used, Section) and isinstance(value, Mapping):
            yield from _remarks(used, value, f"{prefix}{name}.")
        elif isinstance(value, float) and isinstance(used, int) and value != used:
            yield f"{prefix}{name}: {value} is rounded down to {math.floor(value)}"
    yield from section.remarks()
