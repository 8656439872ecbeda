"""Execution of partials: operand views, masks, merging, forward and backward. Arguments are not checked here."""
