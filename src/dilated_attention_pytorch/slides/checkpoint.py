"""Loading of slide encoder weights: GigaPath's ``slide_encoder.pth``, or the same in safetensors."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from dilated_attention_pytorch.errors import first_line, shortened
from dilated_attention_pytorch.installation import importing

from .encoder import SlideEncoder, SlideEncoderConfig
from .grid import position_table
from .tensor_file import FLOATS, UnsafeFileError, check_dense, load_tensors

_TABLE = "pos_embed"
_ANCHOR = "patch_embed.proj.weight"
_LAYER_PREFIX = "encoder.layers."
_LAYER = re.compile(re.escape(_LAYER_PREFIX) + r"(0|[1-9][0-9]{0,5})\.")
_SHOWN = 4
_NOT_IT = (
    "pass the file of a slide encoder, such as slide_encoder.pth of prov-gigapath/prov-gigapath (pytorch_model.bin is "
    "its tile encoder, which computes the features)"
)


def load_slide_encoder(
    path: Path | str, *, config: SlideEncoderConfig | None = None, prefix: str = "", dtype: torch.dtype = torch.float32
) -> SlideEncoder:
    """Load a slide encoder from a file, in eval mode, on the CPU.

    No code in the file is executed. Sizes follow from the weights: widths of features, layers and feed-forward, number
    of layers, and the grid if the position table is in the file. Options that weights do not determine (heads, pattern,
    pooling, dropout rates) come from ``config``; None = as released.

    Args:
        path: a ``.safetensors`` file, or a ``torch.save`` file with a state dict, alone or under the key ``"model"``.
        config: configuration of a non-released encoder; sizes that the weights determine override its fields.
        prefix: load only the weights whose names begin with it; ``"slide_encoder."`` for a model fine-tuned with
            GigaPath's own program.
        dtype: of the parameters.

    Raises:
        FileNotFoundError: the file does not exist.
        ImportError: safetensors is needed and not installed.
        ValueError: the file is damaged, holds something other than tensors, belongs to another model, or sizes do not
            match. The message says what was found and what to do.

    >>> import tempfile
    >>> from dilated_attention_pytorch.slides import SlideEncoder, SlideEncoderConfig, load_slide_encoder
    >>> encoder = SlideEncoder(SlideEncoderConfig(feature_dim=32, embed_dim=48, num_layers=2, ffn_dim=96))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     torch.save({"model": encoder.state_dict()}, f"{folder}/slide_encoder.pth")
    ...     again = load_slide_encoder(f"{folder}/slide_encoder.pth")
    >>> again.config.num_layers, again.config.ffn_dim, torch.equal(again.cls_token, encoder.cls_token)
    (2, 96, True)
    """
    path = Path(path)
    weights = read_weights(path)
    if prefix:
        weights = {name.removeprefix(prefix): value for name, value in weights.items() if name.startswith(prefix)}
        if not weights:
            raise ValueError(f"{path}: no weight has a name that begins with {prefix!r}; leave the prefix out")
    for name, value in weights.items():
        _check_value(path, name, value)
    table = weights.pop(_TABLE, None)
    sizes = _sizes(path, weights, table, config or SlideEncoderConfig())
    _check_weights(path, weights, _expected(sizes))
    encoder = SlideEncoder(sizes, dtype=dtype)
    if table is not None:
        _check_table(path, table, position_table(sizes.grid_size, sizes.embed_dim))
    encoder.load_state_dict(weights)
    return encoder.eval()


def read_weights(path: Path) -> dict[str, Tensor]:
    """The tensors of a file by name; see :func:`load_slide_encoder`."""
    if not path.is_file():
        other = "it is a pipe or a device" if path.exists() else "there is no such file"
        raise FileNotFoundError(f"{path}: {'it is a folder' if path.is_dir() else other}; {_NOT_IT}")
    if path.suffix == ".safetensors":
        return _read_safetensors(path)
    try:
        content = load_tensors(path)
    except UnsafeFileError as error:
        raise ValueError(
            f"{path} holds objects other than tensors ({error}), which are not loaded, as that would execute code from "
            "the file; if you trust it, save its state dict alone: "
            'torch.save(torch.load(path, weights_only=False)["model"], new_path)'
        ) from error
    except ValueError as error:
        raise ValueError(_damaged(path, error)) from error
    weights = content.get("model", content) if isinstance(content, Mapping) else content
    if not isinstance(weights, Mapping) or not all(
        isinstance(name, str) and isinstance(value, Tensor) for name, value in weights.items()
    ):
        shown: object = type(weights).__name__
        if isinstance(weights, Mapping):
            shown = [shortened(str(name)) for name in list(weights)[:_SHOWN]]
        raise ValueError(f'{path} holds {shown}; expected a dict of tensors, alone or under "model"; {_NOT_IT}')
    return dict(weights)


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    with importing(path.name, "slides"):
        from safetensors import SafetensorError
        from safetensors.torch import load_file
    try:
        return load_file(path)
    except (SafetensorError, OSError) as error:
        raise ValueError(_damaged(path, error)) from error


def _sizes(
    path: Path, weights: Mapping[str, Tensor], table: Tensor | None, config: SlideEncoderConfig
) -> SlideEncoderConfig:
    """``config`` with the sizes that the weights determine.

    Raises:
        ValueError: the weights are not those of a slide encoder.
    """
    layers = {int(match[1]) for match in map(_LAYER.match, weights) if match}
    matrices = [weights.get(_ANCHOR), weights.get("encoder.layers.0.ffn.fc1.weight")]
    if not layers or any(matrix is None or matrix.dim() != 2 for matrix in matrices):
        inside = [name for name in weights if name.endswith("." + _ANCHOR)]
        if inside:
            prefix = inside[0].removesuffix(_ANCHOR)
            raise ValueError(f"{path}: the names of its weights begin with {prefix!r}; give that as the prefix")
        shown = ", ".join(map(shortened, sorted(weights)[:_SHOWN]))
        raise ValueError(
            f"{path} holds no slide encoder: {_ANCHOR} and encoder.layers.0.ffn.fc1.weight are not both matrices in "
            f"it. Its {len(weights)} weights begin with {shown}; {_NOT_IT}"
        )
    if len(layers) <= max(layers):
        gap = min(set(range(len(layers))) - layers)
        raise ValueError(f"{path}: it has weights of layer {max(layers):,} and none of layer {gap:,}; {_NOT_IT}")
    projection, feedforward = (matrix for matrix in matrices if matrix is not None)
    grid_size = config.grid_size
    if table is not None:
        rows = table.shape[1] if table.dim() == 3 else 0
        grid_size = math.isqrt(rows - 1) if rows > 1 else 0
        width = projection.shape[0]
        if not grid_size or tuple(table.shape) != (1, grid_size**2 + 1, width):
            raise ValueError(
                f"{path}: {_TABLE} must be [1, n * n + 1, {width}], one row for the class token and each of n x n "
                f"places, got {list(table.shape)}"
            )
    try:
        return dataclasses.replace(
            config,
            feature_dim=projection.shape[1],
            embed_dim=projection.shape[0],
            num_layers=max(layers) + 1,
            ffn_dim=feedforward.shape[0],
            grid_size=grid_size,
        )
    except ValueError as error:
        raise ValueError(f"{path}: {error}; pass the values that it was trained with") from error


def _expected(config: SlideEncoderConfig) -> dict[str, torch.Size]:
    """The names and shapes of the weights. Only one layer is built: a file may name any number of them."""
    with torch.device("meta"):
        of_one = SlideEncoder(dataclasses.replace(config, num_layers=1)).state_dict()
    shapes = {}
    for name, value in of_one.items():
        layer = _LAYER.match(name)
        for number in range(config.num_layers) if layer else (0,):
            shapes[f"{_LAYER_PREFIX}{number}.{name[layer.end() :]}" if layer else name] = value.shape
    return shapes


def _check_weights(path: Path, weights: Mapping[str, Tensor], expected: Mapping[str, torch.Size]) -> None:
    missing, unknown = sorted(expected.keys() - weights.keys()), sorted(weights.keys() - expected.keys())
    if missing or unknown:
        parts = [f"{_listed(missing)} missing"] if missing else []
        parts += [f"{_listed(unknown)} not known"] if unknown else []
        raise ValueError(f"{path} is not of this slide encoder: {', and '.join(parts)}; {_NOT_IT}")
    for name, shape in expected.items():
        value = weights[name]
        if value.shape != shape:
            raise ValueError(
                f"{path}: {name} must be {list(shape)} for {_ANCHOR} {list(weights[_ANCHOR].shape)}, got "
                f"{list(value.shape)}; the file is of another model, or damaged"
            )
        if not bool(value.isfinite().all()):
            raise ValueError(f"{path}: {name} holds numbers that are not finite; copy the file again")


def _check_value(path: Path, name: str, value: Tensor) -> None:
    name = shortened(name)
    try:
        check_dense(name, value)
    except ValueError as error:
        raise ValueError(f"{path}: {error}; save it as one, or copy the file again") from error
    if value.dtype not in FLOATS:
        raise ValueError(f"{path}: {name} must hold floats of 16 to 64 bits, got {value.dtype}; copy the file again")


def _check_table(path: Path, table: Tensor, positions: Tensor) -> None:
    """Raise unless the file's position table equals the computed one."""
    side, half = positions.shape
    tolerance = 2 * torch.finfo(table.dtype).eps
    places = table[0, 1:].view(side, side, -1).to(positions.dtype)
    parts = ((places[..., :half], positions[None]), (places[..., half:], positions[:, None]))
    if places.shape[2] == 2 * half and not bool(table[0, 0].any()):
        # Row by row: the whole table takes gigabytes.
        rows = ((part[row], of[row if of.shape[0] > 1 else 0]) for part, of in parts for row in range(side))
        if all(torch.allclose(got, expected.expand_as(got), rtol=0, atol=tolerance) for got, expected in rows):
            return
    raise ValueError(
        f"{path}: {_TABLE} is not the 2-D sine-cosine position table of a grid of {side} x {side}, so the "
        "encoder was trained with other position embeddings, which are not supported"
    )


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{', '.join(map(shortened, names[:_SHOWN]))}{more} {'is' if len(names) == 1 else 'are'}"


def _damaged(path: Path, error: Exception) -> str:
    return f"{path} cannot be read as weights ({first_line(error)}): it is damaged or no such file; copy it again"
