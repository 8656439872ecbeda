"""The command ``dilated-attention generate``."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import tyro

from dilated_attention_pytorch.training import RunError
from dilated_attention_pytorch.training.eight_bit import Weights, import_torchao, make_small
from dilated_attention_pytorch.training.run_settings import DeviceChoice
from dilated_attention_pytorch.training.settings import SampleSettings

if TYPE_CHECKING:
    from dilated_attention_pytorch.models import LongNetLM
    from dilated_attention_pytorch.training.data.tokenizer import Tokenizer


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
    """Run folder that `train` wrote; of an unfinished run, its last checkpoint."""
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
        from dilated_attention_pytorch.training.data.run_data import tokenizer_of
        from dilated_attention_pytorch.training.trained_model import load_model, model_folder

        preflight.check_packages("generating")
        device = choose_device(self.device)
        if self.weight_format != "stored":
            import_torchao(f"--weight-format {self.weight_format}")
        folder, left = model_folder(self.run)
        for name, reason in left.items():
            print(f"dilated-attention: {name} is skipped, {folder.name} is used instead: {reason}", file=sys.stderr)
        prompt = self.prompt
        is_dialogue = prompt is None and sys.stdin.isatty()
        if prompt is None and not is_dialogue:
            prompt = _standard_input()
        model = load_model(folder).model.to(device)
        make_small(model, self.weight_format)
        tokenizer = tokenizer_of(self.run, model.config.vocab_size)
        if prompt is not None:
            self._write(model, tokenizer, prompt)
            return
        print("Type a prompt and Enter; Ctrl-C stops a text, Ctrl-D ends.")
        while True:
            try:
                prompt = input("> ")
            except EOFError:
                print()
                return
            try:
                self._write(model, tokenizer, prompt)
            except KeyboardInterrupt:
                print()

    def _write(self, model: LongNetLM, tokenizer: Tokenizer, prompt: str) -> None:
        from dilated_attention_pytorch.training.trained_model import sample_text

        sys.stdout.write(prompt)
        sys.stdout.flush()
        for piece in sample_text(model, prompt, self, tokenizer):
            sys.stdout.write(piece)
            sys.stdout.flush()
        sys.stdout.write("\n")


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
