import json
import subprocess
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from diffusers import WanImageToVideoPipeline, WanPipeline
from PIL import Image
from torch.nn import functional as F

import encoders
import tiny
from guard import UserError

ROOT = Path(tiny.__file__).parent
NUM_DEMOS = 48


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A small tiny world, built by the command that a user types."""
    folder = tmp_path_factory.mktemp("world")
    command = [sys.executable, "tiny.py", f"--out={folder}", f"--num_demos={NUM_DEMOS}"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    return folder


def cells(rgb):
    """Image f 32 32 3 uint8 -> cell 3 f 16 16 in -1..1."""
    pixels = torch.from_numpy(rgb).permute(3, 0, 1, 2).float() / 127.5 - 1
    return F.avg_pool3d(pixels[None], (1, 2, 2))[0]


def saturation_centroid(pixels):
    """3 f h w in -1..1 -> column and row f 2 of the ball in pixels, and the mean colour f 3 of what is saturated."""
    weight = (pixels.amax(0) - pixels.amin(0) - 0.35).clamp(min=0)  # f h w
    centres = torch.arange(pixels.shape[-1]) + 0.5
    total = weight.sum((1, 2))
    track = torch.stack([(weight * centres).sum((1, 2)), (weight * centres[:, None]).sum((1, 2))], dim=1)
    return track / total[:, None], (pixels * weight).sum((2, 3)).T / total[:, None]


def test_layout_of_the_demonstrations(world):
    with h5py.File(world / "robot.hdf5") as file:
        train, valid = ([name.decode() for name in file[f"mask/{split}"]] for split in ("train", "valid"))
        assert train + valid == [f"demo_{index}" for index in range(NUM_DEMOS)] and len(valid) == 4
        assert json.loads(file["data"].attrs["env_args"])["env_kwargs"]["control_freq"] == 20
        assert file["data"].attrs["total"] == sum(demo.attrs["num_samples"] for demo in file["data"].values())
        lengths = set()
        for name, demo in file["data"].items():
            length = demo.attrs["num_samples"]
            lengths.add(int(length))
            colour, direction = tiny.PROMPTS[int(name[5:]) % 24]
            assert json.loads(demo.attrs["ep_meta"])["lang"] == f"a {colour} ball moves {direction}"
            assert demo["actions"].shape == (length, 7) and demo["dones"][-1] == 1
            for view in tiny.VIEWS:
                shapes = {"image": (32, 32, 3), "depth": (32, 32, 1), "intrinsics": (3, 3), "extrinsics": (4, 4)}
                for part, shape in shapes.items():
                    array = demo[f"obs/{view}_{part}"]
                    assert array.shape == (length, *shape) and array.compression == "gzip"
                    assert array.dtype == (np.uint8 if part == "image" else np.float32)
        assert lengths == {5, 6, 7, 8}


def test_depth_and_cameras_are_exact(world):
    """Unprojected by the stored K and E, each pixel centre lies on the ball, the table or the floor, in both views."""
    with h5py.File(world / "robot.hdf5") as file:
        for name in ("demo_0", "demo_17"):
            observations = file[f"data/{name}/obs"]
            ball_heights = []
            for view in tiny.VIEWS:
                depth = observations[f"{view}_depth"][..., 0].astype(np.float64)  # f h w
                intrinsics, extrinsics = observations[f"{view}_intrinsics"][0], observations[f"{view}_extrinsics"][0]
                rows, columns = np.mgrid[:32, :32] + 0.5
                rays = np.stack([columns, rows, np.ones((32, 32))], axis=-1) @ np.linalg.inv(intrinsics).T
                rays = rays @ extrinsics[:3, :3].T  # h w 3, world
                points = rays * depth[..., None] + extrinsics[:3, 3]  # f h w 3
                centres = observations["object"][:][:, None, None]
                radius = np.linalg.norm(points - centres, axis=-1)
                on_ball = np.abs(radius - tiny.RADIUS) < 2e-6
                on_table = np.abs(points[..., 2] - tiny.TABLE_HEIGHT) < 2e-6
                on_floor = np.abs(points[..., 2]) < 2e-6
                assert (on_ball | on_table | on_floor).all()
                assert on_ball.any((1, 2)).all() and on_table.any((1, 2)).all() and on_floor.any((1, 2)).all()
                assert (np.abs(points[on_table & ~on_ball][:, :2]) < tiny.TABLE_HALF).all()
                # RGB and depth show the same ball: saturated where the rays meet it, grey where they pass it by far.
                passing = np.linalg.norm(np.cross(rays, centres - extrinsics[:3, 3]), axis=-1)  # distance to its centre
                passing /= np.linalg.norm(rays, axis=-1)
                image = observations[f"{view}_image"][:].astype(int)
                saturation = image.max(-1) - image.min(-1)
                assert saturation[passing < tiny.RADIUS * 0.9].min() > 40
                assert saturation[passing > tiny.RADIUS * 1.3].max() <= 1
                ball_heights.append(points[on_ball][:, 2].max())
            assert np.allclose(ball_heights, tiny.TABLE_HEIGHT + 2 * tiny.RADIUS, atol=0.01)


@pytest.mark.parametrize("direction, axis, sign", [("left", 0, -1), ("right", 0, 1), ("up", 1, -1), ("down", 1, 1)])
def test_direction_is_seen_in_the_pixels(direction, axis, sign):
    """What the docstring promises a reward that looks at pixels of one view, before and after the VAE."""
    vae = tiny.make_vae()
    for index, (colour, code) in enumerate(tiny.COLOURS.items()):
        balls = tiny.ball_track(direction, 5, np.random.default_rng(index))
        for view, side in tiny.VIEWS.items():
            intrinsics, extrinsics = tiny.camera(side)
            seen = (np.c_[balls, np.ones(5)] @ np.linalg.inv(extrinsics).T)[:, :3] @ intrinsics.T
            seen = seen[:, :2] / seen[:, 2:] / 2  # column and row in a 16 x 16 cell
            moved = seen[4] - seen[0]
            assert 2.8 < moved[axis] * sign < 4.5 and abs(moved[1 - axis]) < 1.7
            assert 1 < seen.min() and seen.max() < 15  # never out of sight

            pixels = cells(tiny.render(balls, colour, side)[0])
            track, mean_colour = saturation_centroid(pixels)
            assert np.abs(track.numpy() - seen).max() < 0.8, view
            distances = [(mean_colour[0] - (torch.tensor(other) / 127.5 - 1)).norm() for other in tiny.COLOURS.values()]
            assert list(tiny.COLOURS.values())[int(np.argmin(distances))] == code

            decoded = encoders.decode(vae, encoders.encode(vae, pixels[None]))[0]
            track, _ = saturation_centroid(decoded)
            assert (track[4] - track[0])[axis] * sign > max(1.5, (track[4] - track[0])[1 - axis].abs())


def test_prompt_is_all_that_tells_the_direction():
    """The first frame is independent of the direction: same random numbers, same start."""
    starts = [tiny.ball_track(direction, 5, np.random.default_rng(3))[0] for direction in tiny.DIRECTIONS]
    assert all(np.array_equal(starts[0], start) for start in starts)


def test_deterministic(world, tmp_path):
    tiny.make_robot_hdf5(tmp_path / "again.hdf5", NUM_DEMOS)
    assert (tmp_path / "again.hdf5").read_bytes() == (world / "robot.hdf5").read_bytes()
    tiny.make_robot_hdf5(tmp_path / "other.hdf5", 10, seed=1)
    with h5py.File(tmp_path / "other.hdf5") as other, h5py.File(world / "robot.hdf5") as file:
        assert not np.array_equal(other["data/demo_0/states"][0], file["data/demo_0/states"][0])
    again = tiny.make_transformer(36, 0).state_dict()
    saved = WanImageToVideoPipeline.from_pretrained(world / "i2v").transformer.state_dict()
    assert all(torch.equal(saved[name], tensor) for name, tensor in again.items())


def test_agreement_is_the_share_that_follows_the_prompt():
    follows = []
    for index in range(600):
        _, direction, balls = tiny.make_demo(index, 0.5, seed=0)
        step = (balls[1] - balls[0])[:2] / tiny.SPEED
        follows.append(np.allclose(step, tiny.DIRECTIONS[direction]))
    assert abs(np.mean(follows) - 0.625) < 0.06  # half, and a quarter of the other half by chance
    assert all(
        np.allclose((balls[1] - balls[0])[:2] / tiny.SPEED, tiny.DIRECTIONS[direction])
        for _, direction, balls in (tiny.make_demo(index, 1.0, seed=0) for index in range(48))
    )


def test_prompts(world):
    train, evaluation = (
        [json.loads(line) for line in (world / file).read_text().splitlines()] for file in ("train.jsonl", "eval.jsonl")
    )
    assert len(train) == 96 and len(evaluation) == 24
    seen, unseen = ({line["input"] for line in lines} for lines in (train, evaluation))
    assert len(seen) == 16 and len(unseen) == 8 and not seen & unseen
    directions = [{line["metadata"]["direction"] for line in lines} for lines in (train, evaluation)]
    assert directions[0] == directions[1] == set(tiny.DIRECTIONS)  # every direction is rewarded, of other colours
    assert not {line["metadata"]["colour"] for line in train} & {line["metadata"]["colour"] for line in evaluation}
    for line in train + evaluation:
        metadata = line["metadata"]
        assert line["input"] == tiny.prompt_of(metadata["colour"], metadata["direction"])
        image = np.array(Image.open(world / metadata["image_path"]))
        assert image.shape == (32, 32, 3)
        _, colour = saturation_centroid(cells(image[None]))
        distances = {name: (colour[0] - (torch.tensor(code) / 127.5 - 1)).norm() for name, code in tiny.COLOURS.items()}
        assert min(distances, key=distances.get) == metadata["colour"]
    assert len({(world / line["metadata"]["image_path"]).read_bytes() for line in train + evaluation}) == 120


@pytest.mark.parametrize("kind, channels, boundary", [("i2v", 36, 0.9), ("ti2v", 16, None), ("t2v", 16, 0.875)])
def test_checkpoints_load_as_released_ones(world, kind, channels, boundary):
    cls = WanImageToVideoPipeline if kind == "i2v" else WanPipeline
    pipeline = cls.from_pretrained(world / kind)
    assert json.loads((world / kind / "model_index.json").read_text())["_class_name"] == cls.__name__
    assert pipeline.config.boundary_ratio == boundary and pipeline.config.expand_timesteps == (kind == "ti2v")
    assert pipeline.scheduler.config.prediction_type == "flow_prediction" and pipeline.scheduler.config.flow_shift == 5
    experts = [pipeline.transformer] + ([] if kind == "ti2v" else [pipeline.transformer_2])
    for expert in experts:
        assert (expert.config.in_channels, expert.config.out_channels) == (channels, 16)
        assert expert.num_parameters() < 1e6
    if kind == "ti2v":
        assert pipeline.transformer_2 is None
    else:
        assert not torch.equal(experts[0].proj_out.weight, experts[1].proj_out.weight)
    assert encoders.latent_shape(str(world / kind), 5, 16, 16) == (16, 2, 4, 4)


def test_the_pipeline_runs(world):
    pipeline = WanImageToVideoPipeline.from_pretrained(world / "i2v")
    pipeline.set_progress_bar_config(disable=True)
    image = Image.open(world / "images" / "eval_000.png").resize((16, 16), Image.Resampling.BOX)
    sampled = dict(height=16, width=16, num_frames=5, num_inference_steps=4, max_sequence_length=16, output_type="np")
    video = pipeline(image, "a red ball moves left", generator=torch.Generator().manual_seed(0), **sampled).frames
    assert video.shape == (1, 5, 16, 16, 3) and np.isfinite(video).all()


def test_vae_keeps_the_scene():
    vae = tiny.make_vae()
    pixels = torch.stack([cells(tiny.render(tiny.make_demo(i, 1, 9)[2][:5], "red", 1)[0]) for i in range(24)])
    latents = encoders.encode(vae, pixels)
    assert latents.shape == (24, 16, 2, 4, 4)
    assert latents.mean((0, 2, 3, 4)).abs().max() < 1 and 0.3 < latents.std() < 1.5
    error = (encoders.decode(vae, latents) - pixels) / 2
    assert -10 * torch.log10(error.square().mean()) > 26  # dB


def test_text_tells_prompts_apart(world):
    tokenizer, text_encoder = encoders.load_text_encoder(str(world / "t2v"), dtype=torch.float32)
    prompts = [tiny.prompt_of(colour, direction) for colour, direction in tiny.PROMPTS] + [""]
    embeddings = encoders.encode_text(tokenizer, text_encoder, prompts, 16).flatten(1)
    distances = torch.cdist(embeddings, embeddings) + 1e9 * torch.eye(len(prompts))
    assert distances.min() > 0.4 * embeddings.norm(dim=1)[:-1].mean()  # one word changed is a third of the way and more

    instruction = "pick up the red cube and lift it off the table"  # a real robot's: 11 words and </s>
    for prompt, num_tokens in [(instruction, 12), (prompts[0], 6), ("", 1), ("zigzag", 8)]:
        tokens = tokenizer(prompt).input_ids
        assert len(tokens) == num_tokens and tokenizer.unk_token_id not in tokens and tokens[-1] == 1


@pytest.mark.parametrize("setting, value", [("num_demos", 5), ("agreement", 1.5), ("seed", -1),
                                            ("out", "/dev/null/tiny")])
def test_mistakes_are_one_line(monkeypatch, setting, value):
    monkeypatch.setattr(tiny, setting, value)
    with pytest.raises(UserError, match=f"{setting}={value}") as error:
        tiny.main()
    assert "\n" not in str(error.value)
