"""The reader of a RoboCasa / robomimic HDF5: frames, depth and cameras, instructions, splits."""

import difflib
import hashlib
import json
import os
import re
from contextlib import contextmanager
from pathlib import Path

import h5py
import numpy as np

import recordings
from guard import UserError, first_line
from recordings import content_hash, evenly, hold_last, hold_out, json_hash


def demo_number(name):
    """Sort key: h5py lists demo_0, demo_1, demo_10, demo_2."""
    digits = re.search(r"\d+$", name)
    return (int(digits.group()) if digits else -1, name)


def members(group):
    """{name: node} of what lies in a group itself and not at another place."""
    return {name: group[name] for name in group or () if isinstance(group.get(name, getlink=True), h5py.HardLink)}


def is_image(node):
    """Frames of RGB: uint8 f h w 3, at least one."""
    is_rgb = isinstance(node, h5py.Dataset) and node.dtype == np.uint8 and node.ndim == 4 and node.shape[3] == 3
    return is_rgb and node.size > 0


def sample(array):
    """Bytes that stand for a dataset: a small one whole, else three chunks as they are stored, or three frames."""
    if array.nbytes <= 1 << 16:
        return [array[()].tobytes()]
    if array.chunks is None:
        return [array[i].tobytes() for i in evenly(range(len(array)), 3)]
    chunks = [array.id.get_chunk_info(i) for i in evenly(range(array.id.get_num_chunks()), 3)]
    return [array.id.read_direct_chunk(chunk.chunk_offset)[1] for chunk in chunks]  # a tenth of the time of unpacking


