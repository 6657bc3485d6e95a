"""What train_grpo.py checks: its settings before anything is loaded, itself before the first update."""

import math
import os
from types import SimpleNamespace

import torch

import cost
import fsdp
import model
import rollout
from configurator import check_values
from guard import UserError

WITHOUT = dict(  # what it means that a copy of train_grpo.py has no such setting
    law="flow", noise_level=0.7, num_steps=math.inf, num_sde_steps=1, sde_window=(), ratio_norm=False,
    guidance_scale=1.0, guidance_scale_2=0.0, negative_prompt="none", warmup_iterations=0, max_iterations=math.inf,
    data_jsonl="", prompts_per_iteration=1, group_size=1, rollout_batch=1, num_minibatches=1, rollout="local",
    recompute_log_prob=False, kl_beta=0.0, lora_rank=0)


def check_settings(config, world_size):
    """One UserError for all settings that can't work on so many ranks, whatever the model."""
    c, mistakes = SimpleNamespace(**WITHOUT | config), []
    is_cps = c.law == "cps"
    if c.noise_level <= 0 or (is_cps and c.noise_level > 1):
        mistakes.append(f"noise_level={c.noise_level}: an SDE wants more than 0, e.g. 0.7, and cps at most 1")
    last = c.num_steps - is_cps  # cps draws nothing in the last step
    low, high = c.sde_window if len(c.sde_window) == 2 else (0, 0)
    if "sde_window" in config and not (0 <= low and low + c.num_sde_steps <= high <= last):
        mistakes.append(f"sde_window={c.sde_window}: want (lo, hi), lo >= 0, hi <= {last}, at least "
                        f"num_sde_steps={c.num_sde_steps} apart")
    if c.ratio_norm and is_cps:
        mistakes.append("ratio_norm=True: its correction is for Gaussian log-probs; want law=flow or dance")
    if not c.negative_prompt and (c.guidance_scale != 1 or c.guidance_scale_2 not in (0, 1)):
        mistakes.append('guidance wants a negative prompt: --negative_prompt="..." (or " " for the empty one)')
    if c.warmup_iterations > c.max_iterations:
        mistakes.append(f"warmup_iterations={c.warmup_iterations}: want at most max_iterations={c.max_iterations}, the "
                        "whole run")
    if os.path.isfile(c.data_jsonl):
        with open(c.data_jsonl, "rb") as file:
            num_prompts = sum(bool(line.strip()) for line in file)
        if 0 < num_prompts < c.prompts_per_iteration:
            mistakes.append(f"prompts_per_iteration={c.prompts_per_iteration}: want 1 to {num_prompts}, all there are")
    num_videos, batch = c.prompts_per_iteration * c.group_size, max(c.rollout_batch, 1)
    num_pairs = num_videos // world_size // batch * c.num_sde_steps
    if num_videos % (world_size * batch) and {"prompts_per_iteration", "group_size", "rollout_batch"} <= config.keys():
        fits = "" if num_videos % world_size else f", e.g. rollout_batch={math.gcd(num_videos // world_size, batch)}"
        mistakes.append(f"prompts_per_iteration x group_size = {num_videos} videos: want a multiple of {world_size} "
                        f"ranks x rollout_batch={batch}{fits}")
    elif c.num_minibatches > max(num_pairs, 1):
        mistakes.append(f"num_minibatches={c.num_minibatches}: want at most {num_pairs}, a rank's batches of "
                        "rollout_batch videos x num_sde_steps")
    check_values(config, at_least=dict(
        group_size=2, prompts_per_iteration=1, rollout_batch=1, num_steps=2, num_sde_steps=1, num_minibatches=1,
        num_inner_epochs=1, decode_batch=1, num_eval_steps=1, num_eval_samples=2, num_eval_videos=0, max_text_tokens=1,
        max_iterations=1, ema_interval=1, max_bad_steps=1, dp_replicate=1, eval_interval=0, save_interval=0,
        keep_last=0, warmup_iterations=0, guidance_scale=0, guidance_scale_2=0,
        lora_rank=0, lora_alpha=0, lr=0, weight_decay=0, shift=0, kl_beta=0, ema_decay=0, fps=1, seed=0,
        sglang_concurrency=1, sglang_retries=0, sglang_timeout=1, drift_interval=1, gpus=0, gpu_gib=0,
    ), more_than=dict(clip_range=0, grad_clip=0, advantage_clip=0, reward_timeout=0), below=dict(ema_decay=1),
        at_most=dict(reward_timeout=375),  # seconds: a request is tried four times while the other ranks wait
        one_of=dict(
            text_dtype=("float32", "bfloat16"), dtype=("float32", "bfloat16"),
            vae_dtype=("float32", "bfloat16"), rollout=("local", "sglang"),
            checkpointing=("none", "full", "selective"), law=rollout.LAWS, lora_sync=("tensor", "disk"),
    ), mistakes=mistakes)


