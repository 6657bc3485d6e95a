"""What all readers of recordings share: windows, held-out demos, points in the world, the identity of files.

A reader takes all_windows and world_points into its class as they are and calls the others; what it must have stands
above data.open_demos. Cameras are those of geometry.py.
"""

import hashlib
import json
from glob import glob
from pathlib import Path
from typing import NamedTuple

import numpy as np

from geometry import known_points
from guard import UserError


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


def hold_out(demos, val_demos):
    """Names of demos in order -> {demo: "train" | "val"}, the last val_demos held out."""
    if len(demos) < 2:
        raise UserError(f"got {', '.join(demos) or 'no demos'}, want at least two: some to train on, some to hold out")
    if not 0 < val_demos < len(demos):
        raise UserError(f"val_demos={val_demos}: want 1 to {len(demos) - 1} of the {len(demos)} demos")
    return dict.fromkeys(demos[:-val_demos], "train") | dict.fromkeys(demos[-val_demos:], "val")


def all_windows(demos, num_frames, window_stride, pad_short=False):
    """All windows in the order of a reader's demos, train first. A demo shorter than num_frames goes to demos.skipped,
    or with pad_short=True becomes one window that holds its last frame. Zero windows in a split is an error."""
    windows, demos.skipped, demos.num_uncovered = [], [], 0
    for demo, split in demos.splits.items():
        frames = demos.num_frames[demo]
        if frames >= num_frames:
            starts = range(0, frames - num_frames + 1, window_stride)
            windows += [Window(demo, start, num_frames, split) for start in starts]
            demos.num_uncovered += frames - num_frames - starts[-1]
        elif pad_short and frames > 0:
            windows.append(Window(demo, 0, frames, split))
        else:
            demos.skipped.append((demo, frames))
    for split in ("train", "val"):
        if not any(window.split == split for window in windows):
            longest = max(demos.num_frames[demo] for demo in demos.splits if demos.splits[demo] == split)
            raise UserError(f"num_frames={num_frames}: no {split} windows left, the longest {split} demo has {longest} "
                            "frames: lower num_frames or set pad_short=True")
    return windows


def evenly(items, count):
    """Up to `count` of the items, evenly spread, the first and the last among them."""
    return [items[i] for i in np.linspace(0, len(items) - 1, min(count, len(items)), dtype=int)]


def hold_last(frames, num_frames):
    """f ... -> num_frames ...: cut, or the last frame held."""
    return frames[np.minimum(np.arange(num_frames), len(frames) - 1)]


def check_camera(window, view, depth, K, E):
    """UserError if depth f h w is NaN anywhere (0 and inf mean "unknown"), K f 3 3 or E f 4 4 no camera's."""
    for name, bad in (("depth", np.isnan(depth)), ("intrinsics", ~np.isfinite(K)), ("extrinsics", ~np.isfinite(E))):
        if bad.any():
            frame = window.start + int(bad.reshape(len(bad), -1).any(1).argmax())
            raise UserError(f"{window.demo}/{view}_{name}: got NaN in frame {frame}, want 0 where depth is unknown")
    if (flat := ~(np.linalg.det(K) > 0)).any():
        raise UserError(f"{window.demo}/{view}_intrinsics: got {K[flat][0].tolist()}, want focal lengths above 0 and a "
                        "last row 0 0 1")


def world_points(demos, window, view, num_frames):
    """-> world xyz f h w 3 in metres, valid f h w (geometry.known_points)."""
    return known_points(*demos.camera(window, view, num_frames))


# ----------------------------------------------------------------------------- the identity of files


def content_hash(paths, num_blocks=64, block_size=1 << 16):
    """A cheap identity of files: names, sizes and 64 evenly spaced blocks of 64 KiB (everything, up to 4 MiB)."""
    digest = hashlib.sha256()
    for path in paths:
        size = path.stat().st_size
        digest.update(f"{path.name} {size} ".encode())
        with open(path, "rb") as file:
            for offset in np.linspace(0, max(size - block_size, 0), num_blocks, dtype=int):
                file.seek(offset)
                digest.update(file.read(block_size))
    return digest.hexdigest()[:16]


def folder_hash(folder, num_files=16):
    """A cheap identity of a folder: names and sizes of all files in it, and content_hash of 16 of each kind (the first
    folder on their way and their suffix). Hidden files, a download's, don't count."""
    names = [name for name in sorted(glob("**", root_dir=folder, recursive=True)) if Path(folder, name).is_file()]
    kinds = {}
    for name in names:
        kinds.setdefault((Path(name).parent.parts[:1], Path(name).suffix), []).append(Path(folder, name))
    samples = [path for paths in kinds.values() for path in evenly(paths, num_files)]
    sizes = {name: Path(folder, name).stat().st_size for name in names}
    return json_hash([sizes, content_hash(samples)])


def json_hash(value):
    """Of plain values, whole."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]