class RobotDemos:
    """The demos of a RoboCasa (robomimic) HDF5. What it has for others is listed above data.open_demos.

    mask/<train_split> and mask/<val_split> tell which demos are whose; where the file has only one of the two, all
    others are the other's. With val_split="" or without masks, the last `val_demos` of the training demos are held out.
    pointmaps=True also wants <view>_depth, _intrinsics and _extrinsics.
    """

    windows, points = recordings.all_windows, recordings.world_points

    def __init__(self, data, views, train_split="train", val_split="valid", val_demos=1, pointmaps=False,
                 allow_external=False):
        self.path, self.views, self.pointmaps = str(data), recordings.view_names(views), pointmaps
        self.allow_external = allow_external
        self._file, self._pid = None, None
        with self._reading("data/ or mask/"):
            self.splits = self._read_splits(train_split, val_split, val_demos)  # demo -> "train" | "val", numeric order
        self.num_frames, self.prompts = {}, {}
        for demo in self.splits:
            with self._reading(f"data/{demo}"):
                self.num_frames[demo], self.prompts[demo] = self._check_demo(demo), self._read_prompt(demo)

    def _error(self, text):
        return UserError(f"data={self.path}: {text}")

    @property
    def file(self):
        """Opened once a process: an HDF5 handle that crosses a fork reads garbage."""
        if self._pid != os.getpid():
            if not os.path.isfile(self.path):
                raise self._error("a folder, want an HDF5 file" if os.path.isdir(self.path) else "no such file")
            try:
                self._file, self._pid = h5py.File(self.path, "r"), os.getpid()
            except (OSError, RuntimeError, LookupError, ValueError) as error:
                if isinstance(error, BlockingIOError) or "already open for write" in str(error):
                    raise self._error("is open for writing elsewhere or wasn't closed: close it, or free it with "
                                      "h5clear -s") from error
                raise self._error(f"not a whole HDF5 file ({first_line(error)}): copy it again") from error
        return self._file

    @contextmanager
    def _reading(self, place, want="damaged, or a link that leads nowhere: copy the file again"):
        """The one guard: what h5py raises for damaged bytes, dead links and things of another kind becomes one line."""
        try:
            yield
        except UserError:
            raise
        except (OSError, RuntimeError, LookupError, ValueError, TypeError, AttributeError, ArithmeticError,
                MemoryError) as error:
            raise self._error(f"{place}: got {first_line(error)}: {want}") from error

    def _external(self, place, where):
        if not self.allow_external:
            raise self._error(f"{place} is kept in other files ({where}): want --allow_external=True to read them")

    def _follow(self, node, path, place):
        """What lies at a path, None where nothing has its name. Link by link: no other file is even opened unasked."""
        for name in path.strip("/").split("/"):
            link = node.get(name, getlink=True)
            if link is None:
                return None
            if isinstance(link, h5py.ExternalLink):
                self._external(place, link.filename)
            if isinstance(link, h5py.SoftLink):
                node = self._follow(node.file if link.path.startswith("/") else node, link.path, place)
                if node is None:
                    raise KeyError(f"a link to {link.path}, where nothing is")
            else:
                node = node[name]
        return node

    def _open(self, place, kind=h5py.Dataset, missing=""):
        """The dataset or group at a place; where nothing has its name, None or an error that says what is `missing`."""
        with self._reading(place):
            node = self._follow(self.file, place, place)
            if node is None and missing:
                raise self._error(f"{place}: {missing}")
            if node is None:
                return None
            if not isinstance(node, kind):
                raise self._error(f"{place} is a {type(node).__name__.lower()}, want a {kind.__name__.lower()}")
            if kind is h5py.Dataset and (node.external or node.is_virtual):
                self._external(place, "a virtual dataset" if node.is_virtual else node.external[0][0])
            elif kind is h5py.Dataset and node.nbytes > 10_000 * os.path.getsize(self.path):
                raise ValueError(f"shape {node.shape} is more than the file can hold")
            return node

    def _read_splits(self, train_split, val_split, val_demos):
        data = self._open("data", h5py.Group, missing="not there, want data/demo_N (robomimic layout)")
        masks = self._open("mask", h5py.Group)
        there = sorted(data, key=demo_number)
        "".join(there).encode()  # files will be named like them
        if masks is None or not len(masks):
            return hold_out(there, val_demos)
        train = self._read_mask("train_split", train_split, there, masks)
        val = self._read_mask("val_split", val_split, there, masks)
        if train is None and val is None and train_split:
            raise self._error(f"train_split={train_split}: the file has the masks {', '.join(masks)}")
        listed = {*(train or ()), *(val or ())}
        others = [demo for demo in there if demo not in listed]
        train = others if train is None else train
        if not val_split:
            return hold_out(train, val_demos)
        val = others if val is None else val
        for setting, split, demos in (("train_split", train_split, train), ("val_split", val_split, val)):
            if not demos:
                raise self._error(f"{setting}={split}: got no demos, want some in its mask, or in neither")
        if both := [demo for demo in train if demo in set(val)]:
            raise self._error(f"{both[0]} is in mask/{train_split} and mask/{val_split}: --val_split= holds out "
                              "val_demos")
        return dict.fromkeys(train, "train") | dict.fromkeys(val, "val")

    def _read_mask(self, setting, split, there, masks):
        """The demos in mask/<split>, in numeric order; None where it isn't there and has the usual name or none."""
        mask = self._open(f"mask/{split}") if split else None
        if mask is None and split not in ("", "train", "valid"):
            raise self._error(f"{setting}={split}: the file has the masks {', '.join(masks)}")
        if mask is None:
            return None
        with self._reading(f"mask/{split}", "want a list of demos"):
            demos = sorted(set(mask.asstr()[:]), key=demo_number)
        if missing := [demo for demo in demos if demo not in set(there)]:
            raise self._error(f"mask/{split} names {missing[0]}, which data/ does not have")
        return demos

    def _check_demo(self, demo):
        """Presence, dtype, shape and length of all that will be read of a demo -> its number of frames."""
        lengths = {}
        for view in self.views:
            image = self._open(place := f"data/{demo}/obs/{view}_image")
            if image is None:
                raise UserError(f"views={view}: {demo} of {self.path} has the images {self._images(demo, view)}")
            if not is_image(image):
                raise self._error(f"{place}: got {image.dtype} {image.shape}, want uint8 (frames, h, w, 3)")
            lengths[f"{view}_image"] = len(image)
            wanted = {"depth": image.shape[1:3], "intrinsics": (3, 3), "extrinsics": (4, 4)} if self.pointmaps else {}
            for suffix, shape in wanted.items():
                place = f"data/{demo}/obs/{view}_{suffix}"
                array = self._open(place, missing="not there: pointmaps want depth and cameras")
                there = array.shape[1:] if array.shape else ()
                if array.dtype.kind != "f" or there != shape and (suffix != "depth" or there != (*shape, 1)):
                    raise self._error(f"{place}: got {array.dtype} {array.shape}, want float (frames, {shape[0]}, "
                                      f"{shape[1]}); depth in metres")
                lengths[f"{view}_{suffix}"] = len(array)
        if len(set(lengths.values())) > 1:
            listed = ", ".join(f"{name} {length}" for name, length in lengths.items())
            raise self._error(f"{demo}: got unequal numbers of frames ({listed}), want the same in all")
        return lengths[f"{self.views[0]}_image"]

    def _images(self, demo, view):
        """All image datasets of a demo, which lacks this view."""
        found = members(self._open(f"data/{demo}/obs", h5py.Group, "not there"))
        names = [name for name, node in found.items() if is_image(node)]
        nearest = "".join(f"; the nearest is {name}" for name in difflib.get_close_matches(f"{view}_image", names, 1))
        return f"{', '.join(names) or '(none)'}, want {view}_image{nearest}"

    def _read_prompt(self, demo):
        with self._reading(f"ep_meta of data/{demo}", "want JSON with the instruction as lang"):
            lang = json.loads(self._open(f"data/{demo}", h5py.Group).attrs["ep_meta"])["lang"]
            if not lang.strip():
                raise ValueError("lang is empty")
            lang.encode()  # half a surrogate pair is no text
            return lang

    def image_size(self, demo, view):
        return self._open(f"data/{demo}/obs/{view}_image").shape[1:3]

    def has_depth(self, demo):
        names = [f"{view}_{name}" for view in self.views for name in ("depth", "intrinsics", "extrinsics")]
        return all(self._open(f"data/{demo}/obs/{name}") is not None for name in names)

    def _read(self, window, name, num_frames):
        """obs/<name> of a window, its last frame held up to num_frames -> f ..."""
        place = f"data/{window.demo}/obs/{name}"
        with self._reading(place):
            end = window.start + min(window.length, num_frames)
            return hold_last(self._open(place)[window.start : end], num_frames)

    def rgb(self, window, view, num_frames):
        return self._read(window, f"{view}_image", num_frames)

    def camera(self, window, view, num_frames):
        names = [f"{view}_{name}" for name in ("depth", "intrinsics", "extrinsics")]
        depth, K, E = (self._read(window, name, num_frames).astype(np.float32) for name in names)
        depth = depth[..., 0] if depth.ndim == 4 else depth
        recordings.check_camera(window, view, depth, K, E)
        return depth, K, E

    def fingerprint(self):
        """{name: hash} of what shapes a cache: samples of the file; all masks and prompts and samples of each demo's
        frames, which they would miss; with pointmaps also of its depth and cameras ("points"). "cameras", the first and
        last K and E, is what older caches recorded.
        """
        with self._reading("data/ or mask/"):
            masks = members(self._open("mask", h5py.Group)).items()
            masks = {split: [name.decode() if isinstance(name, bytes) else str(name) for name in mask[()]]
                     for split, mask in masks if getattr(mask, "ndim", 0) == 1}
            found = {"data_content": content_hash([Path(self.path)]), "masks": json_hash(masks),
                     "prompts": json_hash(self.prompts), "frames": self._hash(self.splits, ["image"], sample)}
            if self.pointmaps:
                found["points"] = self._hash(self.splits, ["depth", "intrinsics", "extrinsics"], sample)
                found["cameras"] = self._hash(self.file["data"], ["intrinsics", "extrinsics"],
                                              lambda array: [array[0].tobytes(), array[-1].tobytes()])
            return found

    def _hash(self, demos, suffixes, parts):
        """One hash of parts(array) of all that these demos have under <view>_<suffix>."""
        digest = hashlib.sha256()
        for demo in demos:
            for name in [f"{view}_{suffix}" for view in self.views for suffix in suffixes]:
                array = self._open(place := f"data/{demo}/obs/{name}")  # a demo of no split may lack it
                with self._reading(place):
                    if array is not None and len(array):
                        digest.update(f"{demo} {name} {array.shape}".encode())
                        for part in parts(array):
                            digest.update(part)
        return digest.hexdigest()[:16]
