"""Flow-GRPO: reinforcement learning of Wan 2.2 with group-relative advantages, one process or many.

    make tiny                                          # the tiny world, its fine-tuned base model, then this script
    python train_grpo.py                               # the same again: reward on held-out prompts rises in minutes
    torchrun --nproc_per_node=2 train_grpo.py config/wan22_ti2v_grpo.py --model=Wan-AI/Wan2.2-TI2V-5B-Diffusers \\
        --data_jsonl=train.jsonl --eval_data_jsonl=val.jsonl --eval_interval=20

One iteration (Flow-GRPO, arXiv 2505.05470):
    1. roll out    group_size videos for each of a few prompts. In a window of steps the sampler is an SDE with the same
                   marginals as the flow: each of those steps is a draw from a Gaussian. Each video gets a reward.
    2. compare     what do the old policy and the reference say of those steps?
    3. advantages  how much better is a video than the others of its prompt?
    4. train       for each video and step of the window: how much more probable is that step under the policy now?
                   ratio = exp(log_prob - old_log_prob), loss = max(-A ratio, -A clip(ratio, 1 - eps, 1 + eps))
Trained are LoRA adapters (or all weights with lora_rank=0); the reference of the KL is the policy before training: the
model with its adapters off, or as init_lora brought them. Every draw is a function of (seed, iteration, video): neither
an interruption nor, with one minibatch a pass, the number of GPUs changes a run.
"""

import math
import os
import time
from contextlib import contextmanager, nullcontext
from functools import partial

import numpy as np
import torch
from tqdm import tqdm

import adapters
import artifacts
import checkpoints
import encoders
import flow
import fsdp
import grpo_checks
import held_out
import loop
import model as wan_model
import reward
import rollout as wan_rollout
import sglang_sampler
from configurator import configure, defaults, save_config
from fsdp import say
from guard import Diverged, hold_folder
from latent_cache import contents
from plot import MetricsLog, draw_curves
from prompts import Prompts, group_indices
from sampler import Sampler, guided_velocity

