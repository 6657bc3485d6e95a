"""Flow-GRPO: reinforcement learning of Wan 2.2 with group-relative advantages, one process or many.

    make tiny                                          # the tiny world, its fine-tuned base model, then this script
    python train_grpo.py                               # the same again: reward on held-out prompts rises in minutes
    torchrun --nproc_per_node=2 train_grpo.py config/wan22_ti2v_grpo.py --model=Wan-AI/Wan2.2-TI2V-5B-Diffusers \\
        --data_jsonl=train.jsonl --eval_data_jsonl=val.jsonl --eval_interval=20

One iteration (Flow-GRPO, arXiv 2505.05470):
    1. roll out    group_size videos for each of a few prompts. In a window of steps the sampler is an SDE with the same
                   marginals as the flow, so that each of those steps is a draw from a Gaussian with a log-probability.
    2. score       every video with a reward; its advantage is how much better it is than its own group
    3. train       for each video and step of the window: how much more probable is that step under the policy now?
                   ratio = exp(log_prob - old_log_prob), loss = max(-A ratio, -A clip(ratio, 1 - eps, 1 + eps))
Trained are LoRA adapters (or all weights with lora_rank=0); the reference of the KL is the policy before training: the
model with its adapters off, or as init_lora brought them. Every draw is a function of (seed, iteration, video): neither
an interruption nor, with one minibatch, the number of GPUs changes a run (more minibatches are drawn from each rank's
own videos).
"""

import math
import os
import time
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from tqdm import tqdm

import adapters
import checkpoints
import cost
import encoders
import flow
import fsdp
import grpo_checks
import held_out
import model as wan_model
import reward
import rollout as wan_rollout
import sampler
import sglang_client
from configurator import configure, save_config
from data import check_sizes
from guard import UserError, hold_folder
from latent_cache import contents
from plot import MetricsLog, draw_curves
from prompts import Prompts, group_indices

# ----------------------------------------------------------------------------- settings
# model and output
model = "out/tiny_ti2v/model"  # diffusers folder (e.g. a fine-tuned one), hub id, or random:NAME
out_dir = "out/tiny_grpo"  # everything the run leaves behind
resume = True  # go on from out_dir's last checkpoint; False: out_dir must hold none
init_lora = ""  # an exported lora/ folder to start from, e.g. of fine-tuning
# prompts: lines {"input": prompt, "metadata": {"image_path": ...}}
data_jsonl = "out/tiny/train.jsonl"  # to train on
eval_data_jsonl = "out/tiny/eval.jsonl"  # held out
height = 16  # pixels; images are resized to cover it and centre-cropped
width = 16  # pixels
num_frames = 5  # 4n+1
max_text_tokens = 16  # tokens; 512 for the released models
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
shift = 5.0  # of the noise levels
law = "flow"  # "flow" | "dance" | "cps": the stochastic step
noise_level = 0.7  # of the stochastic steps
num_sde_steps = 2  # steps in a row that are stochastic and trained; the others are ODE steps
sde_window = (0, 5)  # first and last+1 step they may be, drawn once an iteration for all
guidance_scale = 1.0  # of the high-noise expert (or the single one); 1: no guidance
guidance_scale_2 = 0.0  # of the low-noise expert; 0: not set, an error for two experts with guidance
cfg_batched = False  # both passes of guidance as one batch
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
    "out_dir", "resume", "rollout", "max_iterations", "eval_interval", "eval_rewards",
    "num_eval_samples", "num_eval_videos", "num_eval_steps", "fps", "device", "checkpointing", "compile_blocks",
    "dp_replicate", "save_interval", "keep_last", "decode_batch", "max_bad_steps", "reward_timeout",
    *(name for name in config if name.startswith(("sglang_", "lora_sync"))), "trainer_devices", "drift_interval",
    *(["rollout_batch"] if num_minibatches == 1 else []),  # of which minibatches are made
}
if trainer_devices:
    os.environ["CUDA_VISIBLE_DEVICES"] = trainer_devices  # before CUDA is first asked

