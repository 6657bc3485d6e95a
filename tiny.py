"""Build the tiny world: everything the scripts need to run in minutes on a laptop, without a download.

    python tiny.py                   # about half a minute on one core, 80 MB in out/tiny/
    python tiny.py --robot=FILE.hdf5 # only out/tiny/robot_i2v/ and robot_ti2v/: the first and second in a size for FILE

    out/tiny/i2v/                    like Wan2.2-I2V-A14B: two experts, 36 input channels, boundary 0.9
    out/tiny/ti2v/                   like Wan2.2-TI2V-5B: one expert, expand_timesteps
    out/tiny/t2v/                    like Wan2.2-T2V-A14B: two experts, boundary 0.875
    out/tiny/ti2v_conv/              like Wan2.2-TI2V-5B with a convolutional VAE, random: for SGLang servers
    out/tiny/robot.hdf5              demonstrations in RoboCasa layout: two views, depth, cameras, language
    out/tiny/robot_mixed.hdf5        the same, but half of them move any way: a worse teacher, which RL can surpass
    out/tiny/train.jsonl eval.jsonl  prompts with their given images; no colour of eval is in train

The scene: a coloured ball rolls over a grey table, seen by two cameras; the prompt says colour and direction, such as
"a red ball moves left". The given frame shows the ball before it moves and says nothing of where it will go.

left, right, up and down are those of the image. The cameras stand askew, yet the prompted direction dominates in both
views: over a clip of 5 frames the ball moves 2.8 to 4.5 pixels of a 16 x 16 cell along it and at most 1.7 across. All
is grey but the ball, so that a pixel's saturation says how much of the ball is in it, and its hue which ball it is.
"""

import json
from pathlib import Path

import diffusers
import h5py
import numpy as np
import torch
import transformers
from diffusers import AutoencoderKLWan, UniPCMultistepScheduler, WanTransformer3DModel
from PIL import Image
from torch.nn import functional as F
from transformers import T5Tokenizer, UMT5Config, UMT5EncoderModel

from configurator import check_values, configure
from data import open_demos, parse_box, point_cell, rgb_cell
from encoders import VAE_2_1, VAE_2_2, AutoencoderDCT
from guard import writing

out = "out/tiny"  # folder to write
num_demos = 624  # demonstrations in robot.hdf5; the last 24 are mask/valid, one of each prompt
agreement = 0.5  # in robot_mixed.hdf5: share of demos that move as their prompt says; the others move any way
seed = 0  # of the scene and of the initial weights
robot = ""  # HDF5 of real recordings: write only robot_i2v and robot_ti2v, larger models with its words and statistics
robot_cell = 64  # pixels of a view that they will be trained at: the latents' statistics depend on it
robot_box = ""  # x0,y0,z0,x1,y1,z1 in metres: the statistics are of RGB and pointmaps in this box, "": of RGB alone

if __name__ == "__main__":
    configure(globals())

# The scene, in metres: x to the right, y away from the cameras, z up; the table's centre is the origin of x and y.
COLOURS = {"red": (220, 40, 40), "green": (40, 190, 60), "blue": (50, 80, 230),
           "yellow": (225, 205, 40), "magenta": (210, 50, 200), "cyan": (40, 195, 205)}
DIRECTIONS = {"left": (-1.0, 0.0), "right": (1.0, 0.0), "up": (0.0, 1.0), "down": (0.0, -1.0)}
PROMPTS = [(colour, direction) for colour in COLOURS for direction in DIRECTIONS]
VIEWS = {"robot0_agentview_left": -1, "robot0_agentview_right": 1}  # side of the table's front that the camera is on
AZIMUTH, ELEVATION, DISTANCE = 18.0, 55.0, 1.1  # degrees, degrees, metres to the table's centre
IMAGE_SIZE = 32  # pixels; the recipes resize to cells of 16
FOCAL = 2.0  # focal length in image sizes: the image spans 0.55 m at the table's centre
TABLE_HEIGHT, TABLE_HALF = 0.1, 0.27  # the table is a thin square above a floor at z = 0
RADIUS, SPEED = 0.08, 0.035  # of the ball, metres and metres a frame: 2.3 pixels and 1 pixel of a 16 x 16 cell
START = 0.07  # the ball starts within this of the centre, wherever it is to go, so that only the prompt tells
NUM_FRAMES = (5, 8)  # shortest and longest demonstration
TABLE_GREY, FLOOR_GREY = 165, 125
LIGHT = np.array([-0.35, -0.45, 0.82]) / np.linalg.norm([-0.35, -0.45, 0.82])  # unit vector towards the light
AMBIENT = 0.7  # brightness where no light falls

