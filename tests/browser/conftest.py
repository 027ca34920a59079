"""A real server in a process of its own and a real Chromium; where one is missing, the tests say so and are skipped."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageDraw

from constraintmatch.annotate.store import open_store
from constraintmatch.data.image_set import ImageSet
from constraintmatch.questions.answers import Question

PROGRAM = "from constraintmatch.cli import app; app()"
COLOURS = [(178, 60, 48), (40, 120, 190), (60, 150, 70)]


class Server:
    """A command that serves the page: started, stopped, killed and started again on the same port."""

    def __init__(self, *words: str) -> None:
        self.words = words
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = int(probe.getsockname()[1])
        self.address = f"http://127.0.0.1:{self.port}/"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> "Server":
        self.process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, *self.words, "--port", str(self.port), "--no-browser"],
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for _ in range(600):
            try:
                urllib.request.urlopen(self.address, timeout=5).close()
                return self
            except OSError:  # not yet: refused, or listening and not answering
                assert self.process.poll() is None, "the server ended"
                time.sleep(0.05)
        raise AssertionError("the server did not start")

    def stop(self, number: int = signal.SIGINT) -> None:
        if self.process is not None:
            self.process.send_signal(number)
            self.process.wait(timeout=20)
            self.process = None

    def get(self, path: str) -> Any:
        with urllib.request.urlopen(self.address + path, timeout=10) as reply:
            return json.load(reply)

    def counts(self) -> dict[str, float]:
        return dict(self.get("api/state")["counts"])

    def pairs(self) -> list[str]:
        """The lines of the pairs file."""
        with urllib.request.urlopen(self.address + "api/pairs.csv", timeout=10) as reply:
            return str(reply.read().decode()).splitlines()[1:]


@pytest.fixture(scope="session")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """60 pictures of 200 × 150: circles, squares and triangles in their colours."""
    place = tmp_path_factory.mktemp("photos")
    random = np.random.Generator(np.random.Philox(5))
    for row in range(60):
        picture = Image.new("RGB", (200, 150), tuple(int(value) for value in random.integers(190, 256, 3)))
        x, y = (int(value) for value in random.integers(20, 60, 2))
        draw, colour = ImageDraw.Draw(picture), COLOURS[row % 3]
        if row % 3 == 0:
            draw.ellipse((x, y, x + 70, y + 70), fill=colour)
        elif row % 3 == 1:
            draw.rectangle((x, y, x + 70, y + 70), fill=colour)
        else:
            draw.polygon([(x, y + 70), (x + 70, y + 70), (x + 35, y)], fill=colour)
        picture.save(place / f"{row:02d}.png")
    return place


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model for these pictures; it need not be good."""
    from constraintmatch.models.cluster_model import build_model, save_model

    place = tmp_path_factory.mktemp("model")
    save_model(build_model(n_clusters=3, side=16, channels=3, backbone="tiny"), place)
    return place


@pytest.fixture
def serve(photos: Path, tmp_path: Path) -> Iterator[Callable[..., Server]]:
    """Start a server over the pictures, with a database of its own."""
    started: list[Server] = []

    def begin(*words: str, small: bool = False, asking: Sequence[Question] = ()) -> Server:
        folder = tmp_path / "photos"
        if not folder.exists():
            shutil.copytree(photos, folder)
            for path in folder.iterdir() if small else ():
                Image.open(path).resize((16, 16)).save(path)
        if asking:
            with open_store(tmp_path / "answers.db", ImageSet.from_folder(folder)) as store:
                for question in asking:
                    store.add_questions([question], urgent=True)
        started.append(Server("annotate", str(folder), "--db", str(tmp_path / "answers.db"), *words).start())
        return started[-1]

    yield begin
    for server in started:
        server.stop()


@pytest.fixture
def serve_loop(tmp_path: Path) -> Iterator[Callable[..., Server]]:
    """Start `constraintmatch loop` over the digits with a quick start and rounds of two steps, in tmp_path / "loop"."""
    started: list[Server] = []

    def begin(*words: str) -> Server:
        where = ["--model", str(quick_start(tmp_path / "start")), "--out", str(tmp_path / "loop"), "--device", "cpu"]
        started.append(Server("loop", "digits", *where, "--set", "steps=2", *words).start())
        return started[-1]

    yield begin
    for server in started:
        server.stop()


def quick_start(folder: Path) -> Path:
    """A model of the digits whose clusters are those of k-means on untrained features."""
    from constraintmatch.data.datasets import DATASETS, load_dataset
    from constraintmatch.models.cluster_model import build_model, save_model
    from constraintmatch.pipeline.config import make_config
    from constraintmatch.pipeline.train import train

    if not folder.exists():
        row = DATASETS["digits"]
        model = build_model(n_clusters=10, side=8, channels=1, backbone="tiny", mean=row.mean, std=row.std)
        config = make_config("linear_scan", {"n_clusters": 10, "n_tries": 4, "device": "cpu"}, start=model)
        made = train(load_dataset("digits", "train"), None, config)
        save_model(made.model, folder)
    return folder


def chromium_path() -> str | None:
    """The system's Chromium, else None: then Playwright's own is tried."""
    names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
    return next(filter(None, map(shutil.which, names)), None)


@pytest.fixture(scope="session")
def chromium() -> Iterator[Any]:
    """A running Chromium."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with playwright.sync_playwright() as driver:
        try:
            browser = driver.chromium.launch(executable_path=chromium_path(), args=["--no-sandbox"])
        except playwright.Error as error:
            pytest.skip(f"there is no Chromium that starts: {str(error).splitlines()[0]}")
        yield browser
        browser.close()


@pytest.fixture
def visit(chromium: Any) -> Iterator[Callable[..., Any]]:
    """Open the page as somebody in a browser of their own; errors on the page fail the test."""
    contexts, errors = [], []

    def go(server: Server, annotator: str = "anna", view: str = "", **options: Any) -> Any:
        context = chromium.new_context(**({"viewport": {"width": 1280, "height": 800}} | options))
        context.set_default_timeout(15_000)
        context.add_init_script(f"localStorage.setItem('constraintmatch:annotator', '{annotator}')")
        contexts.append(context)
        page = context.new_page()
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("console", lambda line: errors.append(line.text) if "Content Security" in line.text else None)
        page.goto(server.address + view)
        if not view:
            page.wait_for_selector("#stage:not([hidden]) img")
        return page

    yield go
    for context in contexts:
        context.close()
    assert not errors
