"""What a training is asked, completed from records: recipes that came up after a run was made."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from constraintmatch._internal.errors import InputError
from constraintmatch._internal.progress import Reporter
from constraintmatch.constraints.constraint_set import Constraints
from constraintmatch.data.datasets import load_dataset
from constraintmatch.models.cluster_model import build_model, save_model
from constraintmatch.pipeline.plan import Plan, Train, plan_training


@pytest.fixture
def pairs(tmp_path: Path) -> Path:
    digits = load_dataset("digits", "train")
    assert digits.labels is not None
    Constraints.sample(digits.labels, 60, seed=0).write(tmp_path / "pairs.csv", names=digits.names)
    save_model(build_model(n_clusters=10, side=8, channels=1), tmp_path / "start")
    return tmp_path / "pairs.csv"


def planned(pairs: Path, **more: object) -> Plan:
    asked = {"data": "digits", "pairs": pairs, "model": pairs.with_name("start"), "out": pairs.with_name("run")}
    return plan_training(Train(**{**asked, "settings": {"device": "cpu"}, **more}), Reporter())  # type: ignore[arg-type]


def test_a_training_is_safe_unless_it_is_asked_otherwise(pairs: Path) -> None:
    assert planned(pairs).config.arguments["recipe"] == "safe"
    assert planned(pairs, arguments={"recipe": "paper"}).config.arguments["recipe"] == "paper"
    with pytest.raises(InputError, match="unknown recipe 'bold'; known are safe, paper"):
        planned(pairs, arguments={"recipe": "bold"})


@pytest.mark.parametrize(("recorded", "recipe"), [({}, "paper"), ({"recipe": "safe"}, "safe")])
def test_a_run_of_before_there_were_recipes_is_repeated_by_the_papers(
    pairs: Path, recorded: dict[str, str], recipe: str
) -> None:
    record = {
        "method": "constraintmatch",
        "data": {"source": "digits", "start": {"model": str(pairs.with_name("start"))}},
        "model": {"n_clusters": 10, "backbone": "tiny"},
        "views": {"flip": False, "without": []},
        "arguments": {"pseudo_weight": 0.5, **recorded},
        "settings": {"steps": 7},
    }
    file = pairs.with_name("run.json")
    file.write_text(json.dumps({"request": record}))
    plan = planned(pairs, data=None, model=None, from_run=file)
    assert (plan.config.arguments["recipe"], plan.config.arguments["pseudo_weight"], plan.config.settings.steps) == (
        recipe,
        0.5,
        7,
    )


def test_contradictions_are_left_out_by_the_safe_recipe_and_refused_by_the_papers(pairs: Path) -> None:
    first = pairs.read_text().splitlines()[1].split(",")
    with pairs.open("a") as file:
        file.write(",".join([first[0], first[1], str(1 - float(first[2])), *first[3:]]) + "\n")
    kept = planned(pairs).pairs
    assert kept is not None
    assert len(kept) == 60
    with pytest.raises(InputError, match="contradict"):
        planned(pairs, arguments={"recipe": "paper"})


def test_a_training_takes_files_of_several_kinds_and_says_what_it_leaves_out(pairs: Path) -> None:
    files = {
        "labels": "image,label\n0,one\n1,two\n2,one\n",
        "triplets": "anchor,near,far\n0,2,1\n5,6,7\n5,7,6\n",
        "sizes": "least,most\n0.05,0.2\n",
    }
    for name, text in files.items():
        pairs.with_name(f"{name}.csv").write_text(text)
    said: list[str] = []
    several = [pairs, *(pairs.with_name(f"{name}.csv") for name in files)]
    asked = Train("digits", several, model=pairs.with_name("start"), out=pairs.with_name("run"))
    reporter = Reporter()
    reporter.say = said.append  # type: ignore[method-assign]
    plan = plan_training(asked, reporter)
    assert plan.pairs is not None
    assert (len(plan.pairs), plan.pairs.triplets.rows.tolist()) == (63, [[0, 2, 1]])
    assert plan.pairs.sizes is not None
    assert any(
        "triplets.csv lines 3, 4: triplets in a circle cannot all be true and are left out" in line for line in said
    )
    assert any("63 pairs" in line and "1 triplets" in line for line in said)
    with pytest.raises(InputError, match=r"none\.csv: no such file"):
        plan_training(replace(asked, pairs=[pairs, pairs.with_name("none.csv")]), Reporter())
    with pytest.raises(InputError, match=r"triplets\.csv lines 3, 4: triplets in a circle.*on_conflict=drop"):
        plan_training(replace(asked, arguments={"recipe": "paper"}), Reporter())
