"""Does the red cube go where the robot's instruction says? From the pixels of two or more calibrated views."""

import re

import torch
from torch.nn import functional as F

from guard import UserError

# away from the robot, to its left, up
DIRECTIONS = {"lift": (0, 0, 1), "left": (0, 1, 0), "right": (0, -1, 0), "away": (1, 0, 0), "back": (-1, 0, 0)}
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


def direction(prompt):
    """The unit vector 3 in which an instruction wants the red cube to go; None for what isn't such an instruction."""
    words = re.findall(r"\w+", prompt.lower())
    asked = [DIRECTIONS[word] for word in words if word in DIRECTIONS]
    return torch.tensor(asked[0]).double() if len(asked) == 1 and {"red", "cube"} <= set(words) else None


def follows(moved, prompt, least=0.035):
    """Whether 3 metres from cube_moved are at least `least` in the instruction's direction, and more than across it.

    35 mm are the recordings' own criterion. None, where no cube was found, doesn't follow.
    """
    asked = direction(prompt)
    if asked is None:
        raise UserError(f"prompt {prompt!r}: want the red cube, and one of the words {', '.join(DIRECTIONS)}")
    if moved is None:
        return False
    along = moved @ asked
    return bool(along >= least and along > (moved.square().sum() - along**2).clamp(min=0).sqrt())
