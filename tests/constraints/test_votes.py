"""Kinds from pairs of which some are wrong: against all assignments counted one by one, and on simulated answers."""

from itertools import product

import numpy as np
import pytest

from constraintmatch.constraints.constraint_set import Constraints
from constraintmatch.constraints.votes import likely_kinds, pass_messages


@pytest.mark.parametrize("error", [0.02, 0.2])
def test_messages_on_a_tree_give_the_exact_posterior(error: float) -> None:
    rng = np.random.default_rng(0)
    prior = rng.dirichlet(np.ones(3), 5)
    ends, same = np.array([[0, 1, 1, 3], [1, 2, 3, 4]]), np.array([True, False, True, True])
    exact, wrong, total = np.zeros((5, 3)), np.zeros(4), 0.0
    for kinds in product(range(3), repeat=5):
        z = np.array(kinds)
        right = (z[ends[0]] == z[ends[1]]) == same
        likely = prior[np.arange(5), z].prod() * np.where(right, 1 - error, error).prod()
        exact[np.arange(5), z] += likely
        wrong += likely * ~right
        total += likely
    found, doubt, _ = pass_messages(np.log(prior), ends, same, error, np.zeros((2, 4, 3)), 60)
    np.testing.assert_allclose(found, exact / total, atol=1e-6)
    np.testing.assert_allclose(doubt, wrong / total, atol=1e-6)


def test_one_wrong_same_does_not_join_two_groups_that_the_model_tells_apart() -> None:
    beliefs = np.repeat(np.array([[0.9, 0.1], [0.1, 0.9]], np.float32), 5, axis=0)
    must = [(0, i) for i in range(1, 5)] + [(5, i) for i in range(6, 10)]
    pairs = Constraints.from_lists(n_images=10, must_link=[*must, (2, 7)], cannot_link=[(0, 5)])
    rows, kinds = likely_kinds(pairs, beliefs)
    np.testing.assert_array_equal(rows, np.arange(10))
    np.testing.assert_array_equal(kinds.argmax(1), np.repeat([0, 1], 5))


@pytest.mark.parametrize("wrong", [0.0, 0.2])
def test_pairs_and_a_model_together_are_more_often_right_than_the_model(wrong: float) -> None:
    rng = np.random.default_rng(1)
    labels = rng.integers(0, 4, 400)
    seen = np.where(rng.random(400) < 0.75, labels, rng.integers(0, 4, 400))
    beliefs = np.full((400, 4), 0.02, np.float32)
    beliefs[np.arange(400), seen] = 0.94
    centres = np.array([np.flatnonzero((labels == k) & (seen == k))[0] for k in range(4)])
    images = np.setdiff1d(np.arange(400), centres)
    left, right = np.tile(images, 2), np.concatenate([centres[seen[images]], centres[(seen[images] + 1) % 4]])
    link = (labels[left] == labels[right]) ^ (rng.random(len(left)) < wrong)
    rows, kinds = likely_kinds(Constraints.from_arrays(left, right, link.astype(float), n_images=400), beliefs)
    found = (kinds.argmax(1) == labels[rows]).mean()
    assert found > (seen == labels).mean() + (0.015 if wrong else 0.1)