def describe_run(config, policy, latent_shape, guidance, sigmas, device, num_ranks):
    """-> lines that tell what will run, before any weight is loaded. UserError as in cost.describe_run."""
    c = WITHOUT | config
    passes = 1 if guidance["guidance_scale"] == guidance["guidance_scale_2"] == 1 else 2
    videos = c["prompts_per_iteration"] * c["group_size"] // num_ranks  # of a rank
    if c["rollout"] == "local":
        rolled = c["num_steps"] + c["num_sde_steps"] * c["recompute_log_prob"]  # steps without a backward pass
    else:
        rolled = c["num_sde_steps"]  # drawn by servers, always scored again
    lines = cost.describe_run(
        policy, config, latent_shape, num_ranks, device, c["rollout_batch"] * passes,
        videos * passes * c["num_sde_steps"] * c["num_inner_epochs"], c["max_iterations"], len(policy.expert_names),
        reference=c["kl_beta"] > 0 and not c["lora_rank"], forwards=videos * passes * rolled)
    sigmas = " ".join(f"{sigma:.3f}" for sigma in sigmas.tolist())
    lines.append(f"grid       {c['num_steps']} steps, shift {c['shift']:g}: {sigmas}")
    lines.append(f"rollout    {c['prompts_per_iteration']} prompts x {c['group_size']}, {c['law']} at noise level "
                 f"{c['noise_level']:g} in {c['num_sde_steps']} steps of {c['sde_window']}, "
                 f"{cost.num_tokens(latent_shape):,} tokens a video, {videos} videos a rank")
    return lines


def self_check(policy, parameters, before_training, record, sigmas, distribution, config, drift):
    """Before the first update of a run: do the rollout's policy, the trainer's and the reference fit together?

    distribution: (record, step) -> rollout.Distribution under the policy as it is then. Prints; raises. Collective.
    """
    fsdp.say(f"self-check {config['prompts_per_iteration']} different prompts, whole groups of {config['group_size']}"
             + (", the given frame unchanged" if policy.kind == "ti2v" else ""))
    fsdp.say(check_first_ratio(lambda step: distribution(record, step).log_prob, record.steps, config["clip_range"],
                               drift))
    if before_training:
        step = record.steps[0]
        expert = model.route(policy.boundary_ratio, sigmas[step.index].view(1))
        ours = {name: value for name, value in before_training.items() if name.startswith(f"{expert}.")}
        fsdp.say(check_reference(lambda: distribution(record, step).mean.detach(), parameters, ours))


def check_first_ratio(log_prob_of, steps, clip_range, sampler_drift):
    """The policy that drew a rollout and the one about to be trained must be the same -> a line that tells so.

    log_prob_of: rollout.Step -> its log-prob b under the trainer's policy. sampler_drift: {} where the stored log-probs
    are the sampler's own, else train_grpo.recompute's. UserError if a ratio is more than clip_range off 1. Collective.
    """
    off = fsdp.reduce_max([((log_prob_of(s).cpu() - s.log_prob).exp() - 1).abs().max().item() for s in steps])
    each = ", ".join(f"{d:.1e} (step {step.index})" for d, step in zip(off, steps, strict=True))
    line = f"self-check ratio of the first update: 1 +- {each}; clip_range {clip_range:g}"
    if sampler_drift:
        line += f"; by the sampler's own log-probs it would be 1 +- {sampler_drift['drift/ratio']:.1e}"
    if not max(off) <= clip_range:
        remedy = "a larger one" if sampler_drift else "recompute_log_prob=True"
        raise UserError(f"before any update the trainer's ratios differ from 1 by {max(off):.1e}, more than "
                        f"clip_range={clip_range:g}: set {remedy}, or dtype=float32 ({line})")
    return line


def check_reference(mean_of, parameters, before_training):
    """The reference is the policy before training -> a line that tells so.

    The same output while nothing was trained, another one after. mean_of: () -> the mean of a stored step under the
    policy with its parameters as they are then; before_training: of that step's expert {name: value before training, a
    tensor or a number}. RuntimeError if it isn't so. Collective.
    """
    moved = [fsdp.full_tensor((parameters[name].detach() - value).abs().sum()).item()
             for name, value in before_training.items()]
    trained_before = sum(moved) > 0  # this expert, which may never have been in a window yet
    nudged = {} if trained_before else {name: torch.full_like(parameters[name].detach(), 0.01)
                                        for name in before_training if ".lora_B." in name}
    mean = mean_of()
    with fsdp.swapped_in(parameters, nudged):  # so that there is something to switch off
        nudge = (mean_of() - mean).abs().max().item()
        with fsdp.swapped_in(parameters, before_training):
            difference = (mean_of() - mean).abs().max().item()
    difference, nudge = fsdp.reduce_max([difference, nudge])
    line = f"self-check reference against policy: {difference:.1e}, want {'more than 0' if trained_before else '0'}"
    if (difference > 0) != trained_before or not (trained_before or nudge > 0):
        raise RuntimeError(f"the reference isn't the policy before training: {line}; a nudge moves it by {nudge:.1e}")
    return line
