"""Wan 2.2 transformers: load them, turn (noisy latents, sigma, condition, text) into a velocity, LoRA, export.

    rectified flow: sigma in [0, 1], timestep = 1000 sigma, x_sigma = (1 - sigma) x0 + sigma noise, velocity noise - x0

Three kinds, told apart by the checkpoint's own config:
    i2v    36 input channels: noisy 16 | given_mask 4 | condition 16; two experts (Wan2.2-I2V-A14B)
    ti2v   the first latent frame is replaced by the clean one and gets timestep 0, token by token (Wan2.2-TI2V-5B)
    t2v    text alone, or a clean first latent frame clamped in (Wan2.2-T2V-A14B, Wan2.1-T2V-1.3B)
Paper: Wan, arXiv 2503.20314.
"""

import json
import os
import shutil
from dataclasses import dataclass, field

import torch
from diffusers import DiffusionPipeline, UniPCMultistepScheduler, WanTransformer3DModel
from huggingface_hub import save_torch_state_dict

import encoders
import fsdp
import pretrained
from adapters import adapter_name, add_lora, clean_name, export_lora, load_lora, read_lora
from cost import random_shape
from guard import UserError, whole

FOLDERS = {"high": "transformer", "low": "transformer_2", "single": "transformer"}  # expert -> checkpoint subfolder


@dataclass
class Wan:
    """What a checkpoint says about itself, and its transformers once they are loaded."""

    model: str  # diffusers folder, hub id, or "random:NAME[:num_layers]"
    kind: str  # "i2v" | "ti2v" | "t2v"
    expert_names: tuple  # ("high", "low") or ("single",)
    boundary_ratio: float | None  # timestep >= 1000 * boundary_ratio -> high
    config: dict  # of the transformer: num_layers, num_attention_heads, in_channels, ...
    dtype: torch.dtype = torch.float32  # of the matrix products
    experts: dict = field(default_factory=dict)  # expert name -> WanTransformer3DModel
    shift: float = 5.0  # of the noise levels: what was asked for, else of the checkpoint's scheduler


# ----------------------------------------------------------------------------- describe and load


def describe(model, boundary_ratio=0.0, shift=5.0):
    """Read kind, experts, boundary, shift and sizes from the checkpoint's JSON files; a folder's weights must fit them.

    boundary_ratio > 0 overrides model_index.json, shift > 0 the scheduler. No weight is touched; a hub id's are checked
    when they are loaded. Raises UserError when the checkpoint isn't one this project trains.
    """
    if model.startswith("random:"):
        config = random_shape(model)
        num_experts, scheduler = config.pop("experts"), {"shift": 5.0}
        index = {name: config.pop(name, None) for name in ("boundary_ratio", "expand_timesteps")}
        with torch.device("meta"):
            config = WanTransformer3DModel(**config | {"num_layers": 1}).config | {"num_layers": config["num_layers"]}
    else:
        if os.path.sep in model and model.count("/") != 1 and not os.path.isdir(model):
            raise UserError(f"model={model}: no such folder; want a diffusers folder, a hub id or random:NAME")
        with pretrained.one_line(model, "model_index.json, transformer or scheduler"):
            index = DiffusionPipeline.load_config(model)
            config = WanTransformer3DModel.load_config(model, subfolder="transformer")
            scheduler = {} if shift else UniPCMultistepScheduler.load_config(model, subfolder="scheduler")
            num_experts = 2 if (index.get("transformer_2") or [None])[0] else 1
    if config.get("image_dim"):
        raise UserError(f"model={model}: has a CLIP image encoder (Wan 2.1 I2V); want a Wan 2.2 checkpoint")
    names = ("high", "low") if num_experts == 2 else ("single",)
    if os.path.isdir(model):
        skeletons = [pretrained.check(WanTransformer3DModel, model, FOLDERS[name])[1] for name in names]
        if len({skeleton.num_parameters() for skeleton in skeletons}) > 1:
            raise UserError(f"model={model}: transformer and transformer_2 differ in size: want two experts of one")
        config = skeletons[0].config  # with diffusers' defaults
        encoders.check(model)
    config = {name: value for name, value in config.items() if not name.startswith("_")}
    if config["in_channels"] == 2 * config["out_channels"] + 4:
        kind = "i2v"
    elif config["in_channels"] != config["out_channels"]:
        raise UserError(f"model={model}: in_channels={config['in_channels']}, out_channels={config['out_channels']}: "
                        "want in = out (t2v, ti2v) or 2 out + 4 (i2v)")
    else:
        kind = "ti2v" if index.get("expand_timesteps") else "t2v"
    if kind == "i2v" and num_experts == 1:
        raise UserError(f"model={model}: an i2v checkpoint without transformer_2: want both experts in one folder")
    boundary = (boundary_ratio or index.get("boundary_ratio")) if num_experts == 2 else None
    if num_experts == 2 and not (isinstance(boundary, float) and 0 < boundary < 1):
        raise UserError(f"model={model}: boundary_ratio={boundary}: two experts want one between 0 and 1")
    shift = shift or scheduler.get("flow_shift", scheduler.get("shift"))
    if not (isinstance(shift, int | float) and shift > 0):
        raise UserError(f"shift=0: the scheduler of {model} has {shift}: want a number, 5 for most of Wan")
    return Wan(model, kind, names, boundary, config, shift=shift)


