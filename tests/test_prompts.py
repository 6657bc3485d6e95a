import collections
import json

import numpy as np
import pytest
import torch
from PIL import Image

from guard import UserError
from prompts import Prompts, group_indices, open_image, read_image


def write(folder, *entries, name="train.jsonl"):
    lines = [entry if isinstance(entry, str) else json.dumps(entry) for entry in entries]
    (folder / name).write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder / name


def line(prompt, image_path, **metadata):
    return {"input": prompt, "metadata": {"image_path": image_path, **metadata}}


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "images").mkdir()
    rng = np.random.default_rng(0)
    for name in ("a.png", "b.jpg"):
        Image.fromarray(rng.integers(0, 256, (40, 60, 3), dtype=np.uint8)).save(tmp_path / "images" / name)
    return tmp_path


def test_reads_lines_in_order(folder, monkeypatch):
    absolute = str(folder / "images/a.png")
    first = line("un été", "images/a.png", colour="red")
    path = write(folder, first, "", line("two", "images/b.jpg"), line("x", absolute))
    monkeypatch.chdir("/")  # image paths are relative to the file, not to where we are
    prompts = Prompts(path, 16, 32)
    assert prompts.prompts == ["un été", "two", "x"] and len(prompts) == 3 and prompts.needs_image
    assert prompts.metadata[0] == {"image_path": "images/a.png", "colour": "red"}
    assert torch.equal(prompts.image(0), prompts.image(2)) and not torch.equal(prompts.image(0), prompts.image(1))


def test_text_to_video_needs_no_image(folder):
    prompts = Prompts(write(folder, {"input": "one"}, line("two", "nowhere.png")), 16, 16, needs_image=False)
    assert prompts.prompts == ["one", "two"] and prompts.metadata == [{}, {"image_path": "nowhere.png"}]
    assert not prompts.needs_image


def test_image_of_the_right_size_is_unchanged(folder):
    prompts = Prompts(write(folder, line("one", "images/a.png")), 40, 60)
    pixels = np.array(Image.open(folder / "images/a.png")).astype(np.float32)
    image = prompts.image(0)
    assert image.shape == (3, 40, 60) and image.dtype == torch.float32
    assert torch.allclose(image, torch.from_numpy(pixels.transpose(2, 0, 1)) / 127.5 - 1, atol=1e-6)


@pytest.mark.parametrize("height, width", [(16, 16), (20, 40), (32, 16), (80, 120)])
def test_image_covers_and_is_cut_to_the_centre(folder, height, width):
    """A ramp along each axis: its values say which part of the image is left, and that nothing is stretched."""
    columns, rows = np.meshgrid(np.arange(200) + 0.5, np.arange(100) + 0.5)
    Image.fromarray(np.stack([columns, rows, rows * 0 + 128], -1).round().astype(np.uint8)).save(folder / "ramp.png")
    image = (Prompts(write(folder, line("one", "ramp.png")), height, width).image(0) + 1) * 127.5
    scale = min(100 / height, 200 / width)  # source pixels a pixel, the same in both directions
    wanted_x = 100 + (np.arange(width) + 0.5 - width / 2) * scale
    wanted_y = 50 + (np.arange(height) + 0.5 - height / 2) * scale
    assert image.shape == (3, height, width)
    inner = slice(2, -2)  # bicubic bends the ramp at the border
    assert np.abs(image[0].mean(0).numpy() - wanted_x)[inner].max() < 1.1
    assert np.abs(image[1].mean(1).numpy() - wanted_y)[inner].max() < 1.1


def test_shrinking_antialiases(folder):
    """A checkerboard of single pixels becomes grey, not black or white."""
    board = (np.indices((64, 64)).sum(0) % 2 * 255).astype(np.uint8)
    Image.fromarray(np.stack([board] * 3, -1)).save(folder / "board.png")
    image = Prompts(write(folder, line("one", "board.png")), 16, 16).image(0)
    assert image[:, 2:-2, 2:-2].abs().max() < 0.05


def test_other_modes_and_turned_photographs(folder):
    Image.new("L", (8, 8), 255).save(folder / "grey.png")
    pixels = np.zeros((8, 16, 3), dtype=np.uint8)
    pixels[:, :8] = 255  # white left of black; turned by 90 degrees clockwise white is above black
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.fromarray(pixels).save(folder / "turned.jpg", exif=exif, quality=100)
    prompts = Prompts(write(folder, line("one", "grey.png"), line("two", "turned.jpg")), 16, 8)
    assert torch.equal(prompts.image(0), torch.ones(3, 16, 8))
    assert prompts.image(1)[:, :6].min() > 0.9 and prompts.image(1)[:, -6:].max() < -0.9


def ramp(mode):
    """8 x 8 pixels of a mode from a red and green ramp, half of them transparent where it has alpha, over blue."""
    levels = np.arange(0, 256, 4, dtype=np.uint8).reshape(8, 8)
    pixels = np.stack([levels, levels.T, levels * 0, np.full_like(levels, 255)], -1)
    pixels[:, 4:, 2:] = 255, 0  # hidden
    image = Image.fromarray(pixels)
    return image if mode == "RGBA" else image.convert("RGB").convert(mode)


