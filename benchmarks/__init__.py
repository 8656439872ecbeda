"""Studies of this repository, one per figure of its README, and results/; the runner is dilated-attention bench."""
