"""LoRA adapters: put on a transformer, checked, read, and exported for diffusers and ComfyUI."""

import json
import os
from contextlib import contextmanager

import torch
from diffusers import WanTransformer3DModel
from peft import LoraConfig
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from cost import count_parameters
from fsdp import say
from guard import UserError, whole

LORA_FILES = {"high": "high_noise", "low": "low_noise", "single": "lora"}  # expert -> exported file name
BASE = ("kind", "num_layers", "dim", "ffn_dim", "in_channels", "out_channels", "content of model")  # of a record
GEOMETRY = ("views", "pointmaps", "cell_height", "cell_width", "num_frames", "shift")  # of a record


def clean_name(name):
    """Parameter name without what wrappers put in."""
    return name.replace("_checkpoint_wrapped_module.", "").replace("_orig_mod.", "")


def adapter_name(parameter_name):
    """"blocks.0.attn1.to_q.lora_A.default.weight" -> "blocks.0.attn1.to_q.lora_A.weight", the name files use."""
    return parameter_name.replace(".default.", ".")


def add_lora(transformer, rank, alpha, targets):
    """Put trainable float32 adapters (B = 0: the identity) on the linears whose name ends with one of targets."""
    targets = [target.strip() for target in targets.split(",")]
    linears = [name for name, module in transformer.named_modules() if isinstance(module, torch.nn.Linear)]
    missing = [t for t in targets if not any(n == t or n.endswith("." + t) for n in linears)]
    if missing:
        raise UserError(f"lora_targets={','.join(missing)}: no such linear layer; want e.g. to_q,to_k,to_v,to_out.0")
    transformer.add_adapter(LoraConfig(r=rank, lora_alpha=alpha, target_modules=targets, init_lora_weights=True))
    for parameter in transformer.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    return transformer


def check_lora(wan, experts, rank, alpha, targets, init_lora, belongs_to=None):
    """UserError for wrong targets, or adapters to start from that don't fit: on the meta device, before loading.

    belongs_to: this run's record, of whose base model they must be (a run may go on in another size: that is printed).
    -> the number of parameters that will be trained, over the experts.
    """
    if init_lora and not os.path.isdir(init_lora):
        raise UserError(f"init_lora={init_lora}: no such folder; want a run's exported lora/")
    if init_lora and not rank:
        raise UserError(f"init_lora={init_lora}: want the lora_rank it was trained with, got 0 (full fine-tuning)")
    if not rank:
        return len(experts) * count_parameters(wan.config)
    for expert in experts if init_lora and belongs_to else ():
        check_base(read_record(init_lora, expert), belongs_to, init_lora)
    for expert in experts:
        with torch.device("meta"):
            skeleton = WanTransformer3DModel.from_config(wan.config).requires_grad_(False)
            add_lora(skeleton, rank, alpha, targets)
        if init_lora:
            tensors, _, trained_alpha, _ = read_lora(init_lora, expert)
            load_lora(skeleton, tensors, init_lora)
            if trained_alpha != alpha:
                raise UserError(f"lora_alpha={alpha:g}: {init_lora} was trained with {trained_alpha:g}, want the same")
    if init_lora and belongs_to:
        say(f"init_lora  {init_lora}: {compare(read_record(init_lora, experts[0]), belongs_to)}")
    return len(experts) * sum(p.numel() for p in skeleton.parameters() if p.requires_grad)


# ----------------------------------------------------------------------------- what adapters belong to


def read_record(folder, expert):
    """What an exported adapter says that it belongs to (artifacts.belongs_to); {} of an older or another tool's."""
    return read_metadata(folder, expert)[1]


def check_base(record, ours, source):
    """UserError unless a record is of our record's base model: kind, sizes and content, or name without a content."""
    for name in (*BASE, "model"):
        was, now = str(record.get(name) or ""), str(ours[name])
        if name == "content of model" and "random:" not in was + now and ("@" in was) != ("@" in now):
            continue  # one is a hub id's commit, the other a hash of files: their sizes have been compared
        if was and was != now and not (name == "model" and record.get("content of model")):
            raise UserError(f"model={ours['model']}: {source} was trained on {record.get('model')}, whose {name} is "
                            f"{was}, here {now}: want the model it was trained on")


def compare(record, ours):
    """-> a line's words on the geometry and the noise levels of a record and ours."""
    if not record:
        return "doesn't say what it belongs to (older, or of another tool): only names and sizes can be checked"
    changes = [f"{name} {record[name]} -> {ours[name]}" for name in GEOMETRY
               if name in record and name in ours and record[name] != ours[name]]
    return f"of {record.get('model')}; {', '.join(changes) or 'the same cells, frames and shift'}"


# ----------------------------------------------------------------------------- files


