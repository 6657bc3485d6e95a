import sys

import pytest
import torch
import transformers
from diffusers import AutoencoderKLWan, FlowMatchEulerDiscreteScheduler, WanImageToVideoPipeline, WanPipeline

import encoders
import tiny
from guard import UserError


@pytest.fixture(scope="module")
def wan_vae():
    """A real Wan VAE with random weights, as narrow as it gets, with statistics that would show a swapped sign."""
    torch.manual_seed(0)
    statistics = dict(latents_mean=[0.5, -1.0, 2.0], latents_std=[2.0, 0.5, 3.0])
    vae = AutoencoderKLWan(base_dim=4, z_dim=3, num_res_blocks=1, **statistics)
    return vae.eval().requires_grad_(False)


@pytest.fixture(scope="module")
def text_folder(tmp_path_factory):
    """A folder with the tokenizer and text encoder of the tiny world."""
    folder = tmp_path_factory.mktemp("text")
    tokenizer, text_encoder = tiny.make_text_encoder(seed=0)
    tokenizer.save_pretrained(folder / "tokenizer")
    text_encoder.save_pretrained(folder / "text_encoder")
    return str(folder)


def test_dct_basis_is_orthonormal():
    for z_dim, stride_t, stride_s in [(16, 4, 4), (192, 4, 4), (24, 2, 8)]:
        basis = encoders.dct_basis(z_dim, stride_t, stride_s).flatten(1).double()
        torch.testing.assert_close(basis @ basis.T, torch.eye(z_dim).double(), atol=1e-6, rtol=0)
    first = encoders.dct_basis(16, 4, 4)[0]  # the mean of a block, over colours too
    torch.testing.assert_close(first, torch.full_like(first, 192**-0.5))


def test_dct_round_trip(tmp_path):
    complete = encoders.AutoencoderDCT(z_dim=192, latents_mean=[0.3] * 192, latents_std=[2.0] * 192)
    pixels = torch.rand(2, 3, 9, 8, 12, generator=torch.Generator().manual_seed(0)) * 2 - 1
    latents = encoders.encode(complete, pixels)
    assert latents.shape == (2, 192, 3, 2, 3)
    torch.testing.assert_close(encoders.decode(complete, latents), pixels, atol=2e-6, rtol=0)

    kept = encoders.AutoencoderDCT(z_dim=16)  # a projection: what it keeps, it keeps exactly
    once = encoders.decode(kept, encoders.encode(kept, pixels * 0.2))
    grey = torch.full((1, 3, 5, 8, 8), 0.4)
    torch.testing.assert_close(encoders.decode(kept, encoders.encode(kept, grey)), grey)
    assert once.shape == pixels.shape and (once - pixels * 0.2).square().mean() < (pixels * 0.2).square().mean()

    complete.save_pretrained(tmp_path / "vae")
    assert encoders.latent_shape(str(tmp_path), 9, 8, 16, rows=2, columns=3) == (192, 3, 4, 12)
    loaded = encoders.load_vae(str(tmp_path), dtype=torch.bfloat16)
    assert loaded.dtype == torch.bfloat16 and not loaded.training
    assert (encoders.decode(loaded, latents) - pixels).abs().mean() < 0.02
    assert torch.equal(encoders.encode(encoders.load_vae(str(tmp_path)), pixels), latents)


def test_encode_and_decode_follow_the_pipeline(wan_vae):
    pixels = torch.rand(1, 3, 5, 16, 24, generator=torch.Generator().manual_seed(1)) * 2 - 1
    mean = torch.tensor(wan_vae.config.latents_mean).view(1, 3, 1, 1, 1)
    std = torch.tensor(wan_vae.config.latents_std).view(1, 3, 1, 1, 1)
    latents = encoders.encode(wan_vae, pixels)
    assert latents.shape == (1, 3, 2, 2, 3) and latents.dtype == torch.float32
    torch.testing.assert_close(latents, (wan_vae.encode(pixels).latent_dist.mode() - mean) / std)
    # The pipelines keep 1 / std and divide by it.
    expected = wan_vae.decode(latents / (1 / std) + mean, return_dict=False)[0]
    torch.testing.assert_close(encoders.decode(wan_vae, latents), expected)
    assert expected.std() > 1e-3  # the comparison means something


