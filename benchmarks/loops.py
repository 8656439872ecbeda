"""Loops of compiled kernels and their register spills, from SASS and AMDGCN listings."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

# Instruction line: "/*1120*/  @!P0 STL.64 [R1+0x8], R186 ;" as nvdisasm writes it.
_SASS = re.compile(r"^\s*/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z]\w*(?:\.\w+)*)\s*(.*?)\s*;")
_SASS_TARGET = re.compile(r"`\((\.L\w+)\)")
# "\tscratch_store_dwordx2 off, v[0:1], off offset:8 ; 8-byte Folded Spill", as LLVM writes it.
_AMDGCN = re.compile(r"^\s+([a-z]\w+)(?:\s+(.*?))?\s*(?:;.*)?$")
_LABEL = re.compile(r"^\s*(\.L\w+):")
_MATRIX = ("HGMMA", "HMMA", "QGMMA", "QMMA", "UTCHMMA", "UTCQMMA", "v_mfma")
_ENDS = ("EXIT", "RET", "BRX", "s_endpgm", "s_setpc")


@dataclass(frozen=True, kw_only=True, slots=True)
class Loop:
    """One loop; counts cover its body once, including inner loops."""

    depth: int
    """Nesting depth."""
    is_innermost: bool
    """Whether it contains no loop with matrix instructions; in code without any, no loop at all."""
    instructions: int
    matrix_instructions: int
    spill_bytes: int
    """Bytes stored to and loaded from thread-local memory, where spilled registers go."""


@dataclass(frozen=True, slots=True)
class _Instruction:
    name: str
    operands: str
    is_predicated: bool

    @property
    def is_matrix(self) -> bool:
        return self.name.startswith(_MATRIX)

    @property
    def spill_bytes(self) -> int:
        """Spilled bytes per thread."""
        if re.match(r"(LDL|STL)\b", self.name):
            width = re.search(r"\.(8|16|64|128)$|\.[US](8|16)$", self.name)
            return int(width[1] or width[2]) // 8 if width else 4
        if self.name.startswith(("scratch_load", "scratch_store")):
            words = re.search(r"dwordx(\d)", self.name)
            return 4 * int(words[1]) if words else 4
        return 0


class Code:
    """The control flow graph of one kernel.

    Args:
        listing: output of ``nvdisasm -c`` for one kernel, or AMDGCN assembly.
    """

    def __init__(self, listing: str) -> None:
        self.instructions: list[_Instruction] = []
        labels: dict[str, int] = {}
        is_sass = "\t.amdgcn_target" not in listing and "s_endpgm" not in listing
        for text in listing.splitlines():
            if label := _LABEL.match(text):
                labels[label[1]] = len(self.instructions)
            elif found := (_SASS if is_sass else _AMDGCN).match(text):
                is_predicated = "@" in text.split(found[1], 1)[0]
                self.instructions.append(_Instruction(found[1], found[2] or "", is_predicated))
            elif text.lstrip().startswith(".section") and labels and self.instructions and not is_sass:
                break  # tables and debug lines follow the code
        self.follows = self._followers(labels, is_sass)

    @property
    def spill_bytes(self) -> int:
        """Spilled bytes of all instructions."""
        return sum(one.spill_bytes for one in self.instructions)

    @property
    def matrix_instructions(self) -> int:
        """Number of tensor core instructions."""
        return sum(one.is_matrix for one in self.instructions)

    def loops(self) -> tuple[Loop, ...]:
        """The loops in order of their start; unreachable code is ignored."""
        bodies = self._bodies()
        matrix = {index for index, one in enumerate(self.instructions) if one.is_matrix}
        inner = [body for body in bodies if body & matrix] if matrix else bodies
        return tuple(
            Loop(
                depth=sum(body < other for other in bodies),
                is_innermost=body in inner and not any(other < body for other in inner),
                instructions=len(body),
                matrix_instructions=len(body & matrix),
                spill_bytes=sum(self.instructions[index].spill_bytes for index in body),
            )
            for body in bodies
        )

    def _bodies(self) -> list[frozenset[int]]:
        """Natural loop bodies: for every back edge to a dominator, all instructions on paths back to it."""
        precedes: list[list[int]] = [[] for _ in self.instructions]
        for index in self._reached():
            for other in self.follows[index]:
                precedes[other].append(index)
        bodies: dict[int, set[int]] = {}
        heads = {other for index, others in enumerate(self.follows) for other in others if other != index + 1}
        for head in sorted(heads):
            for last in precedes[head]:
                body, waiting = {head, last}, [last] if last != head else []
                while waiting and 0 not in body:
                    for before in precedes[waiting.pop()]:
                        if before not in body:
                            body.add(before)
                            waiting.append(before)
                if 0 not in body:
                    bodies.setdefault(head, set()).update(body)
        return [frozenset(body) for _, body in sorted(bodies.items())]

    def _reached(self) -> set[int]:
        reached, waiting = {0}, [0]
        while waiting:
            for other in self.follows[waiting.pop()]:
                if other not in reached:
                    reached.add(other)
                    waiting.append(other)
        return reached

    def _followers(self, labels: dict[str, int], is_sass: bool) -> list[tuple[int, ...]]:
        meeting: dict[str, str] = {}
        return [
            tuple(sorted({labels.get(one, -1) if isinstance(one, str) else one for one in following} - {-1}))
            for following in self._following(meeting, is_sass)
        ]

    def _following(self, meeting: dict[str, str], is_sass: bool) -> Iterator[list[int | str]]:
        """Indices and labels of each instruction's successors; ``meeting`` maps reconvergence points of threads."""
        last = len(self.instructions) - 1
        for index, one in enumerate(self.instructions):
            then: list[int | str] = [] if index == last else [index + 1]
            if is_sass:
                target = _SASS_TARGET.search(one.operands)
                if one.name.startswith("BSSY") and target:
                    meeting[one.operands.split(",")[0]] = target[1]
                elif one.name.startswith("BSYNC") and one.operands in meeting:
                    then.append(meeting[one.operands])
                elif one.name.startswith(("BRA", "CALL.REL.NOINC")) and target:
                    # A call of a label is a jump; "BRA.U UP0, `(.L_x_1)" has its predicate among the operands.
                    is_certain = not one.is_predicated and one.operands.startswith("`")
                    then = [target[1]] if is_certain else [*then, target[1]]
            elif one.name.startswith("s_cbranch"):
                then.append(one.operands)
            elif one.name == "s_branch":
                then = [one.operands]
            if one.name.startswith(_ENDS) and not one.is_predicated:
                then = []
            yield then


if __name__ == "__main__":
    raise SystemExit("a part of another benchmark: python -m benchmarks.registers --help")
