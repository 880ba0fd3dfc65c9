from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file

from tiering import records
from tiering.errors import ConfigError
from tiering.spec import RecordSpec, TensorSpec

FILE_DTYPES = [
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.uint16, torch.uint32, torch.uint64, torch.float16, torch.bfloat16, torch.float32),
    *(torch.float64, torch.complex64, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.float8_e4m3fnuz, torch.float8_e5m2fnuz),
]


def spec_of(*tensors: tuple[torch.dtype, tuple[int, ...]], key: str = "layer.0") -> RecordSpec:
    """A record of tensors named t0, t1, ..."""
    return RecordSpec(
        key, tuple(TensorSpec(f"t{i}", dtype, shape) for i, (dtype, shape) in enumerate(tensors))
    )


def write(path: Path, spec: RecordSpec, payload: bytes) -> None:
    """A record's file as the tier writes it."""
    padding = bytes(records.aligned_bytes(len(payload)) - len(payload))
    path.write_bytes(records.header(spec) + payload + padding)


def pattern(nbytes: int) -> torch.Tensor:
    """Bytes that are 0 or 1, which are values of every dtype."""
    return (torch.arange(nbytes) % 3 % 2).to(torch.uint8)


@pytest.mark.parametrize("dtype", FILE_DTYPES, ids=str)
def test_any_tool_that_reads_safetensors_gets_equal_tensors(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    """Every dtype, with a scalar and an empty tensor beside an ordinary one."""
    spec = spec_of((dtype, (3, 5)), (dtype, ()), (dtype, (2, 0)))
    payload = pattern(spec.nbytes)
    path = tmp_path / "record.safetensors"
    write(path, spec, payload.numpy().tobytes())
    assert path.stat().st_size == records.file_bytes(spec)
    tensors = load_file(path)
    for tensor, start in zip(spec.tensors, spec.offsets_bytes, strict=True):
        loaded = tensors[tensor.name]
        assert (loaded.dtype, tuple(loaded.shape)) == (tensor.dtype, tensor.shape)
        raw = loaded.reshape(-1).view(torch.uint8)
        assert torch.equal(raw, payload[start : start + tensor.nbytes])


def test_a_file_tells_its_key_and_the_version_of_its_format(tmp_path: Path) -> None:
    """Whoever finds a file can tell what it is; any string is a key."""
    key = 'blocks.0 "größe"\n\t\\'
    path = tmp_path / "record.safetensors"
    write(path, spec_of((torch.uint8, (5,)), key=key), bytes(5))
    with safe_open(path, framework="pt") as file:
        assert file.metadata() == {"format_version": records.FORMAT_VERSION, "key": key}
        assert set(file.keys()) == {"t0", "__padding__"}


@given(
    numels=st.lists(st.integers(0, 5000), min_size=1, max_size=60),
    key=st.text(max_size=300),
)
def test_header_and_payload_are_cut_for_direct_transfers(numels: list[int], key: str) -> None:
    """Payload and file end at multiples of the alignment, and the offsets leave no hole."""
    spec = spec_of(*((torch.float16, (numel,)) for numel in numels), key=key)
    head = records.header(spec)
    assert len(head) == records.payload_offset(spec)
    assert len(head) % records.ALIGNMENT_BYTES == 0
    assert records.file_bytes(spec) % records.ALIGNMENT_BYTES == 0
    assert int.from_bytes(head[:8], "little") == len(head) - 8
    fields = json.loads(head[8:])
    assert fields.pop("__metadata__")["key"] == key
    at = 0
    for field in fields.values():
        assert field["data_offsets"][0] == at
        at = field["data_offsets"][1]
    assert len(head) + at == records.file_bytes(spec)


def test_a_payload_that_ends_on_the_alignment_is_not_padded() -> None:
    """No tensor is declared that has no bytes."""
    spec = spec_of((torch.uint8, (8192,)))
    assert b"__padding__" not in records.header(spec)
    assert records.file_bytes(spec) == 4096 + 8192


@pytest.mark.parametrize("name", ["__padding__", "__metadata__"])
def test_a_tensor_cannot_have_a_name_that_the_format_uses(name: str) -> None:
    """A collision would make one of the two unreadable."""
    spec = RecordSpec("layer.0", (TensorSpec(name, torch.uint8, (1,)),))
    with pytest.raises(ConfigError, match=rf"'layer\.0'.*'{name}'"):
        records.header(spec)


def test_a_dtype_the_format_does_not_know_is_refused_by_name() -> None:
    """The message names the record, the tensor, its dtype, and those that would do."""
    assert not records.has_file_dtype(torch.complex128)
    with pytest.raises(ConfigError, match=r"'layer\.0': tensor 't0' is torch\.complex128.*float32"):
        records.header(spec_of((torch.complex128, (1,))))
