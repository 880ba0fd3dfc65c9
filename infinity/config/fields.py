"""What all sections are made of: types of values, and the marks of keys that do nothing here.

A key without a mark acts. `NoEffect` is for what may be asked and changes nothing: one warning a
file lists it. `Refused` is for what would train differently: an error that says what to use.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    model_validator,
)
from pydantic_core import CoreSchema, core_schema

from tiering.errors import ConfigError
from tiering.sizes import parse_bytes


def _number(value: object) -> object:
    """True and false are no numbers."""
    if isinstance(value, bool):
        raise ValueError(f"must be a number, got {str(value).lower()}")  # noqa: TRY004 - pydantic's
    return value


def whole(value: object) -> object:
    """Counts may be written as floats such as 1e9."""
    value = _number(value)
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _floor(value: object) -> object:
    """Sizes may be worked out by hand, such as 0.9 * 4096 * 4096; `load_config` tells of it."""
    value = _number(value)
    return math.floor(value) if isinstance(value, float) and math.isfinite(value) else value


def _bytes(value: object) -> object:
    """Sizes may be written as "8GiB"."""
    if not isinstance(value, str) or value == "auto":
        return _floor(value)
    try:
        return parse_bytes(value)
    except ConfigError as error:
        raise ValueError(str(error)) from None


def _default_if_null(value: object) -> object:
    """Null for a section is the section left out."""
    return {} if value is None else value


Auto = Literal["auto"]
Count = Annotated[int, BeforeValidator(whole), Field(ge=0)]
Positive = Annotated[int, BeforeValidator(whole), Field(ge=1)]
Whole = Annotated[int, BeforeValidator(whole)]
Size = Annotated[int, BeforeValidator(_floor), Field(ge=1)]
SizeOrNone = Annotated[int, BeforeValidator(_floor), Field(ge=0)]
Bytes = Annotated[int, BeforeValidator(_bytes), Field(ge=1)]
Number = Annotated[float, BeforeValidator(_number), Field(ge=0, allow_inf_nan=False)]
Factor = Annotated[float, BeforeValidator(_number), Field(gt=0, allow_inf_nan=False)]
FloatType = Literal["fp32", "fp16", "bf16"]
NullIsDefault = BeforeValidator(_default_if_null)

Met = Callable[[object], bool]


def anything(_: object) -> bool:
    """Whatever is asked, the outcome is the same."""
    return True


def never(_: object) -> bool:
    """No value of this key is met."""
    return False


def off(value: object) -> bool:
    """A section that is not switched on, whatever else is in it; or false."""
    if isinstance(value, Mapping):
        return value.get("enabled", False) in (False, "auto")
    return value is False


@dataclass(frozen=True)
class Values:
    """Those that ask for what always happens; 1 is not true."""

    values: tuple[object, ...]

    def __call__(self, value: object) -> bool:
        """Whether it is one of them."""
        return value in [v for v in self.values if isinstance(v, bool) == isinstance(value, bool)]


def given(*values: object) -> Values:
    """These ask for what always happens."""
    return Values(values)


@dataclass(frozen=True)
class _Mark:
    why: str
    met_by: Met = never
    keys: tuple[str, ...] = ()

    def is_met(self, value: object) -> bool:
        """Whether what this value asks is what happens."""
        return value is None or value == "auto" or self.met_by(value)


class NoEffect(_Mark):
    """Marks a key that changes nothing.

    Args:
        why: in one line.
        met_by: which values ask for what always happens, and need no warning.
        keys: of a section that is not looked into.
    """


class Refused(_Mark):
    """Marks a key that is an error, except where it asks for what always happens.

    Args:
        why: what to use instead.
        met_by: which values are let pass.
        keys: of a section that is not looked into.
    """

    def __get_pydantic_core_schema__(
        self,
        source: Any,  # noqa: ANN401 - pydantic's signature
        handler: GetCoreSchemaHandler,
    ) -> CoreSchema:
        """Check after the type."""
        return core_schema.no_info_after_validator_function(self._check, handler(source))

    def _check(self, value: object) -> object:
        if self.is_met(value):
            return value
        shown = "" if isinstance(value, (Mapping, list)) else f", got {value!r}"
        raise ValueError(f"is not supported{shown}; {self.why}")


class Section(BaseModel):
    """What all sections share: frozen, nothing unknown, values of the stated types only."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    def remarks(self) -> Iterator[str]:
        """What a reader of the file should know of keys that are each fine."""
        yield from ()


class AutoSection(Section):
    """One whose keys may each be "auto", which is the default where nobody else can know better."""

    @model_validator(mode="before")
    @classmethod
    def _auto_is_the_default(cls, value: object) -> object:
        if not isinstance(value, Mapping):
            return value
        return {k: v for k, v in value.items() if v != "auto" or cls._keeps_auto(k)}

    @classmethod
    def _keeps_auto(cls, key: object) -> bool:
        field = cls.model_fields.get(key) if isinstance(key, str) else None
        return field is None or "auto" in _arguments(field.annotation)


def _arguments(annotation: object) -> Iterator[object]:
    for argument in get_args(annotation):
        yield argument
        yield from _arguments(argument)
