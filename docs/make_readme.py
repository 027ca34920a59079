"""Fill the generated parts of README.md: tables from `results/`, the tree from the modules' first lines.

python docs/make_readme.py
"""

import ast
import json
import statistics
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "constraintmatch"


def demo_table() -> str:
    found = json.loads((ROOT / "results" / "demo-digits.json").read_text(encoding="utf-8"))
    lines = ["| | ACC | NMI | ARI |", "|---|--:|--:|--:|"]
    titles = {"start": "self-supervised start", "constrained": "constrained", "constraintmatch": "**ConstraintMatch**"}
    for name, title in titles.items():
        cells = [_mean([100 * row[metric] for row in found[name]]) for metric in ("acc", "nmi", "ari")]
        lines.append(f"| {title} | {' | '.join(cells)} |")
    both = list(zip(found["constraintmatch"], found["constrained"], strict=True))
    gains = [_mean([100 * (ours[key] - theirs[key]) for ours, theirs in both]) for key in ("acc", "nmi", "ari")]
    return "\n".join([*lines, f"| gain on the same pairs | {' | '.join(gains)} |"])


def start_table() -> str:
    lines = ["| stage | on the test images | seconds |", "|---|---|--:|"]
    for stage, title in {"simclr": "SimCLR, 500 epochs", "scan": "SCAN, 50 epochs"}.items():
        result = json.loads((ROOT / "results" / f"start-cifar10-{stage}.json").read_text(encoding="utf-8"))
        names = {"knn_acc": "kNN accuracy", "acc": "ACC", "nmi": "NMI", "ari": "ARI"}
        told = [f"{title} {100 * result['scores'][key]:.1f}" for key, title in names.items() if key in result["scores"]]
        lines.append(f"| {title} | {', '.join(told)} | {result['seconds']:,.0f} |")
    return "\n".join(lines)


def tree() -> str:
    lines = ["```", "src/constraintmatch/"]
    for path in sorted(PACKAGE.iterdir(), key=lambda path: (path.is_dir(), path.name)):
        if path.suffix == ".py" and path.name != "__init__.py":
            lines.append(f"{'  ' + path.name:26}{_first_line(path)}")
        elif (path / "__init__.py").is_file():
            lines.append(f"{'  ' + path.name + '/':26}{_first_line(path / '__init__.py')}")
    for path in sorted((PACKAGE / "methods").glob("[a-z]*.py")):
        lines.insert(_after(lines, "  methods/"), f"{'    ' + path.name:26}{_first_line(path)}")
    others = {
        "tests/": "mirrors the package",
        "benchmarks/": "tables of ratios and long runs",
        "results/": "one JSON per finished run: the only source of published numbers",
        "weights/": "models worth keeping, fp16",
        "docs/": "architecture, commands, decisions, lab notes",
    }
    return "\n".join([*lines, *(f"{name:26}{what}" for name, what in others.items()), "```"])


def _first_line(path: Path) -> str:
    return (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").splitlines()[0]


def _after(lines: list[str], start: str) -> int:
    """Where the next line of a folder belongs: behind the folder's line and those that are already there."""
    at = next(number for number, line in enumerate(lines) if line.startswith(start)) + 1
    while at < len(lines) and lines[at].startswith("    "):
        at += 1
    return at


def readme(text: str) -> str:
    """The README with its generated parts made anew."""
    for name, part in {"demo table": demo_table(), "start table": start_table(), "tree": tree()}.items():
        before, rest = text.split(f"<!-- {name} -->\n")
        after = rest.split(f"<!-- end of {name} -->")[1]
        text = f"{before}<!-- {name} -->\n{part}\n<!-- end of {name} -->{after}"
    return text


def _mean(values: list[float]) -> str:
    mean = f"{statistics.fmean(values):.1f}"
    return f"{mean} ± {statistics.stdev(values):.1f}" if len(values) > 1 else mean


if __name__ == "__main__":
    path = ROOT / "README.md"
    path.write_text(readme(path.read_text(encoding="utf-8")), encoding="utf-8")
