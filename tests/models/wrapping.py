"""All exported modules with parameters, and the ways in which other libraries move, build or wrap them.

A way takes a :class:`Case` and returns ``(found, expected)``: what the moved module computes, and what it must.
"""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils import prune

from dilated_attention_pytorch import parallel
from dilated_attention_pytorch.integrations import MultiheadReplacement
from dilated_attention_pytorch.models import (
    LongNetCausalLMConfig,
    LongNetConfig,
    LongNetEncoder,
    LongNetEncoderDecoder,
    LongNetForCausalLM,
    LongNetLM,
)
from dilated_attention_pytorch.nn import (
    AdaptiveBlockAttention,
    DynamicMultiheadDilatedAttention,
    MultiheadDilatedAttention,
    MultiheadPatternAttention,
)
from dilated_attention_pytorch.patterns import DilatedPattern, local_window
from dilated_attention_pytorch.slides import SlideEncoder, SlideEncoderConfig

ROWS = 17
PATTERN = DilatedPattern([8, 16], [1, 2])


class Case(NamedTuple):
    """A module on a device, and a call of it."""

    make: Callable[[str], nn.Module]
    call: Callable[[nn.Module], Tensor]

    def drawn(self) -> nn.Module:
        """With weights that all matter, in eval mode."""
        module = self.make("cpu")
        with torch.no_grad():
            for parameter in module.parameters():
                nn.init.normal_(parameter, std=0.3)
        return module.eval()


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(7))


def config(**changes: Any) -> LongNetConfig:
    sizes: dict[str, Any] = {"vocab_size": 29, "embed_dim": 16, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2}
    return LongNetConfig(**sizes, ffn_dim=24, segment_lengths=[8, 16], dilation_rates=[1, 2], **changes)


def causal_lm(tied: bool) -> Case:
    def make(device: str) -> nn.Module:
        with torch.device(device):
            return LongNetForCausalLM(LongNetCausalLMConfig.from_longnet_config(config(tie_embeddings=tied)))

    return Case(make, lambda module: module(IDS).logits)


def slides(pooling: Any) -> Case:
    sizes: dict[str, Any] = {"feature_dim": 12, "embed_dim": 16, "num_layers": 2, "num_heads": 4, "ffn_dim": 24}
    of_slides = SlideEncoderConfig(
        **sizes, grid_size=20, segment_lengths=(8, 16), dilation_rates=(1, 2), pooling=pooling
    )
    features, corners = draw(2, ROWS, 12), 256 * torch.arange(4 * ROWS).reshape(2, ROWS, 2).remainder(20)
    return Case(
        lambda device: SlideEncoder(of_slides, device=device), lambda module: module(features, corners).layers.flatten()
    )


def replacement(device: str) -> nn.Module:
    return MultiheadReplacement(nn.MultiheadAttention(16, 4, batch_first=True, device=device), PATTERN)


IDS = torch.arange(2 * ROWS).reshape(2, ROWS) % 29
X, NARROW = draw(2, ROWS, 16), draw(2, ROWS, 12)
HEADS = draw(2, ROWS, 4, 8)
SELF = Case(lambda device: nn.Identity(), lambda module: module(X, X, X)[0]).call

