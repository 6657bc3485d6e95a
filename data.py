"""Robot demonstrations: from a RoboCasa HDF5 to the cells that a VAE takes and the grid that the model sees.

    RobotDemos     HDF5 -> windows of frames, points in the world, instructions
    *_cell         one view of one modality as a VAE takes it: 3 f h w in -1..1
    *_cells        cells <-> grid: views are columns, modalities are rows (RGB above its pointmap)

Cameras are OpenCV's: x right, y down, z forward. K is in pixels whose centres lie at +0.5, E is camera-to-world,
depth is in metres along the optical axis.
"""

import json
import os
import re
from typing import NamedTuple

import h5py
import numpy as np
import torch
import torch.nn.functional as F

from geometry import normalise_points, unproject
from guard import UserError, first_line

# ----------------------------------------------------------------------------------------------------------------------
# demonstrations


class Window(NamedTuple):
    """num_frames consecutive frames of a demo. `length` of them exist: fewer only where a short demo is padded."""

    demo: str
    start: int
    length: int
    split: str  # "train" | "val"

    @property
    def key(self):
        return f"{self.demo}_{self.start:05d}"


def view_names(views):
    """ "left, right" -> ["left", "right"]."""
    names = [name.strip() for name in (views.split(",") if isinstance(views, str) else views)]
    if not all(names) or len(set(names)) != len(names):
        raise UserError(f"views={views}: want different camera names, separated by commas")
    return names


def demo_number(name):
    """Sort key: h5py lists demo_0, demo_1, demo_10, demo_2."""
    digits = re.search(r"\d+$", name)
    return (int(digits.group()) if digits else -1, name)


