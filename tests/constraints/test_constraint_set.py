"""Constraints: in memory, drawn from labels, closed, contradicted, flipped."""

import itertools
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import sparse

from constraintmatch._internal import rng
from constraintmatch._internal.errors import InputError
from constraintmatch.constraints import graph
from constraintmatch.constraints.constraint_set import Constraints

few = settings(max_examples=40, deadline=None)
N = 7


@st.composite
def small_constraints(draw, links=(0.0, 1.0), max_size=12):
    pair = st.tuples(st.integers(0, N - 1), st.integers(0, N - 1)).filter(lambda pair: pair[0] != pair[1])
    rows = draw(st.lists(st.tuples(pair, st.sampled_from(links), st.integers(1, 3)), max_size=max_size))
    left, right = [row[0][0] for row in rows], [row[0][1] for row in rows]
    return Constraints.from_arrays(left, right, [r[1] for r in rows], n_images=N, weight=[r[2] for r in rows])


def same_sets(constraints):
    """Brute force: reachable[i][j] through must-links, by Warshall's closure."""
    reach = np.eye(constraints.n_images, dtype=bool)
    for i, j, link in zip(constraints.left, constraints.right, constraints.link, strict=True):
        if link == 1:
            reach[i, j] = reach[j, i] = True
    for k in range(constraints.n_images):
        reach |= reach[:, k : k + 1] & reach[k : k + 1, :]
    return reach


def brute_closure(constraints):
    reach = same_sets(constraints)
    pairs = {(i, j): 1.0 for i, j in itertools.combinations(range(constraints.n_images), 2) if reach[i, j]}
    for i, j, link in zip(constraints.left, constraints.right, constraints.link, strict=True):
        if link == 0:
            for a, b in itertools.product(np.flatnonzero(reach[i]), np.flatnonzero(reach[j])):
                pairs[tuple(sorted((int(a), int(b))))] = 0.0
    return pairs


def as_dict(constraints):
    ends = zip(constraints.left.tolist(), constraints.right.tolist(), strict=True)
    return dict(zip([tuple(sorted(pair)) for pair in ends], constraints.link.tolist(), strict=True))


# In memory


def test_lists_matrix_and_arrays_say_the_same():
    lists = Constraints.from_lists(n_images=4, must_link=[(0, 1)], cannot_link=[(1, 2), (0, 3)])
    upper = np.zeros((4, 4), int)
    upper[0, 1], upper[1, 2], upper[0, 3] = 1, -1, -1
    for matrix in (
        upper,
        upper.T,
        upper + upper.T + np.eye(4, dtype=int),
        sparse.csr_matrix(upper),
        sparse.coo_array(upper),
    ):
        assert as_dict(Constraints.from_matrix(matrix)) == as_dict(lists) == {(0, 1): 1.0, (1, 2): 0.0, (0, 3): 0.0}
    assert (len(lists), lists.n_must_links, lists.n_cannot_links) == (3, 1, 2)


def test_a_stored_zero_in_a_sparse_matrix_says_nothing():
    matrix = sparse.coo_array((np.array([1.0, 0.0]), (np.array([0, 1]), np.array([1, 2]))), shape=(3, 3))
    assert as_dict(Constraints.from_matrix(matrix)) == {(0, 1): 1.0}


@pytest.mark.parametrize(
    ("matrix", "message"),
    [
        (np.zeros((2, 3)), "square"),
        (np.array([[0, 1], [-1, 0]]), r"1 and -1 for the same pair at \(0, 1\)"),
        (np.array([[0, 0.5], [0, 0]]), r"0\.5 at \(0, 1\)"),
        (np.array([[-1, 0], [0, 0]]), "different from itself"),
    ],
)
def test_a_matrix_that_is_not_plus_minus_one_is_refused(matrix, message):
    with pytest.raises(InputError, match=message):
        Constraints.from_matrix(matrix)


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"left": [0, 5], "right": [1, 1], "link": [1, 1]}, r"pair 1: image 5 does not exist \(the set has 5 images\)"),
        ({"left": [0], "right": [-1], "link": [1]}, "image -1 does not exist"),
        ({"left": [0], "right": [1], "link": [-1]}, r"link -1 is outside \[0, 1\]"),
        ({"left": [0], "right": [1], "link": [np.nan]}, "link nan"),
        ({"left": [0], "right": [1], "link": [1], "weight": [-1]}, "weight -1"),
        ({"left": [0], "right": [1], "link": [1], "weight": [np.inf]}, "weight inf"),
        ({"left": [0], "right": [1], "link": [1], "weight": [1e39]}, "weight inf"),
        ({"left": [0, 1], "right": [1], "link": [1]}, "differ in length"),
        ({"left": [0.5], "right": [1], "link": [1]}, "row numbers"),
        ({"left": ["a"], "right": [1], "link": [1]}, "row numbers"),
        ({"left": [2], "right": [2], "link": [0]}, "pair 0: an image cannot be different from itself"),
        ({"left": [[2]], "right": [2], "link": [0]}, "one column"),
    ],
)
def test_bad_columns_are_refused_with_the_pair(columns, message):
    with pytest.raises(InputError, match=message):
        Constraints.from_arrays(**columns, n_images=5)


