"""The check of the Triton kernels on a device: what is wrong is found, and wherever it ends there is one verdict."""

from __future__ import annotations

import functools
import json
import multiprocessing
from collections.abc import Callable, Iterator
from dataclasses import replace
from multiprocessing.queues import SimpleQueue
from multiprocessing.synchronize import Barrier
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from triton.runtime.errors import OutOfResources

from dilated_attention_pytorch.cli import _run_without, main
from dilated_attention_pytorch.folders import cache_folder
from dilated_attention_pytorch.kernels import device_check, select
from dilated_attention_pytorch.kernels.device_check import (
    Subject,
    check_again,
    kept_check,
    machine_of,
    run_check,
    subjects,
    trusts_triton,
)
from dilated_attention_pytorch.kernels.select import is_interpreted
from dilated_attention_pytorch.kernels.triton import check
from dilated_attention_pytorch.kernels.triton.configurations import BlockSizes
from dilated_attention_pytorch.kernels.triton.plan import plan_of
from support.checked_kernels import stand_ins
from support.interpreter import patched_once_per_launch

pytestmark = pytest.mark.skipif(not is_interpreted(), reason="stand-ins for kernels run on the CPU")
CPU = torch.device("cpu")
SUBJECT = Subject(CPU, torch.bfloat16, 64)
NAMES = ("out", "grad_query", "grad_key", "grad_value")


@pytest.fixture(autouse=True)
def _nothing_is_known(own_cache: None) -> Iterator[None]:
    forget()
    yield
    forget()


def forget() -> None:
    """What this process knows of checks."""
    device_check._checked.cache_clear()
    device_check._said.clear()


def program(monkeypatch: pytest.MonkeyPatch, *words: str) -> None:
    monkeypatch.setattr(device_check, "_PROGRAM", words)


def printing(monkeypatch: pytest.MonkeyPatch, code: str, machine: dict[str, str] | None = None) -> None:
    """A program that prints, without kernels, what the check does before ``code``."""
    begin = json.dumps({"machine": machine_of(CPU) if machine is None else machine})
    program(monkeypatch, "-c", f"import os, sys, time\nprint({begin!r}, flush=True)\n{code}")


def noted(calls: Path, code: str) -> str:
    """Code that notes that it ran."""
    return f"open({str(calls)!r}, 'a').write('x')\n{code}"


COMPLETE = """
print('{"call": "causal"}')
print('{"call": "causal", "found": "errors", "passes": true}')
print('{"complete": true}')
"""
WRONG = """
print('{"call": "causal"}')
print('{"call": "causal", "found": "out is off", "passes": false}')
print('{"complete": true}')
"""


# The calls and their judgement.


@functools.cache
def drawn(index: int, dtype: torch.dtype = torch.bfloat16, width: int = 64) -> check.Drawn:
    return check.draw(check.CALLS[index], CPU, dtype, width, seed=index)


@pytest.mark.parametrize(("dtype", "width"), [(torch.float32, 64), (torch.float16, 128), (torch.bfloat16, 256)])
def test_the_definition_is_right_in_every_call(dtype: torch.dtype, width: int) -> None:
    with stand_ins(lambda index, result: result):
        for index, call in enumerate(check.CALLS):
            one = drawn(index, dtype, width)
            verdict = check.judge(call, one, check.compute(call, one))
            assert verdict.passes, (call.name, verdict.describe())


def larger(result: Tensor) -> Tensor:
    return result * 1.02


def with_a_row_lost(result: Tensor) -> Tensor:
    lost = result.abs().amax((2, 3)) == result.abs().max()
    return result.masked_fill(lost[:, :, None, None], 0.0)


def with_a_nan(result: Tensor) -> Tensor:
    spoiled = result.clone()
    spoiled[0, 0, 0, 0] = torch.nan
    return spoiled


