"""data.py, the readers of recordings and geometry.py on small ones: windows, errors, points in the world, cells."""

import os
import re
import subprocess
import sys

import h5py
import numpy as np
import pytest
import torch

import data
import geometry
import recordings
import tiny
from guard import UserError
from read_hdf5 import RobotDemos
from recordings import Window

LEFT, RIGHT = VIEWS = ["robot0_agentview_left", "robot0_agentview_right"]
BOX = [-0.5, -0.5, 0.6, 0.5, 0.5, 1.1]


@pytest.fixture(scope="module")
def recording(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "robot.hdf5"
    tiny.make_robot_hdf5(path, num_demos=12)
    return path


@pytest.fixture
def edit(recording, tmp_path):
    """Returns a function that applies an edit to a copy of the recording and gives its path."""

    def apply(change):
        path = tmp_path / "edited.hdf5"
        path.write_bytes(recording.read_bytes())
        with h5py.File(path, "r+") as file:
            change(file)
        return path

    return apply


def replace(file, name, change):
    """Replace a dataset by a function of its content."""
    content = change(file[name][()])
    del file[name]
    file[name] = content


def frames_of(demos):
    return {demo: demos.num_frames[demo] for demo in demos.splits}


# ---------------------------------------------------------------------------------------------------------- recordings


def test_splits_and_numeric_order(recording, edit):
    demos = RobotDemos(recording, "robot0_agentview_left, robot0_agentview_right")
    assert list(demos.splits) == [f"demo_{i}" for i in range(12)]  # h5py's order would put demo_10 after demo_1
    assert [demo for demo, split in demos.splits.items() if split == "val"] == ["demo_11"]
    assert demos.prompts["demo_0"] == "a red ball moves left"

    held_out = RobotDemos(recording, LEFT, val_split="", val_demos=2).splits  # of mask/train, which lacks demo_11
    assert [demo for demo, split in held_out.items() if split == "val"] == ["demo_9", "demo_10"]
    unmasked = RobotDemos(edit(lambda file: file.pop("mask")), LEFT, val_demos=3).splits
    assert [demo for demo, split in unmasked.items() if split == "val"] == ["demo_9", "demo_10", "demo_11"]


def test_windows(recording):
    demos = RobotDemos(recording, VIEWS)
    frames = frames_of(demos)
    windows = demos.windows(num_frames=5, window_stride=2)
    assert [w.start for w in windows if w.demo == "demo_0"] == list(range(0, frames["demo_0"] - 4, 2))
    assert all(w.start + w.length <= frames[w.demo] and w.length == 5 for w in windows)
    assert windows[0].key == "demo_0_00000"
    assert demos.skipped == []


def test_short_demos_are_listed_or_padded(edit):
    demos = RobotDemos(
        edit(lambda f: [replace(f, f"data/demo_3/obs/{v}_image", lambda x: x[:3]) for v in VIEWS]), VIEWS
    )
    windows = demos.windows(5, 1)
    assert demos.skipped == [("demo_3", 3)]
    assert {w.demo for w in windows} == {f"demo_{i}" for i in range(12)} - {"demo_3"}

    padded = [w for w in demos.windows(5, 1, pad_short=True) if w.demo == "demo_3"]
    assert demos.skipped == []
    assert padded == [Window("demo_3", 0, 3, "train")]
    rgb = demos.rgb(padded[0], LEFT, 5)
    assert rgb.shape == (5, 32, 32, 3)
    assert (rgb[3:] == rgb[2]).all()
    assert (rgb[2] != rgb[1]).any()


def test_a_window_reads_its_own_frames(recording):
    demos = RobotDemos(recording, VIEWS)
    demo = max(demos.num_frames, key=demos.num_frames.get)
    with h5py.File(recording) as file:
        expected = file[f"data/{demo}/obs/{RIGHT}_image"][2:7]
    assert (demos.rgb(Window(demo, 2, 5, "train"), RIGHT, 5) == expected).all()


def test_the_file_is_opened_again_after_a_fork(recording):
    demos = RobotDemos(recording, VIEWS)
    handle = demos.file
    if (pid := os.fork()) == 0:
        os._exit(0 if demos.file is not handle and demos.rgb(Window("demo_0", 0, 1, ""), LEFT, 1).any() else 1)
    assert os.waitpid(pid, 0)[1] == 0
    assert demos.file is handle


def test_a_reader_gets_the_settings_it_wants_and_keeps_its_defaults(recording):
    """A forked script may lack some settings, and has others."""
    settings = {"data": str(recording), "views": f"{LEFT}, {RIGHT}", "lr": 1.0, "cache_dir": "none"}
    few = data.open_demos(settings)
    assert (few.views, few.pointmaps, few.splits["demo_11"], few.splits["demo_10"]) == (VIEWS, False, "val", "train")
    demos = data.open_demos(settings | {"pointmaps": True, "val_split": "", "val_demos": 2, "train_split": "train"})
    assert demos.pointmaps and [demo for demo in demos.splits if demos.splits[demo] == "val"] == ["demo_9", "demo_10"]
    with pytest.raises(UserError, match="train_split=some: .* has the masks train, valid"):
        data.open_demos(settings | {"train_split": "some"})


def test_what_is_there_whatever_is_wanted(recording, edit):
    demos = RobotDemos(recording, VIEWS)
    assert demos.image_size("demo_3", RIGHT) == (32, 32) and demos.has_depth("demo_3")
    for name in (DEPTH, f"data/demo_3/obs/{RIGHT}_extrinsics"):
        path = edit(lambda file, name=name: file.pop(name))
        assert [RobotDemos(path, VIEWS).has_depth(demo) for demo in ("demo_2", "demo_3")] == [True, False]
    wide = RobotDemos(edit(lambda file: replace(file, IMAGE, lambda x: x[:, :20])), VIEWS)
    assert wide.image_size("demo_3", LEFT) == (20, 32) and wide.image_size("demo_3", RIGHT) == (32, 32)


class Another:
    """The least that a second reader writes itself: one camera that looks along z, from further up frame by frame."""

    windows, points = recordings.all_windows, recordings.world_points

    def __init__(self, lengths, val_demos):
        self.num_frames = lengths
        self.splits = recordings.hold_out(list(lengths), val_demos)

    def camera(self, window, view, num_frames):
        depth = np.float32([[[2, 0], [np.inf, 4]]]).repeat(9, 0)[window.start : window.start + window.length]
        E = np.eye(4)[None].repeat(len(depth), 0)
        E[:, 2, 3] = window.start + np.arange(len(depth))
        K = np.float32([[2, 0, 1], [0, 2, 1], [0, 0, 1]])[None].repeat(len(depth), 0)
        recordings.check_camera(window, view, depth, K, E)
        return tuple(recordings.hold_last(array, num_frames) for array in (depth, K, E))


def test_what_readers_share_serves_a_second_one():
    demos = Another({"a": 9, "short": 3, "b": 5, "held": 6}, val_demos=1)
    assert demos.splits == {"a": "train", "short": "train", "b": "train", "held": "val"}
    windows = demos.windows(5, 3)
    assert windows == [Window("a", 0, 5, "train"), Window("a", 3, 5, "train"), Window("b", 0, 5, "train"),
                       Window("held", 0, 5, "val")]
    assert demos.skipped == [("short", 3)] and demos.num_uncovered == 1 + 0 + 1
    padded = demos.windows(5, 3, pad_short=True)[2]
    assert padded == Window("short", 0, 3, "train") and demos.skipped == []
    xyz, valid = demos.points(padded, "front", 5)
    assert valid.tolist() == [[[True, False], [False, True]]] * 5
    assert xyz[:, 0, 0].tolist() == [[-0.5, -0.5, 2 + frame] for frame in (0, 1, 2, 2, 2)]  # the last is held
    assert xyz[:, 1, 1].tolist() == [[1, 1, 4 + frame] for frame in (0, 1, 2, 2, 2)]
    assert not xyz[~valid].any()
    with pytest.raises(UserError, match="val_demos=4: want 1 to 3 of the 4 demos"):
        Another(demos.num_frames, val_demos=4)
    with pytest.raises(UserError, match="num_frames=7: no val windows left, the longest val demo has 6 frames"):
        demos.windows(7, 1)


def test_evenly():
    assert recordings.evenly(list(range(10)), 4) == [0, 3, 6, 9]
    assert recordings.evenly([5, 6], 8) == [5, 6] and recordings.evenly([], 8) == []


# -------------------------------------------------------------------------------------------------- one line of errors

IMAGE, DEPTH = f"data/demo_3/obs/{LEFT}_image", f"data/demo_3/obs/{LEFT}_depth"


def meta(value):
    return lambda file: file["data/demo_3"].attrs.__setitem__("ep_meta", value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda f: replace(f, IMAGE, lambda x: x / np.float32(255)), r"demo_3/.*_image: got float32 .*, want uint8"),
        (lambda f: replace(f, IMAGE, lambda x: x[:-1]), "demo_3: got unequal numbers of frames"),
        (lambda f: f.pop(IMAGE), f"views={LEFT}: demo_3 of .* has the images {RIGHT}_image, want {LEFT}_image; the "
         f"nearest is {RIGHT}_image"),
        (lambda f: f.pop(DEPTH), "demo_3/obs/robot0_agentview_left_depth: not there"),
        (
            lambda f: replace(f, DEPTH, lambda x: (1000 * x).astype(np.uint16)),
            "_depth: got uint16 .*, want float .*met",
        ),
        (lambda f: f["data/demo_3"].attrs.pop("ep_meta"), "ep_meta of data/demo_3: got .*: want JSON with the instr"),
        *[(meta(value), "ep_meta of data/demo_3: got .*: want JSON with the instruction as lang") for value in (
            "pick it up", "[" * 2000, "{}", '["lang"]', '{"lang": " "}', '{"lang": 5}', '{"lang": "\\ud800"}', b"\xff",
            5, np.array([1, 2]), h5py.Empty("S4"))],
        (lambda f: f.pop("data/demo_3"), "mask/train names demo_3, which data/ does not have"),
        (lambda f: f.pop("data"), r"want data/demo_N"),
        (lambda f: f.move("mask/valid", "mask/held") or f.pop("mask/train"), "train_split=train: .* masks held"),
        (lambda f: replace(f, "mask/valid", lambda _: np.array([b"demo_0"])), "demo_0 is in mask/train and mask/valid"),
    ],
)
def test_bad_recordings(edit, change, message):
    with pytest.raises(UserError, match=message) as error:
        RobotDemos(edit(change), VIEWS, pointmaps=True)
    assert "\n" not in str(error.value)


