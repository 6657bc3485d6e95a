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
from diffusers import DiffusionPipeline, WanPipeline, WanTransformer3DModel
from huggingface_hub import save_torch_state_dict, snapshot_download
from peft import LoraConfig
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from configurator import UserError, first_line, replace_folder, user_errors

FOLDERS = {"high": "transformer", "low": "transformer_2", "single": "transformer"}  # expert -> checkpoint subfolder
LORA_FILES = {"high": "high_noise", "low": "low_noise", "single": "lora"}  # expert -> exported file name
RANDOM = {  # full-size shapes for `model="random:NAME"`: measuring speed and memory without a download
    "i2v-a14b": dict(experts=2, boundary_ratio=0.9, num_attention_heads=40, num_layers=40, ffn_dim=13824,
                     in_channels=36),
    "t2v-a14b": dict(experts=2, boundary_ratio=0.875, num_attention_heads=40, num_layers=40, ffn_dim=13824),
    "t2v-1.3b": dict(experts=1, boundary_ratio=None, num_attention_heads=12, num_layers=30, ffn_dim=8960),
    "ti2v-5b": dict(experts=1, boundary_ratio=None, num_attention_heads=24, num_layers=30, ffn_dim=14336,
                    in_channels=48, out_channels=48, expand_timesteps=True),
}  # fmt: skip


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


# ----------------------------------------------------------------------------- describe and load


def describe(model, boundary_ratio=0.0):
    """Read kind, experts, boundary and sizes from the checkpoint's JSON files; no weight is touched.

    boundary_ratio > 0 overrides model_index.json. Raises UserError when the checkpoint isn't one this project trains.
    """
    if model.startswith("random:"):
        name, _, num_layers = model.removeprefix("random:").partition(":")
        if name not in RANDOM or not (num_layers or "1").isdecimal():
            raise UserError(f"model={model}: want random: and one of {', '.join(RANDOM)}")
        shape = dict(RANDOM[name])
        num_experts, index_boundary = shape.pop("experts"), shape.pop("boundary_ratio")
        expand_timesteps = shape.pop("expand_timesteps", False)
        with torch.device("meta"):
            config = dict(WanTransformer3DModel(**{**shape, "num_layers": 1}).config)
        config["num_layers"] = int(num_layers or shape["num_layers"])
    else:
        if os.path.sep in model and model.count("/") != 1 and not os.path.isdir(model):
            raise UserError(f"model={model}: no such folder; want a diffusers folder, a hub id or random:NAME")
        try:
            index = DiffusionPipeline.load_config(model)
            config = WanTransformer3DModel.load_config(model, subfolder="transformer")
        except OSError as error:
            reason = first_line(error)[:120]
            where = "no diffusers checkpoint there" if os.path.isdir(model) else (
                "no such folder, and no checkpoint of that name could be had from the hub")  # fmt: skip
            raise UserError(f"model={model}: {where} ({reason})") from None
        num_experts = 2 if (index.get("transformer_2") or [None])[0] else 1
        index_boundary, expand_timesteps = index.get("boundary_ratio"), index.get("expand_timesteps", False)
        if os.path.isdir(model) and num_experts == 2 and not os.path.isdir(os.path.join(model, "transformer_2")):
            raise UserError(f"model={model}: model_index.json names transformer_2, which is missing: copy it there")
    if config.get("image_dim"):
        raise UserError(f"model={model}: has a CLIP image encoder (Wan 2.1 I2V); want a Wan 2.2 checkpoint")
    if config["in_channels"] == 2 * config["out_channels"] + 4:
        kind = "i2v"
    elif config["in_channels"] != config["out_channels"]:
        raise UserError(f"model={model}: in_channels={config['in_channels']}, out_channels={config['out_channels']}: "
                        "want in = out (t2v, ti2v) or 2 out + 4 (i2v)")  # fmt: skip
    else:
        kind = "ti2v" if expand_timesteps else "t2v"
    if kind == "i2v" and num_experts == 1:
        raise UserError(f"model={model}: an i2v checkpoint without transformer_2: want both experts in one folder")
    boundary = boundary_ratio or index_boundary
    if num_experts == 2 and not (boundary and 0 < boundary < 1):
        raise UserError(f"model={model}: boundary_ratio={boundary}: two experts want one between 0 and 1")
    names = ("high", "low") if num_experts == 2 else ("single",)
    return Wan(model, kind, names, boundary if num_experts == 2 else None, dict(config))


