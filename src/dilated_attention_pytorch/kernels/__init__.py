"""How one partial is computed, and which implementation a call gets."""
