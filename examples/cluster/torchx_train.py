"""A TorchX component: ``torchx run --scheduler slurm examples/cluster/torchx_train.py:train --config run.toml ...``.

``--scheduler`` takes whatever TorchX has: slurm, kubernetes, aws_batch, local_cwd and others.
"""

import torchx.specs as specs
from torchx.components import dist


def train(
    config: str,
    output: str,
    nodes: str = "2x8",
    gpu: int = 8,
    memory_mb: int = 512_000,
    image: str = "",
    retries: int = 3,
) -> specs.AppDef:
    """Train a LongNet on several nodes; started again, the run goes on.

    Args:
        config: the TOML file of the run.
        output: the run folder, on a file system that all nodes share.
        nodes: nodes and processes of each, as in 2x8.
        gpu: GPUs of a node.
        memory_mb: memory of a node, in MB.
        image: container with the package in it, for schedulers that take one.
        retries: how often torchrun starts the processes again.
    """
    words = ("train", "--config", config, "--output", output, "--resume", "auto")
    return dist.ddp(
        *words,
        m="dilated_attention_pytorch",
        name="longnet",
        image=image or "dilated-attention-pytorch",
        j=nodes,
        gpu=gpu,
        memMB=memory_mb,
        max_retries=retries,
        env={"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "270"},
    )
