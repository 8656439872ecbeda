"""Verification that every attention layer of a model uses the registered attention function."""

from __future__ import annotations

import dis
import functools
import inspect
import weakref
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from dilated_attention_pytorch.tracing import constant_of_graph

from .config import NAME
from .distances import take_biases_by_distance
from .mask import gives_mask_of_pairs
from .names import methods_of, names_of
from .written_out import OWN_LAYER, write_under_pattern

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_PROOF = "_attended_under_pattern"
"""Attribute of a layer: False once found, True once it attended under the pattern. Of a model: True once checked."""

_OWN = "_attended_to_its_own_sequence"
"""Attribute of a layer, and of a model once checked: whether any attention was under a pattern."""

_WATCHED: weakref.WeakSet[Any] = weakref.WeakSet()
"""Models to check at their first call; a call of ``model.forward`` itself reaches no hook."""

_BY_SDPA = "_is_causal_as_by_sdpa"
"""Attribute of a layer: whether its model supports "sdpa", which without a mask follows the layer's is_causal."""

_OF_ANOTHER = "_keys_are_of_another"
"""Attribute of a layer that may attend to another sequence: whether its present call does."""

_SOURCES = frozenset({"context", "encoder_hidden_states", "key", "key_value_states"})
"""Arguments with the sequence of the keys: None, or that of the queries, for a layer's own sequence."""

_OTHER_FORMS = (
    "Autoformer",
    "BlockSparse",
    "Canine",
    "Deformable",
    "FunnelRel",
    "GlobalLocal",
    "GroundingDino",
    "IBert",
    "LEDEncoder",
    "LSHSelf",
    "LocalSelf",
    "Longformer",
    "Mra",
    "Ngram",
    "Nystromformer",
    "ProbSparse",
    "Reformer",
    "Rwkv",
    "XLNet",
)
"""In names of classes whose attention is no softmax over all pairs of a sequence, times values."""

_OF_ATTENTION = ("scaled_dot_product_attention", "_flash_attention_forward", "multi_head_attention_forward")
"""Functions that only attention calls."""


def look_through(model: PreTrainedModel, configs: Sequence[Any], *, is_all_attention: bool) -> list[Any]:
    """Find the attention layers of the model parts that have one of these configurations.

    Afterwards each layer raises if its first call does not reach the registered attention function. A layer that
    computes attention itself is made to reach it, see :func:`write_under_pattern`.

    Args:
        model: a transformers model.
        configs: configurations, compared by identity.
        is_all_attention: whether they cover all attention of the model, so that at least one layer must be found.

    Returns:
        the configurations of layers that compute attention themselves.

    Raises:
        NotImplementedError: a layer is PyTorch's own, or no layer computes attention.
    """
    from transformers import PreTrainedModel

    layers, written, rest = [], [], ""
    for name, module, config, is_apart in _parts(model, configs):
        kind: Any = type(module)
        if isinstance(module, PreTrainedModel):
            continue
        is_layer = _uses_interface(kind)
        if is_layer:
            _check_keys_are_not_chosen(model, name, module)
            _check_is_of_one_sequence(model, name, module)
            layers.append((name, module, config))
        if not is_layer and not is_apart and _computes_attention(kind):
            if issubclass(kind, nn.MultiheadAttention) or any(form in kind.__name__ for form in _OTHER_FORMS):
                raise NotImplementedError(
                    f"{type(model).__name__} does not use transformers' attention interface, through which a layer "
                    f'gets its pattern, in every layer: {kind.__name__} ("{name}") computes attention itself. Use '
                    '"sdpa" or "eager" for this model, without a pattern'
                )
            written.append((name, module, config))
        _check_reads_no_mask(model, name, module, config)
        if not is_layer and not is_apart and not _computes_attention(kind) and _is_named_attention(kind):
            rest = rest or f': {kind.__name__} ("{name}") is something else'
    if not layers and not written and is_all_attention:
        check_is_in_no_part(model, configs)
    if not layers and not written and (is_all_attention or rest):
        raise NotImplementedError(
            f"{type(model).__name__} does not use transformers' attention interface, through which a layer gets its "
            f'pattern{rest}. Use "sdpa" or "eager" for this model, without a pattern'
        )
    for name, module, config in layers:
        setattr(module, _BY_SDPA, model._supports_sdpa)
        take_biases_by_distance(module)
        _prove(name, module, config)
    for name, module, config in written:
        if not hasattr(module, OWN_LAYER):
            setattr(module, OWN_LAYER, (config, _index_of(name)))
            write_under_pattern(module)
        _prove(name, module, config)
    return [config for _, _, config in written]


