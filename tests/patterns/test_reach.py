"""How far a token's information comes: as a walk from position to position over the counts says."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dilated_attention_pytorch import DilatedPattern, attend, global_tokens, local_window, per_head
from support.drawn import DrawnCall, Sizes, block_calls, examples

SIZES = Sizes(st.integers(1, 40), batch=1, kv_heads=4, head_dims=(4,), segments=st.integers(1, 50))


@examples(60)
@given(block_calls(with_padding=False, sizes=SIZES), st.integers(1, 4))
def test_the_first_layer_is_the_length_of_the_shortest_walk(call: DrawnCall, num_layers: int) -> None:
    call.options.clear()
    call.num_queries = call.num_keys = length = min(call.num_queries, call.num_keys)
    counts = call.counts()[0][0].sum(0)
    found = call.pattern.reach(length, num_layers, num_kv_heads=call.kv_heads, is_causal=call.is_causal)
    for query in range(length):
        known = {query: 0}
        for layer in range(1, num_layers + 1):
            for position in [p for p in known if known[p] < layer]:
                for key in counts[position].nonzero().flatten().tolist():
                    known.setdefault(key, layer)
        assert found.first_layer[query].tolist() == [known.get(key, -1) for key in range(length)]
    for layer in range(num_layers + 1):
        by_distance = [0] * length
        for query, key in found.mask(layer).nonzero().tolist():
            by_distance[abs(query - key)] += 1
        assert found.by_distance(layer).tolist() == by_distance


def test_a_gradient_comes_from_the_positions_in_reach_and_from_no_other() -> None:
    pattern = DilatedPattern([5, 16], [1, 3]) + per_head([local_window(1), global_tokens(2)])
    reach = pattern.reach(29, 3, num_kv_heads=2, is_causal=True)
    token = torch.randn(1, 29, 1, 8, dtype=torch.float64, requires_grad=True)
    # Small: no probability underflows.
    state, mixing = token, [torch.randn(2, 8, 8, dtype=torch.float64) / 8 for _ in range(3)]
    for layer, matrices in enumerate(mixing, start=1):
        heads = torch.einsum("bnhd,gde->bnge", state, matrices)
        state = state + attend(heads, heads, heads, pattern, is_causal=True).sum(2, keepdim=True)
        for query in range(29):
            (grad,) = torch.autograd.grad(state[0, query].sum(), token, retain_graph=True)
            assert torch.equal(grad[0, :, 0].abs().amax(-1) > 0, reach.mask(layer)[query])


def test_numbers_out_of_range_are_named() -> None:
    pattern = local_window(3)
    with pytest.raises(ValueError, match=r"sequence_length must be at most 8,192, .*, got 8193; take a shorter"):
        pattern.reach(8193, 1)
    with pytest.raises(ValueError, match="num_layers must be at least 1, got 0"):
        pattern.reach(8, 0)
    with pytest.raises(TypeError, match=r"num_layers must be an integer, got 1\.5"):
        pattern.reach(8, 1.5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="num_layers must be between 0 and the 2 layers of this result, got 3"):
        pattern.reach(8, 2).by_distance(3)
