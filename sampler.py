"""Videos by this process: prompts, given frames and seeds through text encoder, VAE and the policy's steps.

    dx = velocity dsigma                        integrated from sigma 1 (noise) to 0 (video)

A picture may be a grid of cells (views side by side, pointmaps under them): each is encoded and decoded by itself.
"""

import torch
import torch.nn.functional as F
from tqdm import tqdm

import encoders
import flow
import fsdp
import model as wan_model
import rollout
from data import join_cells, split_cells
from guard import Diverged

# ----------------------------------------------------------------------------- from noise to latents


def guided_velocity(wan, latents, sigma, condition, text, negative_text, guidance_scale, guidance_scale_2):
    """Velocity with classifier-free guidance: uncond + scale (cond - uncond) (Ho & Salimans, arXiv 2207.12598).

    latents b c f h w; sigma b on the CPU; text b n d, negative_text b|1 n d. guidance_scale is the high expert's (or
    the single one's), guidance_scale_2 the low one's. At scale 1 the unconditional pass is left out.
    """
    low = wan_model.route(wan.boundary_ratio, sigma) == "low"
    scale = guidance_scale_2 if low else guidance_scale
    conditional = wan_model.velocity(wan, latents, sigma, condition, text)
    if scale == 1.0:
        return conditional
    unconditional = wan_model.velocity(wan, latents, sigma, condition, negative_text.expand_as(text))
    return unconditional + scale * (conditional - unconditional)


@torch.no_grad()
def sample(wan, noise, condition, text, negative_text, sigmas, guidance_scale, guidance_scale_2, law="flow",
           noise_level=0.0, window=(), generators=(), progress=None):
    """From noise to latents: stochastic steps of a law inside the window, Euler's ODE steps x + v dt outside it.

    noise b c f h w; sigmas k+1 from flow.sigma_grid; condition, texts and guidance as in guided_velocity; generators:
    one a sample, on the CPU, for the noise of its stochastic steps. progress: a label for a bar, None for no bar.
    -> latents b c f h w with the given frame restored, list of rollout.Step (one for each of the window). Collective;
    Diverged where the latents aren't finite, but for a rollout's, of whose window the trainer tells more.
    """
    latents, steps = noise.float(), []
    gen_mask = wan_model.generated_mask(wan, latents, condition)
    grid = sigmas.tolist()
    for i in tqdm(range(len(grid) - 1), desc=progress, leave=False, disable=None if progress else True):
        sigma = sigmas[i].expand(len(latents))
        v = guided_velocity(wan, latents, sigma, condition, text, negative_text, guidance_scale, guidance_scale_2)
        if i not in window:
            latents = latents + v * (grid[i + 1] - grid[i])
            continue
        mean, std = rollout.sde_step(law, latents, v, grid[i], grid[i + 1], grid[1], noise_level)
        drawn = torch.stack([torch.randn(latents.shape[1:], generator=g) for g in generators]).to(latents.device)
        following = wan_model.clamp_given(wan, mean + std * drawn, condition)
        log_prob = rollout.log_prob(law, following, mean, std, gen_mask)
        steps.append(rollout.Step(i, latents.cpu(), following.cpu(), mean.cpu(), log_prob.cpu()))
        latents = following
    latents = wan_model.clamp_given(wan, latents, condition)
    if not steps:
        with fsdp.all_ranks_agree():
            if not latents.isfinite().all():
                raise Diverged("got NaN or infinity in a sampled video: want lower guidance, or another checkpoint or "
                               "adapter")
    return latents, steps


# ----------------------------------------------------------------------------- cells and text


def encode_given(vae, cells, num_frames, kind):
    """Given frames {(modality, view): b 3 h w in -1..1} -> the model's condition b z F|1 H W, cell by cell."""
    return join_cells({name: encoders.encode_condition(vae, cell, num_frames, kind) for name, cell in cells.items()})


def decode_cells(vae, latents, modalities, views):
    """Grid latents z F H W -> {(modality, view): pixels 3 f h w in -1..1}; each cell is decoded by itself."""
    cells = split_cells(latents, modalities, views)
    return {name: encoders.decode(vae, cell[None])[0] for name, cell in cells.items()}


def embed(config, prompts, device, dtype):
    """{prompt: its own tokens n d in dtype, on the CPU}: the zeros after them would be 4 MB a prompt.

    config: a script's settings model, text_dtype and max_text_tokens.
    """
    max_text_tokens = config["max_text_tokens"]
    tokenizer, text_encoder = encoders.load_text_encoder(config["model"], device, getattr(torch, config["text_dtype"]))
    for line in encoders.text_warnings(tokenizer, text_encoder, prompts, max_text_tokens):
        fsdp.say(line)
    text_of = {}
    for prompt in tqdm(prompts, desc="text", leave=False, disable=None if fsdp.is_first() else True):
        embedding = encoders.encode_text(tokenizer, text_encoder, [prompt], max_text_tokens)[0].cpu()
        text_of[prompt] = embedding[: int(embedding.any(-1).sum())].to(dtype)
    return text_of


# ----------------------------------------------------------------------------- the policy's videos


