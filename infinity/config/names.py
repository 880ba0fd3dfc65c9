"""Every key of the format, dotted, with what it is; and the nearest one to a wrong one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, Literal, NamedTuple, get_args

from pydantic.fields import FieldInfo

from infinity.config.fields import NoEffect, Refused, Section
from infinity.config.root import Config
from infinity.config.spelling import did_you_mean, nearest

Kind = Literal["honoured", "no effect", "refused"]


class Key(NamedTuple):
    """One key."""

    place: str
    """Dotted."""
    field: FieldInfo
    owner: type[Section]
    """The section that it is a field of."""

    @property
    def mark(self) -> NoEffect | Refused | None:
        """That it does nothing here, and why."""
        return mark_of(self.field)

    @property
    def kind(self) -> Kind:
        """What is done with it."""
        if self.mark is None:
            return "honoured"
        return "refused" if isinstance(self.mark, Refused) else "no effect"


def mark_of(field: FieldInfo) -> NoEffect | Refused | None:
    """The mark of a field, if it has one."""
    return next((m for m in field.metadata if isinstance(m, (NoEffect, Refused))), None)


def sections_of(annotation: object) -> Iterator[type[Section]]:
    """The sections that a value of this type may be or hold."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        yield annotation
    for argument in get_args(annotation):
        yield from sections_of(argument)


def keys_of(section: type[Section], prefix: str = "") -> Iterator[Key]:
    """Every key of a section and of those in it; one not looked into has its field for its keys."""
    for name, field in section.model_fields.items():
        key = Key(prefix + name, field, section)
        yield key
        for inner in sections_of(field.annotation):
            yield from keys_of(inner, f"{prefix}{name}.")
        yield from (key._replace(place=f"{key.place}.{k}") for k in (key.mark or _BARE).keys)


def all_keys() -> dict[str, Key]:
    """Every key of the format by its name; one that several types have is there once."""
    return {key.place: key for key in reversed(list(keys_of(Config)))}


def own_parts(location: tuple[int | str, ...]) -> Iterator[int | str]:
    """What of an error's place is the user's key, and not an alternative of its type."""
    models: list[type[Section]] = [Config]
    for part in location:
        if not models:
            return
        if isinstance(part, int):  # a place in a list of sections
            yield part
            continue
        tagged = [m for m in models if m.__name__ == part and "type" in m.model_fields]
        if len(models) > 1 and tagged:
            models = tagged
            continue
        yield part
        fields = [m.model_fields[part] for m in models if part in m.model_fields]
        models = [inner for field in fields for inner in sections_of(field.annotation)]


def suggestion(place: str) -> str:
    """What may have been meant by an unknown key."""
    known = list(all_keys())
    close = nearest(place, known)
    if close is None:
        leaves = {key.rsplit(".", 1)[-1]: key for key in reversed(known)}
        leaf = nearest(place.rsplit(".", 1)[-1], leaves)
        close = leaf and leaves[leaf]
    return did_you_mean(close) or "; it is not supported (yet)"


_BARE: Final = NoEffect("")
