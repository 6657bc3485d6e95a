"""The reader of a RoboCasa / robomimic HDF5: frames, depth and cameras, instructions, splits."""

import hashlib
import json
import os
import re
from pathlib import Path

import h5py
import numpy as np

import recordings
from guard import UserError, first_line
from recordings import Window, content_hash, hold_last, hold_out, json_hash


def demo_number(name):
    """Sort key: h5py lists demo_0, demo_1, demo_10, demo_2."""
    digits = re.search(r"\d+$", name)
    return (int(digits.group()) if digits else -1, name)


def mask_names(mask):
    """The demos that a dataset of mask/ lists."""
    return [name.decode() if isinstance(name, bytes) else str(name) for name in mask[()]]


class RobotDemos:
    """The demos of a RoboCasa (robomimic) HDF5. What it has for others is listed above data.open_demos.

    Validation demos are mask/<val_split>; with val_split="" or in a file without masks, the last `val_demos` of the
    training demos are held out. pointmaps=True also wants <view>_depth, _intrinsics and _extrinsics.
    """

    windows, points = recordings.all_windows, recordings.world_points

    def __init__(self, data, views, train_split="train", val_split="valid", val_demos=1, pointmaps=False):
        self.path, self.views, self.pointmaps = str(data), recordings.view_names(views), pointmaps
        self._file, self._pid = None, None
        self.splits = self._read_splits(train_split, val_split, val_demos)  # demo -> "train" | "val", numeric order
        self.num_frames = {demo: self._check_demo(demo) for demo in self.splits}
        self.prompts = {demo: self._read_prompt(demo) for demo in self.splits}

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
        if "mask" not in self.file:
            return hold_out(sorted(there, key=demo_number), val_demos)
        train = self._read_mask("train_split", train_split, there)
        if not val_split:
            return hold_out(train, val_demos)
        val = self._read_mask("val_split", val_split, there)
        if both := sorted(set(train) & set(val), key=demo_number):
            raise UserError(f"{both[0]} is in mask/{train_split} and mask/{val_split}: --val_split= holds out "
                            "val_demos")
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

    def image_size(self, demo, view):
        return self.file[f"data/{demo}/obs/{view}_image"].shape[1:3]

    def has_depth(self, demo):
        names = [f"{view}_{name}" for view in self.views for name in ("depth", "intrinsics", "extrinsics")]
        return all(name in self.file[f"data/{demo}/obs"] for name in names)

    def _read(self, window, name, num_frames):
        """obs/<name> of a window, its last frame held up to num_frames -> f ..."""
        try:
            end = window.start + min(window.length, num_frames)
            frames = self.file[f"data/{window.demo}/obs/{name}"][window.start : end]
        except OSError as error:
            raise UserError(f"data={self.path}: {window.demo}/{name} is damaged ({first_line(error)}): copy the file "
                            "again") from None
        return hold_last(frames, num_frames)

    def rgb(self, window, view, num_frames):
        return self._read(window, f"{view}_image", num_frames)

    def camera(self, window, view, num_frames):
        names = [f"{view}_{name}" for name in ("depth", "intrinsics", "extrinsics")]
        depth, K, E = (self._read(window, name, num_frames).astype(np.float32) for name in names)
        depth = depth[..., 0] if depth.ndim == 4 else depth
        recordings.check_camera(window, view, depth, K, E)
        return depth, K, E

    def fingerprint(self):
        """{name: hash} of the file's samples, of all masks and, with pointmaps, of each demo's first and last K and E.

        content_hash takes samples of a large file: an edit in place of what is small would escape it.
        """
        masks = {split: mask_names(mask) for split, mask in self.file.get("mask", {}).items()
                 if isinstance(mask, h5py.Dataset) and mask.ndim == 1}
        found = {"data_content": content_hash([Path(self.path)]), "masks": json_hash(masks)}
        if not self.pointmaps:
            return found
        digest = hashlib.sha256()
        for demo in self.file["data"]:
            for name in [f"{view}_{kind}" for view in self.views for kind in ("intrinsics", "extrinsics")]:
                array = self.file["data"].get(f"{demo}/obs/{name}")  # demos outside the splits may lack it
                if array is not None and len(array):
                    digest.update(f"{demo} {name} {array.shape}".encode())
                    for frame in (0, len(array) - 1):
                        digest.update(self._read(Window(demo, frame, 1, ""), name, 1).tobytes())
        return found | {"cameras": digest.hexdigest()[:16]}
