"""The clusterer with scikit-learn's contract: `ConstraintMatch(n_clusters=…).fit(images, constraints).labels_`."""

import copy
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.sparse import issparse
from sklearn.base import BaseEstimator, ClusterMixin, TransformerMixin
from sklearn.exceptions import ConvergenceWarning
from sklearn.utils.validation import check_is_fitted

from constraintmatch.batches import derive_seed
from constraintmatch.constraints import Constraints
from constraintmatch.errors import InputError
from constraintmatch.evaluation import Predictions, accuracy, collapse_warnings, embed, predict
from constraintmatch.images import ImageSet, load_images
from constraintmatch.methods import METHODS, ViewChoice
from constraintmatch.methods.preparation import check_images
from constraintmatch.models import ClusterModel, build_model, load_model, save_model
from constraintmatch.pretraining import ORDER, PRETEXTS, pretrain, short_start, training_size
from constraintmatch.progress import Quiet, console_reporter
from constraintmatch.running import Around, check_kinds, method_arguments, method_settings, run_method
from constraintmatch.training import TrainSettings, choose_device
from constraintmatch.views import View

__all__ = ["ConstraintMatch", "as_constraints", "as_images"]

Images = ImageSet | ArrayLike | Path | str
Pairs = Constraints | Mapping[str, Any] | Sequence[Any] | Path | str | Any  # Any: a sparse matrix

SELF_SUPERVISED = "self-supervised"
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
ELSEWHERE = {"steps": "steps", "device": "device", "seed": "random_state"}  # settings with a parameter of their own
SETTINGS = {entry.name for entry in fields(TrainSettings)} - ELSEWHERE.keys()
OWN_VIEWS = ("own_weak", "own_strong", "own_contrastive")


@dataclass(frozen=True)
class _Plan:
    """What a fit will do, checked before the first step of its start."""

    method: str
    arguments: dict[str, Any]
    settings: TrainSettings
    recipe: dict[str, dict[str, Any]]  # of the self-supervised start, by stage
    around: Around


