"""Everything around the transformer: video VAE (pixels <-> latents) and text encoder (prompts -> embeddings).

`model` is a diffusers folder, a hub id, or "random:NAME" (full-size random weights, for measuring without a download).
"""

import hashlib
import itertools
import math
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
from transformers import AutoTokenizer, UMT5EncoderModel

from guard import UserError, user_errors

# Constructor arguments of the two released VAEs: 2.1 is diffusers' default, 2.2 belongs to TI2V-5B.
# The latent statistics are left at 0 and 1 for 2.2: with random weights no others would be right either.
VAE_2_1 = {}
VAE_2_2 = dict(base_dim=160, decoder_base_dim=256, z_dim=48, is_residual=True, in_channels=12, out_channels=12,
               patch_size=2, scale_factor_spatial=16, latents_mean=[0.0] * 48, latents_std=[1.0] * 48)
RANDOM_VAES = {"i2v-a14b": VAE_2_1, "t2v-a14b": VAE_2_1, "t2v-1.3b": VAE_2_1, "ti2v-5b": VAE_2_2}
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


def latent_geometry(model):
    """(z_dim, stride (t, h, w)) of a model's VAE, read from vae/config.json alone."""
    config = vae_config(model)
    stride_t, stride_s = config.get("scale_factor_temporal", 4), config.get("scale_factor_spatial", 8)
    return config.get("z_dim", 16), (stride_t, stride_s, stride_s)


def vae_config(model):
    """Configuration dict of a model's VAE, `_class_name` included."""
    if model.startswith("random:"):
        name = model.split(":")[1]  # "random:NAME" or "random:NAME:layers"
        if name not in RANDOM_VAES:
            raise UserError(f"model={model}: want random: and one of {', '.join(RANDOM_VAES)}")
        return {"_class_name": "AutoencoderKLWan", **RANDOM_VAES[name]}
    with user_errors(model, "vae"):
        return AutoencoderKLWan.load_config(model, subfolder="vae")


def load_vae(model, device="cpu", dtype=torch.float32):
    """The model's frozen VAE. Raises UserError if there is none, or if its class is not known here."""
    config = vae_config(model)
    classes = {"AutoencoderKLWan": AutoencoderKLWan, "AutoencoderDCT": AutoencoderDCT}
    if config.get("_class_name") not in classes:
        raise UserError(f"model={model}: its VAE is {config.get('_class_name')}: want {' or '.join(classes)}")
    if model.startswith("random:"):
        torch.manual_seed(0)  # the same on every rank and in every run
        with torch.device(device):  # initialise there: 0.7 B numbers take long on a CPU
            vae = AutoencoderKLWan.from_config(config)
        vae = torch.nn.Module.to(vae, dtype)  # diffusers' own .to warns of modules to keep in float32; a VAE has none
    else:
        with user_errors(model, "vae"):
            vae = classes[config["_class_name"]].from_pretrained(model, subfolder="vae", torch_dtype=dtype).to(device)
    return vae.eval().requires_grad_(False)


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
    with user_errors(model, "tokenizer"):
        tokenizer = AutoTokenizer.from_pretrained(model, subfolder="tokenizer")
    if not sys.stderr.isatty():  # a log would keep every state of "Loading weights"
        transformers.utils.logging.disable_progress_bar()
    with user_errors(model, "text_encoder"):
        text_encoder = UMT5EncoderModel.from_pretrained(model, subfolder="text_encoder", dtype=dtype)
    return tokenizer, text_encoder.to(device).eval().requires_grad_(False)


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
