"""Writes docs/reproduction.md and docs/figures/ from results/paper/: python docs/make_reproduction.py"""

from pathlib import Path

from constraintmatch.paper.reproduction import write_reproduction

ROOT = Path(__file__).resolve().parent.parent

if __name__ == "__main__":
    print(write_reproduction(ROOT / "results" / "paper", ROOT / "docs").relative_to(ROOT))
