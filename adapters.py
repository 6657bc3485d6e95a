"""LoRA adapters: put on a transformer, checked, read from any tool's files, exported for diffusers and ComfyUI.

init_lora and sample.py's lora are PATH[:high|low|both][:WEIGHT], several separated by commas: safetensors, or folders.
"""

import difflib
import json
import math
import os
import re
from contextlib import contextmanager
from glob import escape, glob
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from diffusers import WanTransformer3DModel
from peft import LoraConfig
from peft.utils.other import get_pattern_key
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from cost import count_parameters
from fsdp import say
from guard import UserError, whole

LORA_FILES = {"high": "high_noise", "low": "low_noise", "single": "lora"}  # expert -> exported file name


def clean_name(name):
    """Parameter name without what wrappers put in."""
    return name.replace("_checkpoint_wrapped_module.", "").replace("_orig_mod.", "")


def adapter_name(parameter_name):
    """"blocks.0.attn1.to_q.lora_A.default.weight" -> "blocks.0.attn1.to_q.lora_A.weight", the name files use."""
    return parameter_name.replace(".default.", ".")


def target_layers(linears, targets):
    """Names of linear layers -> {"to_q": ["blocks.0.attn1.to_q", ...], ...}, by each target that they end with."""
    layers = {target: [name for name in linears if f".{name}".endswith(f".{target}")]
              for target in map(str.strip, targets.split(","))}
    if missing := [target for target in layers if not layers[target]]:
        ends = {name.split(".", i)[-1] for name in linears for i in range(name.count(".") + 1)}
        near = difflib.get_close_matches(missing[0], sorted(ends), n=1, cutoff=0.5) or ["to_q,to_k,to_v,to_out.0"]
        raise UserError(f"lora_targets={','.join(missing)}: no such linear layer; want e.g. {near[0]}")
    return layers


def add_lora(transformer, rank, alpha, targets):
    """Put trainable float32 adapters (B = 0: the identity) on the linears whose name ends with one of targets."""
    linears = [name for name, module in transformer.named_modules() if isinstance(module, torch.nn.Linear)]
    names = sorted({name for layers in target_layers(linears, targets).values() for name in layers})
    transformer.add_adapter(LoraConfig(r=rank, lora_alpha=alpha, target_modules=names, init_lora_weights=True))
    for parameter in transformer.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    return transformer


def check_lora(wan, experts, rank, alpha, targets, init_lora):
    """UserError for wrong targets, or adapters to start from that don't fit: before a transformer is loaded.

    -> the number of parameters that will be trained, over the experts.
    """
    if init_lora and not rank:
        raise UserError(f"init_lora={init_lora}: want the lora_rank it was trained with, got 0 (full fine-tuning)")
    if not rank:
        return len(experts) * count_parameters(wan.config)
    shapes, trained = linear_shapes(wan.config), set()
    for target, layers in target_layers(shapes, targets).items():
        trained.update(layers)
        others = ", ".join(name for name in layers if not name.startswith("blocks."))
        say(f"lora       {target}: {len(layers)} layers" + (f", outside the blocks: {others}" if others else ""))
    for expert in experts if init_lora else ():
        tensors, its_rank, its_alpha, its_layers = read_lora(init_lora, wan, expert)
        if its_rank != rank or {*its_layers.split(",")} != trained:
            ends = sorted({re.sub(r"^blocks\.\d+\.(attn\d\.)?", "", name) for name in its_layers.split(",")})
            raise UserError(f"lora_rank={rank}, lora_targets={targets}: {init_lora} has {its_rank}, {','.join(ends)} "
                            f"on {len(tensors) // 2} layers: want the same")
        if not math.isclose(its_alpha, alpha):
            raise UserError(f"lora_alpha={alpha:g}: {init_lora} was trained with {its_alpha:g}, want the same")
        if not all(tensor.any(1).all() for name, tensor in tensors.items() if ".lora_A." in name):
            raise UserError(f"init_lora={init_lora}: has layers of lower rank than {rank}, want the same for all")
    return len(experts) * rank * sum(sum(shapes[name]) for name in trained)


# ----------------------------------------------------------------------------- export

