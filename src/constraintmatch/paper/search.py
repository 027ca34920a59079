"""Hyperparameter search as in the paper's appendix: a grid, or TPE, chosen by the loss on validation constraints.

Workers share nothing but an Optuna storage. A search has numbered slots: the points of the grid, or N draws of TPE. A
worker claims a slot with a trial that names it, and looks again: of several trials for a slot the first that stands
wins. That needs only what every storage does at one stroke, adding a trial, and not the claim of a waiting one, which
SQLite lets two workers make.
"""

import copy
import hashlib
import itertools
import json
import multiprocessing
import os
import platform
import shlex
import shutil
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from constraintmatch.constraints import Constraints
from constraintmatch.datasets import DATASETS, DataSet, load_dataset
from constraintmatch.errors import InputError
from constraintmatch.evaluation import agreement, predict, scores
from constraintmatch.files import check_target
from constraintmatch.images import ImageSet
from constraintmatch.methods import ViewChoice
from constraintmatch.models import ClusterModel, load_model
from constraintmatch.paper.cells import STEPS
from constraintmatch.pretraining import training_size
from constraintmatch.progress import Quiet, Reporter, say_error
from constraintmatch.running import Around, method_arguments, method_settings, run_method, split_options, weights_hash
from constraintmatch.runs import environment, write_result
from constraintmatch.sources import Data, open_data, open_pairs
from constraintmatch.training import NonFinite, TrainSettings, choose_device
from constraintmatch.views import check_operation_names

__all__ = ["PAPER_VALUES", "Found", "Patience", "Search", "Tried", "search"]

FORMAT = 1
_SHARED = {"weight_decay": (1e-3, 1e-4, 1e-5), "lr": (0.03, 0.01, 0.003, 0.001, 0.0001)}
_WEIGHTS = (1.0, 0.5, 0.1, 0.05)
# The paper's table of search values, by method: 15, 300, 240 and 15 points.
PAPER_VALUES: Mapping[str, Mapping[str, tuple[float, ...]]] = MappingProxyType(
    {
        "constrained": _SHARED,
        "pseudo_label": {**_SHARED, "pseudo_weight": _WEIGHTS, "min_confidence": (0.7, 0.8, 0.9, 0.95, 0.99)},
        "constraintmatch": {**_SHARED, "pseudo_weight": _WEIGHTS, "max_entropy": (0.05, 0.1, 0.2, 0.3)},
        "fully_constrained": _SHARED,
    }
)


@dataclass(frozen=True)
class Patience:
    """Seconds: between a worker's signs of life, without one until its trial is taken up, between looks for work."""

    beat: float = 15.0
    grace: float = 180.0
    look: float = 2.0


@dataclass(frozen=True)
class Search:
    """What `search` is asked; None leaves the choice to the data, the device or the paper."""

    data: str
    model: Path
    method: str = "constraintmatch"
    pairs: Path | None = None  # None: drawn from the labels of a data set
    n_constraints: int = 10_000  # of fold 0, where they are drawn
    holdout_pairs: float = 0.2  # of the pairs file, to judge by
    values: Mapping[str, Sequence[float]] = field(default_factory=dict)  # in place of the paper's
    sampler: Literal["grid", "tpe"] = "grid"
    trials: int | None = None  # of tpe
    steps: int | None = None
    storage: str = "search.db"  # a SQLite file, or the URL of a database
    study: str | None = None
    workers: int = 1
    out: Path | None = None
    data_dir: Path | None = None
    columns: str | None = None
    flip: bool | None = None
    without: tuple[str, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)  # how to train: device, compile …
    patience: Patience = field(default_factory=Patience)


@dataclass(frozen=True)
class Tried:
    """One finished slot: its settings, and the validation loss or, where training diverged, None and why."""

    slot: int
    settings: dict[str, float]
    loss: float | None
    note: str
    told: dict[str, Any]  # agreement, scores where labels are known, seconds, commit, hardware

    @property
    def flags(self) -> str:
        """The settings as flags of `train`."""
        return " ".join(f"--{name.replace('_', '-')} {value!r}" for name, value in self.settings.items())


