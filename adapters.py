"""LoRA adapters: put on a transformer, checked, read, and exported for diffusers and ComfyUI."""

import json
import os
import shutil

import torch
from diffusers import WanPipeline, WanTransformer3DModel
from peft import LoraConfig
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from cost import count_parameters
from guard import UserError, replace_folder

LORA_FILES = {"high": "high_noise", "low": "low_noise", "single": "lora"}  # expert -> exported file name


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


def check_lora(wan, experts, rank, alpha, targets, init_lora):
    """UserError for wrong targets, or adapters to start from that don't fit: on the meta device, before loading.

    -> the number of parameters that will be trained, over the experts.
    """
    if init_lora and not os.path.isdir(init_lora):
        raise UserError(f"init_lora={init_lora}: no such folder; want a run's exported lora/")
    if init_lora and not rank:
        raise UserError(f"init_lora={init_lora}: want the lora_rank it was trained with, got 0 (full fine-tuning)")
    if not rank:
        return len(experts) * count_parameters(wan.config)
    for expert in experts:
        with torch.device("meta"):
            skeleton = WanTransformer3DModel.from_config(wan.config).requires_grad_(False)
            add_lora(skeleton, rank, alpha, targets)
        if init_lora:
            tensors, _, trained_alpha, _ = read_lora(init_lora, expert)
            load_lora(skeleton, tensors, init_lora)
            if trained_alpha != alpha:
                raise UserError(f"lora_alpha={alpha:g}: {init_lora} was trained with {trained_alpha:g}, want the same")
    return len(experts) * sum(p.numel() for p in skeleton.parameters() if p.requires_grad)


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
        layer, _, side = name.removesuffix(".weight").rpartition(".")
        for ours, original in COMFYUI.items():
            layer = layer.replace(ours, original)
        side = {"lora_A": "lora_down", "lora_B": "lora_up"}[side]
        tensors[f"diffusion_model.{layer}.{side}.weight"] = tensor
        tensors[f"diffusion_model.{layer}.alpha"] = torch.tensor(float(alpha))
    return tensors


def export_lora(folder, adapters, rank, alpha, targets):
    """Write one file an expert for diffusers and one for ComfyUI; the folder appears whole or not at all.

    adapters: {"high": {"blocks.0.attn1.to_q.lora_A.weight": cpu tensor}, ...}. Load with
    pipe.load_lora_weights(folder, weight_name="high_noise.safetensors") and, for the low-noise expert,
    pipe.load_lora_weights(folder, weight_name="low_noise.safetensors", load_into_transformer_2=True).
    """
    temporary = f"{folder}.tmp"
    shutil.rmtree(temporary, ignore_errors=True)
    metadata = dict(r=rank, lora_alpha=alpha, target_modules=sorted(target.strip() for target in targets.split(",")))
    for expert, tensors in adapters.items():
        tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
        WanPipeline.save_lora_weights(temporary, transformer_lora_layers=tensors, safe_serialization=True,
                                      weight_name=f"{LORA_FILES[expert]}.safetensors",
                                      transformer_lora_adapter_metadata=metadata)
        save_file(comfyui_tensors(tensors, alpha), f"{temporary}/comfyui_{LORA_FILES[expert]}.safetensors")
    replace_folder(temporary, folder)


def has_lora(folder, expert):
    """Whether an exported folder holds an adapter for the expert."""
    return os.path.isfile(os.path.join(folder, f"{LORA_FILES[expert]}.safetensors"))


def read_lora(folder, expert):
    """-> ({"blocks.0.attn1.to_q.lora_A.weight": tensor}, rank, alpha, targets) from an exported folder."""
    path = os.path.join(folder, f"{LORA_FILES[expert]}.safetensors")
    if not has_lora(folder, expert):
        raise UserError(f"{folder}: no {os.path.basename(path)} in it; want a lora/ folder that a run of this kind of "
                        "model exported")
    try:
        with safe_open(path, framework="pt") as file:
            metadata = json.loads((file.metadata() or {}).get("lora_adapter_metadata", "{}"))
        tensors = {name.removeprefix("transformer."): tensor for name, tensor in load_file(path).items()}
        rank = next(tensor.shape[0] for name, tensor in tensors.items() if ".lora_A." in name)
    except (OSError, ValueError, SafetensorError, StopIteration) as error:
        raise UserError(f"{path}: can't read its adapter ({error!r:.200}): want a file that a run exported") from None
    targets = metadata.get("transformer.target_modules") or sorted({n.rsplit(".lora_", 1)[0] for n in tensors})
    return tensors, rank, metadata.get("transformer.lora_alpha", rank), ",".join(targets)


def load_lora(transformer, tensors, source):
    """Copy exported adapters into a transformer that add_lora prepared; the sets and shapes must match exactly."""
    parameters = {adapter_name(clean_name(n)): p for n, p in transformer.named_parameters() if p.requires_grad}
    shapes = {name: tuple(p.shape) for name, p in parameters.items()}
    differing = sorted(name for name in shapes.keys() | tensors.keys()
                       if name not in tensors or shapes.get(name) != tuple(tensors[name].shape))
    if differing:
        raise UserError(f"init_lora={source}: {len(differing)} tensors differ from lora_rank and lora_targets, "
                        f"the first is {differing[0]}: use the rank and targets it was trained with")
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
    layers = {name.rsplit(".lora_", 1)[0] for name in tensors}
    if unknown := sorted(layers - shapes.keys()):
        raise UserError(f"LoRA for the server: no linear layer {unknown[0]} in the model")
    if embedders := sorted(layer for layer in layers if "embedder" in layer):
        raise UserError(f"LoRA for the server: SGLang adapts no embedder such as {embedders[0]}: leave it out of "
                        "lora_targets")
    for layer in sorted(layers):
        a, b = (tensors.get(f"{layer}.lora_{side}.weight") for side in "AB")
        if a is None or b is None:
            raise UserError(f"LoRA for the server: {layer} has no lora_{'A' if a is None else 'B'}")
        rows, columns = shapes[layer]
        if a.ndim != 2 or a.shape[1] != columns or tuple(b.shape) != (rows, len(a)):
            raise UserError(f"LoRA for the server: {layer} has A {tuple(a.shape)} and B {tuple(b.shape)}, "
                            f"want (r, {columns}) and ({rows}, r)")
        if not (a.isfinite().all() and b.isfinite().all()):
            raise UserError(f"LoRA for the server: {layer} has NaN or infinity")
