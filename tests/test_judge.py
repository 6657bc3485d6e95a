import json

import h5py
import numpy as np
import pytest
import torch

import encoders
import judge
import model as wan_model
import tiny
import validate
from data import rgb_cell
from guard import UserError
from read_hdf5 import RobotDemos
from recordings import Window

TASKS = {"lift the red cube off the table": (0, 0, 1), "push the red cube to the robot's left": (0, 1, 0),
         "push the red cube to the robot's right": (0, -1, 0), "push the red cube away from the robot": (1, 0, 0),
         "pull the red cube back towards the robot": (-1, 0, 0)}
VIEWS = {"robot0_agentview_left": 1, "robot0_agentview_right": -1}  # the sign of the camera's y
START, FRAMES = np.array([0.02, -0.03, 0.83]), 17


def camera(side):
    """Looks across the table at the robot's place: focal length 1.2 image sizes, as robosuite's views of Lift."""
    forward = np.array([-0.728, -0.544 * side, -0.418])
    forward /= np.linalg.norm(forward)
    right = np.cross(forward, [0, 0, 1])
    right /= np.linalg.norm(right)
    E = np.eye(4)
    E[:3, :3], E[:3, 3] = np.stack([right, np.cross(forward, right), forward], 1), [0.75, 0.65 * side, 1.45]
    K = np.array([[77.25, 0, 32], [0, 77.25, 32], [0, 0, 1]])
    return dict(intrinsics=K.tolist(), extrinsics=E.tolist(), size=[64, 64])


CAMERAS = [camera(side) for side in VIEWS.values()]


def draw(cubes, camera, half=1.6):
    """Cubes n f 3 metres (NaN: not there) -> f 3 64 64 in 0..1: dim red squares on a table, each dimmer than
    the one before, and a lamp: a single pixel, redder than they."""
    K, E = (np.array(camera[name]) for name in ("intrinsics", "extrinsics"))
    picture = np.full((cubes.shape[1], 3, 64, 64), 0.4)
    centres = np.arange(64) + 0.5
    for n, cube in enumerate(cubes):
        seen = (cube - E[:3, 3]) @ E[:3, :3] @ K.T
        column, row = (seen[:, :2] / seen[:, 2:]).T
        inside = [(half + 0.5 - abs(centres - at[:, None])).clip(0, 1) for at in (column, row)]  # f w, f h
        covered = np.nan_to_num(inside[1][:, None, :, None] * inside[0][:, None, None, :])  # f 1 h w
        picture += covered * (np.array([0.5 - 0.04 * n, 0.3, 0.3]).reshape(3, 1, 1) - picture)
    picture[:, :, 5, 9] = 0.6, 0.35, 0.35
    return torch.from_numpy(picture).float()


def moving(by, start=START):
    """f 3: a still beginning, then a straight path."""
    return start + np.linspace(-0.33, 1, FRAMES).clip(0)[:, None] * np.array(by)


def videos(*cubes):
    """v f 3 h w of paths f 3."""
    return torch.stack([draw(np.stack(cubes), camera) for camera in CAMERAS])


# ----------------------------------------------------------------------------- the judge


@pytest.mark.parametrize("prompt", TASKS)
def test_the_cube_is_followed_in_metres(prompt):
    """Whichever way: right to 6 mm, and of the five instructions it follows its own alone."""
    by = 0.08 * np.array(TASKS[prompt])
    moved = judge.cube_moved(videos(moving(by)), CAMERAS)
    assert (moved - torch.tensor(by)).norm() < 0.006
    assert [other for other in TASKS if judge.follows(moved, other)] == [prompt]
    small = torch.nn.functional.avg_pool2d(videos(moving(by)).flatten(0, 1), 2).view(2, FRAMES, 3, 32, 32)
    assert (judge.cube_moved(small, CAMERAS) - torch.tensor(by)).norm() < 0.01  # the intrinsics are of 64 x 64


def test_how_far_and_how_straight_is_enough():
    left = "push the red cube to the robot's left"
    for by, good in [((0, 0.03, 0), False), ((0, 0.04, 0), True), ((0.06, 0.05, 0), False), ((0.05, 0.06, 0), True),
                     ((0, -0.08, 0), False), ((0, 0, 0), False)]:
        moved = judge.cube_moved(videos(moving(by)), CAMERAS)
        assert (moved - torch.tensor(by)).norm() < 0.006 and judge.follows(moved, left) == good, by
    still = videos(moving((0, 0.08, 0)))[:, :1].expand(-1, FRAMES, -1, -1, -1)
    assert judge.cube_moved(still, CAMERAS).norm() < 1e-6
    assert not any(judge.follows(judge.cube_moved(still, CAMERAS), prompt) for prompt in TASKS)