def check_guidance(wan, guidance_scale, guidance_scale_2):
    """-> {"guidance_scale": of the high-noise expert or the single one, "guidance_scale_2": of the low-noise one}.

    UserError where two experts are guided and the low-noise one's scale isn't set: 0.
    """
    if "low" in wan.expert_names and guidance_scale != 1 and not guidance_scale_2:
        raise UserError("guidance_scale_2=0: two experts want the low-noise expert's guidance too, e.g. 3.5")
    return dict(guidance_scale=guidance_scale, guidance_scale_2=guidance_scale_2 or guidance_scale)


def load_transformer(wan, expert, device, dtype, seed=0):
    """-> the expert's WanTransformer3DModel in dtype (norms, modulation, time embedder in float32), frozen, eval."""
    if wan.model.startswith("random:"):
        transformer = pretrained.draw(lambda: WanTransformer3DModel.from_config(wan.config), dtype, device,
                                      seed + list(FOLDERS).index(expert))
        for name, parameter in transformer.named_parameters():
            if any(part in name.split(".") for part in WanTransformer3DModel._keep_in_fp32_modules):
                parameter.data = parameter.data.float()
    else:
        on_gpu = dict(device_map={"": device}) if torch.device(device).type == "cuda" else {}
        transformer = pretrained.load(WanTransformer3DModel, wan.model, FOLDERS[expert], dtype, device, **on_gpu)
    transformer.rope.to(device)
    # Under autocast a float32 linear would run in bf16; sinusoids of timesteps up to 1000 must not.
    embedder = transformer.condition_embedder.time_embedder
    embedder.forward = torch.autocast(torch.device(device).type, enabled=False)(embedder.forward)
    return transformer


# ----------------------------------------------------------------------------- the velocity


def route(boundary_ratio, sigma):
    """Expert of a noise level: sigma (float32, b, on the CPU) -> "high" | "low" | "single".

    By timestep in float32, before any bf16 cast (bf16(899) is 900). A batch has one expert, else ValueError.
    """
    if boundary_ratio is None:
        return "single"
    high = 1000.0 * sigma.float() >= 1000.0 * boundary_ratio
    if high.any() != high.all():
        raise ValueError(f"a batch across the experts' boundary {boundary_ratio}: sigmas {sigma.tolist()}")
    return "high" if high.all() else "low"


def generated_mask(wan, latents, condition):
    """gen_mask: 1 where the model generates, 0 in a latent frame that is given clean (ti2v; t2v with a condition).

    latents b c f h w -> b 1 f h w. For i2v all ones: the given frame is a condition, its latents are denoised too.
    """
    gen_mask = torch.ones_like(latents[:, :1])  # b 1 f h w
    if wan.kind != "i2v" and condition is not None:
        gen_mask[:, :, 0] = 0
    return gen_mask


def clamp_given(wan, latents, condition):
    """Put the clean first latent frame back where it is given (ti2v, t2v with a condition); i2v: leave the latents."""
    if wan.kind == "i2v" or condition is None:
        return latents
    gen_mask = generated_mask(wan, latents, condition)
    return (1 - gen_mask) * condition + gen_mask * latents  # condition b c 1 h w broadcasts over frames


def velocity(wan, latents, sigma, condition, text):
    """The one function that turns noisy latents into a velocity (noise - x0), for training, sampling and scoring.

    latents b c f h w; sigma b, float32, on the CPU; text b n d; condition by kind, normalised VAE latents:
    i2v: b c f h w, [first frame, zeros ...] encoded as one clip; ti2v: b c 1 h w, the first frame encoded alone;
    t2v: None, or b c 1 h w to clamp. -> velocity b c f h w, float32. The layout is that of WanImageToVideoPipeline.
    """
    b, c, f, h, w = latents.shape
    expert = wan.experts[route(wan.boundary_ratio, sigma)]
    timestep = 1000.0 * sigma.to(latents.device, torch.float32)  # b
    if wan.kind == "i2v":
        given_mask = latents.new_zeros(b, 4, f, h, w)  # one channel for each of the 4 video frames in a latent frame
        given_mask[:, :, 0] = 1
        model_input = torch.cat([latents, given_mask, condition], dim=1)  # b 2c+4 f h w
    else:
        model_input = clamp_given(wan, latents, condition)  # b c f h w
    if wan.kind == "ti2v":
        gen_mask = generated_mask(wan, latents, condition)
        timestep = (gen_mask[:, 0, :, ::2, ::2] * timestep.view(b, 1, 1, 1)).flatten(1)  # b n: 0 for given tokens
    # no weight cache: a weight is used once, and in full fine-tuning the cache would hold a bf16 copy of every one
    with torch.autocast(latents.device.type, wan.dtype, enabled=wan.dtype != torch.float32, cache_enabled=False):
        output = expert(model_input.to(wan.dtype), timestep, text.to(wan.dtype), return_dict=False)[0]
    return output.float()


