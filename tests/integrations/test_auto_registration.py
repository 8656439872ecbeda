"""A saved model loads in a new process that has imported this package, before transformers or after it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from dilated_attention_pytorch import LongNetConfig, LongNetForCausalLM, set_pattern
from dilated_attention_pytorch.models import LongNetCausalLMConfig
from integrations.tiny_models import PATTERN, draw, tiny

TOKENS = draw(1, 50)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama under a pattern and a LongNet, saved, each with the logits that it has."""
    folder = tmp_path_factory.mktemp("saved")
    config = LongNetConfig(embed_dim=16, num_layers=1, num_heads=2, segment_lengths=[8], dilation_rates=[2])
    models = {
        "llama": set_pattern(tiny("llama"), PATTERN).float().eval(),
        "longnet": LongNetForCausalLM(LongNetCausalLMConfig.from_longnet_config(config)).eval(),
    }
    for name, model in models.items():
        model.save_pretrained(folder / name)
        with torch.no_grad():
            torch.save((TOKENS, model(TOKENS).logits), folder / name / "logits.pt")
    return folder


LOAD = """
import sys
from pathlib import Path
for folder in Path(sys.argv[1]).iterdir():
    tokens, logits = torch.load(folder / "logits.pt")
    with torch.no_grad():
        assert torch.equal(AutoModelForCausalLM.from_pretrained(folder).eval()(tokens).logits, logits), folder
"""


@pytest.mark.parametrize(
    "imports",
    [
        "from dilated_attention_pytorch import attend\nfrom transformers import AutoModelForCausalLM",
        "from transformers import AutoModelForCausalLM\nimport dilated_attention_pytorch",
        "import dilated_attention_pytorch\nfrom transformers import LlamaForCausalLM, AutoModelForCausalLM",
        # A program that asks whether the module is there, before it imports it.
        "import dilated_attention_pytorch\nfrom importlib.util import find_spec\n"
        "assert find_spec('transformers.models.auto.modeling_auto')\nfrom transformers import AutoModelForCausalLM",
    ],
)
def test_a_saved_model_loads_after_the_imports_in_any_order(folder: Path, imports: str) -> None:
    program = f"import torch\n{imports}\n{LOAD}"
    subprocess.run([sys.executable, "-W", "error::UserWarning", "-c", program, str(folder)], check=True)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # PEFT reads it
def test_an_adapter_of_a_saved_model_loads_with_the_pattern(folder: Path, tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    model = AutoModelForCausalLM.from_pretrained(folder / "llama")
    names = ["q_proj", "v_proj"]
    adapted = get_peft_model(model, LoraConfig(target_modules=names, task_type="CAUSAL_LM", init_lora_weights=False))
    adapted.save_pretrained(tmp_path / "adapter")
    with torch.no_grad():
        torch.save((TOKENS, adapted.eval()(TOKENS).logits), tmp_path / "adapter" / "logits.pt")
    load = LOAD.replace("AutoModelForCausalLM", "AutoPeftModelForCausalLM")
    program = f"import torch\nimport dilated_attention_pytorch\nfrom peft import AutoPeftModelForCausalLM\n{load}"
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=True)


def test_a_transformers_that_is_too_old_imports_as_without_this_package(tmp_path: Path) -> None:
    for name in ("", "models", "models/auto"):
        (tmp_path / "transformers" / name).mkdir(exist_ok=True)
        (tmp_path / "transformers" / name / "__init__.py").touch()
    (tmp_path / "transformers/models/auto/modeling_auto.py").write_text("AutoModel = 7")
    program = (
        f"import sys\nsys.path.insert(0, {str(tmp_path)!r})\n"
        "import dilated_attention_pytorch\n"
        "from transformers.models.auto.modeling_auto import AutoModel\n"
        "assert AutoModel == 7\n"
        "try: dilated_attention_pytorch.set_pattern('gpt2', 'local_window(3)')\n"
        "except ImportError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert "transformers is installed, but importing it fails" in done.stdout
    assert "transformers>=5.6" in done.stdout
