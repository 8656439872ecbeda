"""Taking a pretrained model to longer texts: a small Llama is trained here on short ones, then extended."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch.nn import functional
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    TrainingArguments,
)

from dilated_attention_pytorch.cli import main
from dilated_attention_pytorch.installation import NAME
from dilated_attention_pytorch.integrations import register
from dilated_attention_pytorch.patterns import pattern_from_expression
from dilated_attention_pytorch.training import (
    ExtensionOutcome,
    ExtensionSettings,
    RunError,
    extend,
    extension,
    resume_extension,
)
from dilated_attention_pytorch.training.callbacks import read_metrics
from dilated_attention_pytorch.training.data.corpus import Text, read_corpus
from dilated_attention_pytorch.training.data.windows import EvaluationWindows, StagedBatches, TrainingWindows
from dilated_attention_pytorch.training.evaluation import bits_of_tokens
from dilated_attention_pytorch.training.faults import read_faults
from dilated_attention_pytorch.training.model_evaluation import EvalSettings, evaluate_model
from dilated_attention_pytorch.training.pretrained import load_tokenizer, tokenized
from dilated_attention_pytorch.training.report import read_run
from dilated_attention_pytorch.training.run_checkpoints import RunCheckpoints
from dilated_attention_pytorch.training.run_trainer import RunTrainer
from dilated_attention_pytorch.training.stages import Stages, stage_ends
from training.broken_runs import break_at
from training.damage import Payload
from training.runs import Heard, assert_same_weights, change_sealed, leave_out_figures, quiet, seal_again, stop_after

OWN, LONG = 32, 128
SEGMENTS = "DilatedPattern([32, 64, 128], [1, 2, 2])"


@pytest.fixture(scope="module")
def short(texts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The pretrained model: 60 steps on windows of 32 bytes."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(config()).train()
    windows = TrainingWindows(read_corpus([texts]).training, OWN, 60 * 32, seed=1, file_start_fraction=0.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(60):
        batch = torch.stack([windows[step * 32 + row]["input_ids"] for row in range(32)])
        model(batch, labels=batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    folder = tmp_path_factory.mktemp("extension") / "short"
    model.save_pretrained(folder)
    return folder


def config(**changes: Any) -> LlamaConfig:
    return LlamaConfig(
        **{
            "vocab_size": 256,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": OWN,
            **changes,
        }
    )


def tiny(model: Path, data: Path, **changes: Any) -> ExtensionSettings:
    given: dict[str, Any] = {
        "model": str(model), "data": (data,), "context_length": LONG, "pattern": SEGMENTS, "steps": 24,
        "learning_rate": 3e-3, "precision": "float32", "device": "cpu", "threads": 1, "log_steps": 2,
        "eval_steps": 12, "save_steps": 8,
        "eval_windows": 2, "final_eval_windows": 6, "batch_tokens": 512, **changes,
    }  # fmt: skip
    return ExtensionSettings(**given)


@pytest.fixture(scope="module")
def finished(short: Path, texts: Path, tmp_path_factory: pytest.TempPathFactory) -> ExtensionOutcome:
    return extend(tiny(short, texts), tmp_path_factory.mktemp("extension") / "finished", quiet())


def record_of(outcome: ExtensionOutcome) -> dict[str, Any]:
    record: dict[str, Any] = json.loads((outcome.run / "training.json").read_text())
    return record


def mean_bits(model: Any, windows: list[torch.Tensor], mask: torch.Tensor | None) -> float:
    """Bits per token of whole windows, attention as a dense matrix."""
    total = 0.0
    for window in windows:
        tokens = window[None, :-1]
        added = None if mask is None else mask.expand(1, *mask.shape)
        with torch.no_grad():
            logits = model(tokens, attention_mask=added, use_cache=False).logits[0]
        total += functional.cross_entropy(logits, window[1:]).item() / math.log(2)
    return total / len(windows)


def test_the_recipe_end_to_end_on_a_model_trained_here(finished: ExtensionOutcome, short: Path, texts: Path) -> None:
    bits = finished.bits_per_byte
    print({state: {length: round(value, 3) for length, value in row.items()} for state, row in bits.items()})
    assert finished.step == 24
    assert finished.stopped_by is None
    assert all(list(row) == [OWN, LONG] for row in bits.values())
    # Every figure again from the saved models, attention as a dense matrix of the pattern's log counts.
    held_out = EvaluationWindows(read_corpus([texts]).held_out, LONG, 6)
    windows = [held_out[index]["input_ids"] for index in range(len(held_out))]
    before = LlamaForCausalLM.from_pretrained(short, attn_implementation="eager").eval()
    assert bits["before"][LONG] == pytest.approx(mean_bits(before, windows, None), rel=1e-5)
    with pytest.warns(UserWarning, match=r'has a pattern in .* attends to everything \("eager"\)'):
        trained = LlamaForCausalLM.from_pretrained(finished.run, attn_implementation="eager").eval()
    pattern = pattern_from_expression(f"DilatedPattern([{OWN}, {2 * OWN}, {LONG}], [1, 2, 2])")
    positions = torch.arange(LONG - 1)
    counts = pattern.counts(positions, positions, 2, is_causal=True)
    mask = counts.double().log().float().repeat_interleave(2, dim=0)
    assert bits["trained"][LONG] == pytest.approx(mean_bits(trained, windows, mask), rel=1e-5)
    # Training on has made the longer context one that the model can read.
    assert bits["trained"][LONG] < min(bits["replaced"][LONG], bits["before"][LONG])


def test_the_log_counts_operations_of_every_stage_and_the_report_reads_the_run(finished: ExtensionOutcome) -> None:
    entries = read_metrics(finished.run)
    rate = entries[0]["matrix_product_flops"]
    # A stage reads 512 tokens a step; a longer one has more pairs, and so more operations a token.
    of_token = {entry["step"]: entry["mfu"] * rate / entry["tokens_per_second"] for entry in entries if "mfu" in entry}
    # 3 passes; 2 a weight of 2 layers of 4 x 32 x 32 (2 of them halved) and 3 x 32 x 64, and of the output matrix.
    of_matrices = 3 * 2 * (2 * (3 * 32 * 32 + 3 * 32 * 64) + 32 * 256)
    pattern = pattern_from_expression(record_of(finished)["settings"]["pattern"])
    for step, length in ((2, 64), (24, 128)):
        pairs = pattern.num_pairs(length, num_kv_heads=2, is_causal=True)
        expected = of_matrices + 3 * 2 * 2 * 4 * 8 * pairs / length
        assert of_token[step] == pytest.approx(expected, rel=0.02)
    run = read_run(finished.run)
    assert (run.command, run.figures["state"], run.figures["steps"]) == ("extend", "finished", "24 of 24")
    bits = finished.bits_per_byte["trained"][LONG]
    assert run.figures[f"bits per byte, trained, reading {LONG} tokens"] == f"{bits:.3f}"


def test_the_run_leaves_what_it_promises(finished: ExtensionOutcome) -> None:
    names = {path.name for path in finished.run.iterdir()}
    assert {"config.json", "training.json", "metrics.jsonl", "model.safetensors", "context.png"} <= names
    assert not any(name.endswith(".part") or name.startswith(".unfinished") for name in names)
    assert (finished.run / "context.png").read_bytes().startswith(b"\x89PNG")
    record = record_of(finished)
    assert record["settings"]["stages"] == [64, 128]
    assert record["settings"]["pattern"] == "DilatedPattern([32, 64, 128], [1, 2, 2])"
    for state in ("before", "replaced", "trained"):
        entry = record["measured"][state]
        mean = sum(entry["by_position"]) / len(entry["by_position"])
        assert entry["bits_per_byte"]["128"] == pytest.approx(mean, abs=1e-4)
    assert [entry["step"] for entry in read_metrics(finished.run) if "eval_bits_per_byte" in entry] == [12, 24]
    assert {path.name for path in finished.run.glob("checkpoint-*")} == {"checkpoint-16", "checkpoint-24"}


def test_the_card_of_the_saved_model_loads_it_in_a_new_process(finished: ExtensionOutcome) -> None:
    card = (finished.run / "README.md").read_text()
    assert "# LlamaForCausalLM with dilated attention" in card
    assert f"`pip install '{NAME}[train]'`" in card
    assert "Attention pattern: `DilatedPattern([32, 64, 128], [1, 2, 2])`." in card
    (lines,) = re.findall(r"```python\n(.+?)```", card, flags=re.DOTALL)
    assert len(lines.splitlines()) == 3
    program = f"{lines}\nassert model.config._attn_implementation == 'dilated'"
    subprocess.run([sys.executable, "-W", "error::UserWarning", "-c", program], cwd=finished.run, check=True)


def test_the_saved_model_reads_long_texts_and_generates(finished: ExtensionOutcome) -> None:
    register()
    model = AutoModelForCausalLM.from_pretrained(finished.run, attn_implementation="dilated")
    assert model.config.max_position_embeddings == LONG
    assert model.config.rope_parameters["rope_type"] == "yarn"
    assert model.config.rope_parameters["factor"] == LONG / OWN
    assert model.config.use_cache
    tokens = torch.randint(256, (1, 100))
    assert model.generate(tokens, max_new_tokens=5, do_sample=False, min_new_tokens=5).shape == (1, 105)


def greedy(run: Path, tokens: list[int], number: int) -> list[int]:
    """The most likely tokens after ``tokens``, each from a pass over all before it, without a cache."""
    register()
    model = AutoModelForCausalLM.from_pretrained(run, attn_implementation="dilated").eval()
    given = len(tokens)
    while len(tokens) < given + number:
        with torch.no_grad():
            tokens = [*tokens, int(model(torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax())]
    return tokens[given:]


def generated(run: Path, prompt: str, *flags: str) -> list[str]:
    return ["generate", str(run), "--prompt", prompt, "--max-new-tokens", "30", "--device", "cpu", *flags]


def test_generate_continues_a_text_by_the_extended_model(
    finished: ExtensionOutcome, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompt = "def f1_1(x): return x * 1 + 1\ndef f1_2"
    expected = bytes(greedy(finished.run, [0, *prompt.encode()], 30))
    assert 0 not in expected
    main(generated(finished.run, prompt, "--temperature", "0"))
    assert capsys.readouterr().out == prompt + expected.decode(errors="replace") + "\n"
    drawn = []
    for seed in ("1", "1", "2"):
        main(generated(finished.run, prompt, "--seed", seed, "--temperature", "1.5", "--top-k", "100"))
        drawn.append(capsys.readouterr().out)
    assert drawn[0] == drawn[1] != drawn[2]
    # The folder of a run that is not finished, and what is no run: a saved model with a pattern, one without.
    stopped = Path(shutil.copytree(finished.run, tmp_path / "stopped"))
    (stopped / "model.safetensors").unlink()
    saved = Path(shutil.copytree(finished.run, tmp_path / "saved"))
    (saved / "training.json").unlink()
    for run in (stopped, saved):
        main(generated(run, prompt, "--temperature", "0"))
        assert capsys.readouterr().out == prompt + expected.decode(errors="replace") + "\n"
    LlamaForCausalLM(config()).save_pretrained(tmp_path / "plain")
    with pytest.raises(SystemExit):
        main(generated(tmp_path / "plain", prompt))
    assert "holds a model of type 'llama' without a pattern; name the --output of" in capsys.readouterr().err


def test_a_run_that_was_stopped_ends_bit_for_bit_where_one_that_was_not_ends(
    finished: ExtensionOutcome, short: Path, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop_after(monkeypatch, 10, signal.SIGINT)
    model = shutil.copytree(short, tmp_path / "short")
    stopped = extend(tiny(model, texts), tmp_path / "stopped", quiet())
    assert stopped.stopped_by == signal.SIGINT
    assert stopped.step in (10, 11)
    assert not (stopped.run / "model.safetensors").exists()
    # What the run began with is in its checkpoint: the folder of the model may go.
    shutil.rmtree(model)
    resumed = resume_extension(stopped.run, quiet())
    assert resumed.step == 24
    assert resumed.bits_per_byte == finished.bits_per_byte
    assert_same_weights(stopped.run, finished.run)
    with pytest.raises(RunError, match="that run is finished"):
        resume_extension(stopped.run, quiet())


def test_a_finished_run_is_trained_longer_with_its_stages_where_they_were(
    short: Path, texts: Path, tmp_path: Path
) -> None:
    """At a constant rate it ends where a run with that number of steps ends."""
    few = tiny(short, texts, schedule="constant", warmup_fraction=0.0, steps=8)
    run = extend(few, tmp_path / "run", quiet()).run
    trained = record_of(extend(few, run, quiet(), may_resume=True))["measured"]["trained"]
    outcome = resume_extension(run, quiet(), 12)
    at_once = extend(dataclasses.replace(few, steps=12, stage_steps=8), tmp_path / "at once", quiet())
    assert dataclasses.replace(outcome, run=at_once.run) == at_once
    assert_same_weights(run, at_once.run)
    assert record_of(outcome)["steps_changed"] == [{"at": 8, "from": 8, "to": 12, "trained": trained}]
    main(["extend", "--resume", str(run), "--steps", "13"])
    assert [change["to"] for change in record_of(outcome)["steps_changed"]] == [12, 13]
    with pytest.raises(RunError, match=r"--steps 11 is the number that the whole run is to have, .* 13 already"):
        resume_extension(run, quiet(), 11)


_PLAIN_ROTARY = {"rope_type": "default", "rope_theta": 1e4}


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("Gemma2", {}),
        ("Gemma3Text", {}),
        ("GptOss", {"num_local_experts": 3, "num_experts_per_tok": 2, "rope_parameters": _PLAIN_ROTARY}),
    ],
)
def test_a_model_with_windows_in_some_layers_is_extended_and_resumed(
    name: str, changes: dict[str, Any], texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = config().to_diff_dict()
    del sizes["model_type"]
    types = ["sliding_attention", "full_attention"]
    own = {"head_dim": 8, "layer_types": types, "sliding_window": 9, "pad_token_id": 0, **changes}
    model = AutoModelForCausalLM.from_config(getattr(transformers, f"{name}Config")(**sizes | own))
    model.save_pretrained(tmp_path / "model")
    few = {
        "context_length": 64,
        "pattern": "DilatedPattern([32, 64], [1, 2])",
        "steps": 3,
        "log_steps": 1,
        "save_steps": 1,
        "eval_steps": 2,
        "eval_windows": 1,
        "final_eval_windows": 1,
    }
    leave_out_figures(monkeypatch)
    console = Heard()
    with monkeypatch.context() as patch:
        stop_after(patch, 1, signal.SIGINT)
        run = extend(tiny(tmp_path / "model", texts, **few), tmp_path / "run", console).run
    # A layer has windows of 9 tokens; the other half of the pairs of 64 twice, and all of its own length of 32.
    pairs = sum(min(9, token + 1) for token in range(64)) + 2 * 32 * 33 // 2 + 32 * 33 // 2
    assert f": {pairs / (64 * 65):.1%} of the pairs of dense attention" in console.said
    begun = json.loads((run / "training.json").read_text())["settings"]
    begun["length"] = begun.pop("context_length")  # as an earlier version named it
    change_sealed(run / "training.json", settings=begun)
    resumed = resume_extension(run, quiet())
    assert resumed.step == 3
    assert resumed.length == 64
    assert all(math.isfinite(bits) for bits in resumed.bits_per_byte["trained"].values())


def test_eval_of_a_run_that_was_stopped_takes_its_newest_whole_checkpoint(
    short: Path, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop_after(monkeypatch, 10, signal.SIGINT)
    run = extend(tiny(short, texts), tmp_path / "run", quiet()).run
    asked = EvalSettings(context_lengths=(OWN,), windows=1, recall_texts=0, precision="float32", device="cpu")

    def measured(name: str) -> tuple[dict[str, Any], str]:
        console = Heard()
        file = evaluate_model(str(run), asked, tmp_path / name, console)
        return json.loads(file.read_text()), console.said

    newest, said = measured("newest.json")
    assert (newest["weights"], "is left" in said) == ("checkpoint-11", False)
    found = bytearray((run / "checkpoint-11" / "model.safetensors").read_bytes())
    found[-3] ^= 4
    (run / "checkpoint-11" / "model.safetensors").write_bytes(found)
    before, said = measured("before.json")
    assert before["weights"] == "checkpoint-8"
    assert "checkpoint-11 is skipped, checkpoint-8 is used instead: broken checkpoint: " in said
    held_out = EvaluationWindows(read_corpus([texts]).held_out, OWN, 1)[0]["input_ids"]
    model = AutoModelForCausalLM.from_pretrained(run / "checkpoint-8", attn_implementation="dilated").eval()
    assert before["bits_per_byte"][str(OWN)] == pytest.approx(mean_bits(model, [held_out], None), rel=1e-5)
    assert before["bits_per_byte"] != newest["bits_per_byte"]
    (run / "checkpoint-8" / "manifest.json").unlink()
    with pytest.raises(RunError, match=r"checkpoint-11/model\.safetensors is damaged"):
        measured("none.json")


def test_the_same_command_given_again_begins_goes_on_and_then_finds_nothing_left_to_do(
    finished: ExtensionOutcome, short: Path, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert extend(tiny(short, texts), finished.run, quiet(), may_resume=True) == finished
    with pytest.raises(RunError, match=r"with other settings .learning_rate 0.003 there, 0.1 here"):
        extend(tiny(short, texts, learning_rate=0.1), finished.run, quiet(), may_resume=True)

    def die(*args: Any, **options: Any) -> None:
        raise KeyboardInterrupt

    run = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(RunCheckpoints, "staging", die)
        with pytest.raises(KeyboardInterrupt):
            extend(tiny(short, texts), run, quiet())
    with pytest.raises(RunError, match="stopped before its first checkpoint"):
        resume_extension(run, quiet())
    with monkeypatch.context() as patch:
        stop_after(patch, 10, signal.SIGINT)
        assert extend(tiny(short, texts), run, quiet(), may_resume=True).stopped_by == signal.SIGINT
    again = extend(tiny(short, texts), run, quiet(), may_resume=True)
    assert again == dataclasses.replace(finished, run=run)


@pytest.mark.parametrize("optimizer", [pytest.param("adamw-bf16", marks=pytest.mark.slow), "adamw-8bit"])
def test_small_moments_extend_a_model_as_well(
    finished: ExtensionOutcome, short: Path, texts: Path, tmp_path: Path, optimizer: Any
) -> None:
    outcome = extend(tiny(short, texts, optimizer=optimizer), tmp_path / "run", quiet())
    assert outcome.bits_per_byte["trained"][LONG] == pytest.approx(finished.bits_per_byte["trained"][LONG], rel=0.01)


def test_a_run_that_breaks_ends_in_words_and_loses_nothing(
    finished: ExtensionOutcome, short: Path, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        break_at(patch, "weight", 16, RunTrainer)
        words = "the checkpoint of step 16 is not written: NaN or infinity is in 1 of 21 weights .*; .* step 8 is kept"
        with pytest.raises(RunError, match=words):
            extend(tiny(short, texts), tmp_path / "run", quiet())
    assert resume_extension(tmp_path / "run", quiet()).bits_per_byte == finished.bits_per_byte
    assert_same_weights(tmp_path / "run", finished.run)


def test_a_batch_that_breaks_the_run_is_left_out_where_that_is_asked_for(
    short: Path, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    break_at(monkeypatch, "gradient", 10, RunTrainer)
    run = extend(tiny(short, texts, steps=12, on_nan="skip"), tmp_path / "run", quiet()).run
    (skipped,), (resumed,) = read_faults(run, "skipped"), read_faults(run, "resumed")
    assert (skipped["step"], skipped["batches"], resumed["step"]) == (10, [9, 9], 8)
    assert [path.name for path in sorted(run.glob("checkpoint-*"))] == ["checkpoint-12", "checkpoint-8"]


def test_a_model_that_is_not_finite_is_refused_before_it_is_measured(short: Path, texts: Path, tmp_path: Path) -> None:
    model = LlamaForCausalLM.from_pretrained(short)
    with torch.no_grad():
        model.model.norm.weight[3] = math.nan
    model.save_pretrained(tmp_path / "broken")
    with pytest.raises(RunError, match=r"NaN or infinity is in 1 of 21 weights \(model\.norm\.weight\)"):
        extend(tiny(tmp_path / "broken", texts), tmp_path / "run", quiet())
    assert not (tmp_path / "run").exists()


def test_a_model_that_overflows_is_refused_where_it_is_measured(short: Path, texts: Path, tmp_path: Path) -> None:
    model = LlamaForCausalLM.from_pretrained(short)
    with torch.no_grad():
        model.model.norm.weight *= 1e38
    model.save_pretrained(tmp_path / "large")
    with pytest.raises(RunError, match="before, reading 32 tokens, the model computes NaN or infinity from finite"):
        extend(tiny(tmp_path / "large", texts), tmp_path / "run", quiet())
    assert not any((tmp_path / "run").iterdir())


def test_an_evaluation_before_the_first_entry_of_the_training_loss_says_what_is_known(
    short: Path, texts: Path, tmp_path: Path
) -> None:
    console = Heard()
    extend(tiny(short, texts, steps=3, log_steps=5, eval_steps=3), tmp_path / "run", console)
    assert "step 3/3: held-out " in console.said
    assert "nan" not in console.said


def test_windows_grow_by_stage_and_none_is_drawn_twice(texts: Path) -> None:
    text = Text(torch.arange(5000, dtype=torch.int32), torch.tensor([0]))
    stages = Stages((16, 40, 64), stage_ends(7, 3), (8, 3, 2))
    batches = StagedBatches(text, stages, batches_per_step=2, seed=3)
    shapes = [tuple(batches[index]["input_ids"].shape) for index in range(len(batches))]
    assert shapes == [(8, 16)] * 6 + [(3, 40)] * 4 + [(2, 64)] * 4
    for step in range(8):
        assert batches.tokens_after(step) == sum(rows * length for rows, length in shapes[: 2 * step])
    starts = [int(row[0]) for index in range(len(batches)) for row in batches[index]["input_ids"]]
    assert len(set(starts)) > 0.95 * len(starts)
    again = StagedBatches(text, stages, batches_per_step=2, seed=3)
    assert torch.equal(again[9]["labels"], batches[9]["labels"])
    other = StagedBatches(text, stages, batches_per_step=2, seed=4)
    assert not torch.equal(other[9]["labels"], batches[9]["labels"])


@pytest.mark.parametrize("context", [2, 17, 50, 51, 80])
def test_bits_are_those_of_every_token_given_what_it_may_see(short: Path, context: int) -> None:
    model = LlamaForCausalLM.from_pretrained(short, attn_implementation="eager").eval().double()
    windows = list(torch.randint(256, (3, 51)))
    bits = bits_of_tokens(model, windows, context, "float32", quiet(), "")
    expected = torch.zeros(50, dtype=torch.float64)
    for window in windows:
        for target in range(1, 51):
            first = (target - 1) // (context - 1) * (context - 1)
            with torch.no_grad():
                logits = model(window[None, first:target]).logits[0, -1]
            expected[target - 1] -= logits.float().log_softmax(dim=0)[window[target]].double() / math.log(2) / 3
    assert torch.allclose(torch.stack(bits).mean(dim=0), expected, atol=1e-5)


def train_tokenizer(folder: Path, text: str) -> PreTrainedTokenizerFast:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<end>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([text], trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", model_max_length=16)
    fast.save_pretrained(folder)
    return fast


def test_a_model_with_a_tokenizer_is_measured_in_bits_per_byte(
    texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    corpus = read_corpus([texts])
    torch.manual_seed(1)
    folder = tmp_path / "short"
    LlamaForCausalLM(config(vocab_size=320)).save_pretrained(folder)
    fast = train_tokenizer(folder, bytes(corpus.training.data).replace(b"\0", b"").decode())
    tokenizer = load_tokenizer("", str(folder), LlamaConfig.from_pretrained(folder))
    tokens = tokenized(corpus.held_out, tokenizer)
    for index in range(len(tokens.file_starts)):
        file = tokens.file(index)
        assert file[0] == fast.eos_token_id
        assert fast.decode(file[1:]).encode() == bytes(corpus.held_out.file(index)[1:])
    outcome = extend(tiny(folder, texts, steps=2, save_steps=2, eval_steps=2), tmp_path / "run", quiet())
    # Weights that know nothing: as many bits a token as there are tokens to choose from, spread over its bytes.
    windows = EvaluationWindows(tokens, LONG, 6)
    predicted = [windows[index]["input_ids"][1:] for index in range(len(windows))]
    said = sum(len(fast.decode(part[part != fast.eos_token_id]).encode()) for part in predicted)
    per_token = (said + sum(int((part == fast.eos_token_id).sum()) for part in predicted)) / (len(windows) * (LONG - 1))
    assert per_token > 1.5
    assert record_of(outcome)["bytes_per_token"] == pytest.approx(per_token, rel=1e-12)
    assert outcome.bits_per_byte["before"][OWN] == pytest.approx(math.log2(320) / per_token, rel=0.05)
    saved = load_tokenizer("", str(outcome.run), LlamaConfig.from_pretrained(outcome.run))
    assert saved is not None
    assert saved.model_max_length == LONG
    evaluations = [entry for entry in read_metrics(outcome.run) if "eval_bits_per_byte" in entry]
    assert evaluations[0]["eval_bits_per_byte"] == pytest.approx(math.log2(320) / per_token, rel=0.05)
    prompt = "def f1_1(x):"
    expected = fast.decode(greedy(outcome.run, [fast.eos_token_id, *fast(prompt)["input_ids"]], 30))
    assert "<end>" not in expected
    main(generated(outcome.run, prompt, "--temperature", "0"))
    assert capsys.readouterr().out == f"{prompt}{expected}\n"


def test_models_that_cannot_be_extended_are_refused_by_name(texts: Path, tmp_path: Path) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    GPT2LMHeadModel(
        GPT2Config(vocab_size=256, n_embd=16, n_layer=1, n_head=2, n_positions=OWN, bos_token_id=0, eos_token_id=0)
    ).save_pretrained(tmp_path / "gpt2")
    with pytest.raises(RunError, match="GPT2LMHeadModel has no rotary positions"):
        extend(tiny(tmp_path / "gpt2", texts), tmp_path / "run", quiet())
    scaled = {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}
    LlamaForCausalLM(config(rope_parameters=scaled)).save_pretrained(tmp_path / "scaled")
    with pytest.raises(RunError, match="positions are scaled already"):
        extend(tiny(tmp_path / "scaled", texts), tmp_path / "run", quiet())
    LlamaForCausalLM(config(vocab_size=300)).save_pretrained(tmp_path / "untold")
    with pytest.raises(RunError, match="300 tokens and no tokenizer"):
        extend(tiny(tmp_path / "untold", texts), tmp_path / "run", quiet())
    LlamaForCausalLM(config()).save_pretrained(tmp_path / "cut")
    weights_file = tmp_path / "cut" / "model.safetensors"
    weights_file.write_bytes(weights_file.read_bytes()[:5000])
    with pytest.raises(RunError, match=r"the weights of .* cannot be loaded"):
        extend(tiny(tmp_path / "cut", texts), tmp_path / "run", quiet())
    assert not (tmp_path / "run").exists()


def test_a_model_that_would_run_a_program_is_refused_in_words_and_not_executed(texts: Path, tmp_path: Path) -> None:
    folder, canary = tmp_path / "pickle", tmp_path / "canary"
    LlamaForCausalLM(config()).save_pretrained(folder)
    (folder / "model.safetensors").unlink()
    torch.save({"model.norm.weight": Payload(canary)}, folder / "pytorch_model.bin")
    with pytest.raises(RunError, match=r"a pickle that holds more than tensors, and were not unpickled"):
        extend(tiny(folder, texts), tmp_path / "run", quiet())
    folder = tmp_path / "code"
    LlamaForCausalLM(config()).save_pretrained(folder)
    described = json.loads((folder / "config.json").read_text())
    own = {"model_type": "own", "auto_map": {"AutoConfig": "own.Own"}}
    (folder / "config.json").write_text(json.dumps({**described, **own}))
    (folder / "own.py").write_text(
        f"import pathlib\nfrom transformers import PretrainedConfig\npathlib.Path('{canary}').touch()\n"
        "class Own(PretrainedConfig):\n    pass\n"
    )
    with pytest.raises(RunError, match=r"describes no model of transformers"):
        extend(tiny(folder, texts), tmp_path / "run", quiet())
    assert not canary.exists()
    assert not (tmp_path / "run").exists()


def test_a_model_that_was_extended_is_not_extended_again(
    finished: ExtensionOutcome, texts: Path, tmp_path: Path
) -> None:
    with pytest.raises(RunError, match="the model has a pattern already"):
        extend(tiny(finished.run, texts, context_length=512, batch_tokens=512), tmp_path / "run", quiet())


def test_one_process_uses_one_of_several_devices(
    short: Path, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where two GPUs are visible: transformers would give each of them half of a batch of one."""
    setup = TrainingArguments.__dict__["_setup_devices"].func

    def two(self: TrainingArguments) -> Any:
        device = setup(self)
        self._n_gpu = 2
        return device

    found = functools.cached_property(two)
    found.__set_name__(TrainingArguments, "_setup_devices")
    monkeypatch.setattr(TrainingArguments, "_setup_devices", found)
    outcome = extend(tiny(short, texts, steps=2, eval_steps=2, save_steps=2), tmp_path / "run", quiet())
    assert outcome.step == 2


