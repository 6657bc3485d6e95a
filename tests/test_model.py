import json
import shutil
from pathlib import Path

import pytest
import torch
from diffusers import WanImageToVideoPipeline, WanPipeline, WanTransformer3DModel
from diffusers.loaders.lora_conversion_utils import _convert_non_diffusers_wan_lora_to_diffusers
from safetensors import safe_open
from safetensors.torch import load_file
from torch.utils.flop_counter import FlopCounterMode

import adapters
import cost
import flow
import fsdp
import model as wan_model
import tiny
from guard import UserError
from helpers import load

ATTENTION = "to_q,to_k,to_v,to_out.0"
EVERYTHING = f"{ATTENTION},ffn.net.0.proj,ffn.net.2"
RECORD = {"model": "base", "kind": "i2v", "views": "left,right", "num_frames": 5, "box": None}
SIGMA = {"high": torch.tensor([0.95]), "low": torch.tensor([0.5]), "single": torch.tensor([0.7])}
FLOAT32 = ("time_embedder", "scale_shift_table", "norm1", "norm2", "norm3")  # what Wan keeps in float32 under bfloat16


def velocities(wan):
    """{expert: velocity} of fixed inputs."""
    condition = flow.randn((1, 16, 3 if wan.kind == "i2v" else 1, 4, 4), 1)
    noise, text = flow.randn((1, 16, 3, 4, 4), 2), flow.randn((1, 16, 64), 3)
    with torch.no_grad():
        return {name: wan_model.velocity(wan, noise, SIGMA[name], condition, text) for name in wan.expert_names}


def add_random_lora(wan, rank, alpha, targets):
    """Adapters with B away from zero -> {expert: {file name: tensor}}."""
    for index, transformer in enumerate(wan.experts.values()):
        adapters.add_lora(transformer, rank, alpha, targets)
        generator = torch.Generator().manual_seed(index)
        for name, parameter in transformer.named_parameters():
            if ".lora_B." in name:
                parameter.data.normal_(0, 0.2, generator=generator)
    exported = {expert: {} for expert in wan.experts}
    for name, parameter in wan_model.trainable_parameters(wan).items():
        expert, name = name.split(".", 1)
        exported[expert][adapters.adapter_name(name)] = parameter.detach().clone()
    return exported


def metadata_of(path):
    with safe_open(path, framework="pt") as file:
        return {key: text if key == "format" else json.loads(text) for key, text in file.metadata().items()}


def pipeline_of(folder, kind):
    pipeline_class = WanImageToVideoPipeline if kind == "i2v" else WanPipeline
    return pipeline_class.from_pretrained(folder, text_encoder=None, tokenizer=None)


def pipeline_velocities(wan, pipeline):
    """The same as velocities(wan), by the transformers of a diffusers pipeline."""
    transformers = [pipeline.transformer, pipeline.transformer_2]
    experts = dict(zip(wan.expert_names, transformers, strict=False))
    return velocities(wan_model.Wan(wan.model, wan.kind, wan.expert_names, wan.boundary_ratio, {}, wan.dtype, experts))


def assert_same(got, want):
    assert got.keys() == want.keys()
    for name in want:
        torch.testing.assert_close(got[name], want[name], atol=1e-5, rtol=1e-5)


def differ(got, want):
    return min((got[name] - want[name]).abs().max().item() for name in want)


# ----------------------------------------------------------------------------- describe


def test_counts_of_the_released_models():
    assert cost.count_parameters(wan_model.describe("random:ti2v-5b").config) == 4_999_787_712
    assert cost.count_parameters(wan_model.describe("random:i2v-a14b").config) == 14_288_901_184