@pytest.mark.parametrize("kind, latent_frames", [("i2v", 3), ("ti2v", 1), ("t2v", 1)])
def test_condition_equals_the_image_to_video_pipeline(wan_vae, kind, latent_frames):
    parts = dict(tokenizer=None, text_encoder=None, vae=wan_vae, scheduler=FlowMatchEulerDiscreteScheduler())
    pipeline = WanImageToVideoPipeline(expand_timesteps=kind != "i2v", **parts)
    shape = dict(num_channels_latents=3, height=16, width=24, num_frames=9, dtype=torch.float32, device="cpu")
    frame = torch.rand(2, 3, 16, 24, generator=torch.Generator().manual_seed(2)) * 2 - 1
    condition = encoders.encode_condition(wan_vae, frame, 9, kind)
    assert condition.shape == (2, 3, latent_frames, 2, 3)
    for row in range(2):
        expected = pipeline.prepare_latents(frame[row : row + 1], 1, **shape)[1]
        expected = expected[:, 4:] if kind == "i2v" else expected  # the first four channels are the mask
        torch.testing.assert_close(condition[row : row + 1], expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_text_equals_the_pipeline(text_folder, dtype):
    tokenizer, text_encoder = encoders.load_text_encoder(text_folder, dtype=dtype)
    assert text_encoder.dtype == dtype
    pipeline = WanPipeline(
        tokenizer=tokenizer, text_encoder=text_encoder, vae=None, scheduler=FlowMatchEulerDiscreteScheduler()
    )
    prompts = ["a red ball  moves\nleft", "", "a green ball &amp;amp; more", "a red ball moves right " * 9] * 5
    embeddings = encoders.encode_text(tokenizer, text_encoder, prompts, 16)
    expected, _ = pipeline.encode_prompt(prompts, do_classifier_free_guidance=False, max_sequence_length=16)
    assert embeddings.dtype == torch.float32
    torch.testing.assert_close(embeddings, expected.float(), atol=1e-5 if dtype == torch.float32 else 2e-2, rtol=1e-5)
    assert embeddings[0, 6:].abs().max() == 0 and embeddings[0, :6].abs().sum(-1).min() > 0  # five words and </s>
    assert embeddings[1, 1:].abs().max() == 0  # the empty prompt is </s> alone


def test_prompts_that_are_cut_are_counted(text_folder):
    tokenizer, text_encoder = encoders.load_text_encoder(text_folder)
    prompts = ["a red ball", "a red ball moves left " * 3]
    assert not list(encoders.text_warnings(tokenizer, text_encoder, prompts, 16))  # the second is 15 words and </s>
    (line,) = encoders.text_warnings(tokenizer, text_encoder, prompts, 15)
    assert "1 of 2 prompts have more than max_text_tokens=15 tokens and are cut, the longest has 16: 'a red" in line
    text_encoder.config.d_model = 4096  # as in the released models
    assert ["max_text_tokens=16: the released models" in line
            for line in encoders.text_warnings(tokenizer, text_encoder, prompts, 16)] == [True]
    assert not list(encoders.text_warnings(tokenizer, text_encoder, prompts, 512))


def test_text_leaves_the_device_batch_by_batch(text_folder, monkeypatch):
    tokenizer, text_encoder = encoders.load_text_encoder(text_folder)
    moved, cpu = [], torch.Tensor.cpu
    monkeypatch.setattr(torch.Tensor, "cpu", lambda tensor: moved.append(tuple(tensor.shape)) or cpu(tensor))
    embeddings = encoders.encode_text(tokenizer, text_encoder, ["a red ball"] * 20, 8)
    assert moved == [(16, 8, 64), (4, 8, 64)]
    assert embeddings.shape == (20, 8, 64) and embeddings.device.type == "cpu"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="wants a GPU")
