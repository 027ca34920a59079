"""Trials of a search, shared by workers through an Optuna storage: each slot is tried once, whoever dies meanwhile.

A search has numbered slots: the points of a grid, or N draws of TPE. A worker claims a slot with a new trial that names
it, and looks again: of several trials for one slot the first that stands wins. That needs only what every storage does
at one stroke, adding a trial, and not the claim of a waiting one, which SQLite lets two workers make. A trial at work
shows signs of life; one without is marked as failed, and its slot is open again.
"""

import itertools
import math
import multiprocessing
import os
import platform
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from constraintmatch.errors import InputError
from constraintmatch.files import check_target
from constraintmatch.progress import Reporter
from constraintmatch.runs import environment, flat_items

__all__ = [
    "Patience",
    "Slots",
    "Tried",
    "finished_trials",
    "load_optuna",
    "open_storage",
    "open_study",
    "shown_storage",
    "sqlite_file",
    "work",
]

# Trains with settings, in a folder of its own or none; gives back "loss" (None: diverged) and what else is to be kept.
Train = Callable[[dict[str, float], Path | None, Reporter], dict[str, Any]]


@dataclass(frozen=True)
class Patience:
    """Seconds: between a worker's signs of life, without one until its trial is taken up, between looks for work."""

    beat: float = 15.0
    grace: float = 180.0
    look: float = 2.0


@dataclass(frozen=True)
class Slots:
    """What is to be tried: every combination of the values, or `n_draws` draws by TPE from between them."""

    values: Mapping[str, tuple[float, ...]]
    sampler: Literal["grid", "tpe"] = "grid"
    n_draws: int = 0

    def __len__(self) -> int:
        return self.n_draws if self.sampler == "tpe" else math.prod(len(of) for of in self.values.values())

    def point(self, slot: int) -> dict[str, float]:
        """The settings of a slot, as far as they are known before it is tried."""
        if self.sampler == "tpe":
            return {}
        points = itertools.product(*self.values.values())
        return dict(zip(self.values, next(itertools.islice(points, slot, None)), strict=True))

    def distributions(self) -> dict[str, Any]:
        """What Optuna is to know of the values. Ranges of a factor of ten or more are drawn from by their logarithm."""
        of = load_optuna().distributions
        if self.sampler == "grid":
            return {name: of.CategoricalDistribution(values) for name, values in self.values.items()}
        ranges = {name: (min(values), max(values)) for name, values in self.values.items()}
        return {
            name: of.FloatDistribution(low, high, log=low > 0 and high >= 10 * low)
            for name, (low, high) in ranges.items()
        }


@dataclass(frozen=True)
class Tried:
    """One finished slot: its settings, and its loss or, where training diverged, None."""

    slot: int
    settings: dict[str, float]
    loss: float | None
    told: dict[str, Any]  # what else the training told, seconds, commit, hardware

    @property
    def flags(self) -> str:
        """The settings as flags of `train`."""
        return " ".join(f"--set {name}={value!r}" for name, value in self.settings.items())


def work(study: Any, slots: Slots, train: Train, *, runs: Path | None, patience: Patience, reporter: Reporter) -> None:
    """Take part in a search until every slot has a finished trial."""
    desk = _Desk(study, slots, patience)
    waited = beaten = False
    while True:
        trials = desk.trials()
        running = [trial for trial in trials if trial.state.name == "RUNNING"]
        dead = [trial for trial in running if desk.is_dead(trial)]
        if dead:
            for trial in dead:
                desk.release(trial)
            continue
        taken = {trial.user_attrs["slot"] for trial in trials if _stands(trial)}
        vacant = [slot for slot in range(len(slots)) if slot not in taken]
        if vacant:
            slot = vacant[os.getpid() % len(vacant) if beaten else 0]  # who was beaten looks where others may not
            claimed = desk.claim(slot, trials)
            beaten = claimed is None
            if claimed is not None:
                desk.do(claimed, slot, train, runs, reporter)
        elif running:
            if not waited:
                reporter.say(f"nothing is left to begin; waiting for other workers (trials: {len(running):,})")
            waited = True
            multiprocessing.active_children()  # a helper that died is no longer counted as alive
            time.sleep(patience.look)
        else:
            return


def finished_trials(study: Any, slots: Slots) -> list[Tried]:
    """The finished slots, the lowest loss first, what diverged at the end."""
    tried: dict[int, Tried] = {}
    for trial in _Desk(study, slots, Patience()).trials():
        if trial.state.name in ("COMPLETE", "PRUNED"):
            slot, told = trial.user_attrs["slot"], dict(trial.user_attrs["told"])
            tried.setdefault(slot, Tried(slot, told.pop("settings"), told.pop("loss"), told))
    return sorted(tried.values(), key=lambda one: (one.loss is None, one.loss or 0.0, one.slot))