def _prove(name: str, module: nn.Module, config: Any) -> None:
    """Check the calls of a layer from now on."""
    if _PROOF in vars(module):
        return
    setattr(module, _PROOF, False)
    module.register_forward_hook(functools.partial(_check_attended, name, config))
    kind: Any = type(module)
    others = _sources(kind)
    if others:
        module.register_forward_pre_hook(functools.partial(_note_source, name, others), with_kwargs=True)


def _index_of(name: str) -> int | None:
    """The number in a module's name, which is its layer's; None for none, or for several."""
    numbers = [int(part) for part in name.split(".") if part.isdecimal()]
    return numbers[0] if len(numbers) == 1 else None


def check_is_in_no_part(model: PreTrainedModel, configs: Sequence[Any]) -> None:
    """Raise if the attention is in a submodel that must be given the pattern directly.

    Raises:
        NotImplementedError: names the first such part, preferably one with a chosen configuration.
    """
    from transformers import PreTrainedModel

    names = {False: "", True: ""}
    for name, part in model.named_modules():
        if part is model or not isinstance(part, PreTrainedModel):
            continue
        kinds: set[Any] = {type(module) for _, module, _, _ in _parts(part, [part.config])}
        if any(_uses_interface(kind) for kind in kinds if not issubclass(kind, PreTrainedModel)):
            is_meant = any(part.config is config for config in configs)
            names[is_meant] = names[is_meant] or name
    if any(names.values()):
        raise NotImplementedError(
            f"{type(model).__name__} has its attention in parts with configurations of their own: call set_pattern on "
            f"one of them, as in set_pattern(model.{names[True] or names[False]}, pattern)"
        )


@constant_of_graph
def note_attended(module: nn.Module) -> None:
    """Record that a layer reached the registered attention function.

    Raises:
        ValueError: the layer's model was never checked, so other layers of it may attend to everything.
        NotImplementedError: see :func:`look_through`.
    """
    if getattr(module, _PROOF, None) is None:
        for model in list(_WATCHED):
            if model.config._attn_implementation == NAME and any(part is module for part in model.modules()):
                _look_through_once(model)
    if getattr(module, _PROOF, None) is None:
        raise ValueError(
            f"{type(module).__name__} is in a model of which it is not known whether every layer attends under the "
            "pattern: call set_pattern(model, pattern) after the model is built, or have the pattern in the "
            "configuration, and this package imported, before it is built"
        )
    setattr(module, _PROOF, True)


@constant_of_graph
def note_own(module: nn.Module) -> None:
    """Record that a layer attended to its own sequence, under its pattern."""
    setattr(module, _OWN, True)


def is_causal_without_mask(layer: nn.Module) -> bool:
    """Whether a layer without a mask is causal, by the rule of transformers' "sdpa".

    Raises:
        NotImplementedError: the layer is marked causal, and its model supports only "eager", which without a mask
            attends to everything.
    """
    is_causal = bool(getattr(layer, "is_causal", True))
    if is_causal and not getattr(layer, _BY_SDPA):
        raise NotImplementedError(
            f"{type(layer).__name__} says that it is causal and came without a mask, and its model does not support "
            '"sdpa", which would go by that: with "eager" it attends to everything. Use "eager" for this model'
        )
    return is_causal


def keys_are_of_another(layer: nn.Module) -> bool:
    """Whether the keys of a layer's present call belong to another sequence, as those of cross-attention do."""
    return "Cross" in type(layer).__name__ or getattr(layer, _OF_ANOTHER, False)


