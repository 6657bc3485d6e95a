import io
import json
import runpy
import shutil
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn import functional as F
from transformers import CLIPConfig, CLIPImageProcessorPil, CLIPModel, CLIPTokenizer

import encoders
import fsdp
import reward
import task_rewards
import tiny
import web
from geometry import normalise_points
from guard import UserError
from helpers import ENVIRONMENT, REPOSITORY, refusal, script
from video import read_mp4, write_mp4


def noise(*shape, seed=0):
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed))


# ----------------------------------------------------------------------------- specification, mix, score


@pytest.mark.parametrize("spec, wanted", [
    ("pickscore:1.0,smoothness:0.1", [("pickscore", 1.0), ("smoothness", 0.1)]),
    ("ball", [("ball", 1.0)]),
    (" jpeg:-2 , first_frame:1e-3", [("jpeg", -2.0), ("first_frame", 0.001)]),
    ("http://host:8000:0.5", [("http://host:8000", 0.5)]),
    ("http://host:8000", [("http://host:8000", 1.0)]),
    ("https://host/path/score:1.0,ball:2", [("https://host/path/score", 1.0), ("ball", 2.0)]),
    ("http://10.0.0.1:80/a:b:-.5", [("http://10.0.0.1:80/a:b", -0.5)]),
])
def test_parse(spec, wanted):
    assert reward.parse_rewards(spec) == wanted


@pytest.mark.parametrize("spec, message", [
    ("pickscor:1.0", r"rewards=pickscor:1.0: got 'pickscor' \(did you mean pickscore\?\), want some of pickscore"),
    ("", "got '', want some of pickscore, .*views, http://host:port/path"),
    ("ball:1.0,", "got '', want"),
    ("ball:x", "got weight 'x' of ball, want a number as in ball:1.0"),
    ("ball:nan", "got weight 'nan'"),
    ("ball:", "got weight ''"),
    ("ball:1.0,ball:2.0", "got ball twice"),
    ("http:1.0", "got 'http', want .*http://host:port/path"),
])
def test_parse_mistakes(spec, message):
    with pytest.raises(UserError, match=message) as error:
        reward.parse_rewards(spec)
    assert "\n" not in str(error.value)


def test_load_score_and_mix():
    videos = noise(3, 5, 3, 8, 8)
    rewards = reward.load_rewards("smoothness:2.0,jpeg:-0.5", {})
    scores = reward.score(rewards, videos, ["a"] * 3, [{}] * 3)
    assert list(scores) == ["smoothness", "jpeg"]
    assert all(values.shape == (3,) and values.dtype == torch.float32 for values in scores.values())
    total = reward.mix(scores, reward.parse_rewards("smoothness:2.0,jpeg:-0.5"))
    assert torch.equal(total, 2 * scores["smoothness"] - 0.5 * scores["jpeg"])


def test_a_loader_gets_all_settings(monkeypatch):
    """A reward with a setting is the setting, a loader and a line in REWARDS."""

    def load_threshold(name, config, device):
        least = config["least_brightness"]
        return lambda videos, prompts, metadata: (videos.mean((1, 2, 3, 4)) > least).to(device)

    monkeypatch.setitem(reward.REWARDS, "bright", load_threshold)
    config = {"least_brightness": 0.4, "lr": 1e-3}
    videos = torch.tensor([0.3, 0.5])[:, None, None, None, None].expand(2, 2, 3, 4, 4)
    for names in ("bright:2.0,smoothness", ["bright", "first_frame"], dict([("bright", 2.0)])):
        rewards = reward.load_rewards(names, config, torch.device("cpu"))
        assert list(rewards) == (["bright", "smoothness"] if isinstance(names, str) else list(names))
        assert rewards["bright"](videos, None, None).tolist() == [False, True]
    assert reward.load_rewards(["bright"], config, "meta")["bright"](videos, None, None).device.type == "meta"
    with pytest.raises(UserError, match="reward bright: got no setting least_brightness, want it among") as error:
        reward.load_rewards("smoothness,bright", {"lr": 1e-3})
    assert "\n" not in str(error.value)
    # but what goes wrong inside a loader is not taken for a missing setting
    monkeypatch.setitem(reward.REWARDS, "bright", lambda name, config, device: {}["weights"])
    with pytest.raises(KeyError, match="weights"):
        reward.load_rewards("bright", config)


@pytest.mark.parametrize("name, lacking", [
    ("pickscore", "pickscore_frames"), ("pickscore", "pickscore_model"), ("http://127.0.0.1:1/", "reward_timeout"),
])
def test_missing_settings_are_named(name, lacking):
    config = {"pickscore_model": "/nowhere/clip", "pickscore_frames": 4, "reward_timeout": 5.0}
    del config[lacking]
    with pytest.raises(UserError, match=f"reward {name}: got no setting {lacking}, want it among those of the script"):
        reward.load_rewards([name], config)


@pytest.mark.parametrize("values, message", [
    (torch.tensor([0.0, float("nan"), 1.0]), "reward mine: got nan for 'two', want finite"),
    (torch.tensor([float("inf"), 0.0, 1.0]), "reward mine: got inf for 'one'"),
    (None, r"reward mine: got None, want 3 numbers, one a video"),
    (["a", "b", "c"], r"reward mine: got \['a', 'b', 'c'\], want 3 numbers, one a video"),
    (torch.zeros(3, 1), r"reward mine: got shape \(3, 1\), want \(3,\)"),
    (torch.tensor(0.0), r"reward mine: got shape \(\), want \(3,\)"),
])
def test_a_bad_reward_is_named(values, message):
    with pytest.raises(UserError, match=message):
        reward.score({"mine": lambda *_: values}, noise(3, 2, 3, 4, 4), ["one", "two", "three"], [{}] * 3)


