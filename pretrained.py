"""Checkpoints are believed as far as they are whole: what their files hold is compared with what config.json describes.

A safetensors file begins with names, types and shapes: to compare them no weight is read. A loader would draw at random
what it misses, and go on.
"""

import json
import os
import re
from contextlib import contextmanager

import torch
from huggingface_hub import snapshot_download
from safetensors import safe_open
from transformers import AutoTokenizer, PreTrainedModel
from transformers.utils import is_protobuf_available, is_sentencepiece_available

from guard import UserError, first_line

# Weights that a checkpoint may hold beyond those of its class: of all T5 the text needs the encoder alone.
BESIDE = {"UMT5EncoderModel": [r"^decoder\.|^lm_head\."], "CLIPModel": [r"\.position_ids$"]}
VOCABULARIES = ("tokenizer.json", "vocab.json", "spiece.model")  # a tokenizer has one of them


@contextmanager
def one_line(model, part, setting="model"):
    """Whatever a library raises while it reads a part of a model, and there is no end of kinds, is one line."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"{setting}={model}: can't load its {part}: want a folder or hub id that holds one "
                        f"({first_line(error):.200})") from error


def folder_of(model, part, stem=""):
    """-> the folder of a part ("vae"; "": the model's own) of a folder or hub id; what isn't here is downloaded."""
    if not os.path.isdir(model):
        names = ("*.json", "*.txt", "*.model", f"{stem}*.safetensors")
        model = snapshot_download(model, allow_patterns=[os.path.join(part, name) for name in names])
    return os.path.join(model, part)


def check(cls, model, part, setting="model"):
    """UserError unless a part of a model holds the weights, and no others, of cls with its config.

    config.json is compared with the headers of the files that from_pretrained reads -> (folder, module on meta).
    """
    of_transformers = issubclass(cls, PreTrainedModel)
    stem = "model" if of_transformers else "diffusion_pytorch_model"
    where = f"{setting}={model}: {part or cls.__name__}"
    with one_line(model, part or cls.__name__, setting):
        folder = folder_of(model, part, stem)
        config = read_json(folder, "config.json")
        key, kind = ("model_type", cls.config_class.model_type) if of_transformers else ("_class_name", cls.__name__)
        if config.get(key, kind) != kind:
            raise UserError(f"{where}: its config.json says {key} {config[key]}: want {kind}")
        with torch.device("meta"):
            skeleton = cls(cls.config_class.from_dict(config)) if of_transformers else cls.from_config(config)
        index = f"{stem}.safetensors.index.json"
        sharded = os.path.isfile(os.path.join(folder, index))
        types, shapes = {}, {}
        for file in set(read_json(folder, index)["weight_map"].values()) if sharded else [f"{stem}.safetensors"]:
            with safe_open(os.path.join(folder, file), "pt") as opened:
                for name in opened.keys():  # noqa: SIM118
                    header = opened.get_slice(name)
                    types[name], shapes[name] = header.get_dtype(), tuple(header.get_shape())
    wanted = {name: tuple(tensor.shape) for name, tensor in skeleton.state_dict().items()}
    if other := [name for name in wanted if types.get(name, "F32") not in ("F64", "F32", "F16", "BF16")]:
        scales = sum("scale" in name for name in types.keys() - wanted.keys())
        raise UserError(f"{where}: {len(other)} of its weights are {types[other[0]]}, with {scales} scales (first "
                        f"{other[0]}): a quantised checkpoint, want bfloat16, float16 or float32")
    tied = getattr(skeleton, "all_tied_weights_keys", {})
    tied = tied | {source: target for target, source in tied.items()}  # one of the two is enough
    refuse(cls, where, [name for name in wanted if name not in shapes and tied.get(name) not in shapes],
           shapes.keys() - wanted.keys(), [name for name in wanted if shapes.get(name, wanted[name]) != wanted[name]])
    return folder, skeleton


def read_json(folder, name):
    with open(os.path.join(folder, name), encoding="utf-8") as file:
        return json.load(file)


def refuse(cls, where, missing, unexpected, mismatched):
    """UserError where a checkpoint lacks weights of cls, has others, or has them in another shape: names of each."""
    allowed = [*(cls._keys_to_ignore_on_load_unexpected or ()), *BESIDE.get(cls.__name__, ())]
    unexpected = [name for name in unexpected if not any(re.search(pattern, name) for pattern in allowed)]
    faults = {"missing": missing, "unknown": unexpected, "of another shape": mismatched}
    faults = [f"{len(names)} {words} (first {min(names)})" for words, names in faults.items() if names]
    if faults:
        raise UserError(f"{where}: of its weights {', '.join(faults)}: want the {cls.__name__} that its config.json "
                        "describes, in diffusers' names")


def load(cls, model, part, dtype, device, setting="model", **options):
    """-> a part of a model, whole and finite, on the device, frozen, eval; options: more for from_pretrained."""
    where, (folder, _) = f"{setting}={model}: {part or cls.__name__}", check(cls, model, part, setting)
    with one_line(model, part or cls.__name__, setting):
        module, report = cls.from_pretrained(folder, dtype=dtype, use_safetensors=True, output_loading_info=True,
                                             **options)
    refuse(cls, where, *(report[f"{kind}_keys"] for kind in ("missing", "unexpected", "mismatched")))
    if bad := [name for name, tensor in module.state_dict().items() if not tensor.sum().isfinite()]:
        raise UserError(f"{where}: {len(bad)} of its weights hold NaN or infinity, the first is {bad[0]}: want another "
                        "copy of the checkpoint")
    return module.to(device).eval().requires_grad_(False)


def load_tokenizer(model, part, rows, setting="model"):
    """-> the tokenizer of an embedding with so many rows: one a token, and a few more to make the number round."""
    folder = check_tokenizer(model, part, setting)
    with one_line(model, part or "tokenizer", setting):
        tokenizer = AutoTokenizer.from_pretrained(folder)
    if not 0 <= rows - len(tokenizer) < 256:
        raise UserError(f"{setting}={model}: its tokenizer knows {len(tokenizer)} tokens, the encoder {rows}: want the "
                        "tokenizer that it was trained with")
    return tokenizer


def check_tokenizer(model, part, setting="model"):
    """UserError where a tokenizer has no vocabulary, or one that nothing here can read -> its folder."""
    with one_line(model, part or "tokenizer", setting):
        folder = folder_of(model, part)
    there = [name for name in VOCABULARIES if os.path.isfile(os.path.join(folder, name))]
    if not there:
        raise UserError(f"{setting}={model}: its tokenizer has no vocabulary: want tokenizer.json in {folder}")
    if there == ["spiece.model"] and not (is_sentencepiece_available() and is_protobuf_available()):
        raise UserError(f"{setting}={model}: its tokenizer is spiece.model alone: want `pip install sentencepiece "
                        "protobuf`, or tokenizer.json beside it")
    return folder


def draw(build, dtype, device, seed=0):
    """-> build()'s module with random weights, drawn on the device, the same on every rank; frozen, eval."""
    torch.manual_seed(seed)
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)  # float32 first would take twice the memory
    with torch.device(device):
        module = build()
    torch.set_default_dtype(default)
    return module.eval().requires_grad_(False)
