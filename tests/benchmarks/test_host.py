"""What calls cost on the host: every call is made, and its launches are those of docs/kernels.md."""

from __future__ import annotations

import pytest
import torch

from benchmarks import host
from dilated_attention_pytorch.kernels.select import is_interpreted


@pytest.mark.skipif(not is_interpreted(), reason="tensors of the CPU")
def test_every_call_is_timed_without_its_launches() -> None:
    rows = host.measure(torch.device("cpu"), rounds=1, calls_per_round=2)
    assert {row.what: row.launches for row in rows} == {
        "attend, forward": 3,
        "of it, the checks of the arguments": 0,
        "of it, whether anything looks on": 0,
        "of it, from operands to launches": 3,
        "attend, forward + backward": 8,
        "of it, from the gradient of the output to launches": 5,
        "of it, autograd around a function that computes nothing": 0,
        "the operator by itself, forward": 3,
        "the operator by itself, forward + backward": 8,
        "attend, a step of decoding, again and again": 2,
        "attend, a step of decoding, each at the next position": 2,
        "attend, a step of decoding, the position on the device": 2,
        "PyTorch's attention of one row, forward": 0,
        "PyTorch's attention of one row, forward + backward": 0,
    }
    assert all(len(row.samples) == 1 and row.least > 0 for row in rows)


@pytest.mark.skipif(not is_interpreted(), reason="tensors of the CPU")
def test_launches_are_launches_again_afterwards() -> None:
    call = host.calls(torch.device("cpu"))["attend, forward"]
    assert host.num_launches(call) == 3
    host.check(torch.device("cpu"))
