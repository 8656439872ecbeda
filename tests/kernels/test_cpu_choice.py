"""What impl="auto" is on a CPU where the native kernels run: the faster of both, of equal results, kept per dtype."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from dilated_attention_pytorch import DilatedPattern, attend
from dilated_attention_pytorch.cli import main
from dilated_attention_pytorch.folders import cache_folder
from dilated_attention_pytorch.kernels import compilation, cpu_choice, measured_choice, select
from dilated_attention_pytorch.kernels.measured_choice import MeasuredChoice, Routine
from dilated_attention_pytorch.ops import Scores, attend_blocks, implementation
from support.operators import implementations_run
from support.routines import RESULT, failing, taking

NO_KERNELS = compilation.refusal_to_load()
pytestmark = pytest.mark.skipif(NO_KERNELS is not None, reason=str(NO_KERNELS))
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
PATTERN = DilatedPattern([16, 64], [1, 4])
SLOW, FAST = 0.02, 0.001


@pytest.fixture(autouse=True)
def _measured_by_this_test(own_cache: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv(cpu_choice.VARIABLE)
    monkeypatch.setattr(measured_choice, "_SECONDS", 0.0)
    forget()
    yield
    forget()


def forget() -> None:
    cpu_choice.cpu_choice.cache_clear()
    select._CHOSEN.clear()


def stand_in(monkeypatch: pytest.MonkeyPatch, native: Routine, aten: Routine) -> list[torch.dtype]:
    """Routines that are measured instead of the kernels; the dtypes that are measured."""
    measured: list[torch.dtype] = []

    def routines(dtype: torch.dtype) -> dict[str, Routine]:
        measured.append(dtype)
        return {"native": native, "aten": aten}

    monkeypatch.setattr(cpu_choice, "_routines", routines)
    return measured


def operands(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [torch.randn(1, 64, 4, 16, dtype=dtype, requires_grad=True) for _ in range(3)]


def compute(dtype: torch.dtype = torch.float32, **options: Any) -> Callable[[], None]:
    return lambda: attend(*operands(dtype), PATTERN, is_causal=True, **options).sum().backward()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_both_kernels_compute_the_measured_call_and_agree(dtype: torch.dtype) -> None:
    before = torch.get_rng_state()
    choice = cpu_choice.cpu_choice(dtype)
    assert choice.rates.keys() == {"native", "aten"}
    assert min(choice.rates.values()) > 0
    assert torch.equal(torch.get_rng_state(), before)
    forget()
    assert cpu_choice.cpu_choice(dtype) == choice  # kept
    (file,) = cache_folder().glob("choice-attention-*.json")
    assert file.name.startswith(f"choice-attention-{str(dtype).removeprefix('torch.')}-native-")


def test_pytorchs_kernels_are_taken_where_they_are_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = stand_in(monkeypatch, taking(SLOW), taking(FAST))
    for _ in range(2):
        assert implementations_run(compute()) == {"aten"}
    assert measured == [torch.float32]
    assert implementations_run(compute(torch.bfloat16)) == {"aten"}
    assert measured == [torch.float32, torch.bfloat16]
    assert implementations_run(compute(impl="native")) == {"native"}
    with implementation("native"):
        assert implementations_run(compute()) == {"native"}
    forget()
    monkeypatch.setattr(cpu_choice, "_routines", lambda dtype: {"native": failing, "aten": failing})
    assert implementations_run(compute()) == {"aten"}  # kept


@pytest.mark.parametrize(
    "aten",
    [taking(SLOW), failing, taking(0.0, 1.5 * RESULT), taking(0.0, RESULT * torch.nan)],
    ids=["slower", "raises", "other numbers", "NaN"],
)
def test_the_native_kernels_stay_where_pytorchs_are_slower_or_differ(
    aten: Routine, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(monkeypatch, taking(FAST), aten)
    assert implementations_run(compute()) == {"native"}


def test_native_kernels_that_fail_are_left_out_in_one_line_and_tried_again_by_the_next_process(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    stand_in(monkeypatch, failing, taking(FAST))
    for _ in range(2):
        assert implementations_run(compute()) == {"aten"}
    assert [line for line in capfd.readouterr().err.splitlines() if "CPU kernels" in line] == [
        "dilated-attention: computing torch.float32 without its CPU kernels, which failed: could not create a primitive"
    ]
    assert not list(cache_folder().glob("choice-attention-*.json"))


def test_what_pytorchs_fused_kernels_do_not_compute_is_native(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = stand_in(monkeypatch, taking(SLOW), taking(FAST))
    blocks = torch.tensor([0, 3]).expand(1, 4, 4, 2)
    for call in (
        compute(dropout_p=0.1),
        compute(scores=Scores(softcap=2.0)),
        lambda: attend_blocks(*operands(), blocks, block_size=16).out.sum().backward(),
    ):
        assert implementations_run(call) == {"native"}
    assert not measured
    assert implementations_run(compute(scores=Scores(sinks=torch.zeros(4)))) == {"aten"}


def of_fake_tensors() -> None:
    with FakeTensorMode():
        attend(*operands(), PATTERN)


def under_deterministic_algorithms() -> None:
    torch.use_deterministic_algorithms(True)
    try:
        compute()()
    finally:
        torch.use_deterministic_algorithms(False)


def compiled() -> None:
    torch.compile(lambda q, k, v: attend(q, k, v, PATTERN), fullgraph=True, backend="aot_eager")(*operands())


class Attention(torch.nn.Module):
    def forward(self, query: Tensor) -> Tensor:
        return attend(query, query, query, PATTERN)


STATES: dict[str, Callable[[], Any]] = {
    "compiled": compiled,
    "exported": lambda: torch.export.export(Attention(), (torch.randn(1, 64, 4, 16),)),
    "fake tensors": of_fake_tensors,
    "vmap": lambda: torch.vmap(lambda q: attend(q, q, q, PATTERN))(torch.randn(2, 1, 64, 4, 16)),
    "deterministic": under_deterministic_algorithms,
}


# Inductor scripts functions of PyTorch's own.
@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
@pytest.mark.parametrize("call", STATES.values(), ids=STATES)
def test_it_is_measured_in_every_state_of_the_thread_that_calls(
    call: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, size in (("_SEGMENTS", 1), ("_ROWS", 64), ("_HEADS", 2)):
        monkeypatch.setattr(cpu_choice, name, size)
    torch.manual_seed(0)
    call()
    drawn = torch.rand(())
    misses = cpu_choice.cpu_choice.cache_info().misses
    assert misses == 1
    assert min(cpu_choice.cpu_choice(torch.float32).rates.values()) > 0
    torch.manual_seed(0)
    call()
    assert torch.equal(torch.rand(()), drawn)


def test_the_variable_names_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = stand_in(monkeypatch, taking(FAST), taking(SLOW))
    monkeypatch.setenv(cpu_choice.VARIABLE, "aten")
    assert cpu_choice.cpu_choice(torch.float32) == MeasuredChoice("aten", {})
    assert implementations_run(compute()) == {"aten"}
    forget()
    monkeypatch.setenv(cpu_choice.VARIABLE, "fast")
    with pytest.raises(ValueError, match="DILATED_ATTENTION_CPU must be native or aten, got 'fast'"):
        compute()()
    assert not measured


def test_the_command_shows_the_choice_of_every_dtype(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stand_in(monkeypatch, taking(SLOW), taking(FAST))
    main(["info"])
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [line[2:5] for line in lines if line[:2] == ["attention", "in"]] == [
        [name, "aten", "(native"] for name in ("float32", "bfloat16", "float16")
    ]
