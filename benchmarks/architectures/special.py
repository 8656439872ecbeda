"""What some architectures need beyond small numbers, and which cannot be had here."""

from __future__ import annotations

from typing import Any

from .vision_sizes import VISION_CHANGES

_ROTARY = {"rope_type": "default", "rope_theta": 10000.0}
_SERIES = {"prediction_length": 11, "context_length": 37, "lags_sequence": [1, 2, 3], "num_time_features": 1}
_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_chunk_size": 8}
_STEP = {
    "layer_types": ["full_attention", "sliding_attention"], "sliding_window": 5, "share_expert_dim": 48,
    "rope_parameters": {"full_attention": _ROTARY, "sliding_attention": _ROTARY},
}  # fmt: skip
_SEAMLESS = {
    "speech_encoder_layers": 2, "speech_encoder_attention_heads": 4, "speech_encoder_intermediate_size": 48,
    "t2u_encoder_layers": 2, "t2u_decoder_layers": 2, "t2u_encoder_ffn_dim": 48, "t2u_decoder_ffn_dim": 48,
    "t2u_vocab_size": 160, "unit_hifi_gan_vocab_size": 160, "unit_embed_dim": 64,
}  # fmt: skip
_VIBEVOICE = {"num_filters": 4, "downsampling_ratios": [2, 2, 4], "depths": [1, 1, 1, 1]}