# auto_wrap_output_keys=None: scikit-learn would wrap `transform` for data frames and rename its argument
class ConstraintMatch(  # type: ignore[call-arg]
    ClusterMixin,  # type: ignore[misc]
    TransformerMixin,  # type: ignore[misc]
    BaseEstimator,  # type: ignore[misc]
    auto_wrap_output_keys=None,
):
    """Clusters of images, or of their embeddings, from a few pairs that belong together or apart.

    Parameters
    ----------
    n_clusters : 2 or more.
    method : "constraintmatch", "constrained" or "pseudo_label"; "propagate" trains nothing and tells the head what
        answers in groups say; "supervised" and "fully_constrained" learn from labels. The first three keep the start
        unless held-out pairs say that the training is better; options={"recipe": "paper"} trains as published.
    backbone : "tiny", "resnet18", "resnet34" or "timm:NAME"; None chooses by the side of the images. Embeddings
        need none.
    start : what training starts from: "self-supervised" (SimCLR and linear heads, kept short),
        None (random weights), a model or run folder, or a `ClusterModel` (which is left as it is). A start without
        clusters, such as `build_model(n_clusters=0, backbone="timm:NAME", pretrained=True, …)`, takes SimCLR's place.
    steps : training steps; None: enough for 100 passes over the images, 500 to 20,000 (on a CPU to 1,000).
    device : "cuda", "mps" or "cpu"; None takes the first of these that is there.
    random_state : a seed, a RandomState or Generator to draw one from, or None for a new one (`seed_` tells it).
    flip : whether a mirrored image still belongs to its cluster (not so for digits and letters).
    without : operations to leave out of the strong views, such as ("solarize", "rotate").
    options : further arguments of the method (`pseudo_weight`, `max_entropy`, …), training settings (`lr`, `ema`, …),
        own views (`own_weak`, `own_strong`, `own_contrastive`), and for each stage of the self-supervised start a
        dict of the same kind, such as {"simclr": {"epochs": 500}}.
    verbose : whether to show progress.

    After `fit`: `labels_` (the cluster of each image), `model_`, `log_` and `seed_`.
    """

    def __init__(
        self,
        n_clusters: int,
        *,
        method: str = "constraintmatch",
        backbone: str | None = None,
        start: str | Path | ClusterModel | None = SELF_SUPERVISED,
        steps: int | None = None,
        device: str | None = None,
        random_state: int | np.random.RandomState | np.random.Generator | None = None,
        flip: bool = True,
        without: Sequence[str] = (),
        options: Mapping[str, Any] | None = None,
        verbose: bool = False,
    ) -> None:
        self.n_clusters = n_clusters
        self.method = method
        self.backbone = backbone
        self.start = start
        self.steps = steps
        self.device = device
        self.random_state = random_state
        self.flip = flip
        self.without = without
        self.options = options
        self.verbose = verbose

    def fit(self, images: Images, constraints: Pairs = None) -> Self:
        """The estimator, trained on images (see `as_images`) and pairs (see `as_constraints`)."""
        start = self._loaded_start()
        images = as_images(images, start)
        pairs = as_constraints(constraints, images)
        _check_clusters(self.n_clusters, len(images))
        _check_pairs(self.method, pairs, images)
        seed = _seed(self.random_state)
        plan = self._plan(images, seed)
        model, log = run_method(
            plan.method,
            self._started(start, images, plan, seed),
            images,
            pairs,
            arguments=plan.arguments,
            settings=plan.settings,
            around=plan.around,
        )
        self.model_, self.log_, self.seed_ = _noted(model, plan, images).eval(), log, seed
        predictions = predict(model, images)
        self.labels_ = predictions.clusters
        for sign in collapse_warnings(predictions):
            warnings.warn(sign, ConvergenceWarning, stacklevel=2)
        return self

    def fit_predict(self, images: Images, constraints: Pairs = None) -> NDArray[np.int64]:
        """The cluster of each image after `fit`."""
        return self.fit(images, constraints).labels_

    def predict(self, images: Images) -> NDArray[np.int64]:
        """The cluster (n,) of each image; they need not be those of `fit`."""
        return self._predictions(images).clusters

    def predict_proba(self, images: Images) -> NDArray[np.float32]:
        """The probability (n, n_clusters) of each cluster for each image."""
        return self._predictions(images).probabilities

    def transform(self, images: Images) -> NDArray[np.float32]:
        """The features (n, width) of the images in the last layer before the clusters."""
        check_is_fitted(self, "model_")
        return embed(self.model_, self._seen(images))

    def score(self, images: Images, y: ArrayLike | None = None) -> float:
        """The share of images in the cluster that is matched with their class; classes from `y` or the set's labels."""
        check_is_fitted(self, "model_")
        seen = self._seen(images)
        labels = seen.labels if y is None else _as_labels(y)
        if labels is None:
            raise InputError("score needs the labels of the images: give an ImageSet with labels, or score(images, y)")
        return accuracy(labels, predict(self.model_, seen).clusters)

    def save_pretrained(self, folder: Path | str, *, half: bool = False) -> None:
        """Write the model folder (`config.json`, `model.safetensors`; fp16 when `half`), which every command takes."""
        check_is_fitted(self, "model_")
        save_model(self.model_, folder, half=half)

    @classmethod
    def from_pretrained(cls, source: Path | str, *, device: str | None = None, revision: str | None = None) -> Self:
        """A fitted estimator from a model or run folder, or else from the Hugging Face hub by `owner/name`."""
        folder = Path(source) if Path(source).exists() else _from_hub(str(source), revision)
        model = load_model(folder, device=choose_device(device))
        if model.config.n_clusters == 0:
            raise InputError(f"{source}: this model has no clusters yet; use it as start= of a new estimator")
        made = cls(model.config.n_clusters, backbone=model.config.backbone, start=None, device=device)
        made.model_ = model.eval()
        return made

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.two_d_array, tags.input_tags.three_d_array = True, True
        return tags

    def _predictions(self, images: Images) -> Predictions:
        check_is_fitted(self, "model_")
        return predict(self.model_, self._seen(images))

    def _seen(self, images: Images) -> ImageSet:
        seen = as_images(images, self.model_)
        check_images(self.model_, seen)
        return seen

    def _loaded_start(self) -> ClusterModel | None:
        """The model given to start from, never the caller's own; None when one has to be made."""
        if self.start is None or (isinstance(self.start, str) and self.start == SELF_SUPERVISED):
            return None
        if not isinstance(self.start, ClusterModel | Path | str):
            raise InputError(f"start is {self.start!r}; give a model, its folder, {SELF_SUPERVISED!r} or None")
        model = copy.deepcopy(self.start) if isinstance(self.start, ClusterModel) else load_model(self.start)
        if self.backbone not in (None, model.config.backbone):
            raise InputError(
                f"backbone is {self.backbone!r} and the start has {model.config.backbone!r}; leave one out"
            )
        if model.config.n_clusters not in (0, self.n_clusters):
            mend = "ask for as many, or give it another head: with_clusters(model, n)"
            raise InputError(
                f"the start has {model.config.n_clusters} clusters, n_clusters is {self.n_clusters}; {mend}"
            )
        return model

    def _started(self, start: ClusterModel | None, images: ImageSet, plan: _Plan, seed: int) -> ClusterModel:
        """The model to train: the start itself, or after those stages of the self-supervised start that it lacks."""
        if start is None:
            mean, std = images.moments() if images.embedded else (None, None)
            start = build_model(
                n_clusters=self.n_clusters if self.start is None else 0,
                side=images.side,
                channels=images.channels,
                backbone=self.backbone,
                mean=mean,
                std=std,
                seed=derive_seed(seed, "weights"),
            )
        if start.config.n_clusters:
            return start
        # a given backbone stands for SimCLR, and so do embeddings
        made = isinstance(self.start, str) and self.start == SELF_SUPERVISED and not images.embedded
        stages = [stage for stage in ORDER if stage in plan.recipe and (made or stage not in PRETEXTS)]
        given = {"seed": seed, "device": self.device}
        return pretrain(
            start, images, self.n_clusters, stages=stages, recipe=plan.recipe, settings=given, around=plan.around
        )

    def _plan(self, images: ImageSet, seed: int) -> _Plan:
        """Everything the fit needs from the parameters; what cannot be used is an InputError."""
        known = _known_method(self.method)
        if not isinstance(self.options or {}, Mapping):
            raise InputError(f"options is {self.options!r}; give a dictionary, such as {{'lr': 0.01}}")
        asked = dict(self.options or {})
        cpu = choose_device(self.device).type == "cpu"
        asked_start = {stage: asked.pop(stage) for stage in ORDER if stage in asked}
        recipe = _start_recipe(short_start(len(images), cpu=cpu), asked_start)
        own = {name: asked.pop(name) for name in OWN_VIEWS if name in asked}
        size = training_size(len(images), cpu=cpu)
        arguments = {name: value for name, value in {"recipe": "safe", **size}.items() if name in known}
        arguments |= {name: asked.pop(name) for name in known & asked.keys()}
        _check_options(asked, self.method, known)
        check_kinds(self.method, arguments, {key: of.default for key, of in method_arguments(self.method).items()})
        steps = size["steps"] if self.steps is None else self.steps
        settings = {"lr": size["lr"]} | asked | {"steps": steps, "seed": seed, "device": self.device}
        views = self._views(images, own)
        reporter = console_reporter() if self.verbose else Quiet()
        around = Around(reporter=reporter, views=views)
        return _Plan(self.method, arguments, method_settings(self.method, settings), recipe, around)

    def _views(self, images: ImageSet, own: Mapping[str, Any]) -> ViewChoice:
        """The views of the images; names that are no operations are found here, not after the start."""
        if odd := [name for name, view in own.items() if view is not None and not isinstance(view, View)]:
            raise InputError(f"options: {odd[0]} is {own[odd[0]]!r}; make a view with views.from_function")
        if not isinstance(self.without, Iterable):
            raise InputError(f"without is {self.without!r}; name the operations to leave out, such as ['rotate']")
        without = (self.without,) if isinstance(self.without, str) else tuple(self.without)
        views = ViewChoice(flip=self.flip, without=without, **own)
        views.strong(images)
        return views


