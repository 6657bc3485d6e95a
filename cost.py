"""What a run costs before anything is loaded: tokens, parameters, arithmetic, memory, seconds.

    python train_i2v_sft.py config/robocasa_i2v.py --model=random:i2v-a14b --data= --dry_run=True --gpus=4 --gpu_gib=80
"""

import functools
import json

import numpy as np
import torch
from diffusers import WanTransformer3DModel

from flow import expert_share
from guard import UserError

RANDOM = {  # full-size shapes for `model="random:NAME"`: measuring speed and memory without a download
    "i2v-a14b": dict(experts=2, boundary_ratio=0.9, num_attention_heads=40, num_layers=40, ffn_dim=13824,
                     in_channels=36),
    "t2v-a14b": dict(experts=2, boundary_ratio=0.875, num_attention_heads=40, num_layers=40, ffn_dim=13824),
    "t2v-1.3b": dict(experts=1, boundary_ratio=None, num_attention_heads=12, num_layers=30, ffn_dim=8960),
    "ti2v-5b": dict(experts=1, boundary_ratio=None, num_attention_heads=24, num_layers=30, ffn_dim=14336,
                    in_channels=48, out_channels=48, expand_timesteps=True),
}
KEPT = dict(none=53, selective=6, full=2)  # bytes kept for the backward, a token, layer and unit of width, in bf16
A14B = dict(num_attention_heads=40, attention_head_dim=128, num_layers=40, ffn_dim=13824)
# GPU -> compiled or not -> (checkpointing, seconds a step at 27,216 and at 54,432 tokens), by bench.py: A14B, LoRA rank
# 16, one GPU; what isn't compiled is its baseline. Another card is one more line here, and then a value of `gpu`.
MEASURED = {"h200": {True: ("selective", 7.13, 22.41), False: ("full", 10.23, 30.48)}}
WITHOUT = dict(  # what it means that a copy of a script has no such setting
    shift=5.0, max_text_tokens=512, lora_rank=0, lora_targets="", guidance_scale=1.0, guidance_scale_2=0.0,
    ema_decay=0.0, dtype="float32", checkpointing="none", compile_blocks=False, dp_replicate=1, dry_run=False, gpu="",
    gpu_gib=0.0)


def random_shape(model):
    """ "random:NAME[:num_layers]" -> a copy of RANDOM's. UserError for other names."""
    _, name, num_layers = f"{model}:".split(":")[:3]
    if name not in RANDOM or not (num_layers or "1").isdecimal():
        raise UserError(f"model={model}: want random: and one of {', '.join(RANDOM)}")
    return RANDOM[name] | ({"num_layers": int(num_layers)} if num_layers else {})


