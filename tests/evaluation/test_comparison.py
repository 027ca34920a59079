"""Which system to take, and the table that says so."""

from typing import Any

import numpy as np
import pytest

from constraintmatch.constraints.constraint_set import Constraints
from constraintmatch.evaluation.comparison import advise, rank_rows, table_text
from constraintmatch.evaluation.judge import Judge


def row_of(name: str, losses: list[float], **more: Any) -> dict[str, Any]:
    return {"method": name, "error": None, "losses": losses, "seconds": 1.0, "mebibytes": 2.0, **more}


@pytest.fixture
def judge() -> Judge:
    links = np.arange(40) % 2
    return Judge(Constraints.from_arrays(np.arange(40), np.arange(40, 80), links, n_images=80))


def test_labels_decide_where_they_are_known_and_else_held_out_pairs(judge: Judge) -> None:
    good, bad = [0.1] * 40, [0.5] * 40
    rows = [row_of("a", good), row_of("b", bad), {"method": "c", "error": "needs labels"}]
    assert [row["method"] for row in rank_rows(rows, judge)] == ["a", "b", "c"]
    assert advise(rows, judge)[0].startswith("Take a: held-out pairs are likeliest by it (0.100 nats a pair)")
    scored = [row_of("a", good, acc=0.5, nmi=0.5), row_of("b", bad, acc=0.9, nmi=0.9)]
    assert advise(scored, judge)[0].startswith("Take b: it has the best mean of ACC and NMI")


def test_systems_that_the_pairs_cannot_tell_apart_are_named(judge: Judge) -> None:
    noise = np.random.default_rng(0).normal(size=40) * 0.3
    rows = [row_of("a", [0.3] * 40), row_of("b", (0.31 + noise - noise.mean()).tolist()), row_of("c", [0.9] * 40)]
    assert any("cannot tell it from b." in line for line in advise(rows, judge))


def test_where_ours_is_not_first_the_advice_says_by_how_much_and_why(judge: Judge) -> None:
    rows = [
        row_of("constraintmatch", [0.3] * 40, acc=0.9, nmi=0.8, note="kept the start: too few pairs"),
        row_of("cpac", [0.2] * 40, acc=0.95, nmi=0.9),
    ]
    said = " ".join(advise(rows, judge))
    assert "constraintmatch is not first: cpac differs by +5.0% ACC and +10.0% NMI" in said
    assert "constraintmatch kept the start: too few pairs." in said


def test_the_table_fits_eighty_columns_with_long_errors(judge: Judge) -> None:
    rows = [row_of("logistic_regression", [0.1] * 40, acc=1.0, nmi=1.0, ari=1.0, held_out=1.0, kept=1.0)]
    rows.append({"method": "pcog", "error": "word " * 40})
    assert max(map(len, table_text(rows, judge).splitlines())) <= 80
    assert advise([{"method": "pcog", "error": "word"}], judge) == ["No system finished; the rows say why."]


def test_a_table_without_a_finished_row_says_why(judge: Judge) -> None:
    text = table_text([{"method": "k_means", "error": "its process died"}], judge)
    assert "k_means" in text
    assert "its process died" in text
