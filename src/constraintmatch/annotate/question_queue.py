"""What is asked next: a chooser of questions, a queue that a thread keeps filled so nobody waits, and the terminal."""

import logging
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from constraintmatch._internal.errors import InputError
from constraintmatch.annotate.database import Asked
from constraintmatch.annotate.store import Store
from constraintmatch.data.image_set import ImageSet
from constraintmatch.questions.answers import NONE, UNSURE, Answer, Question, implied_groups
from constraintmatch.questions.belief import Belief
from constraintmatch.questions.next_question import Choice, Kind, next_questions, question_about

Line = Callable[[], str | None]  # gives a line to show, or nothing
LOW = 4  # new questions are chosen when fewer wait
FRESH = 5  # answers after which waiting questions are chosen again: they know less than what was answered
log = logging.getLogger(__name__)

PREVIOUS = -3  # undo the last answer
FINISHED = -4
_ALWAYS = {"u": UNSURE, "p": PREVIOUS, "f": FINISHED}
_ALWAYS |= {"unsure": UNSURE, "previous": PREVIOUS, "finished": FINISHED}  # the words of the prompt count too
_PAIR = {"y": 0, "s": 0, "same": 0, "n": NONE, "d": NONE, "different": NONE}
_NONE_OF_THESE = {"0": NONE, "n": NONE, "none of these": NONE}
HALF_BLOCK = "▀"  # its upper half in the foreground colour, its lower half in the background's


@dataclass
class Chooser:
    """Chooses questions: of one kind, in one way, until there are `total` answers (None: without an end)."""

    kind: Kind = "which"
    choose: Choice = "recommended"
    seed: int = 0
    total: int | None = None

    def next(self, belief: Belief, answers: Sequence[Answer], n: int, waiting: Sequence[Question]) -> list[Question]:
        """At most n questions; `waiting` are handed out and not answered yet."""
        if self.total is not None:
            n = min(n, self.total - len(answers) - len(waiting))
        if n < 1:
            return []
        return next_questions(belief, answers, n, kind=self.kind, choose=self.choose, seed=self.seed, waiting=waiting)

    def about(self, belief: Belief, answers: Sequence[Answer], image: int) -> Question | None:
        """The question that places an image; None if answers place it already: then one of them is wrong.

        A triplet places no image.
        """
        if implied_groups(answers, len(belief.features))[image] >= 0:
            return None
        return question_about(belief, answers, image, kind="which" if self.kind == "triplet" else self.kind)


@dataclass(eq=False)
class QuestionQueue:
    """Hands questions out and chooses new ones in time. `done` says that nothing is left to ask.

    `belief` gives what the model says now and `model` its name. Both are called again and again, so a training may
    change what they give.
    """

    store: Store
    belief: Callable[[], Belief]
    chooser: Chooser = field(default_factory=Chooser)
    model: Line = lambda: None

    def __post_init__(self) -> None:
        self.done = False
        self.asked = threading.Event()  # set when the first question is handed out
        self.problem: str | None = None
        self._held: dict[str, list[Asked]] = {}
        self._short = False
        self._chosen_at: tuple[int, Belief | None] = (-1, None)  # answers and belief of the last choice
        self._claiming, self._event, self._stop = threading.RLock(), threading.Event(), False
        self._thread = threading.Thread(target=self._run, name="question queue", daemon=True)

    def start(self) -> None:
        """Start the thread; the first questions come at once."""
        self.wake()
        self._thread.start()

    def wake(self) -> None:
        """Check whether questions are needed: after an answer, an undo, a new belief."""
        self._event.set()

    def stop(self) -> None:
        """End the thread after its current work."""
        self._stop = True
        self.wake()
        if self._thread.is_alive():
            self._thread.join(timeout=3)  # a choice among very many images may take longer; it is then dropped

    def claim(self, annotator: str, n: int) -> list[Asked]:
        """The questions that this annotator holds now, filled up to n; those that answers have settled are gone."""
        with self._claiming:
            self._held[annotator] = held = self.store.claim(annotator, n)
            self._short = self._short or len(held) < n
        if held:
            self.asked.set()
        self.wake()
        return held

    def claim_first(self, question: Question, annotator: str, n: int) -> tuple[Asked | None, list[Asked]]:
        """This question for this annotator before all others, and all that the annotator holds now.

        None if it is answered already. What the annotator held goes back first: more than n of them are for others.
        """
        with self._claiming:
            self.store.add_questions([question], model=self.model() or "", urgent=True)
            self.store.release(annotator)
            held = self.claim(annotator, n)
        same = (one for one in held if one.question.image == question.image)
        return next((one for one in same if set(one.question.shown) == set(question.shown)), None), held

    def fill(self) -> None:
        """Choose questions if few are waiting; bad input is noted in `problem`."""
        try:
            self._fill()
            self.problem = None
        except InputError as error:
            self.problem = str(error)

    def _fill(self) -> None:
        belief, answers = self.belief(), self.store.answers()
        with self._claiming:
            held = [asked.question for one in self._held.values() for asked in self.store.unanswered(one)]
            short, self._short = self._short, False
        answered, believed = self._chosen_at
        stale = believed is not belief or abs(len(answers) - answered) >= FRESH
        few = short or (not self.done and self.store.n_waiting() - len(held) < LOW)
        if not (stale or few):
            return
        chosen = self.chooser.next(belief, answers, 2 * LOW, held)
        if self._stop:
            return
        self.store.add_questions(chosen, model=self.model() or "", replace=True)
        self._chosen_at = (len(answers), belief)
        self.done = not chosen and self.store.n_waiting() == 0

    def _run(self) -> None:
        while True:
            self._event.wait()
            self._event.clear()
            if self._stop:
                return
            try:
                self.fill()
            except Exception:  # the page must go on with the questions it has
                if self._stop:
                    return
                log.exception("no new questions could be chosen")
                self.problem = "no new questions could be chosen; the output of the server says why"


