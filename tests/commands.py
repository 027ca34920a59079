"""Run a command as a user does, in this process."""

from typing import Any

from typer.testing import CliRunner

from constraintmatch import cli

__all__ = ["run"]


def run(*words: object, code: int = 0) -> Any:
    """The result of a command that ends with this exit code, and never with a traceback."""
    result = CliRunner().invoke(cli.app, [str(word) for word in words])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == code, result.output
    return result
