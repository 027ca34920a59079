"""Two groups become one kind only if two answers say so: one may be wrong."""

from constraintmatch.constraints.constraint_set import Constraints
from constraintmatch.questions.answers import confirm_merges


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
