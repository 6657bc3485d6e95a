import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

import data as robot_data
import encoders
import flow
import fsdp
import model as wan_model
import sampler
import tiny
import validate
import video
from read_hdf5 import RobotDemos

VIEWS = ("robot0_agentview_left", "robot0_agentview_right")
CONFIG = dict(
    batch_size=2, num_val_windows=5, val_sigmas=3, shift=5.0, seed=4, clamp_first_frame=True, num_frames=5, fps=8,
    cell_height=16, cell_width=16, num_val_videos=3, num_inference_steps=4, guidance_scale=2.0, guidance_scale_2=1.0,
)


def with_experts(kind, *functions):
    """A Wan whose experts are functions of (input, timestep, text) -> velocity."""
    names = ("high", "low") if len(functions) == 2 else ("single",)
    experts = {name: lambda x, timestep, text, return_dict, f=f: (f(x, timestep, text),)
               for name, f in zip(names, functions, strict=True)}
    return wan_model.Wan("", kind, names, 0.9 if len(names) == 2 else None, {}, experts=experts)


# ----------------------------------------------------------------------------- loss


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 7, 9])
@pytest.mark.parametrize("num_items", [1, 3, 7])
def test_every_item_counts_once(num_items, world_size):
    """And every rank has as many, real or repeated: no collective call waits for ever."""
    shares = [fsdp.share_out(num_items, rank, world_size) for rank in range(world_size)]
    assert {len(items) for items, _ in shares} == {math.ceil(num_items / world_size)}
    assert all(len(items) == len(weights) and set(weights) <= {0.0, 1.0} for items, weights in shares)
    counted = sorted(item for items, weights in shares for item, weight in zip(items, weights, strict=True) if weight)
    assert counted == list(range(num_items))
    assert all(0 <= item < num_items for items, _ in shares for item in items)


@pytest.mark.parametrize("kind, gives", [("i2v", True), ("ti2v", True), ("t2v", True), ("t2v", False)])
def test_loss_is_the_formula(kind, gives):
    """mean((velocity - (noise - x0))^2) in float64, over generated positions, of the noise level asked for."""
    generator = torch.Generator().manual_seed(0)
    latents, noise, velocity = torch.randn(3, 2, 16, 3, 4, 6, generator=generator)
    frames = 3 if kind == "i2v" else 1
    condition = torch.randn(2, 16, frames, 4, 6, generator=generator) if gives else None
    sigma = torch.tensor([0.95, 0.3])
    seen = []
    wan = with_experts(kind, lambda x, timestep, text: seen.append(x[:, :16]) or velocity)
    loss = wan_model.flow_matching_loss(wan, latents, noise, sigma, condition, torch.zeros(2, 1, 1))

    first = 1 if gives and kind != "i2v" else 0  # the first frame that is generated
    squared = (velocity.double() - (noise.double() - latents.double()))[:, :, first:] ** 2
    assert loss.shape == (2,) and loss.dtype == torch.float32
    torch.testing.assert_close(loss.double(), squared.flatten(1).mean(1), atol=0, rtol=1e-6)
    for row, level in enumerate((0.95, 0.3)):
        noisy = (1 - level) * latents[row].double() + level * noise[row].double()
        torch.testing.assert_close(seen[0][row, :, first:].double(), noisy[:, first:], atol=1e-6, rtol=0)
    if first:
        assert torch.equal(seen[0][:, :, :1], condition)

    velocity[:, :, 0] += 100  # what the model says of a given frame is no error
    again = wan_model.flow_matching_loss(wan, latents, noise, sigma, condition, torch.zeros(2, 1, 1))
    assert torch.equal(again, loss) == bool(first)


def test_loss_has_gradients():
    weight = torch.tensor(0.5, requires_grad=True)
    latents, noise = torch.randn(2, 1, 16, 2, 2, 2, generator=torch.Generator().manual_seed(0))
    wan = with_experts("i2v", lambda x, timestep, text: weight * torch.ones_like(x[:, :16]))
    condition, text = torch.zeros(1, 16, 2, 2, 2), torch.zeros(1, 1, 1)
    wan_model.flow_matching_loss(wan, latents, noise, torch.tensor([0.5]), condition, text).sum().backward()
    torch.testing.assert_close(weight.grad, 2 * (0.5 - (noise - latents)).mean())


