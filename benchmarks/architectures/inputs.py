"""Inputs for any model, by what its forward is called with; those that it takes are found by trying."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from .drawing import draw_tokens, noise
from .special_inputs import inputs_of

TOKENS, DECODER_TOKENS = 29, 23
"""Two lengths, so that attention to another sequence is seen in its shape."""
ROWS = 2


def candidates(model: Any, limit: int = 24) -> Iterator[dict[str, Any]]:
    """Inputs to try, the most likely first."""
    known = inputs_of(type(model).__name__, model.config)
    if known is not None:
        yield known
        return
    parameters = inspect.signature(model.forward).parameters
    required = [
        name
        for name, parameter in parameters.items()
        if parameter.default is inspect.Parameter.empty
        and parameter.kind not in (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    ]
    main = model.main_input_name
    base = [name for name in ([main] if isinstance(main, str) else main) if name in parameters]
    base += [name for name in required if name not in base]
    if "input_features" in base:
        base += [name for name in ("input_features_mask",) if name in parameters and name not in base]
    if main == "input_ids" or "input_ids" in base:
        base += [name for name in ("decoder_input_ids",) if name in parameters and name not in base]
    wider = [
        name
        for name in ("pixel_values", "input_features", "input_values", "decoder_input_ids", "bbox", "input_ids")
        if name in parameters and name not in base
    ]
    ways_to_call = [base, *([*base, name] for name in wider), [*base, *wider]]
    if main != "input_ids" and "input_ids" in parameters and not required:
        ways_to_call.insert(1, ["input_ids"])
    if "inputs_embeds" in parameters and "inputs_embeds" not in base:
        ways_to_call.append(["inputs_embeds"])
    for names in ways_to_call:
        ways = [_values(name, model) for name in names]
        for values in itertools.islice(itertools.product(*ways), limit):
            given = {name: value for name, value in zip(names, values, strict=True) if value is not None}
            if "pixel_values" in given and "grid_thw" in parameters and "grid_thw" not in given:
                continue
            yield given
            if "use_cache" in parameters:
                yield {**given, "use_cache": False}


def _find(config: Any, *names: str) -> Any:
    """The first of the names that the configuration or one of its parts has."""
    from transformers import PretrainedConfig

    for name in names:
        value = getattr(config, name, None)
        if value is not None:
            return value
    for part in vars(config).values():
        if isinstance(part, PretrainedConfig) and (value := _find(part, *names)) is not None:
            return value
    return None


def _int(value: Any, default: int) -> int:
    if isinstance(value, dict):
        value = value.get("height", default)
    while isinstance(value, (list, tuple)):
        value = value[-1] if value else default
    return int(value) if isinstance(value, (int, float)) else default


def _values(name: str, model: Any) -> list[Any]:
    """What a parameter may be, by its name."""
    config = model.config
    width = _int(_find(config, "hidden_size", "d_model", "n_embd", "embed_dim", "dim"), 64)
    mels = _int(
        _find(
            config,
            "num_mel_bins",
            "input_feat_per_channel",
            "feature_size",
            "input_dim",
            "n_mels",
            "feature_projection_input_dim",
            "num_mel_channels",
            "input_channels",
            "input_size",
        ),
        80,
    )
    frames = _int(_find(config, "max_source_positions", "max_length"), 100) * 2
    codebooks = _int(_find(config, "num_codebooks", "num_channels", "n_codebooks"), 4)
    match name:
        case "input_ids" | "decoder_input_ids" | "qformer_input_ids" | "input_tokens" | "code":
            length = DECODER_TOKENS if name == "decoder_input_ids" else TOKENS
            return [
                draw_tokens(ROWS, length, seed=len(name)),
                draw_tokens(ROWS, length, codebooks, seed=len(name)) % 50,
                draw_tokens(ROWS, codebooks, length, seed=len(name)) % 50,
                draw_tokens(ROWS * codebooks, length, seed=len(name)) % 50,
            ]
        case "inputs_embeds" | "hidden_states" | "encoder_hidden_states" | "decoder_inputs_embeds" | "inputs":
            length = DECODER_TOKENS + 8 if name == "encoder_hidden_states" else TOKENS
            return [noise(ROWS, length, width), *_patches(config), draw_tokens(ROWS, 256)]
        case "attention_mask":
            return [torch.ones(ROWS, TOKENS, dtype=torch.long), None]
        case "pixel_values" | "pixel_values_videos" | "images" | "flattened_patches" | "pixel_values_images":
            return [*_images(config, videos=name == "pixel_values_videos"), *_patches(config)]
        case "grid_thw" | "image_grid_thw" | "grid_hws" | "grid_hw":
            return [torch.tensor([[1, 8, 8]]), torch.tensor([[8, 8]])]
        case "bbox":
            return [torch.zeros(ROWS, TOKENS, 4, dtype=torch.long)]
        case "input_features" | "audio_features" | "input_audio_embeds" | "audio_values":
            return [
                noise(ROWS, mels, frames),
                noise(ROWS, 96, mels),
                noise(ROWS, mels, 96),
                noise(ROWS, 1, 64, mels),
                noise(mels, 200),
                noise(ROWS, 96, 2 * mels),
                noise(ROWS, 1, 1024, mels),
                noise(ROWS, 96, 128),
            ]
        case "input_values" | "padded_audio" | "waveform":
            return [
                noise(ROWS, 6400),
                noise(ROWS, 1, 9600),
                noise(ROWS, 1024, mels),
                noise(ROWS, 100, mels),
                noise(ROWS, mels, 100),
            ]
        case "feature_lens" | "input_features_lens" | "feature_lengths":
            return [torch.tensor([200])]
        case "aftercnn_lens":
            return [torch.tensor([100])]
        case "past_values" | "past_observed_mask":
            length = _int(_find(config, "context_length"), 32) + max([0, *(_find(config, "lags_sequence") or [])])
            length = _int(_find(config, "context_length"), 32) if _find(config, "patch_length") else length
            channels = _int(_find(config, "num_input_channels", "input_size"), 1)
            shapes = [(ROWS, length, channels), (ROWS, length)]
            return [noise(*shape) if name == "past_values" else torch.ones(shape) for shape in shapes]
        case "past_values_padding":
            return [torch.zeros(ROWS, _int(_find(config, "context_length"), 32))]
        case "past_time_features" | "future_time_features":
            features = _int(_find(config, "num_time_features"), 0)
            ahead = _int(_find(config, "prediction_length"), 8)
            length = _int(_find(config, "context_length"), 32) + max([0, *(_find(config, "lags_sequence") or [])])
            return [noise(ROWS, length if name[0] == "p" else ahead, features)]
        case "future_values":
            return [noise(ROWS, _int(_find(config, "prediction_length"), 8))]
        case "freq":
            return [torch.zeros(ROWS, 1, dtype=torch.long)]
        case "timestep" | "timesteps":
            return [torch.full((ROWS,), 3)]
        case "position_ids":
            return [torch.arange(TOKENS)[None].expand(ROWS, -1)]
        case "query_embeds":
            return [noise(ROWS, 11, width)]
        case "speech_inputs":
            return [noise(ROWS, 9600)]
        case _ if name.endswith("mask"):
            return [torch.ones(ROWS, length, dtype=torch.long) for length in (frames, 96, TOKENS)]
        case _:
            return [None]


def _images(config: Any, *, videos: bool = False) -> list[Tensor]:
    channels = _int(_find(config, "num_channels", "in_channels", "in_chans"), 3)
    if channels > 9:
        channels = 3
    named = _int(_find(config, "image_size", "img_size", "crop_size"), 64)
    given = _find(config, "image_size", "img_size")
    sizes = list(dict.fromkeys([named, 64, 224]))
    frames = _int(_find(config, "num_frames", "frames_per_clip"), 4)
    images = [noise(ROWS, channels, size, size) for size in sizes]
    clips = [noise(ROWS, frames, channels, size, size) for size in sizes[:2]]
    others = [noise(ROWS, 2, channels, sizes[0], sizes[0]), noise(ROWS, channels, frames, sizes[0], sizes[0])]
    if isinstance(given, (list, tuple)) and len(given) == 2:
        images.insert(0, noise(ROWS, channels, int(given[0]), int(given[1])))
    return [*clips, *images, *others] if videos else [*images, *clips, *others]


def _patches(config: Any) -> list[Tensor]:
    """Images cut into patches, as vision towers of language models take them: 64 of them."""
    channels = _int(_find(config, "in_channels", "in_chans", "num_channels"), 3)
    patch = _int(_find(config, "patch_size", "spatial_patch_size"), 14)
    frames = _int(_find(config, "temporal_patch_size", "patch_temporal"), 1)
    if channels > 9 or patch > 64:
        return []
    return [
        noise(64, channels * frames * patch * patch),
        noise(64, channels, patch, patch),
        noise(ROWS, 64, channels * patch * patch),
    ]
