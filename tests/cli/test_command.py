"""The command: what it says when all is well."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest
import torch

from dilated_attention_pytorch.cli import main
from dilated_attention_pytorch.installation import EXTRAS
from dilated_attention_pytorch.kernels.select import IMPLS
from dilated_attention_pytorch.machine import choose_device
from dilated_attention_pytorch.training import evaluation
from support.processes import fork
from training.runs import stop_after, write_texts

ROOT = Path(__file__).parents[2]
HANG_SECONDS = 600.0


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A run made by the command line, and what the command said."""
    folder, said = tmp_path_factory.mktemp("command"), io.StringIO()
    texts = write_texts(folder / "texts")
    with contextlib.redirect_stdout(said):
        main(_train(texts, folder / "run"))
    return folder / "run", said.getvalue()


@pytest.fixture
def run(trained: tuple[Path, str]) -> Path:
    return trained[0]


def _train(texts: Path, output: Path) -> list[str]:
    words = "--preset tiny --steps 4 --log-steps 2 --eval-steps 2 --save-steps 3 --sample-length 20"
    return ["train", *words.split(), "--data", str(texts), "--output", str(output)]


def test_train_prints_the_result_beside_xz_the_quarters_and_what_to_do_next(trained: tuple[Path, str]) -> None:
    run, said = trained
    for words in (
        "xz -9e takes",
        "held-out bits per byte by quarter of the context",
        "the last quarter without the earlier context",
        "step 4/4",
        "sample",
        f"dilated-attention generate {run}",
        "loss.png",
    ):
        assert words in said
    assert (run / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_ctrl_c_says_how_to_go_on_and_going_on_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stop_after(monkeypatch, 2, signal.SIGINT)
    with pytest.raises(SystemExit) as left:
        main(_train(write_texts(tmp_path / "texts"), tmp_path / "run"))
    assert left.value.code == 130
    assert f"dilated-attention train --resume {tmp_path / 'run'}" in capsys.readouterr().out
    main(["train", "--resume", str(tmp_path / "run")])
    said = capsys.readouterr().out
    assert "going on after step 3" in said
    assert "step 4/4" in said
    assert (tmp_path / "run" / "model.safetensors").exists()


def test_a_second_ctrl_c_keeps_the_last_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*args: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(evaluation, "bits_by_quarter", interrupted)
        with pytest.raises(SystemExit) as left:
            main(_train(write_texts(tmp_path / "texts"), tmp_path / "run"))
    assert left.value.code == 130
    assert "the checkpoint of step 4 is kept" in capsys.readouterr().err
    main(["train", "--resume", str(tmp_path / "run")])
    assert (tmp_path / "run" / "model.safetensors").exists()


def test_a_signal_from_outside_ends_a_process_cleanly(tmp_path: Path) -> None:
    words = _train(write_texts(tmp_path / "texts"), tmp_path / "run")
    words[words.index("--steps") + 1] = "100000"
    process, metrics = fork(lambda: main(words)), tmp_path / "run" / "metrics.jsonl"
    deadline = time.monotonic() + HANG_SECONDS
    while not (metrics.exists() and '"loss"' in metrics.read_text()) and time.monotonic() < deadline:
        time.sleep(0.1)
    os.kill(process.pid, signal.SIGTERM)
    ended = process.ended()
    assert ended.returncode == 128 + signal.SIGTERM, ended.stderr
    assert "stopped by SIGTERM" in ended.stdout
    assert "Traceback" not in ended.stderr
    assert list((tmp_path / "run").glob("checkpoint-*"))
    assert not (tmp_path / "run" / "lease.json").exists()


def test_generate_is_the_same_for_the_same_seed_and_begins_with_the_prompt(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["generate", str(run), "--prompt", "def f(", "--max-new-tokens", "30", "--seed", "5"]
    main(words)
    first = capsys.readouterr().out
    main(words)
    assert capsys.readouterr().out == first
    assert first.startswith("def f(")


def test_generate_reads_the_prompt_from_standard_input(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("import ä"))
    main(["generate", str(run), "--max-new-tokens", "5", "--temperature", "0"])
    assert capsys.readouterr().out.startswith("import ä")


def test_generate_on_a_terminal_answers_one_prompt_after_the_other(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(sys, "stdin", Terminal("first\nsecond\n"))
    main(["generate", str(run), "--max-new-tokens", "5"])
    said = capsys.readouterr().out
    assert said.index("first") < said.index("second")


def test_the_reader_of_the_output_may_go_away(run: Path) -> None:
    words = ("generate", str(run), "--prompt", "def f(", "--max-new-tokens", "300")
    process = subprocess.Popen(
        [sys.executable, "-m", "dilated_attention_pytorch", *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.read(3)
    process.stdout.close()
    said = process.stderr.read()
    process.stderr.close()
    process.wait(timeout=HANG_SECONDS)
    assert said == b""


def test_bench_prints_times_and_writes_results_and_their_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(
        [
            "bench",
            "--shapes",
            "three",
            "--implementations",
            "aten",
            "dense",
            "--dry-run",
            "--output",
            str(tmp_path / "new"),
        ]
    )
    said = capsys.readouterr().out
    for words in ("ours, aten", "dense SDPA", "this was a dry run", "bench.json"):
        assert words in said
    assert {path.name for path in (tmp_path / "new").iterdir()} == {"bench.json", "page.md"}


def test_info_names_every_implementation_and_every_extra(capsys: pytest.CaptureFixture[str]) -> None:
    main(["info"])
    said = capsys.readouterr().out
    assert all(impl in said for impl in IMPLS if impl != "auto")
    assert "torch" in said.lower()
    assert "transformers" in said


def test_info_lists_the_gpu_of_a_mac(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.mps, "is_available", lambda: True)
    main(["info"])
    said = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["aten", "mps", "float16,", "bfloat16,", "float32", "yes"] in said
    assert choose_device("auto") == "cpu"


def test_info_lists_the_extras_of_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert set(EXTRAS) == set(project["optional-dependencies"])
    for extra, brought in EXTRAS.items():
        wanted = project["optional-dependencies"][extra]
        assert [word for word in wanted if "[" not in word] == list(brought)


def test_help_of_a_preset_shows_its_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["train", "--preset", "gpu", "--help"])
    assert "32768" in capsys.readouterr().out


def test_help_does_not_wait_for_transformers() -> None:
    code = (
        "import contextlib, sys\nfrom dilated_attention_pytorch.cli import main\n"
        "for command in ('train', 'extend', 'eval', 'report', 'bench', 'profile'):\n"
        "    with contextlib.suppress(SystemExit):\n        main([command, '--help'])\n"
        "    assert not {'transformers', 'matplotlib', 'accelerate'} & sys.modules.keys(), command"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL, env=os.environ)
