"""Models whose attention is in parts: which of them takes the pattern, and which stay as they are."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import AutoModel

from dilated_attention_pytorch import DilatedPattern
from dilated_attention_pytorch.integrations import register, set_pattern
from dilated_attention_pytorch.integrations.transformers import layers
from integrations.tiny_models import PATTERN, draw, tiny

register()
WHOLE = DilatedPattern([64], [1])

_SIZES = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 6, "intermediate_size": 53}
_IMAGES = {**_SIZES, "image_size": 32, "patch_size": 8}


def images() -> Tensor:
    return torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def built(name: str, attention: Any = "eager", **sizes: Any) -> Any:
    """A model in evaluation mode; equal weights for equal calls."""
    torch.manual_seed(3)
    kind = getattr(transformers, name)
    return kind._from_config(kind.config_class(**sizes), attn_implementation=attention).double().eval()


def test_a_table_of_attention_in_the_same_file_is_no_matter_to_a_model_that_does_not_take_from_it() -> None:
    """The vision tower of GIT uses the interface, and its text model has classes of its own."""
    with torch.no_grad():
        expected = built("GitVisionModel", **_IMAGES)(images()).last_hidden_state
        whole = set_pattern(built("GitVisionModel", "dilated", **_IMAGES), WHOLE)(images()).last_hidden_state
        dilated = set_pattern(built("GitVisionModel", "dilated", **_IMAGES), PATTERN)(images()).last_hidden_state
    torch.testing.assert_close(whole, expected)
    assert not torch.allclose(dilated, expected, atol=1e-3)


def depth_anything() -> Any:
    backbone = {
        "model_type": "dinov2",
        **_SIZES,
        "image_size": 32,
        "patch_size": 8,
        "num_hidden_layers": 4,
        "out_indices": [1, 2, 3, 4],
        "reshape_hidden_states": False,
        "initializer_range": 0.3,
    }
    return built(
        "DepthAnythingForDepthEstimation",
        backbone_config=backbone,
        patch_size=8,
        reassemble_hidden_size=48,
        neck_hidden_sizes=[8, 8, 8, 8],
        fusion_hidden_size=8,
        initializer_range=0.3,
    )


def test_a_model_whose_attention_is_in_a_part_names_the_part_and_that_part_takes_the_pattern() -> None:
    with torch.no_grad():
        expected = depth_anything()(images()).predicted_depth
        model = depth_anything()
        with pytest.raises(NotImplementedError, match=r"as in set_pattern\(model.backbone, pattern\)"):
            set_pattern(model, PATTERN)
        set_pattern(model.backbone, WHOLE)
        torch.testing.assert_close(model(images()).predicted_depth, expected, atol=0, rtol=1e-6)
        set_pattern(model.backbone, PATTERN)
        assert not torch.allclose(model(images()).predicted_depth, expected, atol=0, rtol=1e-2)


def test_the_part_that_generates_is_named_of_a_model_that_does_not_say_that_it_has_it() -> None:
    """RAG has a configuration of its generator that transformers does not count among the parts."""
    bart = tiny("bart", "sdpa").config.to_dict()
    encoder = tiny("bert", "sdpa").config.to_dict()
    model = built("RagModel", question_encoder=encoder | {"model_type": "dpr"}, generator=bart)
    with pytest.raises(NotImplementedError, match=r"as in set_pattern\(model.generator, pattern\)"):
        set_pattern(model, PATTERN)
    set_pattern(model.generator, PATTERN)
    assert model.generator.config._attn_implementation == "dilated"


def chameleon() -> Any:
    return built(
        "ChameleonModel",
        "sdpa",
        **_SIZES,
        num_key_value_heads=6,
        vocab_size=31,
        pad_token_id=0,
        vocabulary_map={"<image>": 9, "IMGIMGA": 10},
        vq_config={"base_channels": 32, "embed_dim": 32, "num_embeddings": 16, "latent_channels": 32},
    )


def test_parts_stay_as_they_are_beside_layers_of_the_models_own(tmp_path: Path) -> None:
    """Chameleon's layers are its own, and its images have a part that computes attention itself."""
    with torch.no_grad():
        expected = set_pattern(chameleon(), PATTERN)
        tokens = draw(1, 12)
        logits = expected(tokens).last_hidden_state
        assert not torch.allclose(logits, chameleon()(tokens).last_hidden_state, atol=1e-3)
        expected.save_pretrained(tmp_path)
        again = AutoModel.from_pretrained(tmp_path, dtype=torch.float64).eval()
    for model in (expected, again):
        assert model.config._attn_implementation == "dilated"
        assert model.config.vq_config._attn_implementation == "sdpa"
    torch.testing.assert_close(again(tokens).last_hidden_state, logits)


