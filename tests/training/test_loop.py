import importlib
import json
import math
import os
import random
import signal
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from forks import Fork
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from constraintmatch._internal.errors import InputError
from constraintmatch._internal.progress import Reporter
from constraintmatch.training.loop import (
    SCHEDULES,
    Interrupted,
    NonFinite,
    Surroundings,
    TrainSettings,
    choose_device,
    fit,
)
from constraintmatch.training.run_folder import open_run, read_log
from constraintmatch.training.step import ForwardKernels

CPU = TrainSettings(steps=12, lr=0.1, device="cpu", log_every=4, checkpoint_every=5)


@dataclass(frozen=True)
class Numbers:
    x: Tensor


def numbers(step: int) -> Numbers:
    return Numbers(torch.rand((6, 3), generator=torch.Generator().manual_seed(step)))


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 1))


def squares(forward: Callable[..., Tensor], batch: Numbers) -> dict[str, Tensor]:
    answer = forward(batch.x).squeeze(1)
    return {"fit": ((answer - batch.x.sum(1)) ** 2).mean(), "size": 0.01 * (answer**2).mean()}


def reference(settings: TrainSettings) -> nn.Module:
    """The same training written out plainly."""
    module = network()
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0, momentum=0.9, weight_decay=settings.weight_decay)
    for step in range(settings.steps):
        for group in optimizer.param_groups:
            group["lr"] = settings.lr * math.cos(7 * math.pi * step / (16 * settings.steps))
        optimizer.zero_grad()
        sum(squares(module, numbers(step)).values()).backward()
        optimizer.step()
    return module