@pytest.mark.parametrize("name, rank, targets, trainable, tensors, total", [
    ("ti2v-5b", 4, EVERYTHING, 10_076_160, 600, 5_009_863_872),
    ("i2v-a14b", 16, ATTENTION, 52_428_800, 640, 14_288_901_184 + 52_428_800),
])
def test_counts_of_adapters(name, rank, targets, trainable, tensors, total):
    wan = wan_model.describe(f"random:{name}")
    with torch.device("meta"):
        expert = wan.expert_names[0]
        wan.experts[expert] = WanTransformer3DModel.from_config(wan.config).requires_grad_(False)
        adapters.add_lora(wan.experts[expert], rank, 2 * rank, targets)
    parameters = wan_model.trainable_parameters(wan)
    assert len(parameters) == tensors and sum(p.numel() for p in parameters.values()) == trainable
    assert len({key.rsplit(".lora_", 1)[0] for key in parameters}) == tensors // 2
    assert sum(p.numel() for p in wan.experts[expert].parameters()) == total
    assert f"{expert}.blocks.0.attn1.to_q.lora_A.default.weight" in parameters
    estimate = cost.estimate_memory(wan.config, 1000, 1, 2, torch.bfloat16, rank, targets, "selective", ema=False)
    assert estimate["state"] == trainable * 16 / 2 / 2**30  # float32: itself, gradient, two moments; on two GPUs
    assert estimate["weights"] == pytest.approx((total - trainable) * 2 / 2 / 2**30)
    full = cost.estimate_memory(wan.config, 1000, 1, 1, torch.bfloat16, 0, targets, "full", True, reference=True)
    assert full["state"] == (total - trainable) * 16 / 2**30  # and the average
    assert full["weights"] == (total - trainable) * (4 + 2) / 2**30  # float32 masters, the frozen copy in bfloat16


def test_describe(checkpoints):
    for name, kind, names, boundary, layers in [
        (checkpoints["i2v"], "i2v", ("high", "low"), 0.9, 3),
        (checkpoints["ti2v"], "ti2v", ("single",), None, 3),
        (checkpoints["t2v"], "t2v", ("high", "low"), 0.875, 3),
        ("random:i2v-a14b", "i2v", ("high", "low"), 0.9, 40),
        ("random:t2v-a14b", "t2v", ("high", "low"), 0.875, 40),
        ("random:ti2v-5b:2", "ti2v", ("single",), None, 2),
        ("random:t2v-1.3b", "t2v", ("single",), None, 30),
    ]:
        wan = wan_model.describe(name)
        assert (wan.kind, wan.expert_names, wan.boundary_ratio) == (kind, names, boundary)
        assert wan.config["num_layers"] == layers
    assert wan_model.describe(checkpoints["i2v"], boundary_ratio=0.8).boundary_ratio == 0.8
    assert wan_model.describe(checkpoints["ti2v"], boundary_ratio=0.8).boundary_ratio is None


def test_shift_is_the_schedulers_where_it_is_0(checkpoints, tmp_path):
    shutil.copytree(checkpoints["ti2v"], tmp_path / "ti2v")
    folder, file = str(tmp_path / "ti2v"), tmp_path / "ti2v/scheduler/scheduler_config.json"
    for scheduler, shift in [({"flow_shift": 3.0}, 3.0), ({"shift": 7}, 7), ({"flow_shift": 1.5, "shift": 7}, 1.5)]:
        file.write_text(json.dumps(scheduler))
        assert wan_model.describe(folder, shift=0).shift == shift
        assert wan_model.describe(folder, shift=2.5).shift == 2.5
    for scheduler in ({}, {"flow_shift": "three"}, {"flow_shift": 0}):
        file.write_text(json.dumps(scheduler))
        with pytest.raises(UserError, match=f"^shift=0: the scheduler of {folder} has .*: want a number"):
            wan_model.describe(folder, shift=0)
    file.unlink()
    assert wan_model.describe(folder, shift=2.5).shift == 2.5
    with pytest.raises(UserError, match="scheduler_config.json"):
        wan_model.describe(folder, shift=0)
    assert wan_model.describe("random:ti2v-5b", shift=0).shift == 5.0


