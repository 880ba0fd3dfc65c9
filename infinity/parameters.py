"""Parameters that stay the user's while their memory is elsewhere.

Note: a released parameter

On release a parameter keeps its identity, name, shape and type. Its data becomes one element (NaN,
so that nothing can compute with it unnoticed) seen at the true shape with strides of zero, and its
class becomes a `ReleasedParameter`. That class answers questions about shape and type as if the
parameter were there; any other use first fetches the unit, which gives the parameter its memory and
its plain class back, and then goes on. A present parameter is a plain `nn.Parameter` and costs
nothing.

What would break it: memory given to something else while a tensor still looks at it. Slots are
reused only when the last tensor over them is gone, so an alias taken by ``p.detach()`` or
``p.data`` stays what it was. And backward of what has saved the parameter itself, which autograd
does where it is used outside of the model's modules: it would compute with the stub. Every release
counts as a change in place, so autograd refuses that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn, Protocol

import torch
from torch import nn
from torch.autograd.graph import increment_version
from torch.utils._pytree import tree_leaves


class Fetcher(Protocol):
    """Whoever can bring released parameters back."""

    def fetch(self, parameters: Sequence[nn.Parameter]) -> None:
        """Make those of these parameters present that are one's own, all at once."""
        ...

    def asked_for_gradient(self, parameter: nn.Parameter) -> None:
        """Somebody looks at a released parameter's ``grad``."""
        ...


def _accessors(accessor: str, *names: str) -> Iterator[Callable[..., Any]]:
    """The functions behind reading, setting or deleting attributes, of those this torch has."""
    for name in names:
        if hasattr(torch.Tensor, name):
            yield getattr(getattr(torch.Tensor, name), accessor)


def _methods(*names: str) -> Iterator[Callable[..., Any]]:
    """Methods by name, of those that this torch has."""
    for name in names:
        if hasattr(torch.Tensor, name):
            yield getattr(torch.Tensor, name)


# What can be answered without the data: the stub has the true shape, type and autograd state.
_METADATA: frozenset[Callable[..., Any]] = frozenset(
    [
        *_accessors(
            "__get__",
            *("shape", "dtype", "device", "ndim", "layout", "itemsize", "nbytes", "names", "name"),
            *("is_cpu", "is_cuda", "is_meta", "is_sparse", "is_quantized", "is_nested"),
            *("requires_grad", "is_leaf", "grad", "grad_fn", "output_nr", "retains_grad"),
            *("_version", "_base", "_grad", "_grad_fn"),
            *("_backward_hooks", "_post_accumulate_grad_hooks"),
        ),
        *_accessors(
            "__set__", "requires_grad", "grad", "_backward_hooks", "_post_accumulate_grad_hooks"
        ),
        *_accessors("__delete__", "grad"),
        *_methods(
            *("size", "dim", "ndimension", "numel", "nelement", "element_size", "get_device"),
            *("is_floating_point", "is_complex", "is_signed", "is_inference", "_is_view"),
            *("register_hook", "register_post_accumulate_grad_hook", "requires_grad_"),
            *("retain_grad", "__len__", "__hash__"),
        ),
        torch.numel,
        torch.is_floating_point,
        torch.is_complex,
        torch.is_tensor,
        torch.is_inference,
    ]
)


def _contiguous_stride(shape: Sequence[int]) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def _stride(parameter: torch.Tensor, dim: int | None = None) -> int | tuple[int, ...]:
    strides = _contiguous_stride(parameter.shape)
    return strides if dim is None else strides[dim]


(_GRAD,) = _accessors("__get__", "grad")

# The stub would answer these wrongly: a present parameter is contiguous.
_LAYOUT: dict[Callable[..., Any], Callable[..., Any]] = {
    torch.Tensor.stride: _stride,
    torch.Tensor.is_contiguous: lambda _p, **_kwargs: True,
    torch.Tensor.storage_offset: lambda _p: 0,
}


class ReleasedParameter(nn.Parameter):
    """A parameter whose memory is elsewhere. Engines use subclasses made by `Stubs`."""

    fetcher: Fetcher

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401 - whatever the function returns
        """Answer from the metadata, or bring the data back and go on."""
        del types
        kwargs = kwargs or {}
        if func in _LAYOUT:
            return _LAYOUT[func](*args, **kwargs)
        if func == _GRAD:
            cls.fetcher.asked_for_gradient(args[0])
        if func in _METADATA:
            with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001
                return func(*args, **kwargs)
        if func is torch.Tensor.__reduce_ex__:
            _refuse_copy()
        # All of them: fetching some must not send away others that the function needs as well.
        leaves = tree_leaves((args, kwargs))
        cls.fetcher.fetch([leaf for leaf in leaves if isinstance(leaf, nn.Parameter)])
        return func(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        """Refuse: a copy would gather the whole model."""
        _refuse_copy()

    def __reduce_ex__(self, protocol: Any) -> NoReturn:  # noqa: ANN401
        """Refuse, for the same reason."""
        _refuse_copy()


def _refuse_copy() -> NoReturn:
    raise RuntimeError(
        "the model's parameters are paged out, so it cannot be copied or pickled as a whole; "
        "use engine.module.state_dict() for its weights, or copy the model before "
        "infinity.initialize()"
    )


class Stubs:
    """Turns parameters into released ones and back.

    Args:
        fetcher: who fetches them when they are used.
        device: where they appear to be.
    """

    def __init__(self, fetcher: Fetcher, device: torch.device) -> None:
        self._class: type[ReleasedParameter] = type(
            "ReleasedParameter", (ReleasedParameter,), {"fetcher": fetcher}
        )
        self._device = device
        self._cells: dict[torch.dtype, torch.Tensor] = {}

    def answer_by(self, fetcher: Fetcher) -> None:
        """Have another fetch the parameters that are released."""
        self._class.fetcher = fetcher

    def release(self, parameter: nn.Parameter, dtype: torch.dtype) -> None:
        """Take the parameter's memory away."""
        cell = self._cells.get(dtype)
        if cell is None:
            cell = torch.full((1,), torch.nan, dtype=torch.float32, device=self._device).to(dtype)
            self._cells[dtype] = cell
        parameter.__class__ = self._class
        _set_data(parameter, cell.as_strided(parameter.shape, (0,) * parameter.ndim))
        increment_version(parameter)

    @staticmethod
    def restore(parameter: nn.Parameter, view: torch.Tensor) -> None:
        """Give the parameter this memory, of its shape."""
        _set_data(parameter, view)
        parameter.__class__ = nn.Parameter


def _set_data(parameter: nn.Parameter, data: torch.Tensor) -> None:
    """While it is a released one, so that nobody ever finds an ordinary one without its values."""
    with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001
        parameter.data = data
