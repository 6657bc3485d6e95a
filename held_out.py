"""Held-out prompts: rewards of a policy's videos, and the same noise before training and now, side by side."""

import math
import os

import numpy as np
from tqdm import tqdm

import flow
import fsdp
import reward
import video
from guard import whole


def score(sampler, rewards, prompts, config, iteration, rank, world_size):
    """Rewards of num_eval_samples videos of held-out prompts -> ({name: mean}, {name: standard error of the mean}).

    The prompts in turn, a video's noise always the same; the first num_eval_videos are written. Ranks share them out.
    """
    positions, weights = fsdp.share_out(config["num_eval_samples"], rank, world_size)
    size, sums = config["rollout_batch"], {name: np.zeros(2) for name in rewards}
    starts = range(0, len(positions), size)
    for start in tqdm(starts, desc="evaluation", leave=False, disable=None if rank == 0 else True):
        chosen, weight = positions[start : start + size], np.array(weights[start : start + size])
        lines = [i % len(prompts) for i in chosen]
        seeds = [flow.seed_of(config["seed"], flow.VALIDATION, i) for i in chosen]
        videos = sampler.generate(prompts, lines, seeds)
        texts, metadata = [prompts.prompts[i] for i in lines], [prompts.metadata[i] for i in lines]
        with fsdp.all_ranks_agree():
            scores = reward.score(rewards, videos, texts, metadata)
            for i, line, frames, counts in zip(chosen, lines, videos, weight, strict=True):
                if counts and i < config["num_eval_videos"]:
                    frames = video.to_uint8(2 * frames.transpose(0, 1) - 1)
                    given = video.to_uint8(prompts.image(line)[:, None]) if prompts.needs_image else frames[:1]
                    write_before_and_after(config, iteration, i, frames, given, prompts.prompts[line])
        for name, values in scores.items():
            sums[name] += [(weight * values.double().numpy()).sum(), (weight * values.double().numpy() ** 2).sum()]
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
        with whole(before) as temporary, open(temporary, "wb") as file:
            np.save(file, frames, allow_pickle=False)
    untrained = np.load(before, allow_pickle=False) if os.path.exists(before) else np.zeros_like(frames)
    path = os.path.join(folder, f"step_{iteration:06d}_{i}")
    video.write_mp4(f"{path}.mp4", np.concatenate([untrained, frames], axis=2), config["fps"])
    rows = [("given", given), ("before", untrained), (f"iteration {iteration}", frames)]
    video.contact_sheet(f"{path}.png", rows, title=prompt)
