"""Prompts with their given images, from JSON lines, and which of them an iteration uses.

    {"input": "A camera moves around the subject.", "metadata": {"image_path": "images/frame.jpg"}}
"""

import os
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps

from guard import UserError, first_line, parse_json


def open_image(path, where, quick=False):
    """A given image as Pillow's RGB: upright by its EXIF, the first of several, on white where it's transparent.

    All of it is decoded (quick: a JPEG at an eighth of its size). UserError, which says where it was named.
    """
    if not os.path.isfile(path):
        what = "a folder" if os.path.isdir(path) else "which is not there"
        raise UserError(f"{where}: got image {str(path):.300}, {what}, want a file: an image")
    try:
        with Image.open(path) as image:
            if image.mode.startswith(("I", "F")):
                raise ValueError(f"mode {image.mode}: more than 8 bits a pixel's channel")
            if quick:
                image.draft("RGB", (1, 1))
            image = ImageOps.exif_transpose(image)
            if image.has_transparency_data:
                white = Image.new("RGBA", image.size, "white")
                image = Image.alpha_composite(white, image.convert("RGBA"))
            return image.convert("RGB")
    except Exception as error:  # decoders raise what they like where a file is damaged
        raise UserError(f"{where}: got image {path} ({first_line(error)}), want one that opens") from None


def read_image(path, height, width, where):
    """A given image -> 3 height width float32 in -1..1, by open_image.

    Scaled to cover height x width, bicubic and antialiased, then cut to the centre: never stretched.
    """
    image = ImageOps.fit(open_image(path, where), (width, height), Image.Resampling.BICUBIC)
    return torch.from_numpy(np.array(image)).permute(2, 0, 1).float() / 127.5 - 1


class Prompts:
    """The lines of a JSONL file, all checked at once: .prompts (strings) and .metadata (dicts), in the file's order.

    needs_image=False (text to video) neither wants nor opens images. Blank lines are skipped. Raises UserError.
    """

    modalities, views = ("rgb",), ("",)  # a video is one cell: sampler.Sampler takes grids too

    def __init__(self, path, height, width, needs_image=True):
        self.path, self.height, self.width, self.needs_image = Path(path), height, width, needs_image
        self.prompts, self.metadata, self.lines = [], [], []
        try:
            lines = self.path.read_text(encoding="utf-8-sig").split("\n")  # with a BOM or without
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"{path}: got {error}, want a file of JSON lines in UTF-8") from None
        opened = set()
        for number, line in enumerate(lines, 1):
            if line.strip():
                prompt, metadata = self._parse(line, number)
                if needs_image and metadata["image_path"] not in opened:  # groups of prompts often share an image
                    open_image(self._path(metadata), f"{path}:{number}", quick=True)
                    opened.add(metadata["image_path"])
                self.prompts.append(prompt)
                self.metadata.append(metadata)
                self.lines.append(number)
        if not self.prompts:
            raise UserError(f'{path}: got no lines, want one {{"input": prompt, "metadata": {{}}}} or more')

    def __len__(self):
        return len(self.prompts)

    def _parse(self, line, number):
        where = f"{self.path}:{number}"
        entry = parse_json(line, where, 'an object {"input": prompt, "metadata": {}}')
        prompt, metadata = entry.get("input"), entry.get("metadata", {})
        if not isinstance(prompt, str) or not prompt.strip():
            raise UserError(f"{where}: got input {prompt!r}, want the prompt, some text")
        if not isinstance(metadata, dict):
            raise UserError(f"{where}: got metadata {metadata!r}, want an object")
        image_path = metadata.get("image_path")
        if self.needs_image and (not isinstance(image_path, str) or not image_path):
            raise UserError(f"{where}: got image_path {image_path!r} in metadata, want the given image's file")
        return prompt, metadata

    def _path(self, metadata):
        return self.path.parent / os.path.expanduser(metadata["image_path"])  # an absolute one stays as it is

    def image(self, index):
        """The given image of a line -> 3 h w float32 in -1..1, see read_image."""
        where = f"{self.path}:{self.lines[index]}"
        return read_image(self._path(self.metadata[index]), self.height, self.width, where)

    def given(self, index):
        """The given frame of a line, cell by cell -> {(modality, view): 3 h w in -1..1}."""
        return {("rgb", ""): self.image(index)}


def group_indices(num_prompts, prompts_per_iteration, iteration, seed):
    """The prompts of an iteration, a pure function of (seed, iteration) -> list of prompts_per_iteration indices.

    One permutation of the file after another, each prompt once an epoch. An iteration that ends one epoch and begins
    the next would repeat prompts: those it has are moved back in the new permutation.
    """
    if not 1 <= prompts_per_iteration <= num_prompts:
        raise UserError(f"prompts_per_iteration={prompts_per_iteration}: want 1 to {num_prompts}, all there are")
    start, end = iteration * prompts_per_iteration, (iteration + 1) * prompts_per_iteration
    before = order = np.empty(0, dtype=np.int64)
    last_epoch = (end - 1) // num_prompts
    for epoch in range(last_epoch + 1):  # from the first on, because each depends on how the one before it ended
        before, order = order, np.random.default_rng((seed, epoch)).permutation(num_prompts)
        begun = epoch * num_prompts % prompts_per_iteration  # prompts that the iteration on the border has already
        if begun:
            head = order[~np.isin(order, before[-begun:])][: prompts_per_iteration - begun]
            order = np.concatenate([head, order[~np.isin(order, head)]])
    stream = np.concatenate([before, order])
    offset = last_epoch * num_prompts - len(before)  # of the stream's first prompt
    return stream[start - offset : end - offset].tolist()
