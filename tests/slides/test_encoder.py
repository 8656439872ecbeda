"""The slide encoder equals the authors', rebuilt in dense arithmetic, and reads their files; wrong ones say why."""

from __future__ import annotations

import argparse
import itertools
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from dilated_attention_pytorch.slides import (
    SlideEncoder,
    SlideEncoderConfig,
    load_slide_encoder,
    pack_slides,
    released_segment_lengths,
    tile_grid,
)
from slides.authors_encoder import AuthorsSlideEncoder, position_table, segment_lengths

SMALL = {"features": 19, "width": 32, "layers": 3, "heads": 16, "inner": 52}
RELEASED = {"features": 1536, "width": 768, "layers": 12, "heads": 16, "inner": 3072}


def slide(tiles: int, width: int, seed: int = 0, side: int = 128) -> tuple[Tensor, Tensor]:
    """Features, float64, and corners, int64, of different tiles in no order; corners lie anywhere in their tiles."""
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(1, tiles, width, generator=generator, dtype=torch.float64)
    places = torch.randperm(side * side, generator=generator)[:tiles]
    corners = torch.stack((places // side, places % side), dim=-1)
    return features, (256 * corners + torch.randint(0, 256, (tiles, 2), generator=generator))[None]


def ours(theirs: AuthorsSlideEncoder, **options: Any) -> SlideEncoder:
    """An encoder of ours with their weights."""
    weights = theirs.state_dict()
    config = SlideEncoderConfig(
        feature_dim=theirs.patch_embed.proj.in_features,
        embed_dim=theirs.norm.normalized_shape[0],
        num_layers=len(theirs.encoder.layers),
        num_heads=theirs.encoder.layers[0].self_attn.num_heads,
        ffn_dim=theirs.encoder.layers[0].ffn.fc1.out_features,
        grid_size=theirs.grid_size,
        pooling="mean" if theirs.global_pool else "class",
        **options,
    )
    made = SlideEncoder(config, dtype=torch.float64).eval()
    made.load_state_dict(weights)
    assert made.state_dict().keys() == weights.keys()
    return made


def largest_difference(theirs: AuthorsSlideEncoder, features: Tensor, coordinates: Tensor) -> float:
    """Over what both say of a slide, layers and embedding; numbers are of size 1, as they come out of a norm."""
    with torch.no_grad():
        embedding, layers = ours(theirs)(features, coordinates)
        last, expected = theirs(features, coordinates)
    assert layers.shape == expected.shape
    return max(float((layers - expected).abs().max()), float((embedding - last).abs().max()))


@pytest.mark.parametrize(
    ("tiles", "layers", "global_pool"),
    [(1, 3, False), (1, 3, True), (17, 3, False), (17, 3, True), (1025, 2, False), (1025, 2, True), (2300, 1, False)],
)
def test_it_equals_the_authors_encoder_in_every_layer(tiles: int, layers: int, global_pool: bool) -> None:
    theirs = AuthorsSlideEncoder(**{**SMALL, "layers": layers}, global_pool=global_pool).draw(seed=tiles)
    assert largest_difference(theirs, *slide(tiles, SMALL["features"])) < 1e-12


@pytest.mark.slow
@pytest.mark.parametrize("tiles", [1, 17, 1025, 5000])
def test_at_the_released_sizes_it_equals_the_authors_encoder(tiles: int, figure: Any) -> None:
    torch.set_num_threads(2)
    # Their table of all 1,000 x 1,000 places takes 6 GB in float64.
    theirs = AuthorsSlideEncoder(**RELEASED, grid_size=100).draw(seed=1)
    difference = largest_difference(theirs, *slide(tiles, 1536, side=100))
    figure(f"slide encoder, 12 x 768 in float64, {tiles} tiles, largest difference", f"{difference:.1e}")
    assert difference < 1e-12


def test_a_batch_of_slides_equals_slide_by_slide() -> None:
    theirs = AuthorsSlideEncoder(**SMALL).draw(seed=2)
    slides = [slide(61, 19, seed) for seed in range(3)]
    features, coordinates = (torch.cat(parts) for parts in zip(*slides, strict=True))
    with torch.no_grad():
        together = ours(theirs)(features, coordinates)
        expected, _ = theirs(features, coordinates)
    torch.testing.assert_close(together.embedding, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("pooling", ["class", "mean"])
def test_packed_slides_equal_slide_by_slide_in_values_and_gradients(pooling: str) -> None:
    theirs = AuthorsSlideEncoder(**SMALL, global_pool=pooling == "mean").draw(seed=3)
    encoder = ours(theirs)
    slides = [slide(tiles, 19, tiles) for tiles in (63, 1, 1100, 17)]
    features, coordinates, cu_seqlens = pack_slides([(f[0], c[0]) for f, c in slides])
    gradients = []
    for parts in ([(features, coordinates, cu_seqlens)], [(f, c, None) for f, c in slides]):
        encoder.zero_grad()
        found = [encoder(f, c, cu_seqlens=ends) for f, c, ends in parts]
        layers = torch.cat([one.layers for one in found])
        embedding = torch.cat([one.embedding for one in found])
        (layers.square().sum() + embedding.pow(3).sum()).backward()
        gradients.append([layers.detach(), embedding.detach(), *(p.grad.clone() for p in encoder.parameters())])
    for together, alone in zip(*gradients, strict=True):
        torch.testing.assert_close(together, alone, rtol=0, atol=1e-11 * max(1.0, float(alone.abs().max())))


@pytest.mark.parametrize("pooling", ["class", "mean"])
def test_a_call_that_stops_early_has_the_same_states_and_leaves_the_other_layers_alone(pooling: str) -> None:
    theirs = AuthorsSlideEncoder(**SMALL, global_pool=pooling == "mean").draw(seed=4)
    encoder, (features, coordinates) = ours(theirs), slide(43, 19)
    every = encoder(features, coordinates).layers
    for number in range(4):
        encoder.zero_grad()
        states = encoder(features, coordinates, num_layers=number).layers
        assert torch.equal(states, every[:, : number + 1])
        states[:, number].square().sum().backward()
        for index, layer in enumerate(encoder.encoder.layers):
            assert all((parameter.grad is not None) == (index < number) for parameter in layer.parameters())
        tiles = encoder.tile_states(features, coordinates, layer=number)
        pooled = encoder.norm(tiles.mean(1))
        if pooling == "mean":
            torch.testing.assert_close(pooled, every[:, number], rtol=0, atol=1e-12)


def test_rows_of_a_feed_forward_taken_at_once_change_nothing() -> None:
    torch.manual_seed(0)
    config = SlideEncoderConfig(feature_dim=5, embed_dim=16, num_layers=1, num_heads=2, ffn_dim=24)
    encoder = SlideEncoder(config, dtype=torch.float64).eval()
    features, coordinates = slide(9001, 5)
    whole = encoder(features, coordinates).layers
    with torch.no_grad():
        in_rows = encoder(features, coordinates).layers
    torch.testing.assert_close(in_rows, whole.detach(), rtol=0, atol=1e-13)


def test_gelu_in_float32_as_the_authors_run_it_differs_by_its_rounding_alone(figure: Any) -> None:
    theirs = AuthorsSlideEncoder(**SMALL).draw(seed=4)
    features, coordinates = slide(257, 19)
    with torch.no_grad():
        embedding = ours(theirs)(features, coordinates).embedding
        for layer in theirs.encoder.layers:
            layer.ffn.is_rounded = True
        expected, _ = theirs(features, coordinates)
    difference = float((embedding - expected).abs().max())
    figure("slide encoder in float64, by the authors' gelu in float32", f"{difference:.0e}")
    assert 0 < difference < 100 * torch.finfo(torch.float32).eps


@pytest.mark.parametrize(("slide_size", "tile_size"), [(262144, 256), (262144, 512), (131072, 256), (200000, 224)])
def test_segment_lengths_are_computed_as_the_authors_do(slide_size: int, tile_size: int) -> None:
    assert list(released_segment_lengths(slide_size, tile_size)) == segment_lengths(slide_size, tile_size)
    with pytest.raises(ValueError, match="at least 1,024 tiles, got 961 from 8000 and 256"):
        released_segment_lengths(8000, 256)


def test_the_released_sizes_have_the_released_number_of_parameters() -> None:
    with torch.device("meta"):
        encoder = SlideEncoder(SlideEncoderConfig())
    assert sum(p.numel() for p in encoder.encoder.parameters()) == 85_148_160
    assert sum(p.numel() for p in encoder.parameters()) == 86_330_880
    assert not [name for name, _ in encoder.named_parameters() if name.startswith("pos")]


def test_positions_do_not_follow_the_default_device() -> None:
    encoder = SlideEncoder(SlideEncoderConfig(feature_dim=3, embed_dim=16, num_layers=1, num_heads=2, ffn_dim=8))
    features, coordinates = slide(7, 3)
    with torch.device("meta"):
        assert encoder.to(features.dtype)(features, coordinates).layers.device.type == "cpu"


def test_where_a_tile_lies_on_its_grid_changes_the_slide_and_where_in_its_tile_does_not() -> None:
    encoder = ours(AuthorsSlideEncoder(**SMALL).draw(seed=5))
    features, coordinates = slide(40, 19)
    with torch.no_grad():
        first = encoder(features, coordinates).embedding
        in_tiles = encoder(features, tile_grid(coordinates, 256, 128), tile_size=1).embedding
        as_floats = encoder(features, coordinates.double() + 0.25).embedding
        swapped = encoder(features, coordinates.flip(-1)).embedding
    assert torch.equal(in_tiles, first)
    assert torch.equal(as_floats, first)
    assert (swapped - first).abs().max() > 1e-3


def test_dropout_and_dropped_paths_act_in_training_alone_and_by_slide() -> None:
    torch.manual_seed(0)
    config = SlideEncoderConfig(
        feature_dim=5, embed_dim=8, num_layers=2, num_heads=2, ffn_dim=8, dropout=0.0, drop_path=0.5
    )
    encoder = SlideEncoder(config, dtype=torch.float64)
    assert [layer.drop_path for layer in encoder.encoder.layers] == [0.0, 0.5]
    features, coordinates, ends = pack_slides([(f[0], c[0]) for f, c in [slide(3, 5), slide(3, 5)] * 200])
    layers = encoder(features, coordinates, cu_seqlens=ends).layers.detach()
    assert (layers[:, 1] - layers[0, 1]).abs().max() < 1e-12
    # Two branches, each left out for half of the slides: four outcomes.
    assert len({tuple(round(float(x), 9) for x in row) for row in layers[:, 2]}) == 4
    encoder.eval()
    calm = encoder(features, coordinates, cu_seqlens=ends).layers
    assert (calm[:, 2] - calm[0, 2]).abs().max() < 1e-12


def test_a_slide_for_which_the_authors_rows_are_displaced_is_computed_with_a_warning() -> None:
    config = SlideEncoderConfig(
        feature_dim=3, embed_dim=8, num_layers=2, num_heads=2, ffn_dim=8, segment_lengths=(7, 64), dilation_rates=(2, 4)
    )
    encoder = SlideEncoder(config).eval()
    features, coordinates = slide(6, 3)
    encoder(features, coordinates)
    features, coordinates = slide(7, 3)
    with pytest.warns(UserWarning, match="shifts the rows of segment j of 7 rows by 1 j rows") as caught:
        encoder(features, coordinates)
    assert len(caught) == config.num_layers


# Files


@pytest.fixture(scope="module")
def theirs() -> AuthorsSlideEncoder:
    return AuthorsSlideEncoder(**SMALL, grid_size=30).draw(seed=6)


def weights_of(theirs: AuthorsSlideEncoder) -> dict[str, Tensor]:
    return {name: value.float().contiguous() for name, value in theirs.state_dict().items()}


@pytest.mark.parametrize("kind", ["model", "alone", "safetensors", "namespace", "table", "prefix", "half"])
def test_a_file_of_the_authors_weights_gives_their_encoder(
    kind: str, theirs: AuthorsSlideEncoder, tmp_path: Path
) -> None:
    weights = weights_of(theirs)
    path, prefix = tmp_path / "slide_encoder.pth", ""
    if kind == "model":
        torch.save({"model": weights}, path)
    elif kind == "alone":
        torch.save(weights, path)
    elif kind == "safetensors":
        path = path.with_suffix(".safetensors")
        save_file(weights, path)
    elif kind == "namespace":
        torch.save({"model": weights, "args": argparse.Namespace(lr=0.1), "epoch": 7}, path)
    elif kind == "table":
        torch.save({"model": {**weights, "pos_embed": theirs.pos_embed.float()}}, path)
    elif kind == "prefix":
        prefix = "slide_encoder."
        named = {prefix + name: value for name, value in weights.items()}
        torch.save({**named, "classifier.0.weight": torch.zeros(2, 32)}, path)
    else:
        torch.save({"model": {name: value.half() for name, value in weights.items()}}, path)
    encoder = load_slide_encoder(path, prefix=prefix)
    assert not encoder.training
    expected = {name: value.half().float() for name, value in weights.items()} if kind == "half" else weights
    assert encoder.state_dict().keys() == expected.keys()
    assert all(torch.equal(value, expected[name]) for name, value in encoder.state_dict().items())
    config = encoder.config
    assert (config.feature_dim, config.embed_dim, config.num_layers, config.ffn_dim) == (19, 32, 3, 52)
    assert config.grid_size == (30 if kind == "table" else 1000)


def without(weights: dict[str, Tensor], *names: str) -> dict[str, Tensor]:
    return {name: value for name, value in weights.items() if name not in names}


LAYER = "encoder.layers.1."
BAD: dict[str, tuple[Any, str]] = {
    "garbage": (b"not weights" * 99, "cannot be read as weights"),
    "empty": (b"", "cannot be read as weights"),
    "cut": (lambda w: None, "cannot be read as weights"),
    "code": (lambda w: {"model": w, "hook": Path("x")}, "holds objects other than tensors (an object pathlib."),
    "list": (lambda w: [1, 2], "holds list; expected a dict of tensors"),
    "numbers": (lambda w: {"model": {"a": 1}}, "holds ['a']; expected a dict of tensors"),
    "tile encoder": (
        lambda w: {"cls_token": w["cls_token"], "blocks.0.attn.qkv.weight": torch.zeros(3, 3)},
        "holds no slide encoder: patch_embed.proj.weight and encoder.layers.0.ffn.fc1.weight are not both matrices in "
        "it. Its 2 weights begin with blocks.0.attn.qkv.weight, cls_token",
    ),
    "prefixed": (lambda w: {f"module.{n}": v for n, v in w.items()}, "begin with 'module.'; give that as the prefix"),
    "missing": (
        lambda w: without(w, "norm.bias", LAYER + "ffn.fc1.bias"),
        f"is not of this slide encoder: {LAYER}ffn.fc1.bias, norm.bias are missing; pass the file",
    ),
    "unknown": (lambda w: {**w, "decoder.weight": w["norm.bias"]}, "decoder.weight is not known"),
    "gap": (
        lambda w: {n: v for n, v in w.items() if not n.startswith(LAYER)},
        "it has weights of layer 2 and none of layer 1; pass the file",
    ),
    "far layer": (
        lambda w: {**w, "encoder.layers.20000.ffn.fc1.bias": w["norm.bias"]},
        "it has weights of layer 20,000 and none of layer 3; pass the file",
    ),
    "farther layer": (
        lambda w: {**w, f"encoder.layers.1{'0' * 5000}.ffn.fc1.bias": w["norm.bias"]},
        f"encoder.layers.1{'0' * 64}... is not known",
    ),
    "numbered": (lambda w: {**w, 7: w["norm.bias"]}, 'expected a dict of tensors, alone or under "model"'),
    "lines": (lambda w: {**w, "a\nb": w["norm.bias"]}, "a\\nb is not known"),
    "float8": (
        lambda w: {**w, "norm.bias": w["norm.bias"].to(torch.float8_e5m2)},
        "norm.bias must hold floats of 16 to 64 bits, got torch.float8_e5m2",
    ),
    "sparse": (
        lambda w: {**w, "patch_embed.proj.weight": w["patch_embed.proj.weight"].to_sparse()},
        "patch_embed.proj.weight must be a dense tensor, got one that is sparse_coo",
    ),
    "meta": (
        lambda w: {**w, "norm.bias": w["norm.bias"].to("meta")},
        "norm.bias must be a dense tensor, got one that is meta, without numbers",
    ),
    "expanded": (
        lambda w: {**w, "pos_embed": torch.zeros(1, 1, 1).expand(1, 10**10 + 1, 32)},
        "pos_embed must be a dense tensor, got one that is [1, 10000000001, 32] expanded from 4 bytes",
    ),
    "size": (
        lambda w: {**w, LAYER + "ffn.fc1.weight": torch.zeros(52, 31)},
        f"{LAYER}ffn.fc1.weight must be [52, 32] for patch_embed.proj.weight [32, 19], got [52, 31]",
    ),
    "not finite": (
        lambda w: {**w, "norm.bias": torch.full((32,), float("nan"))},
        "norm.bias holds numbers that are not finite",
    ),
    "integers": (
        lambda w: {**w, "norm.bias": torch.zeros(32, dtype=torch.int8)},
        "norm.bias must hold floats of 16 to 64 bits, got torch.int8",
    ),
    "heads": (
        lambda w: {**w, "patch_embed.proj.weight": torch.zeros(36, 19)},
        "num_heads must divide embed_dim, got 16 heads and embed_dim 36; pass the values that it was trained with",
    ),
    "no square": (lambda w: {**w, "pos_embed": torch.zeros(1, 12, 32)}, "must be [1, n * n + 1, 32], one row"),
    "other positions": (
        lambda w: {**w, "pos_embed": torch.cat((torch.zeros(1, 32), position_table(32, 7)[1:].flip(1)))[None]},
        "pos_embed is not the 2-D sine-cosine position table of a grid of 7 x 7",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_a_file_that_holds_something_else_says_what(name: str, theirs: AuthorsSlideEncoder, tmp_path: Path) -> None:
    content, message = BAD[name]
    path, weights = tmp_path / "weights.pth", weights_of(theirs)
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif name == "cut":
        torch.save(weights, path)
        path.write_bytes(path.read_bytes()[:-999])
    else:
        torch.save(content(weights), path)
    with pytest.raises(ValueError) as raised:
        load_slide_encoder(path)
    assert message in str(raised.value)
    assert str(path) in str(raised.value)


def test_files_that_are_not_there_or_need_a_package_say_so(
    theirs: AuthorsSlideEncoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(FileNotFoundError, match=r"nothing\.pth: there is no such file; pass the file of a slide"):
        load_slide_encoder(tmp_path / "nothing.pth")
    with pytest.raises(FileNotFoundError, match="it is a folder"):
        load_slide_encoder(tmp_path)
    path = tmp_path / "cut.safetensors"
    save_file(weights_of(theirs), path)
    with pytest.raises(ValueError, match=r"no weight has a name that begins with 'x\.'"):
        load_slide_encoder(path, prefix="x.")
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(ValueError, match="cannot be read as weights"):
        load_slide_encoder(path)
    monkeypatch.setitem(__import__("sys").modules, "safetensors", None)
    with pytest.raises(ImportError, match="needs safetensors, not installed here: pip install"):
        load_slide_encoder(path)


def _call(change: dict[str, Any]) -> Any:
    encoder = SlideEncoder(SlideEncoderConfig(feature_dim=3, embed_dim=8, num_layers=1, num_heads=2, ffn_dim=8)).eval()
    features, coordinates = slide(7, 3)
    return encoder(**{"features": features.float(), "coordinates": coordinates, **change})


ENDS = torch.tensor([0, 3, 3, 7], dtype=torch.int32)
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"features": torch.zeros(7, 3)}, "features must be floats [slides, tiles, 3], got torch.float32 [7, 3]"),
    ({"features": torch.zeros(1, 7, 4)}, "features must be floats [slides, tiles, 3], got torch.float32 [1, 7, 4]"),
    ({"features": torch.zeros(1, 7, 3, dtype=torch.int32)}, "got torch.int32"),
    ({"coordinates": torch.zeros(1, 6, 2)}, "coordinates must be [slides, tiles, 2] = [1, 7, 2]"),
    ({"features": torch.zeros(1, 0, 3), "coordinates": torch.zeros(1, 0, 2)}, "a slide must have at least one tile"),
    ({"cu_seqlens": ENDS}, "a slide must have at least one tile, got none in slide 1; leave it out"),
    ({"cu_seqlens": ENDS[:3]}, "cu_seqlens must run from 0 to the number of rows 7, got 0 to 3"),
    (
        {"features": torch.zeros(2, 7, 3), "coordinates": torch.zeros(2, 7, 2), "cu_seqlens": ENDS},
        "packed slides lie in one row",
    ),
    (
        {"coordinates": torch.full((1, 7, 2), -1)},
        "the tile at [-1, -1] has grid position [-1, -1], outside",
    ),
    (
        {"coordinates": torch.full((1, 7, 2), 256000)},
        "grid position [1000, 1000], outside the grid of 1000 x 1000 tiles of",
    ),
    ({"coordinates": torch.full((1, 7, 2), float("nan"))}, "coordinates must be finite"),
    ({"tile_size": 0}, "tile_size must be at least 1, got 0"),
    ({"num_layers": 9}, "num_layers must be 0 to 1, the layers of the encoder, got 9"),
]


@pytest.mark.parametrize(("change", "message"), WRONG, ids=itertools.count())
def test_a_wrong_call_says_what_was_expected(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as raised:
        _call(change)
    assert message in str(raised.value)


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ({"num_heads": 7}, "num_heads must divide embed_dim, got 7 heads and embed_dim 768"),
        ({"embed_dim": 18, "num_heads": 2}, "embed_dim must be a multiple of 4"),
        ({"num_layers": 0}, "num_layers must be at least 1, got 0"),
        ({"dropout": 1.0}, "dropout must be a probability of at least 0 and"),
        ({"pooling": "max"}, "pooling must be"),
        ({"segment_lengths": (4, 8)}, "dilation_rates"),
    ],
)
def test_numbers_that_do_not_go_together_say_so(numbers: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SlideEncoderConfig(**numbers)


def test_it_is_one_graph_that_names_a_tile_outside_the_grid_and_is_saved_as_a_program(tmp_path: Path) -> None:
    theirs = AuthorsSlideEncoder(**SMALL, grid_size=30).draw(seed=3)
    encoder = ours(theirs)
    features, coordinates = slide(17, SMALL["features"], side=30)
    with torch.no_grad():
        expected = encoder(features, coordinates)
        program = torch.export.export(encoder, (features, coordinates))
        compiled = torch.compile(encoder, fullgraph=True, backend="aot_eager")
        for made in (program.module(), compiled):
            torch.testing.assert_close(made(features, coordinates), expected)
            with pytest.raises(RuntimeError, match="a tile is outside the grid of 30 x 30 tiles"):
                made(features, coordinates + 256 * 30)
        compiled(features, coordinates.double())
    file = tmp_path / "encoder.pt2"
    torch.export.save(program, file)
    torch.testing.assert_close(torch.export.load(file).module()(features, coordinates), expected)
    alone = f"import torch; torch.export.load({str(file)!r})"
    ended = subprocess.run([sys.executable, "-c", alone], capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    assert "resolve torch.ops.dilated_attention_pytorch.attend" in ended.stderr
    assert "Please import" in ended.stderr


def test_onnx_refuses_the_operator_by_name(tmp_path: Path) -> None:
    pytest.importorskip("onnxscript")
    encoder = ours(AuthorsSlideEncoder(**SMALL, grid_size=30).draw(seed=3))
    arguments = slide(17, SMALL["features"], side=30)
    with pytest.raises(torch.onnx.errors.OnnxExporterError, match=r"dilated_attention_pytorch.attend"):
        torch.onnx.export(encoder, arguments, str(tmp_path / "encoder.onnx"), dynamo=True)
