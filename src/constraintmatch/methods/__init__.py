"""The training methods, by name. A method is a function; its keyword arguments are its configuration."""

from collections.abc import Callable

from constraintmatch.methods.cluster_contrast import cc, mice, pica, tcc
from constraintmatch.methods.constraintmatch import (
    constrained,
    constraintmatch,
    fully_constrained,
    pseudo_label,
    supervised,
)
from constraintmatch.methods.preparation import Context, Trained, ViewChoice
from constraintmatch.methods.pretext import byol, propos, simclr
from constraintmatch.methods.propagate import propagate
from constraintmatch.methods.scan import linear_scan, neighbour_label, scan, self_label

__all__ = ["METHODS", "Context", "Trained", "ViewChoice"]

METHODS: dict[str, Callable[..., Trained]] = {
    "simclr": simclr,
    "byol": byol,
    "propos": propos,
    "cc": cc,
    "pica": pica,
    "mice": mice,
    "tcc": tcc,
    "linear_scan": linear_scan,
    "scan": scan,
    "self_label": self_label,
    "neighbour_label": neighbour_label,
    "propagate": propagate,
    "constrained": constrained,
    "pseudo_label": pseudo_label,
    "constraintmatch": constraintmatch,
    "fully_constrained": fully_constrained,
    "supervised": supervised,
}