def test_score_wants_frames_before_channels():
    with pytest.raises(ValueError, match="videos"):
        reward.score({}, noise(2, 3, 5, 4, 4), ["a", "b"], [{}, {}])



@pytest.mark.parametrize("error", [SystemExit(3), SystemExit(), GeneratorExit("x"), ZeroDivisionError("1 / 0")])
def test_whatever_a_reward_raises_is_one_line(capsys, error):
    def odd(*_):
        raise error

    videos = noise(1, 3, 3, 4, 6)
    with pytest.raises(UserError, match=f"^reward odd: {type(error).__name__}: {error}$"):
        reward.score({"odd": odd}, videos, ["a"], [{}])
    assert "in odd\n" in capsys.readouterr().err  # its author sees where


@pytest.mark.parametrize("error", [KeyboardInterrupt, fsdp.Stopped(0)])
def test_a_run_that_is_stopped_in_a_reward_stops(error):
    def stopped(*_):
        raise error

    with pytest.raises(type(error) if isinstance(error, BaseException) else error):
        reward.score({"stopped": stopped}, noise(1, 3, 3, 4, 6), ["a"], [{}])


def test_what_a_reward_does_to_its_videos_is_seen_by_nobody():
    def spoiler(videos, prompts, metadata):
        videos.zero_()
        prompts[0], metadata[0]["box"][0] = "another", 7
        return torch.zeros(len(videos))

    def after(videos, prompts, metadata):
        assert prompts == ["a"] and metadata == [{"box": [1]}]
        return videos.mean((1, 2, 3, 4))

    videos, prompts, metadata = noise(1, 3, 3, 4, 6), ["a"], [{"box": [1]}]
    kept = videos.clone()
    scores = reward.score({"spoiler": spoiler, "after": after}, videos, prompts, metadata)
    assert torch.equal(videos, kept) and scores["after"] == kept.mean()
    assert prompts == ["a"] and metadata == [{"box": [1]}]


# ----------------------------------------------------------------------------- advantages


@pytest.mark.parametrize("global_std", [False, True])
def test_group_advantages(global_std):
    rewards = torch.tensor([0.1, 5.0, 0.4, 3.0, 0.9, 4.5, 7.0, 7.0, 7.0])
    groups = torch.tensor([4, 1, 4, 1, 4, 1, 2, 2, 2])  # not in order, not from 0
    advantages, num_equal = reward.group_advantages(rewards, groups, global_std)
    wanted = np.zeros(9)
    for members in ([0, 2, 4], [1, 3, 5]):
        values = rewards.double().numpy()[members]
        std = np.std(rewards.double().numpy() if global_std else values)
        wanted[members] = (values - values.mean()) / (std + 1e-4)
    assert num_equal == 1 and advantages.dtype == torch.float32
    assert np.allclose(advantages, wanted, atol=1e-6)
    assert (advantages[6:] == 0).all()
    assert all(abs(advantages[groups == group].sum()) < 1e-5 for group in (1, 2, 4))


def test_advantages_are_clipped_and_equal_rewards_exactly_zero():
    rewards = torch.zeros(100)
    rewards[0] = 1  # (1 - 0.01) / 0.0995 = 9.9 standard deviations
    advantages, _ = reward.group_advantages(rewards, torch.zeros(100, dtype=torch.long))
    assert advantages[0] == 5
    assert reward.group_advantages(rewards, torch.zeros(100, dtype=torch.long), clip=2.0)[0][0] == 2
    equal = torch.full((6,), 0.1)  # whose mean is not 0.1 in float32
    advantages, num_equal = reward.group_advantages(equal, torch.tensor([0, 0, 0, 1, 1, 1]), global_std=True)
    assert num_equal == 2 and (advantages == 0).all()


# ----------------------------------------------------------------------------- closed forms


def test_smoothness():
    fade = torch.linspace(0, 1, 6)[None, :, None, None, None].expand(1, 6, 3, 4, 4)
    strobe = torch.tensor([0.0, 1.0] * 3)[None, :, None, None, None].expand(1, 6, 3, 4, 4)
    random = noise(1, 6, 3, 4, 4)
    got = reward.smoothness(torch.cat([fade, strobe, random]), None, None)
    x = random[0].double().numpy()
    wanted = -np.mean([(x[i + 1] - 2 * x[i] + x[i - 1]) ** 2 for i in range(1, 5)])
    assert torch.allclose(got, torch.tensor([0, -4, wanted]).float(), atol=1e-6)
    with pytest.raises(UserError, match="reward smoothness: got videos of 2 frames, want at least 3"):
        reward.smoothness(noise(1, 2, 3, 4, 4), None, None)


def test_first_frame():
    videos = noise(2, 3, 3, 4, 4)
    videos[1, 1] = videos[1, 0]  # continues the given frame; frame 2 may differ
    got = reward.first_frame(videos, None, None)
    wanted = -np.mean((videos[0, 1].double().numpy() - videos[0, 0].double().numpy()) ** 2)
    assert got[0] == pytest.approx(wanted, rel=1e-5) and got[1] == 0


def test_jpeg(tmp_path):
    videos = torch.stack([noise(2, 3, 32, 48), torch.full((2, 3, 32, 48), 0.5)])
    got = reward.jpeg(videos, None, None)
    sizes = []
    for index in range(2):
        Image.fromarray((videos[0, index].permute(1, 2, 0).numpy() * 255).round().astype(np.uint8)).save(
            tmp_path / "frame.jpg", quality=95
        )
        sizes.append((tmp_path / "frame.jpg").stat().st_size)
    assert got[0] == pytest.approx(-sum(sizes) / 2 / 1000, rel=1e-6) and got[0] < -2 < -0.9 < got[1] < 0


