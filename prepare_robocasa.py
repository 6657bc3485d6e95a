"""RoboCasa / robomimic HDF5 -> latent cache, once, so that training touches neither video, VAE nor text encoder.

    python prepare_robocasa.py                                        # the tiny world of tiny.py, seconds
    python prepare_robocasa.py config/robocasa_i2v.py --inspect=True  # look first: contact sheet and verdict, no model
    torchrun --nproc_per_node=4 prepare_robocasa.py config/robocasa_i2v.py

Every cell (a view's RGB or its pointmap) is encoded by itself; the first frame of a window is the given one. Run again
after an interruption it continues; after a change of settings it says what became stale, and --force=True rebuilds it.

Data: data/demo_N/obs/<view>_image uint8 (frames, h, w, 3), data/demo_N.attrs["ep_meta"] with "lang"; for pointmaps
<view>_depth (metres along the optical axis), <view>_intrinsics and <view>_extrinsics (camera-to-world) per frame.
Expect, on one H200 with the VAE of A14B in float32, about 1.5 s a window of 81 frames, two views and one modality.
"""

import os
import shutil
import sys
import time
from pathlib import Path

import matplotlib
import numpy as np
import torch
from tqdm import tqdm

import encoders
import fsdp
import geometry
import video
from configurator import check_values, configure, given
from data import open_demos, parse_box, window_cells
from guard import UserError, hold_folder
from latent_cache import LatentCache, check_unit, fingerprints, is_whole, write_json, write_tensors
from model import describe
from recordings import Window, evenly

# settings shared with train_i2v_sft.py: what shapes the cache
model = "out/tiny/i2v"  # diffusers folder, hub id or random:NAME: its VAE and text encoder are used
data = "out/tiny/robot.hdf5"  # HDF5 of demonstrations
allow_external = False  # read what it keeps in other files
cache_dir = "out/tiny/cache_i2v"  # where the latents go
views = "robot0_agentview_left,robot0_agentview_right"  # cameras, left to right in the grid
pointmaps = False  # also encode XYZ pointmaps, the row below the RGB row (HCPT)
cell_height = 16  # pixels, a multiple of twice the VAE's stride
cell_width = 16  # pixels
num_frames = 5  # frames a window, 4n + 1
window_stride = 4  # frames from one window's start to the next
pad_short = False  # hold the last frame of demos shorter than a window, instead of skipping them
train_split = "train"  # mask/<train_split> lists the training demos; where it isn't there, all others are
val_split = "valid"  # mask/<val_split> lists the validation demos, likewise; "": the last val_demos of the others
val_demos = 1  # demos held out with val_split="" or without masks
workspace_box = ""  # x0,y0,z0,x1,y1,z1 in metres, world frame; "": percentiles of the training points
box_percentile = 1.0  # percent cut off at each side of each axis where workspace_box is ""
max_text_tokens = 16  # prompts are padded to this (512 for the released models)
text_dtype = "bfloat16"  # float32 | bfloat16: of the text encoder; float16 overflows in UMT5
negative_prompt = ""  # embedded beside the prompts, for classifier-free guidance
# settings of this script alone
force = False  # rebuild what is stale
inspect = False  # only check the recordings: contact sheet in cache_dir, verdict on stdout, exit code 1 if it fails
check_recordings = True  # refuse what inspect's verdict fails, before hours of encoding
encode_batch = 16  # windows a VAE call (1 at full size)
vae_dtype = "float32"  # float32 | bfloat16
cache_dtype = "float32"  # float32 | bfloat16: of the files
device = "auto"  # auto | cpu | cuda
config = configure(globals(), also="cache_dir")

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def make_box(demos):
    """-> (workspace box x0 y0 z0 x1 y1 z1 in metres, given or percentiles; a line that says so).

    From the points of frames spread evenly over the training demos, the same on every rank.
    """
    if not 0 <= box_percentile < 50:
        raise UserError(f"box_percentile={box_percentile}: want 0 to below 50")
    frames = [Window(demo, i, 1, split) for demo, split in demos.splits.items() if split == "train"
              for i in range(demos.num_frames[demo])]
    points = []
    for frame in evenly(frames, 100):
        for view in demos.views:
            xyz, valid = demos.points(frame, view, 1)
            points.append(xyz[valid][::7])  # odd, so that it does not keep to some columns
    points = np.concatenate(points)  # n 3, metres
    if not len(points):
        raise UserError(f"data={data}: no pixel has a known depth (all 0 or infinite), pointmaps need one")
    if workspace_box:
        box, source = parse_box(workspace_box), "given"
    else:
        low, high = np.percentile(points, [box_percentile, 100 - box_percentile], axis=0)
        high = np.maximum(high, low + 0.01)  # a flat scene still needs a height
        box, source = [round(float(x), 4) for x in (*low, *high)], "percentiles"
    share = ((points >= box[:3]) & (points <= box[3:])).all(1).mean()
    if share == 0:
        spans = ", ".join(f"{low:.2f}..{high:.2f}" for low, high in zip(points.min(0), points.max(0), strict=True))
        raise UserError(f"workspace_box={workspace_box}: holds none of the points, which span {spans} metres")
    return box, f"workspace box {', '.join(f'{x:.3f}' for x in box)} m ({source}), holds {share:.0%} of the points"


