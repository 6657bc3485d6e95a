"""What exported adapters, models and checkpoints belong to: their record, what sample.py takes from it, and refuses.

A record is one JSON dict: the run's settings that its weights belong to, by sample.py's names, the base model (kind,
sizes, content), the box of the pointmaps and the commit. Adapters have it in their metadata ("nanowan"), a model folder
in nanowan.json, a checkpoint in the settings and the box of its meta.json.
"""

import os

import adapters
import checkpoints
from configurator import git_commit, given
from fsdp import say
from guard import UserError, read_json
from latent_cache import contents, weights_identity

BASE = ("kind", "num_layers", "dim", "ffn_dim", "in_channels", "out_channels", "content of model")  # of a record
GEOMETRY = ("views", "pointmaps", "cell_height", "cell_width", "num_frames", "shift")  # of a record
SETTINGS = (  # of a record: those that sample.py must have too, then those that may be given otherwise
    "model", *GEOMETRY, "experts", "clamp_first_frame", "boundary_ratio", "max_text_tokens", "text_dtype",
    "negative_prompt", "guidance_scale", "guidance_scale_2", "fps", "dtype")


def settings_of(config):
    """The settings that a run's weights belong to; train_grpo.py's picture is a cell of one view without name."""
    if "height" in config:
        config = dict(views="", pointmaps=False, clamp_first_frame=False, cell_height=config["height"],
                      cell_width=config["width"]) | config
    return {name: config[name] for name in SETTINGS if name in config}


def belongs_to(wan, config, box=None):
    """The record of a run with this model and these settings; box: x0 y0 z0 x1 y1 z1 of its pointmaps, metres."""
    content = contents(config, "model")["content of model"] or weights_identity(wan.model, "transformer")
    sizes = {name: wan.config[name] for name in ("num_layers", "ffn_dim", "in_channels", "out_channels")}
    sizes["dim"] = wan.config["num_attention_heads"] * wan.config["attention_head_dim"]
    return settings_of(config) | sizes | {"kind": wan.kind, "boundary_ratio": wan.boundary_ratio or 0.0, "box": box,
                                          "content of model": content, "commit": git_commit()}


def check_base(record, ours, source):
    """UserError unless a record is of our record's base model: kind, sizes and content, or name without a content."""
    for name in (*BASE, "model"):
        was, now = str(record.get(name) or ""), str(ours[name])
        if name == "content of model" and "random:" not in was + now and ("@" in was) != ("@" in now):
            continue  # one is a hub id's commit, the other a hash of files: their sizes have been compared
        if was and was != now and not (name == "model" and record.get("content of model")):
            raise UserError(f"model={ours['model']}: {source} was trained on {record.get('model')}, whose {name} is "
                            f"{was}, here {now}: want the model it was trained on")


def compare(record, ours):
    """-> a line's words on the geometry and the noise levels of a record and ours."""
    if not record:
        return "doesn't say what it belongs to (older, or of another tool): only names and sizes can be checked"
    changes = [f"{name} {record[name]} -> {ours[name]}" for name in GEOMETRY
               if name in record and name in ours and record[name] != ours[name]]
    return f"of {record.get('model')}; {', '.join(changes) or 'the same cells, frames and shift'}"


def check_start(init_lora, ours):
    """UserError unless adapters to start from are of our base model. Another size is printed: a run may go on in it."""
    for file in adapters.adapter_files(init_lora) if init_lora else ():
        check_base(file.record, ours, file.given)
        say(f"init_lora  {file.name}: {compare(file.record, ours)}")


def records_of(config):
    """[(path, its record)] of the weights that sample.py is given, one a file of a lora; {} where they say nothing.

    Where no adapter says anything, as another tool's doesn't, the model under them may.
    """
    lora, checkpoint, of_model = config["lora"], config["checkpoint"], f"{config['model']}/nanowan.json"
    if lora and checkpoint:
        raise UserError("lora and checkpoint: want one of them")
    if lora and (said := [(file.given, file.record) for file in adapters.adapter_files(lora) if file.record]):
        return said
    if checkpoint:
        if not os.path.isfile(os.path.join(checkpoint, "meta.json")):
            raise UserError(f"checkpoint={checkpoint}: no meta.json there; want a run's ckpt/step_NNNNNN")
        meta = checkpoints.read_meta(checkpoint)
        return [(checkpoint, settings_of(meta["config"]) | {
            "box": meta.get("box"), "content of model": meta["config"].get("content of model")})]
    record = read_json(of_model, "what full fine-tuning exported") if os.path.isfile(of_model) else {}
    of_base = ("model", "content of model")
    return [(config["model"], {name: value for name, value in record.items() if name not in of_base})]


def recorded(config):
    """What sample.py takes where nothing is given: {setting: value} of config["run"] and of the weights' record."""
    path, found = config["run"], {}
    if path:
        settings = read_json(path, "a run's config.json").get("settings")
        if not isinstance(settings, dict) or "model" not in settings:
            raise UserError(f"{path}: no settings of a run in it, want the config.json of a run's out_dir")
        found, out_dir = settings | settings_of(settings), os.path.dirname(path)
        if not (config["lora"] or config["checkpoint"] or "model" in given):
            there = [name for name in ("lora", "model") if os.path.isdir(os.path.join(out_dir, name))]
            if not there:
                saved = (checkpoints.saved_in(out_dir) or ["(it has saved none yet)"])[-1]
                raise UserError(f"{path}: neither lora/ nor model/ is beside it, want a run that has exported one, or "
                                f"--checkpoint={saved}")
            found[there[0]] = os.path.join(out_dir, there[0])
        config = config | {name: found[name] for name in ("model", "lora") if name in found and name not in given}
    return found | records_of(config)[0][1]


def check(wan, config):
    """UserError where settings or the model aren't those of the weights -> their record, {} where they say nothing."""
    ours, records = belongs_to(wan, config), records_of(config)
    for source, record in records:
        check_base(record, ours, source)
        for name in GEOMETRY:
            was, now = record.get(name), config[name]
            unnamed = name == "views" and was == ""  # one picture
            if name in record and was != now and not (unnamed and "," not in now):
                was = "one view" if unnamed else was
                raise UserError(f"{name}={now}: {source} was trained with {was}, want the same")
    return records[0][1]
