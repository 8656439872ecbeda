"""What models of images and videos need beyond small numbers."""

from __future__ import annotations

from typing import Any

_STAGES = {"depths": [1, 1, 1, 1], "out_features": ["stage2", "stage3", "stage4"]}
_DETR = {"use_timm_backbone": False, "backbone_config": {"model_type": "resnet", **_STAGES}}
_HGNET = {"backbone_config": {"model_type": "hgnet_v2", "out_features": ["stage2", "stage3", "stage4"]}}
_SWIN = {"embed_dim": 48, "depths": [1, 1, 1, 1], "num_heads": [3, 6, 12, 24], "window_size": 4, "image_size": 64}
_WIDE = {"encoder_hidden_dim": 256, "d_model": 256}
_FOUR_LAYERS = {"num_hidden_layers": 4, "out_indices": [1, 2, 3, 4], "reshape_hidden_states": False}
_ALL_FOUR = {
    "num_hidden_layers": 4,
    "out_features": ["stage1", "stage2", "stage3", "stage4"],
    "reshape_hidden_states": False,
}
_HIERA = {
    "image_size": [64, 64],
    "blocks_per_stage": [1, 2, 2, 1],
    "embed_dim_per_stage": [16, 32, 64, 128],
    "num_attention_heads_per_stage": [1, 2, 4, 8],
    "window_size_per_stage": [8, 4, 4, 2],
    "global_attention_blocks": [4],
    "hidden_size": 16,
}
_SAM3_FEATURES = {"fpn_hidden_size": 64, "backbone_feature_sizes": [[32, 32], [16, 16], [8, 8]]}
_HIERA_FEATURES = {
    "backbone_channel_list": [128, 64, 32, 16],
    "backbone_feature_sizes": [[16, 16], [8, 8], [4, 4]],
    "fpn_hidden_size": 64,
}
_TRACKER = {
    "mask_decoder_config": {"hidden_size": 128},
    "memory_attention_hidden_size": 128,
    "memory_encoder_hidden_size": 128,
    "memory_attention_feed_forward_hidden_size": 48,
    "mask_downsampler_embed_dim": 128,
    "memory_fuser_embed_dim": 128,
    "memory_fuser_intermediate_dim": 64,
}

