"""What every rank runs in ``test_generation.py``: each function returns what the test compares."""

from __future__ import annotations

import math
from typing import Any, NamedTuple, get_args

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from dilated_attention_pytorch import parallel
from dilated_attention_pytorch.estimate.parallel import Strategy
from dilated_attention_pytorch.models import LongNetCache, LongNetConfig, LongNetLM, generate
from dilated_attention_pytorch.models.cache_index import CacheIndex
from dilated_attention_pytorch.models.generation import read_prompt
from dilated_attention_pytorch.parallel import RankFailure, count_traffic
from dilated_attention_pytorch.parallel.generation import RankShare
from dilated_attention_pytorch.plan.layout import Layout

SIZES: dict[str, Any] = {
    "vocab_size": 29,
    "embed_dim": 60,
    "num_layers": 2,
    "num_heads": 6,
    "num_kv_heads": 3,
    "ffn_dim": 53,
    "segment_lengths": [7, 23],
    "dilation_rates": [1, 3],
    "layer_segment_shifts": (0, 5),
}


HYBRID = {"head_gates": True, "key_convolution": 3, "layer_rope_thetas": (0.0, 1e4), "layer_scale_lengths": (5, 0)}
CHUNKS = [1, 1, 1, 1, 5, 1, 1, 1, 1, 1, 1]
"""Tokens after the prompt, by call."""


class Case(NamedTuple):
    """A model, a prompt ``[batch, length]``, and how it is dealt out."""

    changes: dict[str, Any]
    batch: int
    length: int
    layout: Layout
    strategy: Strategy = "auto"


CASES = {
    "segments shorter than a shard, shifted layers": Case({}, 2, 41, "contiguous"),
    "in zigzag, keys of two rows before": Case(HYBRID, 2, 41, "zigzag"),
    "segments longer than a shard": Case(
        {"segment_lengths": [11, 1000], "dilation_rates": [2, 5]}, 1, 37, "zigzag", "heads"
    ),
    "a rate that the ranks divide": Case(
        {"segment_lengths": [8, 18], "dilation_rates": [2, 3]}, 2, 36, "contiguous", "gather"
    ),
    "no group with every row": Case(
        {"segment_lengths": [5, 13, 29], "dilation_rates": [4, 2, 6], "num_kv_heads": 1}, 2, 43, "contiguous"
    ),
    "block offsets, a head each": Case(
        {"segment_lengths": [6, 17], "dilation_rates": [2, 4], "offset_rule": "block", "num_kv_heads": 6},
        1,
        29,
        "zigzag",
    ),
    "one token, keys of two rows before": Case(HYBRID, 2, 1, "contiguous"),
    "fewer tokens than ranks, shifted keys": Case({"shifted_keys": True}, 3, 2, "zigzag"),
    "nothing but itself": Case({"segment_lengths": [1], "dilation_rates": [1]}, 1, 11, "contiguous"),
}


def model_of(changes: dict[str, Any]) -> LongNetLM:
    """The same on every rank."""
    torch.manual_seed(0)
    return LongNetLM(LongNetConfig(**{**SIZES, **changes})).double().eval()


def follow(case: Case, mesh: DeviceMesh) -> dict[str, Any]:
    """Logits of a prompt and of given tokens after it, one by one and several at once; and the rows that are held."""
    model, (_, batch, length, layout, strategy) = model_of(case.changes), case
    ids, num_kv_heads = torch.randint(29, (batch, length + sum(CHUNKS))), model.config.num_kv_heads
    assert num_kv_heads is not None
    cache = LongNetCache(model.config, share=RankShare(mesh, strategy=strategy, layout=layout))
    alone = [CacheIndex(pattern, num_kv_heads, ids.device) for pattern in model.patterns]
    rows, errors, seen = [], [], 0
    with torch.no_grad():
        naive = model(ids)
        for chunk in ids.split([length, *CHUNKS], dim=1):
            if seen == 0:
                logits = model.logits(read_prompt(model, chunk, cache)).unsqueeze(1)
            else:
                logits = model(chunk, cache=cache)
            seen += chunk.shape[1]
            errors.append((logits - naive[:, seen - logits.shape[1] : seen]).abs().max())
            for layer, cache_index in enumerate(alone):
                cache_index.advance(chunk.shape[1])
                for head in range(num_kv_heads):
                    rows.append((cache.positions(layer, 0, head), cache_index.positions(head)))
    return {"error": float(max(errors)), "rows": rows}


