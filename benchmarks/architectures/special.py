"""What some architectures need beyond small numbers, and which cannot be had here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .sizes import FIRST_TOKEN, LAST_TOKEN

_ROTARY = {"rope_type": "default", "rope_theta": 10000.0}
_STAGES = {"depths": [1, 1, 1, 1], "out_features": ["stage2", "stage3", "stage4"]}
_DETR = {"use_timm_backbone": False, "backbone_config": {"model_type": "resnet", **_STAGES}}
_HGNET = {"backbone_config": {"model_type": "hgnet_v2", "out_features": ["stage2", "stage3", "stage4"]}}
_SWIN = {"embed_dim": 48, "depths": [1, 1, 1, 1], "num_heads": [3, 6, 12, 24], "window_size": 4, "image_size": 64}
_WIDE = {"encoder_hidden_dim": 256, "d_model": 256}
_FOUR_LAYERS = {"num_hidden_layers": 4, "out_indices": [1, 2, 3, 4], "reshape_hidden_states": False}
_SERIES = {"prediction_length": 11, "context_length": 37, "lags_sequence": [1, 2, 3], "num_time_features": 1}

CHANGES: dict[str, dict[str, Any]] = {
    "align": {"projection_dim": 80},
    "align_vision_model": {"width_coefficient": 0.25, "depth_coefficient": 0.2, "hidden_dim": 64},
    "clap_audio_model": {"hidden_size": 768},
    "clvp_encoder": {"num_attention_heads": 2},
    "efficientnet": {"width_coefficient": 0.25, "depth_coefficient": 0.2, "hidden_dim": 320},
    "d_fine": {**_HGNET, **_WIDE},
    "deimv2": {**_HGNET, **_WIDE},
    "depth_anything": {"reassemble_hidden_size": 64, "backbone_config": {"model_type": "dinov2", **_FOUR_LAYERS}},
    "prompt_depth_anything": {
        "reassemble_hidden_size": 64, "backbone_config": {"model_type": "dinov2", **_FOUR_LAYERS},
    },
    "chmv2": {"backbone_config": {"model_type": "dinov3_vit", **_FOUR_LAYERS, "return_class_token": True}},
    "deepseek_ocr2_text": {"rope_parameters": _ROTARY, "mlp_layer_types": ["dense", "sparse"]},
    "dots3_note_audio_encoder": {"adapter_input_size": 64},
    "dots3_note_vision_encoder": {"adapter_in_dim": 64},
    "glm4v_moe_text": {"rope_parameters": {**_ROTARY, "partial_rotary_factor": 0.5, "mrope_section": [1, 1, 2]}},
    "gemma3n_text": {"num_kv_shared_layers": 0},
    "rt_detr": {"backbone_config": {"model_type": "rt_detr_resnet", **_STAGES}, **_WIDE},
    "rt_detr_v2": {"backbone_config": {"model_type": "rt_detr_resnet", **_STAGES}, **_WIDE},
    "moonshine_streaming": {"num_attention_heads": 4, "num_key_value_heads": 4},
    "nemotron3_5_transcribe_audio": {"head_config": {"audio_hidden_size": 64}},
    "nemotron3_diarization": {"head_config": {"audio_hidden_size": 64}},
    "swin": _SWIN,
    "swinv2": _SWIN,
    "donut-swin": _SWIN,
    "maskformer-swin": _SWIN,
    "janus_vqgan": {"base_channels": 32, "embed_dim": 32, "num_embeddings": 128},
    "qwen4_exp_text": {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16},
    "phi4_multimodal_audio": {"nemo_conv_channels": 64},
    "mimi": {"upsample_groups": 64},
    "emu3_vqgan": {"base_channels": 32, "embed_dim": 32, "num_embeddings": 128, "hidden_size": 64},
    "chameleon_vqgan": {"base_channels": 32, "embed_dim": 32, "num_embeddings": 128},
    "upernet": {
        "backbone_config": {
            "model_type": "convnext", "hidden_sizes": [32, 64, 96, 128],
            "out_features": [f"stage{number}" for number in (1, 2, 3, 4)],
        },
    },
    "autoformer": _SERIES,
    "bamba": {"attn_layer_indices": [1]},
    "blt": {"encoder_hash_byte_group_vocab": 50},
    "chameleon": {"vocabulary_map": {"<image>": 9, "IMGIMGA": 10}},
    "cohere_compass_text": {"rope_parameters": {"full_attention": _ROTARY, "sliding_attention": _ROTARY}},
    "conditional_detr": _DETR,
    "dab-detr": _DETR,
    "dbrx": {"attn_config": {"rope_theta": 10000.0, "kv_n_heads": 2}},
    "deformable_detr": _DETR,
    "depth_pro": {
        "patch_size": 64, "scaled_images_ratios": (1.0,), "scaled_images_overlap_ratios": (0.0,),
        "scaled_images_feature_dims": (64,),
    },
    "detr": _DETR,
    "diffusion_gemma_text": {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 48},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1},
    "emu3": {"vocabulary_map": {"<image>": 9, "<|extra_200|>": 10}},
    "ernie4_5_vl_moe_text": {
        "moe_intermediate_size": [48, 48], "rope_parameters": {**_ROTARY, "mrope_section": [3, 3, 2]},
    },
    "esm": {"vocab_size": 160, "pad_token_id": 0, "mask_token_id": 4},
    "gemma4_assistant": {"text_config": {"hidden_size_per_layer_input": 0}},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "num_layers": 2, "window_size": 5},
    "hunyuan_v1_dense": {"head_dim": 16, "num_key_value_heads": 2},
    "hunyuan_v1_moe": {"head_dim": 16, "num_key_value_heads": 2},
    "hunyuan_vl_text": {"head_dim": 16, "num_key_value_heads": 2},
    "informer": _SERIES,
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "luke": {"entity_vocab_size": 50},
    "mamba2": {"num_heads": 8},
    "ministral": {"head_dim": 16},
    "nemotron": {"num_key_value_heads": 2},
    "omdet-turbo": _DETR,
    "perceiver": {
        "num_latents": 19, "d_latents": 64, "num_self_attends_per_block": 2, "num_self_attention_heads": 4,
        "num_cross_attention_heads": 4,
    },
    "reformer": {"axial_pos_embds_dim": [16, 48], "axial_pos_shape": [8, 8]},
    "t5gemma2_decoder": {"dropout_rate": 0.0},
    "t5gemma2_encoder": {"text_config": {"dropout_rate": 0.0}},
    "t5gemma2_text": {"dropout_rate": 0.0},
    "table-transformer": _DETR,
    "time_series_transformer": _SERIES,
    "qwen3_omni_moe_talker_text": {"shared_expert_intermediate_size": 48},
}  # fmt: skip
"""Arguments of configurations, by model type."""

NOT_HERE: dict[str, str] = {
    "edgetam_video": "is called with the session of a video",
    "sam2_video": "is called with the session of a video",
    "sam3_video": "is called with the session of a video",
    "sam3_tracker_video": "is called with the session of a video",
}
"""Model types of which no model is called, and why."""


def inputs_of(class_name: str, config: Any) -> dict[str, Any] | None:
    """What a class is called with, where the names of its arguments do not tell; None for all others."""
    make = _INPUTS.get(class_name)
    return None if make is None else make(config)


def _noise(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(7), dtype=torch.float64)


def _tokens(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(FIRST_TOKEN, LAST_TOKEN, shape, generator=torch.Generator().manual_seed(seed))


def _qformer(config: Any) -> dict[str, Any]:
    return {"query_embeds": _noise(2, 11, config.hidden_size),
            "encoder_hidden_states": _noise(2, 17, config.encoder_hidden_size)}  # fmt: skip


def _flattened(width: int) -> Tensor:
    """17 patches of an image with their rows and columns before their numbers."""
    places = torch.arange(1.0, 18.0, dtype=torch.float64).expand(2, 17)[..., None].expand(-1, -1, 2)
    return torch.cat([places, _noise(2, 17, width)], dim=-1)


_INPUTS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "Blip2QFormerModel": _qformer,
    "DecisionTransformerModel": lambda config: {
        "states": _noise(2, 9, config.state_dim), "actions": _noise(2, 9, config.act_dim), "rewards": _noise(2, 9, 1),
        "returns_to_go": _noise(2, 9, 1), "timesteps": torch.arange(9).expand(2, -1),
        "attention_mask": torch.ones(2, 9, dtype=torch.long),
    },
    "DiaModel": lambda config: {
        "input_ids": _tokens(2, 29), "decoder_input_ids": _tokens(2, 23, config.decoder_config.num_channels) % 50,
    },
    "GraniteSpeechCTCEncoder": lambda config: {"hidden_states": _noise(2, 40, config.input_dim)},
    "GraniteSpeechPlusCTCEncoder": lambda config: {"hidden_states": _noise(2, 40, config.input_dim)},
    "Phi4MultimodalAudioModel": lambda config: {
        "hidden_states": _noise(2, 96, config.input_size), "mask": torch.ones(2, 96, dtype=torch.bool),
    },
    "Pix2StructForConditionalGeneration": lambda config: {
        "flattened_patches": _flattened(config.vision_config.patch_embed_hidden_size),
        "decoder_input_ids": _tokens(2, 23),
    },
    "Pix2StructVisionModel": lambda config: {"flattened_patches": _flattened(config.patch_embed_hidden_size)},
    "Kosmos2_5VisionModel": lambda config: {"flattened_patches": _flattened(config.patch_embed_hidden_size)},
    "Gemma3nAudioEncoder": lambda config: {
        "audio_mel": _noise(2, 64, config.input_feat_size), "audio_mel_mask": torch.zeros(2, 64, dtype=torch.bool),
    },
    "GraniteSpeech5Encoder": lambda config: {"input_features": _noise(2, 40, config.input_dim)},
    "KyutaiSpeechToTextModel": lambda config: {"input_ids": _tokens(2, 29, config.num_codebooks + 1) % 50},
    "Idefics2PerceiverResampler": lambda config: {
        "context": _noise(2, 17, config.hidden_size), "attention_mask": torch.ones(2, 17, dtype=torch.long),
    },
    "LxmertModel": lambda config: {
        "input_ids": _tokens(2, 29), "visual_feats": _noise(2, 13, config.visual_feat_dim),
        "visual_pos": _noise(2, 13, config.visual_pos_dim),
    },
}  # fmt: skip
