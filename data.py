"""Robot demonstrations: from recordings to the cells that a VAE takes and the grid that the model sees.

A cell is one view of one modality, 3 f h w in -1..1. In the grid views are columns, modalities rows (RGB on top).
"""

import inspect

import torch
import torch.nn.functional as F

from geometry import normalise_points
from guard import UserError
from read_hdf5 import RobotDemos

# ----------------------------------------------------------------------------- demonstrations
# A reader's __init__ names the settings it wants and checks all metadata. It has (in brackets: recordings.py's help)
#   views, pointmaps             [camera], the columns of the grid; whether depth and cameras are wanted too
#   splits, num_frames, prompts  {demo: "train" | "val"}, {demo: frames}, {demo: instruction}; train first
#   windows(num_frames, window_stride, pad_short)  -> [Window]; sets skipped, [(demo, frames)] of the demos too short,
#                                and num_uncovered, frames at the ends of demos that are in none (all_windows)
#   rgb(window, view, num_frames)                  -> uint8 f h w 3, the last frame held up to num_frames (hold_last)
#   camera(window, view, num_frames)               -> depth f h w, K f 3 3, E f 4 4, float32 (check_camera)
#   points(window, view, num_frames)               -> xyz f h w 3 in metres, valid f h w (world_points)
#   image_size(demo, view), has_depth(demo)        -> (h, w) as recorded; whether all views have depth and cameras
#   fingerprint()                                  -> {name: value} of what shapes a cache; "frames": latents alone,
#                                "prompts": text alone, "points" and "cameras": pointmaps alone


def open_demos(config):
    """The reader of config["data"]. What the settings lack of what it wants has its own default."""
    reader = RobotDemos  # the only kind so far: another one is chosen here, by what config["data"] is
    wanted = inspect.signature(reader).parameters
    return reader(**{name: config[name] for name in wanted if name in config})


# ----------------------------------------------------------------------------- cells and the grid


def rgb_cell(rgb, height, width, device="cpu"):
    """uint8 f h w 3 -> 3 f height width in -1..1. Antialiased: plain bilinear skips pixels where it shrinks."""
    pixels = torch.as_tensor(rgb, device=device).permute(0, 3, 1, 2).float() / 127.5 - 1  # f 3 h w
    if pixels.shape[-2:] != (height, width):
        pixels = F.interpolate(pixels, (height, width), mode="bilinear", antialias=True).clamp(-1, 1)
    return pixels.transpose(0, 1)


def point_cell(xyz, valid, box, height, width, device="cpu"):
    """xyz f h w 3 (metres), valid f h w -> 3 f height width in -1..1, valid f height width (known AND inside the box).

    Nearest-exact: a blend of two surfaces would be a point on neither. Unknown pixels are 0, the middle of the box.
    """
    xyz, valid = torch.as_tensor(xyz, device=device), torch.as_tensor(valid, device=device)
    low, high = torch.as_tensor(box, dtype=torch.float32, device=device).chunk(2)
    inside = valid & (xyz >= low).all(-1) & (xyz <= high).all(-1)
    points = torch.where(valid[..., None], normalise_points(xyz, box), 0.0)
    stacked = torch.cat([points.permute(0, 3, 1, 2), inside[:, None].float()], 1)  # f 4 h w
    stacked = F.interpolate(stacked, (height, width), mode="nearest-exact")
    return stacked[:, :3].transpose(0, 1), stacked[:, 3] > 0.5


def window_cells(demos, window, modality, num_frames, size, box=None, device="cpu"):
    """A window as the VAE takes it -> {view: 3 f height width}, {view: valid f height width} (of pointmaps only)."""
    cells, valid = {}, {}
    for view in demos.views:
        if modality == "rgb":
            cells[view] = rgb_cell(demos.rgb(window, view, num_frames), *size, device)
        else:
            cells[view], valid[view] = point_cell(*demos.points(window, view, num_frames), box, *size, device)
    return cells, valid


def parse_box(text):
    """ "x0,y0,z0,x1,y1,z1" -> six floats, low corner first; UserError if they are not a box."""
    try:
        box = [float(number) for number in text.split(",")]
    except ValueError:
        box = []
    if len(box) != 6 or not all(low < high for low, high in zip(box[:3], box[3:], strict=True)):
        raise UserError(f"workspace_box={text}: want x0,y0,z0,x1,y1,z1 in metres with x0 < x1, y0 < y1, z0 < z1")
    return box


def join_cells(cells):
    """{(modality, view): ... h w} -> ... H W: a row a modality, a column a view, both in the dict's order."""
    modalities, views = (list(dict.fromkeys(names)) for names in zip(*cells, strict=True))
    return torch.cat([torch.cat([cells[modality, view] for view in views], -1) for modality in modalities], -2)


def split_cells(grid, modalities, views):
    """The inverse of join_cells: ... H W -> {(modality, view): ... h w}."""
    rows = grid.chunk(len(modalities), -2)
    return {
        (modality, view): cell
        for modality, row in zip(modalities, rows, strict=True)
        for view, cell in zip(views, row.chunk(len(views), -1), strict=True)
    }