# ----------------------------------------------------------------------------- settings
# model and output
model = "out/tiny_ti2v/model"  # diffusers folder (e.g. a fine-tuned one), hub id, or random:NAME
out_dir = "out/tiny_grpo"  # everything the run leaves behind
resume = True  # go on from out_dir's last checkpoint; False: out_dir must hold none
init_lora = ""  # an exported lora/ folder to start from, e.g. of fine-tuning
dry_run = False  # print sizes and costs, and stop
gpus = 0  # GPUs that a dry run is for; 0: as many as it runs on
gpu_gib = 0.0  # memory of each of them, GiB; 0: this GPU's
gpu = ""  # "h200": seconds an iteration there, and hours of the run
# prompts: lines {"input": prompt, "metadata": {"image_path": ...}}
data_jsonl = "out/tiny/train.jsonl"  # to train on
eval_data_jsonl = "out/tiny/eval.jsonl"  # held out
height = 16  # pixels; images are resized to cover it and centre-cropped
width = 16  # pixels
num_frames = 5  # 4n+1
max_text_tokens = 16  # tokens; 512 for the released models
text_dtype = "bfloat16"  # "float32" | "bfloat16": of the text encoder; float16 overflows in UMT5
negative_prompt = ""  # unconditional text of classifier-free guidance
# rewards
rewards = "ball:1.0"  # name:weight, comma-separated: what is trained (reward.py lists the names)
eval_rewards = "ball_success:1.0,smoothness:1.0"  # logged on held-out prompts, never trained: they show reward hacking
pickscore_model = "yuvalkirstain/PickScore_v1"  # folder or hub id; "random": full size, random weights
pickscore_frames = 4  # frames scored a video, evenly spaced, the given one left out
reward_timeout = 60.0  # seconds an http reward may take
# rollout
prompts_per_iteration = 12  # groups
group_size = 12  # videos a prompt
rollout_batch = 72  # videos at a time, in rollout and in training
num_steps = 10  # of the sampler
shift = 5.0  # of the noise levels; 0: of the checkpoint's scheduler
law = "flow"  # "flow" | "dance" | "cps": the stochastic step
noise_level = 0.7  # of the stochastic steps
num_sde_steps = 2  # steps in a row that are stochastic and trained; the others are ODE steps
sde_window = (0, 5)  # first and last+1 step they may be, drawn once an iteration for all
guidance_scale = 1.0  # of the high-noise expert (or the single one); 1: no guidance
guidance_scale_2 = 0.0  # of the low-noise expert; 0: not set, an error for two experts with guidance
boundary_ratio = 0.0  # sigma where high becomes low; 0: from model_index.json
decode_batch = 72  # videos decoded at a time
# rollouts by SGLang servers (sglang_client.py, sglang_server.py)
rollout = "local"  # "local": in this process | "sglang"
sglang_urls = ""  # servers that run already, http://host:port, comma-separated; or:
sglang_launch = False  # start one on each node, end it with the run
sglang_command = ".venv-sglang/bin/sglang serve"  # what starts it
sglang_args = ""  # more arguments for it, e.g. "--tp-size 2 --num-gpus 2"
sglang_port = 30000  # the first of its ports; others are tried when taken
sglang_devices = ""  # its CUDA_VISIBLE_DEVICES
trainer_devices = ""  # this process's CUDA_VISIBLE_DEVICES
sglang_colocated = False  # server and trainer on the same GPUs: its memory is released while training
sglang_concurrency = 4  # requests in flight a rank
sglang_timeout = 300.0  # seconds a request may take, and a start
sglang_retries = 2  # of a request, and restarts of a server
lora_sync = "disk"  # "disk": by safetensors files that the server sees | "tensor": inside the request, to any machine
lora_sync_dir = "/dev/shm"  # for "disk"
drift_interval = 50  # iterations between comparisons of the server's velocity with the trainer's
# optimisation
lora_rank = 16  # 0: full fine-tuning
lora_alpha = 32.0  # scale alpha / rank; 0: the rank (scale 1)
lora_targets = "to_q,to_k,to_v,to_out.0,ffn.net.0.proj,ffn.net.2"  # linears by the end of their names
max_iterations = 150  # rollouts
num_inner_epochs = 1  # passes over a rollout
num_minibatches = 1  # optimizer steps a pass
lr = 1e-3  # of AdamW, constant after warmup
warmup_iterations = 0  # of linear warmup
weight_decay = 1e-4  # of AdamW
grad_clip = 1.0  # L2 norm
clip_range = 1e-3  # eps of the ratio
advantage_clip = 5.0  # of advantages, absolute
global_std = False  # advantages by the std of all rewards instead of the group's
kl_beta = 0.0  # weight of the KL to the reference
ratio_norm = False  # GRPO-Guard's normalised ratio and step weights (arXiv 2510.22319)
recompute_log_prob = False  # score the old policy with the trainer, not the sampler; always so with servers
ema_decay = 0.7  # of the trained parameters, used for evaluation and export; 0: off
ema_interval = 1  # iterations between its updates
max_bad_steps = 5  # non-finite steps in a row that end the run
seed = 0  # of every draw
# evaluation
eval_interval = 25  # iterations; 0: only before the first and after the last
num_eval_samples = 96  # held-out videos, the prompts in turn, always the same noise
num_eval_videos = 4  # of these written, before and after side by side
num_eval_steps = 10  # of the ODE sampler
fps = 8  # frames a second of the videos written
# system
device = "auto"  # "auto" | "cpu" | "cuda"
dtype = "float32"  # "float32" | "bfloat16": frozen weights and matrix products; trainable weights are always float32
vae_dtype = "float32"  # "float32" | "bfloat16"
checkpointing = "none"  # "none" | "full" | "selective": what is recomputed in the backward pass
compile_blocks = False  # torch.compile each transformer block
dp_replicate = 1  # whole copies of the model
save_interval = 25  # iterations between checkpoints
keep_last = 2  # checkpoints kept; 0: all
config = configure(globals())
MAY_CHANGE = {  # settings that a resumed run may change
    "out_dir", "resume", "dry_run", "rollout", "max_iterations", "eval_interval", "eval_rewards", "fps", "device",
    "checkpointing", "compile_blocks", "dp_replicate", "save_interval", "keep_last", "decode_batch", "max_bad_steps",
    "reward_timeout", "trainer_devices", "drift_interval",
    "lr", "grad_clip", "clip_range", "kl_beta", "noise_level",  # for one that has diverged
    *(name for name in config if name.startswith(("gpu", "num_eval_", "sglang_", "lora_sync"))),
    *(["rollout_batch"] if num_minibatches == 1 else []),  # of which minibatches are made
}
if trainer_devices:
    os.environ["CUDA_VISIBLE_DEVICES"] = trainer_devices  # before CUDA is first asked