def weights(module: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


def assert_equal(left: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    assert left.keys() == right.keys()
    for name, value in left.items():
        assert torch.equal(value, right[name]), name


def test_fit_is_plain_sgd_with_the_papers_schedule() -> None:
    module = network()
    fit(module, numbers, squares, CPU)
    assert_equal(weights(module), weights(reference(CPU)))


PACKAGE = ("constraintmatch", "training")


def test_one_call_stands_between_fit_and_the_optimiser(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, step = [], torch.optim.SGD.step

    def spy(self: torch.optim.SGD, closure: None = None) -> None:
        stack = traceback.extract_stack()
        calls.append([frame.name for frame in stack if Path(frame.filename).parts[-3:-1] == PACKAGE])
        step(self, closure)

    monkeypatch.setattr(torch.optim.SGD, "step", spy)
    fit(network(), numbers, squares, replace(CPU, steps=2, ema=0.9, clip_norm=1.0))
    assert calls == [["fit", "__call__"]] * 2


def test_schedules_start_at_one_and_end_where_they_say() -> None:
    assert [schedule(0.0) for schedule in SCHEDULES.values()] == [1.0, 1.0, 0.0, 1.0]
    assert SCHEDULES["cosine-warm"](0.025) == pytest.approx(0.5)
    assert SCHEDULES["cosine-warm"](0.05) == pytest.approx(1.0)
    assert SCHEDULES["cosine-warm"](1.0) == pytest.approx(1e-3)
    assert SCHEDULES["cosine-7/16"](1.0) == pytest.approx(math.cos(7 * math.pi / 16))
    assert SCHEDULES["cosine"](1.0) == pytest.approx(1e-3)
    assert SCHEDULES["cosine"](0.5) == pytest.approx(0.5005)


def test_the_log_has_means_of_the_terms_between_lines() -> None:
    module, seen = network(), []

    def spy(forward: Callable[..., Tensor], batch: Numbers) -> dict[str, Tensor]:
        terms = squares(forward, batch)
        seen.append({name: float(value.detach()) for name, value in terms.items()})
        return terms

    log = fit(
        module,
        numbers,
        spy,
        CPU,
        Surroundings(measure=lambda batch: {"rows": len(batch.x)}, evaluate=lambda: {"acc": 0.5}),
    )
    training = [entry for entry in log if entry["kind"] == "training"]
    assert [entry["step"] for entry in training] == [4, 8, 12]
    for index, entry in enumerate(training):
        chunk = seen[4 * index : 4 * index + 4]
        assert entry["loss_fit"] == pytest.approx(sum(terms["fit"] for terms in chunk) / 4, rel=1e-6)
        assert entry["loss"] == pytest.approx(entry["loss_fit"] + entry["loss_size"])
        assert entry["rows"] == 6
    assert [(entry["step"], entry["acc"]) for entry in log if entry["kind"] == "evaluation"] == [(12, 0.5)]


def test_an_average_of_the_weights_is_kept_instead_of_the_last() -> None:
    module, history = network(), []
    average = {name: value.double() for name, value in weights(module).items()}

    def spy(forward: Callable[..., Tensor], batch: Numbers) -> dict[str, Tensor]:
        history.append(weights(module))
        return squares(forward, batch)

    last: dict[str, Tensor] = {}
    plain = network()
    fit(plain, numbers, squares, CPU)
    fit(module, numbers, spy, replace(CPU, ema=0.9), Surroundings(evaluate=lambda: last.update(weights(module)) or {}))
    for state in [*history[1:], weights(plain)]:
        for name, value in state.items():
            average[name] = average[name] * 0.9 + value * 0.1 if value.is_floating_point() else value
    for name, value in weights(module).items():
        torch.testing.assert_close(value.double(), average[name].double(), atol=1e-6, rtol=1e-5)
    assert_equal(last, weights(module))  # evaluation sees the average too


def test_gradients_are_clipped_only_when_asked() -> None:
    def steep(forward: Callable[..., Tensor], batch: Numbers) -> dict[str, Tensor]:
        return {"steep": 1e4 * forward(batch.x).mean()}

    settings = replace(CPU, steps=1, lr=1.0, weight_decay=0.0)
    moved = []
    for clip in (None, 0.5):
        module = network()
        before = weights(module)
        fit(module, numbers, steep, replace(settings, clip_norm=clip))
        parts = [value - before[name] for name, value in module.named_parameters()]
        moved.append(float(torch.cat([part.detach().flatten() for part in parts]).norm()))
    assert moved[0] > 100
    assert moved[1] == pytest.approx(0.5, rel=1e-3)


def test_adam_trains_too() -> None:
    log = fit(network(), numbers, squares, replace(CPU, optimizer="adam", steps=200, lr=0.02, log_every=50))
    losses = [entry["loss"] for entry in log]
    assert losses[-1] < 0.3 * losses[0]


def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path: Path) -> None:
    settings = replace(CPU, ema=0.9, optimizer="adam")
    whole = network()
    with open_run(tmp_path / "whole", {}) as run:
        fit(whole, numbers, squares, settings, Surroundings(run=run))

    def failing(step: int) -> Numbers:
        if step == 8:
            raise OSError("the machine went away")
        return numbers(step)

    with pytest.raises(OSError, match="went away"), open_run(tmp_path / "parts", {}) as run:
        fit(network(), failing, squares, settings, Surroundings(run=run))
    assert json.loads((tmp_path / "parts" / "run.json").read_text())["status"] == "failed"
    module = network()
    with open_run(tmp_path / "parts", {}, resume=True) as run:
        fit(module, numbers, squares, settings, Surroundings(run=run))
    assert_equal(weights(module), weights(whole))
    plain = [{k: v for k, v in entry.items() if k != "seconds"} for entry in read_log(tmp_path / "whole")]
    assert plain == [{k: v for k, v in entry.items() if k != "seconds"} for entry in read_log(tmp_path / "parts")]
    assert_equal(
        load_file(tmp_path / "parts/checkpoint.safetensors"), load_file(tmp_path / "whole/checkpoint.safetensors")
    )


LONG = replace(CPU, steps=60, checkpoint_every=7)


def train_slowly(out: Path) -> None:
    """What the process that is killed does: it is told to stop, saves, and is killed in its second run."""
    torch.set_num_threads(1)

    def slow(step: int) -> Numbers:
        if step == 0:
            print("ready")
        time.sleep(0.01)
        return numbers(step)

    with suppress(Interrupted), open_run(out / "told", {}) as run:
        fit(network(), slow, squares, LONG, Surroundings(run=run))
    with open_run(out / "killed", {}) as run:
        fit(network(), slow, squares, LONG, Surroundings(run=run))


def test_a_killed_run_goes_on_bit_for_bit(tmp_path: Path) -> None:
    with Fork(train_slowly, tmp_path) as process:
        for kind in (signal.SIGTERM, signal.SIGKILL):
            assert process.out.readline() == "ready\n"
            time.sleep(random.uniform(0.05, 0.5))
            process.send(kind)
        assert process.wait() == -signal.SIGKILL
    status = json.loads((tmp_path / "told" / "run.json").read_text())  # it was told, so it saved where it stood
    assert status["status"] == "interrupted"
    assert (tmp_path / "told" / "checkpoint.safetensors").is_file()
    whole = network()
    fit(whole, numbers, squares, LONG)
    for name in ("told", "killed"):
        resumed = network()
        with open_run(tmp_path / name, {}, resume=True) as run:
            fit(resumed, numbers, squares, LONG, Surroundings(run=run))
        assert_equal(weights(resumed), weights(whole))


def test_a_signal_saves_and_stops(tmp_path: Path) -> None:
    def batches(step: int) -> Numbers:
        if step == 2:
            os.kill(os.getpid(), signal.SIGINT)
        return numbers(step)

    before = signal.getsignal(signal.SIGINT)  # a shell's background jobs ignore it
    with pytest.raises(Interrupted, match="step 3 of 12"), open_run(tmp_path / "run", {}) as run:
        fit(network(), batches, squares, CPU, Surroundings(run=run))
    assert json.loads((tmp_path / "run" / "run.json").read_text())["status"] == "interrupted"
    assert signal.getsignal(signal.SIGINT) is before
    module, whole = network(), network()
    with open_run(tmp_path / "run", {}, resume=True) as run:
        fit(module, numbers, squares, CPU, Surroundings(run=run))
    fit(whole, numbers, squares, CPU)
    assert_equal(weights(module), weights(whole))


@pytest.mark.parametrize("at", [4, 12], ids=["in between", "the last"])
@pytest.mark.parametrize("kind", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_an_evaluation_at_once_and_the_run_goes_on_bit_for_bit(
    tmp_path: Path, at: int, kind: signal.Signals
) -> None:
    settings, done = replace(CPU, evaluate_every=4), []

    def judge(module: torch.nn.Module, *, signalled: int) -> Callable[[], dict[str, float]]:
        def evaluate() -> dict[str, float]:
            done.append(len(done))
            if 4 * (len(done) - 1) == signalled:  # the first judges the beginning
                os.kill(os.getpid(), kind)
                for _ in range(100):
                    time.sleep(0.05)
                raise AssertionError("the evaluation went on")
            return {"score": float(next(module.parameters()).detach().sum())}

        return evaluate

    first = network()
    stopped = judge(first, signalled=at)
    with pytest.raises(Interrupted, match=f"step {at} of 12"), open_run(tmp_path / "run", {}) as run:
        fit(first, numbers, squares, settings, Surroundings(run=run, evaluate=stopped, keep_best="score"))
    resumed, whole = network(), network()
    with open_run(tmp_path / "run", {}, resume=True) as run:
        again = judge(resumed, signalled=-1)
        log = fit(resumed, numbers, squares, settings, Surroundings(run=run, evaluate=again, keep_best="score"))
    straight = fit(
        whole, numbers, squares, settings, Surroundings(evaluate=judge(whole, signalled=-1), keep_best="score")
    )
    assert_equal(weights(resumed), weights(whole))
    said = [[(entry["step"], entry["kind"], entry.get("score")) for entry in one] for one in (log, straight)]
    assert said[0] == said[1]


def test_a_signal_in_the_last_step_or_in_the_first_stops_too(tmp_path: Path) -> None:
    for at, kept in ((11, 12), (0, 0)):

        def batches(step: int, at: int = at) -> Numbers:
            if step == at:
                os.kill(os.getpid(), signal.SIGTERM)
            return numbers(step)

        place = tmp_path / str(at)
        with pytest.raises(Interrupted, match=f"after step {kept} of 12"), open_run(place, {}) as run:
            fit(network(), batches, squares, CPU, Surroundings(run=run))
        resumed, whole = network(), network()
        with open_run(place, {}, resume=True) as run:
            fit(resumed, numbers, squares, CPU, Surroundings(run=run))
        fit(whole, numbers, squares, CPU)
        assert_equal(weights(resumed), weights(whole))


def test_the_silence_of_the_compiler_is_announced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)  # the compiler itself takes a minute
    said: list[str] = []
    reporter = Reporter()
    monkeypatch.setattr(reporter, "say", said.append)
    fit(network(), numbers, squares, replace(CPU, compile=True), Surroundings(reporter=reporter))
    assert said == ["the first step is compiled, which is silent and takes a minute or two; later ones are fast"]


@pytest.mark.parametrize(("steps", "compiled"), [(500, False), (4_999, False), (5_000, True), (20_000, True)])
def test_a_short_training_on_a_gpu_is_not_compiled(steps: int, compiled: bool) -> None:
    found = TrainSettings(steps=steps).resolve(torch.device("cuda"))
    assert (found.compile, found.cuda_graph) == (compiled, compiled)
    asked = TrainSettings(steps=steps, compile=not compiled).resolve(torch.device("cuda"))
    assert (asked.compile, asked.cuda_graph) == (not compiled, not compiled)


def test_a_training_stops_when_it_is_asked_to_and_goes_on_from_there(tmp_path: Path) -> None:
    asked: list[int] = []

    def stop() -> bool:
        asked.append(1)
        return len(asked) == 5

    with pytest.raises(Interrupted, match="stopped after step 5 of 12"), open_run(tmp_path / "run", {}) as run:
        fit(network(), numbers, squares, CPU, Surroundings(run=run, stop=stop))
    seen: list[int] = []
    module, whole = network(), network()
    with open_run(tmp_path / "run", {}, resume=True) as run:
        fit(module, lambda step: (seen.append(step), numbers(step))[1], squares, CPU, Surroundings(run=run))
    fit(whole, numbers, squares, CPU, Surroundings(stop=lambda: False))
    assert seen == list(range(5, 12))
    assert_equal(weights(module), weights(whole))


def test_a_non_finite_loss_names_step_and_term_and_keeps_the_last_good_checkpoint(tmp_path: Path) -> None:
    def poisoned(forward: Callable[..., Tensor], batch: Numbers) -> dict[str, Tensor]:
        terms = squares(forward, batch)
        bad = torch.equal(batch.x, numbers(6).x)
        return {**terms, "size": terms["size"] * (math.nan if bad else 1.0)}

    with pytest.raises(NonFinite, match=r"step 7: the loss term 'size'.*step 5 is kept"), open_run(tmp_path, {}) as run:
        fit(network(), numbers, poisoned, CPU, Surroundings(run=run))
    kept = load_file(tmp_path / "checkpoint.safetensors")
    assert int(kept["count"]) == 5
    assert all(bool(torch.isfinite(value).all()) for value in kept.values() if value.is_floating_point())


def test_weights_that_explode_are_never_saved(tmp_path: Path) -> None:
    def exploding(forward: Callable[..., Tensor], batch: Numbers) -> dict[str, Tensor]:
        scale = 1e38 if torch.equal(batch.x, numbers(4).x) else 1.0
        return {"fit": scale * forward(batch.x).mean()}

    settings = replace(CPU, lr=1e5, checkpoint_every=5, log_every=100)
    with pytest.raises(NonFinite, match="step 5"), open_run(tmp_path, {}) as run:
        fit(network(), numbers, exploding, settings, Surroundings(run=run))
    assert not (tmp_path / "checkpoint.safetensors").exists()


def test_weights_that_explode_in_the_last_step_stop_a_training_without_a_folder_too() -> None:
    def exploding(forward: Callable[..., Tensor], batch: Numbers) -> dict[str, Tensor]:
        return {"fit": 1e36 * forward(batch.x).mean()}  # a number still

    with pytest.raises(NonFinite, match=r"step 1.*weights"):
        fit(network(), numbers, exploding, replace(CPU, steps=1, lr=1e5))


def test_foreign_checkpoints_are_refused_and_left_alone(tmp_path: Path) -> None:
    for content in (b"garbage", None):
        folder = tmp_path / str(content is None)
        with open_run(folder, {}) as run:
            if content is None:
                fit(nn.Linear(3, 1), numbers, lambda f, b: {"x": f(b.x).mean()}, CPU, Surroundings(run=run))
                run.record["status"] = "running"
        record = json.loads((folder / "run.json").read_text())
        (folder / "run.json").write_text(json.dumps({**record, "status": "interrupted"}))
        file = folder / "checkpoint.safetensors"
        if content is not None:
            file.write_bytes(content)
        before = file.read_bytes()
        with pytest.raises(InputError, match="not a checkpoint of this run"), open_run(folder, {}, resume=True) as run:
            fit(network(), numbers, squares, CPU, Surroundings(run=run))
        assert file.read_bytes() == before


def judged(
    module: nn.Module, scores: list[float], seen: list[dict[str, Tensor]], **more: float
) -> Callable[[], dict[str, float]]:
    """An evaluation that gives one score after the other and notes the weights of each."""

    def evaluate() -> dict[str, float]:
        seen.append(weights(module))
        return {"quality": scores[len(seen) - 1], **more}

    return evaluate


def test_the_weights_of_the_best_evaluation_are_kept() -> None:
    settings, said = replace(CPU, evaluate_every=3), []
    for scores, best in (
        ([0.0, 0.1, 0.9, 0.3, 0.2], 2),
        ([0.0, 0.1, 0.2, 0.3, 0.4], 4),
        ([0.5, 0.5, 0.5, 0.5, 0.5], 4),
        ([0.9, 0.1, 0.1, 0.1, 0.1], 0),  # a stage that only does harm
    ):
        module, seen = network(), []
        log = fit(
            module, numbers, squares, settings, Surroundings(evaluate=judged(module, scores, seen), keep_best="quality")
        )
        assert_equal(weights(module), seen[best])
        said.append([entry["kept_step"] for entry in log if entry["kind"] == "kept"])
    assert said == [[6], [], [], [0]]


def test_with_a_tolerance_the_latest_weights_near_the_best_are_kept() -> None:
    settings = replace(CPU, evaluate_every=3)
    for scores, kept in (
        ([0.1, 0.5, 0.9, 0.8, 0.75], 4),  # all within a fifth of 0.9
        ([0.1, 0.5, 0.9, 0.8, 0.1], 3),  # a collapse at the end
        ([0.1, 0.9, 0.8, 0.71, 0.63], 2),  # measured from the highest of all, not from the one before
    ):
        module, seen = network(), []
        evaluate = judged(module, scores, seen)
        fit(module, numbers, squares, settings, Surroundings(evaluate=evaluate, keep_best="quality", tolerance=0.2))
        assert_equal(weights(module), seen[kept])


def test_a_resumed_run_remembers_the_best(tmp_path: Path) -> None:
    settings, scores = replace(CPU, evaluate_every=3, checkpoint_every=4), [0.1, 0.9, 0.1, 0.2, 0.3]
    first = network()

    def failing(step: int) -> Numbers:
        if step == 7:
            raise OSError("gone")
        return numbers(step)

    seen: list[dict[str, Tensor]] = []
    with pytest.raises(OSError, match="gone"), open_run(tmp_path, {}) as run:
        fit(
            first,
            failing,
            squares,
            settings,
            Surroundings(run=run, evaluate=judged(first, scores, seen), keep_best="quality"),
        )
    module = network()
    again = judged(module, [0.1, 0.2, 0.3], [])
    with open_run(tmp_path, {}, resume=True) as run:
        fit(module, numbers, squares, settings, Surroundings(run=run, evaluate=again, keep_best="quality"))
    assert_equal(weights(module), seen[1])
    log = read_log(tmp_path)
    times = [entry["seconds"] for entry in log]
    assert times == sorted(times)
    record = json.loads((tmp_path / "run.json").read_text())
    (tmp_path / "run.json").write_text(json.dumps({**record, "status": "running"}))  # killed before it was noted
    late = network()
    with open_run(tmp_path, {}, resume=True) as run:
        fit(late, numbers, squares, settings, Surroundings(run=run, evaluate=again, keep_best="quality"))
    assert_equal(weights(late), seen[1])
    assert read_log(tmp_path) == log


Fall = tuple[float, bool]  # a quality, and whether it has fallen
FALLS: list[Fall] = [(0.0, False), (0.5, False), (0.1, True), (0.6, False), (0.2, True), (0.9, False), (0.9, False)]
FALLING = replace(CPU, steps=18, evaluate_every=3, log_every=1, checkpoint_every=4, ema=0.8)


def falling(module: nn.Module, told: list[Fall], seen: list[dict[str, Tensor]]) -> Callable[[], dict[str, object]]:
    """An evaluation that says when the training has fallen."""

    def evaluate() -> dict[str, object]:
        seen.append(weights(module))
        quality, fallen = told[len(seen) - 1]
        return {"quality": quality, "fallen": fallen}

    return evaluate


def rates(log: list[dict[str, object]]) -> dict[object, object]:
    return {entry["step"]: entry["lr"] for entry in log if entry["kind"] == "training"}


def test_a_fallen_training_goes_back_to_the_kept_weights_and_goes_on_more_slowly() -> None:
    told, settings = [*FALLS[:4], (0.7, False)], replace(FALLING, steps=12, schedule="constant", ema=None)
    module, seen, begun = network(), [], []

    def spy(forward: Callable[..., Tensor], batch: Numbers) -> dict[str, Tensor]:
        begun.append(weights(module))
        return squares(forward, batch)

    log = fit(module, numbers, spy, settings, Surroundings(evaluate=falling(module, told, seen), keep_best="quality"))
    assert_equal(begun[6], seen[1])  # step 7 begins where step 3 ended
    assert [(entry["step"], entry["back_to"]) for entry in log if entry["kind"] == "back"] == [(6, 3)]
    assert rates(log) == pytest.approx({step: 0.1 if step < 7 else 0.03 for step in range(1, 13)})
    assert_equal(weights(module), seen[4])
    fresh = network()
    fresh.load_state_dict(seen[1])  # from there on it is a training of its own: the momentum is forgotten
    calm = replace(settings, steps=3, lr=0.03)
    fit(fresh, lambda step: numbers(step + 6), squares, calm)
    assert_equal(weights(fresh), seen[3])


def test_a_training_that_falls_twice_ends_with_the_kept_weights() -> None:
    for settings in (FALLING, replace(FALLING, ema=None, optimizer="adam", lr=0.01)):
        module, seen = network(), []
        log = fit(
            module, numbers, squares, settings, Surroundings(evaluate=falling(module, FALLS, seen), keep_best="quality")
        )
        assert [(entry["step"], entry["back_to"]) for entry in log if entry["kind"] == "back"] == [(6, 3), (12, 9)]
        assert max(rates(log)) == 12
        assert len(seen) == 5
        assert_equal(weights(module), seen[3])
        assert log[-1]["kind"] == "kept"
        assert log[-1]["kept_step"] == 9


def test_a_fall_at_the_end_needs_no_further_step() -> None:
    told, settings = [(0.5, False), (0.1, True)], replace(FALLING, evaluate_every=None)
    module, seen = network(), []
    log = fit(
        module, numbers, squares, settings, Surroundings(evaluate=falling(module, told, seen), keep_best="quality")
    )
    assert "back" not in {entry["kind"] for entry in log}
    assert_equal(weights(module), seen[0])


@pytest.mark.parametrize(
    "at", [7, 10]
)  # after the first fall, with a checkpoint from before it and with one that knows of it
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_a_resumed_run_remembers_that_it_fell(tmp_path: Path, at: int, optimizer: str) -> None:
    settings, whole, seen = replace(FALLING, optimizer=optimizer, lr=0.02), network(), []
    with open_run(tmp_path / "whole", {}) as run:
        fit(
            whole,
            numbers,
            squares,
            settings,
            Surroundings(run=run, evaluate=falling(whole, FALLS, seen), keep_best="quality"),
        )

    def failing(step: int) -> Numbers:
        if step == at:
            raise OSError("gone")
        return numbers(step)

    first, resumed, again = network(), network(), []
    with pytest.raises(OSError, match="gone"), open_run(tmp_path / "parts", {}) as run:
        fit(
            first,
            failing,
            squares,
            settings,
            Surroundings(run=run, evaluate=falling(first, FALLS, []), keep_best="quality"),
        )
    left = at // 4 * 4  # the step of the last checkpoint
    told = falling(resumed, FALLS[1 + left // 3 :], again)
    with open_run(tmp_path / "parts", {}, resume=True) as run:
        fit(resumed, numbers, squares, settings, Surroundings(run=run, evaluate=told, keep_best="quality"))
    assert_equal(weights(resumed), weights(whole))
    plain, other = (
        [{k: v for k, v in entry.items() if k != "seconds"} for entry in read_log(tmp_path / name)]
        for name in ("whole", "parts")
    )
    assert plain == other


def test_a_run_that_fell_twice_makes_no_step_when_it_is_resumed(tmp_path: Path) -> None:
    module, seen = network(), []
    with open_run(tmp_path, {}) as run:
        fit(
            module,
            numbers,
            squares,
            FALLING,
            Surroundings(run=run, evaluate=falling(module, FALLS, seen), keep_best="quality"),
        )
    with safe_open(tmp_path / "checkpoint.safetensors", framework="pt") as file:
        assert (file.metadata()["step"], file.metadata()["falls"]) == ("12", "2")
    record = json.loads((tmp_path / "run.json").read_text())
    (tmp_path / "run.json").write_text(json.dumps({**record, "status": "running"}))  # killed before it was noted

    def nothing(step: int) -> Numbers:
        raise AssertionError(f"step {step}")

    late = network()
    with open_run(tmp_path, {}, resume=True) as run:
        fit(late, nothing, squares, FALLING, Surroundings(run=run, evaluate=falling(late, [], []), keep_best="quality"))
    assert_equal(weights(late), weights(module))


def test_the_latest_weights_within_the_slack_of_an_evaluation_are_kept() -> None:
    settings, scores = replace(CPU, evaluate_every=3), [0.0, 0.9, 0.8, 0.6, 0.1]
    for slack, kept in ((0.0, 1), (0.15, 2), (0.35, 3)):
        module, seen = network(), []
        evaluate = judged(module, scores, seen, quality_slack=slack)
        fit(module, numbers, squares, settings, Surroundings(evaluate=evaluate, keep_best="quality"))
        assert_equal(weights(module), seen[kept])


def test_a_warning_is_said_when_it_comes_up() -> None:
    said: list[str] = []

    class Ears(Reporter):
        def say(self, text: str) -> None:
            said.append(text)

    told = iter(
        [
            ["2 of 9 clusters are empty"],
            ["3 of 9 clusters are empty", "one holds 80 %"],
            [],
            ["1 of 9 clusters are empty"],
        ]
    )
    evaluate = lambda: {"warnings": next(told)}  # noqa: E731
    fit(network(), numbers, squares, replace(CPU, evaluate_every=3), Surroundings(evaluate=evaluate, reporter=Ears()))
    assert said == ["step 3: 2 of 9 clusters are empty", "step 6: one holds 80 %", "step 12: 1 of 9 clusters are empty"]


def test_prefetched_batches_are_the_same() -> None:
    plain, ahead, threads, steps = network(), network(), set(), []

    def spy(step: int) -> Numbers:
        threads.add(threading.current_thread().name)
        steps.append(step)
        return numbers(step)

    fit(plain, numbers, squares, CPU)
    fit(ahead, spy, squares, CPU, Surroundings(prefetch=True))
    assert_equal(weights(plain), weights(ahead))
    assert threads
    assert all(name.startswith("batches") for name in threads)
    assert steps == list(range(CPU.steps))  # none that nobody takes


def test_tensorboard_files_are_written_when_asked(tmp_path: Path) -> None:
    with open_run(tmp_path, {}) as run:
        fit(network(), numbers, squares, replace(CPU, tensorboard=True), Surroundings(run=run))
    assert list((tmp_path / "tensorboard").glob("events.*"))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"steps": 0}, "steps is 0"),
        ({"lr": float("nan")}, "lr is nan"),
        ({"optimizer": "lion"}, "unknown optimizer 'lion'"),
        ({"schedule": "step"}, "unknown schedule"),
        ({"ema": 1.0}, "ema is 1.0"),
        ({"clip_norm": -1.0}, "clip_norm is -1.0"),
        ({"momentum": 1.0}, "momentum is 1.0"),
        ({"weight_decay": -0.1}, "weight_decay is -0.1"),
        ({"evaluate_every": 0}, "evaluate_every is 0"),
        ({"steps": 2.5}, "steps is 2.5; it must be a whole number"),
        ({"seed": -1}, "seed -1 is not a whole number from 0"),
        ({"seed": 2**64}, "seed 18446744073709551616 is not"),
    ],
)
def test_impossible_settings_are_refused(change: dict[str, object], said: str) -> None:
    with pytest.raises(InputError, match=said):
        replace(CPU, **change)