class Sampler:
    """Videos of prompts by this process. sglang_sampler.SGLangSampler takes the same and has the same methods.

    config: train_grpo.py's settings; policy: model.Wan, whose experts may be loaded later; phases: loop.Phases that the
    seconds go to; stop: fsdp.Stop. Prompts: prompts.Prompts, or what else has .prompts, .given(i), .modalities, .views.
    """

    logged = {}  # what a line of the log says of it

    def __init__(self, config, policy, latent_shape, guidance, device, train_prompts, eval_prompts, phases, stop):
        self.config, self.policy, self.latent_shape, self.guidance = config, policy, latent_shape, guidance
        self.device, self.phases, self.stop = device, phases, stop
        self.sigmas = flow.sigma_grid(config["num_steps"], config["shift"])
        self.eval_sigmas = flow.sigma_grid(config["num_eval_steps"], config["shift"])
        distinct = sorted({*train_prompts.prompts, *eval_prompts.prompts, config["negative_prompt"]})
        self.text_of = embed(config, distinct, device, policy.dtype)
        self.vae = encoders.load_vae(config["model"], device, getattr(torch, config["vae_dtype"]))

    def begun(self):
        """A line that tells what makes the videos."""
        return f"sampler    this process, {len(self.text_of)} prompts embedded"

    def conditions(self, prompts, indices):
        """-> condition b c f|1 h w or None, text b n d, negative text 1 n d for prompts of a file, on the device."""
        condition = None
        if self.policy.kind != "t2v":
            encoded = {}  # of each given frame once
            for i in set(indices):
                cells = {name: cell[None].to(self.device) for name, cell in prompts.given(i).items()}
                encoded[i] = encode_given(self.vae, cells, self.config["num_frames"], self.policy.kind)
            condition = torch.cat([encoded[i] for i in indices])
        tokens = self.config["max_text_tokens"]
        text = [self.text_of[prompts.prompts[i]] for i in indices] + [self.text_of[self.config["negative_prompt"]]]
        text = torch.stack([F.pad(x, (0, 0, 0, tokens - len(x))) for x in text]).to(self.device)  # b+1 n d
        return condition, text[:-1], text[-1:]

    def decode(self, latents, prompts):
        """Latents b c f h w -> videos b f 3 h w in 0..1, as 8-bit files would hold them."""
        cells = split_cells(latents, prompts.modalities, prompts.views)
        size = self.config["decode_batch"]
        cells = {name: torch.cat([encoders.decode(self.vae, chunk) for chunk in cell.split(size)])  # b 3 f h w
                 for name, cell in cells.items()}
        return ((join_cells(cells) + 1) * 127.5).round().div(255).transpose(1, 2)

    def roll_out(self, prompts, positions, indices, seeds, window, measured=False):
        """Videos of prompts, rollout_batch at a time -> (rollout.Record without rewards, pixels b f 3 h w in 0..1).

        positions: range of the videos' numbers in the iteration; indices: the prompt of each; seeds: of its noise.
        Ends early where the run is asked to stop. measured: for servers; this process always tells its log-probs.
        """
        size = self.config["rollout_batch"]
        for start in range(0, len(positions), size):
            if self.stop.anywhere():
                return
            batch = slice(start, start + size)
            yield self._batch(prompts, positions[batch], indices[batch], seeds[batch], window)

    def _batch(self, prompts, positions, indices, seeds, window):
        """Apart from roll_out, so that what it needs is free while rewards score its videos."""
        with self.phases("roll"):
            with fsdp.all_ranks_agree():  # where an image is gone
                condition, text, negative_text = self.conditions(prompts, indices)
            # a video's noise, the first and each step's, comes from one generator of its own
            generators = [torch.Generator().manual_seed(seed) for seed in seeds]
            noise = torch.stack([torch.randn(self.latent_shape, generator=g) for g in generators]).to(self.device)
            law = {name: self.config[name] for name in ("law", "noise_level")}
            latents, steps = sample(self.policy, noise, condition, text, negative_text, self.sigmas, **self.guidance,
                                    **law, window=window, generators=generators)
        finite = latents.isfinite().all()
        if self.policy.kind == "ti2v" and finite and not torch.equal(latents[:, :, :1], condition):
            raise RuntimeError("the given frame changed in the rollout")
        with self.phases("decode"):
            pixels = self.decode(latents, prompts)
        on_cpu = [x.cpu() if x is not None else None for x in (condition, text, negative_text)]
        return rollout.Record(positions, *on_cpu, steps, {}), pixels

    @torch.no_grad()
    def generate(self, prompts, indices, seeds):
        """Videos b f 3 h w in 0..1 of prompts by the ODE's num_eval_steps."""
        noise = torch.stack([torch.randn(self.latent_shape, generator=torch.Generator().manual_seed(seed))
                             for seed in seeds]).to(self.device)
        with fsdp.all_ranks_agree():  # where an image is gone
            conditions = self.conditions(prompts, indices)
        latents = sample(self.policy, noise, *conditions, self.eval_sigmas, **self.guidance)[0]
        return self.decode(latents, prompts)

    def sync(self, parameters):
        """Servers are given the policy's adapters; this process has them."""

    def check_drift(self, drift):
        """Servers' numbers may differ from the trainer's; this process's are seen in the first ratio."""

    def release(self):
        """Servers on the trainer's GPUs give their memory back."""

    def close(self):
        """Servers that belong to the run end."""
