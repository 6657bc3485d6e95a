"""What people bring along as a checkpoint: whole, or refused in one line before a weight is read."""

import json
import shutil

import pytest
import torch
from diffusers import WanTransformer3DModel
from safetensors.torch import load_file, save_file
from transformers import CLIPConfig, CLIPModel, UMT5Config, UMT5EncoderModel, UMT5ForConditionalGeneration

import encoders
import model as wan_model
import pretrained
import tiny
from guard import UserError

SMALL = dict(d_model=64, d_kv=16, d_ff=128, num_heads=4, num_layers=1)


@pytest.fixture
def folder(checkpoints, tmp_path):
    shutil.copytree(checkpoints["i2v"], tmp_path / "i2v")
    return tmp_path / "i2v"


def change(part, weights=None, **settings):
    """Rewrite a part's weights by a function of {name: tensor}, and settings of its config.json."""
    config = part / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | settings))
    if weights:
        (file,) = part.glob("*.safetensors")
        save_file({name: x.contiguous() for name, x in weights(load_file(file)).items()}, file, {"format": "pt"})


def without(name):
    return lambda tensors: {key: x for key, x in tensors.items() if key != name}


def scaled_float8(tensors):
    linears = [name for name, x in tensors.items() if x.ndim == 2 and name.startswith(("blocks.", "encoder.block"))]
    float8 = {name: tensors[name].to(torch.float8_e4m3fn) for name in linears}
    return tensors | float8 | {name.replace(".weight", ".scale_weight"): torch.ones(()) for name in linears}


def original_names(tensors):
    return {name.replace("attn1.to_", "self_attn."): x for name, x in tensors.items()}


def with_nan(name):
    return lambda tensors: tensors | {name: tensors[name].index_fill(0, torch.tensor([1]), float("nan"))}


FAULTS = {  # part, what is changed, the line
    "a weight": ("transformer_2", dict(weights=without("blocks.1.attn1.to_q.weight")),
                 "transformer_2: of its weights 1 missing (first blocks.1.attn1.to_q.weight): want the WanTransf"),
    "the original's names": ("transformer", dict(weights=original_names),
                             "transformer: of its weights 24 missing (first blocks.0.attn1.to_k.bias), 24 unknown "
                             "(first blocks.0.self_attn.k.bias)"),
    "another depth": ("transformer", dict(num_layers=2), "of its weights 27 unknown (first blocks.2."),
    "two depths": ("transformer_2", dict(num_layers=2, weights=lambda tensors: {
        name: x for name, x in tensors.items() if "blocks.2." not in name}),
                   "transformer and transformer_2 differ in size"),
    "another width": ("transformer_2", dict(ffn_dim=256), "9 of another shape (first blocks.0.ffn.net.0.proj."),
    "another class": ("transformer", dict(_class_name="WanVACETransformer3DModel"),
                      "config.json says _class_name WanVACETransformer3DModel: want WanTransformer3DModel"),
    "no number": ("transformer", dict(num_layers="three"), "can't load its transformer: "),
    "scaled float8": ("transformer", dict(weights=scaled_float8), "transformer: 30 of its weights are F8_E4M3, with 30 "
                      "scales (first blocks.0.attn1.to_q.weight): a quantised checkpoint"),
    "float8 text": ("text_encoder", dict(weights=scaled_float8), "text_encoder: 8 of its weights are F8_E4M3, with 8"),
    "a weight of the text": ("text_encoder", dict(weights=without("encoder.final_layer_norm.weight")),
                             "text_encoder: of its weights 1 missing (first encoder.final_layer_norm.weight)"),
    "no embedding": ("text_encoder", dict(weights=without("shared.weight")),
                     "of its weights 2 missing (first encoder.embed_tokens.weight)"),
    "T5": ("text_encoder", dict(model_type="t5"), "text_encoder: its config.json says model_type t5: want umt5"),
    "the VAE's weight": ("vae", dict(weights=lambda tensors: {"other": tensors["basis"]}),
                         "vae: of its weights 1 missing (first basis), 1 unknown (first other)"),
    "the VAE's size": ("vae", dict(z_dim=24), "vae: of its weights 1 of another shape (first basis)"),
    "the VAE's statistics": ("vae", dict(latents_std=[float("nan")] * 16), "vae: want 16 finite latents_mean"),
}


