"""Every command that a page or the Makefile shows runs, in a form of seconds; one that has no row here fails.

A row of ``ROWS`` is a pattern of command lines and the form in which they run. The first row that fits counts.
"""

from __future__ import annotations

import importlib.util
import json
import re
import runpy
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from transformers import LlamaConfig, LlamaForCausalLM

from dilated_attention_pytorch.slides import Embedder, EmbedSettings
from dilated_attention_pytorch.training.data.tokenizer import train_tokenizer
from slides import made_slides
from support import pages
from support.forked import run_jobs
from support.pages import DOCS, ROOT, Command
from training.runs import stopped_run, tiny_settings, write_texts

SMALL_TRAINING = {
    "--steps": "2", "--context-length": "64", "--device": "cpu", "--max-tokens": "256", "--sample-length": "5",
    "--eval-windows": "1", "--final-eval-windows": "1", "--quarter-files": "1",
}  # fmt: skip
"""Settings of a run of seconds, beside the preset ``tiny``."""
FLAG = re.compile(r"--[a-z]")


def with_flags(words: list[str], values: dict[str, str | None], *, is_added: bool = True) -> list[str]:
    """The command line with other values of flags; None leaves a flag out, and a missing one is added."""
    parts: list[list[str]] = [[]]
    for word in words:
        if FLAG.match(word):
            parts.append([])
        parts[-1].append(word)
    for flag, value in values.items():
        new = [] if value is None else [flag, *value.split()]
        index = next((index for index, part in enumerate(parts) if part[:1] == [flag]), None)
        if index is not None:
            parts[index] = new
        elif is_added:
            parts.append(new)
    return [word for part in parts for word in part]


def program(words: list[str]) -> list[str]:
    """A ``dilated-attention`` line as a module that Python runs."""
    return ["-m", "dilated_attention_pytorch", *words[1:]]


def train(words: list[str]) -> list[str]:
    """The preset ``tiny`` for two steps of 64 tokens; a run that is resumed has its own settings."""
    if "--resume" in words and "auto" not in words:
        return program(with_flags(words, {"--steps": "11"}, is_added=False))
    small = {"--preset": "tiny", **SMALL_TRAINING}
    if "--packing" not in words:
        del small["--max-tokens"]
    if "--config" in words:
        small["--model.num-layers"] = "2"
    if "--track" in words:
        small |= {"--prometheus-port": "0"}
    if "--cache" in words:
        small |= {"--cache": "tokens"}
    return program(with_flags(words, small))


def plan_of_ranks(words: list[str]) -> list[str]:
    """What ``train`` would run on several ranks, planned for as many: every check of its settings, and no processes."""
    processes = 1
    for flag in ("--nnodes", "--nproc-per-node"):
        processes *= int(words[words.index(flag) + 1]) if flag in words else 1
    of_train = words[words.index("train") + 1 :]
    kept = with_flags(of_train, {"--output": None, "--offload-folder": None}, is_added=False)
    flags = {"--preset": "tiny", "--context-length": "1024", "--processes": str(processes), "--hardware": "H200"}
    if "--heads-parallel" in words:  # the preset has too few heads
        flags |= {"--model.num-heads": "8", "--model.embed-dim": "64"}
    return program(["dilated-attention", "plan", *with_flags(kept, flags)])


def flags(**values: str | None) -> Callable[[list[str]], list[str]]:
    """The line of ``dilated-attention`` with these flags."""
    small = {f"--{name.replace('_', '-')}": value for name, value in values.items()}
    return lambda words: program(with_flags(words, small))


def to_help(words: list[str]) -> list[str]:
    return program([*words, "--help"])


def one_rank(words: list[str]) -> list[str]:
    return [str(ROOT / words[-1])]


def benchmark(words: list[str]) -> list[str]:
    """``--tiny`` into a folder of its own."""
    return with_flags(words[1:], {"--tiny": "", "--output": "results"})


def help_of_benchmark(words: list[str]) -> list[str]:
    return [*words[1:3], "--help"]


@dataclass(frozen=True)
class Row:
    """How the command lines that a pattern fits are run."""

    pattern: str
    run: Callable[[list[str]], list[str]] | None
    """The words for Python, from those of the command line; None: checked by :data:`CHECKS` and not run here."""
    why: str = ""
    """Why it is not the command itself at a small size."""