def test_text_of_a_gpu_comes_back_to_the_cpu(text_folder):
    embeddings = encoders.encode_text(*encoders.load_text_encoder(text_folder, "cuda"), ["a red ball"] * 20, 8)
    assert embeddings.device.type == "cpu"


@pytest.mark.parametrize("terminal", [False, True])
def test_no_loading_bar_without_a_terminal(text_folder, monkeypatch, capsys, terminal):
    transformers.utils.logging.enable_progress_bar()
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    encoders.load_text_encoder(text_folder)
    assert ("Loading weights" in capsys.readouterr().err) is terminal
    transformers.utils.logging.disable_progress_bar()


def test_text_encoder_that_overflows_is_refused(text_folder):
    tokenizer, text_encoder = encoders.load_text_encoder(text_folder, dtype=torch.float32)
    text_encoder.encoder.final_layer_norm.weight[0] = float("nan")
    with pytest.raises(UserError, match="want bfloat16 or float32"):
        encoders.encode_text(tokenizer, text_encoder, ["a red ball"], 16)


def test_random_models():
    assert encoders.latent_shape("random:i2v-a14b", 81, 432, 384, 2, 2) == (16, 21, 108, 96)
    assert encoders.latent_shape("random:ti2v-5b:2", 49, 480, 832) == (48, 13, 30, 52)
    with torch.device("meta"):  # the parameter counts of the released VAEs
        counts = [
            sum(p.numel() for p in AutoencoderKLWan(**config).parameters())
            for config in (encoders.VAE_2_1, encoders.VAE_2_2)
        ]
    assert counts == [126_892_531, 704_688_668]
    torch.manual_seed(5)  # ranks and runs begin with seeds of their own
    weights = [list(encoders.load_vae("random:i2v-a14b").parameters()) for _ in range(2)]
    assert all(torch.equal(a, b) for a, b in zip(*weights, strict=True)) and weights[0][0].std() > 0

    tokenizer, text_encoder = encoders.load_text_encoder("random:ti2v-5b")
    first, second, empty = encoders.encode_text(tokenizer, text_encoder, ["a red ball", "a red cube", ""], 8)
    again = encoders.encode_text(tokenizer, text_encoder, ["a red ball"], 8)[0]
    assert first.shape == (8, 4096) and torch.equal(first, again) and not torch.equal(first, second)
    assert first[4:].abs().max() == 0 and first[3].abs().max() > 0 and empty[1:].abs().max() == 0


def test_sizes():
    assert encoders.latent_shape("random:i2v-a14b", 81, 432, 384) == (16, 21, 54, 48)
    for size, names, message in [
        ((81, 440, 384), {}, r"^cell_height=440: want a multiple of 16 \(432 or 448\)"),
        ((81, 432, 216), {}, r"^cell_width=216: want a multiple of 16 \(208 or 224\)"),
        ((80, 432, 384), {}, r"^num_frames=80: want 4n\+1 \(77 or 81\)"),
        ((81, 440, 384), dict(names=("height", "width")), r"^height=440: want a multiple of 16"),
        ((81, 432, 216), dict(names=("height", "width")), r"^width=216: want a multiple of 16"),
    ]:
        with pytest.raises(UserError, match=message):
            encoders.latent_shape("random:i2v-a14b", *size, **names)


def test_user_errors_are_one_line(tmp_path):
    for call in (encoders.vae_config, encoders.load_vae, encoders.load_text_encoder):
        for model in (str(tmp_path / "nothing"), str(tmp_path)):
            with pytest.raises(UserError, match="can't load its") as error:
                call(model)
            assert "\n" not in str(error.value)
    with pytest.raises(UserError, match="want random: and one of i2v-a14b"):
        encoders.vae_config("random:a14b")
    (tmp_path / "vae").mkdir()
    (tmp_path / "vae" / "config.json").write_text('{"_class_name": "AutoencoderKL"}')
    with pytest.raises(UserError, match="want AutoencoderKLWan or AutoencoderDCT"):
        encoders.load_vae(str(tmp_path))
