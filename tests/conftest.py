import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: OpenMP's threads spin longer than they work here
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest  # noqa: E402
import torch  # noqa: E402

import encoders  # noqa: E402
import helpers  # noqa: E402
import tiny  # noqa: E402

torch.set_num_threads(1)


def pytest_addoption(parser):
    parser.addoption("--script", help="a copy of train_grpo.py or train_i2v_sft.py, which the tests of it run instead")


def pytest_configure(config):
    if script := config.getoption("--script"):
        try:
            helpers.use_copy(config.invocation_params.dir / script)
        except (OSError, ValueError, SyntaxError) as error:
            raise pytest.UsageError(f"--script={script}: {error}") from None


def pytest_report_header():
    return [f"{name} here is {path}" for name in helpers.TRAINERS if (path := helpers.path_of(name)).name != name]


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