@dataclass(frozen=True)
class Found:
    """A finished search: its trials, the best first."""

    request: Search
    study: str
    steps: int
    full_steps: int
    paper_values: bool
    tried: tuple[Tried, ...]

    @property
    def cut(self) -> bool:
        return self.steps < self.full_steps

    @property
    def best(self) -> Tried | None:
        return self.tried[0] if self.tried and self.tried[0].loss is not None else None

    def lines(self) -> list[tuple[str, str]]:
        """The trials by validation loss, and the command that trains with the best settings."""
        rows = [("validation loss", "settings")]
        rows += [(trial.note or f"{trial.loss:.5f}", trial.flags) for trial in self.tried]
        if self.cut:
            rows.append(("cut", f"{self.steps:,} of {self.full_steps:,} steps: the best at full length may differ"))
        if self.best is None:
            return [*rows, ("best", "none: every training diverged; try smaller values of --grid lr=")]
        asked = self.request
        pairs = shlex.quote(str(asked.pairs or "pairs.csv"))
        takes = "" if asked.method == "fully_constrained" else f" --pairs {pairs}"
        start = shlex.quote(str(asked.model))
        command = f"constraintmatch train {shlex.quote(asked.data)} --method {asked.method}{takes} --model {start}"
        return [*rows, ("best", self.best.flags), ("next", f"{command} {self.best.flags}")]


def search(request: Search, reporter: Reporter | None = None) -> Found:
    """The finished search. The same request again, at the same time or later, takes part in it or shows it."""
    reporter = reporter or Quiet()
    optuna = _optuna()
    if request.out is not None:
        check_target(request.out)
    task = _open_task(request, reporter)
    with _open_storage(request.storage) as storage:
        study = _open_study(storage, task, request)
        desk = _Desk(study, task, request, _runs_folder(request, study.study_name, task))
        helpers = _start_helpers(request)
        try:
            desk.work(reporter)
        except KeyboardInterrupt:
            raise KeyboardInterrupt("stopped; the same command goes on with what is left") from None
        except optuna.exceptions.StorageInternalError as error:
            said = _first_line(error.__cause__ or error)
            mend = "run the same command again when it is back"
            raise InputError(f"{_shown(request.storage)}: does not answer ({said}); {mend}") from None
        finally:
            _end_helpers(helpers)
        found = _found(desk.trials(), study.study_name, task, request)
    if request.out is not None:
        _write(found, task, request.out)
    return found


# What is searched, on what, judged by what


@dataclass(frozen=True)
class _Task:
    """A search before its first trial: everything opened and checked."""

    images: ImageSet
    constraints: Constraints
    judges: Constraints  # over the rows of `judged`
    judged: ImageSet
    model: ClusterModel
    views: ViewChoice
    values: dict[str, tuple[float, ...]]
    n_slots: int
    arguments: dict[str, Any]
    settings: TrainSettings
    full_steps: int
    record: dict[str, Any]

    def point(self, slot: int) -> dict[str, float]:
        """The settings of a point of the grid."""
        points = itertools.islice(itertools.product(*self.values.values()), slot, None)
        return dict(zip(self.values, next(points), strict=True))

    def protocol(self, request: Search) -> dict[str, Any]:
        """What must be the same for trials to be compared, as JSON gives it back."""
        chosen: dict[str, Any] = {
            "format": FORMAT,
            "data": request.data if request.data in DATASETS else self.record["kind"],
            "images": self.images.fingerprint(),
            "validation_images": self.judged.fingerprint(),
            "constraints": _mark(self.constraints),
            "validation_constraints": _mark(self.judges),
            "model": weights_hash(self.model),
            "method": request.method,
            "sampler": request.sampler,
            "values": self.values,
            "arguments": self.arguments,
            "views": self.views.request(),
            "settings": {k: v for k, v in self.settings.request().items() if k not in self.values},
        }
        return dict(json.loads(json.dumps(chosen)))


