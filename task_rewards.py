"""Rewards in closed form: general ones, then what a task asks for: the tiny world's ball, an HCPT video's geometry.

Functions (videos b f 3 h w in 0..1, prompts, metadata) -> b, listed in reward.REWARDS.
"""

import io
import itertools

import numpy as np
import torch
from PIL import Image
from torch.nn import functional as F

import tiny
from geometry import denormalise_points
from guard import UserError

# ----------------------------------------------------------------------------- closed forms


def smoothness(videos, prompts, metadata):
    """-mean (x[f+1] - 2 x[f] + x[f-1])^2 over pixels and times: 0 for any steady fade, -4 for strobing black and white.

    A still video has the best score: use it beside a reward that wants motion.
    """
    want_frames("smoothness", videos, 3)
    return -torch.diff(videos.float(), n=2, dim=1).square().flatten(1).mean(1)


def first_frame(videos, prompts, metadata):
    """-mean (x[1] - x[0])^2: 0 where the first generated frame continues the given one, more negative at a jump."""
    want_frames("first_frame", videos, 2)
    return -(videos[:, 1].float() - videos[:, 0].float()).square().flatten(1).mean(1)


def jpeg(videos, prompts, metadata):
    """Compressibility: minus kilobytes (1000 bytes) a frame as JPEG of quality 95 (DDPO, arXiv 2305.13301)."""

    def kilobytes(frame):  # h w 3 uint8
        file = io.BytesIO()
        Image.fromarray(frame).save(file, format="JPEG", quality=95)
        return file.tell() / 1000

    return -torch.tensor([np.mean([kilobytes(frame) for frame in video]) for video in uint8_frames(videos)])


def want_frames(name, videos, num_frames):
    if videos.shape[1] < num_frames:
        raise UserError(f"reward {name}: got videos of {videos.shape[1]} frames, want at least {num_frames}")


def uint8_frames(videos):
    """b f 3 h w in 0..1 -> numpy uint8 b f h w 3."""
    return (videos.float().clamp(0, 1) * 255).round().to(torch.uint8).movedim(2, -1).cpu().numpy()


# ----------------------------------------------------------------------------- the tiny world's ball

VIVID = 0.2  # least difference of a pixel's channels, of 1, to count: all is grey but the ball, and the VAE's errors
IN_HUE = 0.12  # the same of its chroma along the prompted hue
PATH = 0.04  # image sizes a frame: the least that a ball of tiny.py moves, a little less for the VAE's blur


def ramp(x, low, high):
    """0 below low, 1 above high, straight between them; low > high falls instead."""
    return ((x - low) / (high - low)).clamp(0, 1)


def ball_track(videos, metadata):
    """-> along, across b f: how far the ball is from frame 0 in the prompted direction and across it, in image sizes;
    quality b f in 0..1: is there one whole, compact ball of the prompted colour in a frame?

    The ball is what is saturated in the prompted hue, its mass, centroid and spread the moments of that. What fades,
    grows, smears or doubles after frame 0 costs quality, and so does any saturation of another hue.
    """
    want_frames("ball", videos, 2)
    for name, known in (("colour", tiny.COLOURS), ("direction", tiny.DIRECTIONS)):
        for entry in metadata:
            if entry.get(name) not in known:
                raise UserError(f"reward ball or ball_success: got {name} {entry.get(name)!r} in metadata, want one of "
                                f"{list(known)}; for other prompts set other rewards and eval_rewards")
    videos = videos.float()
    height, width = videos.shape[-2:]
    colours = torch.tensor([tiny.COLOURS[entry["colour"]] for entry in metadata], device=videos.device).float()
    hues = F.normalize(colours - colours.mean(1, keepdim=True), dim=1)[:, None, :, None, None]  # b 1 3 1 1
    chroma = videos - videos.mean(2, keepdim=True)  # b f 3 h w: its direction is the hue, its length the saturation
    in_hue = (chroma * hues).sum(2)  # b f h w
    vivid = (videos.amax(2) - videos.amin(2) - VIVID).clamp(min=0)
    cosine = (vivid * in_hue).sum((2, 3)) / (vivid * chroma.norm(dim=2)).sum((2, 3)).clamp(min=1e-6)  # b f

    weight = (in_hue - IN_HUE).clamp(min=0)
    total = weight.sum((2, 3)).clamp(min=1e-6)
    x = (torch.arange(width, device=videos.device) + 0.5) / width
    y = ((torch.arange(height, device=videos.device) + 0.5) / height)[:, None]
    centre_x, centre_y = (weight * x).sum((2, 3)) / total, (weight * y).sum((2, 3)) / total
    distance = (x - centre_x[..., None, None]) ** 2 + (y - centre_y[..., None, None]) ** 2
    spread = (weight * distance).sum((2, 3)) / total
    mass = total / (height * width)

    growth = mass / mass[:, :1].clamp(min=0.01)  # the bounds matter where frame 0 is generated too: no ball, or a smear
    spreading = spread / spread[:, :1].clamp(0.002, 0.02)
    # Clips of the scene that went through its VAE keep 0.6 to 1.4 of the mass, spread by 1.8 at most, cosine 0.93.
    quality = ramp(growth, 0.2, 0.6) * ramp(growth, 2.2, 1.4) * ramp(spreading, 3, 1.9) * ramp(cosine, 0.7, 0.9)

    to = torch.tensor([tiny.DIRECTIONS[entry["direction"]] for entry in metadata], device=videos.device)  # b 2, y up
    right, up = centre_x - centre_x[:, :1], centre_y[:, :1] - centre_y  # b f
    along, across = right * to[:, :1] + up * to[:, 1:], (up * to[:, :1] - right * to[:, 1:]).abs()
    return along, across, quality


