"""What several methods share: preparation, training on pairs, cluster heads."""

__all__: list[str] = []
