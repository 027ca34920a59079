"""Small grey pictures of ten kinds of clothes, drawn at random: a set for `safety.py` that nobody has tuned on.

python benchmarks/clothes.py runs/clothes
constraintmatch pretrain runs/clothes/train --clusters 10 --chain short --out runs/clothes-start
python benchmarks/safety.py runs/clothes/train runs/clothes/test --start runs/clothes-start --name clothes
"""

import argparse
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFilter

SIDE, LARGE = 28, 8  # pixels, and how many times larger the shapes are drawn
SHAPES = {  # the corners in hundredths of the side, x and y in turn; a kind has one polygon or two
    "trousers": ["30 10 70 10 75 95 57 95 50 35 43 95 25 95"],
    "shirt": ["35 15 65 15 95 40 82 50 68 40 68 90 32 90 32 40 18 50 5 40"],
    "jumper": ["35 15 65 15 85 30 95 85 82 87 70 45 70 90 30 90 30 45 18 87 5 85 15 30"],
    "dress": ["40 5 60 5 57 40 80 95 20 95 43 40"],
    "skirt": ["35 30 65 30 90 80 10 80"],
    "bag": ["12 45 88 45 92 90 8 90", "30 45 35 20 65 20 70 45 63 45 60 27 40 27 37 45"],
    "boot": ["35 10 65 10 65 60 95 72 95 90 35 90"],
    "sandal": ["5 75 95 70 95 80 5 85", "25 75 50 45 75 72 68 72 50 53 33 75"],
    "shoe": ["5 50 30 50 45 60 95 70 95 85 5 85"],
    "hat": ["30 35 70 35 74 60 97 68 97 74 3 74 3 68 26 60"],
}


def draw(kind: str, rng: np.random.Generator) -> Image.Image:
    """One picture: the shape turned, stretched and moved a little, in any grey, with stripes or without, blurred."""
    size, turn = SIDE * LARGE, rng.normal(0, 0.15)
    matrix = np.array([[np.cos(turn), -np.sin(turn)], [np.sin(turn), np.cos(turn)]]) * rng.uniform(0.65, 1.0, 2)
    shift = 0.5 + rng.normal(0, 0.04, 2)
    picture = Image.new("L", (size, size), 0)
    for corners in SHAPES[kind]:
        around = np.array(corners.split(), float).reshape(-1, 2) / 100 - 0.5
        around += rng.normal(0, 0.025, around.shape)
        points = [tuple(point) for point in ((around @ matrix.T + shift) * size).tolist()]
        ImageDraw.Draw(picture).polygon(points, fill=int(rng.uniform(90, 255)))
    pixels = np.asarray(picture.filter(ImageFilter.GaussianBlur(LARGE * rng.uniform(0.2, 0.8))), float)
    if rng.random() < 0.5:
        wave = np.sin(np.arange(size) * rng.uniform(0.02, 0.15) + rng.uniform(0, 6))
        pixels *= 0.8 + 0.2 * (wave[:, None] if rng.random() < 0.5 else wave)
    small = pixels.reshape(SIDE, LARGE, SIDE, LARGE).mean((1, 3)) + rng.normal(0, 12, (SIDE, SIDE))
    return Image.fromarray(small.clip(0, 255).astype(np.uint8))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--each", type=int, default=200, help="training pictures of a kind; half as many for the test")
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    for part, (name, n) in enumerate((("train", asked.each), ("test", asked.each // 2))):
        for number, kind in enumerate(SHAPES):
            rng = np.random.default_rng([asked.seed, part, number])
            folder = asked.out / name / kind
            folder.mkdir(parents=True, exist_ok=True)
            for at in range(n):
                draw(kind, rng).save(folder / f"{at:05}.png")


if __name__ == "__main__":
    main()