def ball(videos, prompts, metadata):
    """The task as a number in 0..1: progress along the prompted direction times the quality of the worst frame.

    Progress averages over the frames, later ones count more, how much of the least path that a frame should have behind
    it is there. Motion across costs what exceeds 0.6 of that along: the cameras stand askew, true clips have up to 0.5.
    The scene's own clips score 0.9 to 1; no motion, another direction or another colour about 0.
    """
    along, across, quality = ball_track(videos, metadata)
    wanted = PATH * torch.arange(videos.shape[1], device=videos.device)  # f
    progress = torch.minimum(along - (across - 0.6 * along).clamp(min=0), wanted)
    return (progress.sum(1) / wanted.sum()).clamp(0, 1) * quality.amin(1)


def ball_success(videos, prompts, metadata):
    """1 where a whole ball of the right colour ends over 8 % of the image away, nearest to the prompted direction."""
    along, across, quality = ball_track(videos, metadata)
    return ((along[:, -1] > 0.08) & (along[:, -1] > across[:, -1]) & (quality.amin(1) > 0.5)).float()


# ----------------------------------------------------------------------------- the views of HCPT


def views(videos, prompts, metadata):
    """Minus the median distance, mm, between what a pixel says and what the other view says of the same place.

    videos are HCPT grids: the RGB row above the pointmap row, a column a view, each cell decoded by itself as
    sampler.decode_cells does (train_grpo.py decodes one picture, which blurs the seams). Wanted of metadata:
      "box"      x0 y0 z0 x1 y1 z1 metres, that -1..1 of a pointmap spans (LatentCache.box)
      "cameras"  a dict a view, left to right: "intrinsics" 3 3 and "extrinsics" 4 4 (camera to world), standing still,
                 and "size" [h, w], the image size that the intrinsics speak of
      "points"   optional v 3 f h w in -1..1, pointmap cells to use in place of the lower half of the video

    A point goes into the other view, where its pixel's point is read: hidden, not wrong, if more than 2 % behind that.
    How far it lies off its own ray is added, or all points could meet in one. Points at the box's walls don't count; a
    video of which under 5 % can be compared gets minus the box's diagonal. Blind to what both views get wrong alike.
    """
    scores = []
    for video, entry in zip(videos, metadata, strict=True):
        if missing := [name for name in ("box", "cameras") if name not in entry]:
            raise UserError(f"reward views: got no {missing[0]} in metadata, want box and cameras (see reward.views)")
        if "points" in entry:
            points = torch.as_tensor(entry["points"], device=videos.device).movedim(1, -1)
        else:
            row = video[:, :, video.shape[2] // 2 :] * 2 - 1  # f 3 h W
            points = torch.stack(row.chunk(len(entry["cameras"]), -1)).movedim(2, -1)
        scores.append(-view_distance(points.float(), entry["box"], entry["cameras"]))  # v f h w 3
    return torch.stack(scores)


def view_distance(points, box, cameras):
    """Pointmaps v f h w 3 in -1..1 -> their median disagreement in mm, see `views`."""
    height, width = points.shape[2:4]
    counts = points.abs().amax(-1) < 0.99  # v f h w
    xyz = denormalise_points(points, box)
    size = torch.tensor([width, height], device=points.device)
    pixels = torch.stack(torch.meshgrid(*(torch.arange(n, device=points.device) + 0.5 for n in (width, height)),
                                        indexing="xy"), dim=-1)  # h w 2, column and row

    def project(xyz, camera):
        """World points ... 3 -> camera's pixel ... 2 in cells, depth ... 1."""
        K, E = (torch.tensor(camera[name], dtype=torch.float32, device=xyz.device)
                for name in ("intrinsics", "extrinsics"))
        seen = (xyz - E[:3, 3]) @ E[:3, :3] @ K.T
        scale = size / torch.tensor(camera["size"][::-1], device=xyz.device)
        return seen[..., :2] / seen[..., 2:] * scale, seen[..., 2:], K[0, 0] * scale[0]

    distances = []
    for source, target in itertools.permutations(range(len(cameras)), 2):
        at, depth, focal = project(xyz[source], cameras[source])
        off_ray = (at - pixels).norm(dim=-1) * depth[..., 0].abs() / focal  # f h w, metres
        at, depth, _ = project(xyz[source], cameras[target])
        _, nearness, _ = project(xyz[target], cameras[target])
        # x/z and 1/z are linear over the pixels of a plane, x and z are not: interpolate those
        surface = torch.cat([xyz[target] / nearness, 1 / nearness, counts[target][..., None]], -1).movedim(-1, 1)
        grid = at / size * 2 - 1
        surface = F.grid_sample(surface, grid, padding_mode="border", align_corners=False).movedim(1, -1)  # f h w 5
        found, seen_depth = surface[..., :3] / surface[..., 3:4], 1 / surface[..., 3]
        apart = (xyz[source] - found).norm(dim=-1) + off_ray
        mutual = counts[source] & (surface[..., 4] > 0.99) & (grid.abs() < 1).all(-1) & (depth[..., 0] > 0)
        distances.append(torch.where(mutual & (depth[..., 0] - seen_depth < 0.02 * depth[..., 0]), apart, torch.nan))
    distances = torch.stack(distances)
    valid = distances.isfinite()
    if valid.float().mean() < 0.05:
        return 1000 * torch.dist(*torch.as_tensor(box, dtype=torch.float32, device=points.device).chunk(2))
    return 1000 * distances[valid].median()
