"""Checkpoints of a run: what training changes, written whole or not at all, and read back on any number of ranks.

They are torch.distributed.checkpoint's, in safetensors files (no pickle) with a meta.json.
"""

import glob
import json
import math
import os
import re
import shutil
from contextlib import contextmanager

import torch
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.tensor import DTensor

from fsdp import all_ranks_agree, is_first, say
from guard import Diverged, UserError, read_json, remove_folder, replace_folder


def training_tensors(parameters, optimizer, averages=None, saved=None):
    """Everything a step changes, as one flat {name: tensor}: parameters, AdamW's moments and counts, averages.

    averages: {prefix of the names: {name: tensor}}, such as {"ema": ema.shadow}, or of an old policy.
    saved: names that a checkpoint holds; the optimizer state among them is allocated so that it can be loaded into.
    """
    tensors = {f"parameter.{name}": parameter.detach() for name, parameter in parameters.items()}
    for name, parameter in parameters.items():
        if saved is not None and f"optimizer.{name}.exp_avg" in saved:
            moments = dict(exp_avg=torch.zeros_like(parameter), exp_avg_sq=torch.zeros_like(parameter))
            count = torch.zeros((), device=parameter.device if optimizer.defaults["fused"] else "cpu")
            optimizer.state[parameter] = dict(step=count, **moments)
        for key, tensor in optimizer.state.get(parameter, {}).items():  # an expert not drawn so far has none
            tensors[f"optimizer.{name}.{key}"] = tensor
    for prefix, average in (averages or {}).items():
        if saved is not None and not any(name.startswith(f"{prefix}.") for name in saved):
            raise UserError(f"the checkpoint has no average {prefix!r}, as this script has: start in another out_dir")
        tensors |= {f"{prefix}.{name}": tensor for name, tensor in average.items()}
    return tensors


def saved_in(out_dir):
    """Whole checkpoints of a run, oldest first: [out_dir/ckpt/step_000120, ...]. One without meta.json isn't whole."""
    return [path for path in _folders(out_dir) if os.path.isfile(os.path.join(path, "meta.json"))]


def _folders(out_dir):
    folder = os.path.join(out_dir, "ckpt")
    names = [name for name in os.listdir(folder) if re.fullmatch(r"step_\d{6,}", name)] if os.path.isdir(folder) else []
    return [os.path.join(folder, name) for name in sorted(names, key=lambda name: int(name.removeprefix("step_")))]


def to_resume(out_dir, resume, last=math.inf):
    """-> the last whole checkpoint of out_dir, or None for a new run. last: the step at which the run will end."""
    found = saved_in(out_dir)
    for path in _folders(out_dir):
        if path not in found:
            say(f"warning    {path} has no meta.json: stepped over")
    name = os.path.basename(found[-1]) if found else "step_0"
    if found and not resume:
        raise UserError(f"resume=False: {out_dir} holds {name}: choose another out_dir")
    if int(name.removeprefix("step_")) > last:
        raise UserError(f"{out_dir} holds {name}, past this run's end at {last}: want a later end, or another out_dir")
    return found[-1] if found else None


def check_same_config(checkpoint, saved, current, may_change, defaults):
    """UserError naming the settings in which a checkpoint's config differs from the current one.

    Scripts change: a setting that is new is as if it had been at its default, one that is gone matters no more.
    -> those that differ and may, for the user to see: "fps 8 -> 9, num_val_videos 2 -> 0", or "nothing".
    """
    current, defaults = json.loads(json.dumps([current, defaults]))  # as saved: tuples are lists there
    gone = {name: f"{name} {saved[name]!r} -> no longer a setting" for name in saved.keys() - current.keys()}
    before = defaults | saved
    changes = {name: f"{name} {before.get(name)!r} -> {value!r}" for name, value in current.items()
               if value != before.get(name) and (name in saved or not name.startswith("content of "))}
    refused = ", ".join(changes[name] for name in sorted(changes) if name not in may_change)
    if refused:
        run = os.path.dirname(os.path.dirname(checkpoint))
        way_on = f"init_lora={run}/lora" if saved.get("lora_rank") else f"model={run}/model (written at the run's end)"
        raise UserError(f"{checkpoint} was made with another config ({refused}): use another out_dir, where {way_on} "
                        "starts from what was learnt, or the old values")
    changes |= gone
    return ", ".join(changes[name] for name in sorted(changes)) or "nothing"