# The models. Narrower than z * 4 = 64 numbers a token and they could not pass a latent through.
TRANSFORMER = dict(patch_size=(1, 2, 2), num_attention_heads=4, attention_head_dim=32, text_dim=64, freq_dim=64,
                   ffn_dim=512, num_layers=3, rope_max_seq_len=128)
# For real recordings: 48 of a block's 192 coefficients, as many channels as Wan 2.2's own VAE has; wider than z * 4.
ROBOT_Z = 48
ROBOT_TRANSFORMER = TRANSFORMER | dict(num_attention_heads=8, freq_dim=256, ffn_dim=1024, num_layers=6)
# Whole words keep a prompt within 16 tokens; letters spell any other word.
WORDS = (
    "a ball moves left right up down red green blue yellow magenta cyan pick up the red cube and lift it off the table "
    "place put push pull open close turn on off from to into in under of with door drawer cabinet counter sink robot"
)
LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789.,;:!?'\"-()"


def prompt_of(colour, direction):
    return f"a {colour} ball moves {direction}"


def camera(side):
    """(K 3 3 in pixels, E 4 4 camera to world) of a view; OpenCV axes: x right, y down, z along the optical axis."""
    azimuth, elevation = np.radians([AZIMUTH * side, ELEVATION])
    backward = np.array([np.cos(elevation) * np.sin(azimuth), -np.cos(elevation) * np.cos(azimuth), np.sin(elevation)])
    forward = -backward
    right = np.cross(forward, [0.0, 0.0, 1.0])
    right /= np.linalg.norm(right)
    extrinsics = np.eye(4)
    extrinsics[:3, :3] = np.stack([right, np.cross(forward, right), forward], axis=1)
    extrinsics[:3, 3] = np.array([0.0, 0.0, TABLE_HEIGHT]) + DISTANCE * backward
    intrinsics = np.array([[FOCAL * IMAGE_SIZE, 0, IMAGE_SIZE / 2], [0, FOCAL * IMAGE_SIZE, IMAGE_SIZE / 2], [0, 0, 1]])
    return intrinsics, extrinsics


def hit_sphere(origins, rays, centres):
    """Distance along each ray, in units of its length, to the ball around `centres`; infinity where it misses."""
    offset = origins - centres
    a, b = (rays * rays).sum(-1), (rays * offset).sum(-1)
    discriminant = b * b - a * ((offset * offset).sum(-1) - RADIUS**2)
    nearest = (-b - np.sqrt(np.maximum(discriminant, 0))) / a
    return np.where((discriminant > 0) & (nearest > 0), nearest, np.inf)


def trace(balls, intrinsics, extrinsics, grid):
    """Cast one ray through each pixel centre of a grid x grid image of each frame.

    balls f 3 metres -> depth f h w (metres along the optical axis), points f h w 3 (world), is_ball f h w
    """
    columns = (np.arange(grid) + 0.5) * IMAGE_SIZE / grid  # in pixels of the image that the intrinsics speak of
    x = (columns[None, :] - intrinsics[0, 2]) / intrinsics[0, 0]
    y = (columns[:, None] - intrinsics[1, 2]) / intrinsics[1, 1]
    rays = np.stack(np.broadcast_arrays(x, y, 1.0), axis=-1) @ extrinsics[:3, :3].T  # h w 3; depth 1 per unit
    origin = extrinsics[:3, 3]
    to_table = (TABLE_HEIGHT - origin[2]) / rays[..., 2]
    on_table = (np.abs(origin[:2] + to_table[..., None] * rays[..., :2]) < TABLE_HALF).all(-1)
    background = np.where(on_table, to_table, -origin[2] / rays[..., 2])  # h w
    to_ball = hit_sphere(origin, rays, balls[:, None, None])  # f h w
    depth = np.minimum(to_ball, background)
    return depth, origin + depth[..., None] * rays, to_ball < background


