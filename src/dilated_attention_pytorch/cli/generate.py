"""The command ``dilated-attention generate``."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import tyro

from dilated_attention_pytorch.training import RunError
from dilated_attention_pytorch.training.eight_bit import Weights, import_torchao, make_small
from dilated_attention_pytorch.training.run_settings import DeviceChoice
from dilated_attention_pytorch.training.settings import SampleSettings


@dataclass(kw_only=True, slots=True)
class Generate(SampleSettings):
    """Generate text from a trained run and print it as it is sampled.

    The prompt is treated as the beginning of a file. Memory is bounded in the length of the text: the cache keeps only
    what later tokens can attend to.

        dilated-attention generate runs/mine --prompt "import os"

    A long prompt from a file, continued by the most likely tokens:

        dilated-attention generate runs/mine --temperature 0 --max-new-tokens 200 < chapter.txt
    """

    run: tyro.conf.Positional[Path]
    """Run folder that `train` or `extend` wrote (of an unfinished run, its last checkpoint), or a model that was saved
    with a pattern."""
    prompt: str | None = None
    """Text to continue. Default: standard input, or on a terminal one prompt after the other."""
    device: DeviceChoice = "auto"
    """"auto" takes a CUDA device if there is one."""
    weight_format: Weights = "stored"
    """How the layers' matrices are stored. "int8" or "float8": in 8 bits (torchao). "stored": as in the file."""

    def run_command(self) -> None:
        """Load the model, then write the prompt and its continuation to standard output.

        Raises:
            RunError: the folder holds no loadable model, or the prompt is not text.
        """
        from dilated_attention_pytorch.machine import choose_device
        from dilated_attention_pytorch.training import preflight

        preflight.check_packages("generating")
        device = choose_device(self.device)
        if self.weight_format != "stored":
            import_torchao(f"--weight-format {self.weight_format}")
        prompt = self.prompt
        is_dialogue = prompt is None and sys.stdin.isatty()
        if prompt is None and not is_dialogue:
            prompt = _standard_input()
        continue_text = self._opened(device)
        if prompt is not None:
            continue_text(prompt)
            return
        print("Type a prompt and Enter; Ctrl-C stops a text, Ctrl-D ends.")
        while True:
            try:
                prompt = input("> ")
            except EOFError:
                print()
                return
            try:
                continue_text(prompt)
            except KeyboardInterrupt:
                print()

    def _opened(self, device: str) -> Callable[[str], None]:
        """A function that writes a prompt and its continuation by the model of the folder."""
        from dilated_attention_pytorch.training.extended_model import is_of_transformers, write_text_after

        if is_of_transformers(self.run):
            from dilated_attention_pytorch.training.evaluated_model import open_model

            opened = open_model(str(self.run), device)
            _say_skipped(opened.rejected, opened.weights)
            make_small(opened.model, self.weight_format)

            def continue_text(prompt: str) -> None:
                _write(prompt)
                write_text_after(prompt, opened, self, _write, _say)
                _write("\n")

            return continue_text
        from dilated_attention_pytorch.training.data.run_data import tokenizer_of
        from dilated_attention_pytorch.training.trained_model import load_model, model_folder, sample_text

        folder, left = model_folder(self.run)
        _say_skipped(left, folder.name)
        model = load_model(folder).model.to(device)
        make_small(model, self.weight_format)
        tokenizer = tokenizer_of(self.run, model.config.vocab_size)

        def continue_text_of_longnet(prompt: str) -> None:
            _write(prompt)
            for piece in sample_text(model, prompt, self, tokenizer):
                _write(piece)
            _write("\n")

        return continue_text_of_longnet


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _say(line: str) -> None:
    print(f"dilated-attention: {line}", file=sys.stderr)


def _say_skipped(rejected: Mapping[str, str], used: str) -> None:
    for name, reason in rejected.items():
        _say(f"{name} is skipped, {used} is used instead: {reason}")


def _standard_input() -> str:
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        from dilated_attention_pytorch.training.data.records import describe_compression

        compression = describe_compression(error.object, Path("FILE"))
        if compression is not None:
            raise RunError(f"the prompt on standard input is {compression}") from error
        raise RunError(
            f"the prompt on standard input is not UTF-8 text ({error}); convert it (iconv -f LATIN1 -t UTF-8)"
        ) from error
