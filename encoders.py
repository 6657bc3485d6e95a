"""Everything around the transformer: video VAE (pixels <-> latents) and text encoder (prompts -> embeddings).

`model` is a diffusers folder, a hub id, or "random:NAME" (full-size random weights, for measuring without a download).
"""

import hashlib
import itertools
import math
import os
import sys

import torch
import transformers
from diffusers import AutoencoderKLWan
from diffusers.configuration_utils import ConfigMixin, register_to_config
from diffusers.models.autoencoders.vae import DecoderOutput, IdentityDistribution
from diffusers.models.modeling_outputs import AutoencoderKLOutput
from diffusers.models.modeling_utils import ModelMixin
from diffusers.pipelines.wan.pipeline_wan import prompt_clean
from torch.nn import functional as F
from transformers import UMT5EncoderModel

import pretrained
from cost import random_shape
from guard import UserError

# Constructor arguments of the two released VAEs: 2.1 is diffusers' default, 2.2 belongs to TI2V-5B.
# The latent statistics are left at 0 and 1 for 2.2: with random weights no others would be right either.
VAE_2_1 = {}
VAE_2_2 = dict(base_dim=160, decoder_base_dim=256, z_dim=48, is_residual=True, in_channels=12, out_channels=12,
               patch_size=2, scale_factor_spatial=16, latents_mean=[0.0] * 48, latents_std=[1.0] * 48)
RANDOM_TEXT_DIM = 4096  # width of UMT5-XXL


class AutoencoderDCT(ModelMixin, ConfigMixin):
    """A parameter-free stand-in for AutoencoderKLWan: the z_dim lowest frequencies of an orthonormal 3-D DCT.

    Pixels are cut into blocks of stride (t, h, w) = (4, 4, 4), the first frame repeated to fill its block, so that
    4n + 1 frames give n + 1 latent frames as in Wan. Exact on what it keeps, where a random convolutional VAE would
    decode to noise. Nothing crosses a block's border.
    """

    @register_to_config
    def __init__(self, z_dim=16, latents_mean=(0.0,) * 16, latents_std=(1.0,) * 16, scale_factor_temporal=4,
                 scale_factor_spatial=4):
        super().__init__()
        # The only state. A stored buffer rather than a computed constant, because from_pretrained wants a weight file.
        self.register_buffer("basis", dct_basis(z_dim, scale_factor_temporal, scale_factor_spatial))  # z c t h w

    def encode(self, x):
        """Pixels b 3 f h w in -1..1 -> distribution whose mode and sample are the coefficients b z F h w."""
        stride = self.basis.shape[2:]
        fill = x[:, :, :1].expand(-1, -1, stride[0] - 1, -1, -1)
        latents = F.conv3d(torch.cat([fill, x], dim=2), self.basis, stride=stride)
        return AutoencoderKLOutput(latent_dist=IdentityDistribution(latents))

    def decode(self, z, return_dict=True):
        """Coefficients b z F h w -> pixels b 3 f h w, clamped to -1..1; the adjoint is the inverse (orthonormal)."""
        stride = self.basis.shape[2:]
        pixels = F.conv_transpose3d(z, self.basis, stride=stride)[:, :, stride[0] - 1 :].clamp(-1, 1)
        return DecoderOutput(sample=pixels) if return_dict else (pixels,)


def dct_basis(z_dim, stride_t, stride_s):
    """Orthonormal basis vectors z c t h w of a block, lowest frequencies first (grey before colour differences)."""

    def dct(n):  # DCT-II, rows are frequencies
        k, i = torch.meshgrid(torch.arange(n, dtype=torch.float64), torch.arange(n, dtype=torch.float64), indexing="ij")
        rows = torch.cos(math.pi * k * (2 * i + 1) / (2 * n)) * math.sqrt(2 / n)
        rows[0] /= math.sqrt(2)
        return rows

    colour, time, space = dct(3), dct(stride_t), dct(stride_s)
    frequencies = itertools.product(range(stride_t), range(stride_s), range(stride_s), range(3))
    frequencies = sorted(frequencies, key=lambda k: (k[0] ** 2 + k[1] ** 2 + k[2] ** 2, k[3], k))[:z_dim]
    vectors = [torch.einsum("c,t,h,w->cthw", colour[c], time[t], space[h], space[w]) for t, h, w, c in frequencies]
    return torch.stack(vectors).float()


