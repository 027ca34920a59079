"""Asking people: the store of their answers, the exchange with other tools, the page in the browser."""

__all__ = []
