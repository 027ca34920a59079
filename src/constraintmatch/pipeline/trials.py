"""The trials of a search in an Optuna storage, which several workers may share.

Optuna hands out the points, records signs of life, and queues the trial of a worker that died once more.
"""

import hashlib
import json
import math
import os
import re
import shutil
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from constraintmatch._internal.errors import InputError
from constraintmatch._internal.files import check_target
from constraintmatch._internal.progress import Reporter
from constraintmatch.pipeline.config import method_arguments, method_settings, split_options
from constraintmatch.training.run_folder import environment, flat_items

BEAT, GRACE, LOOK = 15, 90, 2.0  # seconds: between signs of life, without one until a trial is dead, between looks

_SHARED = {"weight_decay": (1e-3, 1e-4, 1e-5), "lr": (0.03, 0.01, 0.003, 0.001, 0.0001)}
_WEIGHTS = (1.0, 0.5, 0.1, 0.05)
# The paper's table of search values, by method: 15, 300, 240 and 15 points.
PAPER_VALUES: Mapping[str, Mapping[str, tuple[float, ...]]] = {
    "constrained": _SHARED,
    "pseudo_label": {**_SHARED, "pseudo_weight": _WEIGHTS, "min_confidence": (0.7, 0.8, 0.9, 0.95, 0.99)},
    "constraintmatch": {**_SHARED, "pseudo_weight": _WEIGHTS, "max_entropy": (0.05, 0.1, 0.2, 0.3)},
    "fully_constrained": _SHARED,
}

# Trains with settings, in a folder of its own or none; gives back "loss" (None: diverged) and what else is to be kept.
Train = Callable[[dict[str, float], Path | None], dict[str, Any]]


@dataclass(frozen=True)
class Space:
    """What is to be tried: every combination of the values or, by TPE, `n_draws` draws from between them."""

    values: Mapping[str, tuple[float, ...]]
    n_draws: int | None = None

    def __len__(self) -> int:
        return math.prod(map(len, self.values.values())) if self.n_draws is None else self.n_draws

    def sampler(self) -> Any:
        samplers = load_optuna().samplers
        if self.n_draws is None:
            return samplers.GridSampler(dict(self.values), seed=0)
        tpe = samplers.TPESampler()
        # A draw depends on the number of its trial and on what is finished, not on the worker.
        tpe.before_trial = lambda _, trial: tpe.__init__(seed=trial.number)
        return tpe

    def suggest(self, trial: Any) -> dict[str, float]:
        """The settings of a trial. Ranges of a factor of ten or more are drawn from by their logarithm."""
        if self.n_draws is None:
            return {name: trial.suggest_categorical(name, of) for name, of in self.values.items()}
        found = {}
        for name, of in self.values.items():
            low, high = min(of), max(of)
            value = trial.suggest_float(name, low, high, log=low > 0 and high >= 10 * low)
            found[name] = _round(value, low, high)  # what is shown and pasted is what was trained
        return found


def search_space(
    method: str, values: Mapping[str, Sequence[float]], sampler: Literal["grid", "tpe"], trials: int | None
) -> Space:
    """The values of each parameter, the paper's where nothing else is asked; settings are checked here.

    A method checks its own arguments when it is rehearsed.
    """
    if method not in PAPER_VALUES:
        raise InputError(f"no search for {method!r}; there is one for {', '.join(PAPER_VALUES)}")
    defaults = method_arguments(method) | vars(method_settings(method))
    numbers = sorted(name for name, value in defaults.items() if isinstance(value, float))
    if odd := sorted(values.keys() - set(numbers)):
        raise InputError(f"cannot search over {odd[0]!r}; {method} has {', '.join(numbers)}")
    chosen = {}
    for name, asked in {**PAPER_VALUES[method], **values}.items():
        chosen[name] = tuple(dict.fromkeys(map(float, asked)))
        if not chosen[name]:
            raise InputError(f"no values for {name}; give some: --grid {name}=0.1,0.01")
        for value in chosen[name]:
            method_settings(method, split_options(method, {name: value})[1])
    if sampler == "grid" and trials is not None:
        n_points = len(Space(chosen))
        raise InputError(f"--trials goes with --sampler tpe; the grid has {n_points:,} points, --grid cuts it")
    if sampler == "tpe" and (trials is None or trials < 1):
        raise InputError("--sampler tpe: say how many trials, --trials 50 for example")
    return Space(chosen, trials)


def _round(value: float, low: float, high: float) -> float:
    """A draw with three digits, or with more if a hundredth of a narrow range needs them; never out of the range."""
    texts = (float(f"{value:.{digits}g}") for digits in range(3, 18))
    near = next((short for short in texts if abs(short - value) <= (high - low) / 100), value)
    return min(max(near, low), high)


