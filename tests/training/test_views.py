"""Views against Pillow's and torchvision's own operations, and the promises every view keeps."""

import colorsys
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageDraw, ImageEnhance, ImageOps
from torch import Tensor
from torchvision.transforms import v2

from constraintmatch._internal.errors import InputError
from constraintmatch.training import pixel_ops, views

SIDES = (8, 32, 96, 224)
EVERY_VIEW = {
    "plain": views.plain(),
    "weak": views.weak(),
    "crop": views.crop(),
    "strong": views.strong(),
    "strong published": views.strong(style="published"),
    "scan_strong": views.scan_strong(),
    "contrastive": views.contrastive(),
}
ALL_BUT_IDENTITY = [name for name in views.OPERATIONS if name != "identity"]


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """Small tensors gain nothing from threads, and wait for each other on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def see(view: views.View, images: Tensor, draw: torch.Generator) -> Tensor:
    """The view of each image, with uniforms of the generator."""
    return view.apply(images, torch.rand((len(images), view.n_draws), generator=draw))


def operate(operation: pixel_ops.Operation, images: Tensor, values: Tensor) -> Tensor:
    """The operation on every image, with one value each."""
    return pixel_ops.apply_operations(images, [(operation, torch.ones(len(images), dtype=torch.bool), values)])


def photos(side: int, channels: int, n: int = 4, seed: int = 0) -> Tensor:
    """Smooth random images with noise, contrast and brightness differing from one to the next."""
    draw = np.random.default_rng([seed, side, channels])
    coarse = draw.uniform(0, 255, (n, channels, 4, 4)).repeat(-(-side // 4), 2).repeat(-(-side // 4), 3)
    spread, base = draw.uniform(0.2, 0.8, (n, 1, 1, 1)), draw.uniform(0, 60, (n, channels, 1, 1))
    noisy = base + spread * (coarse[..., :side, :side] + draw.normal(0, 20, (n, channels, side, side)))
    return torch.from_numpy(noisy.clip(0, 255).astype(np.uint8))


def to_pil(image: Tensor) -> Image.Image:
    return Image.fromarray(image[0].numpy() if len(image) == 1 else image.permute(1, 2, 0).numpy())


def from_pil(image: Image.Image) -> Tensor:
    pixels = torch.from_numpy(np.array(image))
    return pixels[None] if pixels.ndim == 2 else pixels.permute(2, 0, 1)


def affine(*entries: float) -> Callable[[Image.Image], Image.Image]:
    return lambda image: image.transform(image.size, Image.Transform.AFFINE, entries)


# name: (values to try, Pillow's operation, share of pixels that may differ, by at most how much)
# Measured on x86-64: all fourteen exact. The room left is for Pillow builds whose compiler fuses a blend's multiply and
# add, and for sines that another maths library rounds differently before they become fixed point.
PIL_OPERATIONS: dict[str, tuple[list[float], Callable[[Image.Image, float], Image.Image], float, int]] = {
    "identity": ([0.0], lambda image, _: image, 0, 0),
    "auto_contrast": ([0.0], lambda image, _: ImageOps.autocontrast(image), 0, 0),
    "equalize": ([0.0], lambda image, _: ImageOps.equalize(image), 0, 0),
    "posterize": ([4, 5, 6, 7, 8], lambda image, v: ImageOps.posterize(image, int(v)), 0, 0),
    "solarize": ([0.0, 25.6, 128, 230.4, 256], lambda image, v: ImageOps.solarize(image, v), 0, 0),
    "brightness": ([0.05, 0.14, 0.5, 0.95, 1.5], lambda image, v: ImageEnhance.Brightness(image).enhance(v), 0, 0),
    "color": ([0.05, 0.14, 0.5, 0.95, 1.5], lambda image, v: ImageEnhance.Color(image).enhance(v), 0.005, 1),
    "contrast": ([0.05, 0.14, 0.5, 0.95, 1.5], lambda image, v: ImageEnhance.Contrast(image).enhance(v), 0.005, 1),
    "sharpness": ([0.05, 0.14, 0.5, 0.95, 1.5], lambda image, v: ImageEnhance.Sharpness(image).enhance(v), 0.005, 1),
    "rotate": ([-30, -13.7, 0, 3, 21, 90], lambda image, v: image.rotate(v), 0.0002, 255),
    "shear_x": ([-0.3, -0.03, 0, 0.12, 0.27], lambda image, v: affine(1, v, 0, 0, 1, 0)(image), 0.0002, 255),
    "shear_y": ([-0.3, -0.03, 0, 0.12, 0.27], lambda image, v: affine(1, 0, 0, v, 1, 0)(image), 0.0002, 255),
    "translate_x": ([-9, -2, 0, 1, 5], lambda image, v: affine(1, 0, v, 0, 1, 0)(image), 0, 0),
    "translate_y": ([-9, -2, 0, 1, 5], lambda image, v: affine(1, 0, 0, 0, 1, v)(image), 0, 0),
}


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("name", views.OPERATIONS)
def test_operation_equals_pillows(name: str, channels: int) -> None:
    tried, reference, share, most = PIL_OPERATIONS[name]
    different = pixels = 0
    for side, n in zip(SIDES, (3, 3, 1, 1), strict=True):
        images = photos(side, channels, n=n).repeat_interleave(len(tried), 0)
        values = torch.tensor(tried, dtype=torch.float32).repeat(n)
        ours = operate(views.OPERATIONS[name], images, values)
        pil = torch.stack([from_pil(reference(to_pil(i), v)) for i, v in zip(images, values.tolist(), strict=True)])
        gap = (ours.int() - pil.int()).abs()
        assert gap.max() <= most
        different, pixels = different + int((gap > 0).sum()), pixels + gap.numel()
    assert different <= share * pixels


def test_an_operation_gives_each_image_its_own_strength() -> None:
    images = photos(32, 3, n=1).expand(3, -1, -1, -1)
    turned = operate(views.OPERATIONS["rotate"], images, torch.tensor([0.0, 90.0, 180.0]))
    assert [torch.equal(turned[i], images[0].rot90(i, (1, 2))) for i in range(3)] == [True] * 3


@pytest.mark.parametrize("pixels", [np.zeros((32, 32)), np.arange(1024).reshape(32, 32) % 256, np.eye(32) * 255])
@pytest.mark.parametrize("name", ["auto_contrast", "equalize", "contrast", "sharpness"])
def test_unusual_histograms_are_treated_as_pillow_treats_them(name: str, pixels: np.ndarray) -> None:
    images = torch.from_numpy(pixels.astype(np.uint8))[None, None]
    ours = operate(views.OPERATIONS[name], images, torch.tensor([0.5]))
    pil = from_pil(PIL_OPERATIONS[name][1](to_pil(images[0]), 0.5))
    assert torch.equal(ours[0], pil)


def test_strengths_cover_fixmatchs_ranges() -> None:
    tenths = torch.arange(1.0, 10.0)

    def values(name: str, side: int = 32, positive: bool = True) -> list[float]:
        return views.OPERATIONS[name].value(tenths, torch.full((9,), positive), side).tolist()

    for name in ("brightness", "color", "contrast", "sharpness"):
        assert values(name) == pytest.approx([0.14, 0.23, 0.32, 0.41, 0.5, 0.59, 0.68, 0.77, 0.86])
    assert values("posterize") == [4, 4, 5, 5, 6, 6, 6, 7, 7]
    assert values("rotate") == [3, 6, 9, 12, 15, 18, 21, 24, 27]
    assert values("rotate", positive=False) == [-3, -6, -9, -12, -15, -18, -21, -24, -27]
    assert values("shear_x") == values("shear_y") == pytest.approx([0.03 * k for k in range(1, 10)])
    assert values("solarize") == pytest.approx([256 * (1 - k / 10) for k in range(1, 10)], abs=1e-4)
    assert values("translate_x") == values("translate_y") == [0, 1, 2, 3, 4, 5, 6, 7, 8]
    assert values("translate_x", side=20) == [int(k * 6) // 10 for k in range(1, 10)]  # 0.15 × 20 is 3, not 2.99


# Moves and cutouts against Pillow, pixel for pixel


def moved_by_pillow(image: Tensor, right: int, down: int, mirrored: bool, reflect: bool) -> Tensor:
    array = (image.flip(-1) if mirrored else image).numpy()
    side = array.shape[-1]
    reach = max(abs(right), abs(down), 1)
    edges = ((0, 0), (reach, reach), (reach, reach))
    padded = np.pad(array, edges, mode="reflect") if reflect else np.pad(array, edges)
    box = (reach - right, reach - down, reach - right + side, reach - down + side)
    return from_pil(to_pil(torch.from_numpy(padded)).crop(box))


@pytest.mark.parametrize(("view", "reflect"), [(views.weak(), True), (views.crop(), False)])
@pytest.mark.parametrize("side", SIDES)
def test_weak_and_crop_are_a_flip_and_a_padded_crop(view: views.View, reflect: bool, side: int) -> None:
    images, reach = photos(side, 3, n=12), side // 8
    uniforms = torch.rand((12, view.n_draws), generator=generator())
    result = view.apply(images, uniforms)
    for image, ours, (flip, x, y) in zip(images, result, uniforms.tolist(), strict=True):
        right, down = (int(u * (2 * reach + 1)) - reach for u in (x, y))
        assert torch.equal(ours, moved_by_pillow(image, right, down, flip < 0.5, reflect))


def test_weak_reaches_every_shift_up_to_an_eighth_equally_often() -> None:
    images = torch.zeros((6_000, 1, 16, 16), dtype=torch.uint8)
    images[:, :, 8, 8] = 255
    bright = see(views.weak(flip=False), images, generator()).flatten(1).argmax(1)
    shifts = torch.stack([bright // 16, bright % 16], 1) - 8
    counts = torch.unique(shifts, dim=0, return_counts=True)[1]
    assert shifts.abs().max() == 2
    assert len(counts) == 25
    assert (counts.float() / 240 - 1).abs().max() < 0.3  # 240 expected, 4.6 standard deviations


@pytest.mark.parametrize("side", SIDES)
def test_strong_ends_with_a_grey_square_of_half_the_side_as_pillow_draws_it(side: int) -> None:
    images, view, half = photos(side, 3, n=8), views.strong(flip=False, without=ALL_BUT_IDENTITY), side // 2
    uniforms = torch.rand((8, view.n_draws), generator=generator())
    for image, ours, (*_, y, x) in zip(images, view.apply(images, uniforms), uniforms.tolist(), strict=True):
        top, left = int(y * side) - half // 2, int(x * side) - half // 2
        pil = to_pil(image)
        ImageDraw.Draw(pil).rectangle((left, top, left + half - 1, top + half - 1), fill=(127, 127, 127))
        assert torch.equal(ours, from_pil(pil))


def test_scans_cutout_is_square_and_up_to_half_the_side() -> None:
    images = torch.zeros((3_000, 1, 32, 32), dtype=torch.uint8)
    covered = see(views.scan_strong(without=ALL_BUT_IDENTITY), images, generator()) == 127
    high, wide = covered.any(3).sum((1, 2)), covered.any(2).sum((1, 2))
    assert torch.equal(high * wide, covered.sum((1, 2, 3)))
    assert high.max() == wide.max() == 16
    assert high.min() == wide.min() == 1


# RandAugment's draws


def test_strong_is_made_of_the_operations_it_draws() -> None:
    images, view = photos(32, 3, n=300), views._random_operation(views.OPERATIONS, 0.5)
    uniforms = torch.rand((300, view.n_draws), generator=generator())
    result, names = view.apply(images, uniforms), list(views.OPERATIONS)
    for i, (which, strength, sign, applied) in enumerate(uniforms.tolist()):
        name = names[int(which * 14)]
        operation = views.OPERATIONS[name]
        value = operation.value(torch.tensor([float(1 + int(strength * 9))]), torch.tensor([sign < 0.5]), 32)
        expected = operate(operation, images[i : i + 1], value) if applied < 0.5 else images[i : i + 1]
        assert torch.equal(result[i : i + 1], expected), name


def cut(images: Tensor, uniforms: Tensor) -> Tensor:
    """The cutout of `strong`, which takes the last two uniforms."""
    return views._cutout(random_size=False).apply(images, uniforms[:, -2:])


def test_two_operations_and_a_cutout_follow_one_another() -> None:
    images, one = photos(32, 3, n=64), views._random_operation(views.OPERATIONS, 0.5)
    uniforms = torch.rand((64, 10), generator=generator())
    both = one.apply(one.apply(images, uniforms[:, :4]), uniforms[:, 4:8])
    assert torch.equal(views.strong(flip=False).apply(images, uniforms), cut(both, uniforms))


@pytest.mark.parametrize("name", [name for name in views.OPERATIONS if name != "identity"])
def test_an_excluded_operation_never_occurs(name: str) -> None:
    others = [other for other in views.OPERATIONS if other not in (name, "identity")]
    images = photos(16, 3, n=1, seed=3).expand(200, -1, -1, -1)
    uniforms = torch.rand((200, 10), generator=generator())
    with_it = views.strong(flip=False, without=others).apply(images, uniforms)
    without_it = views.strong(flip=False, without=[*others, name]).apply(images, uniforms)
    assert not torch.equal(with_it, cut(images, uniforms)) or name == "equalize"  # 256 pixels are too few to equalize
    assert torch.equal(without_it, cut(images, uniforms))


def test_no_flip_never_mirrors() -> None:
    image = torch.zeros((1, 1, 32, 32), dtype=torch.uint8)
    image[..., 14:18, 4:12] = 255  # which no move brings to the right half
    images = image.expand(500, -1, -1, -1)
    everything = list(views.OPERATIONS)[:-1]  # all but translate_y
    for make in (
        lambda flip: views.weak(flip=flip),
        lambda flip: views.crop(flip=flip),
        lambda flip: views.strong(flip=flip, without=everything),
        lambda flip: views.scan_strong(flip=flip, without=everything),
        lambda flip: views.contrastive(flip=flip, scale=(0.9, 1.0), jitter=(0, 0, 0, 0)),
    ):
        white = [(view == 255).long() for view in _two(make, images)]  # cutouts are grey
        right_heavy = [view[..., 16:].sum((1, 2, 3)) > view[..., :16].sum((1, 2, 3)) for view in white]
        assert not right_heavy[0].any()
        assert 0.4 < right_heavy[1].float().mean() < 0.6


def _two(make: Callable[[bool], views.View], images: Tensor) -> list[Tensor]:
    return [see(make(flip), images, generator()) for flip in (False, True)]


def test_published_style_inverts_where_fixmatch_solarizes() -> None:
    only_solarize = [name for name in views.OPERATIONS if name != "solarize"]
    images, uniforms = photos(8, 1), torch.rand((4, 10), generator=generator())
    uniforms[:, 3], uniforms[:, 7] = 0, 1  # of the two operations only the first is applied
    published = views.strong(without=only_solarize, flip=False, style="published")
    assert torch.equal(published.apply(images, uniforms), cut(255 - images, uniforms))


# The contrastive view


@pytest.mark.parametrize("side", SIDES)
def test_resized_crop_equals_torchvisions(side: int) -> None:
    images, draw = photos(side, 3, n=6), np.random.default_rng(side)
    height, width = draw.integers(3, side + 1, (2, 6))
    top, left = draw.integers(0, side - height + 1), draw.integers(0, side - width + 1)
    mirrored = torch.tensor([False, True] * 3)
    box = [torch.tensor(part, dtype=torch.float32) for part in (top, left, height, width)]
    ours = pixel_ops.resized_crop(images, *box, mirrored)
    for i, image in enumerate(images):
        place = [int(part[i]) for part in box]
        expected = v2.functional.resized_crop(image.float(), *place, [side, side], antialias=False)
        assert (ours[i] - (expected.flip(-1) if mirrored[i] else expected)).abs().max() < 0.02  # of 255


def test_boxes_have_the_areas_and_ratios_torchvision_draws() -> None:
    uniforms = torch.rand((20_000, 22), generator=generator())
    top, left, height, width = views._boxes(uniforms, 224, (0.2, 1.0), (3 / 4, 4 / 3))
    assert min(top.min(), left.min()) == 0
    assert max((top + height).max(), (left + width).max()) == 224
    area, ratio = height * width / 224**2, width / height
    assert 0.195 < area.min() < 0.21
    assert 0.98 < area.max() <= 1
    assert 0.74 < ratio.min() < 0.77
    assert 1.3 < ratio.max() < 1.35
    torch.manual_seed(0)  # torchvision knows only the global generator
    drawn = [v2.RandomResizedCrop(224, scale=(0.2, 1.0)).make_params([torch.empty(3, 224, 224)]) for _ in range(4_000)]
    theirs = torch.tensor([params["height"] * params["width"] for params in drawn]) / 224**2
    assert area.mean() == pytest.approx(float(theirs.float().mean()), abs=0.012)
    assert area.std() == pytest.approx(float(theirs.float().std()), abs=0.012)


def jitter_draws(order: list[int], brightness: float, contrast: float, saturation: float, hue: float) -> Tensor:
    """Uniforms that make `_jitter` apply these factors in this order."""
    ranks = [order.index(i) / 4 for i in range(4)]
    return torch.tensor(
        [[*ranks, *((f - 0.6) / 0.8 for f in (brightness, contrast, saturation)), (hue + 0.1) / 0.2, 0.0]]
    )


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("order", [[0, 1, 2, 3], [3, 2, 1, 0], [1, 3, 0, 2], [2, 0, 3, 1]])
def test_jitter_equals_torchvisions_in_any_order(order: list[int], channels: int) -> None:
    image, factors = photos(32, channels, n=1).float(), (1.3, 0.7, 1.35, -0.08)
    ours = views._jitter(image, jitter_draws(order, *factors), (0.4, 0.4, 0.4, 0.1), 0.8)
    adjust = v2.functional
    steps = (adjust.adjust_brightness, adjust.adjust_contrast, adjust.adjust_saturation, adjust.adjust_hue)
    expected = image / 255
    for i in order:
        expected = steps[i](expected, factors[i])
    # torchvision's luma is .2989 .587 .114, which is short of 1 by 1e-4: up to 0.1 of 255 for four steps
    assert (ours - 255 * expected).abs().max() < 0.15


@given(st.tuples(*[st.integers(0, 255)] * 3), st.floats(-0.5, 0.5))
@settings(max_examples=50, deadline=None)
def test_hue_turns_as_colorsys_does(colour: tuple[int, int, int], turns: float) -> None:
    hue, saturation, value = colorsys.rgb_to_hsv(*(part / 255 for part in colour))
    expected = [255 * part for part in colorsys.hsv_to_rgb((hue + turns) % 1.0, saturation, value)]
    pixel = torch.tensor(colour, dtype=torch.float32).reshape(1, 3, 1, 1)
    assert pixel_ops.turn_hue(pixel, torch.tensor([turns])).flatten().tolist() == pytest.approx(expected, abs=2e-3)


def test_contrastive_jitters_four_in_five_and_greys_one_in_five() -> None:
    images = photos(8, 3, n=1).expand(2_000, -1, -1, -1)
    settings_ = {"flip": False, "scale": (1.0, 1.0), "ratio": (1.0, 1.0)}
    jittered = see(views.contrastive(**settings_, grey_probability=0), images, generator())
    greyed = see(views.contrastive(**settings_, jitter_probability=0), images, generator())
    assert (jittered != images).flatten(1).any(1).float().mean() == pytest.approx(0.8, abs=0.03)
    grey = (greyed[:, :1] == greyed).flatten(1).all(1)
    assert grey.float().mean() == pytest.approx(0.2, abs=0.03)
    assert torch.equal(greyed[~grey], images[~grey])
    expected = from_pil(to_pil(images[0]).convert("L")).int()
    assert (greyed[grey].int() - expected).abs().max() <= 1  # Pillow's weights are rounded to 16 bits


# What every view promises


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("view", EVERY_VIEW.values(), ids=EVERY_VIEW)
def test_a_view_is_uint8_of_the_same_shape_in_either_layout(view: views.View, side: int, channels: int) -> None:
    images = photos(side, channels, n=3)
    last = images.contiguous(memory_format=torch.channels_last)
    first_view, last_view = see(view, images, generator()), see(view, last, generator())
    assert (first_view.dtype, first_view.shape) == (torch.uint8, images.shape)
    assert torch.equal(first_view, last_view)
    assert last_view.is_contiguous(memory_format=torch.channels_last)
    assert first_view.is_contiguous()


@pytest.mark.parametrize("view", EVERY_VIEW.values(), ids=EVERY_VIEW)
def test_the_input_is_left_alone(view: views.View) -> None:
    images = photos(16, 3)
    before = images.clone()
    see(view, images, generator())
    assert torch.equal(images, before)


@pytest.mark.parametrize("view", list(EVERY_VIEW.values())[1:], ids=list(EVERY_VIEW)[1:])
def test_equal_images_get_different_views_and_the_seed_repeats_them(view: views.View) -> None:
    images = photos(32, 3, n=1).expand(32, -1, -1, -1)
    result = see(view, images, generator(1))
    assert len(torch.unique(result.flatten(1), dim=0)) > 24
    assert torch.equal(result, see(view, images, generator(1)))
    assert not torch.equal(result, see(view, images, generator(2)))


@pytest.mark.parametrize("view", EVERY_VIEW.values(), ids=EVERY_VIEW)
@given(rows=st.lists(st.integers(0, 11), max_size=5), seed=st.integers(0, 1_000))
@settings(max_examples=10, deadline=None)
def test_a_view_does_not_depend_on_the_rest_of_the_batch(view: views.View, rows: list[int], seed: int) -> None:
    images, picked = photos(16, 3, n=12), torch.tensor(rows, dtype=torch.int64)
    uniforms = torch.rand((12, view.n_draws), generator=generator(seed))
    assert torch.equal(view.apply(images, uniforms)[picked], view.apply(images[picked], uniforms[picked]))


@pytest.mark.parametrize("view", EVERY_VIEW.values(), ids=EVERY_VIEW)
@pytest.mark.parametrize("extreme", [0.0, 1 - 2**-24])
def test_the_most_extreme_uniforms_are_harmless(view: views.View, extreme: float) -> None:
    for side in (1, 2, 8, 32):
        images = photos(side, 3)
        assert view.apply(images, torch.full((4, view.n_draws), extreme)).shape == images.shape


@pytest.mark.parametrize("view", EVERY_VIEW.values(), ids=EVERY_VIEW)
def test_a_view_reads_no_value_back(view: views.View) -> None:
    images = torch.empty((4, 3, 8, 8), dtype=torch.uint8, device="meta")  # raises where a value is needed
    assert view.apply(images, torch.empty((4, view.n_draws), device="meta")).shape == images.shape


def test_views_trace_into_one_graph() -> None:
    # tracing only: inductor takes half a minute for its first graph on a CPU; the GPU test below compiles
    view = views.chain("all", views.weak(), views.strong(), views.contrastive())
    images, uniforms = photos(8, 3), torch.rand((4, view.n_draws), generator=generator())
    traced = torch.compile(view.apply, fullgraph=True, dynamic=False, backend="eager")
    assert torch.equal(traced(images, uniforms), view.apply(images, uniforms))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("view", EVERY_VIEW.values(), ids=EVERY_VIEW)
def test_a_gpu_gives_the_same_views_eager_compiled_and_captured(view: views.View) -> None:
    images, uniforms = photos(32, 3, n=200), torch.rand((200, view.n_draws), generator=generator())
    expected = view.apply(images, uniforms).int()
    images, uniforms = images.cuda(), uniforms.cuda()
    compiled = torch.compile(view.apply, fullgraph=True, dynamic=False)
    compiled(images, uniforms)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = view.apply(images, uniforms)
    graph.replay()
    for ways in (view.apply(images, uniforms), compiled(images, uniforms), captured):
        gap = (ways.cpu().int() - expected).abs()
        # a fused multiply-add truncates to another whole number now and then
        assert (gap > 0).float().mean() < 0.005
        assert (gap > 1).float().mean() < 0.0002


# A person's choices and mistakes


def test_a_users_function_becomes_a_view_that_chains() -> None:
    def darken(images: Tensor, uniforms: Tensor) -> Tensor:
        return (images * uniforms[:, :, None, None]).to(torch.uint8)

    mine = views.chain("mine", views.plain(), views.from_function("darken", darken, n_draws=1))
    images = photos(8, 3)
    uniforms = torch.rand((4, 1), generator=generator(5))
    assert torch.equal(see(mine, images, generator(5)), darken(images, uniforms))


def test_a_users_function_with_a_wrong_result_is_named() -> None:
    halves = views.from_function("halves", lambda images, _: images / 2)
    with pytest.raises(InputError, match=r"view halves: .*float32"):
        see(halves, photos(8, 3), generator())


def test_unknown_operations_are_named_beside_the_known_ones() -> None:
    with pytest.raises(InputError, match=r"no such operation: twirl \(known: auto_contrast, equalize, .*translate_y\)"):
        views.strong(without=["rotate", "twirl"])
    with pytest.raises(InputError, match="twirl"):
        views.check_operation_names(["twirl"])
    views.check_operation_names(["rotate", "solarize"])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: views.strong(without=views.OPERATIONS), "at least one"),
        (lambda: views.strong(style="mine"), "style"),
        (lambda: views.contrastive(scale=(0.0, 1.0)), "scale"),
        (lambda: views.contrastive(ratio=(2, 1)), "ratio"),
        (lambda: views.contrastive(jitter=(0.4, 0.4, 0.4, 0.9)), "jitter"),
    ],
)
def test_settings_out_of_range_are_refused(make: Callable[[], views.View], message: str) -> None:
    with pytest.raises(InputError, match=message):
        make()