def _open_task(request: Search, reporter: Reporter) -> _Task:
    values = _values(request)
    n_slots = _n_slots(request, values)
    if request.workers < 1:
        raise InputError(f"--workers {request.workers}: at least one has to work")
    check_operation_names(request.without)
    cpu = choose_device(request.settings.get("device")).type == "cpu"
    model = load_model(request.model)
    if not model.config.n_clusters:
        raise InputError(
            f"{request.model}: has no clusters yet; begin with a model after scan (constraintmatch pretrain)"
        )
    row = DATASETS.get(request.data)
    if request.pairs is not None:
        data, constraints, judged, judges = _from_pairs(request, model, reporter)
    else:
        data, constraints, judged, judges = _from_labels(request, row)
    options, full_steps = _base_options(request, row, len(data.images), cpu)
    arguments, changes = split_options(request.method, options)
    flip = request.flip if request.flip is not None else row is None or row.flip
    without = tuple(sorted({*request.without, *(row.without if row else ())}))
    return _Task(
        images=data.images,
        constraints=constraints,
        judges=judges,
        judged=judged,
        model=model,
        views=ViewChoice(flip=flip, without=without),
        values=values,
        n_slots=n_slots,
        arguments=arguments,
        settings=method_settings(request.method, {**changes, **request.settings}),
        full_steps=full_steps,
        record=data.record,
    )


def _values(request: Search) -> dict[str, tuple[float, ...]]:
    """The values of each parameter, the paper's where nothing else is asked."""
    if request.method not in PAPER_VALUES:
        raise InputError(f"no search for {request.method!r}; there is one for {', '.join(PAPER_VALUES)}")
    settings = method_settings(request.method)
    numbers = {name for name in vars(settings) if isinstance(getattr(settings, name), float)}
    numbers |= {name for name, value in method_arguments(request.method).items() if isinstance(value.default, float)}
    if odd := sorted(request.values.keys() - numbers):
        raise InputError(f"cannot search over {odd[0]!r}; {request.method} has {', '.join(sorted(numbers))}")
    if empty := [name for name, values in request.values.items() if not values]:
        raise InputError(f"no values for {empty[0]}; give some: --grid {empty[0]}=0.1,0.01")
    asked = {**PAPER_VALUES[request.method], **request.values}
    return {name: tuple(dict.fromkeys(float(value) for value in values)) for name, values in asked.items()}


def _n_slots(request: Search, values: Mapping[str, Sequence[float]]) -> int:
    points = 1
    for chosen in values.values():
        points *= len(chosen)
    if request.sampler == "grid":
        if request.trials is not None:
            raise InputError(f"--trials goes with --sampler tpe; the grid has its {points:,} points (--grid cuts it)")
        return points
    if request.trials is None or request.trials < 1:
        raise InputError("--sampler tpe: say how many trials, --trials 50 for example")
    return request.trials


def _from_labels(request: Search, row: DataSet | None) -> tuple[Data, Constraints, ImageSet, Constraints]:
    """Training constraints of fold 0 from the labels of a data set, and the paper's number from its validation split."""
    if row is None:
        raise InputError("a folder needs --pairs FILE to train on and to judge by; data sets have labels to draw from")
    if request.n_constraints < 1:
        raise InputError(f"--constraints {request.n_constraints}: at least one is needed")
    data = open_data(request.data, split="train", data_dir=request.data_dir)
    judged = load_dataset(request.data, "val", request.data_dir)
    assert data.images.labels is not None
    assert judged.labels is not None
    constraints = Constraints.sample(data.images.labels, request.n_constraints, seed=0)
    return data, constraints, judged, Constraints.sample(judged.labels, row.n_validation_constraints, seed=0)


def _from_pairs(
    request: Search, model: ClusterModel, reporter: Reporter
) -> tuple[Data, Constraints, ImageSet, Constraints]:
    """The pairs of a file, a share of them held out to judge by."""
    assert request.pairs is not None
    if not request.pairs.exists():
        raise InputError(f"{request.pairs}: no such file")  # before thousands of images are read
    data = open_data(
        request.data,
        side=model.config.side,
        channels=model.config.channels,
        split="train" if request.data in DATASETS else None,
        data_dir=request.data_dir,
        reporter=reporter,
    )
    if not request.holdout_pairs:
        raise InputError("--holdout-pairs 0 leaves no pairs to judge by; try 0.2")
    pairs = open_pairs(
        request.pairs, data.images, columns=request.columns, holdout=request.holdout_pairs, reporter=reporter
    )
    assert pairs.held_out is not None
    return data, pairs.training, data.images, pairs.held_out