COMFYUI = {  # diffusers module name -> the name in the original Wan code, which ComfyUI keeps
    "attn1.": "self_attn.", "attn2.": "cross_attn.", "to_q": "q", "to_k": "k", "to_v": "v", "to_out.0": "o",
    "ffn.net.0.proj": "ffn.0", "ffn.net.2": "ffn.2", "proj_out": "head.head",
    "condition_embedder.time_embedder.linear_1": "time_embedding.0",
    "condition_embedder.time_embedder.linear_2": "time_embedding.2",
    "condition_embedder.time_proj": "time_projection.1",
    "condition_embedder.text_embedder.linear_1": "text_embedding.0",
    "condition_embedder.text_embedder.linear_2": "text_embedding.2",
}


def original_name(layer):
    """"blocks.0.attn1.to_q" -> "blocks.0.self_attn.q"."""
    for ours, original in COMFYUI.items():
        layer = layer.replace(ours, original)
    return layer


def comfyui_tensors(adapters, alpha):
    """{"blocks.0.attn1.to_q.lora_A.weight": tensor} -> ComfyUI's keys: lora_down, lora_up and an alpha a layer."""
    tensors = {}
    for name, tensor in adapters.items():
        layer, side = name.removesuffix(".weight").rsplit(".lora_")
        layer = original_name(layer)
        tensors[f"diffusion_model.{layer}.lora_{'down' if side == 'A' else 'up'}.weight"] = tensor
        tensors[f"diffusion_model.{layer}.alpha"] = torch.tensor(float(alpha))
    return tensors


def export_lora(folder, adapters, rank, alpha, targets, belongs_to):
    """Write one file an expert for diffusers (pipe.load_lora_weights) and one for ComfyUI; whole or not at all.

    adapters: {"high": {"blocks.0.attn1.to_q.lora_A.weight": cpu tensor}, ...}. belongs_to (of artifacts.py) is in the
    metadata of each, as JSON under "nanowan".
    """
    lora = {"transformer.r": rank, "transformer.lora_alpha": alpha,
            "transformer.target_modules": sorted(target.strip() for target in targets.split(","))}  # diffusers' names
    with whole(folder) as temporary:
        os.makedirs(temporary)
        for expert, tensors in adapters.items():
            tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
            record = {"format": "pt", "nanowan": json.dumps(belongs_to | {"expert": expert})}
            save_file({f"transformer.{name}": tensor for name, tensor in tensors.items()},
                      temporary / f"{LORA_FILES[expert]}.safetensors",
                      record | {"lora_adapter_metadata": json.dumps(lora)})
            save_file(comfyui_tensors(tensors, alpha), temporary / f"comfyui_{LORA_FILES[expert]}.safetensors", record)


# ----------------------------------------------------------------------------- files of any tool

PART = re.compile(r"([^:]+)(?::(high|low|both))?(?::(-?(?:\d+\.?\d*|\.\d+)(?:e-?\d+)?))?")
NOISE = re.compile(r"(?<![a-z])(high|low)(?=_?noise|[^a-z]|$)")  # in "x_HIGH_fp16" and "lowNoise", not in "slow"
PREFIX = re.compile(r"^((base_model\.model|model|pipe\.dit|diffusion_model|transformer|transformer_2)\.|lora_unet_+)+")
TENSOR = re.compile(r"(.+)\.(?:lora_(A|B|down|up)(?:\.default)?\.weight|alpha)")
KINDS = {"A": "lora_A.weight", "down": "lora_A.weight", "B": "lora_B.weight", "up": "lora_B.weight", None: "alpha"}
ON_BASE = (True, False, None, "gaussian", "eva", "orthogonal")  # peft's init_lora_weights that leave the base as it is


class AdapterFile(NamedTuple):
    """One file of a `lora`, without its tensors."""

    given: str  # what stands for it: the file or its folder, with what is asked for
    name: str  # of the file
    expert: str  # "high" | "low" | "single" | "both", as asked for or as the file says; "": it doesn't say
    weight: float | None  # asked for
    record: dict  # what it says that it belongs to (artifacts.belongs_to); {} of an older or another tool's
    settings: dict  # peft's: r, lora_alpha, ...


@contextmanager
def one_line_if_damaged(path):
    try:
        yield
    except (OSError, ValueError, TypeError, AttributeError, RuntimeError, ArithmeticError, re.error,
            SafetensorError) as error:
        raise UserError(f"{path}: can't read its adapter ({error!r:.200}): want a whole LoRA in safetensors") from None