def as_images(images: Images, model: ClusterModel | None = None) -> ImageSet:
    """An ImageSet from one, from an array (n, h, w[, c]), or from a folder or .npy/.npz file, at the model's size.

    An array (n, d) has embeddings.
    """
    if isinstance(images, ImageSet):
        return images
    if isinstance(images, Path | str):
        side, channels = (None, None) if model is None else (model.config.side, model.config.channels)
        return load_images(images, side=side, channels=channels)
    return ImageSet.from_arrays(images)


def as_constraints(constraints: Pairs, images: ImageSet) -> Constraints | None:
    """Constraints over the images from what people have; None stays None.

    Taken are `Constraints`, a pairs file, columns (left, right, link), a list of such triples,
    {"must_link": [(i, j), …], "cannot_link": […]}, and a square matrix of 1, −1 and 0. `Constraints` are used as they
    are; in all others a contradiction is an error.
    """
    if constraints is None or isinstance(constraints, Constraints):
        return constraints
    n = len(images)
    if isinstance(constraints, Path | str):
        made = Constraints.read(constraints, names=images.names, n_images=n)
    elif isinstance(constraints, Mapping):
        if odd := sorted(map(str, constraints.keys() - {"must_link", "cannot_link"})):
            raise InputError(f"constraints: unknown key {odd[0]!r}; known are must_link, cannot_link")
        made = Constraints.from_lists(n_images=n, **constraints)
    elif issparse(constraints) or (isinstance(constraints, np.ndarray) and constraints.ndim == 2):
        made = Constraints.from_matrix(constraints)
    elif isinstance(constraints, list | tuple) and (columns := _columns(constraints)) is not None:
        made = Constraints.from_arrays(*columns, n_images=n)
    else:
        raise InputError(
            "constraints must be Constraints, a pairs file, columns (left, right, link), a list of such triples, "
            "a dict with must_link and cannot_link, or a square matrix of 1, -1 and 0"
        )
    return made.resolve("error", names=images.names)


