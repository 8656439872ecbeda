"""Where every published figure comes from: one run, one machine, against something real."""
