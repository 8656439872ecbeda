"""Loops and spills are found in listings of machine code."""

from __future__ import annotations

from benchmarks.loops import Code

# A loop over runs, in it one over blocks with a block of code that was moved behind the end.
SASS = """
        /*0000*/                   STL.64 [R1+0x8], R186 ;
.L_x_0:
        /*0010*/                   LDL R188, [R1] ;
        /*0020*/              @!P6 CALL.REL.NOINC `(.L_x_3) ;
.L_x_1:
        /*0030*/                   HGMMA.64x64x16.F32.BF16 R24, R24, gdesc[UR8], R24 ;
        /*0040*/               @P1 BRA `(.L_x_4) ;
.L_x_2:
        /*0050*/               @P0 BRA `(.L_x_1) ;
.L_x_3:
        /*0060*/                   BRA.U UP0, `(.L_x_0) ;
        /*0070*/               @P4 EXIT ;
        /*0080*/                   LDL.LU.64 R186, [R1+0x8] ;
        /*0090*/                   EXIT ;
.L_x_4:
        /*00a0*/                   STL.128 [R1+0x10], R4 ;
        /*00b0*/                   BRA `(.L_x_2) ;
.L_x_5:
        /*00c0*/                   BRA `(.L_x_5);
"""
AMDGCN = """
	.amdgcn_target "amdgcn-amd-amdhsa--gfx942"
kernel:
	scratch_store_dwordx2 off, v[0:1], off offset:8 ; 8-byte Folded Spill
.LBB0_1:                                ; =>This Loop Header: Depth=1
	s_cbranch_execz .LBB0_3
.LBB0_2:
	v_mfma_f32_32x32x8_bf16 v[0:15], v[16:17], v[18:19], v[0:15]
	scratch_load_dword v2, off, off ; 4-byte Folded Reload
	s_cbranch_scc1 .LBB0_2
.LBB0_3:
	s_cbranch_vccnz .LBB0_1
	s_endpgm
	.section	.rodata
	scratch_load_dword v2, off, off
"""


def test_a_spill_counts_for_every_loop_that_it_lies_in() -> None:
    code = Code(SASS)
    assert code.spill_bytes == 8 + 4 + 8 + 16
    assert code.matrix_instructions == 1
    over_runs, over_blocks = code.loops()
    assert (over_runs.depth, over_runs.instructions, over_runs.spill_bytes) == (0, 8, 4 + 16)
    assert (over_blocks.depth, over_blocks.instructions, over_blocks.spill_bytes) == (1, 5, 16)
    assert over_blocks.matrix_instructions == over_runs.matrix_instructions == 1


def test_a_loop_that_only_waits_is_not_the_innermost() -> None:
    waiting = """        /*0034*/                   STL R2, [R1] ;
.L_x_6:
        /*0038*/               @P2 BRA `(.L_x_6) ;
"""
    before_the_branch = "        /*0040*/               @P1 BRA"
    loops = Code(SASS.replace(before_the_branch, waiting + before_the_branch)).loops()
    assert [(loop.depth, loop.is_innermost, loop.spill_bytes) for loop in loops] == [
        (0, False, 4 + 4 + 16),
        (1, True, 4 + 16),
        (2, False, 0),
    ]


def test_without_matrix_instructions_every_loop_is_looked_at() -> None:
    loops = Code(SASS.replace("HGMMA.64x64x16.F32.BF16", "FFMA")).loops()
    assert [(loop.depth, loop.is_innermost) for loop in loops] == [(0, False), (1, True)]


def test_what_is_spilled_around_loops_is_in_none_of_them() -> None:
    code = Code(SASS.replace("STL.128", "STS.128").replace("LDL R188, [R1]", "LDS R188, [R1]"))
    assert code.spill_bytes == 16
    assert [loop.spill_bytes for loop in code.loops()] == [0, 0]


def test_amd_assembly_is_read_up_to_its_tables() -> None:
    code = Code(AMDGCN)
    assert code.spill_bytes == 8 + 4
    over_runs, over_blocks = code.loops()
    assert (over_runs.depth, over_runs.instructions, over_runs.spill_bytes) == (0, 5, 4)
    assert (over_blocks.depth, over_blocks.instructions, over_blocks.matrix_instructions) == (1, 3, 1)