OTHERS = "a program that is not this package's"
NO_COMMAND, A_NAME = "no command yet", "a name in a sentence"
ROWS = [
    Row(r"dilated-attention(-?\.\.\.| \.\.\.| COMMAND --help)?", lambda _: program(["", "--help"]), NO_COMMAND),
    Row(r"dilated-attention (bench|diagnose|embed|eval|extend|finetune|heatmap|plan|profile|show|tokenizer|train|tune)", to_help, A_NAME),
    Row(r"dilated-attention train .*(--track wandb|--offload|zero\d).*", None, "needs W&B, MLflow or DeepSpeed: its flags are parsed"),
    Row(r"dilated-attention train .*", train),
    Row(r"dilated-attention generate .*", flags(max_new_tokens="5", device="cpu")),
    Row(r"dilated-attention eval .*", flags(lengths="16 32", windows="1", recall_texts="0", device="cpu")),
    Row(r"dilated-attention extend .*", flags(length="64", steps="2", data="texts", device="cpu", eval_windows="1", final_eval_windows="1")),
    Row(r"dilated-attention tokenizer .*", flags(vocab_size="300")),
    Row(r"dilated-attention bench .*--resume", flags(resume=None, dry_run="", shapes="three", dtypes="float32", preset="cpu")),
    Row(r"dilated-attention bench .*", flags(dry_run="", shapes="three", dtypes="float32")),
    Row(r"dilated-attention tune .*", flags(dry_run="", device="cpu")),
    Row(r"dilated-attention plan --preset tiny", None, "measures this machine for two minutes: its flags are parsed"),
    Row(r"dilated-attention plan .*--changes.*", None, "plans dozens of runs, as tests/estimate does: its flags are parsed"),
    Row(r"dilated-attention plan .*--preset gpu.*", flags(preset="tiny", context_length="256")),
    Row(r"dilated-attention plan --model .*", flags(context_length="128", pattern="DilatedPattern([16,32],[1,2])")),
    Row(r"dilated-attention finetune .*--freeze.*", flags(layers="1", epochs="2", test="0.4", device="cpu")),
    Row(r"dilated-attention finetune .*", flags(layers="1", epochs="1", folds=None, test="0.4", device="cpu")),
    Row(r"dilated-attention heatmap .*--contribution.*", None, "needs a trained model, as tests/slides/finetune does: its flags are parsed"),
    Row(r"dilated-attention embed .*--engine ray.*", None, "starts a Ray cluster, as tests/slides/test_ray.py does: its flags are parsed"),
    Row(r"dilated-attention (plan --help|show .*|info|build|diagnose .*|profile .*|report .*|embed .*|heatmap .*)", program),
    Row(r"torchrun .* embed .*", None, "tests/slides/test_sharing.py starts processes: its flags are parsed"),
    Row(r"torchrun .* train .*--resume .*", None, "needs ranks, and a run that they wrote: its flags are parsed"),
    Row(r"torchrun .* train .*(fsdp|zero).*", None, "tests/estimate plans FSDP and ZeRO, tests/training trains: its flags are parsed"),
    Row(r"torchrun .* train .*", plan_of_ranks, "planned for as many ranks; tests/training starts them"),
    Row(r"torchrun( --nnodes 1:2)?( --max-restarts( N)?)?", None, A_NAME),
    Row(r"torchrun .*examples/parallel_attention\.py", one_rank, "on one rank"),
    Row(r"python -m benchmarks\.(gpu|architectures).*", help_of_benchmark, "minutes; tests run its steps"),
    Row(r"python -m benchmarks\.\w+.*", benchmark),
    Row(r"(PYTHONPATH=tests )?python -m (cli|training)\.\w+.*", None, "a part of it runs in the gate: it exists"),
    Row(r"python tests/.*\.py.*", None, "hours, or many processes; a part of it runs in the gate: it exists"),
    Row(r"python examples/\w+\.py.*", None, "run whole by tests/examples/test_examples.py"),
    Row(r"python \.github/check_release\.py .*", None, "tests/test_release.py runs it: it exists"),
    Row(r"jupyter lab examples/.*\.ipynb", None, "run whole by tests/examples/test_examples.py"),
    Row(r"(TRITON_INTERPRET=0 )?pytest.*", None, "the gate or a target runs these tests: they exist"),
    Row(r"make .*", None, "make --dry-run; its recipes are commands of this table"),
    Row(r"(ruff|mypy|mkdocs) ?.*", None, "the gate runs it"),
    Row(r"(sbatch|kubectl apply -f) examples/cluster/.*", None, "needs a cluster: the file is parsed; make cluster runs it"),
    Row(r"(pip|pre-commit|apt-get) (un)?install.*|pip index .*|python -m build .*", None, OTHERS),
]  # fmt: skip


def row_of(command: Command) -> Row:
    """The row of a command; raises for one without."""
    # Assignments before a program are for its environment; some rows name them.
    plain = " ".join(command.words)
    for row in ROWS:
        if re.fullmatch(row.pattern, command.line) or re.fullmatch(row.pattern, plain):
            return row
    raise LookupError(f"{command.where}: no row of {Path(__file__).name} runs `{command.line}`; add one")


