import json
import shutil
from pathlib import Path

import pytest
import torch
from diffusers import WanImageToVideoPipeline, WanPipeline, WanTransformer3DModel
from diffusers.loaders.lora_conversion_utils import _convert_non_diffusers_wan_lora_to_diffusers
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch.utils.flop_counter import FlopCounterMode

import adapters
import artifacts
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
    for targets, words in [("to_q, to_z", "to_z: no such linear layer; want e.g. to_v"), ("xx,", "xx,: no such linear"),
                           ("attn.to_out", "attn.to_out: no such linear layer; want e.g. attn2.to_out.0"),
                           ("patch_embedding", "patch_embedding: no such linear"), ("norm2", "norm2: no such linear")]:
        with pytest.raises(UserError, match=f"lora_targets={words}"):
            adapters.add_lora(transformer, 4, 4, targets)
    adapters.add_lora(transformer, 4, 4, "0, to_q, to_q")  # blocks.0 ends with 0 too, but is no linear
    adapted = {name.split(".lora_")[0] for name, p in transformer.named_parameters() if p.requires_grad}
    assert adapted == {f"blocks.{i}.attn{j}.{name}" for i in range(3) for j in (1, 2) for name in ("to_out.0", "to_q")}


def test_a_line_a_target_tells_the_layers_that_it_hits(checkpoints, capsys):
    wan = wan_model.describe(str(checkpoints["i2v"]))
    number = adapters.check_lora(wan, wan.expert_names, 4, 4.0, "to_q,linear_1,proj_out", "")
    embedders = ", ".join(f"condition_embedder.{name}_embedder.linear_1" for name in ("time", "text"))
    assert capsys.readouterr().out.splitlines() == [
        "lora       to_q: 6 layers", f"lora       linear_1: 2 layers, outside the blocks: {embedders}",
        "lora       proj_out: 1 layers, outside the blocks: proj_out"]
    for transformer in load(checkpoints["i2v"]).experts.values():
        adapters.add_lora(transformer, 4, 4, "to_q,linear_1,proj_out")
        number -= sum(p.numel() for p in transformer.parameters() if p.requires_grad)
    assert number == 0


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
        records = [file.record for file in adapters.adapter_files(str(tmp_path / "lora"))]
        assert records == [RECORD | {"expert": expert} for expert in ("high", "low")]


def test_a_record_is_of_the_same_base_model_or_refused():
    sizes = dict(kind="i2v", num_layers=3, dim=64, ffn_dim=128, in_channels=36, out_channels=16)
    ours = {"model": "b", "content of model": "abc"} | sizes

    def refusal_of(**record):
        with pytest.raises(UserError) as caught:
            artifacts.check_base({"model": "a"} | record, ours, "x/lora")
        return str(caught.value)

    content = {"content of model": "abc"}
    for record in ({}, content, content | sizes, {"content of model": "hub/a@123"} | sizes):  # the last: not comparable
        artifacts.check_base({"model": "b"} | record, ours, "x/lora")
    artifacts.check_base({"model": "a"} | content | sizes, ours, "x/lora")  # under another name
    line = "model=b: x/lora was trained on a, whose {} is {}, here {}: want the model it was trained on"
    assert refusal_of() == line.format("model", "a", "b")  # where there is no content, the name counts
    assert refusal_of(**content | sizes | dict(num_layers=40)) == line.format("num_layers", 40, 3)
    assert refusal_of(kind="ti2v") == line.format("kind", "ti2v", "i2v")
    for other in ("abd", "random:i2v-a14b"):
        assert refusal_of(**sizes, **{"content of model": other}) == line.format("content of model", other, "abc")
    assert artifacts.compare({"model": "a", "num_frames": 5, "shift": 5.0}, dict(num_frames=9, shift=5.0, views="x")) \
        == "of a; num_frames 5 -> 9"
    assert "doesn't say what it belongs to" in artifacts.compare({}, ours)


