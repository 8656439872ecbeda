"""``dilated-attention extend`` from its words to its report."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from dilated_attention_pytorch.cli import main
from training.runs import stop_after, write_texts


@pytest.fixture
def words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setenv("COLUMNS", "200")
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=256, max_position_embeddings=16, **sizes))
    model.save_pretrained(tmp_path / "short")
    write_texts(tmp_path / "texts")
    line = (
        f"extend --model {tmp_path}/short --data {tmp_path}/texts --output {tmp_path}/run "
        "--context-length 64 --stages 48 64 --pattern local_window(15)+DilatedPattern([64],[4]) --rotary linear "
        "--steps 4 --save-steps 1 --eval-steps 2 "
        "--log-steps 1 --final-eval-windows 2 --threads 1 --gradient-checkpointing --precision float32 --device cpu"
    )
    return line.split()


def test_extend_prints_what_it_measured_and_going_on_ends_the_run(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stop_after(monkeypatch, 2, signal.SIGINT)
    with pytest.raises(SystemExit) as left:
        main(words)
    assert left.value.code == 128 + signal.SIGINT
    said = capsys.readouterr().out
    assert "windows of 48, 64" in said
    # Of 64 * 65 / 2 pairs: 16 a row in the window, less 120 at the front, and of 64 rows with a rate of 4, 136 in 16.
    assert f"{(64 * 16 - 120 + 136) / (64 * 65 / 2):.1%} of the pairs of dense attention" in said
    assert f"Go on with:\n  dilated-attention extend --resume {tmp_path}/run" in said
    main(["extend", "--resume", f"{tmp_path}/run"])
    said = capsys.readouterr().out
    lines = [line for line in said.splitlines() if "│" in line]
    assert [line.split("│")[1].strip() for line in lines] == ["before", "after replacement", "after further training"]
    assert all(7 < float(number) < 9 for line in lines for number in line.split("│")[2:4])
    assert f"  model = AutoModelForCausalLM.from_pretrained('{tmp_path}/run')" in said