def adapter_files(lora):
    """ "a/lora,b.safetensors:both:0.5" -> [AdapterFile]; a folder is what a run exported there, else all in it.

    peft's settings are where diffusers writes them, in the file, or where peft does, beside it.
    """
    found = []
    for text in map(str.strip, lora.split(",")):
        match = PART.fullmatch(text)
        path = os.path.expanduser(match[1]) if match else text
        files = sorted(glob(f"{escape(path)}/*.safetensors")) if os.path.isdir(path) else [path]
        if not match or not all(map(os.path.isfile, files or [""])):
            raise UserError(f"{text}: no adapter there; want PATH, PATH:WEIGHT or PATH:high:WEIGHT (low, both) of a "
                            ".safetensors file or a folder of one, as a run's lora/")
        exported = [name for name in files if os.path.basename(name)[:-12] in LORA_FILES.values()]
        for name in exported or files:
            folder, base = os.path.split(name)
            with one_line_if_damaged(name), safe_open(name, framework="pt") as file:
                parts = {tensor.split(".")[0] for tensor in file.keys()}  # noqa: SIM118
                texts = {"nanowan": "{}", "lora_adapter_metadata": "{}"} | (file.metadata() or {})
                if base == "adapter_model.safetensors" and os.path.isfile(f"{folder}/adapter_config.json"):
                    texts["lora_adapter_metadata"] = Path(folder, "adapter_config.json").read_text(encoding="utf-8")
                record, settings = (dict(json.loads(texts[key])) for key in ("nanowan", "lora_adapter_metadata"))
            named = {*NOISE.findall(base.lower())} or {*NOISE.findall(os.path.basename(path).lower())}
            said = record.get("expert") or "".join(named)  # both words say nothing
            if "transformer_2" in parts:
                said = "both" if "transformer" in parts else "low"
            found.append(AdapterFile(text, name, match[2] or said, match[3] and float(match[3]), record, settings))
    return found


def files_for(lora, expert_names, expert):
    """[AdapterFile] for an expert. UserError where one doesn't say which it is for, or a folder has two for it."""
    chosen = []
    for file in adapter_files(lora):
        whose = "both" if expert_names == ("single",) else file.expert
        if whose not in (*expert_names, "both"):
            raise UserError(f"{file.name}: doesn't say which expert it is for; want {file.name}:high, :low or :both")
        if whose in (expert, "both"):
            if file.given in [other.given for other in chosen]:
                raise UserError(f"{file.given}: two adapters for {expert}, the second is {file.name}: want one of them")
            chosen.append(file)
    return chosen


def scale_of(layer, rank, alpha, settings):
    """What a layer's B A is multiplied by: alpha / rank of the file, else of peft's settings; None: neither says it."""
    if alpha is not None:
        return alpha.item() / rank
    if settings.get("lora_alpha") is None:
        return None
    if settings.get("init_lora_weights") not in ON_BASE:
        raise ValueError(f"init_lora_weights={settings['init_lora_weights']} has changed the base model too")
    patterns, ranks = settings.get("alpha_pattern") or {}, {settings.get("r", rank)}
    if rank not in ranks.union((settings.get("rank_pattern") or {}).values()):
        raise ValueError(f"{layer} has rank {rank}, its settings say {settings['r']}")
    keys = [get_pattern_key(patterns, name) for name in (layer, original_name(layer))]
    alpha = next((patterns[key] for key in keys if key in patterns), settings["lora_alpha"])
    return alpha / (math.sqrt(rank) if settings.get("use_rslora") else rank)


def read_layers(file, expert, shapes):
    """An AdapterFile -> {layer: (A r in, B out r, scale)}, float32, by our names. UserError for no plain LoRA."""
    known = {re.sub(r"[._]", "_", name): layer for layer in shapes for name in (layer, original_name(layer))}
    with one_line_if_damaged(file.name):
        tensors = load_file(file.name)
    of_both = any(name.startswith("transformer_2.") for name in tensors)
    component = "transformer_2." if of_both and expert == "low" else "transformer."
    settings = {key.removeprefix(component): value for key, value in file.settings.items()}
    found, others = {}, []
    for name, tensor in tensors.items():
        if of_both and not name.startswith(component):
            continue
        match = TENSOR.fullmatch(PREFIX.sub("", name))
        layer = known.get(re.sub(r"[._]", "_", match[1])) if match else None
        key = f"{layer}.{KINDS[match[2]]}" if match else name
        if layer is None or key in found or not (tensor.is_floating_point() or key.endswith(".alpha")):
            others.append(name)
        found[key] = tensor.float()
    if others or not found:
        raise UserError(f"{file.name}: {len(others)} of {len(tensors)} tensors are no LoRA of this model's layers, the "
                        f"first is {(others or ['none'])[0]}: want lora_A and lora_B of linear layers that it has "
                        "(no bias, diff, DoRA, LoKr, LoHa)")
    check_layers(found, shapes, file.name)
    layers = {}
    for layer in (name for name in shapes if f"{name}.lora_A.weight" in found):
        a, b, alpha = (found.get(f"{layer}.{kind}") for kind in ("lora_A.weight", "lora_B.weight", "alpha"))
        with one_line_if_damaged(file.name):
            scale = scale_of(layer, len(a), alpha, settings)
        factors = [factor for factor in (scale, file.weight) if factor is not None]
        if not factors:
            raise UserError(f"{file.name}: doesn't say its scale (no alpha); want {file.given}:1 to add B A as it is, "
                            "as ComfyUI does (alpha = rank), or another number to multiply it by")
        layers[layer] = a, b, math.prod(factors)
        if not 0 < abs(math.prod(factors)) < math.inf:
            raise UserError(f"{file.name}: {layer} has a scale of {math.prod(factors):g}, want a finite one, not 0")
    return layers


