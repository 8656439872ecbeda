"""Machine code of compute capability 9.0, checked on every path for two faults of compilers.

A WGMMA runs on after its instruction was issued, until its warpgroup waits for it. Until then, its operand A in
registers must not be written. After that, nothing is copied into the shared memory that it read before a barrier of all
warpgroups: another warpgroup's product may still read it. Copies are those that are pipelined. Other stores are not
searched: they also store what no product reads.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path
from typing import NamedTuple

_LINE = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(?:@(!?U?P\w+)\s+)?([A-Z][\w.]*)\s*(.*?)\s*;")
_PREDICATE = re.compile(r"!?U?P(T|\d+)")
_REGISTER = re.compile(r"R(\d+)(\.reuse)?")
# The first operand of these is not a register that they write.
_WRITE_NO_REGISTER = {"BAR", "BRA", "CALL", "DSETP", "EXIT", "FCHK", "FSETP", "HGMMA", "HSETP2", "ISETP", "NANOSLEEP"}
_WRITE_NO_REGISTER |= {"R2P", "RET", "WARPSYNC"}
_REGISTERS_OF_A = 4
_MOST_GROUPS = 8
"""Groups that are told apart, the oldest ones together: a wait leaves 7 pending at most."""


class Instruction(NamedTuple):
    address: str
    guard: str
    name: str
    operands: tuple[str, ...]

    @property
    def opcode(self) -> str:
        return self.name.split(".")[0]


class Pending(NamedTuple):
    """The products that may be pending at an instruction: registers of their operands A, with their addresses."""

    issued: frozenset[tuple[int, str]] = frozenset()
    """Of the group that is not yet committed."""
    groups: tuple[frozenset[tuple[int, str]], ...] = ()
    """Of the committed groups, the newest first."""
    finished: frozenset[str] = frozenset()
    """Addresses of products for which this warpgroup has waited, since when there was no barrier."""

    def joined(self, other: Pending) -> Pending:
        """What may be pending where two paths meet."""
        longer, shorter = sorted((self.groups, other.groups), key=len, reverse=True)
        groups = [group | (shorter[age] if age < len(shorter) else frozenset()) for age, group in enumerate(longer)]
        return Pending(self.issued | other.issued, tuple(groups), self.finished | other.finished)

    def after(self, instruction: Instruction) -> Pending:
        """What is pending after an instruction."""
        name, operands = instruction.name, instruction.operands
        if instruction.opcode == "HGMMA":
            a = _REGISTER.fullmatch(operands[1])  # -1 stands for an operand in shared memory
            registers = range(int(a[1]), int(a[1]) + _REGISTERS_OF_A) if a else range(-1, 0)
            issued = self.issued | {(register, instruction.address) for register in registers}
            if not operands[-1].startswith("gsb"):
                return self._replace(issued=issued)
            groups = (issued, *self.groups)
            if len(groups) > _MOST_GROUPS:
                groups = (
                    *groups[: _MOST_GROUPS - 1],
                    frozenset[tuple[int, str]]().union(*groups[_MOST_GROUPS - 1 :]),
                )
            return self._replace(issued=frozenset(), groups=groups)
        if name.startswith("WARPGROUP.DEPBAR"):
            left = int(operands[1], 16)
            done = {address for group in self.groups[left:] for _, address in group}
            return self._replace(groups=self.groups[:left], finished=self.finished | done)
        if name.startswith(("BAR.SYNC", "BAR.RED")):
            return self._replace(finished=frozenset())
        return self


def disassembled(cubin: bytes) -> str:
    """The machine code of a kernel as text, by the disassembler that Triton brings."""
    from triton.backends.nvidia import compiler

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        tool = Path(compiler.__file__).with_name("bin") / "nvdisasm"
        return subprocess.run([tool, "-c", file.name], capture_output=True, text=True, check=True).stdout


def violations(text: str, num_warps: int) -> list[str]:
    """A sentence for every register written, and every copy to shared memory, that a product may still read."""
    instructions, labels = _parsed(text)
    pending = {0: Pending()}
    queue = [0]
    while queue:
        at = queue.pop()
        after = pending[at].after(instructions[at])
        for following in _following(at, instructions, labels):
            joined = pending[following].joined(after) if following in pending else after
            if joined != pending.get(following):
                pending[following] = joined
                queue.append(following)
    found = set()
    for at, before in pending.items():
        instruction = instructions[at]
        written = _written_registers(instruction)
        for register, product in before.issued.union(*before.groups):
            if register in written:
                found.add(f"R{register} of the HGMMA at {product} is written at {instruction.address}, before its wait")
        if num_warps > 4 and instruction.opcode == "LDGSTS":
            for product in before.finished:
                found.add(
                    f"shared memory is copied to at {instruction.address}, with no barrier since the HGMMA at {product}"
                )
    return sorted(found)


def _parsed(text: str) -> tuple[list[Instruction], dict[str, int]]:
    """The instructions, and the index of the first after each label."""
    instructions: list[Instruction] = []
    labels = {}
    for line in text.splitlines():
        if label := re.match(r"(\.L\w+):", line):
            labels[label[1]] = len(instructions)
        elif parts := _LINE.search(line):
            operands = tuple(operand.strip() for operand in parts[4].split(",")) if parts[4] else ()
            instructions.append(Instruction(parts[1], parts[2] or "", parts[3], operands))
    return instructions, labels


def _following(at: int, instructions: list[Instruction], labels: dict[str, int]) -> list[int]:
    """Indices of the instructions that may be executed next."""
    instruction = instructions[at]
    opcode, is_conditional = instruction.opcode, instruction.guard != "" or len(instruction.operands) > 1
    assert opcode not in ("BRX", "JMX"), "the targets of a jump are not known"
    targets = [at + 1] if at + 1 < len(instructions) else []
    if opcode in ("BRA", "CALL"):
        if opcode == "BRA" and not is_conditional:
            targets = []
        targets.append(labels[_label_of(instruction)])
    elif opcode in ("EXIT", "RET") and not instruction.guard:
        targets = []
    elif opcode == "BSYNC":  # a divergent thread goes on where the others meet
        barriers = [one for one in instructions if one.opcode == "BSSY" and one.operands[0] == instruction.operands[0]]
        targets += [labels[_label_of(one)] for one in barriers]
    return targets


def _label_of(instruction: Instruction) -> str:
    label = re.search(r"`\((.*?)\)", " ".join(instruction.operands))
    assert label is not None, instruction
    return label[1]


def _written_registers(instruction: Instruction) -> range:
    """The registers that an instruction writes: from its first operand that is no predicate on."""
    opcode = instruction.opcode
    destination = next((one for one in instruction.operands if not _PREDICATE.fullmatch(one)), "")
    register = _REGISTER.fullmatch(destination)
    if register is None or opcode in _WRITE_NO_REGISTER or opcode.startswith("ST"):
        return range(0)
    first = int(register[1])
    return range(first, first + _width(instruction.name))


def _width(name: str) -> int:
    """Number of 32-bit registers that an instruction writes."""
    if ".128" in name or re.match(r"LDSM.*\.4$", name) or (name.startswith("HMMA") and not name.endswith(".F16")):
        return 4
    is_wide = re.match(r"(LD|ATOM).*\.64|IMAD\.WIDE|D(ADD|MUL|FMA)|(F2F|I2F)\.F64|CS2R(?!\.32)|HMMA|LDSM", name)
    return 2 if is_wide else 1