@pytest.mark.parametrize("part, changes, message", FAULTS.values(), ids=FAULTS)
def test_a_folder_that_is_not_whole(folder, monkeypatch, part, changes, message):
    change(folder / part, **changes)
    for kind in (WanTransformer3DModel, UMT5EncoderModel, encoders.AutoencoderDCT):
        monkeypatch.setattr(kind, "from_pretrained", None)  # nothing is loaded
    with pytest.raises(UserError) as error:
        wan_model.describe(str(folder))
    assert message in str(error.value) and str(folder) in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("content", [b"version https://git-lfs.github.com/spec/v1\n", b"", None])
def test_a_file_that_is_none(folder, content):
    file = folder / "transformer/diffusion_pytorch_model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000] if content is None else content)
    with pytest.raises(UserError, match="can't load its transformer: ") as error:
        wan_model.describe(str(folder))
    assert "\n" not in str(error.value)


def test_shards(folder, checkpoints):
    whole = wan_model.load_transformer(wan_model.describe(str(folder)), "low", "cpu", torch.float32)
    (folder / "transformer_2/diffusion_pytorch_model.safetensors").unlink()
    whole.save_pretrained(folder / "transformer_2", max_shard_size="1MB")
    wan = wan_model.describe(str(folder))
    again = wan_model.load_transformer(wan, "low", "cpu", torch.float32)
    assert all(torch.equal(x, again.state_dict()[name]) for name, x in whole.state_dict().items())
    first = min((folder / "transformer_2").glob("*.safetensors"))
    first.unlink()
    with pytest.raises(UserError, match=f"can't load its transformer_2: .*{first.name}"):
        wan_model.describe(str(folder))


def test_numbers_that_are_none(folder):
    change(folder / "transformer_2", weights=with_nan("blocks.0.ffn.net.2.weight"))
    change(folder / "vae", weights=with_nan("basis"))
    change(folder / "text_encoder", weights=with_nan("encoder.final_layer_norm.weight"))
    wan = wan_model.describe(str(folder))
    for load, part, first in [
        (lambda: wan_model.load_transformer(wan, "low", "cpu", torch.bfloat16), "transformer_2", "blocks.0.ffn.net.2."),
        (lambda: encoders.load_vae(wan.model), "vae", "basis"),
        (lambda: encoders.load_text_encoder(wan.model), "text_encoder", "encoder.final_layer_norm.weight"),
    ]:
        with pytest.raises(UserError, match=f"{part}: 1 of its weights hold NaN or infinity, the first is {first}"):
            load()


def test_what_the_library_reports_is_read_too(folder, monkeypatch):
    """A version of it that loads otherwise than the headers let one expect."""
    report = dict(missing_keys={"b", "a"}, unexpected_keys=set(), mismatched_keys=set(), error_msgs=[])
    monkeypatch.setattr(UMT5EncoderModel, "from_pretrained", lambda *args, **options: (None, report))
    with pytest.raises(UserError, match=r"text_encoder: of its weights 2 missing \(first a\)"):
        encoders.load_text_encoder(str(folder))


# ----------------------------------------------------------------------------- text encoders that are accepted


@pytest.mark.parametrize("tie", [True, False])
@pytest.mark.parametrize("dropped", ["shared.weight", "encoder.embed_tokens.weight", ""])
def test_one_embedding_is_enough(folder, tie, dropped):
    """The released folders hold it once, under either name, and say tie_word_embeddings: false."""
    part = folder / "text_encoder"
    embedding = load_file(part / "model.safetensors")["shared.weight"]
    change(part, lambda tensors: without(dropped)(tensors | {"encoder.embed_tokens.weight": embedding.clone()}),
           tie_word_embeddings=tie)
    wan_model.describe(str(folder))
    loaded = encoders.load_text_encoder(str(folder), dtype=torch.float32)[1]
    assert torch.equal(loaded.encoder.embed_tokens.weight, embedding)


