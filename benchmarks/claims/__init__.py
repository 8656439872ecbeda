"""Every headline figure of the documents of the earlier package of this name: what it would take, what we find."""