# ----------------------------------------------------------------------------- checks, before any weight is loaded
rank, world_size, device = fsdp.init(device)
is_main = rank == 0
stop = fsdp.Stop()
num_ranks = gpus if dry_run and gpus else world_size
lora_alpha = lora_alpha or float(lora_rank)
num_videos = prompts_per_iteration * group_size  # of an iteration
videos_each = num_videos // world_size
mine = range(rank * videos_each, (rank + 1) * videos_each)  # this rank's share

with fsdp.all_ranks_agree():
    grpo_checks.check_settings(config, num_ranks)
    policy = wan_model.describe(model, boundary_ratio, shift)
    shift = config["shift"] = policy.shift
    policy.dtype = getattr(torch, dtype)
    SamplerClass = Sampler
    if rollout == "sglang":
        sglang_sampler.check_settings(config, policy)
        SamplerClass, recompute_log_prob = sglang_sampler.SGLangSampler, True
    belongs_to = artifacts.belongs_to(policy, config)  # what is exported says it
    artifacts.check_start(init_lora, belongs_to)
    num_trained = adapters.check_lora(policy, policy.expert_names, lora_rank, lora_alpha, lora_targets, init_lora)
    latent_shape = encoders.latent_shape(model, num_frames, height, width, names=("height", "width"))  # c f h w
    guidance = wan_model.check_guidance(policy, guidance_scale, guidance_scale_2)
    train_prompts = Prompts(data_jsonl, height, width, needs_image=policy.kind != "t2v")
    eval_prompts = Prompts(eval_data_jsonl, height, width, needs_image=policy.kind != "t2v")
    weights = reward.parse_rewards(rewards)
    checkpoint = None if dry_run else checkpoints.to_resume(out_dir, resume, max_iterations)
    meta = checkpoints.read_meta(checkpoint) if checkpoint else None
    begun_with = config | contents(config, "model", "init_lora", "data_jsonl", "eval_data_jsonl")
    changed = meta and checkpoints.check_same_config(checkpoint, meta["config"], begun_with, MAY_CHANGE, defaults)
    sigmas = flow.sigma_grid(num_steps, shift)
    described = grpo_checks.describe_run(config, policy, latent_shape, guidance, sigmas, device, num_ranks)
say("\n".join(described))
if dry_run:
    fsdp.cleanup()
    raise SystemExit(0)

# ----------------------------------------------------------------------------- rewards, and what makes the videos
with fsdp.all_ranks_agree():
    mesh = fsdp.make_mesh(device, dp_replicate)
    more = reward.parse_rewards(eval_rewards, "eval_rewards") if eval_rewards else []
    all_rewards = reward.load_rewards(dict(weights + more), config, device)  # name -> reward
    train_rewards = {name: all_rewards[name] for name, _ in weights}
    if is_main:
        hold_folder(out_dir)  # a job submitted twice must not touch the servers of the first
phase = loop.Phases(device)
with fsdp.all_ranks_agree():
    sampler = SamplerClass(config, policy, latent_shape, guidance, device, train_prompts, eval_prompts, phase, stop)
say(sampler.begun())

# ----------------------------------------------------------------------------- policy, reference, optimizer, resume
load = partial(wan_model.load_expert, policy, device, seed, lora_rank, lora_alpha, lora_targets, init_lora)
policy.experts = fsdp.load_sharded(policy.expert_names, load, mesh, checkpointing, compile_blocks)
parameters = wan_model.trainable_parameters(policy)
assert sum(p.numel() for p in parameters.values()) == num_trained
# the policy before training: B = 0, or the adapters to start from; a frozen copy where all weights are trained
before_training = {name: p.detach().clone() if init_lora else 0.0 for name, p in parameters.items()
                   if lora_rank and (init_lora or ".lora_B." in name)}
frozen = fsdp.load_sharded(policy.expert_names if kl_beta > 0 and not lora_rank else (),
                           partial(load, trainable=False), mesh, checkpointing, compile_blocks)
