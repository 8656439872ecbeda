"""One table of wrong command lines, configurations and inputs, each with the sentence that it gets.

    PYTHONPATH=tests python -m cli.wrong_command_lines

runs every row of the commands that train and of those that read what they leave, and prints the table as Markdown, with
the whole sentences.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import io
import re
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from cli import broken_machine as machine
from dilated_attention_pytorch.cli import main as run_command
from dilated_attention_pytorch.installation import install_command


@dataclass(frozen=True, slots=True)
class Row:
    """A command line, what it must say, and what is wrong with the machine while it runs."""

    line: str
    """The words; ``{}`` stands for the folder with everything in it, ``{toml}`` for the file with ``toml``."""
    message: str
    """A part of the sentence that tells it from others."""
    machine: machine.Patch = lambda monkeypatch: None
    toml: str = ""
    """What the file of --config holds."""

    @property
    def file(self) -> str:
        """The name of the file with ``toml``."""
        return f"{hashlib.sha256(self.toml.encode()).hexdigest()[:8]}.toml"

    def words(self, world: Path) -> list[str]:
        """The command line."""
        return self.line.replace("{toml}", str(world / "settings" / self.file)).replace("{}", str(world)).split()


def run_row(row: Row, world: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[int, str, str]:
    """Run the command of a row in ``folder``; its exit code, what it wrote, and its sentence on one line."""
    out, err = io.StringIO(), io.StringIO()
    with monkeypatch.context() as patch, contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        patch.chdir(folder)
        row.machine(patch)
        with pytest.raises(SystemExit) as left:
            run_command(row.words(world))
    assert isinstance(left.value.code, int)
    return left.value.code, out.getvalue(), " ".join(err.getvalue().replace("│", " ").split())


TRAIN = "train --preset tiny --data {}/texts --output {}/new"

COMMANDS = (
    "train, extend, generate, embed, eval, report, diagnose, tokenizer, bench, profile, tune, plan, show, build, info"
)
TABLE: dict[str, list[Row]] = {
    "what is no command line": [
        Row("", f"Expected one of {{{COMMANDS}}}"),
        Row("trian", f"Available subcommands: {COMMANDS}"),
        Row(f"{TRAIN} --stepz 3", "Unrecognized options: --stepz"),
        Row(f"{TRAIN} --steps three", "invalid"),
        Row(f"{TRAIN} --optimizer sgd", "invalid choice 'sgd'"),
        Row(f"{TRAIN} --on-nan ignore", "invalid choice 'ignore'"),
        Row("train --preset huge", "--preset huge: there is no such preset; choose one of auto, cpu, gpu, gpu-large, tiny"),
        Row("generate", "required"),
        Row("info --verbose", "Unrecognized options: --verbose"),
    ],
    "the file of --config": [
        Row("train --config {toml} --output {}/new", "is not TOML: ", toml="steps = "),
        Row("train --config {toml} --output {}/new", "there is no setting step; did you mean steps?", toml="step = 5"),
        Row("train --config {toml} --output {}/new", "there is no setting zzz; --help lists", toml="zzz = 5"),
        Row("train --config {toml} --output {}/new", "steps = 'many': str is not an instance of int", toml='steps = "many"'),
        Row("train --config {toml} --output {}/new", "steps = 2.5: float is not an instance of int", toml="steps = 2.5"),
        Row("train --config {toml} --output {}/new", "steps must be at least 1, got 0", toml="steps = 0"),
        Row("train --config {toml} --output {}/new", "steps must be a finite number, got True", toml="steps = true"),
        Row("train --config {toml} --output {}/new", "compile = 'yes': str is not an instance of bool", toml='compile = "yes"'),
        Row("train --config {toml} --output {}/new", "schedule = 'exponential': str is not any of ('linear', 'cosine', 'wsd', 'constant')", toml='schedule = "exponential"'),
        Row("train --config {toml} --output {}/new", "data = 'texts': pathlib.PosixPath is not a tuple", toml='data = "texts"'),
        Row("train --config {toml} --output {}/new", "data = [1]: item 0 of tuple is not an instance of pathlib.Path", toml="data = [1]"),
        Row("train --config {toml} --output {}/new", "model = 5: int is not an instance of", toml="model = 5"),
        Row("train --config {toml} --output {}/new", "there is no setting model.embed_dims; did you mean model.embed_dim?", toml="[model]\nembed_dims = 64"),
        Row("train --config {toml} --output {}/new", "model.num_heads must divide embed_dim", toml="[model]\nnum_heads = 3"),
        Row("train --config {toml} --output {}/new", "model.segment_lengths and dilation_rates", toml="[model]\nsegment_lengths = [8, 16]"),
        Row("train --config {toml} --output {}/new", "--preset huge: there is no such preset", toml='preset = "huge"'),
        Row("train --config {toml} --output {}/new", "learning_rate must be a finite number, got nan", toml="learning_rate = nan"),
        Row("train --config {}/nothing --output {}/new", "--config {}/nothing: there is no such file"),
        Row("train --config {}/texts --output {}/new", "--config {}/texts cannot be read: Is a directory"),
        Row("train --config /dev/zero --output {}/new", "--config /dev/zero is longer than any file of settings; name another one"),
        Row("train --config {}/bad/latin.txt --output {}/new", "--config {}/bad/latin.txt is not TOML: 'utf-8' codec can't decode byte 0xe9 in"),
        Row("train --config {toml} --output {}/new", "is not TOML: maximum recursion depth exceeded", toml="a = " + "[" * 5000),
        Row("train --config {toml} --output {}/new", "--preset 3: there is no such preset; choose one of auto, cpu, gpu, gpu-large,", toml="preset = 3"),
        Row("train --config {toml} --output {}/new", "--preset ['tiny']: there is no such preset; choose one of auto, cpu, gpu,", toml='preset = ["tiny"]'),
        Row("train --config {toml} --output {}/new", "there is no setting given; --help lists the settings that there are", toml='given = ["steps"]'),
        Row("train --config {toml} --output {}/new", "resume is for the command line alone; write --resume there", toml='resume = "x"'),
        Row("train --config {toml} --output {}/new", "config is for the command line alone; write --config there", toml='config = "x"'),
        Row("train --config {toml}", "output is an empty path; this folder is .", toml='preset="tiny"\noutput = ""'),
        Row("train --config {toml} --output {}/new", "stages.fractions must add up to 1, got [0.5, 0.6]", toml='preset="tiny"\n[stages]\nlengths = [64, 256]\nfractions = [0.5, 0.6]'),
        Row("train --config {toml} --output {}/new", "stages.lengths = 'x': str is not a tuple", toml='preset="tiny"\n[stages]\nlengths = "x"'),
        Row("train --config {toml} --output {}/new", "steps times gradient_accumulation times the windows of a batch must be at", toml='preset="tiny"\nsteps = 9223372036854775808'),
        Row("train --config {toml} --output {}/new", "cannot be read (embedded null byte); name another path", toml='preset="tiny"\ndata = ["a\\u0000b"]'),
        Row("train --config {toml} --output {}/new", "sample_prompt = datetime.date(2020, 1, 1): datetime.date is not an instance", toml='preset="tiny"\nsample_prompt = 2020-01-01'),
        Row("train --config {toml} --output {}/new", "learning_rate must be a finite number, got inf", toml='preset="tiny"\nlearning_rate = inf'),
        Row("extend --config {toml} --output {}/new", "model = 3: int is not an instance of str", toml="model = 3"),
        Row("extend --config {toml} --output {}/new", "rotary = 'x': str is not any of ('yarn', 'linear', 'ntk', 'none')", toml='model = "{}/short"\nrotary="x"'),
        Row("extend --config {toml} --output {}/new", "there is no setting batch_size; did you mean batch_tokens?", toml="batch_size = 3"),
        Row("extend --config {toml} --output {}/new", "extend needs --model FOLDER, the pretrained model to begin with (or --resume", toml="steps = 3"),
        Row("extend --config {toml} --output {}/new", "stages = [3.5]: item 0 of tuple is not an instance of int", toml='model = "{}/short"\nstages = [3.5]'),
    ],
    "numbers out of range": [
        Row(f"{TRAIN} --model.embed-dim 1000000000", "parameters; at most 281,474,976,710,656 are supported"),
        Row(f"{TRAIN} --workers 1000000", "workers must be at most 1024, got 1000000"),
        Row("plan --context-length 1000000000000000", "--context-length must be at most 2,147,483,648, got 1000000000000000"),
        Row("plan --processes 1000000000000", "--processes must be at most 2,147,483,648, got 1000000000000"),
        Row("plan --for generation --prompt 1000000000000", "--prompt must be at most 2,147,483,648, got 1000000000000"),
        Row("extend --model {}/short --data {}/texts --output {}/new --length 1000000000000", "length must be at most 2147"),
        Row("eval {}/finished --lengths 1000000000000", "lengths must be at most 2,147,483,648 tokens, got 1000000000000"),
        Row("eval {}/finished --recall-texts 1000000000", "recall_texts must be at most 65536, got 1000000000"),
        Row("generate {}/finished --prompt x --max-new-tokens 1000000000000", "max_new_tokens must be at most 2147483648"),
        Row("embed {}/texts --checkpoint {}/file --output {}/new --memory 1e300", "memory must be at most 1073741824, got 1e+300"),
        Row(f"show local_window({chr(45) * 3000}1)", "is not a sum of patterns (maximum recursion depth exceeded"),
        Row(f"{TRAIN} --spike-window 0", "spike_window must be at least 1, got 0"),
        Row(f"{TRAIN} --spike-deviations -1", "spike_deviations must be at least 0, got -1"),
        Row(f"{TRAIN} --spike-deviations nan", "spike_deviations must be a finite number, got nan"),
        Row(f"{TRAIN} --threads 100000", "--threads must be at most 1,024, got 100000; this machine has"),
        Row("extend --model {}/short --threads 100000 --length 64 --data {}/texts --output {}/new", "at most 1,024, got"),
        Row("bench --threads 100000 --output {}/new", "--threads must be at most 1,024, got 100000; this machine has"),
        Row("tune --threads 100000 --output {}/new", "--threads must be at most 1,024, got 100000; this machine has"),
        Row("show local_window(1) --heads 10000000000", "--heads must be at most 4,096, got 10000000000"),
        Row("show local_window(1) --heads 65 --output {}/new.png", "--heads must be at most 64 beside it, got 65"),
        Row("show local_window(1) --length 10000000000", "sequence_length must be at most 2,147,483,648, so that"),
        Row("show random_blocks(0.1) --length 1000000000", "make 61,035,156,250,000 pairs of blocks, and"),
        Row(f"{TRAIN} --steps 1000000000000000000000000000000", "must be at most 281,474,976,710,656, got 2,000,000,000"),
        Row(f"{TRAIN} --gradient-accumulation 9223372036854775808", "the windows of a batch must be at most 281,474"),
        Row("extend --model x --steps 1000000000000000000000 --output {}/new", "the windows of a batch must be at most"),
        Row(f"{TRAIN} --muon-learning-rate 1e308", "muon_learning_rate must be at most 1e+36, got 1e+308"),
        Row(f"{TRAIN} --timeout 1000000000000", "timeout must be at most 604800, got 1000000000000"),
        Row(f"{TRAIN} --learning-rate 1e308", "learning_rate must be at most 1e+36, got 1e+308"),
        Row(f"{TRAIN} --sample-prompt \udcff", "sample_prompt must be UTF-8 text, got '\\udcff'"),
        Row(f"{TRAIN} --optimizer adamw-8bit", "--optimizer adamw-8bit needs bitsandbytes, not installed here", machine.uninstall("bitsandbytes")),
        Row(f"{TRAIN} --data {{}}/bad/good.jsonl", "--data holds 4 bytes of training text, fewer than one window of"),
        Row("train --preset tiny --device cpu --data {}/texts --output {}/new --timeout 1", "timeout must be at least 5, got 1"),
        Row("train --preset tiny --device cpu --data {}/texts --output {}/new --seed 4294967296", "seed must be at most 4294967295, got 4294967296"),
        Row(f"{TRAIN} --keep-checkpoints 0", "keep_checkpoints must be at least 1, got 0"),
        Row(f"{TRAIN} --adam-beta1 1", "adam_beta1 must be below 1, got 1.0"),
        Row(f"{TRAIN} --model.checkpoint-every 2", "model.checkpoint_every says which blocks model.gradient_checkpointing"),
        Row(f"{TRAIN} --stages.lengths 64", "stages.lengths must rise and end with the context_length 256, got [64]"),
        Row(f"{TRAIN} --stages.lengths 64 256 --steps 1", "stages must have a step each: 1 steps in parts of [64, 256] leave one of them"),
        Row(f"{TRAIN} --stages.lengths 64 256 --stages.windows 5 1", "stages.windows must have no more tokens than one of the context_length 256,"),
        Row(f"{TRAIN} --stages.lengths 64 256 --stages.patterns local_window(3) local_window(4)", "stages.patterns say segment lengths and rates, DilatedPattern(lengths,"),
    ],
    "more memory than there is": [
        Row(f"{TRAIN} --batch-size 100000000", "GB are free; take a smaller --batch-size, --max-tokens or"),
        Row(f"{TRAIN} --batch-size 100000000", "TB activations) is at most 10 % too high, needs at least"),
        Row(f"{TRAIN} --model.embed-dim 100000", "GB are free; take a smaller --model.embed-dim, --model.ffn-dim or"),
        Row(f"{TRAIN} --model.num-layers 10000000000", "num_layers must be at most 4,096, got 10000000000"),
        Row("extend --model {}/short --length 64 --batch-tokens 100000000000 --data {}/texts --output {}/new", "GB are free; take smaller --batch-tokens or a smaller --length"),
        Row("bench --rows 10000000000 --output {}/new", "GB are free; take fewer --rows, a smaller --batch, or"),
        Row("bench --batch 10000000000 --output {}/new", "GB are free; take fewer --rows, a smaller --batch, or"),
        Row("bench --rows 1000000000000000000000000000000 --output {}/new", "GB are free; take fewer --rows"),
        Row(f"{TRAIN} --steps 0", "steps must be at least 1, got 0"),
        Row(f"{TRAIN} --learning-rate -1", "learning_rate must be above 0, got -1.0"),
        Row(f"{TRAIN} --batch-size 0", "batch_size must be at least 1, got 0"),
        Row(f"{TRAIN} --warmup-fraction 2", "warmup_fraction must be at most 1, got 2.0"),
        Row(f"{TRAIN} --model.num-heads 5", "num_heads must divide embed_dim"),
        Row(f"{TRAIN} --model.segment-lengths 64", "got 1 segment lengths [64] and 2 dilation rates"),
        Row(f"{TRAIN} --context-length 100000", "give more text, or a --context-length of at most"),
        Row("generate {}/finished --prompt x --temperature -1", "temperature must be at least 0, got -1.0"),
        Row("generate {}/finished --prompt x --top-p 1.5", "top_p must be at most 1, got 1.5"),
        Row("generate {}/finished --prompt x --max-new-tokens 0", "max_new_tokens must be at least 1, got 0"),
    ],
    "processes": [
        Row(f"{TRAIN} --context-parallel 2", "got 1; start it with torchrun --nproc-per-node 2 -m"),
        Row(f"{TRAIN} --context-parallel 4", "must be a multiple of 4, got 2", machine.start_processes(2)),
        Row(f"{TRAIN} --data-parallel zero1", "runs under torchrun, with one process too; start it with torchrun"),
        Row(f"{TRAIN} --offload optimizer", 'set data_parallel to "zero1", "zero2" or "zero3", got "ddp"'),
        Row(f"{TRAIN} --data-parallel zero3 --offload nvme", 'got offload "nvme" and offload_folder None: set both or none'),
        Row(f"{TRAIN} --precision float8 --device cpu", "--precision float8 needs a CUDA GPU whose tensor cores multiply"),
        Row(f"{TRAIN} --precision tf32 --device cpu", "--precision tf32 is how CUDA GPUs"),
        Row(f"{TRAIN} --schedule wsd --decay-fraction 1", 'at most 1 together for the schedule "wsd", got 0.03 and 1.0'),
        Row(f"{TRAIN} --parallel auto --data-parallel fsdp", 'parallel "auto" chooses data_parallel and context_parallel'),
        Row(f"{TRAIN} --data-parallel fsdp", "this is the only one; start it with torchrun --nproc-per-node 2"),
        Row(f"{TRAIN} --strategy ring", "--strategy ring says how processes share a sequence"),
        Row(f"{TRAIN} --strategy star", "invalid choice 'star'"),
        Row(f"{TRAIN} --heads-parallel 2", "heads_parallel must divide context_parallel"),
        Row(f"{TRAIN} --tensor-parallel 4", "got 2; start it with torchrun --nproc-per-node 4", machine.start_processes(2)),
        Row(f"{TRAIN} --context-parallel 4 --strategy heads", "--context-parallel 4 splits 2 heads of each process over more processes than", machine.start_processes(4)),
        Row(f"{TRAIN} --context-parallel 4 --heads-parallel 4", "--heads-parallel 4 splits 2 heads of each process over more processes than", machine.start_processes(4)),
        Row(f"{TRAIN} --context-parallel 16 --context-length 8", "--context-length 8 has fewer rows than --context-parallel 16 has processes;", machine.start_processes(16)),
        Row(f"{TRAIN} --tensor-parallel 4", "--tensor-parallel 4 must divide the key/value heads, the feed-forward and the", machine.start_processes(4)),
        Row(f"{TRAIN} --tensor-parallel 2", "--tensor-parallel 2 with 2 groups of processes that read other rows needs", machine.start_processes(4)),
        Row(f"{TRAIN} --context-parallel 2 --compile", "--compile is for a model whose weights and rows one process has; leave it out", machine.start_processes(2)),
        Row(f"{TRAIN} --data-parallel fsdp --optimizer adamw-8bit", "--optimizer adamw-8bit steps whole weights, and --tensor-parallel and", machine.start_processes(2)),
        Row(f"{TRAIN} --data-parallel fsdp --compile", "--compile is for a model whose weights and rows one process has; leave it out", machine.start_processes(2)),
        Row(f"{TRAIN} --tensor-parallel 2 --model.attention-dropout 0.1", "--model.attention-dropout 0.1 with --tensor-parallel 2: the heads of all", machine.start_processes(2)),
        Row(f"{TRAIN} --data-parallel zero3 --optimizer adamw", "--data-parallel zero3 runs under torchrun, with one process too; start it", machine.start_processes(2)),
        Row(f"{TRAIN} --data-parallel zero1", "--data-parallel zero1 runs under torchrun, with one process too; start it", machine.start_processes(2)),
        Row(f"{TRAIN} --data-parallel zero2 --offload parameters", 'offload "parameters" is for weights that are split: set data_parallel to', machine.start_processes(2)),
        Row("train --resume {}/stopped --context-parallel 3", "for --context-parallel 3 the number of processes must be a multiple of 3, got", machine.start_processes(2)),
        Row("train --resume {}/stopped --tensor-parallel 4", "--tensor-parallel 4 must divide the key/value heads, the feed-forward and the", machine.start_processes(4)),
    ],
    "the environment": [
        Row(TRAIN, "the environment says WORLD_SIZE='two', which is not a number; start processes", machine.environment(WORLD_SIZE="two")),
        Row(TRAIN, "the environment says that this is process 0 (RANK) of 0 (WORLD_SIZE), counted", machine.environment(WORLD_SIZE="0")),
        Row(TRAIN, "the environment says that this is process 0 (RANK) of -3 (WORLD_SIZE),", machine.environment(WORLD_SIZE="-3")),
        Row(TRAIN, "the environment says RANK='x', which is not a number; start processes with", machine.environment(RANK="x")),
        Row(TRAIN, "the environment says that this is process 2 (RANK) of 2 (WORLD_SIZE), counted", machine.environment(WORLD_SIZE="2", RANK="2", MASTER_ADDR="localhost")),
        Row("extend --model {}/short --length 64 --data {}/texts --output {}/new", "the environment says WORLD_SIZE='two', which is not a number; start processes", machine.environment(WORLD_SIZE="two")),
        Row("extend --model {}/short --length 64 --data {}/texts --output {}/new", "extend runs in one process, and torchrun started 2; for several call", machine.start_processes(2)),
        Row("eval {}/finished --output {}/new.json", "eval runs in one process, and torchrun started 2; start it without torchrun", machine.environment(RANK="0", WORLD_SIZE="2", MASTER_ADDR="localhost")),
        Row("eval {}/finished --output {}/new.json", "the environment says RANK='x', which is not a number; start processes with", machine.environment(RANK="x")),
        Row(f"{TRAIN} --tokenizer {{}}/tokenizer.json --model.vocab-size 300", "the cache of tokens cannot be written to", machine.environment(XDG_CACHE_HOME="/dev/null")),
    ],
    "text": [
        Row("train --preset tiny --output {}/new --data {}/nothing", "nothing does not exist; check the path"),
        Row("train --preset tiny --output {}/new --data {}/bad/empty.txt", "empty.txt is empty; name a file"),
        Row("train --preset tiny --output {}/new --data {}/bad/binary.bin", "is not text: it holds zero bytes"),
        Row("train --preset tiny --output {}/new --data {}/bad/text.gz", "text.gz is compressed by gzip; decompress it (gzip -dk "),
        Row("train --preset tiny --output {}/new --cache {}/tokens --data {}/bad/text.gz", "text.gz is compressed by gzip"),
        Row("train --preset tiny --output {}/new --data {}/bad/text.bz2", "text.bz2 is compressed by bzip2; decompress it (bzip2 -dk"),
        Row("train --preset tiny --output {}/new --data {}/bad/text.xz", "text.xz is compressed by xz; decompress it (xz -dk "),
        Row("train --preset tiny --output {}/new --data {}/bad/text.zst", "is compressed by Zstandard; decompress it (zstd -d "),
        Row("train --preset tiny --output {}/new --data {}/bad/text.zip", "text.zip is compressed by zip; decompress it (unzip "),
        Row("train --preset tiny --output {}/new --data {}/bad/packed", "1 files were looked at: 1 compressed"),
        Row("train --preset tiny --output {}/new --data {}/bad/gz.jsonl", "gz.jsonl is compressed by gzip; decompress it (gzip -dk"),
        Row("tokenizer {}/bad/text.gz --vocab-size 300 --output {}/new.json", "text.gz is compressed by gzip; decompress it"),
        Row("eval {}/finished --data {}/bad/text.gz", "text.gz is compressed by gzip; decompress it"),
        Row("train --preset tiny --output {}/new --data {}/bad/latin.txt", "convert it (iconv -f LATIN1 -t UTF-8)"),
        Row("train --preset tiny --output {}/new --data {}/bad/short.txt", "fewer than one window of --context-length 256"),
        Row("train --preset tiny --output {}/new --data {}/bad/textless", "no text file (1 files were looked at: 1 not"),
        Row(TRAIN, "module3.py may not be read by this user; change its permissions", machine.refuse_reading),
        Row("train --preset tiny --output {}/new --data /dev/zero", "/dev/zero is neither a regular file nor a folder; write its"),
        Row("train --preset tiny --output {}/new --data {}/bad/pipe", "pipe is neither a regular file nor a folder; write its"),
        Row("train --preset tiny --output {}/new --data {}/bad/odd", "looked at: 1 no regular files, 1 empty); name a folder"),
    ],
    "records, tokenizers, packing, mixtures": [
        Row("train --preset tiny --output {}/new --data {}/bad/no.jsonl", "bad/no.jsonl does not exist; check the path (it is read from"),
        Row("train --preset tiny --output {}/new --data {}/bad/cut.jsonl", "bad/cut.jsonl, line 2 is not valid JSON (Expecting"),
        Row("train --preset tiny --output {}/new --data {}/bad/good.jsonl --text-field body", "line 1 has no 'body'; it has"),
        Row("train --preset tiny --output {}/new --data {}/bad/blank.jsonl", "blank.jsonl holds no record with text in it"),
        Row("train --preset tiny --output {}/new --data {}/bad/bad.parquet", "bad.parquet is damaged or not a Parquet file ("),
        Row("train --preset tiny --output {}/new --data {}/bad/no.parquet", "no.parquet does not exist; check the path (it is read"),
        Row("train --preset tiny --output {}/new --data {}/bad/saved", "state.json is not what save_to_disk of datasets"),
        Row("train --preset tiny --output {}/new --data {}/bad/splits", "holds several splits (test, train); name one, as"),
        Row("train --preset tiny --output {}/new --data {}/bad/bad.parquet", f"pyarrow, not installed here: {install_command('data')}", machine.uninstall("pyarrow")),
        Row("train --preset tiny --output {}/new --cache {}/new2 --data {}/bad/cut.jsonl", "cut.jsonl, line 2 is not valid JSON"),
        Row(f"{TRAIN} --cache {{}}/file", "the cache of tokens cannot be written to {}/file (File exists); make room"),
        Row(f"{TRAIN} --model.vocab-size 300", "model.vocab_size must be 256, one token a byte, got 300; or name the"),
        Row(f"{TRAIN} --tokenizer {{}}/tokenizer.json", "has 300 tokens and the model 256; add --model.vocab-size 300"),
        Row(f"{TRAIN} --tokenizer {{}}/taken", "there is no file {}/taken/tokenizer.json; name the tokenizer.json of a"),
        Row(f"{TRAIN} --tokenizer {{}}/file", "{}/file is damaged or not a tokenizer ("),
        Row(f"{TRAIN} --weights 1 2", "weights must be one for each of data, got 2 for 1; leave them out"),
        Row(f"{TRAIN} --weights 0", "weights must be finite numbers above 0, got 0"),
        Row(f"{TRAIN} --packing rows", "invalid choice 'rows'"),
        Row(f"{TRAIN} --packing documents --file-start-fraction 0.5", "every document begins one; leave it out"),
        Row(f"{TRAIN} --packing documents --stages.lengths 64 256", "stages are of windows, got [64, 256] with packing"),
        Row(f"{TRAIN} --packing documents --compile", "compile is for windows: the documents of every row"),
        Row(f"{TRAIN} --max-tokens 512", 'max_tokens counts the tokens of whole documents: add packing "documents"'),
        Row(f"{TRAIN} --max-batch-size 5", "max_batch_size bounds the batches that max_tokens makes; add that"),
        Row(f"{TRAIN} --packing documents --max-tokens 512", "batch_size counts rows, got 2 with max_tokens"),
        Row(f"{TRAIN} --packing documents --batch-size 1 --max-tokens 99", "max_tokens must hold the longest document, of con"),
        Row(f"{TRAIN} --packing documents --batch-size 1 --max-tokens 512 --context-parallel 2", "max_tokens makes batches of any length, which 2 processes cannot share (context_parallel); leave it out"),
        Row(f"{TRAIN} --workers -1", "workers must be at least 0, got -1"),
        Row("train --preset tiny --output {}/new --data {}/texts {}/bad/short.txt --weights 1 1", "bad/short.txt holds 64 bytes of training text, fewer than one window of --context-length 256"),
        Row("tokenizer {}/texts --vocab-size 100 --output {}/new.json", "--vocab-size must be at least 257, the bytes and"),
        Row("tokenizer {}/bad/short.txt --vocab-size 999 --output {}/new.json", "the text gives 261 tokens only; take 261"),
        Row("tokenizer {}/texts --vocab-size 300 --output {}/file", "file exists; nothing in it was changed. Name a new"),
        Row("tokenizer {}/bad/cut.jsonl --vocab-size 300 --output {}/new.json", "cut.jsonl, line 2 is not valid JSON"),
        Row("extend --model {}/short --length 64 --data {}/bad/cut.jsonl --output {}/new", "cut.jsonl, line 2 is not valid JSON ("),
        Row("generate {}/tokens --prompt x", "holds a model of 300 tokens, not of the 256 bytes, and no tokenizer.json"),
        Row("generate {}/other-tokenizer --prompt x", "broken tokenizer: {}/other-tokenizer/tokenizer.json is damaged"),
        Row("train --resume {}/other-tokenizer", "broken tokenizer: {}/other-tokenizer/tokenizer.json is damaged"),
        Row("train --preset tiny --output {}/new --data=", "a path on the command line is empty (a variable of"),
        Row("tokenizer {}/nothing --vocab-size 300 --output {}/new.json", "--data: {}/nothing does not exist; check the path"),
        Row("tokenizer {}/bad/empty.txt --vocab-size 300 --output {}/new.json", "--data: {}/bad/empty.txt is empty; name a file that holds text"),
        Row("tokenizer {}/bad/bad.parquet --vocab-size 300 --output {}/new.json", "--data: {}/bad/bad.parquet is damaged or not a Parquet file (Parquet file size"),
        Row("tokenizer {}/bad/good.jsonl --text-field body --vocab-size 300 --output {}/new.json", "--data: {}/bad/good.jsonl, line 1 has no 'body'; it has 'text'; name the one"),
        Row("tokenizer --mixture --vocab-size 300 --output {}/new.json", "--mixture is for the data of a run with --weights; name them, or leave it out"),
        Row("tokenizer {}/texts --vocab-size 300", "Missing from dilated-attention tokenizer: --output PATH The tokenizer.json to"),
        Row("tokenizer {}/texts --vocab-size 99999999999 --output {}/new.json", "--vocab-size must be at least 257, the bytes and a separator, and at most"),
        Row("tokenizer {}/texts --vocab-size 300 --output {}/no/new.json", "--output {}/no/new.json: there is no folder {}/no; make it first"),
        Row("tokenizer {}/texts --vocab-size 300 --output {}/new.json", "--output {}/new.json cannot be written: {} is read-only for this user; change", machine.refuse_writing),
        Row("tokenizer {}/texts --vocab-size 300 --output {}/new.json", "training a tokenizer needs tokenizers, not installed here", machine.uninstall("tokenizers")),
        Row("tokenizer {}/bad/good.jsonl --vocab-size 300 --output {}/new.json", "--vocab-size 300: the text gives 259 tokens only; take 259, or more text"),
    ],
    "where to write": [
        Row("train --preset tiny --data {}/texts --output=", "a path on the command line is empty (a variable of"),
        Row("train --preset tiny --data {}/texts --output ..", "--output .. exists and is not empty; nothing in it was"),
        Row("train --preset tiny --data {}/texts --output /", "for example --output runs/new-2"),
        Row("extend --model {}/short --length 64 --data {}/texts --output /", "for example --output runs/new-2"),
        Row("bench --output /", "for example --output runs/new-2"),
        Row("train --preset tiny --data {}/texts --output \udcff", "is no name in UTF-8; name another one"),
        Row("profile {}/finished --output \udcff", "is no name in UTF-8; name another one"),
        Row("tune --output {}/file", "--output {}/file cannot be made: {}/file is a file; name a folder below a folder"),
        Row("tune --output {}/reports", "report.txt exists; nothing in it was changed. Name a new file, for example"),
        Row("show local_window(1) --output {}/old.png", "old.png exists; nothing in it was changed. Name a new file, for"),
        Row("show local_window(1) --output {}/old.png", "for example --output {}/old-2.png"),
        Row("show local_window(1) --output {}/new.png", "is read-only for this user; change its", machine.refuse_writing),
        Row("train --preset tiny --data {}/texts --output {}/taken", "exists and is not empty; nothing in it was changed"),
        Row("train --preset tiny --data {}/texts --output {}/taken", "for example --output {}/taken-2"),
        Row("train --preset tiny --data {}/texts --output {}/stopped", "or go on with that run: --resume {}/stopped"),
        Row("train --preset tiny --data {}/texts --output {}/file", "file is a file, not a folder; name a free folder"),
        Row("train --preset tiny --data {}/texts --output {}/file/new", "file is a file; name a folder below a folder"),
        Row(TRAIN, "is read-only for this user; change its permissions", machine.refuse_writing),
        Row(TRAIN, "cannot be made (Read-only file system); name a folder on a disk that can be written", machine.refuse_making),
        Row(TRAIN, "MB for its checkpoints and the disk has 10 MB free; free some space", machine.fill_disk),
        Row(f"{TRAIN} --device cuda", "PyTorch finds no CUDA device here; use --device cpu", machine.take_cuda_away),
    ],
    "what is not installed": [
        Row(TRAIN, f"accelerate, not installed here: {install_command('train')}", machine.uninstall("accelerate")),
        Row("generate {}/finished --prompt x", "generating needs transformers", machine.uninstall("transformers")),
        Row("generate {}/finished --prompt x --weights int8", "--weights int8 needs torchao, not", machine.uninstall("torchao")),
        Row("eval {}/finished --weights float8", "--weights float8 needs torchao, not installed", machine.uninstall("torchao")),
        Row("eval {}/finished --precision float8", "--precision float8 is for train, and eval computes in no float8"),
        Row("info --x", f"the command needs tyro, not installed here: {install_command('train')}", machine.uninstall_tyro),
    ],
    "going on": [
        Row("train --resume {}/stopped --steps 5", "--resume continues with the run's own settings, so --steps cannot be"),
        Row("train --resume {}/stopped --no-async-checkpoints", "so --no-async-checkpoints cannot be used with it"),
        Row("train --resume {}/stopped --spike-window 0", "spike_window must be at least 1, got 0"),
        Row("train --resume {}/nothing", "there is no such folder; name the --output of the run that was stopped"),
        Row("train --resume {}/taken", "training.json does not exist; name the --output of a `train` command"),
        Row("train --resume {}/finished", "that run is finished; sample from it with `dilated-attention generate"),
        Row("train --resume {}/unbegun", "stopped before its first checkpoint; start a new run"),
        Row("train --resume {}/truncated", "model.safetensors is damaged or was not written to its end"),
        Row("train --resume {}/cut-optimizer", "optimizer.pt is damaged or was not written to its end: it has"),
        Row("train --resume {}/no-scheduler", "scheduler.pt does not exist; restore the folder from a copy"),
        Row("train --resume {}/other-model", "is of another model than {}/other-model/training.json describes (rope_theta"),
        Row("train --resume {}/changed-config", "config.json is damaged or was not written to its end: it has"),
        Row("train --resume {}/other-run", "checkpoint-2 was written by another run ("),
        Row("train --resume {}/no-manifest", "manifest.json does not exist; restore the folder from a copy"),
        Row("train --resume {}/flipped-checkpoint", "its bytes are not those that were written (SHA-256); restore"),
        Row("train --resume {}/bad-settings", "training.json is damaged, it is not JSON"),
        Row("train --resume {}/changed-settings", "training.json is damaged or was changed: its checksum is another one"),
        Row("train --resume {}/earlier", "was written by an earlier version of this package, which is the one to go on"),
        Row("train --resume {}/stopped", "cannot share evenly; go on with 1 or 2 processes", machine.start_processes(3)),
        Row("train --resume {}/stopped", "does not say where they meet (MASTER_ADDR)", machine.start_two_processes_by_hand),
        Row(TRAIN, "does not say where they meet (MASTER_ADDR)", machine.start_two_processes_by_hand),
        Row("train --resume {}/other-text", "the text is not what the run began with"),
        Row("train --resume {}/stopped", "is read-only for this user; change its permissions", machine.refuse_writing),
        Row("train --resume {}/stopped --data-parallel fsdp", "--data-parallel fsdp splits the weights over several processes and this is"),
        Row("train --preset tiny --data {}/other --output {}/stopped --resume auto", "--resume auto: the run in {}/stopped was begun with other settings (data"),
        Row("train --preset tiny --data {}/texts --output {}/bad-settings --resume auto", "--resume {}/bad-settings: {}/bad-settings/training.json is damaged, it is no"),
        Row("train --resume=", "a path on the command line is empty (a variable of the shell that is not"),
    ],
    "models to extend, calls to measure": [
        Row("extend --length 512 --output {}/new", "extend needs --model FOLDER, the pretrained model to begin with"),
        Row("extend --model {}/nothing --output {}/new", "--model {}/nothing: there is no such folder (looked for from"),
        Row("extend --model {}/taken --output {}/new", "--model {}/taken: there is no config.json in that folder; name a"),
        Row("extend --model {}/file --output {}/new", "--model {}/file: it is a file, not a folder; name a folder with"),
        Row("extend --model ../nothing --output {}/new", "--model ../nothing: there is no such folder (looked for from"),
        Row("extend --model nothere/x --output {}/new", "and no hub to ask for a model of that name (huggingface.co: Name or", machine.take_network_away),
        Row("extend --model {}/short --length 32 --output {}/new", "--length must be more than the 32 tokens"),
        Row("extend --model {}/short --length 4 --output {}/new", "length must be at least 8, got 4"),
        Row("extend --model {}/short --length 64 --stages 8 --output {}/new", "stages must rise and end with the length 64"),
        Row("extend --model {}/short --length 64 --pattern f(3) --output {}/new", "pattern: "),
        Row("extend --model {}/short --length 64 --data {}/bad/short.txt --output {}/new", "fewer than one window of --length"),
        Row("extend --model {}/short --length 64 --data {}/texts --output {}/taken", "exists and is not empty; nothing in it"),
        Row("extend --model {}/short --device cuda --output {}/new", "--device cuda: PyTorch finds no", machine.take_cuda_away),
        Row("extend --resume {}/stopped", "describes no run ('kind'); name the --output of an `extend` command"),
        Row("extend --resume {}/stopped --steps 5", "so --steps cannot be used with it"),
        Row("train --resume {}/extension", "describes no run"),
        Row("bench --preset fast", "invalid choice 'fast'"),
        Row("bench --shapes square --output {}/new", "shapes: there is no 'square'; choose from paper, slide, three"),
        Row("bench --contestants gluon --output {}/new", "contestant 'gluon': impl='gluon', the warp-specialised forward for compute capability 9.0, was removed: no device had run it; use impl=\"triton\""),
        Row("bench --contestants nobody --output {}/new", "contestants must be parts of names, got 'nobody'; the names are"),
        Row("bench --modes backward --output {}/new", "invalid choice 'backward'"),
        Row("bench --dtypes int8 --output {}/new", "invalid choice 'int8'"),
        Row("bench --rows 0 --output {}/new", "rows must be at least 1, got 0"),
        Row("bench --head-dims -8 --output {}/new", "head_dims must be at least 1, got -8"),
        Row("bench --batch 0 --output {}/new", "batch must be at least 1, got 0"),
        Row("bench --time-limit -1 --output {}/new", "time_limit must be at least 0, got -1.0"),
        Row("bench --shapes three --num-groups 4 --output {}/new", "the shape three has 3 dilation groups; name at most 3"),
        Row("bench --device cuda --output {}/new", "PyTorch finds no CUDA device here; use --device cpu", machine.take_cuda_away),
        Row("bench --output {}/taken", "exists and is not empty; nothing in it was changed. Name a free folder"),
        Row("bench --output {}/file", "file is a file, not a folder; name a free folder"),
        Row("bench --output {}/file/new", "file is a file; name a folder below a folder"),
        Row("bench --output {}/new", "is read-only for this user; change its permissions", machine.refuse_writing),
        Row("bench --output {}/new", "cannot be made (Read-only file system); name a folder on a disk", machine.refuse_making),
        Row("profile {}/nothing --output {}/new", "profile: {}/nothing is not a run folder; name the --output of a `train` command"),
        Row("profile {}/texts --output {}/new", "training.json does not exist; name the --output of a `train` command"),
        Row("profile {}/finished --steps 0 --output {}/new", "--steps must be from 1 to 100, got 0"),
        Row("profile {}/finished --output {}/taken", "exists and is not empty; nothing in it was changed. Name a free folder"),
        Row("profile --shape paper --rows 8192", "profile --shape was removed: profile takes steps of a run, as it was trained"),
        Row("diagnose {}/finished --step", "diagnose --step was removed: `dilated-attention profile RUN` measures steps"),
        Row("diagnose {}/file", "file is not a run folder; name the --output of a `train` or `extend` command; docs/troubleshooting.md"),
        Row("diagnose {}/texts", "training.json does not exist; name the --output of a `train` or `extend` command"),
        Row("extend --model {}/short --output {}/stopped --resume auto", "--resume auto: the run in {}/stopped was begun with other settings (data"),
        Row("extend --model {}/short --length 64 --steps 0 --output {}/new", "steps must be at least 1, got 0"),
        Row("extend --model {}/short --length 64 --rotary x --output {}/new", "invalid choice 'x' for argument '--rotary'. Expected one of ('yarn',"),
        Row("extend --model {}/short --length 64 --stages 16 8 64 --output {}/new", "stages must rise and end with the length 64, which the model is to read, got"),
        Row("extend --model {}/short --length 64 --steps 1 --stages 16 32 64 --output {}/new", "stages must be no more than the 1 steps, got 3"),
        Row("extend --model {}/short --length 64 --batch-tokens 8 --output {}/new", "batch_tokens must hold one window of 64 tokens, got 8; leave it out"),
        Row("extend --model {}/short --length 64 --packing documents --output {}/new", "Unrecognized options: --packing, documents"),
        Row("extend --model {}/finished --length 512 --output {}/new", "--model {}/finished: longnet-dilated has no max_position_embeddings, so its"),
        Row("extend --model {}/foreign --length 512 --output {}/new", "--length must be more than the 1024 tokens that the model has already"),
        Row("extend --resume {}/nothing", "--resume {}/nothing: there is no such folder; name the --output of the run"),
        Row("extend --resume {}/taken", "--resume {}/taken: {}/taken/training.json does not exist; name the --output"),
    ],
    "what to embed": [
        Row("embed", "required"),
        Row("embed --checkpoint {}/file --output {}/new", "slides must name at least one file or folder, got none"),
        Row("embed {}/nothing --checkpoint {}/file --output {}/new", "{}/nothing does not exist; pass files of tile features"),
        Row("embed {}/texts --checkpoint {}/file --output {}/new", "the folder {}/texts holds no .h5, .hdf5, .pt, .npz file"),
        Row("embed {}/file --checkpoint {}/file --output {}/new", "{}/file is not a file of tile features: its name must end in"),
        Row("embed {}/file --checkpoint {}/file --output {}/new --memory 0", "memory must be above 0, got 0.0"),
        Row("embed {}/file --checkpoint {}/file --output {}/new --device cuda", "PyTorch finds no CUDA", machine.take_cuda_away),
        Row("embed {}/file --checkpoint {}/file --output {}/new", "embedding slides needs h5py", machine.uninstall("h5py")),
    ],
    "what to generate from": [
        Row("generate {}/nothing --prompt x", "there is no such folder; name the --output of a `train` command"),
        Row("generate {}/taken --prompt x", "holds no trained model: neither model.safetensors nor a checkpoint is in it"),
        Row("generate {}/file --prompt x", "is not a run folder: it is a file"),
        Row("generate {}/cut-weights --prompt x", "model.safetensors is damaged or was not written to its end"),
        Row("generate {}/flipped --prompt x", "its bytes are not those that were written (SHA-256); copy it again"),
        Row("generate {}/flipped-checkpoint --prompt x", "its bytes are not those that were written (SHA-256); restore"),
        Row("generate {}/no-config --prompt x", "config.json does not exist; copy it again, or, if it was changed on purpose, remove"),
        Row("generate {}/foreign --prompt x", "describes a model of type 'gpt2', not 'longnet-dilated'"),
        Row("generate {}/unfit --prompt x", "do not fit"),
        Row("generate {}/contrary --prompt x", "hidden_size=32: pass one of them; in a config.json, change both"),
        Row("generate {}/finished --prompt x --device cuda", "PyTorch finds no CUDA device here", machine.take_cuda_away),
        Row("generate {}/finished --prompt x --seed -1", "seed must be at least 0, got -1"),
        Row("generate {}/finished --prompt x --seed 99999999999999999999", "seed must be at most 4294967295, got 99999999999999999999"),
        Row("generate {}/finished --prompt x --top-k 0", "top_k must be at least 1, got 0"),
        Row("generate {}/extension --prompt x", "{}/extension holds no trained model: neither model.safetensors nor a"),
    ],
    "where figures go": [
        Row(f"{TRAIN} --track comet", "invalid choice 'comet'"),
        Row(f"{TRAIN} --track wandb", f"--track wandb needs wandb, not installed here: {install_command('track')}", machine.uninstall("wandb")),
        Row(f"{TRAIN} --track prometheus prometheus", "track must be different ones of tensorboard, wandb, mlflow, prom"),
        Row(f"{TRAIN} --prometheus-port 9000", 'prometheus_port is for "prometheus" in track, got 9000'),
        Row(f"{TRAIN} --track prometheus --prometheus-port 99999", "prometheus_port must be at most 65535, got 99999"),
    ],
    "runs to compare and models to measure": [
        Row("report --output {}/new.html", "report needs the folder of at least one run: dilated-attention report runs/"),
        Row("report {}/nothing --output {}/new.html", "{}/nothing is not a run folder; name the --output of a `train`"),
        Row("report {}/taken --output {}/new.html", "training.json does not exist; name the --output of a `train` or"),
        Row("report {}/finished {}/bad-settings --output {}/new.html", "training.json is damaged, it is not JSON"),
        Row("report {}/finished --output {}/file", "file exists; nothing in it was changed. Name a new file, for example"),
        Row("report {}/finished --output {}/no/new.html", "there is no folder {}/no; make it first"),
        Row("report {}/finished --output {}/new.html", "the report needs plotly, not installed here", machine.uninstall("plotly")),
        Row("eval", "required"),
        Row("eval {}/nothing", "{}/nothing: there is no such folder (looked for from"),
        Row("eval {}/taken", "{}/taken: there is no config.json in that folder; name a folder with config.json and"),
        Row("eval {}/file", "{}/file: it is a file, not a folder; name a folder with config.json and weights"),
        Row("eval {}/finished --lengths 4", "lengths must be different numbers of at least 16 tokens, got [4]"),
        Row("eval {}/finished --lengths 64 64", "lengths must be different numbers of at least 16 tokens, got [64, 64]"),
        Row("eval {}/finished --windows 0", "windows must be at least 1, got 0"),
        Row("eval {}/finished --lengths 1000000", "fewer than one window of --lengths 1000000; give more text, or"),
        Row("eval {}/finished --output {}/old.png", "--output {}/old.png: the figures are JSON, for example {}/old.json"),
        Row("eval {}/finished --output {}/file", "file exists; nothing in it was changed. Name a new file, for"),
        Row("eval {}/finished --output {}/old.json", "old.png exists; nothing in it was changed. Name a new file, for"),
        Row("eval {}/flipped", "its bytes are not those that were written (SHA-256); "),
        Row("eval {}/unbegun", "holds no trained model: neither model.safetensors nor a checkpoint is in it"),
        Row("eval {}/finished --device cuda", "PyTorch finds no CUDA device here", machine.take_cuda_away),
        Row("eval nothere/x --output {}/new.json", "nothere/x: there is no such folder", machine.take_network_away),
        Row("eval {}/finished --seed -1", "seed must be at least 0, got -1"),
        Row("eval {}/finished --output {}/new.json --data {}/nothing", "--data: {}/nothing does not exist; check the path"),
        Row("eval {}/finished --output {}/new.json --data {}/bad/cut.jsonl", "--data: {}/bad/cut.jsonl, line 2 is not valid JSON (Expecting property name enclosed"),
        Row("eval {}/finished --output {}/new.json --data {}/bad/good.jsonl --text-field body", "--data: {}/bad/good.jsonl, line 1 has no 'body'; it has 'text'; name the one"),
        Row("eval {}/finished --output {}/no/new.json", "--output {}/no/new.json: there is no folder {}/no; make it first"),
        Row("eval {}/finished --output {}/new.json --threads 100000", "--threads must be at most 1,024, got 100000; this machine has"),
        Row("eval {}/finished --output {}/new.json --precision tf32 --device cpu", "--precision tf32 is how CUDA GPUs from compute capability 8.0 (Ampere) on"),
        Row("eval {}/finished --output {}/new.json --lengths x", "Error parsing --lengths: Could not find valid parse for arguments: ['x']"),
        Row("eval {}/stopped --output {}/stopped/training.json", "--output {}/stopped/training.json exists; nothing in it was changed. Name a"),
        Row("eval {}/bad-settings --output {}/new.json", "{}/bad-settings: {}/bad-settings/training.json is damaged, it is not JSON"),
        Row("eval {}/foreign --output {}/new.json", "weights are missing in it (lm_head.weight the first), so it is not a trained"),
        Row("eval {}/tokens --output {}/new.json", "{}/tokens holds a model of 300 tokens, not of the 256 bytes, and no"),
        Row("eval {}/extension --output {}/new.json", "{}/extension/training.json describes no run ('length'); name the --output of"),
        Row("report {}/extension --output {}/new.html", "report: {}/extension/training.json describes no run ('steps'); name the"),
        Row("report {}/file --output {}/new.html", "report: {}/file is not a run folder; name the --output of a `train` or `extend`"),
        Row("report {}/changed-settings --output {}/new.html", "report: {}/changed-settings/training.json is damaged or was changed: its"),
        Row("report {}/finished --output=", "a path on the command line is empty (a variable of the shell that is not"),
        Row("report --format pdf", "Unrecognized options: --format, pdf"),
    ],
    "plans": [
        Row("plan --hardware H300", "--hardware: there is no data sheet of 'H300'; there are H200, H100 SXM,"),
        Row("plan --hardware=", "--hardware: there is no data sheet of ''; there are H200, H100 SXM,"),
        Row("plan --link NVLink", "--link: there is no link 'NVLink'; there are NVLink 1, NVLink 2,"),
        Row("plan --preset huge", "--preset huge: there is no such preset"),
        Row("plan --processes 0", "a run takes at least 1 process, got 0"),
        Row("plan --processes -4", "a run takes at least 1 process, got -4"),
        Row("plan --processes 2.5", "invalid"),
        Row("plan --processes many", "invalid"),
        Row("plan --price-per-hour -1", "--price-per-hour must be a finite number, at least 0, got -1.0"),
        Row("plan --price-per-hour nan", "--price-per-hour must be a finite number, at least 0, got nan"),
        Row("plan --price-per-hour inf", "--price-per-hour must be a finite number, at least 0, got inf"),
        Row("plan --for inference", "invalid choice 'inference'"),
        Row("plan --for generation --prompt -1", "--prompt must be at least 1, got -1; or 0 for --context-length"),
        Row("plan --for generation --new-tokens 0", "--new-tokens must be at least 1, got 0"),
        Row("plan --for generation --chunk-size 0", "--chunk-size must be at least 1, got 0"),
        Row("plan --prompt 100", "--prompt requires --for generation, got --for training"),
        Row("plan --new-tokens 500", "--new-tokens requires --for generation, got --for training"),
        Row("plan --for forward --chunk-size 4096", "--chunk-size requires --for generation, got --for forward"),
        Row("plan --for forward --longest", "--longest is for training steps of a LongNet; leave it out with --for forward"),
        Row("plan --for generation --mesh", "--mesh is for training steps of a LongNet; leave it out with --for generation"),
        Row("plan --preset tiny --for generation --processes 2", "generation is planned for one process that holds all weights and the whole cache, got 2"),
        Row("plan --preset tiny --for generation --context-parallel 2 --processes 2", "generation is planned for one process"),
        Row("plan --preset tiny --for forward --processes 2 --data-parallel fsdp", "leave --data-parallel fsdp and --tensor-parallel 1 out"),
        Row("plan --preset tiny --tokenizer {}/nowhere.json", "there is no file"),
        Row("plan --preset tiny --processes 2 --context-parallel 3", "must be a multiple of 3, got 2; plan for 3 processes (--processes 3)"),
        Row("plan --preset tiny --processes 2 --data-parallel zero1", "--data-parallel zero1 does not go with --optimizer muon"),
        Row("plan --preset tiny --html {}/one", "plan --html was removed: the plan is printed, and --output writes it as JSON; leave it out"),
        Row('plan --model {}/short --pattern local_window(3) --gradient-accumulation 4', "--gradient-accumulation is for a LongNet, and a plan of a model of transformers does not read it"),
        Row('plan --model {}/short --pattern local_window(3) --model.embed-dim 64', "--model.embed-dim is for a LongNet, and a plan of a model of transformers does not read it"),
        Row("plan --context-length -8", "context_length must be at least 8, got -8"),
        Row("plan --context-length 0", "context_length must be at least 8, got 0"),
        Row("plan --batch-size 0", "batch_size must be at least 1, got 0"),
        Row("plan --model.num-heads 7", "num_heads must divide embed_dim into heads of even width"),
        Row("plan --model.num-kv-heads 5", "num_kv_heads must divide num_heads: got 5 of"),
        Row("plan --model.num-layers 0", "num_layers must be at least 1, got 0"),
        Row("plan --model.embed-dim -64", "embed_dim must be at least 1, got -64"),
        Row("plan --preset tiny --context-parallel 3 --processes 4", "for --context-parallel 3 the number of processes must be a multiple of 3, got 4"),
        Row("plan --preset tiny --tensor-parallel 3 --processes 3", "--tensor-parallel 3 must divide the key/value heads"),
        Row("plan --preset tiny --strategy ring", "--strategy ring says how processes share a sequence, and no other shares this one"),
        Row("plan --preset tiny --data-parallel fsdp", "--data-parallel fsdp splits the weights over several processes and this is the only one"),
        Row("plan --preset tiny --hardware V100 --precision bfloat16", "--precision bfloat16: V100 has no rate of it; take one of float16, float32"),
        Row("plan --preset tiny --hardware here --link PCIe", "--hardware here measures one process, which sends nothing; leave --link PCIe out"),
        Row("plan --preset tiny --hardware here --for generation", "--hardware here predicts training steps and no longer the seconds of a generation; name a device"),
        Row("plan --preset tiny --for generation --price-per-hour 2", "--price-per-hour needs seconds, which are not predicted for --for generation; leave it out"),
        Row("plan --preset tiny --hardware here --processes 2 --data-parallel fsdp", "--hardware here measures steps of one process, got --processes 2; name a device, whose data sheet is read"),
        Row("plan --preset tiny --hardware here --for forward", "--hardware here predicts training steps; name a device with --for forward"),
        Row("plan --preset tiny --hardware here --fewest", "--fewest is for a device by its name; leave it out with --hardware here"),
        Row("plan --pattern local_window(3)", "--pattern is for a model of transformers, named by --model"),
        Row("plan --model {}/short", "--model needs a --pattern, for example"),
        Row("plan --model {}/nothing --pattern local_window(3)", "--model {}/nothing: there is no file {}/nothing; name a folder with config.json, or that file"),
        Row("plan --model {}/no-config --pattern local_window(3)", "--model {}/no-config: there is no file {}/no-config/config.json"),
        Row("plan --model {}/texts --pattern local_window(3)", "there is no file {}/texts/config.json; name a folder with config.json"),
        Row("plan --model {}/short --pattern window(3)", "--pattern: "),
        Row("plan --model {}/short --pattern local_window(3) --processes 2", "a model of transformers is planned for one process, got --processes 2"),
        Row("plan --model {}/short --pattern local_window(3) --hardware here", "--hardware here predicts steps of a LongNet; name a device with --model"),
        Row("plan --model {}/short --pattern local_window(3) --changes", "--changes is for training steps of a LongNet; leave it out with --model"),
        Row("plan --output {}/file", "--output {}/file exists; nothing in it was changed. Name a new file"),
        Row("plan --output {}/none/plan.json", "--output {}/none/plan.json: there is no folder {}/none; make it first"),
        Row("plan --longst", "Unrecognized options: --longst"),
    ],
}  # fmt: skip

ROWS = [row for rows in TABLE.values() for row in rows]
OF_TRAINING = ("train", "extend", "eval", "report", "tokenizer", "generate")
"""The commands that train, and those that read what they leave or make what they take."""


def table(world: Path, folder: Path) -> Iterator[str]:
    """The rows of :data:`OF_TRAINING` as Markdown, each with the sentence that it gets now."""
    for heading, rows in TABLE.items():
        rows = [row for row in rows if row.line.partition(" ")[0] in OF_TRAINING]
        if not rows:
            continue
        yield f"\n### {heading.capitalize()}\n\n| command line | what is wrong besides | what it says |\n|---|---|---|"
        for row in rows:
            with pytest.MonkeyPatch.context() as patch:
                code, _, said = run_row(row, world, folder, patch)
            assert code == 2
            name = row.machine.__name__.removeprefix("<lambda>")
            beside = f"`{row.toml}`" if row.toml else name if "=" in name else name.replace("_", " ")
            line = row.line.replace("{toml}", "run.toml").replace("{}", "WORLD").encode("ascii", "backslashreplace")
            cells = (f"`{line.decode()}`", beside.replace("\n", "; "), _sentence(said.replace(str(world), "WORLD")))
            yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _sentence(said: str) -> str:
    """What a command said, without what stands around it: its name, or the box and the help of the parser."""
    of_parser = re.sub("[╭╮╰╯─]+|-{5,}", "", said).partition("For full helptext")[0]
    return said.partition("dilated-attention: ")[2] or of_parser.rpartition("Error parsing ")[2].strip()


def main() -> None:
    """Print the table."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    from cli.wrong_world import make_world

    count = sum(row.line.partition(" ")[0] in OF_TRAINING for row in ROWS)
    print(f"{count} wrong command lines, configurations and inputs of {', '.join(OF_TRAINING)}")
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place, "empty")
        folder.mkdir()
        for line in table(make_world(Path(place, "WORLD")), folder):
            print(line)


if __name__ == "__main__":
    main()
