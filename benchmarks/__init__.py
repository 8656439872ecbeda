"""Studies of this repository, each a figure of its README, and results/; the runner is dilated-attention bench."""
