"""The report page: self-contained, well-formed, escaped, and with the numbers that evaluation gives."""

import base64
import io
import itertools
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from html import escape, unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from PIL import Image

from constraintmatch._internal.errors import InputError
from constraintmatch.constraints.constraint_set import Constraints
from constraintmatch.data.image_set import ImageSet, Skipped
from constraintmatch.evaluation.metrics import Predictions, accuracy, agreement, collapse_warnings, scores
from constraintmatch.evaluation.report import report_html, write_report
from constraintmatch.evaluation.report_parts import histogram, line_chart, nice_ticks, percent, short_number

VOID = {"meta", "link", "img", "br"}
MakeRun = Callable[..., Path]


class Page(HTMLParser):
    """The elements of a page; unbalanced tags are an AssertionError."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        names = [name for name, _ in attrs]
        assert len(names) == len(set(names)), f"<{tag}> has an attribute twice"
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] != "style":
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())

    def all(self, tag: str, kind: str | None = None) -> list[dict[str, str | None]]:
        return [
            a for name, a in self.elements if name == tag and (kind is None or kind in (a.get("class") or "").split())
        ]

    def ids(self) -> set[str | None]:
        return {attributes["id"] for _, attributes in self.elements if "id" in attributes}


@pytest.fixture
def make_run(tmp_path: Path) -> MakeRun:
    def make(log: list[dict[str, Any]] | None = None, **record: Any) -> Path:
        request = {
            "method": "constraintmatch",
            "arguments": {"pseudo_weight": 1.0, "flip_fraction": 0.0},
            "settings": {"steps": 12000, "lr": 0.01, "ema": None, "bf16": False},
            "data": {"name": "stripes", "split": "train"},
            "constraints": {"pairs": 1234, "must_links": 617},
            "model": {"mean": [0.5]},
        }
        whole = {
            "format": 1,
            "request": request,
            "status": "finished",
            "seconds": 3725.0,
            "started": "2025-01-31T13:00:00+00:00",
            "ended": "2025-01-31T14:05:00+00:00",
            "environment": {"constraintmatch": "0.1.0", "gpu": None},
        }
        (tmp_path / "run.json").write_text(json.dumps(whole | record))
        (tmp_path / "log.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in log or []))
        return tmp_path

    return make


def soft_guess(labels: np.ndarray, k: int, *, strength: float = 3.0, seed: int = 0) -> Predictions:
    """Predictions that are mostly right: cluster (label + 1) mod k."""
    logits = np.random.default_rng(seed).normal(size=(len(labels), k)) * 1.5
    logits[np.arange(len(labels)), (labels + 1) % k] += strength
    probabilities = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    return Predictions(probabilities.astype(np.float32))


def labels_of(images: ImageSet) -> np.ndarray:
    assert images.labels is not None
    return images.labels


def training_log(n: int) -> list[dict[str, Any]]:
    lines: list[dict[str, Any]] = []
    for step in range(1, n + 1):
        terms = {"loss": 3 / step, "loss_constrained": 2 / step, "loss_pseudo": 1 / step}
        lines.append({"step": step, "kind": "training", **terms, "selected": 0.25, "pseudo_label_accuracy": 0.5})
    return lines


def embedded(page: Page) -> Iterator[tuple[dict[str, str | None], Image.Image]]:
    for attributes in page.all("img"):
        source = attributes["src"] or ""
        yield attributes, Image.open(io.BytesIO(base64.b64decode(source.partition("base64,")[2])))


def test_the_page_asks_for_nothing_outside_itself(make_run: MakeRun, stripes: ImageSet) -> None:
    run = make_run(training_log(5))
    html = report_html(run, stripes, soft_guess(labels_of(stripes), 3))
    page = Page(html)
    without_pictures = re.sub(r"base64,[\w+/=]+", "", html)
    assert not re.search(r"https?:|//|@import|url\(|<script", without_pictures, re.IGNORECASE)
    addresses = [a.get("src") or a.get("href") or "#" for tag, a in page.elements if tag in {"img", "link", "a", "use"}]
    assert addresses
    assert all(address.startswith(("data:", "#")) for address in addresses)
    policy = next(a["content"] for a in page.all("meta") if a.get("http-equiv") == "Content-Security-Policy")
    assert (policy or "").startswith("default-src 'none'")
    assert "prefers-color-scheme: dark" in html
    assert any(a.get("name") == "viewport" for a in page.all("meta"))


def test_links_within_the_page_lead_somewhere(make_run: MakeRun, stripes: ImageSet) -> None:
    page = Page(report_html(make_run(), stripes, soft_guess(labels_of(stripes), 5)))
    targets = {(a["href"] or "")[1:] for a in page.all("a")}
    assert "clusters" in targets
    assert targets <= page.ids()
    ids = [a["id"] for _, a in page.elements if "id" in a]
    assert len(ids) == len(set(ids))


def test_the_head_line_has_the_numbers_of_the_run(make_run: MakeRun, stripes: ImageSet) -> None:
    labels, guess = labels_of(stripes), soft_guess(labels_of(stripes), 3, strength=1.5)
    text = Page(report_html(make_run(), stripes, guess)).text
    found = scores(labels, guess)
    assert 0.4 < found["acc"] < 1
    assert "constraintmatch on stripes" in text
    assert f"Accuracy {found['acc']:.1%} NMI {found['nmi']:.1%}" in text
    assert "Images 60 8 × 8, grey" in text
    assert "Pairs 1,234 50.0% must-links" in text
    assert "Duration 1 h 2 min 12,000 steps" in text
    assert "2025-01-31 14:05 UTC" in text


def test_without_labels_there_is_agreement_and_no_confusion(make_run: MakeRun, stripes: ImageSet) -> None:
    guess = soft_guess(labels_of(stripes), 3, strength=1.5)
    constraints = Constraints.sample(labels_of(stripes), 100, seed=0)
    html = report_html(make_run(), replace(stripes, labels=None, classes=None), guess, constraints=constraints)
    page = Page(html)
    kept = agreement(constraints, guess)["balanced"]
    assert kept is not None
    assert f"Agreement with constraints {kept:.1%}" in page.text
    assert "Accuracy" not in page.text
    assert "confusion" not in page.ids()
    assert not page.all("figure", "other")
    assert "confusion" in Page(report_html(make_run(), stripes, guess)).ids()


def test_the_confusion_matrix_counts_classes_by_matched_clusters(make_run: MakeRun, stripes: ImageSet) -> None:
    guess = soft_guess(labels_of(stripes), 4, strength=2.0)
    named = replace(stripes, classes=("flat & wide", "upright", "chess"))
    html = report_html(make_run(), named, guess)
    table = re.search(r'<table class="confusion">.*?</table>', html, re.DOTALL)
    assert table
    head = [int(cluster) for cluster in re.findall(r'<th scope="col">(\d+)</th>', table[0])]
    assert sorted(head) == [0, 1, 2, 3]
    assert head[:3] == [1, 2, 3]  # label l lies in cluster l + 1
    rows = re.findall(r'<th scope="row"[^>]*>(.*?)</th>(.*?)</tr>', table[0])
    assert [unescape(name) for name, _ in rows] == ["flat & wide", "upright", "chess"]
    for label, (_, cells) in enumerate(rows):
        counts = [int(cell or 0) for cell in re.findall(r"<td[^>]*>(.*?)</td>", cells)]
        expected = [int(((labels_of(stripes) == label) & (guess.clusters == cluster)).sum()) for cluster in head]
        assert counts == [*expected, int((labels_of(stripes) == label).sum())]
    matched = re.findall(r'<td class="match"[^>]*>(\d+)</td>', table[0])
    assert sum(map(int, matched)) == round(accuracy(labels_of(stripes), guess.clusters) * 60)


def test_a_matrix_too_large_to_read_becomes_a_list_of_mistakes(make_run: MakeRun) -> None:
    labels = np.arange(400) % 100
    images = ImageSet.from_arrays(np.zeros((400, 8, 8), np.uint8), labels=labels)
    page = Page(report_html(make_run(), images, soft_guess(labels, 100, strength=2.0)))
    assert not page.all("table", "confusion")
    assert "The most frequent mistakes" in page.text


def test_galleries_hold_the_surest_and_the_least_sure_images(make_run: MakeRun, stripes: ImageSet) -> None:
    guess = soft_guess(np.zeros(60, np.int64), 3, strength=5.0)
    html = report_html(make_run(), stripes, guess)
    card = re.search(r'<article class="cluster" id="cluster-1">.*?</article>', html, re.DOTALL)
    assert card
    names = [int(a["title"] or "") for a in Page(card[0]).all("img")]
    rows = np.flatnonzero(guess.clusters == 1)
    assert len(rows) > 30
    ordered = rows[np.argsort(-guess.confidence[rows], kind="stable")].tolist()
    assert names == ordered[:12] + ordered[::-1][:6]
    captions = re.findall(r"<figcaption>([\d.]+%)", card[0])
    assert captions == [f"{guess.confidence[row]:.1%}" for row in names]
    assert f"{len(rows):,} images, {len(rows) / 60:.1%}" in card[0]


def test_a_small_cluster_shows_each_image_once(make_run: MakeRun, stripes: ImageSet) -> None:
    probabilities = np.tile(np.float32([0.1, 0.9]), (60, 1))
    probabilities[:5] = [0.8, 0.2]
    html = report_html(make_run(), stripes, Predictions(probabilities))
    card = re.search(r'<article class="cluster" id="cluster-0">.*?</article>', html, re.DOTALL)
    assert card
    assert sorted(a["title"] or "" for a in Page(card[0]).all("img")) == ["0", "1", "2", "3", "4"]


def test_thumbnails_are_the_images_and_have_alternative_texts(make_run: MakeRun, stripes: ImageSet) -> None:
    page = Page(report_html(make_run(), stripes, soft_guess(labels_of(stripes), 3)))
    pictures = list(embedded(page))
    assert len(pictures) == 3 * 18
    for attributes, picture in pictures:
        row = int(attributes["title"] or "")
        assert (np.asarray(picture) == stripes.images[row, :, :, 0]).all()  # tiny images are kept exactly
        assert (attributes["alt"] or "").startswith(f"{row}, cluster ")
        assert attributes["class"] == "pixels"


def test_large_colour_images_are_reduced(make_run: MakeRun) -> None:
    pixels = np.full((4, 96, 96, 3), (200, 60, 20), np.uint8)
    images = ImageSet.from_arrays(pixels)
    page = Page(report_html(make_run(), images, soft_guess(np.zeros(4, np.int64), 2)))
    shown = list(embedded(page))
    assert shown
    for attributes, picture in shown:
        assert picture.size == (64, 64)
        assert np.abs(np.asarray(picture.convert("RGB"), int) - [200, 60, 20]).max() <= 6  # lossy
        assert "class" not in attributes


def test_violated_constraints_are_counted_and_shown_surest_first(make_run: MakeRun, stripes: ImageSet) -> None:
    guess = soft_guess(labels_of(stripes), 3, strength=2.0)
    constraints = Constraints.sample(labels_of(stripes), 300, seed=3).flip(0.2, seed=4)
    html = report_html(make_run(), stripes, guess, constraints=constraints)
    same = guess.clusters[constraints.left] == guess.clusters[constraints.right]
    must = constraints.link == 1
    text = Page(html).text
    for name, of_kind, violated in (("Must-links", must, ~same), ("Cannot-links", ~must, same)):
        count = int((of_kind & violated).sum())
        assert count > 12
        assert f"{name} {of_kind.sum():,} {count:,} {count / of_kind.sum():.1%}" in text
    cards = re.findall(r'<article class="pair">.*?</article>', html, re.DOTALL)
    assert len(cards) == 24
    beliefs = []
    for card in cards:
        left, right = (int(a["title"] or "") for a in Page(card).all("img"))
        asked = ((constraints.left == left) & (constraints.right == right)).nonzero()[0]
        kind = "cannot-link" if guess.clusters[left] == guess.clusters[right] else "must-link"
        assert any(("must-link" if constraints.link[row] == 1 else "cannot-link") == kind for row in asked)
        belief = float(guess.probabilities[left] @ guess.probabilities[right])
        assert f"Answer: {kind}. The model: {belief:.1%} together." in card
        beliefs.append(belief if kind == "cannot-link" else 1 - belief)
    assert beliefs[:12] == sorted(beliefs[:12], reverse=True)
    assert beliefs[12:] == sorted(beliefs[12:], reverse=True)


def test_kept_constraints_show_no_pairs(make_run: MakeRun, stripes: ImageSet) -> None:
    guess = Predictions(np.eye(3, dtype=np.float32)[labels_of(stripes)])
    only_must = Constraints.from_lists(n_images=60, must_link=[(0, 3), (3, 6)])
    page = Page(report_html(make_run(), stripes, guess, constraints=only_must))
    assert "Must-links 2 0 0.0% Cannot-links 0 0 –" in page.text
    assert not page.all("article", "pair")


def test_who_answered_and_how_softly_stands_beside_a_violated_pair(make_run: MakeRun, stripes: ImageSet) -> None:
    guess = Predictions(np.eye(3, dtype=np.float32)[labels_of(stripes)])
    soft = Constraints.from_arrays([0], [1], [0.75], n_images=60, annotator=["<Ann>"])
    html = report_html(make_run(), stripes, guess, constraints=soft)
    assert "Answer: must-link (0.75) by &lt;Ann&gt;. The model: 0.0% together." in html


@settings(max_examples=10, deadline=None)
@given(name=st.text(min_size=1, max_size=20), reason=st.text(max_size=10))
def test_any_text_of_the_user_is_escaped(tmp_path_factory: pytest.TempPathFactory, name: str, reason: str) -> None:
    run = tmp_path_factory.mktemp("run")
    hostile = f'{name}<i onmouseover="x">\'&amp;'
    (run / "run.json").write_text(json.dumps({"request": {"method": hostile, "data": {"name": reason}}, "error": name}))
    images = ImageSet(
        np.zeros((2, 8, 8, 1), np.uint8), (hostile, "1"), np.array([0, 1]), (hostile, "b"), (Skipped(name, reason),)
    )
    pairs = Constraints.from_lists(n_images=2, must_link=[(0, 1)])
    html = report_html(run, images, Predictions(np.eye(2, dtype=np.float32)), constraints=pairs)
    page = Page(html)
    assert all("onmouseover" not in attributes for _, attributes in page.elements)
    printable = "".join(char if char.isprintable() else ascii(char)[1:-1] for char in hostile)
    assert any(attributes["title"] == printable for attributes in page.all("img"))
    assert any(words.startswith(printable) and words != printable for words in page.words)  # the heading


def test_names_that_are_not_text_can_be_written(make_run: MakeRun) -> None:
    images = ImageSet(np.zeros((2, 8, 8, 1), np.uint8), ("a\udcff.png", "b\n\u202e.png"))
    path = write_report(make_run(), images, Predictions(np.eye(2, dtype=np.float32)))
    text = path.read_text(encoding="utf-8")
    assert "a\\udcff.png" in text
    assert "b\\n\\u202e.png" in text


def test_signs_of_collapse_come_first(make_run: MakeRun, stripes: ImageSet) -> None:
    guess = Predictions(np.tile(np.float32([0.9, 0.05, 0.05]), (60, 1)))
    warnings = collapse_warnings(guess)
    assert len(warnings) == 2
    log = [
        {"step": 100, "kind": "evaluation", "acc": 0.5, "warnings": ["earlier <trouble>"]},
        {"step": 200, "kind": "evaluation", "acc": 0.5},
    ]
    html = report_html(make_run(log), stripes, guess)
    alert = html[html.index('role="alert"') : html.index("<main>")]
    for warning in warnings:
        assert escape(warning) in alert
    assert "While training, 1 of 2 evaluations warned, the last time at step 100: earlier &lt;trouble&gt;" in alert
    assert 'role="alert"' not in report_html(make_run(), stripes, soft_guess(labels_of(stripes), 3))


def test_a_run_that_did_not_finish_says_why(make_run: MakeRun, stripes: ImageSet) -> None:
    run = make_run(status="failed", error="step 7: the loss term 'pseudo' is not finite")
    text = Page(report_html(run, stripes, soft_guess(labels_of(stripes), 3))).text
    assert "it is failed: step 7: the loss term 'pseudo' is not finite" in text


@pytest.mark.parametrize(
    ("seconds", "said"), [(3.24, "3.2 s"), (239.7, "4 min 0 s"), (3599, "59 min 59 s"), (90_061, "25 h 1 min")]
)
def test_durations_are_told_in_two_units(make_run: MakeRun, stripes: ImageSet, seconds: float, said: str) -> None:
    text = Page(report_html(make_run(seconds=seconds), stripes, soft_guess(labels_of(stripes), 3))).text
    assert f"Duration {said} 12,000 steps" in text


@pytest.mark.parametrize("n_lines", [0, 1, 2, 1000])
def test_a_log_of_any_length_is_drawn(make_run: MakeRun, stripes: ImageSet, n_lines: int) -> None:
    html = report_html(make_run(training_log(n_lines)), stripes, soft_guess(labels_of(stripes), 3))
    page = Page(html)
    lines = re.findall(r'<polyline class="line s\d" points="([^"]*)"', html)
    assert len(lines) == (5 if n_lines > 1 else 0)  # three losses, selected share, pseudo-label accuracy
    assert all(len(line.split()) == min(n_lines, 300) for line in lines)
    assert ("The log of this run is empty." in page.text) == (n_lines == 0)
    if n_lines:
        last = short_number(3 / n_lines)
        assert f"total {last}" in page.text
        assert "selected images 25.0%" in page.text
        assert "pseudo-labels right 50.0%" in page.text


def test_values_that_are_not_numbers_are_left_out_of_the_curves(make_run: MakeRun, stripes: ImageSet) -> None:
    log = [
        {"step": 1, "kind": "training", "loss": float("nan"), "selected": None},
        {"step": 2, "kind": "training", "loss": 1.0, "selected": "many"},
        {"step": 3, "kind": "training", "loss": 0.5},
        {"kind": "training", "loss": 0.25},
    ]
    html = report_html(make_run(log), stripes, soft_guess(labels_of(stripes), 3))
    assert re.findall(r"<title>(total [^<]*)</title>", html) == ["total 1.000 at step 2", "total 0.5 at step 3"]
    assert "selected images" not in html
    assert "nan" not in Page(html).text


def test_one_hundred_clusters_stay_small(make_run: MakeRun) -> None:
    labels = np.arange(1500) % 100
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 256, (1500, 32, 32, 3), np.uint8)  # noise: nothing compresses worse
    images = ImageSet.from_arrays(pixels, labels=labels)
    constraints = Constraints.sample(labels, 500, seed=0)
    html = report_html(make_run(), images, soft_guess(labels, 100, strength=4.0), constraints=constraints)
    assert len(html) < 2_500_000
    assert len(Page(html).all("article", "cluster")) == 100
    assert len(Page(html).all("img")) <= 1000 + 48


def test_thousands_of_clusters_are_cut_to_the_largest(make_run: MakeRun) -> None:
    n = 2000
    images = ImageSet.from_arrays(np.zeros((n, 8, 8), np.uint8))
    clusters = np.concatenate([np.arange(1500), np.full(500, 7)])
    probabilities = np.zeros((n, 3000), np.float32)
    probabilities[np.arange(n), clusters] = 1
    page = Page(report_html(make_run(), images, Predictions(probabilities)))
    assert len(page.all("article", "cluster")) == 200
    assert "cluster-7" in page.ids()
    assert "1,300 smaller clusters not shown." in page.text


def test_empty_clusters_are_not_given_a_class(make_run: MakeRun, stripes: ImageSet) -> None:
    guess = Predictions(np.tile(np.float32([0.9, 0.05, 0.05]), (60, 1)))
    page = Page(report_html(make_run(), stripes, guess))
    assert [a["title"] for a in page.all("span", "name")] == ["cluster 0 “0”", "cluster 1", "cluster 2"]


def test_the_confidence_histogram_holds_every_image(make_run: MakeRun, stripes: ImageSet) -> None:
    guess = soft_guess(labels_of(stripes), 3, strength=1.0)
    html = report_html(make_run(), stripes, guess)
    right = round(accuracy(labels_of(stripes), guess.clusters) * 60)
    for name, count in (("in the cluster of their class", right), ("in another cluster", 60 - right)):
        assert sum(map(int, re.findall(rf"<title>(\d+) {name}, confidence", html))) == count > 0
    assert f"{np.mean(guess.confidence >= 0.5):.1%} of the images have at least 50%" in Page(html).text


def test_settings_are_told_in_words(make_run: MakeRun, stripes: ImageSet) -> None:
    text = Page(report_html(make_run(), stripes, soft_guess(labels_of(stripes), 3))).text
    for line in (
        "arguments.pseudo_weight 1.0",
        "arguments.flip_fraction 0.0",
        "settings.steps 12,000",
        "settings.ema none",
        "settings.bf16 no",
        "model.mean [0.5]",
        "environment.constraintmatch 0.1.0",
    ):
        assert line in text


def test_skipped_files_are_listed_with_their_reason(make_run: MakeRun, stripes: ImageSet) -> None:
    skipped = tuple(Skipped(f"bad{number}.jpg", "truncated") for number in range(250))
    text = Page(report_html(make_run(), replace(stripes, skipped=skipped), soft_guess(labels_of(stripes), 3))).text
    assert "250 files skipped" in text
    assert "bad199.jpg truncated" in text
    assert "bad200.jpg" not in text
    assert "And 50 more." in text


def test_the_page_says_whether_these_are_the_images_trained_on(make_run: MakeRun, stripes: ImageSet) -> None:
    request = {"data": {"name": "stripes", "images": 60, "fingerprint": stripes.fingerprint()}}
    guess = soft_guess(labels_of(stripes), 3)
    run = make_run(request=request)
    assert "are of the images the model was trained on" in Page(report_html(run, stripes, guess)).text
    half = stripes.take(np.arange(30))
    text = Page(report_html(run, half, Predictions(guess.probabilities[:30]))).text
    assert "are of other images than the set the model was trained on" in text
    assert "trained on 60 images" in text


def test_the_report_is_written_whole_and_replaces_the_old_one(make_run: MakeRun, stripes: ImageSet) -> None:
    run, guess = make_run(), soft_guess(labels_of(stripes), 3)
    (run / "report.html").write_text("old")
    path = write_report(run, stripes, guess)
    assert path == run / "report.html"
    assert path.read_text(encoding="utf-8") == report_html(run, stripes, guess)
    assert sorted(file.name for file in run.iterdir()) == ["log.jsonl", "report.html", "run.json"]


def test_the_verdict_of_the_safe_recipe_and_the_pairs_to_look_at_come_first(
    make_run: MakeRun, stripes: ImageSet
) -> None:
    doubtful = [{"left": 0, "right": 1, "link": 1}] * 2
    verdict = {"kind": "verdict", "kept": "the start", "why": "it keeps <more> pairs", "wrong_must_links": 0.125}
    guess = soft_guess(labels_of(stripes), 3)
    page = Page(report_html(make_run([{**verdict, "doubtful": doubtful}]), stripes, guess))
    assert "The start: it keeps <more> pairs. About 12.5% of the must-links look wrong to this model." in page.text
    assert "Look at 2 pairs again: they are in doubtful.csv" in page.text
    assert page.all("section")[0]["id"] == "kept"
    assert "again" not in Page(report_html(make_run([{**verdict, "doubtful": []}]), stripes, guess)).text
    assert "kept" not in Page(report_html(make_run(), stripes, guess)).ids()


def test_headings_and_tables_are_marked_up(make_run: MakeRun, stripes: ImageSet) -> None:
    constraints = Constraints.sample(labels_of(stripes), 50, seed=0)
    html = report_html(make_run(training_log(3)), stripes, soft_guess(labels_of(stripes), 3), constraints=constraints)
    page = Page(html)
    assert len(page.all("h1")) == 1
    levels = [int(tag[1]) for tag, _ in page.elements if re.fullmatch(r"h[1-6]", tag)]
    assert len(levels) > 1
    assert all(after <= before + 1 for before, after in itertools.pairwise(levels))
    for tag in ("th", "svg", "img"):
        assert page.all(tag), tag
    assert all(attributes.get("scope") in {"row", "col"} for attributes in page.all("th"))
    assert all(attributes.get("aria-label") or attributes.get("aria-hidden") for attributes in page.all("svg"))
    assert all(attributes.get("alt") for attributes in page.all("img"))
    assert page.elements[0] == ("html", {"lang": "en"})


def test_what_does_not_fit_together_is_refused(make_run: MakeRun, stripes: ImageSet, tmp_path: Path) -> None:
    guess = soft_guess(labels_of(stripes), 3)
    with pytest.raises(InputError, match=r"not a run folder \(it has no run.json\)"):
        report_html(tmp_path / "nowhere", stripes, guess)
    run = make_run()
    with pytest.raises(InputError, match="59 predictions for 60 images"):
        report_html(run, stripes, Predictions(guess.probabilities[:59]))
    with pytest.raises(InputError, match="over 10 images, the report is over 60"):
        report_html(run, stripes, guess, constraints=Constraints.from_lists(n_images=10))
    with pytest.raises(InputError, match="no images"):
        report_html(run, stripes.take([]), Predictions(guess.probabilities[:0]))


def test_a_record_with_nothing_in_it_still_makes_a_page(tmp_path: Path, stripes: ImageSet) -> None:
    (tmp_path / "run.json").write_text("{}")
    text = Page(report_html(tmp_path, stripes, soft_guess(labels_of(stripes), 3))).text
    assert "Duration unknown" in text
    assert "Pairs none" in text


@given(start=st.floats(-100, 100), width=st.floats(1e-20, 1e12))
@settings(max_examples=50, deadline=None)
def test_ticks_are_few_round_and_reach_around_the_values(start: float, width: float) -> None:
    low, high = start * width, (start + 1) * width
    ticks = nice_ticks(low, high)
    assert 2 <= len(ticks) <= 8
    assert ticks[0] <= low + 1e-6 * width
    assert ticks[-1] >= high - 1e-6 * width
    steps = np.diff(ticks)
    assert np.allclose(steps, steps[0], rtol=1e-3, atol=0)
    assert f"{steps[0]:.0e}"[0] in "125"


@pytest.mark.parametrize(
    ("values", "ticks"),
    [
        ((0, 2.4), ["0.0", "0.5", "1.0", "1.5", "2.0", "2.5"]),
        ((0, 47_000), ["0k", "10k", "20k", "30k", "40k", "50k"]),
        ((0, 1e-14), ["0", "2e-15", "4e-15", "6e-15", "8e-15", "1e-14"]),
        ((0, 0), ["0.0", "0.2", "0.4", "0.6", "0.8", "1.0"]),
        ((-4, 1), ["-4", "-3", "-2", "-1", "0", "1"]),
    ],
)
def test_ticks_of_one_axis_are_written_alike(values: tuple[float, float], ticks: list[str]) -> None:
    chart = line_chart("Losses", {"total": list(enumerate(values, 1))})
    assert [said for _, said in chart["y_ticks"]] == ticks


def test_short_numbers_keep_what_counts() -> None:
    said = {0: "0", 0.02134: "0.0213", 1.2: "1.200", 123.456: "123.5", 15300.2: "15,300", 0.0000123: "1.23e-05"}
    assert {value: short_number(value) for value in said} == said
    assert percent(0.93149) == "93.1%"


@given(
    st.lists(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=8), min_size=1, max_size=4),
    st.booleans(),
)
@example([[0.0, 5e-324]], False)
@example([[-5e-324, 0.0]], False)
@settings(max_examples=30, deadline=None)
def test_lines_stay_inside_the_drawing(lines: list[list[float]], shares: bool) -> None:
    chart = line_chart("Title", {f"line {n}": list(enumerate(of, 1)) for n, of in enumerate(lines)}, shares=shares)
    drawn = [line["points"].split() for line in chart["lines"]]
    assert [len(points) for points in drawn] == ([len(of) for of in lines] if max(map(len, lines)) > 1 else [])
    for point in itertools.chain(*drawn):
        x, y = map(float, point.split(","))
        assert 52 <= x <= 468
        assert 12 <= y <= 200


def test_a_histogram_of_equal_values_is_one_bar() -> None:
    chart = histogram("Confidence", np.ones(7), {"images": np.ones(7, bool)})
    assert [bar["said"] for bar in chart["bars"]] == ["7 images, confidence 95% to 100%"]