def test_describe_refuses(checkpoints, tmp_path):
    def broken(index=None, config=None, without=""):
        """Path of a checkpoint of transformers alone, with changes in its JSON files."""
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        for part in ("", "transformer", "transformer_2"):
            name = "config.json" if part else "model_index.json"
            if part == without != "":
                continue
            settings = json.loads(Path(checkpoints["i2v"], part, name).read_text())
            settings |= (config if part else index) or {}
            (folder / part).mkdir(parents=True, exist_ok=True)
            for file in Path(checkpoints["i2v"], part).glob("*.safetensors"):
                shutil.copy(file, folder / part)
            (folder / part / name).write_text(json.dumps(settings))
        return str(folder)

    channels = broken()
    for part in ("transformer", "transformer_2"):
        tiny.make_transformer(20, 0).save_pretrained(Path(channels, part))
    assert wan_model.describe(broken()).kind == "i2v"
    for folder, message in [
        (broken(without="transformer_2"), "transformer_2"),
        (broken(index={"transformer_2": [None, None]}), "without transformer_2: want both experts"),
        (broken(without="transformer"), "can't load its model_index.json, transformer or scheduler"),
        (broken(index={"boundary_ratio": None}), "boundary_ratio=None: two experts want one between 0 and 1"),
        (broken(config={"image_dim": 1280}), "CLIP image encoder"),
        (channels, "in_channels=20, out_channels=16: want in = out"),
        (str(tmp_path / "nothing" / "here"), "no such folder"),
        (str(tmp_path), "can't load its model_index.json"),
        ("random:wrong", "want random: and one of i2v-a14b, t2v-a14b, t2v-1.3b, ti2v-5b"),
        ("random:i2v-a14b:two", "want random: and one of"),
    ]:
        with pytest.raises(UserError) as error:
            wan_model.describe(folder)
        assert message in str(error.value) and folder in str(error.value) and "\n" not in str(error.value)
    with pytest.raises(UserError, match="boundary_ratio=1.5"):
        wan_model.describe(checkpoints["i2v"], boundary_ratio=1.5)


# ----------------------------------------------------------------------------- precision


def is_float32(name):
    return any(part in name.split(".") for part in FLOAT32)


def test_dtypes(checkpoints, monkeypatch):
    """bfloat16 but for the modules that Wan keeps in float32: loaded, random, and as diffusers itself does it."""
    small = dict(num_attention_heads=2, attention_head_dim=16, num_layers=2, ffn_dim=64)
    monkeypatch.setitem(cost.RANDOM, "small", dict(experts=1, boundary_ratio=None, **small))
    for folder in (checkpoints["i2v"], "random:small"):
        wan = load(folder, torch.bfloat16)
        transformer = wan.experts[wan.expert_names[-1]]
        for name, parameter in transformer.named_parameters():
            assert parameter.dtype == (torch.float32 if is_float32(name) else torch.bfloat16), name
            assert not parameter.requires_grad
        assert not transformer.training
        assert all(buffer.dtype == torch.float32 for buffer in transformer.rope.buffers())
    pipeline = WanImageToVideoPipeline.from_pretrained(
        checkpoints["i2v"], dtype=torch.bfloat16, text_encoder=None, tokenizer=None
    )
    theirs = {name: parameter.dtype for name, parameter in pipeline.transformer.named_parameters()}
    ours = load(checkpoints["i2v"], torch.bfloat16).experts["high"].named_parameters()
    assert theirs == {name: parameter.dtype for name, parameter in ours}


def test_random_weights_are_the_same_on_every_rank():
    """And differ between experts, between seeds; the default dtype is left alone."""
    config = wan_model.describe("random:t2v-1.3b").config | dict(num_attention_heads=2, num_layers=1, ffn_dim=32)
    wan = wan_model.Wan("random:t2v-1.3b", "t2v", ("high", "low"), 0.9, config)

    def weight(expert, seed, before):
        torch.manual_seed(before)
        return wan_model.load_transformer(wan, expert, "cpu", torch.bfloat16, seed).blocks[0].attn1.to_q.weight

    first = weight("high", 0, before=1)
    assert torch.equal(first, weight("high", 0, before=2)) and torch.get_default_dtype() == torch.float32
    assert not torch.equal(first, weight("low", 0, 1)) and not torch.equal(first, weight("high", 7, 1))


def test_bfloat16_stays_near_float32(checkpoints):
    """And timesteps up to 1000 go through their embedder in float32, inside autocast too."""
    embedded = {}
    for dtype in (torch.float32, torch.bfloat16):
        wan = load(checkpoints["i2v"], dtype)
        embedder = wan.experts["high"].condition_embedder.time_embedder
        embedder.register_forward_hook(lambda module, args, output, dtype=dtype: embedded.update({dtype: output}))
        if dtype == torch.float32:
            exact = velocities(wan)
        else:
            rounded = velocities(wan)
    assert embedded[torch.bfloat16].dtype == torch.float32
    torch.testing.assert_close(embedded[torch.bfloat16], embedded[torch.float32], atol=1e-6, rtol=1e-6)
    for name in exact:
        assert rounded[name].dtype == torch.float32
        assert 1e-5 < (rounded[name] - exact[name]).norm() / exact[name].norm() < 0.02


