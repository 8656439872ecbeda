"""The programs of examples run: they learn, they go on after a stop, and they give what dense attention gives."""

from __future__ import annotations

import importlib.util
import json
import shutil
import statistics
import sys
import sysconfig
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import layer_norm, scaled_dot_product_attention

from dilated_attention_pytorch import DilatedPattern, Pattern, attend
from dilated_attention_pytorch.integrations import register, replace_attention
from dilated_attention_pytorch.slides import load_slide_encoder

EXAMPLES = Path(__file__).parents[2] / "examples"


def example(name: str) -> ModuleType:
    """A program of the folder as a module."""
    specification = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def entropy(tokens: Tensor) -> float:
    """Nats a token by the frequency of tokens alone: what a model knows without attention."""
    counts = torch.bincount(tokens)
    return float(torch.special.entr(counts / counts.sum()).sum())


def entropy_of_bytes() -> float:
    """Of the text that the examples learn."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return entropy(torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8))


def test_a_llama_learns_under_a_pattern() -> None:
    program = example("finetune_transformers")
    _, _, documents = program.model_and_documents(None, 128, 1000)
    tokens = torch.tensor([token for document in documents for token in document])
    assert program.main([]) < entropy(tokens) - 0.2


def test_a_checkpoint_is_tuned_on_packed_documents_and_saved_with_its_pattern(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer = Tokenizer(models.BPE({letter: number for number, letter in enumerate(sorted(alphabet))}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(tmp_path / "old")
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    old = LlamaForCausalLM(LlamaConfig(vocab_size=256, **sizes))
    old.save_pretrained(tmp_path / "old")
    words = ["--model", str(tmp_path / "old"), "--output", str(tmp_path / "new"), "--length", "48", "--steps", "2"]
    example("finetune_transformers").main(words)

    register()
    new = AutoModelForCausalLM.from_pretrained(tmp_path / "new", attn_implementation="dilated").double()
    assert not torch.equal(new.lm_head.weight, old.lm_head.weight)
    saved = AutoTokenizer.from_pretrained(tmp_path / "new")
    assert saved("a text of bytes")["input_ids"] == tokenizer.encode("a text of bytes").ids
    tokens, lengths = torch.randint(256, (1, 130)), (100, 30)
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    with torch.no_grad():
        packed = new(tokens, position_ids=positions, use_cache=False).logits
        alone = torch.cat([new(part).logits for part in tokens.split(lengths, dim=1)], dim=1)
        torch.testing.assert_close(packed, alone, rtol=1e-10, atol=1e-10)


def test_a_loop_with_accelerate_learns_and_goes_on_as_if_never_stopped(tmp_path: Path) -> None:
    main = example("train_accelerate").main
    words = ["--output", str(tmp_path / "run"), "--steps", "50", "--save-every", "40"]
    whole = main(words)
    assert sum(whole[step] for step in range(41, 51)) / 10 < entropy_of_bytes() - 0.2
    assert main([*words, "--resume"]) == {step: whole[step] for step in range(41, 51)}


def test_examples_overwrite_nothing_and_refuse_what_they_cannot_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "steps.txt").write_text("6")
    there = ["--output", str(tmp_path / "run")]
    for name, words, message in (
        ("train_accelerate", there, "has a checkpoint: add --resume"),
        ("train_accelerate", ["--output", str(tmp_path / "new"), "--resume"], "has no checkpoint"),
        ("train_accelerate", [*there, "--resume", "--save-every", "0"], "--save-every must be at least 1, got 0"),
        ("finetune_transformers", there, "has files already: name a new folder"),
        ("finetune_transformers", ["--steps", "0"], "--steps must be at least 1, got 0"),
        ("finetune_transformers", ["--length", "0"], "--length must be at least 1, got 0"),
    ):
        with pytest.raises(SystemExit):
            example(name).main(words)
        assert message in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["steps.txt"]


@pytest.mark.filterwarnings("ignore:::lightning")  # its own: PyTorch's names of yesterday, workers, loggers
def test_lightning_trains_a_longnet() -> None:
    pytest.importorskip("lightning", reason="Lightning is no dependency: pip install lightning")
    assert example("train_lightning").main([]) < entropy_of_bytes() - 0.2


def test_without_lightning_a_sentence_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lightning", None)
    with pytest.raises(SystemExit, match="not installed: pip install lightning"):
        example("train_lightning").main([])


class TestViT:
    """Patches in Z-order: a square is a run."""

    SIDE = 16

    def test_every_aligned_run_of_the_order_is_a_square(self) -> None:
        order = example("vit").z_order(self.SIDE)
        assert order.sort().values.tolist() == list(range(self.SIDE**2))
        for size in (1, 2, 4, 8):
            runs = order.view(-1, size**2)
            square = torch.stack([runs // self.SIDE // size, runs % self.SIDE // size])
            assert (square == square[..., :1]).all()

    def counts(self, head: int) -> Tensor:
        """Of `squares(4, 8, 4)` by rows and columns alone: the class token, then the patches in raster order."""
        row, column = (torch.arange(self.SIDE**2) // self.SIDE, torch.arange(self.SIDE**2) % self.SIDE)

        def together(size: int) -> Tensor:
            square = row // size * self.SIDE + column // size
            return square[:, None] == square

        chosen = (row % 2 == head // 2) & (column % 2 == head % 2)
        patches = together(4).int() + (together(8) & chosen[:, None] & chosen).int()
        # Position 0 is the last one of a square before the image, in which it is alone.
        own = torch.tensor([[2 + (head == 3)]])
        ones = torch.ones(1, self.SIDE**2, dtype=torch.int)
        return torch.cat([torch.cat([own, ones], 1), torch.cat([ones.T, patches], 1)])

    def test_squares_of_patches_give_what_a_mask_over_rows_and_columns_gives(self) -> None:
        vit = example("vit")
        dense = vit.VisionTransformer(self.SIDE).double().eval()
        model = vit.VisionTransformer(self.SIDE, order=vit.z_order(self.SIDE)).double().eval()
        model.load_state_dict(dense.state_dict())
        assert len(replace_attention(model, vit.squares(4, 8, 4)).replaced) == 2
        mask = torch.stack([self.counts(head) for head in range(4)]).double().log()
        images = torch.randn(2, 3, 8 * self.SIDE, 8 * self.SIDE, dtype=torch.float64)
        with pytest.MonkeyPatch.context() as patch, torch.no_grad():
            patch.setattr(
                vit, "scaled_dot_product_attention", lambda q, k, v: scaled_dot_product_attention(q, k, v, mask)
            )
            torch.testing.assert_close(model(images), dense(images), rtol=1e-10, atol=1e-10)

    def test_a_pattern_that_covers_all_changes_nothing(self) -> None:
        vit = example("vit")
        model = vit.VisionTransformer(self.SIDE, order=vit.z_order(self.SIDE)).double().eval()
        images = torch.randn(2, 3, 8 * self.SIDE, 8 * self.SIDE, dtype=torch.float64)
        with torch.no_grad():
            before = model(images)
            replace_attention(model, DilatedPattern([self.SIDE**2 + 1], [1]))
            torch.testing.assert_close(model(images), before, rtol=1e-10, atol=1e-10)

    def test_the_program_says_what_it_replaced(self, capsys: pytest.CaptureFixture[str]) -> None:
        example("vit").main(self.SIDE * 2)
        assert "replaced 2\n" in capsys.readouterr().out


@pytest.fixture
def gallery(monkeypatch: pytest.MonkeyPatch) -> dict[str, Pattern]:
    """The notebook, run from its first cell to its last: the patterns that it drew."""
    monkeypatch.setenv("MPLBACKEND", "agg")
    notebook = json.loads((EXAMPLES / "pattern_gallery.ipynb").read_text("utf-8"))
    names: dict[str, Any] = {"__name__": "__main__"}
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            assert cell["outputs"] == []
            assert cell["execution_count"] is None
            exec(compile("".join(cell["source"]), cell["id"], "exec"), names)
    import matplotlib.pyplot as plt

    drawn = [axes.get_title() for number in plt.get_fignums() for axes in plt.figure(number).axes]
    assert set(names["gallery"]) - set(drawn) <= {"dilated", "dilated, shifted by head", "lines", "per head"}
    plt.close("all")
    return names["gallery"]


def test_the_gallery_shows_patterns_that_attention_is_computed_by(gallery: dict[str, Pattern]) -> None:
    length, heads = 61, 4
    positions = torch.arange(length)
    query, key, value = torch.randn(3, 1, length, heads, 8, dtype=torch.float64)
    for name, pattern in gallery.items():
        counts = pattern.counts(positions, positions, heads)
        assert pattern.density(length, num_kv_heads=heads) == int(counts.sum()) / (heads * length**2), name
        weights = counts * (torch.einsum("bphd,bthd->bhpt", query, key) / 8**0.5).exp()
        weights = weights / weights.sum(-1, keepdim=True).clamp_min(1e-300)
        dense = torch.einsum("bhpt,bthd->bphd", weights, value)
        torch.testing.assert_close(attend(query, key, value, pattern), dense, rtol=1e-12, atol=1e-12, msg=name)


def test_a_slide_encoder_is_pretrained_resumes_and_loads(tmp_path: Path) -> None:
    program = example("pretrain_slides")
    words = ["--width", "32", "--layers", "2", "--decoder-width", "32", "--slides-per-step", "2"]
    whole = program.main([*words, "--steps", "10", "--output", str(tmp_path / "whole")])
    # Stopped after its first checkpoint.
    shutil.copytree(tmp_path / "whole" / "checkpoint-8", tmp_path / "stopped" / "checkpoint-8")
    assert program.main([*words, "--steps", "10", "--output", str(tmp_path / "stopped")]) == whole
    one, other = (
        load_slide_encoder(tmp_path / folder / "slide_encoder.safetensors") for folder in ("whole", "stopped")
    )
    assert (one.config.feature_dim, one.config.embed_dim, one.config.num_layers) == (64, 32, 2)
    for name, value in one.state_dict().items():
        torch.testing.assert_close(value, other.state_dict()[name], rtol=0, atol=0)


@pytest.mark.slow
def test_pretraining_predicts_hidden_tiles_better_than_the_mean_of_the_others(tmp_path: Path) -> None:
    program = example("pretrain_slides")
    of_mean = []
    torch.manual_seed(0)
    for index in range(program.HELD_OUT):
        features, grid = program.MadeSlides(range(program.HELD_OUT))[index]
        is_hidden = program.hidden_tiles(torch.tensor([0, len(grid)]))
        target = layer_norm(features, features.shape[1:])
        of_mean.append(float((target[is_hidden] - target[~is_hidden].mean(dim=0)).square().mean()))
    assert program.main(["--output", str(tmp_path)]) < statistics.mean(of_mean) - 0.03
