"""Which parameters are gathered together: from the module tree to scopes and groups.

A *scope* is a module whose forward needs certain parameters present: an element of a `ModuleList`
or `Sequential` (a transformer block, normally) with everything below it, a leaf module outside of
those, or a module that owns parameters directly. Each parameter belongs to the first scope that
holds it; a tied parameter is needed by several scopes and stored once. Within a scope parameters of
one type and one kind (trained or frozen, kept in fp32 or not) form a group, and each group becomes
a unit.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn


@dataclass(eq=False)
class Group:
    """Parameters that share a flat buffer.

    Args:
        names: their names in the model, in order.
        parameters: the user's objects, in the same order.
        keeps_fp32: whether they are stored, and computed with, in fp32 whatever the rest is.
    """

    names: list[str] = field(default_factory=list)
    parameters: list[nn.Parameter] = field(default_factory=list)
    keeps_fp32: bool = False

    @property
    def dtype(self) -> torch.dtype:
        """Their common type, as the user built them."""
        return self.parameters[0].dtype

    @property
    def trained(self) -> bool:
        """Whether they get gradients."""
        return self.parameters[0].requires_grad


@dataclass(eq=False)
class Scope:
    """A module, and the groups that must be present while its forward or backward runs."""

    name: str
    module: nn.Module
    groups: list[Group]

    @property
    def is_root(self) -> bool:
        """Whether it is the model itself."""
        return not self.name


def find_scopes(
    model: nn.Module, *, max_unit_numel: int, keep_fp32: Sequence[str] = ()
) -> list[Scope]:
    """Divide the model.

    Args:
        model: the user's module.
        max_unit_numel: a list element with more elements is divided further, at its children.

        keep_fp32: patterns, as of a shell, of the names of parameters that stay in fp32.

    Returns:
        Scopes in the order of the module tree; every parameter is in exactly one group.
    """
    owner: dict[nn.Parameter, Group] = {}
    scopes = []
    for name, module, named in _places(model, "", in_list=False, limit=max_unit_numel):
        new: dict[tuple[torch.dtype, bool, bool], Group] = {}
        needed: dict[Group, None] = {}
        for parameter_name, parameter in named:
            group = owner.get(parameter)
            if group is None:
                keeps = any(fnmatch.fnmatchcase(parameter_name, p) for p in keep_fp32)
                kind = (parameter.dtype, parameter.requires_grad, keeps)
                group = new.setdefault(kind, Group(keeps_fp32=keeps))
                group.names.append(parameter_name)
                group.parameters.append(parameter)
                owner[parameter] = group
            needed[group] = None
        scopes.append(Scope(name, module, list(needed)))
    return scopes


_Place = tuple[str, nn.Module, list[tuple[str, nn.Parameter]]]


def _places(module: nn.Module, name: str, *, in_list: bool, limit: int) -> Iterator[_Place]:
    """The scopes' modules with the parameters each needs."""
    children = dict(module.named_children())
    numel = sum(p.numel() for p in module.parameters())
    if not children or (in_list and numel <= limit):
        named = list(module.named_parameters(prefix=name))
        if named:
            yield name, module, named
        return
    direct = list(module.named_parameters(prefix=name, recurse=False))
    if direct:
        yield name, module, direct
    is_list = isinstance(module, (nn.ModuleList, nn.Sequential, nn.ModuleDict))
    for child_name, child in children.items():
        path = f"{name}.{child_name}" if name else child_name
        yield from _places(child, path, in_list=is_list, limit=limit)
