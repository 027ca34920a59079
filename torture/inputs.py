"""Bad inputs, machines and files: words, values and requests drawn from signatures; small disks; broken bytes."""

import http.client
import json
import os
import random
import resource
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
from ground import BASE, PATIENCE, Ended, Row, act, commands, files_of, fork, limit, on_disk, wait
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from kills import count_operations, fresh
from typer.main import get_command

from constraintmatch import ConstraintMatch, Constraints, ImageSet
from constraintmatch.cli import app
from constraintmatch.cli.flags import settings_of

__all__ = ["bad_files", "bad_machines", "bad_requests", "bad_values", "bad_words"]

NUMBERS = ["-1", "0", "1", "0.5", "nan", "inf", "-inf", "1e308", "1e-320", str(2**63), str(10**30), "1_000", "0x10"]
PLACES = [
    "",
    ".",
    "..x",
    "nowhere",
    "photos",
    "pairs.csv",
    "pairs.csv/x",
    "/proc/x",
    "/dev/null",
    "/dev/full",
    "x" * 300,
]
PLACES += [
    "o\udcff",
    "a/b/c/d",
    "photos/in",
    "~",
    "-",
    "model",
    "run",
    "answers.db",
    "set.npz",
    "with space",
    "new\nline",
]
TEXTS = ["x", "digits", "cifar10", "tiny", "a,b", "left,right", "=", "💥" * 50, "yes", "no", "cuda:99", "cpu", "train"]
DRAWN: dict[str, Any] = {"database": None, "deadline": None, "phases": [Phase.generate]}
DRAWN["suppress_health_check"] = list(HealthCheck)


def judge(row: Row, ended: Ended, before: dict[str, str], place: Path, what: str) -> None:
    """Refused in one line with nothing left, or done; everything else is a failure."""
    stopped = ended.code == 130 and ended.late is not None and ended.late <= PATIENCE
    told = ended.code == 2 and "contradiction: " in ended.said  # what check is for
    left = sorted(files_of(place).items() ^ before.items())[:4]
    if "Traceback" not in ended.said and (ended.code == 0 or stopped or told):
        row.add("survived")
    elif ended.code == 2 and ended.clear and not left:
        row.add("refused")
    else:
        row.add("failed", f"{what}: code {ended.code}, late {ended.late}, left {left}: {ended.said[-900:]}")


# Words


def bad_words(ground: Path, work: Path, draw: random.Random, n: int) -> Row:
    """Calls of every command with one word of it spoiled."""
    row, known = Row("bad words to the commands"), get_command(app).commands  # type: ignore[attr-defined]
    place = fresh(ground, work)
    before = files_of(place)
    for _ in range(n):
        name = draw.choice(list(BASE))
        words = spoil(commands(name), known[name].params, name, draw)
        ended = act(words, place, stop_at=8.0)
        judge(row, ended, before, place, repr(words))
        if files_of(place) != before:
            place = fresh(ground, work)
    return row


def spoil(words: list[str], params: list[Any], name: str, draw: random.Random) -> list[str]:
    """The words with an option, an argument or a setting that cannot be, or that can."""
    value = draw.choice(draw.choice([NUMBERS, PLACES, TEXTS]))
    options = [param.opts[0] for param in params if param.param_type_name == "option" and not param.is_flag]
    options = [option for option in options if option not in ("--set", "--help")]
    kinds = ["option"] * 5 + ["argument"] * 2 + ["setting"] * 4 * bool(settings_of(name)) + ["flag", "missing"]
    kind = draw.choice(kinds)
    if kind == "setting":
        return [*words, "--set", f"{draw.choice(settings_of(name))}={value}"]
    if kind == "option" and options:
        option = draw.choice(options)
        if option in words:
            at = words.index(option)
            words = words[:at] + words[at + 2 :]
        return [*words, option, value]
    if kind == "argument" and len(words) > 1 and not words[1].startswith("-"):
        return [words[0], value, *words[2:]]
    if kind == "missing":
        at = draw.randrange(1, len(words)) if len(words) > 1 else 1
        return words[:at] + words[at + 1 :]
    return [*words, draw.choice(["--no-such", "extra", "--resume", "--strict", "--labels", "--frozen", "--terminal"])]


