"""Contradictions between answers, found as they come: links as a graph whose edges remember who said so.

A union-find would be faster but cannot forget; answers are undone and withdrawn. One breadth-first search over an
image's group costs about 2 ms at 10,000 images, and an answer needs a handful of them.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from constraintmatch.answers import UNSURE, Answer, Question

__all__ = ["Clash", "LinkGraph"]

_Edges = defaultdict[int, dict[int, list[int]]]  # image -> the other image -> answers that say so, oldest first
_Tree = dict[int, tuple[int, int]]  # image -> (the image before it, steps from the root)


@dataclass(frozen=True)
class Clash:
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

    def add(self, number: int, answer: Answer) -> None:
        """Take an answer's links in."""
        for edges, i, j in self._links(answer):
            for one, other in ((i, j), (j, i)):
                edges[one].setdefault(other, []).append(number)

    def remove(self, number: int, answer: Answer) -> None:
        """Take an answer's links out again."""
        for edges, i, j in self._links(answer):
            for one, other in ((i, j), (j, i)):
                edges[one][other].remove(number)
                if not edges[one][other]:
                    del edges[one][other]

    def _links(self, answer: Answer) -> Iterator[tuple[_Edges, int, int]]:
        if answer.choice != UNSURE:
            for at, shown in enumerate(answer.question.shown):
                yield self._must if at == answer.choice else self._cannot, answer.question.image, shown

    def clashes_of(self, number: int, answer: Answer) -> list[Clash]:
        """What the other answers say against this one, which is among them: the shortest proof for each of its links.

        A must-link between two groups that were one already brings no new contradiction.
        """
        found = []
        for edges, i, j in self._links(answer):
            clash = self._against_must(number, i, j) if edges is self._must else self._against_cannot(number, i, j)
            if clash is not None:
                found.append(clash)
        return found

    def _against_cannot(self, number: int, i: int, j: int) -> Clash | None:
        tree = self._tree(i)
        return self._clash(_way(tree, j)[::-1], number) if j in tree else None

    def _against_must(self, number: int, i: int, j: int) -> Clash | None:
        """The nearest earlier cannot-link between the groups that the must-link i–j joins."""
        if self._must[i][j] != [number]:
            return None
        here = self._tree(i, without=j)
        if j in here:
            return None
        there = self._tree(j, without=i)
        crossing = [
            (here[a][1] + there[b][1], a, b)
            for a in here
            for b, said in self._cannot.get(a, {}).items()
            if b in there and said != [number]
        ]
        if not crossing:
            return None
        _, a, b = min(crossing)
        apart = next(other for other in self._cannot[a][b] if other != number)
        return self._clash(_way(here, a) + _way(there, b)[::-1], apart)

    def clashes(self, limit: int | None = 10) -> list[Clash]:
        """All contradictions that stand, by the answers that keep apart, each pair of images once."""
        group = self._groups()
        torn = [
            (said[0], i, j)
            for i, others in self._cannot.items()
            for j, said in others.items()
            if i < j and group.get(i, -1) == group.get(j, -2)
        ]
        return [self._clash(_way(self._tree(i), j)[::-1], apart) for apart, i, j in sorted(torn)[:limit]]

    def settles(self, question: Question) -> bool:
        """Whether the answers imply this one: one of the shown images is of the same group, or all are kept apart."""
        group = self._tree(question.image)
        if not group.keys().isdisjoint(question.shown):
            return True
        apart = {other for image in group for other in self._cannot.get(image, ())}
        return all(not apart.isdisjoint(self._tree(shown)) for shown in question.shown)

    def _tree(self, root: int, *, without: int | None = None) -> _Tree:
        """The group of an image by breadth-first search; `without`: not over the edge from the root to that image."""
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

    def _clash(self, way: list[int], apart: int) -> Clash:
        steps = zip(way, way[1:], strict=False)
        return Clash(tuple(way), tuple(self._must[i][j][0] for i, j in steps), apart)


def _way(tree: _Tree, end: int) -> list[int]:
    """The images from `end` back to the tree's root."""
    way = [end]
    while (before := tree[way[-1]][0]) != way[-1]:
        way.append(before)
    return way