# ----------------------------------------------------------------------------- LoRA


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["i2v", "ti2v"])
def test_lora_starts_as_the_identity(checkpoints, kind, dtype):
    wan = load(checkpoints[kind], dtype)
    before = velocities(wan)
    dtypes = {name: p.dtype for name, p in wan.experts[wan.expert_names[0]].named_parameters()}
    for transformer in wan.experts.values():
        adapters.add_lora(transformer, 4, 8, EVERYTHING)
    after = velocities(wan)
    assert all(torch.equal(after[name], before[name]) for name in before)

    parameters = wan_model.trainable_parameters(wan)
    assert len(parameters) == len(wan.experts) * 3 * 10 * 2  # layers, linears a layer, A and B
    assert all(p.dtype == torch.float32 and ".lora_" in name for name, p in parameters.items())
    assert all((p.abs().max() == 0) == (".lora_B." in name) for name, p in parameters.items())
    for name, parameter in wan.experts[wan.expert_names[0]].named_parameters():  # the base is as it was, and frozen
        if ".lora_" not in name:
            assert parameter.dtype == dtypes[name.replace(".base_layer", "")] and not parameter.requires_grad


def test_lora_is_the_formula(checkpoints):
    """W + alpha / rank B A, merged by hand in float64."""
    wan, merged = load(checkpoints["i2v"]), load(checkpoints["i2v"])
    exported = add_random_lora(wan, 4, 6.0, EVERYTHING)
    for expert, tensors in exported.items():
        weights = dict(merged.experts[expert].named_parameters())
        for layer in {name.rsplit(".lora_", 1)[0] for name in tensors}:
            a, b = (tensors[f"{layer}.lora_{side}.weight"].double() for side in "AB")
            weights[f"{layer}.weight"].data = (weights[f"{layer}.weight"].double() + 6.0 / 4 * b @ a).float()
    assert_same(velocities(wan), velocities(merged))
    assert differ(velocities(wan), velocities(load(checkpoints["i2v"]))) > 0.01


def test_with_b_at_0_it_is_the_model_under_the_adapters(checkpoints):
    wan, base = load(checkpoints["i2v"]), velocities(load(checkpoints["i2v"]))
    exported = add_random_lora(wan, 4, 6.0, EVERYTHING)
    before = velocities(wan)
    parameters = wan_model.trainable_parameters(wan)
    off = fsdp.swapped_in(parameters, {name: 0 for name in parameters if ".lora_B." in name})
    with pytest.raises(RuntimeError), off:
        inside = velocities(wan)
        raise RuntimeError
    assert all(torch.equal(inside[name], base[name]) for name in base) and differ(before, base) > 0.01
    assert all(torch.equal(velocities(wan)[name], before[name]) for name in before)
    after = wan_model.by_expert({name: p.detach() for name, p in wan_model.trainable_parameters(wan).items()})
    assert all(torch.equal(after[e][name], x) for e, tensors in exported.items() for name, x in tensors.items())


def test_lora_targets_that_do_not_exist(checkpoints):
    transformer = load(checkpoints["ti2v"]).experts["single"]
    with pytest.raises(UserError, match="lora_targets=to_z: no such linear layer"):
        adapters.add_lora(transformer, 4, 4, "to_q, to_z")


