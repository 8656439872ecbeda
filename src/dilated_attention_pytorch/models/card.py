"""The card of a saved model: what it is, and how it is loaded."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from dilated_attention_pytorch.installation import NAME

if TYPE_CHECKING:
    from transformers import PreTrainedModel

CARD_NAME = "README.md"


def lines_to_load(folder: str) -> tuple[str, ...]:
    """The lines of Python that load the causal language model saved in ``folder``."""
    return (
        "import dilated_attention_pytorch",
        "from transformers import AutoModelForCausalLM",
        f"model = AutoModelForCausalLM.from_pretrained({folder!r})",
    )


def write_card(model: PreTrainedModel, folder: str | os.PathLike[str]) -> None:
    """Write the card of a causal language model into the folder where it was saved, unless there is one."""
    card = Path(folder, CARD_NAME)
    if card.exists():
        return
    lines = "\n".join(lines_to_load("."))
    card.write_text(
        "---\n"
        "library_name: transformers\n"
        "---\n\n"
        f"# {type(model).__name__} with dilated attention\n\n"
        f"It needs the package [{NAME}](https://pypi.org/project/{NAME}): `pip install '{NAME}[train]'`. In this "
        "folder:\n\n"
        f"```python\n{lines}\n```\n\n"
        f"Attention pattern: `{_pattern(model)}`.\n",
        encoding="utf-8",
    )


def _pattern(model: PreTrainedModel) -> str:
    config = model.config.get_text_config()
    entry = getattr(config, "dilated_attention", None)
    if entry is None:
        return str(config.to_longnet_config().pattern_in_words)
    held = entry["pattern"]
    return held if isinstance(held, str) else "; ".join(str(text) for text in held)
