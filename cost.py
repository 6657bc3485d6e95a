"""What a run costs before anything is loaded: tokens, parameters, arithmetic, memory."""

import torch
from diffusers import WanTransformer3DModel


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
                    reference=False):
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
                 "ffn.net.0.proj": dim + config["ffn_dim"], "ffn.net.2": dim + config["ffn_dim"]}
        trainable = layers * lora_rank * sum(sizes.get(target.strip(), 0) for target in lora_targets.split(","))
    activations = dict(none=52, full=3.8, selective=6.9)[checkpointing] * tokens * layers * dim * (dtype.itemsize / 2)
    return {
        "weights": num_experts * parameters * bytes_each / num_shards / 2**30,
        "state": num_experts * trainable * (12 + 4 * ema) / num_shards / 2**30,  # gradient, AdamW's two moments, EMA
        "activations": activations / 2**30,
    }