class FakeCache:
    """Seven held-out samples of random latents."""

    def __init__(self):
        generator = torch.Generator().manual_seed(0)
        self.latents = torch.randn(7, 16, 2, 4, 4, generator=generator)
        self.condition = torch.randn(7, 16, 2, 4, 4, generator=generator)
        self.val, self.text = list(range(7)), torch.randn(2, 3, 8, generator=generator)

    def sample(self, window):
        return dict(latents=self.latents[window], condition=self.condition[window], prompt_index=window % 2)


def test_held_out_loss_is_the_mean_over_clips_and_bins():
    """The same on one rank, and summed over ranks that repeat clips; expert by expert and sigma by sigma."""
    cache, both = FakeCache(), ("high", "low")
    wan = with_experts(
        "i2v",
        lambda x, timestep, text: x[:, :16] * (1 + text.mean((1, 2)).view(-1, 1, 1, 1, 1)),
        lambda x, timestep, text: 0 * x[:, :16],
    )
    losses = validate.held_out_loss(wan, cache, both, CONFIG, 0, 1, "cpu")
    expected = {}
    for expert in ("high", "low"):
        for sigma in flow.bin_sigmas(expert, 0.9, 5.0, 3).tolist():
            errors = []
            for item in range(5):
                x0 = cache.latents[item].double()
                noise = flow.randn(x0.shape, 4, flow.VALIDATION, item).double()
                scale = 1 + cache.text[item % 2].double().mean() if expert == "high" else 0
                errors.append((scale * ((1 - sigma) * x0 + sigma * noise) - (noise - x0)).square().mean().item())
            expected[f"val_loss/sigma {sigma:.3f}"] = np.mean(errors)
        expected[f"val_loss/{expert}"] = np.mean(list(expected.values())[-3:])
    assert list(losses) == list(expected) and len(losses) == 8
    np.testing.assert_allclose(list(losses.values()), list(expected.values()), rtol=1e-5)

    for world_size in (2, 3):
        ranks = [validate.held_out_loss(wan, cache, both, CONFIG, r, world_size, "cpu") for r in range(world_size)]
        sums = [sum(rank[name] for rank in ranks) for name in losses]
        np.testing.assert_allclose(sums, list(losses.values()), rtol=1e-6)
    alone = validate.held_out_loss(wan, cache, ("low",), CONFIG, 0, 1, "cpu")
    assert alone == {name: losses[name] for name in list(losses)[4:]}


def test_held_out_loss_with_bins_too_near_to_tell_apart():
    """Twenty bins beside sigma 1 share a name, the expert's mean still counts each once."""
    config = CONFIG | dict(val_sigmas=20, shift=1000.0)
    wan = with_experts("i2v", lambda x, timestep, text: x[:, :16], lambda x, timestep, text: 0 * x[:, :16])
    cache = FakeCache()
    losses = validate.held_out_loss(wan, cache, ("high",), config, 0, 1, "cpu")
    assert len(losses) < 21
    each = []
    for sigma in flow.bin_sigmas("high", 0.9, 1000.0, 20).tolist():
        for item in range(5):
            x0, noise = cache.latents[item], flow.randn((16, 2, 4, 4), 4, flow.VALIDATION, item)
            each.append(((1 - sigma) * x0 + sigma * noise - (noise - x0)).square().mean().item())
    assert losses["val_loss/high"] == pytest.approx(np.mean(each), rel=1e-5)


# ----------------------------------------------------------------------------- scores


def pixels(levels):
    """8-bit levels f h w 3 -> 3 f h w in -1..1."""
    return torch.as_tensor(levels).float().movedim(-1, 0) / 127.5 - 1


def test_psnr_and_ssim_of_a_constant_error():
    """Two flat greys: PSNR is 20 log10(255 / difference), and SSIM has only its luminance term."""
    flat = np.full((4, 16, 16, 3), 100)
    cells = {("rgb", "a"): pixels(flat + 10), ("rgb", "b"): pixels(flat + 20)}
    truth = {("rgb", "a"): pixels(flat), ("rgb", "b"): pixels(flat)}
    for video_cell in cells.values():
        video_cell[:, 0] = 1.0  # the given frame doesn't count
    result = validate.scores(cells, truth, {}, None)
    assert result.keys() == {"psnr", "ssim"}
    assert result["psnr"] == pytest.approx((20 * math.log10(25.5) + 20 * math.log10(12.75)) / 2, abs=1e-6)
    c1 = 0.01**2

    def luminance(a, b):
        return (2 * a * b + c1) / (a * a + b * b + c1)

    by_hand = [luminance(110 / 255, 100 / 255), luminance(120 / 255, 100 / 255)]
    assert result["ssim"] == pytest.approx(np.mean(by_hand), abs=1e-6)
    same = validate.scores(truth, truth, {}, None)
    assert same["psnr"] == 100 and same["ssim"] == pytest.approx(1)
    small = {name: cell[..., :8, :8] for name, cell in truth.items()}
    assert validate.scores(small, small, {}, None).keys() == {"psnr"}  # smaller than SSIM's window


