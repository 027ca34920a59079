"""Two groups become one kind only if two answers say so: one may be wrong. Later answers outvote a wrong one."""

import numpy as np
import pytest

from constraintmatch.constraints.constraint_set import Constraints
from constraintmatch.questions.answers import (
    NONE,
    Answer,
    Question,
    confirm_merges,
    count_votes,
    implied_groups,
    votes_of,
)


def stars(*centres: int, size: int = 3) -> list[tuple[int, int]]:
    """Must-links of each centre with the images after it: groups of this size."""
    return [(centre, centre + step) for centre in centres for step in range(1, size)]


def confirmed(pairs: list[tuple[int, int]]) -> list[tuple[int, int]]:
    left, right = zip(*pairs, strict=True)
    kept = confirm_merges(Constraints.from_arrays(left, right, [1.0] * len(pairs), n_images=30))
    return list(zip(kept.left.tolist(), kept.right.tolist(), strict=True))


def test_one_answer_does_not_merge_two_groups_of_three_and_a_second_one_does() -> None:
    groups = stars(0, 10)
    assert confirmed([*groups, (1, 11)]) == groups
    assert confirmed([*groups, (1, 11), (2, 10)]) == [*groups, (1, 11), (2, 10)]
    assert confirmed([*groups, (1, 11), (20, 21), (0, 20)]) == [*groups, (20, 21), (0, 20)]  # says nothing of them


def test_one_answer_is_enough_for_an_image_and_for_a_pair() -> None:
    pairs = [*stars(0), (10, 11), (0, 20), (2, 11), (5, 6), (6, 7), (7, 20)]
    assert confirmed(pairs) == pairs[:-1]  # the last one joins two groups of three or more
    chain = [(step, step + 1) for step in range(9)]
    assert confirmed(chain) == chain


def test_cannot_links_stay() -> None:
    said = Constraints.from_lists(n_images=9, must_link=[], cannot_link=[(0, 1), (3, 4)])
    assert confirm_merges(said).n_cannot_links == 2


def same(image: int, *shown: int) -> Answer:
    return Answer(Question(image, shown), 0)


def different(image: int, *shown: int) -> Answer:
    return Answer(Question(image, shown), NONE)


# Images 0 to 4 and 10 to 14 are two groups; a wrong answer kept the first image of the second apart
TWICE = [*(same(image, 0) for image in range(1, 5)), different(10, 0), *(same(image, 10) for image in range(11, 15))]


@pytest.mark.parametrize(
    ("later", "joined"),
    [
        ([], False),
        ([same(11, 0)], False),
        ([same(11, 0), same(1, 10)], False),
        ([same(11, 0), same(1, 10), same(12, 0)], True),
        ([same(11, 0), different(12, 0), same(1, 10), same(13, 0)], False),
        ([same(11, 0), different(12, 0), same(1, 10), same(13, 0), same(2, 10)], True),
    ],
)
def test_most_answers_decide_whether_two_groups_are_one(later: list[Answer], joined: bool) -> None:
    group = implied_groups([*TWICE, *later], 20)
    assert (group[4] == group[14]) == joined
    assert len(set(group[[0, 1, 2, 3, 4]])) == len(set(group[[10, 11, 12, 13, 14]])) == 1


def test_a_group_that_gathers_what_was_none_of_another_has_one_vote_against_it() -> None:
    gathered = [one for image in (11, 12, 13) for one in (different(image, 0), same(image, 10))]
    answers = [same(1, 0), same(2, 0), different(10, 0), *gathered]
    component = np.array([0, 0, 0, *range(3, 10), *[10] * 4])
    for more, counts in (([], (0, 1)), ([different(11, 1)], (0, 2)), ([same(11, 1)], (1, 1))):
        pairs, *votes = count_votes(votes_of([*answers, *more], 14), component)
        assert pairs.tolist() == [[0, 10]]
        assert (*votes[0], *votes[1]) == counts


def test_an_image_that_was_called_both_is_in_one_group() -> None:
    answers = [same(1, 0), same(2, 0), same(11, 10), same(12, 10), different(10, 0), same(20, 0), same(20, 10)]
    group = implied_groups(answers, 30)
    assert group[0] != group[10]
    assert group[20] in (group[0], group[10])
