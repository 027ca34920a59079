"""The one exception for what a user can fix."""

from pathlib import Path
from typing import Self


class InputError(ValueError):
    """Bad input: what is wrong, where, and how to fix it, where these are known.

    As text it is one line, `place: problem; fix`. The command line prints it and exits with 2.
    """

    def __init__(self, problem: str, place: Path | str = "", fix: str = "") -> None:
        self.problem, self.place, self.fix = problem, str(place), fix
        super().__init__(self.problem, self.place, self.fix)  # what a pickle keeps

    def __str__(self) -> str:
        return "; ".join(filter(None, [": ".join(filter(None, [self.place, self.problem])), self.fix]))

    def at(self, place: Path | str) -> Self:
        """The same error with a place in front of the one that it has."""
        return type(self)(self.problem, ": ".join(filter(None, [str(place), self.place])), self.fix)


def one_line(error: BaseException) -> str:
    """What an exception says, without line breaks; never empty."""
    return " ".join(str(error).split()) or type(error).__name__
