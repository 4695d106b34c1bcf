"""`vlmembed plan`: what it says of a run beside what the run then does."""

from __future__ import annotations

import io
import json
import struct
import subprocess
import sys
import tarfile
import zlib
from collections import Counter
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import SAMPLES, noise
from PIL import Image
from servers import http_server

import vlmembed
from vlmembed.batch import PackCost
from vlmembed.cli import main
from vlmembed.cli.plan import describe_forecast
from vlmembed.config import EncodeConfig
from vlmembed.errors import ConfigError, InputError
from vlmembed.forecast.estimate import alone_shares, run_seconds, stage_seconds
from vlmembed.forecast.sampling import random_rows, spread_rows
from vlmembed.forecast.survey import Survey
from vlmembed.forecast.trial import Timings
from vlmembed.sources import readahead
from vlmembed.sources.glance import HEAD_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vlmembed.forecast.prediction import Forecast
    from vlmembed.report import RunReport

NO_CALIBRATION = {"calibration_seconds": 0}


def plan(inputs: object, model: Path, *, looking: dict[str, Any] | None = None, **settings: Any) -> Forecast:  # noqa: ANN401
    config = EncodeConfig(inputs=(str(inputs),), model=str(model), device="cpu", **settings)
    return vlmembed.plan(config, **(NO_CALIBRATION | (looking or {})))


def run(inputs: object, model: Path, output: Path, **settings: Any) -> RunReport:  # noqa: ANN401
    config = EncodeConfig(inputs=(str(inputs),), output=str(output), model=str(model), device="cpu", **settings)
    return vlmembed.encode(config)


def errors_of(output: Path) -> dict[str, str]:
    rows = pq.read_table(output.with_suffix(".errors.parquet")).to_pylist()
    return {row["id"]: row["code"] for row in rows}


def codes(found: Forecast) -> dict[str, int]:
    return {failure.code: failure.num_rows for failure in found.failures}


def save(image: Image.Image, path: Path, **options: Any) -> None:  # noqa: ANN401  as Pillow's
    image.save(path, **options)


def huge_png(width: int, height: int) -> bytes:
    """A PNG that says it has so many pixels, and has none."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", b"") + chunk(b"IEND", b"")


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pictures of many sizes, some twice, and files that a header shows to be no good."""
    folder = tmp_path_factory.mktemp("mixed")
    generator = np.random.default_rng(1)
    for number in range(60):
        height, width = (int(side) for side in generator.integers(15, 400, 2))
        kind = ("jpg", "png", "webp")[number % 3]
        save(noise(height, width, number), folder / f"{number:03}.{kind}")
    for number in (3, 17, 40):
        kind = ("jpg", "png", "webp")[number % 3]
        (folder / f"copy-{number}.{kind}").write_bytes((folder / f"{number:03}.{kind}").read_bytes())
    (folder / "a-empty.jpg").write_bytes(b"")
    (folder / "b-text.png").write_bytes(b"not a picture, whatever its name says")
    (folder / "c-huge.png").write_bytes(huge_png(40_000, 40_000))
    (folder / "d-corrupt.png").write_bytes(b"\x89PNG\r\n\x1a\n" + b"\0" * 40)
    (folder / "e-missing.jpg").symlink_to(folder / "nowhere.jpg")
    (folder / "f-long.png").write_bytes(huge_png(2**23 + 1, 1))
    (folder / "notes.txt").write_text("no picture")
    return folder


