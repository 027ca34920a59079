"""Contradictions between answers, found when an answer comes: a graph of links and of the answers behind them.

A union-find is faster but cannot forget, and answers are undone and withdrawn. A breadth-first search over a group
costs about 3 ms at 10,000 images, and an answer needs one to three of them.
"""

from collections import Counter, defaultdict
from dataclasses import dataclass
from itertools import pairwise

from constraintmatch.questions.answers import NONE, Answer, Question

__all__ = ["Contradiction", "LinkGraph"]

_Edges = defaultdict[int, dict[int, list[int]]]  # image -> the other image -> answers that say so, oldest first
_Tree = dict[int, tuple[int, int]]  # image -> (the image before it, steps from the root)


@dataclass(frozen=True)
class Contradiction:
    """Two images that one answer keeps apart and a chain of answers holds together.

    `images` is the way from one to the other, `together[k]` the answer that links images[k] and images[k + 1], `apart`
    the answer against it. Images are rows, answers ids.
    """

    images: tuple[int, ...]
    together: tuple[int, ...]
    apart: int

    @property
    def answers(self) -> tuple[int, ...]:
        """The answers that cannot all be true, each once: the one that keeps apart first."""
        return tuple(dict.fromkeys((self.apart, *self.together)))


class LinkGraph:
    """The links of the answers that stand, and what follows from them."""

    def __init__(self) -> None:
        self._must: _Edges = defaultdict(dict)
        self._cannot: _Edges = defaultdict(dict)
        self._torn: list[tuple[int, int, int]] | None = []  # what `_find_torn` found; None: look again

    def add_checked(self, number: int, answer: Answer) -> list[Contradiction]:
        """Add the links of an answer; returns what the other answers say against it."""
        torn = self._torn
        self.add(number, answer)
        found = self.contradictions_of(number, answer)
        if not found:
            self._torn = torn  # an answer without a contradiction tears nothing
        return found

    def add(self, number: int, answer: Answer) -> None:
        """Add the links of an answer without a check: faster for many at once."""
        self._torn = None
        for edges, i, j in self._links(answer):
            for one, other in ((i, j), (j, i)):
                edges[one].setdefault(other, []).append(number)

    def remove(self, number: int, answer: Answer) -> None:
        """Remove the links of an answer."""
        if self._torn:
            self._torn = None
        for edges, i, j in self._links(answer):
            for one, other in ((i, j), (j, i)):
                edges[one][other].remove(number)
                if not edges[one][other]:
                    del edges[one][other]

    def _links(self, answer: Answer) -> list[tuple[_Edges, int, int]]:
        """What the answer states: same as the chosen image, or different from all shown.

        The other shown images are different only if no two of them are of one kind. Who sees two that fit picks one of
        them, and that is no contradiction.
        """
        image, shown = answer.question.image, answer.question.shown
        if answer.choice >= 0:
            return [(self._must, image, shown[answer.choice])]
        return [(self._cannot, image, other) for other in shown] if answer.choice == NONE else []

    def contradictions_of(self, number: int, answer: Answer) -> list[Contradiction]:
        """What the other answers say against this one, which is in the graph: the shortest proof for each of its links.

        A must-link between two groups that were one already brings no new contradiction.
        """
        found = []
        tree = self._tree(answer.question.image)
        for edges, i, j in self._links(answer):
            if edges is self._must:
                found += self._against_must(number, i, j)
            elif j in tree:
                found.append(self._proof(_way(tree, j)[::-1], number))
        return found

    def _against_must(self, number: int, i: int, j: int) -> list[Contradiction]:
        """The nearest earlier cannot-link between the groups that the must-link i–j joins, if there is one."""
        if self._must[i][j] != [number]:
            return []
        here = self._tree(i, without=j)
        apart = [(a, b) for a in here for b in self._cannot.get(a, ()) if j not in here]
        if not apart:  # mostly so: the image is new
            return []
        there = self._tree(j, without=i)
        crossing = [(here[a][1] + there[b][1], a, b) for a, b in apart if b in there]
        if not crossing:
            return []
        _, a, b = min(crossing)
        return [self._proof(_way(here, a) + _way(there, b)[::-1], self._cannot[a][b][0])]

    def n_contradictions(self) -> int:
        """How many pairs of images one answer keeps apart and others hold together."""
        return len(self._find_torn())

    def contradictions(self, limit: int | None = 10) -> list[Contradiction]:
        """The open contradictions, in the order of the answers that keep apart, each pair of images once.

        Each image needs a search of its own: all of many (limit=None) may take long; `n_contradictions` is fast.
        """
        torn = self._find_torn()[:limit]
        often = Counter(image for _, i, j in torn for image in (i, j))
        ways = [(j, i, apart) if often[i] < often[j] else (i, j, apart) for apart, i, j in torn]
        found: dict[tuple[int, int, int], Contradiction] = {}
        root, tree = -1, _Tree()
        for way in sorted(ways):
            if way[0] != root:
                root, tree = way[0], self._tree(way[0])
            found[way] = self._proof(_way(tree, way[1])[::-1], way[2])
        return [found[way] for way in ways]

    def _find_torn(self) -> list[tuple[int, int, int]]:
        """(answer, i, j) of each cannot-link inside a group, sorted."""
        if self._torn is None:
            group = self._groups()
            self._torn = sorted(
                (said[0], i, j)
                for i, others in self._cannot.items()
                if i in group
                for j, said in others.items()
                if i < j and group[i] == group.get(j)
            )
        return self._torn

    def settles(self, question: Question) -> bool:
        """Whether the answers imply this one: one of the shown images is of the same group, or all are kept apart."""
        group = self._tree(question.image)
        if not group.keys().isdisjoint(question.shown):
            return True
        apart = {other for image in group for other in self._cannot.get(image, ())}
        return bool(apart) and all(not apart.isdisjoint(self._tree(shown)) for shown in question.shown)

    def _tree(self, root: int, *, without: int | None = None) -> _Tree:
        """The group of an image by breadth-first search; `without`: not over the link from the root to that image."""
        tree: _Tree = {root: (root, 0)}
        queue = [root]
        for image in queue:
            steps = tree[image][1] + 1
            for other in self._must.get(image, ()):
                if other not in tree and not (image == root and other == without):
                    tree[other] = (image, steps)
                    queue.append(other)
        return tree

    def _groups(self) -> dict[int, int]:
        group: dict[int, int] = {}
        for image in self._must:
            if image not in group:
                group |= dict.fromkeys(self._tree(image), image)
        return group

    def _proof(self, way: list[int], apart: int) -> Contradiction:
        steps = pairwise(way)
        return Contradiction(tuple(way), tuple(self._must[i][j][0] for i, j in steps), apart)


def _way(tree: _Tree, end: int) -> list[int]:
    """The images from `end` back to the tree's root."""
    way = [end]
    while (before := tree[way[-1]][0]) != way[-1]:
        way.append(before)
    return way
