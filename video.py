"""Frames to mp4 and back, to a contact sheet; how near two videos are. Frames `f h w c`: uint8, or floats in 0..1."""

import math
import subprocess
from pathlib import Path

import imageio_ffmpeg
import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, ImageDraw, ImageFont

from guard import UserError, whole

MIN_SIDE = 256  # pixels: smaller videos are enlarged by a whole factor, so that players show them sharp
CELL_SIDES = (128, 384)  # pixels: least and greatest longer side of a frame in a contact sheet
SSIM_WINDOW, SSIM_STD = 11, 1.5  # pixels, of a Gaussian


def to_uint8(pixels):
    """Pixels in -1..1 [... 3 f h w] -> uint8 numpy frames [... f h w 3], rounded to the nearest level."""
    frames = pixels.detach().float().movedim(-4, -1)  # ... f h w 3
    return ((frames + 1) * 127.5).round().clamp(0, 255).to(torch.uint8).cpu().numpy()


def write_mp4(path, frames, fps):
    """Write uint8 frames [f h w 3] as H.264 that every browser plays; returns the path."""
    frames = _enlarge(np.asarray(frames), MIN_SIDE)
    height, width = frames.shape[1:3]
    frames = np.pad(frames, ((0, 0), (0, height % 2), (0, width % 2), (0, 0)), mode="edge")  # 4:2:0 wants even sizes
    raw = f"-f rawvideo -pix_fmt rgb24 -s {frames.shape[2]}x{frames.shape[1]} -r {fps} -i -"
    options = f"-y -v error {raw} -vcodec libx264 -pix_fmt yuv420p -crf 10 -f mp4"
    with whole(path) as temporary:
        command = [imageio_ffmpeg.get_ffmpeg_exe(), *options.split(), temporary.resolve()]
        run = subprocess.run(command, input=frames.tobytes(), capture_output=True, start_new_session=True)  # no Ctrl-C
        if run.returncode:
            raise OSError(" ".join(run.stderr.decode(errors="replace").split()))
    return Path(path)


def read_mp4(path):
    """An mp4, or whatever else ffmpeg reads -> uint8 frames [f h w 3], frames a second. Raises UserError."""
    if not Path(path).is_file():
        raise UserError(f"{path}: no such file, want a video")
    try:
        reader = imageio_ffmpeg.read_frames(Path(path).resolve())  # a bare name with a colon would be an address
        info = next(reader)
        width, height = info["size"]
        return np.stack([np.frombuffer(frame, np.uint8).reshape(height, width, 3) for frame in reader]), info["fps"]
    except (OSError, RuntimeError, ValueError):  # the header, a frame, no frames
        raise UserError(f"{path}: ffmpeg finds no video in it, want an mp4") from None


def contact_sheet(path, rows, num_columns=6, title=""):
    """Write a PNG of rows (label, uint8 frames [f h w 3]), of any sizes and lengths, under a title; returns the path.

    A row shows up to num_columns frames evenly spaced in time, the first and the last among them, under their numbers.
    """
    font, gap = ImageFont.load_default(size=14), 6
    strips = []
    for label, frames in rows:
        indices = np.linspace(0, len(frames) - 1, min(num_columns, len(frames))).round().astype(int)
        strips.append((label, {index: _cell(frames[index]) for index in indices}))
    gutter = int(max(font.getlength(label) for label, _ in strips)) + 2 * gap
    width = gutter + max(len(cells) * (cells[0].width + gap) for _, cells in strips)
    top = 40 if title else 20
    height = top - 20 + sum(cells[0].height + 20 for _, cells in strips) + gap
    sheet = Image.new("RGB", (width, height), "white")
    draw = ImageDraw.Draw(sheet)
    draw.text((gap, 4), title, "black", font)
    for label, cells in strips:
        draw.text((gap, top + cells[0].height // 2), label, "black", font, anchor="lm")
        left = gutter
        for index, cell in cells.items():
            draw.text((left, top - 3), str(index), "gray", font, anchor="ls")
            sheet.paste(cell, (left, top))
            left += cell.width + gap
        top += cells[0].height + 20
    with whole(path) as temporary:
        sheet.save(temporary, "png")
    return Path(path)


def psnr(a, b):
    """Peak signal-to-noise ratio of two videos [f h w c] in dB, from the squared error over all of it; 100 if equal."""
    error = (_unit(a) - _unit(b)).square().mean().item()
    return -10 * float(np.log10(max(error, 1e-10)))


def ssim(a, b):
    """SSIM of two videos [f h w c], whole windows, mean over frames and channels (Wang et al. 2004, eq. 13)."""
    a, b = _unit(a), _unit(b)
    if min(a.shape[1:3]) < SSIM_WINDOW:
        raise ValueError(f"frames of {a.shape[1]} x {a.shape[2]}: SSIM wants at least {SSIM_WINDOW} x {SSIM_WINDOW}")
    offsets = torch.arange(SSIM_WINDOW, dtype=torch.float64, device=a.device) - SSIM_WINDOW // 2
    window = torch.exp(-offsets.square() / (2 * SSIM_STD**2))
    window = window / window.sum()

    def blur(images):  # c h w; the window is separable
        rows = F.conv2d(images[:, None], window[None, None, None])
        return F.conv2d(rows, window[None, None, :, None])[:, 0]

    c1, c2 = 0.01**2, 0.03**2
    scores = []
    for x, y in zip(a.movedim(-1, 1), b.movedim(-1, 1), strict=True):  # c h w: a frame at a time bounds the memory
        mean_x, mean_y = blur(x), blur(y)
        var_x, var_y, cov = blur(x * x) - mean_x**2, blur(y * y) - mean_y**2, blur(x * y) - mean_x * mean_y
        luminance = (2 * mean_x * mean_y + c1) / (mean_x**2 + mean_y**2 + c1)
        scores.append((luminance * (2 * cov + c2) / (var_x + var_y + c2)).mean())
    return torch.stack(scores).mean().item()


def _unit(frames):
    """uint8, or floats in 0..1 -> float64 in 0..1."""
    frames = torch.as_tensor(frames)
    return frames.double() / 255 if frames.dtype == torch.uint8 else frames.double()


def _enlarge(frames, least):
    """Frames [f h w c], repeated pixel by pixel by the least whole factor that makes the longer side `least`."""
    factor = math.ceil(least / max(frames.shape[1:3]))
    return frames.repeat(factor, axis=1).repeat(factor, axis=2)


def _cell(frame):
    """One uint8 frame [h w 3] as an image of a readable size: a whole factor up, or smoothly down."""
    low, high = CELL_SIDES
    image = Image.fromarray(_enlarge(np.asarray(frame)[None], low)[0])
    image.thumbnail((high, high), Image.Resampling.LANCZOS)
    return image
