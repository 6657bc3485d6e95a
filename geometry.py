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


# ----------------------------------------------------------------------------------------------------------------------
# is a recording the right way up, in metres, and do its views agree?


def ray_length(K, depth):
    """Length of the ray to each pixel per metre along the optical axis, f h w."""
    at_origin = np.broadcast_to(np.eye(4), (len(K), 4, 4))
    return np.linalg.norm(unproject(np.ones_like(depth), K, at_origin), axis=-1)


# What people get wrong, and how to undo it: a camera -> the camera, corrected.
CORRECTIONS = {
    "depth is upside down": lambda depth, K, E: (depth[:, ::-1], K, E),
    "depth is mirrored": lambda depth, K, E: (depth[:, :, ::-1], K, E),
    "depth is turned by 180 degrees": lambda depth, K, E: (depth[:, ::-1, ::-1], K, E),
    "depth is the length of the ray, not along the optical axis": lambda depth, K, E: (
        depth / ray_length(K, depth),
        K,
        E,
    ),
    "extrinsics are world-to-camera, not camera-to-world": lambda depth, K, E: (depth, K, np.linalg.inv(E)),
    "extrinsics have OpenGL axes (y up, z backwards)": lambda depth, K, E: (depth, K, E * np.float32([1, -1, -1, 1])),
}


def view_distances(source, target):
    """Project a view's points into another view -> |distance| along its axis, metres, of the pixels that both see.

    source, target: cameras. Points more than 2 % behind the target's surface are hidden from it, which is legitimate;
    points in front of it are not: the target would have seen them.
    """
    depth, K, E = target
    height, width = depth.shape[-2:]
    xyz = unproject(*source)
    camera = (xyz - E[:, None, None, :3, 3]) @ E[:, None, :3, :3]  # R^T (p - c), f h w 3
    z = camera[..., 2]
    with np.errstate(all="ignore"):
        pixel = (camera @ K[:, None].swapaxes(-1, -2))[..., :2] / z[..., None]  # column, row
        disparity = np.where(depth > 0, 1 / depth, np.nan)  # linear over a plane's pixels, as depth is not
    grid = torch.from_numpy(
        (pixel / [width, height] * 2 - 1).astype(np.float32)
    )  # align_corners=False: centres at +0.5
    disparity = torch.from_numpy(disparity.astype(np.float32))[:, None]
    seen = 1 / F.grid_sample(disparity, grid, padding_mode="border", align_corners=False)[:, 0].numpy()
    known = np.isfinite(source[0]) & (source[0] > 0) & np.isfinite(seen)
    mutual = known & (z > 0) & (np.abs(grid.numpy()) < 1).all(-1) & (z - seen < 0.02 * z)
    return np.abs(z - seen)[mutual]


def agreement(cameras):
    """{view: (depth, K, E)} -> (median distance of the views' points in mm, share of pixels seen by two views)."""
    pairs = list(itertools.permutations(cameras.values(), 2))
    distances = np.concatenate([view_distances(source, target) for source, target in pairs])
    share = len(distances) / sum(source[0].size for source, _ in pairs)
    return (float(np.median(distances)) * 1000 if share > 0.01 else math.inf), share


def edge_match(rgb, depth):
    """Correlation of the edges in the images f h w 3 with the edges in the depth f h w, -1..1."""

    def edges(values, limit):
        steps = [np.abs(np.diff(values, axis=1))[:, :, :-1], np.abs(np.diff(values, axis=2))[:, :-1]]
        return np.minimum(steps[0] + steps[1], limit).ravel()

    known = np.where(np.isfinite(depth) & (depth > 0), depth, np.nan)
    known = np.nan_to_num(known, nan=np.nanmedian(known))
    image, surface = edges(rgb.astype(np.float32).mean(-1), 60), edges(np.log(known), 0.1)
    return float(np.corrcoef(image, surface)[0, 1]) if image.std() > 0 and surface.std() > 0 else 0.0


