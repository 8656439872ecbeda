"""The spacing of tiles is what their places say, however sparse, jittered or overlapping they are."""

from __future__ import annotations

import pytest
import torch

from dilated_attention_pytorch.slides.placement import placement


def tiles(
    density: float, step: int, *, offset: tuple[int, int] = (0, 0), side: int = 40, seed: int = 0
) -> torch.Tensor:
    """Tiles of a square grid, of which so many are there."""
    generator = torch.Generator().manual_seed(seed)
    cells = torch.arange(side**2)[torch.rand(side**2, generator=generator) < density]
    places = step * torch.stack((cells // side, cells % side), dim=1) + torch.tensor(offset)
    return places[torch.randperm(len(places), generator=generator)]


@pytest.mark.parametrize("density", [1.0, 0.5, 0.1, 0.02])
@pytest.mark.parametrize("seed", range(5))
def test_the_spacing_of_a_grid_is_found_at_any_density(density: float, seed: int) -> None:
    found = placement(tiles(density, 512, offset=(37, 1000), seed=seed))
    assert (found.spacing, found.repeated) == (512, 0)


def test_the_right_tile_size_of_sparse_slides_is_taken_and_half_or_double_is_not() -> None:
    generator = torch.Generator().manual_seed(3)
    for seed in range(200):
        number = int(torch.randint(10, 201, (), generator=generator))
        density = float(0.1 + 0.4 * torch.rand((), generator=generator))
        side = round((number / density) ** 0.5)
        cells = torch.randperm(side**2, generator=generator)[:number]
        spacing = placement(512 * torch.stack((cells // side, cells % side), dim=1)).spacing
        assert spacing == 512, (seed, number, density)
    # Where two steps are as common as one, or none is common.
    assert placement(tiles(0.15, 512, side=11, seed=22)).spacing == 512
    assert placement(tiles(0.02, 512, side=90, seed=2)).spacing == 512


def test_contours_that_begin_elsewhere_and_steps_that_were_rounded_do_not_hide_it() -> None:
    several = [tiles(0.9, 512, offset=(100 * index, 20000 * index), side=12, seed=index) for index in range(4)]
    assert placement(torch.cat(several)).spacing == 512
    few = [[0, 0], [0, 512], [0, 1024], [512, 0], [104, 9992], [104, 10504], [616, 9992], [616, 10504]]
    assert placement(torch.tensor(few)).spacing == 512
    assert placement((tiles(1.0, 1) * 512.4).round()).spacing == 512


@pytest.mark.parametrize("number", [1, 2, 3])
def test_a_few_tiles_tell_no_spacing(number: int) -> None:
    assert placement(tiles(0.01, 512, seed=3)[:number]).spacing is None


def test_tiles_at_one_place_are_counted() -> None:
    places = tiles(0.5, 512)
    found = placement(torch.cat((places, places[:5])))
    assert (found.spacing, found.repeated) == (512, 5)
    assert found.first in places[:5].tolist()
