"""Fine-tune Wan 2.2 on two-view robot video: both experts in one run, LoRA or full, one process or many.

    python tiny.py && python prepare_robocasa.py && python train_i2v_sft.py         # the tiny world, on a laptop's CPU
    torchrun --nproc_per_node=4 prepare_robocasa.py config/robocasa_i2v.py --data=demo.hdf5
    torchrun --nproc_per_node=4 train_i2v_sft.py config/robocasa_i2v.py --data=demo.hdf5

Each step draws ONE expert for all ranks, as often as its share of the shifted noise levels says, and then a noise level
inside that expert's range for each sample: the joint distribution is the intended one, no expert's parameters are left
without a gradient, and no rank waits. Every draw is a function of (seed, step, sample), so neither the number of GPUs
nor an interruption changes a run. The same command again resumes.
The tiny run takes about 4 minutes on two CPU cores; what it reaches is in the README.
"""

import functools
import math
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial

import torch

import adapters
import artifacts
import checkpoints
import cost
import data as robot_data
import encoders
import flow
import fsdp
import latent_cache
import loop
import model as wan_model
import validate
from configurator import check_values, configure, defaults, save_config
from fsdp import say
from guard import UserError
from plot import MetricsLog, draw_curves
from recordings import view_names

# ----------------------------------------------------------------------------- settings
# model and output
model = "out/tiny/i2v"  # diffusers folder, hub id, or random:NAME (i2v-a14b, ti2v-5b, t2v-a14b, t2v-1.3b)
out_dir = "out/tiny_i2v"  # everything the run leaves behind
resume = True  # go on from out_dir's last checkpoint; False: out_dir must hold none
init_lora = ""  # an exported lora/ to start from, or any tool's file of the same rank and targets (adapters.py)
dry_run = False  # print sizes, costs and windows, and stop; with data="" without the windows
gpus = 0  # GPUs that a dry run is for; 0: as many as it runs on
gpu_gib = 0.0  # memory of each of them, GiB; 0: this GPU's
gpu = ""  # "h200": seconds a step there, and hours of the run
# data: the same names as in prepare_robocasa.py
data = "out/tiny/robot.hdf5"  # RoboCasa / robomimic HDF5
allow_external = False  # read what it keeps in other files
cache_dir = "out/tiny/cache_i2v"  # written by prepare_robocasa.py
views = "robot0_agentview_left,robot0_agentview_right"  # cameras, side by side in this order
pointmaps = False  # HCPT: a row of XYZ pointmaps under the RGB row
cell_height = 16  # pixels of one view
cell_width = 16  # pixels
num_frames = 5  # frames a clip, 4n+1
window_stride = 4  # frames between the starts of clips of a demo
pad_short = False  # hold the last frame of demos shorter than a clip
train_split = "train"  # mask/<split> to train on
val_split = "valid"  # mask/<split> held out; "": the last val_demos of train_split
val_demos = 1  # demos held out where the file has no val_split
workspace_box = ""  # x0,y0,z0,x1,y1,z1 in metres; "": percentiles of the data
box_percentile = 1.0  # percent of points outside the box on each side
max_text_tokens = 16  # tokens; Wan 2.2 was trained with 512
text_dtype = "bfloat16"  # "float32" | "bfloat16": of the text encoder; float16 overflows in UMT5
negative_prompt = ""  # unconditional text of classifier-free guidance in validation videos
keep_in_memory = True  # keep latents after they were read once
# method
experts = "both"  # "high" | "low" | "both": which are trained
boundary_ratio = 0.0  # sigma where high becomes low; 0: from model_index.json
shift = 5.0  # of the noise levels, in training and in sampling; 0: of the checkpoint's scheduler
clamp_first_frame = True  # t2v only: give the first latent frame clean
text_dropout = 0.1  # probability of an empty prompt, for classifier-free guidance
lora_rank = 0  # 0: full fine-tuning
lora_alpha = 0.0  # 0: the rank (scale 1)
lora_targets = "to_q,to_k,to_v,to_out.0"  # linears by the end of their names; add ffn.net.0.proj,ffn.net.2 for the MLP
batch_size = 32  # clips a rank and micro-batch
grad_accum = 1  # micro-batches a step
max_steps = 1500  # optimizer steps
lr = 3e-3  # peak learning rate of AdamW
min_lr = 1e-5  # at the end of the cosine
warmup_steps = 20  # steps of linear warmup
weight_decay = 0.01  # of AdamW
beta2 = 0.99  # of AdamW
grad_clip = 1.0  # L2 norm
ema_decay = 0.0  # of the trained parameters, used for validation and export; 0: off
max_bad_steps = 5  # non-finite steps in a row that end the run
seed = 0  # of every draw
# validation
eval_interval = 500  # steps; 0: only at the end
num_val_windows = 16  # held-out clips for the validation loss
val_sigmas = 4  # noise levels an expert, the mid-points of bins of equal probability
num_val_videos = 2  # held-out clips generated in full; 0: none
num_inference_steps = 50  # of the sampler
guidance_scale = 1.0  # of the high-noise expert (or the single one); 1: no guidance
guidance_scale_2 = 0.0  # of the low-noise expert; 0: not set, an error for two experts with guidance
fps = 8  # frames a second of the videos written
# system
device = "auto"  # "auto" | "cpu" | "cuda"
dtype = "float32"  # "float32" | "bfloat16": frozen weights and matrix products; trainable weights are always float32
checkpointing = "none"  # "none" | "full" | "selective": what is recomputed in the backward pass
compile_blocks = False  # torch.compile each transformer block
dp_replicate = 1  # whole copies of the model, e.g. nodes; the ranks of a copy share it
peak_tflops = 989.0  # of the GPU in bf16 without sparsity, for mfu (H100, H200: 989; B200: 2250; A100: 312)
save_interval = 500  # steps between checkpoints
keep_last = 2  # checkpoints kept; 0: all
log_interval = 50  # steps between lines
config = configure(globals(), also="cache_dir")
MAY_CHANGE = {  # settings that a resumed run may change
    "out_dir", "resume", "dry_run", "gpus", "gpu_gib", "gpu", "max_steps", "keep_in_memory", "max_bad_steps",
    "eval_interval", "num_val_windows", "val_sigmas", "num_val_videos", "num_inference_steps", "guidance_scale",
    "guidance_scale_2", "fps", "device", "checkpointing", "compile_blocks", "dp_replicate", "peak_tflops",
    "save_interval", "keep_last", "log_interval", "lr", "min_lr", "grad_clip", "allow_external",
    "batch_size", "grad_accum",  # their product with the number of ranks is what must stay
}