optimizer = torch.optim.AdamW(parameters.values(), lr=lr, weight_decay=weight_decay, fused=device.type == "cuda")
ema = fsdp.EMA(parameters, ema_decay) if ema_decay > 0 else None
averages = {"ema": ema.shadow} if ema else {}
start_iteration = meta["step"] if meta else 0
saved_iteration = meta["step"] if meta else -1  # of the last checkpoint
if checkpoint:
    checkpoints.restore(checkpoint, parameters, optimizer, averages)
    say(f"resumed    {checkpoint}: iteration {start_iteration}\nchanged    {changed}")
    if start_iteration >= max_iterations:
        say(f"done       {start_iteration} of {max_iterations} iterations; a larger max_iterations goes on")
steps = loop.OptimizerSteps(optimizer, parameters, grad_clip, max_bad_steps, meta["skipped_steps"] if meta else 0)
say(f"training   {num_trained:,} parameters in {len(parameters)} tensors on {world_size} x {device.type}")
with fsdp.all_ranks_agree():
    if is_main:
        save_config(out_dir, config)
        metrics = MetricsLog(out_dir, start_iteration)


@contextmanager
def reference_policy():
    """Inside, the policy is what it was before training, on the same kernels: untrained, its KL is 0 in bf16 too."""
    with fsdp.swapped_in(parameters, before_training):
        trained, policy.experts = policy.experts, frozen or policy.experts
        yield
        policy.experts = trained


# ----------------------------------------------------------------------------- rollout


