"""Long test videos in seconds: one short clip is encoded, its packets are repeated."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import av
import numpy as np


def make_clip(path: Path, seconds: int = 10, fps: int = 25, height_px: int = 720, width_px: int = 1280, gop: int = 50) -> Path:
    """Encode a clip with moving waves over a grain, of about the bit rate of real footage (H.264)."""
    generator = np.random.default_rng(0)
    grain = generator.integers(0, 60, (height_px, 2 * width_px, 1), np.uint8)
    y, x = np.mgrid[0:height_px, 0:width_px].astype(np.float32)
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=fps, options={"preset": "ultrafast", "bf": "2", "crf": "30"})
        stream.height, stream.width, stream.pix_fmt, stream.gop_size = height_px, width_px, "yuv420p", gop
        for number in range(seconds * fps):
            wave = 90 + 60 * np.sin(x / 37 + number / 9) * np.cos(y / 53 - number / 13)
            shift = 4 * number % width_px
            picture = np.repeat(wave[..., None].astype(np.uint8), 3, axis=2) + grain[:, shift : shift + width_px]
            frame = av.VideoFrame.from_ndarray(picture, format="rgb24")
            frame.pts, frame.time_base = number, Fraction(1, fps)
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return path


def repeat_clip(path: Path, clip: Path, times: int) -> Path:
    """Write the clip's packets `times` times over with ascending times; nothing is encoded."""
    with av.open(str(path), "w") as out, av.open(str(clip)) as source:
        template = source.streams.video[0]
        stream = out.add_stream_from_template(template)
        length, time_base = template.duration or 0, template.time_base
        packets = [(bytes(p), p.pts or 0, p.dts or 0, p.is_keyframe, p.duration) for p in source.demux(template) if p.size]
        for turn in range(times):
            for data, pts, dts, is_keyframe, duration in packets:
                packet = av.Packet(data)
                packet.stream, packet.time_base, packet.is_keyframe = stream, time_base, is_keyframe
                packet.pts, packet.dts, packet.duration = pts + turn * length, dts + turn * length, duration
                out.mux_one(packet)
    return path
