"""Registration of attention, masks and the construction hook with transformers."""

from __future__ import annotations

from dilated_attention_pytorch.installation import importing

from .attention import dilated_attention_forward
from .building import watch_building
from .config import NAME
from .mask import documents_mask


def register() -> None:
    """Make ``attn_implementation="dilated"`` available to every transformers model that uses its attention interface.

    ``O[p] = sum_t c[p, t] exp(s[p, t]) v[t] / sum_t c[p, t] exp(s[p, t])`` with the pattern's count c replaces
    the model's dense attention; weights, positions and caches are the model's own. It applies to models built or
    loaded with ``attn_implementation="dilated"``, or after ``model.set_attn_implementation("dilated")``. The
    pattern is set by :func:`set_pattern` or ``config.dilated_attention``; a layer without one raises. Idempotent.

    Unsupported features raise ``NotImplementedError`` or ``ValueError`` by name:
    soft-capped scores, position biases, attention sinks, 4-D masks, custom mask functions, blocks of tokens with
    bidirectional attention, paged caches, returned attention weights.

    Raises:
        ImportError: transformers is not installed, or cannot be imported.

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> from dilated_attention_pytorch import DilatedPattern
    >>> from dilated_attention_pytorch.integrations import register, set_pattern
    >>> register()
    >>> config = LlamaConfig(
    ...     vocab_size=97, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
    ...     num_key_value_heads=2, attn_implementation="dilated",
    ... )
    >>> model = set_pattern(LlamaForCausalLM(config), DilatedPattern([16, 64], [1, 4]))
    >>> model(torch.randint(97, (2, 100))).logits.shape
    torch.Size([2, 100, 97])
    """
    with importing("register()", "train"):
        from transformers import AttentionInterface, AttentionMaskInterface
    AttentionInterface.register(NAME, dilated_attention_forward)
    AttentionMaskInterface.register(NAME, documents_mask)
    watch_building()
    from dilated_attention_pytorch.models import causal_lm  # noqa: F401 - makes LongNet's classes known to AutoModel
