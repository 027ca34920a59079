"""Annotators that are no people: the labels, for experiments, and vision-language models behind OpenAI's protocol.

A model is sent the images of a question as small JPEGs. What it says is stored as said by an annotator of its own. The
key of its endpoint is read from the environment variable OPENAI_API_KEY and is stored nowhere.
"""

import asyncio
import base64
import io
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from PIL import Image

from constraintmatch._internal.errors import InputError, one_line
from constraintmatch._internal.progress import QUIET, Reporter
from constraintmatch.annotate.background_training import Learner
from constraintmatch.annotate.commands import Loop, end_loop, open_loop
from constraintmatch.annotate.database import LONGEST, Given
from constraintmatch.annotate.question_queue import QuestionQueue, read_choice
from constraintmatch.annotate.sitting import Rows
from constraintmatch.annotate.store import Store
from constraintmatch.annotate.thumbnails import large_picture
from constraintmatch.data.image_set import ImageSet
from constraintmatch.pipeline.commands import score_line
from constraintmatch.pipeline.sources import Data
from constraintmatch.questions.answers import UNSURE, Answer, Question
from constraintmatch.questions.rounds import LabelOracle

Said = Iterator[tuple[Question, int | None]]  # None: it said nothing that is understood
Ask = Callable[[Sequence[Question]], Said]
LABELS, PROTOCOL = "labels", "openai:"  # names of annotators begin with them
AT_ONCE = 4  # questions on their way to an endpoint; a killed program loses no more answers than these
SHARED = 10  # one question in ten may be compared with what a person answered
NONSENSE = 5  # replies in a row that nobody understands: the model does not see images, or does not speak so
SMALLEST, LARGEST = 224, 512  # pixels of an image that is sent; smaller ones are enlarged
_PAIR = "Are these two images of the same kind? {}Answer with one word: same, different or unsure."
_WHICH = (
    "Which of the numbered images is of the same kind as the first image? {}"
    "Answer with its number alone, 0 if it is none of them, or the word unsure."
)
_TRIPLET = (
    "Which of the two numbered images is nearer in kind to the first image? {}"
    "Answer with its number alone, or the word unsure."
)
_AGAIN = "That was not understood. Answer with one of the allowed words and nothing else."
_FILLERS = {"the", "answer", "is", "image", "number", "final", "it"}


# In rounds


def ask_labels(loop: Loop, error: float = 0.0, reporter: Reporter = QUIET) -> Rows:
    """Let the labels answer, some of them wrongly, and train after every `every` answers: for experiments and tests."""

    def oracle(data: Data) -> LabelOracle:
        if data.images.labels is None:
            raise InputError(f"--oracle labels: {loop.data} has no labels; give class folders or a data set")
        return LabelOracle(data.images.labels, error=error, seed=loop.seed)

    with open_loop(loop, reporter, oracle) as (data, queue, learner):
        known = oracle(data)

        def ask(questions: Sequence[Question]) -> Said:
            return ((question, known.answer(question).choice) for question in questions)

        _ask_in_rounds(loop, data, queue, learner, LABELS, ask, reporter)
        return end_loop(loop, data, queue.store, learner)


