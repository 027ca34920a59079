"""The clusterer with scikit-learn's contract: `ConstraintMatch(n_clusters=…).fit(images, constraints).labels_`."""

import copy
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self, cast

import numpy as np
from numpy.typing import ArrayLike, NDArray
from sklearn.base import BaseEstimator, ClassNamePrefixFeaturesOutMixin, ClusterMixin, TransformerMixin
from sklearn.exceptions import ConvergenceWarning
from sklearn.utils.validation import check_is_fitted, validate_data

from constraintmatch._internal.errors import InputError, one_line
from constraintmatch._internal.progress import Reporter, console_reporter
from constraintmatch.constraints.constraint_set import Constraints
from constraintmatch.data.image_set import ImageSet, load_images
from constraintmatch.evaluation.metrics import accuracy, as_labels, collapse_warnings, embed, predict
from constraintmatch.evaluation.report_parts import Clustering, gallery_html
from constraintmatch.methods import METHODS, Context, ViewChoice
from constraintmatch.methods.preparation import check_images
from constraintmatch.models.cluster_model import (
    ClusterModel,
    build_model,
    fetch_model,
    load_model,
    push_model,
    save_model,
)
from constraintmatch.pipeline.config import ORDER, PRETEXTS, TrainConfig, default_options, make_config, own_start
from constraintmatch.pipeline.embedding import choose_encoder, encode, is_encoder
from constraintmatch.pipeline.sources import Pairs, as_constraints, choose_pairs
from constraintmatch.pipeline.train import train
from constraintmatch.training.batches import derive_seed
from constraintmatch.training.loop import choose_device
from constraintmatch.training.views import View

Images = ImageSet | ArrayLike | Path | str
AUTO, SELF_SUPERVISED = "auto", "self-supervised"
# parameters that are handed on by name; None leaves the choice to the method, the number of images and the device
KNOBS = ("recipe", "steps", "lr", "pseudo_weight", "max_entropy", "error_rate", "pairs_per_step", "images_per_step")
ELSEWHERE = {"device": "device", "seed": "random_state"}  # training settings and the parameters that give them
OWN_VIEWS = ("own_weak", "own_strong", "own_contrastive")