COMMANDS = pages.commands()


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.line[:100])
def test_a_command_has_a_row_and_what_it_names_exists(command: Command) -> None:
    from dilated_attention_pytorch.cli.command import _parse

    # What ends with help, or reads a file or a folder while it is parsed, is run; the others are parsed as they stand.
    row = row_of(command)
    if row.why in (OTHERS, NO_COMMAND, A_NAME) or {"--help", "--config", "--init-from"} & {*command.words}:
        return
    words = command.words
    match words:
        case ["dilated-attention", *rest]:
            _parse([word.replace("FOLDER", "folder") for word in rest])
        case ["torchrun", *_] if commands := [word for word in words if word in ("embed", "train")]:
            _parse(words[words.index(commands[0]) :])
        case ["make", *targets]:
            subprocess.run(["make", "--dry-run", *targets], cwd=ROOT, capture_output=True, check=True)
        case ["python", "-m", module, *_]:
            assert importlib.util.find_spec(module), module
        case ["jupyter", *_] | ["torchrun", *_] | ["python", *_]:
            (file,) = (word for word in words if word.endswith((".py", ".ipynb")))
            assert (ROOT / file).exists()
            if row.run is None and file.startswith("examples/"):
                assert Path(file).stem in (ROOT / "tests" / "examples" / "test_examples.py").read_text()
        case ["pytest", *paths]:
            assert all((ROOT / path).exists() for path in paths if path.startswith("tests/"))
        case ["sbatch", file]:
            subprocess.run(["bash", "-n", file], cwd=ROOT, check=True)
        case ["kubectl", "apply", "-f", file]:
            assert list(yaml.safe_load_all((ROOT / file).read_text()))
        case _:
            assert words[0] in ("ruff", "mypy", "mkdocs"), words


def test_a_command_without_a_row_fails() -> None:
    for line in ("dilated-attention trian --output runs/a", "python -m bench.marks", "srun hostname"):
        with pytest.raises(LookupError, match="no row of"):
            row_of(Command("a page", line))


def test_every_row_has_a_command() -> None:
    taken = {id(row_of(command)) for command in COMMANDS}
    assert [row.pattern for row in ROWS if id(row) not in taken] == []