def test_must_links_of_an_image_with_itself_are_ignored_and_counted():
    made = Constraints.from_arrays([0, 1, 2], [0, 2, 2], [1, 0, 1], n_images=3, annotator=["a", "b", "c"])
    assert (as_dict(made), made.ignored_self_links, made.annotator) == ({(1, 2): 0.0}, 2, ("b",))


def test_no_constraints_at_all_go_through_every_operation():
    for n_images in (0, 3):
        none = Constraints.from_lists(n_images=n_images)
        first, second = none.split(0, seed=0)
        for made in (none.merged(), none.close(), none.resolve("drop"), none.flip(0.5, seed=0), first, second):
            assert len(made) == 0
        assert none.components().tolist() == list(range(n_images))
        assert none.conflicts() == []


def test_a_pair_list_of_triples_is_refused():
    with pytest.raises(InputError, match="must_link must be a list of pairs"):
        Constraints.from_lists(n_images=4, must_link=[(0, 1, 2)])


# Drawn from labels


@few
@given(st.lists(st.integers(0, 3), min_size=2, max_size=30), st.integers(0, 70), st.integers(0, 2**64 - 1))
def test_sampled_pairs_follow_the_paper(labels, n, seed):
    pairs = Constraints.sample(labels, n, seed=seed)
    labels = np.asarray(labels)
    assert len(pairs) == n
    assert (pairs.left != pairs.right).all()
    assert (pairs.link == (labels[pairs.left] == labels[pairs.right])).all()
    for start in range(0, n, len(labels)):  # each round draws its first members without replacement
        part = pairs.left[start : start + len(labels)]
        assert len(set(part.tolist())) == len(part)


def test_partners_are_drawn_uniformly_and_with_replacement_from_all_other_images():
    pairs = Constraints.sample(np.zeros(4, int), 40_000, seed=3)
    counts = Counter(zip(pairs.left.tolist(), pairs.right.tolist(), strict=True))
    assert len(counts) == 12
    expected = 40_000 / 12
    assert sum((count - expected) ** 2 / expected for count in counts.values()) < 31.3  # chi², 11 d.f., p = 0.001


@few
@given(st.integers(0, 200), st.integers(0, 1000))
def test_balanced_samples_have_exactly_half_must_links(n, seed):
    labels = np.array(["cat", "dog", "dog", "cat", "dog", "cat", "owl"])  # the owl has no second one
    pairs = Constraints.sample(labels, n, seed=seed, balanced=True)
    assert pairs.n_must_links == n // 2
    assert (pairs.left != pairs.right).all()
    assert (pairs.link == (labels[pairs.left] == labels[pairs.right])).all()
    assert len(set(pairs.left[:7].tolist())) == min(n, 7)


def test_balanced_partners_reach_every_image_they_may():
    labels = np.array([0, 1, 0, 1, 1, 0, 2])
    pairs = Constraints.sample(labels, 7_000, seed=0, balanced=True)
    seen = set(zip(pairs.left.tolist(), pairs.right.tolist(), strict=True))
    assert seen == {(i, j) for i in range(7) for j in range(7) if i != j}


@pytest.mark.parametrize(("labels", "n"), [([0, 0, 0], 2), ([0, 1, 2], 2)])
def test_balanced_pairs_that_cannot_be_are_refused(labels, n):
    with pytest.raises(InputError, match="balanced pairs need two classes"):
        Constraints.sample(labels, n, seed=0, balanced=True)


