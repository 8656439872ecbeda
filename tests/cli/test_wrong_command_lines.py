"""Wrong command lines: each gives a sentence that says what to do, exit code 2, and leaves everything as it was."""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import json
import os
import shutil
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from dilated_attention_pytorch.benchmarks import profiling
from dilated_attention_pytorch.benchmarks import run as bench_run
from dilated_attention_pytorch.benchmarks.results import FORMAT
from dilated_attention_pytorch.benchmarks.shapes import SHAPES
from dilated_attention_pytorch.cli import main
from dilated_attention_pytorch.installation import install_command
from dilated_attention_pytorch.training import run as training_run
from dilated_attention_pytorch.training import train
from dilated_attention_pytorch.training.data.tokenizer import train_tokenizer
from dilated_attention_pytorch.training.manifest import sealed
from training.runs import change_sealed, quiet, seal_again, stopped_run, tiny_settings, write_texts

Patch = Callable[[pytest.MonkeyPatch], None]


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """A command line, what it must say, and what is wrong with the machine while it runs."""

    line: str
    """The words; ``{}`` stands for the folder with everything in it."""
    message: str
    machine: Patch = lambda monkeypatch: None


def _refuse_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    read = Path.read_bytes

    def read_bytes(path: Path) -> bytes:
        if path.name == "module3.py":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", read_bytes)


def _refuse_making(monkeypatch: pytest.MonkeyPatch) -> None:
    def mkdir(path: Path, *args: Any, **kwargs: Any) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    monkeypatch.setattr(Path, "mkdir", mkdir)


def _refuse_writing(monkeypatch: pytest.MonkeyPatch) -> None:
    # As access() answers on a read-only file system, for root too.
    monkeypatch.setattr(os, "access", lambda path, mode: not mode & os.W_OK)


def _fill_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: type("Usage", (), {"free": 10_000_000})())


def _take_cuda_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def _take_network_away(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    def connect(address: tuple[str, int], timeout: float) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    def ask(*words: Any, **options: Any) -> None:
        raise AssertionError("the hub was asked")

    monkeypatch.setattr(socket, "create_connection", connect)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", ask)
    for name in ("https_proxy", "HTTPS_PROXY"):
        monkeypatch.delenv(name, raising=False)


def _start_two_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("MASTER_ADDR", "localhost")


def _start_three_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "3")
    monkeypatch.setenv("MASTER_ADDR", "localhost")


def _start_two_processes_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")


def _uninstall(name: str) -> Patch:
    def patch(monkeypatch: pytest.MonkeyPatch) -> None:
        import importlib.util

        find = importlib.util.find_spec
        monkeypatch.setattr(importlib.util, "find_spec", lambda wanted, *rest: None if wanted == name else find(wanted))

    return patch


def _uninstall_tyro(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "dilated_attention_pytorch.cli.command", raising=False)
    monkeypatch.setitem(sys.modules, "tyro", None)


TRAIN = "train --preset tiny --data {}/texts --output {}/new"

