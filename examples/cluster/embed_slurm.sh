#!/usr/bin/env bash
# sbatch examples/cluster/embed_slurm.sh
#
# Every task of the array has one GPU. It begins with a part of the slides, and then helps with the others' parts. A task
# that failed or was preempted can be queued again: finished files stay, and what it had claimed another task embeds.
# FEATURES, CHECKPOINT and OUTPUT must lie on a file system that all nodes share.
#SBATCH --job-name=embed
#SBATCH --array=1-16
#SBATCH --gpus=1
#SBATCH --cpus-per-task=8
#SBATCH --time=04:00:00
#SBATCH --requeue
set -euo pipefail

FEATURES=${FEATURES:-/shared/features_gigapath}
CHECKPOINT=${CHECKPOINT:-/shared/slide_encoder.pth}
OUTPUT=${OUTPUT:-/shared/embeddings}

dilated-attention embed "$FEATURES" --checkpoint "$CHECKPOINT" --output "$OUTPUT" "$@"