def read_lora(lora, wan, expert):
    """The adapters for an expert, added up -> ({"blocks.0.attn1.to_q.lora_A.weight": tensor}, rank, alpha, targets).

    Their A lie one under the other and their B side by side, so that one B A is the sum of all. Where scales differ a
    B has its share of the greatest; where ranks do, zeros fill up.
    """
    shapes, parts = linear_shapes(wan.config), {}
    for file in files_for(lora, wan.expert_names, expert):
        for layer, adapter in read_layers(file, expert, shapes).items():
            parts.setdefault(layer, []).append(adapter)
    if not parts:
        raise UserError(f"{lora}: no adapter for {expert}; want one for each expert that is trained")
    rank = max(sum(len(a) for a, _, _ in adapters) for adapters in parts.values())
    greatest = max(abs(scale) for adapters in parts.values() for _, _, scale in adapters)
    tensors = {}
    for layer, adapters in parts.items():
        a = torch.cat([a for a, _, _ in adapters])  # r in
        b = torch.cat([b * (scale / greatest) for _, b, scale in adapters], 1)  # out r
        tensors[f"{layer}.lora_A.weight"] = F.pad(a, (0, 0, 0, rank - len(a)))
        tensors[f"{layer}.lora_B.weight"] = F.pad(b, (0, rank - len(a)))
    return tensors, rank, greatest * rank, ",".join(parts)


def load_lora(transformer, tensors):
    """Copy what read_lora has read into a transformer that add_lora prepared for it."""
    parameters = {adapter_name(clean_name(n)): p for n, p in transformer.named_parameters() if p.requires_grad}
    for name, parameter in parameters.items():
        parameter.data.copy_(tensors[name])


def linear_shapes(config):
    """{"blocks.0.attn1.to_q": (out, in)} of a transformer's linear layers, from its config alone."""
    with torch.device("meta"):
        transformer = WanTransformer3DModel.from_config(config)
    return {name: tuple(module.weight.shape) for name, module in transformer.named_modules()
            if isinstance(module, torch.nn.Linear)}


def check_layers(tensors, shapes, source=""):
    """UserError unless each layer's lora_A (r, in) and lora_B (out, r) are there, fit it, and are finite.

    source: the file they are of; "": they are for a server, which would skip an unknown name, drop an A without its B,
    and break at a wrong shape.
    """
    for layer in sorted({re.sub(r"\.lora_[AB]\.weight$|\.alpha$", "", name) for name in tensors}):
        a, b = (tensors.get(f"{layer}.lora_{side}.weight") for side in "AB")
        rows, columns = shapes.get(layer, (0, 0))
        if layer not in shapes:
            wrong = f"no linear layer {layer} in the model"
        elif "embedder" in layer and not source:
            wrong = f"SGLang adapts no embedder such as {layer}: leave it out of lora_targets"
        elif a is None or b is None:
            wrong = f"{layer} has no lora_{'A' if a is None else 'B'}"
        elif a.ndim != 2 or a.shape != (max(1, len(a)), columns) or b.shape != (rows, len(a)):
            wrong = f"{layer} has A {tuple(a.shape)} and B {tuple(b.shape)}, want (r, {columns}) and ({rows}, r)"
        elif not (a.isfinite().all() and b.isfinite().all()):
            wrong = f"{layer} has NaN or infinity"
        else:
            continue
        raise UserError(f"{source or 'LoRA for the server'}: {wrong}")