def _base_options(request: Search, row: DataSet | None, n_images: int, cpu: bool) -> tuple[dict[str, Any], int]:
    """What all trials share, as `train` would choose it, and the steps of a training at full length."""
    known = method_arguments(request.method)
    chosen = training_size(n_images, cpu=cpu)
    full_steps = STEPS if row is not None else training_size(n_images, cpu=False)["steps"]
    if row is not None:
        chosen.pop("warm_up")
        chosen |= {"pairs_per_step": row.pairs_per_step, "images_per_step": row.images_per_step}
        chosen |= {} if cpu else {"steps": STEPS}
    if "pairs_per_step" not in known:  # the bound has both images of each pair in one batch
        chosen["images_per_step"] = 2 * chosen["pairs_per_step"]
    sizes = {name: value for name, value in chosen.items() if name in known}
    return {**sizes, "steps": chosen["steps"] if request.steps is None else request.steps, "seed": 0}, full_steps


def _mark(constraints: Constraints) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for part in (constraints.left, constraints.right, constraints.link, constraints.weight):
        digest.update(part.tobytes())
    return f"{len(constraints):,} pairs {digest.hexdigest()}"


# The storage


def _optuna() -> Any:
    try:
        import optuna
    except ImportError:
        raise InputError("search needs Optuna; install it: pip install 'constraintmatch[search]'") from None
    optuna.logging.set_verbosity(optuna.logging.ERROR)  # what there is to say goes through the reporter
    return optuna


@contextmanager
def _open_storage(place: str) -> Iterator[Any]:
    """Optuna's storage at a file or URL, made where there is none; two workers may make it at the same time."""
    from sqlalchemy.exc import SQLAlchemyError

    optuna = _optuna()
    file = _sqlite_file(place)
    if file is not None:
        check_target(file)
        file.parent.mkdir(parents=True, exist_ok=True)
    url = place if file is None else f"sqlite:///{file}"
    # a worker waits for the others' writes, and finds out by itself when the server has hung up
    how: dict[str, Any] = {"pool_pre_ping": True} if file is None else {"connect_args": {"timeout": 60}}
    for left in reversed(range(8)):
        try:
            storage = optuna.storages.RDBStorage(url, engine_kwargs=how)
            break
        except ImportError:
            mend = "install its driver, for PostgreSQL: pip install 'constraintmatch[postgres]'"
            raise InputError(f"{_shown(place)}: no driver for this database; {mend}") from None
        except (SQLAlchemyError, optuna.exceptions.StorageInternalError, RuntimeError, ValueError) as error:
            if not left:  # tables that another worker was making would be there by now
                raise InputError(f"{_shown(place)}: cannot be used as storage ({_first_line(error)})") from None
            time.sleep(0.25)
    try:
        yield storage
    finally:
        storage.remove_session()
        storage.engine.dispose()


def _sqlite_file(place: str) -> Path | None:
    """The file of a SQLite storage, None for the URL of another database."""
    if "://" not in place:
        return Path(os.path.abspath(place))  # noqa: PTH100
    return Path(os.path.abspath(place.removeprefix("sqlite:///"))) if place.startswith("sqlite:///") else None  # noqa: PTH100


def _shown(place: str) -> str:
    """The storage as it may be printed: without its password."""
    scheme, mark, rest = place.partition("://")
    login, at, host = rest.rpartition("@")
    return f"{scheme}{mark}{login.split(':')[0]}{at}{host}" if mark else place


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


