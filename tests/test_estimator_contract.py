"""scikit-learn's own tools work with the estimator: checks, clones, searches, pipelines, routing, pickles, frames."""

import doctest
import importlib
import inspect
import os
import pickle
import re
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from sklearn import config_context
from sklearn.base import clone
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

import constraintmatch
from constraintmatch import ConstraintMatch, Constraints, ImageSet, InputError

# after a step or two everything may still be in one cluster: that is what the warning is for
pytestmark = pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")

FAST: dict[str, Any] = {"n_clusters": 3, "start": None, "recipe": "paper", "steps": 2, "device": "cpu"}
FAST |= {"pairs_per_step": 8, "images_per_step": 12, "random_state": 0}
KNOBS = {"pseudo_weight": 0.5, "max_entropy": 0.3, "error_rate": 0.1, "pairs_per_step": 7, "images_per_step": 9}

ONE_CLUSTER = "the check sets n_clusters=1, and one cluster is refused: there is nothing to find"
EXPECTED = dict.fromkeys(
    (
        "check_dont_overwrite_parameters",
        "check_methods_subset_invariance",
        "check_fit2d_1sample",
        "check_fit2d_1feature",
        "check_fit2d_predict1d",
    ),
    ONE_CLUSTER,
)


class Paired(ConstraintMatch):
    """The estimator with a pair of its own: the checks know no constraints, and it refuses to train without."""

    def fit(self, X: Any, y: Any = None, *, constraints: Any = None) -> "Paired":
        return super().fit(X, y, constraints=[(0, 1, 0.5)] if constraints is None else constraints)


@pytest.fixture(scope="module")
def table(stripes: ImageSet) -> np.ndarray:
    """The stripes as embeddings: 60 rows of 64 numbers."""
    return stripes.images.reshape(60, -1) / 255.0


@pytest.fixture(scope="module")
def pairs(stripes: ImageSet) -> Constraints:
    """As many pairs as rows: scikit-learn takes what is as long as X for something to split with it."""
    return Constraints.sample(stripes.labels, 60, seed=0)


@pytest.fixture(scope="module")
def fitted(table: np.ndarray, pairs: Constraints) -> ConstraintMatch:
    return ConstraintMatch(**FAST).fit(table, constraints=pairs)


def test_the_checks_of_scikit_learn_pass_on_embeddings() -> None:
    from sklearn.utils.estimator_checks import check_estimator  # half a second, of one worker

    results = check_estimator(Paired(**FAST | {"n_clusters": 2}), expected_failed_checks=EXPECTED, on_skip=None)
    assert {result["check_name"] for result in results if result["status"] == "xfail"} == EXPECTED.keys()
    assert sum(result["status"] == "passed" for result in results) > 35


def test_rows_alone_or_together_are_placed_the_same(fitted: ConstraintMatch, table: np.ndarray) -> None:
    alone = np.concatenate([fitted.predict_proba(row[None]) for row in table[:5]])
    np.testing.assert_allclose(alone, fitted.predict_proba(table)[:5], rtol=1e-5)
    with pytest.raises(InputError, match="Expected 2D array, got 1D array"):
        fitted.predict(table[0])


# Parameters


def test_the_docstring_has_every_parameter_in_order() -> None:
    text = inspect.getdoc(ConstraintMatch)
    assert text is not None
    listed = text[text.index("Parameters\n") : text.index("Attributes\n")]
    assert re.findall(r"^(\w+) : ", listed, re.MULTILINE) == list(inspect.signature(ConstraintMatch).parameters)


def test_parameters_reach_the_training(table: np.ndarray, pairs: Constraints) -> None:
    made = clone(ConstraintMatch(**FAST)).set_params(**KNOBS, lr=0.02, steps=3).fit(table, constraints=pairs)
    stage = made.model_.config.trained[-1]
    assert KNOBS.items() <= stage["arguments"].items()
    assert (stage["lr"], stage["steps"], made.n_iter_) == (0.02, 3, 3)


def test_options_of_the_same_names_do_the_same(fitted: ConstraintMatch, table: np.ndarray, pairs: Constraints) -> None:
    named = ("recipe", "steps", "pairs_per_step", "images_per_step")
    moved = {name: value for name, value in FAST.items() if name not in named}
    made = ConstraintMatch(**moved, options={name: FAST[name] for name in named}).fit(table, pairs)
    np.testing.assert_array_equal(made.predict_proba(table), fitted.predict_proba(table))


# Constraints


def test_constraints_by_name_and_in_second_place_are_the_same(
    fitted: ConstraintMatch, table: np.ndarray, pairs: Constraints, stripes: ImageSet
) -> None:
    wanted = fitted.predict_proba(table)
    for second, named in ((pairs, None), (np.asarray(pairs)[:, :3], None), (stripes.labels, pairs)):
        made = ConstraintMatch(**FAST).fit(table, second, constraints=named)
        np.testing.assert_array_equal(made.predict_proba(table), wanted)
    np.testing.assert_array_equal(ConstraintMatch(**FAST).fit_predict(table, constraints=pairs), fitted.labels_)
    features = ConstraintMatch(**FAST).fit_transform(table, constraints=pairs)
    np.testing.assert_array_equal(features, fitted.transform(table))