def test_adapters_round_trip(checkpoints, tmp_path):
    wan, again = load(checkpoints["i2v"]), load(checkpoints["i2v"])
    exported = add_random_lora(wan, 4, 6.0, ATTENTION)
    folder = str(tmp_path / "lora")
    adapters.export_lora(folder, exported, 4, 6.0, ATTENTION, RECORD)
    for expert, transformer in again.experts.items():
        tensors, rank, alpha, targets = adapters.read_lora(folder, wan, expert)
        assert tensors.keys() == exported[expert].keys() and (rank, alpha) == (4, 6.0)
        assert all(torch.equal(tensor, exported[expert][name]) for name, tensor in tensors.items())
        assert set(targets.split(",")) == {name.split(".lora_")[0] for name in tensors}
        adapters.add_lora(transformer, rank, alpha, targets)
        adapters.load_lora(transformer, tensors)
    got, want = velocities(again), velocities(wan)
    assert all(torch.equal(got[name], want[name]) for name in want)

    single = wan_model.describe(str(checkpoints["ti2v"]))
    with pytest.raises(UserError, match=f"{folder}: two adapters for single, the second is {folder}/low_noise.safet"):
        adapters.read_lora(folder, single, "single")


# ----------------------------------------------------------------------------- adapters of other tools

ORIGINAL = {"attn1.to_q": "self_attn.q", "attn1.to_k": "self_attn.k", "attn1.to_v": "self_attn.v",
            "attn1.to_out.0": "self_attn.o", "attn2.to_q": "cross_attn.q", "attn2.to_k": "cross_attn.k",
            "attn2.to_v": "cross_attn.v", "attn2.to_out.0": "cross_attn.o", "ffn.net.0.proj": "ffn.0",
            "ffn.net.2": "ffn.2"}


def random_lora(rank_of, seed=0, layers=3):
    """{"blocks.0.attn1.to_q": (A, B)} of the tiny model's blocks; rank_of: name in a block -> rank, 0: left out."""
    generator, lora = torch.Generator().manual_seed(seed), {}
    for i in range(layers):
        for name in ORIGINAL:
            if rank := rank_of(name):
                columns, rows = (512 if name == "ffn.net.2" else 128), (512 if name == "ffn.net.0.proj" else 128)
                lora[f"blocks.{i}.{name}"] = [0.2 * torch.randn(*shape, generator=generator)
                                              for shape in ((rank, columns), (rows, rank))]
    return lora


def named(lora, form, sides=("lora_A", "lora_B"), alpha=None):
    """As a tool would write it. form: name of a layer -> the tool's."""
    tensors = {}
    for layer, pair in lora.items():
        for side, tensor in zip(sides, pair, strict=True):
            tensors[f"{form(layer)}.{side}.weight"] = tensor
        if alpha is not None:
            tensors[f"{form(layer)}.alpha"] = torch.tensor(alpha(layer) if callable(alpha) else alpha)
    return tensors


def original(layer):
    block, number, name = layer.split(".", 2)
    return f"{block}.{number}.{ORIGINAL[name]}"


def write(path, tensors, **metadata):
    path.parent.mkdir(exist_ok=True)
    save_file(tensors, path, {key: json.dumps(value) for key, value in metadata.items()} or None)
    return str(path)


def products(lora, wan, expert="high"):
    """{layer: scale B A} of what read_lora returns, float64."""
    tensors, rank, alpha, _ = adapters.read_lora(str(lora), wan, expert)
    pairs = {layer: [tensors[f"{layer}.lora_{side}.weight"] for side in "AB"]
             for layer in {name.split(".lora_")[0] for name in tensors}}
    assert len(tensors) == 2 * len(pairs)
    return scaled(pairs, alpha / rank)


def scaled(lora, scale):
    return {layer: (scale(layer) if callable(scale) else scale) * b.double() @ a.double()
            for layer, (a, b) in lora.items()}


def added(*sums):
    return {layer: sum(each[layer] for each in sums if layer in each) for layer in set().union(*sums)}


def assert_products(got, want):
    assert got.keys() == want.keys()
    for layer in want:
        torch.testing.assert_close(got[layer], want[layer], atol=1e-6, rtol=1e-5)


DOWN_UP = ("lora_down", "lora_up")