CASES: dict[str, Case] = {
    "MultiheadPatternAttention": Case(
        lambda device: MultiheadPatternAttention(16, 4, PATTERN, sub_layernorm=True, device=device), SELF
    ),
    "MultiheadDilatedAttention": Case(
        lambda device: MultiheadDilatedAttention(16, 4, [8, 16], [1, 2], kdim=12, vdim=12, device=device),
        lambda module: module(X, NARROW, NARROW)[0],
    ),
    "DynamicMultiheadDilatedAttention": Case(
        lambda device: DynamicMultiheadDilatedAttention(16, 4, num_kv_heads=2, device=device), SELF
    ),
    "RingMultiheadDilatedAttention": Case(
        lambda device: parallel.RingMultiheadDilatedAttention(16, 4, [8, 16], [1, 2], device=device), SELF
    ),
    "AdaptiveBlockAttention": Case(
        lambda device: AdaptiveBlockAttention(
            4, 8, block_size=4, blocks_per_query=2, pattern=local_window(2), device=device
        ),
        lambda module: module(HEADS, HEADS, HEADS),
    ),
    "MultiheadReplacement": Case(replacement, SELF),
    "LongNetLM": Case(lambda device: LongNetLM(config(), device=device), lambda module: module(IDS)),
    "LongNetLM, untied": Case(
        lambda device: LongNetLM(config(tie_embeddings=False, shifted_keys=True), device=device),
        lambda module: module(IDS),
    ),
    "LongNetLM, gates and convolved keys": Case(
        lambda device: LongNetLM(config(head_gates=True, key_convolution=3), device=device),
        lambda module: module(IDS),
    ),
    "LongNetForCausalLM": causal_lm(tied=True),
    "LongNetForCausalLM, untied": causal_lm(tied=False),
    "LongNetEncoder": Case(lambda device: LongNetEncoder(config(), device=device), lambda module: module(IDS)),
    "LongNetEncoderDecoder": Case(
        lambda device: LongNetEncoderDecoder(config(), config(), device=device),
        lambda module: module(IDS, IDS[:, :9]),
    ),
    "LongNetEncoderDecoder, untied": Case(
        lambda device: LongNetEncoderDecoder(config(), config(tie_embeddings=False), device=device),
        lambda module: module(IDS, IDS[:, :9]),
    ),
    "SlideEncoder": slides("class"),
    "SlideEncoder, mean": slides("mean"),
}