SMALL = ("data", "data/demo_1", "data/demo_1/obs", *(f"data/demo_1/obs/left_{name}" for name in (
    "image", "depth", "intrinsics", "extrinsics")), "mask", "mask/train", "mask/valid")


def small_recording(path, **kwargs):
    with h5py.File(path, "w", **kwargs) as file:
        for demo in range(3):
            group = file.create_group(f"data/demo_{demo}")
            group.attrs["ep_meta"] = '{"lang": "go"}'
            arrays = dict(image=np.arange(6 * 96, dtype="u1").reshape(6, 4, 8, 3), depth=np.ones((6, 4, 8), "f4"),
                          intrinsics=np.tile(np.diag(np.float32([2, 2, 1])), (6, 1, 1)),
                          extrinsics=np.tile(np.eye(4, dtype="f4"), (6, 1, 1)))
            for name, array in arrays.items():
                group.create_dataset(f"obs/left_{name}", data=array, compression="gzip" if demo else None)
        file["mask/train"], file["mask/valid"] = np.array([b"demo_0", b"demo_1"]), np.array([b"demo_2"])
    return path


def use(path, **settings):
    """Everything that a reader does."""
    demos = RobotDemos(path, "left", **{"pointmaps": True} | settings)
    for window in demos.windows(5, 1):
        demos.rgb(window, "left", 5), demos.points(window, "left", 5)
    assert all(demos.has_depth(demo) and demos.image_size(demo, "left") for demo in demos.splits)
    return demos.fingerprint()