def check_guidance(wan, guidance_scale, guidance_scale_2):
    """UserError where two experts are guided and the low-noise one's scale isn't set: 0."""
    if "low" in wan.expert_names and guidance_scale != 1 and not guidance_scale_2:
        raise UserError("guidance_scale_2=0: two experts want the low-noise expert's guidance too, e.g. 3.5")


def kind_of(model):
    """-> "i2v" | "ti2v" | "t2v", from the checkpoint's JSON files."""
    return describe(model, boundary_ratio=0.5).kind  # whatever the boundary, which training may be given


def load_transformer(wan, expert, device, dtype, seed=0):
    """-> the expert's WanTransformer3DModel in dtype (norms, modulation, time embedder in float32), frozen, eval."""
    if wan.model.startswith("random:"):
        torch.manual_seed(seed + list(FOLDERS).index(expert))  # the same on every rank
        default = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        with torch.device(device):
            transformer = WanTransformer3DModel.from_config(wan.config)
        torch.set_default_dtype(default)
        for name, parameter in transformer.named_parameters():
            if any(part in name.split(".") for part in WanTransformer3DModel._keep_in_fp32_modules):
                parameter.data = parameter.data.float()
    else:
        on_gpu = dict(device_map={"": device}) if torch.device(device).type == "cuda" else {}
        with user_errors(wan.model, FOLDERS[expert]):
            transformer = WanTransformer3DModel.from_pretrained(
                wan.model, subfolder=FOLDERS[expert], torch_dtype=dtype, use_safetensors=True, **on_gpu
            )
    transformer.rope.to(device)
    # Under autocast a float32 linear would run in bf16; sinusoids of timesteps up to 1000 must not.
    embedder = transformer.condition_embedder.time_embedder
    embedder.forward = torch.autocast(torch.device(device).type, enabled=False)(embedder.forward)
    return transformer.requires_grad_(False).eval()


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


# ----------------------------------------------------------------------------- size, tokens, arithmetic


