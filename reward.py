"""Rewards: what reinforcement learning pushes a video model towards.

A reward is a function of videos b f 3 h w (float in 0..1, on any device), prompts (b strings) and metadata (b dicts,
from the prompt file) that returns b numbers, more is better. To add one, write it and add "name": ready(function) to
REWARDS; where it has settings or loads something, add its loader: (name, config, device) -> reward.

    rewards="pickscore:1.0,smoothness:0.1"     a weighted sum; without a number the weight is 1
    rewards="http://host:8000/score:1.0"       a reward in another process; the weight needs its dot there

Tried on video files, whose compression, and enlarging of small ones, moves the numbers a little (jpeg's a lot):

    python reward.py clip.mp4 --rewards=ball:1.0 --prompt="..." --metadata='{"colour": "red", "direction": "left"}'
"""

import copy
import difflib
import functools
import http.client
import io
import json
import math
import re
import sys
import time
import traceback
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch.nn import functional as F
from transformers import CLIPConfig, CLIPImageProcessorPil, CLIPModel

import fsdp
import pretrained
import web
from configurator import configure
from guard import UserError, first_line, parse_json
from task_rewards import ball, ball_success, first_frame, jpeg, smoothness, uint8_frames, views
from video import read_mp4

# ----------------------------------------------------------------------------- PickScore, arXiv 2305.01569


@functools.lru_cache(maxsize=1)  # rewards that are trained on and held-out ones share it
def load_clip(model, device):
    """-> (tokenizer, image processor, frozen CLIPModel). "random": CLIP-ViT-H-14 in full size with random weights, to
    measure with. A folder without a preprocessor_config.json gets CLIP's own at its image_size, which a line says.
    """
    if model == "random":
        text = dict(hidden_size=1024, intermediate_size=4096, num_hidden_layers=24, num_attention_heads=16)
        vision = dict(hidden_size=1280, intermediate_size=5120, num_hidden_layers=32, num_attention_heads=16)
        vision, both = vision | dict(patch_size=14), dict(hidden_act="gelu", projection_dim=1024)
        config = CLIPConfig(text_config=text | both, vision_config=vision | both, projection_dim=1024)
        return same_tokens, CLIPImageProcessorPil(), pretrained.draw(lambda: CLIPModel(config), torch.float32, device)
    own = any((Path(model) / name).exists() for name in pretrained.VOCABULARIES)
    _, skeleton = pretrained.check(CLIPModel, model, "", "pickscore_model")
    tokenizer = pretrained.load_tokenizer(model if own else "laion/CLIP-ViT-H-14-laion2B-s32B-b79K", "",
                                          skeleton.config.text_config.vocab_size, "pickscore_model")
    clip = pretrained.load(CLIPModel, model, "", torch.float32, device, "pickscore_model")
    size = clip.config.vision_config.image_size
    try:
        processor = CLIPImageProcessorPil.from_pretrained(model)
    except OSError as error:
        processor = CLIPImageProcessorPil(size={"shortest_edge": size}, crop_size=size)
        print(f"{model}: taking CLIP's image processor, at {size} pixels ({first_line(error)})", file=sys.stderr)
    try:
        ramp = torch.linspace(0, 1, 6 * size**2).view(1, 3, size, 2 * size)
        pixels, wanted = clip_pixels(ramp, processor), processor(uint8_frames(ramp[None])[0, 0], return_tensors="pt")
        if pixels.shape[2:] != (size, size) or (pixels - wanted["pixel_values"]).abs().max() > 0.1:
            raise ValueError(f"its image processor doesn't resize, cut to {size} x {size} and normalise as CLIP's do")
    except (ValueError, KeyError, TypeError, RuntimeError) as error:
        raise UserError(f"pickscore_model={model}: want an image processor like CLIP's: {first_line(error)}") from error
    return tokenizer, processor, clip


def same_tokens(prompts, **options):
    """Stands in for a tokenizer where no vocabulary is at hand: to measure with, all prompts are alike."""
    return {"input_ids": torch.tensor([[49406] * 76 + [49407]] * len(prompts))}


