"""Depth and cameras: points in the world, the workspace box, and whether a recording's geometry holds together.

Cameras are OpenCV's: x right, y down, z forward. K is in pixels whose centres lie at +0.5, E is camera-to-world,
depth is in metres along the optical axis (not along the ray). A "camera" here is (depth f h w, K f 3 3, E f 4 4).
"""

import itertools
import math

import numpy as np
import torch
import torch.nn.functional as F


def unproject(depth, K, E):
    """Points of the pixel centres in the world: E [depth K^-1 (col + 0.5, row + 0.5, 1)].

    depth f h w (metres along the optical axis), K f 3 3, E f 4 4 (camera-to-world) -> f h w 3 float32, metres
    """
    height, width = depth.shape[-2:]
    rows, columns = np.mgrid[:height, :width] + 0.5
    pixels = np.stack([columns, rows, np.ones_like(rows)], -1).reshape(-1, 3)  # hw 3
    rays = pixels @ np.linalg.inv(K.astype(np.float64)).swapaxes(-1, -2)  # f hw 3
    camera = rays * depth.reshape(len(depth), -1, 1)
    world = camera @ E[:, :3, :3].swapaxes(-1, -2).astype(np.float64) + E[:, None, :3, 3]
    return world.reshape(*depth.shape, 3).astype(np.float32)


def normalise_points(xyz, box):
    """Metres -> -1..1 in a workspace box (x0, y0, z0, x1, y1, z1), clamped to it. xyz ... 3 -> ... 3"""
    low, high = torch.as_tensor(box, dtype=torch.float32, device=xyz.device).chunk(2)
    return ((xyz - low) / (high - low) * 2 - 1).clamp(-1, 1)


def denormalise_points(points, box):
    """-1..1 -> metres. points ... 3 -> ... 3"""
    low, high = torch.as_tensor(box, dtype=torch.float32, device=points.device).chunk(2)
    return (points.float() + 1) / 2 * (high - low) + low


# ----------------------------------------------------------------------------- is a recording's geometry sound?


def known(depth):
    """Where a depth was measured: 0 and infinity stand for nothing there."""
    return np.isfinite(depth) & (depth > 0)


def known_points(depth, K, E):
    """-> world xyz f h w 3 in metres, valid f h w: False where the depth isn't known (xyz is 0 there)."""
    valid = known(depth)
    return np.where(valid[..., None], unproject(np.where(valid, depth, 1), K, E), 0), valid


def ray_length(K, depth):
    """Length of the ray to each pixel per metre along the optical axis, f h w."""
    at_origin = np.broadcast_to(np.eye(4), (len(K), 4, 4))
    return np.linalg.norm(unproject(np.ones_like(depth), K, at_origin), axis=-1)


# What people get wrong, and how to undo it: a camera -> the camera, corrected.
CORRECTIONS = {
    "depth is upside down": lambda depth, K, E: (depth[:, ::-1], K, E),
    "depth is mirrored": lambda depth, K, E: (depth[:, :, ::-1], K, E),
    "depth is turned by 180 degrees": lambda depth, K, E: (depth[:, ::-1, ::-1], K, E),
    "depth is along the ray, not the optical axis": lambda depth, K, E: (depth / ray_length(K, depth), K, E),
    "extrinsics are world-to-camera, not camera-to-world": lambda depth, K, E: (depth, K, np.linalg.inv(E)),
    "extrinsics have OpenGL axes (y up, z backwards)": lambda depth, K, E: (depth, K, E * np.float32([1, -1, -1, 1])),
}


def view_distances(source, target):
    """Project a camera's points into another one -> |distance| along its axis, metres, of the pixels that both see.

    Points more than 2 % behind the target's surface are hidden from it; those before it, it would have seen.
    """
    depth, K, E = target
    height, width = depth.shape[-2:]
    xyz = unproject(np.where(known(source[0]), source[0], 1), *source[1:])
    camera = (xyz - E[:, None, None, :3, 3]) @ E[:, None, :3, :3]  # R^T (p - c), f h w 3
    z = camera[..., 2]
    with np.errstate(all="ignore"):
        pixel = (camera @ K[:, None].swapaxes(-1, -2))[..., :2] / z[..., None]  # column, row
        disparity = np.where(known(depth), 1 / depth, np.nan)  # linear over a plane's pixels, which depth is not
    grid = torch.from_numpy(pixel / [width, height] * 2 - 1).float()  # -1..1 from border to border, as K is
    disparity = torch.from_numpy(disparity).float()[:, None]
    seen = 1 / F.grid_sample(disparity, grid, padding_mode="border", align_corners=False)[:, 0].numpy()
    inside = (z > 0) & (np.abs(grid.numpy()) < 1).all(-1)
    mutual = known(source[0]) & inside & np.isfinite(seen) & (z - seen < 0.02 * z)
    return np.abs(z - seen)[mutual]


def agreement(cameras):
    """How far apart the views' points are: (median, 80th percentile in mm; share of the pixels that two views see).

    The percentile decides: a table alone satisfies the median, for a plane fits itself even when it is mirrored. The
    last fifth is left to the edges of things, where neighbouring pixels see different surfaces.
    """
    pairs = list(itertools.permutations(cameras.values(), 2))
    distances = np.concatenate([view_distances(source, target) for source, target in pairs]) * 1000
    share = len(distances) / sum(source[0].size for source, _ in pairs)
    return (*np.percentile(distances, [50, 80]), share) if share > 0.01 else (math.inf, math.inf, share)


