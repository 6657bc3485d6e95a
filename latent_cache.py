"""The latent cache that prepare_robocasa.py writes and training reads, and the order in which its samples are drawn.

    rgb/<key>.safetensors, pointmap/<key>.safetensors                        {view: z F h w}
    condition/rgb/<key>.safetensors, condition/pointmap/<key>.safetensors    {view: z F h w (z 1 h w: a frame alone)}
    condition/text/embeddings.safetensors                                    {text: prompts tokens width}

Each of the five units is a folder with fingerprint.json (written first), all that shaped it, and index.json (written
last). A unit that was made from anything else than the settings at hand is refused.
"""

import json
import os
from functools import lru_cache
from pathlib import Path

import numpy as np
import safetensors.torch
import torch
from huggingface_hub import hf_hub_download
from safetensors import SafetensorError

from data import join_cells
from guard import UserError, first_line, read_json, write_atomic
from recordings import Window, content_hash, folder_hash, view_names


def fingerprints(config, kind, demos):
    """{unit: {name: value}} of all that shapes the units these settings want; kind is "i2v" | "ti2v" | "t2v".

    What isn't at hand isn't compared: a trainer lacks the dtypes.
    """

    def known(*names):
        return {name: config[name] for name in names if name in config}

    data = {"data": Path(config["data"]).name} | known("train_split", "val_split", "val_demos") | demos.fingerprint()
    frames, prompts, box = ({name: data.pop(name) for name in names if name in data}
                            for names in (["frames"], ["prompts"], ["points", "cameras"]))
    box |= known("workspace_box") if config.get("workspace_box") else known("workspace_box", "box_percentile")
    latents = data | frames | known("num_frames", "window_stride", "pad_short", "cell_height", "cell_width")
    latents |= {"views": view_names(config["views"]), "vae": weights_identity(config["model"], "vae")}
    latents |= known("vae_dtype", "cache_dtype")
    text = data | prompts | {"text_encoder": weights_identity(config["model"], "text_encoder", "tokenizer")}
    text |= known("max_text_tokens", "negative_prompt", "text_dtype", "cache_dtype")

    units = {"rgb": latents, "condition/rgb": latents | {"kind": kind}, "condition/text": text}
    if config.get("pointmaps"):
        units |= {"pointmap": latents | box, "condition/pointmap": latents | box | {"kind": kind}}
    return units


def contents(config, *names, demos=None):
    """{"content of model": hash, ...} of the files and folders that settings name, "" for hub ids and what isn't set;
    with their reader also {"content of data: prompts": hash, ...}, all that it knows of recordings.

    Of a folder with weights these count, and model_index.json: a run's own folder may lie among them. Of another
    folder, of recordings, everything does.
    """
    found = {f"content of data: {name}": value for name, value in demos.fingerprint().items()} if demos else {}
    for name in names:
        path, content = Path(config[name].split(":")[0] if name == "init_lora" else config[name]), ""  # PATH:WEIGHT
        if config[name] and path.is_dir():
            patterns = ("model_index.json", "*.safetensors", "*/*.safetensors")
            weights = [file for pattern in patterns for file in sorted(path.glob(pattern))]
            content = content_hash(weights) if weights else folder_hash(path)
        elif config[name] and path.exists():
            content = content_hash([path])
        found[f"content of {name}"] = content
    return found


def weights_identity(model, *parts):
    """What stands for parts of a checkpoint in a fingerprint: its files' content, a hub id's commit, "random:NAME"."""
    if model.startswith("random:"):
        return ":".join(model.split(":")[:2])  # random:NAME:num_layers
    if os.path.isdir(model):
        return content_hash(path for part in parts for path in sorted(Path(model, part).glob("*")) if path.is_file())
    try:
        config = Path(hf_hub_download(model, f"{parts[0]}/config.json"))  # .../snapshots/<commit>/<part>/config.json
    except (OSError, ValueError) as error:
        raise UserError(f"model={model}: want a diffusers folder or a hub id ({first_line(error)})") from None
    return f"{model}@{config.parent.parent.name}"


def stored(path):
    """The dict in a JSON file of a cache, {} where it isn't there or is damaged."""
    try:
        return read_json(path, "what a preparation wrote")
    except UserError:
        return {}


def check_unit(folder, expected, force=False):
    """Whether a unit's preparation recorded something else than `expected`, which is a UserError unless force; None
    where it was never begun. What it didn't record, as an older one didn't all, isn't compared."""
    recorded = stored(folder / "fingerprint.json")
    if not recorded and not any(folder.glob("*.safetensors")):
        return None
    differences = [] if recorded else ["it has no whole fingerprint.json"]
    differences += [f"{name} was {recorded[name]}, now {value}" for name, value in expected.items()
                    if name in recorded and recorded[name] != value]
    if differences and not force:
        raise UserError(f"{folder} is stale: {'; '.join(differences)}: prepare in another cache_dir, or replace it "
                        "with prepare_robocasa.py --force=True")
    return bool(differences)


