"""The stages of a start without answers: features first, then clusters."""

__all__: list[str] = []
