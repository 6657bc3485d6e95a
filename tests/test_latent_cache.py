"""latent_cache.py: the order of samples, identities of files. test_prepare.py reads what prepare_robocasa.py wrote."""

import h5py
import numpy as np

import latent_cache
from data import open_demos
from read_hdf5 import RobotDemos
from recordings import Window, content_hash, folder_hash


def test_the_first_held_out_windows_are_of_all_demos_and_not_all_beginnings():
    windows = [Window(f"demo_{d}", start, 81, "val") for d in range(3) for start in range(0, 180, 20)]
    first = latent_cache.spread(windows)[:6]
    assert [(window.demo, window.start) for window in first] == [
        ("demo_0", 0), ("demo_1", 100), ("demo_2", 40), ("demo_0", 20), ("demo_1", 120), ("demo_2", 60)]
    assert sorted(latent_cache.spread(windows)) == sorted(windows)
    assert latent_cache.spread(windows[:9]) == windows[:9]  # one demo's, in their order


def small_recording(path):
    """Four demos whose numbers are known: no library's rounding is in their cameras."""
    with h5py.File(path, "w") as file:
        for demo in (0, 1, 2, 10):
            group = file.create_group(f"data/demo_{demo}")
            group.attrs["ep_meta"] = '{"lang": "go"}'
            for i, view in enumerate(("left", "right")):
                E = np.tile(np.eye(4, dtype=np.float32), (6, 1, 1))
                E[:, 0, 3] = np.arange(6) + 10 * demo + 100 * i
                group[f"obs/{view}_image"] = np.zeros((6, 4, 8, 3), np.uint8)
                group[f"obs/{view}_depth"] = np.ones((6, 4, 8), np.float32)
                group[f"obs/{view}_intrinsics"] = np.tile(np.diag(np.float32([2, 2, 1])), (6, 1, 1))
                group[f"obs/{view}_extrinsics"] = E
        file["mask/train"], file["mask/valid"] = np.array([b"demo_10", b"demo_0", b"demo_2"]), np.array([b"demo_1"])
    return path


def test_fingerprints_are_those_of_caches_that_exist(tmp_path):
    """The numbers were written by the code that wrote the first caches: other ones make every cache stale."""
    recording = small_recording(tmp_path / "robot.hdf5")
    for part in ("vae", "text_encoder", "tokenizer", "transformer"):
        (tmp_path / "model" / part).mkdir(parents=True)
        (tmp_path / "model" / part / f"{part}.safetensors").write_text(part)
    (tmp_path / "model/model_index.json").write_text("{}")
    config = {"data": str(recording), "views": "left, right", "pointmaps": True, "model": str(tmp_path / "model"),
              "cell_height": 16, "cell_width": 32, "num_frames": 5, "window_stride": 4, "pad_short": False,
              "train_split": "train", "val_split": "valid", "val_demos": 1, "workspace_box": "", "box_percentile": 1.0,
              "max_text_tokens": 16, "negative_prompt": "", "cache_dtype": "float32", "lr": 1.0}
    data = {"data": "robot.hdf5", "train_split": "train", "val_split": "valid", "val_demos": 1,
            "data_content": content_hash([recording]), "masks": "7b00652c79ea363b"}
    rgb = data | {"num_frames": 5, "window_stride": 4, "pad_short": False, "cell_height": 16, "cell_width": 32,
                  "frames": "9bb64b5000c82c5a", "views": ["left", "right"], "vae": "05accdc05edf4d71",
                  "cache_dtype": "float32"}
    pointmap = rgb | {"workspace_box": "", "box_percentile": 1.0, "cameras": "72e5f0ffea2f104b",
                      "points": "272cfcd8e09e1b7a"}
    text = data | {"text_encoder": "72cec2a3c9c6e65b", "max_text_tokens": 16, "negative_prompt": "",
                   "prompts": "eeff7a1726ffdae8", "cache_dtype": "float32"}
    kind = {"kind": "i2v"}
    wanted = {"rgb": rgb, "condition/rgb": rgb | kind, "condition/text": text, "pointmap": pointmap,
              "condition/pointmap": pointmap | kind}
    assert latent_cache.fingerprints(config, "i2v", open_demos(config)) == wanted

    right = config | {"views": "right", "workspace_box": "0,0,0,1,1,1"}  # the percentile is no matter then
    pointmap = latent_cache.fingerprints(right, "i2v", open_demos(right))["pointmap"]
    assert pointmap["cameras"] == "e41878a05bcf15cc" and "box_percentile" not in pointmap

    for name in ("pointmaps", "workspace_box", "val_demos", "negative_prompt"):  # settings that a copy took out
        config.pop(name)
    few = latent_cache.fingerprints(config, "i2v", open_demos(config))
    assert few == {"rgb": {name: value for name, value in rgb.items() if name != "val_demos"}, "condition/rgb":
                   {name: value for name, value in (rgb | kind).items() if name != "val_demos"}, "condition/text":
                   {name: value for name, value in text.items() if name not in ("val_demos", "negative_prompt")}}

    assert latent_cache.contents({"model": config["model"]}, "model") == {"content of model": "e4a2ea43c0837811"}
    (tmp_path / "data.bin").write_bytes(np.arange(3_000_000, dtype="<u4").tobytes())
    assert content_hash([tmp_path / "data.bin"]) == "db64b82a84e348ba"