def test_headers_tell_what_a_run_over_mixed_files_does(mixed: Path, tiny_model: Path, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"rows_per_part": 16, "max_tokens_per_batch": 64, "max_pixels": 50 * 14**2}
    found = plan(mixed, tiny_model, looking={"hash_contents": True}, resize="native", min_pixels=1, **settings)
    report = run(mixed, tiny_model, tmp_path / "out.parquet", resize="native", min_pixels=1, **settings)
    assert (found.num_rows, found.num_embedded, found.num_duplicates, found.num_failed) == (69, 60, 3, 6)
    assert found.num_embedded == report.num_embedded
    assert found.num_duplicates == report.num_duplicates
    assert codes(found) == report.codes
    assert dict(found.skipped) == {".txt": 1} == report.skipped
    assert dict(found.formats) == {"JPEG": 21, "PNG": 21, "WEBP": 21}
    examples = {key: failure.code for failure in found.failures for key, _ in failure.examples}
    assert examples == errors_of(tmp_path / "out.parquet")
    assert report.num_packs > 8
    assert found.num_packs == report.num_packs
    assert found.packing_efficiency == report.packing_efficiency
    table = pq.read_table(tmp_path / "out.parquet")
    widths, heights = (sorted(table[name].to_pylist()) for name in ("width", "height"))
    assert (found.widths.min, found.widths.median, found.widths.max) == (widths[0], widths[31], widths[-1])
    assert (found.heights.total, found.heights.max) == (sum(heights), heights[-1])
    assert found.num_bytes == sum(path.stat().st_size for path in mixed.iterdir() if path.name[0] in "abcdf0")
    assert sum(each.count for each in found.token_bins) == 60


def test_without_hashing_every_row_is_a_picture_of_its_own(mixed: Path, tiny_model: Path, tmp_path: Path) -> None:
    found = plan(mixed, tiny_model)
    report = run(mixed, tiny_model, tmp_path / "out.parquet", dedup="none")
    assert found.num_duplicates is None
    assert found.num_embedded == report.num_embedded == 63
    assert found.packing_efficiency == report.packing_efficiency
    assert found.not_foreseen[0].startswith("duplicates: every row counts")
    assert plan(mixed, tiny_model, dedup="none").not_foreseen[0].startswith("damage")


def test_deterministic_packs_hold_one_picture_each(mixed: Path, tiny_model: Path) -> None:
    assert plan(mixed, tiny_model, deterministic=True).num_packs == 63


@contextmanager
def reads_counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, int]]]:
    """(function, bytes) of every file that is read."""
    reads: list[tuple[str, int]] = []
    head, whole = readahead.read_head, readahead.read_content

    def read_head(path: str, num_bytes: int, max_bytes: int) -> Any:  # noqa: ANN401
        found = head(path, num_bytes, max_bytes)
        reads.append(("head", len(found[0]) if isinstance(found, tuple) else 0))
        return found

    def read_content(path: str, max_bytes: int) -> Any:  # noqa: ANN401
        found = whole(path, max_bytes)
        reads.append((Path(path).name, len(found) if isinstance(found, bytes) else 0))
        return found

    with monkeypatch.context() as patch:
        patch.setattr(readahead, "read_head", read_head)
        patch.setattr(readahead, "read_content", read_content)
        yield reads


