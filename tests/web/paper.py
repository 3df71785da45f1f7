"""What is printed: the text of each sheet of a PDF that Chromium has made."""

from __future__ import annotations

import re
import unicodedata
import zlib

Glyphs = dict[int, str]


def sheets(pdf: bytes) -> list[str]:
    """The text of each sheet as it was drawn, without spaces: letters come in pieces, and as ligatures."""
    objects = {int(number): body for number, body in re.findall(rb"(\d+) 0 obj(.*?)endobj", pdf, re.DOTALL)}
    pages = [body for body in objects.values() if re.search(rb"/Type\s*/Page\b", body)]
    return [unicodedata.normalize("NFKC", _text(objects, page)) for page in pages]


def _text(objects: dict[int, bytes], part: bytes) -> str:
    """Of a page, or of a drawing in it."""
    glyphs = {name: _glyphs(objects, font) for name, font in _resources(objects, part, b"Font")}
    font, said = Glyphs(), list[str]()
    for name, shown in re.findall(rb"/(\w+) [\d.]+ Tf|(<[0-9A-Fa-f]+>|\[.*?\])\s*TJ?", _drawn(objects, part)):
        if name:
            font = glyphs[name]
            continue
        codes = b"".join(re.findall(rb"<([0-9A-Fa-f]+)>", shown)).decode()
        said.append("".join(font.get(int(codes[n : n + 4], 16), "") for n in range(0, len(codes), 4)))
    inner = (each for _, each in _resources(objects, part, b"XObject") if b"/Form" in each)
    return re.sub(r"\s", "", "".join((*said, *(_text(objects, each) for each in inner))))


def _resources(objects: dict[int, bytes], part: bytes, kind: bytes) -> list[tuple[bytes, bytes]]:
    listed = re.search(rb"/%b\s*<<(.*?)>>" % kind, part, re.DOTALL)
    named = [] if listed is None else re.findall(rb"/(\w+) (\d+) 0 R", listed[1])
    return [(name, objects[int(number)]) for name, number in named]


def _drawn(objects: dict[int, bytes], part: bytes) -> bytes:
    contents = re.search(rb"/Contents (\d+) 0 R", part)
    return _stream(part if contents is None else objects[int(contents[1])])


def _glyphs(objects: dict[int, bytes], font: bytes) -> Glyphs:
    """What each number of a font stands for."""
    told = re.search(rb"/ToUnicode (\d+) 0 R", font)
    if told is None:
        return {}
    map, found = _stream(objects[int(told[1])]), Glyphs()
    for part in re.findall(rb"beginbfchar(.*?)endbfchar", map, re.DOTALL):
        for code, letter in re.findall(rb"<(\w+)> <(\w+)>", part):
            found[int(code, 16)] = bytes.fromhex(letter.decode()).decode("utf-16-be")
    for part in re.findall(rb"beginbfrange(.*?)endbfrange", map, re.DOTALL):
        for first, last, letter in re.findall(rb"<(\w+)> <(\w+)> <(\w+)>", part):
            begin, end, of = int(first, 16), int(last, 16), int(letter, 16)
            found.update({code: chr(of + code - begin) for code in range(begin, end + 1)})
    return found


def _stream(body: bytes) -> bytes:
    raw = body.partition(b"stream")[2].removeprefix(b"\r").removeprefix(b"\n")
    data = raw.rpartition(b"endstream")[0]
    return zlib.decompressobj().decompress(data) if b"/FlateDecode" in body else data