def render(balls, colour, side, supersampling=2):
    """Ball centres f 3 (metres) and a colour's name -> rgb f h w 3 uint8, depth f h w float32 metres, of one view."""
    intrinsics, extrinsics = camera(side)
    _, points, is_ball = trace(balls, intrinsics, extrinsics, IMAGE_SIZE * supersampling)
    centres = balls[:, None, None]
    normals = np.where(is_ball[..., None], (points - centres) / RADIUS, [0.0, 0.0, 1.0])
    light = np.maximum(normals @ LIGHT, 0) / LIGHT[2]  # 1 on the table
    light[~is_ball & np.isfinite(hit_sphere(points, LIGHT, centres))] = 0  # the ball's shadow
    on_table = points[..., 2:] > TABLE_HEIGHT - 1e-6
    albedo = np.where(is_ball[..., None], COLOURS[colour], np.where(on_table, TABLE_GREY, FLOOR_GREY))  # f h w 3
    rgb = (albedo * (AMBIENT + (1 - AMBIENT) * light[..., None])).clip(0, 255)
    blocks = rgb.reshape(len(balls), IMAGE_SIZE, supersampling, IMAGE_SIZE, supersampling, 3)
    depth, _, _ = trace(balls, intrinsics, extrinsics, IMAGE_SIZE)  # at pixel centres, never averaged over an edge
    return blocks.mean((2, 4)).round().astype(np.uint8), depth.astype(np.float32)


def ball_track(direction, num_frames, rng):
    """Centres f 3 (metres) of a ball that starts near the table's centre and moves straight at SPEED."""
    start = np.append(rng.uniform(-START, START, 2), TABLE_HEIGHT + RADIUS)
    velocity = SPEED * np.array([*DIRECTIONS[direction], 0.0])
    return start + np.arange(num_frames)[:, None] * velocity


def make_demo(index, agreement, seed):
    """Demonstration number `index`, the same whatever their number: (colour, direction of the prompt, balls f 3)."""
    rng = np.random.default_rng((seed, index))
    colour, direction = PROMPTS[index % len(PROMPTS)]
    moves = direction if rng.random() < agreement else str(rng.choice(list(DIRECTIONS)))
    return colour, direction, ball_track(moves, rng.integers(NUM_FRAMES[0], NUM_FRAMES[1] + 1), rng)