def test_an_edit_in_place_is_seen_wherever_it_lies(tmp_path, monkeypatch):
    """Of a large file only samples are compared: each demo's own numbers are looked at beside them."""
    monkeypatch.setattr("read_hdf5.content_hash", lambda paths: "the same samples")
    path = small_recording(tmp_path / "robot.hdf5")
    with h5py.File(path, "r+") as file:  # too large to be compared whole, packed or not
        frames = np.random.default_rng(0).integers(0, 255, (6, 80, 96, 3), dtype=np.uint8)
        for demo, packed in (("demo_1", None), ("demo_2", "gzip")):
            del file[f"data/{demo}/obs/left_image"]
            file.create_dataset(f"data/{demo}/obs/left_image", data=frames, compression=packed,
                                chunks=packed and (1, 80, 96, 3))
            del file[f"data/{demo}/obs/left_depth"]
            file.create_dataset(f"data/{demo}/obs/left_depth", data=np.ones((6, 80, 96), np.float32))

    def seen(change, pointmaps=True):
        before = RobotDemos(path, ["left"], pointmaps=pointmaps).fingerprint()
        with h5py.File(path, "r+") as file:
            change(file)
        after = RobotDemos(path, ["left"], pointmaps=pointmaps).fingerprint()
        return [name for name in before if before[name] != after[name]]

    def turn(name, frame):
        return lambda file: file[name].__setitem__(frame, file[name][frame] + 1)

    assert seen(lambda file: None) == []
    assert seen(lambda file: file["data/demo_10"].attrs.modify("ep_meta", '{"lang": "no"}')) == ["prompts"]
    assert seen(lambda file: file["data/demo_10"].attrs.modify("ep_meta", '{"lang":   "no"}')) == []
    for demo in ("demo_0", "demo_1", "demo_2"):
        assert seen(turn(f"data/{demo}/obs/left_image", 5)) == ["frames"]
        assert seen(turn(f"data/{demo}/obs/left_depth", 0)) == ["points"]
        assert seen(turn(f"data/{demo}/obs/left_depth", 0), pointmaps=False) == []
    assert seen(turn("data/demo_0/obs/left_extrinsics", 3)) == ["points"]
    assert seen(turn("data/demo_0/obs/left_extrinsics", 0)) == ["points", "cameras"]

    settings = {"data": str(path)}
    before = latent_cache.contents(settings, "data", demos=RobotDemos(path, ["left"]))
    seen(lambda file: file["data/demo_1"].attrs.modify("ep_meta", '{"lang": "up"}'))
    monkeypatch.setattr("latent_cache.content_hash", lambda paths: before["content of data"])
    after = latent_cache.contents(settings, "data", demos=RobotDemos(path, ["left"]))
    assert [name for name in before if before[name] != after[name]] == ["content of data: prompts"]


def test_what_else_a_recording_holds_is_no_matter(tmp_path):
    """A demo without observations, a mask of another form: nothing of it is used."""
    path = small_recording(tmp_path / "robot.hdf5")

    def after(change):
        with h5py.File(path, "r+") as file:
            change(file)
        return RobotDemos(path, ["left"], pointmaps=True).fingerprint()

    def add(file):
        file.create_group("data/demo_11")
        file["mask/about"] = "a text"
        file["mask/more/inside"] = np.array([b"demo_1"])

    plain = after(lambda file: None)
    more = after(add)
    assert (more["masks"], more["cameras"]) == (plain["masks"], plain["cameras"])
    assert more["data_content"] != plain["data_content"]
    moved = after(lambda file: file["data/demo_0/obs/left_intrinsics"].write_direct(np.full((6, 3, 3), 2, "f4")))
    assert moved["masks"] == plain["masks"] and moved["cameras"] != plain["cameras"]
    turned = after(lambda file: file["mask/train"].write_direct(np.array([b"demo_0", b"demo_10", b"demo_2"], "S7")))
    assert turned["masks"] != plain["masks"] and turned["cameras"] == moved["cameras"]


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
    before = content_hash([path])
    assert content_hash([path]) == before
    path.write_bytes(bytes(150_000) + b"1" + bytes(149_999))
    assert content_hash([path]) != before


def test_a_folder_of_recordings_is_what_is_in_it(tmp_path):
    """Another one under the same name makes a cache stale, and a run that began with it isn't resumed."""
    folder = tmp_path / "recordings"
    names = [f"videos/chunk-000/left/episode_{i:06d}.mp4" for i in range(40)] + ["meta/info.json", "meta/tasks.parquet"]
    for i, name in enumerate([*names, *(f"data/episode_{i:06d}.parquet" for i in range(40))]):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(bytes([i]) * 1000)
    content = lambda: latent_cache.contents({"data": str(folder)}, "data")["content of data"]  # noqa: E731
    first = content()
    assert len(first) == 16 and first == content() == folder_hash(folder)
    assert folder_hash(folder.rename(tmp_path / "copy")) == first  # wherever it lies
    folder = (tmp_path / "copy").rename(folder)
    (folder / ".cache/huggingface").mkdir(parents=True)
    (folder / ".cache/huggingface/download.lock").write_text("")
    assert content() == first

    def changed(name, content_there):
        before = (folder / name).read_bytes()
        (folder / name).write_bytes(content_there)
        differs = content() != first
        (folder / name).write_bytes(before)
        assert content() == first
        return differs

    for name in ("meta/info.json", "meta/tasks.parquet", names[0], names[39], "data/episode_000039.parquet"):
        assert changed(name, bytes([200]) * 1000), name  # of the same size
    assert changed(names[1], b"shorter")
    (folder / names[1]).rename(folder / "videos/chunk-000/left/episode_000040.mp4")
    renamed = content()
    (folder / "videos/chunk-000/left/episode_000040.mp4").unlink()
    assert len({first, renamed, content()}) == 3
    assert len(latent_cache.contents({"data": str(tmp_path / "copy")}, "data")["content of data"]) == 0  # isn't there
    (tmp_path / "copy").mkdir()
    assert latent_cache.contents({"data": str(tmp_path / "copy")}, "data")["content of data"] != ""


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