def outcome(path, **settings):
    """ "" or the one line that names the file or, of what is wrong with a camera, the demo."""
    try:
        return use(path, **settings) and ""
    except UserError as error:
        assert "\n" not in str(error) and (str(path) in str(error) or str(error).startswith("demo_"))
        return str(error)


@pytest.mark.parametrize("libver", ["earliest", "latest"])
@pytest.mark.filterwarnings("ignore")
def test_damaged_bytes_and_cut_files_are_one_line_or_no_matter(tmp_path, libver):
    whole = small_recording(tmp_path / "whole.hdf5", libver=libver).read_bytes()
    outcomes, path = [], tmp_path / "damaged.hdf5"
    for seed in range(60):
        rng, content = np.random.default_rng(seed), bytearray(whole)
        for at in rng.integers(0, len(content), rng.choice([1, 8, 40, 200])):
            content[at] = rng.integers(0, 256)
        path.write_bytes(content)
        outcomes.append(outcome(path))
    assert 20 < sum(map(bool, outcomes)) < 60
    for length in range(0, len(whole), len(whole) // 9):
        path.write_bytes(whole[:length])
        assert f"data={path}: not a whole HDF5 file" in outcome(path)


@pytest.mark.parametrize("name", SMALL)
def test_what_another_thing_is_in_the_place_of_is_named(tmp_path, name):
    """A group, dataset or link where another belongs; numbers of another kind, rank or length."""
    whole = small_recording(tmp_path / "whole.hdf5").read_bytes()
    os.mkfifo(tmp_path / "pipe")
    with h5py.File(tmp_path / "other.hdf5", "w") as file:
        file["x"] = np.zeros((6, 4, 8, 3), "u1")
    things = dict(
        group=lambda file: file.create_group(name), dead=h5py.SoftLink("/nowhere"), loop=h5py.SoftLink(f"/{name}"),
        other=h5py.ExternalLink("other.hdf5", "x"), gone=h5py.ExternalLink("gone.hdf5", "x"),
        chain=lambda file: file.update({"link": h5py.ExternalLink("other.hdf5", "x")}) or h5py.SoftLink("/link"),
        pipe=h5py.ExternalLink(str(tmp_path / "pipe"), "x"), empty=h5py.Empty("u1"), scalar=np.uint8(3), text="demo_0",
        kind=np.dtype("f4"), texts=np.array([b"demo_7", b"x"]), short=np.zeros((0, 4, 8, 3), "u1"),
        rank=np.zeros((6, 4), "u1"), booleans=np.ones((6, 4, 8, 3), bool), record=np.zeros(6, [("a", "u1")]),
        references=lambda file: file.create_dataset("r", 3, h5py.ref_dtype), complex=np.zeros((6, 4, 8), "c8"),
        ragged=lambda file: file.create_dataset("v", 6, h5py.vlen_dtype("u1")),
        huge=lambda file: file.create_dataset("h", (10**12, 4, 8, 3), "u1", chunks=(1, 4, 8, 3)))
    for kind, thing in things.items():
        path = tmp_path / f"{kind}.hdf5"
        path.write_bytes(whole)
        with h5py.File(path, "r+") as file:
            del file[name]
            thing = thing(file) if callable(thing) else thing
            if thing is not None and name not in file:
                file[name] = thing
        found = outcome(path)
        if kind != "group" or "/obs/" in name:  # an empty mask/ is none, an empty data/ and demo lack what is in them
            assert f"data={path}: " in found and (name in found or f"mask/{name}" in found), (kind, found)
        if kind in ("other", "gone", "chain", "pipe"):
            assert "want --allow_external=True" in found, (kind, found)


def test_no_other_file_is_read_unasked(tmp_path):
    path, image = small_recording(tmp_path / "a.hdf5"), "data/demo_1/obs/left_image"
    other = small_recording(tmp_path / "b.hdf5")
    plain = outcome(path)
    assert plain == ""
    raw = tmp_path / "raw.bin"
    with h5py.File(path) as file:
        raw.write_bytes(file[image][()].tobytes())
    layout = h5py.VirtualLayout((6, 4, 8, 3), "u1")
    layout[:] = h5py.VirtualSource(str(other), image, (6, 4, 8, 3))
    changes = {
        "raw.bin": lambda file: file.create_dataset(image, (6, 4, 8, 3), "u1", external=[(str(raw), 0, 6 * 96)]),
        "virtual": lambda file: file.create_virtual_dataset(image, layout),
        "b.hdf5": lambda file: file.update({image: h5py.ExternalLink(str(other), image)}),
    }
    for where, change in changes.items():
        small_recording(path)
        with h5py.File(path, "r+") as file:
            del file[image]
            change(file)
        assert re.search(f"data={path}: {image} is kept in other files .*{where}.*: want --allow_external=True",
                         outcome(path))
        assert outcome(path, allow_external=True) == ""
        assert data.open_demos({"data": path, "views": "left", "allow_external": True}).rgb(
            Window("demo_1", 1, 2, ""), "left", 2).ravel()[:3].tolist() == [96, 97, 98]


def test_a_file_that_is_written_or_was_not_closed_is_told_as_that(tmp_path):
    path = tmp_path / "open.hdf5"
    code = (f"import h5py; f = h5py.File({str(path)!r}, 'w', libver='latest'); f['x'] = 1; f.flush(); "
            "print('open', flush=True); input()")
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as writer:
        assert writer.stdout.readline() == b"open\n"
        told = f"data={path}: is open for writing elsewhere or wasn't closed: close it, or free it with h5clear -s"
        assert outcome(path) == told
        writer.kill()
    assert outcome(path) == told


def test_a_given_split_tells_by_itself_which_demos(edit):
    """The others are the other split's; a name that isn't the usual one must be there."""
    names = [f"demo_{i}" for i in range(12)]

    def split(change, **settings):
        splits = RobotDemos(edit(change), LEFT, **settings).splits
        assert sorted(splits) == sorted(names)
        return [demo for demo in splits if splits[demo] == "val"]

    assert split(lambda file: file.pop("mask/train")) == ["demo_11"]
    assert split(lambda file: file.pop("mask/valid")) == ["demo_11"]
    assert split(lambda file: file.pop("mask/valid"), train_split="", val_split="train") == names[:11]
    assert split(lambda file: file.move("mask/train", "mask/some"), train_split="some") == ["demo_11"]
    assert split(lambda file: [file.pop("mask/train"), file.pop("mask/valid")]) == ["demo_11"]
    for change, settings, message in (
        (lambda file: file.pop("mask/valid"), dict(val_split="vaild"), "val_split=vaild: the file has the masks train"),
        (lambda file: [file.pop("mask/valid"), replace(file, "mask/train", lambda _: np.array(names, "S"))], {},
         "val_split=valid: got no demos, want some"),
        (lambda file: replace(file, "mask/train", lambda _: np.array([b"demo_3"])), dict(val_split=""),
         "got demo_3, want at least two"),
        (lambda file: [file.pop("mask"), file.pop("data"), file.create_group("data")], {}, "got no demos, want at le"),
        (lambda file: replace(file, "mask/train", lambda x: x[:0]), {}, "train_split=train: got no demos"),
    ):
        with pytest.raises(UserError, match=message):
            RobotDemos(edit(change), LEFT, **settings)


def test_the_images_that_are_there_are_listed(edit):
    with pytest.raises(UserError, match=f"views={LEFT}_image: demo_0 of .* the nearest is {LEFT}_image"):
        RobotDemos(edit(lambda file: None), f"{LEFT}_image")
    path = edit(lambda file: file["data/demo_0/obs"].move(f"{LEFT}_image", LEFT))
    with pytest.raises(UserError, match=f"has the images {LEFT}, {RIGHT}_image, want {LEFT}_image"):
        RobotDemos(path, VIEWS)


def test_bad_files(recording, tmp_path):
    with pytest.raises(UserError, match="no such file"):
        RobotDemos(tmp_path / "none.hdf5", VIEWS)
    truncated = tmp_path / "truncated.hdf5"
    truncated.write_bytes(recording.read_bytes()[:-5000])
    with pytest.raises(UserError, match="not a whole HDF5 file .*truncated"):
        RobotDemos(truncated, VIEWS)
    with pytest.raises(UserError, match="views=a,,b"):
        RobotDemos(recording, "a,,b")
    with pytest.raises(UserError, match="val_demos=11: want 1 to 10 of the 11 demos"):
        RobotDemos(recording, VIEWS, val_split="", val_demos=11)


def test_a_damaged_chunk_is_named(recording, tmp_path):
    with h5py.File(recording) as file:
        chunk = file[IMAGE].id.get_chunk_info(0)
    content = bytearray(recording.read_bytes())
    content[chunk.byte_offset : chunk.byte_offset + chunk.size] = bytes(chunk.size)
    path = tmp_path / "damaged.hdf5"
    path.write_bytes(content)
    demos = RobotDemos(path, VIEWS)  # its metadata is whole
    with pytest.raises(UserError, match=f"demo_3/obs/{LEFT}_image: got .*filter.*: damaged, .*copy the file again"):
        demos.rgb(Window("demo_3", 0, 5, ""), LEFT, 5)


def test_nan_depth_is_an_error_and_unknown_depth_is_masked(edit):
    def spoil(value):
        def change(depth):
            depth[4, 10, 20] = value
            return depth

        return edit(lambda file: replace(file, DEPTH, change))

    with pytest.raises(UserError, match=f"demo_3/{LEFT}_depth: got NaN in frame 4"):
        RobotDemos(spoil(np.nan), VIEWS, pointmaps=True).points(Window("demo_3", 0, 5, ""), LEFT, 5)
    for unknown in (0, np.inf):
        xyz, valid = RobotDemos(spoil(unknown), VIEWS, pointmaps=True).points(Window("demo_3", 0, 5, ""), LEFT, 5)
        assert np.isfinite(xyz).all()
        assert np.argwhere(~valid).tolist() == [[4, 10, 20]]


def test_a_camera_that_sees_nothing_is_an_error(edit):
    """A matrix of zeros has no inverse."""
    path = edit(lambda file: replace(file, f"data/demo_3/obs/{LEFT}_intrinsics", lambda K: 0 * K))
    with pytest.raises(UserError, match=rf"demo_3/{LEFT}_intrinsics: got \[\[0.0, .*, want focal lengths above 0"):
        RobotDemos(path, VIEWS, pointmaps=True).points(Window("demo_3", 0, 5, ""), LEFT, 5)


def test_no_windows_left(recording):
    with pytest.raises(UserError, match="num_frames=9: no train windows left, the longest train demo has 8 frames"):
        RobotDemos(recording, VIEWS).windows(9, 1)


def test_boxes():
    assert data.parse_box("-1, 0,0.5,1,2,3") == [-1, 0, 0.5, 1, 2, 3]
    for text in ("0,0,0,1,1", "0,0,0,1,1,0", "0,0,0,1,1,x"):
        with pytest.raises(UserError, match=f"workspace_box={text}: want x0,y0,z0,x1,y1,z1"):
            data.parse_box(text)


# ------------------------------------------------------------------------------------------------------------ geometry


def test_unproject_is_the_pinhole_equation_at_pixel_centres():
    K = np.array([[[2.0, 0, 1.0], [0, 4.0, 1.0], [0, 0, 1]]])
    E = np.eye(4)[None].copy()
    E[0, :3, :3] = [[0, -1, 0], [1, 0, 0], [0, 0, 1]]  # a quarter turn about the optical axis
    E[0, :3, 3] = [10, 20, 30]
    xyz = geometry.unproject(np.array([[[1.0, 2.0], [3.0, 4.0]]]), K, E)[0]
    # pixel (row 1, column 0): camera x = (0.5 - 1) / 2 * 3, y = (1.5 - 1) / 4 * 3, z = 3
    assert xyz[1, 0] == pytest.approx([10 - 0.375, 20 - 0.75, 33])
    assert xyz[0, 1] == pytest.approx([10 + 0.25, 20 + 0.5, 32])


def test_points_lie_where_the_scene_is(recording):
    """The table of the tiny world is a plane at a known height; forgetting the half pixel would miss it by > 1 mm."""
    demos = RobotDemos(recording, VIEWS, pointmaps=True)
    for view in VIEWS:
        xyz, valid = demos.points(Window("demo_0", 0, 1, ""), view, 1)
        height = xyz[..., 2]
        assert valid.all()
        on_table = np.abs(height - tiny.TABLE_HEIGHT) < 1e-5
        on_floor = np.abs(height) < 1e-5
        assert on_table.mean() > 0.3
        ball = xyz[~(on_table | on_floor)]
        with h5py.File(recording) as file:
            centre = file["data/demo_0/obs/object"][0, :3]
        assert np.linalg.norm(ball - centre, axis=1) == pytest.approx(tiny.RADIUS, abs=1e-5)


def test_box_round_trip_and_clamp():
    xyz = torch.tensor([[-0.5, 0.0, 0.6], [0.2, -0.1, 1.0]])
    points = geometry.normalise_points(xyz, BOX)
    assert points[0].tolist() == pytest.approx([-1, 0, -1], abs=1e-6)
    assert torch.allclose(geometry.denormalise_points(points, BOX), xyz, atol=1e-6)
    assert geometry.normalise_points(torch.tensor([9.0, -9.0, 0.85]), BOX).tolist() == pytest.approx(
        [1, -1, 0], abs=1e-6
    )


def stored(recording):
    """Some frames of the recording: images {view: f h w 3}, cameras {view: (depth, K, E)}."""
    demos = RobotDemos(recording, VIEWS, pointmaps=True)
    window = Window("demo_1", 0, 5, "")
    return {v: demos.rgb(window, v, 5) for v in VIEWS}, {v: demos.camera(window, v, 5) for v in VIEWS}


def test_a_sound_recording_has_no_faults(recording):
    images, cameras = stored(recording)
    assert geometry.check_geometry(images, cameras)[1:] == ([], [])
    assert geometry.plain_views(images) == []
    median, distance, share = geometry.agreement(cameras)
    assert median <= distance < 0.05  # mm: the two ray-cast views are exact
    assert share > 0.5


@pytest.mark.parametrize(
    ("spoil", "faults"),
    [
        (
            lambda rgb, d, K, E: (rgb[:, ::-1], d[:, ::-1], K, E),
            ["depth is upside down", "images of .*left and .*right are upside down"],
        ),
        (lambda rgb, d, K, E: (rgb[:, ::-1], d, K, E), ["^images of .*left and .*right are upside down"]),
        (lambda rgb, d, K, E: (rgb, d[:, ::-1], K, E), ["depth is upside down"]),
        (lambda rgb, d, K, E: (rgb, d[:, :, ::-1], K, E), ["mirrored"]),
        (
            lambda rgb, d, K, E: (rgb, d * 1000, K, E),
            [r"depth is in millimetres \(median 1\d\d\d\).* multiply it by 0.001"],
        ),
        (lambda rgb, d, K, E: (rgb, d * geometry.ray_length(K, d), K, E), ["depth is along the ray"]),
        (lambda rgb, d, K, E: (rgb, d, K, np.linalg.inv(E)), ["extrinsics are world-to-camera"]),
        (lambda rgb, d, K, E: (rgb, d, K, E * np.float32([1, -1, -1, 1])), ["extrinsics have OpenGL axes"]),
        (lambda rgb, d, K, E: (rgb, d, K, E * np.float32([1, -1, 1, 1])), ["hold no rotation"]),
        (
            lambda rgb, d, K, E: (rgb[:, ::-1, ::-1], d[:, ::-1, ::-1], K, E * np.float32([-1, -1, 1, 1])),
            ["^all of .*left and .*right is upside down"],
        ),
        (lambda rgb, d, K, E: (rgb, d, K * np.float32([1.5, 1.5, 1])[:, None], E), ["points are .* mm apart"]),
        (lambda rgb, d, K, E: (rgb, d * 0, K, E), ["no known depth"]),
    ],
)
def test_what_people_get_wrong_is_named(recording, spoil, faults):
    images, cameras = stored(recording)
    spoilt = {view: spoil(images[view], *cameras[view]) for view in VIEWS}
    images, cameras = {v: x[0] for v, x in spoilt.items()}, {v: x[1:] for v, x in spoilt.items()}
    _, of_images, of_cameras = geometry.check_geometry(images, cameras)
    found = "; ".join(of_images + of_cameras)
    for fault in faults:
        assert re.search(fault, found), found


def test_a_view_of_one_colour_is_named(recording):
    images, _ = stored(recording)
    images[LEFT][2:4], images[RIGHT][1] = 0, [0, 90, 200]
    assert geometry.plain_views(images) == [
        f"{LEFT} is black or of one colour in 2 of the 5 frames looked at",
        f"{RIGHT} is black or of one colour in 1 of the 5 frames looked at"]


# --------------------------------------------------------------------------------------------------------------- cells


def test_rgb_cell():
    rgb = np.zeros((2, 4, 4, 3), np.uint8)
    rgb[:, :, ::2] = 255  # columns on and off: an antialiased half is grey, a skipping one would be black or white
    cell = data.rgb_cell(rgb, 2, 2)
    assert cell.shape == (3, 2, 2, 2)
    assert cell.abs().max() < 0.35
    assert torch.equal(data.rgb_cell(rgb, 4, 4)[0, 0, 0], torch.tensor([1.0, -1, 1, -1]))


def test_point_cell_picks_pixels_and_masks():
    xyz = np.full((1, 4, 4, 3), 0.85, np.float32)
    xyz[0, ..., 0], xyz[0, ..., 1] = np.meshgrid(np.linspace(-0.4, 0.4, 4), np.linspace(-0.4, 0.4, 4))
    xyz[0, 3, 3, 0] = 7  # a wall behind
    valid = np.ones((1, 4, 4), bool)
    valid[0, 0, 0] = False
    points, inside = data.point_cell(xyz, valid, BOX, 8, 8)
    assert points.shape == (3, 1, 8, 8)
    assert torch.equal(points[:, 0, ::2, ::2], points[:, 0, 1::2, 1::2])  # nearest: no value between two surfaces
    assert points[:, 0, 0, 0].tolist() == [0, 0, 0]
    assert points[0, 0, 7, 7] == 1
    assert (~inside[0]).nonzero().tolist() == [[0, 0], [0, 1], [1, 0], [1, 1], [6, 6], [6, 7], [7, 6], [7, 7]]
    back = geometry.denormalise_points(points[:, 0, ::2, ::2].permute(1, 2, 0), BOX)
    assert torch.allclose(back[inside[0, ::2, ::2]], torch.from_numpy(xyz[0])[inside[0, ::2, ::2]], atol=1e-6)


def test_grid():
    names = [(modality, view) for modality in ("rgb", "pointmap") for view in VIEWS]
    cells = {name: torch.full((1, 2, 2, 3), float(i)) for i, name in enumerate(names)}  # z F h w
    grid = data.join_cells(cells)
    assert grid.shape == (1, 2, 4, 6)
    assert grid[0, 0, ::2, ::3].tolist() == [[0, 1], [2, 3]]  # rows are modalities, columns are views
    split = data.split_cells(grid, ("rgb", "pointmap"), VIEWS)
    assert list(split) == names
    assert all(torch.equal(split[name], cells[name]) for name in names)
    assert torch.equal(
        data.split_cells(grid[None], ("rgb", "pointmap"), VIEWS)["pointmap", LEFT], cells[names[2]][None]
    )