def test_every_kind_of_image_is_the_same_picture(folder):
    """Alpha in its three forms lies on white, whatever colours it hides; ink, palettes and grey are what one sees."""
    rgba, rgb = ramp("RGBA"), ramp("RGB")
    wanted = np.asarray(rgb).copy()
    wanted[:, 4:] = 255
    opaque = np.asarray(rgb.convert("P", palette=Image.Palette.ADAPTIVE, colors=256).convert("RGB"))
    palette = rgb.convert("P", palette=Image.Palette.ADAPTIVE, colors=128)
    grey = np.repeat(np.asarray(rgb.convert("L"))[..., None], 3, 2)
    la, of_grey = Image.merge("LA", [rgb.convert("L"), rgba.getchannel("A")]), grey.copy()
    of_grey[:, 4:] = 255
    keyed = np.zeros((8, 8, 3), np.uint8)
    keyed[:, 4:] = (10, 20, 30)  # one colour stands for transparent
    on_white = keyed.copy()
    on_white[:, 4:] = 255
    levels = np.array([0, 1, 0, 1, 0, 1, 0, 1] * 8, np.uint8).reshape(8, 8)
    two = Image.fromarray(levels)
    two.putpalette([255, 0, 0, 0, 255, 0])
    red = np.where(levels[..., None] == 0, [255, 0, 0], 255).astype(np.uint8)
    half = Image.fromarray(np.full((8, 8, 4), (0, 0, 0, 128), np.uint8))
    for name, image, seen, options in [
        ("rgba.png", rgba, wanted, {}), ("rgba.webp", rgba, wanted, dict(lossless=True, exact=True)),
        ("p.png", palette, np.asarray(palette.convert("RGB")), {}), ("p.gif", palette, opaque, {}),
        ("l.png", rgb.convert("L"), grey, {}), ("la.png", la, of_grey, {}),
        ("cmyk.tiff", rgb.convert("CMYK"), np.asarray(rgb), {}), ("one.png", two.convert("1"), None, {}),
        ("key.png", Image.fromarray(keyed), on_white, dict(transparency=(10, 20, 30))),
        ("pa.png", two, red, dict(transparency=1)), ("pa.gif", two, red, dict(transparency=1)),
        ("half.png", half, np.full((8, 8, 3), 127, np.uint8), {}),
    ]:
        image.save(folder / name, **options)
        got = np.asarray(open_image(folder / name, "here")).astype(int)
        assert got.shape == (8, 8, 3), name
        assert seen is None or np.abs(got - seen).max() <= (2 if name == "p.gif" else 0), name
        pixels = read_image(folder / name, 8, 8, "here")
        assert torch.equal(((pixels + 1) * 127.5).round(), torch.from_numpy(got).permute(2, 0, 1).float()), name
    rgb.save(folder / "many.gif", save_all=True, append_images=[Image.new("RGB", (8, 8), "red")] * 3)
    assert np.abs(np.asarray(open_image(folder / "many.gif", "here")).astype(int) - np.asarray(rgb)).max() < 40  # first


def test_an_image_that_is_none_is_one_line(folder, monkeypatch):
    random = np.random.default_rng(0)
    whole = {}
    for kind, options in dict(png={}, jpeg={}, gif={}, tiff=dict(compression="tiff_lzw"), bmp={}, webp={}).items():
        path = folder / f"whole.{kind}"
        ramp("RGB").resize((64, 64)).save(path, **options)
        whole[kind] = path.read_bytes()
    damaged = folder / "damaged"
    for content in whole.values():
        for cut in (0, 3, 20, len(content) // 2):
            damaged.write_bytes(content[:cut])
            with pytest.raises(UserError, match=rf"^here: got image {damaged} \(.+\), want one that opens$"):
                open_image(damaged, "here")
        for _ in range(40):  # whatever a decoder makes of it, a picture or an error of any class
            noisy = bytearray(content)
            for place in random.integers(0, len(noisy), 8):
                noisy[place] = random.integers(256)
            damaged.write_bytes(noisy)
            try:
                open_image(damaged, "here")
            except UserError as error:
                assert "\n" not in str(error)
    Image.fromarray(np.full((4, 4), 0.5, np.float32)).save(folder / "float.tiff")
    Image.fromarray(np.full((4, 4), 60_000, np.int32)).save(folder / "int.tiff")
    for name, words in [("float.tiff", "mode F: more than 8 bits"), ("int.tiff", "mode I: more than 8 bits"),
                        ("x" * 300 + ".png", "which is not there"), ("a\0b.png", "which is not there"),
                        ("a/" * 3000 + "b.png", "which is not there"), ("images/a.png/b.png", "which is not there"),
                        ("\udce4.png", "surrogates not allowed"), ("..", "a folder"),
                        ("/dev/zero", "which is not there"), ("~nobody-of-that-name/x.png", "which is not there")]:
        with pytest.raises(UserError, match=words) as error:
            Prompts(write(folder, line("one", name)), 16, 16)
        assert len(str(error.value)) < 700
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)
    with pytest.raises(UserError, match="exceeds limit .* want one that opens"):
        Prompts(write(folder, line("one", "images/a.png")), 16, 16)


