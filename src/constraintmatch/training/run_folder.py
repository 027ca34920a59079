"""The run folder: what was asked (`run.json`), what happened (`log.jsonl`), where to go on (`checkpoint.safetensors`).

runs/x/
  run.json                everything needed to repeat the run, and how it ended
  log.jsonl               one line every log_every steps and for every evaluation
  checkpoint.safetensors  weights, optimiser, step; removed when the run is finished
  model/                  the model folder it left
  pairs.csv clusters.csv evaluation.json report.html   written by the commands, where they apply
"""

import json
import os
import platform
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import constraintmatch
from constraintmatch._internal import files
from constraintmatch._internal.errors import InputError

FORMAT = 1
GONE: dict[str, tuple[Any, str]] = {  # arguments of earlier versions: their default, and what there is now
    "least_share": (0.0, "the stage neighbour_label teaches every cluster"),
    "n_heads": (1, "--set scan.n_tries=20 tries several linear heads and keeps the best"),
    "objective": ("mcl", "pairs are learned by the paper's loss, MCL"),
    "over_selected": (False, "pseudo-labels are averaged over all images of a step"),
    "pool": ("all", "unconstrained images are drawn from all images"),
}
_CONTRAST = {"temperature": 0.5, "head_temperature": 1.0, "entropy_weight": 1.0, "projection": 128}
_FIXED: dict[str, dict[str, float]] = {  # arguments of one stage
    "simclr": {"projection": 128},
    "cc": _CONTRAST,
    "tcc": _CONTRAST,
    "pica": {"entropy_weight": 2.0},
    "mice": {"temperature": 1.0, "entropy_weight": 1.0, "target_momentum": 0.999, "projection": 128},
    "linear_scan": {"n_neighbours": 20, "most_images": 50_000},
}
GONE |= {f"{stage}.{name}": (of[name], f"it is always {of[name]}") for stage, of in _FIXED.items() for name in of}
_MAYBE = (str, type(None))
_KINDS: dict[str, Any] = {  # of the entries of a request, where they are there
    "method": str,
    "arguments": {},
    "settings": {},
    "views": {"flip": bool, "without": list},
    "data": {
        **dict.fromkeys(("source", "test", "pictures", "data_dir"), _MAYBE),
        **{"side": int, "channels": int, "class_folders": (bool, str), "start": {"model": _MAYBE}},
    },
    "model": {"n_clusters": int, "backbone": str},
}
_WRITTEN_FIRST = ("run.json", "pairs.csv", "merged.json")  # before the first step
_OWN_BYTES = 2 << 30  # of GPU memory that a process may hold in addition to its tensors


class OtherRequest(InputError):
    """The run folder holds another run than the one that is asked for."""


