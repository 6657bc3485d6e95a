import numpy as np
import pytest
import torch
from PIL import Image

from guard import UserError
from video import contact_sheet, psnr, read_mp4, ssim, to_uint8, write_mp4


def noise(*shape, seed=0):
    return np.random.default_rng(seed).random(shape)


def smooth_video(num_frames, height, width):
    """A colour ramp that moves: compresses almost without loss."""
    f, y, x = np.meshgrid(np.arange(num_frames), np.arange(height), np.arange(width), indexing="ij")
    frames = np.stack([200 * x / width, 200 * y / height, 20 * f], axis=-1)
    return frames.astype(np.uint8)  # f h w 3


def test_to_uint8_rounds_and_moves_channels_last():
    pixels = torch.tensor([-1.5, -1, 0, 1, 1.5, -1 + 2 * 7.4 / 255]).expand(2, 3, 1, 1, 6)  # b 3 f h w
    frames = to_uint8(pixels)
    assert frames.shape == (2, 1, 1, 6, 3) and frames.dtype == np.uint8
    assert frames[0, 0, 0, :, 0].tolist() == [0, 0, 128, 255, 255, 7]
    levels = torch.arange(256, dtype=torch.uint8)
    assert (to_uint8((levels / 127.5 - 1).expand(3, 1, 1, 256))[0, 0, :, 0] == levels.numpy()).all()
    assert to_uint8(pixels.bfloat16()).max() == 255


@pytest.mark.parametrize(
    ("size", "written"), [((16, 32), (128, 256)), ((13, 21), (170, 274)), ((301, 259), (302, 260))]
)
def test_mp4_round_trip(tmp_path, capfd, caplog, size, written):
    frames = smooth_video(5, *size)
    path = write_mp4(tmp_path / "new" / "video.mp4", frames, fps=12)
    read, fps = read_mp4(path)
    factor = round(written[0] / size[0])
    assert fps == 12 and read.shape == (5, *written, 3) and read.dtype == np.uint8
    centres = read[:, factor // 2 :: factor, factor // 2 :: factor][:, : size[0], : size[1]]
    assert psnr(centres, frames) > 35
    assert capfd.readouterr() == ("", "") and not caplog.records  # neither ffmpeg nor imageio warns


@pytest.mark.parametrize("content", [b"", b"some text\n" * 100, "half"])
def test_what_is_no_mp4(tmp_path, monkeypatch, content):
    """One line; and a name that ffmpeg would take for an address is read."""
    monkeypatch.chdir(tmp_path)
    whole = write_mp4(tmp_path / "whole.mp4", smooth_video(3, 32, 32), fps=8).rename("ball:left.mp4")
    assert read_mp4(whole)[0].shape == (3, 256, 256, 3)
    (tmp_path / "broken.mp4").write_bytes(whole.read_bytes()[:500] if content == "half" else content)
    with pytest.raises(UserError, match="^broken.mp4: ffmpeg finds no video in it, want an mp4$"):
        read_mp4("broken.mp4")
    for path in ("none.mp4", tmp_path):
        with pytest.raises(UserError, match=f"^{path}: no such file, want a video$"):
            read_mp4(path)


def test_contact_sheet(tmp_path):
    colours = [[255, 0, 0], [0, 255, 0], [0, 0, 255], [255, 255, 0], [0, 255, 255]]
    frames = np.array(colours, np.uint8)[:, None, None].repeat(16, 1).repeat(32, 2)  # f h w 3
    path = contact_sheet(tmp_path / "new" / "sheet.png", [("given", frames[:1]), ("generated", frames)], num_columns=3)
    sheet = np.asarray(Image.open(path))
    cell = 64 * 128  # pixels of a 16 x 32 frame enlarged four times
    counts = [int((sheet == colour).all(-1).sum()) for colour in colours]
    assert counts == [2 * cell, 0, cell, 0, cell]  # frames 0, 2, 4; the first one twice


def test_contact_sheet_with_a_title(tmp_path):
    frames = np.full((2, 16, 64, 3), 200, np.uint8)
    plain, titled = (Image.open(contact_sheet(tmp_path / f"{title}_.png", [("a", frames)], title=title))
                     for title in ("", "one"))
    assert (titled.width, titled.height) == (plain.width, plain.height + 20)
    assert (np.asarray(titled)[20:] == np.asarray(plain)).all() and (np.asarray(titled)[:20] < 128).any()


def test_contact_sheet_shrinks_large_frames(tmp_path):
    sheet = Image.open(contact_sheet(tmp_path / "sheet.png", [("", np.zeros((3, 864, 768, 3), np.uint8))]))
    assert sheet.height < 432 and sheet.width < 3 * 384


def test_psnr():
    a = noise(2, 8, 8, 3)
    assert psnr(a, a) == 100
    assert psnr(np.zeros((1, 4, 4, 3)), np.full((1, 4, 4, 3), 0.1)) == pytest.approx(20)
    levels = (a * 255).astype(np.uint8)
    assert psnr(levels, a) == pytest.approx(-10 * np.log10(np.mean((levels / 255 - a) ** 2)))


def direct_ssim(a, b):
    """Equation 13 of Wang et al. 2004, a window at a time; a, b: h w in 0..1."""
    offsets = np.arange(11) - 5
    weights = np.exp(-(offsets[:, None] ** 2 + offsets[None] ** 2) / (2 * 1.5**2))
    weights /= weights.sum()
    scores = []
    for top in range(a.shape[0] - 10):
        for left in range(a.shape[1] - 10):
            x, y = a[top : top + 11, left : left + 11], b[top : top + 11, left : left + 11]
            mean_x, mean_y = (weights * x).sum(), (weights * y).sum()
            var_x, var_y = (weights * (x - mean_x) ** 2).sum(), (weights * (y - mean_y) ** 2).sum()
            cov = (weights * (x - mean_x) * (y - mean_y)).sum()
            numerator = (2 * mean_x * mean_y + 0.01**2) * (2 * cov + 0.03**2)
            scores.append(numerator / ((mean_x**2 + mean_y**2 + 0.01**2) * (var_x + var_y + 0.03**2)))
    return np.mean(scores)


def test_ssim_equals_the_formula():
    a = noise(2, 16, 19, 3)
    b = (a + 0.3 * noise(2, 16, 19, 3, seed=1)).clip(0, 1)
    want = np.mean([direct_ssim(a[f, ..., c], b[f, ..., c]) for f in range(2) for c in range(3)])
    assert ssim(a, b) == pytest.approx(want, abs=1e-12)
    assert ssim(torch.from_numpy(a).float(), torch.from_numpy(b).float()) == pytest.approx(want, abs=1e-6)
    assert 0.1 < want < 0.95


def test_ssim_bounds():
    a = (noise(1, 16, 16, 3) * 255).astype(np.uint8)
    assert ssim(a, a) == pytest.approx(1, abs=1e-12)
    assert ssim(a, 255 - a) < 0
    with pytest.raises(ValueError, match="frames of 10 x 16"):
        ssim(a[:, :10], a[:, :10])