COMMANDS = "train, extend, generate, eval, report, tokenizer, bench, profile, tune, show, build, info"
ROWS = [
    # what is no command line
    Row("", f"Expected one of {{{COMMANDS}}}"),
    Row("trian", f"Available subcommands: {COMMANDS}"),
    Row(f"{TRAIN} --stepz 3", "Unrecognized options: --stepz"),
    Row(f"{TRAIN} --steps three", "invalid"),
    Row(f"{TRAIN} --optimizer sgd", "invalid choice 'sgd'"),
    Row(f"{TRAIN} --on-nan ignore", "invalid choice 'ignore'"),
    Row("train --preset huge", "--preset huge: there is no such preset; choose one of auto, cpu, gpu, gpu-large, tiny"),
    Row("generate", "required"),
    Row("info --verbose", "Unrecognized options: --verbose"),
    # numbers out of range
    Row(f"{TRAIN} --spike-window 0", "spike_window must be at least 1, got 0"),
    Row(f"{TRAIN} --spike-deviations -1", "spike_deviations must be at least 0, got -1"),
    Row(f"{TRAIN} --spike-deviations nan", "spike_deviations must be a finite number, got nan"),
    Row(f"{TRAIN} --threads 100000", "--threads must be at most 1,024, got 100000; this machine has"),
    Row("extend --model {}/short --threads 100000 --length 64 --data {}/texts --output {}/new", "at most 1,024, got"),
    Row("bench --threads 100000 --output {}/new", "--threads must be at most 1,024, got 100000; this machine has"),
    Row("profile --threads 100000 --output {}/new", "--threads must be at most 1,024, got 100000; this machine has"),
    Row("tune --threads 100000 --output {}/new", "--threads must be at most 1,024, got 100000; this machine has"),
    Row("show local_window(1) --heads 10000000000", "--heads must be at most 4,096, got 10000000000"),
    Row("show local_window(1) --heads 65 --output {}/new.png", "--heads must be at most 64 beside it, got 65"),
    Row("show local_window(1) --length 10000000000", "sequence_length must be at most 2,147,483,648, whose pairs"),
    Row("show random_blocks(0.1) --length 1000000000", "are 61,035,156,250,000 pairs of blocks to look at, and"),
    Row(f"{TRAIN} --steps 1000000000000000000000000000000", "must be at most 281,474,976,710,656, got 2,000,000,000"),
    Row(f"{TRAIN} --gradient-accumulation 9223372036854775808", "the windows of a batch must be at most 281,474"),
    Row("extend --model x --steps 1000000000000000000000 --output {}/new", "the windows of a batch must be at most"),
    Row(f"{TRAIN} --muon-learning-rate 1e308", "muon_learning_rate must be at most 1e+36, got 1e+308"),
    Row(f"{TRAIN} --timeout 1000000000000", "timeout must be at most 604800, got 1000000000000"),
    Row(f"{TRAIN} --learning-rate 1e308", "learning_rate must be at most 1e+36, got 1e+308"),
    Row(f"{TRAIN} --sample-prompt \udcff", "sample_prompt must be UTF-8 text, got '\\udcff'"),
    # more memory than there is
    Row(f"{TRAIN} --batch-size 100000000", "GB are free; take a smaller --batch-size, --max-tokens or"),
    Row(f"{TRAIN} --batch-size 100000000", "TB activations) needs at least"),
    Row(f"{TRAIN} --model.embed-dim 100000", "GB are free; take a smaller --model.embed-dim, --model.ffn-dim or"),
    Row(f"{TRAIN} --model.num-layers 10000000000", "GB are free; take a smaller"),
    Row(
        "extend --model {}/short --length 64 --batch-tokens 100000000000 --data {}/texts --output {}/new",
        "GB are free; take smaller --batch-tokens or a smaller --length",
    ),
    Row("bench --rows 10000000000 --output {}/new", "GB are free; take fewer --rows, a smaller --batch, or"),
    Row("bench --batch 10000000000 --output {}/new", "GB are free; take fewer --rows, a smaller --batch, or"),
    Row("bench --rows 1000000000000000000000000000000 --output {}/new", "GB are free; take fewer --rows"),
    Row("profile --rows 10000000000 --output {}/new", "GB are free; take fewer --rows, a smaller --batch, or"),
    Row("profile --head-dim 10000000000 --output {}/new", "GB are free; take fewer --rows, a smaller --batch, or"),
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
    # processes
    Row(f"{TRAIN} --context-parallel 2", "got 1; start it with torchrun --nproc-per-node 2 -m"),
    Row(f"{TRAIN} --context-parallel 4", "must be a multiple of 4, got 2", _start_two_processes),
    Row(f"{TRAIN} --data-parallel zero1", "runs under torchrun, with one process too; start it with torchrun"),
    Row(f"{TRAIN} --offload optimizer", 'set data_parallel to "zero1", "zero2" or "zero3", got "ddp"'),
    Row(f"{TRAIN} --precision tf32 --device cpu", "--precision tf32 is how CUDA GPUs"),
    Row(f"{TRAIN} --schedule wsd --decay-fraction 1", 'at most 1 together for the schedule "wsd", got 0.03 and 1.0'),
    Row(f"{TRAIN} --parallel auto --data-parallel fsdp", 'parallel "auto" chooses data_parallel and context_parallel'),
    Row(f"{TRAIN} --data-parallel fsdp", "this is the only one; start it with torchrun --nproc-per-node 2"),
    Row(f"{TRAIN} --strategy ring", "--strategy ring says how processes share a sequence"),
    Row(f"{TRAIN} --strategy star", "invalid choice 'star'"),
    Row(f"{TRAIN} --heads-parallel 2", "heads_parallel must divide context_parallel"),
    Row(f"{TRAIN} --tensor-parallel 4", "got 2; start it with torchrun --nproc-per-node 4", _start_two_processes),
    # text
    Row("train --preset tiny --output {}/new --data {}/nothing", "nothing does not exist; check the path"),
    Row("train --preset tiny --output {}/new --data {}/bad/empty.txt", "empty.txt is empty; name a file"),
    Row("train --preset tiny --output {}/new --data {}/bad/binary.bin", "is not text: it holds zero bytes"),
    Row("train --preset tiny --output {}/new --data {}/bad/latin.txt", "convert it (iconv -f LATIN1 -t UTF-8)"),
    Row("train --preset tiny --output {}/new --data {}/bad/short.txt", "fewer than one window of --context-length 256"),
    Row("train --preset tiny --output {}/new --data {}/bad/textless", "no text file (1 files were looked at: 1 not"),
    Row(TRAIN, "module3.py may not be read by this user; change its permissions", _refuse_reading),
    Row(
        "train --preset tiny --output {}/new --data /dev/zero", "/dev/zero is no regular file and no folder; write its"
    ),
    Row("train --preset tiny --output {}/new --data {}/bad/pipe", "pipe is no regular file and no folder; write its"),
    Row(
        "train --preset tiny --output {}/new --data {}/bad/odd",
        "looked at: 1 no regular files, 1 empty); name a folder",
    ),
    # records, tokenizers, packing, mixtures
    Row("train --preset tiny --output {}/new --data {}/bad/no.jsonl", "bad/no.jsonl does not exist (it is read from"),
    Row("train --preset tiny --output {}/new --data {}/bad/cut.jsonl", "bad/cut.jsonl, line 2 is no JSON (Expecting"),
    Row(
        "train --preset tiny --output {}/new --data {}/bad/good.jsonl --text-field body", "line 1 has no 'body'; it has"
    ),
    Row("train --preset tiny --output {}/new --data {}/bad/blank.jsonl", "blank.jsonl holds no record with text in it"),
    Row("train --preset tiny --output {}/new --data {}/bad/bad.parquet", "bad.parquet is damaged or no Parquet file ("),
    Row("train --preset tiny --output {}/new --data {}/bad/no.parquet", "no.parquet does not exist (it is read"),
    Row("train --preset tiny --output {}/new --data {}/bad/saved", "state.json is not what save_to_disk of datasets"),
    Row("train --preset tiny --output {}/new --data {}/bad/splits", "holds several splits (test, train); name one, as"),
    Row(
        "train --preset tiny --output {}/new --data {}/bad/bad.parquet",
        f"pyarrow, not installed here: {install_command('data')}",
        _uninstall("pyarrow"),
    ),
    Row("train --preset tiny --output {}/new --cache {}/new2 --data {}/bad/cut.jsonl", "cut.jsonl, line 2 is no JSON"),
    Row(f"{TRAIN} --cache {{}}/file", "the cache of tokens cannot be written to {}/file (File exists); make room"),
    Row(f"{TRAIN} --model.vocab-size 300", "model.vocab_size must be 256, one token a byte, got 300; or name the"),
    Row(f"{TRAIN} --tokenizer {{}}/tokenizer.json", "has 300 tokens and the model 256; add --model.vocab-size 300"),
    Row(f"{TRAIN} --tokenizer {{}}/taken", "there is no file {}/taken/tokenizer.json; name the tokenizer.json of a"),
    Row(f"{TRAIN} --tokenizer {{}}/file", "{}/file is damaged or no tokenizer ("),
    Row(f"{TRAIN} --weights 1 2", "weights must be one for each of data, got 2 for 1; leave them out"),
    Row(f"{TRAIN} --weights 0", "weights must be finite numbers above 0, got 0"),
    Row(f"{TRAIN} --packing rows", "invalid choice 'rows'"),
    Row(f"{TRAIN} --packing documents --file-start-fraction 0.5", "every document begins one; leave it out"),
    Row(f"{TRAIN} --packing documents --stages.lengths 64 256", "stages are of windows, got [64, 256] beside packing"),
    Row(f"{TRAIN} --packing documents --compile", "compile is for windows: the documents of every row"),
    Row(f"{TRAIN} --max-tokens 512", 'max_tokens counts the tokens of whole documents: add packing "documents"'),
    Row(f"{TRAIN} --max-batch-size 5", "max_batch_size bounds the batches that max_tokens makes; add that"),
    Row(f"{TRAIN} --packing documents --max-tokens 512", "batch_size counts rows, got 2 beside max_tokens"),
    Row(
        f"{TRAIN} --packing documents --batch-size 1 --max-tokens 99",
        "max_tokens must hold the longest document, of con",
    ),
    Row(
        f"{TRAIN} --packing documents --batch-size 1 --max-tokens 512 --context-parallel 2",
        "max_tokens makes batches of any length, which 2 processes cannot share (context_parallel); leave it out",
    ),
    Row(f"{TRAIN} --workers -1", "workers must be at least 0, got -1"),
    Row(
        "train --preset tiny --output {}/new --data {}/texts {}/bad/short.txt --weights 1 1",
        "bad/short.txt holds 64 bytes of training text, fewer than one window of --context-length 256",
    ),
    Row("tokenizer {}/texts --vocab-size 100 --output {}/new.json", "--vocab-size must be at least 257, the bytes and"),
    Row("tokenizer {}/bad/short.txt --vocab-size 999 --output {}/new.json", "the text gives 261 tokens only; take 261"),
    Row("tokenizer {}/texts --vocab-size 300 --output {}/file", "file exists; nothing in it was changed. Name a new"),
    Row("tokenizer {}/bad/cut.jsonl --vocab-size 300 --output {}/new.json", "cut.jsonl, line 2 is no JSON"),
    Row(
        "extend --model {}/short --length 64 --data {}/bad/cut.jsonl --output {}/new", "cut.jsonl, line 2 is no JSON ("
    ),
    Row("generate {}/tokens --prompt x", "holds a model of 300 tokens, not of the 256 bytes, and no tokenizer.json"),
    Row("generate {}/other-tokenizer --prompt x", "broken tokenizer: {}/other-tokenizer/tokenizer.json is damaged"),
    Row("train --resume {}/other-tokenizer", "broken tokenizer: {}/other-tokenizer/tokenizer.json is damaged"),
    Row("train --preset tiny --output {}/new --data=", "a path on the command line is empty (a variable of"),
    # where to write
    Row(
        "train --preset tiny --data {}/texts --output=",
        "a path on the command line is empty (a variable of",
    ),
    Row("train --preset tiny --data {}/texts --output ..", "--output .. exists and is not empty; nothing in it was"),
    Row("train --preset tiny --data {}/texts --output /", "for example --output runs/new-2"),
    Row("extend --model {}/short --length 64 --data {}/texts --output /", "for example --output runs/new-2"),
    Row("bench --output /", "for example --output runs/new-2"),
    Row("train --preset tiny --data {}/texts --output \udcff", "is no name in UTF-8; name another one"),
    Row("profile --output \udcff", "is no name in UTF-8; name another one"),
    Row("tune --output {}/file", "--output {}/file cannot be made: {}/file is a file; name a folder below a folder"),
    Row("tune --output {}/reports", "report.txt exists; nothing in it was changed. Name a new file, for example"),
    Row("show local_window(1) --output {}/old.png", "old.png exists; nothing in it was changed. Name a new file, for"),
    Row("show local_window(1) --output {}/old.png", "for example --output {}/old-2.png"),
    Row("show local_window(1) --output {}/new.png", "is read-only for this user; change its", _refuse_writing),
    Row("train --preset tiny --data {}/texts --output {}/taken", "exists and is not empty; nothing in it was changed"),
    Row("train --preset tiny --data {}/texts --output {}/taken", "for example --output {}/taken-2"),
    Row("train --preset tiny --data {}/texts --output {}/stopped", "or go on with that run: --resume {}/stopped"),
    Row("train --preset tiny --data {}/texts --output {}/file", "file is a file, not a folder; name a free folder"),
    Row("train --preset tiny --data {}/texts --output {}/file/new", "file is a file; name a folder below a folder"),
    Row(TRAIN, "is read-only for this user; change its permissions", _refuse_writing),
    Row(TRAIN, "cannot be made (Read-only file system); name a folder on a disk that can be written", _refuse_making),
    Row(TRAIN, "MB for its checkpoints and the disk has 10 MB free; free some space", _fill_disk),
    Row(f"{TRAIN} --device cuda", "PyTorch finds no CUDA device here; use --device cpu", _take_cuda_away),
    # what is not installed
    Row(TRAIN, f"accelerate, not installed here: {install_command('train')}", _uninstall("accelerate")),
    Row("generate {}/finished --prompt x", "generating needs transformers", _uninstall("transformers")),
    Row("info --x", f"the command needs tyro, not installed here: {install_command('train')}", _uninstall_tyro),
    # going on
    Row("train --resume {}/stopped --steps 5", "--resume goes on with the run's own settings, so --steps cannot go"),
    Row("train --resume {}/stopped --no-async-checkpoints", "so --no-async-checkpoints cannot go with it"),
    Row("train --resume {}/stopped --spike-window 0", "spike_window must be at least 1, got 0"),
    Row("train --resume {}/nothing", "there is no such folder; name the --output of the run that was stopped"),
    Row("train --resume {}/taken", "training.json does not exist; name the --output of a `train` command"),
    Row("train --resume {}/finished", "that run is finished; sample from it with `dilated-attention generate"),
    Row("train --resume {}/unbegun", "stopped before its first checkpoint; begin anew"),
    Row("train --resume {}/truncated", "model.safetensors is damaged or was not written to its end"),
    Row("train --resume {}/cut-optimizer", "optimizer.pt is damaged or was not written to its end: it has"),
    Row("train --resume {}/no-scheduler", "scheduler.pt does not exist; restore the folder from a copy"),
    Row("train --resume {}/other-model", "is of another model than {}/other-model/training.json describes (rope_theta"),
    Row("train --resume {}/changed-config", "config.json is damaged or was not written to its end: it has"),
    Row("train --resume {}/other-run", "checkpoint-2 was written by another run ("),
    Row("train --resume {}/no-manifest", "manifest.json does not exist; restore the folder from a copy"),
    Row("train --resume {}/flipped-checkpoint", "its bytes are not those that were written (SHA-256); restore"),
    Row("train --resume {}/bad-settings", "training.json is damaged, it is no JSON"),
    Row("train --resume {}/changed-settings", "training.json is damaged or was changed: its checksum is another one"),
    Row("train --resume {}/earlier", "was written by an earlier version of this package, which is the one to go on"),
    Row("train --resume {}/stopped", "cannot share evenly; go on with 1 or 2 processes", _start_three_processes),
    Row("train --resume {}/stopped", "does not say where they meet (MASTER_ADDR)", _start_two_processes_by_hand),
    Row(TRAIN, "does not say where they meet (MASTER_ADDR)", _start_two_processes_by_hand),
    Row("train --resume {}/other-text", "the text is not what the run began with"),
    Row("train --resume {}/stopped", "is read-only for this user; change its permissions", _refuse_writing),
    # what to measure
    Row("extend --length 512 --output {}/new", "extend needs --model FOLDER, the pretrained model to begin with"),
    Row("extend --model {}/nothing --output {}/new", "--model {}/nothing: there is no such folder (looked for from"),
    Row("extend --model {}/taken --output {}/new", "--model {}/taken: there is no config.json in that folder; name a"),
    Row("extend --model {}/file --output {}/new", "--model {}/file: it is a file, not a folder; name a folder with"),
    Row("extend --model ../nothing --output {}/new", "--model ../nothing: there is no such folder (looked for from"),
    Row(
        "extend --model nothere/x --output {}/new",
        "and no hub to ask for a model of that name (huggingface.co: Name or",
        _take_network_away,
    ),
    Row("extend --model {}/short --length 32 --output {}/new", "--length must be more than the 32 tokens"),
    Row("extend --model {}/short --length 4 --output {}/new", "length must be at least 8, got 4"),
    Row(
        "extend --model {}/short --length 64 --stages 8 --output {}/new", "stages must rise and end with the length 64"
    ),
    Row("extend --model {}/short --length 64 --pattern f(3) --output {}/new", "pattern: "),
    Row(
        "extend --model {}/short --length 64 --data {}/bad/short.txt --output {}/new",
        "fewer than one window of --length",
    ),
    Row(
        "extend --model {}/short --length 64 --data {}/texts --output {}/taken",
        "exists and is not empty; nothing in it",
    ),
    Row("extend --model {}/short --device cuda --output {}/new", "--device cuda: PyTorch finds no", _take_cuda_away),
    Row("extend --resume {}/stopped", "describes no such run ('kind'); name the --output of an `extend` command"),
    Row("extend --resume {}/stopped --steps 5", "so --steps cannot go with it"),
    Row("train --resume {}/extension", "describes no such run"),
    Row("bench --preset fast", "invalid choice 'fast'"),
    Row("bench --shapes square --output {}/new", "shapes: there is no 'square'; choose from paper, slide, three"),
    Row(
        "bench --contestants nobody --output {}/new", "contestants must be parts of names, got 'nobody'; the names are"
    ),
    Row("bench --modes backward --output {}/new", "invalid choice 'backward'"),
    Row("bench --dtypes int8 --output {}/new", "invalid choice 'int8'"),
    Row("bench --rows 0 --output {}/new", "rows must be at least 1, got 0"),
    Row("bench --head-dims -8 --output {}/new", "head_dims must be at least 1, got -8"),
    Row("bench --batch 0 --output {}/new", "batch must be at least 1, got 0"),
    Row("bench --time-limit -1 --output {}/new", "time_limit must be at least 0, got -1.0"),
    Row("bench --shapes three --num-groups 4 --output {}/new", "the shape three has 3 dilation groups; name at most 3"),
    Row("bench --device cuda --output {}/new", "PyTorch finds no CUDA device here; use --device cpu", _take_cuda_away),
    Row("bench --output {}/taken", "exists and is not empty; nothing in it was changed. Name a free folder"),
    Row("bench --output {}/file", "file is a file, not a folder; name a free folder"),
    Row("bench --output {}/file/new", "file is a file; name a folder below a folder"),
    Row("bench --output {}/new", "is read-only for this user; change its permissions", _refuse_writing),
    Row("bench --output {}/new", "cannot be made (Read-only file system); name a folder on a disk", _refuse_making),
    Row("bench --output {}/new", "the benchmark needs matplotlib, not installed here", _uninstall("matplotlib")),
    Row("bench --output {}/new --compare {}/nothing", "nothing does not exist; name the bench.json of an earlier"),
    Row("bench --output {}/new --compare {}/taken", "taken cannot be read (Is a directory); name the bench.json"),
    Row("bench --output {}/new --compare {}/file", "file is no JSON"),
    Row("bench --output {}/new --compare /dev/zero", "--compare /dev/zero is no regular file; name the bench.json of"),
    Row("bench --output {}/new --compare {}/finished/config.json", "is not written by this version of the benchmark"),
    Row("bench --output {}/new --compare {}/dry.json", "dry.json is of a dry run, which measures nothing"),
    Row("bench --output {}/new --compare {}/other-cases.json", "holds no time of any case that is about to be run"),
    Row("bench --output {}/new --shapes three --compare {}/other-machine.json", "is of another machine (processor"),
    Row("bench --output {}/new --shapes three --compare {}/other-machine.json", "or add --compare-any-machine"),
    Row("bench --output {}/new --compare-any-machine", "there is no --compare; name a file with it"),
    Row("profile --shape square --output {}/new", "shape: there is no 'square'; choose from paper, slide, three"),
    Row("profile --rows 0 --output {}/new", "rows must be at least 1, got 0"),
    Row(
        "profile --contestant ours --output {}/new", "it must be part of one name, got 8; choose one of 'ours, triton'"
    ),
    Row("profile --contestant FlashAttention-2 --output {}/new", "the package of flash_attn is not installed"),
    Row("profile --shape decode --backward --output {}/new", "a decoding step has none; leave it out"),
    Row("profile --num-groups 9 --output {}/new", "the shape three has 3 dilation groups; name at most so many"),
    Row("profile --output {}/taken", "exists and is not empty; nothing in it was changed. Name a free folder"),
    Row("profile --device cuda --output {}/new", "PyTorch finds no CUDA device here", _take_cuda_away),
    # what to generate from
    Row("generate {}/nothing --prompt x", "there is no such folder; name the --output of a `train` command"),
    Row("generate {}/taken --prompt x", "holds no trained model: neither model.safetensors nor a checkpoint is in it"),
    Row("generate {}/file --prompt x", "is no run folder: it is a file"),
    Row("generate {}/cut-weights --prompt x", "model.safetensors is damaged or was not written to its end"),
    Row("generate {}/flipped --prompt x", "its bytes are not those that were written (SHA-256); copy it again"),
    Row("generate {}/flipped-checkpoint --prompt x", "its bytes are not those that were written (SHA-256); restore"),
    Row(
        "generate {}/no-config --prompt x",
        "config.json does not exist; copy it again, or, if it was changed on purpose, remove",
    ),
    Row("generate {}/foreign --prompt x", "describes a model of type 'gpt2', not 'longnet-dilated'"),
    Row("generate {}/unfit --prompt x", "do not fit"),
    Row("generate {}/finished --prompt x --device cuda", "PyTorch finds no CUDA device here", _take_cuda_away),
    # where figures go
    Row(f"{TRAIN} --track comet", "invalid choice 'comet'"),
    Row(
        f"{TRAIN} --track wandb",
        f"--track wandb needs wandb, not installed here: {install_command('track')}",
        _uninstall("wandb"),
    ),
    Row(f"{TRAIN} --track prometheus prometheus", "track must be different ones of tensorboard, wandb, mlflow, prom"),
    Row(f"{TRAIN} --prometheus-port 9000", 'prometheus_port is for "prometheus" in track, got 9000'),
    Row(f"{TRAIN} --track prometheus --prometheus-port 99999", "prometheus_port must be at most 65535, got 99999"),
    # runs to compare and models to measure
    Row("report --output {}/new.html", "report needs the folder of at least one run: dilated-attention report runs/"),
    Row("report {}/nothing --output {}/new.html", "{}/nothing is no run folder; name the --output of a `train`"),
    Row("report {}/taken --output {}/new.html", "training.json does not exist; name the --output of a `train` or"),
    Row("report {}/finished {}/bad-settings --output {}/new.html", "training.json is damaged, it is no JSON"),
    Row("report {}/finished --output {}/file", "file exists; nothing in it was changed. Name a new file, for example"),
    Row("report {}/finished --output {}/no/new.html", "there is no folder {}/no; make it first"),
    Row("report {}/finished --output {}/new.html", "the report needs plotly, not installed here", _uninstall("plotly")),
    Row("eval", "required"),
    Row("eval {}/nothing", "{}/nothing: there is no such folder (looked for from"),
    Row("eval {}/taken", "{}/taken: there is no config.json in that folder; name a folder with config.json and"),
    Row("eval {}/file", "{}/file: it is a file, not a folder; name a folder with config.json and weights"),
    Row("eval {}/finished --lengths 4", "lengths must be different numbers of at least 16 tokens, got [4]"),
    Row("eval {}/finished --lengths 64 64", "lengths must be different numbers of at least 16 tokens, got [64, 64]"),
    Row("eval {}/finished --windows 0", "windows must be at least 1, got 0"),
    Row("eval {}/finished --lengths 1000000", "fewer than one window of --lengths 1000000; give more text, or"),
    Row("eval {}/finished --output {}/old.png", "--output {}/old.png: the figures are JSON, for example {}/old.json"),
    Row("eval {}/finished --output {}/dry.json", "dry.json exists; nothing in it was changed. Name a new file, for"),
    Row("eval {}/finished --output {}/old.json", "old.png exists; nothing in it was changed. Name a new file, for"),
    Row("eval {}/flipped", "its bytes are not those that were written (SHA-256); "),
    Row("eval {}/unbegun", "holds no trained model: neither model.safetensors nor a checkpoint is in it"),
    Row("eval {}/finished --device cuda", "PyTorch finds no CUDA device here", _take_cuda_away),
]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Texts good and bad, a run that is finished, one that was stopped, and damaged copies of both."""
    world = tmp_path_factory.mktemp("world")
    texts = write_texts(world / "texts")
    settings = tiny_settings(texts, steps=3, log_steps=1)
    train(settings, world / "finished", quiet())
    with pytest.MonkeyPatch.context() as monkeypatch:
        stopped_run(monkeypatch, settings, world / "stopped", 1)

    bad = world / "bad"
    (bad / "textless").mkdir(parents=True)
    (bad / "textless" / "image.png").write_bytes(b"\x89PNG\0\0")
    (bad / "empty.txt").touch()
    (bad / "odd").mkdir()
    (bad / "odd" / "empty").touch()
    os.mkfifo(bad / "odd" / "a-pipe")
    os.mkfifo(bad / "pipe")
    (bad / "binary.bin").write_bytes(bytes(range(256)) * 9)
    (bad / "latin.txt").write_bytes("é".encode("latin-1") * 999)
    (bad / "short.txt").write_text("short\n" * 11)
    (bad / "good.jsonl").write_text('{"text": "good"}\n')
    (bad / "cut.jsonl").write_text('{"text": "good"}\n{\n')
    (bad / "blank.jsonl").write_text('{"text": ""}\n')
    (bad / "bad.parquet").write_bytes(b"PAR1" * 9)
    (bad / "saved").mkdir()
    (bad / "saved" / "state.json").write_text("{}")
    for split in ("train", "test"):
        (bad / "splits" / split).mkdir(parents=True)
        (bad / "splits" / split / "state.json").write_text("{}")
    (bad / "splits" / "dataset_dict.json").write_text("{}")
    tokenizer = train_tokenizer([path.read_bytes() for path in sorted(texts.iterdir())], 300)
    (world / "tokenizer.json").write_text(tokenizer.text)
    over_tokens = dataclasses.replace(
        settings, tokenizer=world / "tokenizer.json", model=dataclasses.replace(settings.model, vocab_size=300)
    )
    with pytest.MonkeyPatch.context() as monkeypatch:
        stopped_run(monkeypatch, over_tokens, world / "tokens", 1)
    (world / "taken").mkdir()
    (world / "taken" / "notes.txt").write_text("precious")
    (world / "file").write_text("precious")
    (world / "old.png").write_bytes(b"precious")
    (world / "reports").mkdir()
    (world / "reports" / "report.txt").write_text("precious")

    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=256, max_position_embeddings=32, **sizes)).save_pretrained(world / "short")
    (world / "extension").mkdir()
    (world / "extension" / "training.json").write_text(sealed({"kind": "extension", "settings": {"model": "x"}}))

    def copy(source: str, name: str) -> Path:
        return Path(shutil.copytree(world / source, world / name))

    def cut(path: Path) -> None:
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])

    def flip(path: Path) -> None:
        whole = bytearray(path.read_bytes())
        whole[-3] ^= 4
        path.write_bytes(whole)

    def change(path: Path, **values: Any) -> None:
        path.write_text(json.dumps(json.loads(path.read_text()) | values))

    cut(copy("tokens", "other-tokenizer") / "tokenizer.json")
    (world / "tokens" / "tokenizer.json").unlink()
    shutil.rmtree(copy("stopped", "unbegun") / "checkpoint-2")
    cut(copy("stopped", "truncated") / "checkpoint-2" / "model.safetensors")
    cut(copy("stopped", "cut-optimizer") / "checkpoint-2" / "optimizer.pt")
    (copy("stopped", "no-scheduler") / "checkpoint-2" / "scheduler.pt").unlink()
    change(copy("stopped", "changed-config") / "checkpoint-2" / "config.json", rope_theta=77.0)
    change(copy("stopped", "other-model") / "checkpoint-2" / "config.json", rope_theta=77.0)
    seal_again(world / "other-model" / "checkpoint-2")
    copy("stopped", "other-run")
    change_sealed(world / "other-run" / "training.json", run="00")
    (copy("stopped", "no-manifest") / "checkpoint-2" / "manifest.json").unlink()
    change(copy("stopped", "changed-settings") / "training.json", processes=2)
    unsealed = json.loads((copy("stopped", "earlier") / "training.json").read_text())
    del unsealed["sha256"]
    (world / "earlier" / "training.json").write_text(json.dumps(unsealed))
    cut(copy("stopped", "bad-settings") / "training.json")
    record = json.loads((world / "stopped" / "training.json").read_text())
    copy("stopped", "other-text")
    change_sealed(world / "other-text" / "training.json", corpus={**record["corpus"], "training_bytes": 1})
    cut(copy("finished", "cut-weights") / "model.safetensors")
    (copy("finished", "no-config") / "config.json").unlink()
    flip(copy("finished", "flipped") / "model.safetensors")
    flip(copy("stopped", "flipped-checkpoint") / "checkpoint-2" / "model.safetensors")
    # Folders without a manifest, as save_pretrained makes them.
    for name, values in (("foreign", {"model_type": "gpt2"}), ("unfit", {"embed_dim": 64})):
        (copy("finished", name) / "manifest.json").unlink()
        change(world / name / "config.json", **values)

    name = SHAPES["three"].case(rows=8192).name
    no_limits = {"limits": None, "limit_seconds": 1.0}
    elsewhere = {"format": FORMAT, "dry_run": False, "machine": {"processor": "another"}}
    for file, values in (
        ("dry.json", {"dry_run": True}),
        ("other-cases.json", {"rows": [{"name": "a call", "contestant": "x", "samples": [1.0], **no_limits}]}),
        ("other-machine.json", {"rows": [{"name": name, "contestant": "x", "samples": [1.0], **no_limits}]}),
    ):
        (world / file).write_text(json.dumps(elsewhere | values))
    return world


def _state(folder: Path) -> dict[str, str]:
    return {
        str(path): hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "folder"
        for path in folder.rglob("*")
    }


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.line)
def test_a_wrong_command_line_says_what_to_do_and_changes_nothing(
    row: Row, world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def forbidden(*run: Any, **options: Any) -> None:
        raise AssertionError("the run began")

    before = _state(world)
    with monkeypatch.context() as patch:
        patch.chdir(tmp_path)
        patch.setattr(training_run, "_go", forbidden)
        patch.setattr(bench_run, "_time_cases", forbidden)
        patch.setattr(profiling, "profile", forbidden)
        row.machine(patch)
        with pytest.raises(SystemExit) as left:
            main(row.line.replace("{}", str(world)).split())
    captured = capsys.readouterr()
    said = " ".join(captured.err.replace("│", " ").split())
    assert left.value.code == 2
    assert row.message.replace("{}", str(world)) in said
    assert captured.out == ""
    assert _state(world) == before
    assert not any(tmp_path.iterdir())


def test_the_folder_that_one_stands_in_is_refused_with_a_name_beside_it(
    world: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(world / "taken")
    for command in (
        "train --preset tiny --data ../texts",
        "extend --model ../short --data ../texts",
        "bench",
        "profile",
    ):
        with pytest.raises(SystemExit) as left:
            main([*command.split(), "--output", "."])
        assert left.value.code == 2
        said = " ".join(capsys.readouterr().err.split())
        assert "--output . exists and is not empty; nothing in it was changed." in said
        assert f"for example --output {world}/taken-2" in said