@pytest.mark.parametrize("spoil", [larger, with_a_row_lost, with_a_nan])
@pytest.mark.parametrize("index", range(len(check.CALLS)))
def test_what_is_wrong_in_one_result_is_found_in_every_call(index: int, spoil: Callable[[Tensor], Tensor]) -> None:
    call, one = check.CALLS[index], drawn(index)
    heads = (call.heads[0], call.heads[0], call.heads[1], call.heads[1])
    right = [
        exact.value.unflatten(1, (number, -1)).sum(2).transpose(1, 2).bfloat16()
        for exact, number in zip(one.exact, heads, strict=False)
    ]
    assert check.judge(call, one, right).passes
    for which, result in enumerate(right):
        verdict = check.judge(call, one, [*right[:which], spoil(result), *right[which + 1 :]])
        assert not verdict.passes
        assert NAMES[which] in verdict.describe()


@pytest.mark.parametrize("index", [*(pytest.param(index, marks=pytest.mark.slow) for index in range(4)), 4])
def test_the_kernels_are_right_in_the_interpreter(index: int) -> None:
    with patched_once_per_launch():
        verdict = check.judge(check.CALLS[index], drawn(index), check.compute(check.CALLS[index], drawn(index)))
    assert verdict.passes, verdict.describe()


def test_the_first_call_is_computed_by_every_configuration_that_fits(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    problem = drawn(0).problem
    plan = plan_of(problem)
    kernels = (plan.forward, plan.query_gradient, plan.key_gradient)
    shipped = [kernel.choice.candidates for kernel in kernels]
    used: list[set[BlockSizes]] = [set() for _ in kernels]

    def compute(call: check.CheckedCall, drawn: check.Drawn) -> list[Tensor]:
        for configurations, kernel in zip(used, kernels, strict=True):
            configurations.add(kernel.choice.candidates[0])
        if plan.forward.choice.candidates[0] == shipped[0][-1]:
            raise OutOfResources(300_000, 230_000, "shared memory")
        return [torch.zeros(())]

    monkeypatch.setattr(check, "compute", compute)
    monkeypatch.setattr(check, "judge", lambda *_: SimpleNamespace(passes=True, describe=lambda: "errors"))
    check._check(check.CALLS[0], drawn(0), by_all=True)
    assert used == [set(candidates) for candidates in shipped]
    assert [kernel.choice.candidates for kernel in kernels] == shipped
    said = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    begun, done = ([line["call"] for line in said if ("found" in line) == is_done] for is_done in (False, True))
    assert begun[0] == "causal"
    assert begun[1] == "causal, forward 128x128x8x3"
    assert set(begun) - set(done) == {"causal, forward 128x64x4x2"}
    monkeypatch.setattr(plan.forward.choice, "candidates", shipped[0][-1:])
    with pytest.raises(OutOfResources):
        check._check(check.CALLS[0], drawn(0), by_all=False)


# The program and its verdicts.


def test_right_kernels_are_trusted_by_one_check_of_the_machine(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    program(monkeypatch, "-m", "support.checked_kernels", "right")
    state = torch.get_rng_state()
    assert trusts_triton(CPU, torch.bfloat16, 48)
    assert torch.equal(torch.get_rng_state(), state)
    said = capfd.readouterr().err
    assert said.count("\n") == 1
    assert (
        "checking its Triton kernels on the CPU, in Triton's interpreter in bfloat16 with heads up to 64 wide" in said
    )
    kept = kept_check(SUBJECT)
    assert kept is not None
    assert kept.describe() == "right"
    assert [call.name for call in kept.calls] == [call.name for call in check.CALLS]
    program(monkeypatch, "-c", "raise AssertionError('it was checked again')")
    forget()
    assert trusts_triton(CPU, torch.bfloat16, 64)
    assert not capfd.readouterr().err


@pytest.mark.parametrize(
    ("kernels", "problem"),
    [
        ("wrong", r"call 'causal': grad_key is off by \d\.\de-02 of its size \(rounding explains [\d.]+e-03\)"),
        ("raising", "call 'causal' failed: RuntimeError: CUDA error: an illegal memory access was encountered"),
    ],
    ids=["wrong", "raising"],
)
def test_kernels_that_are_wrong_or_raise_are_kept_and_warned_of(
    kernels: str, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    program(monkeypatch, "-m", "support.checked_kernels", kernels)
    remedies = r'.*impl="triton" takes them all the same; `dilated-attention info --check` checks again'
    with pytest.warns(
        RuntimeWarning, match=rf'impl="aten".* in bfloat16 with heads up to 64 wide.*{problem}{remedies}'
    ):
        assert not trusts_triton(CPU, torch.bfloat16, 64)
    assert kept_check(SUBJECT) is not None


ENDS = {
    "hangs": (
        'print(\'{"call": "causal"}\', flush=True); time.sleep(600)',
        "call 'causal' was not done after 2 s",
        True,
    ),
    "breaks": (
        'print(\'{"call": "causal"}\', flush=True); os.kill(os.getpid(), 11)',
        "call 'causal' was ended by SIGSEGV",
        True,
    ),
    "is killed": ("os.kill(os.getpid(), 9)", "the first call was ended by SIGKILL", False),
    "has no memory": (
        "sys.exit('torch.OutOfMemoryError: CUDA out of memory.')",
        "the first call failed: torch.Out",
        False,
    ),
    "ends early": ("", "the first call failed: exit code 0", True),
    "fails after the last call": (f"{COMPLETE}sys.exit(3)", "call 'causal' failed: exit code 3", True),
}


@pytest.mark.parametrize("end", ENDS)
def test_wherever_the_program_ends_there_is_a_verdict(end: str, monkeypatch: pytest.MonkeyPatch) -> None:
    code, problem, is_kept = ENDS[end]
    monkeypatch.setattr(device_check, "_SECONDS", 2.0 if end == "hangs" else 60.0)
    printing(monkeypatch, code)
    verdict = check_again(SUBJECT)
    assert problem in verdict.problem
    assert (kept_check(SUBJECT) is not None) == is_kept


def test_a_check_that_cannot_start_or_has_another_device_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    program(monkeypatch, "-c", "raise RuntimeError('CUDA-capable device(s) is/are busy or unavailable')")
    assert check_again(SUBJECT).problem.startswith(
        "it could not start: it failed: RuntimeError: CUDA-capable device(s) is/are busy"
    )
    printing(monkeypatch, COMPLETE, machine_of(CPU) | {"device": "another"})
    assert "it could not start: it ran on {'device': 'another'" in check_again(SUBJECT).problem
    monkeypatch.setattr("sys.executable", "/nowhere/python")
    assert "/nowhere/python does not start: No such file or directory" in check_again(SUBJECT).problem
    assert kept_check(SUBJECT) is None
    with pytest.warns(RuntimeWarning, match="does not start"):
        assert not trusts_triton(CPU, torch.bfloat16, 64)


def test_other_output_of_the_program_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    printing(monkeypatch, f"print('{{ptxas}}'); print([1]); print('done', file=sys.stderr){COMPLETE}")
    assert not run_check(SUBJECT).problem


def test_it_warns_once_in_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    printing(monkeypatch, WRONG)
    with pytest.warns(RuntimeWarning, match="call 'causal': out is off") as warned:
        assert not any(trusts_triton(CPU, torch.bfloat16, width) for width in (64, 128, 64))
    assert len(warned) == 1
    assert kept_check(replace(SUBJECT, width=128)) is not None


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[:-9],
        lambda text: "",
        lambda text: "[1]",
        lambda text: text.replace('"passes": true', '"passes": false'),
        lambda text: text.replace('"interpreter"', '"another"').replace("Triton's", "another"),
        lambda text: json.dumps(json.loads(text) | {"calls": []}),
        lambda text: json.dumps(json.loads(text) | {"problem": 1}),
    ],
)
def test_after_a_damaged_file_it_is_checked_again(
    damage: Callable[[str], str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    printing(monkeypatch, noted(tmp_path / "calls", COMPLETE))
    assert trusts_triton(CPU, torch.bfloat16, 64)
    (file,) = cache_folder().glob("check-triton-*.json")
    file.write_text(damage(file.read_text()))
    for _ in range(2):
        forget()
        assert trusts_triton(CPU, torch.bfloat16, 64)
    assert (tmp_path / "calls").read_text() == "xx"


def test_without_a_folder_every_process_checks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    printing(monkeypatch, noted(tmp_path / "calls", COMPLETE))
    for _ in range(2):
        forget()
        assert trusts_triton(CPU, torch.bfloat16, 64)
        assert trusts_triton(CPU, torch.bfloat16, 64)
    assert (tmp_path / "calls").read_text() == "xx"


def rank(begin: Barrier, answers: SimpleQueue[bool]) -> None:
    begin.wait()
    answers.put(trusts_triton(CPU, torch.bfloat16, 64))


def test_of_processes_that_begin_at_once_one_checks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    printing(monkeypatch, noted(tmp_path / "calls", f"time.sleep(0.5){COMPLETE}"))
    processes = multiprocessing.get_context("fork")
    begin, answers = processes.Barrier(2), processes.SimpleQueue()
    ranks = [processes.Process(target=rank, args=(begin, answers)) for _ in range(2)]
    for one in ranks:
        one.start()
    assert [answers.get() for _ in ranks] == [True, True]
    for one in ranks:
        one.join()
    assert (tmp_path / "calls").read_text() == "x"


@pytest.mark.parametrize(
    ("name", "other"), [("device", "NVIDIA H100"), ("ptxas", "13.3"), ("Triton", "4.0"), ("kernels", "0" * 16)]
)
def test_a_verdict_is_for_its_device_versions_and_sources(
    name: str, other: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    printing(monkeypatch, COMPLETE)
    check_again(SUBJECT)
    changed = machine_of(CPU) | {name: other}
    with monkeypatch.context() as patch:
        patch.setattr(device_check, "machine_of", lambda device: changed)
        assert kept_check(SUBJECT) is None
        printing(patch, WRONG, changed)
        check_again(SUBJECT)
        assert kept_check(SUBJECT) is not None
    kept = kept_check(SUBJECT)
    assert kept is not None
    assert not kept.problem


# The choice.


@pytest.mark.parametrize("is_right", [True, False])
def test_auto_follows_the_check_and_a_name_does_not(is_right: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[object, ...]] = []
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(select, "trusts_triton", lambda *subject: asked.append(subject) or is_right)
    cuda = torch.device("cuda", 0)
    assert select.select("triton", cuda, torch.bfloat16, 64) == "triton"
    assert not asked
    assert select.select("auto", cuda, torch.bfloat16, 64) == ("triton" if is_right else "aten")
    assert asked == [(cuda, torch.bfloat16, 64)]


def test_it_runs_while_a_graph_is_traced_and_under_fake_tensors(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    printing(monkeypatch, noted(tmp_path / "calls", COMPLETE))

    def doubled(x: Tensor) -> Tensor:
        return 2 * x if trusts_triton(x.device, torch.float32, x.shape[-1]) else x

    compiled = torch.compile(doubled, fullgraph=True, backend="eager", dynamic=True)
    for rows in (3, 5):
        assert torch.equal(compiled(torch.ones(rows, 80)), 2 * torch.ones(rows, 80))
    assert (tmp_path / "calls").read_text() == "x"
    assert kept_check(Subject(CPU, torch.float32, 128)) is not None
    with FakeTensorMode():
        assert trusts_triton(CPU, torch.float32, 200)
    assert (tmp_path / "calls").read_text() == "xx"


# The command.


def test_info_checks_by_hand_and_shows_what_is_kept(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    printing(monkeypatch, WRONG)
    check_again(SUBJECT)
    printing(monkeypatch, COMPLETE)
    main(["info"])
    said = capsys.readouterr().out
    assert said.count("not checked yet") == len(subjects(CPU)) - 1 == 2
    assert "64 call 'causal': out is off" in " ".join(said.split())
    main(["info", "--check"])
    said = capsys.readouterr().out
    for name in machine_of(CPU).values():
        assert name in said
    assert said.count("verdict") == 3
    main(["info"])
    assert "not checked yet" not in capsys.readouterr().out
    _run_without("without tyro", ["info", "--check"])
    assert capsys.readouterr().out == said


def test_where_no_gpu_is_info_says_how_to_check(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    main(["info", "--check"])
    assert "no GPU that the Triton kernels run on was found" in capsys.readouterr().out
