"""Generate a video with a fine-tuned Wan 2.2: model (+ LoRA or checkpoint) + given frames + prompt -> mp4 and png.

    python sample.py out/tiny_i2v/config.json --demo=demo_600                    # a run's settings and its export
    python sample.py --lora=out/my/lora --images=left.png,right.png --prompt="open the drawer"
    python sample.py --checkpoint=out/my/ckpt/step_003000 --data=demo.hdf5 --demo=demo_7
    python sample.py --model=Wan-AI/Wan2.2-I2V-A14B-Diffusers --images=left.png,right.png --prompt="open the drawer" ...

What isn't given is what the run's weights belong to (artifacts.py): model, views, cells, frames, shift, text, guidance,
box, fps. The config file of a run serves here too. Under torchrun the transformers are sharded over the GPUs.
"""

import os
import tempfile
from types import SimpleNamespace

import torch
import torch.nn.functional as F

import adapters
import artifacts
import checkpoints
import data as robot_data
import encoders
import flow
import fsdp
import latent_cache
import model as wan_model
import prompts
import sampler
import validate
import video
from configurator import check_values, configure
from guard import UserError, writing
from recordings import Window

run = ""  # a run's config.json, also without --run=: its settings, and the lora/ or model/ it exported
model = "out/tiny/i2v"  # diffusers folder, hub id or random:NAME
lora = ""  # adapters to put on it, PATH[:high|low|both][:WEIGHT],...: a run's lora/, or any tool's safetensors
checkpoint = ""  # a run's ckpt/step_NNNNNN to put on it instead: its average with EMA, else its weights
out = "out/sample"  # writes <out>.mp4 and <out>.png
# the given frame: images, or a frame of a demonstration (then the recording is shown beside the video)
images = ""  # an image file a view, in their order, separated by commas, scaled to cover a cell and cut to its centre
data = "out/tiny/robot.hdf5"  # HDF5 of demonstrations
allow_external = False  # read what it keeps in other files
demo = ""  # e.g. demo_7
start = 0  # frame of the demo to start from
train_split = "train"  # mask/<split> of the file to find the demo in
val_split = "valid"  # or in this one
val_demos = 1  # demos held out where the file has no val_split
prompt = ""  # "": the demo's own
negative_prompt = ""  # unconditional text
views = "robot0_agentview_left,robot0_agentview_right"  # cameras of the demo, side by side in this order
pointmaps = False  # HCPT: a pointmap row under the RGB row; wants a demo
workspace_box = ""  # x0,y0,z0,x1,y1,z1 in metres for the pointmaps; "": that of the weights, else the cache's
cache_dir = ""  # of the training: the box of its pointmaps is used
cell_height = 16  # pixels of one view
cell_width = 16  # pixels
num_frames = 5  # frames, 4n+1
boundary_ratio = 0.0  # sigma where high becomes low; 0: from model_index.json
shift = 5.0  # of the noise levels; 0: of the checkpoint's scheduler
num_inference_steps = 50  # of the sampler
guidance_scale = 1.0  # of the high-noise expert (or the single one); 1: no guidance
guidance_scale_2 = 0.0  # of the low-noise expert; 0: not set, an error for two experts with guidance
max_text_tokens = 16  # tokens; 512 for the released models
text_dtype = "bfloat16"  # "float32" | "bfloat16": of the text encoder; float16 overflows in UMT5
clamp_first_frame = True  # t2v only: give the first latent frame clean
seed = 0  # of the noise
fps = 8  # frames a second
dtype = "float32"  # "float32" | "bfloat16"
compile_blocks = False  # torch.compile each transformer block
device = "auto"  # "auto" | "cpu" | "cuda"
config = configure(globals(), also="cache_dir", others="run", recorded=artifacts.recorded)