def is_whole(path):
    """Whether a .safetensors file is as long as its header says."""
    try:
        with safetensors.safe_open(path, "np"):
            return True
    except (OSError, SafetensorError):
        return False


def write_tensors(path, tensors):
    write_atomic(path, safetensors.torch.save({name: tensor.contiguous().cpu() for name, tensor in tensors.items()}))


def write_json(path, value, indent=None):
    write_atomic(path, (json.dumps(value, indent=indent, ensure_ascii=False) + "\n").encode())


def cached_box(cache_dir):
    """The box of a cache's pointmaps, x0 y0 z0 x1 y1 z1 in metres; None where it holds no finished ones."""
    return stored(Path(cache_dir, "pointmap/index.json")).get("box")


def spread(windows):
    """Windows, demo after demo, in an order whose first few are of as many demos as there are, and not all beginnings.

    One of each demo, then a second of each, ...; a demo's begin a golden section further on than the one's before it.
    """
    of_demo = {}
    for window in windows:
        of_demo.setdefault(window.demo, []).append(window)
    turns = []
    for number, own in enumerate(of_demo.values()):
        first = int(len(own) * (0.618 * number % 1))
        turns += [((i - first) % len(own), window) for i, window in enumerate(own)]
    return [window for _, window in sorted(turns, key=lambda turn: turn[0])]


class LatentCache:
    """The cache that prepare_robocasa.py made with these settings (the dict of a script) for a model of this kind, from
    these recordings (their reader).

    .train, .val   lists of Window
    .text          prompts n d, zero-padded after the encoder; .prompts their strings; .empty_index, .negative_index
    .box           x0 y0 z0 x1 y1 z1, metres; None without pointmaps
    """

    def __init__(self, config, kind, demos):
        self.root = Path(config["cache_dir"])
        self.views = view_names(config["views"])
        self.modalities = ["rgb", "pointmap"] if config.get("pointmaps") else ["rgb"]
        index = {unit: self._read_index(unit, wanted) for unit, wanted in fingerprints(config, kind, demos).items()}

        windows = [Window(*window) for window in index["rgb"]["windows"]]
        self.train = [window for window in windows if window.split == "train"]
        self.val = spread([window for window in windows if window.split == "val"])
        self.box = index["pointmap"]["box"] if "pointmap" in index else None
        self.prompts = index["condition/text"]["prompts"]
        self._prompt_of_demo = index["condition/text"]["prompt_of_demo"]
        self.empty_index = self.prompts.index("")
        self.negative_index = self.prompts.index(config.get("negative_prompt", ""))
        self.text = self._load("condition/text", "embeddings")["text"]  # prompts n d

    def _read_index(self, unit, expected):
        stale = check_unit(self.root / unit, expected)
        if index := stored(self.root / unit / "index.json"):
            return index
        state = "missing" if stale is None else "unfinished"
        raise UserError(f"{self.root / unit} is {state}: run prepare_robocasa.py with the same settings")

    def _load(self, unit, key):
        path = self.root / unit / f"{key}.safetensors"
        try:
            return safetensors.torch.load_file(path)
        except (OSError, SafetensorError) as error:
            raise UserError(f"{path}: {first_line(error)}: delete it and run prepare_robocasa.py again") from None

    def _grid(self, prefix, window):
        cells = {}
        for modality in self.modalities:
            tensors = self._load(prefix + modality, window.key)
            cells |= {(modality, view): tensors[view].float() for view in self.views}
        return join_cells(cells)

    def sample(self, window):
        """-> latents z F H W, condition z F H W (z 1 H W: the given frame alone), both float32; prompt_index."""
        return {
            "latents": self._grid("", window),
            "condition": self._grid("condition/", window),
            "prompt_index": self._prompt_of_demo[window.demo],
        }


def collate(samples, text, device, given=True):
    """Samples of a LatentCache -> latents b z F H W, condition b z F H W (b z 1 H W; None unless given), text b n d."""
    names = ("latents", "condition") if given else ("latents",)
    batch = [torch.stack([sample[name] for sample in samples]).to(device, non_blocking=True) for name in names]
    text = text[[sample["prompt_index"] for sample in samples]].to(device, non_blocking=True)
    return batch[0], batch[1] if given else None, text


@lru_cache(maxsize=4)
def _permutation(num_samples, seed, epoch):
    return np.random.default_rng([seed, epoch]).permutation(num_samples)


def batch_indices(num_samples, batch_size, step, seed):
    """The global batch of a step (a rank takes its slice): positions step * batch_size onwards of an endless stream of
    epochs, each a permutation seeded by (seed, epoch). Nothing to store or to restore."""
    positions = range(step * batch_size, (step + 1) * batch_size)
    return [int(_permutation(num_samples, seed, at // num_samples)[at % num_samples]) for at in positions]
