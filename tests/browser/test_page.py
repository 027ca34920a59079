"""The page in a real browser: keys, undo, two people, a killed server, contradictions, a phone, the clusters."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from constraintmatch.questions.answers import Question

pytestmark = [pytest.mark.browser, pytest.mark.skipif(os.name == "nt", reason="signals of POSIX")]

PHONE = {"viewport": {"width": 360, "height": 740}, "has_touch": True, "is_mobile": True}
Serve = Callable[..., Any]
Visit = Callable[..., Any]


def answered(page: Any, n: int) -> None:
    """Wait until the page counts so many answers, all saved."""
    page.wait_for_function(
        "n => document.getElementById('answered').textContent === String(n)"
        " && document.getElementById('saved').textContent === 'Saved'",
        arg=n,
    )


def press(page: Any, keys: str) -> None:
    """Press keys, each when a question stands there and no swap of it is under way."""
    for key in keys:
        page.wait_for_selector("#stage:not([hidden]) img")
        page.wait_for_timeout(400)
        page.keyboard.press(key)


def asked(page: Any) -> tuple[str, ...]:
    """The alternatives of the images on the stage."""
    return tuple(page.eval_on_selector_all("#stage img", "images => images.map(image => image.alt)"))


def test_pairs_are_answered_by_keyboard(serve: Serve, visit: Visit) -> None:
    server = serve("--kind", "pair")
    page = visit(server)
    first = asked(page)
    press(page, "sdu")
    answered(page, 3)
    counts = server.counts()
    assert (counts["same"], counts["different"], counts["unsure"]) == (1, 1, 1)
    assert asked(page) != first
    left, right = (alternative.rsplit(": ")[-1] for alternative in first)
    assert server.pairs()[0].startswith(f"{left},{right},1")


def test_which_of_these_is_answered_by_number(serve: Serve, visit: Visit) -> None:
    server = serve()
    page = visit(server)
    chosen, n_shown = asked(page)[2], len(asked(page)) - 1
    press(page, "2")
    answered(page, 1)
    links = [line.split(",")[:3] for line in server.pairs()]
    assert [other for _, other, link in links if float(link) == 1] == [chosen.rsplit(": ")[-1]]
    assert len(links) == n_shown
    press(page, "0")
    answered(page, 2)
    assert server.counts()["different"] == 1


def test_a_triplet_is_answered_by_one_or_two_and_not_by_none(serve: Serve, visit: Visit) -> None:
    server = serve("--kind", "triplet")
    page = visit(server)
    anchor, far, near = (alternative.rsplit(": ")[-1] for alternative in asked(page))
    assert "nearer" in page.inner_text("#prompt")
    press(page, "0sd32u")
    answered(page, 2)
    counts = server.counts()
    assert (counts["nearer"], counts["unsure"], counts["same"]) == (1, 1, 0)
    assert page.inner_text("#nearer") == "1"
    assert page.is_visible("#export-triplets")
    assert server.pairs()[0].startswith(f"{anchor},{near},{far}")


def test_keys_of_the_other_kind_and_in_the_name_field_do_nothing(serve: Serve, visit: Visit) -> None:
    server = serve("--kind", "pair")
    page = visit(server)
    press(page, "105")
    page.focus("#annotator")
    page.keyboard.type("sd")
    page.wait_for_timeout(300)
    assert server.counts()["answered"] == 0
    assert page.input_value("#annotator").endswith("sd")


def test_undo_brings_the_question_back(serve: Serve, visit: Visit) -> None:
    server = serve("--kind", "pair")
    page = visit(server)
    first = asked(page)
    press(page, "s")
    answered(page, 1)
    press(page, "z")
    answered(page, 0)
    page.wait_for_function("alt => document.querySelector('#image img').alt === alt", arg=first[0])
    assert asked(page) == first
    press(page, "d")
    answered(page, 1)
    assert server.counts()["different"] == 1


def test_two_people_answer_at_once_and_nothing_is_lost_or_asked_twice(serve: Serve, visit: Visit) -> None:
    server = serve("--kind", "pair", "--choose", "random")
    anna, bert = visit(server, "anna"), visit(server, "bert")
    seen = []
    for _ in range(10):
        for page in (anna, bert):
            page.wait_for_selector("#stage:not([hidden]) img")
            seen.append(frozenset(alternative.rsplit(": ")[-1] for alternative in asked(page)))
        assert seen[-1] != seen[-2]
        for page in (anna, bert):
            page.keyboard.press("u")
        for page in (anna, bert):
            page.wait_for_function("() => document.getElementById('saved').textContent === 'Saved'")
    assert server.counts()["answered"] == 20
    assert len(set(seen)) == 20


def test_a_killed_server_loses_no_answer(serve: Serve, visit: Visit) -> None:
    server = serve("--kind", "pair")
    page = visit(server)
    press(page, "sds")
    answered(page, 3)
    server.stop(signal.SIGKILL)
    press(page, "d")
    page.wait_for_selector("#saved.unsaved")
    assert "Not saved: 1" in page.inner_text("#saved")
    server.start()
    page.wait_for_function("() => document.getElementById('saved').textContent === 'Saved'")
    assert server.counts()["answered"] == 4
    assert server.counts()["different"] == 2


def test_an_answer_that_was_not_saved_outlives_the_page(serve: Serve, visit: Visit) -> None:
    server = serve("--kind", "pair")
    page = visit(server)
    page.route("**/api/answers", lambda route: route.abort())
    press(page, "s")
    page.wait_for_selector("#saved.unsaved")
    page.unroute("**/api/answers")
    other = page.context.new_page()
    page.close(run_before_unload=False)
    other.goto(server.address)
    answered(other, 1)
    assert server.counts()["same"] == 1


def test_a_reply_that_is_lost_does_not_count_twice(serve: Serve, visit: Visit) -> None:
    server = serve("--kind", "pair")
    page = visit(server)
    lost = []

    def lose(route: Any) -> None:
        if not lost:
            lost.append(route.fetch().status)
            route.abort()
        else:
            route.continue_()

    page.route("**/api/answers", lose)
    press(page, "s")
    answered(page, 1)
    assert lost == [200]
    assert server.counts()["answered"] == 1


def test_the_next_images_are_there_before_they_are_needed(serve: Serve, visit: Visit) -> None:
    page = visit(serve("--kind", "pair"))
    page.wait_for_load_state("networkidle")
    loaded = set(page.evaluate("() => performance.getEntriesByType('resource').map(entry => entry.name)"))
    for _ in range(2):
        before = asked(page)
        page.keyboard.press("u")
        page.wait_for_function("alt => document.querySelector('#image img').alt !== alt", arg=before[0])
        assert set(page.eval_on_selector_all("#stage img", "images => images.map(image => image.src)")) <= loaded


def contradicted(serve: Serve, visit: Visit) -> Any:
    """A page on which 00 = 03, 03 = 06 and 00 ≠ 06 have just been answered."""
    chain = [Question(0, (3,)), Question(3, (6,)), Question(0, (6,))]
    server = serve("--kind", "pair", asking=chain)
    page = visit(server)
    press(page, "ssd")
    page.wait_for_selector("#clash:not([hidden])")
    return page


def test_a_contradiction_is_shown_at_once_with_the_earlier_answers(serve: Serve, visit: Visit) -> None:
    page = contradicted(serve, visit)
    said = [one.replace("\n", " ") for one in page.locator("#clash li").all_inner_texts()]
    assert [("different" in one.split("·")[0], "same" in one.split("·")[0]) for one in said] == [
        (True, False),
        (False, True),
        (False, True),
    ]
    assert page.inner_text("#contradictions") == "1"
    page.keyboard.press("s")  # the question may be out of sight: nothing is answered
    page.wait_for_timeout(300)
    assert page.inner_text("#answered") == "3"


@pytest.mark.parametrize(("tabs", "does", "left"), [(1, "Change to same", 3), (2, "Take back", 2)])
def test_a_contradiction_is_settled_by_keyboard(serve: Serve, visit: Visit, tabs: int, does: str, left: int) -> None:
    page = contradicted(serve, visit)
    assert page.evaluate("document.activeElement.id") == "clash-title"
    for _ in range(tabs):
        page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == does
    page.keyboard.press("Enter")
    page.wait_for_selector("#clash", state="hidden")
    assert page.inner_text("#contradictions") == "0"
    assert page.inner_text("#answered") == str(left)


def test_a_contradiction_can_wait(serve: Serve, visit: Visit) -> None:
    page = contradicted(serve, visit)
    page.keyboard.press("Escape")
    assert not page.is_visible("#clash")
    press(page, "u")
    answered(page, 4)
    page.click("#contradictions")
    page.wait_for_selector("#clash:not([hidden])")


@pytest.mark.parametrize("kind", ["pair", "which"])
def test_a_phone_shows_everything_within_360_pixels(serve: Serve, visit: Visit, kind: str) -> None:
    server = serve("--kind", kind)
    page = visit(server, **PHONE)
    assert page.evaluate("document.documentElement.scrollWidth") == 360
    boxes = [button.bounding_box() for button in page.locator("#keys button:visible, #shown button").all()]
    assert all(box["height"] >= 44 and box["width"] >= 44 for box in boxes)
    assert all(box["x"] >= 0 and box["x"] + box["width"] <= 360 and box["y"] + box["height"] <= 740 for box in boxes)
    page.tap("#key-same" if kind == "pair" else "#shown button")
    answered(page, 1)
    assert server.counts()["same"] == 1
    page.goto(server.address + "#clusters")
    page.wait_for_selector(".gallery")
    assert page.evaluate("document.documentElement.scrollWidth") == 360


def test_the_keyboard_reaches_every_control_and_shows_where_it_is(serve: Serve, visit: Visit) -> None:
    page = visit(serve())
    reached = set()
    for _ in range(40):
        page.keyboard.press("Tab")
        active = page.evaluate(
            "() => { const e = document.activeElement, s = getComputedStyle(e);"
            " return [e.id || e.className, s.outlineStyle, parseFloat(s.outlineWidth)]; }"
        )
        if active[0]:
            reached.add(active[0])
            assert active[1] != "none"
            assert active[2] >= 2
    assert reached >= {
        "to-questions",
        "to-clusters",
        "annotator",
        "tile",
        "key-none",
        "key-unsure",
        "key-undo",
        "export",
    }


def test_a_screen_reader_hears_the_question_and_knows_the_images(serve: Serve, visit: Visit) -> None:
    page = visit(serve("--kind", "pair"))
    heard = page.inner_text("#heard")
    names = [alternative.rsplit(": ")[-1] for alternative in asked(page)]
    assert all(name in heard for name in names)
    press(page, "u")
    page.wait_for_function("text => document.getElementById('heard').textContent !== text", arg=heard)
    assert page.eval_on_selector_all("img", "images => images.every(image => image.hasAttribute('alt'))")


@pytest.mark.parametrize("small", [True, False])
def test_small_images_are_scaled_up_with_hard_edges(serve: Serve, visit: Visit, small: bool) -> None:
    page = visit(serve(small=small))
    page.wait_for_function("() => document.querySelector('#image img').naturalWidth > 0")
    how = page.eval_on_selector("#image img", "image => getComputedStyle(image).imageRendering")
    assert how == ("pixelated" if small else "auto")
    assert page.locator("#image img").bounding_box()["width"] > 300


def test_dark_and_light_follow_the_system(serve: Serve, visit: Visit) -> None:
    page = visit(serve(), color_scheme="light")
    tell = "getComputedStyle(document.body).backgroundColor"
    assert page.evaluate(tell) == "rgb(255, 255, 255)"
    page.emulate_media(color_scheme="dark")
    assert max(int(value) for value in page.evaluate(tell)[4:-1].split(",")) < 40


def test_a_cluster_is_renamed_and_a_wrong_image_becomes_a_question(serve: Serve, visit: Visit, model: Path) -> None:
    server = serve("--model", str(model))
    page = visit(server, view="#clusters")
    field = page.locator(".gallery input").first
    field.fill("round things")
    field.press("Enter")
    page.wait_for_function("() => document.getElementById('heard').textContent.includes('round things')")
    page.reload()
    page.wait_for_selector(".gallery")
    assert page.locator(".gallery input").first.input_value() == "round things"
    name = page.locator(".grid .tile").last.get_attribute("title")
    page.locator(".grid .tile").last.press("Enter")
    page.wait_for_selector("#view-questions:not([hidden])")
    page.wait_for_function("name => document.querySelector('#image img').alt.endsWith(name)", arg=name)
    press(page, "0" if page.is_visible("#key-none") else "d")
    answered(page, 1)
    assert all(line.startswith(f"{name},") for line in server.pairs())


def test_other_machines_need_the_token(serve: Serve, visit: Visit) -> None:
    server = serve("--token", "open-sesame")
    page = visit(server, view="#")
    page.wait_for_selector("#notice:not([hidden])")
    assert "token" in page.inner_text("#notice")
    page.goto(server.address + "?token=open-sesame")
    page.wait_for_selector("#stage:not([hidden]) img")
    assert "token" not in page.url
    page.goto(server.address)
    page.wait_for_selector("#stage:not([hidden]) img")


def test_the_loop_learns_beside_the_person_and_shows_it(serve_loop: Serve, visit: Visit, tmp_path: Path) -> None:
    server = serve_loop("--set", "every=5", "--questions", "8")
    page = visit(server)
    assert page.inner_text("#wanted").strip() == "of 8"
    press(page, "111000")
    answered(page, 6)
    page.wait_for_function(
        "() => document.getElementById('activity').textContent.includes('has learned from')", timeout=60_000
    )
    watcher = visit(server, "bert", view="#clusters")
    watcher.wait_for_selector(".gallery")
    before = watcher.inner_text("#folder"), watcher.locator("#galleries").inner_html()
    press(page, "20")
    page.wait_for_function("() => document.getElementById('prompt').textContent.startsWith('All 8 questions')")
    page.wait_for_function(
        "() => document.getElementById('activity').textContent.includes('learned from 8 answers')", timeout=60_000
    )
    watcher.wait_for_function("text => document.getElementById('folder').textContent !== text", arg=before[0])
    watcher.wait_for_function("html => document.getElementById('galleries').innerHTML !== html", arg=before[1])
    server.stop()
    assert (tmp_path / "loop" / "model" / "model.safetensors").is_file()
    assert (tmp_path / "loop" / "clusters.csv").is_file()


def test_each_view_is_kept_to_be_looked_at(serve: Serve, visit: Visit, model: Path, tmp_path: Path) -> None:
    """With SCREENSHOTS=folder they are kept there."""
    place = Path(os.environ.get("SCREENSHOTS") or tmp_path)
    server = serve("--model", str(model))
    for look in ("light", "dark"):
        for view in ("", "#clusters"):
            page = visit(server, view=view, color_scheme=look)
            page.wait_for_selector(".gallery" if view else "#stage:not([hidden]) img")
            page.wait_for_load_state("networkidle")
            page.screenshot(path=place / f"{view.removeprefix('#') or 'questions'}-{look}.png")
    assert len(list(place.glob("*-dark.png"))) >= 2