def test_what_moved_is_scored_by_itself():
    """Pixels that the recording has changed by more than ten levels in a channel; errors elsewhere don't count."""
    recorded = np.full((3, 16, 16, 3), 100)
    recorded[1, 2, 3, 2] += 11  # three pixels of two frames: one, and two others
    recorded[2, 4:6, 5, 0] -= 40
    recorded[1:, 9, 9] += 10  # not enough
    recorded[0, 0, 0] = 100
    made = recorded + 60  # wherever nothing moves
    made[1, 2, 3], made[2, 4, 5], made[2, 5, 5] = recorded[1, 2, 3] + 10, recorded[2, 4, 5] + 20, recorded[2, 5, 5]
    still = {("rgb", "b"): pixels(np.full((3, 16, 16, 3), 100))}  # a view in which nothing moves has no say
    cells, truth = {("rgb", "a"): pixels(made)} | still, {("rgb", "a"): pixels(recorded)} | still
    result = validate.scores(cells, truth, {}, None)
    assert result["moved_psnr"] == pytest.approx(10 * math.log10(255**2 / ((10**2 + 20**2) / 3)), abs=1e-6)
    assert validate.scores(truth, truth, {}, None)["moved_psnr"] == 100
    assert "moved_psnr" not in validate.scores(still, still, {}, None)


def test_means_are_over_the_clips_that_have_a_score(monkeypatch):
    clips = [{"psnr": 20.0, "moved_psnr": 10.0, "success": 1.0}, {"psnr": 30.0, "success": 0.0}]
    assert validate.mean_scores(clips) == {"psnr": 25.0, "moved_psnr": 10.0, "success": 0.5}
    assert validate.mean_scores([]) == {}
    other = [{"psnr": 40.0, "moved_psnr": 20.0}]  # of another rank
    totals = []
    monkeypatch.setattr(fsdp, "reduce_sum", lambda values: totals.append(values) or values)
    validate.mean_scores(other)
    monkeypatch.setattr(fsdp, "reduce_sum", lambda values: [a + b for a, b in zip(values, totals[0], strict=True)])
    assert validate.mean_scores(clips) == {"psnr": 30.0, "moved_psnr": 15.0, "success": 0.5}


def test_an_evaluation_in_a_line():
    row = {"val_loss/sigma 0.5": 1.0, "val_loss/high": 0.04954, "psnr": 25.909, "ssim": 0.5, "floor/psnr": 20.29,
           "ceiling/psnr": 27.8, "floor/ssim": 0.0, "ceiling/ssim": 1.0}
    assert validate.in_a_line(row) == "val_loss/high 0.04954 | psnr 25.91 (20.29..27.80) | ssim 0.5000 (0.000..1.000)"


def test_point_error_in_millimetres():
    """A known shift in metres: mean and median apart, the given frame and unknown pixels left out."""
    box = (-1.0, 0.0, 0.5, 1.0, 4.0, 1.0)  # edges of 2, 4 and 0.5 m
    size = torch.tensor([2.0, 4.0, 0.5]).view(3, 1, 1, 1)
    grey = {("rgb", view): torch.zeros(3, 3, 16, 16) for view in "ab"}
    truth = grey | {("pointmap", view): torch.zeros(3, 3, 16, 16) for view in "ab"}
    known = torch.ones(3, 16, 16, dtype=torch.bool)
    known[:, 0] = False
    error = torch.zeros(3, 3, 16, 16)  # metres
    error[0], error[1] = 0.03, 0.04  # 50 mm away
    error[:, 2, 15, 15] = torch.tensor([0.0, 0.0, 0.2])  # one pixel 200 mm
    error[:, 0] = error[:, :, 0] = 0.7  # given frame, unknown row
    cells = grey | {("pointmap", view): truth["pointmap", view] + 2 * error / size for view in "ab"}
    result = validate.scores(cells, truth, {view: known for view in "ab"}, box)
    assert result["psnr"] == 100
    num_pixels = 2 * 15 * 16
    assert result["point_median_mm"] == pytest.approx(50, rel=1e-4)
    assert result["point_mm"] == pytest.approx((50 * (num_pixels - 1) + 200) / num_pixels, rel=1e-4)


