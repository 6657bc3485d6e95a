import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: OpenMP's threads spin longer than they work here
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest  # noqa: E402
import torch  # noqa: E402

import encoders  # noqa: E402
import tiny  # noqa: E402

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory):
    """{"i2v" | "ti2v" | "t2v": folder} of tiny random checkpoints, with latent statistics that would show a mix-up."""
    folder = tmp_path_factory.mktemp("checkpoints")
    statistics = dict(latents_mean=[0.1 * i - 0.5 for i in range(16)], latents_std=[0.5 + 0.1 * i for i in range(16)])
    tokenizer, text_encoder = tiny.make_text_encoder()
    for kind in ("i2v", "ti2v", "t2v"):
        vae = encoders.AutoencoderDCT(**statistics)
        tiny.make_checkpoint(folder / kind, kind, vae, tokenizer, text_encoder, seed=1)
    return {kind: str(folder / kind) for kind in ("i2v", "ti2v", "t2v")}