# ----------------------------------------------------------------------------- checks, before any weight is loaded
rank, world_size, device = fsdp.init(device)
is_main = rank == 0
stop = fsdp.Stop()
num_ranks = gpus if dry_run and gpus else world_size
global_batch = batch_size * grad_accum * num_ranks
lora_alpha = lora_alpha or float(lora_rank)

with fsdp.all_ranks_agree():
    check_values(config, at_least=dict(
        batch_size=1, grad_accum=1, max_steps=1, num_inference_steps=1, val_sigmas=1, dp_replicate=1, num_val_windows=1,
        num_val_videos=0, window_stride=1, max_text_tokens=1, max_bad_steps=1, log_interval=1, eval_interval=0,
        save_interval=0, keep_last=0, lora_rank=0, lora_alpha=0, warmup_steps=0, lr=0, weight_decay=0, beta2=0,
        shift=0, text_dropout=0, ema_decay=0, fps=1, seed=0, peak_tflops=1, gpus=0, gpu_gib=0,
    ), more_than=dict(grad_clip=0), at_most=dict(text_dropout=1), below=dict(ema_decay=1, beta2=1),
        one_of=dict(dtype=("float32", "bfloat16"), text_dtype=("float32", "bfloat16"),
                    checkpointing=("none", "full", "selective")),
        mistakes=[f"warmup_steps={warmup_steps}: want at most max_steps={max_steps}, the whole run"]
        if warmup_steps > max_steps else [])
    wan = wan_model.describe(model, boundary_ratio, shift)
    shift = config["shift"] = wan.shift
    wan.dtype = getattr(torch, dtype)
    wan_model.check_guidance(wan, guidance_scale, guidance_scale_2)
    if experts not in ("both", "high", "low") or (experts != "both" and "single" in wan.expert_names):
        raise UserError(f"experts={experts}: {model} has {' and '.join(wan.expert_names)}; want both"
                        + ("" if "single" in wan.expert_names else ", high or low"))
    trained = wan.expert_names if experts == "both" else (experts,)
    belongs_to = artifacts.belongs_to(wan, config)  # what is exported says it
    artifacts.check_start(init_lora, belongs_to)
    adapters.check_lora(wan, trained, lora_rank, lora_alpha, lora_targets, init_lora)
    modalities = ("rgb", "pointmap") if pointmaps else ("rgb",)
    num_views = len(view_names(views))
    latent_shape = encoders.latent_shape(model, num_frames, cell_height, cell_width, len(modalities), num_views)
    tokens = cost.num_tokens(latent_shape)
    flops = cost.step_flops(wan.config, tokens, lora_rank > 0, max_text_tokens) * batch_size * grad_accum  # a rank
    described = cost.describe_run(
        wan, config, latent_shape, num_ranks, device, batch_size, batch_size * grad_accum, max_steps, len(trained),
        reference=len(trained) < len(wan.expert_names) and num_val_videos > 0)