def test_home_is_expanded(folder, monkeypatch):
    monkeypatch.setenv("HOME", str(folder / "images"))
    assert Prompts(write(folder, line("one", "~/a.png")), 16, 16).image(0).shape == (3, 16, 16)


def test_mistakes_name_file_and_line(folder):
    good = line("one", "images/a.png")
    (folder / "images/text.png").write_text("no image")
    data = (folder / "images/b.jpg").read_bytes()
    (folder / "images/half.jpg").write_bytes(data[: len(data) // 2])
    data = (folder / "images/a.png").read_bytes()
    (folder / "images/half.png").write_bytes(data[: len(data) // 2])
    cases = {
        '{"input": "one", ': "Expecting property name .*want an object",
        '["one"]': "want an object",
        "[" * 2000: "recursion.* want an object",
        '{"input": "a \\ud83d b"}': "surrogates not allowed.* want an object",
        '{"prompt": "one"}': "got input None",
        '{"input": " ", "metadata": {}}': "got input ' '",
        '{"input": 3}': "got input 3",
        '{"input": "one", "metadata": []}': r"got metadata \[\]",
        '{"input": "one"}': "got image_path None",
        json.dumps(line("one", "images/c.png")): "images/c.png, which is not there",
        json.dumps(line("one", "images")): "images, a folder, want a file",
        json.dumps(line("one", "images/text.png")): "text.png .*want one that opens",
        json.dumps(line("one", "images/half.jpg")): "half.jpg .*want one that opens",
        json.dumps(line("one", "images/half.png")): "half.png .*want one that opens",
        json.dumps(line("one", "images/deep.png")): r"deep.png \(mode I;16: more than 8 bits .*want one that opens",
    }
    Image.fromarray(np.full((4, 4), 60_000, np.uint16)).save(folder / "images/deep.png")
    for bad, message in cases.items():
        path = write(folder, good, "", bad, good)
        with pytest.raises(UserError, match=f"train.jsonl:3: .*{message}") as error:
            Prompts(path, 16, 16)
        assert "\n" not in str(error.value)
    for path in (folder / "none.jsonl", folder / "images" / "b.jpg", write(folder, "", " ", name="empty.jsonl")):
        with pytest.raises(UserError, match=f"{path.name}: got .* want"):
            Prompts(path, 16, 16)


def test_a_byte_order_mark_is_no_mistake(folder):
    path = write(folder, line("ein Würfel", "images/a.png"))
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert Prompts(path, 16, 16).prompts == ["ein Würfel"]


def test_only_a_line_feed_ends_a_line(folder):
    """JSON strings may hold other separators of lines as they are."""
    path = write(folder, line("one\u2028two\x85three", "images/a.png"))
    path.write_text(json.dumps(json.loads(path.read_text()), ensure_ascii=False) + "\r\n", encoding="utf-8", newline="")
    assert Prompts(path, 16, 16).prompts == ["one\u2028two\x85three"]


@pytest.mark.parametrize("num_prompts, size", [(10, 4), (7, 5), (6, 6), (9, 3), (8, 7), (5, 1), (2, 2), (90, 12)])
def test_iterations_are_whole_epochs_without_repeats(num_prompts, size):
    num_epochs = 6 * size  # a whole number of iterations
    batches = [group_indices(num_prompts, size, i, seed=3) for i in range(num_epochs * num_prompts // size)]
    assert all(len(batch) == len(set(batch)) == size for batch in batches)
    stream = np.concatenate(batches).reshape(num_epochs, num_prompts)
    assert (np.sort(stream, axis=1) == np.arange(num_prompts)).all()  # each prompt once an epoch
    assert num_prompts < 5 or len({tuple(epoch) for epoch in stream.tolist()}) > num_epochs / 2  # shuffled anew


def test_group_indices_are_a_pure_function():
    forwards = [group_indices(10, 4, i, seed=0) for i in range(20)]
    assert [group_indices(10, 4, i, seed=0) for i in reversed(range(20))] == forwards[::-1]
    assert [group_indices(10, 4, i, seed=1) for i in range(20)] != forwards
    assert all(isinstance(index, int) for index in forwards[0])


def test_every_pair_of_prompts_meets():
    """Moving repeated prompts back must not tie prompts to each other or to a place in the file."""
    pairs = collections.Counter()
    for i in range(2000):
        batch = sorted(group_indices(7, 4, i % 40, seed=i // 40))
        pairs.update((a, b) for a in batch for b in batch if a < b)
    counts = np.array([pairs[a, b] for a in range(7) for b in range(a + 1, 7)])
    assert counts.sum() == 2000 * 6 and counts.min() > 0.85 * counts.mean() and counts.max() < 1.15 * counts.mean()


@pytest.mark.parametrize("size", [0, 11])
def test_more_prompts_than_there_are(size):
    with pytest.raises(UserError, match=f"prompts_per_iteration={size}: want 1 to 10"):
        group_indices(10, size, 0, seed=0)