COMFYUI = {  # diffusers module name -> the name in the original Wan code, which ComfyUI keeps
    "attn1.": "self_attn.", "attn2.": "cross_attn.", "to_q": "q", "to_k": "k", "to_v": "v", "to_out.0": "o",
    "ffn.net.0.proj": "ffn.0", "ffn.net.2": "ffn.2", "proj_out": "head.head",
    "condition_embedder.time_embedder.linear_1": "time_embedding.0",
    "condition_embedder.time_embedder.linear_2": "time_embedding.2",
    "condition_embedder.time_proj": "time_projection.1",
    "condition_embedder.text_embedder.linear_1": "text_embedding.0",
    "condition_embedder.text_embedder.linear_2": "text_embedding.2",
}


def comfyui_tensors(adapters, alpha):
    """{"blocks.0.attn1.to_q.lora_A.weight": tensor} -> ComfyUI's keys: lora_down, lora_up and an alpha a layer."""
    tensors = {}
    for name, tensor in adapters.items():
        layer, side = name.removesuffix(".weight").rsplit(".lora_")
        for ours, original in COMFYUI.items():
            layer = layer.replace(ours, original)
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


def has_lora(folder, expert):
    """Whether an exported folder holds an adapter for the expert."""
    return os.path.isfile(os.path.join(folder, f"{LORA_FILES[expert]}.safetensors"))


@contextmanager
def one_line_if_damaged(path):
    try:
        yield
    except (OSError, ValueError, TypeError, SafetensorError, StopIteration) as error:
        raise UserError(f"{path}: can't read its adapter ({error!r:.200}): want a file that a run exported") from None


def read_metadata(folder, expert):
    """-> path of an expert's file in an exported folder, its record, what diffusers writes of the LoRA."""
    path = os.path.join(folder, f"{LORA_FILES[expert]}.safetensors")
    if not has_lora(folder, expert):
        raise UserError(f"{folder}: no {os.path.basename(path)} in it; want a lora/ folder that a run of this kind of "
                        "model exported")
    with one_line_if_damaged(path), safe_open(path, framework="pt") as file:
        metadata = file.metadata() or {}
        return path, *(dict(json.loads(metadata.get(name, "{}"))) for name in ("nanowan", "lora_adapter_metadata"))


def read_lora(folder, expert):
    """-> ({"blocks.0.attn1.to_q.lora_A.weight": tensor}, rank, alpha, targets) from an exported folder."""
    path, _, lora = read_metadata(folder, expert)
    with one_line_if_damaged(path):
        tensors = {name.removeprefix("transformer."): tensor for name, tensor in load_file(path).items()}
        rank = next(tensor.shape[0] for name, tensor in tensors.items() if ".lora_A." in name)
    targets = lora.get("transformer.target_modules") or sorted({name.rsplit(".lora_", 1)[0] for name in tensors})
    return tensors, rank, lora.get("transformer.lora_alpha", rank), ",".join(targets)


def load_lora(transformer, tensors, source):
    """Copy exported adapters into a transformer that add_lora prepared; the sets and shapes must match exactly."""
    parameters = {adapter_name(clean_name(n)): p for n, p in transformer.named_parameters() if p.requires_grad}
    shapes = {name: tuple(p.shape) for name, p in parameters.items()}
    differing = sorted(name for name in shapes.keys() | tensors.keys()
                       if name not in tensors or shapes.get(name) != tuple(tensors[name].shape))
    if differing:
        raise UserError(f"{source}: {len(differing)} tensors differ from lora_rank and lora_targets on this model, "
                        f"the first is {differing[0]}: use the model, rank and targets it was trained with")
    for name, parameter in parameters.items():
        parameter.data.copy_(tensors[name])


def linear_shapes(config):
    """{"blocks.0.attn1.to_q": (out, in)} of a transformer's linear layers, from its config alone."""
    with torch.device("meta"):
        transformer = WanTransformer3DModel.from_config(config)
    return {name: tuple(module.weight.shape) for name, module in transformer.named_modules()
            if isinstance(module, torch.nn.Linear)}


def check_layers(tensors, shapes):
    """UserError unless each layer's lora_A (r, in) and lora_B (out, r) are there, fit it, and are finite.

    The server would skip an unknown name, drop an A without its B, and break at a wrong shape.
    """
    for layer in sorted({name.rsplit(".lora_", 1)[0] for name in tensors}):
        a, b = (tensors.get(f"{layer}.lora_{side}.weight") for side in "AB")
        rows, columns = shapes.get(layer, (0, 0))
        if layer not in shapes:
            wrong = f"no linear layer {layer} in the model"
        elif "embedder" in layer:
            wrong = f"SGLang adapts no embedder such as {layer}: leave it out of lora_targets"
        elif a is None or b is None:
            wrong = f"{layer} has no lora_{'A' if a is None else 'B'}"
        elif a.ndim != 2 or a.shape[1] != columns or tuple(b.shape) != (rows, len(a)):
            wrong = f"{layer} has A {tuple(a.shape)} and B {tuple(b.shape)}, want (r, {columns}) and ({rows}, r)"
        elif not (a.isfinite().all() and b.isfinite().all()):
            wrong = f"{layer} has NaN or infinity"
        else:
            continue
        raise UserError(f"LoRA for the server: {wrong}")