CHANGES: dict[str, dict[str, Any]] = {
    "align": {"projection_dim": 80},
    "autoformer": _SERIES,
    "bamba": {"attn_layer_indices": [1], **_MAMBA},
    "blip-2": {"image_token_index": 5, "num_query_tokens": 7},
    "blt": {"encoder_hash_byte_group_vocab": 50},
    "chameleon": {"vocabulary_map": {"<image>": 9, "IMGIMGA": 10}},
    "clap_audio_model": {"hidden_size": 768},
    "clvp_encoder": {"num_attention_heads": 2},
    "cohere_compass_text": {"rope_parameters": {"full_attention": _ROTARY, "sliding_attention": _ROTARY}},
    "dac": {"encoder_hidden_size": 16, "decoder_hidden_size": 64},
    "dbrx": {"attn_config": {"rope_theta": 10000.0, "kv_n_heads": 2, "clip_qkv": 8.0}},
    "deepseek_ocr2_text": {"rope_parameters": _ROTARY, "mlp_layer_types": ["dense", "sparse"]},
    "diffusion_gemma_text": {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 48},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1},
    "dots3_note": {"vision_config": {"adapter_out_dim": 64}, "audio_config": {"adapter_out_dim": 64}},
    "dots3_note_audio_encoder": {"adapter_input_size": 64, "downsample_hidden_size": 16},
    "emu3": {"vocabulary_map": {"<image>": 9, "<|extra_200|>": 10}},
    "ernie4_5_vl_moe_text": {
        "moe_intermediate_size": [48, 48], "rope_parameters": {**_ROTARY, "mrope_section": [3, 3, 2]},
    },
    "esm": {"vocab_size": 160, "pad_token_id": 0, "mask_token_id": 4},
    "falcon_h1": {"mamba_d_ssm": 128, **_MAMBA},
    "fun_asr_nano": {"adaptor_config": {"hidden_size": 64, "intermediate_size": 16}},
    "gemma3n_text": {"num_kv_shared_layers": 0},
    "gemma4_assistant": {"text_config": {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}},
    "glm4v_moe_text": {"rope_parameters": {**_ROTARY, "partial_rotary_factor": 0.5, "mrope_section": [1, 1, 2]}},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "num_layers": 2, "window_size": 5},
    "granite4_vision": {"deepstack_layer_map": [[0, 0]], "downsample_rate": "1/2"},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"], **_MAMBA},
    "hunyuan_v1_dense": {"head_dim": 16, "num_key_value_heads": 2},
    "hunyuan_v1_moe": {"head_dim": 16, "num_key_value_heads": 2},
    "hunyuan_vl_text": {"head_dim": 16, "num_key_value_heads": 2},
    "idefics": {"vision_config": {"embed_dim": 64}},
    "informer": _SERIES,
    "instructblip": {"image_token_index": 5, "num_query_tokens": 7},
    "instructblipvideo": {"video_token_index": 5, "num_query_tokens": 7},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "luke": {"entity_vocab_size": 50},
    "mamba2": {"num_heads": 8},
    "mimi": {"upsample_groups": 64},
    "ministral": {"head_dim": 16},
    "molmo2": {"adapter_config": {"vision_feature_layer": [1, 0]}},
    "moonshine_streaming": {"num_attention_heads": 4, "num_key_value_heads": 4},
    "moshi_depth": {"num_codebooks": 24, "audio_vocab_size": 160},
    "muse_spark_audio": {
        "num_hidden_layers": 2, "patch_sizes": [8, 4], "hidden_sizes": [32, 64], "depths": [1, 1],
    },
    "nemotron": {"num_key_value_heads": 2},
    "nemotron3_5_transcribe_audio": {"head_config": {"audio_hidden_size": 64}},
    "nemotron3_diarization": {"head_config": {"audio_hidden_size": 64}},
    "nemotron_asr_streaming_encoder": {"subsampling_conv_channels": 16},
    "nemotron_h": {
        "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"], "mamba_num_heads": 8,
        "mamba_head_dim": 16, "n_groups": 2, "ssm_state_size": 16, "chunk_size": 8,
    },
    "nemotron_h_omni": {"vision_config": {"video_temporal_patch_size": 2}},
    "neucodec": {"encoder_hidden_size": 8, "quantization_levels": [4, 4, 4], "quantization_dim": 128},
    "perceiver": {
        "num_latents": 19, "d_latents": 64, "num_self_attends_per_block": 2, "num_self_attention_heads": 4,
        "num_cross_attention_heads": 4,
    },
    "phi4_multimodal_audio": {"nemo_conv_channels": 64},
    "qwen2_5_omni_bigvgan": {"upsample_initial_channel": 128},
    "qwen2_5_omni_dit": {
        "rope_parameters": _ROTARY, "num_embeds": 160, "enc_channels": [32, 32, 32, 32, 96], "enc_emb_dim": 16,
        "enc_dim": 16, "look_ahead_layers": [1],
    },
    "qwen3_omni_moe_talker_text": {"shared_expert_intermediate_size": 48},
    "qwen4_exp_text": {
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "indexer_n_heads": 2, "indexer_kv_heads": 1,
        "indexer_head_dim": 16, "indexer_budget": 8, "indexer_compress_ratio": 2,
    },
    "recurrent_gemma": {"block_types": ["recurrent", "attention"], "attention_window_size": 5},
    "reformer": {"axial_pos_embds_dim": [16, 48], "axial_pos_shape": [8, 8]},
    "sam3_lite_text_text_model": {"num_hidden_layers": 3},
    "seamless_m4t": _SEAMLESS,
    "seamless_m4t_v2": _SEAMLESS,
    "shieldgemma2": {"yes_token_index": 20, "no_token_index": 21},
    "step3p5": _STEP,
    "step3p7": {"text_config": _STEP},
    "step3p7_text": _STEP,
    "t5gemma2_decoder": {"dropout_rate": 0.0},
    "t5gemma2_encoder": {"text_config": {"dropout_rate": 0.0}},
    "t5gemma2_text": {"dropout_rate": 0.0},
    "time_series_transformer": _SERIES,
    "vibevoice_acoustic_tokenizer": _VIBEVOICE,
    "vibevoice_acoustic_tokenizer_decoder": _VIBEVOICE,
    "vibevoice_acoustic_tokenizer_encoder": _VIBEVOICE,
    "xcodec2": {"encoder_hidden_size": 8, "quantization_levels": [4, 4, 4], "quantization_dim": 128},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"num_hidden_layers": 4, "layers_block_type": ["linear_attention", "hybrid"] * 2},
    **VISION_CHANGES,
}  # fmt: skip
"""Arguments of configurations, by model type."""

NOT_HERE: dict[str, str] = {
    "omdet-turbo": "keeps what its text encoder gave, so that a second call shows nothing",
    "xcodec": "gives codes, which do not show what the attention of a small model gives",
    "sam3_video": "is called with the session of a video",
    "edgetam_video": "is called with the session of a video",
}
"""Model types of which no model is called, and why."""