OPTIONS: dict[Layout, dict[str, Any]] = {
    "contiguous": {"temperature": 0.0},
    "zigzag": {"temperature": 0.8, "top_k": 11, "top_p": 0.9},
}


def draw(layout: Layout, mesh: DeviceMesh | None) -> list[list[int]]:
    """Tokens that :func:`generate` yields, in a first turn and in one with the same cache."""
    model, prompt, more = model_of({}), torch.randint(29, (2, 19)), torch.randint(29, (2, 3))
    share = None if mesh is None else RankShare(mesh, layout=layout)
    cache = LongNetCache(model.config, share=share)
    # A rank that would draw other tokens takes the first rank's.
    generator = torch.Generator().manual_seed(5 if share is None else 5 + share.rank)
    tokens = list(generate(model, prompt, 11, generator=generator, cache=cache, **OPTIONS[layout]))
    # The last token that was yielded is not in the cache yet.
    turn = torch.cat([tokens[-1].unsqueeze(1), more], dim=1)
    tokens += generate(model, turn, 5, generator=generator, cache=cache, chunk_size=3, **OPTIONS[layout])
    return torch.stack(tokens).tolist()


def pad_and_reorder(mesh: DeviceMesh) -> float:
    """Largest error of the logits of rows of different lengths, read whole on every rank, that then change places."""
    model, ids, prompt = model_of({}), torch.randint(29, (3, 47)), 31
    mask = torch.ones(3, prompt, dtype=torch.int64)
    mask[1, :7] = 0
    cache, error = LongNetCache(model.config, share=RankShare(mesh)), 0.0
    with torch.no_grad():
        for start in range(0, prompt, 13):
            columns = slice(start, min(start + 13, prompt))
            model(ids[:, columns], attention_mask=mask[:, : columns.stop], cache=cache)
        cache.reorder_cache(torch.tensor([1, 1, 2, 0]))
        texts = [ids[row, 7 if row == 1 else 0 : prompt] for row in (1, 1, 2, 0)]
        for _ in range(5):
            new = torch.randint(29, (4, 1))
            logits = model(new, cache=cache)
            texts = [torch.cat([text, token]) for text, token in zip(texts, new, strict=True)]
            for row, text in enumerate(texts):
                error = max(error, float((logits[row, -1] - model(text[None])[0, -1]).abs().max()))
    return error


def count_bytes(mesh: DeviceMesh) -> dict[str, int]:
    """Bytes that this rank sends for a token, all layers together."""
    model = model_of({})
    cache = LongNetCache(model.config, share=RankShare(mesh))
    with torch.no_grad():
        read_prompt(model, torch.randint(29, (2, 19)), cache)
        with count_traffic() as traffic:
            model(torch.randint(29, (2, 1)), cache=cache)
    return {"sent": traffic.sent, "messages": traffic.messages}


