"""Attaches the schedule to a model's modules and to autograd.

Note: what autograd saves

A forward saves views of weights (``weight.t()``) for backward. Held as tensors they would keep the
unit's memory between forward and backward, which is what paging is there to avoid; and a weight
that is saved as it is would be a stub by then. So while the model, or any part of it, runs, a saved
tensor that lies in a unit's flat buffer is packed as its place (unit, offset, sizes, strides), and
unpacked as a view of wherever the unit is then. The weight must be the same then; if it was changed
in between, that is the same error as in torch.

What would break it: a saved tensor of memory that merely used to be a unit's. Packing asks for the
storage's address among the units present now, and a slot is not reused while an old view of it
lives.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.graph import register_multi_grad_hook, saved_tensors_hooks

from infinity.schedule import Schedule
from infinity.unit import Unit

# Who packs saved tensors now. Before torch 2.8 that is not told, and might be anybody.
_PACKED_BY = getattr(
    torch._C._autograd,  # noqa: SLF001
    "_top_saved_tensors_default_hooks",
    lambda _ignore_is_tracing: True,
)


class SavedView(NamedTuple):
    """Where in a unit a saved tensor lies, and in which version of the weight."""

    unit: Unit
    version: int
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class HostCopy(NamedTuple):
    """A saved activation that waits for backward in host memory."""

    values: torch.Tensor
    device: torch.device


class Hooks:
    """The hooks of one engine; `remove` takes them all away.

    Args:
        schedule: what they call.
        saves_on_host: whether activations wait for backward in host memory.
    """

    def __init__(self, schedule: Schedule, *, saves_on_host: bool = False) -> None:
        self._schedule = schedule
        self._saves_on_host = saves_on_host
        self._handles: list[Any] = []
        self._packing_now: list[AbstractContextManager[Any]] = []  # of the calls under way
        schedule.unwind_by(self.unwind)

    def attach(self, module: nn.Module, units: Sequence[Unit]) -> None:
        """Have the units present in the module's forward, and released behind its backward."""

        # A compiler would trace into them; what they do is not part of the model's arithmetic.
        @torch.compiler.disable  # type: ignore[untyped-decorator]
        def before(_module: nn.Module, _args: Any) -> None:  # noqa: ANN401
            self._packing_now.append(self._packing())
            self._packing_now[-1].__enter__()
            self._schedule.enter(units)

        @torch.compiler.disable  # type: ignore[untyped-decorator]
        def after(_module: nn.Module, _args: Any, output: Any) -> None:  # noqa: ANN401
            if self._packing_now:
                self._packing_now.pop().__exit__(None, None, None)
            self._schedule.leave(units)
            outputs = [t for t in tensors_in(output) if t.grad_fn is not None]
            if outputs:
                register_multi_grad_hook(
                    outputs, lambda _grad: self._schedule.enter_backward(units), mode="any"
                )

        self._handles.append(module.register_forward_pre_hook(before, prepend=True))
        self._handles.append(module.register_forward_hook(after, always_call=True))

    def take_gradient(self, parameter: nn.Parameter) -> None:
        """Take the parameter's gradient as soon as autograd has finished it."""
        self._handles.append(
            parameter.register_post_accumulate_grad_hook(self._schedule.take_gradient)
        )

    def copy_on_state_dict(self, module: nn.Module) -> None:
        """Have ``state_dict()`` return copies of the module's own parameters, in host memory.

        All of them at once may be more than a GPU has room for.
        """

        def before(_module: nn.Module, _prefix: str, _keep_vars: bool) -> None:  # noqa: FBT001
            self._schedule.begin_copy()

        def after(owner: nn.Module, state: dict[str, Any], prefix: str, _metadata: Any) -> None:  # noqa: ANN401
            self._schedule.end_copy()
            for name, _ in owner.named_parameters(recurse=False, remove_duplicate=False):
                tensor = state.get(prefix + name)
                if tensor is not None and not isinstance(tensor, nn.Parameter):
                    state[prefix + name] = tensor.to("cpu", copy=True)

        self._handles.append(module.register_state_dict_pre_hook(before))
        self._handles.append(module.register_state_dict_post_hook(after))

    def saving(self) -> AbstractContextManager[Any]:
        """While in force, saved views of units are packed as places."""
        return saved_tensors_hooks(
            torch.compiler.disable(self._pack), torch.compiler.disable(self._unpack)
        )

    def _packing(self) -> AbstractContextManager[Any]:
        """For a module that is called by itself, or once more in backward.

        Within the engine's forward it is on already. And where others pack what is saved, as
        checkpointing does, they would not see it any more.
        """
        needed = torch.is_grad_enabled() and not _PACKED_BY(True)  # noqa: FBT003
        return self.saving() if needed else nullcontext()

    def unwind(self) -> None:
        """End the calls that an interrupt has ended: torch has told nobody."""
        while self._packing_now:
            self._packing_now.pop().__exit__(None, None, None)

    def remove(self) -> None:
        """Detach everything."""
        self.unwind()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _pack(self, tensor: torch.Tensor) -> SavedView | HostCopy | torch.Tensor:
        if tensor.layout is not torch.strided:
            return tensor
        unit = self._schedule.unit_at(tensor.untyped_storage().data_ptr())
        if unit is None or tensor.dtype != unit.compute_dtype:
            return self._pack_activation(tensor)
        offset = int(tensor.storage_offset())
        return SavedView(unit, unit.version_at(offset), tensor.size(), tensor.stride(), offset)

    def _pack_activation(self, tensor: torch.Tensor) -> HostCopy | torch.Tensor:
        if not self._saves_on_host or tensor.device.type == "cpu":
            return tensor
        values = torch.empty(tensor.size(), dtype=tensor.dtype, device="cpu", pin_memory=True)
        return HostCopy(values.copy_(tensor, non_blocking=True), tensor.device)

    def _unpack(self, saved: SavedView | HostCopy | torch.Tensor) -> torch.Tensor:
        if isinstance(saved, torch.Tensor):
            return saved
        if isinstance(saved, HostCopy):
            return saved.values.to(saved.device, non_blocking=True)
        flat = self._schedule.require(saved.unit)
        if saved.version != saved.unit.version_at(saved.offset):
            raise RuntimeError(
                "a weight needed for gradient computation was changed after the forward "
                f"(in the unit of {saved.unit.names[0]!r}): run backward before step(), or "
                "forward again"
            )
        return flat.as_strided(saved.size, saved.stride, saved.offset)


def is_managed(model: nn.Module) -> bool:
    """Whether an engine that was not closed has its hooks in the model."""
    return any(
        getattr(hook, "__module__", "") == __name__
        for module in model.modules()
        for hook in module._forward_pre_hooks.values()  # noqa: SLF001
    )


def tensors_in(value: Any) -> Iterator[torch.Tensor]:  # noqa: ANN401
    """Every tensor in nested tuples, lists, mappings and dataclasses."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors_in(item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from tensors_in(getattr(value, field.name))
