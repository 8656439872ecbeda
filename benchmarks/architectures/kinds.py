"""Which architectures the installed transformers has: a model type, one of its classes, and the part that it plays."""

from __future__ import annotations

import importlib
import inspect
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, order=True)
class Kind:
    """One row of the table."""

    model_type: str
    class_name: str
    is_decoder: bool = False
    """Built with ``is_decoder=True``: classes that are encoders without it."""
    needs: str = field(default="", compare=False)
    """A package that its modules import and that is not here."""

    @property
    def name(self) -> str:
        """As ``"bert BertLMHeadModel decoder"``."""
        return f"{self.model_type} {self.class_name}" + (" decoder" if self.is_decoder else "")


def config_classes() -> dict[str, Any]:
    """The configuration of every model type."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING, CONFIG_MAPPING_NAMES

    return {model_type: CONFIG_MAPPING[model_type] for model_type in CONFIG_MAPPING_NAMES}


def model_class(kind: Kind) -> Any:
    """The class of a row."""
    return _classes_of(config_classes_of(kind.model_type))[kind.class_name]


def config_classes_of(model_type: str) -> Any:
    """The configuration of one model type."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    return CONFIG_MAPPING[model_type]


def all_kinds() -> list[Kind]:
    """One row for the plain model of every type, and one for its causal language model if that is another network."""
    kinds = []
    for model_type in sorted(config_classes()):
        try:
            kinds += kinds_of(model_type) or [Kind(model_type, "")]
        except ModuleNotFoundError as error:
            kinds.append(Kind(model_type, "", needs=str(error.name)))
    return kinds


def kinds_of(model_type: str) -> list[Kind]:
    """The rows of one model type; none where no class of models is written for it."""
    from transformers.models.auto import modeling_auto

    config_class = config_classes_of(model_type)
    classes = _classes_of(config_class)
    named = modeling_auto.MODEL_MAPPING_NAMES.get(model_type, ())
    plain = [name for name in ([named] if isinstance(named, str) else named) if name in classes]
    causal = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(model_type)
    has_switch = "is_decoder" in config_class.__dataclass_fields__ and not config_class().is_decoder
    if causal in classes and not has_switch:
        # The plain model is the causal one without its last projection, or it is another network altogether.
        other = [name for name in plain if not _is_part_of(classes[name], classes[causal])]
        return [Kind(model_type, causal), *(Kind(model_type, name) for name in other)]
    found = [Kind(model_type, name) for name in plain or _without_auto(classes)]
    if causal in classes:
        found.append(Kind(model_type, causal, is_decoder=True))
    return found


def _classes_of(config_class: Any) -> dict[str, Any]:
    """The models written for a configuration, by name, in the order of their file."""
    from torch import nn
    from transformers import PreTrainedModel

    package = config_class.__module__.rpartition(".")[0]
    folder = importlib.import_module(package)
    found = {}
    for name in _modeling_modules(folder):
        for attribute, value in vars(importlib.import_module(f"{package}.{name}")).items():
            if (
                inspect.isclass(value)
                and issubclass(value, PreTrainedModel)
                and getattr(value, "config_class", None) is config_class
                and value.forward is not nn.Module.forward
            ):
                found[attribute] = value
    return found


def _modeling_modules(folder: Any) -> list[str]:
    from pathlib import Path

    return sorted(file.stem for file in Path(folder.__path__[0]).glob("modeling_*.py"))


def _without_auto(classes: dict[str, Any]) -> list[str]:
    """The class of a part that no automatic class knows: a plain model if there is one, or the first."""
    concrete = [name for name in classes if not name.endswith("PreTrainedModel")]
    plain = [name for name in concrete if name.endswith("Model")]
    return (plain or concrete)[:1]


def _is_part_of(plain: Any, causal: Any) -> bool:
    """Whether the constructor of the causal model builds the plain one, or its text model."""
    source = inspect.getsource(causal.__init__)
    return plain.__name__ in source or "AutoModel" in source or plain is causal