def test_damaged_and_foreign_runs_are_not_gone_on_with(
    short: Path, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(RunError, match="there is no such folder"):
        resume_extension(tmp_path / "none", quiet())
    stop_after(monkeypatch, 10, signal.SIGTERM)
    run = extend(tiny(short, texts), tmp_path / "run", quiet()).run
    checkpoint, older = sorted(run.glob("checkpoint-*"), key=lambda path: -int(path.name.split("-")[1]))
    state = (checkpoint / "optimizer.pt").read_bytes()
    (checkpoint / "optimizer.pt").write_bytes(state[: len(state) // 2])
    with monkeypatch.context() as patch:
        patch.setattr(extension, "_train_and_report", lambda run, device: run)
        taken: Any = resume_extension(run, quiet())
        assert taken.opened.start.checkpoint == older
        assert list(taken.opened.start.rejected) == [checkpoint.name]
    shutil.rmtree(older)
    with pytest.raises(RunError, match=r"optimizer\.pt is damaged"):
        resume_extension(run, quiet())
    (checkpoint / "optimizer.pt").write_bytes(state)
    written = (run / "training.json").read_text()
    record = json.loads(written)
    change_sealed(run / "training.json", corpus={**record["corpus"], "held_out_bytes": 1})
    with pytest.raises(RunError, match="the text is not what the run began with"):
        resume_extension(run, quiet())
    for damage in ({"kind": "other"}, {"measured": {**record["measured"], "replaced": {"by_position": [1.0]}}}):
        change_sealed(run / "training.json", **{**record, **damage})
        with pytest.raises(RunError, match="describes no run"):
            resume_extension(run, quiet())
    change_sealed(run / "training.json", **{**record, "model": {**record["model"], "more": 3}})
    with pytest.raises(RunError, match=r"foreign checkpoint: .*\(more differ\)"):
        resume_extension(run, quiet())
    (run / "training.json").write_text(written.replace('"seed": 0', '"seed": 1'))
    with pytest.raises(RunError, match="is damaged or was changed: its checksum"):
        resume_extension(run, quiet())
    (run / "training.json").write_text(written)
    described = json.loads((checkpoint / "config.json").read_text())
    unscaled = {"rope_type": "default", "rope_theta": 1e4}
    for changed in ({"rope_parameters": unscaled}, {"dilated_attention": {"pattern": "local_window(3)"}}):
        (checkpoint / "config.json").write_text(json.dumps({**described, **changed}))
        seal_again(checkpoint)
        with pytest.raises(RunError, match=f"foreign checkpoint: .*{next(iter(changed))} differ"):
            resume_extension(run, quiet())
    (checkpoint / "config.json").write_text(json.dumps(described))
    weights_file = checkpoint / "model.safetensors"
    whole = weights_file.read_bytes()
    weights_file.write_bytes(whole[:5000])
    seal_again(checkpoint)
    with pytest.raises(RunError, match=r"--resume .*: the weights of .* cannot be loaded"):
        resume_extension(run, quiet())
    weights_file.write_bytes(whole)
    seal_again(checkpoint)
    file = sorted(texts.iterdir())[0]
    text = file.read_text()
    try:
        file.write_text(text.replace("def", "fed"))
        with pytest.raises(RunError, match="the text is not what the run began with"):
            resume_extension(run, quiet())
    finally:
        file.write_text(text)
