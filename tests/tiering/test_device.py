"""Slots of a device whose memory is not the host's; torch's meta device has tensors without any."""

from __future__ import annotations

import torch

from tiering.spec import RecordSpec, TensorSpec
from tiering.tiers.device import DeviceTier

SPEC = RecordSpec(
    "x", (TensorSpec("a", torch.float32, (4,)), TensorSpec("b", torch.bfloat16, (3, 2)))
)


def test_a_slot_knows_whether_a_tensor_over_it_is_alive() -> None:
    """A view, a parameter that points there, and what autograd knows as its base."""
    slot = DeviceTier(torch.device("meta")).allocate(SPEC.nbytes)
    assert not slot.is_aliased
    tensors = slot.tensors(SPEC)
    assert slot.is_aliased
    kept = tensors["b"][1:].detach()
    del tensors
    assert slot.is_aliased
    parameter = torch.nn.Parameter(torch.empty(0, device="meta"))
    parameter.data = kept
    del kept
    assert slot.is_aliased
    parameter.data = torch.empty(0, device="meta")
    assert not slot.is_aliased


def test_a_slot_made_in_inference_mode_can_be_trained_with() -> None:
    """Whoever asks first for a record's memory may be an evaluation."""
    with torch.inference_mode():
        slot = DeviceTier(torch.device("meta")).allocate(SPEC.nbytes)
    assert not slot.tensors(SPEC)["a"].is_inference()