def _open_study(storage: Any, task: _Task, request: Search) -> Any:
    """The study of this search; one of that name with another protocol is refused."""
    optuna = _optuna()
    name = request.study or "-".join((_data_name(request), request.method, request.sampler))
    protocol = task.protocol(request)
    try:
        study = optuna.create_study(storage=storage, study_name=name)
        study.set_user_attr("protocol", protocol)
        return study
    except optuna.exceptions.DuplicatedStudyError:
        study = optuna.load_study(storage=storage, study_name=name)
    stored = _stored_protocol(study, request.patience)
    if stored is None:  # whoever made the study did not live to say what for
        if study.get_trials(deepcopy=False):
            raise InputError(f"{_shown(request.storage)}: study {name!r} is of another program; choose another --study")
        study.set_user_attr("protocol", protocol)
        return study
    before, now = dict(_flat(stored)), dict(_flat(protocol))
    if odd := [key for key in {**now, **before} if before.get(key) != now.get(key)]:
        said = "; ".join(f"{key} was {before.get(key)!r}, is {now.get(key)!r}" for key in odd[:3])
        where = f"{_shown(request.storage)}: study {name!r}"
        raise InputError(f"{where} is of another search ({said}); choose another --study or --storage")
    return study


def _data_name(request: Search) -> str:
    return request.data if request.data in DATASETS else Path(os.path.abspath(request.data)).name  # noqa: PTH100


def _stored_protocol(study: Any, patience: Patience) -> Mapping[str, Any] | None:
    for _ in range(5):
        if (stored := study.user_attrs.get("protocol")) is not None:
            return dict(stored)
        time.sleep(patience.look)  # it was made a moment ago
    return None