def make_robot_hdf5(path, num_demos, agreement=1.0, seed=0):
    """Write demonstrations in RoboCasa layout, as `prepare_robocasa.py` reads them, with depth and cameras a frame."""
    compressed = dict(compression="gzip", compression_opts=1)
    with h5py.File(path, "w") as file:
        data = file.create_group("data")
        for index in range(num_demos):
            colour, direction, balls = make_demo(index, agreement, seed)
            num_frames = len(balls)
            velocity = np.gradient(balls, axis=0)
            demo = data.create_group(f"demo_{index}")
            demo.attrs["ep_meta"] = json.dumps({"layout_id": 0, "style_id": 0, "lang": prompt_of(colour, direction)})
            demo.attrs["model_file"] = '<mujoco model="tiny"/>'
            demo.attrs["num_samples"] = num_frames
            demo["actions"] = np.pad(velocity, [(0, 0), (0, 4)])  # the 7 numbers of an arm: position, rotation, grip
            demo["states"] = np.concatenate([balls, velocity], axis=1)
            demo["rewards"] = np.zeros(num_frames)
            demo["dones"] = (np.arange(num_frames) == num_frames - 1).astype(np.int64)
            observations = demo.create_group("obs")
            observations["object"] = balls
            for view, side in VIEWS.items():
                rgb, depth = render(balls, colour, side)
                observations.create_dataset(f"{view}_image", data=rgb, **compressed)
                observations.create_dataset(f"{view}_depth", data=depth[..., None], **compressed)
                for name, matrix in zip(("intrinsics", "extrinsics"), camera(side), strict=True):
                    matrices = np.tile(matrix.astype(np.float32), (num_frames, 1, 1))
                    observations.create_dataset(f"{view}_{name}", data=matrices, **compressed)
        data.attrs["total"] = sum(len(demo["actions"]) for demo in data.values())
        data.attrs["env_args"] = json.dumps({"env_name": "TinyBall", "type": 1, "env_kwargs": {"control_freq": 20}})
        names = np.array([f"demo_{index}" for index in range(num_demos)], dtype="S")
        num_valid = min(len(PROMPTS), num_demos // 10)
        file["mask/train"], file["mask/valid"] = np.split(names, [num_demos - num_valid])


def make_prompts(folder, seed=0):
    """Write train.jsonl, eval.jsonl and their images: 6 starts of each prompt for training, 3 for evaluation.

    Two colours are evaluation's alone: one whose "left" is never rewarded would teach that it does not move left.
    """
    rng = np.random.default_rng((seed, 1_000_000))  # away from the demonstrations' starts
    (folder / "images").mkdir(parents=True, exist_ok=True)
    for split, colours, starts in (("train", list(COLOURS)[:4], 6), ("eval", list(COLOURS)[4:], 3)):
        pairs = [pair for pair in PROMPTS if pair[0] in colours] * starts
        lines = []
        for index, (colour, direction) in enumerate(pairs):
            image_path = f"images/{split}_{index:03d}.png"
            rgb, _ = render(ball_track(direction, 1, rng), colour, VIEWS["robot0_agentview_left"])
            Image.fromarray(rgb[0]).save(folder / image_path)
            metadata = {"image_path": image_path, "direction": direction, "colour": colour}
            lines.append(json.dumps({"input": prompt_of(colour, direction), "metadata": metadata}))
        (folder / f"{split}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


def make_vae(seed=0):
    """The DCT autoencoder with the scene's own latent statistics."""
    clips = [render(balls[: NUM_FRAMES[0]], colour, side)[0]
             for colour, _, balls in (make_demo(index, 1.0, seed) for index in range(4 * len(PROMPTS)))
             for side in VIEWS.values()]
    pixels = torch.from_numpy(np.stack(clips)).permute(0, 4, 1, 2, 3).float() / 127.5 - 1  # b 3 f h w
    return fitted_vae(F.avg_pool3d(pixels, (1, 2, 2)), z_dim=16)  # the 16 x 16 cells of the recipes


def make_robot_vae(demos):
    """The same for recordings, with ROBOT_Z channels: statistics of their training demos' RGB, pointmaps too if any."""
    seen = [(window, view, 9) for window in demos.windows(9, 24) if window.split == "train" for view in demos.views]
    size = robot_cell, robot_cell
    clips = [rgb_cell(demos.rgb(*clip), *size) for clip in seen]
    if demos.pointmaps:
        clips += [point_cell(*demos.points(*clip), parse_box(robot_box), *size)[0] for clip in seen]
    return fitted_vae(torch.stack(clips), ROBOT_Z)


def fitted_vae(pixels, z_dim):
    """The DCT autoencoder with the latent statistics of pixels b 3 f h w in -1..1.

    Each channel is divided by the square root of its standard deviation: by all of it, the high frequencies, which
    hardly show, would be as loud as the picture; by nothing, all but the mean would drown.
    """
    latents = AutoencoderDCT(z_dim).encode(pixels).latent_dist.mode().transpose(0, 1).flatten(1).double()  # z n
    mean, std = latents.mean(1), latents.std(1).sqrt()
    return AutoencoderDCT(z_dim, latents_mean=mean.float().tolist(), latents_std=std.float().tolist())


def make_text_encoder(seed=0, words=WORDS):
    """A word tokenizer in T5's format and a small random UMT5 encoder: each prompt has its own embeddings."""
    vocabulary = {"<pad>": 0.0, "</s>": 0.0, "<unk>": 0.0, "▁": -9.0}
    vocabulary |= {f"▁{word}": -1.0 for word in words.split()} | dict.fromkeys(LETTERS, -9.0)
    tokenizer = T5Tokenizer(vocab=list(vocabulary.items()), extra_ids=0)
    torch.manual_seed(seed)
    width = TRANSFORMER["text_dim"]
    config = UMT5Config(vocab_size=len(tokenizer), d_model=width, d_kv=16, d_ff=128, num_heads=4, num_layers=1)
    return tokenizer, UMT5EncoderModel(config).eval()


def make_conv_vae(kind, seed=1):
    """The released VAEs' architecture, few channels, random weights: it decodes to noise, but servers know it."""
    torch.manual_seed(seed)
    config = VAE_2_1
    if kind == "ti2v":
        config = VAE_2_2 | dict(decoder_base_dim=8, latents_mean=torch.linspace(-1, 1, 48).tolist(),
                                latents_std=torch.linspace(0.5, 1.5, 48).tolist())
    return AutoencoderKLWan(**config | dict(base_dim=8, num_res_blocks=1))


def make_transformer(in_channels, seed, out_channels=16, size=TRANSFORMER):
    torch.manual_seed(seed)
    return WanTransformer3DModel(**size | dict(in_channels=in_channels, out_channels=out_channels)).eval()


def make_checkpoint(folder, kind, vae, tokenizer, text_encoder, seed=0, size=TRANSFORMER):
    """Save a model folder with random experts, by the pipeline class of its released model. kind: i2v, ti2v, t2v."""
    scheduler = UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=5.0)
    z = vae.config.z_dim
    in_channels = 2 * z + 4 if kind == "i2v" else z
    parts = dict(tokenizer=tokenizer, text_encoder=text_encoder, vae=vae, scheduler=scheduler)
    parts["transformer"] = make_transformer(in_channels, seed, z, size)
    if kind == "ti2v":
        parts["expand_timesteps"] = True
    else:
        parts["transformer_2"] = make_transformer(in_channels, seed + 1, z, size)
        parts["boundary_ratio"] = 0.9 if kind == "i2v" else 0.875
    pipeline = diffusers.WanImageToVideoPipeline if kind == "i2v" else diffusers.WanPipeline
    pipeline(**parts).save_pretrained(folder)


def make_robot_models(folder):
    """robot_i2v and robot_ti2v for the recordings in `robot`."""
    demos = open_demos(dict(data=robot, views=",".join(VIEWS), pointmaps=bool(robot_box)))
    vae = make_robot_vae(demos)
    words = " ".join(demos.prompts.values()).lower()
    for kind in ("i2v", "ti2v"):
        make_checkpoint(folder / f"robot_{kind}", kind, vae, *make_text_encoder(seed, words), seed, ROBOT_TRANSFORMER)
    parameters = make_transformer(2 * ROBOT_Z + 4, 0, ROBOT_Z, ROBOT_TRANSFORMER).num_parameters()
    print(f"{folder}: robot_i2v robot_ti2v of {parameters / 1e6:.2f} M parameters an expert, for {robot}")


def main():
    check_values(globals(), {}, at_least=dict(num_demos=10, agreement=0, seed=0), at_most=dict(agreement=1))
    transformers.logging.set_verbosity_error()  # it would tell that torchvision is missing, which nothing here needs
    transformers.logging.disable_progress_bar()
    folder = Path(out)
    with writing(out, "out="):
        folder.mkdir(parents=True, exist_ok=True)
        if robot:
            return make_robot_models(folder)
        make_robot_hdf5(folder / "robot.hdf5", num_demos, 1.0, seed)
        make_robot_hdf5(folder / "robot_mixed.hdf5", num_demos, agreement, seed)
        make_prompts(folder, seed)
        vae = make_vae(seed)
        tokenizer, text_encoder = make_text_encoder(seed)
        for kind in ("i2v", "ti2v", "t2v"):
            make_checkpoint(folder / kind, kind, vae, tokenizer, text_encoder, seed)
        make_checkpoint(folder / "ti2v_conv", "ti2v", make_conv_vae("ti2v"), tokenizer, text_encoder, seed)
    print(f"{folder}: {num_demos} demos, {len(PROMPTS)} prompts, models i2v ti2v t2v ti2v_conv of "
          f"{make_transformer(36, 0).num_parameters() / 1e6:.2f} M parameters an expert")


if __name__ == "__main__":
    main()
