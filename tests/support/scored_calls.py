"""Drawn calls with terms of the scores, and what they are by the definition."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from dilated_attention_pytorch import attend_with_lse
from dilated_attention_pytorch.kernels.select import Impl
from dilated_attention_pytorch.ops import Scores
from support.drawn import DrawnCall
from support.error_budget import budget_with_scores
from support.oracle import Groups, Terms, dense_attention

NAMES = ("softcap", "sinks", "slopes", "distance_bias", "key_bias")
"""Terms with gradients, after the cap."""


@dataclass
class ScoredCall:
    """A drawn call with values of their own width and terms of the scores."""

    call: DrawnCall
    value_dim: int
    softcap: float | None
    names: frozenset[str]
    reach: int
    """Largest distance W of the bias by distance."""
    is_in_the_plane: bool = False
    """Whether slopes are of distances in a plane."""

    def coordinates(self) -> Tensor | None:
        """``[B, M, 2]`` in float64, some of them without a place."""
        if not self.is_in_the_plane:
            return None
        call, generator = self.call, torch.Generator().manual_seed(self.call.seed + 1)
        shape = call.batch, call.num_keys
        places = torch.randint(-40, 400, (*shape, 2), generator=generator).double() / 4
        return places.masked_fill(torch.rand(*shape, 1, generator=generator) < 0.1, math.nan)

    def tensors(self, dtype: torch.dtype) -> tuple[dict[str, Tensor], Tensor, Tensor]:
        """Query, key, value and tensors of the scores by name; the weights of out and lse in a loss."""
        q, k, v, _, of_lse = self.call.tensors(dtype)
        heads, generator = q.shape[2], torch.Generator().manual_seed(self.call.seed)

        def draw(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.float64)

        v = draw(*v.shape[:3], self.value_dim)
        # Powers of two: such slopes times distances are exact, whatever the dtype.
        slopes = 2.0 ** -torch.arange(1.0, heads + 1, dtype=torch.float64)
        terms = {
            "sinks": draw(heads),
            "slopes": slopes if self.call.seed % 3 else -slopes / 64,
            "distance_bias": draw(heads, 2 * self.reach + 1),
            "key_bias": draw(*(k.shape[:3] if self.call.seed % 2 else k.shape[:2])),
        }
        of_scores = torch.float64 if dtype == torch.float64 else torch.float32
        chosen = {name: terms[name].to(of_scores) for name in NAMES if name in self.names}
        return {"q": q, "k": k, "v": v.to(dtype), **chosen}, draw(*q.shape[:3], self.value_dim).to(dtype), of_lse

    def bias(self, tensors: dict[str, Tensor]) -> Tensor:
        """The biases, ``[B or 1, H, N, M]``, from the definition."""
        options, call = self.call.options, self.call
        p = torch.arange(call.num_queries) + options.get("query_offset", 0)
        t = torch.arange(call.num_keys) + options.get("key_offset", 0)
        distance = t - p.unsqueeze(1)
        bias = torch.zeros(1, call.kv_heads * call.ratio, call.num_queries, call.num_keys, dtype=torch.float64)
        places = self.coordinates()
        if places is not None:
            first = options.get("query_offset", 0) - options.get("key_offset", 0)
            rows = places[:, first : first + call.num_queries]
            away = torch.hypot(*(rows.unsqueeze(2) - places.unsqueeze(1)).unbind(-1)).nan_to_num(0.0)  # [B, N, M]
            bias = bias - tensors["slopes"].view(-1, 1, 1) * away.unsqueeze(1)
        elif "slopes" in tensors:
            bias = bias - tensors["slopes"].view(-1, 1, 1) * distance.abs()
        if "distance_bias" in tensors:
            bias = bias + tensors["distance_bias"][:, distance.clamp(-self.reach, self.reach) + self.reach]
        if "key_bias" in tensors:
            of_keys = tensors["key_bias"]
            of_keys = of_keys.unsqueeze(1) if of_keys.dim() == 2 else of_keys.mT.repeat_interleave(call.ratio, 1)
            bias = bias + of_keys.unsqueeze(2)
        return bias

    def scores(self, tensors: dict[str, Tensor]) -> Scores:
        """The terms as an argument of a call."""
        places, device = self.coordinates(), tensors["q"].device
        coordinates = None if places is None else places.to(device)
        return Scores(self.softcap, *(tensors.get(name) for name in NAMES[1:]), coordinates=coordinates)

    def attend(self, tensors: dict[str, Tensor], impl: Impl) -> tuple[Tensor, Tensor]:
        scores = self.scores(tensors)
        operands = (tensors["q"], tensors["k"], tensors["v"], self.call.pattern)
        options: Any = {"is_causal": self.call.is_causal, "scale": self.call.scale}
        for name, x in self.call.options.items():
            options[name] = x.to(tensors["q"].device) if isinstance(x, Tensor) else x
        return attend_with_lse(*operands, scores=scores, impl=impl, **options)

    def oracle(self, tensors: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        scale = 1 / math.sqrt(self.call.head_dim) if self.call.scale is None else self.call.scale
        terms = Terms(self.softcap, self.bias(tensors), tensors.get("sinks"))
        q, k, v = tensors["q"], tensors["k"], tensors["v"]
        return dense_attention(q, k, v, *self.call.counts(), scale, terms=terms)


@st.composite
def scored(draw: st.DrawFn, of_calls: st.SearchStrategy[DrawnCall]) -> ScoredCall:
    names = frozenset(draw(st.sets(st.sampled_from(NAMES[1:]))))
    cap, call = draw(st.sampled_from([None, 0.5, 3.0, 50.0])), draw(of_calls)
    further_keys = call.num_keys - call.num_queries
    has_places = further_keys >= 0 and draw(st.booleans())
    if has_places:
        names = (names - {"distance_bias"}) | {"slopes"}
        if "query_offset" in call.options:  # queries lie among the keys
            call.options["query_offset"] = call.options["key_offset"] + draw(st.integers(0, further_keys))
    value_dim, reach = draw(st.sampled_from([1, 3, 8, 16, 20])), draw(st.integers(0, 140))
    return ScoredCall(call, value_dim, cap, names, reach, has_places)


def losses(out: Tensor, lse: Tensor, of_out: Tensor, of_lse: Tensor) -> Tensor:
    return (out.double() * of_out.double()).sum() + (torch.where(lse.isinf(), 0.0, lse) * of_lse).sum()


def gradients(
    call: ScoredCall, tensors: dict[str, Tensor], compute: Callable[..., Any], *of: Tensor
) -> dict[str, Tensor]:
    """out, lse, and the gradients of a loss over both, by name."""
    leaves = {name: x.detach().requires_grad_() for name, x in tensors.items()}
    out, lse = compute(leaves)
    grads = torch.autograd.grad(losses(out, lse, *of), list(leaves.values()), allow_unused=True)
    found = {name: torch.zeros_like(x) if g is None else g for (name, x), g in zip(leaves.items(), grads, strict=True)}
    return {"out": out.detach(), "lse": lse.detach(), **found}


def check_budget(
    call: ScoredCall,
    dtype: torch.dtype,
    impl: Impl,
    used: dict[str, float],
    placed: Callable[[dict[str, Tensor]], dict[str, Tensor]] = lambda tensors: tensors,
) -> None:
    """Check that outputs and gradients are within the error budget of which ``used`` becomes the largest part.

    ``placed`` are the tensors where the implementation computes.
    """
    # Sinks are applied to results, in PyTorch: their rounding is no kernel's.
    call.names = call.names - {"sinks"}
    ragged = (replace(one, tail="ragged") if isinstance(one, Groups) else one for one in call.call.summands)
    call.call.summands = tuple(ragged)
    tensors, of_out, of_lse = call.tensors(dtype)
    here = placed({**tensors, "of_out": of_out, "of_lse": of_lse})
    weights = here.pop("of_out"), here.pop("of_lse")
    found = gradients(call, here, lambda leaves: call.attend(leaves, impl), *weights)
    exact = {name: x.double() for name, x in tensors.items()}
    expected = gradients(call, exact, call.oracle, of_out, of_lse)
    ratio, bias = call.call.ratio, call.bias(exact)
    k, v = (exact[name].repeat_interleave(ratio, 2) for name in ("k", "v"))
    counts = call.call.counts()[0].repeat_interleave(ratio, 1).double()
    scale = 1 / math.sqrt(call.call.head_dim) if call.call.scale is None else call.call.scale
    operands = (exact["q"], k, v, of_out.double(), counts, scale, dtype, of_lse)
    budget, of_scores = budget_with_scores(*operands, softcap=call.softcap, bias=bias)
    bounds = {
        "out": budget.out,
        "lse": budget.lse,
        "q": budget.grad_query,
        "k": budget.grad_key.unflatten(2, (-1, ratio)).sum(3),
        "v": budget.grad_value.unflatten(2, (-1, ratio)).sum(3),
    }
    # The gradients of biases are sums of those of the scores: their bounds are the sums of the bounds.
    leaves = {name: exact[name].detach().requires_grad_() for name in NAMES[1:] if name in exact}
    if leaves:
        biases = call.bias(exact | leaves)
        grads = torch.autograd.grad((biases * of_scores).sum(), list(leaves.values()), retain_graph=True)
        bounds.update({name: grad.abs() for name, grad in zip(leaves, grads, strict=True)})
    for name, bound in bounds.items():
        floor = torch.finfo(dtype).tiny * 64
        if name in leaves:  # of a sum of up to B N M H / 2 terms in float32
            floor += 2.0**-24 * call.call.num_queries * float(expected[name].abs().sum() + 1)
        is_finite = expected[name].isfinite()
        assert torch.equal(found[name].isfinite().cpu(), is_finite), name
        error = torch.where(is_finite, (found[name].cpu().double() - expected[name]).abs(), 0.0)
        assert (error <= bound + floor).all(), name
        if error.numel():
            used[name] = max(used.get(name, 0.0), (error / (bound + floor)).max().item())
