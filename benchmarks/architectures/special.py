"""What some architectures need beyond small numbers, and which cannot be had here."""

from __future__ import annotations

from typing import Any

_ROTARY = {"rope_type": "default", "rope_theta": 10000.0}
_STAGES = {"depths": [1, 1, 1, 1], "out_features": ["stage2", "stage3", "stage4"]}
_DETR = {"use_timm_backbone": False, "backbone_config": {"model_type": "resnet", **_STAGES}}
_HGNET = {"backbone_config": {"model_type": "hgnet_v2", "out_features": ["stage2", "stage3", "stage4"]}}
_SWIN = {"embed_dim": 48, "depths": [1, 1, 1, 1], "num_heads": [3, 6, 12, 24], "window_size": 4, "image_size": 64}
_WIDE = {"encoder_hidden_dim": 256, "d_model": 256}
_FOUR_LAYERS = {"num_hidden_layers": 4, "out_indices": [1, 2, 3, 4], "reshape_hidden_states": False}
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

_ALL_FOUR = {
    "num_hidden_layers": 4, "out_features": ["stage1", "stage2", "stage3", "stage4"], "reshape_hidden_states": False,
}  # fmt: skip
_HIERA = {
    "image_size": [64, 64], "blocks_per_stage": [1, 2, 2, 1], "embed_dim_per_stage": [16, 32, 64, 128],
    "num_attention_heads_per_stage": [1, 2, 4, 8], "window_size_per_stage": [8, 4, 4, 2],
    "global_attention_blocks": [4], "hidden_size": 16,
}  # fmt: skip
_SAM3_FEATURES = {"fpn_hidden_size": 64, "backbone_feature_sizes": [[32, 32], [16, 16], [8, 8]]}
_HIERA_FEATURES = {
    "backbone_channel_list": [128, 64, 32, 16], "backbone_feature_sizes": [[16, 16], [8, 8], [4, 4]],
    "fpn_hidden_size": 64,
}  # fmt: skip
_TRACKER = {
    "mask_decoder_config": {"hidden_size": 128}, "memory_attention_hidden_size": 128,
    "memory_encoder_hidden_size": 128, "memory_attention_feed_forward_hidden_size": 48,
    "mask_downsampler_embed_dim": 128, "memory_fuser_embed_dim": 128, "memory_fuser_intermediate_dim": 64,
}  # fmt: skip

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
    "chmv2": {
        "backbone_config": {
            "model_type": "dinov3_vit", **_FOUR_LAYERS, "reshape_hidden_states": True, "return_class_token": True,
        },
        "post_process_channels": [32, 32, 32, 32],
    },
    "deepseek_ocr2_text": {"rope_parameters": _ROTARY, "mlp_layer_types": ["dense", "sparse"]},
    "dots3_note_audio_encoder": {"adapter_input_size": 64, "downsample_hidden_size": 16},
    "dots3_note_vision_encoder": {"adapter_in_dim": 64},
    "glm4v_moe_text": {"rope_parameters": {**_ROTARY, "partial_rotary_factor": 0.5, "mrope_section": [1, 1, 2]}},
    "gemma3n_text": {"num_kv_shared_layers": 0},
    "rt_detr": {"backbone_config": {"model_type": "rt_detr_resnet", **_STAGES}, **_WIDE},
    "rt_detr_v2": {"backbone_config": {"model_type": "rt_detr_resnet", **_STAGES}, **_WIDE},
    "moonshine_streaming": {"num_attention_heads": 4, "num_key_value_heads": 4},
    "nemotron3_5_transcribe_audio": {"head_config": {"audio_hidden_size": 64}},
    "nemotron3_diarization": {"head_config": {"audio_hidden_size": 64}},
    "swin": {**_SWIN, "window_size": 2},
    "swinv2": _SWIN,
    "donut-swin": {**_SWIN, "window_size": 2},
    "maskformer-swin": _SWIN,
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
    "bamba": {"attn_layer_indices": [1], **_MAMBA},
    "falcon_h1": {"mamba_d_ssm": 128, **_MAMBA},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"], **_MAMBA},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "nemotron_h": {
        "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"], "mamba_num_heads": 8,
        "mamba_head_dim": 16, "n_groups": 2, "ssm_state_size": 16, "chunk_size": 8,
    },
    "recurrent_gemma": {"block_types": ["recurrent", "attention"], "attention_window_size": 5},
    "zamba": {"num_hidden_layers": 4, "layers_block_type": ["linear_attention", "hybrid"] * 2},
    "step3p5": _STEP,
    "step3p7": {"text_config": _STEP},
    "step3p7_text": _STEP,
    "blip-2": {"image_token_index": 5, "num_query_tokens": 7},
    "instructblip": {"image_token_index": 5, "num_query_tokens": 7},
    "instructblipvideo": {"video_token_index": 5, "num_query_tokens": 7},
    "gemma4_assistant": {"text_config": {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}},
    "idefics": {"vision_config": {"embed_dim": 64}},
    "inkling_vision": {"num_hidden_layers": 4},
    "molmo2": {"adapter_config": {"vision_feature_layer": [1, 0]}},
    "molmo2_vision": {"image_size": [56, 56]},
    "molmo2_adapter": {"vision_feature_layer": [1, 0]},
    "muse_spark_audio": {
        "num_hidden_layers": 2, "patch_sizes": [8, 4], "hidden_sizes": [32, 64], "depths": [1, 1],
    },
    "nemotron_h_omni": {"vision_config": {"video_temporal_patch_size": 2}},
    "qwen4_exp_text": {
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "indexer_n_heads": 2, "indexer_kv_heads": 1,
        "indexer_head_dim": 16, "indexer_budget": 8, "indexer_compress_ratio": 2,
    },
    "shieldgemma2": {"yes_token_index": 20, "no_token_index": 21},
    "bridgetower_vision_model": {"image_size": 64},
    "deepseek_ocr2_vision": {"encoder_config": {"hidden_size": 64}, "sam_config": {"downsample_channels": [64, 64]}},
    "dots3_note": {"vision_config": {"adapter_out_dim": 64}, "audio_config": {"adapter_out_dim": 64}},
    "fun_asr_nano": {"adaptor_config": {"hidden_size": 64, "intermediate_size": 16}},
    "granite4_vision": {"deepstack_layer_map": [[0, 0]], "downsample_rate": "1/2"},
    "llama4_vision_model": {"intermediate_size": 256, "projector_input_dim": 64, "projector_output_dim": 64},
    "minicpm_ocr_vision": {"insert_layer_id": 0},
    "minicpmv4_6_vision": {"insert_layer_id": 0},
    "minicpmv4_7_vision": {"insert_layer_id": 0},
    "mllama_vision_model": {"intermediate_layers_indices": [0, 1], "num_global_layers": 1},
    "moshi_depth": {"num_codebooks": 24, "audio_vocab_size": 160},
    "paddleocr_vl_vision": {"rope_parameters": {"rope_type": "axial", "rope_theta": 10000.0}},
    "tvp": {"max_img_size": 64, "visual_prompt_size": 8, "num_frames": 2},
    "unlimited_ocr_vision": {"sam_config": {"downsample_channels": [64, 64]}},
    "nemotron_asr_streaming_encoder": {"subsampling_conv_channels": 16},
    "qwen2_5_omni_bigvgan": {"upsample_initial_channel": 128},
    "qwen2_5_omni_dit": {
        "rope_parameters": _ROTARY, "num_embeds": 160, "enc_channels": [32, 32, 32, 32, 96], "enc_emb_dim": 16,
        "enc_dim": 16, "look_ahead_layers": [1],
    },
    "seamless_m4t": _SEAMLESS,
    "seamless_m4t_v2": _SEAMLESS,
    "vibevoice_acoustic_tokenizer": _VIBEVOICE,
    "vibevoice_acoustic_tokenizer_decoder": _VIBEVOICE,
    "vibevoice_acoustic_tokenizer_encoder": _VIBEVOICE,
    "dac": {"encoder_hidden_size": 16, "decoder_hidden_size": 64},
    "neucodec": {"encoder_hidden_size": 8, "quantization_levels": [4, 4, 4], "quantization_dim": 128},
    "xcodec2": {"encoder_hidden_size": 8, "quantization_levels": [4, 4, 4], "quantization_dim": 128},
    "tipsv2_dpt": {"backbone_config": _ALL_FOUR, "neck_hidden_sizes": [32, 32, 32, 32]},
    "zoedepth": {"backbone_config": _ALL_FOUR, "neck_hidden_sizes": [32, 32, 32, 32], "bottleneck_features": 64},
    "mask2former": {
        "backbone_config": {"out_features": ["stage1", "stage2", "stage3", "stage4"]}, "feature_size": 64,
        "mask_feature_size": 64, "encoder_feedforward_dim": 48, "num_queries": 20,
    },
    "oneformer": {
        "backbone_config": {"out_features": ["stage1", "stage2", "stage3", "stage4"]}, "conv_dim": 64, "mask_dim": 64,
        "encoder_feedforward_dim": 48, "num_queries": 20, "text_encoder_width": 64, "task_seq_len": 19,
        "text_encoder_vocab_size": 160,
    },
    "lw_detr_vit": {"num_windows": 4},
    "lw_detr": {
        "backbone_config": {"out_features": ["stage1", "stage2"]}, "projector_scale_factors": [1.0], "num_queries": 12,
        "group_detr": 1,
    },
    "rf_detr": {"num_queries": 12, "group_detr": 1},
    "pp_doclayout_v2": {**_HGNET, "num_queries": 12},
    "pp_doclayout_v3": {
        "backbone_config": {"model_type": "hgnet_v2", "out_features": ["stage1", "stage2", "stage3", "stage4"]},
        "num_queries": 12,
    },
    "pp_doclayout_v4": {**_HGNET, "num_queries": 12},
    "grounding-dino": {"num_queries": 12},
    "mm-grounding-dino": {"num_queries": 12},
    "vitmatte": {"fusion_hidden_sizes": [32, 32, 32, 32], "convstream_hidden_sizes": [16, 16, 16]},
    "vjepa2": {
        "crop_size": 64, "frames_per_clip": 4, "pred_hidden_size": 64, "pred_num_attention_heads": 4,
        "pred_num_hidden_layers": 2,
    },
    "seggpt": {
        "image_size": [128, 64], "pretrain_image_size": 64, "merge_index": 0,
        "intermediate_hidden_state_indices": [0, 1],
    },
    "sam2_hiera_det_model": _HIERA,
    "sam2_vision_model": {**_HIERA_FEATURES, "backbone_config": _HIERA},
    "sam2_video": {
        "vision_config": {**_HIERA_FEATURES, "backbone_config": _HIERA, "fpn_hidden_size": 128},
        "prompt_encoder_config": {"hidden_size": 128}, "memory_attention_rope_feat_sizes": [4, 4], **_TRACKER,
    },
    "sam3_tracker_video": {
        "vision_config": {"fpn_hidden_size": 128}, "prompt_encoder_config": {"hidden_size": 128, "image_size": 112},
        "memory_attention_rope_feat_sizes": [8, 8], "image_size": 112, **_TRACKER,
    },
    "sam2": {"vision_config": {**_HIERA_FEATURES, "backbone_config": _HIERA}},
    "sam3_vision_model": _SAM3_FEATURES,
    "sam3_vit_model": {"window_size": 2},
    "florence_vision": {"embed_dim": [16, 32, 64, 64], "num_heads": [2, 2, 4, 4], "num_groups": [2, 2, 4, 4]},
    "janus_vqgan": {"base_channels": 32, "embed_dim": 32, "num_embeddings": 128, "num_patches": 4},
    "slanext": {"vision_config": {"output_channels": 64}, "post_conv_in_channels": 64, "post_conv_out_channels": 64},
    "xcodec": {"acoustic_model_config": {"downsampling_ratios": [2, 4, 5, 8], "upsampling_ratios": [8, 5, 4, 2]}},
    "sam3_tracker_prompt_encoder": {"image_size": 112},
    "sam3_lite_text_text_model": {"num_hidden_layers": 3},
    "uvdoc": {"backbone_config": {"out_features": [f"stage{number}" for number in range(1, 7)]}},
    "xmod": {"default_language": "en_XX"},
    "blt": {"encoder_hash_byte_group_vocab": 50},
    "chameleon": {"vocabulary_map": {"<image>": 9, "IMGIMGA": 10}},
    "cohere_compass_text": {"rope_parameters": {"full_attention": _ROTARY, "sliding_attention": _ROTARY}},
    "conditional_detr": _DETR,
    "dab-detr": _DETR,
    "dbrx": {"attn_config": {"rope_theta": 10000.0, "kv_n_heads": 2, "clip_qkv": 8.0}},
    "deformable_detr": _DETR,
    "depth_pro": {
        "patch_size": 64, "intermediate_hook_ids": [1, 0], "intermediate_feature_dims": [64, 64],
        "scaled_images_feature_dims": [64, 64, 64],
    },
    "detr": _DETR,
    "diffusion_gemma_text": {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 48},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1},
    "emu3": {"vocabulary_map": {"<image>": 9, "<|extra_200|>": 10}},
    "ernie4_5_vl_moe_text": {
        "moe_intermediate_size": [48, 48], "rope_parameters": {**_ROTARY, "mrope_section": [3, 3, 2]},
    },
    "esm": {"vocab_size": 160, "pad_token_id": 0, "mask_token_id": 4},
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
    "omdet-turbo": {**_DETR, "encoder_in_channels": [512, 1024, 2048], "num_queries": 12,
        "apply_layernorm_after_vision_backbone": False, "vision_features_channels": [256, 256, 256],
    },
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
    "omdet-turbo": "keeps what its text encoder gave, so that a second call shows nothing",
    "sam3_video": "is called with the session of a video",
    "edgetam_video": "is called with the session of a video",
}
"""Model types of which no model is called, and why."""