def white_noise(height: int, width: int) -> Image.Image:
    pixels = np.random.default_rng(height).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def test_of_large_files_the_head_is_read_and_the_whole_only_where_it_must_be(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    large = white_noise(700, 900)
    save(large, tmp_path / "a.jpg", quality=98)
    save(large, tmp_path / "b.png")
    save(large, tmp_path / "c.tiff")  # Pillow puts the directory in front
    content = (tmp_path / "c.tiff").read_bytes()
    save(large, tmp_path / "d.jp2")
    behind = bytearray(content)  # and here it is moved to the end
    (start,) = struct.unpack_from("<I", behind, 4)
    (num_tags,) = struct.unpack_from("<H", behind, start)
    directory = behind[start : start + 2 + 12 * num_tags + 4]
    struct.pack_into("<I", behind, 4, len(behind))
    (tmp_path / "e.tiff").write_bytes(bytes(behind) + bytes(directory))
    sizes = {path.name: path.stat().st_size for path in tmp_path.iterdir()}
    assert min(sizes.values()) > 2 * HEAD_BYTES
    with reads_counted(monkeypatch) as reads:
        found = plan(tmp_path, tiny_model)
    assert [num_bytes for what, num_bytes in reads if what == "head"] == [HEAD_BYTES] * 5
    whole = {what: num_bytes for what, num_bytes in reads if what != "head"}
    assert whole.keys() >= {"d.jp2", "e.tiff"}
    assert not whole.keys() & {"a.jpg", "b.png"}
    assert found.num_failed == 0
    assert dict(found.formats) == {"TIFF": 2, "JPEG": 1, "PNG": 1, "JPEG2000": 1}
    assert found.num_bytes == sum(sizes.values())
    assert (found.widths.min, found.widths.max, found.heights.min, found.heights.max) == (900, 900, 700, 700)


def test_sizes_are_those_of_the_upright_picture(tmp_path: Path, tiny_model: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    for suffix in ("jpg", "png", "webp", "tiff"):
        save(noise(60, 90, 1), tmp_path / f"a.{suffix}", exif=exif)
    found = plan(tmp_path, tiny_model)
    assert (found.widths.min, found.widths.max, found.heights.min, found.heights.max) == (60, 60, 90, 90)


def test_rows_of_parquet_files(tmp_path: Path, tiny_model: Path) -> None:
    save(noise(50, 40, 1), tmp_path / "there.png")
    encoded = io.BytesIO()
    noise(70, 80, 2).save(encoded, "JPEG")
    rows = [
        {"bytes": encoded.getvalue(), "path": None},
        {"bytes": None, "path": "there.png"},
        {"bytes": None, "path": "gone.png"},
        None,
    ]
    captions = ["one", "two", "three", "four"]
    table = pa.table(
        {"image": pa.array(rows, pa.struct({"bytes": pa.binary(), "path": pa.string()})), "text": captions}
    )
    pq.write_table(table, tmp_path / "data.parquet")
    settings: dict[str, Any] = {"keep_columns": ("text",)}
    found = plan(tmp_path / "data.parquet", tiny_model, looking={"calibration_seconds": 0.01}, **settings)
    report = run(tmp_path / "data.parquet", tiny_model, tmp_path / "out.parquet", **settings)
    assert codes(found) == report.codes == {"missing": 1, "null": 1}
    assert dict(found.formats) == {"JPEG": 1, "PNG": 1}
    assert found.output_bytes == pytest.approx((tmp_path / "out.parquet").stat().st_size, rel=0.25)


def make_tar(path: Path, count: int) -> None:
    with tarfile.open(path, "w") as archive:
        for number in range(count):
            encoded = io.BytesIO()
            noise(40 + number, 50, number).save(encoded, "PNG")
            info = tarfile.TarInfo(f"{number:04}.png")
            info.size = len(encoded.getvalue())
            archive.addfile(info, io.BytesIO(encoded.getvalue()))


def test_tars_are_counted_and_tried_from_their_front(tmp_path: Path, tiny_model: Path) -> None:
    make_tar(tmp_path / "a.tar", 30)
    found = plan(tmp_path / "a.tar", tiny_model, looking={"calibration_seconds": 0.01})
    assert (found.num_rows, found.num_embedded, dict(found.formats)) == (30, 30, {"PNG": 30})
    assert found.calibration is not None
    assert found.calibration.num_images > 0
    assert plan(tmp_path / "a.tar", tiny_model, limit=7).num_rows == 7
    with pytest.raises(ConfigError, match="a tar is read from its front"):
        plan(tmp_path / "a.tar", tiny_model, looking={"num_sampled": 3})


def test_a_sample_is_scaled_up(mixed: Path, tiny_model: Path) -> None:
    every = plan(mixed, tiny_model)
    found = plan(mixed, tiny_model, looking={"num_sampled": 23})
    assert (found.num_rows, found.num_looked_at, found.is_sampled) == (69, 23, True)
    assert found.num_embedded + found.num_failed == 69
    assert found.num_bytes == pytest.approx(every.num_bytes, rel=0.5)
    assert found.tokens.total == pytest.approx(every.tokens.total, rel=0.2)
    assert found.output_bytes == pytest.approx(every.output_bytes, rel=0.2)
    assert "about" in describe_forecast(found)
    everything = plan(mixed, tiny_model, looking={"num_sampled": 1000})
    assert everything == every.__class__(**{**_fields(every), "setup_seconds": everything.setup_seconds})
    with pytest.raises(ConfigError, match="give --hash or --sample"):
        plan(mixed, tiny_model, looking={"num_sampled": 3, "hash_contents": True})


def _fields(found: Forecast) -> dict[str, Any]:
    return {name: getattr(found, name) for name in found.__dataclass_fields__}


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"embedding_dtype": "float16"},
        {"emit": "tokens"},
        {"emit": "tokens", "resize": "native", "max_pixels": 400 * 14**2, "min_pixels": 1},
    ],
)
@pytest.mark.parametrize("output", ["out.parquet", "out/"])
def test_the_outputs_size_is_foreseen(
    mixed: Path, tiny_model: Path, tmp_path: Path, settings: dict[str, Any], output: str
) -> None:
    path = tmp_path / output
    config = EncodeConfig(
        inputs=(str(mixed),),
        output=f"{tmp_path}/{output}",
        model=str(tiny_model),
        device="cpu",
        rows_per_part=40,
        **settings,
    )
    found = vlmembed.plan(config, calibration_seconds=0.05, hash_contents=True)
    assert not path.exists()
    vlmembed.encode(config)
    written = [path] if path.is_file() else list(path.glob("part-*.parquet"))
    size = sum(each.stat().st_size for each in written)
    assert found.output_bytes == pytest.approx(size, rel=0.25)
    if settings.get("emit") == "tokens":
        lengths = [
            len(row) for each in written for row in pq.read_table(each, columns=["tokens"])["tokens"].to_pylist()
        ]
        assert found.num_stored_tokens == sum(lengths)


