"""What several methods share: preparation, training on pairs or labels, linear heads, merged clusters."""

__all__: list[str] = []
