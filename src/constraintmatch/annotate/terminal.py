"""Questions in the terminal: images as coloured blocks, one key and Enter for an answer."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from constraintmatch._internal.errors import InputError
from constraintmatch.annotate.question_queue import QuestionQueue
from constraintmatch.questions.answers import NONE, UNSURE, Question

if TYPE_CHECKING:
    from constraintmatch.annotate.api_types import Asked
    from constraintmatch.data.image_set import ImageSet

__all__ = ["FINISHED", "PREVIOUS", "Prompt", "ask_one_by_one", "picture", "read_choice", "side_by_side"]

PREVIOUS = -3  # undo the last answer
FINISHED = -4
_ALWAYS = {"u": UNSURE, "p": PREVIOUS, "f": FINISHED}
_ALWAYS |= {"unsure": UNSURE, "previous": PREVIOUS, "finished": FINISHED}  # the words of the prompt count too
_PAIR = {"y": 0, "s": 0, "same": 0, "n": NONE, "d": NONE, "different": NONE}
_NONE_OF_THESE = {"0": NONE, "n": NONE, "none of these": NONE}
HALF_BLOCK = "▀"  # its upper half in the foreground colour, its lower half in the background's


def picture(image: NDArray[np.uint8], columns: int) -> list[str]:
    """An image (h, w, c) as lines of coloured half blocks, two pixels of height to a line."""
    made = Image.fromarray(image[..., 0] if image.shape[-1] == 1 else image).convert("RGB")
    how = Image.Resampling.NEAREST if image.shape[0] < columns else Image.Resampling.BOX
    pixels = np.asarray(made.resize((columns, columns + columns % 2), how))
    return [
        "".join(_block(top, bottom) for top, bottom in zip(pixels[row], pixels[row + 1], strict=True)) + "\x1b[0m"
        for row in range(0, len(pixels), 2)
    ]


def _block(top: NDArray[np.uint8], bottom: NDArray[np.uint8]) -> str:
    upper, lower = (";".join(str(int(value)) for value in colour) for colour in (top, bottom))
    return f"\x1b[38;2;{upper}m\x1b[48;2;{lower}m{HALF_BLOCK}"


def side_by_side(pictures: Sequence[list[str]], captions: Sequence[str], columns: int) -> str:
    """Pictures of equal size in a row, each under its caption."""
    head = "  ".join(f"{caption[:columns]:<{columns}}" for caption in captions)
    return "\n".join([head, *("  ".join(parts) for parts in zip(*pictures, strict=True))])


def read_choice(text: str, question: Question) -> int | None:
    """The choice that a line means: y/n for a pair, 1-5 or 0 for which of these, u, p, f; None for any other line."""
    numbered = {str(at): at - 1 for at in range(1, len(question.shown) + 1)}
    keys = _ALWAYS | (_PAIR if question.kind == "pair" else _NONE_OF_THESE | numbered)
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
    def of_terminal(cls, images: ImageSet) -> Prompt:
        """A prompt as wide as this terminal; without pictures if colours are not wanted (NO_COLOR, a pipe)."""
        colour = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
        return cls(images, width=shutil.get_terminal_size().columns, colour=colour)

    def ask(self, question: Question, heading: str = "") -> int:
        """The choice of the user; PREVIOUS and FINISHED are choices too, and an end of input is FINISHED."""
        self.write(self._shown(question, heading))
        keys = "y same, n different" if question.kind == "pair" else f"1-{len(question.shown)}, 0 none of these"
        while True:
            try:
                text = self.read(f"{keys}, u unsure, p previous, f finished: ")
            except EOFError:
                return FINISHED
            choice = read_choice(text, question)
            if choice is not None:
                return choice
            self.write("that is not an answer; type one of the keys above and Enter")

    def _shown(self, question: Question, heading: str) -> str:
        rows, seen = (question.image, *question.shown), self.images.to_look_at()
        labels = ["?", *(str(number) for number in range(1, len(rows)))] if question.kind == "which" else ["A", "B"]
        names = [f"{label}  {self.images.names[row]}" for label, row in zip(labels, rows, strict=True)]
        if not self.colour:
            return "\n".join([heading, *names])
        columns = max(8, min(32, (self.width - 2 * len(rows)) // len(rows)))
        pictures = [picture(np.asarray(seen.images[row]), columns) for row in rows]
        captions = [
            f"{label} {self.images.names[row].rsplit('/', 1)[-1]}" for label, row in zip(labels, rows, strict=True)
        ]
        return f"{heading}\n{side_by_side(pictures, captions, columns)}"


def ask_one_by_one(queue: QuestionQueue, prompt: Prompt, activity: Callable[[], str | None]) -> None:
    """Ask until enough is answered or the user finishes. `activity` is a line about the training."""
    store, names, who = queue.store, prompt.images.names, "terminal"
    while (asked := _claim(queue, who)) is not None:
        began, n_answers = time.monotonic(), store.counts().answered
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
        for found in store.answer(asked.id, choice, who, spent).contradictions[:1]:
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
