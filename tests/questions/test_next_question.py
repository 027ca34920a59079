"""Questions: what answers say, what is never asked, who stands for a kind, and that choosing is worth it."""

import hashlib
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.stats import rankdata

from constraintmatch._internal.errors import InputError
from constraintmatch.questions import belief as belief_module
from constraintmatch.questions import next_question
from constraintmatch.questions.answers import (
    CONFIRMED,
    MAX_SHOWN,
    NONE,
    UNSURE,
    Answer,
    Known,
    Question,
    find_known,
    implied_groups,
    links_of,
    pair_of,
    stated_constraints,
    triplets_of,
)
from constraintmatch.questions.belief import Belief, find_exemplars, ranks, spread
from constraintmatch.questions.next_question import certain_share, next_questions, question_about
from constraintmatch.questions.rounds import LabelOracle

few = settings(max_examples=20, deadline=None)
KINDS: Any = st.sampled_from(["which", "pair"])
CHOICES: Any = st.sampled_from(["recommended", "uncertain", "random"])


def generator(seed: int) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(seed))


def blobs(
    sizes: Sequence[int], *, seed: int = 0, noise: float = 0.4, model: bool = True
) -> tuple[Belief, NDArray[np.int64]]:
    """Images around one centre for each class, and a model that sees soft, noisy distances from the centres."""
    random = generator(seed)
    labels = np.repeat(np.arange(len(sizes)), sizes)
    centres = random.standard_normal((len(sizes), 16))
    features = centres[labels] + noise * random.standard_normal((len(labels), 16)) * np.sqrt(2)
    logits = -((features[:, None] - centres) ** 2).sum(2) / 4 + random.standard_normal((len(labels), len(sizes)))
    shares = np.exp(logits - logits.max(1, keepdims=True))
    return Belief.of(features, shares / shares.sum(1, keepdims=True) if model else None), labels


def crisp(clusters: Sequence[int], features: NDArray[np.float64] | None = None) -> Belief:
    """A model that is nearly certain of these clusters; features that say the same unless they are given."""
    shares = np.full((len(clusters), max(clusters) + 1), 0.01)
    shares[np.arange(len(clusters)), clusters] = 0.9
    jitter = 0.05 * generator(0).standard_normal(shares.shape)
    return Belief.of(shares + jitter if features is None else features, shares / shares.sum(1, keepdims=True))


def has_open_vote(known: Known, one: int, other: int) -> bool:
    """Whether answers differ on the groups of two images, or one vote alone keeps them apart: it is asked again."""
    same, different = known.votes.get(pair_of(*known.component[[one, other]].tolist()), (0, 0))
    return same + different > 0 and abs(same - different) < CONFIRMED


def ask(
    belief: Belief, oracle: Callable[[Question], Answer], n: int, *, batch: int = 5, **options: Any
) -> list[Answer]:
    """Up to n answers, asked in batches until nothing is left."""
    answers: list[Answer] = []
    while len(answers) < n:
        questions = next_questions(belief, answers, min(batch, n - len(answers)), **options)
        if not questions:
            break
        answers += map(oracle, questions)
    return answers