def layer_of(module: nn.Module) -> tuple[Any, int | None]:
    """Configuration and index of an attention layer."""
    own: tuple[Any, int | None] | None = getattr(module, OWN_LAYER, None)
    return (module.config, getattr(module, "layer_idx", None)) if own is None else own


def watch(model: PreTrainedModel) -> None:
    """Schedule the check of a model before its first call under a pattern, as it may still be incomplete now."""
    _WATCHED.add(model)
    if _PROOF not in vars(model):
        setattr(model, _PROOF, False)
        model.register_forward_pre_hook(_before_call)
        model.register_forward_hook(_after_call)


def _before_call(model: PreTrainedModel, args: Any) -> None:
    if model.config._attn_implementation != NAME:
        return
    if torch.compiler.is_dynamo_compiling():
        _look_through_once(model)
    else:
        # torch.compile runs the hooks of its outermost module outside the graph, and compiles what they call.
        _look_through_uncompiled(model)


def _after_call(model: PreTrainedModel, args: Any, output: Any) -> None:
    """Raise if all attention of a model's first call was to other sequences, which is dense."""
    if torch.compiler.is_compiling() or model.config._attn_implementation != NAME or getattr(model, _OWN, False):
        return
    layers = [module for module in model.modules() if vars(module).get(_PROOF) and module not in _WATCHED]
    if layers and not any(getattr(layer, _OWN, False) for layer in layers):
        raise NotImplementedError(
            f"{type(model).__name__} attends to other sequences alone, as {type(layers[0]).__name__} does, and a "
            'pattern is of one sequence: use "sdpa" for this model'
        )
    setattr(model, _OWN, bool(layers))


# Called at trace time by torch.compile, which reads nothing of what it changes: a graph that breaks is traced again.
@constant_of_graph
def _look_through_once(model: PreTrainedModel) -> None:
    if getattr(model, _PROOF):
        return
    # Include parts that are never called as a whole, and parts whose configuration only their layers have.
    inside = [config for module in model.modules() if (config := vars(module).get("config")) is not None]
    chosen = [config for config in inside if getattr(config, "_attn_implementation", None) == NAME]
    look_through(model, chosen, is_all_attention=False)
    setattr(model, _PROOF, True)


_look_through_uncompiled = torch.compiler.disable(_look_through_once)


def _check_attended(name: str, config: Any, module: nn.Module, args: Any, output: Any) -> None:
    # torch.export runs this; in a graph of torch.compile nothing may depend on what the trace itself changes.
    if torch.compiler.is_dynamo_compiling() or getattr(module, _PROOF) or config._attn_implementation != NAME:
        return
    raise NotImplementedError(
        f'{type(module).__name__} ("{name}") did not come to the attention under the pattern and computed attention '
        'itself: one of its options keeps it from transformers\' attention interface; use "sdpa" or "eager" for it'
    )


@functools.cache
def _sources(kind: type[nn.Module]) -> tuple[tuple[str, int], ...]:
    """The first argument of a layer, and those that bring keys of another sequence, with their positions.

    Empty if there are none of these.
    """
    names = list(inspect.signature(kind.forward).parameters)[1:]
    found = [(name, at) for at, name in enumerate(names) if name in _SOURCES]
    return ((names[0], 0), *found) if found else ()


def _note_source(path: str, sources: tuple[tuple[str, int], ...], module: nn.Module, args: Any, kwargs: Any) -> None:
    """Note whether a layer's present call brings keys of another sequence.

    Raises:
        NotImplementedError: they have as many rows as the queries and may be of the same sequence.
    """
    (first, _), *others = sources
    rows = args[0] if args else kwargs[first]
    is_of_another = False
    for name, at in others:
        given = kwargs.get(name, args[at] if at < len(args) else None)
        if given is None or given is rows:
            continue
        is_named = any(word in path.rpartition("layers.")[2].casefold() for word in ("cross", "encoder"))
        if not is_named and getattr(module, "is_decoder", None) is None and given.shape[1] == rows.shape[1]:
            raise NotImplementedError(
                f'{type(module).__name__} ("{path}") got {name} of as many rows as it has queries, which may be of '
                'another sequence or of its own: use "sdpa" for this model'
            )
        is_of_another = True
    setattr(module, _OF_ANOTHER, is_of_another)