def check_geometry(images, cameras):
    """images {view: f h w 3}, cameras {view: (depth, K, E)} -> (lines to print, list of faults).

    Orientation shows in three ways: points of two views meet only if depth and cameras are the same way up, edges of
    image and depth coincide only if those are, and a fixed camera's down axis points down in the world.
    """
    lines, faults = [], []
    depths = np.concatenate([depth[np.isfinite(depth) & (depth > 0)] for depth, _, _ in cameras.values()])
    if not len(depths):
        return lines, ["no pixel has a known depth: all are 0 or infinite"]
    typical = float(np.median(depths))
    lines.append(
        f"depth units   median {typical:.3f}, 1..99 % {np.percentile(depths, 1):.3f}..{np.percentile(depths, 99):.3f}"
    )
    if typical > 50:  # no arm works 50 m from its camera, or sees anything within 5 cm in millimetres
        faults.append(f"depth is in millimetres (median {typical:.0f}), want metres: multiply it by 0.001")
        cameras = {view: (depth * np.float32(0.001), K, E) for view, (depth, K, E) in cameras.items()}
        typical *= 0.001

    for view, (_, _, E) in cameras.items():
        R = E[:, :3, :3]
        if np.abs(R @ R.swapaxes(-1, -2) - np.eye(3)).max() > 1e-2 or np.linalg.det(R).min() < 0.9:
            faults.append(f"extrinsics of {view} hold no rotation (det {np.linalg.det(R).min():.2f}, want 1)")
            return lines, faults

    if len(cameras) > 1:
        distance, share = agreement(cameras)
        pixel = typical / float(np.mean([K[:, 0, 0].mean() for _, K, _ in cameras.values()])) * 1000  # mm at that depth
        lines.append(
            f"two views     points agree to {distance:.2f} mm, median over the {share:.0%} of pixels that two views see; "
            f"want < {pixel / 2:.2f} (half a pixel)"
        )
        if not distance < pixel / 2:
            found, corrected = {}, {}
            for fault, correct in CORRECTIONS.items():
                corrected[fault] = {view: correct(*camera) for view, camera in cameras.items()}
                found[fault] = agreement(corrected[fault])[0]
            fault = min(found, key=found.get)
            if found[fault] < pixel / 2:
                got = "nowhere" if math.isinf(distance) else f"to {distance:.0f} mm"
                faults.append(f"{fault}: corrected, the views' points agree to {found[fault]:.2f} mm, as stored {got}")
                cameras = corrected[fault]
            elif share > 0.01:
                faults.append(f"the views' points are {distance:.0f} mm apart: check depth, intrinsics and extrinsics")
            else:
                lines.append("              no pixel is seen by two views: their agreement cannot be checked")
    else:
        lines.append("two views     not checked: one view")

    flips = {"": (1, 1), "upside down": (-1, 1), "mirrored": (1, -1), "turned by 180 degrees": (-1, -1)}
    for view, (depth, _, E) in cameras.items():
        match = {flip: edge_match(images[view][:, ::y, ::x], depth) for flip, (y, x) in flips.items()}
        best = max(match, key=match.get)
        down = float(E[:, 2, 1].mean())  # z in the world of the camera's y axis
        fixed = np.abs(E - E[:1]).max() < 1e-4
        lines.append(
            f"orientation   {view}: edges of image and depth correlate {match['']:.2f}, {match['upside down']:.2f} if flipped; "
            f"down in the image is {'down' if down < 0 else 'up'} in the world ({down:.2f})"
        )
        if best and match[best] > max(match[""] + 0.1, 0.2):
            faults.append(f"images of {view} are {best}: they match the depth so ({match[best]:.2f}), not as stored")
        if fixed and down > 0.2:  # a camera on the hand may be held any way up
            faults.append(f"{view} is recorded upside down: its image's down axis points up in the world")
    return lines, faults
