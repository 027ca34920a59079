"""The one exception for what a person can mend."""

__all__ = ["InputError"]


class InputError(ValueError):
    """Bad input: one line that names the place and the mend; the command line prints it and exits with 2."""
