"""Noise levels: the shifted grid of the sampler, how training draws an expert and a level, the seeds of every draw.

    sigma = shift u / (1 + (shift - 1) u)       u uniform in [0, 1]: more of the time at high noise for shift > 1
"""

import numpy as np
import torch

VALIDATION = 2**31  # keeps these draws apart from the training steps' in flow.seeded


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


# ----------------------------------------------------------------------------- what training draws


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
