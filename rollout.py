"""Stochastic steps: the Gaussian that each law draws from, its log-probabilities, and what training keeps of a rollout.

    dx = velocity dsigma                        the flow, integrated from sigma 1 (noise) to 0 (video)
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch

from flow import seeded
from fsdp import reduce_sum
from model import masked_mean

LAWS = ("flow", "dance", "cps")


def sde_step(law, latents, velocity, sigma, sigma_next, sigma_1, noise_level):
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
class Step:
    """A stochastic step of a rollout, kept on the CPU for training: x' ~ N(mean, std^2) given x."""

    index: int  # in the sigma grid
    latents: torch.Tensor  # x, b c f h w
    next_latents: torch.Tensor  # x', b c f h w
    mean: torch.Tensor | None  # under the policy that drew it, b c f h w: by the sampler, or by the trainer
    log_prob: torch.Tensor | None  # of x' under that policy, b; a server tells both only where drift is measured
    reference_mean: torch.Tensor | None = None  # under the reference, b c f h w, where the KL to it is wanted


class Distribution(NamedTuple):
    """What a policy says of a Step: the Gaussian that it draws the next latents from."""

    mean: torch.Tensor  # b c f h w
    std: float
    log_prob: torch.Tensor  # of the latents that were drawn, b
    gen_mask: torch.Tensor  # b 1 f h w

    def on_cpu(self):
        """Its numbers alone: the graph behind them can go."""
        return Distribution(self.mean.detach().cpu(), self.std, self.log_prob.detach().cpu(), self.gen_mask.cpu())


def sampler_error(law, step, ours, sigmas, noise_level):
    """How far the sampler's numbers of a Step are from the trainer's own Distribution, the worst sample -> two floats:

    RMS of the difference of the velocities over the RMS of the sampler's (generated positions), and
    |exp(our log-prob - the sampler's) - 1|, how far off the ratio of the first update would be. All on one device.
    """
    grid, k, x = sigmas.tolist(), step.index, step.latents
    at_zero = sde_step(law, x, torch.zeros_like(x), grid[k], grid[k + 1], grid[1], noise_level)[0]
    # the mean is linear in the velocity, so that its differences measure that
    off, size = (masked_mean(d.square(), ours.gen_mask).sqrt() for d in (ours.mean - step.mean, step.mean - at_zero))
    ratio = (ours.log_prob - step.log_prob).exp()
    return (off / size.clamp(min=1e-12)).max().item(), (ratio - 1).abs().max().item()


@dataclass
class Record:
    """Some videos of an iteration, as training needs them, on the CPU."""

    positions: range  # among all of the iteration's prompts_per_iteration x group_size videos
    condition: torch.Tensor | None  # b c f|1 h w
    text: torch.Tensor  # b n d
    negative_text: torch.Tensor | None  # 1 n d
    steps: list  # one Step for each of the window
    rewards: dict  # name -> b


def of_all_ranks(records, name, num_videos):
    """A reward of all the iteration's videos, in order, on every rank: float64 prompts x members, flat. Collective."""
    everywhere = torch.zeros(num_videos, dtype=torch.float64)
    for record in records:
        everywhere[list(record.positions)] = record.rewards[name].double()
    return torch.tensor(reduce_sum(everywhere.tolist()), dtype=torch.float64)