@pytest.mark.parametrize("form, sides", [
    (lambda layer: f"transformer.{layer}", ("lora_A", "lora_B")),  # diffusers
    (lambda layer: f"base_model.model.{layer}", ("lora_A", "lora_B")),  # peft
    (lambda layer: f"base_model.model.{original(layer)}", ("lora_A.default", "lora_B.default")),
    (lambda layer: f"diffusion_model.{original(layer)}", ("lora_A", "lora_B")),  # ComfyUI, diffusion-pipe
    (lambda layer: f"diffusion_model.{original(layer)}", DOWN_UP),
    (lambda layer: f"lora_unet_{original(layer)}".replace(".", "_"), DOWN_UP),  # kohya, musubi-tuner
    (lambda layer: f"lora_unet__{original(layer)}".replace(".", "_"), DOWN_UP),
    (lambda layer: f"lora_unet_{layer}".replace(".", "_"), DOWN_UP),
    (lambda layer: f"pipe.dit.{original(layer)}", ("lora_A.default", "lora_B.default")),  # DiffSynth
    (original, ("lora_A", "lora_B")),
])
def test_names_of_other_tools(checkpoints, tmp_path, form, sides):
    """Their alpha is a layer's own; without any the scale is asked for; the same products by every tool's names."""
    wan, lora = wan_model.describe(str(checkpoints["i2v"])), random_lora(lambda name: 4)
    alphas = {layer: 1.0 + i for i, layer in enumerate(lora)}
    path = write(tmp_path / "x_HIGH_fp16.safetensors", named(lora, form, sides, lambda layer: alphas[layer]))
    want = scaled(lora, lambda layer: alphas[layer] / 4)
    assert_products(products(path, wan), want)
    assert_products(products(f"{path}:-0.5", wan), {layer: -0.5 * product for layer, product in want.items()})

    path = write(tmp_path / "x_HIGH_fp16.safetensors", named(lora, form, sides))
    with pytest.raises(UserError, match=rf"{path}: doesn't say its scale \(no alpha\); want {path}:1 to add B A as"):
        products(path, wan)
    assert_products(products(f"{path}:1.5", wan), scaled(lora, 1.5))
    with pytest.raises(UserError, match=f"want {path}:both:1 to add"):
        products(f"{path}:both", wan)


def test_scales_in_the_settings_of_peft(checkpoints, tmp_path):
    wan, lora = wan_model.describe(str(checkpoints["i2v"])), random_lora(lambda name: 4 if "ffn" in name else 2)
    ranks = dict(r=2, lora_alpha=6, rank_pattern={"ffn.net.0.proj": 4, r"ffn\.net\.2": 4}, init_lora_weights="gaussian")

    def rank(layer):
        return 4 if "ffn" in layer else 2

    for i, (settings, scale) in enumerate([
        (ranks, lambda layer: 6 / rank(layer)),
        (ranks | dict(use_rslora=True), lambda layer: 6 / rank(layer) ** 0.5),
        (ranks | dict(alpha_pattern={"attn1.to_q": 1, "blocks.2.ffn.net.2": 8, "to_v": 0.5}),
         lambda layer: {"attn1.to_q": 1, "attn2.to_v": 0.5, "attn1.to_v": 0.5}.get(
             layer.split(".", 2)[2], 8 if layer == "blocks.2.ffn.net.2" else 6) / rank(layer)),
    ]):
        path = write(tmp_path / f"low{i}.safetensors", named(lora, lambda layer: f"transformer.{layer}"),
                     lora_adapter_metadata={f"transformer.{key}": value for key, value in settings.items()})
        assert_products(products(path, wan, "low"), scaled(lora, scale))
        folder = tmp_path / f"low-noise_{i}"
        write(folder / "adapter_model.safetensors", named(lora, lambda layer: f"base_model.model.{layer}"))
        (folder / "adapter_config.json").write_text(json.dumps(settings))
        assert_products(products(folder, wan, "low"), scaled(lora, scale))
    write(folder / "adapter_model.safetensors", named(lora, lambda layer: f"diffusion_model.{original(layer)}"))
    settings = ranks | dict(rank_pattern={"ffn.0": 4, "ffn.2": 4}, alpha_pattern={"self_attn.q": 1})
    (folder / "adapter_config.json").write_text(json.dumps(settings))  # by the original names, as diffusion-pipe does
    assert_products(products(folder, wan, "low"),
                    scaled(lora, lambda layer: (1 if layer.endswith("attn1.to_q") else 6) / rank(layer)))