def test_a_window_in_every_layer_that_attends_leaves_no_layer_to_a_pattern() -> None:
    """RecurrentGemma's other layers are recurrent."""
    model = built("RecurrentGemmaForCausalLM", **_SIZES, vocab_size=31, block_types=["recurrent", "attention"])
    with pytest.raises(ValueError, match="every layer of the model has a sliding window of 2048 tokens"):
        set_pattern(model, PATTERN)


def test_a_head_that_pools_by_the_values_of_the_mask_gets_them() -> None:
    sizes = _SIZES | {"num_patches": 16, "patch_size": 8}
    patches = torch.randn(2, 16, 3 * 64, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    mask = torch.ones(2, 16, dtype=torch.long)
    mask[1, 9:] = 0
    shapes = torch.tensor([[4, 4], [3, 3]])
    with torch.no_grad():
        expected = built("Siglip2VisionModel", **sizes)(patches, mask, shapes).pooler_output
        model = set_pattern(built("Siglip2VisionModel", **sizes), WHOLE)
        torch.testing.assert_close(model(patches, mask, shapes).pooler_output, expected)


@pytest.mark.parametrize("words", [11, 24])
def test_one_class_attends_under_the_pattern_to_its_own_sequence_and_densely_to_another(words: int) -> None:
    """SAM 3 has one class for its attention to the image and for that to the words."""
    sizes = {"hidden_size": 48, "num_layers": 1, "num_attention_heads": 6, "intermediate_size": 53}
    kind = importlib.import_module("transformers.models.sam3.modeling_sam3").Sam3DetrEncoder
    torch.manual_seed(0)
    model = kind._from_config(kind.config_class(**sizes), attn_implementation="sdpa").double().eval()
    image = torch.randn(2, 48, 4, 6, dtype=torch.float64)
    given = ([image], torch.randn(2, words, 48, dtype=torch.float64), [image])
    with torch.no_grad():
        expected = model(*given).last_hidden_state
        torch.testing.assert_close(set_pattern(model, WHOLE)(*given).last_hidden_state, expected)
        assert not torch.allclose(set_pattern(model, PATTERN)(*given).last_hidden_state, expected, atol=1e-4)


def test_keys_that_may_be_of_another_sequence_or_of_the_layers_own_are_refused() -> None:
    kind = importlib.import_module("transformers.models.efficientloftr.modeling_efficientloftr").EfficientLoFTRAttention
    config = transformers.EfficientLoFTRConfig()
    layer = kind(config, 0)
    with pytest.raises(NotImplementedError, match="got encoder_hidden_states of as many rows as it has queries"):
        layers._note_source(
            "self_attention", layers._sources(kind), layer, (torch.randn(1, 9, 4), torch.randn(1, 9, 4)), {}
        )


def test_a_model_that_attends_to_other_sequences_alone_is_refused() -> None:
    model = built("BertModel", **_SIZES, vocab_size=31)
    for layer in model.encoder.layer:
        setattr(layer.attention.self, layers._OF_ANOTHER, True)
    with pytest.raises(NotImplementedError, match="BertModel attends to other sequences alone, as BertSelfAttention"):
        set_pattern(model, PATTERN)(draw(1, 12))