# ----------------------------------------------------------------------------- whole videos


@pytest.fixture(scope="module")
def world(checkpoints, tmp_path_factory):
    """Real demonstrations, and a cache of their latents in memory, RGB and points."""
    path = tmp_path_factory.mktemp("validate") / "robot.hdf5"
    tiny.make_robot_hdf5(path, 40)
    demos = RobotDemos(path, ",".join(VIEWS), pointmaps=True)
    box = [-0.6, -0.6, -0.01, 0.6, 0.6, 0.3]
    windows = [window for window in demos.windows(5, 4) if window.split == "val"]
    vae = encoders.load_vae(checkpoints["i2v"])

    def sample(window):
        truth, _ = validate.ground_truth(demos, window, CONFIG, box, "cpu")
        grid = robot_data.join_cells({name: encoders.encode(vae, cell[None])[0] for name, cell in truth.items()})
        return dict(latents=grid, condition=grid.clone(), prompt_index=0)

    cache = SimpleNamespace(
        val=windows, sample=sample, text=torch.zeros(2, 3, 8), negative_index=1,
        box=box, views=VIEWS, modalities=["rgb", "pointmap"],
    )
    return demos, cache, vae


def test_ground_truth_is_the_recording(world):
    demos, cache, _ = world
    window = cache.val[0]
    truth, valid = validate.ground_truth(demos, window, CONFIG, cache.box, "cpu")
    assert list(truth) == [(modality, view) for modality in ("rgb", "pointmap") for view in VIEWS]
    box = torch.tensor(cache.box, dtype=torch.float64).view(2, 3)
    for view in VIEWS:
        recorded = torch.from_numpy(demos.rgb(window, view, 5)).double().permute(3, 0, 1, 2)
        assert truth["rgb", view].shape == (3, 5, 16, 16) and valid[view].shape == (5, 16, 16)
        quarter = torch.nn.functional.avg_pool3d(recorded[None], (1, 2, 2))[0] / 127.5 - 1
        assert (truth["rgb", view] - quarter).abs().mean() < 0.02  # bilinear with antialiasing is nearly that
        xyz = (truth["pointmap", view].double().movedim(0, -1) + 1) / 2 * (box[1] - box[0]) + box[0]
        on_table = (xyz[..., 2] - tiny.TABLE_HEIGHT).abs() < 1e-3
        assert on_table.double().mean() > 0.5 and valid[view].double().mean() > 0.9  # the scene's own geometry
    rgb_only, nothing = validate.ground_truth(demos, window, CONFIG, None, "cpu")
    assert list(rgb_only) == [("rgb", view) for view in VIEWS] and nothing == {}