@pytest.mark.parametrize("kind, files", [("i2v", ("high_noise", "low_noise")), ("ti2v", ("lora",))])
def test_exported_adapters_load_into_diffusers(checkpoints, tmp_path, kind, files):
    """By load_lora_weights, each expert's file; and the ComfyUI files by diffusers' converter: the same velocity."""
    wan = load(checkpoints[kind])
    exported = add_random_lora(wan, 4, 6.0, EVERYTHING)
    expected = velocities(wan)
    folder = tmp_path / "lora"
    adapters.export_lora(str(folder), exported, 4, 6.0, EVERYTHING, RECORD)
    adapters.export_lora(str(folder), exported, 4, 6.0, EVERYTHING, RECORD)  # over an older export
    assert {path.name for path in tmp_path.iterdir()} == {"lora"}
    assert {path.name for path in folder.iterdir()} == {
        f"{comfyui}{name}.safetensors" for comfyui in ("", "comfyui_") for name in files
    }
    for prefix in ("", "comfyui_"):
        pipeline = pipeline_of(checkpoints[kind], kind)
        base = pipeline_velocities(wan, pipeline)
        for name, second in zip(files, (False, True), strict=False):
            file = f"{prefix}{name}.safetensors"
            pipeline.load_lora_weights(folder, weight_name=file, load_into_transformer_2=second)
        assert_same(pipeline_velocities(wan, pipeline), expected)
        assert differ(base, expected) > 0.01


def test_comfyui_keys(checkpoints, tmp_path):
    """The names of the original Wan code, and every tensor comes back through diffusers' own converter."""
    wan = load(checkpoints["ti2v"])
    exported = add_random_lora(wan, 4, 6.0, EVERYTHING)
    adapters.export_lora(str(tmp_path / "lora"), exported, 4, 6.0, EVERYTHING, RECORD)
    tensors = load_file(tmp_path / "lora" / "comfyui_lora.safetensors")
    layers = {key.removeprefix("diffusion_model.blocks.1.").rsplit(".lora_down")[0] for key in tensors
              if key.startswith("diffusion_model.blocks.1.") and ".lora_down" in key}
    attention = {f"{name}.{side}" for name in ("self_attn", "cross_attn") for side in "qkvo"}
    assert layers == attention | {"ffn.0", "ffn.2"} and len(tensors) == 3 * 10 * 3
    assert all(tensors[key] == 6 for key in tensors if key.endswith(".alpha"))

    converted = _convert_non_diffusers_wan_lora_to_diffusers(dict(tensors))
    original = exported["single"]
    assert {name.removeprefix("transformer.") for name in converted} == original.keys()
    for layer in {name.rsplit(".lora_", 1)[0] for name in original}:  # the converter moves alpha / rank into A and B
        b, a = (converted[f"transformer.{layer}.lora_{side}.weight"] for side in "BA")
        want = 6 / 4 * original[f"{layer}.lora_B.weight"] @ original[f"{layer}.lora_A.weight"]
        torch.testing.assert_close(b @ a, want)


def test_adapters_say_what_they_belong_to_beside_what_diffusers_writes(checkpoints, tmp_path):
    exported = add_random_lora(load(checkpoints["i2v"]), 4, 6.0, ATTENTION)
    adapters.export_lora(str(tmp_path / "lora"), exported, 4, 6.0, ATTENTION, RECORD)
    for expert, name in (("high", "high_noise"), ("low", "low_noise")):
        WanPipeline.save_lora_weights(tmp_path, exported[expert], weight_name="theirs.safetensors",
                                      transformer_lora_adapter_metadata=dict(
                                          r=4, lora_alpha=6.0, target_modules=sorted(ATTENTION.split(","))))
        theirs, ours, comfyui = (metadata_of(tmp_path / file) for file in (
            "theirs.safetensors", f"lora/{name}.safetensors", f"lora/comfyui_{name}.safetensors"))
        assert ours.pop("nanowan") == comfyui.pop("nanowan") == RECORD | {"expert": expert}
        assert ours == theirs and comfyui == {"format": "pt"}
        tensors, theirs = load_file(tmp_path / f"lora/{name}.safetensors"), load_file(tmp_path / "theirs.safetensors")
        assert tensors.keys() == theirs.keys() and all(torch.equal(tensors[key], theirs[key]) for key in theirs)
        assert adapters.read_record(str(tmp_path / "lora"), expert) == RECORD | {"expert": expert}


