"""Partials carried out: views of operands, masks, the merge, forward and backward. Nothing here checks arguments."""
