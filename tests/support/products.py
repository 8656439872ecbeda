"""Forms of matrix products that versions of Triton miscompile, found in the intermediate code of a kernel."""

from __future__ import annotations

import re
from collections.abc import Iterator

_NAME = re.compile(r"%[\w-]+(?:#\d+)?")
_PRODUCTS = ("tt.dot", "ttng.warp_group_dot")
_WAIT = "ttng.warp_group_dot_wait"
_OTHER_ELEMENTS = ("tt.broadcast", "tt.expand_dims", "tt.load", "tt.reduce", "tt.splat")
"""Operations whose results are not made element by element of their operands."""
_ARGUMENT = "argument of a loop"


class _Values:
    """Every value: its operation and that operation's operands. A region's results are made of what it yields."""

    def __init__(self) -> None:
        self._made: dict[str, tuple[str, set[str]]] = {}

    def add(self, value: str, operation: str, operands: set[str]) -> None:
        self._made[value] = operation, operands

    def add_yielded(self, value: str, yielded: set[str]) -> None:
        operation, operands = self._of(value)
        self._made[value] = operation, operands | yielded

    def made_by(self, value: str, *operations: str) -> set[str]:
        """The values made by these operations of which ``value`` is made element by element, itself included.

        The search ends at the arguments of loops, which an earlier iteration made.
        """
        reached: set[str] = set()
        queue = [value]
        while queue:
            value = queue.pop()
            if value not in reached:
                reached.add(value)
                operation, operands = self._of(value)
                queue += () if operation in _OTHER_ELEMENTS else operands
        return {one for one in reached if self._of(one)[0] in operations}

    def _of(self, value: str) -> tuple[str, set[str]]:
        return self._made.get(value) or self._made.get(value.split("#")[0], ("", set()))


def forms(text: str) -> list[str]:
    """A sentence for every miscompiled form of a product; ``text`` is ``ttir``, or ``ttgir`` of Hopper.

    - An operand is a product's result, transposed.
    - An operand is a product's result that went through shared memory (``ttgir``).
    - Two products add to one accumulator in an iteration.
    - An accumulator that a loop carries is an operand of a product in the loop.
    """
    return list(_forms(text))


def _forms(text: str) -> Iterator[str]:
    values = _Values()
    # The value of every open region, and the arguments of loops that are operands and accumulators of its products.
    regions: list[tuple[str, set[str], set[str]]] = [("", set(), set())]
    for line in (line.strip().split(" loc(")[0] for line in text.splitlines()):
        owner = ""
        if line.startswith("}"):
            owner, operands, accumulators = regions.pop()
            for argument in sorted(operands & accumulators):
                yield f"the accumulator {argument} of a loop is an operand of a product"
        elif made := re.match(r"(%[\w-]+)(?::\d+)? = \"?([\w.]+)\"?(.*)", line):
            owner, operation, rest = made.groups()
            names = _NAME.findall(rest.split(" : ")[0])
            values.add(owner, operation, set(names))
            if operation == "scf.for":
                for argument in re.findall(r"(%[\w-]+) = %", rest):
                    values.add(argument, _ARGUMENT, set())
            elif operation == _WAIT:  # it returns its operands
                values.add(owner, operation, set(names[:1]))
                for index, name in enumerate(names):
                    values.add(f"{owner}#{index}", operation, {name})
            elif operation in _PRODUCTS:
                left, right, total = names[:3]
                values.add(owner, operation, {total})
                yield from _forms_of_product(values, owner, left, right, total)
                for operand in (left, right):
                    regions[-1][1].update(values.made_by(operand, _ARGUMENT))
                regions[-1][2].update(values.made_by(total, _ARGUMENT))
        elif line.startswith("scf.yield"):
            values.add_yielded(regions[-1][0], set(_NAME.findall(line.split(" : ")[0])))
        if line.endswith("{"):
            regions.append((owner, set(), set()))


def _forms_of_product(values: _Values, value: str, left: str, right: str, total: str) -> Iterator[str]:
    for operand in (left, right):
        for transposed in values.made_by(operand, "tt.trans", "ttg.memdesc_trans"):
            if values.made_by(transposed, *_PRODUCTS):
                yield f"{value} takes the transposed result of a product, {transposed}"
        for stored in values.made_by(operand, "ttg.local_alloc"):
            if values.made_by(stored, "ttng.warp_group_dot"):
                yield f"{value} takes the result of a product from shared memory, {stored}"
    if values.made_by(total, *_PRODUCTS):
        yield f"{value} adds to an accumulator to which a product was added in the same iteration"
