"""Held-out clips: their loss at fixed noise, and whole videos next to what really happened, scored beside trivial ones.

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
import judge
import latent_cache
import model as wan_model
import sampler
import video
from geometry import denormalise_points
from guard import UserError

MOVED = 10  # of 255: a pixel of the recording that differs from the given frame by more, in any channel, has moved
SCORES = ("psnr", "moved_psnr", "ssim", "point_mm", "point_median_mm", "success")  # that a clip may have


@torch.no_grad()
def held_out_loss(wan, cache, experts, config, rank, world_size, device):
    """Mean squared error of the velocity on held-out clips, fixed noise and sigmas.

    -> {"val_loss/high": ..., "val_loss/low": ..., "val_loss/sigma 0.951": ..., ...}; the sigmas are the mid-points of
    val_sigmas bins of equal probability in each expert's range.
    """
    windows = cache.val[: config["num_val_windows"]]
    items, weights = fsdp.share_out(len(windows), rank, world_size)
    size, losses = config["batch_size"], {}
    for expert in experts:
        of_bins = []
        bins = flow.bin_sigmas(expert, wan.boundary_ratio, config["shift"], config["val_sigmas"])
        for sigma in tqdm(bins, f"validation {expert}", leave=False, disable=None if rank == 0 else True):
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
        losses[f"val_loss/{expert}"] = float(np.mean(of_bins))
    return losses


def gives_frame(wan, config):
    """Whether the model is given the first frame: always, but for t2v with clamp_first_frame=False."""
    return wan.kind != "t2v" or config["clamp_first_frame"]


def ground_truth(demos, window, config, box, device):
    """-> the same cells from the recording, and {view: valid f h w} of its points."""
    size = config["cell_height"], config["cell_width"]
    cells, valid = {}, {}
    for modality in ("rgb", "pointmap") if box is not None else ("rgb",):
        of_views, valid = robot_data.window_cells(demos, window, modality, config["num_frames"], size, box, device)
        cells |= {(modality, view): cell for view, cell in of_views.items()}
    return cells, valid


def as_seen(cell):
    """Pixels 3 f h w -> frames as stored, uint8 f h w 3, on the cell's device (SSIM is slow on a CPU)."""
    return torch.as_tensor(video.to_uint8(cell), device=cell.device)


def task_of(demos, window):
    """The instruction that the judge knows and the cameras, a dict a view, with which it sees; None where it can't."""
    prompt = demos.prompts[window.demo]
    if judge.direction(prompt) is None or len(demos.views) < 2 or not demos.has_depth(window.demo):
        return None
    try:
        cameras = [demos.camera(window, view, 1) for view in demos.views]
    except UserError:  # nothing that is trained needs them
        return None
    return prompt, [dict(intrinsics=K[0].tolist(), extrinsics=E[0].tolist(), size=depth.shape[1:])
                    for depth, K, E in cameras]


def scores(cells, truth, valid, box, task=None):
    """PSNR (dB) and SSIM of RGB, PSNR of what moved, and for pointmaps the distance to the true point in mm, mean and
    median over pixels; with a task (see task_of) whether the video follows its instruction: success 1 or 0.

    Over the generated frames: the given one is left out, held frames of padded clips are not. What moved are the pixels
    that the recording has changed since the given frame: no moved_psnr where there are none.
    """
    names = [name for name in cells if name[0] == "rgb"]
    got, want = [as_seen(cells[name]) for name in names], [as_seen(truth[name]) for name in names]
    pairs = [(a[1:], b[1:]) for a, b in zip(got, want, strict=True)]
    result = {"psnr": float(np.mean([video.psnr(*pair) for pair in pairs]))}
    moved = [((frames[1:].int() - frames[:1].int()).abs() > MOVED).any(-1) for frames in want]  # f h w each
    if any(mask.any() for mask in moved):
        sides = ([side[mask] for side, mask in zip(sides, moved, strict=True)] for sides in zip(*pairs, strict=True))
        result["moved_psnr"] = video.psnr(*map(torch.cat, sides))
    if min(pairs[0][0].shape[1:3]) >= video.SSIM_WINDOW:
        result["ssim"] = float(np.mean([video.ssim(*pair) for pair in pairs]))
    if box is not None:
        distances = []
        for view, known in valid.items():
            there, true = (denormalise_points(c["pointmap", view].movedim(0, -1), box) for c in (cells, truth))
            distances.append(1000 * (there - true).norm(dim=-1)[1:][known[1:]])  # of f h w 3
        distances = torch.cat(distances)
        result["point_mm"], result["point_median_mm"] = distances.mean().item(), distances.median().item()
    if task:
        prompt, cameras = task
        views = torch.stack([cells[name] for name in names]).transpose(1, 2) / 2 + 0.5  # v f 3 h w
        result["success"] = float(judge.follows(judge.cube_moved(views, cameras), prompt))
    return result