def roll_out(iteration, window):
    """This rank's share of an iteration's videos, scored -> list of rollout.Record, or None where a stop was asked."""
    groups = group_indices(len(train_prompts), prompts_per_iteration, iteration, seed)  # a prompt each
    assert len(set(groups)) == prompts_per_iteration, groups
    prompt_of = [groups[n // group_size] for n in mine]
    seeds = [flow.seed_of(seed, iteration, n) for n in mine]
    # a server's numbers are compared first with B = 0, then with a LoRA to be seen, then now and then
    measured = iteration - start_iteration < 2 or iteration % drift_interval == 0
    records, bar = [], tqdm(total=videos_each, desc="rollout", leave=False, disable=None if is_main else True)
    for record, pixels in sampler.roll_out(train_prompts, mine, prompt_of, seeds, window, measured):
        of = [prompt_of[n - mine.start] for n in record.positions]
        texts, metadata = [train_prompts.prompts[i] for i in of], [train_prompts.metadata[i] for i in of]
        with fsdp.all_ranks_agree():
            if not (pixels.isfinite().all() and record.steps[-1].next_latents.isfinite().all()):
                raise Diverged(f"iteration {iteration}: got NaN or infinity in a rollout of {texts[0]!r}: lower lr or "
                               "noise_level")
        with phase("reward"), fsdp.all_ranks_agree():
            record.rewards = reward.score(train_rewards, pixels, texts, metadata)
        records.append(record)
        bar.update(len(of))
    bar.close()
    return records if len(records) * rollout_batch == videos_each else None


def distribution(record, step):
    """What the policy, as it is now, says of a stored step -> rollout.Distribution: the functions that drew it."""
    to = lambda x: x.to(device) if x is not None else None  # noqa: E731
    condition, latents, k, grid = to(record.condition), to(step.latents), step.index, sigmas.tolist()
    velocity = guided_velocity(policy, latents, sigmas[k].expand(len(latents)), condition, to(record.text),
                               to(record.negative_text), **guidance)
    mean, std = wan_rollout.sde_step(law, latents, velocity, grid[k], grid[k + 1], grid[1], noise_level)
    gen_mask = wan_model.generated_mask(policy, latents, condition)
    log_prob = wan_rollout.log_prob(law, to(step.next_latents), mean, std, gen_mask)
    return wan_rollout.Distribution(mean, std, log_prob, gen_mask)


def recompute(records):
    """Let the trainer say how probable the rollout's steps were, with gradients switched on as in training: the
    sampler's kernels may be others -> {"drift/velocity 3", "drift/ratio 3", ..., "drift/velocity", "drift/ratio"}: how
    far off the sampler was at each step and at the worst (rollout.sampler_error), where its numbers are known."""
    worst = {}
    for record in records:
        for step in record.steps:
            ours = distribution(record, step).on_cpu()
            if step.log_prob is not None:
                error = wan_rollout.sampler_error(law, step, ours, sigmas, noise_level)
                for name, value in zip(("drift/velocity", "drift/ratio"), error, strict=True):
                    for key in (f"{name} {step.index}", name):
                        worst[key] = float(np.maximum(worst.get(key, 0.0), value))  # NaN stays
            step.mean, step.log_prob = ours.mean, ours.log_prob
    return dict(zip(worst, fsdp.reduce_max(list(worst.values())), strict=True))


def not_finite(losses, iteration):
    """The prompts of the videos whose loss isn't finite, on any rank. Collective."""
    bad = fsdp.reduce_sum((~losses.isfinite()).float().tolist())
    groups = group_indices(len(train_prompts), prompts_per_iteration, iteration, seed)
    names = {train_prompts.prompts[groups[n // group_size]] for n, count in enumerate(bad) if count}
    return ", ".join(map(repr, sorted(names))) or "the gradient of no single video"


# ----------------------------------------------------------------------------- evaluate, save


def evaluate(iteration):
    """Rewards of held-out videos with the averaged weights: mean and standard error; printed, logged, drawn."""
    started = time.time()
    with ema.swapped_in() if ema else nullcontext():
        sampler.sync(parameters)
        with stop.leaves_at_once():
            means, errors = held_out.score(sampler, all_rewards, eval_prompts, config, iteration, rank, world_size)
    sampler.release()
    say(f"eval {iteration:03d}/{max_iterations} | "
        + " | ".join(f"{name} {means[name]:.4f} +- {errors[name]:.4f}" for name in means)
        + f" | {num_eval_samples} held-out videos, {time.time() - started:.1f} s")
    with fsdp.all_ranks_agree():  # its disk may be full
        if is_main:
            metrics.write({"step": iteration, **{f"eval/{name}": mean for name, mean in means.items()},
                           **{f"eval_error/{name}": error for name, error in errors.items()}})
            draw_curves(out_dir)


export = partial(wan_model.export, out_dir, policy, ema.shadow if ema else parameters, lora_rank, lora_alpha,
                 lora_targets, belongs_to)


def save(iteration):
    """A checkpoint to resume from and, with LoRA, the export; once an iteration."""
    global saved_iteration
    if iteration == saved_iteration:
        return  # nothing was trained since
    saved_iteration = iteration
    state = dict(step=iteration, skipped_steps=steps.skipped, world_size=world_size, config=begun_with)
    checkpoints.save(out_dir, iteration, checkpoints.training_tensors(parameters, optimizer, averages), state,
                     keep_last)
    if lora_rank:
        export()


saving = partial(checkpoints.saving, save, out_dir, start_iteration)  # servers, rewards, images may fail

# ----------------------------------------------------------------------------- the loop
stopped = False
if start_iteration == 0:
    evaluate(0)
elif loop.due(eval_interval, start_iteration, max_iterations):  # interrupted in it?
    if not fsdp.reduce_max([float(is_main and metrics.holds(start_iteration, "eval/"))])[0]:
        evaluate(start_iteration)

for iteration in range(start_iteration, max_iterations):
    phase.begin()

    # 1. roll out and score: an SDE inside the window of steps, the flow's ODE outside
    window = wan_rollout.draw_window(num_sde_steps, sde_window, seed, iteration)
    with saving(iteration):
        sampler.sync(parameters)
        if (records := roll_out(iteration, window)) is not None:
            sampler.release()
    if records is None:
        save(iteration)  # nothing has been trained on this iteration's videos yet
        say(f"stopped: {stop.name}; the same command resumes")
        stopped = True
        break
    pairs = [(record, step) for record in records for step in record.steps]

    # 2. what the old policy and the reference say of those steps
    with phase("log_prob"), saving(iteration):
        drift = recompute(records) if recompute_log_prob else {}
        sampler.check_drift(drift)
        if iteration == start_iteration:
            grpo_checks.self_check(policy, parameters, before_training, records[0], sigmas, distribution, config,
                                   drift)
        with reference_policy():  # of all steps for kl_beta, else of one, to log the KL
            for record, step in pairs if kl_beta > 0 else pairs[:1] if lora_rank else []:
                step.reference_mean = distribution(record, step).mean.detach().cpu()

    # 3. advantages: how much better a video is than the others of its prompt
    each = {name: wan_rollout.of_all_ranks(records, name, num_videos) for name in train_rewards}  # name -> all videos'
    total = reward.mix(each, weights)
    groups = torch.arange(num_videos) // group_size
    advantages, zero_std_groups = reward.group_advantages(total, groups, global_std, advantage_clip)

    # 4. train on (videos, step) pairs, in an order that all ranks share: the experts must agree
    logged = {"ratio": [], "clip_fraction": [], "kl": [], "grad_norm": [], "loss": []}
    for group in optimizer.param_groups:
        group["lr"] = lr * min(1.0, (iteration + 1) / max(1, warmup_iterations))
    with phase("train"):
        for epoch in range(num_inner_epochs):
            order = torch.randperm(len(pairs), generator=flow.seeded("cpu", seed, iteration, epoch, 0)).tolist()
            for minibatch in np.array_split(order, num_minibatches):
                losses, found = torch.zeros(num_videos), []  # of this rank's videos; numbers to log
                for record, step in [pairs[n] for n in minibatch]:
                    A = advantages[list(record.positions)].to(device)  # b
                    now = distribution(record, step)
                    difference, weight = now.log_prob - step.log_prob.to(device), 1.0  # b
                    if ratio_norm:  # GRPO-Guard: ratios centred at 1 and of one scale at all steps, weight 1 / -dt
                        moved = wan_model.masked_mean((now.mean - step.mean.to(device)).square(), now.gen_mask)
                        difference = (difference + moved / (2 * now.std**2)) * now.std
                        weight = 1 / (sigmas[step.index] - sigmas[step.index + 1]).item()
                    ratio = difference.exp()  # b: how much more probable the step has become
                    clipped = ratio.clamp(1 - clip_range, 1 + clip_range)
                    loss = weight * torch.maximum(-A * ratio, -A * clipped)  # b
                    numbers = dict(ratio=ratio, clip_fraction=((ratio - 1).abs() > clip_range).float())
                    if step.reference_mean is not None:  # KL of two Gaussians of the same std
                        moved = (now.mean - step.reference_mean.to(device)).square()
                        numbers["kl"] = wan_model.masked_mean(moved, now.gen_mask) / (2 * now.std**2)  # b
                        loss = loss + kl_beta * numbers["kl"]
                    (loss.mean() / len(minibatch)).backward()
                    losses[list(record.positions)] += loss.detach().cpu()
                    found.append({name: x.mean().item() for name, x in (numbers | {"loss": loss}).items()})
                experts = {wan_model.route(policy.boundary_ratio, sigmas[[pairs[n][1].index]]) for n in minibatch}
                grad_norm, taken = steps.step(losses.sum().item(), experts, f"iteration {iteration}",
                                              partial(not_finite, losses, iteration))
                for row in [*found, {"grad_norm": grad_norm}] if taken else []:
                    for name, value in row.items():
                        logged[name].append(value)
    if ema and (iteration + 1) % ema_interval == 0:
        ema.update()

    # 5. log, evaluate, save
    done = iteration + 1
    means = {name: float(np.mean(values)) for name, values in logged.items() if values}
    means = {name: x / world_size for name, x in zip(means, fsdp.reduce_sum(list(means.values())), strict=True)}
    row = dict(step=done, reward=total.mean().item(), reward_std=total.std(correction=0).item(), **means,
               zero_std_groups=zero_std_groups, lr=optimizer.param_groups[0]["lr"], window=window[0],
               skipped_steps=steps.skipped, **drift, **sampler.logged, **phase.row(),
               **{f"reward/{name}": values.mean().item() for name, values in each.items()})
    kl = f" | kl {row['kl']:.1e}" if "kl" in row else ""
    say(f"step {done:03d}/{max_iterations} | reward {row['reward']:.3f} +- {row['reward_std']:.3f}"
        f" | ratio {row.get('ratio', math.nan):.4f} | clip {row.get('clip_fraction', math.nan):.2f}{kl}"
        f" | gnorm {row.get('grad_norm', math.nan):.1e} | {phase.line()}")
    with fsdp.all_ranks_agree():
        if is_main:
            metrics.write(row)
    if loop.due(save_interval, done, max_iterations) or loop.due(eval_interval, done, max_iterations):
        save(done)  # before evaluating, which may take longer than a scheduler waits
    if loop.due(eval_interval, done, max_iterations):
        evaluate(done)

if not stopped:
    if not lora_rank or start_iteration >= max_iterations:  # adapters with each checkpoint, unless a kill came between
        export()
    say(f"exported   {out_dir}/{'lora' if lora_rank else 'model, a complete diffusers folder'}")
sampler.close()
fsdp.cleanup()