def look(demos):
    """Do five frames of up to 8 demos of one image size look as training expects? Depth tells, if there is any.

    -> images {view: f h w 3}, cameras {view: (depth, K, E)}, lines to print, faults, why it would be RGB alone or "".
    """
    sizes = {demo: [demos.image_size(demo, view) for view in demos.views] for demo in demos.splits}
    alike = [demo for demo in sizes if sizes[demo] == next(iter(sizes.values()))]
    frames = [Window(demo, i, 1, demos.splits[demo]) for demo in evenly(alike, 8)
              for i in evenly(range(demos.num_frames[demo]), 5)]
    images = {view: np.concatenate([demos.rgb(frame, view, 1) for frame in frames]) for view in demos.views}
    faults = geometry.plain_views(images)
    try:
        deep = demos if pointmaps else open_demos(config | {"pointmaps": True})
        cameras = {}
        for view in demos.views:
            of_frames = [deep.camera(frame, view, 1) for frame in frames]
            cameras[view] = tuple(map(np.concatenate, zip(*of_frames, strict=True)))
    except UserError as error:
        if pointmaps:
            raise
        return images, {}, [], faults, str(error)
    lines, of_images, of_cameras = geometry.check_geometry(images, cameras)
    faults += of_images + (of_cameras if pointmaps else [])
    return images, cameras, lines, faults, "" if pointmaps else "; ".join(of_cameras)


def run_inspection():
    """Contact sheet and verdict; UserError if the recordings are not what training expects."""
    demos = open_demos(config)
    print(f"{data}: {len(demos.splits)} demos, {sum(demos.num_frames.values())} frames, {len(demos.views)} views")
    images, cameras, lines, faults, rgb_alone = look(demos)
    lines = [make_box(demos)[1], *lines] if pointmaps else lines
    rows = [(f"{view} rgb", frames) for view, frames in images.items()]
    for view, camera in cameras.items():
        depth, (xyz, valid) = camera[0], geometry.known_points(*camera)
        if valid.any():
            near, far = np.percentile(depth[valid], [1, 99])
            turbo = matplotlib.colormaps["turbo"](np.clip((depth - near) / max(far - near, 1e-6), 0, 1))[..., :3]
            low, high = np.percentile(xyz[valid], [1, 99], axis=0)
            colours = ((xyz - low) / np.maximum(high - low, 0.01)).clip(0, 1) * valid[..., None]
            rows.append((f"{view} depth {near:.2f}..{far:.2f} m", (turbo * 255).astype(np.uint8)))
            rows.append((f"{view} xyz as colour", (colours * 255).astype(np.uint8)))
    path = Path(cache_dir, "inspect.png")
    if "data" in given and "cache_dir" not in given:  # the default cache is another's
        path = Path("out", f"inspect_{Path(data).stem}.png")
    video.contact_sheet(path, rows)
    print(f"contact sheet {path}: look whether it is upright")
    for line in lines:
        print(line)
    if faults:
        raise UserError("verdict FAIL: " + "; ".join(faults))
    print("verdict       PASS" + (f" for RGB alone: {rgb_alone}" if rgb_alone else ""))


