"""Sigmas and sampling: the shifted grid, how training draws a noise level and its expert, ODE and SDE steps.

    sigma = shift u / (1 + (shift - 1) u)       u uniform in [0, 1]: more of the time at high noise for shift > 1
    dx = velocity dsigma                        integrated from sigma 1 (noise) to 0 (video)
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
from tqdm import tqdm

import model as wan_model


def seed_of(*key):
    """A 63-bit seed, a pure function of a key of non-negative ints, e.g. (seed, iteration, video).

    The key's length is part of it: numpy pads keys with zeros, and (seed, step) would be (seed, step, sample 0).
    """
    return int(np.random.SeedSequence([*key, len(key)]).generate_state(1, np.uint64)[0] >> 1)


def seeded(device, *key):
    """A torch.Generator seeded with seed_of(key).

    Every draw comes from one of these, so that a run doesn't depend on the number of ranks or on interruptions.
    """
    return torch.Generator(device).manual_seed(seed_of(*key))


def randn(shape, *key):
    """Standard normal numbers, float32, drawn on the CPU: the same on any device."""
    return torch.randn(shape, generator=seeded("cpu", *key))


def shift_sigma(u, shift):
    """u in [0, 1] -> sigma in [0, 1] (Esser et al. 2024, arXiv 2403.03206, eq. 23)."""
    return shift * u / (1 + (shift - 1) * u)


def unshift_sigma(sigma, shift):
    """The inverse of shift_sigma."""
    return sigma / (shift - (shift - 1) * sigma)


def sigma_grid(num_steps, shift):
    """-> num_steps + 1 float32 sigmas from 1 to 0, those of diffusers' FlowMatchEulerDiscreteScheduler(shift=shift)."""
    u = np.linspace(1.0, shift_sigma(torch.tensor(0.001), shift).item(), num_steps)  # the scheduler shifts twice
    return torch.tensor(np.append(shift_sigma(u, shift), 0.0), dtype=torch.float32)


# ----------------------------------------------------------------------------- training draws


def expert_share(expert, boundary_ratio, shift):
    """Share of an expert when u is uniform: shift 5, boundary 0.9 -> high 35.7 %."""
    if expert == "single":
        return 1.0
    low = unshift_sigma(boundary_ratio, shift)
    return 1 - low if expert == "high" else low


def draw_expert(experts, boundary_ratio, shift, seed, step):
    """The expert that all ranks train in a step, drawn by share from a generator they share -> a name of experts."""
    shares = torch.tensor([expert_share(expert, boundary_ratio, shift) for expert in experts], dtype=torch.float64)
    return experts[int(torch.multinomial(shares, 1, generator=seeded("cpu", seed, step)))]


def draw_sigma(expert, boundary_ratio, shift, generator):
    """A sigma (float32, on the CPU) from the part of the shifted distribution that belongs to the expert."""
    u = torch.rand((), generator=generator, dtype=torch.float64)
    if expert == "single":
        return shift_sigma(u, shift).float()
    u_boundary = unshift_sigma(boundary_ratio, shift)
    if expert == "high":
        return shift_sigma(u_boundary + (1 - u_boundary) * u, shift).clamp(min=boundary_ratio + 1e-6).float()
    return shift_sigma(u_boundary * u, shift).clamp(max=boundary_ratio - 1e-6).float()  # float32 keeps to its side


def bin_sigmas(expert, boundary_ratio, shift, num_bins):
    """-> num_bins float32 sigmas, descending: the mid-points of bins of equal probability in the expert's range."""
    u = 1 - (torch.arange(num_bins, dtype=torch.float64) + 0.5) / num_bins
    if expert == "single":
        return shift_sigma(u, shift).float()
    u_boundary = unshift_sigma(boundary_ratio, shift)
    return shift_sigma(u_boundary + (1 - u_boundary) * u if expert == "high" else u_boundary * u, shift).float()


# ----------------------------------------------------------------------------- stochastic steps and their log-probs

LAWS = ("flow", "dance", "cps")


