"""Runs a Gluon kernel's Python on the CPU, on the device of :mod:`support.gluon_machine`. Gluon has no interpreter.

The functions of the kernel become generators, and the language becomes tensors on the CPU. A product is NaN until it
has been waited for; a copy delivers NaN if its descriptor is overwritten before it has arrived. Layouts are not
emulated: the compiler checks them.
"""

from __future__ import annotations

import ast
import inspect
import itertools
import math
import random
import sys
import textwrap
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from support.gluon_machine import Barrier, Cell, Partition, Pointer, Product, Program, Shared, Steps, Wrong


def _initialise(barrier: Shared, count: int) -> Steps:
    yield
    barrier.cell.write(Barrier(count), Program.current.running)


def _wait(barrier: Shared, phase: Any) -> Steps:
    waited = barrier.cell.barrier
    yield lambda: waited.phase % 2 != int(phase)


def _arrive(barrier: Shared) -> Steps:
    yield
    barrier.cell.barrier.arrive(1, 0)


def _expect(barrier: Shared, num_bytes: int) -> Steps:
    yield
    barrier.cell.barrier.arrive(1, num_bytes)


def _fence() -> Steps:
    yield
    for cell in Program.current.cells:
        if cell.unfenced_by is Program.current.running:
            cell.unfenced_by = None


def _describe(base: Pointer, shape: list[Any], strides: list[Any], block_shape: list[int], layout: Any) -> Steps:
    """A descriptor. Descriptors from the same line of code and the same call stack share their memory."""
    yield
    program, frame, place = Program.current, sys._getframe(1), []
    while frame is not None and frame.f_code is not Partition.step.__code__:
        place.append((frame.f_code, frame.f_lasti))
        frame = frame.f_back
    key = (program.running, *place)
    program.descriptors[key] = program.descriptors.get(key, 0) + 1
    (rows, columns), (stride, one), start = map(int, shape), map(int, strides), int(base.offset)
    if rows < 1 or one != 1 or start * 2 % 16 or stride * 2 % 16 or not 0 < stride * 2 < 2**40:
        raise Wrong(f"no descriptor has {rows} rows of stride {stride} from {start} on")
    return types.SimpleNamespace(
        base=base,
        rows=rows,
        columns=columns,
        stride=stride,
        block=block_shape,
        key=key,
        version=program.descriptors[key],
    )


def _copy(described: Any, start: list[Any], barrier: Shared, into: Shared) -> Steps:
    yield
    program, cell, arriving, first = Program.current, into.cell, barrier.cell.barrier, int(start[0])
    if barrier.cell.unfenced_by is not None:
        raise Wrong("a copy arrives at a barrier whose initialisation is not fenced")
    assert int(start[1]) == 0
    assert list(described.block) == list(cell.value.shape)
    missing = torch.full_like(cell.value, math.nan)
    cell.write(missing)

    def arrive() -> None:
        value = missing
        if program.descriptors[described.key] == described.version:
            row = first + torch.arange(described.block[0])[:, None]
            column = torch.arange(described.block[1])
            inside = (row >= 0) & (row < described.rows) & (column < described.columns)
            value = _load(described.base + row * described.stride + column, inside, 0.0)
        cell.write(value)
        arriving.arrive(0, -value.numel() * value.element_size())

    program.copies.append(arrive)


def _multiply(left: Any, right: Shared, total: Tensor, *, use_acc: bool = True, is_async: bool = False) -> Steps:
    yield
    product = Product(left, right, total, use_acc)
    Program.current.running.products.append(product)
    return product if is_async else (yield from _await_products(0, [product]))


def _await_products(num_outstanding: int, deps: list[Any]) -> Steps:
    """Finish all but the last ``num_outstanding`` products, which are still NaN."""
    yield
    products = Program.current.running.products
    while len(products) > num_outstanding:
        product = products.pop(0)
        if product.value is None:
            product.finish()
    values = [torch.full_like(one.total, math.nan) if one in products else getattr(one, "value", one) for one in deps]
    return values[0] if len(values) == 1 else tuple(values)


def _load(pointer: Pointer, mask: Tensor | None = None, other: float = 0) -> Tensor:
    value = pointer.storage[pointer.at(mask)]
    return value if mask is None else torch.where(mask, value, other)


def _store(pointer: Pointer, value: Tensor, mask: Tensor) -> None:
    mask = mask.expand(value.shape)
    pointer.storage[pointer.at(mask)[mask]] = value[mask]


def _allocate(dtype: torch.dtype, shape: list[int], layout: Any) -> Shared:
    cells = [Cell(list(shape[1:]), dtype) for _ in range(shape[0])]
    Program.current.cells += cells
    return Shared(cells)


def _specialize(functions: list[tuple[Callable[..., Steps], tuple[Any, ...]]], *_: Any) -> None:
    Program.current.partitions += [
        Partition(f"{function.__name__} {number}", function(*arguments))
        for number, (function, arguments) in enumerate(functions)
    ]


def _largest(a: Tensor, b: Any) -> Tensor:
    return torch.maximum(a, torch.as_tensor(b, dtype=a.dtype))