def _as_labels(y: ArrayLike) -> NDArray[Any]:
    """Labels as numbers, from numbers or words; a label that is missing is an InputError."""
    labels = np.asarray(y)
    if labels.ndim == 2 and labels.shape[1] == 1:
        labels = labels[:, 0]
    if labels.ndim != 1:
        raise InputError(f"y has the shape {labels.shape}; give one label for each image")
    missing = np.array([label is None or label != label for label in labels.tolist()], bool)  # NaN is not itself
    if missing.any():
        raise InputError(f"image {int(missing.argmax()):,} has no label in y; leave it out")
    if labels.dtype.kind in "iu":
        return labels
    return np.unique(labels.astype(str) if labels.dtype.kind == "O" else labels, return_inverse=True)[1]


def _columns(given: Sequence[Any]) -> Sequence[Any] | None:
    """Left, right and link as columns, from columns or from triples; None: neither. Three by three may be both."""
    triples = len(given) > 0 and all(isinstance(item, list | tuple) and len(item) == 3 for item in given)
    if triples and len(given) == 3:
        as_tuples = [isinstance(item, tuple) for item in given]
        if isinstance(given, tuple) == all(as_tuples) or any(as_tuples) != all(as_tuples):
            raise InputError(
                "constraints: three columns or three triples (left, right, link)? give a tuple of lists for columns, "
                "a list of tuples for triples"
            )
        triples = all(as_tuples)
    if triples:
        return list(zip(*given, strict=True))
    return given if len(given) == 3 else None


def _known_method(name: str) -> set[str]:
    """The names of a method's arguments; a stage of the start is no method here."""
    if name in ORDER or name not in METHODS:
        known = ", ".join(method for method in METHODS if method not in ORDER)
        raise InputError(f"unknown method {name!r}; known are {known}")
    return set(method_arguments(name))