class _Desk:
    """Where one worker sits: looks for open slots, claims them, trains, tells."""

    def __init__(self, study: Any, slots: Slots, patience: Patience) -> None:
        self.study, self.slots, self.patience = study, slots, patience
        self.here = _here()
        self.seen: dict[int, tuple[int, float]] = {}  # of trials at work: the last beat, and when it was new to us

    @cached_property
    def origin(self) -> dict[str, Any]:
        """What trials of this worker come from: workers may differ in it."""
        told = environment()
        return {"commit": told["commit"], "gpu": told["gpu"]}

    def trials(self) -> list[Any]:
        """The trials of the slots that are asked for, in the order of their making."""
        found = self.study.get_trials(deepcopy=False)
        return [trial for trial in found if trial.user_attrs.get("slot", len(self.slots)) < len(self.slots)]

    def claim(self, slot: int, trials: Sequence[Any]) -> Any | None:
        """A new trial for the slot; None if another worker was first."""
        optuna = load_optuna()
        earlier = [trial for trial in trials if trial.user_attrs["slot"] == slot]
        drawn = earlier[-1].params if earlier else {}  # a draw is taken up again, not made anew
        known = {**drawn, **self.slots.point(slot)}
        token = f"{self.here} {os.getpid()} {threading.get_ident()} {time.time_ns()}"
        given = {"slot": slot, "host": self.here, "pid": os.getpid(), "token": token, "beat": 0}
        kinds = self.slots.distributions()
        template = optuna.trial.create_trial(
            state=optuna.trial.TrialState.RUNNING,
            params=known,
            distributions={name: kinds[name] for name in known},
            user_attrs=given,
        )
        self.study.add_trial(template)
        rivals = [trial for trial in self.trials() if trial.user_attrs["slot"] == slot]
        ours = next(trial for trial in rivals if trial.user_attrs["token"] == token)
        if any(_stands(trial) and trial.number < ours.number for trial in rivals):
            self.release(ours)
            return None
        samplers = optuna.samplers
        by_tpe = self.slots.sampler == "tpe"  # a draw depends on its slot and on what is finished, not on the worker
        self.study.sampler = samplers.TPESampler(seed=slot) if by_tpe else samplers.RandomSampler(seed=0)
        return optuna.trial.Trial(self.study, ours._trial_id)

    def do(self, trial: Any, slot: int, train: Train, runs: Path | None, reporter: Reporter) -> None:
        """Train the claimed trial and tell its loss; whatever stops it gives the slot back."""
        optuna = load_optuna()
        began, title = time.monotonic(), f"trial {slot + 1:,} of {len(self.slots):,}"
        folder = runs / f"{slot:04d}" if runs is not None else None
        try:
            settings = self._suggest(trial)
            reporter.say(f"{title}: " + ", ".join(f"{name} {value:g}" for name, value in settings.items()))
            with _beating(trial, self.patience.beat):
                told = train(settings, folder, reporter)
            told |= {"seconds": round(time.monotonic() - began, 1), **self.origin}
            trial.set_user_attr("told", {"settings": settings, **told})
            state = optuna.trial.TrialState.PRUNED if told["loss"] is None else optuna.trial.TrialState.COMPLETE
            self.study.tell(trial, told["loss"], state=state, skip_if_finished=True)
        except optuna.exceptions.UpdateFinishedTrialError:
            reporter.say(f"{title}: no sign of life came through, and another worker took it up; its result counts")
            return
        except BaseException:
            with suppress(Exception):  # the storage may be what is gone
                self.release(trial)
            raise
        reporter.say(f"{title}: " + ("diverged" if told["loss"] is None else f"validation loss {told['loss']:.5f}"))
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)

    def _suggest(self, trial: Any) -> dict[str, float]:
        """The settings of the trial, drawn as far as it does not have them."""
        if self.slots.sampler == "grid":
            return dict(trial.params)
        found = {}
        for name, of in self.slots.distributions().items():
            value = trial.suggest_float(name, of.low, of.high, log=of.log)
            found[name] = _rounded(value, of.low, of.high)  # what is shown and pasted is what was trained
        return found

    def is_dead(self, trial: Any) -> bool:
        """Whether the worker of a running trial is gone: its process here, or no sign of life for long."""
        told = trial.user_attrs
        if told["host"] == self.here and not _process_lives(told["pid"]):
            return True
        beat, since = self.seen.get(trial.number, (-1, 0.0))
        if beat != told["beat"]:  # by our own clock: those of other machines may differ
            self.seen[trial.number] = (told["beat"], time.monotonic())
            return False
        return time.monotonic() - since > self.patience.grace

    def release(self, trial: Any) -> None:
        """Mark a trial as failed, which opens its slot, unless it is ended already."""
        optuna = load_optuna()
        with suppress(ValueError, optuna.exceptions.UpdateFinishedTrialError):
            self.study.tell(trial.number, state=optuna.trial.TrialState.FAIL)


def _rounded(value: float, low: float, high: float) -> float:
    """A draw with three digits, or as many as tell a hundredth of a narrow range apart; never out of the range."""
    texts = (float(f"{value:.{digits}g}") for digits in range(3, 18))
    near = next((short for short in texts if abs(short - value) <= (high - low) / 100), value)
    return min(max(near, low), high)