def _flat(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _flat(inner, f"{prefix}.{key}" if prefix else str(key))
    else:
        yield prefix, value


def _runs_folder(request: Search, study: str, task: _Task) -> Path | None:
    """Where trials at work keep their checkpoints: beside a SQLite file. Other storages have no place of their own."""
    file = _sqlite_file(request.storage)
    if file is None:
        return None
    told = json.dumps(task.protocol(request), sort_keys=True)
    mark = hashlib.blake2b(f"{study}\n{told}".encode(), digest_size=6).hexdigest()
    return file.with_name(f"{file.name}.runs") / mark


# A worker


class _Desk:
    """One worker: looks for open slots, claims them, trains, tells."""

    def __init__(self, study: Any, task: _Task, request: Search, runs: Path | None) -> None:
        self.study, self.task, self.request, self.runs = study, task, request, runs
        self.here = _here()
        self.seen: dict[int, tuple[int, float]] = {}  # of trials at work elsewhere: the last beat, and when it changed

    def trials(self) -> list[Any]:
        """The trials of the slots that are asked for, in the order of their making."""
        found = self.study.get_trials(deepcopy=False)
        return [trial for trial in found if trial.user_attrs.get("slot", self.task.n_slots) < self.task.n_slots]

    def work(self, reporter: Reporter) -> None:
        """Work until every slot has a finished trial."""
        waited = False
        while True:
            trials = self.trials()
            running = [trial for trial in trials if trial.state.name == "RUNNING"]
            if any([self._release(trial) for trial in running if self._is_dead(trial)]):
                continue
            taken = {trial.user_attrs["slot"] for trial in trials if _stands(trial)}
            slot = next((slot for slot in range(self.task.n_slots) if slot not in taken), None)
            if slot is not None:
                trial = self._claim(slot, trials)
                if trial is not None:
                    self._do(trial, slot, reporter)
            elif running:
                if not waited:
                    reporter.say(f"nothing is left to begin; waiting for {len(running):,} trials of other workers")
                waited = True
                multiprocessing.active_children()  # a helper that died is no longer counted as alive
                time.sleep(self.request.patience.look)
            else:
                return

    def _claim(self, slot: int, trials: Sequence[Any]) -> Any | None:
        """A new trial for the slot; None if another worker was first."""
        optuna = _optuna()
        earlier = [trial for trial in trials if trial.user_attrs["slot"] == slot]
        fixed = self.task.point(slot) if self.request.sampler == "grid" else {}
        if earlier and self.request.sampler == "tpe":  # the trial is taken up again, not another one made
            fixed = {**earlier[-1].system_attrs.get("fixed_params", {}), **earlier[-1].params}
        token = f"{self.here} {os.getpid()} {time.time_ns()}"
        given = {"slot": slot, "host": self.here, "pid": os.getpid(), "token": token, "beat": 0}
        self.study.add_trial(
            optuna.trial.create_trial(
                state=optuna.trial.TrialState.RUNNING, user_attrs=given, system_attrs={"fixed_params": fixed}
            )
        )
        rivals = [trial for trial in self.trials() if trial.user_attrs["slot"] == slot]
        ours = next(trial for trial in rivals if trial.user_attrs["token"] == token)
        if any(_stands(trial) and trial.number < ours.number for trial in rivals):
            self._release(ours)
            return None
        samplers = optuna.samplers
        by_tpe = self.request.sampler == "tpe"  # a draw depends on its slot and on what is finished, not on the worker
        self.study.sampler = samplers.TPESampler(seed=slot) if by_tpe else samplers.RandomSampler(seed=0)
        return optuna.trial.Trial(self.study, ours._trial_id)

    def _do(self, trial: Any, slot: int, reporter: Reporter) -> None:
        """Train the claimed trial and tell its loss; whatever stops it gives the slot back."""
        optuna = _optuna()
        began = time.monotonic()
        folder = self.runs / f"{slot:04d}" if self.runs is not None else None
        try:
            settings = self._suggest(trial)
            trial.set_user_attr("settings", settings)
            reporter.say(f"trial {slot + 1:,} of {self.task.n_slots:,}: {_as_text(settings)}")
            with _beating(trial, self.request.patience.beat):
                told = _train(self.task, self.request, settings, folder, reporter)
            here = environment()
            told |= {"seconds": round(time.monotonic() - began, 1), "commit": here["commit"], "gpu": here["gpu"]}
            trial.set_user_attr("told", told)
        except optuna.exceptions.UpdateFinishedTrialError:
            reporter.say(f"trial {slot + 1:,}: another worker took it up meanwhile; its result counts")
            return
        except BaseException:
            with suppress(Exception):
                self._release(trial)
            raise
        loss = told["constraint_loss"]
        state = optuna.trial.TrialState.PRUNED if loss is None else optuna.trial.TrialState.COMPLETE
        self.study.tell(trial, loss, state=state, skip_if_finished=True)
        reporter.say(f"trial {slot + 1:,}: " + ("diverged" if loss is None else f"validation loss {loss:.5f}"))
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)

    def _suggest(self, trial: Any) -> dict[str, float]:
        if self.request.sampler == "grid":
            return {name: trial.suggest_categorical(name, values) for name, values in self.task.values.items()}
        found = {}
        for name, values in self.task.values.items():
            low, high = min(values), max(values)
            value = trial.suggest_float(name, low, high, log=low > 0 and high / low >= 10)
            found[name] = float(f"{value:.3g}")  # what is shown and pasted is what was trained
        return found

    def _is_dead(self, trial: Any) -> bool:
        """Whether the worker of a running trial is gone: its process here, or no sign of life for long."""
        told = trial.user_attrs
        if told["host"] == self.here and not _process_lives(told["pid"]):
            return True
        beat, since = self.seen.get(trial.number, (-1, 0.0))
        if beat != told["beat"]:  # by our own clock: those of other machines may differ
            self.seen[trial.number] = (told["beat"], time.monotonic())
            return False
        return time.monotonic() - since > self.request.patience.grace

    def _release(self, trial: Any) -> bool:
        """Mark a trial as failed, which opens its slot; False if somebody else ended it before."""
        optuna = _optuna()
        try:
            self.study.tell(trial.number, state=optuna.trial.TrialState.FAIL)
        except (ValueError, optuna.exceptions.UpdateFinishedTrialError):
            return False
        return True


def _stands(trial: Any) -> bool:
    """Whether a trial holds its slot: at work, finished, or diverged (which counts as finished)."""
    return trial.state.name in ("RUNNING", "COMPLETE", "PRUNED")


