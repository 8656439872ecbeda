"""Which blocks a device and a version of Triton get."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
import torch

from dilated_attention_pytorch.kernels.triton.configurations import BlockSizes, candidates
from dilated_attention_pytorch.kernels.triton.target import AMD, target_of

NVIDIA = ["sm_80", "sm_86", "sm_87", "sm_89", "sm_90", "sm_100", "sm_103", "sm_110", "sm_120", "sm_121"]


@pytest.mark.parametrize("target", [*NVIDIA, *AMD])
def test_every_device_has_candidates_for_every_call(target: str) -> None:
    for kernel in ("forward", "few_queries", "query_gradient", "key_gradient"):
        for width in (16, 32, 64, 128, 256):
            for itemsize in (2, 4):
                for banded, biased in itertools.product((False, True), repeat=2):
                    for version in ((3, 6), (3, 9)):
                        found = candidates(kernel, width, itemsize, target, banded, biased, version)
                        assert 1 <= len(found) <= 4
                        assert len(set(found)) == len(found)


def test_some_kernels_have_other_blocks_before_triton_3_9() -> None:
    older, newer = (candidates("key_gradient", 64, 2, "sm_100", False, False, version) for version in ((3, 8), (3, 9)))
    assert BlockSizes(128, 64, 8, 3) in set(newer) - set(older)
    older, newer = (candidates("forward", 64, 2, "sm_100", False, False, version) for version in ((3, 8), (3, 9)))
    assert set(newer) - set(older) == {BlockSizes(128, 64, 4, 2)}
    for target in ("sm_80", "sm_90", "gfx942"):
        older, newer = (
            candidates("key_gradient", 64, 2, target, False, False, version) for version in ((3, 8), (3, 9))
        )
        assert older == newer


def test_a_device_is_named_as_its_compiler_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = torch.device("cuda")
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (12, 0))
    assert target_of(cuda) == "sm_120"
    assert target_of(torch.device("cpu")) == "sm_90"
    monkeypatch.setattr(torch.version, "hip", "7.0")
    properties = SimpleNamespace(gcnArchName="gfx942:sramecc+:xnack-")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    assert target_of(cuda) == "gfx942"


@pytest.mark.parametrize("target", ["sm_100", "sm_103"])
def test_narrow_heads_have_more_than_one_warpgroup_on_blackwell_before_triton_3_7(target: str) -> None:
    for kernel in ("forward", "query_gradient", "key_gradient"):
        for width, biased in itertools.product((16, 32), (False, True)):
            found = candidates(kernel, width, 2, target, False, biased, (3, 6))
            assert found
            assert {one.num_warps for one in found} == {8}
    assert {one.num_warps for one in candidates("forward", 32, 2, target, False, False, (3, 7))} == {4, 8}