# ----------------------------------------------------------------------------- the tiny world's ball


@pytest.fixture(scope="module")
def clips():
    """96 true clips b 5 3 16 16, raw and through the VAE, with their metadata."""
    vae, videos, metadata = tiny.make_vae(), [], []
    for index in range(96):
        colour, direction = tiny.PROMPTS[index % 24]
        balls = tiny.ball_track(direction, 5, np.random.default_rng((5, index)))
        rgb, _ = tiny.render(balls, colour, (-1, 1)[index // 24 % 2])
        videos.append(F.avg_pool2d(torch.from_numpy(rgb).permute(0, 3, 1, 2).float() / 255, 2))
        metadata.append({"colour": colour, "direction": direction})
    raw = torch.stack(videos)
    decoded = encoders.decode(vae, encoders.encode(vae, raw.transpose(1, 2) * 2 - 1)).transpose(1, 2) / 2 + 0.5
    return {"raw": raw, "decoded": decoded}, metadata


def ball(videos, metadata):
    values = reward.score(reward.load_rewards("ball,ball_success", {}), videos, ["x"] * len(videos), metadata)
    return values["ball"], values["ball_success"]


@pytest.mark.parametrize("which", ["raw", "decoded"])
def test_true_clips_score_high_and_wrong_ones_nothing(clips, which):
    videos, metadata = clips[0][which], clips[1]
    score, success = ball(videos, metadata)
    assert score.min() >= 0.85 and score.mean() > 0.97 and score.max() <= 1 and success.all()
    for key, values in (("direction", tiny.DIRECTIONS), ("colour", tiny.COLOURS)):
        for value in values:
            other = torch.tensor([entry[key] != value for entry in metadata])
            score, success = ball(videos, [{**entry, key: value} for entry in metadata])
            assert score[other].max() < 0.05 and not success[other].any()
            assert score[~other].min() >= 0.85


@pytest.mark.parametrize("which", ["raw", "decoded"])
def test_ball_cannot_be_fooled(clips, which):
    videos, metadata = clips[0][which], clips[1]
    grey = torch.full_like(videos, 0.6)
    red = torch.tensor([1.0, 0, 0])[:, None, None]
    hacks = {
        "still": videos[:, :1].expand_as(videos),
        "vanishes": torch.cat([videos[:, :4], grey[:, 4:]], 1),
        "vanishes at once": torch.cat([videos[:, :1], grey[:, 1:]], 1),
        "never there": grey,
        "black": torch.zeros_like(videos),
        "fades": torch.cat([videos[:, :1], videos[:, 1:] * 0.25 + grey[:, 1:] * 0.75], 1),
        "tints everything": torch.cat([videos[:, :1], videos[:, 1:] * 0.5 + red * 0.5], 1),
        "noise": noise(*videos.shape),
    }
    for name, hack in hacks.items():
        score, success = ball(hack, metadata)
        assert score.max() < 0.05 and not success.any(), name
    # What leaves its trail behind moves its centroid too; it must be far below a true clip.
    saturation = videos.amax(2, keepdim=True) - videos.amin(2, keepdim=True)  # b f 1 h w
    trail = [videos[:, 0]]
    for frame in range(1, 5):
        brightest = saturation[:, : frame + 1].argmax(1, keepdim=True).expand(-1, -1, 3, -1, -1)
        trail.append(videos[:, : frame + 1].gather(1, brightest)[:, 0])
    assert ball(torch.stack(trail, 1), metadata)[0].mean() < 0.3
    ghost = torch.cat([videos[:, :1], (videos[:, 1:] + videos[:, :1]) / 2], 1)  # half here, half there
    assert ball(ghost, metadata)[0].mean() < 0.65
    late = torch.cat([videos[:, :1].expand(-1, 4, -1, -1, -1), videos[:, 4:]], 1)  # jumps in the last frame
    assert ball(late, metadata)[0].max() < 0.45


def test_ball_can_be_learned_from(clips):
    """From standing still to the true clip, in latent space, the reward rises all the way; a little noise is free."""
    videos, metadata = clips[0]["raw"], clips[1]
    vae = tiny.make_vae()
    moving = encoders.encode(vae, videos.transpose(1, 2) * 2 - 1)
    still = encoders.encode(vae, videos[:, :1].expand_as(videos).transpose(1, 2) * 2 - 1)

    def mean_score(latents):
        return ball(encoders.decode(vae, latents).transpose(1, 2) / 2 + 0.5, metadata)[0].mean()

    means = [mean_score(still + share * (moving - still)) for share in (0, 0.25, 0.5, 0.75, 1)]
    assert all(0.03 < after - before < 0.5 for before, after in zip(means, means[1:], strict=False))
    grain = torch.randn(moving[:, :, 1:].shape, generator=torch.Generator().manual_seed(0))
    noisy = [mean_score(torch.cat([moving[:, :, :1], moving[:, :, 1:] + std * grain], 2)) for std in (0.3, 0.5, 0.7)]
    assert noisy[0] > 0.95 and noisy[1] > 0.8 and 0.1 < noisy[2] < noisy[1]


def test_ball_in_closed_form():
    """A hard square of pure red on grey: progress is the shift over the least path, quality 1."""
    def square(columns):
        video = torch.full((len(columns), 3, 32, 32), 0.5)
        for frame, column in enumerate(columns):
            video[frame, :, 12:20, column : column + 8] = torch.tensor([0.86, 0.16, 0.16])[:, None, None]
        return video

    right = {"colour": "red", "direction": "right"}
    least = task_rewards.PATH * 32  # pixels a frame, 1.28
    videos = torch.stack([square([4, 6, 8, 10]), square([4, 5, 6, 7]), square([4, 4, 4, 8]), square([8, 6, 4, 2])])
    score, success = ball(videos, [right] * 4)
    wanted = [1, 1 / least, 3 * least / (6 * least), 0]
    assert torch.allclose(score, torch.tensor(wanted, dtype=torch.float32), atol=1e-5)
    assert success.tolist() == [1, 1, 1, 0]  # 6, 3 and 4 pixels of 32 exceed 8 %
    assert torch.allclose(ball(videos.flip(-1), [{**right, "direction": "left"}] * 4)[0], score, atol=1e-5)
    assert torch.allclose(ball(videos.mT, [{**right, "direction": "down"}] * 4)[0], score, atol=1e-5)
    assert torch.allclose(ball(videos.mT.flip(-2), [{**right, "direction": "up"}] * 4)[0], score, atol=1e-5)
    along, across, quality = task_rewards.ball_track(videos, [{**right, "direction": "up"}] * 4)
    assert along.abs().max() < 1e-6 and torch.allclose(across[0], torch.tensor([0, 2, 4, 6]) / 32, atol=1e-6)


@pytest.mark.parametrize("metadata", [{}, {"colour": "pink", "direction": "left"}, {"colour": "red", "direction": 1}])
def test_ball_wants_metadata(metadata):
    with pytest.raises(UserError, match="reward ball or ball_success: got (colour|direction) .*, want one of"):
        ball(noise(1, 5, 3, 8, 8), [metadata])


# ----------------------------------------------------------------------------- views of an HCPT grid

BOX = [-0.6, -0.6, -0.1, 0.6, 0.9, 0.5]


def hcpt(shift=0.0, collapse=False):
    """(pointmaps v 3 f h w in -1..1 of the tiny scene, the right view's points shifted by metres in x, cameras)."""
    balls = tiny.ball_track("left", 2, np.random.default_rng(0))
    cells, cameras = [], []
    for view, side in tiny.VIEWS.items():
        intrinsics, extrinsics = tiny.camera(side)
        _, points, _ = tiny.trace(balls, intrinsics, extrinsics, 48)
        points = torch.from_numpy(points).float() + torch.tensor([shift if view.endswith("right") else 0.0, 0, 0])
        points = points * 0 + torch.tensor([0.0, 0.0, 0.1]) if collapse else points
        cells.append(normalise_points(points, BOX).permute(3, 0, 1, 2))
        cameras.append(dict(intrinsics=intrinsics.tolist(), extrinsics=extrinsics.tolist(), size=[32, 32]))
    return torch.stack(cells), cameras


def views(cells, cameras, in_metadata=False):
    row = torch.cat(list(cells), -1).transpose(0, 1) / 2 + 0.5  # f 3 h W
    entry = {"box": BOX, "cameras": cameras} | ({"points": cells} if in_metadata else {})
    grid = torch.cat([torch.rand_like(row), torch.rand_like(row) if in_metadata else row], 2)
    return reward.score({"views": reward.views}, grid[None], ["x"], [entry])["views"][0].item()


def test_views_of_a_true_scene_agree():
    cells, cameras = hcpt()
    assert -0.1 < views(cells, cameras) <= 0  # mm
    assert views(cells, cameras, in_metadata=True) == pytest.approx(views(cells, cameras), abs=1e-3)


def test_views_measure_millimetres():
    """All of the right view's points 10 mm to the side: 10 mm apart, and those also about as far off their rays."""
    cells, cameras = hcpt(shift=0.01)
    assert -21 < views(cells, cameras) < -9
    assert views(*hcpt(shift=0.02)) == pytest.approx(2 * views(cells, cameras), rel=0.1)


def test_views_leave_out_what_is_hidden_and_what_is_clamped():
    """Two cameras in one place. To the left the second sees a wall 1 m away, before the first one's 2 m: the first's
    points are hidden there (0.6 of its pixels), the second's are wrong, 1 m off and more. 0.8 of 1.4 agree."""
    camera = dict(intrinsics=[[10.0, 0, 5], [0, 10.0, 5], [0, 0, 1]], extrinsics=torch.eye(4).tolist(), size=[10, 10])
    x, y = torch.meshgrid((torch.arange(10) - 4.5) / 10, (torch.arange(10) - 4.5) / 10, indexing="xy")
    far = torch.stack([x, y, torch.ones(10, 10)], -1)[None] * 2  # 1 h w 3 metres
    near = torch.where(torch.arange(10)[:, None] < 6, far / 2, far)
    box = torch.tensor([-3.0, -3, -3, 3, 3, 3])
    distance = task_rewards.view_distance(normalise_points(torch.stack([far, near]), box), box, [camera] * 2)
    assert distance < 0.01
    # Six columns beyond the box: its wall at x = -0.15 m is all that is known of them, and they don't count.
    box = torch.tensor([-3.0, -3, -3, -0.15, 3, 3])
    distance = task_rewards.view_distance(normalise_points(torch.stack([far, far]), box), box, [camera] * 2)
    assert distance < 0.01


def test_views_cannot_be_fooled():
    diagonal = 1000 * np.linalg.norm(np.subtract(BOX[3:], BOX[:3]))
    cells, cameras = hcpt(collapse=True)  # all points in one place: the views agree, but no camera sees it so
    assert views(cells, cameras) < -50
    assert views(torch.ones_like(cells), cameras) == pytest.approx(-diagonal, rel=1e-5)  # nothing that can be compared
    assert views(*hcpt()) > views(noise(*cells.shape) * 1.8 - 0.9, cameras) + 50
    with pytest.raises(UserError, match="reward views: got no box in metadata"):
        reward.views(noise(1, 2, 3, 8, 8), ["x"], [{}])


# ----------------------------------------------------------------------------- PickScore


@pytest.fixture(scope="module")
def clip_folder(tmp_path_factory):
    """A tiny CLIP with a byte-level tokenizer, in one folder as save_pretrained leaves it."""
    folder = tmp_path_factory.mktemp("clip")
    letters = "abcdefghijklmnopqrstuvwxyz"
    tokens = ["<|startoftext|>", "<|endoftext|>", *letters, *(f"{letter}</w>" for letter in letters)]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    (folder / "vocab.json").write_text(json.dumps(vocabulary))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    CLIPTokenizer(str(folder / "vocab.json"), str(folder / "merges.txt")).save_pretrained(folder)
    small = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, projection_dim=16)
    text = dict(vocab_size=len(tokens), bos_token_id=0, eos_token_id=1, pad_token_id=1)
    torch.manual_seed(0)
    vision = small | dict(patch_size=56)
    model = CLIPModel(CLIPConfig(text_config=small | text, vision_config=vision, projection_dim=16))
    model.logit_scale.data.fill_(4.6)
    model.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def other_clip(clip_folder, tmp_path_factory):
    """The same with a processor and sizes of its own: 96 of 112 pixels, bilinear, other colours, 12 text tokens."""
    folder = tmp_path_factory.mktemp("other_clip")
    CLIPTokenizer.from_pretrained(clip_folder).save_pretrained(folder)
    config = CLIPConfig.from_pretrained(clip_folder)
    config.vision_config.image_size, config.vision_config.patch_size = 96, 48
    config.text_config.max_position_embeddings = 12
    torch.manual_seed(1)
    CLIPModel(config).save_pretrained(folder)
    CLIPImageProcessorPil(size={"shortest_edge": 112}, crop_size=96, resample=Image.Resampling.BILINEAR,
                          image_mean=[0.5, 0.4, 0.3], image_std=[0.2, 0.3, 0.4]).save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("folder", ["clip_folder", "other_clip"])
def test_pickscore_is_its_formula(request, folder):
    clip_folder = request.getfixturevalue(folder)
    videos, prompts = noise(3, 9, 3, 40, 60), ["a red ball that rolls", "cats", "a red ball that rolls"]
    config = dict(pickscore_model=clip_folder, pickscore_frames=3)
    got = reward.score(reward.load_rewards("pickscore", config), videos, prompts, [{}] * 3)["pickscore"]

    model, tokenizer = CLIPModel.from_pretrained(clip_folder), CLIPTokenizer.from_pretrained(clip_folder)
    own = folder == "other_clip"
    processor = CLIPImageProcessorPil.from_pretrained(clip_folder) if own else CLIPImageProcessorPil()
    cut = dict(truncation=True, max_length=12 if own else 77)
    for index, prompt in enumerate(prompts):
        frames = [videos[index, frame] for frame in (1, 4, 8)]  # 1, 4.5, 8
        images = [Image.fromarray((f.permute(1, 2, 0).numpy() * 255).round().astype(np.uint8)) for f in frames]
        with torch.no_grad():  # the whole model's own logits
            logits = model(**tokenizer([prompt], return_tensors="pt", **cut), **processor(images, return_tensors="pt"))
        assert got[index] == pytest.approx(logits.logits_per_image.mean().item() / 26, abs=2e-4)
    assert abs(got[0] - got[1]) > 1e-3  # and it does depend on the prompt

    changed = videos.clone()
    changed[:, 0] = 0  # the given frame is left out
    again = reward.score(reward.load_rewards("pickscore", config), changed, prompts, [{}] * 3)["pickscore"]
    assert torch.equal(got, again)


def test_pickscore_of_few_frames_and_in_batches(clip_folder):
    """More frames asked for than there are; one image; micro-batches change nothing; the model is loaded once."""
    videos, prompts, metadata = noise(3, 5, 3, 16, 16), ["a", "b", "c"], [{}] * 3
    four, many = (reward.load_rewards("pickscore", dict(pickscore_model=clip_folder, pickscore_frames=n))["pickscore"]
                  for n in (4, 9))
    assert torch.equal(four(videos, prompts, metadata), many(videos, prompts, metadata))
    one = four(videos[:, :1], prompts, metadata)
    assert one.shape == (3,) and torch.allclose(one, four(videos[:, :1].expand(-1, 2, -1, -1, -1), prompts, metadata))
    whole = four(videos.repeat(3, 1, 1, 1, 1), prompts * 3, metadata * 3)  # 36 frames, of which 32 go at once
    assert torch.allclose(whole, four(videos, prompts, metadata).repeat(3), atol=1e-5)
    assert reward.load_clip(clip_folder, "cpu")[2] is reward.load_clip(clip_folder, "cpu")[2]


def test_an_image_processor_that_fits_no_clip_is_refused(other_clip, tmp_path, capsys):
    """And where there is none, CLIP's own at the config's size stands in, which a line says."""
    for name in Path(other_clip).iterdir():
        shutil.copy(name, tmp_path)
    good = json.loads((tmp_path / "preprocessor_config.json").read_text())
    for change in (dict(crop_size={"height": 64, "width": 64}), dict(size={"height": 96, "width": 96}),
                   dict(do_normalize=False), dict(do_rescale=False), dict(image_mean=[0.5, 0.5]), dict(resample=1)):
        (tmp_path / "preprocessor_config.json").write_text(json.dumps(good | change))
        with pytest.raises(UserError, match=f"^pickscore_model={tmp_path}: want an image processor like") as error:
            reward.load_clip(str(tmp_path), "cpu")
        assert "\n" not in str(error.value)
    (tmp_path / "preprocessor_config.json").unlink()
    processor = reward.load_clip(str(tmp_path), "cpu")[1]
    assert processor.crop_size["height"] == processor.size["shortest_edge"] == 96
    assert processor.image_mean == CLIPImageProcessorPil().image_mean
    assert f"{tmp_path}: taking CLIP's image processor, at 96 pixels" in capsys.readouterr().err


@pytest.mark.parametrize("height, width", [(480, 832), (832, 480), (224, 224), (301, 227), (100, 64), (16, 16)])
@pytest.mark.parametrize("options", [
    {}, dict(size={"shortest_edge": 112}, crop_size=96, resample=Image.Resampling.BILINEAR, image_std=[0.26] * 3)])
def test_clip_pixels_equal_the_processor(height, width, options):
    smooth = F.interpolate(noise(1, 3, 12, 20), (height, width), mode="bicubic").clamp(0, 1)
    frame = (smooth + 0.1 * noise(1, 3, height, width, seed=1)).clamp(0, 1)
    image = Image.fromarray((frame[0].permute(1, 2, 0).numpy() * 255).round().astype(np.uint8))
    processor = CLIPImageProcessorPil(**options)
    wanted = processor(image, return_tensors="pt")["pixel_values"]
    got = reward.clip_pixels(frame, processor)
    assert got.shape == wanted.shape == (1, 3, *[options.get("crop_size", 224)] * 2)
    level = 1 / 255 / 0.26  # one of 255 levels, in the normalised units
    assert (got - wanted).abs().max() < 2.1 * level and (got - wanted).abs().mean() < (0.2 if options else 0.02) * level


def test_random_clip_is_vit_h():
    """Built without memory: the parameter count of CLIP-ViT-H-14."""
    tokenizer, _, model = reward.load_clip("random", "meta")
    assert sum(p.numel() for p in model.parameters()) == 986_109_441
    ids = tokenizer(["a red ball", "b"], padding=True)["input_ids"]
    assert ids.shape == (2, 77) and (ids[:, :76] == 49406).all() and (ids[:, 76] == 49407).all()


def test_random_clip_is_the_same_on_every_rank(monkeypatch):
    """Ranks begin with seeds of their own; a smaller CLIP stands for the full size."""
    monkeypatch.setattr(reward, "CLIPModel", lambda config: torch.nn.Linear(3, 2))
    draws = []
    for rank in range(2):
        torch.manual_seed(rank)
        draws.append(reward.load_clip.__wrapped__("random", "cpu")[2].weight)
    assert torch.equal(*draws)


@pytest.mark.parametrize("options, message", [
    (dict(pickscore_model="/nowhere/clip"), "pickscore_model=/nowhere/clip: can't load its CLIPModel: want a "),
    (dict(pickscore_frames=0), "pickscore_frames=0: want at least 1"),
])
def test_pickscore_mistakes(clip_folder, options, message):
    with pytest.raises(UserError, match=message) as error:
        reward.load_rewards("pickscore", dict(pickscore_model=clip_folder, pickscore_frames=4) | options)
    assert "\n" not in str(error.value)


# ----------------------------------------------------------------------------- a reward in another process


class BrightnessServer(BaseHTTPRequestHandler):  # the example of docs/grpo.md
    def do_POST(self):
        body = np.load(io.BytesIO(self.rfile.read(int(self.headers["Content-Length"]))))
        videos, request = body["videos"], json.loads(str(body["json"]))  # uint8 b f h w 3; prompts, metadata
        answer = self.respond(videos, request)
        self.send_response(self.server.status.pop(0) if self.server.status else 200)
        self.send_header("Content-Length", str(len(answer)))
        for name, value in self.server.headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(answer)

    def respond(self, videos, request):
        self.server.requests.append((videos, request))
        return self.server.answer or json.dumps({"rewards": (videos.mean((1, 2, 3, 4)) / 255).tolist()}).encode()

    def log_message(self, *_):
        pass


@pytest.fixture
def server(monkeypatch):
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):  # which isn't asked for this machine's own addresses
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    with HTTPServer(("127.0.0.1", 0), BrightnessServer) as server:
        server.handle_error = lambda *_: None  # a client that gave up
        server.requests, server.status, server.answer, server.headers = [], [], None, {}
        server.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, kwargs=dict(poll_interval=0.01))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def http_score(server, videos=None, timeout=5.0):
    videos = noise(2, 3, 3, 4, 6) if videos is None else videos
    (name, weight), = reward.parse_rewards(f"{server.url}:0.5")
    assert weight == 0.5
    rewards = reward.load_rewards(f"{server.url}:0.5", {"reward_timeout": timeout})
    metadata = [{"colour": "red", "points": torch.zeros(2)}, {"n": [1, 2]}]
    return reward.score(rewards, videos, ["один", "two"], metadata)[name]


