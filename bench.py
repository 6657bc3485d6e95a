"""Seconds a whole optimizer step, MFU and peak memory, on random weights: what a size costs on a GPU at hand.

    python bench.py --baseline=True                                  # A14B, RGB, ours and the plain baseline
    torchrun --nproc_per_node=2 bench.py --pointmaps=True --baseline=True

Both experts are resident, as in training, and take turns. `baseline` is what one gets without this project: diffusers'
model, peft's LoRA, diffusers' gradient checkpointing of whole blocks, no compilation; sharded by FSDP2 on several GPUs
and with the same attention kernel. A step is forward, backward, gradient clipping and AdamW; the median is printed.
"""

import gc
import statistics
import time

import torch

import cost
import encoders
import flow
import fsdp
import model as wan_model
from configurator import check_values, configure

model = "random:i2v-a14b"  # random: and i2v-a14b, ti2v-5b, t2v-a14b or t2v-1.3b; fewer layers: random:i2v-a14b:10
pointmaps = False  # a second row of cells under the first (HCPT)
num_views = 2  # cells side by side
cell_height = 432  # pixels
cell_width = 384  # pixels
num_frames = 81  # 4n+1
batch_size = 1  # clips a GPU
lora_rank = 16  # 0: full fine-tuning
lora_targets = "to_q,to_k,to_v,to_out.0"  # as in train_i2v_sft.py
checkpointing = "selective"  # "none" | "full" | "selective"
compile_blocks = True  # torch.compile each transformer block
baseline = False  # measure the plain baseline too, first
warmup = 2  # steps of each expert before the clock starts; the first compiles
steps = 4  # timed steps
dtype = "bfloat16"  # "float32" | "bfloat16"
device = "auto"  # "auto" | "cpu" | "cuda"
dp_replicate = 1  # whole copies of the model
peak_tflops = 989.0  # for mfu
config = configure(globals())

rank, world_size, device = fsdp.init(device)
with fsdp.all_ranks_agree():
    wan = wan_model.describe(model)
    check_values(config, at_least=dict(num_views=1, batch_size=1, lora_rank=0, warmup=0, steps=1, dp_replicate=1,
                                       peak_tflops=1),
                 one_of=dict(dtype=("float32", "bfloat16"), checkpointing=("none", "full", "selective")))
    latent_shape = encoders.latent_shape(model, num_frames, cell_height, cell_width, 1 + pointmaps, num_views)
wan.dtype = getattr(torch, dtype)
tokens = cost.num_tokens(latent_shape)
flops = cost.step_flops(wan.config, tokens, lora_rank > 0) * batch_size
with fsdp.all_ranks_agree():
    mesh = fsdp.make_mesh(device, dp_replicate)


def synchronize():
    if device.type == "cuda":
        torch.cuda.synchronize()
    fsdp.barrier()


def measure(plain):
    """-> (median seconds of the timed steps, peak GiB, seconds of the first step)."""
    for expert in wan.expert_names:
        transformer = wan_model.load_expert(wan, device, 0, lora_rank, lora_rank, lora_targets, "", expert)
        if plain:
            transformer.enable_gradient_checkpointing()
        else:
            fsdp.wrap_blocks(transformer, checkpointing, compile_blocks)
        wan.experts[expert] = fsdp.shard(transformer, mesh)
    parameters = wan_model.trainable_parameters(wan)
    optimizer = torch.optim.AdamW(parameters.values(), lr=1e-4, fused=device.type == "cuda")
    generator = flow.seeded(device, rank)
    latents = torch.randn(batch_size, *latent_shape, generator=generator, device=device)
    condition = latents if wan.kind == "i2v" else latents[:, :, :1]
    text = torch.randn(batch_size, 512, wan.config["text_dim"], generator=generator, device=device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()

    seconds = []
    for step in range(warmup * len(wan.expert_names) + steps):
        expert = wan.expert_names[step % len(wan.expert_names)]
        synchronize()
        started = time.perf_counter()
        sigma = flow.draw_sigma(expert, wan.boundary_ratio, 5.0, flow.seeded("cpu", step)).expand(batch_size)
        noise = torch.randn(latents.shape, generator=generator, device=device)
        loss = wan_model.flow_matching_loss(wan, latents, noise, sigma, condition, text).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters.values(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        synchronize()
        seconds.append(time.perf_counter() - started)
        if rank == 0:
            name = "baseline" if plain else "nanowan"
            print(f"  {name} step {step} {expert}: loss {loss.item():.3f}, {seconds[-1]:.2f} s", flush=True)
    peak = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else float("nan")
    wan.experts.clear()
    return statistics.median(seconds[-steps:]), peak, seconds[0]


rows = {}
for plain in (True, False) if baseline else (False,):
    ours = f"nanoWan, {checkpointing} checkpointing{', compiled' if compile_blocks else ''}"
    rows["diffusers + peft, full checkpointing, eager" if plain else ours] = measure(plain)
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
if rank == 0:
    method = f"LoRA rank {lora_rank}" if lora_rank else "full"
    name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    print(f"\n{model}, {tokens:,} tokens, batch {batch_size} a GPU, {method}, {world_size} x {name}, "
          f"torch {torch.__version__}")
    print(f"{'':48s} s/step     MFU  peak GiB  first step")
    for name, (median, peak, first) in rows.items():
        print(f"{name:48s} {median:6.2f}  {flops / median / (peak_tflops * 1e12):6.1%}  {peak:8.1f}  {first:7.1f} s")
fsdp.cleanup()
