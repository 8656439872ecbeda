"""Forms of kernels that versions of Triton and of its assembler miscompile: they are found, and ours have none.

What is compiled for the device of most users is checked in :mod:`.test_compiled`, with the first block sizes.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from dilated_attention_pytorch.kernels.triton.target import ptxas_version
from support.machine_code import violations
from support.processes import in_triton


def _printed(*program: str) -> list[Any]:
    """The lines of JSON that a program prints."""
    return [json.loads(line) for line in in_triton("-m", *program).splitlines()]


LOOP = """
.L_x_1:
        /*0010*/                   F2FP.BF16.F32.PACK_AB R8, R41, R40 ;
        /*0020*/                   WARPGROUP.ARRIVE ;
        /*0030*/                   HGMMA.64x64x16.F32.BF16 R24, R8, gdesc[UR4].tnspB, R24 ;
        /*0040*/                   HGMMA.64x64x16.F32.BF16 R24, R12, gdesc[UR8].tnspB, R24, gsb0 ;
        /*0050*/                   WARPGROUP.DEPBAR.LE gsb0, {pending} ;
        /*0060*/                   BAR.SYNC.DEFER_BLOCKING 0x0 ;
        /*0070*/                   LDGSTS.E.BYPASS.128 [R60], desc[UR10][R62.64] ;
        /*0080*/               @P0 BRA `(.L_x_1) ;
        /*0090*/                   WARPGROUP.DEPBAR.LE gsb0, 0x0 ;
        /*00a0*/                   EXIT ;
"""
SAFE = LOOP.format(pending="0x0")


def test_an_operand_that_the_next_iteration_writes_is_found_where_the_wait_leaves_its_product_pending() -> None:
    assert violations(SAFE, num_warps=8) == []
    (found,) = violations(LOOP.format(pending="0x1"), num_warps=4)
    assert found == "R8 of the HGMMA at 0030 is written at 0010, before its wait"


@pytest.mark.parametrize(
    ("written", "registers"),
    [
        ("MOV R15, R3", [15]),
        ("LDS.128 R12, [R5]", [12, 13, 14, 15]),
        ("IMAD.WIDE R14, R3, 0x8, R4", [14, 15]),
        ("LOP3.LUT P1, R13, R13, 0x7, RZ, 0xc0, !PT", [13]),
        ("@P1 LDSM.16.M88.4 R8, [R5+0x20]", [8, 9, 10, 11]),
        ("MOV R16, R8", []),
        ("ISETP.GE.AND P1, PT, R12, R3, PT", []),
        ("STG.E.128 desc[UR4][R12.64], R8", []),
        ("R2UR UR8, R12", []),
    ],
)
def test_the_registers_that_an_instruction_writes_before_the_wait_are_found(written: str, registers: list[int]) -> None:
    at = "        /*0050*/                   WARPGROUP.DEPBAR"
    text = SAFE.replace(at, f"        /*0048*/  {written} ;\n{at}")
    found = violations(text, num_warps=4)
    assert [int(one.split()[0][1:]) for one in found] == sorted(registers, key=lambda number: f"R{number} ")


def test_a_wait_covers_the_older_groups_on_every_path() -> None:
    text = """
        /*0010*/                   HGMMA.64x64x16.F32.BF16 R24, R8, gdesc[UR4], R24, gsb0 ;
        /*0020*/                   HGMMA.64x64x16.F32.BF16 R56, R12, gdesc[UR8], R56, gsb0 ;
        /*0030*/               @P0 BRA `(.L_x_1) ;
        /*0040*/                   WARPGROUP.DEPBAR.LE gsb0, 0x1 ;
.L_x_1:
        /*0050*/                   MOV R8, R3 ;
        /*0060*/                   EXIT ;
"""
    assert len(violations(text, num_warps=4)) == 1
    assert violations(text.replace("@P0 BRA `(.L_x_1)", "NOP"), num_warps=4) == []
    assert len(violations(text.replace("@P0 BRA `(.L_x_1)", "NOP").replace("0x1", "0x2"), num_warps=4)) == 1


def test_shared_memory_is_copied_to_after_a_barrier_of_all_warpgroups() -> None:
    without = SAFE.replace("BAR.SYNC.DEFER_BLOCKING 0x0", "NOP")
    assert violations(without, num_warps=4) == []  # one warpgroup
    assert violations(without, num_warps=8) == [
        f"shared memory is copied to at 0070, with no barrier since the HGMMA at {product}"
        for product in ("0030", "0040")
    ]


@pytest.fixture(scope="module")
def miscompiled() -> dict[str, Any]:
    (found,) = _printed("support.miscompiled")
    return dict(found)


@pytest.mark.parametrize(
    ("kernel", "form"),
    [
        ("transposed_result", "takes the transposed result of a product"),
        ("result_in_shared_memory", "takes the result of a product from shared memory"),
        ("two_products_an_iteration", "adds to an accumulator to which a product was added in the same iteration"),
        ("accumulator_as_operand", "of a loop is an operand of a product"),
    ],
)
def test_forms_that_versions_of_triton_miscompile_are_found(
    miscompiled: dict[str, Any], kernel: str, form: str
) -> None:
    assert any(form in one for one in miscompiled[kernel]), miscompiled[kernel]


def test_an_assembler_before_13_3_writes_operands_of_pending_products(miscompiled: dict[str, Any]) -> None:
    found = miscompiled["cast_operand"]
    assert found.keys() == {".".join(map(str, ptxas_version(target))) for target in ("sm_80", "sm_100")}
    for version, overwritten in found.items():
        is_old = tuple(map(int, version.split("."))) < (13, 3)
        assert any("before its wait" in one for one in overwritten) == is_old, (version, overwritten)


@pytest.mark.slow
def test_no_candidate_for_hopper_has_such_a_form() -> None:
    for figures in _printed("support.every_candidate", "sm_90"):
        for one in figures:
            assert one["faults"] == [], one
