"""What impl="auto" stands for within a context: every call that names no implementation is computed by it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from dilated_attention_pytorch import (
    DilatedPattern,
    LongNetCache,
    LongNetConfig,
    LongNetLM,
    attend,
    generate,
    local_window,
)
from dilated_attention_pytorch.kernels.compilation import refusal_to_load
from dilated_attention_pytorch.nn import AdaptiveBlockAttention
from dilated_attention_pytorch.ops import attend_blocks, implementation
from support.operators import count_operators, implementations_run

NO_KERNELS = refusal_to_load()
needs_kernels = pytest.mark.skipif(NO_KERNELS is not None, reason=str(NO_KERNELS))
IMPLS = ["aten", pytest.param("native", marks=needs_kernels)]
PATTERN = DilatedPattern([16, 64], [1, 4])
BLOCKS = torch.tensor([0, 3]).expand(1, 4, 4, 2)


def operands(dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return [torch.randn(1, 64, 4, 16, dtype=dtype, requires_grad=True) for _ in range(3)]


def model() -> LongNetLM:
    sizes = {"embed_dim": 32, "num_layers": 2, "num_heads": 4}
    return LongNetLM(LongNetConfig(**sizes, segment_lengths=[16, 64], dilation_rates=[1, 4]))


def of_attend() -> None:
    attend(*operands(), PATTERN, is_causal=True).sum().backward()


def of_blocks() -> None:
    attend_blocks(*operands(), BLOCKS, block_size=16).out.sum().backward()


def of_adaptive_module() -> None:
    AdaptiveBlockAttention(4, 16, blocks_per_query=2, block_size=16)(*operands()).sum().backward()


def of_model() -> None:
    model()(torch.randint(256, (1, 64))).sum().backward()


def of_cache() -> None:
    list(generate(model().eval(), torch.randint(256, (1, 40)), 8))


def of_cache_under_rules() -> None:
    config = LongNetConfig(
        embed_dim=32,
        num_layers=1,
        num_heads=4,
        segment_lengths=[],
        dilation_rates=[],
        layer_segment_shifts=[0],
        layer_patterns=["local_window(8)"],
    )
    list(generate(LongNetLM(config).eval(), torch.randint(256, (1, 40)), 8))


CALLS = [of_attend, of_blocks, of_adaptive_module, of_model, of_cache, of_cache_under_rules]


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("call", CALLS)
def test_it_computes_every_call_that_names_none(impl: Any, call: Callable[[], None]) -> None:
    with implementation(impl):
        assert implementations_run(call) == {impl}


def test_a_cache_refuses_one_that_does_not_read_stored_rows() -> None:
    ready = model().eval()
    cache = LongNetCache(ready.config)
    with torch.no_grad():
        ready(torch.randint(256, (1, 40)), cache=cache)
        with implementation("reference"), pytest.raises(NotImplementedError, match='"reference"'):
            ready(torch.randint(256, (1, 1)), cache=cache)


@needs_kernels
def test_without_it_and_after_it_the_choice_is_automatic() -> None:
    assert implementations_run(of_attend) == {"native"}
    with implementation("aten"):
        with implementation("auto"):
            assert implementations_run(of_attend) == {"native"}
        assert implementations_run(of_attend) == {"aten"}
    with pytest.raises(KeyError), implementation("aten"):
        raise KeyError
    assert implementations_run(of_attend) == {"native"}


def test_a_call_that_names_one_keeps_it() -> None:
    q, k, v = operands()
    with implementation("aten"):
        assert not implementations_run(lambda: attend(q, k, v, PATTERN, impl="reference"))


def test_a_backward_outside_is_that_of_its_forward() -> None:
    with implementation("aten"):
        total = attend(*operands(), PATTERN).sum()
    assert implementations_run(total.backward) == {"aten"}


def test_it_reaches_the_other_threads_of_the_process() -> None:
    q, k, v = operands()
    refused = []

    def compute() -> None:
        try:
            attend_blocks(q, k, v, BLOCKS, block_size=16)
        except ValueError as error:
            refused.append(str(error))

    with implementation("reference"):
        thread = threading.Thread(target=compute)
        thread.start()
        thread.join()
    assert refused == ["impl of listed blocks must be one of 'auto', 'native', 'aten', got 'reference'"]


@needs_kernels
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_compiled_call_follows_it_outside_and_inside() -> None:
    q, k, v = operands()
    compiled = torch.compile(lambda: attend(q, k, v, PATTERN, is_causal=True), fullgraph=True, backend="aot_eager")
    for impl in ("native", "aten", "native"):
        with implementation(impl):
            compiled()
            assert implementations_run(compiled) == {impl}

    def inside() -> torch.Tensor:
        with implementation("aten"):
            return attend(q, k, v, PATTERN, is_causal=True)

    compiled_inside = torch.compile(inside, fullgraph=True, backend="aot_eager")
    compiled_inside()
    assert implementations_run(compiled_inside) == {"aten"}
    assert implementations_run(of_attend) == {"native"}


def test_what_it_cannot_do_raises() -> None:
    with pytest.raises(ValueError, match=r"impl must be one of 'auto', .*, got 'flash'"), implementation("flash"):
        pass
    q, k, v = operands(torch.float64)
    with (
        implementation("native"),
        pytest.raises(NotImplementedError, match=r"impl='native' cannot compute this call: .*float32"),
    ):
        attend(q, k, v, local_window(3))


@pytest.mark.parametrize(
    ("impl", "what"), [("gluon", "warp-specialised"), ("triton-fp8", "e4m3 numbers"), ("cudnn", "cuDNN's attention")]
)
def test_one_that_was_removed_says_what_it_was_and_what_to_use(impl: Any, what: str) -> None:
    sentence = f"impl='{impl}', .*{what}.*, was removed: no device had run it; use impl=\"triton\""
    with pytest.raises(ValueError, match=sentence):
        attend(*operands(), PATTERN, impl=impl)
    with pytest.raises(ValueError, match=sentence), implementation(impl):
        pass


def test_the_operators_of_pytorch_are_counted() -> None:
    with implementation("aten"):
        counted = count_operators(of_model)
    assert counted["aten::_scaled_dot_product_flash_attention_for_cpu"] == 2 * len(PATTERN.groups)