PINNED = {
    "plain": [(5, 7), (3, 0), (7, 0), (8, 2), (2, 1), (4, 3), (1, 6), (0, 8), (6, 1), (9, 5), (7, 0), (6, 4)],
    "balanced": [(0, 3), (6, 4), (5, 0), (3, 7), (4, 1), (9, 0)],
    "partners": [(0, 2), (0, 1), (1, 2), (1, 3), (2, 0), (2, 3), (3, 0), (3, 2)],
    "flipped": [4, 5, 6],
    "second": [4, 1, 7],
}


def pairs_of(constraints):
    return list(zip(constraints.left.tolist(), constraints.right.tolist(), strict=True))


def test_the_same_seed_gives_these_pairs_on_every_platform():
    labels = np.arange(10) % 3
    plain = Constraints.sample(labels, 12, seed=0)
    assert pairs_of(plain) == PINNED["plain"]
    assert pairs_of(Constraints.sample(labels, 6, seed=1, balanced=True)) == PINNED["balanced"]
    assert pairs_of(Constraints.sample_partners(labels[:4], 2, seed=2)) == PINNED["partners"]
    assert np.flatnonzero(plain.flip(0.25, seed=0).link != plain.link).tolist() == PINNED["flipped"]
    assert plain.split(3, seed=0)[1].left.tolist() == PINNED["second"]


def philox(key, counter):
    """Philox 4x64 with ten rounds as published (Salmon et al. 2011), in Python's whole numbers."""
    mask = 2**64 - 1
    c0, c1, c2, c3 = counter, 0, 0, 0
    k0, k1 = key
    for _ in range(10):
        first, second = 0xD2E7470EE14C6C93 * c0, 0xCA5A826395121157 * c2
        c0, c1, c2, c3 = second >> 64 ^ c1 ^ k0, second & mask, first >> 64 ^ c3 ^ k1, first & mask
        k0, k1 = k0 + 0x9E3779B97F4A7C15 & mask, k1 + 0xBB67AE8584CAA73B & mask
    return [c0, c1, c2, c3]


@pytest.mark.parametrize("seed", [0, 7, 2**64 - 1])
def test_the_stream_is_the_published_philox(seed):
    words = rng.stream(seed, rng.Purpose.FLIP).random_raw(8).tolist()
    assert words == philox((seed, 3), 1) + philox((seed, 3), 2)


def test_different_seeds_give_different_pairs():
    labels = np.arange(100) % 5
    assert (Constraints.sample(labels, 50, seed=0).left != Constraints.sample(labels, 50, seed=1).left).any()


@few
@given(st.integers(1, 12), st.data())
def test_every_image_gets_k_different_partners(n_images, data):
    k = data.draw(st.integers(0, n_images - 1))
    labels = np.arange(n_images) % 3
    pairs = Constraints.sample_partners(labels, k, seed=data.draw(st.integers(0, 99)))
    assert Counter(pairs.left.tolist()) == (dict.fromkeys(range(n_images), k) if k else {})
    assert len(set(zip(pairs.left.tolist(), pairs.right.tolist(), strict=True))) == n_images * k
    assert (pairs.left != pairs.right).all()
    assert (pairs.link == (labels[pairs.left] == labels[pairs.right])).all()


def test_partners_of_an_image_are_drawn_uniformly():
    pairs = Constraints.sample_partners(np.zeros(200, int), 20, seed=0)
    counts = np.bincount(pairs.right, minlength=200)
    assert ((counts - 20) ** 2 / (20 * (1 - 20 / 199))).sum() < 267  # chi², 199 d.f., p = 0.001


@pytest.mark.parametrize(
    "call",
    [
        lambda: Constraints.sample([0], 1, seed=0),
        lambda: Constraints.sample([0, 1], -1, seed=0),
        lambda: Constraints.sample([[0, 1]], 1, seed=0),
        lambda: Constraints.sample([0, 1], 1, seed=-1),
        lambda: Constraints.sample_partners([0, 1, 2], 3, seed=0),
    ],
)
def test_impossible_samples_are_refused(call):
    with pytest.raises(InputError):
        call()