@contextmanager
def limits(*, width: int = MAX_SHOWN, soon: int = 200) -> Iterator[None]:
    """Questions that show at most so many images, and rest for so many answers after an "unsure"."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(next_question, "MAX_SHOWN", width)
        patch.setattr(next_question, "SOON", soon)
        yield


def until_all_are_seen(answers: Sequence[Answer], labels: NDArray[np.int64]) -> int:
    """How many questions it took until each label had been asked about or shown."""
    seen: set[int] = set()
    for n, answer in enumerate(answers, 1):
        seen.update(labels[[answer.question.image, *answer.question.shown]].tolist())
        if len(seen) == labels.max() + 1:
            return n
    return len(answers) + 1


# What answers say


def test_a_chosen_image_is_one_must_link_and_the_others_are_cannot_links() -> None:
    left, right, link = links_of([Answer(Question(9, (1, 2, 3, 4, 5)), 2)])
    assert left.tolist() == [9] * 5
    assert right.tolist() == [1, 2, 3, 4, 5]
    assert link.tolist() == [0, 0, 1, 0, 0]


def test_none_of_these_is_all_cannot_links_and_unsure_says_nothing() -> None:
    left, right, link = links_of([Answer(Question(9, (1, 2)), NONE), Answer(Question(8, (1, 2)), UNSURE)])
    assert (left.tolist(), right.tolist(), link.tolist()) == ([9, 9], [1, 2], [0, 0])
    assert [column.size for column in links_of([])] == [0, 0, 0]


def test_a_question_of_one_image_is_a_pair() -> None:
    assert Question(0, (1,)).kind == "pair"
    assert Question(0, (1, 2)).kind == "which"


@pytest.mark.parametrize(
    ("image", "shown", "choice", "says"),
    [
        (0, (), 0, "1 to 5 images"),
        (0, (1, 2, 3, 4, 5, 6), 0, "1 to 5 images"),
        (0, (0, 1), 0, "be there once"),
        (0, (1, 1), 0, "be there once"),
        (-1, (1, 2), 0, "count from 0"),
        (0, (1, 2), 2, "use 0 to 1"),
        (0, (1, 2), -3, "use 0 to 1"),
    ],
)
def test_impossible_questions_and_answers_are_refused(
    image: int, shown: tuple[int, ...], choice: int, says: str
) -> None:
    with pytest.raises(InputError, match=says):
        Answer(Question(image, shown), choice)


def test_an_answer_about_an_image_that_does_not_exist_is_refused() -> None:
    with pytest.raises(InputError, match="image 10 does not exist"):
        stated_constraints([Answer(Question(3, (10,)), 0)], 10)


answers_by_labels = st.builds(
    lambda labels, rows: [
        LabelOracle(np.array(labels), error=0).answer(Question(row[0], tuple(row[1:]))) for row in rows
    ],
    st.permutations(range(12)).map(lambda order: [one % 3 for one in order]),  # four of a kind: two groups of three,
    st.lists(st.permutations(range(12)).map(lambda rows: rows[:4]), max_size=12),  # joined by one answer, would wait
)


@few
@given(answers_by_labels)
def test_groups_are_what_must_links_join(answers: list[Answer]) -> None:
    joined = [{image} for image in range(12)]
    for one, other, link in zip(*links_of(answers), strict=True):
        if link == 1:
            union = joined[one] | joined[other]
            for image in union:
                joined[image] = union
    group = implied_groups(answers, 12)
    for image in range(12):
        expected = joined[image] if len(joined[image]) > 1 else set()
        assert set(np.flatnonzero((group == group[image]) & (group >= 0)).tolist()) == expected


@few
@given(answers_by_labels)
def test_true_answers_never_contradict_each_other_even_where_two_of_a_kind_were_shown(answers: list[Answer]) -> None:
    constraints = stated_constraints(answers, 12)
    assert not len(constraints.conflict_rows())
    assert constraints.n_must_links == sum(answer.choice >= 0 for answer in answers)


def test_a_contradiction_does_not_stop_the_questions() -> None:
    belief, _ = blobs([10, 10])
    answers = [Answer(Question(0, (1,)), 0), Answer(Question(1, (2,)), 0), Answer(Question(0, (2,)), NONE)]
    assert implied_groups(answers, 20)[0] != implied_groups(answers, 20)[2]
    assert next_questions(belief, answers, 3)


# What is never asked


@few
@given(KINDS, CHOICES, st.integers(0, 1000), st.booleans(), st.integers(1, 5), st.sampled_from([0.0, 0.2]))
def test_what_the_answers_settle_is_never_asked(
    kind: Any, choose: Any, seed: int, model: bool, width: int, error: float
) -> None:
    belief, labels = blobs([12, 9, 6, 2], seed=seed, model=model)
    oracle, answers = LabelOracle(labels, error=error, unsure=0.1, seed=seed), list[Answer]()
    for _ in range(8):
        known = find_known(answers, len(belief), soon=10)
        with limits(width=width, soon=10):
            questions = next_questions(belief, answers, 4, kind=kind, choose=choose, seed=seed)
        assert len(questions) <= 4
        assert questions or answers  # the first round has some
        for question in questions:
            assert 0 < len(question.shown) <= (1 if kind == "pair" else width)
            assert not any(
                known.settles(question.image, shown) and not has_open_vote(known, question.image, shown)
                for shown in question.shown
            )
            assert len(set(known.component[list(question.shown)].tolist())) == len(question.shown)
            assert question.image not in known.resting
        pairs = [frozenset((q.image, shown)) for q in questions for shown in q.shown]
        assert len(pairs) == len(set(pairs))
        answers += map(oracle.answer, questions)


@few
@given(KINDS, CHOICES, st.integers(0, 1000))
def test_the_same_inputs_give_the_same_questions(kind: Any, choose: Any, seed: int) -> None:
    belief, labels = blobs([8, 8, 8], seed=seed)
    oracle = LabelOracle(labels, error=0.1)
    first, second = (ask(belief, oracle.answer, 12, kind=kind, choose=choose, seed=seed) for _ in range(2))
    assert first == second


@few
@given(st.lists(st.integers(1, 9), min_size=1, max_size=9), st.integers(0, 1000), st.booleans(), KINDS)
def test_asked_to_the_end_the_groups_are_the_labels(sizes: list[int], seed: int, model: bool, kind: Any) -> None:
    belief, labels = blobs(sizes, seed=seed, noise=1.0, model=model)
    answers = ask(belief, LabelOracle(labels, error=0).answer, 2_000, kind=kind)
    known = find_known(answers, len(belief), soon=0)
    one, other = np.triu_indices(len(belief), 1)
    assert ((known.component[one] == known.component[other]) == (labels[one] == labels[other])).all()
    assert all(known.settles(i, j) for i, j in zip(one.tolist(), other.tolist(), strict=True))


def test_an_exemplar_that_is_excluded_is_not_shown_and_the_others_follow() -> None:
    belief = crisp([0] * 6 + [1] * 6 + [2] * 6)
    answers = ask(belief, LabelOracle(np.repeat(np.arange(3), 6), error=0).answer, 3)
    image = next_questions(belief, answers, 1)[0].image
    with limits(width=2):
        first = next_questions(belief, answers, 1, candidates=[image])[0]
        second = next_questions(belief, [*answers, Answer(first, NONE)], 1, candidates=[image])[0]
    assert second.image == image
    assert not set(first.shown) & set(second.shown)
    assert len(second.shown) == 1


def test_unsure_is_not_asked_again_soon_but_later() -> None:
    belief, labels = blobs([30, 30])
    oracle = LabelOracle(labels, error=0)
    answers = ask(belief, oracle.answer, 5)
    doubtful = next_questions(belief, answers, 1)[0]
    answers.append(Answer(doubtful, UNSURE))
    with limits(soon=7):
        for _ in range(6):
            question = next_questions(belief, answers, 1)[0]
            assert question.image != doubtful.image
            answers.append(oracle.answer(question))
        assert not next_questions(belief, answers, 1, candidates=[doubtful.image])
        answers.append(oracle.answer(next_questions(belief, answers, 1)[0]))
        assert next_questions(belief, answers, 1, candidates=[doubtful.image])


@pytest.mark.parametrize("choose", ["recommended", "uncertain", "random"])
@pytest.mark.parametrize("kind", ["which", "pair"])
def test_questions_that_wait_for_an_answer_are_not_made_again_and_nobody_runs_dry(kind: Any, choose: Any) -> None:
    belief, _ = blobs([20, 20, 20])
    waiting: list[Question] = []
    for _ in range(6):
        questions = next_questions(belief, [], 4, kind=kind, choose=choose, waiting=waiting)
        assert questions
        assert not {question.image for question in questions} & {question.image for question in waiting}
        waiting += questions


@few
@given(KINDS, CHOICES, st.sets(st.integers(0, 29), max_size=6))
def test_only_candidates_are_asked_about(kind: Any, choose: Any, rows: set[int]) -> None:
    belief, _ = blobs([10, 10, 10])
    questions = next_questions(belief, [], 8, kind=kind, choose=choose, candidates=sorted(rows))
    assert {question.image for question in questions} <= rows
    assert questions or rows <= set(exemplars(belief, []).image.tolist())  # exemplars are placed already


def test_random_pairs_are_random_and_depend_on_the_seed() -> None:
    belief, labels = blobs([100] * 5)
    questions = next_questions(belief, [], 400, kind="pair", choose="random", seed=1)
    same = [labels[question.image] == labels[question.shown[0]] for question in questions]
    assert len({question.image for question in questions}) == 400  # without replacement, as the paper draws
    assert 0.12 < np.mean(same) < 0.28  # 99 / 499; four standard deviations are 0.08
    assert questions != next_questions(belief, [], 400, kind="pair", choose="random", seed=2)


def test_random_questions_go_on_where_they_stopped() -> None:
    belief, labels = blobs([20, 20])
    oracle = LabelOracle(labels, error=0)
    asked = [answer.question.image for answer in ask(belief, oracle.answer, 20, batch=5, choose="random")]
    at_once = [question.image for question in next_questions(belief, [], 20, choose="random")]
    assert asked == at_once


# Exemplars


def exemplars(belief: Belief, answers: Sequence[Answer]) -> Any:
    return find_exemplars(belief, find_known(answers, len(belief), soon=0))


def test_before_any_answer_the_most_central_image_stands_for_each_cluster() -> None:
    belief, _ = blobs([20, 30, 25])
    found = exemplars(belief, [])
    assert belief.probabilities is not None
    clusters = belief.probabilities.argmax(1)
    for cluster, image in enumerate(found.image.tolist()):
        members = np.flatnonzero(clusters == cluster)
        centre = (belief.probabilities[members, cluster, None] * belief.features[members]).sum(0)
        assert image == members[np.argmax(belief.features[members] @ centre)]


def test_two_clusters_that_are_one_group_get_one_exemplar() -> None:
    belief = crisp([0] * 8 + [1] * 8 + [2] * 8)
    oracle = LabelOracle(np.array([0] * 16 + [1] * 8), error=0)  # clusters 0 and 1 are the same kind
    found = exemplars(belief, ask(belief, oracle.answer, 3))
    assert sorted(oracle.labels[found.image].tolist()) == [0, 1]
    assert found.home[exemplars(belief, []).image[:2]].tolist() == [found.home[found.image[0]]] * 2


def test_a_cluster_with_two_groups_gets_a_second_exemplar() -> None:
    random = generator(3)
    place = np.repeat([[0.0, 0, 1], [1, 0, 0.3], [1, 0.6, 0]], 8, axis=0)
    belief = crisp([0] * 8 + [1] * 16, place + 0.02 * random.standard_normal((24, 3)))
    labels = np.repeat([0, 1, 2], 8)
    assert len(exemplars(belief, [])) == 2
    answers = ask(belief, LabelOracle(labels, error=0).answer, 6, batch=1)
    found = exemplars(belief, answers)
    assert sorted(labels[found.image].tolist()) == [0, 1, 2]


def test_an_image_that_fits_nothing_becomes_an_exemplar_only_when_all_are_excluded() -> None:
    labels = np.repeat(np.arange(8), 5)
    belief = crisp(labels.tolist())
    odd = np.append(labels, 8)
    grown = Belief.of(
        np.vstack([belief.features, belief.features.mean(0)]),
        np.vstack([belief.probabilities, np.full((1, 8), 1 / 8)]),  # type: ignore[list-item]
    )
    oracle = LabelOracle(odd, error=0)
    answers = ask(grown, oracle.answer, 8, candidates=range(40))
    for n_exemplars, n_shown in ((8, 5), (8, 3), (9, None)):
        found = exemplars(grown, answers)
        assert len(found) == n_exemplars
        assert (40 in found.image) == (n_exemplars == 9)
        question = question_about(grown, answers, 40)
        assert n_shown is None or (question is not None and len(question.shown) == n_shown)
        if question is not None:
            answers.append(oracle.answer(question))


def test_a_group_is_shown_by_its_most_typical_member() -> None:
    belief, _ = blobs([30, 30], noise=0.8)
    group = [3, 7, 11, 15]
    answers = [Answer(Question(group[0], (other,)), 0) for other in group[1:]]
    found = exemplars(belief, answers)
    centre = belief.features[group].mean(0)
    centre /= np.linalg.norm(centre)
    typical = belief.density_at(np.array(group)) + belief.features[group] @ centre
    assert group[int(np.argmax(typical))] in found.image
    assert len(set(found.home[group].tolist())) == 1


def test_many_groups_of_two_do_not_all_become_exemplars() -> None:
    belief, _ = blobs([300, 300])
    answers = [Answer(Question(image, (image + 1,)), 0) for image in range(0, 500, 2)]
    assert len(exemplars(belief, answers)) == 100
    questions = next_questions(belief, answers, 200, choose="random")
    component = find_known(answers, 600, soon=0).component
    assert len({int(component[question.image]) for question in questions}) == len(questions) == 200


def test_the_larger_group_stands_first() -> None:
    belief, labels = blobs([30, 30, 30], noise=0.8)
    answers = ask(belief, LabelOracle(labels, error=0).answer, 40)
    size = find_known(answers, 90, soon=0).size
    component = find_known(answers, 90, soon=0).component
    questions = next_questions(belief, answers, 10)
    assert max(len(question.shown) for question in questions) > 1
    for question in questions:
        sizes = size[component[list(question.shown)]].tolist()
        assert sizes == sorted(sizes, reverse=True)


# The recommended choice


def test_the_warm_up_holds_each_cluster_against_its_nearest() -> None:
    belief = crisp(np.repeat(np.arange(12), 6).tolist())
    first = exemplars(belief, []).image.tolist()
    answers: list[Answer] = []
    oracle = LabelOracle(np.repeat(np.arange(12), 6), error=0)
    while set(batch := [question.image for question in next_questions(belief, answers, 4)]) <= set(first):
        assert len(batch) <= 4
        answers += [oracle.answer(question) for question in next_questions(belief, answers, 4)]
        assert len(answers) <= 12, "one question for each cluster is enough"
    assert len(first) == 12
    known = find_known(answers, 72, soon=0)
    for image in first:
        assert sum(known.settles(image, other) for other in first if other != image) >= 5


def test_recommended_images_are_harder_denser_and_further_apart_than_random_ones() -> None:
    belief, labels = blobs([150] * 4, noise=0.9)
    oracle, density = LabelOracle(labels, error=0), belief.density_at(np.arange(len(belief)))
    answers = ask(belief, oracle.answer, 4)
    rows = {
        choose: [question.image for question in next_questions(belief, answers, 40, choose=choose)]
        for choose in ("recommended", "uncertain", "random")
    }

    def margin(images: list[int]) -> float:
        assert belief.probabilities is not None
        second, best = np.sort(belief.probabilities[images], axis=1)[:, -2:].T
        return float((best - second).mean())

    def closest(images: list[int]) -> float:
        similar = belief.features[images] @ belief.features[images].T
        return float((similar - 2 * np.eye(len(images))).max(1).mean())

    assert margin(rows["recommended"]) < 0.8 * margin(rows["random"])
    assert density[rows["recommended"]].mean() > density[rows["uncertain"]].mean() + 0.01
    assert closest(rows["recommended"]) < closest(rows["uncertain"]) - 0.01


def test_recommended_finds_all_kinds_with_fewer_questions_than_random() -> None:
    n_asked: dict[str, list[int]] = {"recommended": [], "random": []}
    n_grouped: dict[str, list[int]] = {"recommended": [], "random": []}
    for seed in range(4):
        belief, labels = blobs([200] * 6 + [60] * 4 + [15] * 2, seed=seed, noise=0.5, model=False)
        for choose in n_asked:
            answers = ask(belief, LabelOracle(labels, error=0).answer, 150, choose=choose, seed=seed)
            n_asked[choose].append(until_all_are_seen(answers, labels))
            n_grouped[choose].append(len(set(labels[implied_groups(answers, len(belief)) >= 0].tolist())))
    assert sum(n_asked["recommended"]) < 0.5 * sum(n_asked["random"])  # single draws are lucky at times: 41 against 65
    assert sum(n_grouped["recommended"]) > sum(n_grouped["random"]) + 4  # at random nobody follows up what fits nothing


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_recommended_exemplars_cover_more_kinds_than_random_ones_where_clusters_are_wrong(seed: int) -> None:
    belief, labels = blobs([60] * 12, seed=seed, noise=0.7)
    assert belief.probabilities is not None
    muddled = belief.probabilities @ np.kron(np.eye(6), np.ones((2, 1)))  # every cluster holds two kinds
    belief = Belief(belief.features, muddled.astype(np.float32))
    covered = {
        choose: set(
            labels[exemplars(belief, ask(belief, LabelOracle(labels, error=0).answer, 60, choose=choose)).image]
        )
        for choose in ("recommended", "random")
    }
    assert len(covered["recommended"]) >= 11
    assert len(covered["random"]) <= 9


# What is certain, and a question of one's own


def test_certain_are_the_grouped_and_the_confident_in_a_cluster_of_one_group() -> None:
    clusters = [0] * 4 + [1] * 4 + [2] * 2
    belief = crisp(clusters)
    assert belief.probabilities is not None
    belief.probabilities[1] = [0.6, 0.2, 0.2]  # not confident
    answers = [Answer(Question(0, (2,)), 0), Answer(Question(4, (5, 0)), 0), Answer(Question(6, (7,)), 0)]
    assert certain_share(belief, [], min_confidence=0.8) == 0
    # cluster 0: images 0, 2 grouped and 3 confident; cluster 1: two groups of two, all grouped; cluster 2: nobody
    assert certain_share(belief, answers, min_confidence=0.8) == pytest.approx(0.7)
    assert certain_share(belief, answers, min_confidence=0.99) == pytest.approx(0.6)
    assert certain_share(Belief(belief.features), answers) == pytest.approx(0.6)


def test_two_groups_in_one_cluster_leave_the_rest_of_it_uncertain() -> None:
    belief = crisp([0] * 8 + [1] * 2)
    answers = [Answer(Question(0, (1,)), 0), Answer(Question(2, (3, 0)), 0)]
    assert certain_share(belief, answers, min_confidence=0.5) == pytest.approx(0.4)


def test_a_person_can_ask_about_one_image() -> None:
    belief, labels = blobs([15, 15, 15])
    answers = ask(belief, LabelOracle(labels, error=0).answer, 10)
    group = implied_groups(answers, 45)
    loose = int(np.flatnonzero(group < 0)[0])
    question = question_about(belief, answers, loose)
    assert question is not None
    assert question.image == loose
    placed = next(i for i in np.flatnonzero(group >= 0).tolist() if i not in exemplars(belief, answers).image)
    assert question_about(belief, answers, placed) is None
    with pytest.raises(InputError, match="image 45 does not exist"):
        question_about(belief, answers, 45)


# The density


def test_density_is_the_mean_cosine_with_the_nearest_neighbours() -> None:
    belief, _ = blobs([40, 25])
    similar = belief.features @ belief.features.T - 9 * np.eye(65, dtype=np.float32)
    expected = np.sort(similar, axis=1)[:, -20:].mean(1)
    np.testing.assert_allclose(belief.density_at(np.arange(65)), expected, rtol=1e-5)


def test_the_density_of_many_images_is_near_the_exact_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(belief_module, "_SAMPLE", 2_500)
    features = Belief.of(generator(0).standard_normal((3_000, 6)) + np.array([2, 0, 0, 0, 0, 0])).features
    some = np.arange(0, 3_000, 15)
    exact = np.sort(features[some] @ features.T, axis=1)[:, -21:-1].mean(1)
    assert np.corrcoef(Belief(features).density_at(some), exact)[0, 1] > 0.98


@few
@given(st.lists(st.integers(-5, 5), min_size=1, max_size=30))
def test_ranks_are_those_of_scipy(values: list[int]) -> None:
    expected = [(rank - 1) / max(len(values) - 1, 1) for rank in rankdata(values).tolist()]
    assert ranks(np.array(values, np.float32)).tolist() == pytest.approx(expected)


@few
@given(st.integers(1, 12), st.integers(0, 4), st.integers(0, 1000))
def test_spread_takes_the_best_of_score_and_distance_each_time(n: int, n_taken: int, seed: int) -> None:
    random = generator(seed)
    features = Belief.of(random.standard_normal((15, 4))).features
    score, taken = random.random(15).astype(np.float32), Belief.of(random.standard_normal((n_taken, 4))).features
    chosen: list[int] = []
    for row in spread(features, score, n, taken=taken, weight=2.0).tolist():
        before = np.vstack([taken, features[chosen]])
        distance = 1 - (features @ before.T).max(1, initial=-1)
        left = [other for other in range(15) if other not in chosen]
        total = score + 2 * distance / distance[left].max()
        assert total[row] >= total[left].max() - 1e-5
        chosen.append(row)
    assert len(set(chosen)) == n


def test_features_are_brought_to_length_1_and_bad_ones_refused() -> None:
    belief = Belief.of([[3, 4], [0, 0]])
    np.testing.assert_allclose(belief.features, np.array([[0.6, 0.8], [0, 0]]), rtol=1e-6)
    with pytest.raises(InputError, match="finite"):
        Belief.of([[np.nan, 1]])
    with pytest.raises(InputError, match="do not fit 2 images"):
        Belief.of([[1, 2], [3, 4]], [[1.0]])


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"kind": "triple"}, "use which, pair or triplet"),
        ({"choose": "best"}, "use recommended, uncertain or random"),
        ({"n": -1}, "from 0 up"),
        ({"candidates": [20]}, "the set has 20 images"),
        ({"seed": -1, "choose": "random"}, "seed -1"),
    ],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, Any], says: str) -> None:
    belief, _ = blobs([10, 10])
    with pytest.raises(InputError, match=says):
        next_questions(belief, [], **{"n": 1, **options})


def test_features_and_probabilities_of_different_images_are_refused() -> None:
    belief, _ = blobs([10, 10])
    assert belief.probabilities is not None
    with pytest.raises(InputError, match="19 images have probabilities and 20 have features"):
        next_questions(Belief(belief.features, belief.probabilities[:19]), [], 1)


@pytest.mark.parametrize("n", [0, 1, 2])
def test_sets_too_small_for_a_question_give_none(n: int) -> None:
    belief = Belief.of(np.ones((n, 3)), np.ones((n, 1)))
    assert len(next_questions(belief, [], 5)) == (1 if n == 2 else 0)
    assert certain_share(belief, []) == 0


def test_more_groups_than_clusters_are_held_against_each_other() -> None:
    """Two groups of one kind, never compared: the next questions find that out, and no group is forgotten."""
    labels = np.repeat(np.arange(4), 30)
    features = np.eye(4, 8, dtype=np.float32)[labels] + 0.1 * generator(3).standard_normal((120, 8)).astype(np.float32)
    probabilities = np.full((120, 4), 0.01, np.float32)
    probabilities[np.arange(120), labels] = 0.97
    belief = Belief.of(features, probabilities)
    typical = [30 * kind + np.argsort(-belief.centrality[labels == kind]) for kind in range(4)]
    pairs = [(typical[kind][at], typical[kind][at + 1]) for kind, at in ((0, 0), (1, 0), (2, 0), (3, 0), (0, 2))]
    groups = [(int(one), int(other)) for one, other in pairs]  # the first and the last are of one kind
    answers = [Answer(Question(one, (other,)), 0) for one, other in groups]
    for at in range(5):
        others = [groups[b][0] for b in range(5) if labels[groups[b][0]] != labels[groups[at][0]]]
        answers.append(Answer(Question(groups[at][0], tuple(others[:3])), NONE))

    def ask(belief: Belief, answers: Sequence[Answer]) -> list[Question]:
        with limits(width=3):  # three were shown with each: no warm-up is left
            return next_questions(belief, answers, 4)

    asked = ask(belief, answers)
    assert any(labels[question.image] == labels[shown] == 0 for question in asked for shown in question.shown)
    told = [*answers, *(LabelOracle(labels, error=0.0).answer(question) for question in asked)]
    assert implied_groups(told, 120).max() + 1 == 4
    again = ask(belief, told)
    grouped = implied_groups(told, 120) >= 0
    assert not grouped[[question.image for question in again]].any()  # nothing but new images any more
    wider = Belief.of(features, np.pad(probabilities, ((0, 0), (0, 1))))  # five clusters: five groups are welcome
    grouped = implied_groups(answers, 120) >= 0
    assert not grouped[[question.image for question in ask(wider, answers)]].any()


def test_a_second_group_that_a_wrong_answer_began_is_compared_again_with_other_images() -> None:
    labels = np.repeat(np.arange(4), 30)
    belief = crisp(labels.tolist())
    oracle = LabelOracle(labels, error=0.0)
    groups = [30 * kind for kind in range(4)] + [10]  # the last is of the first kind
    answers = [Answer(Question(one, tuple(groups[:at])), NONE) for at, one in enumerate(groups) if at]
    answers += [oracle.answer(Question(first + step, (first,))) for first in groups for step in range(1, 5)]
    taken = {frozenset((answer.question.image, shown)) for answer in answers for shown in answer.question.shown}
    for _ in range(3):
        assert implied_groups(answers, 120).max() == 4
        question = next_questions(belief, answers, 5)[0]
        assert labels[question.image] == 0
        assert not taken & {frozenset((question.image, shown)) for shown in question.shown}
        answers.append(oracle.answer(question))
    assert implied_groups(answers, 120).max() == 3
    assert implied_groups(answers, 120)[0] == implied_groups(answers, 120)[10]


@pytest.mark.parametrize(("times", "shown", "stays"), [(1, (30,), False), (2, (30,), True), (2, (), False)])
def test_an_image_that_was_chosen_twice_stays_the_exemplar(times: int, shown: tuple[int, ...], stays: bool) -> None:
    belief = crisp(np.repeat(np.arange(2), 20).tolist())
    *_, edge = order = np.argsort(-belief.centrality[:20]).tolist()
    answers = [Answer(Question(image, (edge, *shown)), 0) for image in order[:times]]
    assert (edge in exemplars(belief, answers).image) == stays


# Large sets


def many(n: int, width: int = 32) -> tuple[Belief, NDArray[np.int64]]:
    """Images of twenty kinds, quickly made; the model is unsure of most."""
    random, labels = generator(n), np.arange(n) % 20
    features = random.standard_normal((n, width), dtype=np.float32)
    features += 1.5 * random.standard_normal((20, width), dtype=np.float32)[labels]
    shares = random.random((n, 20), dtype=np.float32)
    shares[np.arange(n), labels] += 1
    return Belief.of(features, shares / shares.sum(1, keepdims=True)), labels


@contextmanager
def large_from(n: int, *, candidates: int) -> Iterator[None]:
    """Sets of more than n images count as large, and have this many candidates."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (belief_module, next_question):
            patch.setattr(module, "ALL_COMPARED", n)
            patch.setattr(module, "CANDIDATES", candidates)
        yield