def transition(law, latents, velocity, sigma, sigma_next, sigma_1, noise_level):
    """The Gaussian that a stochastic step draws the next latents from -> mean b c f h w, std (a float), float32.

    A flow dx = v dsigma has the same marginals as a reverse SDE with any diffusion coefficient g; with
    dt = sigma_next - sigma < 0, its Euler-Maruyama step is
        mean = x (1 + g^2 dt / (2 sigma)) + v (1 + g^2 (1 - sigma) / (2 sigma)) dt,   std = g sqrt(-dt)
    "flow"   g = noise_level sqrt(sigma / (1 - sigma)); sigma_1, the grid's second value, stands in the denominator for
             sigma = 1, where g would be infinite (Flow-GRPO, arXiv 2505.05470, eq. 9)
    "dance"  g = noise_level (DanceGRPO, arXiv 2505.07818, eq. 8)
    "cps"    keeps the noise level of the grid exactly: with x0 = x - sigma v and x1 = x + (1 - sigma) v,
             mean = (1 - sigma_next) x0 + sqrt(sigma_next^2 - std^2) x1,   std = sigma_next sin(noise_level pi / 2)
             (Flow-CPS, arXiv 2509.05952); for a single x0 only: where x0 spreads, samples spread less than the flow's
    noise_level 0 is the ODE step x + v dt under any law. sigmas are floats.
    """
    dt = sigma_next - sigma
    if law == "cps":
        std = sigma_next * math.sin(noise_level * math.pi / 2)
        x0, x1 = latents - sigma * velocity, latents + (1 - sigma) * velocity
        return (1 - sigma_next) * x0 + math.sqrt(max(sigma_next**2 - std**2, 0.0)) * x1, std
    g = noise_level
    if law == "flow":
        g *= math.sqrt(sigma / (1 - (sigma_1 if sigma == 1 else sigma)))
    mean = latents * (1 + g**2 * dt / (2 * sigma)) + velocity * (1 + g**2 * (1 - sigma) / (2 * sigma)) * dt
    return mean, g * math.sqrt(-dt)


def masked_mean(values, gen_mask):
    """Mean over generated positions: values b c f h w, gen_mask b 1 f h w -> b."""
    return (values.mean(1, keepdim=True) * gen_mask).flatten(1).sum(1) / gen_mask.flatten(1).sum(1)


def log_prob(law, sample, mean, std, gen_mask):
    """Log-density of a step, averaged over generated latent positions: sample, mean b c f h w -> b, float32.

    Averaged, not summed, so that clip ranges don't depend on the size of a video; given positions would only dilute it.
    For "cps" the variance is left out, -(x' - mean)^2, as its paper and all implementations do.
    """
    squared = (sample - mean).square()
    if law == "cps":
        return -masked_mean(squared, gen_mask)
    return masked_mean(-squared / (2 * std**2), gen_mask) - math.log(std) - 0.5 * math.log(2 * math.pi)


def draw_window(num_sde_steps, sde_window, seed, iteration):
    """Indices of an iteration's stochastic steps: num_sde_steps in a row inside sde_window = (lo, hi), hi exclusive.

    One window for all prompts and ranks: a pure function of (seed, iteration) (MixGRPO, arXiv 2507.21802).
    """
    low, high = sde_window
    starts = high - num_sde_steps - low + 1
    start = low + int(torch.randint(starts, (), generator=seeded("cpu", seed, iteration)))
    return list(range(start, start + num_sde_steps))


@dataclass
class Transition:
    """A stochastic step of a rollout, kept on the CPU for training: x' ~ N(mean, std^2) given x."""

    step: int  # in the sigma grid
    latents: torch.Tensor  # x, b c f h w
    next_latents: torch.Tensor  # x', b c f h w
    mean: torch.Tensor | None  # under the policy that drew it, b c f h w: by the sampler, or by the trainer's score
    log_prob: torch.Tensor | None  # of x' under that policy, b; a server tells both only where drift is measured
    reference_mean: torch.Tensor | None = None  # under the reference, b c f h w, where the KL to it is wanted