say("\n".join(described))
say(f"grid       {' over '.join(modalities)} x {num_views} views, latents {latent_shape}, {tokens:,} tokens a clip")
with fsdp.all_ranks_agree():
    if data or not dry_run:
        demos = robot_data.open_demos(config)
        windows = demos.windows(num_frames, window_stride, pad_short)
        num_train = sum(window.split == "train" for window in windows)
        if batch_size * num_ranks > num_train:
            raise UserError(f"batch_size={batch_size} on {num_ranks} ranks: more than the {num_train} training "
                            "windows; lower batch_size, use fewer ranks or a smaller window_stride")
    checkpoint = None if dry_run else checkpoints.to_resume(out_dir, resume, max_steps)
    meta = checkpoints.read_meta(checkpoint) if checkpoint else None
    begun_with = config | ({} if dry_run else latent_cache.contents(config, "model", "data", demos=demos))
    if meta:
        changed = checkpoints.check_same_config(checkpoint, meta["config"], begun_with, MAY_CHANGE, defaults)
        if meta["global_batch"] != global_batch:
            raise UserError(f"{checkpoint} was trained with {meta['global_batch']} clips a step, now {global_batch}: "
                            "keep ranks x batch_size x grad_accum")

if data or not dry_run:
    say(f"data       {num_train} training windows of {num_frames} frames, {len(windows) - num_train} held out, "
        f"{num_train / global_batch:.1f} steps of {global_batch} clips an epoch")
    for demo, frames in demos.skipped:
        say(f"           skipped {demo}: {frames} frames, want {num_frames} (pad_short=True holds the last)")
else:
    say("data       no recordings: windows not counted")
if dry_run:
    fsdp.cleanup()
    raise SystemExit(0)
with fsdp.all_ranks_agree():
    mesh = fsdp.make_mesh(device, dp_replicate)

# ----------------------------------------------------------------------------- data
with fsdp.all_ranks_agree():
    cache = latent_cache.LatentCache(config, wan.kind, demos)
    if is_main:
        save_config(out_dir, config)  # an out_dir that cannot be written is found here


def rank_slice(micro):
    """Positions in a step's global batch that this rank takes in a micro-batch."""
    start = (micro * world_size + rank) * batch_size
    return range(start, start + batch_size)


read = functools.cache(cache.sample) if keep_in_memory else cache.sample  # a window -> its clip


def read_clips(micro_step):
    """This rank's clips of a micro-batch, counted from the first step: the data cursor is the step itself."""
    step, micro = divmod(micro_step, grad_accum)
    batch = latent_cache.batch_indices(len(cache.train), global_batch, step, seed)
    return [read(cache.train[batch[position]]) for position in rank_slice(micro)]


# ----------------------------------------------------------------------------- model, LoRA, sharding
loaded = wan.expert_names if num_val_videos > 0 else trained
load = partial(wan_model.load_expert, wan, device, seed, lora_rank, lora_alpha, lora_targets,
               init_lora if not checkpoint else "")
wan.experts = fsdp.load_sharded(loaded, lambda expert: load(expert=expert, trainable=expert in trained), mesh,
                                checkpointing, compile_blocks)
parameters = wan_model.trainable_parameters(wan)
method = f"LoRA rank {lora_rank}, alpha {lora_alpha:g}" if lora_rank else "full"
say(f"training   {sum(p.numel() for p in parameters.values()):,} parameters in {len(parameters)} tensors, "
    f"{method}, on {world_size} x {device.type}")

