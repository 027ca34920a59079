"""Prints how long each view takes for a batch, eager and compiled, beside a plain copy of the batch.

Run: python research/views.py [--batch 600] [--side 32] [--no-compile]
"""

import argparse
import time
from collections.abc import Callable

import torch
from torch import Tensor

from constraintmatch.training import views

VIEWS = (views.weak(), views.crop(), views.strong(), views.scan_strong(), views.contrastive())


def milliseconds(work: Callable[[], object], device: torch.device, repeats: int) -> float:
    """The median time of one call after three calls of warming up."""
    for _ in range(3):
        work()
    measure = _once_on_cuda if device.type == "cuda" else _once
    return sorted(measure(work) for _ in range(repeats))[repeats // 2]


def _once(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return 1e3 * (time.perf_counter() - start)


def _once_on_cuda(work: Callable[[], object]) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    work()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def rows(images: Tensor, *, compiled: bool, repeats: int) -> list[tuple[str, float, float | None, float | None]]:
    """Name, eager ms, compiled ms and share of pixels in which the two differ, for a copy and for each view."""
    device = images.device
    table: list[tuple[str, float, float | None, float | None]] = [
        ("copy", milliseconds(images.clone, device, repeats), None, None)
    ]
    for view in VIEWS:
        uniforms = torch.rand((len(images), view.n_draws), device=device)
        eager = milliseconds(lambda view=view, draws=uniforms: view.apply(images, draws), device, repeats)
        fast = different = None
        if compiled:
            apply = torch.compile(view.apply, fullgraph=True, dynamic=False)
            fast = milliseconds(lambda apply=apply, draws=uniforms: apply(images, draws), device, repeats)
            different = float((apply(images, uniforms) != view.apply(images, uniforms)).float().mean())
        table.append((view.name, eager, fast, different))
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=600)
    parser.add_argument("--side", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--no-compile", action="store_true")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    images = torch.randint(0, 256, (options.batch, 3, options.side, options.side), dtype=torch.uint8, device=device)
    images = images.contiguous(memory_format=torch.channels_last)
    name = torch.cuda.get_device_name() if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    print(f"{name}; torch {torch.__version__}; {options.batch:,} images of {options.side} px, channels-last\n")
    print("| view | eager ms | × copy | compiled ms | × copy | pixels that differ |\n|---|--:|--:|--:|--:|--:|")
    with torch.no_grad():
        table = rows(images, compiled=not options.no_compile, repeats=options.repeats)
    copy = table[0][1]
    for view, eager, fast, different in table:
        right = f"{fast:.2f} | {fast / copy:.0f} | {different:.1e}" if fast is not None else "– | – | –"
        print(f"| {view} | {eager:.2f} | {eager / copy:.0f} | {right} |")


if __name__ == "__main__":
    main()
