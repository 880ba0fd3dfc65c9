"""How a record lies in its file: a safetensors header, then the payload, both cut for direct I/O.

Bytes come from an arena slot, where the tensors of a record stand one after another, and go to the
same place in the file, shifted by the header. Nothing is converted on the way: one transfer moves
the whole payload. The header is padded with spaces, so that the payload starts at a multiple of
`ALIGNMENT_BYTES`, and the tail is padded by a tensor of its own, because safetensors allows no
bytes that belong to no tensor.

What would break: a payload that starts or ends off the alignment goes through the page cache
instead of past it; a hole in the header's offsets makes the file unreadable for every other tool.
``docs/format.md`` draws the file.
"""

from __future__ import annotations

import json
import struct
from typing import Final

import torch

from tiering.errors import ConfigError
from tiering.spec import RecordSpec, TensorSpec

ALIGNMENT_BYTES: Final = 4096
"""What addresses, file offsets and lengths are multiples of, so that every transfer may go
direct."""

FORMAT_VERSION: Final = "1"
PADDING_NAME: Final = "__padding__"
METADATA_NAME: Final = "__metadata__"

_LENGTH_BYTES: Final = 8  # the header's own length, little endian, in front of it

_DTYPE_NAMES: Final = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.uint16: "U16",
    torch.int16: "I16",
    torch.uint32: "U32",
    torch.int32: "I32",
    torch.uint64: "U64",
    torch.int64: "I64",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
}
if hasattr(torch, "float8_e8m0fnu"):  # not in the oldest torch that will do
    _DTYPE_NAMES[torch.float8_e8m0fnu] = "F8_E8M0"

_Field = dict[str, str | list[int]]


def aligned_bytes(nbytes: int) -> int:
    """``nbytes`` rounded up to a multiple of `ALIGNMENT_BYTES`."""
    return -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def has_file_dtype(dtype: torch.dtype) -> bool:
    """Whether the file format has a name for this dtype."""
    return dtype in _DTYPE_NAMES


def header(spec: RecordSpec) -> bytes:
    """The first bytes of a record's file, up to the payload.

    Args:
        spec: the record; its tensors must have dtypes that `has_file_dtype` and names the format
            leaves free.

    Returns:
        A multiple of `ALIGNMENT_BYTES` long.

    Raises:
        ConfigError: a dtype the format cannot name, or a tensor with a name the format uses itself.

    Source:
        The format section of the safetensors README.
    """
    fields: dict[str, _Field | dict[str, str]] = {
        METADATA_NAME: {"format_version": FORMAT_VERSION, "key": spec.key}
    }
    for tensor, start in zip(spec.tensors, spec.offsets_bytes, strict=True):
        fields[tensor.name] = _field(spec.key, tensor, start)
    padding_bytes = aligned_bytes(spec.nbytes) - spec.nbytes
    if padding_bytes:
        fields[PADDING_NAME] = _extent("U8", (padding_bytes,), spec.nbytes, padding_bytes)
    text = json.dumps(fields, separators=(",", ":")).encode()
    room_bytes = aligned_bytes(_LENGTH_BYTES + len(text)) - _LENGTH_BYTES
    return struct.pack("<Q", room_bytes) + text.ljust(room_bytes)


def payload_offset(spec: RecordSpec) -> int:
    """Byte of the file at which the first tensor starts: a multiple of `ALIGNMENT_BYTES`."""
    return len(header(spec))


def file_bytes(spec: RecordSpec) -> int:
    """Bytes of the record's whole file: header, payload and padding."""
    return payload_offset(spec) + aligned_bytes(spec.nbytes)


def _field(key: str, tensor: TensorSpec, start: int) -> _Field:
    """One tensor's entry in the header."""
    if tensor.name in (PADDING_NAME, METADATA_NAME):
        raise ConfigError(
            f"record {key!r}: the file format uses the name {tensor.name!r} itself; "
            f"rename the tensor"
        )
    if not has_file_dtype(tensor.dtype):
        raise ConfigError(
            f"record {key!r}: tensor {tensor.name!r} is {tensor.dtype}, which a safetensors file "
            f"cannot hold; store it as one of {', '.join(str(dtype) for dtype in _DTYPE_NAMES)}"
        )
    return _extent(_DTYPE_NAMES[tensor.dtype], tensor.shape, start, tensor.nbytes)


def _extent(dtype_name: str, shape: tuple[int, ...], start: int, nbytes: int) -> _Field:
    return {
        "dtype": dtype_name,
        "shape": list(shape),
        "data_offsets": [start, start + nbytes],
    }