class ConstraintMatch(ClassNamePrefixFeaturesOutMixin, ClusterMixin, TransformerMixin, BaseEstimator):  # type: ignore[misc]
    """Cluster images or embeddings with a few pairs that are known to belong together or apart.

    Parameters
    ----------
    n_clusters : int, default=None
        The number of clusters, 2 or more. None takes the clusters of the model given as `start`.
    method : str, default="constraintmatch"
        "constraintmatch", "constrained" and "pseudo_label" train on pairs; "propagate" carries the groups of the pairs
        over to the other images; "supervised" and "fully_constrained" train on the labels of an `ImageSet`.
    recipe : {"safe", "paper"}, default=None
        "safe" keeps the start unless held-out pairs favour the training; "paper" trains as published. None is "safe".
    start : str, Path, ClusterModel, nn.Module or None, default="auto"
        The model that training starts from. "auto" is "pretrained" for photographs (32 pixels or more, grey ones 64)
        if an encoder is at hand, else "self-supervised". "pretrained", "timm:NAME", "torchvision:NAME", "onnx:FILE" or
        your own `nn.Module` (normalised images to features) is an encoder, which stays as it is on a CPU.
        "self-supervised" makes a short start from X alone: SimCLR and linear heads for images, linear heads for
        embeddings. None is random weights. A model folder, a run folder or a `ClusterModel` (which is not changed) is
        the start itself; if it has no clusters, linear heads find them first.
    backbone : str, default=None
        "tiny", "resnet18", "resnet34" or "timm:NAME". None chooses by the size of the images. Embeddings need none.
    steps : int, default=None
        Training steps. None is 60 passes over the images, between 500 and 20,000 steps (1,000 on a CPU).
    lr : float, default=None
        Learning rate. None is 0.01.
    pseudo_weight : float, default=None
        Weight λ of the pseudo-constraints or pseudo-labels. None is 1.
    max_entropy : float, default=None
        Threshold τ: only images whose prediction has a lower entropy form pseudo-constraints. None is 0.2.
    error_rate : float, default=None
        Share of the pairs that are expected to be wrong; the loss allows for it. None is 0.
    pairs_per_step : int, default=None
        Pairs in a batch. None is between 50 and 200, by the number of images (50 on a CPU).
    images_per_step : int, default=None
        Images without pairs in a batch. None is an eighth of the images, between 150 and 600 (150 on a CPU).
    flip : bool, default=True
        Whether a mirrored image still belongs to its cluster. False for digits and letters.
    without : sequence of str, default=()
        Operations to leave out of the strong views, such as ("solarize", "rotate").
    options : dict, default=None
        Other settings by name: of the method (`warm_up`, …), of the training (`ema`, …), your own views (`own_weak`,
        `own_strong`, `own_contrastive`), and a dict for each stage of the start, such as {"simclr": {"epochs": 500}}.
    device : str, default=None
        "cuda", "mps" or "cpu". None takes the first of these that is available.
    random_state : int, RandomState, Generator or None, default=None
        The seed, or where to draw it from. None draws a new one; `seed_` shows it.
    verbose : bool, default=False
        Whether to show progress.

    Attributes
    ----------
    labels_ : ndarray of shape (n_samples,)
        The cluster of each row of X.
    model_ : ClusterModel
        The trained network.
    n_features_in_ : int
        The numbers in each row of X: the length of the embeddings, or the values of an image's pixels.
    feature_names_in_ : ndarray of shape (n_features_in_,)
        The names of the columns, if X is a data frame whose columns all have names.
    n_iter_ : int
        The training steps taken; 0 if the safe recipe keeps the start without a training.
    log_ : list of dict
        The log of the training.
    seed_ : int
        The seed of this fit.
    gallery_ : str
        The surest images of each cluster as HTML, which a notebook shows; empty for embeddings.

    Notes
    -----
    Constraints name rows of X, so a search must not split X: `GridSearchCV(…, cv=[(rows, rows)])` with
    `rows = np.arange(len(X))` uses all rows. Each candidate makes its own start, unless `start` is a model.

    Examples
    --------
    >>> from sklearn.datasets import make_blobs
    >>> from constraintmatch import ConstraintMatch, Constraints
    >>> X, y = make_blobs(90, n_features=8, centers=3, random_state=0)
    >>> pairs = Constraints.sample(y, 60, seed=0)
    >>> model = ConstraintMatch(n_clusters=3, steps=20, random_state=0).fit(X, constraints=pairs)
    >>> model.score(X, y)
    1.0
    """

    __metadata_request__fit = {"constraints": True}  # noqa: RUF012 (scikit-learn reads it from the class)

    def __init__(
        self,
        n_clusters: int | None = None,
        *,
        method: str = "constraintmatch",
        recipe: str | None = None,
        start: str | Path | ClusterModel | None = AUTO,
        backbone: str | None = None,
        steps: int | None = None,
        lr: float | None = None,
        pseudo_weight: float | None = None,
        max_entropy: float | None = None,
        error_rate: float | None = None,
        pairs_per_step: int | None = None,
        images_per_step: int | None = None,
        flip: bool = True,
        without: Sequence[str] = (),
        options: Mapping[str, Any] | None = None,
        device: str | None = None,
        random_state: int | np.random.RandomState | np.random.Generator | None = None,
        verbose: bool = False,
    ) -> None:
        self.n_clusters, self.method, self.recipe = n_clusters, method, recipe
        self.start, self.backbone, self.steps, self.lr = start, backbone, steps, lr
        self.pseudo_weight, self.max_entropy, self.error_rate = pseudo_weight, max_entropy, error_rate
        self.pairs_per_step, self.images_per_step, self.flip = pairs_per_step, images_per_step, flip
        self.without, self.options = without, options
        self.device, self.random_state, self.verbose = device, random_state, verbose

    def fit(self, X: Images, y: Any = None, *, constraints: Pairs = None) -> Self:
        """Train on images or embeddings and pairs, and return the estimator.

        Parameters
        ----------
        X : array-like, ImageSet, path or str
            Embeddings (n, d), images (n, h, w) or (n, h, w, c), an `ImageSet`, a folder, shards, a .npy or .npz file.
        y : ignored
            Labels are not used. Pairs in this place are taken as `constraints`; 3 or 4 columns are a table of pairs.
        constraints : Constraints, path, str, array-like, dict or sparse matrix, default=None
            Pairs of rows of X: `Constraints`, a pairs file, a table (n, 3) of left, right and link (1 = must-link,
            0 = cannot-link; a weight may follow), a list of such triples, a tuple of three columns,
            {"must_link": [(i, j), …], "cannot_link": […]}, or a square matrix of 1, -1 and 0. All methods but
            "supervised" and "fully_constrained" need them.
        """
        given = choose_pairs(y, constraints)
        reporter = console_reporter() if self.verbose else Reporter()
        start = self._load_start(X, reporter)
        images = self._read(X, start, reset=True)
        if start is not None and start.is_encoder and choose_device(self.device).type == "cpu":
            images = encode(start, images, reporter=reporter)
        n_clusters = self._count_clusters(start, len(images))
        pairs = as_constraints(given, images)
        _check_pairs(self.method, pairs, images, ignored=y is not None)
        config = self._configuration(start, images, n_clusters, _seed(self.random_state))
        model, self.log_ = train(images, pairs, config, Context(reporter=reporter))
        self._keep(model)
        self.seed_, self.n_iter_ = config.settings.seed, int(self.log_[-1]["step"])
        predictions = predict(model, images)
        self.labels_ = predictions.clusters
        self.gallery_ = gallery_html(Clustering.of(images, predictions))
        for sign in collapse_warnings(predictions):
            warnings.warn(sign, ConvergenceWarning, stacklevel=2)
        return self

    def fit_predict(self, X: Images, y: Any = None, *, constraints: Pairs = None) -> NDArray[np.int64]:
        """Fit and return `labels_`; the parameters are those of `fit`."""
        return self.fit(X, y, constraints=constraints).labels_

    def predict(self, X: Images) -> NDArray[np.int64]:
        """Return the cluster (n,) of each row of X, which may be new."""
        return np.asarray(self.predict_proba(X).argmax(axis=1), np.int64)

    def predict_proba(self, X: Images) -> NDArray[np.float32]:
        """Return the probability (n, n_clusters) of each cluster for each row of X."""
        check_is_fitted(self, "model_")
        return predict(self.model_, self._read(X, self.model_)).probabilities

    def transform(self, X: Images) -> NDArray[np.float32]:
        """Return the features (n, width) in the last layer before the clusters."""
        check_is_fitted(self, "model_")
        return embed(self.model_, self._read(X, self.model_))

    def score(self, X: Images, y: ArrayLike | None = None) -> float:
        """Return the accuracy in [0, 1] after each cluster is matched with one class.

        y (n,) has the classes as numbers or words; None takes the labels of an `ImageSet` or of class folders.
        """
        check_is_fitted(self, "model_")
        images = self._read(X, self.model_)
        labels = images.labels if y is None else as_labels(y)
        if labels is None:
            raise InputError("score needs the labels of the images: give an ImageSet with labels, or score(X, y)")
        return accuracy(labels, predict(self.model_, images).clusters)

    def save_pretrained(self, folder: Path | str, *, half: bool = False) -> None:
        """Write the model folder (`config.json`, `model.safetensors`; fp16 when `half`), which every command takes."""
        check_is_fitted(self, "model_")
        save_model(self.model_, folder, half=half)

    def push_to_hub(
        self, name: str, *, private: bool = True, half: bool = False, message: str = "Add the model"
    ) -> str:
        """Put the model with a card on the Hugging Face hub as `owner/name` (log in first), and return its address."""
        check_is_fitted(self, "model_")
        return push_model(self.model_, name, private=private, half=half, message=message)

    @classmethod
    def from_pretrained(cls, source: Path | str, *, device: str | None = None, revision: str | None = None) -> Self:
        """Return a fitted estimator from a model or run folder, or from the Hugging Face hub by `owner/name`."""
        folder = Path(source) if Path(source).exists() else fetch_model(str(source), revision)
        model = load_model(folder, device=choose_device(device))
        if model.config.n_clusters == 0:
            raise InputError(f"{source}: this model has no clusters yet; use it as start= of a new estimator")
        made = cls(model.config.n_clusters, backbone=model.config.backbone, start=None, device=device)
        return made._keep(model)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.two_d_array, tags.input_tags.three_d_array = True, True
        tags.transformer_tags.preserves_dtype = []  # features are float32, whatever X is
        return tags

    def _repr_html_inner(self) -> str:
        return f"{super()._repr_html_inner()}{getattr(self, 'gallery_', '')}"

    def _repr_mimebundle_(self, **kwargs: Any) -> dict[str, str]:
        """What a notebook shows: scikit-learn's diagram and, once it is fitted on images, the clusters."""
        bundle: dict[str, str] = super()._repr_mimebundle_(**kwargs)
        return bundle | ({"text/html": self._repr_html_inner()} if "text/html" in bundle else {})

    def __getstate__(self) -> dict[str, Any]:
        """The state for pickle, with the model on the CPU: a machine without a GPU can read it."""
        state: dict[str, Any] = super().__getstate__()
        return state | ({"model_": copy.deepcopy(self.model_).cpu()} if "model_" in state else {})

    @property
    def _n_features_out(self) -> int:
        return self.model_.width  # for `get_feature_names_out` and `set_output`

    def _keep(self, model: ClusterModel) -> Self:
        self.model_, self.n_features_in_ = model.eval(), model.config.side**2 * model.config.channels
        return self

    def _read(self, X: Images, model: ClusterModel | None, *, reset: bool = False) -> ImageSet:
        """X as an ImageSet, at the size of the model if there is one; with `reset`, its columns are recorded."""
        if reset:
            self.__dict__.pop("feature_names_in_", None)  # of an earlier fit
        if isinstance(X, Path | str):
            size: Any = {} if model is None else {"side": model.config.side, "channels": model.config.channels}
            images = load_images(X, **size)
        else:
            images = X if isinstance(X, ImageSet) else ImageSet.from_arrays(self._check_table(X, reset))
        if model is not None and model.is_encoder and not images.embedded:  # made for one size, good for others
            images = images.resized(model.config.side, model.config.channels)
        if model is not None:
            check_images(model, images)
        return images

    def _check_table(self, X: Any, reset: bool) -> Any:
        """X with the checks of scikit-learn if it is a table; a failed check is an InputError."""
        try:
            images = (X if hasattr(X, "ndim") else np.asarray(X)).ndim > 2
        except ValueError:  # rows that differ in length
            images = True
        if images or isinstance(X, np.ma.MaskedArray):
            return X  # ImageSet.from_arrays checks it
        try:
            return validate_data(self, X, reset=reset, ensure_all_finite=False)  # NaN: it names the row
        except ValueError as error:
            raise InputError(one_line(error)) from None

    def _load_start(self, X: Images, reporter: Reporter) -> ClusterModel | None:
        """A copy of the model given as start, or a pretrained encoder; None if the start has to be made."""
        word, named = self.start if isinstance(self.start, str) else "", cast(Any, self.start)
        if self.start is None or word == SELF_SUPERVISED or (word == AUTO and self.backbone is not None):
            return None
        if word == AUTO or is_encoder(named):
            source = X if isinstance(X, Path | str) else self._read(X, None)
            return choose_encoder(source, None if word == AUTO else named, say=reporter.say)
        if not isinstance(self.start, ClusterModel | Path | str):
            raise InputError(f"start is {self.start!r}; give a model, its folder, {SELF_SUPERVISED!r} or None")
        model = copy.deepcopy(self.start) if isinstance(self.start, ClusterModel) else load_model(self.start)
        if self.backbone not in (None, model.config.backbone):
            raise InputError(f"backbone is {self.backbone!r}, the start has {model.config.backbone!r}; leave one out")
        return model

    def _count_clusters(self, start: ClusterModel | None, n_images: int) -> int:
        """The number of clusters, checked against the start and the images."""
        of_start = start.config.n_clusters if start else 0
        n_clusters = (of_start or None) if self.n_clusters is None else self.n_clusters
        if isinstance(n_clusters, bool) or not isinstance(n_clusters, int | np.integer) or n_clusters < 2:
            raise InputError(f"n_clusters is {n_clusters!r}; it must be a whole number, 2 or more")
        if of_start not in (0, n_clusters):
            fix = "ask for as many, or give it another head: with_clusters(model, n)"
            raise InputError(f"the start has {of_start} clusters, n_clusters is {n_clusters}; {fix}")
        if n_images < n_clusters:
            raise InputError(f"n_clusters is {n_clusters:,} and X has {n_images:,} samples; ask for fewer clusters")
        return int(n_clusters)

    def _configuration(self, start: ClusterModel | None, images: ImageSet, n_clusters: int, seed: int) -> TrainConfig:
        """The configuration of the training; what cannot be used is an InputError."""
        if self.method in ORDER or self.method not in METHODS:  # a stage of the start is no method here
            known = ", ".join(method for method in METHODS if method not in ORDER)
            raise InputError(f"unknown method {self.method!r}; known are {known}")
        asked, cpu = self._asked(), choose_device(self.device).type == "cpu"
        own_stages = {stage: asked.pop(stage) for stage in ORDER if stage in asked}
        stages = own_start(len(images), own_stages, cpu=cpu)
        views = self._views(images, {name: asked.pop(name) for name in OWN_VIEWS if name in asked})
        made = start is None and self.start is not None and not images.embedded  # given features need no pretext task
        if start is None:
            mean, std = images.moments() if images.embedded else (None, None)
            how: Any = {"side": images.side, "channels": images.channels, "mean": mean, "std": std}
            how |= {"n_clusters": 0 if self.start else n_clusters, "seed": derive_seed(seed, "weights")}
            start = build_model(backbone=self.backbone, **how)
        options = default_options(self.method, len(images), cpu=cpu)
        options |= {**asked, "seed": seed, "device": self.device}
        missing = [stage for stage in ORDER if stage in stages and (made or stage not in PRETEXTS)]
        chain: Any = {"stages": () if start.config.n_clusters else missing, "stage_options": stages}
        return make_config(self.method, options, start=start, views=views, n_clusters=n_clusters, **chain)

    def _asked(self) -> dict[str, Any]:
        """The options and the parameters that are not None, by name; a name in both is an InputError."""
        if not isinstance(self.options or {}, Mapping):
            raise InputError(f"options is {self.options!r}; give a dictionary, such as {{'ema': 0.99}}")
        options = {str(name): value for name, value in (self.options or {}).items()}
        knobs = {name: value for name in KNOBS if (value := getattr(self, name)) is not None}
        if twice := sorted(options.keys() & knobs.keys()):
            raise InputError(f"{twice[0]} is given twice, as a parameter and in options; leave it out of options")
        for name in options.keys() & ELSEWHERE.keys():
            raise InputError(f"options: {name!r} has a parameter of its own, {ELSEWHERE[name]}")
        return options | knobs

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


def _check_pairs(method: str, pairs: Constraints | None, images: ImageSet, *, ignored: bool) -> None:
    some = pairs is not None and (len(pairs) or len(pairs.triplets))
    if method not in ("supervised", "fully_constrained") and not some:
        labels = "; y is not used, but Constraints.sample(y, 300, seed=0) makes pairs from labels"
        fix = "give some: fit(X, constraints=pairs)" + (labels if ignored and pairs is None else "")
        raise InputError(f"{method} needs constraints and there are none; {fix}")
    if pairs is not None and pairs.n_images != len(images):
        counts = f"the constraints are over {pairs.n_images:,} images, the set has {len(images):,}"
        raise InputError(f"{counts}; give all rows of X, in a search with cv=[(rows, rows)]")


def _seed(state: Any) -> int:
    """A seed from a seed, from a generator's next draw, or from the system."""
    if state is None or isinstance(state, np.random.Generator):
        return int(np.random.default_rng(state).integers(2**31))
    if isinstance(state, np.random.RandomState):
        return int(state.randint(2**31 - 1))
    if isinstance(state, bool) or not isinstance(state, int | np.integer) or state < 0:
        raise InputError(f"random_state is {state!r}; give a whole number from 0, a RandomState, a Generator or None")
    return int(state)
