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
import hashlib
import http.client
import io
import itertools
import json
import math
import re
import sys
import time
import traceback
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoTokenizer, CLIPConfig, CLIPModel

import fsdp
import web
from configurator import configure
from guard import UserError, first_line
from task_rewards import ball, ball_success, first_frame, jpeg, smoothness, uint8_frames, views
from video import read_mp4

CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
CLIP_SIZE, CLIP_BATCH = 224, 32  # pixels; frames in one forward

# ----------------------------------------------------------------------------- PickScore, arXiv 2305.01569


@functools.lru_cache(maxsize=1)  # rewards that are trained on and held-out ones share it
def load_clip(model, device):
    """-> (tokenizer, frozen CLIPModel). "random": CLIP-ViT-H-14 in full size with random weights, to measure with."""
    if model == "random":
        text = dict(hidden_size=1024, intermediate_size=4096, num_hidden_layers=24, num_attention_heads=16)
        vision = dict(hidden_size=1280, intermediate_size=5120, num_hidden_layers=32, num_attention_heads=16)
        vision, both = vision | dict(patch_size=14), dict(hidden_act="gelu", projection_dim=1024)
        config = CLIPConfig(text_config=text | both, vision_config=vision | both, projection_dim=1024)
        torch.manual_seed(0)  # the same on every rank and in every run
        with torch.device(device):
            clip = CLIPModel(config)
        return hash_tokenizer, clip.eval().requires_grad_(False)
    own = any((Path(model) / name).exists() for name in ("tokenizer.json", "vocab.json"))
    try:
        tokenizer = AutoTokenizer.from_pretrained(model if own else "laion/CLIP-ViT-H-14-laion2B-s32B-b79K")
        clip = CLIPModel.from_pretrained(model, dtype=torch.float32)
    except (OSError, ValueError) as error:
        raise UserError(f"pickscore_model={model}: want a hub id, or a folder of a CLIPModel with its tokenizer in it "
                        f"({first_line(error)})") from error
    return tokenizer, clip.to(device).eval().requires_grad_(False)


def hash_tokenizer(prompts, **options):
    """Stands in for CLIP's where no vocabulary is at hand: a word's number is its hash."""
    rows = []
    for prompt in prompts:
        hashes = [hashlib.sha256(word.encode()).digest() for word in prompt.lower().split()[:75]]
        words = [1 + int.from_bytes(digest[:7], "big") % 49404 for digest in hashes]
        rows.append(torch.tensor([49406, *words, 49407]))
    ids = pad_sequence(rows, batch_first=True, padding_value=-1)
    return {"input_ids": ids.where(ids >= 0, 49407), "attention_mask": ids >= 0}


def clip_pixels(frames):
    """n 3 h w in 0..1 -> n 3 224 224 as CLIPImageProcessor gives it: 8 bits, shorter side to 224, bicubic, centre.

    In torch, because the frames are on the GPU; equal to Pillow but for a level or two of 255 here and there.
    """
    height, width = frames.shape[-2:]
    short = min(height, width)
    frames = (frames.float().clamp(0, 1) * 255).round()
    size = (CLIP_SIZE * height // short, CLIP_SIZE * width // short)
    for shape in ((height, size[1]), size):  # across, then down, each rounded and clipped, as Pillow does it
        frames = F.interpolate(frames, shape, mode="bicubic", antialias=True).round().clamp(0, 255)
    top, left = (size[0] - CLIP_SIZE) // 2, (size[1] - CLIP_SIZE) // 2
    frames = frames[..., top : top + CLIP_SIZE, left : left + CLIP_SIZE] / 255
    mean, std = (torch.tensor(values, device=frames.device)[:, None, None] for values in (CLIP_MEAN, CLIP_STD))
    return (frames - mean) / std


def load_pickscore(name, config, device):
    """-> reward: exp(logit_scale) <text, image> / 26, about 0.6 to 0.9, mean of evenly spaced frames after frame 0."""
    num_frames = config["pickscore_frames"]
    if num_frames < 1:
        raise UserError(f"pickscore_frames={num_frames}: want at least 1")
    tokenizer, clip = load_clip(config["pickscore_model"], str(device))

    def pickscore(videos, prompts, metadata):
        first = min(1, videos.shape[1] - 1)  # frame 0 is given, unless it is all there is
        count = min(num_frames, videos.shape[1] - first)
        chosen = torch.linspace(first, videos.shape[1] - 1, count).round().long()
        frames = videos[:, chosen.to(videos.device)].flatten(0, 1)  # b*k 3 h w
        images = []
        for batch in frames.split(CLIP_BATCH):
            pixels = clip_pixels(batch.to(clip.device))
            images.append(clip.get_image_features(pixel_values=pixels).pooler_output)
        images = F.normalize(torch.cat(images), dim=-1).unflatten(0, (len(videos), count))  # b k d

        distinct = list(dict.fromkeys(prompts))  # a group shares its prompt
        tokens = tokenizer(distinct, padding=True, truncation=True, max_length=77, return_tensors="pt")
        tokens = {key: tokens[key].to(clip.device) for key in ("input_ids", "attention_mask")}
        texts = F.normalize(clip.get_text_features(**tokens).pooler_output, dim=-1)
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
        except (ValueError, KeyError, TypeError):
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

    def __init__(self, config, reward):
        super().__init__(config)
        self.reward = reward

    def __missing__(self, setting):
        raise UserError(f"reward {self.reward}: got no setting {setting}, want it among those of the script")


def load_rewards(names, config, device="cpu"):
    """Names, or a specification for parse_rewards -> {name: reward}, models loaded and servers reached.

    config: the script's settings, {name: value}.
    """
    names = dict(parse_rewards(names)) if isinstance(names, str) else names
    return {name: REWARDS["http" if is_url(name) else name](name, Settings(config, name), device) for name in names}


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

rewards = "smoothness:1.0,first_frame:1.0"  # name:weight, comma-separated
prompt = ""  # what the clips should show
metadata = "{}"  # JSON object, as in a prompt file
pickscore_model = "yuvalkirstain/PickScore_v1"  # folder or hub id; "random": full size, random weights
pickscore_frames = 4  # frames scored a clip, evenly spaced, the first left out
reward_timeout = 60.0  # seconds an http reward may take
device = "auto"  # "auto" | "cpu" | "cuda"


def take_clips():
    """Takes out of the command line, and returns, what is neither a setting, a setting's value nor a config file."""
    clips, others = [], sys.argv[:1]
    for before, word in itertools.pairwise(sys.argv):
        is_value = before.startswith("--") and "=" not in before
        is_clip = not is_value and not word.startswith("-") and not word.endswith(".py")
        (clips if is_clip else others).append(word)
    sys.argv = others
    return clips


def try_rewards(clips, config):
    """Paths, settings: prints what each reward says of each clip, then the weighted sums."""
    weights = parse_rewards(config["rewards"])
    try:
        entry = {**json.loads(config["metadata"])}
    except (ValueError, TypeError, RecursionError):  # no JSON, no object
        wanted = """want a JSON object like {"colour": "red", "direction": "left"}"""
        raise UserError(f"metadata={config['metadata']:.60}: {wanted}") from None
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
    clips = take_clips()
    try_rewards(clips, configure(globals(), also="rewards"))