if inspect:
    if os.environ.get("RANK", "0") == "0":
        run_inspection()
    sys.exit()

# ----------------------------------------------------------------------------- checks, before anything is loaded
rank, world_size, device = fsdp.init(device)
root, size = Path(cache_dir), (cell_height, cell_width)
with fsdp.all_ranks_agree():
    check_values(config, at_least=dict(window_stride=1, encode_batch=1, max_text_tokens=1),
                 one_of=dict.fromkeys(("vae_dtype", "text_dtype", "cache_dtype"), tuple(DTYPES)))
    kind = describe(model, boundary_ratio=0.5).kind  # whatever the boundary, which training may be given
    z_dim, latent_frames, latent_height, latent_width = encoders.latent_shape(model, num_frames, *size)  # of a cell
    demos = open_demos(config)
    windows = demos.windows(num_frames, window_stride, pad_short)
    prompts = list(dict.fromkeys([*demos.prompts.values(), "", negative_prompt]))
    if rank == 0:
        hold_folder(cache_dir, "cache_dir")  # nobody else changes what is looked at now

with fsdp.all_ranks_agree():
    units = fingerprints(config, kind, demos)
    stale = {unit: check_unit(root / unit, fingerprint, force) for unit, fingerprint in units.items()}
    todo, need = {}, 0  # {unit: windows to encode, prompts for the text}, bytes
    for unit in units:
        done = {path.stem for path in (root / unit).glob("*.safetensors") if not stale[unit] and is_whole(path)}
        if unit == "condition/text":
            todo[unit] = [] if "embeddings" in done else prompts
            numbers = max_text_tokens * 4096  # UMT5-XXL's width
        else:
            todo[unit] = [window for window in windows if window.key not in done]
            frames = latent_frames if kind == "i2v" or unit in ("rgb", "pointmap") else 1
            numbers = len(demos.views) * z_dim * frames * latent_height * latent_width
        need += len(todo[unit]) * numbers * DTYPES[cache_dtype].itemsize

    free = shutil.disk_usage(root).free
    if need > free:
        smaller = ", or cache_dtype=bfloat16" if cache_dtype == "float32" else ""
        raise UserError(f"cache_dir={cache_dir}: want {need / 1e9:.2f} GB, got {free / 1e9:.2f} GB free: choose "
                        f"another disk{smaller}")

    if todo.get("pointmap") or todo.get("condition/pointmap"):
        # A hundredth of the time that encoding takes, and a NaN in the last demo is found now and not in an hour.
        for demo in tqdm(list(demos.splits)[rank::world_size], "check depth", disable=None if rank == 0 else True):
            length = demos.num_frames[demo]
            for view in demos.views:
                demos.camera(Window(demo, 0, length, demos.splits[demo]), view, length)
    if check_recordings and rank == 0 and any(todo[unit] for unit in todo if unit != "condition/text"):
        if faults := look(demos)[3]:
            raise UserError(f"data={data}: {'; '.join(faults)} (--inspect=True shows it, --check_recordings=False "
                            "prepares it all the same)")
    box, box_line = make_box(demos) if pointmaps else (None, "")

if rank == 0:
    splits = list(demos.splits.values())
    print(f"{data}: {splits.count('train')} train and {splits.count('val')} validation demos, {len(demos.views)} views")
    print(f"{len(windows)} windows of {num_frames} frames, {len(prompts)} prompts, {need / 1e6:.1f} MB to write")
    if demos.skipped:
        names = ", ".join(f"{demo} ({frames})" for demo, frames in demos.skipped)
        print(f"skipped {len(demos.skipped)} demos of fewer than {num_frames} frames: {names}")
    if demos.num_uncovered:
        print(f"{demos.num_uncovered} frames at the ends of demos are in no window; fewer with a smaller window_stride")
    if pointmaps:
        print(box_line)