# ----------------------------------------------------------------------------- optimizer, resume
optimizer = torch.optim.AdamW(parameters.values(), lr=lr, betas=(0.9, beta2), weight_decay=weight_decay,
                              fused=device.type == "cuda")
ema = fsdp.EMA(parameters, ema_decay) if ema_decay > 0 else None
averages = {"ema": ema.shadow} if ema else {}
steps = loop.OptimizerSteps(optimizer, parameters, grad_clip, max_bad_steps, meta["skipped_steps"] if meta else 0)
start_step = meta["step"] if meta else 0
saved_step = meta["step"] if meta else -1  # of the last checkpoint


def lr_at(step):
    """Linear warmup, then a cosine from lr to min_lr at max_steps."""
    if step < warmup_steps:
        return lr * (step + 1) / warmup_steps
    progress = (step - warmup_steps) / max(1, max_steps - warmup_steps)
    return min_lr + (lr - min_lr) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))


if checkpoint:
    checkpoints.restore(checkpoint, parameters, optimizer, averages)
    say(f"resumed    {checkpoint}: step {start_step}, lr {meta['lr']:.3e} before, {lr_at(start_step):.3e} next")
    say(f"changed    {changed}")
    if start_step >= max_steps:
        say(f"done       {start_step} of {max_steps} steps; a larger max_steps goes on")
if is_main:
    metrics = MetricsLog(out_dir, start_step)

# ----------------------------------------------------------------------------- validate, save


bounds = {}  # the floor and ceiling of the videos' scores, of the whole run


def evaluate(step):
    """Held-out loss and whole clips by the two-expert sampler, beside trivial ones; printed, logged, drawn."""
    started = time.time()
    with stop.leaves_at_once(), ema.swapped_in() if ema else nullcontext():
        row = validate.held_out_loss(wan, cache, trained, config, rank, world_size, device)
        if num_val_videos > 0:  # before the first step too: minutes a video at full size, num_val_videos=0 saves them
            row |= validate.held_out_videos(wan, cache, demos, config, step, rank, world_size, device)
            if not bounds:
                bounds.update(validate.floor_and_ceiling(cache, demos, config, rank, world_size, device))
            row |= bounds
    say(f"eval {step:04d}/{max_steps} | {validate.in_a_line(row)} | {time.time() - started:.1f} s")
    with fsdp.all_ranks_agree():  # its disk may be full
        if is_main:
            metrics.write({"step": step, **row})
            draw_curves(out_dir)


export = partial(wan_model.export, out_dir, wan, ema.shadow if ema else parameters, lora_rank, lora_alpha,
                 lora_targets, belongs_to | {"box": cache.box})


def not_finite(sample_losses, step):
    """The clips of a step whose loss isn't finite, on any rank; sample_losses: {position: loss}. Collective."""
    bad = fsdp.reduce_sum([float(not math.isfinite(sample_losses.get(i, 0))) for i in range(global_batch)])
    batch = latent_cache.batch_indices(len(cache.train), global_batch, step, seed)
    return ", ".join([cache.train[i].key for i, is_bad in zip(batch, bad, strict=True) if is_bad][:8]) or "no clip"


def save(step):
    """A checkpoint to resume from and, with LoRA, the export; once a step."""
    global saved_step
    if step == saved_step:
        return  # nothing was trained since
    saved_step = step
    state = dict(step=step, skipped_steps=steps.skipped, lr=lr_at(step - 1), box=cache.box, global_batch=global_batch,
                 world_size=world_size, config=begun_with)
    checkpoints.save(out_dir, step, checkpoints.training_tensors(parameters, optimizer, averages), state, keep_last)
    if lora_rank:
        export()


saving = partial(checkpoints.saving, save, out_dir, start_step)  # saving(step): a file of the cache may be gone


# ----------------------------------------------------------------------------- the loop
reader = ThreadPoolExecutor(max_workers=1)  # reads the next micro-batch while this one computes
next_clips = reader.submit(read_clips, start_step * grad_accum)
bins = torch.zeros(2, 5, dtype=torch.float64)  # sum and number of clip losses since the last line, by fifths of sigma
since_line, stopped = {}, False  # expert -> losses of its steps since the last line
if start_step == 0 and eval_interval:
    evaluate(0)
elif start_step and loop.due(eval_interval, start_step, max_steps):  # interrupted in it?
    if not fsdp.reduce_max([float(is_main and metrics.holds(start_step, "val_loss"))])[0]:
        evaluate(start_step)