def drift(law, stored, mean, log_density, gen_mask, sigmas, noise_level):
    """How far the sampler's numbers of a stored Transition are from the trainer's own, the worst sample -> two floats:

    RMS of the difference of the velocities over the RMS of the sampler's (generated positions), and
    |exp(log_density - the sampler's) - 1|, how far off the ratio of the first update would be. All on one device.
    """
    grid, k, x = sigmas.tolist(), stored.step, stored.latents
    at_zero = transition(law, x, torch.zeros_like(x), grid[k], grid[k + 1], grid[1], noise_level)[0]
    # the mean is linear in the velocity, so that its differences measure that
    off, size = (masked_mean(d.square(), gen_mask).sqrt() for d in (mean - stored.mean, stored.mean - at_zero))
    ratio = (log_density - stored.log_prob).exp()
    return (off / size.clamp(min=1e-12)).max().item(), (ratio - 1).abs().max().item()


@dataclass
class Record:
    """Some videos of an iteration, as training needs them, on the CPU."""

    videos: range  # positions among all of the iteration's prompts_per_iteration x group_size videos
    condition: torch.Tensor | None  # b c f|1 h w
    text: torch.Tensor  # b n d
    negative_text: torch.Tensor | None  # 1 n d
    transitions: list  # one Transition a step of the window
    rewards: dict  # name -> b


# ----------------------------------------------------------------------------- sampling


def guided_velocity(wan, latents, sigma, condition, text, negative_text, guidance_scale, guidance_scale_2,
                    cfg_batched=False):  # fmt: skip
    """Velocity with classifier-free guidance: uncond + scale (cond - uncond) (Ho & Salimans, arXiv 2207.12598).

    latents b c f h w; sigma b on the CPU; text b n d, negative_text b|1 n d. guidance_scale is the high expert's (or
    the single one's), guidance_scale_2 the low one's. At scale 1 the unconditional pass is left out; cfg_batched=True
    runs both passes as one batch of 2 b.
    """
    low = wan_model.route(wan.boundary_ratio, sigma) == "low"
    scale = guidance_scale_2 if low else guidance_scale
    if scale == 1.0:
        return wan_model.velocity(wan, latents, sigma, condition, text)
    negative_text = negative_text.expand_as(text)
    if cfg_batched:
        twice = [torch.cat([x, x]) if x is not None else None for x in (latents, sigma, condition)]
        conditional, unconditional = wan_model.velocity(wan, *twice, torch.cat([text, negative_text])).chunk(2)
    else:
        conditional = wan_model.velocity(wan, latents, sigma, condition, text)
        unconditional = wan_model.velocity(wan, latents, sigma, condition, negative_text)
    return unconditional + scale * (conditional - unconditional)


@torch.no_grad()
def sample(wan, noise, condition, text, negative_text, sigmas, guidance_scale, guidance_scale_2, cfg_batched=False,
           law="flow", noise_level=0.0, window=(), generators=(), progress=None):  # fmt: skip
    """From noise to latents: stochastic steps of a law inside the window, Euler's ODE steps x + v dt outside it.

    noise b c f h w; sigmas k+1 from sigma_grid; condition, texts and guidance as in guided_velocity; generators: one a
    sample, on the CPU, for the noise of its stochastic steps. progress: a label for a bar, None for no bar.
    -> latents b c f h w with the given frame restored, list of Transition (one a step of the window).
    """
    latents, transitions = noise.float(), []
    gen_mask = wan_model.generated_mask(wan, latents, condition)
    grid = sigmas.tolist()
    for i in tqdm(range(len(grid) - 1), desc=progress, leave=False, disable=None if progress else True):
        sigma = sigmas[i].expand(len(latents))
        v = guided_velocity(wan, latents, sigma, condition, text, negative_text, guidance_scale, guidance_scale_2,
                            cfg_batched)  # fmt: skip
        if i not in window:
            latents = latents + v * (grid[i + 1] - grid[i])
            continue
        mean, std = transition(law, latents, v, grid[i], grid[i + 1], grid[1], noise_level)
        drawn = torch.stack([torch.randn(latents.shape[1:], generator=g) for g in generators]).to(latents.device)
        following = wan_model.clamp_given(wan, mean + std * drawn, condition)
        log_density = log_prob(law, following, mean, std, gen_mask)
        transitions.append(Transition(i, latents.cpu(), following.cpu(), mean.cpu(), log_density.cpu()))
        latents = following
    return wan_model.clamp_given(wan, latents, condition), transitions