def masked_mean(values, gen_mask):
    """Mean over generated positions: values b c f h w, gen_mask b 1 f h w -> b."""
    return (values.mean(1, keepdim=True) * gen_mask).flatten(1).sum(1) / gen_mask.flatten(1).sum(1)


def flow_matching_loss(wan, latents, noise, sigma, condition, text):
    """The training loss of each sample: mean of (velocity - (noise - x0))^2 over what is generated, float32.

    latents (x0), noise b c f h w; sigma b, float32, on the CPU; condition and text as in velocity -> b
    """
    level = sigma.to(latents.device).view(-1, 1, 1, 1, 1)
    noisy = (1 - level) * latents + level * noise
    error = velocity(wan, noisy, sigma, condition, text) - (noise - latents)
    return masked_mean(error.square(), generated_mask(wan, latents, condition))


# ----------------------------------------------------------------------------- LoRA


def load_expert(wan, device, seed, rank, alpha, targets, init_lora, expert, trainable=True):
    """-> the expert's transformer on the device: with float32 adapters to train, all float32 (rank 0), or frozen."""
    full = trainable and not rank
    transformer = load_transformer(wan, expert, device, torch.float32 if full else wan.dtype, seed)
    if full:
        transformer.requires_grad_(True)
    elif trainable:
        torch.manual_seed(seed)  # A is drawn, the same on all ranks; B is 0
        add_lora(transformer, rank, alpha, targets)
        if init_lora:
            load_lora(transformer, read_lora(init_lora, wan, expert)[0])
    return transformer.to(device)


def trainable_parameters(wan):
    """{"high.blocks.0.attn1.to_q.lora_A.default.weight": parameter, ...} of all experts, wrapper names removed."""
    return {
        f"{expert}.{clean_name(name)}": parameter
        for expert, transformer in wan.experts.items()
        for name, parameter in transformer.named_parameters()
        if parameter.requires_grad
    }


def by_expert(tensors):
    """{"high.blocks.0.attn1.to_q.lora_A.default.weight": x} -> {"high": {"blocks.0.attn1.to_q.lora_A.weight": x}}."""
    split = {}
    for name, tensor in tensors.items():
        expert, name = name.split(".", 1)
        split.setdefault(expert, {})[adapter_name(name)] = tensor
    return split


# ----------------------------------------------------------------------------- full weights


def export_model(folder, wan, state_dicts, belongs_to):
    """Write a complete diffusers folder: the trained transformers' weights beside the other parts of wan.model.

    state_dicts: {"high": {name: cpu tensor}, ...}; other experts are copied. belongs_to (of artifacts.py) is its
    nanowan.json. The folder appears whole or not at all.
    """
    with whole(folder) as temporary:
        temporary.mkdir()
        if not wan.model.startswith("random:"):
            index = DiffusionPipeline.load_config(wan.model)
            (temporary / "model_index.json").write_text(json.dumps(index, indent=2), encoding="utf-8")
            named = {part for part, of in index.items() if isinstance(of, list | tuple) and of[0]}
            for part in named - {FOLDERS[expert] for expert in state_dicts}:  # the run's own folder may lie among them
                shutil.copytree(pretrained.folder_of(wan.model, part), temporary / part)
        for expert, state_dict in state_dicts.items():
            target = temporary / FOLDERS[expert]
            target.mkdir()
            save_torch_state_dict(state_dict, target, filename_pattern="diffusion_pytorch_model{suffix}.safetensors")
            config = {"_class_name": "WanTransformer3DModel", **wan.config}
            (target / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
        (temporary / "nanowan.json").write_text(json.dumps(belongs_to, indent=2), encoding="utf-8")


def export(out_dir, wan, trained, rank, alpha, targets, belongs_to):
    """What a run leaves for other tools: adapters in out_dir/lora, or a whole diffusers folder, out_dir/model.

    trained: {name: parameter or its average}, of trainable_parameters; rank 0: all weights were trained. belongs_to:
    what artifacts.belongs_to returns, written with them. Collective.
    """
    tensors = by_expert(fsdp.gather(trained))
    with fsdp.all_ranks_agree():
        if rank and fsdp.is_first():
            export_lora(os.path.join(out_dir, "lora"), tensors, rank, alpha, targets, belongs_to)
        elif fsdp.is_first():
            export_model(os.path.join(out_dir, "model"), wan, tensors, belongs_to)