for step in range(start_step, max_steps):
    started = time.time()
    for group in optimizer.param_groups:
        group["lr"] = lr_at(step)
    expert = flow.draw_expert(trained, wan.boundary_ratio, shift, seed, step)
    sample_losses, step_sigma, loading = {}, 0.0, 0.0  # the first by position in the global batch
    for micro in range(grad_accum):
        waited = time.time()
        with saving(step):
            samples = next_clips.result()
            loading += time.time() - waited
        next_clips = reader.submit(read_clips, step * grad_accum + micro + 1)
        latents, condition, text = latent_cache.collate(samples, cache.text, device, validate.gives_frame(wan, config))

        # each sample's draws come from its own generator: (seed, step, position in the global batch)
        generators = [flow.seeded("cpu", seed, step, position) for position in rank_slice(micro)]
        sigma = torch.stack([flow.draw_sigma(expert, wan.boundary_ratio, shift, g) for g in generators])  # b
        dropped = [torch.rand((), generator=g).item() < text_dropout for g in generators]
        noise = torch.stack([torch.randn(latents.shape[1:], generator=g) for g in generators]).to(device)  # b c f h w
        text[dropped] = cache.text[cache.empty_index].to(device)

        error = wan_model.flow_matching_loss(wan, latents, noise, sigma, condition, text)  # b
        (error.mean() / grad_accum).backward()
        sample_losses |= zip(rank_slice(micro), error.tolist(), strict=True)
        fifth = (5 * sigma).long().clamp(max=4)
        bins[0].index_add_(0, fifth, error.detach().double().cpu())
        bins[1].index_add_(0, fifth, torch.ones(len(fifth), dtype=torch.float64))
        step_sigma += sigma.mean().item() / grad_accum

    step_loss = sum(sample_losses.values()) / len(sample_losses)
    grad_norm, taken = steps.step(step_loss, [expert], f"step {step + 1}", partial(not_finite, sample_losses, step))
    if taken and ema:
        ema.update()
    step_loss, step_sigma, stops, loading = (
        total / world_size for total in fsdp.reduce_sum([step_loss, step_sigma, float(stop.requested), loading])
    )
    if taken:
        since_line.setdefault(expert, []).append(step_loss)

    done = step + 1
    if loop.due(log_interval, done, max_steps) or stops:
        ms = 1000 * (time.time() - started)
        row = dict(step=done, expert=expert, loss=step_loss, sigma=step_sigma, grad_norm=grad_norm, lr=lr_at(step),
                   ms=ms, load_ms=1000 * loading, skipped_steps=steps.skipped)
        sums, counts = torch.tensor(fsdp.reduce_sum(bins.flatten().tolist())).view(2, 5).tolist()
        row |= {f"loss/sigma {k / 5:.1f}-{(k + 1) / 5:.1f}": sums[k] / counts[k] for k in range(5) if counts[k]}
        row |= {f"loss/{name}": sum(losses) / len(losses) for name, losses in since_line.items()}
        bins.zero_()
        since_line.clear()
        line = (f"step {done:04d}/{max_steps} | {expert:6s} | loss {step_loss:.4f} | sigma {step_sigma:.2f}"
                f" | gnorm {grad_norm:.2f} | lr {lr_at(step):.1e} | {ms:.0f} ms")
        if device.type == "cuda":
            row |= dict(mfu=flops / (ms / 1000) / (peak_tflops * 1e12), gib=torch.cuda.max_memory_allocated() / 2**30)
            line += f" | mfu {row['mfu']:.0%} | {row['gib']:.1f} GiB"
        say(line)
        with fsdp.all_ranks_agree():
            if is_main:
                metrics.write(row)
    if stops or loop.due(save_interval, done, max_steps) or loop.due(eval_interval, done, max_steps):
        save(done)  # before evaluating, which may take longer than a scheduler waits
    if stops:
        say(f"stopped: {stop.name}; the same command resumes")
        stopped = True
        break
    if loop.due(eval_interval, done, max_steps):
        evaluate(done)

if not stopped:
    if not lora_rank or start_step >= max_steps:  # adapters with each checkpoint, unless a kill came between
        export()
    say(f"exported   {out_dir}/{'lora' if lora_rank else 'model, a complete diffusers folder'}")
fsdp.cleanup()