# ----------------------------------------------------------------------------- checks, before any weight is loaded
rank, world_size, device = fsdp.init(device)
is_main = rank == 0
stop = fsdp.Stop()
lora_alpha = lora_alpha or float(lora_rank)
num_videos = prompts_per_iteration * group_size  # of an iteration
videos_each = num_videos // world_size  # a rank's share


def say(line):
    if is_main:
        print(line, flush=True)


def prompts_of(iteration):
    """Indices of an iteration's prompts, one a group. UserError if it wants more than there are."""
    return group_indices(len(train_prompts), prompts_per_iteration, iteration, seed)


with fsdp.all_ranks_agree():
    grpo_checks.check_settings(config, world_size)
    wan = wan_model.describe(model, boundary_ratio)
    wan.dtype = getattr(torch, dtype)
    if rollout == "sglang":
        sglang_client.check_settings(config, wan)
        recompute_log_prob = True
    num_trained = adapters.check_lora(wan, wan.expert_names, lora_rank, lora_alpha, lora_targets, init_lora)
    z_dim, stride = encoders.latent_geometry(model)
    check_sizes(num_frames, height, width, stride, names=("height", "width"))
    wan_model.check_guidance(wan, guidance_scale, guidance_scale_2)
    guidance = dict(guidance_scale=guidance_scale, guidance_scale_2=guidance_scale_2 or guidance_scale,
                    cfg_batched=cfg_batched)
    if (guidance_scale != 1 or guidance["guidance_scale_2"] != 1) and not negative_prompt:
        raise UserError('guidance wants a negative prompt: --negative_prompt="..." (or " " for the empty one)')
    train_prompts = Prompts(data_jsonl, height, width, needs_image=wan.kind != "t2v")
    eval_prompts = Prompts(eval_data_jsonl, height, width, needs_image=wan.kind != "t2v")
    prompts_of(0)
    weights = reward.parse_rewards(rewards)
    checkpoint = checkpoints.to_resume(out_dir, resume)
    meta = checkpoints.read_meta(checkpoint) if checkpoint else None
    begun_with = config | contents(config, "model", "init_lora", "data_jsonl", "eval_data_jsonl")
    if meta:
        changed = checkpoints.check_same_config(checkpoint, meta["config"], begun_with, MAY_CHANGE)

with fsdp.all_ranks_agree():
    mesh = fsdp.make_mesh(device, dp_replicate)