def test_labels_alone_are_not_enough(table: np.ndarray, stripes: ImageSet) -> None:
    with pytest.raises(InputError, match=r"none; give some: .*; y is not used, but Constraints\.sample\(y, 300"):
        ConstraintMatch(**FAST).fit(table, stripes.labels)


@pytest.mark.parametrize("routed", [True, False])
def test_a_pipeline_hands_constraints_on(table: np.ndarray, pairs: Constraints, routed: bool) -> None:
    scaled = StandardScaler().fit_transform(table)
    wanted = ConstraintMatch(**FAST).fit(scaled, pairs).predict_proba(scaled)
    with config_context(enable_metadata_routing=routed):
        last = ConstraintMatch(**FAST)
        line = make_pipeline(StandardScaler(), last.set_fit_request(constraints=True) if routed else last)
        line.fit(table, **{"constraints" if routed else "constraintmatch__constraints": pairs})
        np.testing.assert_array_equal(line.predict_proba(table), wanted)
        labels = line.fit_predict(table, **{"constraints" if routed else "constraintmatch__constraints": pairs})
    np.testing.assert_array_equal(labels, wanted.argmax(1))


@pytest.mark.parametrize("routed", [True, False])
def test_a_search_reaches_parameters_and_hands_constraints_on(
    table: np.ndarray, pairs: Constraints, stripes: ImageSet, routed: bool
) -> None:
    rows = np.arange(60)
    grid = {"pseudo_weight": [0.0, 2.0], "lr": [0.01, 0.1]}
    with config_context(enable_metadata_routing=routed):
        search = GridSearchCV(ConstraintMatch(**FAST), grid, cv=[(rows, rows)], error_score="raise")
        search.fit(table, stripes.labels, constraints=pairs)
    assert len(search.cv_results_["params"]) == 4
    stage = search.best_estimator_.model_.config.trained[-1]
    assert {"pseudo_weight": stage["arguments"]["pseudo_weight"], "lr": stage["lr"]} == search.best_params_
    assert search.best_score_ == search.best_estimator_.score(table, stripes.labels)


def test_a_search_that_splits_the_rows_says_so(table: np.ndarray, stripes: ImageSet) -> None:
    pairs = Constraints.sample(stripes.labels, 50, seed=0)
    search = GridSearchCV(ConstraintMatch(**FAST), {"lr": [0.1]}, cv=3, error_score="raise")
    with pytest.raises(InputError, match=r"over 60 images, the set has 40; .* cv=\[\(rows, rows\)\]"):
        search.fit(table, stripes.labels, constraints=pairs)


# Keeping and showing


def test_a_pickled_estimator_predicts_the_same(fitted: ConstraintMatch, table: np.ndarray) -> None:
    model = fitted.model_
    again = pickle.loads(pickle.dumps(fitted))
    assert fitted.model_ is model
    assert again.get_params() == fitted.get_params()
    np.testing.assert_array_equal(again.predict_proba(table), fitted.predict_proba(table))
    np.testing.assert_array_equal(again.labels_, fitted.labels_)
    assert not hasattr(pickle.loads(pickle.dumps(ConstraintMatch(3))), "model_")


def test_features_have_names_and_can_become_a_frame(fitted: ConstraintMatch, table: np.ndarray) -> None:
    names = fitted.get_feature_names_out()
    assert names.tolist() == [f"constraintmatch{column}" for column in range(64)]
    assert fitted.set_output(transform="default") is fitted
    pandas = pytest.importorskip("pandas")
    given = pandas.DataFrame(table, columns=[f"pixel {column}" for column in range(64)])
    made = clone(fitted).set_output(transform="pandas")
    assert made.fit_transform(given, [(0, 1, 1)]).columns.tolist() == names.tolist()
    assert made.feature_names_in_.tolist() == given.columns.tolist()
    assert not hasattr(made.fit(ImageSet.from_arrays(table), [(0, 1, 1)]), "feature_names_in_")


@pytest.mark.usefixtures("quick_heads")
def test_the_example_of_the_docstring_runs() -> None:
    (example,) = [test for test in doctest.DocTestFinder(recurse=False).find(ConstraintMatch) if test.examples]
    assert len(example.examples) > 5
    assert doctest.DocTestRunner().run(example).failed == 0


# The package


def test_the_package_offers_exactly_its_public_names() -> None:
    names = ["ClusterModel", "ConstraintMatch", "Constraints", "ImageSet", "InputError", "load_dataset", "load_model"]
    assert dir(constraintmatch) == sorted([*names, "__version__"])
    assert sorted(constraintmatch.__all__) == dir(constraintmatch)
    for name in names:
        found = constraintmatch.__getattr__(name)
        assert found.__name__ == name
        assert found.__module__.startswith("constraintmatch.")
    assert constraintmatch.__version__[0].isdigit()
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = constraintmatch.nonsense


def test_the_import_of_the_package_is_quick_and_light() -> None:
    code = (
        "import sys, time; begun = time.process_time(); import constraintmatch; dir(constraintmatch);"
        "assert time.process_time() - begun < 0.15;"
        "print([name for name in ('torch', 'sklearn', 'numpy') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_waiting_threads_sleep_unless_the_user_wants_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    importlib.reload(constraintmatch)
    assert os.environ["OMP_WAIT_POLICY"] == "ACTIVE"
    monkeypatch.delenv("OMP_WAIT_POLICY")
    importlib.reload(constraintmatch)
    assert os.environ["OMP_WAIT_POLICY"] == "PASSIVE"