def _train(
    task: _Task, request: Search, settings: Mapping[str, float], folder: Path | None, reporter: Reporter
) -> dict[str, Any]:
    """What a training with these settings reaches on the validation constraints; the loss is None if it diverged."""
    own, changes = split_options(request.method, settings)
    around = Around(folder, True, reporter, task.views, task.judged, task.judges, task.record)
    try:
        trained = run_method(
            request.method,
            copy.deepcopy(task.model),
            task.images,
            task.constraints,
            arguments={**task.arguments, **own},
            settings=replace(task.settings, **changes),
            around=around,
        )
    except NonFinite as error:
        return {"constraint_loss": None, "note": str(error)}
    found = predict(trained.model, task.judged)
    labels = task.judged.labels
    return {**agreement(task.judges, found), **(scores(labels, found) if labels is not None else {})}


@contextmanager
def _beating(trial: Any, every: float) -> Iterator[None]:
    """Inside, a trial shows every few seconds that its worker lives."""
    over = threading.Event()

    def beat() -> None:
        for count in itertools.count(1):
            if over.wait(every):
                return
            with suppress(Exception):  # the storage is busy, or the trial is no longer ours: told when it ends
                trial.set_user_attr("beat", count)

    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _here() -> str:
    """This machine, as far as process numbers mean the same: containers may share its name and not its processes."""
    try:
        return f"{platform.node()} {os.readlink('/proc/self/ns/pid')}"  # noqa: PTH115 (not a path)
    except OSError:
        return platform.node()


def _process_lives(pid: int) -> bool:
    if os.name == "nt":  # where signal 0 is not a question
        return True
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _start_helpers(request: Search) -> list[Any]:
    """The other workers of --workers: the same request, each in a process of its own."""
    context = multiprocessing.get_context("spawn")  # a fork would share CUDA and the storage's connections
    ours = replace(request, workers=1, out=None)
    helpers = [context.Process(target=_help, args=(ours,)) for _ in range(request.workers - 1)]
    for helper in helpers:
        helper.start()
    return helpers


def _help(request: Search) -> None:
    try:
        search(request)
    except InputError as error:
        raise SystemExit(say_error(f"a helper stopped: {error}", 2)) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None


def _end_helpers(helpers: Sequence[Any]) -> None:
    """Wait for helpers that are done; stop the others, which give their trials back."""
    for helper in helpers:
        helper.join(10)  # they look for work every few seconds and find none
        if helper.is_alive():
            helper.terminate()
            helper.join()


# The report


def _found(trials: Sequence[Any], study: str, task: _Task, request: Search) -> Found:
    tried: dict[int, Tried] = {}
    for trial in trials:
        if trial.state.name in ("COMPLETE", "PRUNED"):
            given, told = trial.user_attrs, dict(trial.user_attrs["told"])
            loss, note = told.pop("constraint_loss"), told.pop("note", "")
            slot = given["slot"]
            tried.setdefault(slot, Tried(slot, given["settings"], loss, "diverged" if note else "", told))
    ranked = sorted(tried.values(), key=lambda one: (one.loss is None, one.loss or 0.0, one.slot))
    papers = {name: tuple(values) for name, values in PAPER_VALUES[request.method].items()} == task.values
    return Found(request, study, task.settings.steps, task.full_steps, papers, tuple(ranked))


def _write(found: Found, task: _Task, out: Path) -> None:
    best = found.best
    values = {
        "format": FORMAT,
        "kind": "search",
        "study": found.study,
        "method": found.request.method,
        "sampler": found.request.sampler,
        "cut": found.cut,
        "steps": found.steps,
        "full_steps": found.full_steps,
        "paper_values": found.paper_values,
        "best": None if best is None else {"settings": best.settings, "loss": best.loss, "flags": best.flags},
        "trials": [
            {"settings": one.settings, "loss": one.loss, **({"note": one.note} if one.note else {}), **one.told}
            for one in found.tried
        ],
        "protocol": task.protocol(found.request),
    }
    write_result(out, values)


def _as_text(settings: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:g}" for name, value in settings.items())
