"""The stages of a start without answers, one function per file: features first, then clusters."""

__all__: list[str] = []