def finished_trials(study: Any, space: Space) -> list[dict[str, Any]]:
    """The finished trials, the lowest loss first, what diverged at the end; each point of a grid once.

    A trial has its settings, its loss (None where training diverged), and what else was kept.
    """
    found: dict[Any, dict[str, Any]] = {}
    for trial in study.get_trials(deepcopy=False):
        if trial.state.name in ("COMPLETE", "PRUNED"):
            one = dict(trial.user_attrs["told"])
            found.setdefault(tuple(sorted(one["settings"].items())) if space.n_draws is None else trial.number, one)
    return sorted(found.values(), key=lambda one: (one["loss"] is None, one["loss"] or 0.0))


def work(study: Any, space: Space, train: Train, *, runs: Path | None, reporter: Reporter) -> list[dict[str, Any]]:
    """Take part in a search until all of it is finished; its trials, the best first."""
    optuna = load_optuna()
    study.sampler = space.sampler()
    waited, lost = False, list[str]()

    def objective(trial: Any) -> float:
        settings = space.suggest(trial)
        found = next((one for one in tried if one["settings"] == settings), None)  # by a worker that was faster
        if found is None:
            reporter.say(f"{len(tried):,} of {len(space):,} trials done; now {_in_words(settings)}")
            found = {"settings": settings, **_train(study, trial, settings, train, runs, reporter)}
        try:
            trial.set_user_attr("told", found)
        except optuna.exceptions.UpdateFinishedTrialError:
            lost.append(_in_words(settings))
            raise
        if found["loss"] is None:
            raise optuna.TrialPruned
        return float(found["loss"])

    while len(tried := finished_trials(study, space)) < len(space):
        optuna.storages.fail_stale_trials(study)
        trials = study.get_trials(deepcopy=False)
        running = sum(_is_at_work(trial) for trial in trials)
        if len(tried) + running < len(space) or any(trial.state.name == "WAITING" for trial in trials):
            try:
                study.optimize(objective, n_trials=1)
            except ValueError:  # of Optuna, if the trial was ended meanwhile
                if not lost:
                    raise
                reporter.say(f"{lost.pop()}: no sign of life came through, and another worker took it up")
        else:
            if not waited:
                silent = f"one without a sign of life for {GRACE} s is taken up"
                reporter.say(f"nothing is left to begin; waiting for trials at work ({running:,}); {silent}")
            waited = True
            time.sleep(LOOK)
    if runs is not None and not any(map(_is_at_work, study.get_trials(deepcopy=False))):
        shutil.rmtree(runs, ignore_errors=True)
        with suppress(OSError):  # another search is at work there
            runs.parent.rmdir()
    return tried


def _in_words(settings: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:g}" for name, value in settings.items())


def _is_at_work(trial: Any) -> bool:
    """Whether a worker is at this trial. One without settings died at once; one with a slot is of an old version."""
    return trial.state.name == "RUNNING" and bool(trial.params) and "slot" not in trial.user_attrs


def _train(
    study: Any, trial: Any, settings: dict[str, float], train: Train, runs: Path | None, reporter: Reporter
) -> dict[str, Any]:
    """What training with these settings gives; if it is stopped, the trial goes back into the queue."""
    first = study.trials[trial.number].system_attrs.get("failed_trial", trial.number)  # whose checkpoint may be there
    began, folder = time.monotonic(), runs / f"trial-{first}" if runs is not None else None
    try:
        found = train(settings, folder)
    except BaseException:
        with suppress(Exception):  # the storage may be what is gone: then the trial shows no sign of life
            load_optuna().storages.RetryHeartbeatStaleTrialCallback()(study, study.trials[trial.number])
        raise
    reporter.say("diverged" if found["loss"] is None else f"validation loss {found['loss']:.5f}")
    if folder is not None:
        shutil.rmtree(folder, ignore_errors=True)
    here = environment()
    return {**found, "seconds": round(time.monotonic() - began, 1), "commit": here["commit"], "gpu": here["gpu"]}


# The storage


def load_optuna() -> Any:
    """Optuna, which is an optional part; it keeps quiet: what there is to say goes through the reporter."""
    try:
        import optuna
    except ImportError:
        raise InputError("search needs Optuna; install it: pip install 'constraintmatch[search]'") from None
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    warnings.filterwarnings("ignore", category=optuna.exceptions.ExperimentalWarning)  # of its signs of life
    return optuna


