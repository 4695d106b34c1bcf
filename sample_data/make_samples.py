"""Makes `images/` anew, with the pictures of scikit-image 0.25.2: `python make_samples.py SKIMAGE_DATA_FOLDER`.

The files are committed, because encoders differ between library versions; this script says how each one came to be.
"""

from __future__ import annotations

import io
import shutil
import sys
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

FOLDER = Path(__file__).parent / "images"


def photo(source: Path, name: str, width: int) -> Image.Image:
    """A shipped photo, `width` pixels wide."""
    image = Image.open(source / name).convert("RGB")
    return image.resize((width, round(image.height * width / image.width)), Image.Resampling.LANCZOS)


def jpeg(image: Image.Image, **options: object) -> bytes:
    """The image as JPEG bytes."""
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=85, **options)
    return buffer.getvalue()


def drawing(mode: str, background: object, colours: tuple[object, ...]) -> Image.Image:
    """Overlapping discs on a background."""
    image = Image.new(mode, (160, 120), background)
    draw = ImageDraw.Draw(image)
    for index, colour in enumerate(colours):
        draw.ellipse((15 + 40 * index, 20, 75 + 40 * index, 100), fill=colour)
    return image


def main(source: Path) -> None:
    """Write every sample."""
    shutil.rmtree(FOLDER, ignore_errors=True)
    (FOLDER / "photos").mkdir(parents=True)
    (FOLDER / "drawings").mkdir()
    (FOLDER / "broken").mkdir()
    cat, coffee, rocket = (photo(source, name, 320) for name in ("chelsea.png", "coffee.png", "rocket.jpg"))

    # Plain photos, and the same bytes twice.
    for name, image in (("cat", cat), ("coffee", coffee), ("rocket", rocket)):
        (FOLDER / "photos" / f"{name}.jpg").write_bytes(jpeg(image))
    photo(source, "astronaut.png", 256).save(FOLDER / "photos" / "astronaut.webp", quality=85)
    photo(source, "hubble_deep_field.jpg", 240).save(FOLDER / "photos" / "galaxies.avif", quality=70)
    photo(source, "gravel.png", 200).convert("L").save(FOLDER / "photos" / "gravel.png", optimize=True)
    (FOLDER / "photos" / "cat copy.jpg").write_bytes(jpeg(cat))
    (FOLDER / "café ☕ コーヒー.jpg").write_bytes(jpeg(coffee))

    # The same pixels in two files, one name in two formats.
    tiny = cat.resize((96, 64), Image.Resampling.LANCZOS)
    tiny.save(FOLDER / "photos" / "same-pixels.png", optimize=True)
    tiny.save(FOLDER / "photos" / "same-pixels.bmp")
    discs = drawing("RGB", "white", ("navy", "gold", "crimson"))
    discs.save(FOLDER / "drawings" / "a.png", optimize=True)
    (FOLDER / "drawings" / "a.jpg").write_bytes(jpeg(discs))

    # Orientation, colour modes, depth, transparency, frames.
    exif = Image.Exif()
    exif[0x0112] = 6  # shown turned clockwise: stored turned back
    turned = rocket.transpose(Image.Transpose.ROTATE_90)
    (FOLDER / "photos" / "exif-rotated.jpg").write_bytes(jpeg(turned, exif=exif))
    (FOLDER / "photos" / "cmyk.jpg").write_bytes(jpeg(coffee.resize((160, 107)).convert("CMYK")))
    ramp = np.linspace(0, 65535, 128 * 96).reshape(96, 128).astype(np.uint16)
    Image.fromarray(ramp).save(FOLDER / "drawings" / "sixteen-bit.png", optimize=True)
    palette = drawing("P", 0, (1, 2, 3))
    palette.putpalette([0, 0, 0, 200, 30, 30, 30, 160, 60, 40, 60, 200])
    palette.save(FOLDER / "drawings" / "palette-transparent.png", transparency=0, optimize=True)
    drawing("RGBA", (0, 0, 0, 0), ((220, 20, 60, 255), (30, 144, 255, 128), (50, 205, 50, 64))).save(
        FOLDER / "drawings" / "alpha.png", optimize=True
    )
    frames = [drawing("RGB", "white", (colour,)) for colour in ("orange", "purple", "teal")]
    frames[0].save(FOLDER / "drawings" / "animated.gif", save_all=True, append_images=frames[1:], duration=200, loop=0)

    # Extreme shapes.
    Image.new("RGB", (1, 1), (180, 40, 90)).save(FOLDER / "drawings" / "one-pixel.png")
    stripe = Image.fromarray(np.tile(np.linspace(0, 255, 400).astype(np.uint8), (10, 1)))
    stripe.convert("RGB").save(FOLDER / "drawings" / "forty-to-one.png", optimize=True)

    # Broken on purpose.
    (FOLDER / "broken" / "truncated.jpg").write_bytes(jpeg(rocket)[:6000])
    whole = io.BytesIO()
    tiny.save(whole, "PNG")
    (FOLDER / "broken" / "truncated.png").write_bytes(whole.getvalue()[:3000])
    (FOLDER / "broken" / "zero-bytes.jpg").write_bytes(b"")
    (FOLDER / "broken" / "text.jpg").write_text("This is not a picture, whatever its name says.\n")
    flipped = bytearray(whole.getvalue())
    flipped[len(flipped) // 2] ^= 0xFF  # inside the compressed pixels: the length is right, the checksum is not
    (FOLDER / "broken" / "flipped-byte.png").write_bytes(bytes(flipped))
    (FOLDER / "broken" / "truncated copy.jpg").write_bytes(jpeg(rocket)[:6000])

    # No pictures: skipped, and counted.
    (FOLDER / "notes.txt").write_text("Not a row: neither its bytes nor its name say picture.\n")
    (FOLDER / "photos" / "labels.json").write_text('{"cat.jpg": "animal"}\n')
    (FOLDER / "no-extension").write_bytes(jpeg(rocket.resize((120, 80))))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