# ----------------------------------------------------------------------------- encode: text, then each rank its windows
with fsdp.all_ranks_agree():
    if rank == 0:
        # Text first, before a file is touched: minutes, and a missing encoder is not found after hours of VAE.
        if new_text := bool(todo.get("condition/text")):
            tokenizer, text_encoder = encoders.load_text_encoder(model, device, DTYPES[text_dtype])
            for line in encoders.text_warnings(tokenizer, text_encoder, prompts, max_text_tokens):
                print(line)
            text = encoders.encode_text(tokenizer, text_encoder, prompts, max_text_tokens)  # prompts n d
            del tokenizer, text_encoder
        for unit in todo:
            # The fingerprint goes last, so that a kill in between leaves a unit that is still known to be stale.
            patterns = ["*.tmp*"] + ["index.json"] * bool(todo[unit])
            patterns += ["index.json", "*.safetensors", "fingerprint.json"] * bool(stale[unit])
            for path in [path for pattern in dict.fromkeys(patterns) for path in (root / unit).glob(pattern)]:
                path.unlink()
            if stale[unit] is not False:  # what an older preparation didn't record isn't known of what it wrote
                write_json(root / unit / "fingerprint.json", units[unit], indent=1)
        if new_text:
            write_tensors(root / "condition/text/embeddings.safetensors", {"text": text.to(DTYPES[cache_dtype])})
            print(f"condition/text: {len(prompts)} prompts, {text.shape[1]} tokens of {text.shape[2]} numbers")


of_windows = {unit: items for unit, items in todo.items() if unit != "condition/text"}
vae = encoders.load_vae(model, device, DTYPES[vae_dtype]) if any(of_windows.values()) else None
for unit, items in of_windows.items():
    mine = items[rank::world_size]
    start = time.perf_counter()
    batches = [mine[i : i + encode_batch] for i in range(0, len(mine), encode_batch)]
    is_condition, modality = unit.startswith("condition"), Path(unit).name
    for batch in tqdm(batches, unit, unit="batch", disable=None if rank == 0 else True):
        frames = 1 if is_condition else num_frames
        clips = [window_cells(demos, window, modality, frames, size, box, device)[0] for window in batch]
        pixels = torch.stack([cell for clip in clips for cell in clip.values()])  # b*views 3 f h w
        if is_condition:
            latents = encoders.encode_condition(vae, pixels[:, :, 0], num_frames, kind)
        else:
            latents = encoders.encode(vae, pixels)  # b*views z F h w
        for window, of_views in zip(batch, latents.split(len(demos.views)), strict=True):
            if not of_views.isfinite().all():
                raise UserError(f"{window.key}: got NaN or infinity from the VAE in {vae_dtype}, try vae_dtype=float32")
            tensors = dict(zip(demos.views, of_views.to(DTYPES[cache_dtype]), strict=True))
            write_tensors(root / unit / f"{window.key}.safetensors", tensors)
    if rank == 0:
        took = f", {time.perf_counter() - start:.1f} s" if mine else ""
        print(f"{unit}: {len(items)} windows encoded, {len(windows) - len(items)} kept{took}")
fsdp.barrier()

# ----------------------------------------------------------------------------- the indices that make the units valid
with fsdp.all_ranks_agree():
    for unit in todo if rank == 0 else ():
        if not todo[unit] and (root / unit / "index.json").exists():
            continue
        index = {"windows": windows, "skipped": demos.skipped}
        if unit == "condition/text":
            prompt_of_demo = {demo: prompts.index(prompt) for demo, prompt in demos.prompts.items()}
            index = {"prompts": prompts, "prompt_of_demo": prompt_of_demo}
        if unit == "pointmap":
            index |= {"box": box}
        write_json(root / unit / "index.json", index)

if rank == 0:
    cache = LatentCache(config, kind, demos)
    sample = cache.sample(cache.train[0])
    shapes = ", ".join(f"{name} {tuple(sample[name].shape)}" for name in ("latents", "condition"))
    print(f"{root}: {len(cache.train)} train and {len(cache.val)} validation windows; {shapes}; kind {kind}")
fsdp.cleanup()
