"""One cell of the paper's protocol with other options: an experiment, kept apart from the tables.

    python research/trial.py cifar100-20 constraintmatch --constraints 5000 --steps 2000 --set error_rate=0.05 \\
        --data-dir data --results research/experiments

The result is a cell's JSON, with its options in its name; a finished one is not run again.
"""

import argparse
import ast
from pathlib import Path

from rich.console import Console

from constraintmatch._internal.progress import Lines
from constraintmatch.paper.grids import NOISE_OF, STEPS, Cell, Option
from constraintmatch.paper.runner import Place, run_cells


def option_of(word: str) -> tuple[str, Option]:
    """`error_rate=0.05` or `links=hard` as a name and its value."""
    name, text = word.split("=")
    try:
        return name, ast.literal_eval(text)
    except ValueError:  # a word
        return name, text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", help="a data set of the paper")
    parser.add_argument("method", choices=("constraintmatch", "constrained", "pseudo_label"))
    parser.add_argument("--constraints", type=int, default=10_000)
    parser.add_argument("--fold", type=int, default=0)
    parser.add_argument("--noise", type=float, default=0.0, help="share of the constraints that is wrong")
    parser.add_argument("--noise-of", choices=NOISE_OF, default="all", help="of all, or of both kinds alike many")
    parser.add_argument("--clusters", type=int, default=0, help="outputs; as many as the set has classes")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--set", nargs="*", default=[], help="options of the method or its training")
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--starts", type=Path, default=Path("weights"))
    parser.add_argument("--results", type=Path, default=Path("research/experiments"))
    parser.add_argument("--out", type=Path, default=Path("runs/trials"))
    asked = parser.parse_args()
    options = tuple(sorted(map(option_of, asked.set)))
    sizes = {"n_clusters": asked.clusters, "noise": asked.noise, "noise_of": asked.noise_of, "steps": asked.steps}
    cell = Cell(asked.name, asked.method, asked.constraints, asked.fold, options=options, **sizes)
    reporter = Lines(Console(width=200), every=20)
    run_cells([cell], Place(asked.data_dir, asked.starts, asked.results, asked.out, reporter=reporter))


if __name__ == "__main__":
    main()
