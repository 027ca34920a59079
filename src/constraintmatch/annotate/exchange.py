"""Answers from and to files: the pairs file both ways, and Label Studio's export of a two-image choice."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from constraintmatch.annotate.label_studio import read_label_studio
from constraintmatch.annotate.records import Given, annotator_name
from constraintmatch.annotate.store import Store
from constraintmatch.answers import NONE, UNSURE, Answer, Question, links_of
from constraintmatch.constraints import Constraints
from constraintmatch.errors import InputError
from constraintmatch.pairs_file import read_pairs

__all__ = ["Exported", "Imported", "Said", "export_pairs", "import_answers", "is_label_studio", "read_answers"]

_NOBODY = "unknown"  # who answered where a file does not say


@dataclass(frozen=True)
class Exported:
    """What a pairs file got, and what it did not."""

    n_pairs: int
    n_answers: int
    n_unsure: int
    n_set_aside: int

    def describe(self) -> str:
        """One sentence."""
        left_out = [(self.n_unsure, "unsure"), (self.n_set_aside, "set aside")]
        without = ", ".join(f"{n:,} {what}" for n, what in left_out if n)
        return f"{self.n_pairs:,} pairs from {self.n_answers:,} answers" + (
            f" (left out: {without})" if without else ""
        )


@dataclass(frozen=True)
class Said:
    """The answers in a file, checked and not stored yet, and how many were left out."""

    file: str
    given: list[Given]
    n_left_out: int


@dataclass(frozen=True)
class Imported:
    """What became of the answers in a file."""

    n_new: int
    n_known: int
    n_left_out: int
    n_contradictions: int

    def describe(self) -> str:
        """One sentence."""
        more = [
            (self.n_known, "known already"),
            (self.n_left_out, "left out (skipped, soft or without weight)"),
            (self.n_contradictions, "contradictions in the store now; settle them on the page"),
        ]
        return ", ".join([f"{self.n_new:,} answers imported", *(f"{n:,} {what}" for n, what in more if n)])


def export_pairs(store: Store, path: Path | str) -> Exported:
    """Write what the answers say as a pairs file, with annotator and time; unsure ones say nothing.

    A "which of these?" answer makes a pair for each image shown, but for those beside the chosen one that other answers
    join to it. Contradictions are written as they stand: training asks what to do with them.
    """
    rows = [row for row in store.rows() if not row.withdrawn]
    here = [(row, row.answer) for row in rows if row.answer is not None]
    told = [(row, answer) for row, answer in here if answer.choice != UNSURE]
    source = [row for row, answer in told for _ in answer.question.shown]
    left, right, link = links_of(answer for _, answer in told)
    pairs = Constraints.from_arrays(
        left,
        right,
        link,
        n_images=len(store.image_names),
        weight=[row.weight for row in source],
        annotator=[row.annotator for row in source],
        time=[row.time for row in source],
    )
    # who chooses one image does not say that the others shown are different: it only follows if no two are of a kind
    follows = [answer.choice not in (NONE, at) for _, answer in told for at in range(len(answer.question.shown))]
    component = pairs.components()
    pairs = pairs.take(~(np.array(follows, bool) & (component[left] == component[right])))
    pairs.write(path, names=store.image_names)
    return Exported(len(pairs), len(told), len(here) - len(told), len(rows) - len(here))


def read_answers(
    path: Path | str,
    names: Sequence[str],
    *,
    columns: str | None = None,
    same: str | None = None,
    different: str | None = None,
) -> Said:
    """The answers of a file about images with these names: Label Studio's when it ends in .json, else a pairs file.

    `columns` names those of a pairs file; `same` and `different` are what Label Studio's choices are called where they
    are not the usual words. Whatever would be refused is refused here, before there is a database.
    """
    path = Path(path)
    if is_label_studio(path):
        given, n_left_out = read_label_studio(path, names, same=same, different=different)
    else:
        given, n_left_out = _read_pairs_file(path, names, columns)
    try:
        for one in given:
            annotator_name(one.annotator)
    except InputError as error:
        raise InputError(f"{path}: {error}") from None
    return Said(path.name, given, n_left_out)


def is_label_studio(path: Path) -> bool:
    """Whether a file's name says that it is an export of Label Studio."""
    return path.suffix.lower() == ".json"


def _read_pairs_file(path: Path, names: Sequence[str], columns: str | None) -> tuple[list[Given], int]:
    """Pairs as answers to pair questions; those with a link in between or with weight 0 are left out and counted."""
    table = read_pairs(path, names=names, columns=columns)
    said = zip(table.left.tolist(), table.right.tolist(), table.link.tolist(), table.weight.tolist(), strict=True)
    annotators, times = table.annotator or (), table.time or ()
    given = [
        Given(
            Answer(Question(left, (right,)), 0 if link == 1 else NONE),
            annotators[at].strip() or _NOBODY if annotators else _NOBODY,
            times[at].strip() if times else "",
            weight=weight,
        )
        for at, (left, right, link, weight) in enumerate(said)
        if link in (0, 1) and weight > 0
    ]
    return given, len(table.left) - len(given) + table.ignored_self_links


def import_answers(store: Store, said: Said) -> Imported:
    """Take the answers of a file into the database, all of them or none; those it knows are counted."""
    taken = store.take_in(said.given, origin=said.file)
    return Imported(taken.n_new, taken.n_known, said.n_left_out, store.n_clashes())