def test_videos_of_a_perfect_model_reach_the_ceiling(world, checkpoints, tmp_path, monkeypatch):
    """The model knows the answer: what is left is the VAE's error, and files show generated beside recorded."""
    demos, cache, vae = world

    def perfect(x, timestep, text):  # the condition of this cache is the answer
        return (x[:, :16] - x[:, 20:]) / (timestep.view(-1, 1, 1, 1, 1) / 1000)

    wan = with_experts("i2v", perfect, perfect)
    config = CONFIG | dict(model=checkpoints["i2v"], out_dir=str(tmp_path))
    titles, draw = [], video.contact_sheet
    monkeypatch.setattr(video, "contact_sheet", lambda *args, title: titles.append(title) or draw(*args, title=title))
    result = validate.held_out_videos(wan, cache, demos, config, 120, 0, 1, "cpu")
    assert titles == [demos.prompts[window.demo] for window in cache.val[:3]] and len(set(titles)) == 3

    expected = []
    for window in cache.val[:3]:
        truth, valid = validate.ground_truth(demos, window, CONFIG, cache.box, "cpu")
        cells = {name: encoders.decode(vae, encoders.encode(vae, cell[None]))[0] for name, cell in truth.items()}
        error = {name: (cells[name] - truth[name])[:, 1:].double() for name in cells}  # without the given frame
        low, high = torch.tensor(cache.box, dtype=torch.float64).view(2, 3, 1, 1, 1)
        distance = [1000 * (error["pointmap", view] * (high - low) / 2).norm(dim=0)[valid[view][1:]] for view in VIEWS]
        distance = torch.cat(distance)
        psnr = np.mean([10 * math.log10(4 / error["rgb", view].square().mean()) for view in VIEWS])
        expected.append([psnr, distance.mean().item(), distance.median().item()])
    psnr, point_mm, point_median_mm = np.mean(expected, axis=0)
    assert list(result) == ["psnr", "moved_psnr", "ssim", "point_mm", "point_median_mm"]
    assert result["psnr"] == pytest.approx(psnr, abs=0.02) and result["psnr"] > 20
    assert result["point_mm"] == pytest.approx(point_mm, rel=1e-3)
    assert result["point_median_mm"] == pytest.approx(point_median_mm, rel=1e-3)
    assert 0.5 < result["ssim"] < 1

    names = {path.name for path in (tmp_path / "samples").iterdir()}
    assert names == {f"step_000120{suffix}.{kind}" for suffix in ("", "_1", "_2") for kind in ("mp4", "png")}
    assert Image.open(tmp_path / "samples" / "step_000120.png").size[1] > 3 * 128  # three rows

    bounds = validate.floor_and_ceiling(cache, demos, config, 0, 1, "cpu")
    assert list(bounds) == [f"{bound}/{name}" for bound in ("floor", "ceiling") for name in result]
    for name, value in result.items():
        assert bounds[f"ceiling/{name}"] == pytest.approx(value, rel=1e-3)
    monkeypatch.setattr(validate, "mean_scores", lambda clips: dict(enumerate(clips)))
    halves = [validate.held_out_videos(wan, cache, demos, config, 120, rank, 2, "cpu") for rank in range(2)]
    assert np.mean([clip["psnr"] for half in halves for clip in half.values()]) == pytest.approx(result["psnr"])
    parts = [validate.floor_and_ceiling(cache, demos, config, rank, 2, "cpu") for rank in range(2)]
    floors = [clip["moved_psnr"] for part in parts for name, clip in part.items() if name.startswith("floor")]
    assert len(floors) == 3 and np.mean(floors) == pytest.approx(bounds["floor/moved_psnr"])  # ranks share the clips


def test_the_floor_is_the_given_frame_repeated(world, checkpoints):
    """Through the VAE, cell by cell, against the recording; points too."""
    demos, cache, vae = world
    config = CONFIG | dict(model=checkpoints["i2v"], num_val_videos=1)
    bounds = validate.floor_and_ceiling(cache, demos, config, 0, 1, "cpu")
    truth, valid = validate.ground_truth(demos, cache.val[0], CONFIG, cache.box, "cpu")
    still = {name: cell[None, :, [0] * 5] for name, cell in truth.items()}
    cells = {name: encoders.decode(vae, encoders.encode(vae, cell))[0] for name, cell in still.items()}
    assert validate.scores(cells, truth, valid, cache.box) == pytest.approx(
        {name: bounds[f"floor/{name}"] for name in ("psnr", "moved_psnr", "ssim", "point_mm", "point_median_mm")})
    assert bounds["floor/moved_psnr"] < bounds["ceiling/moved_psnr"] - 3
    assert bounds["floor/point_mm"] > bounds["ceiling/point_mm"] > 0


def test_cells_are_decoded_alone(world):
    _, cache, vae = world
    latents = cache.sample(cache.val[0])["latents"]
    cells = sampler.decode_cells(vae, latents, cache.modalities, VIEWS)
    assert list(cells) == [(modality, view) for modality in ("rgb", "pointmap") for view in VIEWS]
    torch.testing.assert_close(cells["pointmap", VIEWS[0]], encoders.decode(vae, latents[None, :, :, 4:, :4])[0])
    torch.testing.assert_close(cells["rgb", VIEWS[1]], encoders.decode(vae, latents[None, :, :, :4, 4:])[0])
    frames = validate.frames_of(cells)
    assert frames.shape == (5, 32, 32, 3) and frames.dtype == np.uint8
    assert np.array_equal(frames[:, 16:, :16], video.to_uint8(cells["pointmap", VIEWS[0]]))


def test_t2v_gives_the_frame_only_if_asked():
    for kind, clamp, gives in [("i2v", False, True), ("ti2v", False, True), ("t2v", True, True), ("t2v", False, False)]:
        assert validate.gives_frame(with_experts(kind, None), {"clamp_first_frame": clamp}) == gives
