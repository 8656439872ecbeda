"""TITAN's encoder equals a dense one, in vector and gradient, keeps memory linear, and reads the files of the hub."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import h5py
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dilated_attention_pytorch.errors import RunError
from dilated_attention_pytorch.slides import (
    Embedder,
    EmbedSettings,
    TitanConfig,
    TitanEncoder,
    load_titan_encoder,
    pack_slides,
)
from dilated_attention_pytorch.slides import titan as module
from slides.authors_titan import alibi_slopes, slide_vector
from slides.made_slides import write_hdf5

SIZES = {"feature_dim": 20, "embed_dim": 48, "num_layers": 2, "num_heads": 6, "ffn_dim": 96, "pool_queries": 5}


def made(tiles: int, seed: int) -> tuple[Tensor, Tensor]:
    """Features and corners, not on multiples of the tile; the last two tiles share a cell, and one holds zeros."""
    generator = torch.Generator().manual_seed(seed)
    places = torch.randperm(20 * 20, generator=generator)[:tiles]
    corners = 512 * torch.stack((places // 20, places % 20), dim=-1) + torch.tensor([700, 45])
    features = torch.randn(tiles, 20, generator=generator, dtype=torch.float64)
    corners[-1] = corners[-2]
    features[tiles // 2] = 0
    return features, corners


def write_checkpoint(encoder: TitanEncoder, folder: Path, pool: str) -> dict[str, Any]:
    """The files of the hub; returns the configuration of the encoder in them."""
    state = {f"vision_encoder.{name}": value for name, value in encoder.state_dict().items()}
    folder.mkdir(exist_ok=True)
    save_file(state | {"text_encoder.x": torch.zeros(3)}, folder / "model.safetensors")
    of_vision = {
        "embed_dim": 48,
        "depth": 2,
        "num_heads": 6,
        "mlp_ratio": 2.0,
        "mlp_patch_embed_dim": 20,
        "attentional_pool": pool,
        "attn_pooler_queries": 5,
    }
    (folder / "config.json").write_text(json.dumps({"model_type": "titan", "vision_config": of_vision}))
    return of_vision


@pytest.mark.parametrize("pool", ["parallel", "cascade"])
def test_vectors_and_gradients_equal_those_of_a_dense_encoder(pool: module.AttentionalPool) -> None:
    torch.manual_seed(0)
    encoder = TitanEncoder(TitanConfig(**SIZES, pool=pool, pool_heads=4)).double()
    for parameter in encoder.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    slides = [made(90, 1), made(3, 2), made(31, 3)]
    features, corners, cu_seqlens = pack_slides(slides)
    features.requires_grad_()
    got = encoder(features, corners, tile_size=512, cu_seqlens=cu_seqlens)
    weights = dict(encoder.named_parameters())
    expected = torch.stack(
        [
            slide_vector(weights, part, corners[0, start:stop], 512, 6, pool, 4)
            for part, start, stop in zip(
                features[0].split([90, 3, 31]), cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist(), strict=True
            )
        ]
    )
    torch.testing.assert_close(got.embedding, expected, rtol=0, atol=1e-12)
    assert got.layers.shape == (3, 3, 48)
    wanted = {name: value for name, value in weights.items() if name != "proj"}
    if pool == "parallel":
        wanted = {name: value for name, value in wanted.items() if not name.startswith("attn_pool.")}
    by = torch.randn(expected.shape, dtype=torch.float64)
    for one, other in zip(
        torch.autograd.grad((got.embedding * by).sum(), [features, *wanted.values()]),
        torch.autograd.grad((expected * by).sum(), [features, *wanted.values()]),
        strict=True,
    ):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12 * float(other.abs().max().clamp(min=1)))


def test_a_folder_of_slides_is_embedded_as_by_a_dense_encoder(tmp_path: Path) -> None:
    torch.manual_seed(0)
    encoder = TitanEncoder(TitanConfig(**SIZES))
    for parameter in encoder.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    write_checkpoint(encoder, tmp_path / "titan", "parallel")
    slides = []
    for index, tiles in enumerate((40, 7)):
        corners = 512 * torch.stack((torch.arange(tiles) // 6, torch.arange(tiles) % 6), dim=-1)
        slides.append((torch.randn(tiles, 20), corners + torch.tensor([700, 45])))
        recorded = {"patch_size_level0": 512, "encoder": "conch_v15", "target_magnification": 20}
        write_hdf5(tmp_path / "features" / f"slide{index}.h5", *slides[-1], **recorded)
    written = [tmp_path / "features", tmp_path / "titan", tmp_path / "out"]
    outcome = Embedder([written[0]], *written[1:], EmbedSettings()).run()
    assert not outcome.failed, [*outcome.failed.values()]
    assert outcome.embedded == 2
    weights = {name: value.double() for name, value in encoder.state_dict().items()}
    for index, (features, corners) in enumerate(slides):
        with h5py.File(tmp_path / "out" / f"slide{index}.h5") as file:
            vector = torch.from_numpy(file["embedding"][()])
        expected = slide_vector(weights, features.double(), corners, 512, 6, "parallel", 8)
        torch.testing.assert_close(vector.double(), expected, rtol=0, atol=1e-5 * float(expected.abs().max()))
    for wrong in (EmbedSettings(maps=True), EmbedSettings(like="trident"), EmbedSettings(layer=2)):
        with pytest.raises(RunError, match="is for GigaPath's encoder"):
            Embedder([written[0]], *written[1:], wrong)


class Largest(TorchDispatchMode):
    """Elements of the largest tensor that any operator returns."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in tree_leaves(result):
            if isinstance(value, Tensor):
                self.numel = max(self.numel, value.numel())
        return result