def num_tokens(latent_shape):
    """(c, f, h, w) of latents -> tokens after the (1, 2, 2) patch embedding."""
    _, f, h, w = latent_shape
    return f * (h // 2) * (w // 2)


def count_parameters(config):
    """Parameters of one transformer with this config, counted on the meta device."""
    with torch.device("meta"):
        return sum(p.numel() for p in WanTransformer3DModel.from_config(config).parameters())


def forward_flops(config, tokens, text_tokens=512):
    """-> (FLOPs of the linear layers, FLOPs of attention) of one forward of one sample; 2 a multiply-add."""
    dim, layers = config["num_attention_heads"] * config["attention_head_dim"], config["num_layers"]
    block = tokens * (6 * dim * dim + 2 * dim * config["ffn_dim"]) + text_tokens * 2 * dim * dim
    attention = tokens * (tokens + text_tokens) * 2 * dim  # scores and weighted sum
    return 2 * layers * block, 2 * layers * attention


def step_flops(config, tokens, lora, text_tokens=512):
    """FLOPs of forward + backward of one sample, without recomputation: what MFU counts.

    Linears: forward + input gradient (+ weight gradient when not LoRA); attention: forward + twice for the backward.
    """
    linear, attention = forward_flops(config, tokens, text_tokens)
    return linear * (2 if lora else 3) + attention * 3


def estimate_memory(config, tokens, num_experts, num_shards, dtype, lora_rank, lora_targets, checkpointing, ema,
                    reference=False):  # fmt: skip
    """Rough GiB a GPU of a training step, before anything is loaded -> {"weights", "state", "activations"}.

    tokens: of one micro-batch. ema: with a moving average of what is trained; reference: with frozen copies beside.
    Activations: bytes a token, layer and unit of width, measured on an H200 in bf16 (none 52, full 3.8, selective
    6.9), twice that in float32.
    """
    dim, layers = config["num_attention_heads"] * config["attention_head_dim"], config["num_layers"]
    parameters = count_parameters(config)
    bytes_each = (dtype.itemsize if lora_rank else 4) + dtype.itemsize * reference
    trainable = parameters
    if lora_rank:
        sizes = {"to_q": 4 * dim, "to_k": 4 * dim, "to_v": 4 * dim, "to_out.0": 4 * dim,  # two attentions, in + out
                 "ffn.net.0.proj": dim + config["ffn_dim"], "ffn.net.2": dim + config["ffn_dim"]}  # fmt: skip
        trainable = layers * lora_rank * sum(sizes.get(target.strip(), 0) for target in lora_targets.split(","))
    activations = dict(none=52, full=3.8, selective=6.9)[checkpointing] * tokens * layers * dim * (dtype.itemsize / 2)
    return {
        "weights": num_experts * parameters * bytes_each / num_shards / 2**30,
        "state": num_experts * trainable * (12 + 4 * ema) / num_shards / 2**30,  # gradient, AdamW's two moments, EMA
        "activations": activations / 2**30,
    }


# ----------------------------------------------------------------------------- LoRA


def clean_name(name):
    """Parameter name without what wrappers put in."""
    return name.replace("_checkpoint_wrapped_module.", "").replace("_orig_mod.", "")


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


def load_expert(wan, expert, device, seed, trainable, rank, alpha, targets, init_lora=""):
    """-> the expert's transformer on the device: with float32 adapters to train, all float32 (rank 0), or frozen."""
    full = trainable and not rank
    transformer = load_transformer(wan, expert, device, torch.float32 if full else wan.dtype, seed)
    if full:
        transformer.requires_grad_(True)
    elif trainable:
        torch.manual_seed(seed)  # A is drawn, the same on all ranks; B is 0
        add_lora(transformer, rank, alpha, targets)
        if init_lora:
            load_lora(transformer, read_lora(init_lora, expert)[0], init_lora)
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


def adapter_name(parameter_name):
    """"blocks.0.attn1.to_q.lora_A.default.weight" -> "blocks.0.attn1.to_q.lora_A.weight", the name files use."""
    return parameter_name.replace(".default.", ".")


COMFYUI = {  # diffusers module name -> the name in the original Wan code, which ComfyUI keeps
    "attn1.": "self_attn.", "attn2.": "cross_attn.", "to_q": "q", "to_k": "k", "to_v": "v", "to_out.0": "o",
    "ffn.net.0.proj": "ffn.0", "ffn.net.2": "ffn.2", "proj_out": "head.head",
    "condition_embedder.time_embedder.linear_1": "time_embedding.0",
    "condition_embedder.time_embedder.linear_2": "time_embedding.2",
    "condition_embedder.time_proj": "time_projection.1",
    "condition_embedder.text_embedder.linear_1": "text_embedding.0",
    "condition_embedder.text_embedder.linear_2": "text_embedding.2",
}  # fmt: skip


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
                                      transformer_lora_adapter_metadata=metadata)  # fmt: skip
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
                        "model exported")  # fmt: skip
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
                       if name not in tensors or shapes.get(name) != tuple(tensors[name].shape))  # fmt: skip
    if differing:
        raise UserError(f"init_lora={source}: {len(differing)} tensors differ from lora_rank and lora_targets, "
                        f"the first is {differing[0]}: use the rank and targets it was trained with")  # fmt: skip
    for name, parameter in parameters.items():
        parameter.data.copy_(tensors[name])


# ----------------------------------------------------------------------------- full weights


def export_model(folder, wan, state_dicts):
    """Write a complete diffusers folder: the trained transformers' weights beside the other parts of wan.model.

    state_dicts: {"high": {name: cpu tensor}, ...}; other experts are copied. The folder appears whole or not at all.
    """
    temporary = f"{folder}.tmp"
    shutil.rmtree(temporary, ignore_errors=True)
    trained = [FOLDERS[expert] for expert in state_dicts]
    if wan.model.startswith("random:"):
        os.makedirs(temporary)
    else:
        source = wan.model
        if not os.path.isdir(source):
            source = snapshot_download(source, ignore_patterns=[f"{name}/*.safetensors" for name in trained])
        shutil.copytree(source, temporary, ignore=lambda path, _: trained if os.path.samefile(path, source) else [])
    for expert, state_dict in state_dicts.items():
        target = os.path.join(temporary, FOLDERS[expert])
        os.makedirs(target)
        save_torch_state_dict(state_dict, target, filename_pattern="diffusion_pytorch_model{suffix}.safetensors")
        with open(os.path.join(target, "config.json"), "w") as file:
            json.dump({"_class_name": "WanTransformer3DModel", **wan.config}, file, indent=2)
    replace_folder(temporary, folder)


def export(out_dir, wan, tensors, rank, alpha, targets):
    """What a run leaves for other tools: adapters in out_dir/lora, or a whole diffusers folder, out_dir/model.

    tensors: {"high": {name: cpu tensor}, ...}, what by_expert returns; rank 0: all weights were trained.
    """
    if rank:
        export_lora(os.path.join(out_dir, "lora"), tensors, rank, alpha, targets)
    else:
        export_model(os.path.join(out_dir, "model"), wan, tensors)