def test_the_encoder_of_a_whole_t5(folder):
    rows = json.loads((folder / "text_encoder/config.json").read_text())["vocab_size"]
    shutil.rmtree(folder / "text_encoder")
    whole = UMT5ForConditionalGeneration(UMT5Config(vocab_size=rows, **SMALL))
    whole.save_pretrained(folder / "text_encoder")
    wan_model.describe(str(folder))
    loaded = encoders.load_text_encoder(str(folder), dtype=torch.float32)[1]
    assert torch.equal(loaded.encoder.block[0].layer[0].SelfAttention.q.weight,
                       whole.encoder.block[0].layer[0].SelfAttention.q.weight)


# ----------------------------------------------------------------------------- tokenizers


def test_tokenizers(folder, monkeypatch):
    tokenizer = folder / "tokenizer"
    other, _ = tiny.make_text_encoder(words=" ".join(f"w{i}" for i in range(50)))
    other.save_pretrained(tokenizer)  # fewer words than the encoder's embedding would do; more don't
    with pytest.raises(UserError, match="its tokenizer knows .* tokens, the encoder "):
        encoders.load_text_encoder(str(folder))
    (tokenizer / "tokenizer.json").write_text("{")
    with pytest.raises(UserError, match="can't load its tokenizer"):
        encoders.load_text_encoder(str(folder))
    (tokenizer / "tokenizer.json").unlink()
    for check in (wan_model.describe, encoders.load_text_encoder):
        with pytest.raises(UserError, match="its tokenizer has no vocabulary: want tokenizer.json in .*tokenizer"):
            check(str(folder))
    (tokenizer / "spiece.model").write_bytes(b"some")
    monkeypatch.setattr(pretrained, "is_protobuf_available", lambda: False)
    with pytest.raises(UserError, match="is spiece.model alone: want `pip install sentencepiece protobuf`, or"):
        wan_model.describe(str(folder))


# ----------------------------------------------------------------------------- CLIP


def test_clip(tmp_path):
    """As PickScore's own repository: logit_scale, and the position_ids that older versions of transformers kept."""
    small = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2)
    vision = small | dict(patch_size=56)
    whole = CLIPModel(CLIPConfig(text_config=small, vision_config=vision, projection_dim=16))
    whole.save_pretrained(tmp_path)
    change(tmp_path, lambda tensors: tensors | {"text_model.embeddings.position_ids": torch.arange(77)[None]})
    assert torch.equal(pretrained.load(CLIPModel, str(tmp_path), "", torch.float32, "cpu").logit_scale,
                       whole.logit_scale)
    for weights, message in [
        (with_nan("visual_projection.weight"), "pickscore_model=.*: CLIPModel: 1 of its weights hold NaN or infinity"),
        (without("logit_scale"), r"pickscore_model=.*: CLIPModel: of its weights 1 missing \(first logit_scale\)"),
    ]:
        change(tmp_path, weights)
        with pytest.raises(UserError, match=message):
            pretrained.load(CLIPModel, str(tmp_path), "", torch.float32, "cpu", "pickscore_model")


# ----------------------------------------------------------------------------- hub ids


def test_hub_ids_are_read_from_what_was_downloaded(folder, monkeypatch):
    asked = []

    def download(model, allow_patterns):
        asked.append((model, allow_patterns))
        return str(folder)

    monkeypatch.setattr(pretrained, "snapshot_download", download)
    vae = pretrained.load(encoders.AutoencoderDCT, "Wan-AI/Some", "vae", torch.float32, "cpu")
    assert torch.equal(vae.basis, encoders.load_vae(str(folder)).basis)
    assert asked == [("Wan-AI/Some", ["vae/*.json", "vae/*.txt", "vae/*.model",
                                      "vae/diffusion_pytorch_model*.safetensors"])]


def test_random_weights():
    build = lambda: torch.nn.Linear(3, 2)  # noqa: E731
    drawn = [pretrained.draw(build, torch.bfloat16, "cpu", seed).weight for seed in (0, 0, 1)]
    assert torch.equal(drawn[0], drawn[1]) and not torch.equal(drawn[0], drawn[2])
    assert drawn[0].dtype == torch.bfloat16 and torch.get_default_dtype() == torch.float32
    assert not drawn[0].requires_grad