def test_several_adapters_are_the_sum_of_their_scaled_products(checkpoints, tmp_path):
    """Of other ranks, targets, forms and weights: in the products, in the velocity, and as diffusers adds them."""
    wan = load(checkpoints["i2v"])
    ranks = {"ffn.net.2": 6, "attn1.to_k": 1}
    first, second = random_lora(lambda name: 4, 1), random_lora(ranks.get, 2)
    style = write(tmp_path / "style.safetensors", named(second, lambda layer: f"diffusion_model.{original(layer)}",
                                                        DOWN_UP, 3.0))
    adapters.export_lora(str(tmp_path / "lora"), {expert: {
        f"{layer}.lora_{side}.weight": x for layer, pair in first.items() for side, x in zip("AB", pair, strict=True)}
        for expert in ("high", "low")}, 4, 6.0, EVERYTHING, RECORD)
    lora = f"{tmp_path}/lora:0.5, {style}:low:-2"
    of_first = scaled(first, 0.5 * 6 / 4)
    of_second = scaled(second, lambda layer: -2 * 3 / (6 if "ffn" in layer else 1))
    want = {"high": of_first, "low": added(of_first, of_second)}
    merged = load(checkpoints["i2v"])
    for expert in ("high", "low"):
        assert_products(products(lora, wan, expert), want[expert])
        weights = dict(merged.experts[expert].named_parameters())
        for layer, product in want[expert].items():
            weights[f"{layer}.weight"].data = (weights[f"{layer}.weight"].double() + product).float()
        adapter = adapters.read_lora(lora, wan, expert)[1:]
        assert adapter[0] == {"high": 4, "low": 10}[expert]
        wan.experts[expert] = wan_model.load_expert(wan, "cpu", 0, *adapter, lora, expert)
    assert_same(velocities(wan), velocities(merged))
    assert all(differ({expert: velocities(wan)[expert]}, {expert: velocities(load(checkpoints["i2v"]))[expert]}) > 0.01
               for expert in ("high", "low"))

    pipeline = pipeline_of(checkpoints["i2v"], "i2v")
    for expert in ("high", "low"):
        for name, file in [("a", f"lora/comfyui_{expert}_noise.safetensors"), ("b", "style.safetensors")]:
            if name == "a" or expert == "low":
                pipeline.load_lora_weights(tmp_path, weight_name=file, adapter_name=name,
                                           load_into_transformer_2=expert == "low")
    pipeline.transformer.set_adapters(["a"], [0.5])
    pipeline.transformer_2.set_adapters(["a", "b"], [0.5, -2.0])
    assert_same(pipeline_velocities(wan, pipeline), velocities(wan))


def test_whose_an_adapter_is(checkpoints, tmp_path):
    """Asked for, else by its record, its components, its name; else it is asked."""
    wan, lora = wan_model.describe(str(checkpoints["i2v"])), random_lora(lambda name: 4)
    tensors = named(lora, lambda layer: f"diffusion_model.{original(layer)}", alpha=4.0)

    def whose(spec):
        return [e for e in wan.expert_names if adapters.files_for(str(spec), wan.expert_names, e)]

    for name, experts in {"Wan2.2-Lightning_I2V-A14B-4steps-lora_HIGH_fp16": ["high"], "high_noise_model": ["high"],
                          "wan2.2_i2v_lightx2v_4steps_lora_v1_low_noise": ["low"], "Wan-LowNoise": ["low"],
                          "slow-highres_low": ["low"], "lownoise": ["low"], "comfyui_high_noise": ["high"]}.items():
        assert whose(write(tmp_path / f"{name}.safetensors", tensors)) == experts, name
        assert whose(f"{tmp_path}/{name}.safetensors:both:0.5") == ["high", "low"]
    for name in ("slow_motion", "highres", "high_and_low", "flow"):
        path = write(tmp_path / f"{name}.safetensors", tensors)
        with pytest.raises(UserError, match=f"{path}: doesn't say which expert it is for; want {path}:high, "):
            whose(path)
        assert whose(f"{path}:low") == ["low"] and whose(f"{path}:high,{path}:low:2") == ["high", "low"]
    assert whose(write(tmp_path / "low.safetensors", tensors, nanowan={"expert": "high"})) == ["high"]

    other = random_lora(lambda name: 2, 5)
    both = named(lora, lambda layer: f"transformer.{layer}") | named(other, lambda layer: f"transformer_2.{layer}")
    path = write(tmp_path / "both.safetensors", both, lora_adapter_metadata={
        "transformer.r": 4, "transformer.lora_alpha": 8, "transformer_2.r": 2, "transformer_2.lora_alpha": 1})
    assert whose(path) == ["high", "low"]
    assert_products(products(path, wan), scaled(lora, 2.0))
    assert_products(products(path, wan, "low"), scaled(other, 0.5))

    exported = tmp_path / "exported"  # its ComfyUI files alone
    adapters.export_lora(str(exported), {e: {f"{layer}.lora_{side}.weight": x for layer, pair in each.items()
                                             for side, x in zip("AB", pair, strict=True)}
                                         for e, each in (("high", lora), ("low", lora))}, 4, 6.0, EVERYTHING, RECORD)
    for expert in ("high", "low"):
        Path(exported, f"{expert}_noise.safetensors").unlink()
    for expert in ("high", "low"):
        assert_products(products(exported, wan, expert), scaled(lora, 1.5))
    write(exported / "comfyui_high_noise_2.safetensors", tensors)
    with pytest.raises(UserError, match=f"{exported}: two adapters for high, the second is "):
        whose(exported)


