"""The output matrix of tied models is the embedding's parameter, whatever moves or loads the model."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from dilated_attention_pytorch.models import (
    LongNetCausalLMConfig,
    LongNetEncoderDecoder,
    LongNetForCausalLM,
    LongNetLM,
)
from dilated_attention_pytorch.nn import MultiheadPatternAttention
from models.wrapping import IDS, config

CONFIG = config()


def on_meta() -> LongNetLM:
    with torch.device("meta"):
        return LongNetLM(CONFIG)


def loaded(model: LongNetLM, *, assign: bool) -> LongNetLM:
    model.load_state_dict(LongNetLM(CONFIG).state_dict(), assign=assign)
    return model


WAYS: dict[str, Callable[[], LongNetLM]] = {
    "to": lambda: LongNetLM(CONFIG).to(torch.float64),
    "to_empty": lambda: on_meta().to_empty(device="cpu"),
    "deepcopy": lambda: copy.deepcopy(LongNetLM(CONFIG)),
    "load": lambda: loaded(LongNetLM(CONFIG), assign=False),
    "load with assign": lambda: loaded(on_meta(), assign=True),
}


@pytest.mark.parametrize("way", WAYS)
def test_the_tie_survives(way: str) -> None:
    model = WAYS[way]()
    assert model.head.weight is model.embedding.weight
    assert [name for name, _ in model.named_parameters() if "head" in name] == []


def test_a_model_that_was_untied_by_hand_stays_so() -> None:
    model = LongNetLM(CONFIG)
    model.head = nn.Linear(16, 29, bias=False)
    expected = model.head.weight.clone()
    model.to(torch.float64)
    torch.testing.assert_close(model.head.weight, expected.double())


@pytest.mark.parametrize("assign", [False, True])
def test_a_state_dict_without_the_head_loads_and_one_with_another_head_raises(assign: bool) -> None:
    for model, other in (
        (LongNetLM(CONFIG), LongNetLM(CONFIG)),
        (LongNetEncoderDecoder(CONFIG, CONFIG), LongNetEncoderDecoder(CONFIG, CONFIG)),
    ):
        weights = other.state_dict()
        head = weights.pop("head.weight")
        model.load_state_dict(weights, assign=assign)
        assert torch.equal(model.head.weight, head)
        with pytest.raises(RuntimeError, match=r"head.weight differs from embedding.weight, but they are one"):
            model.load_state_dict({**weights, "head.weight": head + 1}, assign=assign)


def test_weights_of_another_vocabulary_or_dtype_are_compared_by_value_alone() -> None:
    model, weights = LongNetLM(CONFIG), LongNetLM(CONFIG).state_dict()
    for rows, rows_of_head in ((31, 31), (31, 30), (29, 31)):
        other = {"embedding.weight": torch.randn(rows, 16), "head.weight": torch.randn(rows_of_head, 16)}
        with pytest.raises(RuntimeError, match=r"size mismatch for head\.weight") as caught:
            model.load_state_dict({**weights, **other})
        assert "tie_embeddings" not in str(caught.value)
    half = weights["head.weight"].half()
    model.load_state_dict({**weights, "head.weight": half})
    assert torch.equal(model.head.weight, weights["embedding.weight"])
    with pytest.raises(RuntimeError, match="build it with tie_embeddings=False"):
        model.load_state_dict({**weights, "head.weight": half + 1})


def as_written_before(model: LongNetLM) -> dict[str, Tensor]:
    """A state dict with the names of earlier versions: one matrix of query, key and value, and no tied head."""
    weights = {name: weight for name, weight in model.named_parameters() if "_proj.weight" not in name}
    for name, module in model.named_modules():
        if isinstance(module, MultiheadPatternAttention):
            parts = [module.q_proj.weight, module.k_proj.weight, module.v_proj.weight]
            weights |= {f"{name}.in_proj_weight": torch.cat(parts), f"{name}.out_proj.weight": module.out_proj.weight}
        elif name.endswith("feed_forward"):
            weights |= {f"{name}.{one}.weight": getattr(module, one).weight for one in ("in_proj", "out_proj")}
    return {name: weight.detach() for name, weight in weights.items()}


@pytest.mark.parametrize("tied", [True, False])
def test_folders_with_fused_projections_load_and_are_saved_with_modules(tied: bool, tmp_path: Path) -> None:
    config = LongNetCausalLMConfig.from_longnet_config(CONFIG)
    config.tie_embeddings = tied
    model = LongNetForCausalLM(config).eval()
    config.save_pretrained(tmp_path)
    old = {f"model.{name}": weight.clone() for name, weight in as_written_before(model.model).items()}
    assert len(old) == len(set(old)) == len(list(model.parameters())) - 2 * CONFIG.num_layers
    save_file(old, tmp_path / "model.safetensors", metadata={"format": "pt"})
    again, info = LongNetForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert torch.equal(again(IDS).logits, model(IDS).logits)
    assert (again.model.head.weight is again.model.embedding.weight) == tied
    for saved in (again, model):
        saved.save_pretrained(tmp_path / "new")
        names = set(load_file(tmp_path / "new" / "model.safetensors"))
        assert names == {name for name, _ in model.named_parameters()}
    plain = LongNetForCausalLM(config)
    plain.load_state_dict(old)
    assert torch.equal(plain(IDS).logits, model(IDS).logits)
