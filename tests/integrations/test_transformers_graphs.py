"""Models under a pattern where something else calls, compiles, exports or traces them, compared with sdpa."""

from __future__ import annotations

import copy
import io
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.exc import Unsupported
from torch._dynamo.testing import CompileCounterWithBackend
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    CompileConfig,
    DynamicCache,
    GPTJConfig,
    GPTJForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
)

from dilated_attention_pytorch import DilatedPattern, attend
from dilated_attention_pytorch.integrations import register, replace_attention, set_pattern
from integrations.tiny_models import PATTERN, close, draw, tiny

register()
DENSE = DilatedPattern([1000], [1])


def num_graphs(model: Any, **options: Any) -> int:
    """The number of graphs for calls of three shapes."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("eager")
    compiled, same = torch.compile(model, backend=counter, **options), copy.deepcopy(model)
    for tokens in (draw(2, 40), draw(2, 51), draw(3, 60)):
        close(compiled(tokens).logits, same(tokens).logits)
    return counter.frame_count


def test_all_lengths_are_one_graph_under_the_compiler_with_dynamic_shapes() -> None:
    assert num_graphs(set_pattern(tiny("llama", num_hidden_layers=1), PATTERN), dynamic=True, fullgraph=True) == 1


def test_the_check_of_the_layers_breaks_no_graph() -> None:
    model = tiny("llama", num_hidden_layers=1, dilated_attention={"pattern": PATTERN.spec})
    assert num_graphs(model, dynamic=True) == 1


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # PyTorch, of the tensor at the break
def test_a_graph_may_break_after_the_first_call_of_a_model() -> None:
    model = tiny("llama", num_hidden_layers=1, dilated_attention={"pattern": PATTERN.spec})

    def loss(tokens: Tensor) -> Tensor:
        logits = model(tokens).logits
        torch._dynamo.graph_break()
        return logits.sin().sum()

    torch._dynamo.reset()
    close(torch.compile(loss, backend="eager")(draw(2, 40)), loss(draw(2, 40)))


@pytest.mark.parametrize("is_padded", [False, True])
def test_decoding_with_a_static_cache_is_one_graph(is_padded: bool) -> None:
    model, tokens = set_pattern(tiny("llama", num_hidden_layers=1), PATTERN), draw(3, 12)
    mask = torch.ones_like(tokens)
    if is_padded:
        mask[0, :5] = mask[2, :1] = 0
    graphs = []

    def backend(graph: torch.fx.GraphModule, _: list[Tensor]) -> Any:
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    settings = CompileConfig(fullgraph=True, dynamic=False, backend=backend, mode=None)
    settings._compile_all_devices = True
    options = {"attention_mask": mask, "max_new_tokens": 8, "do_sample": False}
    text = model.generate(tokens, **options, cache_implementation="static", compile_config=settings)
    assert len(graphs) == 1
    assert torch.equal(text, model.generate(tokens, **options))


@pytest.mark.parametrize("boundaries", [[0, 5, 12], [0, 4, 8, 13], [0, 4, -2, 12]])
def test_boundaries_that_position_ids_contradict_are_refused(boundaries: list[int]) -> None:
    model, positions = set_pattern(tiny("llama", use_cache=False), PATTERN), (torch.arange(12) % 4)[None]
    with pytest.raises(ValueError, match=r"cu_seq_lens_q must say .* and \[0, 4, 8, 12\]"):
        model(draw(1, 12), position_ids=positions, cu_seq_lens_q=torch.tensor(boundaries, dtype=torch.int32))


@torch.no_grad()
@pytest.mark.parametrize("has_boundaries", [False, True])
def test_compiled_layers_read_the_documents_of_a_mask_made_outside(has_boundaries: bool) -> None:
    """As accelerate compiles them with ``use_regional_compilation``."""
    model, tokens = set_pattern(tiny("llama", num_hidden_layers=1), PATTERN), draw(2 - has_boundaries, 16)
    lengths = (4, 5, 1, 6)
    packed = {"position_ids": torch.cat([torch.arange(length) for length in lengths])[None], "use_cache": False}
    if has_boundaries:
        packed["cu_seq_lens_q"] = torch.tensor([0, 4, 9, 10, 16], dtype=torch.int32)
    alone = torch.cat([model(part).logits for part in tokens.split(lengths, dim=1)], dim=1)
    torch._dynamo.reset()
    for layer in model.model.layers:
        layer.compile(backend="eager", fullgraph=True)
    close(model(tokens, **packed).logits, alone)
    if has_boundaries:
        with pytest.raises(RuntimeError, match="cu_seq_lens_q must say what position_ids say"):
            model(tokens, **packed | {"cu_seq_lens_q": torch.tensor([0, 4, 9, 11, 16], dtype=torch.int32)})


def test_a_model_whose_forward_is_called_directly_is_checked_at_its_first_call(tmp_path: Path) -> None:
    model = set_pattern(tiny("llama", "sdpa"), PATTERN)
    model.save_pretrained(tmp_path)
    with torch.no_grad():
        expected = model.model(draw(2, 30)).last_hidden_state
        for kind in (AutoModel, AutoModelForCausalLM):
            loaded = kind.from_pretrained(tmp_path)
            out = loaded.forward(draw(2, 30), output_hidden_states=True).hidden_states[-1]
            torch.testing.assert_close(out.double(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["llama", "bert"])
def test_padding_between_real_tokens_is_as_if_it_were_not_there(name: str) -> None:
    """As prefix and prompt tuning make it of rows that are padded on the left."""
    model, tokens = set_pattern(tiny(name, num_hidden_layers=1, attention_dropout=0.0), PATTERN), draw(3, 20)
    mask = torch.ones_like(tokens)
    mask[0, 5:9] = mask[1, 3] = mask[1, 7:9] = mask[2, 15:] = 0
    positions = (mask.cumsum(dim=1) - 1).clamp(min=0)
    compiled = [torch.compile(model, fullgraph=True, backend="aot_eager")] if name == "llama" else []
    for call in (model, *compiled):
        out = call(tokens, attention_mask=mask, position_ids=positions).logits
        for row, real in enumerate(mask.bool()):
            close(out[row, real], model(tokens[row : row + 1, real]).logits[0])


def test_a_prefix_of_keys_and_a_padded_prompt_are_those_of_sdpa() -> None:
    model, tokens = tiny("llama", "sdpa"), draw(3, 14)
    mask = torch.ones(3, 19, dtype=torch.int64)
    mask[0, 5:11] = mask[1, 5:7] = 0
    prefix = torch.randn(2, 2, 1, 3, 5, 8, dtype=torch.float64, requires_grad=True)

    def logits(model: Any) -> tuple[Tensor, Tensor]:
        cache = DynamicCache(config=model.config)
        for layer, (key, value) in enumerate(prefix.expand(2, 2, 3, 3, 5, 8)):
            cache.update(key, value, layer)
        out = model(tokens, attention_mask=mask, past_key_values=cache).logits[mask[:, 5:].bool()]
        return out, torch.autograd.grad(out.sin().sum(), prefix)[0]

    expected = logits(model)
    for found, given in zip(logits(set_pattern(model, DENSE)), expected, strict=True):
        close(found, given)


@pytest.mark.parametrize("is_padded", [False, True])
def test_an_exported_program_is_saved_and_loaded(is_padded: bool) -> None:
    model, tokens = set_pattern(tiny("llama", num_hidden_layers=1, use_cache=False), PATTERN), draw(2, 40)
    mask = torch.ones_like(tokens)
    mask[0, :7] = 0
    options = {"attention_mask": mask} if is_padded else {}
    file = io.BytesIO()
    torch.export.save(torch.export.export(model, (tokens,), options), file)
    file.seek(0)
    out = torch.export.load(file).module()(tokens, **options).logits
    close(out[mask.bool()], model(tokens, **options).logits[mask.bool()])


def test_a_layer_that_computes_attention_itself_is_not_exported() -> None:
    model = tiny("llama", dilated_attention={"pattern": PATTERN.spec}, use_cache=False)
    model.model.layers[1].self_attn.forward = lambda hidden_states, **_: (hidden_states, None)
    with pytest.raises(NotImplementedError, match=r'"model.layers.1.self_attn"\) did not come to the attention'):
        torch.export.export(model, (draw(1, 12),))


def own_code() -> Any:
    """A model of a layer that computes attention itself."""
    sizes = {"vocab_size": 31, "n_embd": 24, "n_layer": 1, "n_head": 4, "rotary_dim": 4, "use_cache": False}
    torch.manual_seed(0)
    return set_pattern(GPTJForCausalLM(GPTJConfig(**sizes)).double().eval(), PATTERN)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # PyTorch, of the tensor at the break
def test_a_layer_s_own_code_runs_between_graphs_with_equal_gradients() -> None:
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    model, tokens = own_code(), draw(2, 40)
    compiled = torch.compile(model, backend=counter)
    results = []
    for call in (model, compiled):
        out = call(tokens).logits
        results.append((out, *torch.autograd.grad(out.sin().sum(), list(model.parameters()))))
    assert counter.frame_count > 1
    for one, other in zip(*results, strict=True):
        close(one, other)
    with pytest.raises(Unsupported, match=r"a layer that computes attention itself runs outside .* without fullgraph"):
        torch.compile(model, fullgraph=True, backend="eager")(tokens)


def test_a_layer_s_own_code_is_exported() -> None:
    model, tokens = own_code(), draw(2, 40)
    exported = torch.export.export(model, (tokens,)).module()
    assert torch.equal(exported(tokens).logits, model(tokens).logits)


class Logits(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Any:
        return self.model(tokens).logits


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")
def test_a_trace_gives_what_the_model_gives() -> None:
    # PyTorch reads every attribute of the model, deprecated ones of transformers among them.
    sizes = {"vocab_size": 31, "hidden_size": 48, "intermediate_size": 53, "num_hidden_layers": 1}
    config = LlamaConfig(**sizes, num_attention_heads=6, num_key_value_heads=3, use_cache=False)
    model = Logits(set_pattern(LlamaForCausalLM(config).eval(), PATTERN))
    traced = torch.jit.trace(model, (draw(2, 40),), check_trace=False)
    assert torch.equal(traced(draw(2, 40, seed=1)), model(draw(2, 40, seed=1)))


def test_meta_tensors_have_the_shapes_of_the_results() -> None:
    model, tokens = set_pattern(tiny("llama"), PATTERN).to("meta"), draw(2, 40).to("meta")
    assert model(tokens).logits.shape == (2, 40, 31)
    for given in (tokens, tokens[:, :1]):
        assert model(given, attention_mask=torch.ones_like(given)).logits.shape == (*given.shape, 31)
    query = torch.empty(1, 7, 4, 8, device="meta", requires_grad=True)
    out = attend(query, query, query, PATTERN)
    assert out.is_meta
    assert torch.autograd.grad(out.sum(), query)[0].shape == query.shape


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(24, 3, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        out, _ = self.attention(x, x, x, need_weights=False)
        return x + out


class QkvBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.qkv, self.proj = 3, nn.Linear(24, 72), nn.Linear(24, 24)

    def forward(self, x: Tensor) -> Tensor:
        batch, rows, width = x.shape
        q, k, v = self.qkv(x).reshape(batch, rows, 3, 3, 8).permute(2, 0, 3, 1, 4)
        out = nn.functional.scaled_dot_product_attention(q, k, v)
        return self.proj(out.transpose(1, 2).reshape(batch, rows, width))


@pytest.mark.parametrize("block", [Block, QkvBlock])
def test_replaced_attention_is_one_node_of_a_symbolic_trace(block: type[nn.Module]) -> None:
    model, x = nn.Sequential(block(), nn.LayerNorm(24)).eval(), torch.randn(2, 11, 24)
    replace_attention(model, PATTERN)
    traced = torch.fx.symbolic_trace(model)
    assert [node.op for node in traced.graph.nodes if "attention" in str(node.target) or node.target == "0"] == [
        "call_module"
    ]
    assert torch.equal(traced(x), model(x))