@pytest.mark.filterwarnings("ignore:.*found in sys.modules:RuntimeWarning")
@pytest.mark.parametrize("path", sorted(path.stem for path in (ROOT / "benchmarks").glob("[a-z]*")))
def test_every_module_of_the_benchmarks_answers_help(
    path: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if path == "results":
        return
    monkeypatch.setattr(sys, "argv", [path, "--help"])
    with pytest.raises(SystemExit) as left:
        runpy.run_module(f"benchmarks.{path}", run_name="__main__", alter_sys=True)
    if left.value.code == 0:
        said = capsys.readouterr().out
        assert said.startswith("usage: ")
        assert len(said.split("options:")[0].split()) > 8  # says what it measures
    else:
        (other,) = re.findall(
            r"^a part of another benchmark: python -m benchmarks\.(\w+) --help$", str(left.value.code)
        )
        assert re.search(r"pars|run\(", (ROOT / "benchmarks" / f"{other}.py").read_text())


def make_world(world: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The files that commands of pages read, under the names that they have there."""
    for folder in ("my_project", "code", "texts"):
        write_texts(world / folder)
    text = "".join(path.read_text() for path in sorted((world / "texts").iterdir()))
    (world / "notes.txt").write_text(text)
    documents = [f"document {number}: {text[: 400 + 7 * number]}" for number in range(40)]
    lines = [json.dumps({"text": document, "content": document}) for document in documents]
    (world / "pages.jsonl").write_text("\n".join(lines))
    table = pa.table({"text": documents})
    for number in range(2):
        pq.write_table(table, world / f"part-00{number}.parquet")
    (world / "saved" / "train").mkdir(parents=True)
    with pa.ipc.new_stream(world / "saved" / "train" / "data.arrow", table.schema) as stream:
        stream.write_table(table)
    state = {"_data_files": [{"filename": "data.arrow"}], "_indices_data_files": None}
    (world / "saved" / "train" / "state.json").write_text(json.dumps(state))
    (world / "tokenizer.json").write_text(train_tokenizer([text.encode()], 300).text)
    settings = tiny_settings(world / "texts", steps=4, log_steps=1)
    stopped_run(monkeypatch, settings, world / "runs" / "mine", 1)
    for name in ("demo", "moved", "other", "t", "tiny"):
        shutil.copytree(world / "runs" / "mine", world / "runs" / name)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=256, max_position_embeddings=32, **sizes)).save_pretrained(
        world / "my/llama"
    )
    for folder in ("features", "features_gigapath"):
        made_slides.write_slides(world / folder, [5, 3, 4, 6, 5, 4])
    lines = [f"slide{number},{('low', 'high')[number % 2]}" for number in range(6)]
    (world / "labels.csv").write_text("\n".join(["slide,label", *lines]))
    weights = made_slides.checkpoint(world)
    for folder in ("embeddings", "maps"):
        Embedder([world / "features"], weights, world / folder, EmbedSettings(maps=True, rollout=True)).run()
    (config,) = (
        block.text
        for block in pages.blocks_of(DOCS / "training.md")
        if block.kind == "toml" and "[model]" in block.text
    )
    (world / "my.toml").write_text(config)
    return world


def ran(commands: list[Command], world: Path, folder: Path) -> list[dict[str, Any]]:
    """Run command lines, each in a copy of the world, and return those that fail, and what they said."""
    jobs = []
    for number, command in enumerate(commands):
        run = row_of(command).run
        assert run is not None
        own = folder / str(number)
        shutil.copytree(world, own)
        words = command.words
        for flag in ("--output", "--output-file"):
            if flag in words and ("--resume" not in words or "auto" in words):
                output = own / words[words.index(flag) + 1]  # what a page writes is not there before
                shutil.rmtree(output, ignore_errors=True)
                output.unlink(missing_ok=True)
        variables = dict(word.split("=", 1) for word in command.line.split() if re.match(r"[A-Z_]+=", word))
        # None opens a window or asks the network.
        variables |= {"MPLBACKEND": "agg", "HF_HUB_OFFLINE": "1"}
        if command.words[0] == "torchrun":
            variables |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
            variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "TORCHELASTIC_RUN_ID": "page"}
        jobs.append({"words": run(words), "environment": variables, "folder": str(own), "seconds": 300})
    results = run_jobs(jobs)
    for command, result in zip(commands, results, strict=True):
        print(f"{result['code']} {result['seconds']:5.1f} s  {command.where}: {command.line}")
    return [
        {"line": command.line, "words": job["words"], **result}
        for command, job, result in zip(commands, jobs, results, strict=True)
        if result["code"] != 0
    ]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with pytest.MonkeyPatch.context() as monkeypatch:
        return make_world(tmp_path_factory.mktemp("world"), monkeypatch)


def lines_of_the_package() -> tuple[list[Command], list[Command]]:
    """Lines with every flag and kind of file of every command, the longest first, and all other lines."""
    shown = [command for command in COMMANDS if row_of(command).run is not None and "benchmarks." not in command.line]
    first, others, seen = [], [], set()
    for command in sorted(shown, key=lambda command: -len(command.words)):
        parts = {word for word in command.words if FLAG.match(word)} | {Path(word).suffix for word in command.words}
        # What is planned for ranks is refused or not by all flags together.
        kinds = [sorted(parts)] if command.words[0] == "torchrun" else [[part] for part in parts]
        new = {(*command.words[:2], *kind) for kind in kinds} - seen
        (first if new else others).append(command)
        seen |= new
    return first, others


def test_the_commands_of_the_package_run(world: Path, tmp_path: Path) -> None:
    first, others = lines_of_the_package()
    assert len(first) + len(others) > 60
    assert ran(first, world, tmp_path) == []


IN_EVERY_RUN = {f"benchmarks.{name}" for name in ("attention", "blocks", "decoding", "slide_encoder")}
"""Those of the figures that the README quotes; the tiny forms of all of them take a quarter of an hour."""


def lines_of_benchmarks() -> tuple[list[Command], list[Command]]:
    """The first line of every benchmark that is in every run, and all other lines."""
    shown = [command for command in COMMANDS if row_of(command).run is not None and "benchmarks." in command.line]
    first = {command.words[2]: command for command in reversed(shown)}
    quick = [command for name, command in first.items() if name in IN_EVERY_RUN]
    return quick, [command for command in shown if command not in quick]


def test_the_benchmarks_of_the_readme_run(world: Path, tmp_path: Path) -> None:
    quick, _ = lines_of_benchmarks()
    assert len(quick) == len(IN_EVERY_RUN)
    assert ran(quick, world, tmp_path) == []


@pytest.mark.slow
@pytest.mark.parametrize("lines", [lines_of_the_package, lines_of_benchmarks])
def test_the_other_lines_run(
    lines: Callable[[], tuple[list[Command], list[Command]]], world: Path, tmp_path: Path
) -> None:
    _, others = lines()
    assert ran(others, world, tmp_path) == []