def owners(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The submodules that hold a parameter themselves."""
    for name, part in module.named_modules():
        if next(part.parameters(recurse=False), None) is not None:
            yield name, part


def silent(case: Case) -> list[str]:
    """Names of the submodules with parameters, of their own or below, whose hooks do not fire in a call."""
    module, heard = case.drawn(), set()
    for name, part in module.named_modules():
        part.register_forward_hook(lambda *_, name=name: heard.add(name))
    with torch.no_grad():
        case.call(module)
    return [
        name
        for name, part in module.named_modules()
        if any(True for _ in part.parameters()) and not isinstance(part, nn.ModuleList) and name not in heard
    ]


def only_in_its_forward(case: Case) -> tuple[Tensor, Tensor]:
    """Every parameter is on meta except while the module that holds it computes."""
    module = case.drawn()
    with torch.no_grad():
        expected = case.call(module)
        for _, part in owners(module):
            real = dict(part._parameters)
            meta = {name: None if weight is None else nn.Parameter(weight.to("meta")) for name, weight in real.items()}
            part._parameters.update(meta)
            part.register_forward_pre_hook(lambda own, _, real=real: own._parameters.update(real))
            part.register_forward_hook(lambda own, _, out, meta=meta: own._parameters.update(meta))
        return case.call(module), expected


def cpu_offload(case: Case) -> tuple[Tensor, Tensor]:
    from accelerate import cpu_offload

    module = case.drawn()
    with torch.no_grad():
        return case.call(module), case.call(cpu_offload(module, execution_device=torch.device("cpu")))


def disk_offload(case: Case) -> tuple[Tensor, Tensor]:
    from accelerate import disk_offload

    module = case.drawn()
    with torch.no_grad(), tempfile.TemporaryDirectory() as folder:
        expected = case.call(module)
        return case.call(disk_offload(module, folder, execution_device=torch.device("cpu"))), expected


def _loaded(case: Case, module: nn.Module, *, assign: bool) -> tuple[Tensor, Tensor]:
    weights = case.drawn()
    module.load_state_dict(weights.state_dict(), assign=assign)
    with torch.no_grad():
        return case.call(module.eval()), case.call(weights)


def empty(module: nn.Module) -> nn.Module:
    """On the CPU, with numbers that nobody wants instead of whatever was in memory, then reset."""
    module = module.to_empty(device="cpu")
    with torch.no_grad():
        for tensor in (*module.parameters(), *module.buffers()):
            tensor.fill_(torch.nan)
    if isinstance(module, LongNetForCausalLM):
        module.model.reset_parameters()
    elif not isinstance(module, MultiheadReplacement):  # it shares the parameters of another module
        module.reset_parameters()
    return module


def _is_tied(module: nn.Module, name: str) -> bool:
    """Whether a submodule's weight is the embedding's."""
    tables = {id(part.weight) for part in module.modules() if isinstance(part, nn.Embedding)}
    return id(module.get_submodule(name).weight) in tables


def meta_and_load(case: Case) -> tuple[Tensor, Tensor]:
    return _loaded(case, empty(case.make("meta")), assign=False)


def meta_and_assign(case: Case) -> tuple[Tensor, Tensor]:
    return _loaded(case, case.make("meta"), assign=True)


def init_empty_weights(case: Case) -> tuple[Tensor, Tensor]:
    from accelerate import init_empty_weights

    with init_empty_weights():
        module = case.make("cpu")
    return _loaded(case, module, assign=True)


def lora_on_all_linear(case: Case) -> tuple[Tensor, Tensor]:
    """Every adapter gets a gradient, and merging them changes nothing.

    Not on a tied output matrix: merged into it, an adapter changes the embedding too, as in every tied model.
    """
    from peft import LoraConfig, get_peft_model
    from peft.tuners.lora import Linear

    module = case.drawn()
    linear = {name for name, part in module.named_modules() if type(part) is nn.Linear}
    if isinstance(module, LongNetForCausalLM):
        linear.discard("model.head")  # PEFT leaves the output matrix out, as in every language model
    tied = [name for name in linear if _is_tied(module, name)]
    linear -= set(tied)
    if not linear:
        raise NotImplementedError("it has no nn.Linear")
    options = LoraConfig(r=2, target_modules="all-linear", exclude_modules=tied or None, init_lora_weights=False)
    adapted = get_peft_model(module, options)
    prefix = "base_model.model."
    reached = {name.removeprefix(prefix) for name, part in adapted.named_modules() if isinstance(part, Linear)}
    assert reached == linear
    out = case.call(adapted)
    out.sin().sum().backward()
    for name, parameter in adapted.named_parameters():
        assert not parameter.requires_grad or (parameter.grad is not None and parameter.grad.abs().sum() > 0), name
    with torch.no_grad():
        return out.detach(), case.call(adapted.merge_and_unload())


def quantize_dynamic(case: Case) -> tuple[Tensor, Tensor]:
    """Against the same module with the quantised weights; activations are quantised as well, to 1 in 127."""
    module = case.drawn()
    with torch.no_grad(), warnings.catch_warnings(action="ignore"):
        small = torch.ao.quantization.quantize_dynamic(module, {nn.Linear})
        for name, part in small.named_modules():
            if isinstance(part, torch.ao.nn.quantized.dynamic.Linear):
                module.get_submodule(name).weight.copy_(part.weight().dequantize())
        exact, found = case.call(module), case.call(small)
    # Products of some hundred numbers rounded to 1 in 127 each, through two layers.
    assert float((found - exact).norm() / exact.norm()) < 0.05
    return exact, exact


def pruned(case: Case) -> tuple[Tensor, Tensor]:
    """Masks act on what they are put on, and stay after the mask is made permanent."""
    module = case.drawn()
    layers = [
        part
        for name, part in module.named_modules()
        if isinstance(part, nn.Linear) and not _is_tied(module, name)  # a mask on one parameter would act on both
    ]
    with torch.no_grad():
        for layer in layers:
            prune.l1_unstructured(layer, "weight", 0.5)
        found = case.call(module)
        for layer in layers:
            prune.remove(layer, "weight")
        return found, case.call(module)


WAYS: dict[str, Callable[[Case], tuple[Tensor, Tensor]]] = {
    "only in its forward": only_in_its_forward,
    "cpu_offload": cpu_offload,
    "disk_offload": disk_offload,
    "meta + load": meta_and_load,
    "meta + assign": meta_and_assign,
    "init_empty_weights": init_empty_weights,
    "LoRA all-linear": lora_on_all_linear,
    "quantize_dynamic": quantize_dynamic,
    "prune": pruned,
}
