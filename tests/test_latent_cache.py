"""latent_cache.py: the order of samples, identities of files. test_prepare.py reads what prepare_robocasa.py wrote."""

import h5py
import numpy as np

import latent_cache
from data import Window


def test_the_first_held_out_windows_are_of_all_demos_and_not_all_beginnings():
    windows = [Window(f"demo_{d}", start, 81, "val") for d in range(3) for start in range(0, 180, 20)]
    first = latent_cache.spread(windows)[:6]
    assert [(window.demo, window.start) for window in first] == [
        ("demo_0", 0), ("demo_1", 100), ("demo_2", 40), ("demo_0", 20), ("demo_1", 120), ("demo_2", 60)]
    assert sorted(latent_cache.spread(windows)) == sorted(windows)
    assert latent_cache.spread(windows[:9]) == windows[:9]  # one demo's, in their order


def test_what_else_a_recording_holds_is_no_matter(tmp_path):
    """A demo without observations, a mask of another form: nothing of it is used."""
    with h5py.File(tmp_path / "robot.hdf5", "w") as file:
        file["data/demo_0/obs/left_intrinsics"] = np.ones((5, 3, 3))
        file["mask/train"] = np.array([b"demo_0"])
        plain = latent_cache.small_content(tmp_path / "robot.hdf5", ["left"], True)
        file.create_group("data/demo_1")
        file["mask/about"] = "a text"
        file["mask/more/inside"] = np.array([b"demo_1"])
        assert latent_cache.small_content(tmp_path / "robot.hdf5", ["left"], True) == plain
        file["data/demo_0/obs/left_intrinsics"][4, 0, 0] = 2
        masks, cameras = latent_cache.small_content(tmp_path / "robot.hdf5", ["left"], True)
        assert masks == plain[0] and cameras != plain[1]


def test_batches_are_a_pure_function_that_covers_each_epoch_once():
    stream = [i for step in range(15) for i in latent_cache.batch_indices(10, 4, step, seed=3)]
    for epoch in range(6):
        assert sorted(stream[10 * epoch : 10 * epoch + 10]) == list(range(10))
    assert stream[:10] != stream[10:20]
    assert latent_cache.batch_indices(10, 4, 7, seed=3) == stream[28:32]
    assert latent_cache.batch_indices(10, 4, 7, seed=4) != stream[28:32]
    assert len(latent_cache.batch_indices(3, 8, 0, seed=0)) == 8


def test_content_hash_sees_one_byte(tmp_path):
    path = tmp_path / "x"
    path.write_bytes(bytes(300_000))
    before = latent_cache.content_hash([path])
    assert latent_cache.content_hash([path]) == before
    path.write_bytes(bytes(150_000) + b"1" + bytes(149_999))
    assert latent_cache.content_hash([path]) != before


def test_the_box_is_that_of_finished_pointmaps(tmp_path):
    index = tmp_path / "pointmap/index.json"
    latent_cache.write_json(index, {"box": [0, 0, 0, 1, 1, 1]})
    assert latent_cache.cached_box(tmp_path) == [0, 0, 0, 1, 1, 1]
    index.write_text("{")
    assert latent_cache.cached_box(tmp_path) is None
    index.unlink()
    assert latent_cache.cached_box(tmp_path) is None


def test_contents_are_of_files_and_folders_and_nothing_else(tmp_path):
    model = tmp_path / "model"
    (model / "transformer").mkdir(parents=True)
    weights = model / "transformer/weights.safetensors"
    weights.write_bytes(b"1234")
    (tmp_path / "data.hdf5").write_bytes(b"5678")
    settings = {"model": str(model), "data": str(tmp_path / "data.hdf5"), "init_lora": "", "other": "Wan-AI/Wan2.2"}
    before = latent_cache.contents(settings, *settings)
    assert list(before) == [f"content of {name}" for name in settings]
    assert before["content of init_lora"] == before["content of other"] == ""
    (model / "README.md").write_text("not what is loaded")
    (model / "run/lora").mkdir(parents=True)  # a run's own folder
    (model / "run/config.json").write_text("{}")
    (model / "run/lora/lora.safetensors").write_bytes(b"0")
    assert latent_cache.contents(settings, *settings) == before
    weights.write_bytes(b"1235")
    after = latent_cache.contents(settings, *settings)
    assert [name for name in before if before[name] != after[name]] == ["content of model"]
