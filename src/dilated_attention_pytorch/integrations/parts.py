"""Checks that a layer has no features that its replacement would lose."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import fx, nn


class NotReplaceable(ValueError):
    """The layer computes, or may compute, something that its replacement would not; the message gives the reason."""


def parts_of(layer: nn.Module) -> dict[str, nn.Module]:
    """The submodules of a layer by name, in order; a module with two names is listed twice."""
    named = layer.named_modules(remove_duplicate=False)
    return {name: module for name, module in named if name and "." not in name}


def check_parts(layer: nn.Module, known_modules: set[str], known_parameters: set[str]) -> None:
    """Raise unless a layer has only known parts, and nothing wraps its forward (:func:`check_unwrapped`).

    Raises:
        NotReplaceable: it has another parameter, buffer or submodule, parameters of another class, hooks, or a forward
            set on the instance.
    """
    own = {name for name, _ in layer.named_parameters(recurse=False)} - known_parameters
    own |= {name for name, _ in layer.named_buffers(recurse=False)} | set(parts_of(layer)) - known_modules
    if own:
        raise NotReplaceable(f"it has unknown parts: {', '.join(sorted(own))}")
    classes = {type(parameter).__name__ for parameter in layer.parameters() if type(parameter) is not nn.Parameter}
    if classes:  # sharding and quantisation refer to the original layer
        raise NotReplaceable(
            f"its parameters are of the class {', '.join(sorted(classes))}; replace before sharding or quantising"
        )
    check_unwrapped(layer)


def check_unwrapped(layer: nn.Module) -> None:
    """Raise if something wraps a layer's forward.

    Raises:
        NotReplaceable: it has hooks, or a forward set on the instance.
    """
    if "forward" in vars(layer):
        raise NotReplaceable("its forward was set on the instance, so something wraps it; replace before wrapping")
    hooks = (
        layer._forward_hooks,
        layer._forward_pre_hooks,
        layer._backward_hooks,
        layer._backward_pre_hooks,
        layer._state_dict_hooks,
        layer._state_dict_pre_hooks,
        layer._load_state_dict_pre_hooks,
        layer._load_state_dict_post_hooks,
    )
    if any(hooks):
        raise NotReplaceable("it has hooks, which would be lost; remove them, replace, and register them again")


def as_leaf(module: nn.Module, first: fx.Proxy, others: tuple[Any, ...], options: Mapping[str, Any]) -> Any:
    """A call of a module that ``torch.fx`` records and does not look into, as it does for attention of PyTorch.

    Args:
        module: the module that is being called.
        first: its first argument, which the tracer follows.
        others, options: its other arguments.
    """
    tracer = first.tracer
    assert isinstance(tracer, fx.Tracer)
    return tracer.create_proxy("call_module", tracer.path_of_module(module), (first, *others), dict(options))