def test_http_round_trip(server):
    videos = noise(2, 3, 3, 4, 6)
    got = http_score(server, videos)
    assert torch.allclose(got, videos.mean((1, 2, 3, 4)), atol=1 / 255)
    (sent, request), = server.requests
    assert sent.dtype == np.uint8 and np.array_equal(sent, (videos * 255).round().byte().movedim(2, -1).numpy())
    assert request == {"prompts": ["один", "two"], "metadata": [{"colour": "red", "points": None}, {"n": [1, 2]}]}


def test_http_retries_what_can_pass(server, monkeypatch):
    naps = []
    monkeypatch.setattr(reward.time, "sleep", naps.append)
    server.status = [503, 500]
    http_score(server)
    assert naps == [1, 2] and len(server.requests) == 3
    server.status = [503] * 10
    with pytest.raises(UserError, match=f"reward {server.url}: answered 503 .* after 4 attempts"):
        http_score(server)
    assert naps[2:] == [1, 2, 4]
    server.status = [400]
    with pytest.raises(UserError, match="answered 400 .* after 1 attempts"):
        http_score(server)
    assert len(naps) == 5


@pytest.mark.parametrize("asked, pause", [
    ("3", 3), ("0", 0), ("600", 5), ("soon", 1), ("9" * 400, 5),  # 5: the timeout; 1: as without it
    (formatdate(time.time() - 60, usegmt=True), 0), (formatdate(time.time() + 900, usegmt=True), 5),
])
def test_http_waits_as_it_is_asked_to(server, monkeypatch, asked, pause):
    naps = []
    monkeypatch.setattr(reward.time, "sleep", naps.append)
    server.status, server.headers = [429], {"Retry-After": asked}
    http_score(server)
    assert naps == [pause] and len(server.requests) == 2