@pytest.mark.parametrize("choose", ["recommended", "uncertain", "random"])
@pytest.mark.parametrize("kind", ["which", "pair"])
@pytest.mark.parametrize("model", [True, False], ids=["model", "features"])
def test_candidates_that_are_all_images_give_the_questions_of_a_small_set(
    choose: Any, kind: Any, model: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(belief_module, "_BLOCK", 400)
    belief, labels = blobs([30, 25, 20, 15], model=model)
    oracle = LabelOracle(labels, error=0.1, unsure=0.1)
    with limits(width=2):
        small = ask(belief, oracle.answer, 30, choose=choose, kind=kind)
        about = [question_about(belief, small, image, kind=kind) for image in range(0, 90, 7)]
        with large_from(10, candidates=200):
            again = Belief(belief.features, belief.probabilities)
            assert ask(again, oracle.answer, 30, choose=choose, kind=kind) == small
            assert [question_about(again, small, image, kind=kind) for image in range(0, 90, 7)] == about


def test_few_candidates_are_the_least_certain_and_some_at_equal_steps() -> None:
    belief, labels = many(2_000)
    answers = ask(belief, LabelOracle(labels, error=0).answer, 30)
    with large_from(500, candidates=100):
        uncertain = next_questions(belief, answers, 20, choose="uncertain")
        recommended = next_questions(belief, answers, 20)
        shuffled = next_questions(belief, answers, 20, choose="random")
    assert uncertain == next_questions(belief, answers, 20, choose="uncertain")
    assert shuffled == next_questions(belief, answers, 20, choose="random")
    assert len({question.image for question in recommended}) == 20


def test_what_is_asked_of_3000_images_stays() -> None:
    belief, labels = many(3_000)
    answers = ask(belief, LabelOracle(labels, error=0.05, unsure=0.05).answer, 120, batch=20)
    images = np.array([answer.question.image for answer in answers], "<i8")
    assert hashlib.sha256(images.tobytes()).hexdigest()[:16] == "2540a0d7ae3436aa"


def test_a_hundred_questions_among_200000_images_need_little_memory_and_no_densities_of_all() -> None:
    belief, labels = many(200_000, width=16)
    oracle = LabelOracle(labels, error=0)
    tracemalloc.start()
    try:
        answers = [oracle.answer(question) for question in next_questions(belief, [], 100)]
        assert len(next_questions(belief, answers, 100)) == 100
        assert tracemalloc.get_traced_memory()[1] < 160 * 2**20  # two blocks of 64 MiB, whatever the number of images
    finally:
        tracemalloc.stop()
    assert np.isnan(vars(belief)["_densities"]).mean() > 0.8


# Triplets


@given(st.integers(0, 99), CHOICES)
@few
def test_triplets_are_about_images_between_two_kinds_each_once(seed: int, choose: Any) -> None:
    belief, labels = blobs([12, 12, 12], seed=seed)
    answers = ask(belief, LabelOracle(labels, error=0).answer, 60, kind="triplet", choose=choose)
    assert answers
    assert all(answer.question.nearer for answer in answers)
    images = [answer.question.image for answer in answers]
    assert len(set(images)) == len(images)  # also those that were unsure
    assert len(links_of(answers)[0]) == 0
    assert implied_groups(answers, len(belief)).max() == -1
    for image, near, far in triplets_of(answers).rows:
        assert labels[image] == labels[near] != labels[far]


def test_recommended_triplets_are_harder_than_random_ones() -> None:
    belief, _ = blobs([40, 40, 40], seed=1)
    shares = np.sort(np.asarray(belief.probabilities), axis=1)
    doubt = 1 - (shares[:, -1] - shares[:, -2])
    found = {
        choose: np.mean([doubt[one.image] for one in next_questions(belief, [], 15, kind="triplet", choose=choose)])
        for choose in ("recommended", "random")
    }
    assert found["recommended"] > found["random"]


def test_triplets_leave_other_questions_as_they_are() -> None:
    belief, labels = blobs([12, 12, 12])
    triplets = ask(belief, LabelOracle(labels, error=0).answer, 20, kind="triplet")
    pairs = ask(belief, LabelOracle(labels, error=0).answer, 20)
    assert next_questions(belief, [*pairs, *triplets], 5) == next_questions(belief, pairs, 5)


def test_a_triplet_shows_two_images_and_has_no_none_of_these() -> None:
    with pytest.raises(InputError, match="a triplet shows 2 images with its own, not 1"):
        Question(0, (1,), nearer=True)
    with pytest.raises(InputError, match="a triplet has no answer -1"):
        Answer(Question(0, (1, 2), nearer=True), NONE)