def test_a_record_is_of_the_same_base_model_or_refused():
    sizes = dict(kind="i2v", num_layers=3, dim=64, ffn_dim=128, in_channels=36, out_channels=16)
    ours = {"model": "b", "content of model": "abc"} | sizes

    def refusal_of(**record):
        with pytest.raises(UserError) as caught:
            adapters.check_base({"model": "a"} | record, ours, "x/lora")
        return str(caught.value)

    content = {"content of model": "abc"}
    for record in ({}, content, content | sizes, {"content of model": "hub/a@123"} | sizes):  # the last: not comparable
        adapters.check_base({"model": "b"} | record, ours, "x/lora")
    adapters.check_base({"model": "a"} | content | sizes, ours, "x/lora")  # under another name
    line = "model=b: x/lora was trained on a, whose {} is {}, here {}: want the model it was trained on"
    assert refusal_of() == line.format("model", "a", "b")  # where there is no content, the name counts
    assert refusal_of(**content | sizes | dict(num_layers=40)) == line.format("num_layers", 40, 3)
    assert refusal_of(kind="ti2v") == line.format("kind", "ti2v", "i2v")
    for other in ("abd", "random:i2v-a14b"):
        assert refusal_of(**sizes, **{"content of model": other}) == line.format("content of model", other, "abc")
    assert adapters.compare({"model": "a", "num_frames": 5, "shift": 5.0}, dict(num_frames=9, shift=5.0, views="x")) \
        == "of a; num_frames 5 -> 9"
    assert "doesn't say what it belongs to" in adapters.compare({}, ours)


def test_adapters_round_trip(checkpoints, tmp_path):
    wan, again = load(checkpoints["i2v"]), load(checkpoints["i2v"])
    exported = add_random_lora(wan, 4, 6.0, ATTENTION)
    folder = str(tmp_path / "lora")
    adapters.export_lora(folder, exported, 4, 6.0, ATTENTION, RECORD)
    for expert, transformer in again.experts.items():
        assert adapters.has_lora(folder, expert)
        tensors, rank, alpha, targets = adapters.read_lora(folder, expert)
        assert tensors.keys() == exported[expert].keys() and (rank, alpha) == (4, 6.0)
        assert all(torch.equal(tensor, exported[expert][name]) for name, tensor in tensors.items())
        assert set(targets.split(",")) == set(ATTENTION.split(","))
        adapters.add_lora(transformer, rank, alpha, targets)
        adapters.load_lora(transformer, tensors, folder)
    got, want = velocities(again), velocities(wan)
    assert all(torch.equal(got[name], want[name]) for name in want)

    assert not adapters.has_lora(folder, "single")
    with pytest.raises(UserError, match=r"no lora.safetensors in it; want a lora/ folder"):
        adapters.read_lora(folder, "single")
    for rank, targets, number, first in [
        (8, ATTENTION, 48, "blocks.0.attn1.to_k.lora_A.weight"),  # 3 layers, 8 linears, A and B: all differ
        (4, EVERYTHING, 12, "blocks.0.ffn.net.0.proj.lora_A.weight"),  # 3 layers, 2 linears that the file lacks
        (4, "to_q,to_k,to_v", 12, "blocks.0.attn1.to_out.0.lora_A.weight"),  # 3 layers, 2 linears too many
    ]:
        transformer = load(checkpoints["i2v"]).experts["high"]
        adapters.add_lora(transformer, rank, rank, targets)
        before = {name: parameter.clone() for name, parameter in transformer.named_parameters()}
        with pytest.raises(UserError, match=f"{folder}: {number} tensors differ .* the first is {first}:"):
            adapters.load_lora(transformer, tensors, folder)
        assert all(torch.equal(parameter, before[name]) for name, parameter in transformer.named_parameters())


def test_clean_names():
    name = "blocks.0._checkpoint_wrapped_module._orig_mod.attn1.to_q.lora_A.default.weight"
    assert adapters.clean_name(name) == "blocks.0.attn1.to_q.lora_A.default.weight"
    assert adapters.adapter_name(adapters.clean_name(name)) == "blocks.0.attn1.to_q.lora_A.weight"


# ----------------------------------------------------------------------------- full weights