@pytest.mark.parametrize("answer, message", [
    (b"not json", "got 'not json', want {\"rewards\": \\[2 numbers\\]}"),
    (b'{"scores": [1, 2]}', "want {\"rewards\""),
    (b'{"rewards": ["a", "b"]}', "want {\"rewards\""),
    (b'{"rewards": [1.0]}', r"got shape \(1,\), want \(2,\)"),
    (b'{"rewards": [1.0, NaN]}', "got nan for 'two'"),
])
def test_http_answers(server, answer, message):
    server.answer = answer
    with pytest.raises(UserError, match=message) as error:
        http_score(server)
    assert "\n" not in str(error.value)


def test_http_unreachable_shows_at_the_start(monkeypatch):
    monkeypatch.setattr(reward.time, "sleep", lambda seconds: None)
    free = HTTPServer(("127.0.0.1", 0), BrightnessServer)
    url = f"http://127.0.0.1:{free.server_port}/score"
    free.server_close()
    with pytest.raises(UserError, match=f"reward {url}: .*refused after 4 attempts: is its server running") as error:
        reward.load_rewards(f"{url}:1.0", {"reward_timeout": 60.0})
    assert "\n" not in str(error.value)


def test_http_timeout(server, monkeypatch):
    monkeypatch.setattr(BrightnessServer, "respond", lambda *_: threading.Event().wait(0.4) or b"")
    monkeypatch.setattr(reward.time, "sleep", lambda seconds: None)
    with pytest.raises(UserError, match="timed out after 4 attempts"):
        http_score(server, timeout=0.1)