def test_words_past_the_last_full_round_are_redrawn():
    """With a bound of 3 · 2**61 a quarter of the words is rejected; what remains is uniform over the bound."""
    bound = 3 << 61
    drawn = rng.below(rng.stream(0, rng.Purpose.SAMPLE), np.full(30_000, bound))
    assert 0 <= drawn.min() <= drawn.max() < bound
    counts = np.bincount((drawn // (bound // 3)).astype(int), minlength=3)
    assert ((counts - 10_000) ** 2 / 10_000).sum() < 13.8  # chi², 2 d.f., p = 0.001; plain modulo gives 3:3:2


# Flips, splits, duplicates


@few
@given(
    small_constraints(links=(0.0, 0.25, 0.5, 1.0)), st.floats(0, 1), st.sampled_from([None, "must-link", "cannot-link"])
)
def test_flip_turns_exactly_the_fraction_of_its_kind(pairs, fraction, only):
    flipped = pairs.flip(fraction, seed=5, only=only)
    changed = flipped.link != pairs.link
    kind = {None: pairs.link >= 0, "must-link": pairs.link > 0.5, "cannot-link": pairs.link < 0.5}[only]
    assert (flipped.link[changed] == 1 - pairs.link[changed]).all()
    assert not changed[~kind].any()
    half = ((pairs.link == 0.5) & kind).sum()  # 1 - 0.5 = 0.5 cannot be seen
    assert round(fraction * kind.sum()) - half <= changed.sum() <= round(fraction * kind.sum())


@pytest.mark.parametrize("fraction", [-0.1, 1.2, np.nan])
def test_fractions_outside_zero_to_one_are_refused(fraction):
    with pytest.raises(InputError, match="the fraction to flip must be in"):
        Constraints.from_lists(n_images=3, must_link=[(0, 1)]).flip(fraction, seed=0)


def test_an_unknown_kind_of_flip_is_refused():
    with pytest.raises(InputError, match="use must-link or cannot-link"):
        Constraints.from_lists(n_images=3, must_link=[(0, 1)]).flip(0.5, seed=0, only="must")


@few
@given(small_constraints(), st.data())
def test_split_parts_every_pair_into_one_of_two(pairs, data):
    n_second = data.draw(st.integers(0, len(pairs)))
    first, second = pairs.split(n_second, seed=0)
    assert len(second) == n_second

    def rows(part):
        return Counter(
            zip(part.left.tolist(), part.right.tolist(), part.link.tolist(), part.weight.tolist(), strict=True)
        )

    assert rows(first) + rows(second) == rows(pairs)
    with pytest.raises(InputError):
        pairs.split(len(pairs) + 1, seed=0)


def test_take_keeps_annotators_and_times_with_their_pairs():
    pairs = Constraints.from_arrays([0, 1], [1, 2], [1, 0], n_images=3, annotator=["ann", "bo"], time=["1", "2"])
    assert pairs.take([1, 0]).annotator == ("bo", "ann")
    assert pairs.take(np.array([False, True])).time == ("2",)


def test_equal_answers_merge_and_contradictory_ones_do_not():
    pairs = Constraints.from_arrays(
        [0, 1, 0, 2, 2, 3, 3],
        [1, 0, 1, 3, 3, 2, 2],
        [1, 1, 0, 0.5, 0.8, 0.2, 0],
        n_images=4,
        weight=[1, 2, 1, 1, 3, 0, 1],
        annotator=["ann", "bo", "ann", "", "x", "x", "y"],
        time=["3", "1", "2", "", "", "", "9"],
    )
    merged = pairs.merged()
    assert merged.left.tolist() == [0, 0, 2, 3]
    assert merged.link.tolist() == pytest.approx([1, 0, (0.5 + 3 * 0.8) / 4, 0])
    assert merged.weight.tolist() == [3, 1, 4, 1]
    assert merged.annotator == ("ann + bo", "ann", "x", "y")
    assert merged.time == ("3", "2", "", "9")


def test_soft_links_without_weight_merge_to_their_plain_mean():
    merged = Constraints.from_arrays([0, 1], [1, 0], [0.2, 0.6], n_images=2, weight=[0, 0]).merged()
    assert merged.link.tolist() == pytest.approx([0.4])
    assert merged.weight.tolist() == [0]


# Closure and contradictions


@few
@given(small_constraints())
def test_closure_and_conflicts_equal_brute_force(pairs):
    reach = same_sets(pairs)
    component = pairs.components()
    assert ((component[:, None] == component[None, :]) == reach).all()
    rows = [row for row in range(len(pairs)) if pairs.link[row] == 0 and reach[pairs.left[row], pairs.right[row]]]
    assert pairs.conflict_rows().tolist() == rows
    if rows:
        with pytest.raises(InputError, match="are cannot-link"):
            pairs.close()
        return
    closed = pairs.close()
    assert as_dict(closed) == brute_closure(pairs)
    assert len(closed) == len(as_dict(closed))


@few
@given(small_constraints())
def test_closing_keeps_given_weights_and_makes_no_implied_pair_heavier_than_its_proof(pairs):
    pairs = pairs.resolve("drop")
    given_pairs, closed = pairs.merged(), pairs.close()
    m = len(given_pairs)
    assert (closed.weight[:m] == given_pairs.weight).all()
    component = pairs.components()
    for i, j, weight in zip(closed.left[m:], closed.right[m:], closed.weight[m:], strict=True):
        sides = {component[i], component[j]}
        ends = [{component[a], component[b]} for a, b in zip(given_pairs.left, given_pairs.right, strict=True)]
        proof = [at for at, end in enumerate(ends) if (given_pairs.link[at] == 1 and end <= sides) or end == sides]
        assert weight == min(given_pairs.weight[at] for at in proof)


@few
@given(small_constraints())
def test_each_conflict_shows_a_shortest_chain_of_must_links(pairs):
    found = pairs.conflicts(limit=None)
    assert [conflict.pair_row for conflict in found] == pairs.conflict_rows().tolist()
    steps = {frozenset((i, j)) for i, j, link in zip(pairs.left, pairs.right, pairs.link, strict=True) if link == 1}
    for conflict in found:
        way = conflict.images
        assert (way[0], way[-1]) == (pairs.left[conflict.pair_row], pairs.right[conflict.pair_row])
        for row, i, j in zip(conflict.chain_rows, way, way[1:], strict=False):
            assert pairs.link[row] == 1
            assert {int(pairs.left[row]), int(pairs.right[row])} == {i, j}
        assert len(conflict.chain_rows) == len(way) - 1 == breadth_first_distance(steps, way[0], way[-1])


def breadth_first_distance(steps, start, end):
    reached, distance = {start}, 0
    while end not in reached:
        reached |= {image for step in steps if step & reached for image in step}
        distance += 1
    return distance


def test_a_conflict_is_told_in_one_sentence():
    pairs = Constraints.from_lists(n_images=4, must_link=[(0, 2), (3, 2), (2, 1)], cannot_link=[(0, 1), (0, 3)])
    names = ["a.png", "b.png", "c.png", "d.png"]
    sentence = "a.png and b.png are cannot-link (row 3), but must-link through a.png – c.png – b.png (rows 0, 2)"
    assert pairs.conflicts()[0].describe(names) == sentence
    with pytest.raises(InputError) as error:
        pairs.resolve("error", names=names)
    assert str(error.value) == (
        f"{sentence}; 2 contradictions in all; correct the pairs, or use --set on_conflict=drop or keep"
    )
    assert len(pairs.conflicts(limit=1)) == 1
    twice = Constraints.from_lists(n_images=2, must_link=[(0, 1)], cannot_link=[(1, 0)])
    assert twice.conflicts()[0].describe() == "image 1 and image 0 are cannot-link (row 1), but also must-link (row 0)"


def test_a_conflict_in_a_file_names_its_lines(tmp_path):
    path = tmp_path / "pairs.csv"
    path.write_text("left,right,link\n\n3,3,1\n0,1,1\n1,2,1\n\n0,2,0\n0,3,0\n")
    pairs = Constraints.read(path)
    message = r"cannot-link \(line 7\), but must-link through .* \(lines 4, 5\)"
    with pytest.raises(InputError, match=message):
        pairs.resolve("error")
    with pytest.raises(InputError, match=message):
        pairs.take([3, 2, 1, 0]).resolve("error")
    pairs.write(tmp_path / "pairs.parquet")
    with pytest.raises(InputError, match=r"cannot-link \(row 3\), but must-link through .* \(rows 1, 2\)"):
        Constraints.read(tmp_path / "pairs.parquet").resolve("error")
    assert pairs.take([0, 1, 3]).close().places is None  # implied pairs stand in no file


def test_a_long_chain_is_told_short():
    n = 1_000
    path = Constraints.from_lists(n_images=n, must_link=[(i, i + 1) for i in range(n - 1)], cannot_link=[(0, n - 1)])
    conflict = path.conflicts()[0]
    assert len(conflict.chain_rows) == n - 1
    assert "…" in conflict.describe()
    assert len(conflict.describe()) < 400


@few
@given(small_constraints(links=(0.0, 0.3, 1.0)))
def test_dropping_leaves_no_conflict_and_only_what_the_rule_says(pairs):
    kept = pairs.resolve("drop")
    assert kept.conflict_rows().size == 0
    assert pairs.resolve("keep") is pairs
    assert as_rows(kept) == as_rows(pairs.take(greedy_oracle(pairs)))
    if not pairs.conflict_rows().size:
        assert kept is pairs


def as_rows(pairs):
    return list(zip(pairs.left.tolist(), pairs.right.tolist(), pairs.link.tolist(), pairs.weight.tolist(), strict=True))


def greedy_oracle(pairs):
    """The documented rule, by asking the brute-force closure after every pair."""
    total = Counter()
    for i, j, link, weight in as_rows(pairs):
        total[frozenset((i, j)), link] += weight
    hard = [row for row in range(len(pairs)) if pairs.link[row] in (0, 1)]
    answer = [(frozenset((i, j)), link) for i, j, link, _ in as_rows(pairs)]
    hard.sort(key=lambda row: (-total[answer[row]], pairs.link[row], row))
    taken: list[int] = []
    for row in hard:
        attempt = pairs.take([*taken, row])
        reach = same_sets(attempt)
        if not any(link == 0 and reach[i, j] for i, j, link, _ in as_rows(attempt)):
            taken.append(row)
    return sorted([*taken, *(row for row in range(len(pairs)) if row not in hard)])


def test_the_heavier_answer_wins_and_the_majority_counts_as_heavier():
    heavy_must = Constraints.from_arrays([0, 0], [1, 1], [1, 0], n_images=2, weight=[2, 1])
    assert heavy_must.resolve("drop").link.tolist() == [1]
    majority = Constraints.from_arrays([0, 1, 0], [1, 0, 1], [1, 0, 1], n_images=2)
    assert majority.resolve("drop").link.tolist() == [1, 1]
    even = Constraints.from_arrays([0, 0], [1, 1], [1, 0], n_images=2)
    assert even.resolve("drop").link.tolist() == [0]


def test_an_unknown_way_with_conflicts_is_refused():
    with pytest.raises(InputError, match="use error, drop or keep"):
        Constraints.from_lists(n_images=2).resolve("ignore")


def test_soft_links_take_no_part_in_closing():
    pairs = Constraints.from_arrays([0, 1, 2], [1, 2, 0], [1, 0.9, 0], n_images=3, annotator=["a", "b", "c"])
    closed = pairs.close()
    assert closed.link[:3].tolist() == pytest.approx([1, 0.9, 0])
    assert (closed.left[3:].tolist(), closed.right[3:].tolist(), closed.link[3:].tolist()) == ([1], [2], [0])
    assert closed.annotator == ("a", "b", "c", "")


def test_many_duplicates_of_a_must_link_stay_one_edge():
    pairs = Constraints.from_arrays(np.zeros(1024, int), np.ones(1024, int), np.ones(1024), n_images=3)
    assert pairs.components().tolist() == [0, 0, 1]


def test_two_hundred_thousand_pairs_close():
    n = 400_000
    must = np.arange(0, n, 4)  # groups {4k, 4k + 1, 4k + 2}, each apart from image 4k + 3
    left, right = np.concatenate([must, must + 1, must + 2]), np.concatenate([must + 1, must + 2, must + 3])
    pairs = Constraints.from_arrays(left, right, np.repeat([1, 1, 0], len(must)), n_images=n)
    closed = pairs.close()
    assert (len(closed), closed.n_must_links, closed.n_cannot_links) == (6 * n // 4, 3 * n // 4, 3 * n // 4)


def test_closing_never_silently_makes_billions_of_pairs():
    n = 100_000
    path = np.arange(n - 1)
    pairs = Constraints.from_arrays(path, path + 1, np.ones(n - 1), n_images=n)
    with pytest.raises(InputError, match="closing 99,999 constraints would make 4,999,950,000 pairs"):
        pairs.close()
    assert len(pairs.take(np.arange(10)).close(max_pairs=55)) == 55
    with pytest.raises(InputError):
        pairs.take(np.arange(10)).close(max_pairs=54)


def test_components_are_numbered_by_their_first_image():
    assert graph.components(np.array([4, 3]), np.array([1, 0]), 6).tolist() == [0, 1, 2, 0, 1, 3]


def test_more_pairs_than_memory_holds_are_refused_at_once() -> None:
    with pytest.raises(InputError, match=r"pairs: needs .* GiB of memory, and .* are free; draw fewer"):
        Constraints.sample([0, 1, 0, 1], 10**25, seed=0)
