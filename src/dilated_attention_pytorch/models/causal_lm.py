"""LongNet as a transformers model, with its saving, loading, training and generation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dilated_attention_pytorch.installation import install_command

try:
    from transformers import (
        AutoConfig,
        AutoModelForCausalLM,
        GenerationConfig,
        GenerationMixin,
        PreTrainedConfig,
        PreTrainedModel,
    )
    from transformers.modeling_outputs import CausalLMOutputWithPast
except ImportError as error:
    raise ImportError(f"LongNetForCausalLM needs transformers 5: {install_command('train')}") from error

from dilated_attention_pytorch.nn import MultiheadPatternAttention

from .blocks import FeedForward
from .cache import LongNetCache
from .config import LongNetConfig
from .longnet import LongNetLM
from .token_loss import next_tokens, token_loss, token_loss_of_hidden

# Gradient checkpointing is enabled by a method call in transformers; it is not part of the saved configuration.
_OF_TRAINING = ("gradient_checkpointing", "checkpoint_every")
_FIELDS = tuple(field.name for field in fields(LongNetConfig) if field.name not in _OF_TRAINING)
_SMALLEST = LongNetConfig(
    embed_dim=256, num_layers=4, num_heads=4, segment_lengths=[512, 2048, 8192], dilation_rates=[1, 4, 16]
)


class LongNetCausalLMConfig(PreTrainedConfig):
    """A :class:`LongNetConfig` as a transformers configuration: the same fields, plus saving and loading.

    Args:
        **kwargs: fields of :class:`LongNetConfig` (defaults give a small model), then transformers' own.

    Raises:
        TypeError, ValueError: see :class:`LongNetConfig`.

    >>> from dilated_attention_pytorch.models.causal_lm import LongNetCausalLMConfig
    >>> LongNetCausalLMConfig(embed_dim=64, num_layers=2).to_longnet_config().num_layers
    2
    """

    model_type = "longnet-dilated"
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["past_key_values"]
    attribute_map: ClassVar[dict[str, str]] = {
        "hidden_size": "embed_dim",
        "num_hidden_layers": "num_layers",
        "num_attention_heads": "num_heads",
        "num_key_value_heads": "num_kv_heads",
        "intermediate_size": "ffn_dim",
    }

    # transformers constructs configurations from arbitrary keys of the file, hence **kwargs.
    def __init__(self, **kwargs: Any) -> None:
        given = {name: kwargs.pop(name) for name in _FIELDS if name in kwargs}
        for alias, name in self.attribute_map.items():
            if alias in kwargs:
                given[name] = kwargs.pop(alias)
        derived: tuple[str, ...] = ("num_kv_heads", "ffn_dim")
        if given.get("layer_patterns"):
            derived += ("segment_lengths", "dilation_rates")  # layer_patterns replace them
        values = {name: getattr(_SMALLEST, name) for name in _FIELDS if name not in derived}
        # Validated as a whole; tuples become lists, so that a configuration read back from JSON is equal.
        for name, value in LongNetConfig(**{**values, **given}).to_dict().items():
            if name in _FIELDS:
                setattr(self, name, value)
        super().__init__(**kwargs)

    @classmethod
    def from_longnet_config(cls, config: LongNetConfig) -> LongNetCausalLMConfig:
        """The transformers configuration with the fields of ``config``, except those for training only."""
        values = config.to_dict()
        return cls(**{name: values[name] for name in _FIELDS})

    def to_longnet_config(self) -> LongNetConfig:
        """The fields as a validated :class:`LongNetConfig`."""
        return LongNetConfig(**{name: getattr(self, name) for name in _FIELDS})


class LongNetForCausalLM(PreTrainedModel, GenerationMixin):
    """:class:`LongNetLM` as a ``PreTrainedModel``: ``save_pretrained``, ``from_pretrained``, ``Trainer``, ``generate``.

    A thin wrapper: ``self.model`` is the :class:`LongNetLM`, with all weights and the whole computation.

    Args:
        config: a :class:`LongNetCausalLMConfig`; from a :class:`LongNetConfig` with :meth:`from_longnet_config`.

    >>> from dilated_attention_pytorch.models import LongNetConfig, LongNetForCausalLM
    >>> config = LongNetConfig(
    ...     embed_dim=32, num_layers=2, num_heads=4, segment_lengths=[16, 64], dilation_rates=[1, 4]
    ... )
    >>> model = LongNetForCausalLM.from_longnet_config(config).eval()
    >>> prompt = torch.randint(256, (2, 20))
    >>> model.generate(prompt, max_new_tokens=5, do_sample=False).shape
    torch.Size([2, 25])
    """

    config_class = LongNetCausalLMConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    accepts_loss_kwargs = True
    # The cache drops rows, so it cannot be rolled back: transformers refuses assisted generation.
    _is_stateful = True

    def __init__(self, config: LongNetCausalLMConfig) -> None:
        super().__init__(config)
        self.model = LongNetLM(config.to_longnet_config())
        self._no_split_modules = {"Block"}
        self.post_init()

    @classmethod
    def from_longnet_config(cls, config: LongNetConfig) -> LongNetForCausalLM:
        """A model with newly initialised weights."""
        model = cls(LongNetCausalLMConfig.from_longnet_config(config))
        model.model.gradient_checkpointing = config.gradient_checkpointing
        model.model.config.checkpoint_every = config.checkpoint_every
        return model

    def get_input_embeddings(self) -> nn.Module:
        """The embedding table."""
        return self.model.embedding

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Replace the embedding table."""
        assert isinstance(value, nn.Embedding)
        self.model.embedding = value

    def get_output_embeddings(self) -> nn.Module | None:
        """The output matrix; None if it is tied to the embedding table."""
        return self.model.head

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        """Replace the output matrix."""
        assert isinstance(new_embeddings, nn.Linear)
        self.model.head = new_embeddings

    @torch.no_grad()
    def initialize_weights(self) -> None:
        """Initialise every module that the checkpoint did not fill, each with its ``reset_parameters``."""
        for module in self.modules():
            if isinstance(module, LongNetLM):
                own = [*module.embedding.parameters(), *(module.head.parameters() if module.head is not None else ())]
                reset: Callable[[], None] = module.reset_embeddings
            elif isinstance(module, (MultiheadPatternAttention, FeedForward, nn.LayerNorm)):
                own, reset = list(module.parameters()), module.reset_parameters
            else:
                continue
            # transformers marks loaded parameters; a partly loaded module is initialised as a whole.
            if not all(getattr(parameter, "_is_hf_initialized", False) for parameter in own):
                reset()

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: LongNetCache | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        cu_seqlens: Tensor | None = None,
        logits_to_keep: int = 0,
        num_items_in_batch: Tensor | int | None = None,
        return_dict: bool | None = None,
        targets: Tensor | None = None,
        positions: Tensor | None = None,
        skip_logits: bool = False,
    ) -> CausalLMOutputWithPast | tuple[Tensor, ...]:
        """Logits, and the loss if ``labels`` or ``targets`` are given.

        Args:
            input_ids: integer ``[B, N]``.
            attention_mask: ``[B, N]`` (with a cache ``[B, past + N]``), 1 = real, see :meth:`LongNetLM.forward`.
            past_key_values: a cache, updated in place. Inference only: call under ``torch.no_grad()``.
            labels: integer ``[B, N]``, the input tokens (shifted internally); -100 is ignored.
            use_cache: True creates a cache if none is given.
            cu_seqlens: int32 boundaries of packed documents, see :meth:`LongNetLM.forward`.
            logits_to_keep: compute only the logits of this many last positions; 0 = all.
            num_items_in_batch: divisor of the summed loss, for gradient accumulation over several calls; None = the
                number of labels.
            return_dict: False returns a tuple.
            targets: integer ``[B, N]``, the next token of each position, instead of labels; for rows that are not
                consecutive, as under context parallelism. -100 is ignored.
            positions: ``[N]`` or ``[B, N]``, absolute positions of those rows, see :meth:`LongNetLM.forward`.
            skip_logits: return only the loss, computed from the logits of one block of rows at a time: the full
                ``[B, N, V]`` logits are never materialised.

        Returns:
            ``CausalLMOutputWithPast(loss, logits [B, N, V], past_key_values)``; logits are None with ``skip_logits``.

        Raises:
            TypeError, ValueError: an argument is of the wrong type or shape; ``skip_logits`` without labels or targets;
                both labels and targets.
        """
        cache = past_key_values
        if cache is None and use_cache:
            cache = LongNetCache(self.model.config)
        hidden = self.model.hidden_states(
            input_ids, attention_mask=attention_mask, cu_seqlens=cu_seqlens, cache=cache, positions=positions
        )
        kept = hidden[:, -logits_to_keep:] if logits_to_keep else hidden
        expected = _expected(labels, targets, kept.shape[:2])
        logits = loss = None
        if skip_logits:
            if expected is None:
                raise ValueError("skip_logits returns only a loss: pass labels or targets, or leave it out")
            vocab_size = self.config.vocab_size
            loss = token_loss_of_hidden(kept, self.model.logits, vocab_size, expected, num_items_in_batch)
        else:
            logits = self.model.logits(kept)
            loss = None if expected is None else token_loss(logits, expected, num_items_in_batch)
        # transformers only passes the cache through; its own cache class would keep every row.
        output = CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=cache)  # type: ignore[arg-type]
        as_dict = self.config.return_dict if return_dict is None else return_dict
        return output if as_dict else output.to_tuple()

    def _set_gradient_checkpointing(
        self,
        enable: bool = True,
        gradient_checkpointing_func: Callable[..., Any] = checkpoint,
        every_n_layers: int = 1,
    ) -> None:
        # Called by gradient_checkpointing_enable and gradient_checkpointing_disable of transformers.
        if every_n_layers != 1:
            raise NotImplementedError(f"every_n_layers must be 1: all blocks are checkpointed; got {every_n_layers}")
        self.model.gradient_checkpointing = enable
        self.model.checkpoint_function = gradient_checkpointing_func

    def _prepare_cache_for_generation(
        self,
        generation_config: GenerationConfig,
        model_kwargs: dict[str, Any],
        generation_mode: Any,
        batch_size: int,
        max_cache_length: int,
    ) -> bool:
        # transformers would create a cache that keeps every row; the return value is unused.
        cache = model_kwargs.get("past_key_values")
        if cache is not None and not isinstance(cache, LongNetCache):
            raise TypeError(f"past_key_values must be a LongNetCache, got {type(cache).__name__}")
        if generation_config.cache_implementation is not None:
            raise NotImplementedError(
                "cache_implementation must be None: LongNet uses its own cache, which keeps only rows that a later "
                f"token can still see; got {generation_config.cache_implementation!r}"
            )
        mask = model_kwargs.get("attention_mask")
        if mask is not None and not bool(mask[:, -1].all()):
            raise ValueError(
                "generate continues from the last column of input_ids, so prompts of different lengths must be padded "
                "on the left: got an attention_mask with padding in its last column"
            )
        if cache is None and generation_config.use_cache is not False:
            model_kwargs["past_key_values"] = LongNetCache(self.model.config)
        return True

    def _reorder_cache(self, past_key_values: LongNetCache, beam_idx: Tensor) -> LongNetCache:
        past_key_values.reorder(beam_idx)
        return past_key_values


def _expected(labels: Tensor | None, targets: Tensor | None, shape: torch.Size) -> Tensor | None:
    """The next token of each row; None if neither labels nor targets are given."""
    if labels is not None and targets is not None:
        raise ValueError("labels and targets both give the next tokens: got both; pass one of them")
    for name, tokens in (("labels", labels), ("targets", targets)):
        if tokens is not None and tokens.shape != shape:
            raise ValueError(f"{name} must have the shape {tuple(shape)} of the logits, got {tuple(tokens.shape)}")
    return targets if labels is None else next_tokens(labels)


AutoConfig.register(LongNetCausalLMConfig.model_type, LongNetCausalLMConfig, exist_ok=True)
AutoModelForCausalLM.register(LongNetCausalLMConfig, LongNetForCausalLM, exist_ok=True)