def _parts(model: nn.Module, configs: Sequence[Any]) -> Iterator[tuple[str, nn.Module, Any, bool]]:
    """Every module under one of these configurations: name, module, configuration, whether it is not self-attention.

    A module's configuration is its own or its parent's. Pooling heads, cross-attention and their submodules are not
    self-attention.
    """
    wanted = {id(config): config for config in configs}
    seen: set[int] = set()
    todo: list[tuple[str, nn.Module, Any, bool]] = [("", model, None, False)]
    while todo:
        name, module, config, is_apart = todo.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        own = vars(module).get("config")
        config = config if own is None else wanted.get(id(own))
        is_apart = is_apart or "Pool" in type(module).__name__ or "Cross" in type(module).__name__
        if config is not None:
            yield name, module, config, is_apart
        children = [
            (f"{name}.{key}" if name else key, child, config, is_apart) for key, child in module.named_children()
        ]
        todo += reversed(children)


def _check_keys_are_not_chosen(model: nn.Module, name: str, layer: nn.Module) -> None:
    """Raise for attention that selects keys by writing into its mask, such as DeepSeek's sparse attention."""
    for _, child in layer.named_children():
        if "Indexer" in type(child).__name__:
            raise NotImplementedError(
                f"{type(model).__name__} chooses by content which keys a query sees ({type(child).__name__} of "
                f'"{name}"), and a pattern goes by positions: use "sdpa" or "eager" for this model, without a pattern'
            )


def _check_is_of_one_sequence(model: nn.Module, name: str, layer: nn.Module) -> None:
    if "Merged" in type(layer).__name__:
        raise NotImplementedError(
            f"{type(model).__name__} attends to its own sequence and to another in one softmax "
            f'({type(layer).__name__} of "{name}"), and a pattern is of one sequence: use "sdpa" or "eager" for this '
            "model, without a pattern"
        )


def _check_reads_no_mask(model: nn.Module, name: str, module: nn.Module, config: Any) -> None:
    """Raise for modules that use the mask otherwise, such as convolutions that skip padding."""
    kind: Any = type(module)
    if _reads_mask(kind) and not gives_mask_of_pairs(config):
        raise NotImplementedError(
            f'{type(model).__name__} reads the values of its attention mask in {kind.__name__} ("{name}"), and '
            'with attn_implementation="dilated" it has none for pairs of tokens: use "sdpa" or "eager" for this model, '
            "without a pattern"
        )


def _is_named_attention(kind: type[nn.Module]) -> bool:
    name = kind.__name__.casefold()
    return "attention" in name or "attn" in name


@functools.cache
def _uses_interface(kind: type[nn.Module]) -> bool:
    from transformers import AttentionInterface

    return any(isinstance(value, AttentionInterface) for _, value in names_of(kind))


@functools.cache
def _computes_attention(kind: type[nn.Module]) -> bool:
    """Whether a class that does not use the interface computes attention."""
    if issubclass(kind, nn.MultiheadAttention):
        return True
    names = {name.casefold() for name, _ in names_of(kind)}
    if names.intersection(_OF_ATTENTION):
        return True
    return _is_named_attention(kind) and any("softmax" in name or name == "logsumexp" for name in names)


@functools.cache
def _reads_mask(kind: type[nn.Module]) -> bool:
    """Whether a method of a class tests its attention mask for bool, which only code that reads its values does."""
    for function in methods_of(kind):
        words = [instruction.argval for instruction in dis.get_instructions(inspect.unwrap(function))]
        for word, *after in zip(*(words[first:] for first in range(5)), strict=False):
            # One instruction may load several variables.
            loaded = word[-1] if isinstance(word, tuple) and word else word
            if loaded == "attention_mask" and after == ["dtype", "torch", "bool", "=="]:
                return True
    return False
