"""Rewards in closed form: general ones, then what a task asks for: the tiny world's ball, an HCPT video's geometry.

Functions (videos b f 3 h w in 0..1, prompts, metadata) -> b, listed in reward.REWARDS.
"""

import io
import itertools
import re

import numpy as np
import torch
from PIL import Image
from torch.nn import functional as F

import tiny
from geometry import denormalise_points
from guard import UserError

# ----------------------------------------------------------------------------------------------------------------------
# closed forms


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


# ----------------------------------------------------------------------------------------------------------------------
# the tiny world's task: does the ball of the prompted colour move in the prompted direction?

VIVID = 0.2  # least difference of a pixel's channels, of 1, to count: all is grey but the ball, and the VAE's errors
IN_HUE = 0.12  # the same of its chroma along the prompted hue
PATH = 0.04  # image sizes a frame: the least that a ball of tiny.py moves, a little less for the VAE's blur


def ramp(x, low, high):
    """0 below low, 1 above high, straight between them; low > high falls instead."""
    return ((x - low) / (high - low)).clamp(0, 1)


def ball_track(videos, metadata):
    """-> along, across b f: how far the ball is from frame 0 in the prompted direction and across it, in image sizes;
    quality b f in 0..1: is there one whole, compact ball of the prompted colour in a frame?

    The ball is what is saturated in the prompted hue: its mass, centroid and spread are the moments of that. Mass and
    spread are compared with frame 0, so a ball that fades, grows, smears or doubles costs quality, and so does any
    saturation of another hue.
    """
    want_frames("ball", videos, 2)
    for name, known in (("colour", tiny.COLOURS), ("direction", tiny.DIRECTIONS)):
        for entry in metadata:
            if entry.get(name) not in known:
                raise UserError(f"reward ball or ball_success: got {name} {entry.get(name)!r} in metadata, want one of "
                                f"{list(known)}: the tiny world's task; for other prompts set other rewards and "
                                "eval_rewards")
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


# ----------------------------------------------------------------------------------------------------------------------
# the robot's task: does the red cube go where the instruction says?

INSTRUCTIONS = {"lift": (0, 0, 1), "left": (0, 1, 0), "right": (0, -1, 0), "away": (1, 0, 0), "back": (-1, 0, 0)}
RED = 0.06  # least excess of red over green and blue, of 1, to count: the table and the robot stay below
REACH = 0.08  # image sizes around the reddest spot within which all red is the cube: it is 0.05 wide, blurred 0.1
CUBE = 5e-4  # mean excess of red over an image that shows the whole cube; 3.3 to 8.3 in the recordings and their blur


