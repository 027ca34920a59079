"""Constraints: pairs of images that belong together (must-link) or apart (cannot-link), and what to do with them."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from constraintmatch._internal import rng
from constraintmatch._internal.errors import InputError
from constraintmatch._internal.files import check_memory
from constraintmatch._internal.rng import Purpose
from constraintmatch.constraints import graph
from constraintmatch.constraints.graph import Conflict, Triplets
from constraintmatch.constraints.pair_cells import MAX_IMAGES, Places, class_numbers, column_of, pair_list
from constraintmatch.constraints.pairs_file import read_pairs, write_pairs

_NUMBERS, _TEXTS = ("left", "right", "link", "weight"), ("annotator", "time")  # the columns


@dataclass(frozen=True, eq=False)
class Constraints:
    """Pairs of rows of an image set with a link in [0, 1] (1 = must-link, 0 = cannot-link, between: soft) and a weight.

    Build them with `read`, `from_arrays`, `from_lists`, `from_matrix` or `sample`, which check; every operation returns
    new constraints. Only hard links (exactly 1 or 0) take part in components, closure and contradictions. Triplets and
    sizes of clusters stay as they are when pairs are chosen, merged or closed.
    """

    left: NDArray[np.int64]
    right: NDArray[np.int64]
    link: NDArray[np.float32]
    weight: NDArray[np.float32]
    n_images: int
    annotator: tuple[str, ...] | None = None
    time: tuple[str, ...] | None = None
    ignored_self_links: int = 0  # must-links of an image with itself that were left out at the door
    places: Places | None = None  # in the file that they were read from
    triplets: Triplets = graph.NO_TRIPLETS
    sizes: NDArray[np.float32] | None = None  # (1 or k, 2) the least and most images of a cluster; up to 1: shares

    def __len__(self) -> int:
        return len(self.left)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        """The table (n, 4) of left, right, link and weight."""
        return np.column_stack([self.left, self.right, self.link, self.weight]).astype(dtype or np.float64)

    @property
    def n_must_links(self) -> int:
        return int((self.link > 0.5).sum())

    @property
    def n_cannot_links(self) -> int:
        return int((self.link < 0.5).sum())

    @classmethod
    def from_arrays(
        cls,
        left: ArrayLike,
        right: ArrayLike,
        link: ArrayLike,
        *,
        n_images: int,
        weight: ArrayLike | None = None,
        annotator: Sequence[str] | None = None,
        time: Sequence[str] | None = None,
        places: Places | None = None,
    ) -> "Constraints":
        """Constraints from columns of equal length; must-links of an image with itself are left out and counted."""
        lefts, rights = column_of(left, "left", np.int64), column_of(right, "right", np.int64)
        links = column_of(link, "link", np.float32)
        weights = np.ones(len(links), np.float32) if weight is None else column_of(weight, "weight", np.float32)
        texts = [None if column is None else tuple(column) for column in (annotator, time)]
        lengths = {len(column) for column in (lefts, rights, links, weights, *texts) if column is not None}
        if len(lengths) > 1:
            raise InputError(f"the columns of the pairs differ in length ({', '.join(map(str, sorted(lengths)))})")
        made = cls(lefts, rights, links, weights, int(n_images), texts[0], texts[1], places=places)
        made._check()
        itself = lefts == rights
        return replace(made.take(~itself), ignored_self_links=int(itself.sum())) if itself.any() else made

    def _check(self) -> None:
        """An InputError for the first pair that has no such image, an odd link or weight, or differs from itself."""
        n, left, right, link, weight = self.n_images, self.left, self.right, self.link, self.weight
        if not 0 <= n <= MAX_IMAGES:
            raise InputError(f"n_images={n} is not a number of images from 0 to {MAX_IMAGES:,}")
        missing = "image {} does not exist (the set has " + f"{n:,} images)"
        for good, values, problem, fix in (
            ((left >= 0) & (left < n), left, missing, ""),
            ((right >= 0) & (right < n), right, missing, ""),
            ((link >= 0) & (link <= 1), link, "link {:g} is outside [0, 1]", "must-links are 1, cannot-links 0"),
            ((weight >= 0) & np.isfinite(weight), weight, "weight {:g} is not a finite number from 0 up", ""),
            ((left != right) | (link > 0.5), left, "an image cannot be different from itself", "leave the pair out"),
        ):
            if not good.all():
                at = int(good.argmin())
                error = InputError(problem.format(values[at]), fix=fix)
                raise error.at(f"pair {at:,}") if self.places is None else self.places.error(at, error)

    @classmethod
    def from_lists(
        cls, *, n_images: int, must_link: Iterable[tuple[int, int]] = (), cannot_link: Iterable[tuple[int, int]] = ()
    ) -> "Constraints":
        """Constraints from lists of (i, j): first the must-links, then the cannot-links."""
        must, cannot = pair_list(must_link, "must_link"), pair_list(cannot_link, "cannot_link")
        pairs = np.concatenate([must, cannot])
        links = np.repeat([1.0, 0.0], [len(must), len(cannot)])
        return cls.from_arrays(pairs[:, 0], pairs[:, 1], links, n_images=n_images)

    @classmethod
    def from_matrix(cls, matrix: Any) -> "Constraints":
        """Constraints from a square matrix, dense or sparse: 1 must-link, -1 cannot-link, 0 nothing known.

        Symmetric or one triangle; where both (i, j) and (j, i) are given they must agree and make one pair.
        """
        from scipy.sparse import coo_array

        entries = coo_array(matrix)
        if entries.ndim != 2 or entries.shape[0] != entries.shape[1]:
            raise InputError(f"the matrix of constraints must be square, not of shape {entries.shape}")
        n = int(entries.shape[0])
        given = entries.data != 0
        rows, columns, values = (part[given] for part in (entries.row, entries.col, entries.data))
        odd = np.flatnonzero((values != 1) & (values != -1))
        if odd.size:
            i, j, value = rows[odd[0]], columns[odd[0]], values[odd[0]]
            raise InputError(f"the matrix of constraints has {value} at ({i}, {j})", fix="use only 1, -1 and 0")
        keys = graph.pair_keys(rows.astype(np.int64), columns.astype(np.int64), n)
        keys, first, number = np.unique(keys, return_index=True, return_inverse=True)
        differ = np.flatnonzero(values[first][number] != values)
        if differ.size:
            i, j = sorted((int(rows[differ[0]]), int(columns[differ[0]])))
            raise InputError(f"the matrix of constraints has 1 and -1 for the same pair at ({i}, {j}) and ({j}, {i})")
        return cls.from_arrays(keys // max(n, 1), keys % max(n, 1), values[first] > 0, n_images=n)

    @classmethod
    def read(
        cls,
        path: Path | str,
        *,
        names: Sequence[str] | None = None,
        n_images: int | None = None,
        columns: str | None = None,
        unread: Mapping[str, str] | None = None,
    ) -> "Constraints":
        """Constraints from a CSV, Parquet or JSON lines file, by its suffix; its columns say what it holds.

        Pairs are `left,right,link`. Labels, `image,label`, become the pairs that they imply. Triplets are
        `anchor,near,far`, sizes of clusters `least,most`.

        Images may be given by name or by row number (counted from 0). A cell that is a name means that image; any other
        whole number is a row number. Where some whole numbers are names and others only row numbers, the file is
        refused. Without `names` all cells are row numbers; without `n_images` too, the largest one gives the number of
        images. `columns="i,j,c_ij"` says which columns of the file are left, right, link and, if more are given,
        weight, annotator, time. `unread` has, by name, why the files of some images could not be read, for errors.
        """
        found = read_pairs(Path(path), names, n_images, columns, unread or {})
        more = {name: found.pop(name) for name in ("triplets", "sizes") if name in found}
        return replace(cls.from_arrays(**found), **more)

    @classmethod
    def join(cls, parts: Sequence["Constraints"]) -> "Constraints":
        """What several constraints over the same images say together; sizes may come once."""
        if len(parts) == 1:
            return parts[0]
        pairs = [part for part in parts if len(part)] or parts
        columns: dict[str, Any] = {name: np.concatenate([getattr(one, name) for one in pairs]) for name in _NUMBERS}
        for name in {name for part in pairs for name in part._texts()}:
            columns[name] = tuple(text for one in pairs for text in getattr(one, name) or ("",) * len(one))
        places = [part.places for part in pairs if part.places is not None]
        columns["places"] = Places.join(places) if len(places) == len(pairs) else None
        columns["triplets"] = Triplets.join([part.triplets for part in parts])
        sizes = [part.sizes for part in parts if part.sizes is not None]
        if len(sizes) > 1:
            raise InputError("two files say how large clusters are", fix="give one of them")
        columns |= {"sizes": next(iter(sizes), None), "n_images": max(part.n_images for part in parts)}
        return cls(**columns, ignored_self_links=sum(part.ignored_self_links for part in parts))

    def write(self, path: Path | str, *, names: Sequence[str] | None = None) -> None:
        """Write `left,right,link[,weight][,annotator][,time]`, atomically, as CSV, Parquet or JSON lines by suffix.

        Triplets and sizes go to files next to it: pairs-triplets.csv, pairs-sizes.csv. Triplets without pairs go to it.
        """
        write_pairs(Path(path), vars(self), names)

    @classmethod
    def sample(cls, labels: ArrayLike, n: int, *, seed: int, balanced: bool = False) -> "Constraints":
        """n pairs drawn from labels as the paper does: first members without replacement, partners from all others.

        More pairs than images are drawn in rounds, each with a fresh permutation as first members. An image is never
        its own partner; the same pair may come twice. `balanced=True` makes n // 2 of them must-links: as many first
        members, chosen at random, get a partner of their class, the others one of another class.
        """
        classes = class_numbers(labels)
        n_images = len(classes)
        if n < 0 or (n > 0 and n_images < 2):
            raise InputError(f"cannot draw {n:,} pairs from {n_images:,} labelled images", fix="at least 2 are needed")
        check_memory(64 * n, f"{n:,} pairs", "draw fewer")
        words = rng.stream(seed, Purpose.SAMPLE)
        rounds = [rng.permutation(words, n_images) for _ in range(-(-n // max(n_images, 1)))]
        first = np.concatenate([np.empty(0, np.int64), *rounds])[:n]
        second = rng.balanced_partners(words, classes, first) if balanced else rng.another(words, first, n_images)
        return cls.from_arrays(first, second, classes[first] == classes[second], n_images=n_images)

    @classmethod
    def sample_partners(cls, labels: ArrayLike, k: int, *, seed: int) -> "Constraints":
        """k different partners for every image, drawn from all others; the pairs of image 0 first, then those of 1, …

        A pair may come twice, once from each end; `merged` makes it one.
        """
        classes = class_numbers(labels)
        n_images = len(classes)
        if not 0 <= k < max(n_images, 1):
            problem = f"cannot draw {k:,} partners for each of {n_images:,} images"
            raise InputError(problem, fix=f"each has {n_images - 1:,} others")
        words = rng.stream(seed, Purpose.PARTNERS)
        others = np.empty((n_images, k), np.int64)
        for at, top in enumerate(range(n_images - 1 - k, n_images - 1)):  # Floyd: k of the n - 1 others, no repeats
            drawn = rng.below(words, np.full(n_images, top + 1))
            taken = (others[:, :at] == drawn[:, None]).any(axis=1)
            others[:, at] = np.where(taken, top, drawn)
        first = np.repeat(np.arange(n_images), k)
        second = others.ravel() + (others.ravel() >= first)
        return cls.from_arrays(first, second, classes[first] == classes[second], n_images=n_images)

    def take(self, rows: ArrayLike) -> "Constraints":
        """The pairs at these rows (numbers or a mask), in that order."""
        at = np.asarray(rows)
        at = np.flatnonzero(at) if at.dtype == bool else at.astype(np.int64)
        columns: dict[str, Any] = {name: getattr(self, name)[at] for name in _NUMBERS}
        columns |= {name: tuple(texts[row] for row in at.tolist()) for name, texts in self._texts().items()}
        places = None if self.places is None else self.places.take(at)
        return replace(self, **columns, ignored_self_links=0, places=places)

    def _texts(self) -> dict[str, tuple[str, ...]]:
        """The columns of text that are known."""
        return {name: getattr(self, name) for name in _TEXTS if getattr(self, name) is not None}

    def split(self, n_second: int, *, seed: int) -> tuple["Constraints", "Constraints"]:
        """All but n_second pairs, and n_second pairs chosen at random; both keep the order.

        Use it on `merged` constraints where the second part is to judge the first: else a pair may be in both.
        """
        if not 0 <= n_second <= len(self):
            raise InputError(f"cannot set {n_second:,} pairs aside; there are {len(self):,}")
        second = np.zeros(len(self), bool)
        second[rng.permutation(rng.stream(seed, Purpose.SPLIT), len(self))[:n_second]] = True
        return self.take(~second), replace(self.take(second), triplets=graph.NO_TRIPLETS, sizes=None)

    def flip(
        self, fraction: float, *, seed: int, only: Literal["must-link", "cannot-link"] | None = None
    ) -> "Constraints":
        """The same pairs with round(fraction · m) of the m links (of the kind `only`) turned to 1 - link, at random.

        Annotation noise; the fraction is the paper's ρ.
        """
        kinds = {None: self.link >= 0, "must-link": self.link > 0.5, "cannot-link": self.link < 0.5}
        if only not in kinds:
            raise InputError(f"only={only!r} is not a kind of constraint", fix="use must-link or cannot-link")
        if not 0 <= fraction <= 1:
            raise InputError("the fraction to flip must be in [0, 1]")
        rows = np.flatnonzero(kinds[only])
        chosen = rows[rng.permutation(rng.stream(seed, Purpose.FLIP), len(rows))[: round(fraction * len(rows))]]
        link = self.link.copy()
        link[chosen] = 1 - link[chosen]
        return replace(self, link=link)

    def merged(self) -> "Constraints":
        """Each unordered pair once per kind of answer (must-link, cannot-link, soft), at its first place.

        Weights are summed, soft links averaged by weight, annotators joined with " + ", the latest time (as text) kept.
        A pair answered both ways keeps both answers: that is a contradiction to `resolve`, not a soft link.
        """
        keys = self._answer_keys()
        _, first, number = np.unique(keys, return_index=True, return_inverse=True)
        if len(first) == len(self):
            return self
        place = np.argsort(first)
        weight = np.bincount(number, self.weight)
        share = np.where(weight[number] > 0, self.weight, 1.0)  # all weights 0: the plain mean
        mean = np.bincount(number, share * self.link) / np.bincount(number, share)
        once = self.take(first[place])
        soft = (once.link > 0) & (once.link < 1)
        link = np.where(soft, mean[place], once.link).astype(np.float32)
        made = replace(once, link=link, weight=weight[place].astype(np.float32))
        return replace(made, ignored_self_links=self.ignored_self_links, **self._merged_texts(number, place))

    def _answer_keys(self) -> NDArray[np.int64]:
        kind = np.where(self.link == 1, 1, np.where(self.link == 0, 0, 2))
        return graph.pair_keys(self.left, self.right, self.n_images) * 3 + kind

    def _merged_texts(self, number: NDArray[np.int64], place: NDArray[np.int64]) -> dict[str, Any]:
        """The annotators and the latest time of each group of pairs, in the order of `place`."""
        merged: dict[str, Any] = {}
        for name, texts in self._texts().items():
            groups: list[dict[str, None]] = [{} for _ in place]  # ordered sets
            for group, text in zip(number.tolist(), texts, strict=True):
                groups[group][text] = None
            join = (lambda given: " + ".join(filter(None, given))) if name == "annotator" else max
            merged[name] = tuple(join(groups[at]) for at in place)
        return merged

    def components(self) -> NDArray[np.int64]:
        """The must-link component of each image (n_images,), numbered in the order of their first images."""
        must = self.link == 1
        return graph.components(self.left[must], self.right[must], self.n_images)

    def component_constraints(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """What closing implies: the component of each image (n_images,), and components (m, 2) that cannot be linked.

        Each two of them come once, smaller first, sorted. Contradicted cannot-links are left out.
        """
        component = self.components()
        cannot = self.link == 0
        first, second = component[self.left[cannot]], component[self.right[cannot]]
        n = max(self.n_images, 1)
        keys = np.unique(graph.pair_keys(first, second, n)[first != second])
        return component, np.stack([keys // n, keys % n], axis=1)

    def close(self, *, max_pairs: int = 10_000_000) -> "Constraints":
        """The merged pairs and all they imply: must-links within components, cannot-links between them.

        Given pairs come first with their weight, then the implied must-links, then the implied cannot-links, sorted. An
        implied pair weighs as little as the lightest pair that may take part in its proof. Soft links stay as they are.
        Contradictory constraints, or more than max_pairs hard pairs in the result, are an error.
        """
        self.resolve("error")
        given = self.merged()
        component, cannot = given.component_constraints()
        n_pairs = sum(graph.n_pairs(component, cannot))
        if n_pairs > max_pairs:
            problem = f"closing {len(self):,} constraints would make {n_pairs:,} pairs (at most {max_pairs:,} allowed)"
            fix = "train on the pairs as they are, use component_constraints(), or raise max_pairs"
            raise InputError(problem, fix=fix)
        new = graph.implied_pairs(given.left, given.right, given.link, given.weight, component, cannot)
        both = zip(_NUMBERS, new, strict=True)
        columns: dict[str, Any] = {name: np.concatenate([getattr(given, name), more]) for name, more in both}
        columns |= {name: texts + ("",) * len(new[0]) for name, texts in given._texts().items()}
        return replace(given, **columns, places=None)

    def conflict_rows(self) -> NDArray[np.int64]:
        """The rows of all cannot-links whose two images are must-linked, directly or through others; in linear time."""
        component = self.components()
        return np.flatnonzero((self.link == 0) & (component[self.left] == component[self.right]))

    def conflicts(self, *, limit: int | None = 10) -> list[Conflict]:
        """The first contradictions, each with its shortest chain; `len(conflict_rows())` is the number of all.

        A chain costs one breadth-first search, so asking for all of many (limit=None) is slow on large files.
        """
        must, n = np.flatnonzero(self.link == 1), self.n_images
        left, right = self.left[must], self.right[must]
        keys, first = np.unique(graph.pair_keys(left, right, n), return_index=True)
        rows = self.conflict_rows()[:limit]
        ends = zip(self.left[rows].tolist(), self.right[rows].tolist(), strict=True)
        found = []
        for row, chain in zip(rows.tolist(), graph.shortest_chains(left, right, n, ends), strict=True):
            steps = np.searchsorted(keys, graph.pair_keys(np.array(chain[:-1]), np.array(chain[1:]), n))
            found.append(Conflict(row, tuple(must[first[steps]].tolist()), tuple(chain)))
        return found

    def resolve(
        self, on_conflict: Literal["error", "drop", "keep"] = "error", *, names: Sequence[str] | None = None
    ) -> "Constraints":
        """These constraints without contradictions: "error" stops at any, "keep" keeps them, "drop" leaves pairs out.

        "drop" takes pairs in from the heaviest to the lightest and leaves out each one that contradicts those before.
        The weights of equal answers to the same pair count together, so the majority wins. Of equal weights
        cannot-links come first, then the order of the pairs decides: a wrong must-link joins two groups and would take
        all cannot-links between them along, a wrong cannot-link only the must-link that closes the chain. (1,000 images
        of 10 classes, 10,000 pairs, 1 % of them wrong: 204 pairs go this way, 6,319 if must-links came first.)
        """
        if on_conflict not in ("error", "drop", "keep"):
            raise InputError(f"on_conflict={on_conflict!r} is not known", fix="use error, drop or keep")
        if (triplets := self.triplets.resolve(on_conflict, self.n_images)) is not self.triplets:
            self = replace(self, triplets=triplets)
        if on_conflict == "keep" or not len(rows := self.conflict_rows()):
            return self
        if on_conflict == "error":
            first = self.conflicts(limit=1)[0].describe(names, self.places)
            count = f"; {len(rows):,} contradictions in all" if len(rows) > 1 else ""
            raise InputError(f"{first}{count}", fix="correct the pairs, or use --set on_conflict=drop or keep")
        component = self.components()
        torn = np.zeros(self.n_images, bool)
        torn[component[self.left[rows]]] = True  # all other components have nothing to decide
        inside = component[self.left] == component[self.right]
        play = np.flatnonzero(inside & torn[component[self.left]] & ((self.link == 0) | (self.link == 1)))
        _, number = np.unique(self._answer_keys()[play], return_inverse=True)
        weight = np.bincount(number, self.weight[play])[number]
        must = self.link[play] == 1
        order = np.lexsort((must, -weight))
        keep = np.ones(len(self), bool)
        keep[play] = graph.keep_consistent(self.left[play], self.right[play], must, order)
        return self.take(keep)