def mean_scores(clips):
    """Scores of this rank's clips, a dict each -> means over all ranks' clips that have the score. Collective."""
    sums = [sum(clip.get(name, 0.0) for clip in clips) for name in SCORES]
    counts = [float(sum(name in clip for clip in clips)) for name in SCORES]
    totals = fsdp.reduce_sum(sums + counts)
    return {name: totals[i] / totals[i + len(SCORES)] for i, name in enumerate(SCORES) if totals[i + len(SCORES)]}


def frames_of(cells):
    """Cells -> one picture a frame, uint8 f H W 3; a pointmap's x, y, z are its red, green, blue."""
    return video.to_uint8(robot_data.join_cells(cells))


@torch.no_grad()
def held_out_videos(wan, cache, demos, config, step, rank, world_size, device):
    """Generate num_val_videos whole clips at training resolution, write them beside the truth, score them.

    samples/step_000120.mp4 (generated left, recorded right) and .png (given frame, generated, recorded), _1, _2, ...
    for further clips -> those of SCORES that they have, means over the clips.
    """
    windows = cache.val[: config["num_val_videos"]]
    vae = encoders.load_vae(config["model"], device)
    sigmas = flow.sigma_grid(config["num_inference_steps"], config["shift"])
    negative = cache.text[cache.negative_index][None].to(device)
    guidance = config["guidance_scale"], config["guidance_scale_2"] or config["guidance_scale"]
    clips = []
    for item, weight in zip(*fsdp.share_out(len(windows), rank, world_size), strict=True):
        window = windows[item]
        latents, condition, text = latent_cache.collate([cache.sample(window)], cache.text, device,
                                                        gives_frame(wan, config))
        noise = flow.randn(latents.shape[1:], config["seed"], flow.VALIDATION, item)[None].to(device)
        label = "validation video" if rank == 0 else None
        generated, _ = sampler.sample(wan, noise, condition, text, negative, sigmas, *guidance, progress=label)
        with fsdp.all_ranks_agree():  # each writes its own
            if not weight:
                continue
            cells = sampler.decode_cells(vae, generated[0], cache.modalities, cache.views)
            truth, valid = ground_truth(demos, window, config, cache.box, device)
            clips.append(scores(cells, truth, valid, cache.box, task_of(demos, window)))
            got, want = frames_of(cells), frames_of(truth)
            path = os.path.join(config["out_dir"], "samples", f"step_{step:06d}" + (f"_{item}" if item else ""))
            video.write_mp4(f"{path}.mp4", np.concatenate([got, want], axis=2), config["fps"])
            rows = [("given", want[:1]), ("generated", got), ("recorded", want)]
            video.contact_sheet(f"{path}.png", rows, title=demos.prompts[window.demo])
    return mean_scores(clips)


@torch.no_grad()
def floor_and_ceiling(cache, demos, config, rank, world_size, device):
    """What the scores of held_out_videos mean: those of the given frame repeated and of the recording itself.

    Both after the VAE's round trip, cell by cell -> {"floor/psnr": ..., "ceiling/psnr": ..., ...}; constant in a run.
    """
    windows = cache.val[: config["num_val_videos"]]
    vae = encoders.load_vae(config["model"], device)
    clips = {"floor": [], "ceiling": []}
    mine = windows[rank::world_size]
    for window in tqdm(mine, "floor and ceiling", leave=False, disable=None if rank == 0 else True):
        truth, valid = ground_truth(demos, window, config, cache.box, device)
        still = {name: cell[:, :1].expand_as(cell) for name, cell in truth.items()}
        for bound, shown in (("floor", still), ("ceiling", truth)):
            cells = {name: encoders.decode(vae, encoders.encode(vae, cell[None]))[0] for name, cell in shown.items()}
            clips[bound].append(scores(cells, truth, valid, cache.box, task_of(demos, window)))
    return {f"{bound}/{name}": mean for bound in clips for name, mean in mean_scores(clips[bound]).items()}


def in_a_line(row):
    """An evaluation as it is printed, scores between their floor and ceiling: "psnr 25.91 (20.29..27.80)"."""
    texts = []
    for name, value in row.items():
        bounds = [f"{row[key]:#.4g}" for key in (f"floor/{name}", f"ceiling/{name}") if key in row]
        if "sigma" not in name and not name.startswith(("floor/", "ceiling/")):
            texts.append(f"{name} {value:#.4g}" + (f" ({'..'.join(bounds)})" if bounds else ""))
    return " | ".join(texts)