def edge_match(rgb, depth):
    """Correlation of the edges in the images f h w 3 with the edges in the depth f h w, -1..1."""

    def edges(values, limit):
        down, across = np.diff(values, axis=1)[:, :, :-1], np.diff(values, axis=2)[:, :-1]
        return np.minimum(np.abs(down) + np.abs(across), limit).ravel()

    filled = np.where(known(depth), depth, np.median(depth[known(depth)]))
    image, surface = edges(rgb.astype(np.float32).mean(-1), 60), edges(np.log(filled), 0.1)
    return float(np.corrcoef(image, surface)[0, 1]) if image.std() > 0 and surface.std() > 0 else 0.0


def plain_views(images):
    """images {view: f h w 3} -> faults: views with frames that show nothing."""
    plain = {view: int((frames.std((1, 2)).max(-1) < 1).sum()) for view, frames in images.items()}  # of 255 levels
    return [f"{view} is black or of one colour in {count} of the {len(images[view])} frames looked at"
            for view, count in plain.items() if count]


def check_geometry(images, cameras):
    """images {view: f h w 3}, cameras {view: (depth, K, E)} -> lines to print, faults of the images, of the cameras.

    Orientation shows in three ways: points of two views meet only if depth and cameras are the same way up, edges of
    image and depth coincide only if those are, and down in the image of a standing camera is down in the world.
    """
    measured = {view: depth[known(depth)] for view, (depth, _, _) in cameras.items()}
    for view, depths in measured.items():
        if not depths.size:
            return [], [], [f"{view} has no known depth: all pixels are 0 or infinite"]
    near, typical, far = map(float, np.percentile(np.concatenate([*measured.values()]), [1, 50, 99]))
    lines, faults = [f"depth units   median {typical:.3f}, 1..99 % {near:.3f}..{far:.3f}; want metres"], []
    if typical > 50:  # no arm works 50 m from its camera, or sees anything within 5 cm in millimetres
        faults.append(f"depth is in millimetres (median {typical:.0f}), want metres: multiply it by 0.001")
        cameras = {view: (depth * np.float32(0.001), K, E) for view, (depth, K, E) in cameras.items()}
        typical *= 0.001

    for view, (_, _, E) in cameras.items():
        R = E[:, :3, :3]
        if np.abs(R @ R.swapaxes(-1, -2) - np.eye(3)).max() > 1e-2 or np.linalg.det(R).min() < 0.9:
            turn = np.linalg.det(R).min()
            return lines, [], [*faults, f"extrinsics of {view} hold no rotation (det {turn:.2f}, want 1)"]

    if len(cameras) > 1:
        median, distance, share = agreement(cameras)
        pixel = typical / float(np.mean([K[:, 0, 0].mean() for _, K, _ in cameras.values()])) * 1000  # mm at that depth
        limit = max(pixel, 15 * typical)  # 1.5 % of the depth, for real sensors
        lines.append(f"two views     of the {share:.0%} of pixels that two see: median {median:.2f} mm apart, 80 % "
                     f"within {distance:.2f} mm, want < {limit:.1f}")
        if not distance < pixel / 10:  # is it noise, or is there a mistake whose undoing makes them agree?
            corrected = {fault: {view: correct(*camera) for view, camera in cameras.items()}
                         for fault, correct in CORRECTIONS.items()}
            found = {fault: agreement(corrected[fault])[1] for fault in CORRECTIONS}
            fault = min(found, key=found.get)
            if found[fault] < min(limit, distance / 3):
                got = "nowhere" if math.isinf(distance) else f"within {distance:.1f} mm"
                faults.append(f"{fault}: corrected, the views' points agree within {found[fault]:.2f} mm, "
                              f"as stored {got}")
                cameras = corrected[fault]
            elif math.isinf(distance):
                lines.append("              no pixel is seen by two views: their agreement cannot be checked")
            elif distance > limit:
                faults.append(f"the views' points are {distance:.1f} mm apart: check depth, intrinsics and extrinsics")
    else:
        lines.append("two views     not checked: one view")

    flips = {"": (1, 1), "upside down": (-1, 1), "mirrored": (1, -1), "turned by 180 degrees": (-1, -1)}
    flipped, upside_down = {}, []
    for view, (depth, _, E) in cameras.items():
        match = {flip: edge_match(images[view][:, ::y, ::x], depth) for flip, (y, x) in flips.items()}
        best = max(match, key=match.get)
        down = float(E[:, 2, 1].mean())  # z in the world of the camera's y axis
        lines.append(f"orientation   {view}: edges of image and depth correlate {match['']:.2f}, upside down "
                     f"{match['upside down']:.2f}; image down is world {'down' if down < 0 else 'up'} ({down:.2f})")
        if best and match[best] > max(match[""] + 0.1, 0.2):
            flipped.setdefault(best, []).append(view)
        if down > 0.2 and "hand" not in view:  # a camera on the hand is held any way up
            upside_down.append(view)
    of_images = [f"images of {' and '.join(views)} are {flip}: they match the depth then"
                 for flip, views in flipped.items()]
    if upside_down:
        of_images.append(f"all of {' and '.join(upside_down)} is upside down: down in the image is up in the world")
    return lines, of_images, faults
