#!/usr/bin/env bash
# sbatch examples/cluster/slurm.sh
#
# The run folder must lie on a file system that all nodes share. Before the time of the job is over the run saves a
# checkpoint, and the job queues itself again; so it does after a node has failed. Started again, it goes on.
#SBATCH --job-name=longnet
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=B:TERM@300
set -uo pipefail

CONFIG=${CONFIG:-examples/cluster/run.toml}
OUTPUT=${OUTPUT:-/shared/runs/longnet}
PROCESSES=${PROCESSES:-8} # on every node, one for each GPU
PORT=${PORT:-29400}

head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
# Without it a restart can find what the processes before it left in torchrun's own store.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
# torchrun kills processes that it told to end after 30 s, which a step and its checkpoint may take longer than.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=270

srun torchrun --nnodes "$SLURM_NNODES" --nproc-per-node "$PROCESSES" --max-restarts 3 \
    --rdzv-backend c10d --rdzv-endpoint "$head:$PORT" --rdzv-id "$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}" \
    -m dilated_attention_pytorch train --config "$CONFIG" --output "$OUTPUT" --resume auto &
step=$!

is_over=false
end_in_time() {
    is_over=true
    kill -TERM "$step" # srun hands it to torchrun, and torchrun to the processes, which save a checkpoint
}
trap end_in_time TERM

wait "$step"
status=$?
if $is_over; then
    wait "$step" # the first one ended with the signal, not with the step
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