def ask_vision_model(loop: Loop, model: "VisionModel", reporter: Reporter = QUIET) -> Rows:
    """Let a vision-language model answer and train after every `every` answers, until its budget is spent.

    It first answers up to a tenth of all questions that a person has answered: these answers do not count, they show
    how often it errs. If the endpoint fails, what was answered is kept, and an InputError says how to go on.
    """
    reporter.say(f"the images of every question are sent to {model.url}")
    with open_loop(loop, reporter, model.begin) as (data, queue, learner):
        try:
            _ask_shared(queue.store, model, loop.questions // SHARED)
            _ask_in_rounds(loop, data, queue, learner, model.name, model.ask, reporter)
        except KeyboardInterrupt:
            reporter.say("stopped; the same command goes on, without --annotator you answer yourself")
        budget = "" if model.tokens is None else f" of {model.tokens:,}"
        rows = [("tokens", f"{model.used:,}{budget}"), ("errors", disagreement(queue.store, model.name))]
        return [*end_loop(loop, data, queue.store, learner), *rows]


def _ask_in_rounds(
    loop: Loop, data: Data, queue: QuestionQueue, learner: Learner, who: str, ask: Ask, reporter: Reporter
) -> None:
    skipped: list[Question] = []
    while True:
        try:
            _answer(queue, learner, min(loop.questions, learner.n_learned + loop.every), who, ask, skipped)
        finally:
            queue.store.release(who)
        if not learner.is_behind or not learner.learn(reporter):
            return
        scores = score_line(data, learner.newest)
        reporter.say(f"{learner.n_learned:,} answers" + (f": {scores}" if scores else ""))


def _answer(queue: QuestionQueue, learner: Learner, until: int, who: str, ask: Ask, skipped: list[Question]) -> None:
    """Answer until there are `until` answers, nothing is left to ask, or the annotator says no more."""
    store = queue.store
    while (n := len(store.answers())) < until:
        chosen = queue.chooser.next(learner.belief(), store.answers(), min(until - n, 50), skipped)
        if not chosen:
            return
        store.add_questions(chosen, model=learner.name())
        held = {one.question: one for one in store.claim(who, len(chosen) + len(skipped))}
        asked, n_said = [question for question in held if question not in skipped], 0
        for question, choice in ask(asked):
            n_said += 1
            if choice is None:  # it waits for a person
                skipped.append(question)
            else:
                store.answer(held[question].id, choice, who)
        if n_said < len(asked) or not asked:
            return


# Shared questions


def _by_people(store: Store) -> list[Any]:
    machine = (LABELS, PROTOCOL)
    rows = (row for row in store.rows() if not row.withdrawn and row.answer is not None and row.choice != UNSURE)
    return [row for row in rows if not row.annotator.startswith(machine)]


def _ask_shared(store: Store, model: "VisionModel", most: int) -> None:
    """Ask what people have answered, evenly spread, as far as the model was not asked it before."""
    before = {(row.image, row.shown) for row in store.rows() if row.annotator == model.name}
    people = _by_people(store)
    known = [row for row in people if (row.image, row.shown) in before]
    new = [row.answer.question for row in people if (row.image, row.shown) not in before]
    n = max(0, min(most - len(known), len(new)))
    for question, choice in model.ask([new[at * len(new) // n] for at in range(n)]):
        if choice is not None:  # kept, but taken back: a person has answered
            store.take_in([Given(Answer(question, choice), model.name, origin="compared with a person")])
            store.settle(store.rows()[-1].id, model.name)


def disagreement(store: Store, who: str) -> str:
    """How often an annotator says something else than people do of the same questions, in words."""
    said = {(row.image, row.shown): row.choice for row in store.rows() if row.annotator == who}
    people = _by_people(store)
    both = [(said[row.image, row.shown], row.choice) for row in people if (row.image, row.shown) in said]
    sure = [(own, right) for own, right in both if own != UNSURE]
    if not sure:
        return "not known: no question has an answer of a person and of the model; answer some with --terminal first"
    from scipy.stats import binomtest

    wrong = sum(own != right for own, right in sure)
    likely = binomtest(wrong, len(sure)).proportion_ci(method="wilson")
    unsure = f", and is unsure about {len(both) - len(sure):,} more" if len(both) > len(sure) else ""
    share = f"{wrong / len(sure):.0%} (95 % interval {likely.low:.0%} to {likely.high:.0%})"
    return f"{who} says something else than a person about {wrong:,} of {len(sure):,}: {share}{unsure}"


# The model


@dataclass
class VisionModel:
    """A model behind an endpoint that speaks OpenAI's protocol: vLLM, Ollama, a hosted one.

    `criterion` says in the user's words what makes images the same ("by species"). The client repeats what fails for
    a moment, and waits as long as the endpoint wants.
    """

    url: str
    model: str
    criterion: str = ""
    tokens: int | None = None  # it may use, in this run
    seconds: float = 120.0  # for an answer
    retries: int = 6  # which take about half a minute
    used: int = 0
    _largest: int = 1  # tokens that one question took
    _nonsense: int = 0
    _data: Data | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.username or parts.password:
            fix = "write openai:http://127.0.0.1:8000/v1; a key goes into the environment variable OPENAI_API_KEY"
            raise InputError(f"--annotator openai:{self.url} names no endpoint; {fix}")
        if self.tokens is not None and self.tokens < 1:
            raise InputError(f"--vlm-tokens is {self.tokens}; it must be 1 or more")
        if find_spec("openai") is None:
            raise InputError("a model as an annotator needs a client; install it: pip install 'constraintmatch[vlm]'")

    @property
    def name(self) -> str:
        """The annotator in the database."""
        return f"{PROTOCOL}{self.model}"[:LONGEST]

    def begin(self, data: Data) -> None:
        """Take these images, and ask one question: an endpoint that does not work shows at once."""
        data.images.to_look_at()
        self._data = data
        if len(data.images) > 1:
            list(self.ask([Question(0, (1,))]))

    def ask(self, questions: Sequence[Question]) -> Said:
        """Questions with what the model says, as it comes; fewer if its tokens are spent.

        What it says twice in words that are not understood is None. A failure is raised after what came with it.
        """
        left = list(questions)
        while left:
            n = AT_ONCE if self.tokens is None else min(AT_ONCE, (self.tokens - self.used) // self._largest)
            now, left = left[: max(n, 0)], left[max(n, 0) :]
            if not now:
                return
            found = asyncio.run(self._ask_together(now))
            for question, said in zip(now, found, strict=True):
                if not isinstance(said, BaseException):
                    yield question, said
            for said in found:
                if isinstance(said, BaseException):
                    raise self._failure(said) from None

    async def _ask_together(self, questions: Sequence[Question]) -> list[int | BaseException | None]:
        import openai

        key = os.environ.get("OPENAI_API_KEY") or "none"  # endpoints on one's own machine want none
        options: dict[str, Any] = {"timeout": self.seconds, "max_retries": self.retries}
        async with openai.AsyncOpenAI(base_url=self.url, api_key=key, **options) as client:
            return await asyncio.gather(*(self._ask_one(client, one) for one in questions), return_exceptions=True)

    async def _ask_one(self, client: Any, question: Question) -> int | None:
        messages: list[dict[str, Any]] = [{"role": "user", "content": self._content(question)}]
        spent, said = 0, ""
        for _ in range(2):
            reply = await client.chat.completions.create(model=self.model, messages=messages)
            usage = getattr(reply, "usage", None)
            try:
                said = str(reply.choices[0].message.content or "")
            except (AttributeError, IndexError, TypeError):
                said = ""
            if usage is None and self.tokens is not None:
                raise InputError("does not say how many tokens it uses", self.url, "leave --vlm-tokens out")
            spent += int(getattr(usage, "total_tokens", 0) or 0)
            choice = read_reply(said, question)
            if choice is not None:
                break
            messages += [{"role": "assistant", "content": said or "…"}, {"role": "user", "content": _AGAIN}]
        self.used, self._largest = self.used + spent, max(self._largest, spent)
        self._nonsense = self._nonsense + 1 if choice is None else 0
        if self._nonsense >= NONSENSE:
            problem = f"{self.model} gives no answers that are understood, the last is {said[:60]!r}"
            raise InputError(problem, self.url, "take another --vlm-model, one that sees images")
        return choice

    def _content(self, question: Question) -> list[dict[str, Any]]:
        assert self._data is not None
        words = {"pair": _PAIR, "which": _WHICH, "triplet": _TRIPLET}[question.kind]
        text = words.format(f"What counts: {self.criterion}. " * bool(self.criterion))
        content: list[dict[str, Any]] = [{"type": "text", "text": text}]
        numbered = [f"Image {number}:" for number in range(1, len(question.shown) + 1)]
        names = ["First image:", *(["Second image:"] if question.kind == "pair" else numbered)]
        for named, row in zip(names, (question.image, *question.shown), strict=True):
            picture = _as_url(self._data.images, self._data.files, row)
            content += [{"type": "text", "text": named}, {"type": "image_url", "image_url": {"url": picture}}]
        return content

    def _failure(self, error: BaseException) -> BaseException:
        """An InputError for what an endpoint does wrong; any other error as it is."""
        import openai

        if isinstance(error, InputError) or not isinstance(error, openai.OpenAIError | ValueError):
            return error
        cause = error.__cause__ if isinstance(error, openai.APIConnectionError) and error.__cause__ else error
        reason = one_line(cause) if isinstance(cause, Exception) else type(cause).__name__
        fix = "what was answered is kept; the same command goes on, without --annotator you answer yourself"
        return InputError(f"{self.model} does not answer ({type(error).__name__}: {reason[:160]})", self.url, fix)


def read_reply(text: str, question: Question) -> int | None:
    """The choice that the last line of a reply means; None if it says anything else, or more than one thing."""
    plain = re.sub(r"<think>.*?</think>", "", text, flags=re.DOTALL).lower().replace("none of these", "none")
    lines = [re.findall(r"[^\W\d_]+|\d+", line) for line in plain.splitlines()]
    last: list[str] = next((words for words in reversed(lines) if words), [])
    meant = [word for word in last if word not in _FILLERS]
    word = "0" if meant == ["none"] and question.kind == "which" else "".join(meant[:1])
    choice = read_choice(word, question) if len(meant) == 1 and (len(word) > 1 or word.isdecimal()) else None
    return choice if choice is not None and choice >= UNSURE else None


@lru_cache(maxsize=512)
def _as_url(images: ImageSet, folder: Path | None, row: int) -> str:
    """A picture as a small JPEG inside an address."""
    with Image.open(io.BytesIO(large_picture(images, folder, row)[0])) as opened:
        picture = opened.convert("RGB")
    if max(picture.size) < SMALLEST:
        scale = SMALLEST / max(picture.size)
        width, height = (max(1, round(scale * size)) for size in picture.size)
        picture = picture.resize((width, height), Image.Resampling.BICUBIC)
    picture.thumbnail((LARGEST, LARGEST))
    file = io.BytesIO()
    picture.save(file, "JPEG", quality=85)
    return f"data:image/jpeg;base64,{base64.b64encode(file.getvalue()).decode()}"
