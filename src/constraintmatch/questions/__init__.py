"""Questions and answers: what to ask next, what answers say, rounds of asking, a simulated annotator."""

__all__: list[str] = []
