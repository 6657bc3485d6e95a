"""Videos: prompts, given frames and seeds through text encoder, VAE and the policy's steps, cell by cell.

    dx = velocity dsigma                        integrated from sigma 1 (noise) to 0 (video)
"""

import torch
from tqdm import tqdm

import data as robot_data
import encoders
import model as wan_model
import rollout


def guided_velocity(wan, latents, sigma, condition, text, negative_text, guidance_scale, guidance_scale_2,
                    cfg_batched=False):
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
           law="flow", noise_level=0.0, window=(), generators=(), progress=None):
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
                            cfg_batched)
        if i not in window:
            latents = latents + v * (grid[i + 1] - grid[i])
            continue
        mean, std = rollout.transition(law, latents, v, grid[i], grid[i + 1], grid[1], noise_level)
        drawn = torch.stack([torch.randn(latents.shape[1:], generator=g) for g in generators]).to(latents.device)
        following = wan_model.clamp_given(wan, mean + std * drawn, condition)
        log_density = rollout.log_prob(law, following, mean, std, gen_mask)
        transitions.append(rollout.Transition(i, latents.cpu(), following.cpu(), mean.cpu(), log_density.cpu()))
        latents = following
    return wan_model.clamp_given(wan, latents, condition), transitions


def decode_cells(vae, latents, modalities, views):
    """Grid latents z F H W -> {(modality, view): pixels 3 f h w in -1..1}; each cell is decoded by itself."""
    cells = robot_data.split_cells(latents, modalities, views)
    return {name: encoders.decode(vae, cell[None])[0] for name, cell in cells.items()}
