"""Contradictions between answers, against the constraints' own closure as the oracle."""

import time

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from constraintmatch.annotate.database import Contradiction, LinkGraph
from constraintmatch.constraints.constraint_set import Constraints
from constraintmatch.questions.answers import NONE, UNSURE, Answer, Question, links_of

N_IMAGES = 8


@st.composite
def answers(draw: st.DrawFn) -> Answer:
    images = draw(st.lists(st.integers(0, N_IMAGES - 1), min_size=2, max_size=4, unique=True))
    choice = draw(st.integers(UNSURE, len(images) - 2))
    return Answer(Question(images[0], tuple(images[1:])), choice)


def graph_of(said: dict[int, Answer]) -> LinkGraph:
    graph = LinkGraph()
    for number, answer in said.items():
        graph.add(number, answer)
    return graph


def assert_proves(clash: Contradiction, said: dict[int, Answer]) -> None:
    """Each step of the way is a must-link of the answer it names, and the ends are a cannot-link of `apart`."""

    def links(number: int, wanted: int) -> set[frozenset[int]]:
        return {frozenset((i, j)) for i, j, link in zip(*links_of([said[number]]), strict=True) if link == wanted}

    for number, ends in zip(clash.together, zip(clash.images, clash.images[1:], strict=False), strict=True):
        assert frozenset(ends) in links(number, 1)
    assert frozenset((clash.images[0], clash.images[-1])) in links(clash.apart, 0)


def conflict_pairs(said: dict[int, Answer]) -> set[frozenset[int]]:
    """Of all links but those that only follow from the choice of another image which is of the same kind."""
    left, right, link = links_of(said.values())
    chosen = [
        a.choice not in (NONE, at) for a in said.values() if a.choice != UNSURE for at in range(len(a.question.shown))
    ]
    found = Constraints.from_arrays(left, right, link, n_images=N_IMAGES)
    component = found.components()
    found = found.take(~(np.array(chosen, bool) & (component[left] == component[right])))
    rows = found.conflict_rows()
    return {frozenset(pair) for pair in zip(found.left[rows].tolist(), found.right[rows].tolist(), strict=True)}


def ends(clashes: list[Contradiction]) -> set[frozenset[int]]:
    return {frozenset((clash.images[0], clash.images[-1])) for clash in clashes}


@settings(max_examples=50, deadline=None)
@given(st.lists(answers() | st.integers(0, 9), max_size=14))
def test_the_clashes_are_the_conflicts_of_the_constraints_while_answers_come_and_go(steps: list[Answer | int]) -> None:
    said: dict[int, Answer] = {}
    graph = LinkGraph()
    for number, step in enumerate(steps):
        if isinstance(step, Answer):
            said[number] = step
            graph.add(number, step)
        elif said:
            gone = list(said)[step % len(said)]
            graph.remove(gone, said.pop(gone))
        assert graph.n_contradictions() == len(conflict_pairs(said))
    clashes = graph.contradictions(limit=None)
    assert ends(clashes) == conflict_pairs(said)
    assert [clash.apart for clash in clashes] == sorted(clash.apart for clash in clashes)
    for clash in clashes:
        assert_proves(clash, said)


@settings(max_examples=50, deadline=None)
@given(st.lists(answers(), max_size=10), answers())
def test_an_answer_clashes_exactly_when_it_brings_a_contradiction(before: list[Answer], last: Answer) -> None:
    said = dict(enumerate(before, start=1))
    if conflict_pairs(said):
        return
    said[99] = last
    found = graph_of(said).contradictions_of(99, last)
    assert bool(found) == bool(conflict_pairs(said))
    for clash in found:
        assert_proves(clash, said)
        assert 99 in (clash.apart, *clash.together)


@settings(max_examples=50, deadline=None)
@given(st.lists(answers(), max_size=10), answers())
def test_a_question_is_settled_exactly_when_the_closure_answers_it(before: list[Answer], asked: Answer) -> None:
    said = dict(enumerate(before, start=1))
    if conflict_pairs(said):
        return
    question = asked.question
    closed = stated(before).close()
    links = {frozenset((i, j)): link for i, j, link in zip(closed.left, closed.right, closed.link, strict=True)}
    known = [links.get(frozenset((question.image, shown))) for shown in question.shown]
    assert graph_of(said).settles(question) == (1 in known or set(known) == {0})


def stated(said: list[Answer]) -> Constraints:
    """What was said in so many words: same as the chosen one, different from all."""
    asked = [(answer.choice, answer.question.image, answer.question.shown) for answer in said]
    must = [(image, shown[choice]) for choice, image, shown in asked if choice >= 0]
    cannot = [(image, other) for choice, image, shown in asked if choice == NONE for other in shown]
    return Constraints.from_lists(n_images=N_IMAGES, must_link=must, cannot_link=cannot)


def test_the_shortest_proof_is_given() -> None:
    said = {1: pair(0, 1, 0), 2: pair(1, 2, 0), 3: pair(2, 3, 0), 4: pair(0, 3, 0), 5: pair(3, 4, 0)}
    said[6] = pair(0, 4, NONE)
    assert graph_of(said).contradictions_of(6, said[6]) == [Contradiction((0, 3, 4), (4, 5), 6)]


def test_a_must_link_is_shown_the_earlier_answer_that_keeps_the_groups_apart() -> None:
    said = {1: pair(0, 1, 0), 2: pair(2, 3, 0), 3: pair(1, 3, NONE), 4: pair(0, 2, 0)}
    (clash,) = graph_of(said).contradictions_of(4, said[4])
    assert clash == Contradiction((1, 0, 2, 3), (1, 4, 2), 3)


def test_who_picks_one_of_two_images_that_both_fit_contradicts_nobody() -> None:
    said = {1: pair(1, 2, 0), 2: Answer(Question(0, (1, 2)), 0)}
    graph = graph_of(said)
    assert graph.contradictions_of(2, said[2]) == [] == graph.contradictions()


def test_none_of_these_is_held_against_each_image_that_was_shown() -> None:
    said = {1: pair(0, 1, 0), 2: pair(1, 2, 0), 3: Answer(Question(0, (1, 2, 3)), NONE)}
    assert graph_of(said).contradictions_of(3, said[3]) == [
        Contradiction((0, 1), (1,), 3),
        Contradiction((0, 1, 2), (1, 2), 3),
    ]


def test_unsure_says_nothing() -> None:
    said = {1: pair(0, 1, 0), 2: pair(0, 1, UNSURE)}
    graph = graph_of(said)
    assert graph.contradictions_of(2, said[2]) == [] == graph.contradictions()


def test_an_answer_is_checked_in_milliseconds_among_ten_thousand() -> None:
    rng = np.random.Generator(np.random.Philox(0))
    labels = rng.integers(0, 10, 10_000)
    exemplars = [int(np.flatnonzero(labels == label)[0]) for label in range(10)]
    graph, times = LinkGraph(), []
    for number, image in enumerate(np.setdiff1d(np.arange(10_000), exemplars).tolist()):
        shown = tuple(exemplars[label] for label in {int(labels[image]), *rng.integers(0, 10, 4).tolist()})
        answer = Answer(Question(image, shown), shown.index(exemplars[labels[image]]))
        graph.add(number, answer)
        if number > 9_980:
            start = time.perf_counter()
            assert graph.contradictions_of(number, answer) == []
            times.append(time.perf_counter() - start)
    assert np.median(times) < 0.02


def pair(left: int, right: int, choice: int) -> Answer:
    return Answer(Question(left, (right,)), choice)