@pytest.mark.parametrize("head", [b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n", b"HTTP/1.1 200 OK\r\nX: "])
def test_a_timeout_is_of_the_whole_answer(head):
    """Not of each byte of it: one comes each 50 ms."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        def drip():
            connection, _ = listening.accept()
            with connection, suppress(OSError):
                connection.sendall(head)
                while True:
                    connection.sendall(b" ")
                    time.sleep(0.05)

        threading.Thread(target=drip, daemon=True).start()
        started = time.time()
        with pytest.raises(web.ServerError, match="timed out") as caught:
            web.request(f"http://127.0.0.1:{listening.getsockname()[1]}", timeout=0.5)
        assert time.time() - started < 1.5 and not caught.value.gone


def test_an_answer_that_breaks_off_is_none():
    with socket.create_server(("127.0.0.1", 0)) as listening:
        def break_off():
            connection, _ = listening.accept()
            with connection:
                connection.recv(1000)
                connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nabc")

        threading.Thread(target=break_off, daemon=True).start()
        with pytest.raises(web.ServerError, match="IncompleteRead"):
            web.request(f"http://127.0.0.1:{listening.getsockname()[1]}", timeout=5)


@pytest.mark.parametrize("host, direct", [
    ("127.0.0.1", True), ("127.1.2.3", True), ("localhost", True), ("LOCALHOST", True), ("[::1]", True),
    ("[::ffff:127.0.0.1]", True), ("0.0.0.0", True), ("a.localhost.", True),
    ("10.0.0.1", False), ("localhost.com", False), ("example.invalid", False), ("128.0.0.1", False),
])
def test_a_proxy_is_asked_for_other_machines_only(server, monkeypatch, host, direct):
    monkeypatch.setenv("http_proxy", server.url)  # it answers 501 to a GET
    monkeypatch.delenv("no_proxy", raising=False)
    try:
        asked_proxy = web.request(f"http://{host}:9/", timeout=5)[0] == 501
    except web.ServerError as error:
        asked_proxy = False
        assert "refused" in str(error) or "not known" in str(error)
    assert asked_proxy is not direct
    monkeypatch.setenv("no_proxy", "*")
    if not direct and host == "example.invalid":
        with pytest.raises(web.ServerError):
            web.request(f"http://{host}:9/", timeout=5)


@pytest.mark.parametrize("url", ["http://[::1", "http://127.0.0.1:port/", "http://a b/", "nothing", "http://ö\ud800/"])
def test_a_wrong_address_is_one_line(url):
    with pytest.raises(web.ServerError) as caught:
        web.request(url, timeout=5)
    assert "\n" not in str(caught.value)


# ----------------------------------------------------------------------------- rewards of video files


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Two clips of the tiny scene, of a blue ball that goes left, of 5 and of 7 frames."""
    folder = tmp_path_factory.mktemp("clips")
    paths = []
    for name, num_frames in (("a.mp4", 5), ("b.mp4", 7)):
        rgb, _ = tiny.render(tiny.ball_track("left", num_frames, np.random.default_rng(num_frames)), "blue", 1)
        paths.append(str(write_mp4(folder / name, rgb, fps=8)))
    return paths


def printed_scores(text):
    """{(label, clip): number} of what `python reward.py` prints, whose columns are aligned."""
    rows = [line.rsplit(maxsplit=2) for line in text.splitlines()]
    assert len({line.rindex(row[1]) + len(row[1]) for line, row in zip(text.splitlines(), rows, strict=True)}) == 1
    return {(label, clip): float(number) for label, number, clip in rows}


def test_files_from_the_command_line(files):
    """Numbers as the functions give them; the weighted sum; flags with and without =, before and after the clips."""
    command = [sys.executable, "reward.py", "--prompt", "a b", files[0], "--rewards=smoothness:1.0,ball:-0.5", files[1],
               "--metadata", '{"colour": "blue", "direction": "left"}', "--device=cpu"]
    run = subprocess.run(command, cwd=REPOSITORY, env=ENVIRONMENT, capture_output=True, text=True, timeout=120)
    assert (run.returncode, run.stderr) == (0, "")
    wanted = {}
    for path in files:
        frames, fps = read_mp4(path)
        assert fps == 8 and len(frames) == (5 if path is files[0] else 7)
        videos = torch.from_numpy(frames / 255).float().permute(0, 3, 1, 2)[None]
        smooth = reward.smoothness(videos, None, None).item()
        at_goal = reward.ball(videos, None, [{"colour": "blue", "direction": "left"}]).item()
        assert smooth < -1e-3 and at_goal > 0.8
        wanted |= {("smoothness:1", path): smooth, ("ball:-0.5", path): at_goal,
                   ("weighted sum", path): smooth - at_goal / 2}
    assert printed_scores(run.stdout) == pytest.approx(wanted, abs=2e-6)
    assert list(printed_scores(run.stdout)) == [(label, path) for label in ("smoothness:1", "ball:-0.5", "weighted sum")
                                                for path in files]


def test_files_with_pickscore_and_a_recipe(files, clip_folder, tmp_path):
    """Settings come from a config file that train_grpo.py may share; a prompt changes what PickScore says."""
    recipe = tmp_path / "recipe.py"
    recipe.write_text(f'rewards = "pickscore:2"\npickscore_model = {clip_folder!r}\npickscore_frames = 3\nlr = 1e-3\n')
    scores = []
    for prompt in ("a ball", "cats"):
        _, printed = script("reward.py", files[0], recipe, prompt=prompt, device="cpu")
        videos = torch.from_numpy(read_mp4(files[0])[0] / 255).float().permute(0, 3, 1, 2)[None]
        config = dict(pickscore_model=clip_folder, pickscore_frames=3)
        wanted = reward.score(reward.load_rewards("pickscore", config), videos, [prompt], [{}])["pickscore"].item()
        assert printed_scores(printed) == pytest.approx(
            {("pickscore:2", files[0]): wanted, ("weighted sum", files[0]): 2 * wanted}, abs=2e-6)
        scores.append(wanted)
    assert abs(scores[0] - scores[1]) > 1e-3


@pytest.mark.parametrize("settings, message", [
    (dict(rewards="bal:1.0"), "rewards=bal:1.0: got 'bal' (did you mean ball?), want some of pickscore"),
    (dict(rewards="ball"), "reward ball or ball_success: got colour None in metadata, want one of"),
    (dict(rewards="views"), "reward views: got no box in metadata, want box and cameras"),
    (dict(metadata="[1]"), "metadata: got '[1]' (no object), want a JSON object like {\"colour\": \"red\", "),
    (dict(metadata="{colour: red}"), "metadata: got '{colour: red}' (Expecting property name enclosed"),
    (dict(metadata="[" * 100_000), "want a JSON object"),
    (dict(rewards="pickscore", pickscore_frames=0), "pickscore_frames=0: want at least 1"),
    (dict(device="tpu"), "device=tpu: want auto, cpu or cuda"),
    (dict(reward="ball"), "--reward is not a setting of reward.py; the nearest is rewards"),
])
def test_files_mistakes(files, settings, message):
    assert message in refusal("reward.py", files[0], **settings)


def test_files_that_are_none(files, tmp_path):
    text = tmp_path / "text.mp4"
    text.write_text("no video\n")
    assert f"{tmp_path}/none.mp4: no such file" in refusal("reward.py", files[0], tmp_path / "none.mp4")
    assert f"{text}: ffmpeg finds no video in it" in refusal("reward.py", text, rewards="pickscore:1.0")
    assert "got no clip, want python reward.py clip.mp4 --rewards=" in refusal("reward.py")
    still = write_mp4(tmp_path / "still.mp4", np.zeros((1, 16, 16, 3), np.uint8), fps=8)
    assert "reward smoothness: got videos of 1 frames, want at least 3" in refusal("reward.py", still)


def test_help_lists_the_settings_of_files():
    """And nothing else: a constant of reward.py is no setting."""
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as ended:
        patch.setattr(sys, "stdout", printed := io.StringIO())
        patch.setattr(sys, "argv", ["reward.py", "clip.mp4", "--help"])
        patch.setattr(sys, "excepthook", sys.excepthook)
        runpy.run_path(str(REPOSITORY / "reward.py"), run_name="__main__")
    assert ended.value.code == 0
    flags = [line.split("=")[0].strip() for line in printed.getvalue().splitlines() if line.startswith("  --")]
    assert flags == [f"--{name}" for name in ("clips", "rewards", "prompt", "metadata", "pickscore_model",
                                              "pickscore_frames", "reward_timeout", "device")]
    assert "python reward.py clip.mp4 --rewards=" in printed.getvalue()