def test_devices_are_checked() -> None:
    assert choose_device("cpu") == torch.device("cpu")
    with pytest.raises(InputError, match="unknown device 'gpu'"):
        choose_device("gpu")
    if not torch.cuda.is_available():
        with pytest.raises(InputError, match="not on this machine"):
            choose_device("cuda")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_batches_made_beside_a_captured_step_are_those_of_the_plain_loop() -> None:
    """A batch takes long to make and leaves its memory to the next: a step that did not wait would see others."""

    def slow(step: int) -> Numbers:
        x = numbers(step).x.cuda()
        noise = torch.full((2048, 2048), float(step), device="cuda")
        for _ in range(20):
            noise = noise @ torch.zeros_like(noise)
        return Numbers(x + noise[:6, :3])

    same = replace(CPU, device="cuda", steps=60, bf16=False, compile=False, log_every=7)
    plain, beside = network(), network()
    expected = fit(plain, slow, squares, replace(same, cuda_graph=False))
    found = fit(beside, slow, squares, replace(same, cuda_graph=True))
    for left, right in zip(expected, found, strict=True):
        assert right["loss"] == pytest.approx(left["loss"], rel=1e-4)
    for name, value in weights(plain).items():
        torch.testing.assert_close(weights(beside)[name], value, rtol=1e-3, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_a_captured_run_that_is_resumed_goes_on_with_its_rate(tmp_path: Path, optimizer: str) -> None:
    def on_device(step: int) -> Numbers:
        return Numbers(numbers(step).x.cuda())

    def failing(step: int) -> Numbers:
        if step == 25:  # made while step 24 runs, after the checkpoint of step 20
            raise OSError("gone")
        return on_device(step)

    settings = replace(CPU, device="cuda", steps=40, bf16=False, compile=False, cuda_graph=True, optimizer=optimizer)
    settings, whole, resumed = replace(settings, lr=0.02, ema=0.9, clip_norm=1.0), network(), network()
    expected = fit(whole, on_device, squares, settings)
    with pytest.raises(OSError, match="gone"), open_run(tmp_path, {}) as run:
        fit(network(), failing, squares, settings, Surroundings(run=run))
    with open_run(tmp_path, {}, resume=True) as run:
        found = fit(resumed, on_device, squares, settings, Surroundings(run=run))
    assert [entry["loss"] for entry in found] == pytest.approx([entry["loss"] for entry in expected], rel=1e-3)
    for name, value in weights(whole).items():
        torch.testing.assert_close(weights(resumed)[name], value, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize(
    "how",
    [
        {"kernel_size": 3, "padding": 1},
        {"kernel_size": 3, "padding": 1, "stride": 2},
        {"kernel_size": 3},
        {"kernel_size": 1, "stride": 2},
        {"kernel_size": (3, 2), "padding": (0, 1), "stride": (2, 3)},
        {"kernel_size": 3, "padding": 3},  # more than the kernel reaches
        {"kernel_size": 3, "padding": 2, "dilation": 2},
        {"kernel_size": 3, "padding": 1, "groups": 2},
    ],
)
def test_gradients_by_forward_convolutions_are_those_of_torch(layout: torch.memory_format, how: dict[str, Any]) -> None:
    module = torch.nn.Conv2d(16, 6, **how).double().to(memory_format=layout)  # type: ignore[call-overload]
    x = torch.rand(5, 16, 9, 8, dtype=torch.float64).to(memory_format=layout).requires_grad_()
    found = []
    around: Any
    for around in (nullcontext(), ForwardKernels()):
        x.grad = None
        module.zero_grad()
        loss = module(x).square().sum()
        with around:
            loss.backward()
        found.append([tensor.grad.clone() for tensor in (x, module.weight, module.bias)])
    for own, expected in zip(*found, strict=True):
        torch.testing.assert_close(own, expected)


def test_an_arm_processor_goes_back_by_forward_convolutions(monkeypatch: pytest.MonkeyPatch) -> None:
    step = importlib.import_module("constraintmatch.training.step")
    for machine, device, kind in (
        ("aarch64", "cpu", ForwardKernels),
        ("x86_64", "cpu", nullcontext),
        ("aarch64", "cuda", nullcontext),
    ):
        monkeypatch.setattr(step.platform, "machine", lambda name=machine: name)
        assert isinstance(step._quick_backward(torch.device(device)), kind)
