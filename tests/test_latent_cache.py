"""latent_cache.py: the order of samples, identities of files. test_prepare.py reads what prepare_robocasa.py wrote."""

import latent_cache


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
    assert latent_cache.contents(settings, *settings) == before
    weights.write_bytes(b"1235")
    after = latent_cache.contents(settings, *settings)
    assert [name for name in before if before[name] != after[name]] == ["content of model"]