def _least(a: Tensor, b: Any) -> Tensor:
    return torch.minimum(a, torch.as_tensor(b, dtype=a.dtype))


def _layout(*_: Any, **__: Any) -> None:
    """Does nothing: the compiler checks layouts."""


_LANGUAGE = types.SimpleNamespace(
    int32=torch.int32,
    int64=torch.int64,
    float32=torch.float32,
    constexpr=None,
    static_range=range,
    where=torch.where,
    maximum=_largest,
    minimum=_least,
    max=torch.amax,
    min=torch.amin,
    sum=torch.sum,
    exp2=torch.exp2,
    log2=torch.log2,
    load=_load,
    store=_store,
    arange=lambda start, end, layout=None: torch.arange(start, end, dtype=torch.int32),
    full=lambda shape, value, dtype, layout=None: torch.full(shape, value, dtype=dtype),
    zeros=lambda shape, dtype, layout=None: torch.zeros(shape, dtype=dtype),
    convert_layout=lambda x, layout: x,
    allocate_shared_memory=_allocate,
    warp_specialize=_specialize,
    program_id=lambda axis: torch.tensor(Program.current.index, dtype=torch.int32),
    BlockedLayout=_layout,
    SliceLayout=_layout,
    DotOperandLayout=_layout,
    NVMMADistributedLayout=_layout,
    NVMMASharedLayout=types.SimpleNamespace(get_default_for=_layout),
)
_STEPPING = {
    "fence_async_shared": _fence,
    "async_load": _copy,
    "warpgroup_mma": _multiply,
    "warpgroup_mma_wait": _await_products,
    "tma": types.SimpleNamespace(make_tensor_descriptor=_describe),
    "mbarrier": types.SimpleNamespace(
        MBarrierLayout=_layout, init=_initialise, wait=_wait, arrive=_arrive, expect=_expect
    ),
}


class _AsGenerator(ast.NodeTransformer):
    """Turns a kernel's function into a generator: ``yield from`` for calls of such functions, no layouts."""

    def __init__(self, scope: dict[str, Any]) -> None:
        self.scope = scope

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        self.generic_visit(node)
        node.decorator_list, node.returns = [], None
        node.body.insert(0, ast.parse("if False: yield").body[0])
        return node

    def visit_AugAssign(self, node: ast.AugAssign) -> ast.Assign:
        """Rewrite ``x += 1`` as ``x = x + 1``, because values are immutable."""
        self.generic_visit(node)
        before = ast.parse(ast.unparse(node.target), mode="eval").body
        return ast.copy_location(ast.Assign([node.target], ast.BinOp(before, node.op, node.value)), node)

    def visit_Call(self, node: ast.Call) -> ast.expr:
        self.generic_visit(node)
        root = node.func.value if isinstance(node.func, ast.Attribute) else node.func
        if not isinstance(root, ast.Name) or ast.unparse(node.func) == "mbarrier.MBarrierLayout":
            return node
        return ast.YieldFrom(node) if root.id in _STEPPING or hasattr(self.scope.get(root.id), "fn") else node

    def visit_Attribute(self, node: ast.Attribute) -> ast.expr:
        self.generic_visit(node)
        name = ast.unparse(node)
        return ast.Constant(None) if name.endswith(".type.layout") or name == "None.parent" else node


class EmulatedKernel:
    """A Gluon kernel with the launch syntax of a compiled one, run on CPU tensors, one program after the other."""

    def __init__(self, kernel: Any, seed: int) -> None:
        self._scopes: dict[int, dict[str, Any]] = {}
        self._function, self._seeds = self._emulated(kernel), itertools.count(seed)

    def _emulated(self, value: Any) -> Any:
        """Convert a kernel function to a generator and a constexpr to its value; return anything else unchanged."""
        if not hasattr(value, "fn"):
            return getattr(value, "value", value)
        outer = value.fn.__globals__
        if id(outer) not in self._scopes:
            scope = self._scopes[id(outer)] = {"gl": _LANGUAGE, "tl": _LANGUAGE, **_STEPPING}
            scope |= {name: self._emulated(one) for name, one in outer.items() if name not in scope}
        tree = ast.parse(textwrap.dedent(inspect.getsource(value.fn)))
        compiled = compile(ast.fix_missing_locations(_AsGenerator(outer).visit(tree)), value.fn.__name__, "exec")
        place: dict[str, Any] = {}
        exec(compiled, self._scopes[id(outer)], place)
        return place[value.fn.__name__]

    def run(self, *arguments: Any, grid: tuple[int], **options: Any) -> None:
        known = inspect.signature(self._function).parameters
        operands = [_start_of(x) if isinstance(x, Tensor) else x for x in arguments]
        named = {name: x for name, x in options.items() if name in known}
        for index in range(grid[0]):
            Program(index, random.Random(next(self._seeds))).run(self._function(*operands, **named))


def _start_of(tensor: Tensor) -> Pointer:
    elements = tensor.untyped_storage().nbytes() // tensor.element_size()
    return Pointer(torch.as_strided(tensor, (elements,), (1,), 0), tensor.storage_offset())
