"""Markdown as a terminal of any width shows it: tables without bars, wide ones in parts below each other."""

import textwrap
from collections.abc import Iterator, Sequence
from itertools import groupby

__all__ = ["for_terminal"]

_KEYS = ("", "pairs")  # columns that say what a line is: repeated in every part of a table
_BESIDE = ("paper", "diff.")  # columns that mean nothing without the one before
_GAP = "  "
_NARROWEST = 16  # letters of a title that are not broken: ConstraintMatch and a comma

Line = Sequence[str]


def for_terminal(text: str, width: int) -> str:
    """The text in lines of at most `width` letters (numbers are never broken, so 40 or more is safe)."""
    blocks = []
    for is_table, found in groupby(text.splitlines(), lambda line: line.startswith("|")):
        lines = list(found)
        blocks.append(_table(lines, width) if is_table else "\n".join(_prose(lines, width)))
    return "\n".join(blocks)


def _prose(lines: Sequence[str], width: int) -> Iterator[str]:
    for line in lines:
        plain = line.lstrip("#").strip() if line.startswith("#") else line.replace("`", "")
        indent = "  " if plain.startswith("- ") else ""
        yield textwrap.fill(plain, width, subsequent_indent=indent, break_on_hyphens=False)


def _table(lines: Sequence[str], width: int) -> str:
    header, rule, *rows = [[cell.strip().replace("**", "") for cell in line.strip("|").split("|")] for line in lines]
    left = [not cell.endswith(":") for cell in rule]
    parts = [_part([header, *rows], left, columns, width) for columns in _parts(header, rows, width)]
    return "\n\n".join(parts)


def _parts(header: Line, rows: Sequence[Line], width: int) -> Iterator[list[int]]:
    """The columns of each part: the keys, then as many groups of columns as fit beside them."""
    widths = [max(len(line[column]) for line in (header, *rows)) for column in range(len(header))]
    keys = [0, *(column for column in range(1, len(header)) if header[column] in _KEYS)]
    room = width - min(widths[0], _NARROWEST) - sum(len(_GAP) + widths[column] for column in keys[1:])
    part: list[int] = []
    for group in _groups(header, len(keys)):
        if part and sum(len(_GAP) + widths[column] for column in (*part, *group)) > room:
            yield [*keys, *part]
            part = []
        part += group
    yield [*keys, *part]


def _groups(header: Line, first: int) -> list[list[int]]:
    groups: list[list[int]] = []
    for column in range(first, len(header)):
        if groups and header[column] in _BESIDE:
            groups[-1].append(column)
        else:
            groups.append([column])
    return groups


def _part(lines: Sequence[Line], left: Sequence[bool], columns: Sequence[int], width: int) -> str:
    """Some columns of a table; the first one is wrapped to what the others leave."""
    first, *others = columns
    widths = {column: max(len(line[column]) for line in lines) for column in columns}
    room = max(_NARROWEST, width - sum(len(_GAP) + widths[column] for column in others))
    widths[first] = min(widths[first], room)
    drawn = []
    for line in lines:
        title = textwrap.wrap(line[first], widths[first]) or [""]
        cells = [line[c].ljust(widths[c]) if left[c] else line[c].rjust(widths[c]) for c in others]
        drawn += [text.ljust(widths[first]) for text in title[:-1]]
        drawn.append(_GAP.join([title[-1].ljust(widths[first]), *cells]))
    return "\n".join(text.rstrip() for text in drawn)