def test_what_is_no_plain_lora_of_this_model_is_one_line(checkpoints, tmp_path):
    wan, lora = wan_model.describe(str(checkpoints["i2v"])), random_lora(lambda name: 4)

    def form(layer):
        return f"diffusion_model.{original(layer)}"

    good = named(lora, form, alpha=4.0)
    q = form("blocks.0.attn1.to_q")
    path, peft = tmp_path / "high.safetensors", {"transformer.r": 4, "transformer.lora_alpha": 8}
    bare = named(lora, lambda layer: f"transformer.{layer}")
    nan = good[f"{q}.lora_B.weight"].clone()
    nan[3, 1] = float("nan")
    deeper = named(random_lora(lambda name: 4, layers=5), form, alpha=4.0)
    for tensors, metadata, words in [
        (good | {f"{q}.diff_b": torch.zeros(128)}, {}, f"1 of 91 tensors are no LoRA .* the first is {q}.diff_b: want"),
        (good | {f"{q}.dora_scale": torch.ones(128, 1)}, {}, f"the first is {q}.dora_scale: want lora_A and lora_B"),
        (good | {f"{q}.lora_B.bias": torch.ones(128)}, {}, f"the first is {q}.lora_B.bias: want"),
        ({f"lora_unet_blocks_0_self_attn_q.{name}": torch.ones(8, 8) for name in ("lokr_w1", "lokr_w2")}, {},
         "2 of 2 tensors are no LoRA of this model's layers, the first is lora_unet_blocks_0_self_attn_q.lokr_w1"),
        ({f"{q}.hada_w1_a": torch.ones(8, 8)}, {}, "1 of 1 tensors .* the first is .*hada_w1_a"),
        (good | {"use_rslora_flag": torch.ones(())}, {}, "the first is use_rslora_flag: want"),
        (good | {"lora_te_text_model_q.lora_down.weight": torch.ones(4, 4)}, {}, "the first is lora_te_text_model_q"),
        (deeper, {}, "60 of 150 tensors .* the first is diffusion_model.blocks.3.cross_attn.k.alpha: want"),
        (good | {"blocks.0.attn1.to_q.lora_A.weight": torch.ones(4, 128)}, {}, "1 of 91 tensors .*, the first is "),
        (good | {f"{q}.lora_A.weight": torch.ones(4, 128, dtype=torch.int8)}, {}, f"first is {q}.lora_A.weight"),
        ({}, {}, "0 of 0 tensors are no LoRA of this model's layers, the first is none: want"),
        ({key: x for key, x in good.items() if key != f"{q}.lora_B.weight"}, {}, "blocks.0.attn1.to_q has no lora_B"),
        ({f"{q}.alpha": torch.ones(())}, {}, "blocks.0.attn1.to_q has no lora_A"),
        (good | {f"{q}.lora_A.weight": torch.ones(4, 32)}, {}, r"has A \(4, 32\) and B \(128, 4\), want \(r, 128\)"),
        (good | {f"{q}.lora_A.weight": torch.ones(0, 128), f"{q}.lora_B.weight": torch.ones(128, 0)}, {}, "has A "),
        (good | {f"{q}.lora_A.weight": torch.ones(4)}, {}, r"has A \(4,\)"),
        (good | {f"{q}.lora_A.weight": torch.ones(())}, {}, r"has A \(\)"),
        (good | {f"{q}.lora_B.weight": nan}, {}, "blocks.0.attn1.to_q has NaN or infinity"),
        (good | {f"{q}.alpha": torch.tensor(float("nan"))}, {}, "to_q has a scale of nan, want a finite"),
        (good | {f"{q}.alpha": torch.zeros(())}, {}, "has a scale of 0, want a finite one, not 0"),
        (good | {f"{q}.alpha": torch.ones(3)}, {}, "can't read its adapter"),
        (bare, dict(lora_adapter_metadata=peft | {"transformer.r": 8}), "to_q has rank 4, its settings say 8"),
        (bare, dict(lora_adapter_metadata=peft | {"transformer.lora_alpha": "many"}), "adapter .TypeError"),
        (bare, dict(lora_adapter_metadata=peft | {"transformer.alpha_pattern": {"(": 1}}), "can't read its adapter"),
        (bare, dict(lora_adapter_metadata=peft | {"transformer.alpha_pattern": 3}), "can't read its adapter"),
        (bare, dict(lora_adapter_metadata=peft | {"transformer.init_lora_weights": "pissa_niter_4"}),
         "init_lora_weights=pissa_niter_4 has changed the base model too"),
        (bare, dict(lora_adapter_metadata=[1]), "can't read its adapter .TypeError"),
        (bare, dict(nanowan="x"), "can't read its adapter .ValueError"),
    ]:
        write(path, tensors, **metadata)
        with pytest.raises(UserError, match=words) as caught:
            adapters.read_lora(str(path), wan, "high")
        assert str(caught.value).startswith(f"{path}: ") and "\n" not in str(caught.value)
    write(path, good)
    for spec in (f"{path}:0", f"{path}:high:0.0"):
        with pytest.raises(UserError, match="scale of 0"):
            adapters.read_lora(spec, wan, "high")
    for spec in (f"{path}:nan", f"{path}:1e999x", f"{path}:1:high", f"{path}:medium", "", f"{path},", f"{path}.pt"):
        with pytest.raises(UserError, match="no adapter there; want PATH, PATH:WEIGHT or PATH:high:WEIGHT"):
            adapters.read_lora(spec, wan, "high")
    (tmp_path / "high.ckpt").write_bytes(b"\x80\x04nothing is unpickled")
    with pytest.raises(UserError, match="high.ckpt: can't read its adapter .SafetensorError"):
        adapters.read_lora(f"{tmp_path}/high.ckpt", wan, "high")
    with pytest.raises(UserError, match="high.safetensors: no adapter for low; want one for each expert"):
        adapters.read_lora(str(path), wan, "low")