def test_no_tensor_holds_all_pairs_of_tiles_in_either_pass() -> None:
    encoder = TitanEncoder(TitanConfig(**SIZES))
    places = torch.arange(900)
    with Largest() as largest:
        corners = torch.stack((places // 30, places % 30), dim=-1)[None]
        encoder(torch.randn(1, 900, 20), corners, tile_size=1).embedding.sum().backward()
    assert 900 * 144 <= largest.numel < 900 * 900 / 4  # queries, keys and values


def test_slopes_of_any_number_of_heads_are_alibis() -> None:
    for heads in (1, 2, 3, 6, 8, 12, 20):
        assert module.slopes(heads) == pytest.approx(alibi_slopes(heads), rel=1e-14)


def test_the_files_of_the_hub_are_read_and_others_refused(tmp_path: Path) -> None:
    torch.manual_seed(0)
    encoder = TitanEncoder(TitanConfig(**SIZES, pool="cascade")).eval()
    of_vision = write_checkpoint(encoder, tmp_path, "cascade")
    config = tmp_path / "config.json"
    again = load_titan_encoder(tmp_path)
    features, corners = made(40, 1)
    for one, other in zip(again(features[None], corners[None]), encoder(features[None], corners[None]), strict=True):
        torch.testing.assert_close(one, other)  # weights at other addresses may be multiplied in another order
    for one, other in zip(again.parameters(), encoder.parameters(), strict=True):
        assert torch.equal(one, other)

    for change, words in (
        ({"depth": 3}, "does not hold TITAN's encoder"),
        ({"pos_encode_type": "abs"}, "pos_encode_type"),
        ({"attentional_pool": "mean"}, "pool must be"),
        ({"num_heads": 7}, "must divide"),
    ):
        config.write_text(json.dumps({"vision_config": of_vision | change}))
        with pytest.raises(ValueError, match=words):
            load_titan_encoder(tmp_path)
    config.write_text("[1]")
    with pytest.raises(ValueError, match="is not the configuration of TITAN"):
        load_titan_encoder(tmp_path)
    config.unlink()
    with pytest.raises(FileNotFoundError, match="MahmoodLab/TITAN"):
        load_titan_encoder(tmp_path)


@pytest.mark.parametrize(
    ("features", "corners", "words"),
    [
        (torch.randn(1, 5, 7), torch.zeros(1, 5, 2), r"\[slides, tiles, 20\]"),
        (torch.randn(1, 0, 20), torch.zeros(1, 0, 2), "at least one tile"),
        (torch.zeros(1, 5, 20), torch.zeros(1, 5, 2), "all features"),
    ],
)
def test_wrong_slides_are_refused(features: Tensor, corners: Tensor, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        TitanEncoder(TitanConfig(**SIZES))(features, corners, tile_size=1)
