"""The numbers the paper prints: its three tables as data, in percent."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

__all__ = ["METRICS", "SETS", "SPLITS", "TABLE_1", "TABLE_2", "TABLE_3", "PublishedRow", "published"]

METRICS = ("acc", "nmi", "ari")
SPLITS = ("test", "train+test")
SETS = ("cifar10", "cifar100-20", "stl10", "imagenet10", "imagenet-dogs")

_Scores = tuple[float, float, float]  # ACC, NMI, ARI


@dataclass(frozen=True)
class PublishedRow:
    """One printed row: a model at one number of constraints, and its scores by data set.

    `method` is our name for it, None for the baselines that the paper quotes and nobody runs here. `n_constraints` is
    None for the upper bounds, which have every label or every pair. `significant` has the sets that carry the star:
    p < 0.05 against the constrained competitor in all three scores.
    """

    split: str
    title: str
    method: str | None
    n_constraints: int | None
    scores: Mapping[str, _Scores]
    quoted: bool = False  # the paper's dagger: reported in the literature, not measured by its authors
    significant: tuple[str, ...] = ()

    def value(self, dataset: str, metric: str) -> float | None:
        """A score in percent, or None where the paper has a dash."""
        scores = self.scores.get(dataset)
        return None if scores is None else scores[METRICS.index(metric)]


def published(
    rows: tuple[PublishedRow, ...], split: str, method: str, n_constraints: int | None
) -> PublishedRow | None:
    """The printed row of one of our methods, or None."""
    wanted = (split, method, n_constraints)
    return next((row for row in rows if (row.split, row.method, row.n_constraints) == wanted), None)


def _five(*scores: _Scores | None) -> Mapping[str, _Scores]:
    """Scores by data set, in the paper's order of columns; None is its dash."""
    return MappingProxyType({name: row for name, row in zip(SETS, scores, strict=True) if row is not None})


def _row(
    split: str, title: str, method: str | None, n_constraints: int | None, *scores: _Scores | None
) -> PublishedRow:
    quoted = method is None or (split == "test" and method in ("supervised", "scan"))
    starred: tuple[str, ...] = SETS if method == "constraintmatch" else ()
    if (split, n_constraints) == ("test", 10_000):  # the text says "all data sets"; this one has no star in the table
        starred = tuple(name for name in starred if name != "imagenet10")
    return PublishedRow(split, title, method, n_constraints, _five(*scores), quoted, starred)


def _single(title: str, method: str, n_constraints: int, **scores: _Scores) -> PublishedRow:
    named = {name.replace("_", "-"): row for name, row in scores.items()}
    return PublishedRow("test", title, method, n_constraints, MappingProxyType(named))


