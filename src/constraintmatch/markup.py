"""Words and tables for HTML: everything a user named goes through `text`."""

from collections.abc import Sequence
from html import escape

__all__ = ["percent", "plural", "short_number", "table", "text"]


def text(value: object) -> str:
    """Any text made safe for HTML, in content and in attributes; what cannot be printed is shown as its escape."""
    printable = "".join(char if char.isprintable() else ascii(char)[1:-1] for char in str(value))
    return escape(printable)


def plural(count: int, word: str) -> str:
    """1 image, 1,200 images."""
    return f"{count:,} {word}" if count == 1 else f"{count:,} {word}s"


def percent(value: float) -> str:
    """A fraction as 93.1%."""
    return f"{value:.1%}"


def short_number(value: float) -> str:
    """A number with three or four digits that count: 0.0213, 1.204, 15,300."""
    if value == 0 or 1e-4 <= abs(value) < 10:
        return f"{value:.3g}" if abs(value) < 1 else f"{value:.3f}"
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e9 else f"{value:.4g}"


def table(head: Sequence[str], rows: Sequence[Sequence[str]], *, kind: str = "", caption: str = "") -> str:
    """A table of cells that are HTML already; the first of each row names it."""
    top = "".join(f'<th scope="col">{name}</th>' for name in head)
    body = "".join(
        f'<tr><th scope="row">{first}</th>{"".join(f"<td>{cell}</td>" for cell in rest)}</tr>' for first, *rest in rows
    )
    said = f'<caption class="quiet">{caption}</caption>' if caption else ""
    opened = f'<table class="{kind}">' if kind else "<table>"
    return f'<div class="wide">{opened}{said}<thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'
