"""The floors of the project: a module imports only from its own floor or from one below.

`FLOORS` is the whole table. A new module must be placed in it, which is a design decision and
should look like one in a change.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("tiering", "infinity", "bench")

# From the ground up. A package's name stands for its `__init__`; what lies in a package and has no
# line of its own belongs to the package's floor.
FLOORS: tuple[tuple[str, ...], ...] = (
    # Run by its path in another interpreter: it imports nothing of ours, and nobody imports it.
    ("bench.deepnvme_child",),
    # What things are: no I/O, no state.
    ("tiering.errors", "tiering.spec", "tiering.sizes", "tiering.records", "tiering.trace"),
    ("tiering.aio",),
    ("tiering.arena", "tiering.folder", "tiering.volumes", "tiering.bandwidth"),
    ("tiering.tiers.link",),
    ("tiering.tiers",),
    ("tiering.store",),
    ("tiering.planner", "tiering.prefetch"),
    ("tiering.swapper",),
    ("tiering",),
    ("infinity.config.spelling", "infinity.config.fields"),
    ("infinity.config.paths",),
    (
        *("infinity.config.batch", "infinity.config.precision", "infinity.config.optimizer"),
        *("infinity.config.scheduler", "infinity.config.zero", "infinity.config.aio"),
        *("infinity.config.activation_checkpointing", "infinity.config.tiering"),
        *("infinity.config.training", "infinity.config.reporting", "infinity.config.elsewhere"),
    ),
    ("infinity.config.root",),
    ("infinity.config.names",),
    ("infinity.config.loading",),
    ("infinity.config",),
    ("infinity.config.reference",),
    (
        *("infinity.partition", "infinity.comm", "infinity.adam"),
        *("infinity.scopes", "infinity.plan", "infinity.trace_file", "infinity.loss_scale"),
        *("infinity.phases", "infinity.sharing"),
        *("infinity.lr_schedules", "infinity.data", "infinity.arguments", "infinity.absent"),
    ),
    ("infinity.agreement",),
    ("infinity.parameters", "infinity.unit_records", "infinity.unit", "infinity.gradients"),
    ("infinity.optimizer", "infinity.schedule", "infinity.hooks"),
    ("infinity.access",),
    ("infinity.outline",),
    ("infinity.report",),
    ("infinity.assembly",),
    ("infinity.engine",),
    ("infinity",),
    ("infinity.demo",),
    # A measured training step, in a process of its own.
    ("bench.steps.link",),
    ("bench.steps.timeline",),
    ("bench.steps.model",),
    ("bench.steps.wire",),
    ("bench.steps.loop",),
    (
        *("bench.steps.child_ours", "bench.steps.child_torch", "bench.steps.child_deepspeed"),
        "bench.steps.child_device",
    ),
    # The commands: what a measurement is, one of them, the commands made of it, what they tell.
    ("bench.job", "bench.buffers", "bench.config_file"),
    ("bench.lane",),
    ("bench.workload", "bench.facts"),
    ("bench.contest", "bench.verification"),
    ("bench.fio_baseline", "bench.deepnvme"),
    ("bench.run", "bench.sweep", "bench.rivals", "bench.compare", "bench.small"),
    ("bench.table",),
    ("bench.report", "bench.plot"),
    ("bench.steps.ideal", "bench.steps.launch", "bench.steps.ranks"),
    ("bench.steps.drive", "bench.steps.device", "bench.steps.contestants"),
    ("bench.steps.measure",),
    ("bench.steps.report", "bench.steps.plot", "bench.steps.timeline_plot"),
    (
        *("bench", "bench.steps", "bench.aio_bench", "bench.collectives", "bench.link"),
        "bench.step_bench",
    ),
)
# Packages whose modules must each be placed: being new there is a decision.
PLACED_ONE_BY_ONE = ("tiering", "infinity", "infinity.config", "bench")
# The product's, and what sets bare collectives beside it.
DISTRIBUTED_IMPORTERS = {"infinity.comm", "bench.collectives"}

# What an assertion may call: nothing here changes anything.
PURE_FUNCTIONS = frozenset(
    {
        *("abs", "all", "any", "bool", "float", "frozenset", "int", "isinstance", "issubclass"),
        *("len", "list", "max", "min", "range", "repr", "set", "sorted", "str", "sum", "tuple"),
        *("type", "zip"),
    }
)
PURE_METHODS = frozenset({"data_ptr", "dim", "element_size", "is_contiguous", "numel"})


class Import(NamedTuple):
    """One imported name: the module it may come from, and where the import stands."""

    module: str
    line: int


def module_name(path: Path) -> str:
    """The dotted name of a file, given relative to the root."""
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def sources() -> dict[str, ast.Module]:
    """Every module of the product, parsed."""
    return {
        module_name(path.relative_to(ROOT)): ast.parse(path.read_text(), filename=str(path))
        for package in PACKAGES
        for path in sorted((ROOT / package).rglob("*.py"))
    }


def imports(tree: ast.Module, known: frozenset[str] = frozenset()) -> Iterator[Import]:
    """All modules that a module imports, wherever the import stands.

    ``from a import b`` imports ``a.b`` where that is a module, and ``a`` otherwise.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (Import(alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            for alias in node.names:
                full = f"{base}.{alias.name}"
                yield Import(
                    full if full in known or floor_of(full, exact=True) else base, node.lineno
                )


def floor_of(module: str, *, exact: bool = False) -> int | None:
    """The floor of a module, counted from 1, or None when it has no place.

    Args:
        module: dotted name.
        exact: only a line of the table with this very name counts, not that of its package.
    """
    for number, floor in enumerate(FLOORS, start=1):
        if module in floor:
            return number
    parent = module.rpartition(".")[0]
    if exact or not parent or parent in PLACED_ONE_BY_ONE:
        return None
    return floor_of(parent)


def layer_faults(module: str, tree: ast.Module, known: frozenset[str] = frozenset()) -> list[str]:
    """Imports that go up, and imports that do not name their module in full."""
    own = floor_of(module) or 0
    faults = []
    for target, line in dict.fromkeys(imports(tree, known)):
        if target.startswith("."):
            faults.append(f"{module}:{line}: relative import; name the module in full")
        elif target.split(".")[0] in PACKAGES:
            floor = floor_of(target)
            if floor is None:
                faults.append(f"{module}:{line}: {target} has no floor; place it in FLOORS")
            elif floor > own:
                faults.append(f"{module}:{line}: floor {own} imports {target} of floor {floor}")
    return faults


def manner_faults(tree: ast.Module) -> list[str]:
    """Imports inside functions or classes, and star imports, by line."""
    faults = []
    for scope in ast.walk(tree):
        if not isinstance(scope, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        faults += [
            f"{node.lineno}: import inside {scope.name}"
            for node in ast.walk(scope)
            if isinstance(node, ast.Import | ast.ImportFrom)
        ]
    faults += [
        f"{node.lineno}: import *"
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and any(alias.name == "*" for alias in node.names)
    ]
    return faults


def uses_distributed(tree: ast.Module) -> bool:
    """Whether torch.distributed is imported or reached through torch."""
    named = any(
        isinstance(node, ast.Attribute)
        and node.attr == "distributed"
        and isinstance(node.value, ast.Name)
        and node.value.id == "torch"
        for node in ast.walk(tree)
    )
    return named or any(
        f"{target}.".startswith("torch.distributed.")
        for target, _ in imports(tree, frozenset({"torch.distributed"}))
    )


def assertion_faults(tree: ast.Module) -> list[str]:
    """Assertions that could change something; under ``python -O`` they do not run at all."""
    faults = []
    for assertion in (node for node in ast.walk(tree) if isinstance(node, ast.Assert)):
        for node in ast.walk(assertion):
            if isinstance(node, ast.Call) and not _is_pure(node.func):
                faults.append(f"{node.lineno}: calls {ast.unparse(node.func)} in an assertion")
            elif isinstance(node, ast.NamedExpr | ast.Await | ast.Yield | ast.YieldFrom):
                faults.append(f"{node.lineno}: {ast.unparse(node)} in an assertion")
    return faults


def _is_pure(function: ast.expr) -> bool:
    if isinstance(function, ast.Name):
        return function.id in PURE_FUNCTIONS
    return isinstance(function, ast.Attribute) and function.attr in PURE_METHODS


def test_every_module_has_its_floor() -> None:
    homeless = [name for name in sources() if floor_of(name) is None]
    assert not homeless, f"place these in FLOORS of {Path(__file__).name}: {homeless}"


def test_modules_import_from_their_floor_or_below() -> None:
    trees = sources()
    known = frozenset(trees)
    faults = [fault for name, tree in trees.items() for fault in layer_faults(name, tree, known)]
    assert not faults, "\n".join(faults)


def test_only_one_module_of_the_product_knows_torch_distributed() -> None:
    users = {name for name, tree in sources().items() if uses_distributed(tree)}
    assert users <= DISTRIBUTED_IMPORTERS, users


def test_imports_stand_at_the_head_and_name_what_they_take() -> None:
    faults = [
        f"{name}:{fault}" for name, tree in sources().items() for fault in manner_faults(tree)
    ]
    assert not faults, "\n".join(faults)


def test_assertions_have_no_effects() -> None:
    faults = [
        f"{name}:{fault}" for name, tree in sources().items() for fault in assertion_faults(tree)
    ]
    assert not faults, "\n".join(faults)


def test_the_c_engine_knows_neither_python_nor_torch() -> None:
    forbidden = re.compile(r'#\s*include\s*[<"](Python\.h|torch/|ATen/|c10/|pybind11/)')
    files = [path for path in (ROOT / "csrc").rglob("*") if path.suffix in {".c", ".h"}]
    assert files
    assert not [path.name for path in files if forbidden.search(path.read_text())]


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("tiering.store", "import infinity"),
        ("tiering.store", "from infinity import initialize"),
        ("tiering.aio.engine", "from tiering.store import TieredStore"),
        ("tiering.arena", "from tiering import store"),
        ("tiering.records", "from tiering import TensorSwapper"),
        ("infinity.unit", "from infinity.engine import Engine"),
        ("infinity.engine", "import infinity.demo.model"),
        ("infinity.unit", "from .partition import Shard"),
        ("infinity.unit", "import tiering.unheard_of"),
    ],
)
def test_an_import_that_goes_up_is_found(module: str, source: str) -> None:
    assert layer_faults(module, ast.parse(source))


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("tiering.store", "from tiering.tiers.nvme import NvmeTier"),
        ("tiering.store", "from tiering import errors"),
        ("tiering.aio.engine", "from tiering.aio._native import ffi, lib"),
        ("infinity.unit", "from tiering import TensorSwapper"),
        ("infinity.demo.__main__", "import infinity"),
        ("bench.aio_bench", "import infinity.demo"),
    ],
)
def test_an_import_that_goes_down_or_stays_is_not(module: str, source: str) -> None:
    assert not layer_faults(module, ast.parse(source))


@pytest.mark.parametrize(
    "source",
    [
        "import torch.distributed as dist",
        "from torch import distributed",
        "from torch.distributed.fsdp import x",
        "import torch\ntorch.distributed.barrier()",
    ],
)
def test_every_way_to_torch_distributed_is_found(source: str) -> None:
    assert uses_distributed(ast.parse(source))


@pytest.mark.parametrize(
    "source",
    ["def f():\n    import os", "class A:\n    from os import path", "from os import *"],
)
def test_an_import_in_the_wrong_place_is_found(source: str) -> None:
    assert manner_faults(ast.parse(source))


@pytest.mark.parametrize(
    "source",
    ["assert f.write(x)", "assert pop()", "assert (n := 1)", "assert x, log('no x')"],
)
def test_an_assertion_with_an_effect_is_found(source: str) -> None:
    assert assertion_faults(ast.parse(source))


def test_a_plain_assertion_is_not() -> None:
    assert not assertion_faults(ast.parse("assert len(x) == 3 and x.numel() > 0, f'{x}'"))
