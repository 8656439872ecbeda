"""What torchao does: weights in 8 bits and what they make of a model, and linear layers that train in float8."""

from __future__ import annotations

import copy
import importlib.util
import json
from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch import nn

from dilated_attention_pytorch.cli import main
from dilated_attention_pytorch.models import LongNetConfig, LongNetForCausalLM
from dilated_attention_pytorch.training import RunError, eight_bit, train
from dilated_attention_pytorch.training.autocast import autocast
from dilated_attention_pytorch.training.eight_bit import (
    Weights,
    convert_to_float8,
    import_torchao,
    make_small,
    weight_bytes,
)
from dilated_attention_pytorch.training.model_evaluation import EvalSettings, evaluate_model
from training.runs import quiet, tiny_settings, write_texts

KINDS: tuple[Weights, ...] = ("int8", "float8")
pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("torchao") is None, reason="the extra torchao is not installed: make quantized"
)


@pytest.fixture(scope="module", autouse=True)
def torchao() -> None:
    """Import it, with its warnings about other machines."""
    import_torchao("a test")


def matrix() -> torch.Tensor:
    """Rows of all sizes, one of zeros, one with a single weight, one with its largest weight twice."""
    torch.manual_seed(0)
    rows = torch.randn(97, 131) * torch.logspace(-6, 4, 97)[:, None]
    rows[3], rows[4], rows[5, :2] = 0, 0, torch.tensor([7.0, -7.0])
    rows[4, 60] = -3.0
    return rows


def test_int8_is_off_by_half_a_step_at_most() -> None:
    """max |w| / s = 127.5 becomes 127, and its negative -128: half a step away, as the worst of the others."""
    rows = matrix()
    step = (rows.abs().amax(dim=1, keepdim=True) / 127.5).clamp(min=2.0**-23)
    small = eight_bit._small(rows, "int8")
    assert small.qdata.dtype == torch.int8
    away = (small.dequantize() - rows).abs()
    # Products with the scale are rounded to float32.
    assert bool((away <= step / 2 + rows.abs() * 2.0**-22).all())
    assert bool((away[40:].amax(dim=1) / step[40:, 0] > 0.4).all())  # and no nearer than that: these are 8 bits


def test_float8_is_off_by_a_sixteenth_or_half_of_its_smallest_step_at_most() -> None:
    rows = matrix()
    scale = rows.abs().amax(dim=1, keepdim=True) / 448
    small = eight_bit._small(rows, "float8")
    assert small.qdata.dtype == torch.float8_e4m3fn
    away = (small.dequantize() - rows).abs()
    assert bool((away <= torch.maximum(rows.abs() / 16, scale * 2.0**-10) * (1 + 1e-5)).all())


@pytest.mark.parametrize("kind", KINDS)
def test_a_product_is_that_with_the_weights_that_8_bits_stand_for(kind: Weights) -> None:
    layer = nn.Linear(131, 97)
    layer.weight = nn.Parameter(matrix())
    x = torch.randn(5, 131)
    small = copy.deepcopy(layer)
    make_small(small, kind)
    seen = small.weight.dequantize()
    expected = nn.functional.linear(x.double(), seen.double(), layer.bias.double())
    # 131 sums of float32.
    budget = 131 * 2.0**-23 * nn.functional.linear(x.abs(), seen.abs())
    assert bool(((small(x) - expected).abs() <= budget + 1e-6).all())
    # And so it is off by what the weights are off, times what they are multiplied with.
    error = nn.functional.linear(x.abs(), (seen - layer.weight).abs())
    assert bool(((small(x) - layer(x)).abs() <= error + 2 * budget + 1e-6).all())


