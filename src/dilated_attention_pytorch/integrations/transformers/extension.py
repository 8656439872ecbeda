"""Context extension of pretrained transformers models."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from .config import PatternOfModel, check_model, configuration_errors, text_config
from .pattern import set_pattern

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Rotary = Literal["yarn", "linear", "ntk", "none"]


def extend_context(
    model: PreTrainedModel, length: int, pattern: PatternOfModel, *, rotary: Rotary = "yarn"
) -> PreTrainedModel:
    """Scale a model's rotary positions to ``length`` tokens and set its attention pattern, in place.

    With ``s = length / L``, L the model's previous ``max_position_embeddings``, and channel pairs that rotate by
    ``theta_i = theta ** (-2 i / d)`` radians per token:

    - ``"yarn"``: pairs with at least 32 rotations in L tokens keep ``theta_i``, those with at most one get
      ``theta_i / s``, with a ramp between; cosines and sines are multiplied by ``0.1 ln(s) + 1``, which scales the
      scores of the rotated channels by its square (Peng et al. 2023, arXiv:2309.00071);
    - ``"linear"``: ``theta_i / s``, position interpolation (Chen et al. 2023, arXiv:2306.15595);
    - ``"ntk"``: theta becomes ``theta * s ** (d / (d - 2))``, so that the slowest pair rotates as with "linear" and the
      fastest as before;
    - ``"none"``: positions unchanged, for models trained without a length limit.

    Weights are unchanged. The settings are stored in the configuration, saved and loaded with the model. The model's
    outputs change, at short lengths too; training on sequences of ``length`` tokens has to recover quality.

    Layers with a sliding window keep it, and keep their own rotary parameters if they have some (Gemma 3), since
    distances within a window do not grow. If all layers share one rotary embedding, it is scaled for all.
    Models whose layers without a window have no positions (Cohere 2) have nothing to scale: pass "none".

    In a multimodal model, the text part is changed.

    Args:
        model: a decoder with unscaled rotary positions.
        length: new maximum length in tokens, more than L.
        pattern: see :func:`set_pattern`.
        rotary: scaling of the positions.

    Returns:
        the model itself.

    Raises:
        TypeError, ValueError: the length does not exceed L, positions are scaled already, or see :func:`set_pattern`.
        NotImplementedError: the model has no rotary positions of transformers' kind, its configuration rejects
            scaled ones (Phi-3), or its attention takes no pattern (DeepSeek V3.2). The model is then
            unchanged.

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> from dilated_attention_pytorch import DilatedPattern
    >>> from dilated_attention_pytorch.integrations import extend_context
    >>> config = LlamaConfig(
    ...     vocab_size=97, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
    ...     max_position_embeddings=64,
    ... )
    >>> model = extend_context(LlamaForCausalLM(config), 256, DilatedPattern([64, 256], [1, 4]))
    >>> model.config.max_position_embeddings, model.config.rope_parameters["factor"]
    (256, 4.0)
    """
    if rotary not in ("yarn", "linear", "ntk", "none"):
        raise ValueError(f'rotary must be "yarn", "linear", "ntk" or "none", got {rotary!r}')
    check_model("extend_context", model)
    config = text_config(model.config)
    before = _length_before(config, length)
    rotaries = _rotaries(model, config)
    scaled = copy.deepcopy(config)
    scaled.max_position_embeddings = length
    if rotary != "none":
        scaled.rope_parameters = _scaled(config, rotary, length / before, before)
    made = _made(rotaries, scaled, is_as_before=rotary == "none")
    set_pattern(model, pattern)
    config.max_position_embeddings = length
    config.rope_parameters = scaled.rope_parameters
    for (parent, name, _), module in zip(rotaries, made, strict=True):
        module.config = config
        setattr(parent, name, module)
    return model


def _length_before(config: Any, length: int) -> int:
    before: int | None = getattr(config, "max_position_embeddings", None)
    if isinstance(length, bool) or not isinstance(length, int):
        raise TypeError(f"length must be a number of tokens, an int, got {length!r}")
    if before is None:
        raise NotImplementedError(
            f"{type(config).__name__} has no max_position_embeddings, so the length to extend from is not known: set "
            "it in the configuration to the length that the model was trained on"
        )
    if length <= before:
        raise ValueError(
            f"length must be more than the {before} tokens of the model (max_position_embeddings), got {length}; for a "
            "pattern alone call set_pattern"
        )
    return before


def _rotaries(model: nn.Module, config: Any) -> list[tuple[nn.Module, str, Any]]:
    """Every rotary embedding that derives its frequencies from ``config``, with its parent and name."""
    rotaries = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        # Every architecture has a class of its own for them, without a base in common: they are known by the method.
        # Other parts of a model, such as a vision tower, have their own configuration.
        if hasattr(child, "compute_default_rope_parameters") and child.config is config
    ]
    if not rotaries:
        raise NotImplementedError(
            f"{type(model).__name__} has no rotary positions of transformers' kind, whose frequencies follow from "
            "config.rope_parameters, so they cannot be scaled; for a pattern alone call set_pattern"
        )
    return rotaries


def _made(rotaries: list[tuple[nn.Module, str, Any]], scaled: Any, *, is_as_before: bool) -> list[Any]:
    """The rotary embeddings of the configuration ``scaled``.

    Raises:
        NotImplementedError: the configuration rejects them, or would not restore them after saving.
    """
    wanted = copy.deepcopy(scaled.rope_parameters)
    try:
        again = type(scaled).from_dict(scaled.to_dict())
        again.validate()
        made = [type(old)(scaled) for _, _, old in rotaries]
    except configuration_errors() as error:
        raise NotImplementedError(
            f"{type(scaled).__name__} does not take the rotary parameters {wanted} ({error}); choose another scaling"
        ) from error
    for other in (again.rope_parameters, scaled.rope_parameters):
        if other != wanted:
            raise NotImplementedError(
                f"{type(scaled).__name__} makes other rotary parameters ({other}) of {wanted}; choose another scaling"
            )
    for (_, _, old), new in zip(rotaries, made, strict=True):
        for buffer in old.buffers():
            new.to(buffer.device)
        if is_as_before and not _are_equal(old, new):
            raise NotImplementedError(
                f'rotary="none" keeps positions, and these follow from the length of the model (rope_type '
                f'"{wanted.get("rope_type")}"): begin with the model before they were scaled'
            )
    return made


def _are_equal(rotary: Any, other: Any) -> bool:
    """Whether two rotary embeddings have the same frequencies at every length."""
    buffers = zip(rotary.buffers(), other.buffers(), strict=True)
    scalings = (getattr(module, "attention_scaling", None) for module in (rotary, other))
    is_fixed = getattr(rotary, "rope_type", None) != "dynamic"
    return is_fixed and len(set(scalings)) == 1 and all(torch.equal(a, b) for a, b in buffers)


def _scaled(config: Any, rotary: Rotary, factor: float, before: int) -> dict[str, Any]:
    """``config.rope_parameters`` scaled by ``factor``, for the layers without a window."""
    parameters: dict[str, Any] = config.rope_parameters
    if "full_attention" in parameters:
        inner = _scaled_alike(parameters["full_attention"], config, rotary, factor, before)
        return {**parameters, "full_attention": inner}
    return _scaled_alike(parameters, config, rotary, factor, before)


def _scaled_alike(
    parameters: dict[str, Any], config: Any, rotary: Rotary, factor: float, before: int
) -> dict[str, Any]:
    kind = parameters.get("rope_type", "default")
    if kind != "default":
        raise ValueError(
            f'positions are scaled already (rope_type "{kind}" in config.rope_parameters), and scaling them again '
            'would be a guess: pass rotary="none" if they reach far enough, or begin with the model before that'
        )
    if rotary == "ntk":
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        channels = int(head_dim * parameters.get("partial_rotary_factor", 1.0))
        if channels <= 2:
            raise ValueError(f'rotary="ntk" needs more than one pair of channels that turn, got {channels} channels')
        return {**parameters, "rope_theta": parameters["rope_theta"] * factor ** (channels / (channels - 2))}
    added: dict[str, Any] = {"rope_type": rotary, "factor": factor}
    if rotary == "yarn":
        added["original_max_position_embeddings"] = before
    return {**parameters, **added}