# Values


def bad_values(number: int, n: int) -> Row:
    """Calls from Python: what is raised is one line of a ValueError or TypeError, or the call works."""
    row = Row("bad values from Python")
    kinds = st.sampled_from(["u1", "f4", "f8", "i8", "U2", "O", "?"])
    arrays = st.builds(np.zeros, st.lists(st.integers(0, 9), max_size=4), kinds)
    links = st.dictionaries(st.sampled_from(["must_link", "cannot_link", "x"]), st.lists(st.integers()), max_size=2)
    lists = st.lists(st.integers(-3, 9) | st.floats() | st.text(max_size=2), max_size=6)
    plain = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
    odd = plain | st.sampled_from(["\ud800", 10**25]) | lists | arrays | links
    images = np.random.default_rng(0).integers(0, 255, (12, 8, 8), dtype=np.uint8)
    own = sorted(ConstraintMatch().get_params())
    quick = {"steps": 2, "device": "cpu", "n_clusters": 3, "images_per_step": 4, "pairs_per_step": 4, "recipe": "paper"}
    quick = {key: value for key, value in quick.items() if key in own}
    said = {"must_link": [(0, 1)], "cannot_link": [(0, 2)]}
    calls: dict[str, tuple[Callable[..., object], dict[str, Any]]] = {  # with arguments that are right
        "ImageSet.from_arrays": (ImageSet.from_arrays, {"images": images, "names": None, "labels": None}),
        "Constraints.from_arrays": (Constraints.from_arrays, {"left": [0], "right": [1], "link": [1], "n_images": 9}),
        "Constraints.from_lists": (Constraints.from_lists, {"n_images": 9, **said}),
        "Constraints.sample": (Constraints.sample, {"labels": [0, 1] * 9, "n": 5, "seed": 0, "balanced": False}),
        "fit": (ConstraintMatch(**quick).fit, {"X": images, "constraints": said}),
        "ConstraintMatch": (
            lambda **given: ConstraintMatch(**given).fit(images, constraints=said),
            {name: quick.get(name, value) for name, value in ConstraintMatch().get_params().items()},
        ),
    }

    @seed(number)
    @settings(max_examples=n, **DRAWN)
    @given(st.data())
    def run(data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(calls)))
        call, right = calls[name]
        wrong = {data.draw(st.sampled_from(sorted(right))): data.draw(odd) for _ in range(data.draw(st.integers(1, 2)))}
        judge_value(row, f"{name}({wrong!r:.300})", lambda: call(**{**right, **wrong}))

    run()
    return row


def judge_value(row: Row, what: str, call: Callable[[], object]) -> None:
    """A call in a fork."""

    def before() -> None:
        import warnings

        warnings.simplefilter("ignore")
        limit(resource.RLIMIT_AS, 4 << 30)()
        try:
            call()
        except (ValueError, TypeError, MemoryError) as error:
            if type(error).__module__ != "builtins" or "\n" not in str(error).strip():
                print(f"error: {type(error).__name__}: {' '.join(ascii(error).split())}")
                raise SystemExit(2) from None
            raise
        raise SystemExit(0)

    place = Path(os.environ["XDG_CACHE_HOME"]).parent / "python"
    place.mkdir(exist_ok=True)
    judge(row, act([], place, before, stop_at=10.0), files_of(place), place, what)


# Requests


@contextmanager
def serving(ground: Path, work: Path) -> Iterator[tuple[int, Path]]:
    """A server of the page; its port and its log."""
    place = fresh(ground, work)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    words = ["annotate", "photos", "--db", "answers.db", "--model", "model", "--port", str(port), "--no-browser", "-q"]
    log = work.with_name("server.log")
    server = fork(words, place, log)
    try:
        for _ in range(2_000):
            try:
                socket.create_connection(("127.0.0.1", port), timeout=5).close()
                request(port, "GET", "/api/state", b"")
                break
            except OSError:
                time.sleep(0.05)
        yield port, log
    finally:
        os.kill(server, signal.SIGTERM)
        wait(server, log)