# The terminal: images as coloured blocks, one key and Enter for an answer


def picture(image: NDArray[np.uint8], columns: int) -> list[str]:
    """An image (h, w, c) as lines of coloured half blocks, two pixels of height to a line."""
    made = Image.fromarray(image[..., 0] if image.shape[-1] == 1 else image).convert("RGB")
    how = Image.Resampling.NEAREST if image.shape[0] < columns else Image.Resampling.BOX
    pixels = np.asarray(made.resize((columns, columns + columns % 2), how))
    colours = [[";".join(map(str, colour)) for colour in line] for line in pixels.tolist()]
    return [
        "".join(f"\x1b[38;2;{up}m\x1b[48;2;{low}m{HALF_BLOCK}" for up, low in zip(top, bottom, strict=True)) + "\x1b[0m"
        for top, bottom in zip(colours[::2], colours[1::2], strict=True)
    ]


def side_by_side(pictures: Sequence[list[str]], captions: Sequence[str], columns: int) -> str:
    """Pictures of equal size in a row, each under its caption."""
    head = "  ".join(f"{caption[:columns]:<{columns}}" for caption in captions)
    return "\n".join([head, *("  ".join(parts) for parts in zip(*pictures, strict=True))])


def read_choice(text: str, question: Question) -> int | None:
    """The choice that a line means: y/n for a pair, 1-5 (or 0, not of a triplet), u, p, f; None for any other line."""
    numbered = {str(at): at - 1 for at in range(1, len(question.shown) + 1)}
    own = {"pair": _PAIR, "which": _NONE_OF_THESE | numbered, "triplet": numbered}
    keys = _ALWAYS | own[question.kind]
    return keys.get(text.strip().lower())


@dataclass(frozen=True)
class Prompt:
    """Shows a question and reads its answer; `write` and `read` are like print and input."""

    images: ImageSet
    write: Callable[[str], None] = print
    read: Callable[[str], str] = input
    width: int = 80
    colour: bool = True

    @classmethod
    def of_terminal(cls, images: ImageSet) -> "Prompt":
        """A prompt as wide as this terminal; without pictures if colours are not wanted (NO_COLOR, a pipe)."""
        colour = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
        return cls(images, width=shutil.get_terminal_size().columns, colour=colour)

    def ask(self, question: Question, heading: str = "") -> int:
        """The choice of the user; PREVIOUS and FINISHED are choices too, and an end of input is FINISHED."""
        self.write(self._show(question, heading))
        which = f"1-{len(question.shown)}, 0 none of these"
        keys = {"pair": "y same, n different", "triplet": "1 or 2 is nearer"}.get(question.kind, which)
        while True:
            try:
                text = self.read(f"{keys}, u unsure, p previous, f finished: ")
            except EOFError:
                return FINISHED
            choice = read_choice(text, question)
            if choice is not None:
                return choice
            self.write("that is not an answer; type one of the keys above and Enter")

    def _show(self, question: Question, heading: str) -> str:
        rows, pixels = (question.image, *question.shown), self.images.to_look_at().images
        labels = ["A", "B"] if question.kind == "pair" else ["?", *map(str, range(1, len(rows)))]
        names = [self.images.names[row] for row in rows]
        if not self.colour:
            return "\n".join([heading, *(f"{label}  {name}" for label, name in zip(labels, names, strict=True))])
        columns = max(8, min(32, (self.width - 2 * len(rows)) // len(rows)))
        pictures = [picture(np.asarray(pixels[row]), columns) for row in rows]
        captions = [f"{label} {name.rsplit('/', 1)[-1]}" for label, name in zip(labels, names, strict=True)]
        return f"{heading}\n{side_by_side(pictures, captions, columns)}"


def ask_one_by_one(queue: QuestionQueue, prompt: Prompt, activity: Line) -> None:
    """Ask until enough is answered or the user finishes. `activity` is a line about the training."""
    store, names, who = queue.store, prompt.images.names, "terminal"
    while (asked := _claim(queue, who)) is not None:
        began, n_answers = time.monotonic(), store.counts()["answered"]
        heading = f"{n_answers:,} of {queue.chooser.total:,} answered; {activity() or 'no round yet'}"
        choice = prompt.ask(asked.question, heading)
        if choice == FINISHED:
            return
        if choice == PREVIOUS:
            store.release(who)
            if store.undo(who) is None:
                prompt.write("there is no answer to undo")
            continue
        spent = round(1e3 * (time.monotonic() - began))
        for found in store.answer(asked.id, choice, who, spent)[1][:1]:
            first, last = (names[found.images[at]] for at in (0, -1))
            said = f"one answer says different, {len(found.together):,} say same"
            prompt.write(f"{first} and {last}: {said}; p undoes yours")


def _claim(queue: QuestionQueue, who: str) -> Asked | None:
    """The next question, chosen now if none waits or the model is a new one; None if nothing is left."""
    for _ in range(2):
        queue.fill()
        if held := queue.claim(who, 1):
            return held[0]
    if queue.problem is not None:
        raise InputError(queue.problem)
    return None
