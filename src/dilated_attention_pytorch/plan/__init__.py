"""From a pattern and lengths to the geometry of partials: cached, independent of tensor values. Nothing is public."""

__all__: list[str] = []
