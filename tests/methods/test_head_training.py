"""The head of a network, taught alone before the network is."""

import copy
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from by_name import run_method

from constraintmatch._internal.errors import InputError
from constraintmatch._internal.progress import Reporter
from constraintmatch.constraints.constraint_set import Constraints
from constraintmatch.data.image_set import ImageSet
from constraintmatch.evaluation.metrics import accuracy, predict
from constraintmatch.methods import METHODS, Context
from constraintmatch.methods.heads import attach_head, detach_head, embed_images
from constraintmatch.models.cluster_model import ClusterModel, build_model
from constraintmatch.training.loop import TrainSettings

pytestmark = pytest.mark.usefixtures("narrow_networks")


def test_a_head_that_learns_nothing_comes_back_as_it_was(stripes: ImageSet) -> None:
    model = build_model(n_clusters=3, side=8, channels=1, seed=2)
    before = predict(model, stripes).probabilities
    embeddings = embed_images(model, stripes)
    assert embeddings.embedded
    assert embeddings.names == stripes.names
    head = detach_head(model, embeddings)
    np.testing.assert_allclose(predict(head, embeddings).probabilities, before, atol=1e-5)
    np.testing.assert_allclose(predict(attach_head(model, head), stripes).probabilities, before, atol=1e-5)


@pytest.mark.parametrize("method", ["constraintmatch", "constrained", "pseudo_label"])
def test_the_head_learns_first_and_the_backbone_waits(stripes: ImageSet, method: str) -> None:
    assert stripes.labels is not None
    pairs = Constraints.sample(stripes.labels, 200, seed=0)
    settings = TrainSettings(steps=1, lr=1e-9, device="cpu")  # the network itself hardly moves
    sizes = {"pairs_per_step": 20, **({} if method == "constrained" else {"images_per_step": 30})}
    start = build_model(n_clusters=3, side=8, channels=1, seed=2)
    weights = {name: value.clone() for name, value in start.backbone.named_parameters()}

    def trained(head_steps: int) -> ClusterModel:
        return METHODS[method](
            copy.deepcopy(start), stripes, pairs, settings=settings, head_steps=head_steps, **sizes
        ).model

    plain, headed = trained(0), trained(60)
    for name, value in headed.backbone.named_parameters():
        torch.testing.assert_close(value, weights[name], atol=1e-5, rtol=0)
    assert accuracy(stripes.labels, predict(plain, stripes).clusters) < 0.9
    assert accuracy(stripes.labels, predict(headed, stripes).clusters) > 0.95
    with pytest.raises(InputError, match="head_steps is -1; it must be 0 or more"):
        trained(-1)


def test_a_resumed_run_does_not_teach_the_head_again(stripes: ImageSet, tmp_path: Path) -> None:
    assert stripes.labels is not None
    pairs = Constraints.sample(stripes.labels, 200, seed=0)
    arguments = {"pairs_per_step": 5, "images_per_step": 8, "head_steps": 5}
    settings = TrainSettings(steps=8, device="cpu", checkpoint_every=2, log_every=4)
    start = build_model(n_clusters=3, side=8, channels=1, seed=2)

    class Watching(Reporter):
        """Notes what is started, and may press Ctrl-C after four steps of the network."""

        def __init__(self, *, stops: bool = False) -> None:
            self.stops, self.titles = stops, list[str]()

        def start(self, title: str, total: int, done: int = 0) -> None:
            self.titles.append(f"{title} from {done} of {total}")

        def update(self, done: int, values: Mapping[str, float] | None = None) -> None:
            if self.stops and values and done == 4 and self.titles[-1] == "constraintmatch from 0 of 8":
                raise KeyboardInterrupt

    def run(out: Path, reporter: Reporter, *, resume: bool = False) -> ClusterModel:
        context = Context(out=out, resume=resume, reporter=reporter)
        given = {"arguments": arguments, "settings": settings, "context": context}
        return run_method("constraintmatch", copy.deepcopy(start), stripes, pairs, **given).model

    first, second = Watching(), Watching()
    whole = run(tmp_path / "whole", first)
    assert first.titles == ["constraintmatch, head alone from 0 of 5", "constraintmatch from 0 of 8"]
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "parts", Watching(stops=True))
    again = run(tmp_path / "parts", second, resume=True)
    assert second.titles == ["constraintmatch from 2 of 8"]
    np.testing.assert_array_equal(predict(again, stripes).probabilities, predict(whole, stripes).probabilities)