def _stands(trial: Any) -> bool:
    """Whether a trial holds its slot: at work, finished, or diverged (which counts as finished)."""
    return trial.state.name in ("RUNNING", "COMPLETE", "PRUNED")


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


# The storage


def load_optuna() -> Any:
    """Optuna, which is an optional part; it keeps quiet: what there is to say goes through the reporter."""
    try:
        import optuna
    except ImportError:
        raise InputError("search needs Optuna; install it: pip install 'constraintmatch[search]'") from None
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return optuna


@contextmanager
def open_storage(place: str) -> Iterator[Any]:
    """Optuna's storage at a file or URL, made where there is none; one that goes away inside is an InputError."""
    optuna = load_optuna()
    storage = _connect(place)
    try:
        yield storage
    except optuna.exceptions.StorageInternalError as error:
        said, mend = _first_line(error.__cause__ or error), "run the same command again when it is back"
        raise InputError(f"{shown_storage(place)}: does not answer ({said}); {mend}") from None
    finally:
        storage.remove_session()
        storage.engine.dispose()


def _connect(place: str) -> Any:
    """Optuna's storage; a few tries, since another worker may be making the tables at the same time."""
    from sqlalchemy.exc import IntegrityError, OperationalError, ProgrammingError, SQLAlchemyError

    optuna = load_optuna()
    may_pass = (IntegrityError, OperationalError, ProgrammingError, optuna.exceptions.StorageInternalError)
    file = sqlite_file(place)
    if file is not None:
        check_target(file)
        file.parent.mkdir(parents=True, exist_ok=True)
    url = _with_driver(place) if file is None else f"sqlite:///{file}"
    # a worker waits for the others' writes, and finds out by itself when the server has hung up
    how: dict[str, Any] = {"pool_pre_ping": True} if file is None else {"connect_args": {"timeout": 60}}
    for left in reversed(range(8)):
        try:
            return optuna.storages.RDBStorage(url, engine_kwargs=how)
        except ImportError:
            mend = "install its driver; for PostgreSQL: pip install 'constraintmatch[postgres]'"
            raise InputError(f"{shown_storage(place)}: no driver for this database; {mend}") from None
        except (SQLAlchemyError, optuna.exceptions.StorageInternalError, RuntimeError, ValueError) as error:
            if not left or not isinstance(error, may_pass):
                mend = "name a new file, or postgresql://USER:PASSWORD@HOST/DATABASE"
                said = _first_line(error).replace(place, shown_storage(place))
                raise InputError(f"{shown_storage(place)}: no storage for a search ({said}); {mend}") from None
            time.sleep(0.25)
    raise AssertionError


def _with_driver(url: str) -> str:
    """The URL with a PostgreSQL driver that is there; which one a bare URL means depends on SQLAlchemy's version."""
    scheme, mark, rest = url.partition("://")
    if scheme not in ("postgresql", "postgres"):
        return url
    driver = next((name for name in ("psycopg", "psycopg2") if find_spec(name)), "psycopg")
    return f"postgresql+{driver}{mark}{rest}"


def sqlite_file(place: str) -> Path | None:
    """The file of a SQLite storage; None for the URL of another database."""
    named = place.removeprefix("sqlite:///")
    return None if "://" in named else Path(os.path.abspath(named))  # noqa: PTH100


def shown_storage(place: str) -> str:
    """The storage as it may be printed: without its password."""
    scheme, mark, rest = place.partition("://")
    login, at, host = rest.rpartition("@")
    return f"{scheme}{mark}{login.split(':')[0]}{at}{host}" if mark else place


def open_study(storage: Any, name: str, protocol: Mapping[str, Any], place: str) -> Any:
    """The study of that name, made where there is none; one with another protocol is refused.

    The protocol is what must be the same for trials to be compared, as JSON gives it back.
    """
    optuna = load_optuna()
    try:
        study = optuna.create_study(storage=storage, study_name=name)
        study.set_user_attr("protocol", dict(protocol))
    except optuna.exceptions.DuplicatedStudyError:
        study = optuna.load_study(storage=storage, study_name=name)
    where = f"{shown_storage(place)}: study {name!r}"
    stored = _stored_protocol(study)
    if stored is None and study.get_trials(deepcopy=False):
        raise InputError(f"{where} is of another program; choose another --study")
    if stored is None:  # whoever made the study did not live to say what for
        study.set_user_attr("protocol", dict(protocol))
        return study
    before, now = dict(flat_items(stored)), dict(flat_items(protocol))
    if odd := [key for key in {**now, **before} if before.get(key) != now.get(key)]:
        said = "; ".join(f"{key} was {before.get(key)!r}, is {now.get(key)!r}" for key in odd[:3])
        raise InputError(f"{where} is of another search ({said}); choose another --study or --storage")
    return study


def _stored_protocol(study: Any) -> dict[str, Any] | None:
    for wait in (0.2, 0.5, 1.0, 2.0, 0.0):
        if (stored := study.user_attrs.get("protocol")) is not None:
            return dict(stored)
        if study.get_trials(deepcopy=False):
            return None
        time.sleep(wait)  # another worker may have made the study a moment ago
    return None


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)
