"""Writes docs/config.md: every key, what is done with it, its type and default, and why.

    python -m infinity.config.reference > docs/config.md

All of it comes from the sections themselves: their fields, their marks and the strings below them.
"""

from __future__ import annotations

import ast
import inspect
import json
import re
import sys
import textwrap
import types
from collections.abc import Iterator
from typing import Annotated, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from infinity.config.batch import BatchSizes
from infinity.config.elsewhere import Elsewhere
from infinity.config.fields import Section, Values
from infinity.config.loading import RENAMED
from infinity.config.names import Key, sections_of
from infinity.config.reporting import Reporting
from infinity.config.root import Config
from infinity.config.training import Training

_HEAD = """\
# Configuration

Written by `python -m infinity.config.reference`; do not edit.

The format is that of DeepSpeed's JSON files, as of 0.19.8; the section `tiering` is our own. Each
key is of one kind:

- **honoured**: it does what it says;
- **no effect**: it is accepted and changes nothing. What a file asks for by such keys and does not
  happen is listed in one warning; keys that only say how fast, or by which buffers, are silent;
- **refused**: an error says what to use instead, unless the file asks for what always happens.

A section that is switched off (`"enabled": false`) is silent, whatever else is in it. Any other key
is an error that names the nearest known one, and all problems of a file are told in one error.

Whole numbers may be written as `5e8`; a size with a fraction is rounded down, with a warning.
`"auto"` is worked out by the engine, except for the optimizer and the scheduler: there it is for a
trainer to fill in, and an error if neither it nor the arguments of `initialize` do.
"""
_COLUMNS = (
    "| key | kind | type | default | what it does, or why not |\n| --- | --- | --- | --- | --- |\n"
)
_GROUPS = (BatchSizes, Training, Reporting, Elsewhere)
_NAMES = {int: "integer", float: "number", bool: "true, false", str: "text", object: "any"}


def document() -> str:
    """The whole of docs/config.md."""
    parts = [_HEAD]
    for group in _GROUPS:
        rows = (_row(Key(name, field, group)) for name, field in group.model_fields.items())
        parts.append(f"## {_first_line(group).removesuffix('.')}\n\n{_COLUMNS}{''.join(rows)}")
    grouped = {name for group in _GROUPS for name in group.model_fields}
    for name, field in Config.model_fields.items():
        if name not in grouped:
            parts += _tables(name, field)
    parts.append(_old_names())
    return "\n".join(parts)


def _tables(place: str, field: FieldInfo) -> Iterator[str]:
    """A section's own table, then those of the sections in it; of several, one for the choice."""
    sections = list(sections_of(field.annotation))
    is_choice = len(sections) > 1
    if is_choice:
        names = ", ".join(_type(section.model_fields["type"].annotation) for section in sections)
        row = (
            f"| `{place}.type` | honoured | {names} | required | Which one, with its `params`. |\n"
        )
        yield f"## `{place}`\n\n{_COLUMNS}{row}"
    for section in sections:
        keys = [Key(f"{place}.{k}", f, section) for k, f in section.model_fields.items()]
        if not is_choice:
            rows = "".join(_row(key) for key in keys if _says_something(key))
            yield f"## {_first_line(section)}\n\n{_COLUMNS}{rows}"
        for key in keys:
            yield from _tables(key.place, key.field)


def _says_something(key: Key) -> bool:
    """A section without words of its own is shown by its table."""
    return not any(sections_of(key.field.annotation)) or bool(_words(key))


def _row(key: Key) -> str:
    kind = key.kind if key.kind == "honoured" else f"*{key.kind}*"
    text = _words(key).replace("|", "\\|")
    if key.mark is not None and key.mark.keys:
        text += f" Its keys: `{'`, `'.join(key.mark.keys)}`."
    if key.mark is not None and isinstance(key.mark.met_by, Values):
        met = " or ".join(f"`{json.dumps(value)}`" for value in key.mark.met_by.values)
        text += f" ({met} is what always happens.)"
    is_type_shown = key.kind != "refused"
    shown = (_type(key.field.annotation), _default(key.field)) if is_type_shown else ("", "")
    return f"| `{key.place}` | {kind} | {shown[0]} | {shown[1]} | {text} |\n"


def _words(key: Key) -> str:
    """Why it does nothing, or the string below the field; in the words of JSON."""
    if key.mark is not None:
        why = key.mark.why
        return f"{why[:1].upper()}{why[1:]}." if why.split()[0].isalpha() else f"{why}."
    docs = _docstrings(key.owner)
    text = " ".join(docs.get(key.place.rpartition(".")[2], "").split()).replace("``", "`")
    for word in ("None", "True", "False"):
        text = re.sub(rf"\b{word}:", f"{json.dumps(ast.literal_eval(word))}:", text)
    return text


def _docstrings(section: type[Section]) -> dict[str, str]:
    """The strings below a section's fields, those that it inherits included."""
    found: dict[str, str] = {}
    for owner in reversed(section.__mro__):
        if not issubclass(owner, Section):
            continue
        [definition] = ast.parse(textwrap.dedent(inspect.getsource(owner))).body
        assert isinstance(definition, ast.ClassDef)
        for field, below in zip(definition.body, definition.body[1:], strict=False):
            match field, below:
                case (
                    ast.AnnAssign(target=ast.Name(id=name)),
                    ast.Expr(value=ast.Constant(value=str(text))),
                ):
                    found[name] = text
    return found


def _first_line(section: type[Section]) -> str:
    return (section.__doc__ or "").partition("\n")[0].replace("``", "`").removesuffix(".")


def _type(annotation: object) -> str:  # noqa: PLR0911 - one for each form
    """In the words of JSON."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if annotation is type(None):
        return "null"
    if origin is Annotated:
        return _type(arguments[0])
    if origin is Literal:
        return ", ".join(f"`{json.dumps(value)}`" for value in arguments)
    if origin in {Union, types.UnionType}:
        return ", ".join(dict.fromkeys(map(_type, arguments)))
    if origin in {list, tuple}:
        inner = [_type(argument) for argument in arguments if argument is not Ellipsis]
        return f"list of {' and '.join(inner) if len(set(inner)) > 1 else inner[0]}"
    if any(sections_of(annotation)) or origin is dict:
        return "section"
    return _NAMES.get(annotation, "any") if isinstance(annotation, type) else "any"


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    if isinstance(field.default, Section):
        return ""
    return f"`{json.dumps(field.default)}`"


def _old_names() -> str:
    rows = "".join(f"| `{old}` | `{new}` |\n" for old, new, _ in RENAMED)
    return (
        "## Old names\n\nThey are taken under their new ones, with a warning.\n\n"
        f"| old | new |\n| --- | --- |\n{rows}"
    )


if __name__ == "__main__":
    sys.stdout.write(document())
