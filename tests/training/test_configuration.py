"""Settings in files: what is written is read back, a run's own file gives the same run, and what is wrong is said."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dilated_attention_pytorch.cli.command import _parse
from dilated_attention_pytorch.cli.train import defaults_of
from dilated_attention_pytorch.training import PRESETS, ExtensionSettings, TrainSettings, train
from dilated_attention_pytorch.training.configuration import (
    CONFIGURATION_NAME,
    configuration_text,
    read_configuration,
    with_values,
)
from dilated_attention_pytorch.training.stages import StageSettings
from training.runs import assert_same_weights, quiet, tiny_settings, write_texts

NUMBERS = st.floats(min_value=1e-30, max_value=1e30)
PATHS = st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1), max_size=3)


@st.composite
def stages_of(draw: st.DrawFn, settings: TrainSettings) -> StageSettings:
    if not draw(st.booleans()):
        return StageSettings()
    return StageSettings(
        lengths=(8, settings.context_length), learning_rates=(draw(NUMBERS), 1.0), fractions=(0.5, 0.5)
    )


@st.composite
def training_settings(draw: st.DrawFn) -> TrainSettings:
    settings = PRESETS[draw(st.sampled_from(sorted(PRESETS)))]()
    shifts = {"layer_segment_shifts": tuple(draw(st.lists(st.integers(0, 60), min_size=1, max_size=2)))}
    model = dataclasses.replace(
        settings.model,
        dropout=draw(st.floats(0, 0.9)),
        tie_embeddings=draw(st.booleans()),
        **(shifts if settings.model.segment_lengths else {}),
    )
    return dataclasses.replace(
        settings,
        model=model,
        data=tuple(Path("/", path) for path in draw(PATHS)),
        steps=draw(st.integers(10, 10**6)),
        learning_rate=draw(NUMBERS),
        compile=draw(st.booleans()),
        sample_prompt=draw(st.text(max_size=20)),
        schedule=draw(st.sampled_from(["linear", "cosine", "constant"])),
        stages=draw(stages_of(settings)),
    )


@given(training_settings())
def test_training_settings_come_back_from_their_file(tmp_path_factory: Any, settings: TrainSettings) -> None:
    file = tmp_path_factory.mktemp("configuration") / CONFIGURATION_NAME
    file.write_text(configuration_text(settings.to_dict(), "train"))
    assert with_values(PRESETS["cpu"](), read_configuration(file), file) == settings


@given(st.lists(st.integers(8, 10**6), max_size=4), NUMBERS)
def test_extension_settings_come_back_from_their_file(tmp_path_factory: Any, stages: list[int], rate: float) -> None:
    rising = tuple(sorted(stages))
    length = rising[-1] if rising else 4096
    settings = ExtensionSettings(
        model="some/model", context_length=length, stages=rising, learning_rate=rate, pattern="local_window(64)"
    )
    file = tmp_path_factory.mktemp("configuration") / CONFIGURATION_NAME
    file.write_text(configuration_text(settings.to_dict(), "extend"))
    assert with_values(ExtensionSettings(model="other"), read_configuration(file), file) == settings


def test_a_file_of_an_earlier_version_is_read(tmp_path: Path) -> None:
    file = tmp_path / "old.toml"
    file.write_text('data = ["a", "b"]\nweights = [0.7, 0.3]\n')
    assert with_values(PRESETS["cpu"](), read_configuration(file), file).data_weights == (0.7, 0.3)
    file.write_text("length = 4096\n")
    assert with_values(ExtensionSettings(model="m"), read_configuration(file), file).context_length == 4096


def test_a_run_is_run_again_from_the_file_that_it_leaves(tmp_path: Path) -> None:
    first = train(tiny_settings(write_texts(tmp_path / "texts")), tmp_path / "first", quiet())
    file = first.run / CONFIGURATION_NAME
    settings = with_values(PRESETS["cpu"](), read_configuration(file), file)
    again = train(settings, tmp_path / "again", quiet())
    assert again.bits_per_byte == first.bits_per_byte
    assert_same_weights(again.run, first.run)


def test_a_file_changes_the_preset_and_flags_change_the_file(tmp_path: Path) -> None:
    file = tmp_path / "my.toml"
    file.write_text('preset = "tiny"\noutput = "mine"\ndata = ["a", "b"]\nsteps = 7\n[model]\nnum_layers = 3\n')
    command = defaults_of(["--config", str(file), "--steps", "5"])
    tiny = PRESETS["tiny"]()
    assert (command.preset, command.output, command.data) == ("tiny", Path("mine"), (Path("a"), Path("b")))
    assert command.model == dataclasses.replace(tiny.model, num_layers=3)
    assert command.context_length == tiny.context_length
    assert defaults_of([f"--config={file}", "--preset", "cpu"]).context_length == PRESETS["cpu"]().context_length


@pytest.mark.parametrize(
    ("words", "file", "preset"),
    [
        ("", "", "hybrid"),
        ("--model.num-layers 12 --data-weights 1", "", "hybrid"),
        ("--preset cpu", 'preset = "hybrid"', "cpu"),
        ("", 'preset = "cpu"', "cpu"),
        ("--packing documents", "", "cpu"),
        ("", 'packing = "documents"', "cpu"),
        ("--packing windows", "", "hybrid"),
        ("--model.segment-lengths 512 --model.dilation-rates 1", "", "cpu"),
        ("--model.layer-patterns=local_window(63)", "", "cpu"),
        ("--resume runs/mine --steps 1", "", "cpu"),
        ("--resume auto", "", "hybrid"),
        ("--model my/llama", "", "cpu"),
        ("", "[model]\nsegment_lengths = [512]\ndilation_rates = [1]", "cpu"),
        ("--model.rope-theta=500", "", "cpu"),
        ("--model.offset-rule block", "", "cpu"),
        ("--model.shifted-keys", "", "cpu"),
        ("--model.num-layers 2", "", "cpu"),
        ("", "[model]\nnum_layers = 1", "cpu"),
        ("--device cpu", "", "hybrid"),
    ],
)
def test_the_preset_of_a_cpu_gives_way_to_flags_that_it_cannot_have(
    words: str, file: str, preset: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    argv = words.split()
    if file:
        (tmp_path / "my.toml").write_text(file)
        argv += ["--config", str(tmp_path / "my.toml")]
    chosen = defaults_of(argv)
    assert chosen.muon_learning_rate == PRESETS[preset]().muon_learning_rate
    assert bool(chosen.stages.lengths) == (preset == "hybrid")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert defaults_of([]).model == PRESETS["gpu"]().model
    assert defaults_of(["--device", "cpu"]).model == PRESETS["hybrid"]().model


GROWING = "--context-length 1024 --stages.lengths 256 1024 --stages.patterns"


@pytest.mark.parametrize(
    "line",
    [
        "--model.shifted-keys",
        "--model.rope-theta 500",
        "--model.offset-rule block",
        "--model.segment-lengths 512 2048 --model.dilation-rates 1 2",
        f"{GROWING} DilatedPattern([256],[1]) DilatedPattern([256,1024],[1,2])",
        "--model.layer-patterns local_window(63) DilatedPattern([8192],[1])",
        "--preset gpu --model.layer-patterns=local_window(63)",
        "--preset hybrid --model.layer-patterns local_window(63)",
        "--preset hybrid --model.num-heads 3",
        "--preset hybrid --model.num-heads 8 --model.embed-dim 256",
        "--preset hybrid --model.activation gelu",
        "--model.num-heads 8",
        "--packing documents",
        "--context-length 300",
    ],
)
def test_flags_of_a_model_or_a_run_fit_the_preset(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    command = _parse(["train", *line.split()])
    model = command.model
    if "layer-patterns" in line:
        assert (model.segment_lengths, len(model.layer_patterns)) == ((), 1 + ("8192" in line))
    if "num-heads" in line:
        assert model.num_heads == model.num_kv_heads
    if "embed-dim" in line:
        assert model.ffn_dim == 704
    if "gelu" in line:
        assert model.ffn_dim == 4 * 192


@pytest.mark.parametrize(
    ("words", "context_length", "lengths", "windows", "fractions"),
    [
        ("", 8192, (512, 2048, 8192), (8, 4, 1), (0.35, 0.35, 0.3)),
        ("--context-length 32768", 32768, (512, 2048, 32768), (32, 16, 1), (0.35, 0.35, 0.3)),
        ("--context-length=2048", 2048, (512, 2048), (2, 1), (0.35, 0.65)),
        ("--context-length 512", 512, (), (), ()),
        ("--context-length 2_048 --steps 2", 2048, (512, 2048), (2, 1), (0.35, 0.65)),
        ("--context-length 2048 --steps 1", 2048, (), (), ()),
        ("--steps 3", 8192, (), (), ()),
        ("--stages.lengths 1024 8192", 8192, (), (), ()),
        ("--stages.lengths", 8192, (), (), ()),
    ],
)
def test_stages_of_a_preset_end_at_the_context_length(
    words: str,
    context_length: int,
    lengths: tuple[int, ...],
    windows: tuple[int, ...],
    fractions: tuple[float, ...],
    tmp_path: Path,
) -> None:
    chosen = defaults_of(["--preset", "hybrid", *words.split()])
    assert (chosen.context_length, chosen.stages.lengths, chosen.stages.windows) == (context_length, lengths, windows)
    assert chosen.stages.fractions == pytest.approx(fractions)
    file = tmp_path / "my.toml"
    file.write_text(f'preset = "hybrid"\ncontext_length = {context_length}\n')
    if not any(flag in words for flag in ("--stages", "--steps")):
        assert defaults_of(["--config", str(file)]).stages == chosen.stages


def test_the_stages_of_the_page_on_runs_are_read_without_a_preset(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    page = (Path(__file__).parents[2] / "docs" / "training.md").read_text()
    (tmp_path / "my.toml").write_text(page.split("### Growing windows")[1].split("```toml\n")[1].split("```")[0])
    assert _parse(["train", "--config", str(tmp_path / "my.toml")]).stages.lengths == (1024, 4096, 8192)


def test_stages_of_a_command_replace_those_of_a_preset(tmp_path: Path) -> None:
    (tmp_path / "my.toml").write_text('preset = "hybrid"\n[stages]\nlengths = [1024, 8192]\n')
    for line in ("--preset hybrid --stages.lengths 1024 8192", f"--config {tmp_path / 'my.toml'}"):
        assert _parse(["train", *line.split()]).stages == StageSettings(lengths=(1024, 8192))
