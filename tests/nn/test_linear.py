"""Linear layers by either route: the same numbers, and tools that know torch.nn.Linear."""

from __future__ import annotations

import copy
import io
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.autograd import forward_ad
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from dilated_attention_pytorch.folders import cache_folder
from dilated_attention_pytorch.integrations import adopt
from dilated_attention_pytorch.kernels.measured_choice import MeasuredChoice
from dilated_attention_pytorch.models import LongNetConfig, LongNetLM
from dilated_attention_pytorch.nn import Linear, linear
from dilated_attention_pytorch.nn.linear import project
from dilated_attention_pytorch.slides import SlideEncoder, SlideEncoderConfig

ROWS, WIDTH_IN, WIDTH_OUT = 1031, 257, 269


@pytest.fixture(autouse=True)
def _by_convolution(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    torch.set_num_threads(2)  # with one thread PyTorch computes a 1 x 1 convolution of one image without oneDNN
    monkeypatch.setenv(linear.VARIABLE, "convolution")
    linear.linear_choice.cache_clear()
    yield
    linear.linear_choice.cache_clear()


@pytest.fixture
def convolutions(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shapes of the inputs that were convolved."""
    shapes: list[tuple[int, ...]] = []

    def counted(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        shapes.append(tuple(x.shape))
        return convolution(x, weight, bias)

    convolution = linear.ROUTES["convolution"]
    monkeypatch.setitem(linear.ROUTES, "convolution", counted)
    return shapes


def layer_and_rows(*, bias: bool = True, batch: int = 1) -> tuple[Linear, Tensor]:
    return Linear(WIDTH_IN, WIDTH_OUT, bias=bias), torch.randn(batch, ROWS, WIDTH_IN)


def assert_close(found: Tensor, exact: Tensor) -> None:
    """Within the error of sums of 1,031 float32 products at most, rounded one after the other."""
    assert found.shape == exact.shape
    found, exact = found.detach(), exact.detach()
    assert float((found - exact).abs().max()) <= ROWS * 2**-24 * float(exact.abs().max())


def assert_near(found: Tensor, expected: Tensor) -> None:
    """Equal up to the rounding of several layers, which is far below what another product would change."""
    found, expected = found.detach(), expected.detach()
    assert float((found - expected).abs().max() / expected.abs().max()) < 1e-5


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("batch", [1, 2])
def test_a_convolution_has_the_output_and_the_gradients_of_the_product(
    bias: bool, batch: int, convolutions: list[tuple[int, ...]]
) -> None:
    layer, x = layer_and_rows(bias=bias, batch=batch)
    grad = torch.randn(batch, ROWS, WIDTH_OUT)
    leaves = [x.requires_grad_(), *layer.parameters()]
    out = layer(x)
    assert convolutions == [tuple(x.shape)]
    assert out.is_contiguous()
    grads = torch.autograd.grad(out, leaves, grad)
    doubles = [leaf.detach().double().requires_grad_() for leaf in leaves]
    exact = functional.linear(*doubles)
    assert_close(out, exact)
    for found, expected in zip(grads, torch.autograd.grad(exact, doubles, grad.double()), strict=True):
        assert found.is_contiguous()
        assert_close(found, expected)


def test_second_derivatives_and_batched_gradients_are_those_of_the_product() -> None:
    layer, x = layer_and_rows()
    x.requires_grad_()
    leaves = [x, *layer.parameters()]

    def seconds(call: Callable[[Tensor], Tensor]) -> tuple[Tensor, ...]:
        (first,) = torch.autograd.grad(call(x).square().mean(), x, create_graph=True)
        return torch.autograd.grad(first.square().sum(), leaves)

    def plain(x: Tensor) -> Tensor:
        return functional.linear(x, layer.weight, layer.bias)

    for found, expected in zip(seconds(layer), seconds(plain), strict=True):
        assert_close(found, expected)
    grads = torch.randn(3, 1, ROWS, WIDTH_OUT)
    batched = torch.autograd.grad(layer(x), leaves, grads, is_grads_batched=True)
    for found, expected in zip(
        batched, torch.autograd.grad(plain(x), leaves, grads, is_grads_batched=True), strict=True
    ):
        assert_close(found, expected)


@pytest.mark.parametrize("state", [torch.no_grad, torch.inference_mode, nullcontext])
def test_two_calls_have_the_same_bits_recomputed_or_not(state: Callable[[], AbstractContextManager[object]]) -> None:
    layer, x = layer_and_rows()
    with state():
        assert torch.equal(layer(x), layer(x))
    once, again = layer(x.requires_grad_()), checkpoint(layer, x, use_reentrant=False)
    assert torch.equal(*(torch.autograd.grad(out.sin().sum(), x)[0] for out in (once, again)))


@contextmanager
def forward_mode() -> Iterator[None]:
    with forward_ad.dual_level():
        yield


@contextmanager
def less_exact_products() -> Iterator[None]:
    torch.backends.mkldnn.matmul.fp32_precision = "bf16"  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.backends.mkldnn.matmul.fp32_precision = "none"  # type: ignore[assignment]


@contextmanager
def without_one_dnn() -> Iterator[None]:
    torch.backends.mkldnn.set_flags(_enabled=False, _fp32_precision=None)
    try:
        yield
    finally:
        torch.backends.mkldnn.set_flags(_enabled=True, _fp32_precision=None)


@contextmanager
def replaced_product() -> Iterator[None]:
    """As DeepSpeed's stage 3 does."""
    own = functional.linear
    functional.linear = lambda *operands: own(*operands)
    try:
        yield
    finally:
        functional.linear = own


class Marked(Tensor):
    """A subclass of tensors."""


@pytest.mark.parametrize(
    "what",
    [
        "few rows",
        "narrow",
        "rows apart",
        "float64",
        "bfloat16",
        "meta",
        "subclass",
        "autocast",
        "forward mode",
        "less exact",
        "without oneDNN",
        "replaced",
        "vmap",
        "functionalize",
        "fake",
        "flops",
    ],
)
def test_what_is_not_large_plain_and_float32_is_no_convolution(what: str, convolutions: list[tuple[int, ...]]) -> None:
    from torch._subclasses import FakeTensorMode
    from torch.utils.flop_counter import FlopCounterMode

    layer, x = layer_and_rows()
    call: Callable[[Tensor], Tensor] = layer
    context: AbstractContextManager[object] = nullcontext()
    if what == "few rows":
        x = x[:, : linear._FEWEST_ROWS - 1]
    elif what == "narrow":
        layer = call = Linear(WIDTH_IN, 255)
    elif what == "rows apart":
        x = torch.randn(1, ROWS, 2 * WIDTH_IN)[..., ::2]
    elif what in ("float64", "bfloat16"):
        dtype = getattr(torch, what)
        layer, x = layer.to(dtype), x.to(dtype)
    elif what == "meta":
        layer, x = layer.to("meta"), x.to("meta")
    elif what == "subclass":
        x = x.as_subclass(Marked)
    elif what == "vmap":
        call = torch.func.vmap(layer)
    elif what == "functionalize":
        call = torch.func.functionalize(layer)
    elif what == "fake":
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        x, context = mode.from_tensor(x), mode
    else:
        context = {
            "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
            "forward mode": forward_mode,
            "less exact": less_exact_products,
            "without oneDNN": without_one_dnn,
            "replaced": replaced_product,
            "flops": lambda: FlopCounterMode(display=False),
        }[what]()
    with context:
        out = call(x)
    assert out.shape == (*x.shape[:-1], layer.out_features)
    assert not convolutions


def test_a_wrong_width_is_pytorchs_error(convolutions: list[tuple[int, ...]]) -> None:
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        layer_and_rows()[0](torch.randn(1, 2 * ROWS, WIDTH_IN + 1))
    assert not convolutions


def test_a_compiled_and_an_exported_layer_are_products(convolutions: list[tuple[int, ...]]) -> None:
    layer, x = layer_and_rows()
    exported = torch.export.export(layer, (x,), dynamic_shapes=({1: torch.export.Dim("rows", min=2)},))
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    for rows in (x, x[:, :7]):
        for call in (exported.module(), compiled):
            assert torch.equal(call(rows), functional.linear(rows, layer.weight, layer.bias))
    assert not convolutions


def test_state_dicts_copies_and_representation_are_those_of_linear() -> None:
    layer, x = layer_and_rows()
    plain = nn.Linear(WIDTH_IN, WIDTH_OUT)
    plain.load_state_dict(layer.state_dict())
    assert repr(plain) == repr(layer)
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    for other in (copy.deepcopy(layer), torch.load(file, weights_only=False)):
        assert torch.equal(other(x), layer(x))
    assert_close(layer(x), plain(x))


def test_a_plain_layer_takes_the_route_and_keeps_its_class(convolutions: list[tuple[int, ...]]) -> None:
    layer, x = nn.Linear(WIDTH_IN, WIDTH_OUT), torch.randn(1, ROWS, WIDTH_IN)
    assert_close(project(layer, x), layer(x))
    assert convolutions == [tuple(x.shape)]


def hook(layer: nn.Module) -> AbstractContextManager[object]:
    return layer.register_forward_hook(lambda module, args, out: out + 1.0)


def backward_hook(layer: nn.Module) -> AbstractContextManager[object]:
    return layer.register_full_backward_hook(lambda module, grad_in, grad_out: (grad_in[0] + 1.0,))


def global_hook(layer: nn.Module) -> AbstractContextManager[object]:
    return nn.modules.module.register_module_forward_hook(lambda module, args, out: out + 1.0)


@contextmanager
def other_forward(layer: nn.Module) -> Iterator[None]:
    """As accelerate's hooks have it."""
    forward = layer.forward
    layer.forward = lambda x: forward(x) + 1.0  # type: ignore[method-assign]
    yield


@contextmanager
def parametrized(layer: nn.Module) -> Iterator[None]:
    class Doubled(nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            return 2.0 * weight

    nn.utils.parametrize.register_parametrization(layer, "weight", Doubled())
    yield


@pytest.mark.parametrize("change", [hook, backward_hook, global_hook, other_forward, parametrized])
def test_what_is_put_on_a_plain_layer_acts(
    change: Callable[[nn.Module], AbstractContextManager[object]], convolutions: list[tuple[int, ...]]
) -> None:
    layer, x = nn.Linear(WIDTH_IN, WIDTH_OUT), torch.randn(1, ROWS, WIDTH_IN, requires_grad=True)
    with change(layer):
        outs = [project(layer, x), layer(x)]
    assert not convolutions
    assert torch.equal(*outs)
    assert torch.equal(*(torch.autograd.grad(out.sum(), x)[0] for out in outs))


@pytest.mark.slow  # PEFT takes seconds to import; tests of models have adapters in every run
def test_a_lora_adapter_reaches_both_and_merges(convolutions: list[tuple[int, ...]]) -> None:
    from peft import LoraConfig, get_peft_model

    x = torch.randn(1, ROWS, WIDTH_IN)
    for layer in (Linear(WIDTH_IN, WIDTH_OUT), nn.Linear(WIDTH_IN, WIDTH_OUT)):
        convolutions.clear()
        model = get_peft_model(nn.Sequential(layer), LoraConfig(r=3, target_modules=["0"], init_lora_weights=False))
        out = project(model.base_model.model[0], x)
        out.sin().sum().backward()
        assert all(p.grad is not None and p.grad.abs().sum() > 0 for n, p in model.named_parameters() if "lora" in n)
        assert_close(out, project(model.merge_and_unload()[0], x))
        assert len(convolutions) == (2 if type(layer) is Linear else 1)


def test_bitsandbytes_and_dynamic_quantisation_reach_the_layers_of_a_model() -> None:
    import bitsandbytes
    from transformers import BitsAndBytesConfig
    from transformers.integrations import replace_with_bnb_linear

    config = LongNetConfig(
        vocab_size=97, embed_dim=32, num_heads=4, num_layers=1, segment_lengths=(16,), dilation_rates=(1,)
    )
    options = BitsAndBytesConfig(load_in_4bit=True)
    kinds: dict[type, nn.Module] = {
        bitsandbytes.nn.Linear4bit: replace_with_bnb_linear(
            LongNetLM(config), modules_to_not_convert=[], quantization_config=options
        )
    }
    with warnings.catch_warnings(action="ignore"):
        kinds[torch.ao.nn.quantized.dynamic.Linear] = torch.ao.quantization.quantize_dynamic(LongNetLM(config))
    for kind, model in kinds.items():
        for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
            assert isinstance(model.get_submodule(f"blocks.0.attention.{name}"), kind)
        for name in ("in_proj", "out_proj"):
            assert isinstance(model.get_submodule(f"blocks.0.feed_forward.{name}"), kind)


def test_the_models_of_the_package_take_the_route(
    convolutions: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {"embed_dim": 256, "num_layers": 2, "num_heads": 4, "ffn_dim": 260, "dilation_rates": (1, 4)}
    language = LongNetLM(LongNetConfig(vocab_size=263, segment_lengths=(64, 256), **sizes))
    slides = SlideEncoder(SlideEncoderConfig(feature_dim=259, segment_lengths=(64, 256), **sizes)).eval()
    tokens, features = torch.randint(263, (1, ROWS)), torch.randn(1, ROWS, 259)
    coordinates = torch.stack([torch.arange(ROWS) // 30, torch.arange(ROWS) % 30], dim=-1)[None]
    for call, number in (
        (lambda: language(tokens), 6 * 2 + 1),
        (lambda: slides(features, coordinates, tile_size=1).layers, 6 * 2 + 1),
    ):
        convolutions.clear()
        out = call()
        assert len(convolutions) == number
        with replaced_product():
            expected = call()
        assert len(convolutions) == number
        assert_near(out, expected)


def test_adopted_models_take_the_route_where_that_is_asked(convolutions: list[tuple[int, ...]]) -> None:
    def model() -> nn.Module:
        torch.manual_seed(0)
        layer = nn.Module()
        layer.args = SimpleNamespace(segment_length=[64, 256], dilated_ratio=[1, 4])
        layer.embed_dim, layer.num_heads = 260, 4  # type: ignore[assignment]
        for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
            layer.add_module(name, nn.Linear(260, 260))
        return nn.ModuleDict({"self_attn": layer, "fc1": nn.Linear(260, 300)})

    plain, fast = adopt(model()), adopt(model(), fast_linear=True)
    x = torch.randn(1, ROWS, 260)
    expected, out = (one["fc1"](one["self_attn"](x, x, x)[0]) for one in (plain, fast))
    assert len(convolutions) == 5
    assert_near(out, expected)
    assert plain.state_dict().keys() == fast.state_dict().keys()


def test_split_weights_have_the_gradients_of_whole_ones(convolutions: list[tuple[int, ...]]) -> None:
    class Layers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.plain, self.own = nn.Linear(WIDTH_IN, WIDTH_OUT), Linear(WIDTH_OUT, WIDTH_IN)

        def forward(self, x: Tensor) -> Tensor:
            return self.own(project(self.plain, x).relu())

    whole, x = Layers(), torch.randn(1, ROWS, WIDTH_IN)
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        mesh = distributed.init_device_mesh("cpu", (1,))
        by_columns = parallelize_module(
            copy.deepcopy(whole), mesh, {"plain": ColwiseParallel(), "own": RowwiseParallel()}
        )
        split = fully_shard(copy.deepcopy(whole), mesh=mesh, reshard_after_forward=True)
        for model, number in ((whole, 2), (split, 2), (by_columns, 0)):
            convolutions.clear()
            model(x).square().mean().backward()
            assert len(convolutions) == number
            for parameter, expected in zip(model.parameters(), whole.parameters(), strict=True):
                assert isinstance(parameter.grad, Tensor)
                assert isinstance(expected.grad, Tensor)
                grad = parameter.grad.full_tensor() if isinstance(parameter.grad, DTensor) else parameter.grad
                assert_close(grad, expected.grad)
    finally:
        distributed.destroy_process_group()


def test_measuring_draws_no_random_number_and_leaves_no_graph(
    own_cache: None, monkeypatch: pytest.MonkeyPatch, convolutions: list[tuple[int, ...]]
) -> None:
    monkeypatch.delenv(linear.VARIABLE)
    layer, x = layer_and_rows()
    before, saved = torch.get_rng_state(), []
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor.shape) or tensor, lambda x: x)
    with hooks:
        layer(x)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(WIDTH_IN in shape or WIDTH_OUT in shape for shape in saved)
    choice = linear.linear_choice(torch.get_num_threads())
    assert choice.name in ("linear", "convolution")
    assert choice.rates.keys() == {"linear", "convolution"}
    assert min(choice.rates.values()) > 0  # both compute, and agree
    assert convolutions.count(tuple(x.shape)) == (choice.name == "convolution")
    linear.linear_choice.cache_clear()
    assert linear.linear_choice(torch.get_num_threads()) == choice  # kept
    (file,) = cache_folder().glob("choice-linear-*.json")
    file.unlink()
    linear.linear_choice.cache_clear()
    with torch.inference_mode():
        layer(x)
    assert file.exists()


def test_the_variable_names_the_route(monkeypatch: pytest.MonkeyPatch) -> None:
    assert linear.linear_choice(2) == MeasuredChoice("convolution", {})
    monkeypatch.setenv(linear.VARIABLE, "fast")
    linear.linear_choice.cache_clear()
    layer, x = layer_and_rows()
    with pytest.raises(ValueError, match="DILATED_ATTENTION_LINEAR must be linear or convolution, got 'fast'"):
        layer(x)
    monkeypatch.setenv(linear.VARIABLE, "linear")
    assert torch.equal(layer(x), functional.linear(x, layer.weight, layer.bias))
