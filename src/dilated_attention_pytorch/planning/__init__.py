"""Where: a pattern and lengths become the geometry of partials. Cached, no tensors' values. Nothing of it is public."""

__all__: list[str] = []
