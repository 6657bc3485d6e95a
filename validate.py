"""Held-out clips: their loss at fixed noise, whole videos next to what really happened, rewards of a policy's videos.

All ranks run the same number of forwards (FSDP's all-gathers are collective): a rank without a clip of its own repeats
one with weight 0. Noise and noise levels are fixed, so that numbers of different steps and runs compare.
"""

import math
import os

import numpy as np
import torch
from tqdm import tqdm

import data as robot_data
import encoders
import fsdp
import latent_cache
import model as wan_model
import reward
import rollout
import video
from geometry import denormalise_points

VALIDATION = 2**31  # keeps these draws apart from the training steps' in rollout.seeded


def share_out(num_items, rank, world_size):
    """Round-robin: the items of a rank, and weights that are 0 for the repeats that make all ranks' numbers equal."""
    rounds = math.ceil(num_items / world_size)
    positions = [round_ * world_size + rank for round_ in range(rounds)]
    return [position % num_items for position in positions], [float(position < num_items) for position in positions]


@torch.no_grad()
def held_out_loss(wan, cache, experts, config, rank, world_size, device):
    """Mean squared error of the velocity on held-out clips, fixed noise and sigmas.

    -> {"val_loss/high": ..., "val_loss/low": ..., "val_loss/sigma 0.951": ..., ...}; the sigmas are the mid-points of
    val_sigmas bins of equal probability in each expert's range.
    """
    windows = cache.val[: config["num_val_windows"]]
    items, weights = share_out(len(windows), rank, world_size)
    size, losses = config["batch_size"], {}
    num_bins = len(experts) * config["val_sigmas"]
    bar = tqdm(total=num_bins, desc="validation", leave=False, disable=None if rank == 0 else True)
    for expert in experts:
        of_bins = []
        for sigma in rollout.bin_sigmas(expert, wan.boundary_ratio, config["shift"], config["val_sigmas"]):
            total = 0.0
            for start in range(0, len(items), size):
                chosen = items[start : start + size]
                samples = [cache.sample(windows[item]) for item in chosen]
                latents, condition, text = latent_cache.collate(samples, cache.text, device, gives_frame(wan, config))
                shape, seed = latents.shape[1:], config["seed"]
                noise = torch.stack([rollout.randn(shape, seed, VALIDATION, item) for item in chosen])
                error = velocity_error(wan, latents, noise.to(device), sigma.expand(len(chosen)), condition, text)
                total += (error * torch.tensor(weights[start : start + size], device=device)).sum().item()
            of_bins.append(fsdp.reduce_sum([total])[0] / len(windows))
            losses[f"val_loss/sigma {sigma:.3f}"] = of_bins[-1]
            bar.update()
        losses[f"val_loss/{expert}"] = float(np.mean(of_bins))
    bar.close()
    return losses


def gives_frame(wan, config):
    """Whether the model is given the first frame: always, but for t2v with clamp_first_frame=False."""
    return wan.kind != "t2v" or config["clamp_first_frame"]


def velocity_error(wan, latents, noise, sigma, condition, text):
    """The training loss of each sample: mean of (velocity - (noise - x0))^2 over what is generated, float32.

    latents, noise b c f h w; sigma b, float32, on the CPU; condition and text as in model.velocity -> b
    """
    level = sigma.to(latents.device).view(-1, 1, 1, 1, 1)
    noisy = (1 - level) * latents + level * noise
    velocity = wan_model.velocity(wan, noisy, sigma, condition, text)
    gen_mask = wan_model.generated_mask(wan, latents, condition)  # b 1 f h w
    squared = (velocity - (noise - latents)).square().mean(1, keepdim=True)  # b 1 f h w
    return (squared * gen_mask).flatten(1).sum(1) / gen_mask.flatten(1).sum(1)


def decode_cells(vae, latents, modalities, views):
    """Grid latents z F H W -> {(modality, view): pixels 3 f h w in -1..1}; each cell is decoded by itself."""
    cells = robot_data.split_cells(latents, modalities, views)
    return {name: encoders.decode(vae, cell[None])[0] for name, cell in cells.items()}