# fmt: off
TABLE_1 = (
    _row("test", "Supervised", "supervised", None,
         (93.80, 86.20, 87.00), (80.00, 68.00, 63.20), (80.60, 65.90, 63.10), None, None),
    _row("test", "Fully constrained", "fully_constrained", None,
         (94.86, 88.39, 89.11), (77.99, 68.37, 61.94), (90.49, 80.94, 80.47), (96.64, 93.45, 92.60),
         (67.10, 73.52, 58.13)),
    _row("test", "SCAN", "scan", 0,
         (87.60, 78.70, 75.80), (45.90, 46.80, 30.10), (76.70, 68.00, 61.60), (86.20, 81.57, 75.71),
         (47.20, 55.42, 35.87)),
    _row("test", "Constrained", "constrained", 5_000,
         (90.12, 80.52, 80.02), (50.99, 46.23, 32.63), (85.90, 74.62, 72.51), (93.12, 87.43, 85.49),
         (44.08, 43.27, 28.92)),
    _row("test", "ConstraintMatch", "constraintmatch", 5_000,
         (92.23, 84.64, 84.27), (54.19, 52.74, 37.84), (88.20, 78.20, 76.68), (94.68, 90.43, 88.61),
         (49.43, 55.23, 38.12)),
    _row("test", "Constrained", "constrained", 10_000,
         (90.89, 81.73, 81.47), (52.45, 46.57, 33.79), (88.21, 77.63, 76.38), (94.90, 90.42, 89.04),
         (45.52, 44.44, 30.10)),
    _row("test", "ConstraintMatch", "constraintmatch", 10_000,
         (93.17, 85.88, 85.92), (57.15, 54.37, 40.59), (90.08, 80.57, 79.81), (95.68, 92.09, 90.70),
         (50.73, 54.92, 38.34)),
    _row("train+test", "PICA", None, 0,
         (69.60, 59.10, 51.20), (33.70, 31.00, 17.10), (71.30, 61.10, 53.10), (87.00, 80.20, 76.10),
         (35.20, 35.20, 20.10)),
    _row("train+test", "MICE", None, 0,
         (83.50, 73.70, 69.80), (44.00, 43.60, 28.00), (75.20, 63.50, 57.50), None, (43.90, 42.30, 28.60)),
    _row("train+test", "CC", None, 0,
         (79.00, 70.50, 63.70), (42.90, 43.10, 26.60), (85.00, 76.40, 72.60), (89.30, 85.90, 82.20),
         (42.90, 44.50, 27.40)),
    _row("train+test", "TCC", None, 0,
         (90.60, 79.00, 73.30), (49.10, 47.90, 31.20), (81.40, 73.20, 68.90), (89.70, 84.80, 82.50),
         (59.50, 55.40, 41.70)),
    _row("train+test", "SCAN", "scan", 0,
         (88.53, 80.09, 77.72), (50.67, 47.72, 33.07), (81.28, 70.15, 65.22), (91.63, 84.00, 82.93),
         (44.06, 45.09, 30.75)),
    _row("train+test", "Constrained", "constrained", 5_000,
         (91.14, 82.30, 82.05), (51.63, 46.58, 33.37), (80.51, 68.38, 63.68), (95.09, 88.42, 89.49),
         (43.25, 38.82, 28.93)),
    _row("train+test", "ConstraintMatch", "constraintmatch", 5_000,
         (92.67, 85.12, 84.98), (54.16, 52.68, 37.79), (82.97, 71.13, 67.80), (95.61, 89.64, 90.59),
         (47.63, 47.82, 35.95)),
    _row("train+test", "Constrained", "constrained", 10_000,
         (92.21, 83.07, 84.08), (53.13, 47.20, 34.86), (89.90, 80.12, 79.49), (96.47, 91.18, 92.36),
         (44.17, 40.07, 30.13)),
    _row("train+test", "ConstraintMatch", "constraintmatch", 10_000,
         (93.61, 86.55, 86.80), (57.18, 53.37, 40.30), (91.30, 82.42, 82.13), (96.68, 91.59, 92.80),
         (49.34, 49.16, 37.37)),
)
# fmt: on

TABLE_2 = (  # the ablation, on CIFAR-100-20
    _single("SCAN", "scan", 0, cifar100_20=(45.90, 46.80, 30.10)),
    _single("+ constrained", "constrained", 10_000, cifar100_20=(52.45, 46.57, 33.79)),
    _single("+ pseudo-labelling", "pseudo_label", 10_000, cifar100_20=(55.38, 53.49, 39.98)),
    _single("+ pseudo-constraining", "constraintmatch", 10_000, cifar100_20=(57.15, 54.37, 40.59)),
)

TABLE_3 = (  # overclustering: five outputs for each class
    _single("SCAN", "scan", 0, cifar10=(34.68, 61.56, 34.52), cifar100_20=(29.88, 47.35, 23.23)),
    _single("Constrained", "constrained", 10_000, cifar10=(82.24, 75.40, 73.80), cifar100_20=(39.41, 44.34, 27.86)),
    _single(
        "ConstraintMatch", "constraintmatch", 10_000, cifar10=(88.89, 83.04, 82.06), cifar100_20=(43.65, 52.37, 34.88)
    ),
)