def find_cube(video):
    """Video f 3 h w in 0..1 -> in each frame: the red cube's centre f 2 (column and row in image sizes), how much of a
    cube is there f, how much of another one elsewhere f."""
    red = (video[:, 0] - video[:, 1:].amax(1) - RED).clamp(min=0)  # f h w
    height, width = red.shape[1:]
    x, y = (torch.arange(width) + 0.5) / width, (torch.arange(height)[:, None] + 0.5) / height
    peak = F.avg_pool2d(red[:, None], 3, 1, 1).flatten(1).argmax(1)[:, None, None]  # a single pixel is the robot's lamp
    near = (x - (peak % width + 0.5) / width) ** 2 + (y - (peak // width + 0.5) / height) ** 2 < REACH**2
    cube = red * near
    mass, other = cube.mean((1, 2)), (red - cube).mean((1, 2))
    centre = torch.stack([(cube * axis).mean((1, 2)) / mass.clamp(min=1e-9) for axis in (x, y)], 1)
    return centre, mass / CUBE, other / CUBE


def cube_moved(views, cameras):
    """Two or more views of a scene v f 3 h w in 0..1 -> 3 metres that the red cube moves: away from the robot, to its
    left, up. None if it isn't there first and last, or is there twice, or the views don't agree where.

    Where it is: nearest to the rays through its centre in the views, each as heavy as what it sees of it, for the
    gripper hides it; what one view alone can't tell stays as in the first frame. Last is the last of the five final
    frames in which it is seen. cameras: a dict a view, as in metadata["cameras"] of the reward `views`.
    """
    heavy, origins, rays, twice = [], [], [], []
    for video, camera in zip(views.float().cpu(), cameras, strict=True):
        centre, mass, other = find_cube(video)
        K, E = (torch.tensor(camera[name], dtype=torch.float64) for name in ("intrinsics", "extrinsics"))
        pixels = torch.cat([centre * torch.tensor(camera["size"][::-1]), torch.ones(len(centre), 1)], 1).double()
        rays.append(F.normalize(pixels @ K.inverse().T @ E[:3, :3].T, dim=1))  # f 3
        origins.append(E[:3, 3])
        heavy.append(mass.clamp(max=1) * (mass > 0.1))
        twice.append((mass > 2.5) | (other > 0.4))
    heavy, origins, rays, twice = (torch.stack(each) for each in (heavy, origins, rays, twice))
    seen = (heavy.sum(0) > 0.2).nonzero()[:, 0]
    last = int(seen[-1]) if len(seen) else 0
    if last < max(1, views.shape[1] - 5) or (heavy[:, 0] == 0).any() or twice[:, [0, last]].any():
        return None
    place, places = torch.zeros(3).double(), []
    for frame, prior in ((0, 0.0), (last, 0.01)):
        ray, weight = rays[:, frame], heavy[:, frame, None, None]
        across = torch.eye(3) - ray[:, :, None] * ray[:, None]  # v 3 3: what a view sees of a displacement
        system = (weight * across).sum(0) + prior * torch.eye(3)
        place = torch.linalg.solve(system, (weight * across @ origins[..., None]).sum(0)[:, 0] + prior * place)
        off = (across @ (place - origins)[..., None]).norm(dim=1)[:, 0]  # v, metres from each ray
        if off[heavy[:, frame] > 0].max() > 0.03:
            return None
        places.append(place)
    return places[1] - places[0]


def follows(moved, prompt, least=0.035):
    """Whether 3 metres from cube_moved are at least `least` in the instruction's direction, and more than across it.

    35 mm are the recordings' own criterion. None, where no cube was found, doesn't follow.
    """
    direction = [INSTRUCTIONS[word] for word in re.findall(r"\w+", prompt.lower()) if word in INSTRUCTIONS]
    if len(direction) != 1:
        raise UserError(f"prompt {prompt!r}: want one of the words {', '.join(INSTRUCTIONS)}")
    if moved is None:
        return False
    along = moved @ torch.tensor(direction[0]).double()
    return bool(along >= least and along > (moved.square().sum() - along**2).clamp(min=0).sqrt())


# ----------------------------------------------------------------------------------------------------------------------
# HCPT: do the pointmaps of the views describe one scene?


def views(videos, prompts, metadata):
    """Minus the median distance, mm, between what a pixel says and what the other view says of the same place.

    videos are HCPT grids: the RGB row above the pointmap row, a column a view. Each cell is to be decoded by itself, as
    sampler.decode_cells does: train_grpo.py decodes a video as one picture of 8 bits, which blurs the seams and rounds
    points to a 255th of the box. Wanted of metadata:
      "box"      x0 y0 z0 x1 y1 z1 metres, that -1..1 of a pointmap spans (LatentCache.box)
      "cameras"  a dict a view, left to right: "intrinsics" 3 3 and "extrinsics" 4 4 (camera to world), standing still,
                 and "size" [h, w], the image size that the intrinsics speak of
      "points"   optional v 3 f h w in -1..1, pointmap cells to use in place of the lower half of the video

    A point goes into the other view, where its pixel's point is read; it is hidden, not wrong, if more than 2 % behind
    that. Added to their distance is how far a point lies off its own pixel's ray, or all points could meet in one.
    Points at the box's walls are clamped there and don't count. A video of which under 5 % can be compared gets minus
    the box's diagonal. Blind to a scene that both views get wrong in the same way.
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