sigmas = flow.sigma_grid(num_steps, shift)
eval_sigmas = flow.sigma_grid(num_eval_steps, shift)
latent_shape = (z_dim, (num_frames - 1) // stride[0] + 1, height // stride[1], width // stride[2])
say(f"model      {model}: {wan.kind}, {len(wan.expert_names)} x {cost.count_parameters(wan.config):,} parameters, "
    f"boundary {wan.boundary_ratio}, guidance {guidance_scale:g} (high) "
    f"{guidance['guidance_scale_2']:g} (low)")
num_passes = 1 if guidance_scale == 1 and guidance["guidance_scale_2"] == 1 else 2
estimate = cost.estimate_memory(
    wan.config, cost.num_tokens(latent_shape) * rollout_batch * num_passes, len(wan.expert_names),
    world_size // dp_replicate, wan.dtype, lora_rank, lora_targets, checkpointing, ema_decay > 0,
    reference=kl_beta > 0 and not lora_rank)
say(f"memory     about {sum(estimate.values()):.1f} GiB a GPU in training, without VAE and rewards: weights "
    f"{estimate['weights']:.1f}, trained state {estimate['state']:.1f}, activations {estimate['activations']:.1f}")
if device.type == "cuda" and sum(estimate.values()) > torch.cuda.get_device_properties(device).total_memory / 2**30:
    say("warning    that is more than the GPU has: lower rollout_batch, set checkpointing=full, or use more GPUs")
say(f"grid       {num_steps} steps, shift {shift:g}: " + " ".join(f"{sigma:.3f}" for sigma in sigmas.tolist()))
say(f"rollout    {prompts_per_iteration} prompts x {group_size}, {law} at noise level {noise_level:g} in "
    f"{num_sde_steps} steps of {sde_window}, {cost.num_tokens(latent_shape):,} tokens a video, "
    f"{videos_each} videos a rank")

# ----------------------------------------------------------------------------- rewards, text, VAE
with fsdp.all_ranks_agree():
    more = reward.parse_rewards(eval_rewards, "eval_rewards") if eval_rewards else []
    all_rewards = reward.load_rewards(dict(weights + more), config, device)  # name -> reward
    train_rewards = {name: all_rewards[name] for name, _ in weights}
    if is_main:
        hold_folder(out_dir)  # a job submitted twice must not touch the servers of the first
server = None
if rollout == "sglang":  # text encoder and VAE are the server's
    with fsdp.all_ranks_agree():
        server = sglang_client.connect(config, wan, latent_shape, guidance, sigmas, device, rank, world_size,
                                       train_prompts, lambda: stop.requested)
    say(f"servers    {', '.join(server.current_urls())}: each made a video of {train_prompts.prompts[0]!r}")
else:
    tokenizer, text_encoder = encoders.load_text_encoder(model, device)
    distinct = sorted({*train_prompts.prompts, *eval_prompts.prompts, negative_prompt})
    for line in encoders.text_warnings(tokenizer, text_encoder, distinct, max_text_tokens):
        say(line)
    text_of = {}  # prompt -> its own tokens, n d: the zeros after them would be 4 MB a prompt
    for prompt in tqdm(distinct, desc="text", leave=False, disable=None if is_main else True):
        embedding = encoders.encode_text(tokenizer, text_encoder, [prompt], max_text_tokens)[0].cpu()
        text_of[prompt] = embedding[: int(embedding.any(-1).sum())].to(wan.dtype)
    del tokenizer, text_encoder
    vae = encoders.load_vae(model, device, getattr(torch, vae_dtype))


def conditions(prompts, indices):
    """-> condition b c f|1 h w or None, text b n d, negative text 1 n d for prompts of a file, on the device."""
    condition = None
    if wan.kind != "t2v":
        images = {i: prompts.image(i)[None].to(device) for i in set(indices)}
        encoded = {i: encoders.encode_condition(vae, image, num_frames, wan.kind) for i, image in images.items()}
        condition = torch.cat([encoded[i] for i in indices])
    text = [text_of[prompts.prompts[i]] for i in indices] + [text_of[negative_prompt]]
    text = torch.stack([F.pad(x, (0, 0, 0, max_text_tokens - len(x))) for x in text]).to(device)  # b+1 n d
    return condition, text[:-1], text[-1:]


def decode(latents):
    """Latents b c f h w -> videos b f 3 h w in 0..1, as 8-bit files would hold them."""
    pixels = torch.cat([encoders.decode(vae, chunk) for chunk in latents.split(decode_batch)])  # b 3 f h w
    return ((pixels + 1) * 127.5).round().div(255).transpose(1, 2)


# ----------------------------------------------------------------------------- model, LoRA, sharding
def load_experts(trainable):
    """{expert: sharded transformer}; trainable with adapters (or all weights), or frozen."""
    loaded = {}
    for expert in wan.expert_names:
        with fsdp.all_ranks_agree():
            transformer = wan_model.load_expert(wan, expert, device, seed, trainable, lora_rank, lora_alpha,
                                                lora_targets, init_lora)
        fsdp.wrap_blocks(transformer, checkpointing, compile_blocks)
        loaded[expert] = fsdp.shard(transformer, mesh)
    return loaded


wan.experts = load_experts(trainable=True)
parameters = wan_model.trainable_parameters(wan)
frozen = load_experts(trainable=False) if kl_beta > 0 and not lora_rank else None  # the reference of full fine-tuning
# that of LoRA: B = 0, so that the same compiled kernels run and round alike, or the adapters to start from
before_training = {name: p.detach().clone() if init_lora else None for name, p in parameters.items()
                   if lora_rank and (init_lora or ".lora_B." in name)}
optimizer = torch.optim.AdamW(parameters.values(), lr=lr, weight_decay=weight_decay, fused=device.type == "cuda")
ema = fsdp.EMA(parameters, ema_decay) if ema_decay > 0 else None
averaged = ema.shadow if ema else parameters  # what is evaluated and exported
start_iteration = skipped_steps = 0
saved_iteration = meta["step"] if meta else -1  # of the last checkpoint
if checkpoint:
    saved = checkpoints.saved_names(checkpoint)
    checkpoints.load(checkpoint, checkpoints.training_tensors(parameters, optimizer, ema, saved))
    start_iteration, skipped_steps = meta["step"], meta["skipped_steps"]
    say(f"resumed    {checkpoint}: iteration {start_iteration}")
    say(f"changed    {changed}")
    if start_iteration >= max_iterations:
        say(f"done       {start_iteration} of {max_iterations} iterations; a larger max_iterations goes on")
if sum(p.numel() for p in parameters.values()) != num_trained:
    raise RuntimeError(f"{sum(p.numel() for p in parameters.values()):,} trainable parameters, want {num_trained:,}")
say(f"training   {num_trained:,} parameters in {len(parameters)} tensors on {world_size} x {device.type}")
with fsdp.all_ranks_agree():
    if is_main:
        save_config(out_dir, config)
        metrics = MetricsLog(out_dir, start_iteration)

# ----------------------------------------------------------------------------- rollout


def now():
    """Seconds, with the GPU's queue empty."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def end_phase(name, started, spent):
    """Add to a phase the seconds since `started` and the GPU's peak GiB since the last call -> the time now."""
    seconds, peak = spent.get(name, (0.0, 0.0))
    if device.type == "cuda":
        peak = max(peak, torch.cuda.max_memory_allocated() / 2**30)
        torch.cuda.reset_peak_memory_stats()
    spent[name] = seconds + now() - started, peak
    return now()


def sample_here(iteration, window, videos, prompt_of, spent):
    """Some videos of an iteration by this process -> (rollout.Record without rewards, pixels b f 3 h w in 0..1)."""
    started = now()
    with saving(iteration), fsdp.all_ranks_agree():  # where an image is gone
        condition, text, negative_text = conditions(train_prompts, prompt_of)
    # a video's noise, the first and each step's, comes from one generator of its own
    generators = [flow.seeded("cpu", seed, iteration, n) for n in videos]
    noise = torch.stack([torch.randn(latent_shape, generator=g) for g in generators]).to(device)
    latents, transitions = sampler.sample(wan, noise, condition, text, negative_text, sigmas, **guidance, law=law,
                                              noise_level=noise_level, window=window,
                                              generators=generators)
    started = end_phase("roll", started, spent)
    if wan.kind == "ti2v" and latents.isfinite().all() and not torch.equal(latents[:, :, :1], condition):
        raise RuntimeError("the given frame changed in the rollout")
    pixels = decode(latents)
    end_phase("decode", started, spent)
    on_cpu = [x.cpu() if x is not None else None for x in (condition, text, negative_text)]
    return wan_rollout.Record(videos, *on_cpu, transitions, {}), pixels


def roll_out(iteration, window, spent):
    """This rank's share of an iteration's videos, scored -> list of rollout.Record, or None where SIGTERM came.

    Adds to spent["roll" | "decode" | "reward"].
    """
    prompt_indices = prompts_of(iteration)
    if len(set(prompt_indices)) < prompts_per_iteration:
        raise RuntimeError(f"a prompt stands twice in iteration {iteration}: {prompt_indices}")
    records = []
    starts = range(rank * videos_each, (rank + 1) * videos_each, rollout_batch)
    if server:  # all of them at once: it works on some while others are scored here
        measured = drift_due(iteration)  # in this rank's first batch
        with saving(iteration), fsdp.all_ranks_agree():
            asked = {n: server.submit(train_prompts, prompt_indices[n // group_size],
                                      flow.seed_of(seed, iteration, n), sigmas, window,
                                      measured and n < starts.start + rollout_batch)
                     for n in range(starts.start, starts.start + videos_each)}
    for start in tqdm(starts, desc="rollout", leave=False, disable=None if is_main else True):
        if stop.anywhere():
            if server:
                server.cancel(asked.values())
            return None
        videos = range(start, start + rollout_batch)
        prompt_of = [prompt_indices[n // group_size] for n in videos]
        if server:
            started = now()
            with saving(iteration), fsdp.all_ranks_agree():
                record, pixels, in_server = server.collect(videos, [asked.pop(n) for n in videos], window, sigmas)
            pixels = pixels.to(device)
            end_phase("roll", started, spent)
            spent["in_server"] = spent.get("in_server", (0.0, 0.0))[0] + in_server, 0.0
        else:
            record, pixels = sample_here(iteration, window, videos, prompt_of, spent)
        with fsdp.all_ranks_agree():
            if not (pixels.isfinite().all() and record.transitions[-1].next_latents.isfinite().all()):
                raise UserError(f"iteration {iteration}: got NaN or infinity in a rollout of "
                                f"{train_prompts.prompts[prompt_of[0]]!r}: lower lr or noise_level")
        started = now()
        with saving(iteration), fsdp.all_ranks_agree():
            record.rewards = reward.score(train_rewards, pixels, [train_prompts.prompts[i] for i in prompt_of],
                                          [train_prompts.metadata[i] for i in prompt_of])
        end_phase("reward", started, spent)
        records.append(record)
    return records


def give_servers(tensors):
    """The LoRA sync: gathered on all ranks, sent whole by the rank responsible for a server, agreed on by all."""
    started = time.perf_counter()
    adapters = wan_model.by_expert(fsdp.gather(tensors, wanted=bool(server.responsible)))
    if sglang_colocated and device.type == "cuda":
        torch.cuda.empty_cache()  # what training's peak left reserved is the server's now
        fsdp.barrier()
    with fsdp.all_ranks_agree():
        if server.responsible:
            if sglang_colocated:
                server.memory("resume")
            server.sync(adapters, lora_rank, lora_alpha, wan.dtype, lora_sync, lora_sync_dir)
    failed = [float(url in server.down and url in server.responsible) for url in server.urls]
    server.down = {url: server.down.get(url, f"{url} failed at the sync")
                   for url, down in zip(server.urls, fsdp.reduce_max(failed), strict=True) if down}
    server.synced()
    return time.perf_counter() - started


def release_servers():
    """The GPU is the trainer's until the next sync."""
    if server and sglang_colocated:
        fsdp.barrier()  # every rank has its videos
        with fsdp.all_ranks_agree():
            if server.responsible:
                server.memory("release")


def from_all_ranks(records, name):
    """A reward of all the iteration's videos, in order, on every rank -> float64 prompts x members."""
    everywhere = torch.zeros(num_videos, dtype=torch.float64)
    for record in records:
        everywhere[record.videos.start : record.videos.stop] = record.rewards[name].double()
    return torch.tensor(fsdp.reduce_sum(everywhere.tolist()), dtype=torch.float64)


# ----------------------------------------------------------------------------- the policy's loss


def score(policy, record, transition):
    """Mean b c f h w, std, log-prob b and gen_mask of a stored transition under a policy: the function that drew it."""
    to = lambda x: x.to(device) if x is not None else None  # noqa: E731
    condition, latents, k = to(record.condition), to(transition.latents), transition.step
    v = sampler.guided_velocity(policy, latents, sigmas[k].expand(len(latents)), condition, to(record.text),
                                to(record.negative_text), **guidance)
    grid = sigmas.tolist()
    mean, std = wan_rollout.transition(law, latents, v, grid[k], grid[k + 1], grid[1], noise_level)
    gen_mask = wan_model.generated_mask(policy, latents, condition)
    return mean, std, wan_rollout.log_prob(law, to(transition.next_latents), mean, std, gen_mask), gen_mask


def clipped_loss(record, transition, advantages):
    """Loss b of one step of some videos, and what to log of it.

    ratio = exp(log_prob - old_log_prob); loss = max(-A ratio, -A clip(ratio)) + kl_beta KL, with
    KL = mean (mean_theta - mean_reference)^2 / (2 std^2) over generated positions, exact as the variances are equal.
    """
    mean, std, log_prob, gen_mask = score(wan, record, transition)
    difference, weight = log_prob - transition.log_prob.to(device), 1.0
    if ratio_norm:  # GRPO-Guard: ratios centred at 1 and of one scale at all steps, gradients weighed by 1 / -dt
        moved = wan_model.masked_mean((mean - transition.mean.to(device)).square(), gen_mask)
        difference = (difference + moved / (2 * std**2)) * std
        weight = 1 / (sigmas[transition.step] - sigmas[transition.step + 1]).item()
    ratio = difference.exp()  # b
    loss = weight * torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1 - clip_range, 1 + clip_range))
    logged = dict(ratio=ratio.mean().item(), clip_fraction=((ratio - 1).abs() > clip_range).float().mean().item())
    if transition.reference_mean is not None:
        moved = (mean - transition.reference_mean.to(device)).square()
        kl = wan_model.masked_mean(moved, gen_mask) / (2 * std**2)
        loss = loss + kl_beta * kl
        logged["kl"] = kl.mean().item()
    return loss, logged


def score_reference(pairs):
    """The means of stored steps under the reference: of all for kl_beta, else of one, to log the KL.

    With gradients switched on, as in training: other kernels would round otherwise, and the KL not begin at 0. (The
    frozen copy of full fine-tuning has no gradients; compiled, it may round otherwise.)
    """
    if kl_beta > 0 or lora_rank:
        with fsdp.swapped_in(parameters, before_training):
            for record, t in pairs if kl_beta > 0 else pairs[:1]:
                t.reference_mean = score(reference, record, t)[0].detach().cpu()


def not_finite(losses, iteration):
    """The prompts of the videos whose loss isn't finite, on any rank. Collective."""
    bad = fsdp.reduce_sum((~losses.isfinite()).float().tolist())
    prompt_indices = prompts_of(iteration)
    names = {train_prompts.prompts[prompt_indices[n // group_size]] for n, count in enumerate(bad) if count}
    return ", ".join(map(repr, sorted(names))) or "the gradient of no single video"


def drift_due(iteration):
    """First with B = 0, then with a LoRA to be seen, then now and then."""
    return iteration - start_iteration < 2 or iteration % drift_interval == 0


def rescore(records):
    """Let the trainer say how probable the rollout's steps were, with gradients switched on as in training: the
    sampler's kernels may be others -> {"drift/velocity 3", "drift/ratio 3", ..., "drift/velocity", "drift/ratio"}, the
    worst (rollout.drift) of each step and of all, on any rank, of the videos where the sampler's numbers are known."""
    row = {}
    for record in records:
        for t in record.transitions:
            mean, _, log_prob, gen_mask = score(wan, record, t)
            mean, log_prob = mean.detach().cpu(), log_prob.detach().cpu()  # and the graph is gone
            if t.log_prob is not None:
                drift = wan_rollout.drift(law, t, mean, log_prob, gen_mask.cpu(), sigmas, noise_level)
                for name, value in zip(("drift/velocity", "drift/ratio"), drift, strict=True):
                    for key in (f"{name} {t.step}", name):
                        row[key] = float(np.maximum(row.get(key, 0.0), value))  # NaN stays
            t.mean, t.log_prob = mean, log_prob
    return dict(zip(row, fsdp.reduce_max(list(row.values())), strict=True))


def self_check(record, drift):
    """Before the first update of a run: do the rollout's policy, the trainer's and the reference fit together?"""
    say(f"self-check {prompts_per_iteration} different prompts, whole groups of {group_size}"
        + (", the given frame unchanged" if wan.kind == "ti2v" else ""))
    say(grpo_checks.check_first_ratio(lambda t: score(wan, record, t)[2], record.transitions, clip_range, drift))
    if lora_rank:
        step = record.transitions[0]
        expert = wan_model.route(wan.boundary_ratio, sigmas[step.step].view(1))
        ours = {name: value for name, value in before_training.items() if name.startswith(f"{expert}.")}
        say(grpo_checks.check_reference(lambda: score(wan, record, step)[0].detach(), parameters, ours))


# ----------------------------------------------------------------------------- evaluate, save


@torch.no_grad()
def generate(positions):
    """Held-out videos b f 3 h w in 0..1 by the ODE sampler: the prompts in turn, a position's noise always the same."""
    if server:
        with fsdp.all_ranks_agree():
            asked = [server.submit(eval_prompts, i % len(eval_prompts),
                                   flow.seed_of(seed, flow.VALIDATION, i), eval_sigmas)
                     for i in positions]
            return torch.stack([future.result().pixels for future in asked]).to(device) / 255
    condition, text, negative_text = conditions(eval_prompts, [i % len(eval_prompts) for i in positions])
    noise = torch.stack([flow.randn(latent_shape, seed, flow.VALIDATION, i) for i in positions]).to(device)
    return decode(sampler.sample(wan, noise, condition, text, negative_text, eval_sigmas, **guidance)[0])


def evaluate(iteration):
    """Rewards of held-out videos with the averaged weights: mean and standard error; printed, logged, drawn."""
    started = time.time()
    if server:
        give_servers(averaged)
    with stop.leaves_at_once(), ema.swapped_in() if ema else nullcontext():
        means, errors = held_out.held_out_rewards(generate, all_rewards, eval_prompts, config, iteration, rank,
                                                  world_size)
    release_servers()
    say(f"eval {iteration:03d}/{max_iterations} | "
        + " | ".join(f"{name} {means[name]:.4f} +- {errors[name]:.4f}" for name in means)
        + f" | {num_eval_samples} held-out videos, {time.time() - started:.1f} s")
    if is_main:
        metrics.write({"step": iteration, **{f"eval/{name}": mean for name, mean in means.items()},
                       **{f"eval_error/{name}": error for name, error in errors.items()}})
        draw_curves(out_dir)


def due(interval, iteration):
    """Whether something done every `interval` iterations (0: only at the end) comes after an iteration."""
    return iteration == max_iterations or (interval > 0 and iteration % interval == 0)


def export():
    """The (averaged) adapters, or all weights of full fine-tuning, for other tools. Collective."""
    whole = wan_model.by_expert(fsdp.gather(averaged))
    if is_main:
        wan_model.export(out_dir, wan, whole, lora_rank, lora_alpha, lora_targets)


def save(iteration):
    """A checkpoint to resume from and, with LoRA, the export; once an iteration."""
    global saved_iteration
    if iteration == saved_iteration:
        return  # nothing was trained since
    saved_iteration = iteration
    state = dict(step=iteration, skipped_steps=skipped_steps, world_size=world_size, config=begun_with)
    checkpoints.save(out_dir, iteration, checkpoints.training_tensors(parameters, optimizer, ema), state, keep_last)
    if lora_rank:
        export()


saving = partial(checkpoints.saving, save, out_dir, start_iteration)  # servers, rewards, images may fail


# ----------------------------------------------------------------------------- the loop
reference = replace(wan, experts=frozen) if frozen else wan  # with LoRA: the policy itself, as before training
bad_steps = 0
if start_iteration == 0:
    evaluate(0)
elif due(eval_interval, start_iteration):  # interrupted in it?
    if not fsdp.reduce_max([float(is_main and metrics.holds(start_iteration, "eval/"))])[0]:
        evaluate(start_iteration)

for iteration in range(start_iteration, max_iterations):
    # 1. roll out and score: an SDE inside the window, the flow's ODE outside
    spent = {}  # phase -> seconds, peak GiB
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()  # of loading or an evaluation
    window = wan_rollout.draw_window(num_sde_steps, sde_window, seed, iteration)
    if server:
        with saving(iteration):
            spent["sync"] = give_servers(parameters), 0.0
    records = roll_out(iteration, window, spent)
    if records is None:
        save(iteration)  # nothing has been trained on this iteration's videos yet
        say(f"stopped: {stop.name}; the same command resumes")
        break
    with saving(iteration):
        release_servers()
    started = now()
    drift = rescore(records) if recompute_log_prob else {}
    if server and drift:
        with saving(iteration), fsdp.all_ranks_agree():
            for line in sglang_client.check_drift(drift, wan, guidance, clip_range):
                say(line)
    if iteration == start_iteration:
        self_check(records[0], drift)
    pairs = [(record, t) for record in records for t in record.transitions]
    score_reference(pairs)
    started = end_phase("score", started, spent)

    # 2. advantages: how much better a video is than the others of its prompt
    each = {name: from_all_ranks(records, name) for name in train_rewards}  # name -> prompts x members, flat
    total = reward.mix(each, weights)
    groups = torch.arange(len(total)) // group_size
    advantages, zero_std_groups = reward.group_advantages(total, groups, global_std, advantage_clip)

    # 3. train on (videos, step) pairs, in an order that all ranks share: the experts must agree
    logged = {"ratio": [], "clip_fraction": [], "kl": [], "grad_norm": [], "loss": []}
    for group in optimizer.param_groups:
        group["lr"] = lr * min(1.0, (iteration + 1) / max(1, warmup_iterations))
    for epoch in range(num_inner_epochs):
        order = torch.randperm(len(pairs), generator=flow.seeded("cpu", seed, iteration, epoch, 0)).tolist()
        for minibatch in np.array_split(order, num_minibatches):
            losses, found = torch.full((num_videos,), 0.0), []  # of this rank's videos; numbers to log
            for n in minibatch:
                record, t = pairs[n]
                mine = slice(record.videos.start, record.videos.stop)
                loss, numbers = clipped_loss(record, t, advantages[mine].to(device, torch.float32))
                (loss.mean() / len(minibatch)).backward()
                losses[mine] += loss.detach().cpu()
                found.append(numbers | {"loss": loss.mean().item()})
            grad_norm = fsdp.full_tensor(torch.nn.utils.clip_grad_norm_(parameters.values(), grad_clip)).item()
            # the same on all ranks
            finite = math.isfinite(fsdp.reduce_sum([grad_norm + losses.sum().item()])[0])
            if finite:
                optimizer.step()
                for numbers in (*found, {"grad_norm": grad_norm}):
                    for name, value in numbers.items():
                        logged[name].append(value)
            optimizer.zero_grad(set_to_none=True)
            skipped_steps, bad_steps = skipped_steps + (not finite), 0 if finite else bad_steps + 1
            if not finite:
                told = f"step skipped on all ranks, not finite: {not_finite(losses, iteration)}"
                say(f"warning    iteration {iteration}: {told}")
                with fsdp.all_ranks_agree():
                    if bad_steps >= max_bad_steps:
                        raise UserError(f"{bad_steps} non-finite steps in a row, now in iteration {iteration}: {told}: "
                                        "lower lr")
    if ema and (iteration + 1) % ema_interval == 0:
        ema.update()

    # 4. log, evaluate, save
    end_phase("train", started, spent)
    done = iteration + 1
    means = {name: float(np.mean(values)) for name, values in logged.items() if values}
    means = {name: total / world_size for name, total in zip(means, fsdp.reduce_sum(list(means.values())), strict=True)}
    row = dict(step=done, reward=total.mean().item(), reward_std=total.std(correction=0).item(), **means,
               zero_std_groups=zero_std_groups, lr=optimizer.param_groups[0]["lr"], window=window[0],
               skipped_steps=skipped_steps)
    row |= drift | ({"lora_version": server.version} if server else {})
    for name, (seconds, peak) in spent.items():
        row |= {f"seconds/{name}": seconds} | ({f"gib/{name}": peak} if peak else {})
    row |= {f"reward/{name}": values.mean().item() for name, values in each.items()}
    kl = f" | kl {row['kl']:.1e}" if "kl" in row else ""
    line = (f"step {done:03d}/{max_iterations} | reward {row['reward']:.3f} +- {row['reward_std']:.3f}"
            f" | ratio {row.get('ratio', math.nan):.4f} | clip {row.get('clip_fraction', math.nan):.2f}{kl}"
            f" | gnorm {row.get('grad_norm', math.nan):.1e} | "
            + " ".join(f"{name} {seconds:.1f} s" for name, (seconds, _) in spent.items()))
    if device.type == "cuda":
        line += " | " + " ".join(f"{name} {peak:.1f}" for name, (_, peak) in spent.items()) + " GiB"
    say(line)
    if is_main:
        metrics.write(row)
    if due(save_interval, done) or due(eval_interval, done):
        save(done)  # before evaluating, which may take longer than a scheduler waits
    if due(eval_interval, done):
        evaluate(done)
else:
    if not lora_rank or start_iteration >= max_iterations:  # adapters with each checkpoint, unless a kill came between
        export()
    say(f"exported   {out_dir}/{'lora' if lora_rank else 'model, a complete diffusers folder'}")
if server:
    server.close()
fsdp.cleanup()