def ground_truth(demos, window, config, box, device):
    """-> the same cells from the recording, and {view: valid f h w} of its points."""
    size = config["cell_height"], config["cell_width"]
    cells, valid = {}, {}
    for view in demos.views:
        cells["rgb", view] = robot_data.rgb_cell(demos.rgb(window, view, config["num_frames"]), *size, device)
    for view in demos.views if box is not None else []:
        xyz, known = demos.points(window, view, config["num_frames"])
        cells["pointmap", view], valid[view] = robot_data.point_cell(xyz, known, box, *size, device)
    return cells, valid


def as_seen(cell):
    """Pixels 3 f h w -> the generated frames as stored, uint8 f h w 3, on the cell's device (SSIM is slow on a CPU)."""
    return torch.as_tensor(video.to_uint8(cell)[1:], device=cell.device)


def scores(cells, truth, valid, box):
    """PSNR (dB) and SSIM of RGB, and for pointmaps the distance to the true point in mm, mean and median over pixels.

    Over the generated frames: the given one is left out, held frames of padded clips are not.
    """
    result = {}
    pairs = [(as_seen(cells[name]), as_seen(truth[name])) for name in cells if name[0] == "rgb"]
    result["psnr"] = float(np.mean([video.psnr(*pair) for pair in pairs]))
    if min(pairs[0][0].shape[1:3]) >= video.SSIM_WINDOW:
        result["ssim"] = float(np.mean([video.ssim(*pair) for pair in pairs]))
    if box is not None:
        distances = []
        for view, known in valid.items():
            got, want = (
                denormalise_points(c["pointmap", view].movedim(0, -1), box) for c in (cells, truth)
            )  # f h w 3
            distances.append(1000 * (got - want).norm(dim=-1)[1:][known[1:]])
        distances = torch.cat(distances)
        result["point_mm"], result["point_median_mm"] = distances.mean().item(), distances.median().item()
    return result


def frames_of(cells):
    """Cells -> one picture a frame, uint8 f H W 3; a pointmap's x, y, z are its red, green, blue."""
    return video.to_uint8(robot_data.join_cells(cells))


@torch.no_grad()
def held_out_videos(wan, cache, demos, config, step, rank, world_size, device):
    """Generate num_val_videos whole clips at training resolution, write them beside the truth, score them.

    samples/step_000120.mp4 (generated left, recorded right) and .png (given frame, generated, recorded), _1, _2, ...
    for further clips -> {"psnr", "ssim"[, "point_mm", "point_median_mm"]}, means over the clips, and the VAE's
    own round trip of points: "point_floor_mm", "point_floor_median_mm".
    """
    windows = cache.val[: config["num_val_videos"]]
    vae = encoders.load_vae(config["model"], device)
    sigmas = rollout.sigma_grid(config["num_inference_steps"], config["shift"])
    negative = cache.text[cache.negative_index][None].to(device)
    guidance = config["guidance_scale"], config["guidance_scale_2"] or config["guidance_scale"]
    totals = {}
    for item, weight in zip(*share_out(len(windows), rank, world_size), strict=True):
        samples = [cache.sample(windows[item])]
        latents, condition, text = latent_cache.collate(samples, cache.text, device, gives_frame(wan, config))
        noise = rollout.randn(latents.shape[1:], config["seed"], VALIDATION, item)[None].to(device)
        label = "validation video" if rank == 0 else None
        generated, _ = rollout.sample(wan, noise, condition, text, negative, sigmas, *guidance, progress=label)
        if not weight:
            continue
        cells = decode_cells(vae, generated[0], cache.modalities, cache.views)
        truth, valid = ground_truth(demos, windows[item], config, cache.box, device)
        for name, value in scores(cells, truth, valid, cache.box).items():
            totals[name] = totals.get(name, 0.0) + value
        got, want = frames_of(cells), frames_of(truth)
        path = os.path.join(config["out_dir"], "samples", f"step_{step:06d}" + (f"_{item}" if item else ""))
        video.write_mp4(f"{path}.mp4", np.concatenate([got, want], axis=2), config["fps"])
        video.contact_sheet(f"{path}.png", [("given", want[:1]), ("generated", got), ("recorded", want)])
    del vae
    names = ["psnr"] + (["ssim"] if min(config["cell_height"], config["cell_width"]) >= video.SSIM_WINDOW else [])
    names += ["point_mm", "point_median_mm"] if cache.box is not None else []
    means = [total / len(windows) for total in fsdp.reduce_sum([totals.get(name, 0.0) for name in names])]
    result = dict(zip(names, means, strict=True))
    if cache.box is not None:
        result["point_floor_mm"], result["point_floor_median_mm"] = cache.floor_mm["mean"], cache.floor_mm["median"]
    return result