def clip_pixels(frames, processor):
    """n 3 h w in 0..1 -> n 3 H W as a CLIPImageProcessor gives it: 8 bits, resized, the centre, normalised.

    In torch, because the frames are on the GPU; equal to Pillow but for a level or two of 255 here and there.
    """
    height, width = frames.shape[-2:]
    edge, crop = processor.size["shortest_edge"], (processor.crop_size["height"], processor.crop_size["width"])
    size = (edge * height // min(height, width), edge * width // min(height, width))
    mode = {Image.Resampling.BILINEAR: "bilinear", Image.Resampling.BICUBIC: "bicubic"}[processor.resample]
    frames = (frames.float().clamp(0, 1) * 255).round()
    for shape in ((height, size[1]), size):  # across, then down, each rounded and clipped, as Pillow does it
        frames = F.interpolate(frames, shape, mode=mode, antialias=True).round().clamp(0, 255)
    top, left = (size[0] - crop[0]) // 2, (size[1] - crop[1]) // 2
    frames = frames[..., top : top + crop[0], left : left + crop[1]] / 255
    mean, std = (torch.tensor(values, device=frames.device)[:, None, None]
                 for values in (processor.image_mean, processor.image_std))
    return (frames - mean) / std


def load_pickscore(name, config, device):
    """-> reward: exp(logit_scale) <text, image> / 26, about 0.6 to 0.9, mean of evenly spaced frames after frame 0."""
    num_frames = config["pickscore_frames"]
    if num_frames < 1:
        raise UserError(f"pickscore_frames={num_frames}: want at least 1")
    tokenizer, processor, clip = load_clip(config["pickscore_model"], str(device))

    def pickscore(videos, prompts, metadata):
        first = min(1, videos.shape[1] - 1)  # frame 0 is given, unless it is all there is
        count = min(num_frames, videos.shape[1] - first)
        chosen = torch.linspace(first, videos.shape[1] - 1, count).round().long()
        frames = videos[:, chosen.to(videos.device)].flatten(0, 1)  # b*k 3 h w
        images = []
        for batch in frames.split(32):
            pixels = clip_pixels(batch.to(clip.device), processor)
            images.append(clip.get_image_features(pixel_values=pixels).pooler_output)
        images = F.normalize(torch.cat(images), dim=-1).unflatten(0, (len(videos), count))  # b k d

        distinct = list(dict.fromkeys(prompts))  # a group shares its prompt
        tokens = tokenizer(distinct, padding=True, truncation=True, return_tensors="pt",
                           max_length=clip.config.text_config.max_position_embeddings)
        texts = clip.get_text_features(input_ids=tokens["input_ids"].to(clip.device))  # causal: padding isn't seen
        texts = F.normalize(texts.pooler_output, dim=-1)
        texts = texts[[distinct.index(prompt) for prompt in prompts]]  # b d
        return clip.logit_scale.exp() * torch.einsum("bkd,bd->b", images, texts) / count / 26

    return pickscore


# ----------------------------------------------------------------------------- a reward in another process


def load_http(url, config, device):
    """-> reward: POSTs an .npz of videos (uint8 b f h w 3) and json (a string of {"prompts": [], "metadata": []}), and
    reads {"rewards": [b numbers]}. A failed attempt is repeated after 1, 2 and 4 seconds, or as the answer asks.
    """
    timeout = config["reward_timeout"]

    def ask(body, seconds):
        for attempt in range(4):
            pause = 2**attempt
            try:
                code, headers, answer = web.request(url, body, {"Content-Type": "application/octet-stream"}, seconds)
                if code < 300 or body is None:
                    return answer
                reason = f"{url}: answered {code} {http.client.responses.get(code, '')}"
                if code < 500 and code not in (408, 429):  # it's there, and says no: that doesn't pass by itself
                    break
                if (asked := web.retry_after(headers)) is not None:
                    pause = min(asked, timeout)
            except web.ServerError as error:
                reason = str(error)
            if attempt < 3:
                time.sleep(pause)
        raise UserError(f"reward {reason} after {attempt + 1} attempts: is its server running there?")

    ask(None, min(timeout, 10))  # a GET, whatever the answer: a wrong address shows before any weight is loaded

    def remote(videos, prompts, metadata):
        plain = json.dumps({"prompts": prompts, "metadata": metadata}, default=lambda value: None)  # tensors stay here
        body = io.BytesIO()
        np.savez(body, videos=uint8_frames(videos), json=np.array(plain))
        answer = ask(body.getvalue(), timeout)
        try:
            return torch.tensor(json.loads(answer)["rewards"], dtype=torch.float32)
        except (ValueError, KeyError, TypeError, RecursionError):
            got = answer[:60].decode(errors="replace")
            raise UserError(f'reward {url}: got {got!r}, want {{"rewards": [{len(prompts)} numbers]}}') from None

    return remote


# ----------------------------------------------------------------------------- the mix


def ready(reward):
    """A reward that nothing has to be loaded for, as REWARDS wants it."""
    return lambda name, config, device: reward


REWARDS = {  # name -> loader (name, config, device) that returns the reward
    "pickscore": load_pickscore,
    "smoothness": ready(smoothness),
    "first_frame": ready(first_frame),
    "jpeg": ready(jpeg),
    "ball": ready(ball),
    "ball_success": ready(ball_success),
    "views": ready(views),
    "http": load_http,  # for names that are an http:// or https:// address
}


def is_url(name):
    return name.startswith(("http://", "https://"))


def parse_rewards(spec, setting="rewards"):
    """ "pickscore:1.0,smoothness:0.1" -> [("pickscore", 1.0), ("smoothness", 0.1)]. Raises UserError."""
    parsed = []
    for part in (part.strip() for part in spec.split(",")):
        if is_url(part):  # http://host:8000 ends in a port, http://host:8000:1.0 in a weight
            if re.fullmatch(r"https?://[^/]+/.*:\d+", part):
                raise UserError(f"{setting}={spec}: got a weight without a dot, want {part}.0")
            name, weight = re.fullmatch(r"(.*?)(?::(-?\d*\.\d*))?", part).groups("1")
        else:
            name, weight = (part if ":" in part else f"{part}:1").split(":", 1)
        if not is_url(name) and (name not in REWARDS or name == "http"):
            near = difflib.get_close_matches(name, REWARDS, n=1, cutoff=0.5)
            meant = f" (did you mean {near[0]}?)" if near and near[0] != name else ""
            known = ", ".join(REWARDS).replace("http", "http://host:port/path")
            raise UserError(f"{setting}={spec}: got {name!r}{meant}, want some of {known}, each with :weight")
        try:
            number = float(weight)
        except ValueError:
            number = math.nan
        if not math.isfinite(number):
            raise UserError(f"{setting}={spec}: got weight {weight!r} of {name}, want a number as in {name}:1.0")
        if name in dict(parsed):
            raise UserError(f"{setting}={spec}: got {name} twice, want it once")
        parsed.append((name, number))
    return parsed


class Settings(dict):
    """A script's settings as the loader of a reward gets them: one that isn't there is one line, no KeyError."""

    def __missing__(self, setting):
        raise UserError(f"reward {self['reward']}: got no setting {setting}, want it among those of the script")


def load_rewards(names, config, device="cpu"):
    """Names, or a specification for parse_rewards -> {name: reward}, models loaded and servers reached.

    config: the script's settings, {name: value}.
    """
    names = dict(parse_rewards(names)) if isinstance(names, str) else names
    loaders = {name: REWARDS["http" if is_url(name) else name] for name in names}
    return {name: load(name, Settings(config, reward=name), device) for name, load in loaders.items()}


@torch.no_grad()
def score(rewards, videos, prompts, metadata):
    """{name: reward}, videos b f 3 h w in 0..1 -> {name: b float32 on the CPU}. Raises UserError for a NaN or shape."""
    if videos.ndim != 5 or videos.shape[2] != 3 or not len(videos) == len(prompts) == len(metadata):
        raise ValueError(f"videos {tuple(videos.shape)}, {len(prompts)} prompts, {len(metadata)} metadata")
    scores = {}
    for name, reward in rewards.items():
        try:  # on copies, for it may be somebody's own that writes into them
            returned = reward(videos.clone(), *copy.deepcopy((prompts, metadata)))
        except (UserError, KeyboardInterrupt, fsdp.Stopped):
            raise
        except BaseException as error:  # sys.exit too: the run ends as with any failing reward; its author sees where
            traceback.print_exc()
            raise UserError(f"reward {name}: {type(error).__name__}: {error}") from None
        try:
            values = torch.as_tensor(returned).detach().float().cpu()
        except (TypeError, ValueError, RuntimeError):
            raise UserError(f"reward {name}: got {returned!r:.60}, want {len(videos)} numbers, one a video") from None
        if values.shape != (len(videos),):
            raise UserError(f"reward {name}: got shape {tuple(values.shape)}, want ({len(videos)},), a number a video")
        if not values.isfinite().all():
            index = int((~values.isfinite()).nonzero()[0])
            raise UserError(f"reward {name}: got {values[index].item()} for {prompts[index]!r}, want finite numbers")
        scores[name] = values
    return scores


def mix(scores, weights):
    """{name: b}, [(name, weight)] -> b: the weighted sum."""
    return sum(weight * scores[name] for name, weight in weights)


def group_advantages(rewards, groups, global_std=False, clip=5.0):
    """Rewards n, the group of each n int -> (advantages n float32, number of groups whose rewards are all equal).

    (r - mean of its group) / (std of its group + 1e-4), population std, or that of the whole batch with global_std,
    clamped to +-clip (Flow-GRPO, arXiv 2505.05470, eq. 4). A group of equal rewards says nothing: exactly 0.
    """
    rewards = rewards.double()
    advantages, num_equal = torch.zeros_like(rewards), 0
    for group in groups.unique():
        own = groups == group
        members = rewards[own]
        if members.min() < members.max():
            std = (rewards if global_std else members).std(correction=0)
            advantages[own] = (members - members.mean()) / (std + 1e-4)
        else:
            num_equal += 1
    return advantages.clamp(-clip, clip).float(), num_equal


# ----------------------------------------------------------------------------- tried on video files

clips = ""  # video files, comma-separated, also without --clips=
rewards = "smoothness:1.0,first_frame:1.0"  # name:weight, comma-separated
prompt = ""  # what the clips should show
metadata = "{}"  # JSON object, as in a prompt file
pickscore_model = "yuvalkirstain/PickScore_v1"  # folder or hub id; "random": full size, random weights
pickscore_frames = 4  # frames scored a clip, evenly spaced, the first left out
reward_timeout = 60.0  # seconds an http reward may take
device = "auto"  # "auto" | "cpu" | "cuda"


def try_rewards(config):
    """Print what each reward says of each clip, then the weighted sums."""
    weights = parse_rewards(config["rewards"])
    entry = parse_json(config["metadata"], "metadata", 'a JSON object like {"colour": "red", "direction": "left"}')
    clips = [clip.strip() for clip in config["clips"].split(",") if clip.strip()]
    if not clips:
        raise UserError("got no clip, want python reward.py clip.mp4 --rewards=...")
    *_, device = fsdp.init(config["device"])
    videos = [torch.from_numpy(read_mp4(clip)[0]).movedim(-1, 1)[None] for clip in clips]  # 1 f 3 h w uint8
    loaded = load_rewards(dict(weights), config, device)
    scores = [score(loaded, video.to(device) / 255, [config["prompt"]], [entry]) for video in videos]
    rows = {f"{name}:{weight:g}": [each[name] for each in scores] for name, weight in weights}
    rows["weighted sum"] = [mix(each, weights) for each in scores]
    width = max(map(len, rows))
    for label, values in rows.items():
        for clip, value in zip(clips, values, strict=True):
            print(f"{label:{width}} {value.item():12.6f}  {clip}")


if __name__ == "__main__":
    try_rewards(configure(globals(), also="rewards", others="clips"))