def test_a_calibration_gives_a_time(mixed: Path, tiny_model: Path) -> None:
    found = plan(mixed, tiny_model, looking={"calibration_seconds": 0.2})
    assert found.calibration is not None
    assert found.seconds is not None
    assert found.images_per_second is not None
    assert 0 < found.calibration.num_images <= 63
    assert min(found.seconds, *found.calibration.stage_seconds.values()) > 0
    assert found.calibration.stage_seconds.keys() == {"read", "decode", "encode"}
    assert found.slowest_stage in found.calibration.stage_seconds
    assert found.images_per_second * found.seconds == pytest.approx(63)


@pytest.mark.slow
def test_decoding_in_processes_and_on_two_workers_is_tried_as_it_runs(mixed: Path, tiny_model: Path) -> None:
    config = EncodeConfig(inputs=(str(mixed),), model=str(tiny_model), device="cpu,cpu", decode="processes", workers=1)
    found = vlmembed.plan(config, calibration_seconds=0.01)
    assert found.seconds is not None
    assert found.device == "cpu,cpu"


def test_heads_of_urls_take_one_request_each(tmp_path: Path, tiny_model: Path) -> None:
    encoded = io.BytesIO()
    white_noise(500, 600).save(encoded, "JPEG", quality=98)
    content = encoded.getvalue()
    assert len(content) > HEAD_BYTES
    small = io.BytesIO()
    noise(30, 30, 1).save(small, "PNG")
    names = ["/a.jpg", "/b.png", "/empty.png", "/gone.jpg"]
    for takes_ranges, tells_length in ((True, True), (False, True), (False, False)):
        with http_server() as server:
            server.takes_ranges, server.tells_length = takes_ranges, tells_length
            server.files |= {"/a.jpg": content, "/b.png": small.getvalue(), "/empty.png": b""}
            (tmp_path / "urls.txt").write_text("\n".join(server.url + name for name in names))
            found = plan(tmp_path / "urls.txt", tiny_model, allow_local_urls=True)
            asked = [(path, part) for method, path, part, _ in server.requests if method == "GET"]
        assert sorted(asked) == [(name, f"bytes=0-{HEAD_BYTES - 1}") for name in names]
        assert (found.num_embedded, codes(found)) == (2, {"empty": 1, "missing": 1})
        assert found.num_bytes == len(content) + len(small.getvalue())


def test_a_part_of_unknown_size_is_not_taken_for_the_file(tmp_path: Path, tiny_model: Path) -> None:
    encoded = io.BytesIO()
    white_noise(900, 600).save(encoded, "WEBP", lossless=True)
    assert len(encoded.getvalue()) > 2 * HEAD_BYTES
    with http_server() as server:
        server.tells_total = server.tells_length = False
        server.files |= {"/a.webp": encoded.getvalue()}
        (tmp_path / "urls.txt").write_text(server.url + "/a.webp")
        found = plan(tmp_path / "urls.txt", tiny_model, allow_local_urls=True)
        asked = [part for method, _, part, _ in server.requests if method == "GET"]
    assert (found.num_embedded, found.num_failed, found.num_bytes) == (1, 0, len(encoded.getvalue()))
    assert asked == [f"bytes=0-{HEAD_BYTES - 1}", ""]


