"""Small configurations: what a number means is told by its name, and the rest keeps its default."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassError

WIDTH, HEADS, KV_HEADS, HEAD_DIM, INNER = 64, 4, 2, 16, 48
VOCABULARY, FIRST_TOKEN, LAST_TOKEN = 160, 80, 130
"""Tokens drawn lie between the two; special ones lie outside."""
PARAMETERS = 45_000_000
"""More than these, and a configuration is not built."""

_LAYERS = {
    "num_hidden_layers",
    "n_layer",
    "n_layers",
    "num_layers",
    "encoder_layers",
    "decoder_layers",
    "depth",
    "layers",
    "num_encoder_layers",
    "num_decoder_layers",
    "num_block_layers",
    "encoder_num_hidden_layers",
    "num_blocks",
    "decoder_num_hidden_layers",
    "resampler_depth",
    "decoder_num_layers",
    "memory_attention_num_layers",
    "e_layers",
    "encoder_num_layers",
    "num_hidden_groups",
    "encoder_n_layers",
    "decoder_n_layers",
    "num_block_repeats",
    "mm_layers",
    "num_qformer_layers",
    "refiner_num_layers",
    "num_fusion_layers",
    "latents_encoder_layers",
}
_WIDTHS = {
    "hidden_size",
    "d_model",
    "n_embd",
    "embed_dim",
    "dim",
    "emb_dim",
    "embedding_size",
    "word_embed_proj_dim",
    "encoder_hidden_size",
    "out_hidden_size",
    "projection_dim",
    "hidden_dim",
    "encoder_hidden_dim",
    "text_hidden_size",
    "cross_attention_hidden_size",
    "lm_hidden_size",
    "vision_hidden_size",
    "qformer_hidden_size",
    "d_embed",
    "decoder_hidden_size",
    "text_embed_dim",
    "projection_hidden_dim",
    "hidden_size_per_layer_input",
    "attention_dim",
    "vision_output_dim",
    "projector_hidden_size",
    "embedding_dim",
    "encoder_embed_dim",
    "decoder_embed_dim",
    "fusion_hidden_size",
    "output_hidden_size",
    "backbone_dim",
    "backbone_hidden_size",
    "shared_dim",
    "cond_dim",
    "d_inner_hidden",
    "vision_embed_dim",
    "output_dim",
    "encoder_width",
    "vision_dim",
    "cross_hidden_size",
    "hidden_size_global",
}
_HEADS = {
    "num_attention_heads",
    "num_heads",
    "n_head",
    "n_heads",
    "encoder_attention_heads",
    "decoder_attention_heads",
    "attention_heads",
    "resampler_n_heads",
    "decoder_num_attention_heads",
    "encoder_num_attention_heads",
    "num_encoder_attention_heads",
    "num_decoder_attention_heads",
    "swa_num_attention_heads",
    "index_n_heads",
    "linear_num_heads",
    "num_qformer_heads",
    "linear_num_value_heads",
    "linear_num_key_heads",
    "num_lightning_heads",
    "cross_num_attention_heads",
    "cross_num_key_value_heads",
}
_KV_HEADS = {
    "num_key_value_heads",
    "swa_num_key_value_heads",
    "num_global_key_value_heads",
    "num_kv_heads",
    "encoder_num_key_value_heads",
    "decoder_num_key_value_heads",
    "n_head_kv",
}
_HEAD_DIMS = {
    "head_dim",
    "d_kv",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
    "swa_head_dim",
    "attention_head_dim",
    "global_head_dim",
    "linear_head_dim",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "index_head_dim",
    "resampler_head_dim",
    "dim_head",
    "attention_head_size",
    "qk_pos_emb_head_dim",
    "kv_channels",
    "linear_kv_head_dim",
    "linear_v_head_dim",
    "v_head_size",
    "cross_head_dim",
}
_INNER = {
    "intermediate_size",
    "ffn_dim",
    "encoder_ffn_dim",
    "decoder_ffn_dim",
    "d_ff",
    "mlp_dim",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
    "dim_feedforward",
    "encoder_intermediate_size",
    "decoder_intermediate_size",
    "intermediate_dim",
    "n_inner",
    "ffn_hidden_size",
    "moe_ffn_hidden_size",
    "intermediate_size_mlp",
    "dense_intermediate_size",
    "shared_intermediate_size",
    "moe_shared_expert_intermediate_size",
    "hidden_ff",
    "encoder_dim_feedforward",
    "decoder_dim_feedforward",
    "expert_ffn_hidden_size",
    "projector_intermediate_size",
}
_EXPERTS = {"num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts", "num_routed_experts"}
_TOP = {
    "num_experts_per_tok",
    "moe_topk",
    "moe_top_k",
    "num_experts_per_token",
    "top_k",
    "moe_k",
    "num_selected_experts",
}
_LOW_RANK = {"q_lora_rank", "kv_lora_rank", "o_lora_rank"}
_POSITIONS = {
    "max_position_embeddings",
    "n_positions",
    "max_source_positions",
    "max_target_positions",
    "n_ctx",
    "max_seq_len",
    "max_sequence_length",
    "encoder_max_position_embeddings",
    "decoder_max_position_embeddings",
    "context_length_text",
}
_VOCABULARIES = {
    "vocab_size",
    "vocab_size_per_layer_input",
    "text_vocab_size",
    "decoder_vocab_size",
    "encoder_vocab_size",
    "embedding_vocab_size",
    "src_vocab_size",
    "tgt_vocab_size",
    "n_vocab",
    "unk_vocab_size",
    "max_vocab_size",
}
_WINDOWS = {"sliding_window", "sliding_window_size", "swa_window_size", "local_window_size", "local_attention"}
WINDOW = 5

_BY_NAME: tuple[tuple[set[str], Any], ...] = (
    (_WIDTHS, WIDTH),
    (_HEADS, HEADS),
    (_KV_HEADS, KV_HEADS),
    (_HEAD_DIMS, HEAD_DIM),
    (_INNER, INNER),
    (_EXPERTS, 4),
    (_TOP, 2),
    ({"rotary_dim"}, 8),
    ({"n_group", "topk_group", "num_expert_group"}, 1),
    (_LOW_RANK, 24),
    (_POSITIONS, 128),
    ({"max_length"}, 96),
)
_SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1, "sep_token_id": 3}


def small_config(config_class: Any, level: str, changes: dict[str, dict[str, Any]]) -> Any:
    """A configuration of few layers and words: ``"tiny"`` narrow too, ``"shallow"`` as wide as by default.

    ``changes`` holds what the types of models need besides, those of its parts too.
    """
    try:
        default = config_class()
    except (TypeError, ValueError, StrictDataclassError):
        default = config_class(**changes.get(config_class.model_type, {}))
    return _rebuilt(default, level, changes, {})


def _rebuilt(default: Any, level: str, all_changes: dict[str, dict[str, Any]], given: dict[str, Any]) -> Any:
    from transformers import CONFIG_MAPPING, PretrainedConfig

    changes = {**all_changes.get(default.model_type, {}), **given}
    if level == "tiny" and "rope_parameters" not in changes and _has_rotary_sections(type(default)):
        changes["rope_parameters"] = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}

    arguments: dict[str, Any] = {}
    values = {name: value for name, value in vars(default).items() if not name.startswith("_")}
    fields = set(type(default).__dataclass_fields__)
    for name, value in values.items():
        if name in changes or name not in fields:
            continue
        if isinstance(value, PretrainedConfig):
            arguments[name] = _rebuilt(value, level, all_changes, {})
        elif level != "default" and (new := _small(name, value, values, level)) is not _KEPT:
            arguments[name] = new
    for name, change in changes.items():
        if isinstance(change, dict) and "model_type" in change:
            arguments[name] = _rebuilt(CONFIG_MAPPING[change["model_type"]](**change), level, all_changes, change)
        elif isinstance(change, dict) and isinstance(values.get(name), PretrainedConfig):
            arguments[name] = _rebuilt(values[name], level, all_changes, change)
        else:
            arguments[name] = change
    kv_heads, heads = values.get("num_key_value_heads"), values.get("num_attention_heads")
    if level == "tiny" and isinstance(heads, int) and kv_heads == heads > 1 and "num_key_value_heads" not in changes:
        arguments["num_key_value_heads"] = HEADS
    return type(default)(**arguments)


_KEPT = object()


def _small(name: str, value: Any, values: dict[str, Any], level: str) -> Any:
    if name in _VOCABULARIES and value and isinstance(value, int):
        return VOCABULARY
    if name.endswith(("_token_id", "_token_index", "_token_ids", "_token")) or name.startswith("token_id_"):
        return _special_token(name, value)
    if name in ("layer_types", "layers_block_type", "mlp_layer_types", "hybrid_layer_pattern"):
        return _few_layers(values, name)
    if value is None and level == "tiny" and name in ("head_dim", *_TOP):
        return HEAD_DIM if name == "head_dim" else 2
    if isinstance(value, bool) or not isinstance(value, (int, list, tuple)):
        return _KEPT
    if name in _LAYERS and isinstance(value, int):
        return _num_layers(values) if name == "num_hidden_layers" else min(value, 2)
    if name == "depths" and isinstance(value, (list, tuple)):
        return type(value)(1 if all(isinstance(depth, int) for depth in value) else value for _ in value)
    if name in ("image_size", "img_size", "input_size") and isinstance(value, int) and value > 224:
        return 64 if level == "tiny" else 128
    if name in _WINDOWS and isinstance(value, int) and value:
        return 2 * WINDOW if name == "local_attention" else WINDOW
    if not isinstance(value, int) or level != "tiny":
        return _KEPT
    for names, new in _BY_NAME:
        if name in names and value:
            return new if value > 1 else value
    if name == "image_size" and value > 64:
        return 64
    return _KEPT


def _special_token(name: str, value: Any) -> Any:
    if name in _SPECIAL:
        return _SPECIAL[name] if value is not None or name == "pad_token_id" else None
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        return _KEPT
    # Each its own number, below and above of the tokens that are drawn.
    return 4 + sum(ord(letter) * (place + 1) for place, letter in enumerate(name)) % (FIRST_TOKEN - 4)


def _num_layers(values: dict[str, Any]) -> int:
    kinds = values.get("layer_types")
    return 2 if not kinds else max(2, len(set(kinds)))


def _few_layers(values: dict[str, Any], name: str) -> Any:
    """One layer of each type, in the order of the model, the last repeated if there is one type."""
    types = values[name]
    if not isinstance(types, (list, tuple)) or not all(isinstance(kind, str) for kind in types):
        return _KEPT
    number = _num_layers(values)
    first = list(dict.fromkeys(types))[:number]
    return first + first[-1:] * (number - len(first))


def _has_rotary_sections(config_class: Any) -> bool:
    """Whether its rotary embedding has sections for time, height and width, which must fill narrow heads too."""
    if "rope_parameters" not in config_class.__dataclass_fields__:
        return False
    folder = Path(inspect.getfile(config_class)).parent
    return any("mrope_section" in file.read_text() for file in folder.glob("modeling_*.py"))


def number_of_parameters(build: Callable[[], Any]) -> int:
    """Of a model, counted without memory for it."""
    import torch

    with torch.device("meta"):
        model = build()
    return sum(parameter.numel() for parameter in model.parameters())