# ----------------------------------------------------------------------------- checks
rank, world_size, device = fsdp.init(device)
with fsdp.all_ranks_agree():
    wan = wan_model.describe(model, boundary_ratio, shift)
    shift = config["shift"] = wan.shift
    record = artifacts.check(wan, config)
    check_values(config, at_least=dict(num_inference_steps=1, max_text_tokens=1, fps=1, seed=0, shift=0),
                 one_of=dict.fromkeys(("dtype", "text_dtype"), ("float32", "bfloat16")))
    wan.dtype = getattr(torch, dtype)
    guidance = wan_model.check_guidance(wan, guidance_scale, guidance_scale_2)
    encoders.latent_shape(model, num_frames, cell_height, cell_width)
    adapted = {}  # expert -> rank (0: all weights), alpha, targets of what is put on it
    settings = checkpoints.read_meta(checkpoint)["config"] if checkpoint else {}
    if checkpoint:
        adapter = settings["lora_rank"], settings["lora_alpha"] or settings["lora_rank"], settings["lora_targets"]
        adapted = {e: adapter for e in wan.expert_names if settings.get("experts", "both") in ("both", e)}
    for expert in wan.expert_names if lora else ():
        if files := adapters.files_for(lora, wan.expert_names, expert):
            adapted[expert] = adapters.read_lora(lora, wan, expert)[1:]
        for file in files:
            weight = "" if file.weight is None else f" x {file.weight:g}"
            fsdp.say(f"lora       {expert}: {file.name}{weight}: {artifacts.compare(file.record, config)}")
    if bool(images) == bool(demo):
        raise UserError(f"images={images!r}, demo={demo!r}: want either images (one a view) or a demo of data")
    box = None
    if pointmaps:
        box = robot_data.parse_box(workspace_box) if workspace_box else record.get("box")
        box = box or (latent_cache.cached_box(cache_dir) if cache_dir else None)
        if box is None or images:
            raise UserError("pointmaps=True: want a demo, and workspace_box or a lora, model or checkpoint that holds "
                            f"one, or the training's cache (got cache_dir={cache_dir!r})")
    if demo:
        demos = robot_data.open_demos(config)
        if demo not in demos.num_frames:
            some = ", ".join(list(demos.num_frames)[:5])
            raise UserError(f"demo={demo}: not in {data}, which has {len(demos.num_frames)} demos: {some}, ...")
        frames_there = demos.num_frames[demo]
        if not 0 <= start < frames_there:
            raise UserError(f"start={start}: {demo} has {frames_there} frames")
        window = Window(demo, start, min(num_frames, frames_there - start), demos.splits[demo])
        prompt = prompt or demos.prompts[demo]
        truth, valid = validate.ground_truth(demos, window, config, box, device)
    else:
        paths, names = images.split(","), views.split(",")
        if len(paths) != len(names):
            raise UserError(f"images={images}: got {len(paths)}, want one a view: {views or '(one view)'}")
        pixels = [prompts.read_image(path.strip(), cell_height, cell_width, f"images={images:.200}") for path in paths]
        truth, valid = {("rgb", str(i)): cell[:, None].to(device) for i, cell in enumerate(pixels)}, {}  # 3 1 h w each
        if not prompt:
            raise UserError("prompt is empty: want --prompt=...")
    if not os.path.basename(out):
        raise UserError(f"out={out}: want a name without suffix, as in out/sample")
    with writing(out, "out="):
        os.makedirs(os.path.dirname(out) or ".", exist_ok=True)
        tempfile.TemporaryFile(dir=os.path.dirname(out) or ".").close()

# ----------------------------------------------------------------------------- condition and text
modalities, view_names = (list(dict.fromkeys(names)) for names in zip(*truth, strict=True))
vae = encoders.load_vae(model, device)
condition = None
if wan.kind != "t2v" or clamp_first_frame:
    given = {name: cell[None, :, 0] for name, cell in truth.items()}  # 1 3 h w each
    condition = sampler.encode_given(vae, given, num_frames, wan.kind)  # 1 z F|1 H W
tokens = sampler.embed(config, [prompt, negative_prompt], device, wan.dtype)  # {prompt: n d}
text, negative = (F.pad(tokens[name], (0, 0, 0, max_text_tokens - len(tokens[name])))[None].to(device)
                  for name in (prompt, negative_prompt))  # 1 n d each

# ----------------------------------------------------------------------------- model
def load(expert):
    adapter = adapted.get(expert, (0, 0, ""))
    return wan_model.load_expert(wan, device, settings.get("seed", 0), *adapter, lora, expert, expert in adapted)


wan.experts = fsdp.load_sharded(wan.expert_names, load, fsdp.make_mesh(device, 1), compile_blocks=compile_blocks)
if checkpoint:
    kind = "ema" if settings.get("ema_decay", 0) > 0 else "parameter"
    tensors = {f"{kind}.{name}": p.detach() for name, p in wan_model.trainable_parameters(wan).items()}
    with fsdp.all_ranks_agree():
        if missing := sorted(tensors.keys() - checkpoints.saved_names(checkpoint)):
            raise UserError(f"checkpoint={checkpoint}: holds no {missing[0]}: want the model it was trained from")
    checkpoints.load(checkpoint, tensors)

# ----------------------------------------------------------------------------- sample, decode, write
latent_shape = encoders.latent_shape(model, num_frames, cell_height, cell_width, len(modalities), len(view_names))
sigmas = flow.sigma_grid(num_inference_steps, shift)
fsdp.say(f"{model}: {wan.kind}, boundary {wan.boundary_ratio}, shift {shift:g}, {num_inference_steps} steps, "
         f"guidance {guidance_scale:g} (high) {guidance['guidance_scale_2']:g} (low), latents {latent_shape}\n"
         f"prompt: {prompt}")
noise = flow.randn(latent_shape, seed)[None].to(device)
latents, _ = sampler.sample(wan, noise, condition, text, negative, sigmas, **guidance,
                            progress="sampling" if rank == 0 else None)
if demo:
    bounds = validate.floor_and_ceiling(SimpleNamespace(val=[window], box=box), demos, config | {"num_val_videos": 1},
                                        rank, world_size, device)
if rank == 0:
    cells = sampler.decode_cells(vae, latents[0], modalities, view_names)
    got, want = validate.frames_of(cells), validate.frames_of(truth)
    video.write_mp4(f"{out}.mp4", got, fps)
    rows = [("given", want[:1]), ("generated", got)] + ([("recorded", want)] if demo else [])
    video.contact_sheet(f"{out}.png", rows, title=prompt)
    if demo:
        numbers = validate.scores(cells, truth, valid, box, validate.task_of(demos, window))
        print(f"{demo} of the {'held-out' if window.split == 'val' else 'training'} demos: "
              + validate.in_a_line(numbers | bounds))
    print(f"wrote {out}.mp4 and {out}.png")
fsdp.cleanup()
