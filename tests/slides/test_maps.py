"""Vectors that other tools compute, attention to tiles, states of tiles, and pictures of them."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import h5py
import pytest
import torch
from matplotlib.image import imread, imsave
from torch import Tensor

from dilated_attention_pytorch import progress
from dilated_attention_pytorch.cli import main
from dilated_attention_pytorch.slides import Embedder, EmbedSettings, SlideEncoder, SlideEncoderConfig, worker
from dilated_attention_pytorch.slides.memory import TileLimits
from slides.authors_encoder import AuthorsSlideEncoder
from slides.made_slides import SIZE, WIDTH, checkpoint, tiles_of, write_hdf5, write_slides

LAYERS, E = 12, 32


@pytest.fixture(autouse=True)
def _memory_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = TileLimits(tile_bytes=10**6, of_batch=10**6, of_slide=10**9)
    monkeypatch.setattr(worker, "measure_limits", lambda *_, **__: limits)


def authors(folder: Path, *, global_pool: bool) -> tuple[AuthorsSlideEncoder, Path]:
    """Their encoder of 12 layers in float64, and its weights as a file."""
    made = AuthorsSlideEncoder(
        features=WIDTH, width=E, layers=LAYERS, heads=16, inner=48, grid_size=400, global_pool=global_pool
    ).draw(seed=3)
    torch.save({"model": made.state_dict()}, folder / "slide_encoder.pth")
    return made, folder / "slide_encoder.pth"


def failure(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    """What a command line that cannot start says."""
    with pytest.raises(SystemExit) as left:
        main([str(word) for word in words])
    assert left.value.code in (1, 2)
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("like", "global_pool", "layer"),
    [("gigapath", False, None), ("gigapath-finetune", False, 11), ("trident", True, 11), ("patho-bench", True, 11)],
)
def test_the_vector_of_a_tool_is_its_own(like: Any, global_pool: bool, layer: int | None, tmp_path: Path) -> None:
    theirs, weights = authors(tmp_path, global_pool=global_pool)
    features, corners = tiles_of(90, 0)
    # TRIDENT rounds coordinates that are floats: 0.4 below a corner is that corner, and floor would move the tile.
    moved = corners - 0.4 if like in ("trident", "patho-bench") else corners
    recorded = {"patch_size_level0": SIZE, "target_magnification": 20, "level0_width": 200_000}
    write_hdf5(tmp_path / "features" / "a.h5", features, moved, **recorded)
    with torch.no_grad():
        last, layers = theirs(features[None].double(), (corners[None] // SIZE) * 256)
    expected = (last if layer is None else layers[:, layer])[0]
    settings = EmbedSettings(like=like)
    embedder = Embedder([tmp_path / "features"], weights, tmp_path / "out", settings)
    embedder.encoder.double()
    embedder.worker.read = wide(embedder.worker.read)  # type: ignore[method-assign]
    computed: list[float] = []
    top = embedder.encoder.encoder.layers[-1]  # type: ignore[union-attr]
    top.register_forward_hook(lambda *_: computed.append(1.0))
    assert embedder.run().embedded == 1
    assert bool(computed) == (settings.vector.layout == "own")  # else nothing of the last layer is written
    with h5py.File(tmp_path / "out" / "a.h5") as file:
        name = "embedding" if settings.vector.layout == "own" else "features"
        found = torch.from_numpy(file[name][()])
        assert found.shape == ((1, E) if like == "patho-bench" else (E,))
        torch.testing.assert_close(found.flatten(), expected.float(), rtol=0, atol=2e-6)
        if like == "trident":
            assert set(file) == {"features", "coords"}
            assert file["features"].attrs["name"] == "a"
            assert dict(file["coords"].attrs) == recorded
            assert torch.equal(torch.from_numpy(file["coords"][()]), moved.double())


def wide(read: Any) -> Any:
    """The reader, with features in float64."""

    def read_wide(*arguments: Any) -> Any:
        sequence = read(*arguments)
        return sequence._replace(slides=[x._replace(features=Wide(x.features)) for x in sequence.slides])

    return read_wide


class Wide(Tensor):
    """Features that stay in float64."""

    @staticmethod
    def __new__(cls: type, features: Tensor) -> Any:
        return torch.Tensor._make_subclass(cls, features.double())

    def float(self) -> Tensor:  # type: ignore[override]
        return self.as_subclass(Tensor)


@pytest.mark.parametrize("pooling", ["class", "mean"])
def test_maps_are_the_dense_probabilities_of_what_is_pooled(pooling: Any, tmp_path: Path) -> None:
    weights, numbers = checkpoint(tmp_path), [40, 1, 130]
    write_slides(tmp_path / "features", numbers)
    settings = EmbedSettings(pooling=pooling, maps=True, rollout=True, tiles=1)
    embedder = Embedder([tmp_path / "features"], weights, tmp_path / "out", settings)
    assert embedder.run().embedded == 3
    for index, number in enumerate(numbers):
        features, corners = tiles_of(number, index)
        inputs, states = attention_inputs(embedder.encoder, features, corners)
        with h5py.File(tmp_path / "out" / f"slide{index}.h5") as file:
            attention, own = (torch.from_numpy(file[name][()]) for name in ("attention", "attention_to_class"))
            torch.testing.assert_close(torch.from_numpy(file["states"][()]), states, rtol=0, atol=2e-5)
            assert torch.equal(torch.from_numpy(file["coords"][()]), corners)
            rollout = torch.from_numpy(file["rollout"][()])
        product = torch.eye(number + 1)
        for layer, (attend, x) in enumerate(inputs):
            dense = dense_probabilities(attend, x)
            product = (torch.eye(number + 1) + dense[0].mean(0)) / 2 @ product
            pooled = dense[0, :, 0] if pooling == "class" else dense[0, :, 1:].mean(1)
            torch.testing.assert_close(attention[layer], pooled[:, 1:], rtol=0, atol=1e-6)
            torch.testing.assert_close(own[layer], pooled[:, 0], rtol=0, atol=1e-6)
        expected = product[0] if pooling == "class" else product[1:].mean(0)
        torch.testing.assert_close(rollout, expected[1:], rtol=0, atol=1e-6)
        collection = json.loads((tmp_path / "out" / f"slide{index}.geojson").read_text())
        assert len(collection["features"]) == number
        first = collection["features"][0]
        assert first["geometry"]["coordinates"][0][2] == (corners[0] + SIZE).tolist()
        measured = first["properties"]["measurements"]
        assert list(measured) == ["attention layer 1", "attention layer 2"]
        assert measured["attention layer 2"] == pytest.approx(float(attention[1, :, 0].mean()))


def attention_inputs(encoder: SlideEncoder, features: Tensor, corners: Tensor) -> tuple[list[Any], Tensor]:
    """The attention of each layer with its input, and the states of the tiles after the first layer."""
    inputs: list[Any] = []
    hooks = [
        layer.self_attn.register_forward_hook(lambda module, args, out: inputs.append((module, args[0])))
        for layer in encoder.encoder.layers
    ]
    states: list[Tensor] = []
    hooks.append(encoder.encoder.layers[0].register_forward_hook(lambda module, args, out: states.append(out)))
    with torch.no_grad():
        encoder(features[None], corners[None], tile_size=SIZE)
    for hook in hooks:
        hook.remove()
    return inputs, states[0][0, 1:]


def dense_probabilities(attention: Any, x: Tensor) -> Tensor:
    """``[1, H, N, N]``, zero keys of the padded segments included in the sum."""
    with torch.no_grad():
        query, key = (
            project(x).unflatten(-1, (attention.num_heads, -1)) for project in (attention.q_proj, attention.k_proj)
        )
        scores = torch.einsum("bnhd,bmhd->bhnm", query, key).double() / math.sqrt(query.shape[-1])
    rows = torch.arange(x.shape[1])
    counts = attention.pattern.counts(rows, rows, attention.num_heads).double()
    padded = torch.zeros(attention.num_heads, x.shape[1], dtype=torch.float64)
    for group in attention.pattern.groups:
        for head in range(attention.num_heads):
            segment, selected = group.locate(rows, head, attention.num_heads)
            filled = -(-min(group.segment_length, x.shape[1]) // group.dilation_rate)
            mates = ((segment[:, None] == segment) & selected).sum(1)
            padded[head] += torch.where(selected, filled - mates, 0)
    terms = counts * scores.exp()
    return (terms / (terms.sum(-1, keepdim=True) + padded.unsqueeze(-1))).float()


def test_a_picture_shows_where_the_tiles_lie(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = checkpoint(tmp_path)
    corners = SIZE * torch.stack((torch.arange(200) // 10, torch.arange(200) % 10), dim=-1)
    recorded = {"patch_size_level0": SIZE, "level0_width": 20 * SIZE, "level0_height": 10 * SIZE}
    write_hdf5(tmp_path / "features" / "a.h5", torch.randn(200, WIDTH), corners, **recorded)
    main(
        [
            "embed",
            *map(
                str,
                (tmp_path / "features", "--checkpoint", weights, "--output", tmp_path / "out", "--maps", "--rollout"),
            ),
        ]
    )
    imsave(tmp_path / "slide.png", torch.rand(10, 20, 3).numpy())
    file = tmp_path / "out" / "a.h5"
    monkeypatch.setattr(progress, "LINE_SECONDS", 0.01)
    main(["heatmap", str(file)])
    assert "drawing 200 tiles, 0 s so far" in capsys.readouterr().out
    main(
        [
            "heatmap",
            str(file),
            "--layer",
            "1",
            "--head",
            "3",
            "--thumbnail",
            str(tmp_path / "slide.png"),
            "--output",
            str(tmp_path / "b.png"),
        ]
    )
    height, width, _ = imread(tmp_path / "out" / "a.png").shape
    assert width == 1200  # 8 inches
    assert 400 < height < 1000
    assert imread(tmp_path / "b.png").shape[1] == 1200
    assert "is not replaced" not in capsys.readouterr().err
    assert "exists" in failure(capsys, "heatmap", file)
    assert "`finetune --maps` wrote: a.h5" in failure(capsys, "heatmap", tmp_path / "out" / "z.h5")
    assert "--layer must be 1 to 2, got 3" in failure(
        capsys, "heatmap", file, "--layer", 3, "--output", tmp_path / "c.png"
    )
    assert "--head must be 0 to 15" in failure(capsys, "heatmap", file, "--head", 16, "--output", tmp_path / "c.png")
    main(["heatmap", str(file), "--rollout", "--output-file", str(tmp_path / "rollout.svg")])
    assert "rollout over all layers" in (tmp_path / "rollout.svg").read_text()
    assert "leave out --layer" in failure(
        capsys, "heatmap", file, "--rollout", "--layer", 1, "--output", tmp_path / "c.png"
    )
    assert "embed --maps" in failure(capsys, "heatmap", tmp_path / "features" / "a.h5", "--output", tmp_path / "c.png")
    assert not (tmp_path / "c.png").exists()


def test_a_foreign_geojson_stays(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    weights = checkpoint(tmp_path)
    write_slides(tmp_path / "features", [5])
    words = ("embed", tmp_path / "features", "--checkpoint", weights, "--output", tmp_path / "out", "--maps")
    main(list(map(str, words)))
    (tmp_path / "out" / "slide0.geojson").write_text("{}")
    (tmp_path / "out" / "slide0.h5").unlink()
    assert "was not written by `embed`" in failure(capsys, *words)
    assert (tmp_path / "out" / "slide0.geojson").read_text() == "{}"
    assert not (tmp_path / "out" / "slide0.h5").exists()  # the next run tries again


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--like", "trident", "--pooling", "mean"), 'pooling is set by like "trident"'),
        (("--like", "trident", "--format", "parquet"), 'like "trident" is written in HDF5'),
        (("--maps", "--format", "parquet"), "maps is written in HDF5"),
        (("--like", "trident"), "--layer must be 0 to 2, the layers of"),
        (("--tiles", 3), "--tiles must be 0 to 2"),
    ],
)
def test_options_that_do_not_go_together_say_so(
    words: tuple[object, ...], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_slides(tmp_path / "features", [5])
    weights = checkpoint(tmp_path)
    command = ("embed", tmp_path / "features", "--checkpoint", weights, "--output", tmp_path / "out", *words)
    assert message in failure(capsys, *command)
    assert not (tmp_path / "out").exists()


def test_a_folder_in_which_nothing_was_embedded_takes_other_settings(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = checkpoint(tmp_path)
    write_hdf5(tmp_path / "features" / "a.h5", *tiles_of(9, 0))  # without a tile size
    words = ("embed", tmp_path / "features", "--checkpoint", weights, "--output", tmp_path / "out")
    assert "pass --tile-size" in failure(capsys, *words)
    main(list(map(str, (*words, "--tile-size", SIZE))))
    assert (tmp_path / "out" / "a.h5").exists()


def test_a_job_folder_names_its_features(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "job" / "20x_256px_0px_overlap" / "features_gigapath"
    write_slides(folder, [5])
    words = ("embed", tmp_path / "job", "--checkpoint", checkpoint(tmp_path), "--output", tmp_path / "out")
    assert str(folder) in failure(capsys, *words)


def test_a_config_of_the_encoder_has_a_pooling() -> None:
    assert SlideEncoderConfig().pooling == EmbedSettings().vector.pooling == "class"