VISION_CHANGES: dict[str, dict[str, Any]] = {
    "align_vision_model": {"width_coefficient": 0.25, "depth_coefficient": 0.2, "hidden_dim": 64},
    "bridgetower_vision_model": {"image_size": 64},
    "chameleon_vqgan": {"base_channels": 32, "embed_dim": 32, "num_embeddings": 128},
    "chmv2": {
        "backbone_config": {
            "model_type": "dinov3_vit",
            **_FOUR_LAYERS,
            "reshape_hidden_states": True,
            "return_class_token": True,
        },
        "post_process_channels": [32, 32, 32, 32],
    },
    "conditional_detr": _DETR,
    "d_fine": {**_HGNET, **_WIDE},
    "dab-detr": _DETR,
    "deepseek_ocr2_vision": {"encoder_config": {"hidden_size": 64}, "sam_config": {"downsample_channels": [64, 64]}},
    "deformable_detr": _DETR,
    "deimv2": {**_HGNET, **_WIDE},
    "depth_anything": {"reassemble_hidden_size": 64, "backbone_config": {"model_type": "dinov2", **_FOUR_LAYERS}},
    "depth_pro": {
        "patch_size": 64,
        "intermediate_hook_ids": [1, 0],
        "intermediate_feature_dims": [64, 64],
        "scaled_images_feature_dims": [64, 64, 64],
    },
    "detr": _DETR,
    "donut-swin": {**_SWIN, "window_size": 2},
    "dots3_note_vision_encoder": {"adapter_in_dim": 64},
    "efficientnet": {"width_coefficient": 0.25, "depth_coefficient": 0.2, "hidden_dim": 320},
    "emu3_vqgan": {"base_channels": 32, "embed_dim": 32, "num_embeddings": 128, "hidden_size": 64},
    "florence_vision": {"embed_dim": [16, 32, 64, 64], "num_heads": [2, 2, 4, 4], "num_groups": [2, 2, 4, 4]},
    "grounding-dino": {"num_queries": 12},
    "inkling_vision": {"num_hidden_layers": 4},
    "janus_vqgan": {"base_channels": 32, "embed_dim": 32, "num_embeddings": 128, "num_patches": 4},
    "llama4_vision_model": {"intermediate_size": 256, "projector_input_dim": 64, "projector_output_dim": 64},
    "lw_detr": {
        "backbone_config": {"out_features": ["stage1", "stage2"]},
        "projector_scale_factors": [1.0],
        "num_queries": 12,
        "group_detr": 1,
    },
    "lw_detr_vit": {"num_windows": 4},
    "mask2former": {
        "backbone_config": {"out_features": ["stage1", "stage2", "stage3", "stage4"]},
        "feature_size": 64,
        "mask_feature_size": 64,
        "encoder_feedforward_dim": 48,
        "num_queries": 20,
    },
    "maskformer-swin": _SWIN,
    "minicpm_ocr_vision": {"insert_layer_id": 0},
    "minicpmv4_6_vision": {"insert_layer_id": 0},
    "minicpmv4_7_vision": {"insert_layer_id": 0},
    "mllama_vision_model": {"intermediate_layers_indices": [0, 1], "num_global_layers": 1},
    "mm-grounding-dino": {"num_queries": 12},
    "molmo2_adapter": {"vision_feature_layer": [1, 0]},
    "molmo2_vision": {"image_size": [56, 56]},
    "omdet-turbo": _DETR,
    "oneformer": {
        "backbone_config": {"out_features": ["stage1", "stage2", "stage3", "stage4"]},
        "conv_dim": 64,
        "mask_dim": 64,
        "encoder_feedforward_dim": 48,
        "num_queries": 20,
        "text_encoder_width": 64,
        "task_seq_len": 19,
        "text_encoder_vocab_size": 160,
    },
    "paddleocr_vl_vision": {"rope_parameters": {"rope_type": "axial", "rope_theta": 10000.0}},
    "pp_doclayout_v2": {**_HGNET, "num_queries": 12},
    "pp_doclayout_v3": {
        "backbone_config": {"model_type": "hgnet_v2", "out_features": ["stage1", "stage2", "stage3", "stage4"]},
        "num_queries": 12,
    },
    "pp_doclayout_v4": {**_HGNET, "num_queries": 12},
    "prompt_depth_anything": {
        "reassemble_hidden_size": 64,
        "backbone_config": {"model_type": "dinov2", **_FOUR_LAYERS},
    },
    "rf_detr": {"num_queries": 12, "group_detr": 1},
    "rt_detr": {"backbone_config": {"model_type": "rt_detr_resnet", **_STAGES}, **_WIDE},
    "rt_detr_v2": {"backbone_config": {"model_type": "rt_detr_resnet", **_STAGES}, **_WIDE},
    "sam2": {"vision_config": {**_HIERA_FEATURES, "backbone_config": _HIERA}},
    "sam2_hiera_det_model": _HIERA,
    "sam2_video": {
        "vision_config": {**_HIERA_FEATURES, "backbone_config": _HIERA, "fpn_hidden_size": 128},
        "prompt_encoder_config": {"hidden_size": 128},
        "memory_attention_rope_feat_sizes": [4, 4],
        **_TRACKER,
    },
    "sam2_vision_model": {**_HIERA_FEATURES, "backbone_config": _HIERA},
    "sam3_tracker_prompt_encoder": {"image_size": 112},
    "sam3_tracker_video": {
        "vision_config": {"fpn_hidden_size": 128},
        "prompt_encoder_config": {"hidden_size": 128, "image_size": 112},
        "memory_attention_rope_feat_sizes": [8, 8],
        "image_size": 112,
        **_TRACKER,
    },
    "sam3_vision_model": _SAM3_FEATURES,
    "sam3_vit_model": {"window_size": 2},
    "seggpt": {
        "image_size": [128, 64],
        "pretrain_image_size": 64,
        "merge_index": 0,
        "intermediate_hidden_state_indices": [0, 1],
    },
    "slanext": {"vision_config": {"output_channels": 64}, "post_conv_in_channels": 64, "post_conv_out_channels": 64},
    "superglue": {"gnn_layers_types": ["self", "cross"]},
    "superpoint": {"max_keypoints": 64},  # of which every image has more, so no keypoint is padding
    "swin": {**_SWIN, "window_size": 2},
    "swinv2": _SWIN,
    "table-transformer": _DETR,
    "tipsv2_dpt": {"backbone_config": _ALL_FOUR, "neck_hidden_sizes": [32, 32, 32, 32]},
    "tvp": {"max_img_size": 64, "visual_prompt_size": 8, "num_frames": 2},
    "unlimited_ocr_vision": {"sam_config": {"downsample_channels": [64, 64]}},
    "upernet": {
        "backbone_config": {
            "model_type": "convnext",
            "hidden_sizes": [32, 64, 96, 128],
            "out_features": [f"stage{number}" for number in (1, 2, 3, 4)],
        },
    },
    "uvdoc": {"backbone_config": {"out_features": [f"stage{number}" for number in range(1, 7)]}},
    "vitmatte": {"fusion_hidden_sizes": [32, 32, 32, 32], "convstream_hidden_sizes": [16, 16, 16]},
    "vjepa2": {
        "crop_size": 64,
        "frames_per_clip": 4,
        "pred_hidden_size": 64,
        "pred_num_attention_heads": 4,
        "pred_num_hidden_layers": 2,
    },
    "xclip_vision_model": {"mit_hidden_size": 64, "mit_intermediate_size": 48, "mit_num_attention_heads": 4},
    "zoedepth": {"backbone_config": _ALL_FOUR, "neck_hidden_sizes": [32, 32, 32, 32], "bottleneck_features": 64},
}
"""Arguments of configurations, by model type."""