def test_a_cube_that_vanishes_doubles_or_disagrees_is_none():
    """None follows no instruction, whatever the rest of the video shows."""
    path, gone, other = moving((0, 0.08, 0)), np.full((FRAMES, 3), np.nan), START + [-0.2, 0.1, 0]

    def moved(*cubes):
        return judge.cube_moved(videos(*cubes), CAMERAS)

    def absent(frames):
        part = path.copy()
        part[frames] = np.nan
        return part

    assert moved(path) is not None and moved(path, gone) is not None
    assert moved(absent(slice(-5, None))) is None  # vanished
    assert moved(absent(slice(0, 1))) is None  # not there at first
    assert moved(gone) is None
    hidden = moved(absent(slice(-3, None)))  # by the gripper at the very end: the fourth last frame counts
    assert (hidden - torch.tensor(path[-4] - START)).norm() < 0.006

    second = np.where(np.arange(FRAMES)[:, None] >= FRAMES - 1, other, np.nan)
    assert moved(path, second) is None  # doubled at the end
    assert moved(path, other + 0 * path) is None  # all the time
    grown = videos(path)
    grown[:, -1:] = torch.stack([draw(path[None, -1:], camera, half=3.4) for camera in CAMERAS])
    assert judge.cube_moved(grown, CAMERAS) is None
    assert moved(path, np.where(np.arange(FRAMES)[:, None] == 8, other, np.nan)) is not None

    split = torch.stack([draw(path[None], CAMERAS[0]), draw(moving((0.1, -0.1, 0))[None], CAMERAS[1])])
    assert judge.cube_moved(split, CAMERAS) is None  # no one place is where both views see it
    assert not judge.follows(None, "push the red cube to the robot's left")


def test_one_view_is_enough_at_the_end():
    """Where the gripper hides the cube from the other; what the one can't tell, along its ray, stays as it was."""
    by = torch.tensor([0, 0, 0.08]).double()
    shown = videos(moving(by.numpy()))
    shown[1, -6:] = draw(np.full((1, 6, 3), np.nan), CAMERAS[1])
    moved = judge.cube_moved(shown, CAMERAS)
    ray = torch.nn.functional.normalize(torch.tensor(START + by.numpy() - np.array([0.75, 0.65, 1.45])), dim=0)
    assert (moved - (by - ray * (ray @ by))).norm() < 0.006
    assert judge.follows(moved, "lift the red cube off the table")


def test_which_instructions_the_judge_knows():
    for prompt, asked in TASKS.items():
        assert judge.direction(prompt).tolist() == list(asked) == judge.direction(prompt.upper()).tolist()
    for prompt in ("a red ball moves left", "push the cube left", "push the red cube left and away",
                   "look at the red cube", ""):
        assert judge.direction(prompt) is None
        with pytest.raises(UserError, match="want the red cube, and one of the words lift, left, right, away, back"):
            judge.follows(torch.zeros(3).double(), prompt)


# ----------------------------------------------------------------------------- recordings: validation and tiny --robot