@pytest.mark.parametrize("kind, trained", [("i2v", ("high", "low")), ("i2v", ("low",)), ("ti2v", ("single",))])
def test_exported_model_is_a_whole_checkpoint(checkpoints, tmp_path, kind, trained):
    wan = load(checkpoints[kind])
    base = velocities(wan)
    generator = torch.Generator().manual_seed(0)
    for expert in trained:
        for parameter in wan.experts[expert].parameters():
            parameter.data += 0.02 * torch.randn(parameter.shape, generator=generator)
    expected = velocities(wan)
    assert [torch.equal(base[name], expected[name]) for name in base] == [name not in trained for name in base]
    folder = str(tmp_path / "model")
    state = {expert: wan.experts[expert].state_dict() for expert in trained}
    wan_model.export_model(folder, wan, state, RECORD)
    wan_model.export_model(folder, wan, state, RECORD)  # over an older export
    assert [path.name for path in tmp_path.iterdir()] == ["model"]

    again = load(folder)
    assert (again.kind, again.expert_names, again.boundary_ratio) == (wan.kind, wan.expert_names, wan.boundary_ratio)
    got = velocities(again)
    assert all(torch.equal(got[name], expected[name]) for name in expected)
    theirs = pipeline_velocities(wan, pipeline_of(folder, kind))
    assert_same(theirs, expected)
    got, want = ({path.relative_to(root) for path in Path(root).rglob("*")} for root in (folder, checkpoints[kind]))
    assert got == want | {Path("nanowan.json")}
    assert json.loads(Path(folder, "nanowan.json").read_text()) == RECORD

    # an interrupted export leaves the old one
    shutil.rmtree(Path(folder, "vae"))  # to recognise it
    with pytest.raises(AttributeError):
        wan_model.export_model(folder, wan, {trained[0]: {"x": None}}, RECORD)
    assert not Path(folder, "vae").exists() and load(folder)


def test_an_export_inside_the_models_folder_copies_what_the_model_is(checkpoints, tmp_path):
    """And neither the run that lies there nor what else does."""
    folder = tmp_path / "i2v"
    shutil.copytree(checkpoints["i2v"], folder)
    for name in ("run/metrics.jsonl", "assets/film.mp4", "README.md"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("something")
    wan = load(folder)
    for _ in range(2):
        wan_model.export(str(folder / "run"), wan, {"low": wan.experts["low"].state_dict()}, 0, 0, "", RECORD)
    want = {path.relative_to(checkpoints["i2v"]) for path in Path(checkpoints["i2v"]).rglob("*")}
    assert {path.relative_to(folder / "run/model") for path in (folder / "run/model").rglob("*")} == (
        want | {Path("nanowan.json")})
    assert_same(velocities(load(folder / "run/model")), velocities(wan))


# ----------------------------------------------------------------------------- arithmetic


def test_tokens():
    assert cost.num_tokens((16, 21, 54, 96)) == 27_216  # RoboCasa, RGB, 81 frames of 432 x 768
    assert cost.num_tokens((16, 21, 108, 96)) == 54_432  # with pointmaps
    assert cost.num_tokens((48, 13, 30, 52)) == 5_070  # TI2V-5B, 49 frames of 480 x 832


def test_flops(checkpoints):
    """Against PyTorch's counter on the blocks of the tiny model."""
    wan = load(checkpoints["i2v"])
    counted = {"attention": 0}

    def by_hand(query, key, value, **options):  # PyTorch doesn't count all of its kernels
        counted["attention"] += 2 * 2 * query.shape[:-1].numel() * key.shape[-2] * query.shape[-1]
        return query

    with pytest.MonkeyPatch.context() as patch, FlopCounterMode(display=False) as counter, torch.no_grad():
        patch.setattr(torch.nn.functional, "scaled_dot_product_attention", by_hand)
        wan_model.velocity(wan, torch.zeros(1, 16, 3, 4, 6), SIGMA["high"], torch.zeros(1, 16, 3, 4, 6),
                           torch.zeros(1, 7, 64))
    per_module = counter.get_flop_counts()
    linears = sum(sum(per_module[f"WanTransformer3DModel.blocks.{layer}"].values()) for layer in range(3))
    tokens = cost.num_tokens((16, 3, 4, 6))
    assert cost.forward_flops(wan.config, tokens, 7) == (linears, counted["attention"])

    _, attention = cost.forward_flops(wan_model.describe("random:i2v-a14b").config, 27_216)
    assert abs(attention / 0.61e15 - 1) < 0.02  # of RoboCasa's RGB clip
    config = wan.config
    linear, attention = cost.forward_flops(config, 100, 7)
    assert cost.step_flops(config, 100, lora=False, text_tokens=7) == 3 * (linear + attention)
    assert cost.step_flops(config, 100, lora=True, text_tokens=7) == 2 * linear + 3 * attention