# ----------------------------------------------------------------------------- reinforcement learning


def held_out_rewards(generate, rewards, prompts, config, iteration, rank, world_size):
    """Score num_eval_samples videos of held-out prompts -> ({name: mean}, {name: standard error of the mean}).

    generate: positions -> videos b f 3 h w in 0..1, of the same noise each time; the first num_eval_videos are written.
    Ranks share the positions out.
    """
    positions, weights = share_out(config["num_eval_samples"], rank, world_size)
    size, sums = config["rollout_batch"], {name: np.zeros(2) for name in rewards}
    starts = range(0, len(positions), size)
    for start in tqdm(starts, desc="evaluation", leave=False, disable=None if rank == 0 else True):
        chosen, weight = positions[start : start + size], np.array(weights[start : start + size])
        videos = generate(chosen)
        lines = [i % len(prompts) for i in chosen]
        texts, metadata = [prompts.prompts[i] for i in lines], [prompts.metadata[i] for i in lines]
        with fsdp.all_ranks_agree():
            scores = reward.score(rewards, videos, texts, metadata)
        for name, values in scores.items():
            sums[name] += [(weight * values.double().numpy()).sum(), (weight * values.double().numpy() ** 2).sum()]
        for i, line, frames, counts in zip(chosen, lines, videos, weight, strict=True):
            if counts and i < config["num_eval_videos"]:
                frames = video.to_uint8(2 * frames.transpose(0, 1) - 1)
                given = video.to_uint8(prompts.image(line)[:, None]) if prompts.needs_image else frames[:1]
                write_before_and_after(config, iteration, i, frames, given, prompts.prompts[line])
    means, errors, count = {}, {}, config["num_eval_samples"]
    for name, (total, squares) in sums.items():
        total, squares = fsdp.reduce_sum([total, squares])
        means[name] = total / count
        errors[name] = math.sqrt(max(squares / count - means[name] ** 2, 0.0) / (count - 1))
    return means, errors


def write_before_and_after(config, iteration, i, frames, given, prompt):
    """samples/step_000020_<i>.mp4 (before training left, now right) and .png (given, before, now, under the prompt).

    frames f h w 3 and given 1 h w 3 uint8; the frames of iteration 0 are kept as before_<i>.npy, black if
    num_eval_videos was smaller then.
    """
    folder = os.path.join(config["out_dir"], "samples")
    os.makedirs(folder, exist_ok=True)
    before = os.path.join(folder, f"before_{i}.npy")
    if iteration == 0:
        np.save(before, frames, allow_pickle=False)
    untrained = np.load(before, allow_pickle=False) if os.path.exists(before) else np.zeros_like(frames)
    path = os.path.join(folder, f"step_{iteration:06d}_{i}")
    video.write_mp4(f"{path}.mp4", np.concatenate([untrained, frames], axis=2), config["fps"])
    rows = [("given", given), ("before", untrained), (f"iteration {iteration}", frames)]
    video.contact_sheet(f"{path}.png", rows, title=prompt)
