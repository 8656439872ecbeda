"""LongNet as a transformers model, with its saving, loading, training and generation."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Callable
from dataclasses import fields
from typing import Any, ClassVar, TypedDict, Unpack

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from dilated_attention_pytorch.installation import importing

with importing("LongNetForCausalLM", "train"):
    from transformers import (
        AutoConfig,
        AutoModel,
        AutoModelForCausalLM,
        GenerationConfig,
        GenerationMixin,
        PreTrainedConfig,
        PreTrainedModel,
        initialization,
    )
    from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
    from transformers.utils.output_capturing import capture_outputs, maybe_install_capturing_hooks

from dilated_attention_pytorch.nn import MultiheadPatternAttention
from dilated_attention_pytorch.nn.linear import project
from dilated_attention_pytorch.ops import attend
from dilated_attention_pytorch.ops.validation import check_cu_seqlens
from dilated_attention_pytorch.tracing import require

from .blocks import FeedForward, HeadGates, LongNetBlock
from .cache import LongNetCache, refuse_removal
from .card import write_card
from .config import LongNetConfig
from .fused_weights import read_fused_weights
from .longnet import LongNetLM, check_equal_boundaries, check_inputs, document_positions, tokens_of
from .previous_keys import KeyConvolution
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
        TypeError, ValueError: see :class:`LongNetConfig`; two names of one field with different values.

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
        "tie_word_embeddings": "tie_embeddings",
    }

    # transformers constructs configurations from arbitrary keys of the file, hence **kwargs.
    def __init__(self, **kwargs: Any) -> None:
        given = {name: kwargs.pop(name) for name in _FIELDS if name in kwargs}
        for alias, name in self.attribute_map.items():
            if alias not in kwargs:
                continue
            value = kwargs.pop(alias)
            if given.setdefault(name, value) != value:
                raise ValueError(
                    f"{name} and {alias} are one field, got {name}={given[name]!r} and {alias}={value!r}: pass one of "
                    "them; in a config.json, change both"
                )
        derived: tuple[str, ...] = ("num_kv_heads", "ffn_dim")
        if given.get("layer_patterns"):
            derived += ("segment_lengths", "dilation_rates")  # layer_patterns replace them
        values = {name: getattr(_SMALLEST, name) for name in _FIELDS if name not in derived}
        # Validated as a whole; tuples become lists, so that a configuration read back from JSON is equal.
        for name, value in LongNetConfig(**{**values, **given}).to_dict().items():
            if name in _FIELDS:
                setattr(self, name, value)
        super().__init__(**kwargs)

    def to_dict(self) -> dict[str, Any]:
        """The fields, some under transformers' names as well: PEFT reads them from here."""
        names = ("hidden_size", "num_hidden_layers", "num_attention_heads")
        values: dict[str, Any] = super().to_dict()
        return {**values, **{name: getattr(self, name) for name in names}}

    @classmethod
    def from_longnet_config(cls, config: LongNetConfig) -> LongNetCausalLMConfig:
        """The transformers configuration with the fields of ``config``, except those for training only."""
        values = config.to_dict()
        return cls(**{name: values[name] for name in _FIELDS})

    def to_longnet_config(self) -> LongNetConfig:
        """The fields as a validated :class:`LongNetConfig`."""
        return LongNetConfig(**{name: getattr(self, name) for name in _FIELDS})


class ForwardKeywords(TypedDict, total=False):
    """Keywords of ``forward`` that transformers and its tools pass."""

    cu_seq_lens_q: Tensor | None
    """The int32 boundaries ``cu_seqlens`` of packed documents, as ``DataCollatorWithFlattening`` calls them."""
    cu_seq_lens_k: Tensor | None
    """Equal to cu_seq_lens_q."""
    max_length_q: int | None
    """Not read: lengths follow from the boundaries."""
    max_length_k: int | None
    """Not read."""
    seq_idx: Tensor | None
    """``[N]`` or ``[B, N]``, the document of each token, the same columns in every row; must agree with the boundaries
    and ``position_ids``, if given."""
    output_hidden_states: bool | None
    """Return the input of every block, and the last hidden state; None = as the configuration says."""
    output_attentions: bool | None
    """False: attention weights are never formed."""
    return_dict: bool | None
    """False returns a tuple; None = as the configuration says."""