@dataclass
class RunFolder:
    """An open run folder, held by this process."""

    path: Path
    record: dict[str, Any]

    @property
    def checkpoint(self) -> Path:
        return self.path / "checkpoint.safetensors"

    @property
    def model(self) -> Path:
        return self.path / "model"

    @property
    def finished(self) -> bool:
        return self.record.get("status") == "finished"

    def log(self, entry: Mapping[str, Any]) -> None:
        """Append one line to `log.jsonl`."""
        with (self.path / "log.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(dict(entry), ensure_ascii=False) + "\n")

    def cut_log(self, step: int) -> None:
        """Forget log lines after `step`: a resumed run writes them again."""
        kept = [entry for entry in read_log(self.path) if entry.get("step", 0) <= step]
        text = "".join(json.dumps(entry, ensure_ascii=False) + "\n" for entry in kept)
        files.write_atomically(self.path / "log.jsonl", lambda path: path.write_text(text, encoding="utf-8"))

    def tensorboard(self, done: int) -> Any:
        """A writer of scalars; what an interrupted run wrote after the step it goes on from is taken back."""
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise InputError("tensorboard needs its package: pip install constraintmatch[tensorboard]") from None
        return SummaryWriter(str(self.path / "tensorboard"), purge_step=done + 1 if done else None)

    def note(self, **changes: Any) -> None:
        """Change entries of `run.json`."""
        self.record.update(changes)
        files.write_json(self.path / "run.json", self.record)


@contextmanager
def open_run(
    path: Path | str,
    record: Mapping[str, Any],
    *,
    resume: bool = False,
    since: Mapping[str, Any] | None = None,
    how: Mapping[str, Any] | None = None,
) -> Iterator[RunFolder]:
    """The run folder, locked for this process; `run.json` says how the block ended.

    Without `resume` a folder that holds a run is refused, so nothing is overwritten. With it the stored request must
    equal the new one, except for the places of the images and of the first model: if they moved, their new place is
    noted. `since` has what older requests meant by entries that they do not have. `how` is noted too: what a resumed
    run may change. A fresh run that is refused before it has logged anything leaves nothing behind.
    """
    path = Path(path)
    with _remove_if_empty(path), files.folder_lock(path):
        for place in (path, path / "model"):
            files.remove_leftovers(place)
        stored = _read_record(path)
        if stored is not None and not resume:
            raise InputError(f"{path}: holds a run already; continue it with --resume or choose another --out")
        run = RunFolder(path, {"format": FORMAT, "request": _plain(record), "started": _now()})
        if stored is not None:
            _check_request(current_request(stored["request"], path), run.record["request"], path, since or {})
            run = RunFolder(path, {**stored, "request": run.record["request"]})
        if run.finished:
            if run.record != stored:
                run.note()
            yield run
            return
        run.note(status="running", environment=environment(), how=_plain(how or {}))
        began = time.monotonic() - float(run.record.get("seconds", 0.0))
        try:
            yield run
        except BaseException as error:
            status = "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"
            if type(error) is InputError and stored is None and not read_log(path) and not run.checkpoint.exists():
                for name in _WRITTEN_FIRST:
                    (path / name).unlink(missing_ok=True)
            else:
                with suppress(InputError, OSError):  # a full disk must not hide why the run ended
                    run.note(status=status, seconds=round(time.monotonic() - began, 3), error=str(error)[:500])
            raise
        run.record.pop("error", None)
        run.note(status="finished", seconds=round(time.monotonic() - began, 3), ended=_now())


@contextmanager
def _remove_if_empty(path: Path) -> Iterator[None]:
    """Folders that are made in this block, and that an error leaves empty, are removed."""
    made = [place for place in (path, *path.parents) if not place.exists()]
    try:
        yield
    except BaseException:
        if path in made and path.is_dir() and all(entry.name == ".lock" for entry in path.iterdir()):
            (path / ".lock").unlink(missing_ok=True)
            for place in made:
                place.rmdir()
        raise


def current_arguments(arguments: Mapping[str, Any], place: Path | str, method: str = "") -> dict[str, Any]:
    """The arguments of a record at `place` without those of `GONE`; one that was not its default is an InputError."""
    gone = {name.removeprefix(f"{method}."): said for name, said in GONE.items()}
    for name, (default, instead) in gone.items():
        if (value := arguments.get(name, default)) != default:
            raise InputError(f"{place}: made with {name} = {value!r}, which is gone: {instead}; train again without it")
    return {name: value for name, value in arguments.items() if name not in gone}


def current_request(request: Mapping[str, Any], place: Path | str) -> dict[str, Any]:
    """A stored request as this version writes it; entries of another kind are an InputError."""
    _check_kinds(request, _KINDS, place)
    held = {name: value for name, value in request.items() if isinstance(value, dict)}
    if "arguments" in held:
        held["arguments"] = current_arguments(held["arguments"], place, request.get("method", ""))
    if "model" in held:
        held["model"] = {name: value for name, value in held["model"].items() if name != "n_heads"}
    return {**request, **held}


def _check_kinds(values: Mapping[str, Any], kinds: Mapping[str, Any], place: Path | str, above: str = "") -> None:
    for name, kind in ((name, kind) for name, kind in kinds.items() if name in values):
        value = values[name]
        fits = isinstance(value, dict if isinstance(kind, dict) else kind)
        if not fits or (kind is list and not all(isinstance(one, str) for one in value)):
            said = f"{above}{name} is {value!r:.60}, which no training writes"
            raise InputError(f"{place}: {said}; name another run")
        if isinstance(kind, dict):
            _check_kinds(value, kind, place, f"{above}{name}.")


def is_finished(path: Path | str) -> bool:
    """Whether the folder holds a run that came to its end."""
    return (_read_record(Path(path)) or {}).get("status") == "finished"


def read_log(path: Path | str) -> list[dict[str, Any]]:
    """The entries of a run's log; a half-written last line (a killed process) is left out."""
    file, entries = Path(path) / "log.jsonl", []
    lines = file.read_text(encoding="utf-8", errors="replace").splitlines() if file.is_file() else []
    for line in lines:
        with suppress(ValueError):
            entries.append(files.parse_json(line))
    return [entry for entry in entries if isinstance(entry, dict)]


def write_result(path: Path | str, values: Mapping[str, Any]) -> None:
    """Write a result as JSON with the environment it came from: the only source of published numbers."""
    files.write_json(path, {**_plain(values), "environment": environment(), "written": _now()})


def flat_items(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The entries of nested mappings as ("outer.inner", value): two records are then compared entry by entry."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from flat_items(inner, f"{prefix}.{key}" if prefix else str(key))
    else:
        yield prefix, value


def environment() -> dict[str, Any]:
    """Versions, hardware and commit of this process: what a result must carry with its numbers.

    A GPU is called shared if a queue that trains several at once says so, or if others hold more of its memory than a
    process needs: its seconds are then not those of a run alone.
    """
    import torch

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    if gpu is not None:
        free, total = torch.cuda.mem_get_info()
        others = total - free - torch.cuda.memory_reserved()
        if os.environ.get("CONSTRAINTMATCH_GPU_SHARED") == "1" or others > _OWN_BYTES:
            gpu = f"{gpu}, shared"
    return {
        "constraintmatch": constraintmatch.__version__,
        "commit": _commit(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "platform": f"{platform.system()} {platform.machine()}",
        "cpu_threads": torch.get_num_threads(),
        "gpu": gpu,
    }


def _read_record(path: Path) -> dict[str, Any] | None:
    if not (path / "run.json").exists():
        return None
    record = files.read_json(path / "run.json")
    if not isinstance(record, dict) or record.get("format") != FORMAT or "request" not in record:
        raise OtherRequest(f"{path / 'run.json'}: not a run of format {FORMAT}; choose another --out")
    return record


def _check_request(stored: Mapping[str, Any], asked: Mapping[str, Any], path: Path, since: Mapping[str, Any]) -> None:
    before, now = {**since, **dict(flat_items(stored))}, dict(flat_items(asked))
    differing = {key for key in before.keys() | now.keys() if before.get(key) != now.get(key)}
    if odd := sorted(differing - _places(before, now)):
        said = "; ".join(f"{key} was {before.get(key)!r}, is {now.get(key)!r}" for key in odd[:4])
        raise OtherRequest(f"{path}: cannot resume with another request ({said}); choose another --out")


def _places(before: Mapping[str, Any], now: Mapping[str, Any]) -> set[str]:
    """The entries that name the place of something that is the same by its fingerprint.

    A data set's name is not among them: two sets may have the same images and other labels.
    """
    same = [key for key in ("data.fingerprint", "model.weights") if before.get(key) and before[key] == now.get(key)]
    places = set()
    if "data.fingerprint" in same:
        places |= {"data.data_dir"} if now.get("data.kind") == "dataset" else {"data.name", "data.source"}
    if "model.weights" in same and before.get("data.start.model") and now.get("data.start.model"):
        places |= {"data.start.model"}
    return places


def _plain(value: Any) -> Any:
    """The value as JSON would give it back, so that stored and asked can be compared."""
    return json.loads(json.dumps(value, default=str))


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _commit() -> str | None:
    """The commit of the checkout this package runs from, with a plus when files are changed; None outside one.

    For a copy without history CONSTRAINTMATCH_COMMIT gives it.
    """
    if given := os.environ.get("CONSTRAINTMATCH_COMMIT"):
        return given
    here = Path(__file__).resolve().parent
    command = ["git", "-C", str(here), "describe", "--always", "--dirty=+", "--abbrev=12", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=5, check=False)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None