@contextmanager
def open_storage(place: str) -> Iterator[Any]:
    """Optuna's storage at a file or URL, made where there is none; one that goes away inside is an InputError."""
    optuna = load_optuna()
    storage = _connect(place)
    try:
        yield storage
    except optuna.exceptions.StorageInternalError as error:
        said, fix = _first_line(error.__cause__ or error), "run the same command again when it is back"
        raise InputError(f"{_shown(place)}: does not answer ({said}); {fix}") from None
    finally:
        storage.remove_session()
        storage.engine.dispose()


def _connect(place: str) -> Any:
    """Optuna's storage; a few tries, since another worker may be making the tables at the same time."""
    from sqlalchemy import event
    from sqlalchemy.exc import IntegrityError, OperationalError, ProgrammingError, SQLAlchemyError

    optuna = load_optuna()
    broken = optuna.exceptions.StorageInternalError
    file = _sqlite_file(place)
    if file is not None:
        check_target(file)
        file.parent.mkdir(parents=True, exist_ok=True)
    # the driver of the extra `postgres`: which one a bare URL means depends on SQLAlchemy's version
    url = re.sub(r"^postgres(ql)?://", "postgresql+psycopg2://", place) if file is None else f"sqlite:///{file}"
    # a worker waits for the others' writes, and notices when the server has hung up
    how: dict[str, Any] = {"pool_pre_ping": True} if file is None else {"connect_args": {"timeout": 60}}
    how = {"engine_kwargs": how, "heartbeat_interval": BEAT, "grace_period": GRACE}
    for left in reversed(range(8)):
        try:
            again = optuna.storages.RetryHeartbeatStaleTrialCallback()
            storage = optuna.storages.RDBStorage(url, heartbeat_stale_trial_callback=again, **how)
            if file is not None:  # SQLite has no locks of rows: a worker that reads to write holds the file
                event.listen(storage.engine, "begin", lambda link: link.exec_driver_sql("BEGIN IMMEDIATE"))
            return storage
        except ImportError:
            fix = "install its driver; for PostgreSQL: pip install 'constraintmatch[postgres]'"
            raise InputError(f"{_shown(place)}: no driver for this database; {fix}") from None
        except (SQLAlchemyError, broken, RuntimeError, ValueError) as error:
            if not left or not isinstance(error, IntegrityError | OperationalError | ProgrammingError | broken):
                fix = "name a new file, or postgresql://USER:PASSWORD@HOST/DATABASE"
                said = _first_line(error).replace(place, _shown(place))
                raise InputError(f"{_shown(place)}: no storage for a search ({said}); {fix}") from None
            time.sleep(0.25)
    raise AssertionError


def _sqlite_file(place: str) -> Path | None:
    """The file of a SQLite storage; None for the URL of another database."""
    named = place.removeprefix("sqlite:///")
    return None if "://" in named else Path(os.path.abspath(named))  # noqa: PTH100


def runs_folder(storage: str, study: str, protocol: Mapping[str, Any]) -> Path | None:
    """Where trials at work keep their checkpoints: next to a SQLite file. Other storages have no place of their own."""
    file = _sqlite_file(storage)
    if file is None:
        return None
    what = f"{study}\n{json.dumps(protocol, sort_keys=True)}"
    return file.with_name(f"{file.name}.runs") / hashlib.blake2b(what.encode(), digest_size=6).hexdigest()


def _shown(place: str) -> str:
    """The storage as it may be printed: without its password."""
    scheme, mark, rest = place.partition("://")
    login, at, host = rest.rpartition("@")
    return f"{scheme}{mark}{login.split(':')[0]}{at}{host}" if mark else place


def open_study(storage: Any, name: str, protocol: Mapping[str, Any], place: str) -> Any:
    """The study of that name, made where there is none; one with another protocol is refused.

    The protocol is what must be the same for trials to be compared, as JSON gives it back.
    """
    study = load_optuna().create_study(storage=storage, study_name=name, load_if_exists=True)
    where = f"{_shown(place)}: study {name!r}"
    begun = bool(study.get_trials(deepcopy=False))  # looked at first: who begins has said what for
    stored = study.user_attrs.get("protocol")
    if stored is None and begun:
        raise InputError(f"{where} is of another program; choose another --study")
    if stored is None:  # a new one, or its maker did not live to say what for
        study.set_user_attr("protocol", dict(protocol))
        return study
    before, now = dict(flat_items(stored)), dict(flat_items(protocol))
    if odd := [key for key in {**now, **before} if before.get(key) != now.get(key)]:
        said = "; ".join(f"{key} was {before.get(key)!r}, is {now.get(key)!r}" for key in odd[:3])
        raise InputError(f"{where} is of another search ({said}); choose another --study or --storage")
    return study


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)
