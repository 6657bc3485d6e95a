"""Held-out clips: their loss at fixed noise, and whole videos next to what really happened.

All ranks run the same number of forwards (FSDP's all-gathers are collective): a rank without a clip of its own repeats
one with weight 0. Noise and noise levels are fixed, so that numbers of different steps and runs compare.
"""

import os

import numpy as np
import torch
from tqdm import tqdm

import data as robot_data
import encoders
import flow
import fsdp
import latent_cache
import model as wan_model
import sampler
import video
from geometry import denormalise_points


@torch.no_grad()
def held_out_loss(wan, cache, experts, config, rank, world_size, device):
    """Mean squared error of the velocity on held-out clips, fixed noise and sigmas.

    -> {"val_loss/high": ..., "val_loss/low": ..., "val_loss/sigma 0.951": ..., ...}; the sigmas are the mid-points of
    val_sigmas bins of equal probability in each expert's range.
    """
    windows = cache.val[: config["num_val_windows"]]
    items, weights = fsdp.share_out(len(windows), rank, world_size)
    size, losses = config["batch_size"], {}
    num_bins = len(experts) * config["val_sigmas"]
    bar = tqdm(total=num_bins, desc="validation", leave=False, disable=None if rank == 0 else True)
    for expert in experts:
        of_bins = []
        for sigma in flow.bin_sigmas(expert, wan.boundary_ratio, config["shift"], config["val_sigmas"]):
            total = 0.0
            for start in range(0, len(items), size):
                chosen = items[start : start + size]
                samples = [cache.sample(windows[item]) for item in chosen]
                latents, condition, text = latent_cache.collate(samples, cache.text, device, gives_frame(wan, config))
                shape, seed = latents.shape[1:], config["seed"]
                noise = torch.stack([flow.randn(shape, seed, flow.VALIDATION, item) for item in chosen])
                sigmas = sigma.expand(len(chosen))
                error = wan_model.flow_matching_loss(wan, latents, noise.to(device), sigmas, condition, text)
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
    sigmas = flow.sigma_grid(config["num_inference_steps"], config["shift"])
    negative = cache.text[cache.negative_index][None].to(device)
    guidance = config["guidance_scale"], config["guidance_scale_2"] or config["guidance_scale"]
    totals = {}
    for item, weight in zip(*fsdp.share_out(len(windows), rank, world_size), strict=True):
        samples = [cache.sample(windows[item])]
        latents, condition, text = latent_cache.collate(samples, cache.text, device, gives_frame(wan, config))
        noise = flow.randn(latents.shape[1:], config["seed"], flow.VALIDATION, item)[None].to(device)
        label = "validation video" if rank == 0 else None
        generated, _ = sampler.sample(wan, noise, condition, text, negative, sigmas, *guidance, progress=label)
        if not weight:
            continue
        cells = sampler.decode_cells(vae, generated[0], cache.modalities, cache.views)
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