def request(port: int, method: str, path: str, body: bytes, kind: str = "application/json") -> int:
    """The status of the reply."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    try:
        connection.request(method, path, body or None, {"content-type": kind})
        reply = connection.getresponse()
        reply.read()
        return reply.status
    finally:
        connection.close()


def bad_requests(ground: Path, work: Path, draw: random.Random, n: int) -> Row:
    """Requests drawn from the server's own description, with any Unicode, and connections that are dropped."""
    row = Row("bad requests to the page")
    text = st.text(st.characters(), max_size=20) | st.just("\ud800")
    json_value = st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | text,
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3),
        max_leaves=6,
    )
    with serving(ground, work) as (port, log):
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        connection.request("GET", "/api/openapi.json")
        described = json.loads(connection.getresponse().read())
        routes = [(method.upper(), path) for path, methods in described["paths"].items() for method in methods]
        names = sorted(
            {name for one in described["components"]["schemas"].values() for name in one.get("properties", {})}
        )

        @seed(draw.randrange(2**32))
        @settings(max_examples=n, **DRAWN)
        @given(st.data())
        def run(data: st.DataObject) -> None:
            method, path = data.draw(st.sampled_from(routes))
            while "{" in path:
                value = data.draw(st.integers().map(str) | st.text(st.characters(codec="utf-8"), max_size=5))
                path = path[: path.index("{")] + quote(value, safe="") + path[path.index("}") + 1 :]
            if data.draw(st.booleans()):
                path += "?" + quote(data.draw(st.text(st.characters(codec="utf-8"), max_size=9)), safe="=&")
            body = json.dumps(data.draw(st.dictionaries(st.sampled_from(names), json_value, max_size=4))).encode()
            body = data.draw(
                st.sampled_from([body, body[: len(body) // 2], b"[" * 5_000, b"\xff\xfe", b"", body + bytes(9)])
            )
            if data.draw(st.integers(0, 3)) == 0:
                drop(port, method, path, body, data.draw(st.sampled_from([0.0, 0.002, 0.02])))
                row.add("survived")
                return
            try:
                status = request(port, method, path, body)
            except (OSError, http.client.HTTPException) as error:
                row.add("failed", f"{method} {path} {body!r:.200}: no reply ({error!r})")
                return
            how = "survived" if status < 400 else "refused" if status < 500 else "failed"
            row.add(how, f"{method} {path} {body!r:.200}: status {status}")

        run()
        fuzz(row, port, draw, n)
        if request(port, "GET", "/api/state", b"") != 200:
            row.add("failed", "the server does not answer any more")
    if "Traceback" in (said := log.read_text(errors="replace")):
        row.add("failed", f"the log of the server has a traceback: {said[-1500:]}")
    return row


def fuzz(row: Row, port: int, draw: random.Random, n: int) -> None:
    """Schemathesis, where it is installed: good and bad data for each route."""
    try:
        import schemathesis
    except ImportError:
        return
    description = schemathesis.openapi.from_url(f"http://127.0.0.1:{port}/api/openapi.json")
    operations = [found.ok() for found in description.get_all_operations()]
    modes = schemathesis.GenerationMode
    for operation in operations:
        for mode in (modes.POSITIVE, modes.NEGATIVE):
            if mode == modes.NEGATIVE and not (operation.body or operation.query or operation.path_parameters):
                continue

            @seed(draw.randrange(2**32))
            @settings(max_examples=max(1, n // 25), **DRAWN)
            @given(case=operation.as_strategy(generation_mode=mode))
            def run(case: Any) -> None:
                status = case.call().status_code
                how = "survived" if status < 400 else "refused" if status < 500 else "failed"
                row.add(how, f"{case.method} {case.formatted_path}: status {status}")

            run()


def drop(port: int, method: str, path: str, body: bytes, after: float) -> None:
    """Send half of a request, or a whole one, and reset the connection."""
    with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
        head = f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\n"
        connection.sendall(head.encode() + f"Content-Length: {len(body) + 5}\r\n\r\n".encode() + body)
        time.sleep(after)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


# Machines

TRIED = ("train", "pretrain", "loop", "predict", "embed", "annotate", "repair")


def bad_machines(ground: Path, work: Path, draw: random.Random, n: int) -> list[Row]:
    """Commands on a full or read-only disk, with few files, little memory or small files; then without limits."""
    limits: dict[str, Callable[[], Callable[[], None]]] = {
        "few open files": lambda: limit(
            resource.RLIMIT_NOFILE, len(list(Path("/proc/self/fd").iterdir())) + draw.randrange(14)
        ),
        "little memory": lambda: limit(resource.RLIMIT_AS, draw.randrange(64 << 20)),
        "files may not be large": lambda: limit(resource.RLIMIT_FSIZE, draw.randrange(200_000)),
    }
    rows = []
    for what, make in limits.items():
        row = Row(what)
        for name in [name for name in TRIED for _ in range(n)]:
            place = fresh(ground, work)
            after_limit(row, name, place, act(commands(name), place, make()), "")
        rows.append(row)
    full, closed = Row("full disk"), Row("read-only disk")
    for name in [name for name in TRIED for _ in range(n)]:
        place = fresh(ground, work)
        with on_disk(place / "disk", f"size={draw.randrange(8, 600)}k") as mounted:
            if mounted:
                ended = act(on(name, place), place)
                subprocess.run(["mount", "-o", "remount,size=64m", str(place / "disk")], check=True)
                after_limit(full, name, place, ended, "disk/")
    for name in TRIED:
        place = fresh(ground, work)
        with on_disk(place / "disk", "size=1m") as mounted:
            if mounted:
                words = on(name, place)
                subprocess.run(["mount", "-o", "remount,ro", str(place / "disk")], check=True)
                ended = act(words, place)
                good = ended.code == 2 and ended.clear
                closed.add("refused" if good else "failed", f"{name}: code {ended.code}: {ended.said[-900:]}")
    return [*rows, full, closed]


def on(name: str, place: Path) -> list[str]:
    """The call of a command that writes to the disk at `disk`."""
    if name == "annotate":
        return ["annotate", "photos", "--db", "disk/answers.db", "--import", "more.csv"]
    words = commands(name, out=f"disk/{'out.npz' if name == 'embed' else 'out.csv' if name == 'predict' else 'out'}")
    assert place.exists()
    return ["disk/sorted" if word == "sorted" else word for word in words]


def after_limit(row: Row, name: str, place: Path, ended: Ended, disk: str) -> None:
    """What a limit did, and whether the same command then works."""
    if not (ended.code == 0 or (ended.code == 2 and ended.clear)) or "Traceback" in ended.said:
        row.add("failed", f"{name}: code {ended.code}: {ended.said[-1200:]}")
        return
    if ended.code == 0:
        row.add("survived")
        return
    begun = (place / disk / "out" / "run.json").exists() or (place / disk / "out" / "start").exists()
    words = on(name, place) if disk else commands(name)
    again = act([*words, *(["--resume"] if name == "train" and begun else [])], place)
    left = [file for file in files_of(place) if Path(file).name.startswith(".")]
    bad = again.code or left
    row.add(
        "failed" if bad else "refused", f"{name} after the limit: code {again.code}, left {left}: {again.said[-900:]}"
    )


# Files

READ: dict[str, list[str]] = {
    "pairs.csv": ["check", "pairs.csv", "photos"],
    "pairs.parquet": ["check", "pairs.parquet", "photos"],
    "pairs.jsonl": ["check", "pairs.jsonl", "photos"],
    "export.json": ["annotate", "photos", "--db", "new.db", "--import", "export.json"],
    "set.npz": ["predict", "flat", "set.npz", "--out", "o.csv", "--device", "cpu"],
    "set.npy": ["predict", "flat", "set.npy", "--out", "o.csv", "--device", "cpu"],
    "images.parquet": ["predict", "model", "images.parquet", "--out", "o.csv", "--device", "cpu"],
    "shards/0.tar": ["predict", "model", "shards", "--out", "o.csv", "--device", "cpu"],
    "photos/a/00.png": ["predict", "model", "photos", "--out", "o.csv", "--device", "cpu"],
    "model/model.safetensors": ["predict", "model", "photos", "--out", "o.csv", "--device", "cpu"],
    "model/config.json": ["predict", "model", "photos", "--out", "o.csv", "--device", "cpu"],
    "run/run.json": ["train", "--from-run", "run", "--model", "model", "--out", "out", "--device", "cpu"],
    "run/log.jsonl": ["report", "run"],
    "run/pairs.csv": ["report", "run"],
    "out/checkpoint.safetensors": commands("train", "--resume"),
    "out/run.json": commands("train", "--resume"),
    "answers.db": ["annotate", "photos", "--db", "answers.db", "--export", "x.csv"],
    "scan.pt": ["import-scan", "scan.pt", "cifar10", "--out", "sc"],
    "cache": ["predict", "model", "photos", "--out", "o.csv", "--device", "cpu"],
}


def bad_files(ground: Path, work: Path, draw: random.Random, n: int) -> list[Row]:
    """Every kind of file that is read, with bytes flipped, cut, swapped or added."""
    row, saved = Row("damaged files"), Row("damaged answers, repaired")
    others = [path.read_bytes() for path in ground.rglob("*") if path.is_file()]
    half = half_a_run(ground, work)
    for file, words in READ.items():
        for _ in range(n):
            place = fresh(half if file.startswith("out/") else ground, work)
            path = place / file
            if file == "cache":
                cached = sorted(Path(os.environ["XDG_CACHE_HOME"]).rglob("*.*"))
                path = draw.choice([one for one in cached if one.is_file()])
            path.write_bytes(damage(path.read_bytes(), others, draw))
            before = files_of(place)
            ended = act(words, place, stop_at=15.0)
            if file == "run/run.json" or file.startswith("out/"):
                judge_loosely(row, ended, file)
            else:
                judge(row, ended, before, place, f"damaged {file}")
            if file == "answers.db" and ended.code == 2:
                judge(saved, act(["repair", "answers.db", "--out", "out.db"], place), before, place, "repair")
    return [row, saved]


def judge_loosely(row: Row, ended: Ended, what: str) -> None:
    """As `judge`, of commands that may leave a note of how they ended."""
    good = ended.code == 2 and ended.clear
    how = "refused" if good else "survived" if ended.code == 0 and "Traceback" not in ended.said else "failed"
    row.add(how, f"damaged {what}: code {ended.code}: {ended.said[-900:]}")


def half_a_run(ground: Path, work: Path) -> Path:
    """The inputs, with a run that was killed after a checkpoint."""
    place = fresh(ground, work)
    for at in range(20, 200, 5):
        place = fresh(ground, work)
        act(commands("train"), place, partial(count_operations, place, kill_at=at))
        if (place / "out" / "checkpoint.safetensors").exists():
            break
    kept = work.with_name("half")
    os.rename(place, kept)  # noqa: PTH104
    return kept


def damage(content: bytes, others: list[bytes], draw: random.Random) -> bytes:
    """The content, spoiled."""
    kind = draw.choice(["flip", "flip", "flip", "cut", "cut", "swap", "empty", "zeros", "more"])
    raw = bytearray(content)
    if kind == "flip" and raw:
        for _ in range(draw.randrange(1, 6)):
            raw[draw.randrange(len(raw))] ^= 1 << draw.randrange(8)
    elif kind == "cut" and raw:
        del raw[draw.randrange(len(raw)) :]
    elif kind == "swap":
        raw = bytearray(draw.choice(others))
    elif kind == "zeros" and raw:
        at = draw.randrange(len(raw))
        raw[at : at + 64] = bytes(len(raw[at : at + 64]))
    elif kind == "more":
        raw += draw.randbytes(40)
    return b"" if kind == "empty" else bytes(raw)


assert sys.platform.startswith("linux"), "the torture test needs Linux: /proc, forks and limits"