def test_few_sampled_rows_fill_packs_as_all_would(tmp_path: Path, tiny_model: Path) -> None:
    for number in range(90):
        noise(30 + number % 40, 90 - number % 40, number).save(tmp_path / f"{number}.png")
    settings: dict[str, Any] = {
        "resize": "native",
        "min_pixels": 1,
        "max_pixels": 9 * 14**2,
        "max_tokens_per_batch": 64,
    }
    everything, some = (plan(tmp_path, tiny_model, looking={"num_sampled": count}, **settings) for count in (None, 4))
    assert everything.num_packs > 5
    assert some.num_packs == pytest.approx(everything.num_packs, rel=0.3)
    assert some.packing_efficiency == pytest.approx(everything.packing_efficiency, abs=0.2)


def test_tokens_are_those_of_pictures_that_are_encoded(tmp_path: Path, tiny_model: Path) -> None:
    content = io.BytesIO()
    noise(30, 40, 0).save(content, "PNG")
    for name in "abc":
        (tmp_path / f"{name}.png").write_bytes(content.getvalue())
    found = plan(tmp_path, tiny_model, looking={"hash_contents": True})
    report = vlmembed.encode(tmp_path, tmp_path / "o.parquet", model=tiny_model)
    assert (found.num_embedded, found.num_duplicates, found.tokens.total) == (1, 2, report.num_tokens)
    with pytest.raises(ConfigError, match="--dedup none embeds each of them"):
        plan(tmp_path, tiny_model, looking={"hash_contents": True}, dedup="none")


def test_the_commands_flags_have_other_names_in_python() -> None:
    with pytest.raises(ConfigError, match="unknown setting 'calibrate': it is calibration_seconds in Python"):
        vlmembed.plan("images", calibrate=0)  # type: ignore[call-overload]


def test_what_cannot_be_planned(tmp_path: Path, tiny_model: Path) -> None:
    (tmp_path / "none").mkdir()
    with pytest.raises(InputError, match="no pictures in"):
        plan(tmp_path / "none", tiny_model)
    with pytest.raises(ConfigError, match="the sample has 0 rows"):
        plan(SAMPLES, tiny_model, looking={"num_sampled": 0})
    with pytest.raises(ConfigError, match="take -1 seconds"):
        plan(SAMPLES, tiny_model, looking={"calibration_seconds": -1})


def command(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    """The exit code of `vlmembed plan` with these arguments."""
    monkeypatch.setattr(sys, "argv", ["vlmembed", "plan", *map(str, arguments)])
    try:
        main()
    except SystemExit as done:
        return int(done.code or 0)
    return 0


def test_the_command_prints_lines_or_json(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tiny_model: Path
) -> None:
    flags = ("--model", tiny_model, "--device", "cpu", "--calibrate", 0)
    assert command(monkeypatch, SAMPLES, *flags) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "rows        27 = 25 to embed + 2 that will fail"
    assert "formats     11 JPEG, 10 PNG, 1 GIF, 1 WEBP, 1 AVIF, 1 BMP; 243 kB in all" in lines
    assert "time        not estimated without a calibration" in lines
    assert any("broken/zero-bytes.jpg: the file has 0 bytes" in line for line in lines)
    assert command(monkeypatch, SAMPLES, *flags, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    again = plan(SAMPLES, tiny_model).to_dict()
    again = json.loads(json.dumps(again))
    differing = {name for name in again if again[name] != found[name]}
    assert differing == {"setup_seconds"}
    assert again.keys() == found.keys()


def test_the_command_takes_a_recipe(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, tiny_model: Path
) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(f'inputs = ["{SAMPLES}"]\noutput = "{tmp_path}/out.parquet"\nmodel = "{tiny_model}"\n')
    assert command(monkeypatch, "--recipe", recipe, "--set", "limit=5", "--calibrate", 0, "--json") == 0
    assert json.loads(capsys.readouterr().out)["num_rows"] == 5
    assert command(monkeypatch, SAMPLES, "--recipe", recipe) == 2
    assert command(monkeypatch, "--recipe", recipe, "--limit", 3) == 2
    assert "leave --limit out, or give it as --set" in capsys.readouterr().err
    assert command(monkeypatch, SAMPLES, "--set", "limit=5") == 2
    assert command(monkeypatch) == 2


def test_the_command_fails_where_nothing_can_be_embedded(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, tiny_model: Path
) -> None:
    (tmp_path / "a.jpg").write_bytes(b"")
    assert command(monkeypatch, tmp_path, "--model", tiny_model) == 1
    told = capsys.readouterr()
    assert "failing     1 empty" in told.out
    assert "not one row could be embedded" in told.err


def test_help_loads_no_torch() -> None:
    code = "import sys; from vlmembed.cli import main; sys.argv = ['vlmembed', 'plan', '--help']\n"
    code += "try: main()\nexcept SystemExit: pass\nprint('torch' in sys.modules, 'transformers' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "--calibrate" in done.stdout
    assert done.stdout.splitlines()[-1] == "False False"


def test_a_histogram_fits_the_terminal(monkeypatch: pytest.MonkeyPatch, mixed: Path, tiny_model: Path) -> None:
    found = plan(mixed, tiny_model, resize="native", min_pixels=1, max_pixels=900 * 14**2)
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding="ascii"))
    lines = describe_forecast(found).split("tokens a picture\n")[1].splitlines()
    assert 2 < len(lines) <= 12
    assert max(map(len, lines)) <= 40
    assert any("####" in line for line in lines)


