"""What classes are called with where the names of their arguments do not tell."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .audio_inputs import AUDIO_INPUTS
from .drawing import draw_tokens, noise
from .vision_inputs import VISION_INPUTS


def inputs_of(class_name: str, config: Any) -> dict[str, Any] | None:
    """What a class is called with, where the names of its arguments do not tell; None for all others."""
    make = _INPUTS.get(class_name)
    return None if make is None else make(config)


def _qformer(config: Any) -> dict[str, Any]:
    return {
        "query_embeds": noise(2, 11, config.hidden_size),
        "encoder_hidden_states": noise(2, 17, config.encoder_hidden_size),
    }


def _flattened(width: int) -> Tensor:
    """17 patches of an image with their rows and columns before their numbers."""
    places = torch.arange(1.0, 18.0, dtype=torch.float64).expand(2, 17)[..., None].expand(-1, -1, 2)
    return torch.cat([places, noise(2, 17, width)], dim=-1)


def _after(token: int, number: int, *, seed: int = 0) -> Tensor:
    """Tokens after those that stand for the parts of an image."""
    return torch.cat([torch.full((2, number), token), draw_tokens(2, 29, seed=seed)], dim=1)


def _images_then_text(config: Any, *, frames: tuple[int, ...] = ()) -> dict[str, Any]:
    """Of BLIP 2 and its kin, whose language model is one of a decoder alone."""
    size = config.vision_config.image_size
    token = config.video_token_index if frames else config.image_token_index
    return {
        "pixel_values": noise(2, *frames, 3, size, size),
        "input_ids": _after(token, config.num_query_tokens * (frames[0] if frames else 1)),
    }


_INPUTS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "Blip2QFormerModel": _qformer,
    "DecisionTransformerModel": lambda config: {
        "states": noise(2, 9, config.state_dim),
        "actions": noise(2, 9, config.act_dim),
        "rewards": noise(2, 9, 1),
        "returns_to_go": noise(2, 9, 1),
        "timesteps": torch.arange(9).expand(2, -1),
        "attention_mask": torch.ones(2, 9, dtype=torch.long),
    },
    "DiaModel": lambda config: {
        "input_ids": draw_tokens(2, 29),
        "decoder_input_ids": draw_tokens(2, 23, config.decoder_config.num_channels) % 50,
    },
    "Pix2StructForConditionalGeneration": lambda config: {
        "flattened_patches": _flattened(config.vision_config.patch_embed_hidden_size),
        "decoder_input_ids": draw_tokens(2, 23),
    },
    "Pix2StructVisionModel": lambda config: {"flattened_patches": _flattened(config.patch_embed_hidden_size)},
    "Kosmos2_5VisionModel": lambda config: {"flattened_patches": _flattened(config.patch_embed_hidden_size)},
    "Idefics2PerceiverResampler": lambda config: {
        "context": noise(2, 17, config.hidden_size),
        "attention_mask": torch.ones(2, 17, dtype=torch.long),
    },
    "LxmertModel": lambda config: {
        "input_ids": draw_tokens(2, 29),
        "visual_feats": noise(2, 13, config.visual_feat_dim),
        "visual_pos": noise(2, 13, config.visual_pos_dim),
    },
    "Blip2Model": lambda config: {**_images_then_text(config), "decoder_input_ids": draw_tokens(2, 23)},
    "InstructBlipModel": lambda config: {
        **_images_then_text(config),
        "qformer_input_ids": draw_tokens(2, 19),
        "decoder_input_ids": draw_tokens(2, 23),
    },
    "InstructBlipVideoModel": lambda config: {
        **_images_then_text(config, frames=(2,)),
        "qformer_input_ids": draw_tokens(2, 19),
        "decoder_input_ids": draw_tokens(2, 23),
    },
    "Kosmos2Model": lambda config: {
        "pixel_values": noise(2, 3, 64, 64),
        "input_ids": _after(5, config.latent_query_num),
        "image_embeds_position_mask": _after(1, config.latent_query_num) == 1,
    },
    "IdeficsModel": lambda config: {
        "input_ids": draw_tokens(2, 29),
        "pixel_values": noise(2, 1, 3, 64, 64),
        "image_attention_mask": torch.ones(2, 29, 1, dtype=torch.long),
    },
    "JevForDecision": lambda config: {
        "input_ids": draw_tokens(1, 29),
        "marks": torch.tensor([[9, 28]]),
        "num_options": torch.tensor([[3, 4]]),
        "question_type_ids": torch.tensor([[0, 2]]),
    },
    "MuseGlimmerAssistantModel": lambda config: {
        "noise_embeds": noise(2, config.block_size, config.hidden_size),
        "context_hidden_states": noise(2, 23, config.hidden_size * len(config.target_layer_ids)),
        "attention_mask": {"full_attention": None, "sliding_attention": None},
    },
    "RagModel": lambda config: {
        "input_ids": draw_tokens(2, 19),
        "context_input_ids": draw_tokens(4, 29),
        "n_docs": 2,
        "context_attention_mask": torch.ones(4, 29, dtype=torch.long),
        "doc_scores": noise(2, 2),
        "decoder_input_ids": draw_tokens(2, 23),
    },
    "PI0Model": lambda config: {
        "action_embeds": noise(2, 11, config.dit_config.hidden_size),
        "pixel_values": noise(2, 1, 3, 64, 64),
        "input_ids": _after(config.vlm_config.image_token_index, 16),
        "attention_mask": torch.ones(2, 45, dtype=torch.long),
        "pixel_attention_mask": torch.ones(2, 1, dtype=torch.bool),
    },
    **AUDIO_INPUTS,
    **VISION_INPUTS,
}