@contextmanager
def one_line_if_disk_fails(final, temporary):
    """Where a rank cannot write a checkpoint all end with one line, and what was written of it is removed."""
    with all_ranks_agree():
        try:
            yield
        except (OSError, CheckpointException) as error:  # DCP raises one rank's failure on all
            reason = next(iter(error.failures.values()))[0] if isinstance(error, CheckpointException) else error
            shutil.rmtree(temporary, ignore_errors=True)
            if isinstance(reason, KeyboardInterrupt):
                raise reason from None  # a second Ctrl-C, not the disk
            kept = "the last whole one is kept; free some space and resume"
            raise UserError(f"checkpoint {final}: {reason}: {kept}") from None


def save(out_dir, step, tensors, meta, keep_last):
    """Write out_dir/ckpt/step_NNNNNN: each rank its shards, then meta.json, then one rename. Collective.

    A kill at any moment leaves the previous checkpoint or this one, never a part: the name appears only after every
    rank has written its last byte and all agree that none failed.
    """
    folder = os.path.join(out_dir, "ckpt")
    final, temporary = (os.path.join(folder, f"{kind}_{step:06d}") for kind in ("step", "tmp"))
    with one_line_if_disk_fails(final, temporary):
        if is_first():
            for left_by_a_kill in glob.glob(os.path.join(glob.escape(folder), "tmp_*")):
                shutil.rmtree(left_by_a_kill)
            os.makedirs(temporary)
    with one_line_if_disk_fails(final, temporary):
        dcp.save(tensors, storage_writer=HuggingFaceStorageWriter(temporary, save_distributed=True))
    with one_line_if_disk_fails(final, temporary):
        if is_first():
            with open(os.path.join(temporary, "meta.json"), "w", encoding="utf-8") as file:
                sizes = {name: os.path.getsize(os.path.join(temporary, name)) for name in sorted(os.listdir(temporary))
                         if name.endswith(".safetensors")}
                json.dump(meta | {"files": sizes}, file, indent=1)
                file.flush()
                os.fsync(file.fileno())
            replace_folder(temporary, final)
            for old in saved_in(out_dir)[:-keep_last] if keep_last > 0 else []:
                remove_folder(old)


@contextmanager
def saving(save, out_dir, start_step, step):
    """Where the inside fails on any rank, all save what was trained before they stop.

    save: step -> None, collective; start_step: where this run began, which is saved or nothing. Collective.
    """
    try:
        with all_ranks_agree():
            yield
    except UserError as error:
        if step > start_step and not isinstance(error, Diverged):
            save(step)
            say(f"saved      {out_dir}/ckpt/step_{step:06d}: the same command resumes")
        raise


@contextmanager
def one_line_if_damaged(path):
    """Our own writes leave no half checkpoint, but copies of them may be cut short."""
    try:
        yield
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise UserError(f"checkpoint {path} is damaged ({error}): remove it to go on from the one before") from None


def read_meta(path):
    """What save was given as meta. UserError unless all shards are there: DCP would load what it finds."""
    with one_line_if_damaged(path):
        meta = read_json(os.path.join(path, "meta.json"), "what a checkpoint was saved with")
        for name, size in meta.pop("files", {}).items():
            if (there := os.path.getsize(os.path.join(path, name))) != size:
                raise ValueError(f"{name}: {there} bytes, want {size}")
    return meta


def saved_names(path):
    """Names of the tensors in a checkpoint, from the safetensors headers."""
    with one_line_if_damaged(path):
        return set(HuggingFaceStorageReader(path).read_metadata().state_dict_metadata)


def load(path, tensors):
    """Fill tensors in place from a checkpoint written by any number of ranks. UserError for NaN. Collective."""
    dcp.load(tensors, storage_reader=HuggingFaceStorageReader(path))
    with all_ranks_agree():
        for name, tensor in tensors.items():
            if not (tensor.to_local() if isinstance(tensor, DTensor) else tensor).isfinite().all():
                raise UserError(f"checkpoint {path}: got NaN or infinity in {name}: go on from one before")


def restore(path, parameters, optimizer, averages):
    """What training_tensors saved, back in place. Collective."""
    load(path, training_tensors(parameters, optimizer, averages, saved_names(path)))