def rows_of_prompts(mesh: DeviceMesh) -> list[str]:
    """The prompts of which rows before each row, or the last rows, are not those of the whole."""
    unlike = []
    for layout in get_args(Layout):
        share = RankShare(mesh, layout=layout)
        for length, count, rest in ((1, 3, (2, 3)), (2, 1, ()), (5, 2, (3,)), (40, 3, (2, 3))):
            whole = 1.0 + torch.arange(2 * length * math.prod(rest)).view(2, length, *rest)
            before = torch.cat([whole.new_zeros(2, count, *rest), whole], dim=1)
            rows, here = parallel.shard(whole, mesh, layout=layout), share.positions(length, whole.device)
            found = share.previous_rows(rows, count, length)
            is_like = all(torch.equal(found[j - 1], before[:, count + here - j]) for j in range(1, count + 1))
            if not is_like or not torch.equal(share.last_rows(rows, count, length), before[:, length:]):
                unlike.append(f"{layout}, length {length}, count {count}")
    return unlike


LONG: dict[str, Any] = {"segment_lengths": [256, 1024], "dilation_rates": [1, 4]}


def held_bytes(mesh: DeviceMesh | None) -> list[int]:
    """Bytes of the cache after a prompt and after some tokens more."""
    model = model_of(LONG)
    cache = LongNetCache(model.config, share=None if mesh is None else RankShare(mesh))
    with torch.no_grad():
        read_prompt(model, torch.randint(29, (1, 1019)), cache)
        sizes = [cache.num_bytes]
        for token in torch.randint(29, (1, 9)).split(1, dim=1):  # crosses the end of every segment
            model(token, cache=cache)
            sizes.append(cache.num_bytes)
    return sizes


def refusals(mesh: DeviceMesh) -> dict[str, str]:
    """The messages of calls that cannot be honoured."""
    model, ids, size = model_of({}), torch.randint(29, (2, 19)), mesh.size()
    share = RankShare(mesh)
    words = {}

    def attempt(name: str, error: type[Exception], call: Any) -> None:
        try:
            with torch.no_grad():
                call()
        except error as raised:
            words[name] = str(raised)

    seen = LongNetCache(model.config, share=share)
    with torch.no_grad():
        model(ids, cache=seen)
    rows, mask, fresh = share.rows(ids), torch.ones(2, 19), LongNetCache(model.config, share=share)
    plane = init_device_mesh("cpu", (1, size), mesh_dim_names=("a", "b"))
    attempt("mesh", NotImplementedError, lambda: RankShare(plane))
    attempt("layout", ValueError, lambda: RankShare(mesh, layout="striped"))  # type: ignore[arg-type]
    attempt("strategy", ValueError, lambda: RankShare(mesh, strategy="star"))  # type: ignore[arg-type]
    attempt("seen", NotImplementedError, lambda: model.hidden_states(rows, cache=seen, sequence_length=19))
    attempt("rows", ValueError, lambda: model.hidden_states(ids, cache=fresh, sequence_length=19))
    attempt(
        "padding",
        NotImplementedError,
        lambda: model.hidden_states(rows, cache=fresh, sequence_length=19, attention_mask=mask[:, : rows.shape[1]]),
    )
    mine = ids.clone()
    mine[1, 18] += mesh.get_rank() == 1
    attempt("prompt", RankFailure, lambda: next(generate(model, mine, 3, cache=fresh)))
    # What was refused has left the cache as it was.
    with torch.no_grad():
        error = model.logits(read_prompt(model, ids, fresh)) - model(ids)[:, -1]
    words["error after refusals"] = str(float(error.abs().max()))
    return words


def run_all() -> dict[str, Any]:
    """Everything, in one launch of the ranks."""
    world = dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    size = 2 if world == 4 else 1
    groups = init_device_mesh("cpu", (world // size, size), mesh_dim_names=("data", "context"))
    return {
        "cases": {name: follow(case, mesh) for name, case in CASES.items()},
        "in groups": follow(next(iter(CASES.values())), groups["context"])["error"],
        "drawn": {layout: draw(layout, mesh) for layout in OPTIONS},
        "padded": pad_and_reorder(mesh),
        "rows of prompts": rows_of_prompts(mesh),
        "bytes": count_bytes(mesh),
        "held bytes": held_bytes(mesh),
        "refusals": refusals(mesh),
    }