VAES = {"AutoencoderKLWan": AutoencoderKLWan, "AutoencoderDCT": AutoencoderDCT}


def vae_config(model):
    """Configuration dict of a model's VAE, `_class_name` included."""
    if model.startswith("random:"):
        return {"_class_name": "AutoencoderKLWan"} | (VAE_2_2 if "out_channels" in random_shape(model) else VAE_2_1)
    with pretrained.one_line(model, "vae"):
        config = AutoencoderKLWan.load_config(model, subfolder="vae")
    if config.get("_class_name") not in VAES:
        raise UserError(f"model={model}: its VAE is {config.get('_class_name')}: want {' or '.join(VAES)}")
    return config


def latent_shape(model, num_frames, cell_height, cell_width, rows=1, columns=1, names=("cell_height", "cell_width")):
    """-> (c, f, h, w) of the latents of a grid of cells, from vae/config.json alone.

    UserError unless the VAE's stride and the transformer's 2 x 2 patches divide a cell evenly; names are the caller's
    settings of height and width.
    """
    config = vae_config(model)
    stride_t, stride = config.get("scale_factor_temporal", 4), config.get("scale_factor_spatial", 8)
    for name, size in zip(names, (cell_height, cell_width), strict=True):
        if size % (2 * stride) or size <= 0:
            below = max(size // (2 * stride), 1) * 2 * stride
            raise UserError(f"{name}={size}: want a multiple of {2 * stride} ({below} or {below + 2 * stride})")
    if (num_frames - 1) % stride_t or num_frames < 1:
        below = max((num_frames - 1) // stride_t, 0) * stride_t + 1
        raise UserError(f"num_frames={num_frames}: want {stride_t}n+1 ({below} or {below + stride_t})")
    frames = (num_frames - 1) // stride_t + 1
    return config.get("z_dim", 16), frames, rows * cell_height // stride, columns * cell_width // stride


def check(model):
    """UserError where the files of a folder's VAE, text encoder or tokenizer don't hold what they should.

    What is missing altogether is missed when it is loaded: not every script wants all of them.
    """
    if os.path.isdir(os.path.join(model, "vae")):
        _, vae = pretrained.check(VAES[vae_config(model)["_class_name"]], model, "vae")
        with pretrained.one_line(model, "vae"):
            mean, std = (torch.tensor(vae.config[name]).double() for name in ("latents_mean", "latents_std"))
        if not (len(mean) == len(std) == vae.config.z_dim and (mean / std).isfinite().all() and (std > 0).all()):
            raise UserError(f"model={model}: vae: want {vae.config.z_dim} finite latents_mean, latents_std above 0")
    if os.path.isdir(os.path.join(model, "text_encoder")):
        pretrained.check(UMT5EncoderModel, model, "text_encoder")
    if os.path.isdir(os.path.join(model, "tokenizer")):
        pretrained.check_tokenizer(model, "tokenizer")


def load_vae(model, device="cpu", dtype=torch.float32):
    """The model's frozen VAE. Raises UserError if there is none, or if its class is not known here."""
    config = vae_config(model)
    if model.startswith("random:"):
        return pretrained.draw(lambda: AutoencoderKLWan.from_config(config), dtype, device)
    return pretrained.load(VAES[config["_class_name"]], model, "vae", dtype, device)


def latent_statistics(vae, device):
    """(mean, std) 1 z 1 1 1 float32: the transformer sees (latents - mean) / std."""
    mean = torch.tensor(vae.config.latents_mean, dtype=torch.float32, device=device).view(1, -1, 1, 1, 1)
    std = torch.tensor(vae.config.latents_std, dtype=torch.float32, device=device).view(1, -1, 1, 1, 1)
    return mean, std


@torch.no_grad()
def encode(vae, pixels):
    """Pixels b 3 f h w in -1..1 -> normalised latents b z F h w float32, the mode of the posterior (no sampling)."""
    latents = vae.encode(pixels.to(vae.device, vae.dtype)).latent_dist.mode().float()
    mean, std = latent_statistics(vae, latents.device)
    return (latents - mean) / std


@torch.no_grad()
def decode(vae, latents):
    """Normalised latents b z F h w -> pixels b 3 f h w float32 in -1..1."""
    mean, std = latent_statistics(vae, vae.device)
    latents = latents.to(vae.device, torch.float32) * std + mean
    return vae.decode(latents.to(vae.dtype), return_dict=False)[0].float().clamp(-1, 1)


def encode_condition(vae, first_frame, num_frames, kind):
    """First frame b 3 h w in -1..1 -> what the model is given, normalised latents b z F h w float32.

    kind "i2v": the frame followed by num_frames - 1 zero (mid-grey) frames, encoded as ONE clip: the VAE has a memory,
    and encoded zeros are not zeros, so padding the frame's own latent is not the same.
    kind "ti2v" or "t2v": the frame alone, F = 1, which will replace the first latent frame.
    """
    clip = first_frame[:, :, None]  # b 3 1 h w
    if kind == "i2v":
        clip = torch.cat([clip, clip.new_zeros(*clip.shape[:2], num_frames - 1, *clip.shape[3:])], dim=2)
    return encode(vae, clip)


def load_text_encoder(model, device="cpu", dtype=torch.bfloat16):
    """(tokenizer, frozen UMT5 encoder) of a model; (None, "random") for "random:NAME", which has neither."""
    if model.startswith("random:"):
        return None, "random"
    _, skeleton = pretrained.check(UMT5EncoderModel, model, "text_encoder")
    tokenizer = pretrained.load_tokenizer(model, "tokenizer", skeleton.config.vocab_size)
    if not sys.stderr.isatty():  # a log would keep every state of "Loading weights"
        transformers.utils.logging.disable_progress_bar()
    return tokenizer, pretrained.load(UMT5EncoderModel, model, "text_encoder", dtype, device)


@torch.no_grad()
def encode_text(tokenizer, text_encoder, prompts, max_text_tokens):
    """List of n prompts -> embeddings n max_text_tokens d, float32 on the CPU, zeros after a prompt's own tokens.

    Prompts are cleaned as diffusers does. Raises UserError if the encoder gives NaN or infinity (it does in float16).
    """
    prompts = [prompt_clean(prompt) for prompt in prompts]
    if text_encoder == "random":
        return torch.stack([random_embedding(prompt, max_text_tokens) for prompt in prompts])
    embeddings = []
    for start in range(0, len(prompts), 16):  # UMT5-XXL at 512 tokens: keep the peak small
        batch = prompts[start : start + 16]
        tokens = tokenizer(batch, padding="max_length", max_length=max_text_tokens, truncation=True,
                           return_attention_mask=True, return_tensors="pt").to(text_encoder.device)
        hidden = text_encoder(tokens.input_ids, tokens.attention_mask).last_hidden_state.float()  # b n d
        if not hidden.isfinite().all():
            raise UserError(f"text encoder in {text_encoder.dtype}: got NaN or infinity, want bfloat16 or float32")
        # Zero the padding AFTER the encoder: it gives padded positions values, and Wan was trained without them.
        embeddings.append((hidden * tokens.attention_mask[:, :, None]).cpu())  # all of them may not fit on the GPU
    return torch.cat(embeddings)


def text_warnings(tokenizer, text_encoder, prompts, max_text_tokens):
    """Lines that tell where max_text_tokens cuts prompts, or isn't what the released models were trained with."""
    if text_encoder == "random":
        return
    lengths = [len(ids) for ids in tokenizer([prompt_clean(prompt) for prompt in prompts]).input_ids]
    cut = [prompt for prompt, length in zip(prompts, lengths, strict=True) if length > max_text_tokens]
    if cut:
        yield (f"warning    {len(cut)} of {len(prompts)} prompts have more than max_text_tokens={max_text_tokens} "
               f"tokens and are cut, the longest has {max(lengths)}: {cut[0][:60]!r}")
    if text_encoder.config.d_model == 4096 and max_text_tokens != 512:
        yield f"warning    max_text_tokens={max_text_tokens}: the released models were trained with 512"


def random_embedding(prompt, max_text_tokens):
    """Normal numbers max_text_tokens d drawn from the prompt's hash: as many tokens as words + 1, the rest zero."""
    seed = int.from_bytes(hashlib.sha256(prompt.encode()).digest()[:7], "big")
    num_tokens = min(len(prompt.split()) + 1, max_text_tokens)
    embedding = torch.zeros(max_text_tokens, RANDOM_TEXT_DIM)
    embedding[:num_tokens] = torch.randn(num_tokens, RANDOM_TEXT_DIM, generator=torch.Generator().manual_seed(seed))
    return embedding