class RobotDemos:
    """The demos of a RoboCasa (robomimic) HDF5. All metadata is checked here, frames are read when asked for.

    Validation demos are mask/<val_split>; with val_split="" or in a file without masks, the last `val_demos` of the
    training demos are held out. pointmaps=True also wants <view>_depth, _intrinsics and _extrinsics.
    """

    def __init__(self, path, views, train_split="train", val_split="valid", val_demos=1, pointmaps=False):
        self.path, self.views, self.pointmaps = str(path), view_names(views), pointmaps
        self._file, self._pid = None, None
        self.skipped = []  # (demo, frames) of the demos shorter than a window; filled by windows()
        self.num_uncovered = 0  # frames at the ends of demos that no window holds; counted by windows()
        self.splits = self._read_splits(train_split, val_split, val_demos)  # demo -> "train" | "val", numeric order
        self.num_frames = {}  # demo -> frames
        self.prompts = {}  # demo -> instruction
        for demo in self.splits:
            self.num_frames[demo] = self._check_demo(demo)
            self.prompts[demo] = self._read_prompt(demo)

    @property
    def file(self):
        """Opened once a process: an HDF5 handle that crosses a fork reads garbage."""
        if self._pid != os.getpid():
            try:
                self._file, self._pid = h5py.File(self.path, "r"), os.getpid()
            except OSError as error:
                what = "a folder, want an HDF5 file" if os.path.isdir(self.path) else "no such file"
                if os.path.isfile(self.path):
                    what = f"not a whole HDF5 file ({first_line(error)}): copy it again"
                raise UserError(f"data={self.path}: {what}") from None
        return self._file

    def _read_splits(self, train_split, val_split, val_demos):
        if "data" not in self.file:
            raise UserError(f"data={self.path}: got groups {list(self.file)}, want data/demo_N (robomimic layout)")
        there = set(self.file["data"])
        if "mask" in self.file:
            train = self._read_mask("train_split", train_split, there)
            val = self._read_mask("val_split", val_split, there) if val_split else []
        else:
            train, val, val_split = sorted(there, key=demo_number), [], ""
        if not val_split:
            if not 0 < val_demos < len(train):
                raise UserError(f"val_demos={val_demos}: want 1 to {len(train) - 1} of the {len(train)} demos")
            train, val = train[:-val_demos], train[-val_demos:]
        if both := sorted(set(train) & set(val), key=demo_number):
            raise UserError(
                f"{both[0]} is in mask/{train_split} and mask/{val_split}: --val_split= holds out val_demos"
            )
        return dict.fromkeys(train, "train") | dict.fromkeys(val, "val")

    def _read_mask(self, setting, split, there):
        if split not in self.file["mask"]:
            raise UserError(f"{setting}={split}: {self.path} has the masks {', '.join(self.file['mask']) or '(none)'}")
        demos = mask_names(self.file["mask"][split])
        if missing := sorted(set(demos) - there, key=demo_number):
            raise UserError(f"{self.path}: mask/{split} names {missing[0]}, which data/ does not have")
        if not demos:
            raise UserError(f"{setting}={split}: mask/{split} of {self.path} is empty")
        return sorted(demos, key=demo_number)

    def _check_demo(self, demo):
        """Presence, dtype, shape and length of all that will be read of a demo -> its number of frames."""
        observations = self.file["data"][demo].get("obs", {})
        lengths = {}
        for view in self.views:
            if f"{view}_image" not in observations:
                cameras = ", ".join(name[: -len("_image")] for name in observations if name.endswith("_image"))
                raise UserError(f"views={view}: {demo} of {self.path} has the views {cameras or 'none'}")
            image = observations[f"{view}_image"]
            if image.dtype != np.uint8 or image.ndim != 4 or image.shape[3] != 3:
                raise UserError(f"{demo}/{view}_image: got {image.dtype} {image.shape}, want uint8 (frames, h, w, 3)")
            lengths[f"{view}_image"] = len(image)
            wanted = {"depth": image.shape[1:3], "intrinsics": (3, 3), "extrinsics": (4, 4)} if self.pointmaps else {}
            for suffix, shape in wanted.items():
                if f"{view}_{suffix}" not in observations:
                    raise UserError(f"{demo}/{view}_{suffix}: not there: pointmaps want depth and cameras")
                array = observations[f"{view}_{suffix}"]
                if array.dtype.kind != "f" or array.shape[1:] not in (shape, (*shape, 1)):
                    got, want = f"{array.dtype} {array.shape}", f"float (frames, {shape[0]}, {shape[1]})"
                    raise UserError(f"{demo}/{view}_{suffix}: got {got}, want {want}; depth in metres")
                lengths[f"{view}_{suffix}"] = len(array)
        if len(set(lengths.values())) > 1:
            listed = ", ".join(f"{name} {length}" for name, length in lengths.items())
            raise UserError(f"{demo}: got unequal numbers of frames ({listed}), want the same in all")
        return lengths[f"{self.views[0]}_image"]

    def _read_prompt(self, demo):
        meta = self.file["data"][demo].attrs.get("ep_meta")
        if meta is None:
            raise UserError(f"{demo}: no ep_meta attribute, want JSON with the instruction as lang")
        try:
            meta = json.loads(meta)
        except ValueError:
            raise UserError(f"{demo}: ep_meta is not JSON ({str(meta)[:40]!r}), want {{'lang': instruction}}") from None
        lang = meta.get("lang") if isinstance(meta, dict) else None
        if not isinstance(lang, str) or not lang.strip():
            raise UserError(f"{demo}: got lang {lang!r} in ep_meta, want the instruction")
        return lang

    def windows(self, num_frames, window_stride, pad_short=False):
        """All windows in the numeric order of demos, train first. A demo shorter than num_frames goes to .skipped, or
        with pad_short=True becomes one window that holds its last frame. Zero windows in a split is an error."""
        windows, self.skipped, self.num_uncovered = [], [], 0
        for demo, split in self.splits.items():
            frames = self.num_frames[demo]
            if frames >= num_frames:
                starts = range(0, frames - num_frames + 1, window_stride)
                windows += [Window(demo, start, num_frames, split) for start in starts]
                self.num_uncovered += frames - num_frames - starts[-1]
            elif pad_short and frames > 0:
                windows.append(Window(demo, 0, frames, split))
            else:
                self.skipped.append((demo, frames))
        for split in ("train", "val"):
            if not any(window.split == split for window in windows):
                longest = max(self.num_frames[demo] for demo in self.splits if self.splits[demo] == split)
                raise UserError(
                    f"num_frames={num_frames}: no {split} windows left, the longest {split} demo has {longest} frames: "
                    f"lower num_frames or set pad_short=True"
                )
        return windows

    def _read(self, window, name, num_frames):
        """obs/<name> of a window, its last frame held up to num_frames -> f ..."""
        try:
            frames = self.file[f"data/{window.demo}/obs/{name}"][window.start : window.start + window.length]
        except OSError as error:
            damage = f"{window.demo}/{name} is damaged ({first_line(error)})"
            raise UserError(f"data={self.path}: {damage}: copy the file again") from None
        held = num_frames - len(frames)
        return np.concatenate([frames, np.repeat(frames[-1:], held, 0)]) if held > 0 else frames[:num_frames]

    def rgb(self, window, view, num_frames):
        """-> uint8 f h w 3."""
        return self._read(window, f"{view}_image", num_frames)

    def camera(self, window, view, num_frames):
        """-> depth f h w (metres), K f 3 3, E f 4 4, float32. NaN is an error; 0 and inf mean "unknown"."""
        depth = self._read(window, f"{view}_depth", num_frames).astype(np.float32)
        depth = depth[..., 0] if depth.ndim == 4 else depth
        K = self._read(window, f"{view}_intrinsics", num_frames).astype(np.float32)
        E = self._read(window, f"{view}_extrinsics", num_frames).astype(np.float32)
        for name, array in (("depth", depth), ("intrinsics", K), ("extrinsics", E)):
            if (bad := np.isnan(array) if name == "depth" else ~np.isfinite(array)).any():
                frame = window.start + int(bad.reshape(len(array), -1).any(1).argmax())
                raise UserError(f"{window.demo}/{view}_{name}: got NaN in frame {frame}, want 0 where depth is unknown")
        if not (np.linalg.det(K) > 0).all():
            raise UserError(f"{window.demo}/{view}_intrinsics: got {K[0].tolist()}, want focal lengths above 0 and a "
                            "last row 0 0 1")
        return depth, K, E

    def points(self, window, view, num_frames):
        """-> world xyz f h w 3 in metres, valid f h w: False where the depth is 0 or infinite (xyz is 0 there)."""
        depth, K, E = self.camera(window, view, num_frames)
        valid = np.isfinite(depth) & (depth > 0)
        xyz = unproject(np.where(valid, depth, 1), K, E)
        return np.where(valid[..., None], xyz, 0), valid

    def prompt(self, demo):
        return self.prompts[demo]


def mask_names(mask):
    """The demos that a dataset of mask/ lists."""
    return [name.decode() if isinstance(name, bytes) else str(name) for name in mask[()]]


# ----------------------------------------------------------------------------------------------------------------------
# cells and the grid


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


def check_sizes(num_frames, height, width, stride, names=("cell_height", "cell_width")):
    """UserError unless the VAE (stride t, h, w) and the transformer's 2 x 2 patches divide a cell evenly.

    names are the caller's settings of height and width.
    """
    for name, size, multiple in zip(names, (height, width), (2 * stride[1], 2 * stride[2]), strict=True):
        if size % multiple or size <= 0:
            below = max(size // multiple, 1) * multiple
            raise UserError(f"{name}={size}: want a multiple of {multiple} ({below} or {below + multiple})")
    if (num_frames - 1) % stride[0] or num_frames < 1:
        below = max((num_frames - 1) // stride[0], 0) * stride[0] + 1
        raise UserError(f"num_frames={num_frames}: want {stride[0]}n+1 ({below} or {below + stride[0]})")
