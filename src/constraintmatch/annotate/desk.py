"""What the routes work on: images, answers, belief and queue, turned into what the page is told."""

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise

from constraintmatch.annotate.clusters import Gallery, galleries
from constraintmatch.annotate.contradictions import Clash
from constraintmatch.annotate.question_queue import Refill
from constraintmatch.annotate.records import AnswerRow, Asked
from constraintmatch.annotate.store import Store
from constraintmatch.annotate.thumbnails import Pictures
from constraintmatch.annotate.types import (
    AskedOut,
    ClashOut,
    ClusterOut,
    CountsOut,
    ImageOut,
    QuestionsOut,
    SaidOut,
    StateOut,
    TileOut,
)
from constraintmatch.answers import NONE, UNSURE
from constraintmatch.images import ImageSet
from constraintmatch.questions import Belief, certain_share

__all__ = ["Desk"]


@dataclass(frozen=True)
class Desk:
    """Everything behind the page. `activity` is a line about what goes on in the background, or None."""

    images: ImageSet
    store: Store
    belief: Callable[[], Belief | None]
    pictures: Pictures
    refill: Refill
    source: str
    model: Callable[[], str | None]
    activity: Callable[[], str | None]
    _kept: dict[tuple[int, int], tuple[Belief | None, float, int]] = field(default_factory=dict)

    @cached_property
    def database(self) -> str:
        """A name for these images and this database: the browser keeps unsent answers and pictures under it."""
        text = f"{self.store.path.resolve()}\0{self.images.fingerprint()}"
        return hashlib.sha256(text.encode("utf-8", "backslashreplace")).hexdigest()[:16]

    def state(self) -> StateOut:
        """Where the work stands."""
        counts = self.store.counts()
        told = CountsOut(
            answered=counts.answered,
            same=counts.same + counts.which,
            different=counts.different + counts.none,
            unsure=counts.unsure,
            withdrawn=counts.withdrawn,
            per_minute=counts.per_minute,
        )
        certain, contradictions = self._implied(counts.answered, counts.withdrawn)
        return StateOut(
            database=self.database,
            source=self.source,
            model=self.model(),
            images=len(self.images),
            counts=told,
            wanted=self.refill.chooser.total,
            certain=certain,
            contradictions=contradictions,
            activity=self.activity(),
        )

    def _implied(self, answered: int, withdrawn: int) -> tuple[float, int]:
        """The share of certain images and the number of contradictions; kept until an answer or the belief changes."""
        belief, key = self.belief(), (answered, withdrawn)
        kept = self._kept.get(key)
        if kept is None or kept[0] is not belief:
            certain = 0.0 if belief is None else certain_share(belief, self.store.answers())
            kept = belief, certain, len(self.store.clashes(limit=None))
            self._kept.clear()
            self._kept[key] = kept
        return kept[1], kept[2]

    # Questions

    def image(self, row: int, cluster: str | None = None) -> ImageOut:
        return ImageOut(row=row, name=self.images.names[row], cluster=cluster)

    def asked(self, asked: Asked) -> AskedOut:
        """A question as the page shows it; images of clusters that a person has named carry the name."""
        names, belief, question = self.store.names(), self.belief(), asked.question
        probabilities = None if belief is None or not names else belief.probabilities
        of = {} if probabilities is None else {row: int(probabilities[row].argmax()) for row in question.shown}
        shown = [self.image(row, names.get(of.get(row, -1))) for row in question.shown]
        return AskedOut(id=asked.id, kind=question.kind, image=self.image(question.image), shown=shown)

    def held(self, held: Iterable[Asked]) -> QuestionsOut:
        """The questions that an annotator holds."""
        questions = [self.asked(asked) for asked in held]
        return QuestionsOut(questions=questions, done=self.refill.done and not questions, problem=self.refill.problem)

    # Contradictions

    def clashes(self, clashes: Iterable[Clash]) -> list[ClashOut]:
        return [self._clash(clash) for clash in clashes]

    def _clash(self, clash: Clash) -> ClashOut:
        steps = zip(clash.together, pairwise(clash.images), strict=True)
        ends = clash.images[0], clash.images[-1]
        said = [self._said(clash.apart, *ends, False), *(self._said(number, *step, True) for number, step in steps)]
        first, last = (self.images.names[row] for row in ends)
        others = "another says same" if len(said) == 2 else f"{len(said) - 1:,} others together say same"
        return ClashOut(text=f"{first} and {last}: one answer says different, {others}.", answers=said)

    def _said(self, number: int, one: int, other: int, link: bool) -> SaidOut:
        row = self.store.row(number)
        change_to = NONE
        if not link and row.answer is not None:
            question = row.answer.question
            change_to = question.shown.index(other if question.image == one else one)
        return SaidOut(
            answer=number,
            kind="pair" if len(row.shown) == 1 else "which",
            left=self.image(one),
            right=self.image(other),
            link=link,
            change_to=change_to,
            annotator=row.annotator,
            time=row.time,
        )

    def said_about(self, image: int) -> list[SaidOut]:
        """What the answers that stand say of an image: links first, at most twelve."""
        rows = [row for row in self.store.rows() if not row.withdrawn and row.answer is not None]
        said = [found for row in rows for found in self._links_with(row, image)]
        return sorted(said, key=lambda one: not one.link)[:12]

    def _links_with(self, row: AnswerRow, image: int) -> list[SaidOut]:
        if row.answer is None or row.choice == UNSURE:
            return []
        question = row.answer.question
        pairs = [(question.image, shown, at == row.choice) for at, shown in enumerate(question.shown)]
        return [self._said(row.id, *pair) for pair in pairs if image in pair[:2]]

    # Clusters

    def galleries(self, order: str) -> list[Gallery]:
        return [one.ordered(order) for one in galleries(self.belief(), self.store.answers(), len(self.images))]

    def cluster(self, gallery: Gallery, names: dict[int, str], offset: int, n: int) -> ClusterOut:
        """A part of a gallery; a group that answers make has no name of its own."""
        confidence = gallery.confidence
        places = range(offset, min(offset + n, len(gallery.rows)))
        tiles = [
            TileOut(
                row=int(gallery.rows[at]),
                name=self.images.names[int(gallery.rows[at])],
                confidence=None if confidence is None else round(float(confidence[at]), 4),
            )
            for at in places
        ]
        plain = f"Cluster {gallery.cluster}" if confidence is not None else f"Group {gallery.cluster + 1}"
        return ClusterOut(
            cluster=gallery.cluster,
            name=plain if confidence is None else names.get(gallery.cluster, plain),
            size=len(gallery.rows),
            confidence=None if confidence is None else round(float(confidence.mean()), 4),
            images=tiles,
        )