class LossKeywords(ForwardKeywords, total=False):
    """Those of a model with a loss.

    Not named in the signature, from which Trainer would take ``shift_labels`` for labels that every batch has.
    """

    shift_labels: Tensor | None
    """Integer ``[B, N]``, the next token of each position; -100 is ignored."""


class _LongNetPreTrained(PreTrainedModel):
    """What the models with and without an output matrix share: ``self.model`` is the :class:`LongNetLM`."""

    config_class = LongNetCausalLMConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    # The cache drops rows, so it cannot be rolled back: transformers refuses assisted generation.
    _is_stateful = True
    # transformers declares these as attributes of instances.
    _no_split_modules = ["LongNetBlock"]  # noqa: RUF012
    _can_record_outputs = {"hidden_states": LongNetBlock}  # noqa: RUF012

    model: LongNetLM
    _keywords: ClassVar[type[ForwardKeywords]] = ForwardKeywords

    def _returns_dict(self, keywords: ForwardKeywords) -> bool:
        given = keywords.get("return_dict")
        return bool(self.config.return_dict if given is None else given)

    def get_input_embeddings(self) -> nn.Module:
        """The embedding table."""
        return self.model.embedding

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Replace the embedding table."""
        assert isinstance(value, nn.Embedding)
        self.model.embedding = value
        self.model.config.vocab_size = value.num_embeddings

    def _initialize_weights(self, module: nn.Module, is_custom_code: bool = False) -> None:
        # In classes outside of its package, transformers skips modules without weights of their own, and thereby the
        # owners of a block's matrices. _init_weights leaves loaded weights itself.
        super()._initialize_weights(module, False)  # by position: versions of transformers differ in its name

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        # Called for every module that was not loaded whole, inner ones first; loaded parameters are marked.
        if isinstance(module, (MultiheadPatternAttention, FeedForward, HeadGates, KeyConvolution, nn.LayerNorm)):
            weights = list(module.parameters())
            loaded = [(weight, weight.clone()) for weight in weights if getattr(weight, "_is_hf_initialized", False)]
            module.reset_parameters()
            for weight, value in loaded:
                weight.copy_(value)
        elif isinstance(module, (nn.Embedding, nn.Linear)):
            # As LongNetLM.reset_embeddings; the matrices of a block are drawn again by their owner above.
            initialization.normal_(module.weight, std=1.0 / math.sqrt(self.config.embed_dim))
            if isinstance(module, nn.Linear) and module.bias is not None:
                initialization.zeros_(module.bias)
        else:
            super()._init_weights(module)

    def _set_gradient_checkpointing(
        self,
        enable: bool = True,
        gradient_checkpointing_func: Callable[..., Any] = checkpoint,
        every_n_layers: int = 1,
    ) -> None:
        # Called by gradient_checkpointing_enable and gradient_checkpointing_disable of transformers.
        self.model.gradient_checkpointing = enable
        self.model.checkpoint_function = gradient_checkpointing_func
        if every_n_layers != 1:  # 1 is transformers' default, and leaves what the configuration says
            self.model.config.checkpoint_every = every_n_layers

    def _captured(self, keywords: ForwardKeywords) -> dict[str, Any]:
        """The arguments of the decorator of :meth:`_outputs`."""
        given = keywords.get("output_hidden_states")
        return {
            "output_hidden_states": self.config.output_hidden_states if given is None else given,
            "return_dict": True,
        }

    @capture_outputs
    def _outputs(
        self,
        input_ids: Tensor | None,
        inputs_embeds: Tensor | None,
        attention_mask: Tensor | None,
        position_ids: Tensor | None,
        cache: LongNetCache | None,
        use_cache: bool | None,
        cu_seqlens: Tensor | None,
        keywords: ForwardKeywords,
        *,
        output_hidden_states: bool,
    ) -> BaseModelOutputWithPast:
        # The decorator adds the hidden states of all blocks.
        names = self._keywords.__annotations__
        unknown = sorted(keywords.keys() - names)
        if unknown:
            raise TypeError(
                f"{type(self).__name__}.forward has no argument {', '.join(unknown)}: leave it out; besides "
                f"its own arguments it takes {', '.join(names)}"
            )
        if keywords.get("output_attentions") or self.config.output_attentions:
            raise NotImplementedError(
                "output_attentions=True asks for N x M attention weights, which attention under a pattern never forms: "
                "leave it out, or use pattern.counts and attend_with_lse for a short sequence"
            )
        if cache is None and use_cache:
            cache = LongNetCache(self.model.config)
        if cache is not None and not isinstance(cache, LongNetCache):
            raise TypeError(
                "past_key_values must be a LongNetCache, made by LongNetCache(model.model.config) or use_cache=True, "
                f"got {type(cache).__name__}; prefix tuning has keys without tokens, which a pattern cannot place"
            )
        tokens = tokens_of(input_ids, inputs_embeds, self.config.embed_dim)
        cu_seqlens = _given_boundaries(tokens, cu_seqlens, keywords)
        seq_idx, positions = keywords.get("seq_idx"), None
        if self.model.attention is not attend:
            positions = position_ids  # of this rank's rows
            if seq_idx is not None:
                raise NotImplementedError(
                    "seq_idx of a rank's rows does not say where documents of the whole sequence begin: pass cu_seqlens"
                )
        elif position_ids is not None or seq_idx is not None:
            check_inputs(tokens, attention_mask, cu_seqlens, cache)
            is_absolute = any(self.model.config.layer_scale_lengths)
            given = (position_ids, seq_idx, tokens.shape[:2], attention_mask, cache, cu_seqlens)
            cu_seqlens = _documents(*given, is_absolute=is_absolute)
        hidden = self.model(
            input_ids,
            inputs_embeds=inputs_embeds,
            attention_mask=attention_mask,
            cu_seqlens=cu_seqlens,
            cache=cache,
            positions=positions,
            hidden_only=True,
        )
        # transformers only passes the cache through; its own cache class would keep every row.
        return BaseModelOutputWithPast(last_hidden_state=hidden, past_key_values=cache)  # type: ignore[arg-type]


class LongNetModel(_LongNetPreTrained):
    """:class:`LongNetLM` without its output matrix: hidden states, as ``AutoModel`` loads it.

    Args:
        config: a :class:`LongNetCausalLMConfig`.
        model: the model, shared with a :class:`LongNetForCausalLM`; None = a new one.
    """

    _keys_to_ignore_on_load_unexpected = [r"^model\.head\."]  # noqa: RUF012 - transformers declares it so

    def __init__(self, config: LongNetCausalLMConfig, model: LongNetLM | None = None) -> None:
        super().__init__(config)
        if model is None:
            self.model = LongNetLM(config.to_longnet_config())
            self.model.head = nn.Identity()  # type: ignore[assignment]
            self.post_init()
        else:
            self.model = model

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: LongNetCache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        *,
        cu_seqlens: Tensor | None = None,
        **keywords: Unpack[ForwardKeywords],
    ) -> BaseModelOutputWithPast | tuple[Tensor, ...]:
        """``BaseModelOutputWithPast(last_hidden_state [B, N, E], past_key_values, hidden_states)``.

        Arguments and errors as in :meth:`LongNetForCausalLM.forward`.
        """
        inputs = (input_ids, inputs_embeds, attention_mask, position_ids, past_key_values, use_cache, cu_seqlens)
        output: BaseModelOutputWithPast = self._outputs(*inputs, keywords, **self._captured(keywords))
        return output if self._returns_dict(keywords) else output.to_tuple()


class LongNetForCausalLM(_LongNetPreTrained, GenerationMixin):
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

    accepts_loss_kwargs = True
    _keywords = LossKeywords
    _tied_weights_keys = {"model.head.weight": "model.embedding.weight"}  # noqa: RUF012 - transformers declares it so

    def __init__(self, config: LongNetCausalLMConfig) -> None:
        super().__init__(config)
        self.model = LongNetLM(config.to_longnet_config())
        if config.tie_embeddings:
            # post_init and from_pretrained tie the two; a parameter that is tied before would count as loaded there.
            self.model.head.weight = nn.Parameter(torch.empty_like(self.model.embedding.weight, device="meta"))
        self.post_init()

    @classmethod
    def from_longnet_config(cls, config: LongNetConfig) -> LongNetForCausalLM:
        """A model with newly initialised weights."""
        model = cls(LongNetCausalLMConfig.from_longnet_config(config))
        model.model.gradient_checkpointing = config.gradient_checkpointing
        model.model.config.checkpoint_every = config.checkpoint_every
        return model

    @property
    def base_model(self) -> LongNetModel:
        """This model without its output matrix, with the same weights, as trainers of TRL call it."""
        maybe_install_capturing_hooks(self)
        base: LongNetModel | None = self.__dict__.get("_base")  # no submodule: its weights would be listed twice
        if base is None or base.model is not self.model:
            base = self.__dict__["_base"] = LongNetModel(self.config, self.model)  # type: ignore[arg-type]
            # Those of this model, on the same blocks.
            base._output_capturing_hooks_installed = True  # type: ignore[assignment]
        base.training = self.training
        return base

    def save_pretrained(
        self, save_directory: str | os.PathLike[str], is_main_process: bool = True, *args: Any, **options: Any
    ) -> None:
        """See ``PreTrainedModel``. A folder without a README.md gets one that says how to load the model."""
        super().save_pretrained(save_directory, is_main_process, *args, **options)
        if is_main_process and os.path.isdir(save_directory):
            write_card(self, save_directory)

    def get_output_embeddings(self) -> nn.Module:
        """The output matrix."""
        return self.model.head

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        """Replace the output matrix."""
        assert isinstance(new_embeddings, nn.Linear)
        self.model.head = new_embeddings

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: LongNetCache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        *,
        cu_seqlens: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
        skip_logits: bool = False,
        **keywords: Unpack[LossKeywords],
    ) -> CausalLMOutputWithPast | tuple[Tensor, ...]:
        """Logits, and the loss if ``labels`` or ``shift_labels`` are given.

        Args:
            input_ids: integer ``[B, N]``.
            attention_mask: ``[B, N]`` (with a cache ``[B, past + N]``), 1 = real, see :meth:`LongNetLM.forward`.
            position_ids: ``[N]`` or ``[B, N]``. Positions that restart at 0 are packed documents, without
                ``attention_mask`` and cache; else the real tokens of a row count on by 1, from any number (with
                layer_scale_lengths from 0): rotary scores depend on differences, and segments count from the row's
                first real token. A model whose attention function is distributed takes the absolute positions of its
                rows.
            past_key_values: a cache, updated in place. Inference only: call under ``torch.no_grad()``.
            inputs_embeds: ``[B, N, E]``, instead of input_ids: rows of the embedding table, as it stores them.
            labels: integer ``[B, N]``, the input tokens (shifted internally); -100 is ignored.
            use_cache: True creates a cache if none is given.
            logits_to_keep: compute only the logits of this many last positions (0 = all), with their labels; or of
                these positions, with shift_labels.
            cu_seqlens: int32 boundaries of packed documents, see :meth:`LongNetLM.forward`.
            num_items_in_batch: divisor of the summed loss, for gradient accumulation over several calls; None = the
                number of labels.
            skip_logits: return only the loss, computed from the logits of one block of rows at a time: the full
                ``[B, N, V]`` logits are never materialised.
            **keywords: see :class:`ForwardKeywords` and :class:`LossKeywords`; shift_labels replace labels, for rows
                that are not consecutive, as under context parallelism.

        Returns:
            ``CausalLMOutputWithPast(loss, logits [B, N, V], past_key_values, hidden_states)``; logits are None with
            ``skip_logits``.

        Raises:
            TypeError, ValueError: an argument is of the wrong type or shape; ``skip_logits`` without labels.
            NotImplementedError: attention weights, positions that a pattern cannot place, or arguments that do not go
                together.
        """
        inputs = (input_ids, inputs_embeds, attention_mask, position_ids, past_key_values, use_cache, cu_seqlens)
        output: BaseModelOutputWithPast = self._outputs(*inputs, keywords, **self._captured(keywords))
        kept = output.last_hidden_state
        assert kept is not None
        if isinstance(logits_to_keep, Tensor):
            if labels is not None and keywords.get("shift_labels") is None:
                raise ValueError(
                    "labels are shifted by one row, and the rows of a tensor logits_to_keep need not be adjacent: pass "
                    "shift_labels, the next token of each chosen row"
                )
            kept = kept[:, logits_to_keep]
        elif logits_to_keep:
            kept = kept[:, -logits_to_keep:]
        expected = _expected(labels, keywords.get("shift_labels"), kept.shape[:2])
        logits = loss = None
        if skip_logits:
            if expected is None:
                raise ValueError("skip_logits returns only a loss: pass labels or shift_labels, or leave it out")
            vocab_size = self.config.vocab_size
            loss = token_loss_of_hidden(kept, self.model.head, vocab_size, expected, num_items_in_batch)
        else:
            logits = project(self.model.head, kept)
            loss = None if expected is None else token_loss(logits, expected, num_items_in_batch)
        result = CausalLMOutputWithPast(
            loss=loss, logits=logits, past_key_values=output.past_key_values, hidden_states=output.hidden_states
        )
        return result if self._returns_dict(keywords) else result.to_tuple()

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
        if generation_config.is_assistant:
            refuse_removal("LongNetCache", 1)
        # Without one, the first forward creates it: PEFT adds the tokens of a prompt only where there is none yet.
        if cache is None and generation_config.prefill_chunk_size is not None:
            if generation_config.use_cache is False:
                raise ValueError(
                    "prefill_chunk_size reads a prompt in chunks through a cache, got use_cache=False: leave one of "
                    "them out"
                )
            model_kwargs["past_key_values"] = LongNetCache(self.model.config)
        return True


def _expected(labels: Tensor | None, shift_labels: Tensor | None, shape: torch.Size) -> Tensor | None:
    """The next token of each row; None if there are no labels. As in transformers, shift_labels replace labels."""
    for name, tokens in (("shift_labels", shift_labels), ("labels", labels)):
        if tokens is None:
            continue
        if tokens.shape != shape:
            raise ValueError(f"{name} must have the shape {tuple(shape)} of the logits, got {tuple(tokens.shape)}")
        return tokens if name == "shift_labels" else next_tokens(tokens)
    return None


def _given_boundaries(tokens: Tensor, cu_seqlens: Tensor | None, keywords: ForwardKeywords) -> Tensor | None:
    """The boundaries of packed documents, of which every name given holds the same."""
    named = {
        "cu_seqlens": cu_seqlens,
        "cu_seq_lens_q": keywords.get("cu_seq_lens_q"),
        "cu_seq_lens_k": keywords.get("cu_seq_lens_k"),
    }
    given = {name: boundaries for name, boundaries in named.items() if boundaries is not None}
    for boundaries in given.values():
        check_cu_seqlens(boundaries, tokens)
    for (name, first), (other_name, other) in itertools.pairwise(given.items()):
        check_equal_boundaries(f"{name} and {other_name}", first, other)
    return next(iter(given.values()), None)


def _documents(
    position_ids: Tensor | None,
    seq_idx: Tensor | None,
    shape: torch.Size,
    attention_mask: Tensor | None,
    cache: LongNetCache | None,
    cu_seqlens: Tensor | None,
    *,
    is_absolute: bool,
) -> Tensor | None:
    """Boundaries of the documents that ``position_ids``, ``seq_idx`` and ``cu_seqlens`` agree on; None for one.

    Unless scores depend on positions themselves (``is_absolute``), and not on differences alone, a row may begin at any
    position.
    """
    if position_ids is not None:
        position_ids = _per_row("position_ids", position_ids, shape)
        if is_absolute and cache is None:
            _check_first_positions(position_ids, attention_mask)
        cu_seqlens = _documents_of_positions(position_ids, attention_mask, cache, cu_seqlens)
    if seq_idx is None:
        return cu_seqlens
    seq_idx = _per_row("seq_idx", seq_idx, shape)
    begins = functional.pad(seq_idx.diff(dim=1) != 0, (1, 0), value=True)
    if cu_seqlens is None and position_ids is None and not torch.compiler.is_compiling():
        _require(begins == begins[:1], seq_idx, "seq_idx must change at the same columns in every row")
        return _boundaries(begins[0])
    _require(
        begins == (document_positions(shape[1], cu_seqlens, seq_idx.device) == 0),
        seq_idx,
        "seq_idx must change where the documents of cu_seqlens and position_ids begin (a compiler cannot count them: "
        "pass cu_seq_lens_q)",
    )
    return cu_seqlens


def _check_first_positions(position_ids: Tensor, attention_mask: Tensor | None) -> None:
    """Raise ``NotImplementedError`` unless the first real token of every row has the position 0."""
    real = torch.ones_like(position_ids) if attention_mask is None else attention_mask.bool().long()
    is_first = (real == 1) & (real.cumsum(dim=1) == 1)
    _require(
        ~is_first | (position_ids == 0),
        position_ids,
        "position_ids must begin at 0 in a model with layer_scale_lengths, whose scores grow with the position: leave "
        "them out, or pass a cache with the tokens before",
    )


def _documents_of_positions(
    position_ids: Tensor, attention_mask: Tensor | None, cache: LongNetCache | None, cu_seqlens: Tensor | None
) -> Tensor | None:
    """Boundaries of the documents in which ``position_ids [B, N]`` restart at 0; None for one document."""
    rows = position_ids.shape[1]
    if cu_seqlens is not None:
        positions = document_positions(rows, cu_seqlens, position_ids.device)
        _require(
            position_ids == positions, position_ids, "position_ids must restart at 0 where cu_seqlens begin a document"
        )
    elif attention_mask is None and cache is None:
        begins = functional.pad(position_ids.diff(dim=1) != 1, (1, 0), value=True)
        restarts = (begins == begins[:1]) & ((position_ids == 0) | ~begins)
        _require(
            functional.pad(restarts[:, 1:], (1, 0), value=True),
            position_ids,
            "position_ids must count on by 1, or restart at 0, at the same columns in every row, for packed documents: "
            "a pattern has no place for gaps",
        )
        if torch.compiler.is_compiling():
            words = "a compiler cannot count documents from position_ids: pass cu_seq_lens_q"
            _require(~begins[:, 1:], position_ids, words)
        else:
            cu_seqlens = _boundaries(begins[0])
    else:
        real = torch.ones_like(position_ids) if attention_mask is None else attention_mask[:, -rows:].bool().long()
        ahead = position_ids - real.cumsum(dim=1)
        if cache is None:
            expected = ahead.gather(1, real.argmax(dim=1, keepdim=True))
        else:
            expected = torch.tensor(cache.tokens_seen or [0], device=position_ids.device).unsqueeze(1) - 1
        _require(
            (ahead == expected) | (real == 0),
            position_ids,
            "position_ids must count on by 1 along the real tokens of a row, after those in the cache; documents are "
            "packed without attention_mask and cache",
        )
    return cu_seqlens


def _per_row(name: str, numbers: Tensor, shape: torch.Size) -> Tensor:
    """A number of each token, ``[N]``, ``[1, N]`` or ``[B, N]``, as ``[B, N]``."""
    if not isinstance(numbers, Tensor):
        raise TypeError(f"{name} must be a tensor of shape {tuple(shape)}, got {type(numbers).__name__}")
    if numbers.shape not in (shape, shape[1:], (1, shape[1])):
        raise ValueError(f"{name} must be of shape {tuple(shape)}, got {tuple(numbers.shape)}")
    return numbers.expand(shape)


def _boundaries(begins: Tensor) -> Tensor | None:
    """Boundaries of the documents whose first rows are marked in ``begins [N]``; None for one document."""
    starts = begins.nonzero().squeeze(1)
    return None if len(starts) <= 1 else functional.pad(starts, (0, 1), value=len(begins)).int()


def _require(holds: Tensor, numbers: Tensor, message: str) -> None:
    """Raise unless ``holds [B, N]`` everywhere; the message shows the numbers at the first exception."""

    def got() -> str:
        row, column = (~holds).nonzero()[0].tolist()
        shown = " after ".join(str(int(number)) for number in numbers[row, max(column - 1, 0) : column + 1].flip(0))
        return f"; got {shown} in column {column} of row {row}"

    require(holds.all(), NotImplementedError, message, got)


read_fused_weights(LongNetCausalLMConfig.model_type)
AutoConfig.register(LongNetCausalLMConfig.model_type, LongNetCausalLMConfig, exist_ok=True)
AutoModelForCausalLM.register(LongNetCausalLMConfig, LongNetForCausalLM, exist_ok=True)
AutoModel.register(LongNetCausalLMConfig, LongNetModel, exist_ok=True)