def test_training_starts_from_one_rank_and_scale(checkpoints, tmp_path):
    """Whoever wrote it; where they differ from layer to layer, it is one line."""
    wan = wan_model.describe(str(checkpoints["i2v"]))

    def start(rank, alpha, targets=ATTENTION, name="high", options="", **lora):
        path = write(tmp_path / f"{name}.safetensors", **lora)
        return adapters.check_lora(wan, ["high"], rank, alpha, targets, path + options)

    lora = random_lora(lambda name: 0 if "ffn" in name else 4)
    kohya = named(lora, lambda layer: f"lora_unet_{original(layer)}".replace(".", "_"), DOWN_UP, 2.0)
    assert start(4, 2.0, tensors=kohya) == 3 * 8 * 4 * (128 + 128)
    assert start(4, 1.0, tensors=kohya, options=":0.5") and start(4, 2.0, tensors=kohya, name="x", options=":both")
    mixed = named(random_lora(lambda name: {"attn1.to_q": 2}.get(name, 0 if "ffn" in name else 4)), original, alpha=2.0)
    for arguments, words in [
        (dict(rank=8, alpha=2.0, tensors=kohya), "lora_rank=8, lora_targets=to_q,to_k,to_v,to_out.0: .*high.saf"
         "etensors has 4, to_k,to_out.0,to_q,to_v on 24 layers: want the same"),
        (dict(rank=4, alpha=2.0, targets="to_q", tensors=kohya), "lora_targets=to_q: .* has 4, to_k,to_out.0,"),
        (dict(rank=4, alpha=4.0, tensors=kohya), "lora_alpha=4: .*high.safetensors was trained with 2, want the same"),
        (dict(rank=4, alpha=4.0, tensors=mixed), "has layers of lower rank than 4, want the same for all"),
    ]:
        with pytest.raises(UserError, match=words):
            start(**arguments)


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
        trained = {f"low.{name}": tensor for name, tensor in wan.experts["low"].state_dict().items()}
        wan_model.export(str(folder / "run"), wan, trained, 0, 0, "", RECORD)
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