def test_rows_of_a_trial_are_spread_and_come_once() -> None:
    chunks = list(spread_rows(1000))
    assert sorted(row for chunk in chunks for row in chunk) == list(range(1000))
    assert [row for row in chunks[0] if row % 8 == 0] == [0, 256, 512, 768]
    assert [row for row in chunks[1] if row % 8 == 0] == [128, 384, 640, 896]
    assert list(spread_rows(3)) == [[0, 1, 2]]
    assert list(spread_rows(0)) == []
    assert random_rows(5, 9, 0) == [0, 1, 2, 3, 4]
    assert random_rows(10**6, 3, 1) == sorted(set(random_rows(10**6, 3, 1)))


def test_stages_are_scaled_by_their_own_work() -> None:
    survey = Survey.__new__(Survey)
    survey.work, survey.num_rows, survey.num_bytes, survey.file_bytes = 1000.0, 50, 600, 600
    survey.decode_pixels = Counter({"JPEG": 100, "PNG": 10, "TIFF": 5})
    timings = Timings(num_images=5, seconds=12.0, encode_seconds=10.0, work=100.0, num_read=5, read_bytes=60)
    timings.decode_seconds |= {"JPEG": 1.0, "PNG": 2.0}
    timings.decode_pixels.update({"JPEG": 10, "PNG": 5})
    timings.read_seconds, timings.reader_seconds = 0.3, 0.1
    found = stage_seconds(survey, timings, num_workers=2, scan_seconds=99.0)
    assert found == pytest.approx({"read": 3 + 1, "decode": (10 + 4 + 5 * 3 / 15) / 2, "encode": 100})
    assert alone_shares(timings) == {"decode": 1.0, "encode": 1.0}
    timings.alone_encode_seconds, timings.alone_work = 4.0, 50.0
    timings.alone_decode_seconds, timings.alone_decode_pixels = 0.6, 5
    shares = alone_shares(timings)
    assert shares == pytest.approx({"encode": (4 / 50) / (10 / 100), "decode": (0.6 / 5) / (2.4 / 10)})
    assert run_seconds(found, shares, held_share=1) == pytest.approx(7.5 * 0.5 + 100 * 0.8)
    assert run_seconds(found, shares, held_share=0.25) == pytest.approx(0.25 * (7.5 * 0.5 + 100 * 0.8) + 0.75 * 100)
    survey.file_bytes = 0
    assert stage_seconds(survey, timings, num_workers=2, scan_seconds=99.0)["read"] == pytest.approx(100)
    timings.work, timings.encode_seconds = 0.0, 0.0
    assert stage_seconds(survey, timings, num_workers=2, scan_seconds=0)["encode"] == pytest.approx(1000 * 4 / 50)


def test_packs_cost_by_lengths() -> None:
    cost = PackCost(per_token=2.0, per_pair=0.5)
    assert cost.of(np.array([3, 4])) == 2 * 7 + 0.5 * 25