@pytest.mark.parametrize("tied", [True, False])
def test_matrices_of_layers_alone_are_made_small_and_their_bytes_are_counted(tied: bool) -> None:
    settings = tiny_settings(Path("unused"))
    settings.model.tie_embeddings = tied
    model = LongNetForCausalLM.from_longnet_config(settings.model)
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    make_small(model, "int8")
    small = {name for name, weight in model.named_parameters() if type(weight.data) is not torch.Tensor}
    assert small == {name for name, weight in before.items() if weight.dim() == 2 and ".blocks." in name}
    kept = sum(4 * weight.numel() for name, weight in before.items() if name not in small)
    # An integer a weight; for each row a scale in float32 and a zero point in int8.
    integers = sum(before[name].numel() + 5 * len(before[name]) for name in small)
    assert weight_bytes(model) == kept + integers
    assert weight_bytes(LongNetForCausalLM.from_longnet_config(settings.model)) == sum(
        4 * weight.numel() for weight in before.values()
    )


def test_a_run_is_measured_and_sampled_from_in_8_bits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], figure: object
) -> None:
    run = train(tiny_settings(write_texts(tmp_path / "texts"), precision="float32"), tmp_path / "run", quiet()).run
    results = {}
    for kind in ("stored", *KINDS):
        asked = EvalSettings(
            context_lengths=(128,), windows=2, recall_texts=0, precision="float32", device="cpu", weight_format=kind
        )
        file = evaluate_model(str(run), asked, tmp_path / f"{kind}.json", Console(quiet=True))
        results[kind] = json.loads(file.read_text())
    bits = {kind: result["bits_per_byte"]["128"] for kind, result in results.items()}
    # Of a model that knows little: what is off in the logits is a hundredth of them in int8.
    assert 0 < abs(bits["int8"] - bits["stored"]) < 0.005
    assert 0 < abs(bits["float8"] - bits["stored"]) < 0.05
    sizes = {kind: result["weight_bytes"] for kind, result in results.items()}
    assert sizes["int8"] < sizes["stored"]
    assert results["int8"]["weights_as"] == "int8"
    for kind in KINDS:
        main(
            [
                "generate",
                str(run),
                "--prompt",
                "def ",
                "--max-new-tokens",
                "5",
                "--weight-format",
                kind,
                "--device",
                "cpu",
            ]
        )
        assert len(capsys.readouterr().out) > len("def ")


def one_block(embed_dim: int = 1024, ffn_dim: int = 4352) -> LongNetForCausalLM:
    """A feed-forward that is large enough for float8, and an attention that is not."""
    torch.manual_seed(0)
    config = LongNetConfig(
        embed_dim=embed_dim,
        num_layers=1,
        num_heads=2,
        segment_lengths=[16],
        dilation_rates=[1],
        ffn_dim=ffn_dim,
        tie_embeddings=False,
        vocab_size=2048,
    )
    return LongNetForCausalLM.from_longnet_config(config)


def test_large_linear_layers_alone_are_converted_to_float8_and_keep_their_weights_and_names() -> None:
    model = one_block()
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    names = convert_to_float8(model)
    assert names == ["model.blocks.0.feed_forward.in_proj", "model.blocks.0.feed_forward.out_proj"]
    assert type(model.model.head) is nn.Linear
    assert type(model.model.blocks[0].attention.out_proj) is nn.Linear
    after = dict(model.named_parameters())
    assert after.keys() == before.keys() == model.state_dict().keys()
    for name, weight in before.items():
        assert after[name].dtype == torch.float32
        assert torch.equal(after[name], weight)


def test_a_step_in_emulated_float8_is_off_by_its_rounding() -> None:
    """Inputs and weights with 3 bits of mantissa, gradients with 2: a sixteenth and an eighth of each at most."""
    model = one_block()
    tokens = torch.randint(2048, (1, 32))
    gradients = []
    for converted in (False, True):
        if converted:
            convert_to_float8(model, emulate=True)
        model.zero_grad()
        with autocast("float8", "cpu"):
            loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        gradients.append(torch.cat([weight.grad.flatten() for weight in model.parameters() if weight.grad is not None]))
    off = float((gradients[1] - gradients[0]).norm() / gradients[0].norm())
    assert 2.0**-8 < off < 2.0**-3


def test_a_model_with_small_layers_is_refused() -> None:
    with pytest.raises(RunError, match="no layer of this model is large enough to be faster in it; take --precision"):
        convert_to_float8(one_block(64, 128))
