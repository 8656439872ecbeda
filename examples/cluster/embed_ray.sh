#!/usr/bin/env bash
# sbatch examples/cluster/embed_ray.sh
#
# Starts a Ray cluster on the nodes of the job, embeds on it, and ends it. A worker that dies is replaced; when the job is
# queued again, it embeds what is missing. FEATURES, CHECKPOINT and OUTPUT must lie on a file system that all nodes share.
# The nodes are the job's alone, as its end stops every Ray process on them.
#SBATCH --job-name=embed
#SBATCH --nodes=4
#SBATCH --exclusive
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=04:00:00
#SBATCH --requeue
set -euo pipefail

FEATURES=${FEATURES:-/shared/features_gigapath}
CHECKPOINT=${CHECKPOINT:-/shared/slide_encoder.pth}
OUTPUT=${OUTPUT:-/shared/embeddings}
HEAD=${HEAD:-$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1):6379}

# Whoever reaches the ports of a Ray cluster can run programs on it, unless it has a token. The home folder is shared.
export RAY_AUTH_MODE=token
ray get-auth-token --generate > /dev/null

srun ray symmetric-run --address "$HEAD" --min-nodes "$SLURM_NNODES" -- \
    dilated-attention embed "$FEATURES" --checkpoint "$CHECKPOINT" --output "$OUTPUT" \
    --engine ray --ray-address "$HEAD" "$@"
