"""What models of images and videos are called with where the names of their arguments do not tell."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch

from .drawing import draw_tokens, noise


def _places(rows: int, height: int, width: int) -> torch.Tensor:
    """Row and column of every patch."""
    return torch.cartesian_prod(torch.arange(height), torch.arange(width)).expand(rows, -1, -1)


def _siglip2(config: Any) -> dict[str, Any]:
    patch = getattr(config, "vision_config", config).patch_size
    return {
        "pixel_values": noise(2, 24, 3 * patch**2),
        "pixel_attention_mask": torch.ones(2, 24, dtype=torch.long),
        "spatial_shapes": torch.tensor([[4, 6], [6, 4]]),
    }


def _patches_in_a_row(config: Any) -> dict[str, Any]:
    """The patches of two images side by side."""
    return {
        "pixel_values": noise(1, 3, config.patch_size, 32 * config.patch_size),
        "target_sizes": torch.tensor([[4, 4], [4, 4]]),
    }


def _image_and_words(config: Any) -> dict[str, Any]:
    return {
        "pixel_values": noise(2, 3, 112, 112),
        "input_ids": draw_tokens(2, 11),
        "attention_mask": torch.ones(2, 11, dtype=torch.long),
    }


def _features(config: Any) -> dict[str, Any]:
    """Of an image, as a map, and of words."""
    return {
        "vision_features": [noise(2, config.hidden_size, 6, 8)],
        "text_features": noise(2, 11, config.hidden_size),
        "vision_pos_embeds": [noise(2, config.hidden_size, 6, 8)],
    }


def _flat_features(config: Any) -> dict[str, Any]:
    """Of an image, as a sequence, and of words."""
    return {
        "vision_features": noise(2, 48, config.hidden_size),
        "text_features": noise(2, 11, config.hidden_size),
        "vision_pos_encoding": noise(2, 48, config.hidden_size),
        "spatial_shapes": torch.tensor([[6, 8]]),
    }


def _mask_features(config: Any) -> dict[str, Any]:
    """Of an image, from the coarsest map to the finest, with queries."""
    width = config.hidden_size
    return {
        "decoder_queries": noise(2, 9, width),
        "encoder_hidden_states": noise(2, 48, width),
        "backbone_features": [noise(2, width, 6 * scale, 8 * scale) for scale in (4, 2, 1)],
        "prompt_features": noise(2, 11, width),
    }


def _session(model: Any, folder: str, size: int) -> Any:
    """Of a video of two images, with a point on the first of them, which the model has seen."""
    module: Any = importlib.import_module(f"transformers.models.{folder}.modeling_{folder}")
    (kind,) = (value for name, value in vars(module).items() if name.endswith("InferenceSession"))
    session = kind(noise(2, 3, size, size), size, size, dtype=model.dtype)
    point = {"point_coords": torch.full((1, 1, 1, 2), 30.0), "point_labels": torch.ones(1, 1, 1, dtype=torch.int32)}
    session.add_point_inputs(session.obj_id_to_idx(1), 0, point)
    session.obj_with_new_inputs = [1]
    model(inference_session=session, frame_idx=0)
    return session


VISION_INPUTS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "BridgeTowerVisionModel": lambda config: {"image": noise(2, 3, config.image_size, config.image_size)},
    "DeepseekOcr2VisionEncoder": lambda config: {"inputs_embeds": noise(2, 40, config.hidden_size), "num_patches": 20},
    "DeepseekOcr2VisionModel": lambda config: {"pixel_values": noise(1, 3, 768, 768)},
    "DepthProModel": lambda config: {"pixel_values": noise(1, 3, 256, 256)},
    "Gemma4VisionModel": lambda config: {
        "pixel_values": noise(2, 36, 3 * config.patch_size**2),
        "pixel_position_ids": _places(2, 6, 6),
    },
    "Inkling2VisionModel": lambda config: {
        "pixel_values": noise(24, 2 * config.patch_size, 2 * config.patch_size, 3),
        "image_grid_thw": torch.tensor([[1, 4, 6]]),
    },
    "InklingVisionModel": lambda config: {
        "pixel_values": noise(5, config.temporal_patch_size, config.patch_size, config.patch_size, 3),
    },
    "MiniCPMOcrVisionModel": _patches_in_a_row,
    "MiniCPMV4_6VisionModel": _patches_in_a_row,
    "MiniCPMV4_7VisionModel": _patches_in_a_row,
    "MllamaVisionModel": lambda config: {
        "pixel_values": noise(2, 1, config.max_num_tiles, 3, config.image_size, config.image_size),
        "aspect_ratio_ids": torch.tensor([[2], [5]]),
        "aspect_ratio_mask": torch.tensor([1, 1, 0, 0]).expand(2, 1, 4),
    },
    "Molmo2Adapter": lambda config: {
        "image_features": noise(2, 16, config.hidden_size * len(config.vision_feature_layer)),
        "pooled_patches_idx": torch.arange(32).view(8, 4),
    },
    "Molmo2VisionModel": lambda config: {"pixel_values": noise(2, 16, 3 * config.patch_size**2)},
    "PPOCRV5MobileDetModel": lambda config: {"hidden_states": noise(2, 3, 64, 64)},
    "PaddleOCRVisionModel": lambda config: {
        "pixel_values": noise(1, 48, 3, config.patch_size, config.patch_size),
        "grid_thw": torch.tensor([[1, 6, 8]]),
    },
    "Siglip2Model": lambda config: {**_siglip2(config), "input_ids": draw_tokens(2, 29)},
    "Siglip2VisionModel": _siglip2,
    "LwDetrViTEncoder": lambda config: {"hidden_states": noise(2 * config.num_windows, 16, config.hidden_size)},
    "Florence2VisionBackbone": lambda config: {"hidden_states": noise(2, 3, 64, 64)},
    "OmDetTurboForObjectDetection": lambda config: {
        "pixel_values": noise(2, 3, 128, 128),
        "classes_input_ids": draw_tokens(6, 7),
        "classes_attention_mask": torch.ones(6, 7, dtype=torch.long),
        "tasks_input_ids": draw_tokens(2, 9),
        "tasks_attention_mask": torch.ones(2, 9, dtype=torch.long),
        "classes_structure": torch.tensor([3, 3]),
    },
    "OneFormerModel": lambda config: {
        "pixel_values": noise(2, 3, 64, 64),
        "task_inputs": draw_tokens(2, config.task_seq_len),
    },
    "SLANetSLAHead": lambda config: {"hidden_states": noise(2, 29, config.post_conv_out_channels)},
    "SLANeXtBackbone": lambda config: {"hidden_states": noise(2, 3, 64, 64)},
    "Sam2HieraDetModel": lambda config: {"pixel_values": noise(2, 3, 64, 64)},
    "Sam2VisionModel": lambda config: {"pixel_values": noise(2, 3, 64, 64)},
    "Sam2VideoModel": lambda config: {
        "inference_session": lambda model: _session(model, "sam2_video", 64),
        "frame_idx": 1,
    },
    "Sam3TrackerVideoModel": lambda config: {
        "inference_session": lambda model: _session(model, "sam3_tracker_video", 112),
        "frame_idx": 1,
    },
    "Sam2Model": lambda config: {
        "pixel_values": noise(2, 3, 64, 64),
        "input_points": noise(2, 1, 5, 2),
        "input_labels": torch.ones(2, 1, 5, dtype=torch.long),
    },
    "Sam3Model": _image_and_words,
    "Sam3LiteTextModel": _image_and_words,
    "Sam3DetrEncoder": _features,
    "Sam3LiteTextDetrEncoder": _features,
    "Sam3DetrDecoder": _flat_features,
    "Sam3LiteTextDetrDecoder": _flat_features,
    "Sam3MaskDecoder": _mask_features,
    "Sam3LiteTextMaskDecoder": _mask_features,
    "Sam3TrackerModel": lambda config: {
        "pixel_values": noise(2, 3, 112, 112),
        "input_points": noise(2, 1, 5, 2),
        "input_labels": torch.ones(2, 1, 5, dtype=torch.long),
    },
    "SegGptModel": lambda config: {
        name: noise(2, 3, 64, 64) for name in ("pixel_values", "prompt_pixel_values", "prompt_masks")
    },
    "XCLIPVisionModel": lambda config: {"pixel_values": noise(2 * config.num_frames, 3, 64, 64)},
    "VJEPA2Model": lambda config: {"pixel_values_videos": noise(2, 4, 3, 64, 64)},
    "TvpModel": lambda config: {
        "input_ids": draw_tokens(1, 29),
        "attention_mask": torch.ones(1, 29, dtype=torch.long),
        "pixel_values": noise(1, config.num_frames, 3, config.max_img_size, config.max_img_size),
    },
    "UnlimitedOcrVisionEncoder": lambda config: {"patch_embeds": noise(2, config.hidden_size, 4, 5)},
    "UnlimitedOcrVisionModel": lambda config: {"pixel_values": noise(1, 3, 512, 512)},
    "VideoLlama3VisionModel": lambda config: {
        "pixel_values": noise(48, 3 * config.patch_size**2),
        "grid_thw": torch.tensor([[2, 4, 6]]),
        "merge_sizes": torch.tensor([2]),
    },
}
"""By the names of classes."""