@pytest.fixture(scope="module")
def recording(tmp_path_factory):
    """Ten drawn demos, two of each instruction, the second half held out; the last demo of each half stays still."""
    path = tmp_path_factory.mktemp("judge") / "cubes.hdf5"
    with h5py.File(path, "w") as file:
        for i in range(10):
            prompt, asked = list(TASKS.items())[i % 5]
            demo = file.create_group(f"data/demo_{i}")
            demo.attrs["ep_meta"] = json.dumps({"lang": prompt})
            clip = moving((0.08 if i % 5 < 4 else 0.0) * np.array(asked), START + [0, 0.01 * (i // 5), 0])
            for view, each in zip(VIEWS, CAMERAS, strict=True):
                frames = (draw(clip[None], each) * 255).round().byte().permute(0, 2, 3, 1).numpy()
                demo[f"obs/{view}_image"] = frames
                demo[f"obs/{view}_depth"] = np.full((FRAMES, 64, 64), 1.0 + 0.1 * i, np.float32)
                for name in ("intrinsics", "extrinsics"):
                    demo[f"obs/{view}_{name}"] = np.repeat(np.array(each[name], np.float32)[None], FRAMES, 0)
        file["mask/train"] = [f"demo_{i}" for i in range(5)]
        file["mask/valid"] = [f"demo_{i}" for i in range(5, 10)]
    return path


def test_success_beside_its_floor_and_ceiling(recording, monkeypatch, tmp_path):
    """A still picture follows no instruction, the recordings four of five, through the VAE; by RGB alone too."""
    demos = RobotDemos(recording, ",".join(VIEWS))
    windows = [window for window in demos.windows(FRAMES, 4) if window.split == "val"]
    prompt, cameras = validate.task_of(demos, windows[1])
    assert prompt == "push the red cube to the robot's left" and [each["size"] for each in cameras] == [(64, 64)] * 2
    for each, wanted in zip(cameras, CAMERAS, strict=True):
        np.testing.assert_allclose(each["extrinsics"], wanted["extrinsics"], atol=1e-6)

    vae = encoders.AutoencoderDCT(48, [0.0] * 48, [1.0] * 48)
    monkeypatch.setattr(encoders, "load_vae", lambda model, device: vae)

    class Cache:
        val, box = windows, None

    config = dict(num_val_videos=20, model="", num_frames=FRAMES, cell_height=64, cell_width=64)
    bounds = validate.floor_and_ceiling(Cache, demos, config, 0, 1, "cpu")
    assert bounds["floor/success"] == 0 and bounds["ceiling/success"] == 0.8
    assert bounds["floor/moved_psnr"] < bounds["ceiling/moved_psnr"] - 5
    assert bounds["floor/psnr"] < bounds["ceiling/psnr"] - 2

    def edited(change):
        path = tmp_path / "edited.hdf5"
        path.write_bytes(recording.read_bytes())
        with h5py.File(path, "r+") as file:
            change(file["data/demo_6"])
        return validate.task_of(RobotDemos(path, ",".join(VIEWS)), windows[1])

    assert edited(lambda demo: None) is not None
    assert edited(lambda demo: demo.pop("obs/robot0_agentview_right_extrinsics")) is None  # RGB alone
    assert edited(lambda demo: demo.attrs.modify("ep_meta", json.dumps({"lang": "a red ball moves left"}))) is None
    assert validate.task_of(RobotDemos(recording, "robot0_agentview_left"), windows[1]) is None  # one view


def test_models_in_a_size_for_recordings(recording, monkeypatch, tmp_path):
    """tiny.py --robot: 48 channels, the words of the file, and the latent statistics of its training demos' clips."""
    monkeypatch.setitem(tiny.ROBOT_TRANSFORMER, "num_layers", 1)
    box = "-1,-1,-1,1,1,1"
    for name, value in dict(out=str(tmp_path), robot=str(recording), robot_cell=32, robot_box=box).items():
        monkeypatch.setattr(tiny, name, value)
    tiny.main()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["robot_i2v", "robot_ti2v"]
    for kind, channels, experts in (("i2v", 100, ("high", "low")), ("ti2v", 48, ("single",))):
        wan = wan_model.describe(str(tmp_path / f"robot_{kind}"))
        assert wan.kind == kind and wan.expert_names == experts
        assert wan.config["in_channels"] == channels and wan.config["out_channels"] == 48
        width = wan.config["num_attention_heads"] * wan.config["attention_head_dim"]
        assert width == 256 > 4 * 48  # a narrower model can't pass a token's latents through
        assert encoders.latent_shape(str(tmp_path / f"robot_{kind}"), 9, 64, 64) == (48, 3, 16, 16)
    tokenizer, _ = encoders.load_text_encoder(str(tmp_path / "robot_i2v"))
    for prompt in TASKS:
        tokens = tokenizer(prompt).input_ids
        assert len(tokens) == len(prompt.split()) + 1 and tokenizer.unk_token_id not in tokens

    demos, clips = RobotDemos(recording, ",".join(VIEWS), pointmaps=True), []
    for i in range(5):  # those of mask/train, their first 9 frames
        window = Window(f"demo_{i}", 0, 9, "train")
        for view in VIEWS:
            xyz, _ = demos.points(window, view, 9)
            clips += [rgb_cell(demos.rgb(window, view, 9), 32, 32),
                      torch.nn.functional.interpolate(torch.from_numpy(xyz).permute(0, 3, 1, 2).clamp(-1, 1), (32, 32),
                                                      mode="nearest-exact").transpose(0, 1)]
    raw = encoders.AutoencoderDCT(48).encode(torch.stack(clips).float()).latent_dist.mode().transpose(0, 1).flatten(1)
    vae = encoders.load_vae(str(tmp_path / "robot_i2v"))
    torch.testing.assert_close(torch.tensor(vae.config.latents_mean), raw.mean(1), atol=2e-3, rtol=1e-3)
    torch.testing.assert_close(torch.tensor(vae.config.latents_std), raw.std(1).sqrt(), atol=2e-3, rtol=1e-3)

    monkeypatch.setattr(tiny, "robot", str(tmp_path / "none.hdf5"))
    with pytest.raises(UserError, match="none.hdf5: no such file"):
        tiny.main()