def num_tokens(latent_shape):
    """(c, f, h, w) of latents -> tokens after the (1, 2, 2) patch embedding."""
    _, f, h, w = latent_shape
    return f * (h // 2) * (w // 2)


def count_parameters(config):
    """Parameters of one transformer with this config, counted on the meta device."""
    return _count(json.dumps(dict(config), sort_keys=True))


@functools.cache
def _count(config):
    with torch.device("meta"):
        return sum(p.numel() for p in WanTransformer3DModel.from_config(json.loads(config)).parameters())


# ----------------------------------------------------------------------------- arithmetic and seconds


def forward_flops(config, tokens, text_tokens=512):
    """-> (FLOPs of the linear layers, FLOPs of attention) of one forward of one sample; 2 a multiply-add."""
    dim, layers = config["num_attention_heads"] * config["attention_head_dim"], config["num_layers"]
    block = tokens * (6 * dim * dim + 2 * dim * config["ffn_dim"]) + text_tokens * 2 * dim * dim
    attention = tokens * (tokens + text_tokens) * 2 * dim  # scores and weighted sum
    return 2 * layers * block, 2 * layers * attention


def training_flops(config, tokens, lora, text_tokens=512, checkpointing="none"):
    """-> the same of one sample's forward, backward and what checkpointing recomputes.

    Linears: forward, input gradient, weight gradient when not LoRA, and again under any checkpointing. Attention:
    forward, twice for the backward, and again under full: selective keeps its output.
    """
    linear, attention = forward_flops(config, tokens, text_tokens)
    return linear * (3 - lora + (checkpointing != "none")), attention * (3 + (checkpointing == "full"))


def step_flops(config, tokens, lora, text_tokens=512):
    """FLOPs of forward + backward of one sample, without recomputation: what MFU counts."""
    return sum(training_flops(config, tokens, lora, text_tokens))


def estimate_seconds(gpu, compiled, linear, attention, per_token=False):
    """FLOPs of linear layers and of attention -> (seconds on a measured GPU, whether these very ones were measured).

    linear / a + attention / b, with the rates a and b that solve it for the two measured steps (H200: 659 and 446
    TFLOP/s compiled, 383 and 484 not). per_token: TI2V's modulation differs from token to token, 1.18 times.
    """
    checkpointing, *seconds = MEASURED[gpu][compiled]
    steps = [training_flops(A14B, tokens, True, checkpointing=checkpointing) for tokens in (27_216, 54_432)]
    a, b = np.linalg.solve(steps, seconds).tolist()  # seconds a FLOP
    return (a * linear + b * attention) * (1.18 if per_token else 1), (linear, attention) in steps


# ----------------------------------------------------------------------------- memory


def estimate_memory(config, tokens, num_experts, num_shards, dtype, lora_rank, lora_targets, checkpointing, ema,
                    reference=False, compiled=True, per_token=False):
    """GiB a GPU at the peak of a training step -> {"weights", "state", "activations"}, and "gathered" where sharded.

    tokens: of one micro-batch; num_experts: that are trained; ema: with a moving average of what is trained;
    reference: a frozen copy beside each (or the expert that isn't trained); per_token: TI2V's modulation.
    Measured on H200s (tests/test_cost.py); not so are full fine-tuning and A14B without checkpointing.
    """
    dim, layers = config["num_attention_heads"] * config["attention_head_dim"], config["num_layers"]
    parameters = count_parameters(config)
    bytes_each = dtype.itemsize if lora_rank else 4
    trainable = parameters
    if lora_rank:
        sizes = {"to_q": 4 * dim, "to_k": 4 * dim, "to_v": 4 * dim, "to_out.0": 4 * dim,  # two attentions, in + out
                 "ffn.net.0.proj": dim + config["ffn_dim"], "ffn.net.2": dim + config["ffn_dim"]}
        trainable = layers * lora_rank * sum(sizes.get(target.strip(), 0) for target in lora_targets.split(","))
    # float32: adapters, AdamW's two moments, average of each expert; the gradient of the one that a step trains
    state = num_experts * (4 * (lora_rank > 0) + 8 + 4 * ema) + 4
    in_work = (32 if compiled else 60) + 50 * per_token  # like KEPT, of the one block that is in its backward
    if checkpointing == "none" and per_token and not compiled:
        in_work += 45 * layers  # then each block keeps its modulation
    parts = {
        "weights": num_experts * parameters * (bytes_each + dtype.itemsize * reference) / num_shards,
        "state": trainable * state / num_shards,
        "activations": tokens * dim * (layers * KEPT[checkpointing] + in_work) * dtype.itemsize / 2,
    }
    if num_shards > 1:  # FSDP2: a block in use, one on its way, one not yet freed; in full fine-tuning gradients too
        parts["gathered"] = 3 * parameters / layers * (bytes_each if lora_rank else 8)
    return {name: size / 2**30 for name, size in parts.items()}


def fits(estimate, gib):
    """Whether an estimate fits a GPU of so many GiB: CUDA takes 1, and 5 % is lost between the allocator's pieces."""
    return 1.05 * sum(estimate.values()) + 1 <= gib


def parts(estimate):
    """An estimate by parts, for a line about it."""
    return ", ".join(f"{part} {gib:.1f}" for part, gib in estimate.items()).replace("state", "trained state")


# ----------------------------------------------------------------------------- what a trainer says first


def describe_run(wan, config, latent_shape, ranks, device, micro_batch, samples, steps, num_experts, reference=False,
                 forwards=0):
    """-> lines on model, experts, cost and memory, with a warning where it won't fit. UserError for wrong settings.

    config: the settings, those that a fork has deleted as in WITHOUT; ranks: GPUs of the run; device: this one's.
    micro_batch: samples whose activations live at once (a guided one is two); samples: a rank's that are trained in a
    step; steps: of the run; num_experts, reference: as in estimate_memory; forwards: a rank's without a backward.
    """
    c, tokens, per_token = WITHOUT | config, num_tokens(latent_shape), wan.kind == "ti2v"
    gpu, gib, own, compiled = c["gpu"], c["gpu_gib"], c["checkpointing"], c["compile_blocks"]
    if ranks % c["dp_replicate"]:
        raise UserError(f"dp_replicate={c['dp_replicate']}: want a divisor of the {ranks} ranks, e.g. one a node")
    if gpu and (gpu not in MEASURED or wan.dtype != torch.bfloat16):
        raise UserError(f"gpu={gpu}, dtype={c['dtype']}: want {' or '.join(MEASURED)}, measured in bfloat16")
    if not gib and device.type == "cuda":
        gib = torch.cuda.get_device_properties(device).total_memory / 2**30

    rolled = forward_flops(wan.config, tokens, c["max_text_tokens"])
    estimates, flops = {}, {}  # by checkpointing; FLOPs of linears, of attention
    for name in KEPT:
        trained = training_flops(wan.config, tokens, c["lora_rank"] > 0, c["max_text_tokens"], name)
        flops[name] = [samples * one + forwards * other for one, other in zip(trained, rolled, strict=True)]
        estimates[name] = estimate_memory(
            wan.config, tokens * micro_batch, num_experts, ranks // c["dp_replicate"], wan.dtype, c["lora_rank"],
            c["lora_targets"], name, c["ema_decay"] > 0, reference, compiled, per_token)
    fitting = [name for name, estimate in estimates.items() if not gib or fits(estimate, gib)]
    seconds = {name: estimate_seconds(gpu, compiled, *each, per_token) for name, each in flops.items() if gpu}

    boundary = f", boundary {wan.boundary_ratio} (timestep {1000 * wan.boundary_ratio:g})" if wan.boundary_ratio else ""
    lines = [f"model      {wan.model}: {wan.kind}, {len(wan.expert_names)} x {count_parameters(wan.config):,} "
             f"parameters{boundary}, shift {c['shift']:g}"]
    if "experts" in c:
        shares = [f"{name} {expert_share(name, wan.boundary_ratio, c['shift']):.1%} of the steps"
                  for name in wan.expert_names]
        lines.append(f"experts    {', '.join(shares)}; trained: {c['experts']}")
    lines += [f"guidance   {c['guidance_scale']:g} (high), {c['guidance_scale_2'] or c['guidance_scale']:g} (low) in "
              "sampling",
              f"cost       {sum(flops['none']) / 1e12:,.2f} TFLOP a step and rank without recomputation",
              f"memory     about {sum(estimates[own].values()):.1f} GiB a GPU: {parts(estimates[own])}"
              + (", without VAE and rewards" if forwards else "")
              + (f": {'fits' if own in fitting else 'DOES NOT FIT'} {gib:.0f} GiB" if gib else "")]
    if gpu:
        best = own if own in fitting or not fitting else fitting[0]  # hours of what can run
        each, is_measured = seconds[best]
        how = "measured, on one at LoRA rank 16" if is_measured else "estimated"
        lines.append(f"speed      {gpu}, checkpointing={best}: {each:.2f} s a step ({how}); {steps:,} steps: "
                     f"{steps * each / 3600:.1f} hours")
    width = max(len(parts(estimate)) for estimate in estimates.values())
    for name, estimate in estimates.items() if c["dry_run"] else ():
        verdict = "fits" if name in fitting else "doesn't fit"
        lines.append(f"  {name:9s}{sum(estimate.values()):7.1f} GiB: {parts(estimate):{width}}"
                     + (f"   {seconds[name][0]:6.2f} s a step" if gpu else "")
                     + (f"   {verdict} {gib:.0f} GiB" if gib else ""))
    if own not in fitting:
        lines.append(f"warning    checkpointing={own} doesn't fit {gib:.0f} GiB: "
                     + (f"checkpointing={fitting[0]} does" if fitting else "none does")
                     + "; more GPUs, a smaller batch or clip" + ("" if compiled else ", compile_blocks=True") + " help")
    return lines