def _start_recipe(
    short: dict[str, dict[str, Any]], asked: Mapping[str, Mapping[str, Any]]
) -> dict[str, dict[str, Any]]:
    """The short recipe with what was asked for its stages; a stage it lacks is added when asked for.

    Another pretext task takes the place of the short recipe's, with as many epochs unless it says how many.
    """
    for stage, options in asked.items():
        if not isinstance(options, Mapping):
            raise InputError(f"options: {stage} is {options!r}; give a dictionary, such as {{'epochs': 20}}")
        known = method_arguments(stage).keys() - {"n_clusters"} | SETTINGS - {"steps"}  # steps follow from the epochs
        if unknown := sorted(options.keys() - known):
            raise InputError(f"options: {stage} knows no {unknown[0]!r}; it knows {', '.join(sorted(known))}")
    if other := [stage for stage in asked if stage in PRETEXTS and stage not in short]:
        short = {other[0] if stage in PRETEXTS else stage: options for stage, options in short.items()}
    return {stage: {**short.get(stage, {}), **asked.get(stage, {})} for stage in ORDER if stage in {*short, *asked}}


def _check_clusters(n_clusters: Any, n_images: int) -> None:
    if isinstance(n_clusters, bool) or not isinstance(n_clusters, int | np.integer):
        raise InputError(f"n_clusters is {n_clusters!r}; it must be a whole number, 2 or more")
    if n_clusters < 2:
        raise InputError(f"n_clusters is {n_clusters}; ask for 2 or more")
    if n_images < n_clusters:
        raise InputError(f"{n_clusters:,} clusters for {n_images:,} images: there must be at least one image each")


def _check_pairs(method: str, pairs: Constraints | None, images: ImageSet) -> None:
    if method not in ("supervised", "fully_constrained") and (pairs is None or len(pairs) == 0):
        raise InputError(f"{method} needs constraints and there are none; sample or answer some pairs first")
    if pairs is not None and pairs.n_images != len(images):
        raise InputError(f"the constraints are over {pairs.n_images:,} images, the set has {len(images):,}")


def _check_options(rest: Mapping[str, Any], method: str, arguments: set[str]) -> None:
    """What is left of the options must be training settings without a parameter of their own."""
    for name in rest:
        if name in ELSEWHERE:
            raise InputError(f"options: {name!r} has a parameter of its own, {ELSEWHERE[name]}")
    if unknown := sorted(map(str, rest.keys() - SETTINGS)):
        known = ", ".join(sorted({*arguments, *SETTINGS, *OWN_VIEWS, *ORDER}))
        raise InputError(f"options: {unknown[0]!r} means nothing to {method}; known are {known}")


def _seed(state: Any) -> int:
    """A seed from a seed, from a generator's next draw, or from the system."""
    if state is None:
        state = np.random.default_rng()
    if isinstance(state, np.random.Generator):
        return int(state.integers(2**31))
    if isinstance(state, np.random.RandomState):
        return int(state.randint(2**31 - 1))
    if isinstance(state, bool) or not isinstance(state, int | np.integer) or state < 0:
        raise InputError(f"random_state is {state!r}; give a whole number from 0, a RandomState, a Generator or None")
    return int(state)


def _noted(model: ClusterModel, plan: _Plan, images: ImageSet) -> ClusterModel:
    """The model with this training in its configuration, as a run folder would have noted it."""
    data = {"images": len(images), "fingerprint": images.fingerprint()}
    settings = {name: getattr(plan.settings, name) for name in ("steps", "lr", "seed")}
    stage = {"method": plan.method, "data": data, **settings, "arguments": plan.arguments}
    model.config = replace(model.config, trained=(*model.config.trained, stage))
    return model


def _from_hub(name: str, revision: str | None) -> Path:
    if not HUB_ID.fullmatch(name):
        raise InputError(f"{name}: no such model or run folder (and not a hub name such as owner/model)")
    from huggingface_hub import snapshot_download

    try:
        wanted = ["config.json", "model.safetensors"]
        return Path(snapshot_download(name, revision=revision, allow_patterns=wanted))
    except Exception as error:  # not found, no network, no permission: each comes as another exception
        said = " ".join(str(error).split())[:200]
        raise InputError(f"{name}: no such folder, and the Hugging Face hub did not give it ({said})") from None
